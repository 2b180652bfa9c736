"""The plan of one rank for attention over items that lie on several: which keys it needs, and which of its own others need.

Each rank plans for itself, from the intervals of keys of all queries. Two ranks that plan for the same neighbourhood agree, since
what one needs of another follows from the same intervals on both.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from polyhead.distributed.item_layout import ItemLayout, find_runs
from polyhead.distributed.row_exchange import RowPlan
from polyhead.neighbourhood import Neighbourhood

# Pairs that are looked at one by one, to leave out keys inside the hulls that nobody may see. With more pairs hulls are sent.
MAX_CHECKED_PAIRS = 1 << 28
# Pairs in one block of such a check.
_CHECK_BLOCK = 1 << 22
# Keys in more runs than this are one block with gaps.
MAX_RUNS = 16


class Layouts(NamedTuple):
    """Where the queries and the keys of a whole attention lie."""

    queries: ItemLayout
    keys: ItemLayout

    @property
    def query_offset(self) -> int:
        """The position of the first query along the keys."""
        return self.keys.length - self.queries.length


class Intervals(NamedTuple):
    """The interval of keys `[first, stop)` of every query of the whole attention; one row if it is the same for the whole batch."""

    first: Int[Tensor, "rows queries"]
    stop: Int[Tensor, "rows queries"]
    keys: int

    @staticmethod
    def of(over: Neighbourhood, layouts: Layouts) -> Intervals:
        queries, keys = layouts.queries.length, layouts.keys.length
        ends = torch.broadcast_tensors(*over.interval(queries, keys, torch.device("cpu")))
        rows = (end.expand(*end.shape[:-1], queries) for end in ends)
        first, stop = ((end.flatten(0, -2) if end.dim() > 1 else end[None]).clamp(0, keys) for end in rows)
        return Intervals(first, torch.maximum(first, stop), keys)

    def pairs_per_query(self) -> Int[Tensor, " queries"]:
        return (self.stop - self.first).sum(0)


class Block(NamedTuple):
    """Own queries and keys that are attended to in one call: places in the local tensors, and indices in the whole sequence."""

    queries: slice
    keys: slice
    query_index: Int[Tensor, " queries"]
    key_index: Int[Tensor, " keys"]
    first: Int[Tensor, "rows queries"]
    stop: Int[Tensor, "rows queries"]
    """The interval of each query among the keys of the block."""

    @property
    def has_gaps(self) -> bool:
        """Whether keys are missing between the first and the last."""
        return len(self.key_index) > 0 and int(self.key_index[-1] - self.key_index[0]) + 1 != len(self.key_index)


class ItemPlan(NamedTuple):
    """What one rank sends, receives and computes."""

    rows: RowPlan
    key_index: Int[Tensor, " received"]
    """The indices of the received keys in the whole sequence, ascending."""
    order: Int[Tensor, " received"] | None
    """The place of each of them among the rows that arrive, which are grouped by sender; None if it is the same."""
    own_blocks: list[Block]
    received_blocks: list[Block]

    @property
    def sent_rows(self) -> int:
        return len(self.rows.send)

    @property
    def messages(self) -> int:
        return self.rows.messages


def make_item_plan(
    over: Neighbourhood, layouts: Layouts, rank: int, intervals: Intervals, heads: int | None
) -> ItemPlan:
    """Plan the exchange of keys for rank `rank`.

    Args:
        over: the neighbourhood of the whole attention.
        intervals: its intervals.
        heads: the number of heads, if single pairs are looked at, so that only keys that some query may see are sent; None if
            all keys inside the intervals are sent.
    """
    own_queries, own_keys, owner = layouts.queries.items(rank), layouts.keys.items(rank), layouts.keys.owners()
    pairs = None if heads is None else PairCheck(over, heads, layouts.query_offset)
    needed = _needed_keys(intervals, own_queries, pairs)
    needed[own_keys] = False
    wanted = _own_keys_needed_by(intervals, layouts, rank, pairs)
    wanted[rank] = False
    send = [row.nonzero()[:, 0] for row in wanted]
    received = needed.nonzero()[:, 0]
    arrival = torch.argsort(owner[received], stable=True)
    order = None if bool((arrival.diff() == 1).all()) else arrival.argsort()
    counts = torch.bincount(owner[received], minlength=layouts.keys.ranks)
    rows = RowPlan(torch.cat(send), tuple(len(x) for x in send), tuple(counts.tolist()))
    own_blocks = make_blocks(intervals, own_queries, own_keys)
    return ItemPlan(rows, received, order, own_blocks, make_blocks(intervals, own_queries, received))


class PairCheck(NamedTuple):
    """Whether single pairs are allowed in any head and any row of the batch."""

    over: Neighbourhood
    heads: int
    query_offset: int

    def any_allowed(self, queries: Int[Tensor, " queries"], keys: Int[Tensor, " keys"]) -> Bool[Tensor, " keys"]:
        """Which of the keys some of the queries may see."""
        seen = torch.zeros(len(keys), dtype=torch.bool)
        head = torch.arange(self.heads if self.over.by_head else 1)[:, None, None]
        step = max(1, _CHECK_BLOCK // max(1, len(keys) * len(head)))
        for part in queries.split(step) if len(keys) else ():
            allowed = self.over.allows(head, part[:, None] + self.query_offset, keys)
            seen |= allowed.expand(*allowed.shape[:-2], len(part), len(keys)).reshape(-1, len(keys)).any(0)
        return seen


def _needed_keys(intervals: Intervals, own: Tensor, pairs: PairCheck | None) -> Bool[Tensor, " items"]:
    """Which keys the own queries may see."""
    first, stop = (end[:, own].reshape(1, -1) for end in intervals[:2])
    needed = _covered(first, stop, intervals.keys)[0]
    if pairs is not None:
        candidates = needed.nonzero()[:, 0]
        needed[candidates] = pairs.any_allowed(own, candidates)
    return needed


def _own_keys_needed_by(
    intervals: Intervals, layouts: Layouts, rank: int, pairs: PairCheck | None
) -> Bool[Tensor, "ranks own"]:
    """Which of the own keys each rank needs."""
    own, owner, ranks = layouts.keys.items(rank), layouts.queries.owners(), layouts.keys.ranks
    first = torch.searchsorted(own, intervals.first.contiguous())
    stop = torch.searchsorted(own, intervals.stop.contiguous())
    wanted = _covered(first, stop, len(own), owner.expand_as(first), ranks)
    if pairs is not None:
        for other in range(ranks):
            if other != rank and wanted[other].any():
                candidates = wanted[other].nonzero()[:, 0]
                wanted[other, candidates] = pairs.any_allowed(layouts.queries.items(other), own[candidates])
    return wanted


def _covered(
    first: Int[Tensor, "rows intervals"], stop: Int[Tensor, "rows intervals"], length: int,
    group: Int[Tensor, "rows intervals"] | None = None, groups: int = 1,
) -> Bool[Tensor, "groups length"]:  # fmt: skip
    """Which of `length` places the intervals of each group cover: +1 where one begins, -1 where it ends, summed."""
    live = stop > first
    at = torch.zeros_like(first[live]) if group is None else group[live]
    change = torch.zeros(groups, length + 1, dtype=torch.int32)
    one = torch.ones(len(at), dtype=torch.int32)
    change.index_put_((at, first[live]), one, accumulate=True)
    change.index_put_((at, stop[live]), -one, accumulate=True)
    return change.cumsum(1)[:, :length] > 0


def make_blocks(intervals: Intervals, queries: Int[Tensor, " queries"], keys: Int[Tensor, " keys"]) -> list[Block]:
    """Cut own queries x some keys, both ascending, into blocks of consecutive items; blocks without a pair are left out."""
    query_places, key_places = find_runs(queries), find_runs(keys)
    if len(key_places) > MAX_RUNS:
        key_places = [slice(0, len(keys))]
    blocks = []
    for q_place in query_places:
        for k_place in key_places:
            block = _make_block(intervals, queries, keys, q_place, k_place)
            if block is not None:
                blocks.append(block)
    return blocks


def _make_block(intervals: Intervals, queries: Tensor, keys: Tensor, q_place: slice, k_place: slice) -> Block | None:
    """The block of these queries and keys, without queries and keys at either end that are in no pair."""
    query_index, key_index = queries[q_place], keys[k_place]
    first = torch.searchsorted(key_index, intervals.first[:, query_index].contiguous())
    stop = torch.searchsorted(key_index, intervals.stop[:, query_index].contiguous())
    live = (stop > first).any(0).nonzero()[:, 0]
    if not len(live):
        return None
    q0, q1 = int(live[0]), int(live[-1]) + 1
    first, stop = first[:, q0:q1], stop[:, q0:q1]
    some = stop > first
    k0, k1 = int(first[some].min()), int(stop[some].max())
    place = lambda run, begin, end: slice(run.start + begin, run.start + end)
    return Block(
        place(q_place, q0, q1), place(k_place, k0, k1), query_index[q0:q1], key_index[k0:k1], (first - k0).clamp(0, k1 - k0),
        (stop - k0).clamp(0, k1 - k0),
    )  # fmt: skip
