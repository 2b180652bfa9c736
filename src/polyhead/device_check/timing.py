"""Times functions on a device: interleaved, so that a busy moment of the machine affects all of them alike."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

import torch

from polyhead.device_check.devices import synchronise

# The least duration of a sample, in seconds; a sample has many calls if one is shorter.
SAMPLE = 0.01
WARM_UP = 0.05
# The least and largest number of rounds where none is given.
FEWEST, MOST = 5, 51

Timed = Callable[[], object]


def interleaved(
    runs: Sequence[Timed], device: torch.device, *, budget: float, rounds: int | None = None
) -> list[list[float]]:
    """Seconds per call: a list of samples for each of `runs`, interleaved in rotating order.

    Without `rounds`, as many rounds as fit into `budget` seconds.
    """
    counts = [_calls_per_sample(run, device) for run in runs]
    samples: list[list[float]] = [[] for _ in runs]
    done, begin = 0, time.perf_counter()
    while not _enough(done, time.perf_counter() - begin, budget, rounds):
        for turn in range(len(runs)):
            i = (done + turn) % len(runs)
            samples[i].append(_sample(runs[i], counts[i], device))
        done += 1
    return samples


def _enough(done: int, spent: float, budget: float, rounds: int | None) -> bool:
    if rounds is not None:
        return done >= rounds
    return done >= MOST or (done >= FEWEST and spent >= budget)


def _calls_per_sample(run: Timed, device: torch.device) -> int:
    """Warm up, and count how many calls fill a sample."""
    best, spent = math.inf, 0.0
    while spent < WARM_UP:
        # on the host's clock: compilation at the first call is part of the warm-up
        begin = time.perf_counter()
        once = _sample(run, 1, device)
        best, spent = min(best, once), spent + time.perf_counter() - begin
    return math.ceil(SAMPLE / best)


def _sample(run: Timed, calls: int, device: torch.device) -> float:
    """Seconds per call: by the device's own clock on CUDA, elsewhere by the host's until the device has finished."""
    synchronise(device)
    if device.type == "cuda":
        return _sample_by_events(run, calls, device)
    begin = time.perf_counter()
    for _ in range(calls):
        run()
    synchronise(device)
    return (time.perf_counter() - begin) / calls


def _sample_by_events(run: Timed, calls: int, device: torch.device) -> float:
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.device(device):
        start.record()
        for _ in range(calls):
            run()
        stop.record()
    stop.synchronize()
    # milliseconds
    return float(start.elapsed_time(stop)) / 1e3 / calls
