"""Kinds of input: random numbers and memory layouts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

DTYPES = {
    "float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16,
}  # fmt: skip
NUMBERS = ("normal", "positive", "large", "small", "few", "equal")
LAYOUTS = (
    "contiguous", "heads inside", "items last", "features apart", "items apart", "part", "one head", "one row", "one item",
)  # fmt: skip


def numbers(kind: str, shape: Sequence[int], rng: np.random.Generator, dtype: torch.dtype) -> Tensor:
    """Random numbers of a kind, rounded to a dtype.

    "positive" numbers add up where others cancel; "few" are multiples of 1/4, so that many are equal and sums of products
    are exact.
    """
    drawn = rng.standard_normal(shape)
    if kind == "positive":
        drawn = 0.5 + rng.random(shape) / 2
    elif kind == "large":
        drawn = 16 * drawn
    elif kind == "small":
        drawn = drawn / 1024
    elif kind == "few":
        drawn = np.round(4 * drawn) / 4
    elif kind == "equal":
        drawn = np.full(shape, float(np.round(rng.standard_normal(), 1)))
    return torch.as_tensor(drawn).to(dtype)


View = Callable[[Tensor], Tensor]


class Layout(NamedTuple):
    """The memory layout of a tensor: the shape of its storage, and the view that is passed on."""

    shape: tuple[int, ...]
    view: View


def draw_layout(random: Random) -> str:
    """Draw a layout; most tensors are contiguous, or have heads inside of items as after a projection."""
    return random.choices(LAYOUTS, (10, 6, 2, 2, 2, 2, 1, 1, 1))[0]


def layout(kind: str, shape: tuple[int, ...]) -> Layout:
    """A tensor (..., heads, items, dim) as a view of another."""
    *batch, heads, items, dim = shape
    if kind == "heads inside":
        return Layout((*batch, items, heads, dim), lambda x: x.transpose(-3, -2))
    if kind == "items last":
        return Layout((*batch, heads, dim, items), lambda x: x.transpose(-2, -1))
    if kind == "features apart":
        return Layout((*batch, heads, items, 2 * dim), lambda x: x[..., ::2])
    if kind == "items apart":
        return Layout((*batch, heads, 3 * items, dim), lambda x: x[..., 1::3, :])
    if kind == "part":
        return Layout((*batch, heads + 1, items + 3, dim + 5), lambda x: x[..., 1:, 2:-1, 3:-2])
    if kind == "one head":
        return Layout((*batch, 1, items, dim), lambda x: x.expand(shape))
    if kind == "one row":
        return Layout((*(1 for _ in batch), heads, items, dim), lambda x: x.expand(shape))
    if kind == "one item":
        return Layout((*batch, heads, 1, dim), lambda x: x.expand(shape))
    return Layout(shape, lambda x: x)
