"""Minimises a failing case as long as it fails in the same way."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from fuzz.case import Case

AnyCase = TypeVar("AnyCase", bound=Case)


def shrink(case: AnyCase, fails: Callable[[AnyCase], bool], seconds: float = 60.0) -> AnyCase:
    """The smallest case found by changing one field at a time, within a time limit.

    Args:
        case: a failing case.
        fails: whether a case fails in the same way. Cases that the package refuses do not.
        seconds: the time limit.
    """
    until = time.monotonic() + seconds
    changed = True
    while changed and time.monotonic() < until:
        changed = False
        for field in dataclasses.fields(case):
            # another seed is not simpler
            smaller = field.name != "seed"
            while smaller and time.monotonic() < until:
                candidates = _simpler(getattr(case, field.name), field.default)
                found = (dataclasses.replace(case, **{field.name: value}) for value in candidates)
                simpler = next((candidate for candidate in found if fails(candidate)), None)
                smaller = simpler is not None
                if simpler is not None:
                    case, changed = simpler, True
    return case


def _simpler(value: Any, default: Any) -> Iterator[Any]:
    """Values to try instead, the simplest first; each is simpler, so that shrinking ends."""
    if value == default:
        return
    yield default
    if isinstance(value, bool) or isinstance(default, str):
        return
    if isinstance(value, int):
        yield from _smaller(value)
    elif isinstance(value, float):
        yield from (rounded for rounded in (float(round(value)), round(value, 1)) if rounded != value)
    elif isinstance(value, frozenset):
        yield from (value - {one} for one in sorted(value))
    elif isinstance(value, tuple):
        yield from _simpler_tuple(value)


def _smaller(value: int) -> Iterator[int]:
    if abs(value) > 3:
        yield int(value / 2)
    if value:
        yield value - 1 if value > 0 else value + 1


def _is_choice(value: Any) -> bool:
    return isinstance(value, tuple) and bool(value) and isinstance(value[0], str)


def _simpler_tuple(value: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    if not _is_choice(value):
        yield from (value[:place] + value[place + 1 :] for place in range(len(value)))
    # one operand instead of the operator
    yield from (part for part in value[1:] if _is_choice(value) and _is_choice(part))
    for place, part in enumerate(value):
        if isinstance(part, tuple):
            parts: Iterator[Any] = _simpler_tuple(part)
        elif isinstance(part, bool):
            parts = iter((False,) if part else ())
        elif isinstance(part, int):
            parts = _smaller(part)
        elif isinstance(part, float):
            parts = (rounded for rounded in (float(round(part)), round(part, 1)) if rounded != part)
        else:
            continue
        yield from ((*value[:place], new, *value[place + 1 :]) for new in parts)
