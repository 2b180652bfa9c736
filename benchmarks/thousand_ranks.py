"""Plans of one rank of 1,024 on torch's `fake` backend: what it would send, and how long the plan takes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist

from benchmarks.rank_cases import draw_clustered, make_over
from polyhead import Graph
from polyhead.distributed import partition, shard_items
from polyhead.distributed.item_plan import Intervals
from polyhead.distributed.item_transport import make_transport_plan

RANKS, TOKENS, ROW_BYTES = 1024, 1 << 20, 2 * 12 * 64 * 4
NODES, EDGES, NODE_BYTES = 1 << 19, 1 << 23, 4 * 32 * 4
PLANNED_RANKS = (0, RANKS // 2, RANKS - 1)


class RankPlan(NamedTuple):
    """What one rank does in a forward pass: keys and values of 12 x 64 in fp32, or source rows of 4 x 32."""

    transport: str
    pairs: int
    sent_rows: int
    messages: int
    seconds: float
    """Of planning."""


@contextmanager
def fake_ranks(rank: int, ranks: int = RANKS) -> Iterator[None]:
    """This process as one of many ranks that exist in name only."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def plan_items(name: str, rank: int, tokens: int = TOKENS, ranks: int = RANKS) -> RankPlan:
    """The plan of one rank for `causal`, `window` or `documents`."""
    over = make_over(name, tokens)
    with fake_ranks(rank, ranks):
        begin = time.perf_counter()
        shard = shard_items(over, tokens, order="zigzag" if name == "causal" else "contiguous")
        # ranks that are not there cannot say how much they receive: with these orders this rank is like the others
        plan = make_transport_plan(over, shard.layouts, rank, 1, None, lambda own: own)
        seconds = time.perf_counter() - begin
        intervals = Intervals.of(over, shard.layouts)
        pairs = int(intervals.pairs_per_query()[shard.item_indices[0]].sum())
    return RankPlan(plan.name, pairs, plan.sent_rows, plan.messages, seconds)


def print_plans() -> None:
    """Print what ranks of 1,024 send for a million tokens, and for a partitioned graph."""
    print(f"\n{RANKS} ranks, {TOKENS} tokens, 12 x 64, fp32, one forward pass")
    print("case              rank  transport     pairs  sent_rows  sent_mb  messages  plan_s", flush=True)
    for name in ("window", "documents", "causal"):
        for rank in PLANNED_RANKS:
            plan = plan_items(name, rank)
            print(
                f"items-{name:10}  {rank:4}  {plan.transport:9}  {plan.pairs:8}  {plan.sent_rows:9}  "
                f"{plan.sent_rows * ROW_BYTES / 1e6:7.1f}  {plan.messages:8}  {plan.seconds:6.1f}",
                flush=True,
            )
    torch.manual_seed(0)
    begin = time.perf_counter()
    parts = partition(Graph(draw_clustered(NODES, EDGES, 512), NODES), RANKS)
    seconds = time.perf_counter() - begin
    print(
        f"\n{RANKS} ranks, a clustered graph of {NODES} nodes and {EDGES} edges, 4 x 32, fp32; partition {seconds:.0f} s"
    )
    print("rank   nodes   edges  sent_rows  sent_mb  messages")
    for rank in PLANNED_RANKS:
        part = parts[rank]
        sent = len(part.send)
        print(
            f"{rank:4}  {len(part.nodes):6}  {part.num_edges:6}  {sent:9}  {sent * NODE_BYTES / 1e6:7.2f}  "
            f"{part.plan.messages:8}",
            flush=True,
        )
