"""The sizes of one attention, what fits them, and intervals of keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

if TYPE_CHECKING:
    from polyhead.neighbourhood.base import Neighbourhood


class Sizes(NamedTuple):
    """The axes of one attention: `batch` holds every leading axis."""

    batch: tuple[int, ...]
    heads: int
    queries: int
    keys: int


KeyInterval = tuple[Int[Tensor, "... queries"], Int[Tensor, "... queries"]]
Band = tuple[int | None, int | None]


def intersect_bands(bands: Sequence[Band]) -> Band:
    """How far the keys of an intersection are before and after their query, from that of its parts."""
    before, after = ([reach for reach in side if reach is not None] for side in zip(*bands, strict=True))
    return min(before, default=None), min(after, default=None)


def unite_bands(bands: Sequence[Band]) -> Band:
    """How far the keys of a union are before and after their query, from that of its parts."""
    farthest = lambda side: None if any(reach is None for reach in side) else max(side)
    before, after = zip(*bands, strict=True)
    return farthest(before), farthest(after)


def broadcasts_to(shape: tuple[int, ...], target: tuple[int, ...]) -> bool:
    """Whether a tensor of one shape can be expanded to another."""
    return len(shape) <= len(target) and all(a in (1, b) for a, b in zip(shape[::-1], target[::-1], strict=False))


def check_broadcasts_to_batch(name: str, shape: tuple[int, ...], sizes: Sizes) -> None:
    """Raise where rows of this shape do not fit the batch."""
    if not broadcasts_to(shape, sizes.batch):
        raise ValueError(f"{name}: its leading axes must broadcast to the batch {sizes.batch}, got {shape}")


def check_mask_shape(shape: tuple[int, ...], without_heads: bool, sizes: Sizes) -> None:
    """Raise where a mask of this shape does not fit; `without_heads`: it was passed as (queries, keys)."""
    target = (*sizes.batch, sizes.heads, sizes.queries, sizes.keys)
    batch = sizes.batch[-1] if sizes.batch else None
    if without_heads and len(shape) == 3:
        shape = shape[1:]
    # the fitting shape is tested first, so that a program traced for any length gets no guard against the batch size
    if len(shape) == 2 and shape != (sizes.queries, sizes.keys) and shape == (batch, sizes.keys):
        raise ValueError(
            f"Mask: keep must have shape (..., queries, keys), got {shape}, which looks like (batch, keys); for padded keys use "
            "Padding(keep), True = a real key, and for torch's key_padding_mask, True = padded, Padding(~mask)"
        )
    if len(shape) == 3 and batch is not None and shape[0] == batch and shape[0] != 1:
        hint = "keep.unsqueeze(1) is (batch, 1, queries, keys)"
        if batch != sizes.heads:
            raise ValueError(
                f"Mask: keep must be (..., heads, queries, keys), got {shape}, which looks like (batch, queries, keys); {hint}"
            )
        raise ValueError(
            f"Mask: keep must have four axes where batch and heads have the same size, got {shape}; {hint}, "
            "keep[None] is (1, heads, queries, keys)"
        )
    if not broadcasts_to(shape, target) or shape[-1] != sizes.keys:
        by_head = batch is not None and len(shape) == 3 and shape[0] == batch * sizes.heads
        hint = f"; keep.unflatten(0, ({batch}, {sizes.heads})) splits batch and heads" if by_head else ""
        raise ValueError(
            f"Mask: keep must broadcast to (..., heads, queries, keys) = {target}, got shape {shape}{hint}"
        )


def interval_around_true(keep: Bool[Tensor, "... keys"]) -> KeyInterval:
    """The index of the first True and the one past the last; the two are equal where no entry is True."""
    keys = keep.shape[-1]
    if keys == 0:
        return keep.sum(-1), keep.sum(-1)
    position = torch.arange(keys, device=keep.device)
    stop = torch.where(keep, position + 1, 0).amax(-1)
    return torch.minimum(torch.where(keep, position, keys).amin(-1), stop), stop


def flatten_batch_unless_shared(x: Tensor, batch: tuple[int, ...], own: int) -> Tensor:
    """(rows, *own axes) of `x`, which has `own` axes besides the batch; one row if it is the same for the whole batch."""
    shape = tuple(x.shape)
    shape = (1,) * (own - len(shape)) + shape
    rest = shape[len(shape) - own :]
    if all(n == 1 for n in shape[: len(shape) - own]):
        return x.reshape(1, *rest)
    # not reshape(-1, …): there may be no queries
    return x.expand(*batch, *rest).flatten(0, len(batch) - 1)


def check_one_lattice(symbol: str, parts: tuple[Neighbourhood, ...]) -> None:
    """Raise where parts disagree about the positions of the queries."""
    lattices = {part.lattice for part in parts} - {None}
    if len(lattices) > 1:
        raise ValueError(f"{symbol}: all parts must be on one grid, got {' and '.join(map(repr, parts))}")
    lattice = next(iter(lattices), None)
    counting = next((part for part in parts if part.along_keys), None)
    if lattice is not None and lattice.queries_differ_from_keys and counting is not None:
        strided = " and ".join(repr(part) for part in parts if part.lattice)
        raise ValueError(
            f"{symbol}: {counting!r} counts queries along the keys, but the queries of {strided} are not the keys; pass a Mask "
            f"instead of {counting!r}"
        )
