"""Linear maps of dense or sparse inputs, also with an own dropout of the input per head."""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from polyhead._torch import without_autocast
from polyhead.linalg.skinny_gemm import apply_linear
from polyhead.neighbourhood.csr import build_indptr
from polyhead.neighbourhood.graph_inputs import check_sparse_indices
from polyhead.nn.dropout import draw_dropout_factors


def project_dense_or_sparse(
    linear: nn.Module, x: Float[Tensor, "... items features"] | list[Any]
) -> Float[Tensor, "... items heads_dim"]:
    """Apply a linear map; to a list of one copy per head, apply the head's own rows of the map to each."""
    if isinstance(x, list):
        assert isinstance(linear, nn.Linear)
        maps = linear.weight.chunk(len(x))
        biases = [None] * len(x) if linear.bias is None else linear.bias.chunk(len(x))
        return torch.cat([_linear_dense_or_sparse(one, w, b) for one, w, b in zip(x, maps, biases, strict=True)], -1)
    if x.layout == torch.strided:
        return apply_linear(linear, x)
    if not isinstance(linear, nn.Linear):
        raise ValueError(
            f"sparse inputs must be projected by a plain nn.Linear, got {type(linear).__name__}; pass them dense"
        )
    return _linear_dense_or_sparse(_sparse_to_cached_csr(x), linear.weight, linear.bias)


def drop_inputs_per_head(
    x: Float[Tensor, "... items features"], p: float, heads: range, total: int | None = None
) -> list[Any]:
    """One copy of the input for each of these heads, each with its own dropout, drawn in the order of all `total` heads."""
    # zeros of a sparse input stay zero: dropout of the entries suffices
    entries = None if x.layout == torch.strided else _sparse_to_cached_csr(x)
    values, dropped = x if entries is None else entries.values, []
    for head in range(heads.stop if total is None else total):
        factors = draw_dropout_factors(values.shape, p, values)
        if head in heads:
            dropped.append(values * factors)
    return dropped if entries is None else [entries._replace(values=one) for one in dropped]


class _SparsityPattern(NamedTuple):
    """The positions of the entries of a sparse matrix: its CSR, and that of its transpose."""

    indptr: Int[Tensor, " items+1"]
    indices: Int[Tensor, " entries"]
    transposed_indptr: Int[Tensor, " features+1"]
    transposed_indices: Int[Tensor, " entries"]
    # the index of each entry of the transpose among the entries
    entry_id: Int[Tensor, " entries"]
    shape: tuple[int, int]


class _SparseInput(NamedTuple):
    pattern: _SparsityPattern
    values: Float[Tensor, " entries"]


# CSR forms of inputs that are still alive: training passes the same matrix in every epoch.
_csr_cache: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def _sparse_to_cached_csr(x: Float[Tensor, "items features"]) -> _SparseInput:
    if x.dim() != 2:
        raise ValueError(f"sparse inputs must have shape (items, features), without a batch, got {tuple(x.shape)}")
    if x.requires_grad:
        raise ValueError("sparse inputs must not require gradients; pass them dense")
    # inference tensors have no version
    version = None if x.is_inference() else x._version
    if version is None or x not in _csr_cache or _csr_cache[x][0] != version:
        check_sparse_indices("sparse inputs", x)
        entries = x.to_sparse_coo().coalesce()
        row, column = entries.indices()
        entry_id = column.argsort(stable=True)
        items, features = x.shape
        pattern = _SparsityPattern(
            build_indptr(row, items), column.contiguous(), build_indptr(column[entry_id], features), row[entry_id].contiguous(), entry_id,
            (items, features),
        )  # fmt: skip
        # a copy: a view would keep x, the key, alive
        _csr_cache[x] = version, _SparseInput(pattern, entries.values().detach().clone())
    cached: _SparseInput = _csr_cache[x][1]
    return cached


def _linear_dense_or_sparse(x: Tensor | _SparseInput, weight: Tensor, bias: Tensor | None) -> Tensor:
    if isinstance(x, Tensor):
        return F.linear(x, weight, bias)
    y: Tensor = _SparseLinear.apply(weight, x.values.to(weight.dtype), x.pattern)
    return y if bias is None else y + bias


class _SparseLinear(torch.autograd.Function):
    """x Wᵀ with the CSR of x, and its gradient with that of xᵀ. torch's own backward sorts the entries at each call."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, values: Tensor, pattern: _SparsityPattern) -> Tensor:
        ctx.pattern = pattern
        ctx.save_for_backward(values)
        # sparse products do not exist in the dtypes of autocast
        with without_autocast(weight.device):
            return _make_csr_tensor(pattern.indptr, pattern.indices, values, pattern.shape) @ weight.T.contiguous()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        pattern, (values,) = ctx.pattern, ctx.saved_tensors
        transposed = _make_csr_tensor(
            pattern.transposed_indptr, pattern.transposed_indices, values[pattern.entry_id], pattern.shape[::-1]
        )
        with without_autocast(grad.device):
            return (transposed @ grad.contiguous()).T, None, None


def _make_csr_tensor(indptr: Tensor, indices: Tensor, values: Tensor, shape: tuple[int, int]) -> Tensor:
    with warnings.catch_warnings():
        # torch warns once that CSR tensors are in beta
        warnings.filterwarnings("ignore", message="Sparse", category=UserWarning)
        return torch.sparse_csr_tensor(indptr, indices, values, shape, check_invariants=False)
