"""The loop: draw a case, check it in a separate process, count, and shrink failures.

A worker process checks the cases and sends the result of each. If it dies, by a signal or a sanitizer, the current case has
failed, and a new worker continues with the next one.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import random
import signal
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from types import ModuleType
from typing import Any, NamedTuple

import torch

from fuzz.case import Case, kind_of
from fuzz.shrink import shrink

Kind = tuple[str, str]
_fork = multiprocessing.get_context("fork")
# Seconds after which a case counts as hanging.
PATIENCE = 120.0


class Report(NamedTuple):
    """The result of a check: the implementations compared, and the largest error as a fraction of its bound."""

    compared: frozenset[str]
    max_error: float = 0.0


class Failure(NamedTuple):
    """A fault: its kind and message, the first case that showed it, minimised, and the number of that case."""

    kind: Kind
    text: str
    case: Case
    number: int


class _Result(NamedTuple):
    """The message of a worker about one case."""

    number: int
    report: Report | None
    kind: Kind | None = None
    text: str = ""


@dataclasses.dataclass
class Summary:
    """Statistics of a run, and its failures."""

    target: str
    seed: int
    cases: int = 0
    seconds: float = 0.0
    max_error: float = 0.0
    compared: Counter[str] = dataclasses.field(default_factory=Counter)
    labels: Counter[tuple[str, str]] = dataclasses.field(default_factory=Counter)
    failures: dict[Kind, Failure] = dataclasses.field(default_factory=dict)
    failed: Counter[Kind] = dataclasses.field(default_factory=Counter)

    @property
    def mismatches(self) -> int:
        return self.failed.total()

    def __str__(self) -> str:
        found = f"{self.mismatches:,} mismatches of {len(self.failed)} kinds" if self.failed else "no mismatch"
        rate = self.cases / max(self.seconds, 1e-9)
        lines = [
            f"{self.target}: {self.cases:,} configurations, {found} "
            f"(seed {self.seed}, {self.seconds:.0f} s, {rate:.1f} per second, largest error {self.max_error:.2f} of its bound)",
            _line("compared", self.compared),
        ]
        fields = dict.fromkeys(name for name, _ in self.labels)
        for field in fields:
            lines.append(_line(field, Counter({label: n for (name, label), n in self.labels.items() if name == field})))
        lines += [f"  FAILED {n:,} times: {way}: {what}" for (way, what), n in self.failed.most_common()]
        return "\n".join(lines)


def _line(name: str, counts: Counter[str]) -> str:
    return f"  {name:<12} " + ", ".join(f"{label} {n:,}" for label, n in counts.most_common())


def case_of(target: ModuleType, seed: int, number: int) -> Case:
    """The case with this number; it depends only on seed and number."""
    drawn: Case = target.draw(random.Random(f"{seed}/{number}"))
    return drawn


def run(
    target: ModuleType,
    seed: int,
    *,
    minutes: float | None = None,
    count: int | None = None,
    log: Callable[[str], None] = print,
    progress: bool = False,
) -> Summary:
    """Check cases until the time is up or the count is reached, and log each new kind of failure, minimised."""
    summary = Summary(target.__name__.rpartition(".")[2], seed)
    begun = time.monotonic()
    until = begun + (minutes * 60 if minutes is not None else 1e9)
    shown = begun
    for result in _checked(target, seed, count, until):
        summary.cases += 1
        summary.seconds = time.monotonic() - begun
        _count(summary, target, result, log)
        if progress and time.monotonic() > shown + 2:
            shown = time.monotonic()
            rate = summary.cases / summary.seconds
            line = f"{summary.target}: {summary.cases:,} configurations, {summary.mismatches:,} mismatches, {rate:.1f} per second"
            print(f"\r{line}   ", end="" if sys.stderr.isatty() else "\n", file=sys.stderr, flush=True)
    return summary


def _count(summary: Summary, target: ModuleType, result: _Result, log: Callable[[str], None]) -> None:
    case = case_of(target, summary.seed, result.number)
    summary.labels.update(case.labels())
    if result.report is not None:
        summary.compared.update(result.report.compared)
        summary.max_error = max(summary.max_error, result.report.max_error)
        return
    assert result.kind is not None
    summary.failed[result.kind] += 1
    if result.kind in summary.failures:
        return
    small, text = _shrunk(target, case, result.kind)
    text = text or result.text
    summary.failures[result.kind] = failure = Failure(result.kind, text, small, result.number)
    log(f"\nMISMATCH in configuration {failure.number} of seed {summary.seed}\n{failure.text}\n\n{small.lines()}\n")


def _checked(target: ModuleType, seed: int, count: int | None, until: float) -> Iterator[_Result]:
    """The results of the workers, case by case; a worker that died gives a failure."""
    number = 0
    while (count is None or number < count) and time.monotonic() < until:
        ours, theirs = _fork.Pipe(duplex=False)
        worker = _started(_work, target, seed, number, count, until, theirs)
        theirs.close()
        finished = False
        while not finished:
            result = _received(ours, worker)
            if isinstance(result, str):
                yield _Result(number, None, ("process", result), f"the process died: {result}")
                number += 1
                break
            finished = result is None
            if result is not None:
                yield result
                number = result.number + 1
        worker.join()
        if finished:
            return


def _started(work: Callable[..., None], *arguments: Any) -> BaseProcess:
    worker = _fork.Process(target=work, args=arguments, daemon=True)
    with warnings.catch_warnings():
        # Python warns about threads of the parent, which a fork does not copy; they hold nothing that is needed here
        warnings.simplefilter("ignore", DeprecationWarning)
        worker.start()
    return worker


def _received(ours: Connection, worker: BaseProcess) -> Any:
    """The next message of a worker, None at its end, or a string that says how it died."""
    if not ours.poll(PATIENCE):
        worker.kill()
        return f"hangs: no answer in {PATIENCE:.0f} s"
    try:
        result = ours.recv()
    except EOFError:
        worker.join()
        code = worker.exitcode or 0
        return signal.Signals(-code).name if code < 0 else f"exit code {code}"
    return result


def _work(target: ModuleType, seed: int, number: int, count: int | None, until: float, pipe: Connection) -> None:
    while (count is None or number < count) and time.monotonic() < until:
        pipe.send(_tried(target, case_of(target, seed, number), number))
        number += 1
    pipe.send(None)


def _tried(target: ModuleType, case: Case, number: int) -> _Result:
    # tensors are small: more threads would only wait for each other
    torch.set_num_threads(1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            return _Result(number, target.check(case))
    except Exception as error:
        return _Result(number, None, kind_of(error), f"{type(error).__name__}: {error}")


def _shrunk(target: ModuleType, case: Case, kind: Kind) -> tuple[Case, str]:
    """The smallest case of a failure, and its message. Candidates run in one process; in one each if the failure kills it."""
    if kind[0] == "process":
        small = shrink(case, lambda candidate: _in_process(_tried, target, candidate, 0)[1] == kind[1])
        return small, ""

    def in_one_process() -> tuple[Case, str]:
        small = shrink(case, lambda candidate: _tried(target, candidate, 0).kind == kind)
        return small, _tried(target, small, 0).text

    shrunk, died = _in_process(in_one_process)
    return (case, "") if died is not None else shrunk


def _in_process(work: Callable[..., Any], *arguments: Any) -> tuple[Any, str | None]:
    """The result of a function in a separate process, or how that process died."""
    ours, theirs = _fork.Pipe(duplex=False)
    worker = _started(lambda: theirs.send(work(*arguments)))
    theirs.close()
    result = _received(ours, worker)
    worker.join()
    return (None, result) if isinstance(result, str) else (result, None)
