"""`polyhead doctor --check`: run the check of a device, print its table and write its report."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from polyhead import _files
from polyhead.cli.doctor import DEFAULT_REPORT, print_facts
from polyhead.device_check.cases import list_cases
from polyhead.device_check.devices import describe_device, find_device, full_fp32_precision, supported_dtypes
from polyhead.device_check.report import Report
from polyhead.device_check.run import CaseResult, run_cases
from polyhead.device_check.times import Times, list_timed_cases, run_timed_cases
from polyhead.inspection.progress import Progress

_RESULT_COLUMNS = ("case", "kernel", "cases", "output", "gradients", "of tolerance", "")
_TIME_COLUMNS = ("time of", "dtype", "kernel", "ours ms", "peer", "peer ms", "peer / ours")
_TEXT_COLUMNS = ("case", "kernel", "time of", "dtype", "peer", "")
_COLUMN_GAP = 2
# the code of a shell for a command that Ctrl-C ended
INTERRUPTED = 130


def run_check(arguments: argparse.Namespace, facts: dict[str, str]) -> int:
    """Check the kernels on a device; 0 if every comparison passed, else 1. Usage errors end the process with code 2.

    Ctrl-C ends the check early: what was compared by then is printed and written, and the code is 130.
    """
    out = arguments.out or Path(DEFAULT_REPORT)
    try:
        device = find_device("cpu" if arguments.device is None else arguments.device)
        # fail before the work if the report cannot be written
        _files.resolve_writable_path(out, "--out")
    except (OSError, ValueError) as error:
        arguments.usage_error(str(error))
    dtypes = supported_dtypes(device)
    cases, timed = list_cases(dtypes, arguments.only, device), list_timed_cases(device, arguments.only)
    if not cases and not timed:
        arguments.usage_error(
            f"--only must be a part of the name of a case, got {arguments.only!r}; names are such as 'window: plain (float32)', "
            "'graph hub: GATv2' and 'time: dense'"
        )
    with full_fp32_precision() as tf32:
        facts = {
            **facts,
            **describe_device(device),
            "fp32 products": f"in fp32: TF32 is off for the check (torch's setting: {tf32})",
        }
    print_facts(facts)
    slow = (
        "" if device.type == "cpu" else "; the first run compiles a kernel per kind of attention, which takes minutes"
    )
    print(f"\nChecking {len(cases)} cases on {device}{slow}", file=sys.stderr, flush=True)
    begin = time.perf_counter()
    results: list[CaseResult] = []
    times: list[Times] = []
    interrupted = False
    try:
        run_cases(cases, device, _progress("Checking"), results)
        run_timed_cases(timed, device, dtypes, _progress("Timing"), times)
    except KeyboardInterrupt:
        interrupted = True
        print(f"\nInterrupted after {len(results)} of {len(cases)} cases", file=sys.stderr, flush=True)
        if not results and not times:
            return INTERRUPTED
    print()
    _print_results(results)
    _print_times(times)
    report = Report(device, facts, results, times, interrupted=interrupted)
    _files.write_atomically(out, json.dumps(report.as_json(), indent=1).encode(), "--out")
    passed = f"{report.compared - report.failed} of {report.compared} comparisons passed"
    print(f"\n{passed} on {device} in {time.perf_counter() - begin:.0f} s.")
    print(f"Report written to {out}: please attach it to a report of a bug, or of a device that passed.")
    return INTERRUPTED if interrupted else 0 if report.passed else 1


def _progress(label: str) -> Progress:
    """Progress on stderr: a bar where rich is installed, else a line now and then."""

    def count(items: Sequence[Any]) -> Iterable[Any]:
        for number, item in enumerate(items):
            if number % max(1, len(items) // 10) == 0:
                print(f"{label}: {number} of {len(items)}", file=sys.stderr, flush=True)
            yield item

    if importlib.util.find_spec("rich") is None:
        return count
    from rich.console import Console
    from rich.progress import track

    return lambda items: track(items, f"{label} …", console=Console(stderr=True), transient=True)


def _print_results(results: Sequence[CaseResult]) -> None:
    """One row per neighbourhood or module and kernel, over all its cases; failed cases in full."""
    rows: dict[tuple[str, str], list[tuple[CaseResult, Any]]] = {}
    for result in results:
        for kernel in result.kernels:
            rows.setdefault((result.case.partition(":")[0], kernel.kernel), []).append((result, kernel))
    if rows:
        _print_table(_RESULT_COLUMNS, [(*subject, *_summary_cells(its)) for subject, its in rows.items()])
        print("\nDifferences are the largest in fp32, relative to the largest number of each output or gradient;")
        print("of tolerance: the largest in any dtype, divided by the tolerance of that dtype.")
    for result in results:
        if result.error is not None:
            print(f"\nFAILED  {result.case} ({result.dtype})\n{result.error.rstrip()}")
        for kernel in result.kernels:
            if not kernel.passed:
                reason = kernel.error or (
                    f"the {kernel.furthest} differs by {max(kernel.output or 0, kernel.gradients or 0):.1e} of its largest number, "
                    f"more than {result.tolerance:.0e}"
                )
                print(f"\nFAILED  {result.case} ({result.dtype}), {kernel.kernel}: {reason.rstrip()}")


def _summary_cells(its: Sequence[tuple[CaseResult, Any]]) -> tuple[str, ...]:
    exact = [kernel for result, kernel in its if result.dtype == "float32"]
    failed = sum(not kernel.passed for _, kernel in its)
    used = [
        max(kernel.output, kernel.gradients or 0.0) / result.tolerance
        for result, kernel in its
        if kernel.output is not None
    ]
    return (
        f"{len(its)}",
        _largest([kernel.output for kernel in exact]),
        _largest([kernel.gradients for kernel in exact]),
        f"{max(used):.1%}" if used else "–",
        f"{failed} FAILED" if failed else "passed",
    )


def _largest(differences: Sequence[float | None]) -> str:
    known = [x for x in differences if x is not None]
    return f"{max(known):.1e}" if known else "–"


def _print_times(times: Sequence[Times]) -> None:
    if not times:
        return
    print()
    number = lambda x: "–" if x is None else f"{x:.3g}" if x < 100 else f"{x:,.0f}"
    _print_table(
        _TIME_COLUMNS,
        [
            (t.case, t.dtype, t.kernel or "–", number(t.ours_ms), t.peer, number(t.peer_ms), number(t.ratio))
            for t in times
        ],
    )
    for t in times:
        if t.error is not None:
            print(f"\nNOT TIMED  {t.case}: {t.error.rstrip()}")


def _print_table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table by rich where it is installed; numbers are aligned to the right."""
    left = [title in _TEXT_COLUMNS for title in titles]
    if importlib.util.find_spec("rich") is None:
        widths = [max(map(len, column)) for column in zip(titles, *rows, strict=True)]
        for row in (titles, *rows):
            cells = zip(row, widths, left, strict=True)
            print((" " * _COLUMN_GAP).join(x.ljust(n) if text else x.rjust(n) for x, n, text in cells).rstrip())
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, _COLUMN_GAP, 0, 0))
    for title, text in zip(titles, left, strict=True):
        table.add_column(title, justify="left" if text else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row, style="bold red" if "FAILED" in row[-1] else None)
    # at least its own width: a narrow terminal breaks lines, and no number or verdict is cut off
    console = Console(markup=False, highlight=False, width=200)
    console.print(table, width=console.measure(table).maximum)
