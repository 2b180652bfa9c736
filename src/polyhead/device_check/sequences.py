"""The table of attention on sequences: neighbourhoods, positions, options, layouts and dtypes.

`tests/conformance` runs it on every combination, the check of a device on some. The sizes of most axes differ, so that two
swapped axes cannot pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from polyhead.device_check.operands import SEED, Operands
from polyhead.neighbourhood import Causal, Dense, Mask, Neighbourhood, Padding, Segments, Window, from_mask_mod
from polyhead.position import ALiBi, Position, RelativeBias, Rotary
from polyhead.score import Dot


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

    def tensors(self, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
        """Random q, k and v with gradients."""
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


def _ids(layout: Layout) -> Tensor:
    return (torch.arange(layout.keys) // 13).expand(*layout.batch, layout.keys)


def _own_ids(layout: Layout) -> Tensor | None:
    return None if layout.queries <= layout.keys else torch.arange(layout.queries) // 13


def _lengths(layout: Layout) -> Tensor:
    """From 0 to all keys."""
    rows = torch.Size(layout.batch).numel()
    return (torch.arange(rows) * (2 * layout.keys // 3) % (layout.keys + 1)).reshape(layout.batch)


def _left(layout: Layout) -> Tensor:
    return torch.arange(layout.keys) >= layout.keys - _lengths(layout)[..., None]


def _mask_by_head(layout: Layout) -> Neighbourhood:
    # heads cannot be told from batch entries where there are as many
    if layout.batch and layout.batch[-1] == layout.heads:
        return Dense()
    return Mask(torch.rand(layout.heads, layout.queries, layout.keys) > 0.5)


def _differs_by_row_and_head(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return (q_idx + 2 * kv_idx + b + h * kv_idx) % 3 > 0


NEIGHBOURHOODS: dict[str, Callable[[Layout], Neighbourhood]] = {
    "dense": lambda layout: Dense(),
    "causal": lambda layout: Causal(),
    "window": lambda layout: Window(5),
    "window-ahead": lambda layout: Window(0, 3),
    "padding-right": lambda layout: Padding(_lengths(layout)),
    "padding-left-self": lambda layout: Padding(_left(layout), queries=True),
    "padding-holes": lambda layout: Padding(torch.rand(*layout.batch, layout.keys) > 0.4),
    "segments": lambda layout: Segments(_ids(layout), _own_ids(layout)),
    "segments-apart": lambda layout: Segments(torch.arange(layout.keys) % 3, torch.arange(layout.queries) % 3),
    "mask": lambda layout: Mask(torch.rand(*layout.batch, 1, layout.queries, layout.keys) > 0.6),
    "mask-by-head": _mask_by_head,
    "causal-window-padding": lambda layout: Causal() & Window(7) & Padding(_lengths(layout), queries=True),
    "causal-segments": lambda layout: Causal() & Segments(_ids(layout), _own_ids(layout)),
    "causal-or-prefix": lambda layout: Causal() | Padding(_lengths(layout), queries=False),
    "not-window-or-segments-and-padding": lambda layout: (
        (~Window(5) | Segments(torch.arange(layout.keys) % 3, torch.arange(layout.queries) % 3))
        & Padding(_lengths(layout))
    ),
    "mask-mod": lambda layout: Window(9) & from_mask_mod(_differs_by_row_and_head),
    "mask-window": lambda layout: Mask(torch.rand(layout.queries, layout.keys) > 0.3) & Window(9),
}

POSITIONS: dict[str, Callable[[Layout], Position | None]] = {
    "none": lambda layout: None,
    "rotary": lambda layout: Rotary(),
    "rotary-partial": lambda layout: Rotary(4, interleaved=True),
    "alibi": lambda layout: ALiBi(layout.heads),
    "relative": lambda layout: RelativeBias(layout.heads, buckets=8, max_distance=20),
}


@dataclass(frozen=True)
class Option:
    """Further arguments of an attention."""

    sink: bool = False
    bias: bool = False
    dropout: float = 0.0
    scale: float | None = None

    def arguments(self, layout: Layout, dtype: torch.dtype) -> dict[str, object]:
        """As `attend` takes them, with random numbers."""
        learned = lambda *shape: torch.randn(*shape, dtype=dtype).requires_grad_()
        given: dict[str, object] = {"dropout": self.dropout, "seed": SEED if self.dropout else None}
        if self.sink:
            given["sink"] = learned(layout.heads)
        if self.bias:
            given["bias"] = learned(layout.heads, 1, layout.keys)
        if self.scale is not None:
            given["score"] = Dot(self.scale)
        return given


OPTIONS = {
    "plain": Option(),
    "sink": Option(sink=True),
    "bias": Option(bias=True),
    "dropout": Option(dropout=0.3),
    "scale": Option(scale=1.0),
}


def make_operands(neighbourhood: str, variant: Variant) -> Operands:
    """The attention of a row of the table, on the CPU."""
    layout, position, option = variant
    q, k, v = layout.tensors()
    given: dict[str, Any] = {"score": Dot(), **option.arguments(layout, torch.float32)}
    del given["seed"]
    return Operands(q, k, v, over=NEIGHBOURHOODS[neighbourhood](layout), position=POSITIONS[position](layout), **given)


class Variant(NamedTuple):
    """Options that the check of a device joins in one case: a kernel is compiled once per case on some devices."""

    layout: Layout
    position: str = "none"
    option: Option = OPTIONS["plain"]


# longer than two blocks of 128, and no multiple of one
LONG = Layout(batch=(3,), heads=4, key_heads=4, queries=293, keys=293, dim=16, value_dim=16)
# together every position and option but a scale, grouped heads, and values of other widths than keys
VARIANTS = {
    "plain": Variant(LONG),
    "few keys": Variant(replace(LONG, queries=37, keys=37)),
    "fewer queries": Variant(replace(LONG, queries=67)),
    "rotary, grouped heads, wide values": Variant(replace(LONG, key_heads=2, value_dim=24), "rotary"),
    "relative bias, bias, sink": Variant(LONG, "relative", Option(sink=True, bias=True)),
    "ALiBi, dropout, narrow values": Variant(replace(LONG, dim=20, value_dim=10), "alibi", Option(dropout=0.3)),
}
# on which other dtypes than fp32 are checked
_FEW_NEIGHBOURHOODS = ("dense", "causal", "window", "padding-holes", "mask")
_FEW_VARIANTS = ("plain", "rotary, grouped heads, wide values")


def device_rows(dtypes: list[torch.dtype]) -> Iterator[tuple[str, torch.dtype, Callable[[], Operands]]]:
    """The rows for a device with these dtypes: a name, a dtype, and the attention on the CPU."""
    for dtype in dtypes:
        for name in NEIGHBOURHOODS:
            for title, variant in VARIANTS.items():
                few = name in _FEW_NEIGHBOURHOODS and title in _FEW_VARIANTS
                if dtype == torch.float32 or few:
                    yield f"{name}: {title}", dtype, partial(make_operands, name, variant)
