"""What a projection may be: any matrix (`Euclidean`), or one with orthonormal columns (`Stiefel`).

Layers say on which manifold their weights lie, optimizers ask the manifold how to move there, and neither knows any case.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Sequence
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from polyhead._checks import HEADS, check_integer, check_integers, check_numel, check_tensor

Points = Float[Tensor, "..."]
Matrices = Float[Tensor, "matrices n k"]

# Gram matrices beyond this norm are those of steps many times larger than the manifold.
_FAR = 1e3
# Beyond this one, the rounding of Gram matrices is seen in the result.
_NEAR = 1.05


class Manifold(abc.ABC):
    """Where a tensor may lie, and how it moves there. A vector u at a point x has the shape of x.

    Axes before those of a point are a batch of points. Manifolds are values: equal ones are written the same by `repr`.
    """

    constant_norm = False
    """Whether all points have one norm, so that weight decay moves none of them."""

    @abc.abstractmethod
    def project(self, x: Points) -> Points:
        """The point nearest to any tensor."""

    @abc.abstractmethod
    def tangent(self, x: Points, u: Points) -> Points:
        """The nearest vector to u that is tangent at x: one that leads along the manifold."""

    @abc.abstractmethod
    def gradient(self, x: Points, g: Points) -> Points:
        """The direction of steepest ascent in the manifold's metric, of a function whose partial derivatives are g."""

    @abc.abstractmethod
    def inner(self, x: Points, u: Points, v: Points, *, keepdim: bool = False) -> Tensor:
        """The inner product of two tangent vectors at x; with `keepdim` in a shape that broadcasts with x."""

    @abc.abstractmethod
    def retract(self, x: Points, u: Points) -> Points:
        """The point that is reached from x along a tangent vector u: x + u to first order, and on the manifold for any length."""

    @abc.abstractmethod
    def transport(self, x: Points, y: Points, u: Points) -> Points:
        """The vector at y that corresponds to u at x."""

    @abc.abstractmethod
    def random(
        self,
        *shape: int,
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> Points:
        """A point drawn uniformly, or normally where the manifold has no end."""

    @abc.abstractmethod
    def check(self, x: Points) -> tuple[bool, str | None]:
        """Whether x lies on the manifold, and if not, why."""


@dataclasses.dataclass(frozen=True)
class Euclidean(Manifold):
    """Every tensor: each of its numbers is a point of the real line."""

    def project(self, x: Points) -> Points:
        return x

    def tangent(self, x: Points, u: Points) -> Points:
        return u

    def gradient(self, x: Points, g: Points) -> Points:
        return g

    def inner(self, x: Points, u: Points, v: Points, *, keepdim: bool = False) -> Points:
        return u * v

    def retract(self, x: Points, u: Points) -> Points:
        return x + u

    def transport(self, x: Points, y: Points, u: Points) -> Points:
        return u

    def random(
        self,
        *shape: int,
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> Points:
        return torch.randn(_shape(shape), generator=generator, dtype=dtype, device=device)

    def check(self, x: Points) -> tuple[bool, str | None]:
        return (True, None) if x.is_meta or x.isfinite().all() else (False, "it has numbers that are not finite")


@dataclasses.dataclass(frozen=True)
class Stiefel(Manifold):
    """Matrices X (n × k) with orthonormal columns, XᵀX = I: bases of k-dimensional subspaces. Any axes before are a batch.

    Args:
        metric: how long a tangent vector Δ is. `"euclidean"`: tr ΔᵀΔ. `"canonical"`: tr Δᵀ(I − ½XXᵀ)Δ, where turns of the
            basis inside of its subspace count half.
        retraction: how a step along Δ ends on the manifold. `"polar"`: at the nearest point to X + Δ, by products of matrices
            alone. `"cayley"`: along a curve of rotations, by solving 2k × 2k equations.
        heads: for the weight of an `nn.Linear` into so many heads, (heads · k, n): the k rows of each head are the columns of
            one matrix. None: the last two axes are n and k.
    """

    metric: Literal["euclidean", "canonical"] = "euclidean"
    retraction: Literal["polar", "cayley"] = "polar"
    heads: int | None = None

    constant_norm = True

    def __post_init__(self) -> None:
        if self.metric not in ("euclidean", "canonical"):
            raise ValueError(f"metric: it is {self.metric!r}; it must be 'euclidean' or 'canonical'")
        if self.retraction not in ("polar", "cayley"):
            raise ValueError(f"retraction: it is {self.retraction!r}; it must be 'polar' or 'cayley'")
        if self.heads is not None:
            # equal manifolds are written the same, whatever kind of integer it was
            object.__setattr__(self, "heads", check_integer("heads", self.heads, 1, HEADS))

    def __repr__(self) -> str:
        fields = [(field, getattr(self, field.name)) for field in dataclasses.fields(self)]
        return f"Stiefel({', '.join(f'{field.name}={value!r}' for field, value in fields if value != field.default)})"

    def project(self, x: Points) -> Points:
        """The nearest matrix with orthonormal columns: UVᵀ of the singular value decomposition."""
        return self._points(_polished(_nearest(self.matrices(x))), x)

    def tangent(self, x: Points, u: Points) -> Points:
        """Δ = U − X sym(XᵀU): then XᵀΔ is skew-symmetric."""
        return self._points(_tangent(*self._both(x, "u", u)), u)

    def gradient(self, x: Points, g: Points) -> Points:
        """G − X sym(XᵀG), or with the canonical metric G − XGᵀX."""
        flow = _tangent if self.metric == "euclidean" else _canonical_gradient
        return self._points(flow(*self._both(x, "g", g)), g)

    def inner(self, x: Points, u: Points, v: Points, *, keepdim: bool = False) -> Tensor:
        (_, a), (y, b) = self._both(x, "u", u), self._both(x, "v", v)
        products = (a * b).sum((-2, -1))
        if self.metric == "canonical":
            products = products - 0.5 * ((y.mT @ a) * (y.mT @ b)).sum((-2, -1))
        if self.heads is None:
            lead = x.shape[:-2]
            return products.reshape(*lead, 1, 1) if keepdim else products.reshape(lead)
        products = products.reshape(*x.shape[:-2], self.heads)
        rows = x.shape[-2] // self.heads
        return products.repeat_interleave(rows, -1)[..., None] if keepdim else products

    def retract(self, x: Points, u: Points) -> Points:
        a, b = self._both(x, "u", u)
        return self._points(_polar(a + b) if self.retraction == "polar" else _cayley(a, b), x)

    def transport(self, x: Points, y: Points, u: Points) -> Points:
        """The nearest tangent vector at y."""
        return self.tangent(y, u)

    def random(
        self,
        *shape: int,
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> Points:
        """Haar's measure: no direction is preferred. The basis of normal numbers that Gram and Schmidt would find."""
        like = torch.empty(_shape(shape), dtype=dtype, device=device)
        normal = self.matrices(like)
        normal = torch.randn(normal.shape, generator=generator, dtype=normal.dtype, device=normal.device)
        basis, triangle = torch.linalg.qr(normal)
        # a decomposition with negative numbers on the diagonal favours some bases
        signs = triangle.diagonal(dim1=-2, dim2=-1).sign()
        # LAPACK leaves columns one after the other
        return self._points(basis * signs[..., None, :], like).contiguous()

    def check(self, x: Points) -> tuple[bool, str | None]:
        try:
            matrices = self.matrices(x)
        except ValueError as problem:
            return False, str(problem)
        if x.is_meta:
            # no numbers, nothing wrong with them
            return True, None
        if not x.isfinite().all():
            return False, "it has numbers that are not finite"
        matrices = matrices.detach()
        errors = _off(matrices)
        if not len(errors):
            return True, None
        worst = int(errors.argmax())
        error, allowed = float(errors[worst]), _tolerance(x.dtype)
        if error <= allowed:
            return True, None
        lines, gram, matrix = ("columns", "XᵀX", "matrix") if self.heads is None else ("rows", "WWᵀ", "head")
        which = "" if len(errors) == 1 else f" of {matrix} {worst} of {len(errors)}"
        return False, (
            f"the {lines}{which} are not orthonormal: {gram} is off the identity by {error:.2g}, of which {allowed:.1g} would be "
            f"rounding; {self!r}.project(x) is the nearest point"
        )

    def matrices(self, x: Points) -> Matrices:
        """x as (matrices, n, k), in fp32 at least."""
        shape = tuple(check_tensor("x", x, "(..., n, k)").shape)
        if x.dim() < 2:
            raise ValueError(f"x: its shape is {shape}; a point of the Stiefel manifold has two axes or more")
        if self.heads is not None:
            if shape[-2] % self.heads:
                raise ValueError(f"x: its shape is {shape}; {self.heads} heads do not divide {shape[-2]} rows")
            x = x.unflatten(-2, (self.heads, shape[-2] // self.heads)).mT
        n, k = x.shape[-2:]
        if k > n:
            turned = (
                " (for the weight of an nn.Linear, whose rows are meant: Stiefel(heads=1))"
                if self.heads is None
                else ""
            )
            raise ValueError(
                f"x: its shape is {shape}; {k} directions cannot be orthonormal in {n} dimensions, k must be at most n{turned}"
            )
        if not x.is_floating_point():
            raise ValueError(f"x: it is {x.dtype}; it must be real and floating-point")
        return x.reshape(math.prod(x.shape[:-2]), n, k).to(torch.promote_types(x.dtype, torch.float32))

    def _both(self, x: Points, name: str, u: Points) -> tuple[Matrices, Matrices]:
        """A point and a vector at it as matrices; of one dtype, where the two are rounded differently."""
        a, b = self.matrices(x), self.matrices(check_tensor(name, u, "of the shape of x"))
        if x.shape != u.shape or x.device != u.device:
            raise ValueError(
                f"{name} must have the shape of x, {tuple(x.shape)}, on its device, got {tuple(u.shape)} on {u.device}"
            )
        wide = torch.promote_types(a.dtype, b.dtype)
        return a.to(wide), b.to(wide)

    def _points(self, matrices: Matrices, like: Points) -> Points:
        """Matrices in the shape and dtype of points."""
        return (matrices if self.heads is None else matrices.mT).reshape(like.shape).to(like.dtype)


def _shape(shape: Sequence[int]) -> list[int]:
    """The shape of a tensor that is to be drawn."""
    known = check_integers("shape", shape, 0)
    check_numel("the tensor", known)
    return known


def _tolerance(dtype: torch.dtype) -> float:
    """How far rounding may take XᵀX from the identity."""
    return float(torch.finfo(dtype).eps ** 0.75)


def _off(x: Matrices) -> Float[Tensor, " matrices"]:
    """The largest number of XᵀX − I."""
    gram = x.mT @ x
    gram.diagonal(dim1=-2, dim2=-1).sub_(1)
    return gram.abs().amax((-2, -1)) if x.shape[-1] else gram.new_zeros(len(gram))


def _tangent(x: Matrices, u: Matrices) -> Matrices:
    inside = torch.bmm(x.mT, u)
    return torch.baddbmm(u, x, inside + inside.mT, alpha=-0.5)


def _canonical_gradient(x: Matrices, g: Matrices) -> Matrices:
    return torch.baddbmm(g, x, torch.bmm(g.mT, x), alpha=-1)


def _nearest(x: Matrices) -> Matrices:
    left, _, right = torch.linalg.svd(x, full_matrices=False)
    return left @ right


def _polar(y: Matrices) -> Matrices:
    """Y(YᵀY)^(−½), the nearest point to Y, by products alone: Newton's iteration for the inverse root of the small matrix.

    Y is a point and a tangent step, so that YᵀY = I + ΔᵀΔ has its spectrum between 1 and its largest row sum.
    """
    gram = torch.bmm(y.mT, y)
    if not gram.numel():
        return y
    bound = float(gram.detach().abs().sum(-1).amax())
    if not bound < _FAR:
        return _polished(_nearest(y))
    # scaled so that the spectrum lies evenly around 1
    scale = 2 / (1 + bound) if bound > 1 else 1.0
    error = abs(1 - scale)
    eye = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    square, root = gram * scale, None
    while True:
        # the iteration's own error after it, from that before it
        error = 0.75 * error**2 + 0.25 * error**3
        step = torch.add(1.5 * eye, square if root is None else torch.bmm(root, square), alpha=-0.5)
        root = step if root is None else torch.bmm(step, root)
        if error < torch.finfo(gram.dtype).eps / 4:
            break
        square = torch.bmm(square, step)
    out = torch.bmm(y, root.mul_(math.sqrt(scale)))
    return _polished(out) if bound > _NEAR else out


def _polished(y: Matrices) -> Matrices:
    """One step of Newton's iteration towards the nearest point, for Y that is off by rounding."""
    return torch.baddbmm(y, y, torch.bmm(y.mT, y), beta=1.5, alpha=-0.5)


def _cayley(x: Matrices, u: Matrices) -> Matrices:
    """(I − ½W)⁻¹(I + ½W)X with the skew-symmetric W = PΔXᵀ − XΔᵀP, P = I − ½XXᵀ.

    W = ABᵀ with A = [PΔ, X] and B = [X, −PΔ] has rank 2k, so that Woodbury's identity leaves 2k × 2k equations.
    """
    if not u.numel():
        return x
    longest = u.abs().amax((-2, -1), keepdim=True)
    if x.dtype != torch.float64 and not float(longest.detach().amax()) <= 1:
        # the equations of long steps are ill-conditioned
        return _cayley(x.double(), u.double()).to(x.dtype)
    # further on, the curve hardly moves
    u = u * (_FAR / longest).clamp(max=1)
    half = torch.baddbmm(u, x, torch.bmm(x.mT, u), alpha=-0.5)
    a, b = torch.cat((half, x), -1), torch.cat((x, -half), -1)
    small = torch.eye(a.shape[-1], dtype=x.dtype, device=x.device) - 0.5 * torch.bmm(b.mT, a)
    # rounding would add up from step to step
    return _polished(torch.baddbmm(x, a, torch.linalg.solve(small, torch.bmm(b.mT, x))))
