"""The sizes of one attention, what fits them, and intervals of keys."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor


class Sizes(NamedTuple):
    """The axes of one attention: `batch` holds every leading axis."""

    batch: tuple[int, ...]
    heads: int
    queries: int
    keys: int


KeyInterval = tuple[Int[Tensor, "... queries"], Int[Tensor, "... queries"]]


def broadcasts_to(shape: tuple[int, ...], target: tuple[int, ...]) -> bool:
    """Whether a tensor of one shape can be expanded to another."""
    return len(shape) <= len(target) and all(a in (1, b) for a, b in zip(shape[::-1], target[::-1], strict=False))


def check_broadcasts_to_batch(name: str, shape: tuple[int, ...], sizes: Sizes) -> None:
    """Raise where rows of this shape do not fit the batch."""
    if not broadcasts_to(shape, sizes.batch):
        raise ValueError(f"{name}: its leading axes must broadcast to the batch {sizes.batch}, got {shape}")


def interval_around_true(keep: Bool[Tensor, "... keys"]) -> KeyInterval:
    """The index of the first True and the one past the last; the two are equal where no entry is True."""
    keys = keep.shape[-1]
    if keys == 0:
        return keep.sum(-1), keep.sum(-1)
    position = torch.arange(keys, device=keep.device)
    stop = torch.where(keep, position + 1, 0).amax(-1)
    return torch.minimum(torch.where(keep, position, keys).amin(-1), stop), stop
