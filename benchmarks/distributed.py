"""The table `distributed`: two processes of one thread, against one process and against two that exchange nothing.

Two processes share the memory of the machine, so that two halves of the work without any exchange, the ceiling, are less than
twice as fast. `of ceiling` is their time divided by that of the sharded work.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch.distributed as dist

from benchmarks.case import CaseError
from benchmarks.memory import _ALLOCATOR, peak_mb
from benchmarks.rank_cases import CASES, RankCase, Results
from benchmarks.rank_messages import print_messages_and_predictions
from benchmarks.rank_pool import RankPool, Sample, Sent, counted, timed
from benchmarks.thousand_ranks import print_plans
from polyhead import _files

TOLERANCE = 1e-3


@dataclass(frozen=True)
class RankLine:
    """The result of a case: milliseconds by the clock, and of the CPU time of the slowest rank."""

    case: str
    one_ms: float
    halves_ms: float
    sharded_ms: float
    one_cpu_ms: float
    sharded_cpu_ms: float
    ceiling: float
    """How much faster two halves are than one process."""
    speedup: float
    of_ceiling: float
    goal: float | None
    one_peak_mb: float
    rank_peak_mb: float
    sent_mb: float
    messages: int
    max_abs_diff: float


def run_distributed(names: list[str], repeats: int | None, file: Path | None) -> None:
    """Run the cases whose name contains one of `names`, or all of them with predictions and plans; print and write the lines."""
    cases = [case for case in CASES if not names or any(name in case.name for name in names)]
    if not cases:
        raise ValueError(f"unknown case {names[0]!r}; the cases are {' '.join(case.name for case in CASES)}")
    columns = [field.name for field in dataclasses.fields(RankLine)]
    print("  ".join([columns[0].ljust(28), *(name.rjust(len(name)) for name in columns[1:])]), flush=True)
    lines = []
    with RankPool(2) as pool:
        for case in cases:
            line = measure_case(pool, case, repeats or case.rounds)
            lines.append(line)
            print(_text(line), flush=True)
    if file is not None:
        text = json.dumps([dataclasses.asdict(line) for line in lines], indent=1) + "\n"
        _files.write_atomically(file, text.encode(), "json")
    if not names:
        print_messages_and_predictions()
        print_plans()


def measure_case(pool: RankPool, case: RankCase, rounds: int) -> RankLine:
    """Compare, time in interleaved rounds, count what is sent, and measure memory in fresh processes."""
    ranks = pool.run(_measure_on_rank, case, rounds)
    difference = ranks[0].difference
    # this form also rejects NaN
    if not difference < TOLERANCE:
        raise CaseError(f"{case.name}: sharded results differ by {difference:.3g}; the tolerance is {TOLERANCE:g}")
    one = ranks[0].whole
    slowest = lambda field, side: [max(getattr(x, field) for x in each) for each in zip(*side, strict=True)]
    halves, sharded = [rank.half for rank in ranks], [rank.sharded for rank in ranks]
    one_ms, halves_ms, sharded_ms = (
        1e3 * median(x) for x in ([s.wall for s in one], slowest("wall", halves), slowest("wall", sharded))
    )
    # glibc returns freed memory at once, so that the peak is the memory in use; it would slow the timed runs
    with RankPool(1, _ALLOCATOR) as alone:
        (one_peak,) = alone.run(_peak_on_rank, case, True)
    with RankPool(2, _ALLOCATOR) as both:
        rank_peak = max(both.run(_peak_on_rank, case, False))
    return RankLine(
        case=case.name, one_ms=one_ms, halves_ms=halves_ms, sharded_ms=sharded_ms,
        one_cpu_ms=1e3 * median(s.cpu for s in one), sharded_cpu_ms=1e3 * median(slowest("cpu", sharded)),
        ceiling=one_ms / halves_ms, speedup=one_ms / sharded_ms, of_ceiling=halves_ms / sharded_ms, goal=case.goal,
        one_peak_mb=one_peak, rank_peak_mb=rank_peak, sent_mb=max(rank.sent.bytes for rank in ranks) / 1e6,
        messages=max(rank.sent.messages for rank in ranks), max_abs_diff=difference,
    )  # fmt: skip


@dataclass(frozen=True)
class RankSamples:
    """What one rank measured."""

    whole: list[Sample]
    half: list[Sample]
    sharded: list[Sample]
    difference: float
    sent: Sent


def _measure_on_rank(case: RankCase, rounds: int) -> RankSamples:
    sides, first = case.setup(), dist.get_rank() == 0
    # the first call also makes the plan and connects the ranks
    sides.sharded()
    with counted() as sent_so_far:
        own = sides.sharded()
        sent = sent_so_far()
    joined = sides.gather(own)
    difference = _largest_difference(sides.whole(), joined) if first else 0.0
    del own, joined
    sides.half()
    whole, half, sharded = [], [], []
    for _ in range(rounds):
        # the other rank waits in the next barrier
        whole.append(timed(sides.whole if first else lambda: None))
        half.append(timed(sides.half))
        sharded.append(timed(sides.sharded))
    return RankSamples(whole, half, sharded, difference, sent)


def _largest_difference(expected: Results, found: Results) -> float:
    """The largest difference of any result, divided by its largest entry."""
    largest = 0.0
    for name, x in expected.items():
        difference = float((found[name] - x).abs().max() / x.abs().max())
        # max() would hide NaN
        largest = difference if not difference <= largest else largest
    return largest


def _peak_on_rank(case: RankCase, alone: bool) -> float:
    sides = case.setup()
    run: Any = sides.whole if alone else sides.sharded
    # plans, connections and the buffers of libraries belong to the set-up
    run()
    dist.barrier()
    return peak_mb(run)


def _text(line: RankLine) -> str:
    texts = [line.case.ljust(28)]
    for field in dataclasses.fields(RankLine)[1:]:
        value = getattr(line, field.name)
        if value is None:
            text = "-"
        elif field.name == "max_abs_diff":
            text = f"{value:.0e}"
        elif isinstance(value, int):
            text = str(value)
        else:
            text = f"{value:.2f}" if value < 10 else f"{value:.0f}"
        texts.append(text.rjust(len(field.name)))
    return "  ".join(texts)
