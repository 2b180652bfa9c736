"""Measures a case: compare results, then time all sides interleaved, then measure the memory of each in a fresh process."""

from __future__ import annotations

import os
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from benchmarks.case import Case, CaseError, Results, Sides
from benchmarks.memory import peak_memory
from benchmarks.placement import here, making
from polyhead.device_check.timing import interleaved

# Without --repeats, the time for all rounds in seconds.
BUDGET = 10.0


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
    ours_peak_mb: float | None
    """None where the device does not tell."""
    peer_peak_mb: float | None
    max_abs_diff: float
    """Between ours and any other side; gradients are divided by their largest entry."""
    device: str = "cpu"


def measured(case: Case, repeats: int | None = None) -> Line:
    """Measure a case; raises `CaseError` if it has no result."""
    with making():
        sides = case.setup()
    difference = largest_difference(sides, case.tolerance)
    ours, peer, *floors = interleaved(sides.timed(), here(), budget=BUDGET, rounds=repeats)
    return Line(
        case=case.name,
        ours_ms=1e3 * median(ours),
        peer=case.peer,
        peer_ms=1e3 * median(peer),
        ratio=median(b / a for a, b in zip(ours, peer, strict=True)),
        floor_ms=min((1e3 * median(floor) for floor in floors), default=None),
        ours_peak_mb=peak_memory(case, sides, "ours"),
        peer_peak_mb=peak_memory(case, sides, "peer"),
        max_abs_diff=difference,
        device=str(here()),
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
