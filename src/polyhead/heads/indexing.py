"""Some rows, heads, queries, keys or edges of a view."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from polyhead._checks import as_tensor, shown
from polyhead.metrics.compute import AnyPart
from polyhead.neighbourhood import Graph

Index = int | slice | Sequence[int] | Tensor


def narrowed(part: AnyPart, rows: list[slice]) -> AnyPart:
    """A part in some rows of its batch."""
    if all(row == slice(None) for row in rows):
        return part
    call, at = part.call, tuple(rows)
    batch, bias = call.sizes.batch, call.bias
    own = len(part.axes)
    if bias is not None and bias.dim() > own:
        bias = bias.expand(*batch, *bias.shape[-own:])[at]
    over = call.over if isinstance(call.over, Graph) else call.over.rows(batch, at)
    call = call._replace(q=call.q[at], k=call.k[at], v=call.v[at], over=over, bias=bias)
    return part._replace(call=call, moved=None if part.moved is None else part.moved[at])


def chosen(part: AnyPart, axis: str, numbers: Int[Tensor, " some"]) -> AnyPart:
    """A part with only these on an axis."""
    changed: dict[str, Any] = {axis: numbers}
    return part._replace(**changed)


def one(index: int, size: int) -> slice:
    """A number as the slice of it alone."""
    index = operator.index(index)
    if not -size <= index < size:
        raise IndexError(f"index {index} is out of bounds for an axis of {size}")
    return slice(index % size, index % size + 1)


def pick(axis: str, own: Int[Tensor, " own"], index: Index) -> Int[Tensor, " some"]:
    """Which of its own numbers a view keeps on an axis."""
    if isinstance(index, slice):
        return own[index]
    at = as_tensor(axis, index, "of integers, a list of them, one, or a slice").to(own.device).reshape(-1)
    if at.dtype == torch.bool:
        at = at.nonzero()[:, 0] if len(at) == len(own) else at
    if not len(at):
        return own[:0]
    whole = not at.is_floating_point() and not at.is_complex() and at.dtype != torch.bool
    if not whole or not -len(own) <= int(at.min()) <= int(at.max()) < len(own):
        raise ValueError(
            f"{axis} must be integers in [{-len(own)}, {len(own) - 1}], for there are {len(own)}, got {shown(index)}"
        )
    return own[at]
