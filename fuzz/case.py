"""A configuration as plain data, and the kinds of its failures."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import Any


@dataclasses.dataclass(frozen=True)
class Case:
    """The base of all configurations: fields of plain values, whose defaults are the simplest ones.

    A tuple that begins with a string is a choice with its arguments, such as `("window", 3, 0)`. Everything random in a case
    is derived from `seed`, so that a case can be printed, pasted and run.
    """

    seed: int = 0

    def __repr__(self) -> str:
        changed = (field for field in dataclasses.fields(self) if getattr(self, field.name) != field.default)
        return f"Case({', '.join(f'{field.name}={getattr(self, field.name)!r}' for field in changed)})"

    def lines(self) -> str:
        """The case as code that can be pasted into a Python started in this repository."""
        return f"from {type(self).__module__} import Case, check\n\ncheck({self!r})"

    def labels(self) -> Iterator[tuple[str, str]]:
        """The options of this case as (field, value), for statistics: its choices, and whether axes are empty."""
        for field in dataclasses.fields(self):
            if field.name != "seed":
                yield from ((field.name, label) for label in _labels(getattr(self, field.name), field.default))


def _labels(value: Any, default: Any) -> Iterator[str]:
    if default is None:
        yield "none" if value is None else "some"
    elif isinstance(value, (str, bool)):
        yield str(value)
    elif isinstance(value, frozenset):
        yield from map(str, value)
    elif isinstance(value, tuple) and value and isinstance(value[0], str):
        yield value[0]
    elif isinstance(value, tuple) and value and isinstance(value[0], tuple):
        yield from (part[0] for part in value)
        yield f"{len(value)} together"
    elif isinstance(value, tuple):
        yield f"{len(value)} axes" + (", one empty" if 0 in value else "")
    elif isinstance(value, (int, float)) and (not value or isinstance(value, float)):
        yield "some" if value else "0"


class Mismatch(AssertionError):
    """The package and the oracle differ: in which implementation, in which result, and how."""

    def __init__(self, way: str, what: str, how: str) -> None:
        super().__init__(f"{way}: {what}: {how}")
        self.kind = (way, what)


def kind_of(error: BaseException) -> tuple[str, str]:
    """A key that is equal for two failures of the same fault."""
    if isinstance(error, Mismatch):
        return error.kind
    # numbers differ from case to case
    words = re.sub(r"[\d.]+|\(.*?\)|\[.*?\]", "…", str(error)).split()
    return type(error).__name__, " ".join(words[:8])
