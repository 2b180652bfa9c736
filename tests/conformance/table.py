"""The table of all combinations: one row per neighbourhood, position, option, layout and dtype.

The sizes of most axes differ, so that two swapped axes cannot pass.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

import polyhead
from polyhead import (
    ALiBi,
    Causal,
    Dense,
    Mask,
    Neighbourhood,
    Padding,
    Position,
    RelativeBias,
    Rotary,
    Segments,
    Window,
)


@dataclass(frozen=True)
class Layout:
    """Shapes of q, k and v."""

    batch: tuple[int, ...] = (2,)
    heads: int = 6
    key_heads: int = 6
    value_heads: int | None = None
    queries: int = 37
    keys: int = 37
    dim: int = 10
    value_dim: int = 10
    strided: bool = False

    def tensors(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        make = self._strided if self.strided else self._plain
        return (
            make(self.heads, self.queries, self.dim, dtype),
            make(self.key_heads, self.keys, self.dim, dtype),
            make(self.value_heads or self.key_heads, self.keys, self.value_dim, dtype),
        )

    def _plain(self, heads: int, items: int, dim: int, dtype: torch.dtype) -> Tensor:
        # as a layer passes them: items before heads in memory
        x = torch.randn(*self.batch, items, heads, dim).to(dtype).requires_grad_()
        return x.transpose(-3, -2)

    def _strided(self, heads: int, items: int, dim: int, dtype: torch.dtype) -> Tensor:
        x = torch.randn(*self.batch, heads, 2 * dim, items).to(dtype).requires_grad_()
        return x[..., ::2, :].transpose(-2, -1)


LAYOUTS = {
    "plain": Layout(),
    "grouped": Layout(key_heads=2),
    "groups-apart": Layout(key_heads=2, value_heads=3),
    "multi-query": Layout(key_heads=1, batch=(3,)),
    "wide-values": Layout(value_dim=13),
    "narrow-values": Layout(value_dim=7),
    "far-wider-values": Layout(value_dim=31),
    "strided": Layout(strided=True),
    "more-keys": Layout(queries=11, keys=41),
    "more-queries": Layout(queries=41, keys=11),
    "one-query": Layout(queries=1, keys=23),
    "one-of-each": Layout(queries=1, keys=1),
    "no-batch": Layout(batch=()),
    "two-batches": Layout(batch=(2, 3), queries=17, keys=17),
    "no-queries": Layout(queries=0),
    "no-keys": Layout(queries=5, keys=0),
    "empty-batch": Layout(batch=(0,)),
    "long": Layout(batch=(1,), heads=3, key_heads=3, queries=331, keys=331, dim=14, value_dim=14),
}


def _ids(layout: Layout) -> Tensor:
    return (torch.arange(layout.keys) // 13).expand(*layout.batch, layout.keys)


def _lengths(layout: Layout) -> Tensor:
    rows = torch.Size(layout.batch).numel()
    return (torch.arange(rows) * 19 % (layout.keys + 1)).reshape(layout.batch)


def _left(layout: Layout) -> Tensor:
    return torch.arange(layout.keys) >= layout.keys - _lengths(layout)[..., None]


NEIGHBOURHOODS: dict[str, Callable[[Layout], Neighbourhood]] = {
    "dense": lambda layout: Dense(),
    "causal": lambda layout: Causal(),
    "window": lambda layout: Window(5),
    "window-ahead": lambda layout: Window(0, 3),
    "padding-right": lambda layout: Padding(_lengths(layout)),
    "padding-left-self": lambda layout: Padding(_left(layout), queries=True),
    "padding-holes": lambda layout: Padding(torch.rand(*layout.batch, layout.keys) > 0.4),
    "segments": lambda layout: Segments(_ids(layout), None if layout.queries <= layout.keys else torch.arange(layout.queries) // 13),
    "segments-apart": lambda layout: Segments(torch.arange(layout.keys) % 3, torch.arange(layout.queries) % 3),
    "mask": lambda layout: Mask(torch.rand(*layout.batch, 1, layout.queries, layout.keys) > 0.6),
    "mask-by-head": lambda layout: Mask(torch.rand(layout.heads, layout.queries, layout.keys) > 0.5) if not layout.batch or layout.batch[-1] != layout.heads else Dense(),
    "causal-window-padding": lambda layout: Causal() & Window(7) & Padding(_lengths(layout), queries=True),
    "causal-segments": lambda layout: Causal() & Segments(_ids(layout), None if layout.queries <= layout.keys else torch.arange(layout.queries) // 13),
    "causal-or-prefix": lambda layout: Causal() | Padding(_lengths(layout), queries=False),
    "not-window-or-segments-and-padding": lambda layout: (~Window(5) | Segments(torch.arange(layout.keys) % 3, torch.arange(layout.queries) % 3)) & Padding(_lengths(layout)),
    "mask-window": lambda layout: Mask(torch.rand(layout.queries, layout.keys) > 0.3) & Window(9),
}  # fmt: skip

POSITIONS: dict[str, Callable[[Layout], Position | None]] = {
    "none": lambda layout: None,
    "rotary": lambda layout: Rotary(),
    "rotary-partial": lambda layout: Rotary(4, interleaved=True),
    "alibi": lambda layout: ALiBi(layout.heads),
    "relative": lambda layout: RelativeBias(layout.heads, buckets=8, max_distance=20),
}


@dataclass(frozen=True)
class Option:
    """Further arguments of a call."""

    sink: bool = False
    bias: bool = False
    dropout: float = 0.0
    scale: float | None = None

    def arguments(self, layout: Layout, dtype: torch.dtype) -> dict[str, object]:
        given: dict[str, object] = {"dropout": self.dropout, "seed": 7 if self.dropout else None}
        if self.sink:
            given["sink"] = torch.randn(layout.heads, dtype=dtype).requires_grad_()
        if self.bias:
            given["bias"] = torch.randn(layout.heads, 1, layout.keys, dtype=dtype).requires_grad_()
        if self.scale is not None:
            given["score"] = polyhead.Dot(self.scale)
        return given


OPTIONS = {
    "plain": Option(),
    "sink": Option(sink=True),
    "bias": Option(bias=True),
    "dropout": Option(dropout=0.3),
    "scale": Option(scale=1.0),
}

# the tolerance of fast kernels against the reference, relative to the largest number
DTYPES = {torch.float64: 1e-11, torch.float32: 2e-5, torch.bfloat16: 4e-2, torch.float16: 6e-3}


@dataclass(frozen=True)
class Row:
    """One combination."""

    neighbourhood: str
    position: str
    option: str
    layout: str
    dtype: torch.dtype = field(default=torch.float32)

    def __str__(self) -> str:
        return f"{self.neighbourhood}-{self.position}-{self.option}-{self.layout}-{str(self.dtype)[6:]}"


def rows() -> list[Row]:
    """Every neighbourhood with every position, option and layout in fp32, and with every dtype on some layouts."""
    some = ("plain", "grouped", "strided")
    return [
        Row(n, p, o, layout, dtype)
        for n in NEIGHBOURHOODS
        for p in POSITIONS
        for o in OPTIONS
        for layout in LAYOUTS
        for dtype in DTYPES
        # a scale has the same effect with and without a position
        if (dtype == torch.float32 or layout in some) and (o != "scale" or p == "none")
    ]
