"""Peak memory of one call: on the CPU in a fresh process, `python -m benchmarks.memory CASE SIDE`."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F

from benchmarks.case import Case, CaseError, Forward, Sides
from benchmarks.placement import here
from polyhead import GATv2, Graph, Window, attend

_ROOT = Path(__file__).resolve().parent.parent
_STATUS = Path("/proc/self/status")
# glibc returns larger blocks to the system as soon as they are freed, so that the peak is the memory in use
_ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(256 * 1024)}


def peak_memory(case: Case, sides: Sides, side: Literal["ours", "peer"]) -> float | None:
    """The peak of one side, in megabytes above the state after set-up; None where the device does not tell."""
    if here().type == "cpu":
        return peak_in_child(case, side)
    return peak_mb_of_cuda((sides.ours if side == "ours" else sides.peer).run) if here().type == "cuda" else None


def peak_mb_of_cuda(run: Forward) -> float:
    """By how much one call raises the memory that tensors have on this GPU, in megabytes."""
    torch.cuda.synchronize(here())
    torch.cuda.reset_peak_memory_stats(here())
    before = torch.cuda.memory_allocated(here())
    run()
    torch.cuda.synchronize(here())
    return (torch.cuda.max_memory_allocated(here()) - before) / 2**20


def peak_in_child(case: Case, side: Literal["ours", "peer"]) -> float:
    """The peak of one side, in megabytes above the state after set-up."""
    command = [sys.executable, "-m", "benchmarks.memory", case.name, side]
    child = subprocess.run(command, cwd=_ROOT, env={**os.environ, **_ALLOCATOR}, capture_output=True, text=True)
    if child.returncode:
        raise CaseError(f"the process that measures the memory of {side} failed:\n{child.stderr.strip()}")
    return float(child.stdout)


def peak_mb(run: Forward) -> float:
    """By how much one call raises the memory of this process, in megabytes."""
    gc.collect()
    _give_back()
    # 5: reset the peak. If this is not permitted, only memory above the old peak is measured.
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    before = _peak_kb()
    run()
    return (_peak_kb() - before) / 1024


def _give_back() -> None:
    """Return freed memory to the system, so that the call cannot reuse memory of the set-up unnoticed."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def _peak_kb() -> int:
    if _STATUS.exists():
        for line in _STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak // 1024 if sys.platform == "darwin" else peak


def _warm_up() -> None:
    """Start threads and load libraries once, so that they do not count as memory of a call."""
    x = torch.randn(1, 2, 256, 64, requires_grad=True)
    F.scaled_dot_product_attention(F.linear(x, x[0, 0, :64]), x, x).square().mean().backward()
    attend(x, x, x, over=Window(1)).square().mean().backward()
    loops = Graph(torch.arange(256).expand(2, -1))
    attend(x, x, x, over=loops, score=GATv2(2, 64)).square().mean().backward()


def _main(name: str, side: str) -> None:
    # imported only in the child, because the tables import this file
    from benchmarks.measure import use_two_threads
    from benchmarks.tables import TABLES

    use_two_threads()
    _warm_up()
    (case,) = (case for cases in TABLES.values() for case in cases if case.name == name)
    sides = case.setup()
    print(peak_mb((sides.ours if side == "ours" else sides.peer).run))


if __name__ == "__main__":
    _main(*sys.argv[1:])
