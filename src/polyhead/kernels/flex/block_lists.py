"""The blocks of queries and keys that torch's flex_attention computes, from each query's interval of keys.

This takes work in proportion to queries and listed blocks, never to pairs, and does not wait for the device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Int
from torch import Tensor

from polyhead.neighbourhood import Combination, Complement, Neighbourhood

BLOCK = 128
# The interval of keys `[first, stop)` of each query, for a neighbourhood or a part of it: (rows, queries) both.
IntervalOf = Callable[[Neighbourhood], tuple[Tensor, Tensor]]


class BlockList(NamedTuple):
    """For each block of one side, how many blocks of the other side it meets, and which, in ascending order."""

    number: Int[Tensor, "rows 1 blocks"]
    listed: Int[Tensor, "rows 1 blocks places"]


class BlockLists(NamedTuple):
    """Blocks with some allowed pairs, and apart from them those that are allowed entirely, if these are known."""

    keys: BlockList
    queries: BlockList
    full_keys: BlockList | None
    full_queries: BlockList | None


def make_block_lists(over: Neighbourhood, interval_of: IntervalOf, keys: int, *, with_full: bool = True) -> BlockLists:
    """The block lists of a neighbourhood, whose parts have the intervals that `interval_of` returns.

    `Neighbourhood.band` bounds how far keys are from their query, and so how long a list may be. A block that the end of the
    queries or keys cuts is never full. Without `with_full` full blocks are listed among the others.
    """
    blocks = _blocks_of(over, interval_of, keys)
    (before, after), shift = over.band, keys - blocks.queries
    query_block, key_block = (torch.arange(_count(n), device=blocks.device) for n in (blocks.queries, keys))
    # the candidates of a block: all blocks in which the band may have pairs with it
    key_of = _candidates(query_block, shift, before, after, len(key_block))
    query_of = _candidates(key_block, -shift, after, before, len(query_block))
    by_query, by_key = (query_block[:, None], key_of), (query_of, key_block[:, None])
    meets = blocks.meets(*by_query), blocks.meets(*by_key)
    if not (with_full and blocks.knows_full):
        return BlockLists(_listed(meets[0], key_of), _listed(meets[1], query_of), None, None)
    fills = blocks.fills(*by_query), blocks.fills(*by_key)
    partial = [some & ~entire for some, entire in zip(meets, fills, strict=True)]
    return BlockLists(
        _listed(partial[0], key_of),
        _listed(partial[1], query_of),
        _listed(fills[0].expand_as(partial[0]), key_of),
        _listed(fills[1].expand_as(partial[1]), query_of),
    )


def _blocks_of(over: Neighbourhood, interval_of: IntervalOf, keys: int) -> _IntervalBlocks:
    """The blocks of an expression of `&`, `|` and `~`, from those of its operands: a union may have gaps, its interval has none."""
    first, stop = interval_of(over)
    # an interval that is exact says all
    if not over.exact and isinstance(over, Combination):
        return _JoinedBlocks(first, stop, keys, over.join, [_blocks_of(part, interval_of, keys) for part in over.parts])
    if not over.exact and isinstance(over, Complement):
        return _ComplementBlocks(first, stop, keys, _blocks_of(over.over, interval_of, keys))
    return _IntervalBlocks(first, stop, keys, over.exact)


class _IntervalBlocks:
    """Which blocks of keys the intervals of a block of queries reach, and which all of them contain."""

    def __init__(self, first: Tensor, stop: Tensor, keys: int, exact: bool) -> None:
        """`exact`: the queries see every key of their interval."""
        self.queries, self.keys, self.device, self.knows_full = first.shape[-1], keys, first.device, exact
        first, stop = first.clamp(0, keys), stop.clamp(0, keys)
        sees = stop > first
        # a query that sees no key, and a place beyond the last query: begins after all keys, ends before them
        first, stop = _cut(torch.where(sees, first, keys), keys), _cut(torch.where(sees, stop, 0), 0)
        self.first, self.stop = first.amin(-1) // BLOCK, (stop.amax(-1) + BLOCK - 1) // BLOCK
        self.full_first, self.full_stop = (first.amax(-1) + BLOCK - 1) // BLOCK, stop.amin(-1) // BLOCK

    def meets(self, query_block: Tensor, key_block: Tensor) -> Bool[Tensor, "rows blocks candidates"]:
        """Whether a pair of a block may be allowed. False only where none is."""
        return self._within(self.first, self.stop, query_block, key_block)

    def fills(self, query_block: Tensor, key_block: Tensor) -> Bool[Tensor, "rows blocks candidates"]:
        """Whether a block is known to be allowed entirely."""
        if not self.knows_full:
            return torch.zeros_like(self.exists(query_block, key_block))[None]
        return self._within(self.full_first, self.full_stop, query_block, key_block)

    def exists(self, query_block: Tensor, key_block: Tensor) -> Bool[Tensor, "blocks candidates"]:
        return (query_block < _count(self.queries)) & (key_block < _count(self.keys))

    def _within(self, first: Tensor, stop: Tensor, query_block: Tensor, key_block: Tensor) -> Tensor:
        row = query_block.clamp(max=_count(self.queries) - 1)
        return self.exists(query_block, key_block) & (key_block >= first[:, row]) & (key_block < stop[:, row])


class _JoinedBlocks(_IntervalBlocks):
    """The blocks of `a & b` or `a | b`, by those of its parts and by its interval."""

    def __init__(
        self, first: Tensor, stop: Tensor, keys: int, join: Callable[[Any, Any], Any], parts: list[_IntervalBlocks]
    ) -> None:
        super().__init__(first, stop, keys, exact=False)
        self.join, self.parts = join, parts
        # bools are joined like tensors
        self.knows_full = functools.reduce(join, [part.knows_full for part in parts])

    def meets(self, query_block: Tensor, key_block: Tensor) -> Tensor:
        of_parts = functools.reduce(self.join, [part.meets(query_block, key_block) for part in self.parts])
        return of_parts & super().meets(query_block, key_block)

    def fills(self, query_block: Tensor, key_block: Tensor) -> Tensor:
        return functools.reduce(self.join, [part.fills(query_block, key_block) for part in self.parts])


class _ComplementBlocks(_IntervalBlocks):
    """The blocks of `~a`: those that `a` does not fill, and those that it does not meet."""

    def __init__(self, first: Tensor, stop: Tensor, keys: int, inner: _IntervalBlocks) -> None:
        super().__init__(first, stop, keys, exact=False)
        self.inner, self.knows_full = inner, True

    def meets(self, query_block: Tensor, key_block: Tensor) -> Tensor:
        return super().meets(query_block, key_block) & ~self.inner.fills(query_block, key_block)

    def fills(self, query_block: Tensor, key_block: Tensor) -> Tensor:
        whole = ((query_block + 1) * BLOCK <= self.queries) & ((key_block + 1) * BLOCK <= self.keys)
        return whole & ~self.inner.meets(query_block, key_block)


def _candidates(
    block: Int[Tensor, " blocks"], shift: int, before: int | None, after: int | None, others: int
) -> Int[Tensor, "blocks candidates"]:
    """The blocks of the other side that lie in a band around each block, and perhaps a few more; some do not exist."""
    if before is None or after is None:
        return torch.arange(others, device=block.device).expand(len(block), -1)
    most = torch.sym_min(others, (before + after + BLOCK - 1) // BLOCK + 2)
    start = ((block * BLOCK + shift - before) // BLOCK).clamp(min=0)
    return start[:, None] + torch.arange(most, device=block.device)


def _listed(chosen: Bool[Tensor, "rows blocks candidates"], index: Int[Tensor, "blocks candidates"]) -> BlockList:
    """The chosen candidates, moved to the front of each list."""
    counted = chosen.cumsum(-1)
    width = chosen.shape[-1]
    # what is not chosen goes to one more place at the end
    place = torch.where(chosen, counted - 1, width)
    listed = torch.zeros(*chosen.shape[:-1], width + 1, dtype=torch.int32, device=chosen.device)
    listed.scatter_(-1, place, index.int().expand(chosen.shape))
    return BlockList(counted[..., -1].int()[:, None], listed[:, None, :, :width].contiguous())


def _cut(x: Int[Tensor, "rows queries"], beyond: int) -> Int[Tensor, "rows blocks block"]:
    """The queries of each block; places beyond the last query have the value `beyond`."""
    queries = x.shape[-1]
    return F.pad(x, (0, _count(queries) * BLOCK - queries), value=beyond).unflatten(-1, (-1, BLOCK))


def _count(items: int) -> int:
    """The number of blocks that contain them."""
    return -(-items // BLOCK)
