"""Indices of heads, queries, keys, edges and batch rows as users pass them."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from jaxtyping import Int
from torch import Tensor

from polyhead._checks import as_tensor, short_repr
from polyhead._torch import move_to

Index = int | slice | Sequence[int] | Tensor


def unit_slice(index: int, size: int) -> slice:
    """The slice of a single index."""
    index = operator.index(index)
    if not -size <= index < size:
        raise IndexError(f"index {index} is out of bounds for an axis of {size}")
    return slice(index % size, index % size + 1)


def index_into_selection(axis: str, own: Int[Tensor, " own"], index: Index) -> Int[Tensor, " some"]:
    """Index the indices `own` that a view has on an axis."""
    if isinstance(index, slice):
        return own[index]
    if type(index) is int and -len(own) <= index < len(own):
        return own[unit_slice(index, len(own))]
    selected = as_tensor(axis, index, "of integers, a list of them, one, or a slice").reshape(-1)
    if selected.dtype == torch.bool and len(selected) == len(own):
        selected = selected.nonzero()[:, 0]
    if not len(selected):
        return own[:0]
    integral = not (selected.is_floating_point() or selected.is_complex() or selected.dtype == torch.bool)
    # indices on a device are not read: torch checks them there
    if not integral or (selected.is_cpu and not -len(own) <= int(selected.min()) <= int(selected.max()) < len(own)):
        raise ValueError(
            f"{axis} must be integers in [{-len(own)}, {len(own) - 1}], for there are {len(own)}, got {short_repr(index)}"
        )
    return own[move_to(selected, own.device)]
