"""Measures a case: compare results, then time all sides interleaved, then measure the memory of each in a fresh process."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from benchmarks.case import Case, CaseError, Forward, Results, Sides
from benchmarks.memory import peak_in_child

# The least duration of a sample, in seconds; a sample has many calls if one is shorter.
SAMPLE = 0.01
WARM_UP = 0.05
# Without --repeats, the time for all rounds in seconds, and the least and largest number of rounds.
BUDGET = 10.0
FEWEST, MOST = 5, 51


@dataclass(frozen=True)
class Line:
    """The result of a case: milliseconds per call, megabytes above the state after set-up."""

    case: str
    ours_ms: float
    peer: str
    peer_ms: float
    ratio: float
    """peer / ours, the median over rounds."""
    floor_ms: float | None
    ours_peak_mb: float
    peer_peak_mb: float
    max_abs_diff: float
    """Between ours and any other side; gradients are divided by their largest entry."""


def measured(case: Case, repeats: int | None = None) -> Line:
    """Measure a case; raises `CaseError` if it has no result."""
    sides = case.setup()
    difference = largest_difference(sides, case.tolerance)
    ours, peer, *floors = interleaved(sides.timed(), repeats)
    return Line(
        case=case.name,
        ours_ms=1e3 * median(ours),
        peer=case.peer,
        peer_ms=1e3 * median(peer),
        ratio=median(b / a for a, b in zip(ours, peer, strict=True)),
        floor_ms=min((1e3 * median(floor) for floor in floors), default=None),
        ours_peak_mb=peak_in_child(case, "ours"),
        peer_peak_mb=peak_in_child(case, "peer"),
        max_abs_diff=difference,
    )


def cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def use_two_threads() -> None:
    """Use two threads for every measurement, or one on a single core."""
    torch.set_num_threads(min(2, cores()))


def largest_difference(sides: Sides, tolerance: float) -> float:
    """Run each side once and compare it with ours; raises `CaseError` if the tolerance is exceeded."""
    ours, *others = (side.reveal(side.run()) for side in sides.all())
    largest = 0.0
    for other in others:
        for name, difference in differences(ours, other).items():
            # this form also rejects NaN
            if not difference < tolerance:
                raise CaseError(f"{name} differs by {difference:.3g}; the tolerance is {tolerance:g}")
            largest = max(largest, difference)
    return largest


def differences(ours: Results, other: Results) -> dict[str, float]:
    """The largest absolute difference of each result; for gradients, divided by their largest entry.

    The loss is a mean over up to millions of numbers, so the absolute size of a gradient is arbitrary.
    """
    if ours.gradients.keys() != other.gradients.keys():
        raise CaseError(f"the sides have different gradients: {[*ours.gradients]}, {[*other.gradients]}")
    found = {"the output": _difference("the output", ours.output, other.output)}
    for name, gradient in other.gradients.items():
        label = f"the gradient of {name}"
        size = float(gradient.abs().max())
        if size == 0:
            raise CaseError(f"{label} is all zeros, so that nothing is compared")
        found[label] = _difference(label, ours.gradients[name], gradient) / size
    return found


def _difference(label: str, a: Tensor, b: Tensor) -> float:
    if a.shape != b.shape:
        raise CaseError(f"{label} is {tuple(a.shape)} on our side and {tuple(b.shape)} on another")
    return float((a - b).abs().max())


def interleaved(runs: Sequence[Forward], repeats: int | None = None) -> list[list[float]]:
    """Seconds per call: a list of samples for each of `runs`, interleaved in rotating order."""
    counts = [_calls_per_sample(run) for run in runs]
    samples: list[list[float]] = [[] for _ in runs]
    rounds, begin = 0, time.perf_counter()
    while not _enough(rounds, time.perf_counter() - begin, repeats):
        for turn in range(len(runs)):
            i = (rounds + turn) % len(runs)
            samples[i].append(_sample(runs[i], counts[i]))
        rounds += 1
    return samples


def _enough(rounds: int, spent: float, repeats: int | None) -> bool:
    if repeats is not None:
        return rounds >= repeats
    return rounds >= MOST or (rounds >= FEWEST and spent >= BUDGET)


def _calls_per_sample(run: Forward) -> int:
    """Warm up, and count how many calls fill a sample."""
    best, spent = math.inf, 0.0
    while spent < WARM_UP:
        once = _sample(run, 1)
        best, spent = min(best, once), spent + once
    return math.ceil(SAMPLE / best)


def _sample(run: Forward, calls: int) -> float:
    begin = time.perf_counter()
    for _ in range(calls):
        run()
    return (time.perf_counter() - begin) / calls
