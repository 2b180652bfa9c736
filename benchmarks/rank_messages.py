"""What messages cost on this machine, and the times of 2, 4 and 8 processes that follow, beside measured ones.

The model: time = work / speed-up of the cores + messages · latency + bytes of all ranks / bandwidth of the machine.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from benchmarks.measure import cores
from benchmarks.rank_cases import items
from benchmarks.rank_pool import RankPool, Sample, Sent, counted, timed

# bytes that each of two ranks sends to the other
SIZES = tuple(1 << power for power in range(10, 27, 2))
REPEATS = 9
# shorter than in the table: eight processes share two cores
PREDICTED_TOKENS, ROUNDS = 8192, 3


class MessageCost(NamedTuple):
    """Seconds per message, and bytes per second of one rank while another sends too."""

    latency: float
    bandwidth: float

    def seconds(self, messages: float, sent: float) -> float:
        return messages * self.latency + sent / self.bandwidth


def measure_messages(pool: RankPool) -> tuple[list[tuple[int, float]], MessageCost]:
    """Seconds of an exchange of each size between two ranks, and the cost of a message that follows."""
    ranks = pool.run(_exchange_on_rank)
    seconds = [max(times) for times in zip(*ranks, strict=True)]
    latency = seconds[0]
    bandwidth = SIZES[-1] / max(seconds[-1] - latency, 1e-9)
    return list(zip(SIZES, seconds, strict=True)), MessageCost(latency, bandwidth)


def _exchange_on_rank() -> list[float]:
    rank, found = dist.get_rank(), []
    splits = [0 if other == rank else 1 for other in range(dist.get_world_size())]
    for size in SIZES:
        x = torch.zeros(1, size // 4)
        y = torch.empty_like(x)
        exchange = lambda x=x, y=y: dist.all_to_all_single(y, x, splits, splits)
        calls = 20 if size <= 1 << 16 else 1
        found.append(median(timed(exchange, calls).wall for _ in range(REPEATS)))
    return found


class RankTimes(NamedTuple):
    """One rank's times of the whole work, half of it and its own part of it, and what it sends."""

    whole: float
    half: float
    own: float
    sent: Sent


def _items_on_rank(name: str) -> RankTimes:
    sides, first = items(name, False, PREDICTED_TOKENS), dist.get_rank() == 0
    sides.sharded()
    with counted() as sent_so_far:
        sides.sharded()
        sent = sent_so_far()
    samples = [
        (timed(sides.whole if first else _nothing), timed(sides.half), timed(sides.sharded)) for _ in range(ROUNDS)
    ]
    wall: Callable[[int], Any] = lambda side: median(_wall(sample[side]) for sample in samples)
    return RankTimes(wall(0), wall(1), wall(2), sent)


def _nothing() -> None:
    """What the other ranks do while the first works alone."""


def _wall(sample: Sample) -> float:
    return sample.wall


def print_messages_and_predictions() -> MessageCost:
    """Print the cost of messages, then predicted and measured times of items on 2, 4 and 8 processes."""
    with RankPool(2) as pool:
        table, cost = measure_messages(pool)
    print("\nexchange between two ranks, bytes each way: " + ", ".join(f"{n}: {1e6 * t:.0f} us" for n, t in table))
    print(f"latency {1e6 * cost.latency:.0f} us, bandwidth {cost.bandwidth / 1e9:.2f} GB/s per rank\n")
    print("case              processes  predicted_ms  measured_ms  sent_mb  messages", flush=True)
    for name in ("causal", "window", "documents"):
        speedup = None
        for world in (2, 4, 8):
            with RankPool(world) as pool:
                ranks = pool.run(_items_on_rank, name)
            if speedup is None:
                # of the cores, as two processes that exchange nothing have it
                speedup = ranks[0].whole / max(rank.half for rank in ranks)
            sent = sum(rank.sent.bytes for rank in ranks)
            busy = min(world, cores())
            messages = max(rank.sent.messages for rank in ranks) * world / busy
            predicted = ranks[0].whole / speedup + cost.seconds(messages, sent / busy)
            measured = max(rank.own for rank in ranks)
            print(
                f"items-{name:10}  {world:9}  {1e3 * predicted:12.0f}  {1e3 * measured:11.0f}  {sent / world / 1e6:7.1f}  "
                f"{max(rank.sent.messages for rank in ranks):8}",
                flush=True,
            )
    return cost
