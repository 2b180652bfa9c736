"""The blocks of queries and keys that torch's flex_attention computes, from each query's interval of keys.

This takes work in proportion to queries and listed blocks, never to pairs, and does not wait for the device.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Int
from torch import Tensor

from polyhead.neighbourhood.shapes import Band

BLOCK = 128


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


def make_block_lists(
    first: Int[Tensor, "rows queries"], stop: Int[Tensor, "rows queries"], keys: int, exact: bool, band: Band
) -> BlockLists:
    """The block lists of queries whose keys lie in `[first, stop)`; `exact`: they see every key of it.

    `band` bounds how far keys are from their query (`Neighbourhood.band`), and so how long a list may be. A block that
    the end of the queries or keys cuts is never full.
    """
    rows = _RowsOfBlocks(first, stop, keys)
    queries, device = first.shape[-1], first.device
    key_blocks, query_blocks = _count(keys), _count(queries)
    before, after = band
    shift = keys - queries
    query_block, key_block = (torch.arange(n, device=device) for n in (query_blocks, key_blocks))
    # the candidates of a block: all blocks in which the band may have pairs with it
    key_of = _candidates(query_block, shift, before, after, key_blocks)
    query_of = _candidates(key_block, -shift, after, before, query_blocks)
    by_query = rows.meets(query_block[:, None], key_of), rows.fills(query_block[:, None], key_of)
    by_key = rows.meets(query_of, key_block[:, None]), rows.fills(query_of, key_block[:, None])
    if not exact:
        return BlockLists(_listed(by_query[0], key_of), _listed(by_key[0], query_of), None, None)
    partial = [meets & ~fills for meets, fills in (by_query, by_key)]
    return BlockLists(
        _listed(partial[0], key_of),
        _listed(partial[1], query_of),
        _listed(by_query[1], key_of),
        _listed(by_key[1], query_of),
    )


class _RowsOfBlocks:
    """For each block of queries, the blocks of keys that its queries reach, and those that all of them see entirely."""

    def __init__(self, first: Tensor, stop: Tensor, keys: int) -> None:
        self.key_blocks, self.query_blocks = _count(keys), _count(first.shape[-1])
        first, stop = first.clamp(0, keys), stop.clamp(0, keys)
        sees = stop > first
        # a query that sees no key, and a place beyond the last query: begins after all keys, ends before them
        first, stop = _cut(torch.where(sees, first, keys), keys), _cut(torch.where(sees, stop, 0), 0)
        self.first, self.stop = first.amin(-1) // BLOCK, (stop.amax(-1) + BLOCK - 1) // BLOCK
        self.full_first, self.full_stop = (first.amax(-1) + BLOCK - 1) // BLOCK, stop.amin(-1) // BLOCK

    def meets(self, query_block: Tensor, key_block: Tensor) -> Bool[Tensor, "rows blocks candidates"]:
        return self._within(self.first, self.stop, query_block, key_block)

    def fills(self, query_block: Tensor, key_block: Tensor) -> Bool[Tensor, "rows blocks candidates"]:
        return self._within(self.full_first, self.full_stop, query_block, key_block)

    def _within(self, first: Tensor, stop: Tensor, query_block: Tensor, key_block: Tensor) -> Tensor:
        exists = (query_block < self.query_blocks) & (key_block < self.key_blocks)
        row = query_block.clamp(max=self.query_blocks - 1)
        return exists & (key_block >= first[:, row]) & (key_block < stop[:, row])


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
