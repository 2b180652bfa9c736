"""Which pairs dropout removes: an integer hash of (seed, head, query, key), the same in every kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Int
from torch import Tensor

if TYPE_CHECKING:
    from polyhead.kernels.call import Call

_HASH_MULTIPLIERS = (0x7FEB352D, 0x846CA68B - (1 << 32), 0x9E3779B1 - (1 << 32))


def keep_mask(
    seed: Int[Tensor, ""], head: Int[Tensor, "..."], query: Int[Tensor, "..."], key: Int[Tensor, "..."], dropout: float
) -> Bool[Tensor, "..."]:
    """True for the pairs that dropout keeps. The index tensors broadcast; heads are numbered through the whole batch."""
    seed = seed[0] if seed.numel() == 3 else seed
    return hash_pairs(seed, head, query, key) >= keep_threshold(dropout)


def hash_pairs(
    seed: Int[Tensor, ""], head: Int[Tensor, "..."], query: Int[Tensor, "..."], key: Int[Tensor, "..."]
) -> Int[Tensor, "..."]:
    """The hash of each pair, uniform over the signed 32-bit integers; dropout keeps those from `keep_threshold` on."""
    row = _hash_int32(_hash_int32(_hash_int32(_to_int32(seed)) + _to_int32(head)) + _to_int32(query))
    return _hash_int32(row ^ (_to_int32(key) * _HASH_MULTIPLIERS[2]))


def unpack_seed(seed: Int[Tensor, ""] | Int[Tensor, " 3"] | None, heads: int) -> tuple[int, int, int]:
    """The 32 bits of the seed that are used, the first head, and the heads of the whole attention, from `Call.seed_and_heads`."""
    if seed is None:
        return 0, 0, heads
    first, total = (int(seed[1]), int(seed[2])) if seed.numel() == 3 else (0, heads)
    return int(seed.reshape(-1)[0].to(torch.int32)), first, total


def head_numbers(
    seed: Int[Tensor, ""] | Int[Tensor, " 3"], lead: Sequence[int], device: torch.device
) -> Int[Tensor, "*lead"]:
    """The numbers of heads (...batch, heads) through the whole batch and the whole attention."""
    *batch, heads = lead
    if seed.numel() != 3:
        return torch.arange(torch.Size(lead).numel(), device=device).reshape(*lead)
    row = torch.arange(torch.Size(batch).numel(), device=device).reshape(*batch, 1)
    return row * seed[2] + seed[1] + torch.arange(heads, device=device)


def pair_numbers(call: Call) -> tuple[Int[Tensor, "... heads"], Int[Tensor, " queries"], Int[Tensor, " keys"]]:
    """The numbers of heads, queries and keys that `keep_mask` takes for a call."""
    batch, heads, queries, keys = call.sizes
    device, seed = call.q.device, call.seed_and_heads
    assert seed is not None
    query, key = call.item_indices
    query = torch.arange(queries, device=device) if query is None else query
    return (
        head_numbers(seed, (*batch, heads), device),
        query,
        torch.arange(keys, device=device) if key is None else key,
    )


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
