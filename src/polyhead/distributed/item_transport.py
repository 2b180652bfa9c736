"""Chooses how keys reach other ranks: one uneven exchange, or a ring."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch

from polyhead._checks import count_of
from polyhead.distributed.item_plan import MAX_CHECKED_PAIRS, Intervals, ItemPlan, Layouts, make_item_plan
from polyhead.distributed.ring_plan import RingPlan, make_ring_plan
from polyhead.neighbourhood import Neighbourhood

TransportName = Literal["exchange", "ring"]
# The ring may send this many times the keys of the exchange, for the memory that it saves.
MAX_RING_ROWS = 2.0


class TransportPlan(NamedTuple):
    """The plan of the chosen transport, and why it was chosen."""

    name: TransportName
    plan: ItemPlan | RingPlan
    reason: str
    most_received: int
    """The keys that an exchange sends to the rank which receives most."""
    threads: int
    """Of the rank that has most."""

    @property
    def sent_rows(self) -> int:
        return self.plan.sent_rows

    @property
    def messages(self) -> int:
        return self.plan.messages


def make_transport_plan(
    over: Neighbourhood,
    layouts: Layouts,
    rank: int,
    heads: int,
    transport: TransportName | None,
    largest: Callable[[tuple[int, ...]], tuple[int, ...]],
) -> TransportPlan:
    """Plan for rank `rank`, by the transport that is asked for, or by the one that costs less.

    An exchange sends each key straight to the ranks that see it, but a rank holds all that it receives. A ring holds two blocks
    at a time, and sends as much or more. So the exchange is chosen unless it would hold more than the ring does.

    Args:
        heads: the number of heads that `over` distinguishes.
        largest: the largest of each number over all ranks, so that all of them choose the same.
    """
    intervals = Intervals.of(over, layouts)
    pairs = int(intervals.pairs_per_query().sum()) * heads
    # keys inside an interval that nobody may see are found by looking at single pairs, unless these are too many
    checked = heads if not over.exact and pairs <= MAX_CHECKED_PAIRS else None
    if transport == "ring":
        return TransportPlan("ring", make_ring_plan(layouts, rank, intervals), "as asked for", 0, 0)
    exchange, block = make_item_plan(over, layouts, rank, intervals, checked), max(layouts.keys.counts())
    held, threads = largest((exchange.rows.received, torch.get_num_threads()))
    if transport == "exchange":
        return TransportPlan("exchange", exchange, "as asked for", held, threads)
    if held <= 2 * block:
        reason = (
            f"a rank receives at most {count_of(held, 'key')}, no more than the two blocks of {block} that a ring holds"
        )
        return TransportPlan("exchange", exchange, reason, held, threads)
    ring = make_ring_plan(layouts, rank, intervals)
    (passed_on,) = largest((ring.received_rows,))
    if passed_on > MAX_RING_ROWS * held:
        reason = f"a rank receives at most {count_of(held, 'key')}, and {passed_on} by a ring"
        return TransportPlan("exchange", exchange, reason, held, threads)
    reason = f"a rank would hold {count_of(held, 'key')} of others at once, and holds two blocks of {block} in a ring"
    return TransportPlan("ring", ring, reason, held, threads)
