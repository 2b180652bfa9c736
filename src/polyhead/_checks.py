"""What a public argument must be: integers, numbers and tensors, checked in one place and in the same words."""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

# Sizes, counts and distances: what 32 bits hold, so that sums and products of two of them fit in 64.
LARGEST = 2**31 - 1
# Heads of an attention: a convolution has one per tap.
HEADS = 2**20
# Layers of a model.
LAYERS = 2**16
# What a tensor of integers holds.
LARGEST_INT64 = 2**63 - 1
# Numbers in one tensor: as many bytes can still be counted.
_NUMEL = 2**56
# Characters of a value that an error shows.
_SHOWN = 60


class WrongType(TypeError, ValueError):
    """An argument of the wrong type. It is a `ValueError` too, like the errors for all other arguments."""


def check_integer(name: str, value: Any, minimum: int = 1, maximum: int = LARGEST, *, hint: str = "") -> int:
    """An integer in a range: Python's, NumPy's, a tensor's single element, or a size that torch traces as it compiles.

    Args:
        name: what the error calls the argument, with its owner where that is not clear: `"Window: left"`.
        hint: what to do instead, said after the rule.

    Raises:
        WrongType: for anything else, booleans and floats included.
        ValueError: for an integer outside of the range.
    """
    # an index of a size that is traced would fix it; and what torch traces is a tensor's, so in range
    if isinstance(value, torch.SymInt):
        return value  # type: ignore[return-value]
    number = value if type(value) is int else _index(value)
    if number is None or not minimum <= number <= maximum:
        kind = WrongType if number is None else ValueError
        raise kind(f"{name} must be an integer in [{minimum}, {maximum}], got {shown(value)}{_also(hint)}")
    return number


def check_integers(name: str, values: Any, minimum: int = 1, maximum: int = LARGEST, *, hint: str = "") -> list[int]:
    """A list of such integers, from whatever can be walked through: a list, a range, a tensor of one axis."""
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable) or getattr(values, "shape", (0,)) == ():
        raise WrongType(
            f"{name} must be a list of integers in [{minimum}, {maximum}], got {shown(values)}{_also(hint)}"
        )
    return [check_integer(f"{name}[{place}]", n, minimum, maximum, hint=hint) for place, n in enumerate(values)]


def is_integer(value: object) -> bool:
    """Whether `check_integer` takes this for an integer."""
    return isinstance(value, torch.SymInt) or type(value) is int or _index(value) is not None


def _index(value: Any) -> int | None:
    if isinstance(value, bool) or (isinstance(value, Tensor) and value.dtype == torch.bool):
        return None
    if isinstance(value, int):
        return value
    try:
        return operator.index(value)
    except TypeError:
        return None


def check_number(
    name: str, value: Any, minimum: float, maximum: float = math.inf, ends: str = "[]", *, hint: str = ""
) -> float:
    """A number in an interval, which `ends` says where it is open: `"[)"` is for dropout, from 0 to less than 1.

    NaN is in no interval, and infinity only in one that is closed there.
    """
    if isinstance(value, (torch.SymFloat, torch.SymInt)):
        return value  # type: ignore[return-value]
    number = value if isinstance(value, float) else _real(value)
    at_end = (number == minimum and ends[0] == "[") or (number == maximum and ends[1] == "]")
    if number is None or not (minimum < number < maximum or at_end):
        kind = WrongType if number is None else ValueError
        rule = f"a number in {ends[0]}{minimum:g}, {maximum:g}{ends[1]}"
        raise kind(f"{name} must be {rule}, got {shown(value)}{_also(hint)}")
    return number


def _real(value: Any) -> float | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        # no float is larger than this
        return float(value) if abs(value) < 2**1023 else math.inf if value > 0 else -math.inf
    if isinstance(value, Tensor):
        # what is learned would lose its gradient
        real = value.numel() == 1 and not (value.is_complex() or value.dtype == torch.bool or value.requires_grad)
        return float(value) if real else None
    return float(value) if isinstance(value, numbers.Real) else None


def check_tensor(name: str, value: object, axes: str, *, hint: str = "") -> Tensor:
    """A tensor that is neither sparse nor nested; `axes` says which ones it should have, such as `"(..., items, 64)"`."""
    if not isinstance(value, Tensor):
        raise WrongType(f"{name} must be a tensor {axes}, got {kind_of(value)}{_also(hint)}")
    if value.layout != torch.strided or value.is_nested:
        what = "nested" if value.is_nested else f"of layout {value.layout}"
        raise ValueError(f"{name} must be a dense tensor {axes}, got one that is {what}{_also(hint)}")
    return value


def check_numel(name: str, shape: Sequence[int], *, hint: str = "") -> None:
    """Raise where a tensor of this shape would have more numbers than torch can count the bytes of."""
    if math.prod(shape) > _NUMEL:
        raise ValueError(f"{name} must have at most {_NUMEL} numbers, got shape {tuple(shape)}{_also(hint)}")


def as_tensor(name: str, value: Any, what: str) -> Tensor:
    """What was given as a tensor, a list or an array, as a dense tensor where it was."""
    if isinstance(value, Tensor):
        return check_tensor(name, value, what)
    try:
        return torch.as_tensor(value)
    # of strings, of lists of different lengths, of integers that fit in no tensor
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise WrongType(f"{name} must be a tensor {what}, got {shown(value)}") from None


def _also(hint: str) -> str:
    return f"; {hint}" if hint else ""


def shown(value: object) -> str:
    """A value as an error shows it: on one line, and short."""
    # of a tensor or an array, what it is like; a single number is written out
    if getattr(value, "shape", ()):
        return kind_of(value)
    try:
        written = " ".join(repr(value).split())
    # Python writes out no integer of thousands of digits, and an object's own way to write itself may fail
    except Exception:
        return kind_of(value)
    return written if len(written) <= _SHOWN else f"{written[: _SHOWN - 1]}…"


def kind_of(value: object) -> str:
    """What a value is, where it is not of the type that was asked for."""
    if value is None or isinstance(value, type):
        return "None" if value is None else f"the class {value.__name__}"
    name = type(value).__name__
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    return name if shape is None or dtype is None else f"{name} of {dtype} and shape {tuple(shape)}"
