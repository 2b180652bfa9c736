"""The plan of one rank for keys that travel around a ring: which keys it holds at each hop, and which of them go on.

The ranks are on a circle. At each hop a rank passes the keys that it holds to its neighbour, but only those that some rank
further on may see. So it never holds more than two blocks, and sends no key past the last rank that needs it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from polyhead.distributed.item_layout import ItemLayout
from polyhead.distributed.item_plan import Block, Intervals, Layouts, make_blocks


class Hop(NamedTuple):
    """The keys that a rank holds at one hop, all of the same owner; at hop 0 they are its own."""

    owner: int
    key_index: Int[Tensor, " keys"]
    blocks: list[Block]
    forward: slice
    """The places of the keys that go on to the next rank."""
    own_final: Int[Tensor, " rows"]
    """The places, among this rank's own keys, of those that go no further than the rank that holds them at this hop."""

    @property
    def final(self) -> Int[Tensor, " rows"]:
        """The places of the keys that go no further."""
        places = torch.arange(len(self.key_index))
        return torch.cat((places[: self.forward.start], places[self.forward.stop :]))


class RingPlan(NamedTuple):
    """The hops of one rank. `direction` is +1 if keys go to the next higher rank, -1 if to the next lower one."""

    rank: int
    ranks: int
    direction: int
    hops: list[Hop]

    @property
    def next_rank(self) -> int:
        return (self.rank + self.direction) % self.ranks

    @property
    def previous_rank(self) -> int:
        return (self.rank - self.direction) % self.ranks

    def holder(self, hop: int) -> int:
        """The rank that holds this rank's own keys at a hop."""
        return (self.rank + self.direction * hop) % self.ranks

    @property
    def received_rows(self) -> int:
        return sum(len(hop.key_index) for hop in self.hops[1:])

    @property
    def sent_rows(self) -> int:
        return sum(hop.forward.stop - hop.forward.start for hop in self.hops)

    @property
    def messages(self) -> int:
        return sum(hop.forward.stop > hop.forward.start for hop in self.hops)


class KeyHulls(NamedTuple):
    """Per rank, the hull `[low, high)` of the keys that its queries may see; low = number of keys, high = 0 if there are none."""

    low: Int[Tensor, " ranks"]
    high: Int[Tensor, " ranks"]

    @staticmethod
    def of(intervals: Intervals, layout: ItemLayout) -> KeyHulls:
        rows = len(intervals.first)
        live = intervals.stop > intervals.first
        owner = layout.owners().expand(rows, -1)[live]
        low = torch.full((layout.ranks,), intervals.keys).scatter_reduce(0, owner, intervals.first[live], "amin")
        high = torch.zeros(layout.ranks, dtype=torch.long).scatter_reduce(0, owner, intervals.stop[live], "amax")
        return KeyHulls(low, high)

    def downstream(self, rank: Int[Tensor, " some"], direction: int) -> KeyHulls:
        """The hulls (some, ranks - 1) of the ranks `rank`, `rank + direction`, …: entry j is for the first j + 1 of them."""
        ranks = len(self.low)
        index = (rank[:, None] + direction * torch.arange(ranks - 1)) % ranks
        return KeyHulls(self.low[index].cummin(1).values, self.high[index].cummax(1).values)


def make_ring_plan(layouts: Layouts, rank: int, intervals: Intervals) -> RingPlan:
    """Plan the hops for rank `rank`, in the direction in which fewer keys travel."""
    ranks, hulls = layouts.keys.ranks, KeyHulls.of(intervals, layouts.queries)
    direction = min((1, -1), key=lambda direction: _travelling_rows(layouts.keys, hulls, direction))
    # from here on: this rank and those after it, and the same without this rank
    low, high = (x[0].tolist() for x in hulls.downstream(torch.tensor([rank]), direction))
    next_low, next_high = (
        x[0].tolist() for x in hulls.downstream(torch.tensor([(rank + direction) % ranks]), direction)
    )
    own_queries, own_keys = layouts.queries.items(rank), layouts.keys.items(rank)
    hops = []
    for hop in range(ranks):
        owner = (rank - direction * hop) % ranks
        # at this hop the keys of `owner` are needed by this rank and the ranks - 1 - hop after it
        key_index = (
            own_keys if hop == 0 else _inside(layouts.keys.items(owner), low[ranks - 1 - hop], high[ranks - 1 - hop])
        )
        left = ranks - 2 - hop
        forward = _places_inside(key_index, next_low[left], next_high[left]) if left >= 0 else slice(0, 0)
        blocks = make_blocks(intervals, own_queries, key_index)
        hops.append(Hop(owner, key_index, blocks, forward, _own_final(layouts.keys, rank, hop, direction, hulls)))
    return RingPlan(rank, ranks, direction, hops)


def _own_final(layout: ItemLayout, rank: int, hop: int, direction: int, hulls: KeyHulls) -> Int[Tensor, " rows"]:
    """The places of own keys that the rank which holds them at this hop does not pass on."""
    ranks, own = layout.ranks, layout.items(rank)
    if hop == 0:
        return own[:0]
    reach = lambda at: hulls.downstream(torch.tensor([(rank + direction * at) % ranks]), direction)
    held, further = reach(hop), reach(hop + 1)
    inside = _places_inside(own, int(held.low[0, ranks - 1 - hop]), int(held.high[0, ranks - 1 - hop]))
    left = ranks - 2 - hop
    passed = _places_inside(own, int(further.low[0, left]), int(further.high[0, left])) if left >= 0 else slice(0, 0)
    places = torch.arange(inside.start, inside.stop)
    return places[(places < passed.start) | (places >= passed.stop)]


def _places_inside(index: Int[Tensor, " keys"], low: int, high: int) -> slice:
    """The places of the ascending indices that lie in `[low, high)`."""
    begin, end = torch.searchsorted(index, torch.tensor([low, max(low, high)])).tolist()
    return slice(begin, end) if end > begin else slice(0, 0)


def _inside(index: Int[Tensor, " keys"], low: int, high: int) -> Int[Tensor, " some"]:
    return index[_places_inside(index, low, high)]


def _travelling_rows(layout: ItemLayout, hulls: KeyHulls, direction: int) -> int:
    """The keys that all ranks receive in one direction."""
    ranks = layout.ranks
    if ranks == 1:
        return 0
    low, high = hulls.downstream(torch.arange(ranks), direction)
    hop = torch.arange(1, ranks)
    owner = (torch.arange(ranks)[:, None] - direction * hop) % ranks
    low, high = low[:, ranks - 1 - hop], high[:, ranks - 1 - hop]
    total = 0
    for begin, end in _run_bounds(layout):
        total += int((torch.minimum(end[owner], high) - torch.maximum(begin[owner], low)).clamp(min=0).sum())
    return total


def _run_bounds(layout: ItemLayout) -> list[tuple[Tensor, Tensor]]:
    """The first and second run of every rank, as (start, stop) per rank; empty if a rank has none."""
    runs = [layout.runs(rank) for rank in range(layout.ranks)]
    bounds = torch.zeros(2, layout.ranks, 2, dtype=torch.long)
    for rank, own in enumerate(runs):
        for place, run in enumerate(own):
            bounds[place, rank] = torch.tensor(run)
    return [(x[:, 0], x[:, 1]) for x in bounds]
