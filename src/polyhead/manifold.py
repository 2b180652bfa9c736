"""The manifolds of projection weights: any matrix (`Euclidean`), or matrices with orthonormal columns (`Stiefel`).

A layer declares the manifolds of its weights, and an optimizer calls the manifold to move on it. Neither depends on a
particular manifold.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from polyhead._checks import MAX_HEADS, check_dense_tensor, check_integer, check_integers, check_numel
from polyhead.retractions import Matrices, cayley_retraction, nearest_point, polar_retraction

ManifoldTensor = Float[Tensor, "..."]

_NOT_FINITE_REASON = "it must be finite, got NaN or inf"


class Manifold(abc.ABC):
    """A set of tensors, and how to move on it. A vector u at a point x has the shape of x.

    Leading axes are a batch of points. Manifolds are values: equal ones have the same `repr`.
    """

    constant_norm = False
    """Whether all points have the same norm, so that weight decay has no effect."""

    @abc.abstractmethod
    def project(self, x: ManifoldTensor) -> ManifoldTensor:
        """The point nearest to any tensor."""

    @abc.abstractmethod
    def tangent(self, x: ManifoldTensor, u: ManifoldTensor) -> ManifoldTensor:
        """The orthogonal projection of u to the tangent space at x."""

    @abc.abstractmethod
    def gradient(self, x: ManifoldTensor, g: ManifoldTensor) -> ManifoldTensor:
        """The Riemannian gradient, from the partial derivatives g: the direction of steepest ascent in the manifold's metric."""

    @abc.abstractmethod
    def inner(self, x: ManifoldTensor, u: ManifoldTensor, v: ManifoldTensor, *, keepdim: bool = False) -> Tensor:
        """The inner product of two tangent vectors at x; with `keepdim` in a shape that broadcasts with x."""

    @abc.abstractmethod
    def retract(self, x: ManifoldTensor, u: ManifoldTensor) -> ManifoldTensor:
        """Move from x along a tangent vector u: x + u to first order, and on the manifold for u of any length."""

    @abc.abstractmethod
    def transport(self, x: ManifoldTensor, y: ManifoldTensor, u: ManifoldTensor) -> ManifoldTensor:
        """The vector at y that corresponds to u at x."""

    @abc.abstractmethod
    def random(
        self,
        *shape: int,
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> ManifoldTensor:
        """A random point: uniform, or normal where the manifold is unbounded."""

    @abc.abstractmethod
    def check(self, x: ManifoldTensor) -> tuple[bool, str | None]:
        """Whether x is on the manifold, and if not, why."""

    def of_part(self, shape: tuple[int, ...], cuts: Mapping[int, int]) -> Manifold | None:
        """The manifold of each part of a tensor that is cut along axes, by axis into how many parts; None if a point is cut."""
        return None if cuts else self


@dataclasses.dataclass(frozen=True)
class Euclidean(Manifold):
    """All tensors; each entry is a point of the real line."""

    def project(self, x: ManifoldTensor) -> ManifoldTensor:
        return x

    def tangent(self, x: ManifoldTensor, u: ManifoldTensor) -> ManifoldTensor:
        return u

    def gradient(self, x: ManifoldTensor, g: ManifoldTensor) -> ManifoldTensor:
        return g

    def inner(
        self, x: ManifoldTensor, u: ManifoldTensor, v: ManifoldTensor, *, keepdim: bool = False
    ) -> ManifoldTensor:
        return u * v

    def retract(self, x: ManifoldTensor, u: ManifoldTensor) -> ManifoldTensor:
        return x + u

    def transport(self, x: ManifoldTensor, y: ManifoldTensor, u: ManifoldTensor) -> ManifoldTensor:
        return u

    def random(
        self,
        *shape: int,
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> ManifoldTensor:
        return torch.randn(_check_random_shape(shape), generator=generator, dtype=dtype, device=device)

    def check(self, x: ManifoldTensor) -> tuple[bool, str | None]:
        return (True, None) if x.is_meta or x.isfinite().all() else (False, _NOT_FINITE_REASON)

    def of_part(self, shape: tuple[int, ...], cuts: Mapping[int, int]) -> Manifold:
        return self


@dataclasses.dataclass(frozen=True)
class Stiefel(Manifold):
    """Matrices X (n × k) with orthonormal columns, XᵀX = I: bases of k-dimensional subspaces. Leading axes are a batch.

    Args:
        metric: the squared norm of a tangent vector Δ. `"euclidean"`: tr ΔᵀΔ. `"canonical"`: tr Δᵀ(I − ½XXᵀ)Δ, where rotations
            of the basis within its subspace count half.
        retraction: how a step along Δ returns to the manifold. `"polar"`: to the nearest point to X + Δ, by matrix products
            only; on a device other than the CPU, a step of norm above 32 is shortened to it. `"cayley"`: along a curve of
            rotations, by solving 2k × 2k equations.
        heads: for the weight (heads · k, n) of an `nn.Linear` with this many heads: the k rows of each head are the columns of
            one matrix. None: the last two axes are n and k.
    """

    metric: Literal["euclidean", "canonical"] = "euclidean"
    retraction: Literal["polar", "cayley"] = "polar"
    heads: int | None = None

    constant_norm = True

    def __post_init__(self) -> None:
        if self.metric not in ("euclidean", "canonical"):
            raise ValueError(f"metric must be 'euclidean' or 'canonical', got {self.metric!r}")
        if self.retraction not in ("polar", "cayley"):
            raise ValueError(f"retraction must be 'polar' or 'cayley', got {self.retraction!r}")
        if self.heads is not None:
            # a plain int, so that equal manifolds have the same repr
            object.__setattr__(self, "heads", check_integer("heads", self.heads, 1, MAX_HEADS))

    def __repr__(self) -> str:
        fields = [(field, getattr(self, field.name)) for field in dataclasses.fields(self)]
        return f"Stiefel({', '.join(f'{field.name}={value!r}' for field, value in fields if value != field.default)})"

    def project(self, x: ManifoldTensor) -> ManifoldTensor:
        """The nearest matrix with orthonormal columns: UVᵀ of the singular value decomposition."""
        return self._matrices_to_points(nearest_point(self.matrices(x)), x)

    def tangent(self, x: ManifoldTensor, u: ManifoldTensor) -> ManifoldTensor:
        """Δ = U − X sym(XᵀU): then XᵀΔ is skew-symmetric."""
        return self._matrices_to_points(_project_to_tangent_space(*self._matrix_pair(x, "u", u)), u)

    def gradient(self, x: ManifoldTensor, g: ManifoldTensor) -> ManifoldTensor:
        """G − X sym(XᵀG), or with the canonical metric G − XGᵀX."""
        gradient = _project_to_tangent_space if self.metric == "euclidean" else _canonical_gradient
        return self._matrices_to_points(gradient(*self._matrix_pair(x, "g", g)), g)

    def inner(self, x: ManifoldTensor, u: ManifoldTensor, v: ManifoldTensor, *, keepdim: bool = False) -> Tensor:
        (_, a), (y, b) = self._matrix_pair(x, "u", u), self._matrix_pair(x, "v", v)
        products = (a * b).sum((-2, -1))
        if self.metric == "canonical":
            products = products - 0.5 * ((y.mT @ a) * (y.mT @ b)).sum((-2, -1))
        if self.heads is None:
            batch = x.shape[:-2]
            return products.reshape(*batch, 1, 1) if keepdim else products.reshape(batch)
        products = products.reshape(*x.shape[:-2], self.heads)
        rows = x.shape[-2] // self.heads
        return products.repeat_interleave(rows, -1)[..., None] if keepdim else products

    def retract(self, x: ManifoldTensor, u: ManifoldTensor) -> ManifoldTensor:
        a, b = self._matrix_pair(x, "u", u)
        retract = polar_retraction if self.retraction == "polar" else cayley_retraction
        return self._matrices_to_points(retract(a, b), x)

    def transport(self, x: ManifoldTensor, y: ManifoldTensor, u: ManifoldTensor) -> ManifoldTensor:
        """The orthogonal projection of u to the tangent space at y."""
        return self.tangent(y, u)

    def random(
        self,
        *shape: int,
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> ManifoldTensor:
        """A point from Haar's measure, which prefers no direction: Gram-Schmidt on normal numbers."""
        like = torch.empty(_check_random_shape(shape), dtype=dtype, device=device)
        normal = self.matrices(like)
        normal = torch.randn(normal.shape, generator=generator, dtype=normal.dtype, device=normal.device)
        basis, triangle = torch.linalg.qr(normal)
        # QR with a diagonal of any sign would favour some bases
        signs = triangle.diagonal(dim1=-2, dim2=-1).sign()
        # LAPACK returns column-major matrices
        return self._matrices_to_points(basis * signs[..., None, :], like).contiguous()

    def check(self, x: ManifoldTensor) -> tuple[bool, str | None]:
        try:
            matrices = self.matrices(x)
        except ValueError as problem:
            return False, str(problem)
        if x.is_meta:
            return True, None
        if not x.isfinite().all():
            return False, _NOT_FINITE_REASON
        matrices = matrices.detach()
        errors = _orthonormality_error(matrices)
        if not len(errors):
            return True, None
        worst = int(errors.argmax())
        error, tolerance = float(errors[worst]), _orthonormality_tolerance(x.dtype)
        if error <= tolerance:
            return True, None
        vectors, gram, matrix = ("columns", "XᵀX", "matrix") if self.heads is None else ("rows", "WWᵀ", "head")
        which = "" if len(errors) == 1 else f" of {matrix} {worst} of {len(errors)}"
        return False, (
            f"the {vectors}{which} must be orthonormal, got {gram} off the identity by {error:.2g}, more than rounding ({tolerance:.1g}); "
            f"{self!r}.project(x) is the nearest point"
        )

    def of_part(self, shape: tuple[int, ...], cuts: Mapping[int, int]) -> Manifold | None:
        rows = len(shape) - 2
        if self.heads is None or not any(axis >= rows for axis in cuts):
            return None if any(axis >= rows for axis in cuts) else self
        # equal parts of whole heads
        whole_heads = rows + 1 not in cuts and self.heads % cuts[rows] == 0
        return dataclasses.replace(self, heads=self.heads // cuts[rows]) if whole_heads else None

    def matrices(self, x: ManifoldTensor) -> Matrices:
        """x as (matrices, n, k), in fp32 at least."""
        shape = tuple(check_dense_tensor("x", x, "(..., n, k)").shape)
        if x.dim() < 2:
            raise ValueError(f"x must have two axes or more, got shape {shape}")
        if self.heads is not None:
            if shape[-2] % self.heads:
                raise ValueError(f"x must have a multiple of {self.heads} rows, one block per head, got shape {shape}")
            x = x.unflatten(-2, (self.heads, shape[-2] // self.heads)).mT
        n, k = x.shape[-2:]
        if k > n:
            hint = (
                "; for orthonormal rows, as in the weight of an nn.Linear, use Stiefel(heads=1)"
                if self.heads is None
                else ""
            )
            raise ValueError(
                f"x must have at most as many orthonormal vectors as dimensions, got {k} in {n} dimensions, shape {shape}{hint}"
            )
        if not x.is_floating_point():
            raise ValueError(f"x must be real and floating-point, got {x.dtype}")
        return x.reshape(math.prod(x.shape[:-2]), n, k).to(torch.promote_types(x.dtype, torch.float32))

    def _matrix_pair(self, x: ManifoldTensor, name: str, u: ManifoldTensor) -> tuple[Matrices, Matrices]:
        """A point and a vector at it as matrices of one dtype."""
        a, b = self.matrices(x), self.matrices(check_dense_tensor(name, u, "of the shape of x"))
        if x.shape != u.shape or x.device != u.device:
            raise ValueError(
                f"{name} must have the shape of x, {tuple(x.shape)}, on its device, got {tuple(u.shape)} on {u.device}"
            )
        dtype = torch.promote_types(a.dtype, b.dtype)
        return a.to(dtype), b.to(dtype)

    def _matrices_to_points(self, matrices: Matrices, like: ManifoldTensor) -> ManifoldTensor:
        """Matrices in the shape and dtype of points."""
        return (matrices if self.heads is None else matrices.mT).reshape(like.shape).to(like.dtype)


def _check_random_shape(shape: Sequence[int]) -> list[int]:
    """The checked shape of a random tensor."""
    sizes = check_integers("shape", shape, 0)
    check_numel("the tensor", sizes)
    return sizes


def _orthonormality_tolerance(dtype: torch.dtype) -> float:
    """How far rounding may take XᵀX from the identity."""
    return float(torch.finfo(dtype).eps ** 0.75)


def _orthonormality_error(x: Matrices) -> Float[Tensor, " matrices"]:
    """The largest absolute entry of XᵀX − I."""
    gram = x.mT @ x
    gram.diagonal(dim1=-2, dim2=-1).sub_(1)
    return gram.abs().amax((-2, -1)) if x.shape[-1] else gram.new_zeros(len(gram))


def _project_to_tangent_space(x: Matrices, u: Matrices) -> Matrices:
    product = torch.bmm(x.mT, u)
    return torch.baddbmm(u, x, product + product.mT, alpha=-0.5)


def _canonical_gradient(x: Matrices, g: Matrices) -> Matrices:
    return torch.baddbmm(g, x, torch.bmm(g.mT, x), alpha=-1)
