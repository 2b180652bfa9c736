"""How inputs reach the projections: dense or sparse, without padded rows, and dropped anew for each head."""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from polyhead._torch import values_unavailable, without_autocast
from polyhead.linalg.skinny_gemm import apply_linear
from polyhead.neighbourhood import Dense, Neighbourhood, Sizes, neighbourhood
from polyhead.neighbourhood.csr import starts
from polyhead.neighbourhood.graph import check_sparse
from polyhead.nn.unpad import Unpadding

# Leaving rows out costs copies: it pays where the share left out, times the features that each row is mapped by, is more
# than this; and not where there are few numbers at all.
_COPIES = 32
_SMALL = 1 << 17


def live_rows(
    over: Neighbourhood | Tensor | None, x: Float[Tensor, "... items features"], heads: int
) -> Unpadding | None:
    """Which rows of a padded batch that attends to itself need be mapped at all; None for all."""
    over = neighbourhood(over)
    if type(over) is Dense or values_unavailable(x, *over.leaves()) or x.numel() < _SMALL:
        return None
    over = over.within(True)
    over.check(Sizes(tuple(x.shape[:-2]), heads, x.shape[-2], x.shape[-2]))
    real = over.real_queries(x.shape[:-1])
    if real is None or not real.numel() or (1 - real.float().mean()) * x.shape[-1] < _COPIES:
        return None
    return Unpadding(real)


def project(
    linear: nn.Module, x: Float[Tensor, "... items features"] | list[Any]
) -> Float[Tensor, "... items heads_dim"]:
    """A linear map of an input; of one copy of it a head, each by the head's own rows of the map."""
    if isinstance(x, list):
        assert isinstance(linear, nn.Linear)
        maps = linear.weight.chunk(len(x))
        biases = [None] * len(x) if linear.bias is None else linear.bias.chunk(len(x))
        return torch.cat([_linear(one, w, b) for one, w, b in zip(x, maps, biases, strict=True)], -1)
    if x.layout == torch.strided:
        return apply_linear(linear, x)
    if not isinstance(linear, nn.Linear):
        raise ValueError(f"sparse inputs: the projection is {type(linear).__name__}; it must be a plain nn.Linear")
    return _linear(_sparse(x), linear.weight, linear.bias)


def dropout_per_head(x: Float[Tensor, "... items features"], heads: int, share: float) -> list[Any]:
    """One copy of the input a head, with numbers of its own set to zero and the rest scaled up."""
    if x.layout == torch.strided:
        return [dropout(x, share) for _ in range(heads)]
    # what is zero already need not be dropped
    known = _sparse(x)
    return [known._replace(values=dropout(known.values, share)) for _ in range(heads)]


def dropout(x: Float[Tensor, "*any"], share: float) -> Float[Tensor, "*any"]:
    """Dropout, from 16 random bits a number: a fraction of what a whole random number costs.

    The share is one of 65,536 steps; the rest is scaled by what it really is.
    """
    steps = min(round(share * 65536), 65535)
    drawn = torch.empty(-(-x.numel() // 4), dtype=torch.int64, device=x.device).random_(-(2**63), None)
    keep = drawn.view(torch.int16)[: x.numel()].view(x.shape) >= steps - 32768
    return x * keep.to(x.dtype).mul_(65536 / (65536 - steps))


class _Pattern(NamedTuple):
    """Where a sparse matrix has entries: compressed rows, and those of its transpose."""

    first: Int[Tensor, " items+1"]
    column: Int[Tensor, " entries"]
    turned_first: Int[Tensor, " features+1"]
    turned_column: Int[Tensor, " entries"]
    # the place of each entry of the transpose among the entries
    place: Int[Tensor, " entries"]
    shape: tuple[int, int]


class _Sparse(NamedTuple):
    pattern: _Pattern
    values: Float[Tensor, " entries"]


# Of inputs that are still alive: the same matrix comes in every epoch.
_known: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def _sparse(x: Float[Tensor, "items features"]) -> _Sparse:
    if x.dim() != 2:
        raise ValueError(f"sparse inputs: the shape is {tuple(x.shape)}; it must be (items, features), without a batch")
    if x.requires_grad:
        raise ValueError("sparse inputs: they cannot require gradients; pass them dense")
    # inference tensors count no changes
    version = None if x.is_inference() else x._version
    if version is None or x not in _known or _known[x][0] != version:
        check_sparse("sparse inputs", x)
        entries = x.to_sparse_coo().coalesce()
        row, column = entries.indices()
        place = column.argsort(stable=True)
        items, features = x.shape
        pattern = _Pattern(
            starts(row, items), column.contiguous(), starts(column, features), row[place].contiguous(), place, (items, features)
        )  # fmt: skip
        # a copy: a view of x would keep its own key alive
        _known[x] = version, _Sparse(pattern, entries.values().detach().clone())
    known: _Sparse = _known[x][1]
    return known


def _linear(x: Tensor | _Sparse, weight: Tensor, bias: Tensor | None) -> Tensor:
    if isinstance(x, Tensor):
        return F.linear(x, weight, bias)
    y: Tensor = _SparseProduct.apply(weight, x.values.to(weight.dtype), x.pattern)
    return y if bias is None else y + bias


class _SparseProduct(torch.autograd.Function):
    """x Wᵀ by compressed rows, and its gradient by those of the transpose: torch's own sorts the entries each time."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, values: Tensor, pattern: _Pattern) -> Tensor:
        ctx.pattern = pattern
        ctx.save_for_backward(values)
        # autocast's narrow numbers have no sparse product
        with without_autocast(weight.device):
            return _rows(pattern.first, pattern.column, values, pattern.shape) @ weight.T.contiguous()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        pattern, (values,) = ctx.pattern, ctx.saved_tensors
        turned = _rows(pattern.turned_first, pattern.turned_column, values[pattern.place], pattern.shape[::-1])
        with without_autocast(grad.device):
            return (turned @ grad.contiguous()).T, None, None


def _rows(first: Tensor, column: Tensor, values: Tensor, shape: tuple[int, int]) -> Tensor:
    with warnings.catch_warnings():
        # torch calls compressed rows a beta, once
        warnings.filterwarnings("ignore", message="Sparse", category=UserWarning)
        return torch.sparse_csr_tensor(first, column, values, shape, check_invariants=False)
