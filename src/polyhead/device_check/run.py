"""Runs the cases of a check one by one, and compares what each kernel gives with the reference."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from polyhead.device_check.cases import Case, Results
from polyhead.device_check.devices import full_fp32_precision, synchronise
from polyhead.inspection.progress import Progress, wrap_with_progress

# The largest difference that passes, relative to the largest number of a result: twice and more what rounding makes on the CPU.
TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 8e-3, torch.bfloat16: 6e-2}


class KernelResult(NamedTuple):
    """How one kernel did in a case. Differences are the largest, relative to the largest number of a result.

    `error` says why there is no difference: what the kernel raised, or results that cannot be compared.
    """

    kernel: str
    output: float | None
    gradients: float | None
    furthest: str | None
    """The name of the result that differs most."""
    passed: bool
    error: str | None = None


class CaseResult(NamedTuple):
    """How the kernels did in a case. The first is the one that a call uses; `refused` has the reasons of the others."""

    case: str
    dtype: str
    tolerance: float
    kernels: list[KernelResult]
    refused: dict[str, str]
    error: str | None = None
    """What was raised before any kernel ran."""

    @property
    def passed(self) -> bool:
        return self.error is None and bool(self.kernels) and all(result.passed for result in self.kernels)


def run_cases(
    cases: Sequence[Case],
    device: torch.device,
    progress: Progress | None = None,
    results: list[CaseResult] | None = None,
) -> list[CaseResult]:
    """Run every case; one that raises is recorded with its error, and the others go on. The state of torch's generator stays.

    Results are appended to `results` one by one, so that an interruption loses none.
    """
    results = [] if results is None else results
    with torch.random.fork_rng(devices=[]), full_fp32_precision():
        for case in wrap_with_progress(cases, progress):
            results.append(run_case(case, device))
    return results


def run_case(case: Case, device: torch.device) -> CaseResult:
    """Run the kernels of a case that do not refuse it."""
    name, dtype, tolerance = case.name, str(case.dtype)[6:], TOLERANCES[case.dtype]
    try:
        prepared = case.prepare(device)
    except Exception:
        return CaseResult(name, dtype, tolerance, [], {}, traceback.format_exc())
    results = [_run_kernel(kernel, run, prepared.expected, tolerance, device) for kernel, run in prepared.runs.items()]
    return CaseResult(name, dtype, tolerance, results, prepared.refused)


def _run_kernel(
    kernel: str, run: Callable[[], Results], expected: Results, tolerance: float, device: torch.device
) -> KernelResult:
    try:
        got = run()
        synchronise(device)
        differences = {name: _relative_difference(name, got[name], x) for name, x in expected.items()}
    except Exception:
        return KernelResult(kernel, None, None, None, False, traceback.format_exc())
    of_gradients = {name: x for name, x in differences.items() if name.startswith("gradient")}
    of_outputs = {name: x for name, x in differences.items() if name not in of_gradients}
    furthest = max(differences, key=lambda name: differences[name])
    return KernelResult(
        kernel,
        max(of_outputs.values()),
        max(of_gradients.values(), default=None),
        furthest,
        differences[furthest] <= tolerance,
    )


def _relative_difference(name: str, got: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to the largest number that is expected."""
    if got.shape != expected.shape:
        raise ValueError(f"the {name} must have shape {tuple(expected.shape)}, got {tuple(got.shape)}")
    if not expected.numel():
        return 0.0
    got, expected = got.detach().cpu().double(), expected.detach().double()
    if not got.isfinite().all():
        raise ValueError(
            f"the {name} must be finite, got {int((~got.isfinite()).sum())} of {got.numel()} numbers that are not"
        )
    return float((got - expected).abs().max()) / (float(expected.abs().max()) or 1.0)
