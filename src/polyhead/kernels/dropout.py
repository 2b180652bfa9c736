"""Which pairs dropout removes: an integer hash of (seed, head, query, key), the same in every kernel."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Int
from torch import Tensor

_MIX = (0x7FEB352D, 0x846CA68B - (1 << 32), 0x9E3779B1 - (1 << 32))


def keeps(
    seed: Int[Tensor, ""], head: Int[Tensor, "..."], query: Int[Tensor, "..."], key: Int[Tensor, "..."], dropout: float
) -> Bool[Tensor, "..."]:
    """True for the pairs that stay: index tensors that broadcast. Heads count on through the batch."""
    row = _mix(_mix(_mix(_int32(seed)) + _int32(head)) + _int32(query))
    word = _mix(row ^ (_int32(key) * _MIX[2]))
    return word >= threshold(dropout)


def threshold(dropout: float) -> int:
    """The smallest word of a pair that stays: words are uniform over the 2^32 signed integers."""
    return min(round(dropout * 2**32) - 2**31, 2**31 - 1)


def _int32(x: Tensor) -> Tensor:
    return x.to(torch.int32)


def _mix(x: Int[Tensor, "..."]) -> Int[Tensor, "..."]:
    """A 32-bit integer hash in two rounds (lowbias32): every bit of the result depends on every bit of `x`."""
    # torch shifts the sign in: the masks make the shifts logical
    x = (x ^ ((x >> 16) & 0xFFFF)) * _MIX[0]
    x = (x ^ ((x >> 15) & 0x1FFFF)) * _MIX[1]
    return x ^ ((x >> 16) & 0xFFFF)
