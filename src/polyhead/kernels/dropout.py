"""Which pairs dropout removes: an integer hash of (seed, head, query, key), the same in every kernel."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Int
from torch import Tensor

_HASH_MULTIPLIERS = (0x7FEB352D, 0x846CA68B - (1 << 32), 0x9E3779B1 - (1 << 32))


def keep_mask(
    seed: Int[Tensor, ""], head: Int[Tensor, "..."], query: Int[Tensor, "..."], key: Int[Tensor, "..."], dropout: float
) -> Bool[Tensor, "..."]:
    """True for the pairs that dropout keeps. The index tensors broadcast; heads are numbered through the whole batch."""
    row = _hash_int32(_hash_int32(_hash_int32(_to_int32(seed)) + _to_int32(head)) + _to_int32(query))
    hashed = _hash_int32(row ^ (_to_int32(key) * _HASH_MULTIPLIERS[2]))
    return hashed >= keep_threshold(dropout)


def keep_threshold(dropout: float) -> int:
    """The smallest hash of a pair that is kept: hashes are uniform over the 2^32 signed integers."""
    return min(round(dropout * 2**32) - 2**31, 2**31 - 1)


def _to_int32(x: Tensor) -> Tensor:
    return x.to(torch.int32)


def _hash_int32(x: Int[Tensor, "..."]) -> Int[Tensor, "..."]:
    """A 32-bit integer hash in two rounds (lowbias32): every bit of the result depends on every bit of `x`."""
    # torch shifts the sign bit in: the masks make the shifts logical
    x = (x ^ ((x >> 16) & 0xFFFF)) * _HASH_MULTIPLIERS[0]
    x = (x ^ ((x >> 15) & 0x1FFFF)) * _HASH_MULTIPLIERS[1]
    return x ^ ((x >> 16) & 0xFFFF)
