"""Injects faults into the package that the fuzzer must find: `python tests/fuzz_faults.py FAULT`.

Each runs in a separate process: the fuzzer forks workers, which the threads of a test run would not survive.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from fuzz import attend
from fuzz.case import Case, Mismatch
from fuzz.run import Report, Summary, run
from polyhead.kernels.reference import Reference
from polyhead.kernels.short import Short

SEED = 2024


def found_by(target: object, count: int) -> tuple[list[str], Summary]:
    logged: list[str] = []
    return logged, run(target, SEED, count=count, log=logged.append)


def wrong_output() -> None:
    """One number of every output of a kernel is wrong: the case is minimised and printed as code that shows it."""
    right = Short.__call__

    def wrong(self: object, call: object) -> tuple[Tensor, Tensor | None]:
        out, lse = right(self, call)
        off = torch.zeros_like(out)
        off.view(-1)[-1:] = 1e-2
        return out + off, lse

    Short.__call__ = wrong
    logged, summary = found_by(attend, 40)
    failure = summary.failures["short", "output"]
    # the smallest case has one number
    assert (failure.case.batch, failure.case.heads, failure.case.queries, failure.case.value_dim) == ((), 1, 1, 1)
    assert failure.case.over == () and failure.case.dropout == 0 and not failure.case.requires_grad
    assert "FAILED" in str(summary) and "short: output" in str(summary)
    text = next(text for text in logged if "short: output" in text)
    lines = compile(text[text.index("from fuzz") :], "pasted", "exec")
    try:
        exec(lines, {})
    except Mismatch as error:
        assert "short: output" in str(error)
    else:
        raise AssertionError("the printed lines do not show the fault")
    Short.__call__ = right
    exec(lines, {})


class ScaledGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        return grad * 1.001


def wrong_gradient() -> None:
    """A gradient is wrong by a thousandth."""
    right = Reference.__call__
    Reference.__call__ = lambda self, call: right(self, call._replace(v=ScaledGradient.apply(call.v)))
    _, summary = found_by(attend, 60)
    assert ("reference", "gradient of v") in summary.failures


def error_that_mentions_a_refusal() -> None:
    """An error of a kernel that took the call is a fault, even if its message has the word "refuses"."""

    def fail(self: object, call: object) -> None:
        raise ValueError("the allocator refuses this call")

    # the default kernel of this case is another one
    Reference.__call__ = fail
    try:
        attend.check(attend.Case())
    except ValueError as error:
        assert "allocator" in str(error)
    else:
        raise AssertionError("the error was taken for a refusal")


@dataclasses.dataclass(frozen=True, repr=False)
class Fragile(Case):
    size: int = 0
    more: int = 0


def death() -> None:
    """A process that dies is a fault, and the other cases are checked."""

    def check(case: Fragile) -> Report:
        if case.size > 6:
            os.kill(os.getpid(), signal.SIGKILL)
        return Report(frozenset({"fine"}))

    target = SimpleNamespace(
        __name__="fragile", check=check, draw=lambda drawn: Fragile(0, drawn.randint(0, 9), drawn.randint(0, 9))
    )
    logged, summary = found_by(target, 40)
    assert summary.cases == 40 and summary.compared["fine"] + summary.mismatches == 40
    (failure,) = summary.failures.values()
    assert failure.kind == ("process", "SIGKILL") and failure.case == Fragile(0, 7, 0)
    assert len(logged) == 1 and "died" in logged[0]


FAULTS = {fault.__name__: fault for fault in (wrong_output, wrong_gradient, error_that_mentions_a_refusal, death)}

if __name__ == "__main__":
    FAULTS[sys.argv[1]]()
