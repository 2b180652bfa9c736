"""The table of attention on grids and at offsets, for the check of a device."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch

from polyhead.device_check.operands import Operands
from polyhead.neighbourhood import Causal, Grid, Neighbourhood, Offsets, Padding
from polyhead.position import Position, QuadraticOffset, RelativeBias, Rotary
from polyhead.score import GAT, Dot, GATv2, Score

HEADS, DIM, BATCH = 3, 12, 2

GRIDS: dict[str, Callable[[], Neighbourhood]] = {
    "grid": lambda: Grid(17, 19),
    "grid-window": lambda: Grid(17, 19, window=5),
    "grid-dilated": lambda: Grid(17, 19, window=(3, 5), dilation=(3, 2)),
    "grid-strided": lambda: Grid(17, 19, window=3, stride=2),
    "grid-prefix": lambda: Grid(17, 19, window=5, prefix=2),
    "grid-rows": lambda: Grid(11, 23, window=(1, None)),
    "grid-space": lambda: Grid(5, 6, 7, window=3),
    "grid-causal": lambda: Grid(17, 19, window=5) & Causal(),
    "grid-padded": lambda: Padding([300, 112]) & Grid(17, 19, window=5),
    "offsets": lambda: Offsets([(0, 0), (-1, 2), (3, -1)], (17, 19)),
    "offsets-several": lambda: Offsets([[(0, 0), (0, 1)], [(1, 1), (2, 2)], [(0, -1), (-9, 0)]], (17, 19)),
    "offsets-reflect": lambda: Offsets([(0, 1), (-1, 2), (4, -1)], (17, 19), padding="reflect", stride=(1, 2)),
    "offsets-padded": lambda: Offsets([(0, 0), (-1, 2), (3, -1)], (17, 19)) & Padding([300, 112]),
}


class Variant(NamedTuple):
    """A score, and options that are joined in one case."""

    score: Callable[[], Score] = Dot
    position: Callable[[int], Position | None] = lambda axes: None
    sink: bool = False
    dropout: float = 0.0


VARIANTS = {
    "plain": Variant(),
    "rotary, sink": Variant(position=lambda axes: Rotary(axes=axes), sink=True),
    "relative bias, dropout": Variant(position=lambda axes: RelativeBias(HEADS, window=(5,) * axes), dropout=0.3),
    "quadratic offset": Variant(position=lambda axes: QuadraticOffset(torch.randn(HEADS, axes), alpha=0.7)),
    "GAT, sink": Variant(lambda: GAT(HEADS, DIM), sink=True),
    "GATv2, dropout": Variant(lambda: GATv2(HEADS, DIM), dropout=0.3),
}
# on which other dtypes than fp32 are checked
_FEW_GRIDS = ("grid-window", "grid-prefix", "offsets")


def make_operands(grid: str, variant: Variant) -> Operands:
    """The attention of a row, on the CPU."""
    over = GRIDS[grid]()
    lattice = over.lattice
    assert lattice is not None
    axes = len(lattice.sizes)
    queries, keys = math.prod(lattice.outputs) + lattice.prefix, math.prod(lattice.sizes) + lattice.prefix
    # (batch, items, heads, dim) -> (batch, heads, items, dim)
    q, k, v = (torch.randn(BATCH, items, HEADS, DIM).transpose(1, 2) for items in (queries, keys, keys))
    sink = torch.randn(HEADS) if variant.sink else None
    return Operands(q, k, v, over, variant.score(), variant.position(axes), None, sink, variant.dropout)


def device_rows(dtypes: list[torch.dtype]) -> Iterator[tuple[str, torch.dtype, Callable[[], Operands]]]:
    """The rows for a device with these dtypes: a name, a dtype, and the attention on the CPU."""
    for dtype in dtypes:
        for grid in GRIDS:
            for title, variant in VARIANTS.items():
                # with one key per query the gradient of a distant quadratic is zero up to rounding, which its numbers magnify
                vanishes = grid.startswith("offsets") and title == "quadratic offset"
                few = grid in _FEW_GRIDS and title == "plain"
                if not vanishes and (dtype == torch.float32 or few):
                    yield f"{grid}: {title}", dtype, partial(make_operands, grid, variant)
