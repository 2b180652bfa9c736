"""The loop: draw a case, check it in a process of its own, count, and shrink what fails.

Cases are checked by a worker process, which tells of each. Where it dies, by a signal or a sanitizer, the case that it was
at has failed, and another worker goes on behind it.
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
# A case that takes longer hangs.
PATIENCE = 120.0


class Report(NamedTuple):
    """What a check has compared: the ways to compute it, and the largest error as a share of what is allowed."""

    ways: frozenset[str]
    nearest: float = 0.0


class Failure(NamedTuple):
    """A fault: how it shows, the first case that showed it, made small, and how many cases did."""

    kind: Kind
    text: str
    case: Case
    number: int


class _Told(NamedTuple):
    """What a worker tells of one case."""

    number: int
    report: Report | None
    kind: Kind | None = None
    text: str = ""


@dataclasses.dataclass
class Summary:
    """What was checked, and what failed."""

    target: str
    seed: int
    cases: int = 0
    seconds: float = 0.0
    nearest: float = 0.0
    ways: Counter[str] = dataclasses.field(default_factory=Counter)
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
            f"(seed {self.seed}, {self.seconds:.0f} s, {rate:.1f} per second, largest error {self.nearest:.2f} of what is allowed)",
            _line("compared", self.ways),
        ]
        fields = dict.fromkeys(name for name, _ in self.labels)
        for field in fields:
            lines.append(_line(field, Counter({label: n for (name, label), n in self.labels.items() if name == field})))
        lines += [f"  FAILED {n:,} times: {way}: {what}" for (way, what), n in self.failed.most_common()]
        return "\n".join(lines)


def _line(name: str, counts: Counter[str]) -> str:
    return f"  {name:<12} " + ", ".join(f"{label} {n:,}" for label, n in counts.most_common())


def case_of(target: ModuleType, seed: int, number: int) -> Case:
    """The case of this number: it depends on nothing else."""
    drawn: Case = target.draw(random.Random(f"{seed}/{number}"))
    return drawn


def run(
    target: ModuleType,
    seed: int,
    *,
    minutes: float | None = None,
    count: int | None = None,
    tell: Callable[[str], None] = print,
    progress: bool = False,
) -> Summary:
    """Check cases until the time is up or the number is reached, telling of each new kind of failure, made small."""
    summary = Summary(target.__name__.rpartition(".")[2], seed)
    begun = time.monotonic()
    until = begun + (minutes * 60 if minutes is not None else 1e9)
    shown = begun
    for told in _checked(target, seed, count, until):
        summary.cases += 1
        summary.seconds = time.monotonic() - begun
        _count(summary, target, told, tell)
        if progress and time.monotonic() > shown + 2:
            shown = time.monotonic()
            rate = summary.cases / summary.seconds
            line = f"{summary.target}: {summary.cases:,} configurations, {summary.mismatches:,} mismatches, {rate:.1f} per second"
            print(f"\r{line}   ", end="" if sys.stderr.isatty() else "\n", file=sys.stderr, flush=True)
    return summary


def _count(summary: Summary, target: ModuleType, told: _Told, tell: Callable[[str], None]) -> None:
    case = case_of(target, summary.seed, told.number)
    summary.labels.update(case.labels())
    if told.report is not None:
        summary.ways.update(told.report.ways)
        summary.nearest = max(summary.nearest, told.report.nearest)
        return
    assert told.kind is not None
    summary.failed[told.kind] += 1
    if told.kind in summary.failures:
        return
    small, text = _shrunk(target, case, told.kind)
    text = text or told.text
    summary.failures[told.kind] = failure = Failure(told.kind, text, small, told.number)
    tell(f"\nMISMATCH in configuration {failure.number} of seed {summary.seed}\n{failure.text}\n\n{small.lines()}\n")


def _checked(target: ModuleType, seed: int, count: int | None, until: float) -> Iterator[_Told]:
    """What workers tell, case by case; one that died is told of, too."""
    number = 0
    while (count is None or number < count) and time.monotonic() < until:
        ours, theirs = _fork.Pipe(duplex=False)
        worker = _started(_work, target, seed, number, count, until, theirs)
        theirs.close()
        finished = False
        while not finished:
            told = _received(ours, worker)
            if isinstance(told, str):
                yield _Told(number, None, ("process", told), f"the process died: {told}")
                number += 1
                break
            finished = told is None
            if told is not None:
                yield told
                number = told.number + 1
        worker.join()
        if finished:
            return


def _started(work: Callable[..., None], *about: Any) -> BaseProcess:
    worker = _fork.Process(target=work, args=about, daemon=True)
    with warnings.catch_warnings():
        # Python warns of threads that a fork leaves behind: those of the one who called, which hold nothing that is needed here
        warnings.simplefilter("ignore", DeprecationWarning)
        worker.start()
    return worker


def _received(ours: Connection, worker: BaseProcess) -> Any:
    """The next of what a worker tells, None at its end, or in a word how it died."""
    if not ours.poll(PATIENCE):
        worker.kill()
        return f"it hangs: no answer in {PATIENCE:.0f} s"
    try:
        told = ours.recv()
    except EOFError:
        worker.join()
        code = worker.exitcode or 0
        return signal.Signals(-code).name if code < 0 else f"exit code {code}"
    return told


def _work(target: ModuleType, seed: int, number: int, count: int | None, until: float, pipe: Connection) -> None:
    while (count is None or number < count) and time.monotonic() < until:
        pipe.send(_tried(target, case_of(target, seed, number), number))
        number += 1
    pipe.send(None)


def _tried(target: ModuleType, case: Case, number: int) -> _Told:
    # tensors are small: more threads only wait for each other
    torch.set_num_threads(1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            return _Told(number, target.check(case))
    except Exception as error:
        return _Told(number, None, kind_of(error), f"{type(error).__name__}: {error}")


def _shrunk(target: ModuleType, case: Case, kind: Kind) -> tuple[Case, str]:
    """The smallest case of a failure, and how it fails: tried in one process, or in one each where that is killed."""
    if kind[0] == "process":
        small = shrink(case, lambda candidate: _apart(_tried, target, candidate, 0)[1] == kind[1])
        return small, ""

    def in_turn() -> tuple[Case, str]:
        small = shrink(case, lambda candidate: _tried(target, candidate, 0).kind == kind)
        return small, _tried(target, small, 0).text

    shrunk, died = _apart(in_turn)
    return (case, "") if died is not None else shrunk


def _apart(work: Callable[..., Any], *about: Any) -> tuple[Any, str | None]:
    """What a function gives in a process of its own, or how that died."""
    ours, theirs = _fork.Pipe(duplex=False)
    worker = _started(lambda: theirs.send(work(*about)))
    theirs.close()
    told = _received(ours, worker)
    worker.join()
    return (None, told) if isinstance(told, str) else (told, None)
