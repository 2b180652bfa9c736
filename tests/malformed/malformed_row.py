"""A row of the table of malformed inputs, and functions that make similar rows."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

LARGEST, HEADS = 2**31 - 1, 2**20
NAN, INF = float("nan"), float("inf")


class Row(NamedTuple):
    """A call that must fail: its public entry, the case, and a pattern of the message, which names the argument."""

    entry: str
    case: str
    call: Callable[[], object]
    words: str
    error: type[BaseException] = ValueError

    @property
    def name(self) -> str:
        return f"{self.entry}: {self.case}"


def integers(
    entry: str, argument: str, call: Callable[[Any], object], low: int = 1, high: int = LARGEST, name: str | None = None
) -> list[Row]:
    """Rows of an integer argument: out of range on both sides, and not an integer. `name` is its name in the error."""
    rule = re.escape(f"{name or argument} must be an integer in [{low}, {high}], got ")
    bad: dict[Any, Any] = {low - 1: ValueError, high + 1: ValueError, 2.5: TypeError, "3": TypeError}
    rows = [
        Row(entry, f"{argument}={x!r}", lambda x=x: call(x), f"^{rule}{re.escape(repr(x))}", e) for x, e in bad.items()
    ]
    return [*rows, Row(entry, f"{argument}=True", lambda: call(True), f"^{rule}True", TypeError)]


def numbers(
    entry: str, argument: str, call: Callable[[Any], object], interval: str, *bad: Any, name: str | None = None
) -> list[Row]:
    """Rows of an argument that must be a number in an interval."""
    rule = re.escape(f"{name or argument} must be a number in {interval}, got ")
    kind = lambda x: ValueError if isinstance(x, (int, float)) and not isinstance(x, bool) else TypeError
    return [Row(entry, f"{argument}={x!r}", lambda x=x: call(x), f"^{rule}", kind(x)) for x in bad]


def tensors(entry: str, argument: str, call: Callable[[Any], object], *, sparse: bool = True) -> list[Row]:
    """Rows of a tensor argument: other types, and a sparse tensor."""
    bad = {"None": None, "a list": [[1.0, 2.0]], "an array": np.ones((2, 3)), "a string": "abc"}
    rows = [
        Row(
            entry,
            f"{argument} is {what}",
            lambda x=x: call(x),
            f"^{re.escape(argument)} must be a tensor .*got ",
            TypeError,
        )
        for what, x in bad.items()
    ]
    if sparse:
        words = f"^{re.escape(argument)} must be a dense tensor .*sparse_coo"
        rows.append(Row(entry, f"{argument} is sparse", lambda: call(torch.eye(3).to_sparse()), words))
    return rows
