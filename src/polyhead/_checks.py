"""Argument checks: public integers, numbers and tensors, with uniform error messages."""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

# Sizes, counts and distances: 32 bits, so that sums and products of two of them fit in 64.
LARGEST_INT32 = 2**31 - 1
# Heads per attention: a convolution has one per tap.
MAX_HEADS = 2**20
# Layers of a model.
MAX_LAYERS = 2**16
# The largest element of an integer tensor.
LARGEST_INT64 = 2**63 - 1
# Elements of one tensor: their bytes fit in 64 bits.
_MAX_NUMEL = 2**56
# Characters of a value in an error message.
_MAX_REPR_CHARACTERS = 60


class WrongType(TypeError, ValueError):
    """An argument of the wrong type: a `TypeError`, and a `ValueError` like all other argument errors."""


def check_integer(name: str, value: Any, minimum: int = 1, maximum: int = LARGEST_INT32, *, hint: str = "") -> int:
    """An integer in a range: of Python or NumPy, the single element of a tensor, or a symbolic size under torch.compile.

    Args:
        name: the argument in the error message, with its owner if that is unclear: `"Window: left"`.
        hint: the remedy, appended to the message.

    Raises:
        WrongType: for other types, booleans and floats included.
        ValueError: for an integer outside the range.
    """
    # converting a symbolic size would specialise it; it is the size of a tensor, so in range
    if isinstance(value, torch.SymInt):
        return value  # type: ignore[return-value]
    number = value if type(value) is int else _integer_or_none(value)
    if number is None or not minimum <= number <= maximum:
        kind = WrongType if number is None else ValueError
        raise kind(f"{name} must be an integer in [{minimum}, {maximum}], got {short_repr(value)}{_hint_suffix(hint)}")
    return number


def check_integers(
    name: str, values: Any, minimum: int = 1, maximum: int = LARGEST_INT32, *, hint: str = ""
) -> list[int]:
    """Return a list of integers, and raise unless all are in a range; from any iterable: a list, a range, a tensor with one axis."""
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable) or getattr(values, "shape", (0,)) == ():
        raise WrongType(
            f"{name} must be a list of integers in [{minimum}, {maximum}], got {short_repr(values)}{_hint_suffix(hint)}"
        )
    return [check_integer(f"{name}[{index}]", n, minimum, maximum, hint=hint) for index, n in enumerate(values)]


def is_integer(value: object) -> bool:
    """Whether `check_integer` accepts the type of a value."""
    return isinstance(value, torch.SymInt) or type(value) is int or _integer_or_none(value) is not None


def _integer_or_none(value: Any) -> int | None:
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
    """Return a number, and raise unless it is in an interval; `ends` says which ends are open: `"[)"` for dropout, in [0, 1).

    NaN is always rejected, and infinity unless the interval is closed there.
    """
    if isinstance(value, (torch.SymFloat, torch.SymInt)):
        return value  # type: ignore[return-value]
    number = value if isinstance(value, float) else _float_or_none(value)
    at_end = (number == minimum and ends[0] == "[") or (number == maximum and ends[1] == "]")
    if number is None or not (minimum < number < maximum or at_end):
        kind = WrongType if number is None else ValueError
        rule = f"a number in {ends[0]}{minimum:g}, {maximum:g}{ends[1]}"
        raise kind(f"{name} must be {rule}, got {short_repr(value)}{_hint_suffix(hint)}")
    return number


def _float_or_none(value: Any) -> float | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        # beyond the range of floats
        return float(value) if abs(value) < 2**1023 else math.inf if value > 0 else -math.inf
    if isinstance(value, Tensor):
        # a parameter would lose its gradient
        real = value.numel() == 1 and not (value.is_complex() or value.dtype == torch.bool or value.requires_grad)
        return float(value) if real else None
    return float(value) if isinstance(value, numbers.Real) else None


def check_dense_tensor(name: str, value: object, described_as: str, *, hint: str = "") -> Tensor:
    """Raise unless `value` is a tensor that is neither sparse nor nested, and return it.

    The shape is not checked: `described_as`, such as `"(..., items, 64)"`, is only quoted in the message.
    """
    if not isinstance(value, Tensor):
        raise WrongType(f"{name} must be a tensor {described_as}, got {describe_type(value)}{_hint_suffix(hint)}")
    if value.layout != torch.strided or value.is_nested:
        layout = "a nested tensor" if value.is_nested else f"layout {value.layout}"
        raise ValueError(f"{name} must be a dense tensor {described_as}, got {layout}{_hint_suffix(hint)}")
    return value


def check_numel(name: str, shape: Sequence[int], *, hint: str = "") -> None:
    """Raise if a tensor of this shape is too large: its size in bytes would overflow int64."""
    if math.prod(shape) > _MAX_NUMEL:
        raise ValueError(f"{name} must have at most {_MAX_NUMEL} numbers, got shape {tuple(shape)}{_hint_suffix(hint)}")


def as_tensor(name: str, value: Any, described_as: str) -> Tensor:
    """A tensor, list or array as a dense tensor; tensors are returned as they are."""
    if isinstance(value, Tensor):
        return check_dense_tensor(name, value, described_as)
    try:
        return torch.as_tensor(value)
    # strings, ragged lists, integers beyond 64 bits
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise WrongType(f"{name} must be a tensor {described_as}, got {short_repr(value)}") from None


def _hint_suffix(hint: str) -> str:
    return f"; {hint}" if hint else ""


def short_repr(value: object) -> str:
    """A value in an error message: one short line."""
    # tensors and arrays are described; single elements are printed
    if getattr(value, "shape", ()):
        return describe_type(value)
    try:
        text = " ".join(repr(value).split())
    # Python refuses to print integers of thousands of digits, and a custom __repr__ may fail
    except Exception:
        return describe_type(value)
    return text if len(text) <= _MAX_REPR_CHARACTERS else f"{text[: _MAX_REPR_CHARACTERS - 1]}…"


def count_of(number: int, noun: str) -> str:
    """How many of something, in a message: `1 rank`, `2 ranks`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def describe_type(value: object) -> str:
    """The type of a value, with dtype and shape of tensors and arrays."""
    if value is None or isinstance(value, type):
        return "None" if value is None else f"the class {value.__name__}"
    name = type(value).__name__
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    return name if shape is None or dtype is None else f"{name} of {dtype} and shape {tuple(shape)}"
