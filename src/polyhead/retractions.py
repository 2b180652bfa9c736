"""Steps from points of the Stiefel manifold back to it, for batches of matrices.

On the CPU the lengths of the steps decide what is computed. On another device reading them would make the host wait, so there
everything is computed that a step may need.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

from polyhead._torch import widest_float

Matrices = Float[Tensor, "matrices n k"]

# Above this norm of the Gram matrix, a step is many times larger than the manifold, and Newton's iteration converges slowly.
_LONG_STEP_NORM = 1e3
# Above this norm, the rounding of the Gram matrix shows in the result.
_ROUNDING_NORM = 1.05
# On devices, longer steps are shortened to this norm: its square is about the norm above.
_LONGEST_DEVICE_STEP = 32.0


def nearest_point(x: Matrices) -> Matrices:
    """The nearest matrices with orthonormal columns."""
    left, _, right = torch.linalg.svd(x, full_matrices=False)
    return _newton_schulz_step(left @ right)


def polar_retraction(x: Matrices, u: Matrices) -> Matrices:
    """The nearest points to X + Δ."""
    return _polar_factor(x + u) if x.device.type == "cpu" else _polar_retraction_on_device(x, u)


def _polar_factor(y: Matrices) -> Matrices:
    """Y(YᵀY)^(−½), the nearest point to Y, by products only: Newton's iteration for the inverse root of the k × k matrix.

    Y is a point plus a tangent step, so the spectrum of YᵀY = I + ΔᵀΔ lies between 1 and its largest row sum.
    """
    gram = torch.bmm(y.mT, y)
    if not gram.numel():
        return y
    bound = float(gram.detach().abs().sum(-1).amax())
    if not bound < _LONG_STEP_NORM:
        return nearest_point(y)
    # scaled so that the spectrum is centred on 1
    scale = 2 / (1 + bound) if bound > 1 else 1.0
    error = abs(1 - scale)
    eye = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    square, root = gram * scale, None
    while True:
        # a bound on the error after this iteration, from the one before it
        error = 0.75 * error**2 + 0.25 * error**3
        step = torch.add(1.5 * eye, square if root is None else torch.bmm(root, square), alpha=-0.5)
        root = step if root is None else torch.bmm(step, root)
        if error < torch.finfo(gram.dtype).eps / 4:
            break
        square = torch.bmm(square, step)
    out = torch.bmm(y, root.mul_(math.sqrt(scale)))
    return _newton_schulz_step(out) if bound > _ROUNDING_NORM else out


def _polar_retraction_on_device(x: Matrices, u: Matrices) -> Matrices:
    """The same by a fixed number of products, for steps up to a norm of `_LONGEST_DEVICE_STEP`; longer ones are shortened."""
    if not u.numel():
        return x
    # divided by the largest entry, so that the square of the norm does not overflow
    largest = u.abs().amax((-2, -1), keepdim=True).clamp(min=1)
    u = u / largest
    norm = torch.linalg.vector_norm(u, dim=(-2, -1), keepdim=True)
    factor = torch.minimum(largest, _LONGEST_DEVICE_STEP / norm.clamp(min=torch.finfo(u.dtype).tiny))
    y = torch.addcmul(x, u, factor)
    # at least the largest singular value of Y; the smallest is 1 or more
    bound = 1 + norm * factor
    square = torch.bmm(y.mT, y) / bound.square()
    eye = torch.eye(u.shape[-1], dtype=u.dtype, device=u.device)
    root: Tensor | None = None
    schedule = _newton_scales(1 / (1 + _LONGEST_DEVICE_STEP), math.sqrt(torch.finfo(u.dtype).eps))
    for number, scale in enumerate(schedule):
        if root is None:
            root = step = torch.add(1.5 * scale * eye, square, alpha=-0.5 * scale**3)
        else:
            step = torch.baddbmm(eye.expand_as(square), root, square, beta=1.5 * scale, alpha=-0.5 * scale**3)
            root = torch.bmm(step, root)
        if number + 1 < len(schedule):
            square = torch.bmm(square, step)
    assert root is not None
    return _newton_schulz_step(torch.bmm(y, root / bound))


def _newton_scales(lowest: float, within: float) -> list[float]:
    """The scales a of Newton's steps σ → aσ(3 − a²σ²)/2 that take all σ in [lowest, 1] to 1 in the fewest steps, within a tolerance.

    Each step takes an interval [l, 1] to [l′, 1]; a² = 3 / (1 + l + l²) makes both ends meet at l′ (Chen and Chow 2014).
    """
    scales = []
    while 1 - lowest > within:
        scale = math.sqrt(3 / (1 + lowest + lowest**2))
        scales.append(scale)
        lowest = scale * lowest * (3 - (scale * lowest) ** 2) / 2
    return scales


def _newton_schulz_step(y: Matrices) -> Matrices:
    """One step of Newton's iteration towards the nearest point, which removes rounding errors of Y."""
    return torch.baddbmm(y, y, torch.bmm(y.mT, y), beta=1.5, alpha=-0.5)


def cayley_retraction(x: Matrices, u: Matrices) -> Matrices:
    """(I − ½W)⁻¹(I + ½W)X with the skew-symmetric W = PΔXᵀ − XΔᵀP, P = I − ½XXᵀ.

    W = ABᵀ with A = [PΔ, X] and B = [X, −PΔ] has rank 2k, so Woodbury's identity reduces it to 2k × 2k equations.
    """
    if not u.numel():
        return x
    longest = u.abs().amax((-2, -1), keepdim=True)
    wide = widest_float(x.device)
    # the equations of long steps are ill-conditioned; on a device the host does not look at the length
    if x.dtype != wide and (x.device.type != "cpu" or not float(longest.detach().amax()) <= 1):
        return cayley_retraction(x.to(wide), u.to(wide)).to(x.dtype)
    # beyond this length the curve hardly moves
    u = u * (_LONG_STEP_NORM / longest).clamp(max=1)
    half = torch.baddbmm(u, x, torch.bmm(x.mT, u), alpha=-0.5)
    a, b = torch.cat((half, x), -1), torch.cat((x, -half), -1)
    small = torch.eye(a.shape[-1], dtype=x.dtype, device=x.device) - 0.5 * torch.bmm(b.mT, a)
    # rounding errors would add up over steps
    return _newton_schulz_step(torch.baddbmm(x, a, _solve(small, torch.bmm(b.mT, x))))


def _solve(matrices: Tensor, right: Tensor) -> Tensor:
    if matrices.device.type == "cpu":
        return torch.linalg.solve(matrices, right)
    # torch.linalg.solve would read from the device whether a matrix is singular
    solution: Tensor = torch.linalg.solve_ex(matrices, right, check_errors=False).result
    return solution
