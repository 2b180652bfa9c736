"""Attention over grids and offsets: every kernel against the reference, and the reference against plain loops."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from on_device import fast_kernels, on_device
from table import DTYPES
from test_conformance import differs
from torch import Tensor

import polyhead
import polyhead.numpy as definition
from polyhead import (
    GAT,
    ALiBi,
    Causal,
    Dot,
    GATv2,
    Grid,
    Neighbourhood,
    Offsets,
    Padding,
    Position,
    QuadraticOffset,
    RelativeBias,
    Rotary,
    Score,
    attend,
    attention_weights,
    explain,
)
from polyhead._torch import native
from polyhead.kernels import candidate_kernels
from polyhead.neighbourhood import Sizes
from polyhead.prepare import AttentionOptions, check_and_make_call

HEADS, DIM = 3, 12

GRIDS: dict[str, Callable[[], Neighbourhood]] = {
    "line": lambda: Grid(23, window=5),
    "line-all": lambda: Grid(17),
    "line-strided": lambda: Grid(17, stride=2),
    "line-fewer": lambda: Grid(17, outputs=(15,)),
    "line-strided-window": lambda: Grid(17, window=5, stride=3),
    "strided-as-many": lambda: Grid(6, 6, window=3, stride=2, outputs=(6, 6)),
    "rows": lambda: Grid(5, 7, window=(1, None)),
    "prefix": lambda: Grid(3, 5, window=3, prefix=2),
    "prefix-line": lambda: Grid(9, window=3, prefix=1),
    "prefix-all": lambda: Grid(3, 5, prefix=1),
    "line-dilated": lambda: Grid(23, window=5, dilation=3),
    "plane": lambda: Grid(5, 7, window=3),
    "plane-uneven": lambda: Grid(7, 5, window=(1, 3), dilation=(1, 2)),
    "plane-dilated": lambda: Grid(11, 7, window=3, dilation=2),
    "plane-all": lambda: Grid(5, 7),
    "wider-than-the-grid": lambda: Grid(3, 5, window=11),
    "almost-as-wide": lambda: Grid(6, 7, window=(3, 9)),
    "space": lambda: Grid(3, 4, 5, window=3),
    "space-uneven": lambda: Grid(2, 5, 3, window=(3, 5, 1)),
    "one-row": lambda: Grid(1, 19, window=7),
    "one-column": lambda: Grid(19, 1, window=7),
    "one-point": lambda: Grid(1, 1, window=3),
    "strided": lambda: Grid(9, 7, window=3, stride=2),
    "strided-all": lambda: Grid(6, 5, stride=(3, 2)),
    "beyond": lambda: Grid(5, 4, window=3, stride=3, outputs=(4, 3)),
    "causal": lambda: Grid(5, 7, window=3) & Causal(),
    "padded": lambda: Padding([35, 12]) & Grid(5, 7, window=5),
    "offsets": lambda: Offsets([(0, 0), (-1, 2), (3, -1)], (5, 7)),
    "offsets-replicate": lambda: Offsets([(0, 0), (-1, 2), (9, -1)], (5, 7), padding="replicate"),
    "offsets-circular": lambda: Offsets([(0, 0), (-1, 2), (9, -1)], (5, 7), padding="circular"),
    "offsets-reflect": lambda: Offsets([(0, 1), (-1, 2), (4, -1)], (5, 7), padding="reflect", stride=(1, 2)),
    "offsets-strided": lambda: Offsets([(-1,), (0,), (2,)], (17,), stride=3, outputs=(7,)),
    "offsets-several": lambda: Offsets([[(0, 0), (0, 1)], [(1, 1), (2, 2)], [(0, -1), (-9, 0)]], (5, 7)),
    "offsets-twice": lambda: Offsets([[(0, 3), (0, 4), (0, 9)]] * 3, (2, 5), padding="replicate"),
    "offsets-padded": lambda: Offsets([(0, 0), (-1, 2), (3, -1)], (5, 7)) & Padding([35, 12]),
}  # fmt: skip

# the offsets above, by head
OFFSETS: dict[str, list[list[tuple[int, ...]]]] = {
    repr(GRIDS[name]()): heads
    for name, heads in {
        "offsets": [[(0, 0)], [(-1, 2)], [(3, -1)]],
        "offsets-replicate": [[(0, 0)], [(-1, 2)], [(9, -1)]],
        "offsets-circular": [[(0, 0)], [(-1, 2)], [(9, -1)]],
        "offsets-reflect": [[(0, 1)], [(-1, 2)], [(4, -1)]],
        "offsets-strided": [[(-1,)], [(0,)], [(2,)]],
        "offsets-twice": [[(0, 3), (0, 4), (0, 9)]] * 3,
        "offsets-several": [[(0, 0), (0, 1)], [(1, 1), (2, 2)], [(0, -1), (-9, 0)]],
    }.items()
}

POSITIONS: dict[str, Callable[[int], Position | None]] = {
    "none": lambda axes: None,
    "rotary": lambda axes: Rotary(axes=axes),
    "rotary-partial": lambda axes: Rotary(2 * axes, interleaved=True, axes=axes),
    "relative": lambda axes: RelativeBias(HEADS, window=(5,) * axes),
    "quadratic": lambda axes: QuadraticOffset(torch.randn(HEADS, axes), alpha=0.7),
    "quadratic-zeros": lambda axes: QuadraticOffset(torch.randn(HEADS, axes), padding="zeros"),
    "quadratic-circular": lambda axes: QuadraticOffset(2 * torch.randn(HEADS, axes), padding="circular"),
    "quadratic-reflect": lambda axes: QuadraticOffset(2 * torch.randn(HEADS, axes), padding="reflect"),
    # counts items along the flattened sequence
    "alibi": lambda axes: ALiBi(HEADS),
}
APART = (
    "line-strided",
    "line-fewer",
    "line-strided-window",
    "strided-as-many",
    "strided",
    "strided-all",
    "beyond",
    "offsets-reflect",
    "offsets-strided",
)

SCORES: dict[str, Callable[[], Score]] = {
    "dot": Dot,
    "gat": lambda: GAT(HEADS, DIM),
    "gatv2": lambda: GATv2(HEADS, DIM),
}

OPTIONS: dict[str, dict[str, object]] = {"plain": {}, "sink": {"sink": 0.3}, "dropout": {"dropout": 0.3, "seed": 5}}


@dataclass(frozen=True)
class Row:
    """One combination."""

    grid: str
    position: str = "none"
    score: str = "dot"
    option: str = "plain"
    dtype: torch.dtype = torch.float32

    def __str__(self) -> str:
        return f"{self.grid}-{self.position}-{self.score}-{self.option}-{str(self.dtype)[6:]}"


def _exactly(grid: str, position: str) -> torch.dtype:
    """With one key per query the gradient of a distant quadratic is zero up to rounding, which its large numbers magnify."""
    return torch.float64 if grid.startswith("offsets") and position.startswith("quadratic") else torch.float32


ROWS = [
    *(Row(g, p, "dot", o, _exactly(g, p)) for g in GRIDS for p in POSITIONS for o in OPTIONS if p != "alibi" or g not in APART),
    *(Row(g, p, s, o) for g in GRIDS for p in ("none", "relative") for s in ("gat", "gatv2") for o in OPTIONS),
    *(Row(g, p, s, dtype=d) for g in GRIDS for p in ("none", "rotary", "relative") for s in SCORES for d in DTYPES if d != torch.float32),
]  # fmt: skip


class Built:
    """The tensors of a row of the table."""

    def __init__(self, row: Row, batch: int = 2) -> None:
        torch.manual_seed(sum(map(ord, str(row))))
        self.over = GRIDS[row.grid]()
        lattice = self.over.lattice
        assert lattice is not None
        queries, keys = math.prod(lattice.outputs) + lattice.prefix, math.prod(lattice.sizes) + lattice.prefix
        make = lambda items: torch.randn(batch, items, HEADS, DIM).to(row.dtype).requires_grad_().transpose(1, 2)
        self.tensors = make(queries), make(keys), make(keys)
        self.position = POSITIONS[row.position](len(lattice.sizes))
        self.score = SCORES[row.score]().to(row.dtype)
        if self.position is not None:
            self.position.to(row.dtype)
        self.options = OPTIONS[row.option]
        owners = [self.score] if self.position is None else [self.score, self.position]
        self.learned = [*self.tensors, *(p for owner in owners for p in owner.parameters())]

    def attend(self, kernel: str | None) -> Tensor:
        return attend(
            *self.tensors, over=self.over, score=self.score, position=self.position, kernel=kernel, **self.options
        )

    def fast_kernels(self) -> list[str]:
        options = AttentionOptions(self.over, self.score, self.position, **self.options)
        call = check_and_make_call(*self.tensors, options)
        return fast_kernels(candidate_kernels(call), call)

    def gradients(self, out: Tensor, towards: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, self.learned, towards, allow_unused=True, materialize_grads=True)


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_kernels_equal_the_reference(row: Row):
    built = Built(row)
    there = on_device(built)
    options = {name: value for name, value in there.options.items() if name != "seed"}
    said = explain(*there.tensors, over=there.over, score=there.score, position=there.position, **options)
    reference = built.attend("reference")
    assert reference.dtype == row.dtype
    towards = torch.randn_like(reference)
    expected = [reference, *built.gradients(reference, towards)]
    for kernel in there.fast_kernels():
        out = there.attend(kernel)
        got = [out, *there.gradients(out, towards.to(out.device))]
        wrong = [i for i, (a, b) in enumerate(zip(got, expected, strict=True)) if differs(a, b, DTYPES[row.dtype])]
        assert not wrong, f"{kernel}: {wrong}"
    assert torch.equal(there.attend(None), there.attend(said.kernel))


@pytest.mark.parametrize(
    ("row", "kernel"),
    [
        (Row("plane"), "grid"),
        (Row("plane", "rotary"), "grid"),
        (Row("plane", "relative"), "grid"),
        (Row("plane", "alibi", option="dropout"), "grid"),
        (Row("space", option="sink"), "grid"),
        (Row("plane", score="gat"), "windows"),
        (Row("strided", "relative", score="gatv2"), "reference"),
        (Row("strided", score="gatv2"), "windows"),
        (Row("strided"), "windows"),
        (Row("line-strided-window", option="dropout"), "windows"),
        (Row("rows", "relative"), "tiled"),
        (Row("rows"), "grid"),
        (Row("prefix"), "windows"),
        (Row("prefix", "rotary"), "windows"),
        (Row("prefix-all", "rotary"), "fused"),
        (Row("offsets"), "offsets"),
        (Row("offsets-strided", score="gat"), "offsets"),
        (Row("offsets-several"), "offsets"),
        (Row("offsets-padded"), "tiled"),
        (Row("plane-all"), "fused"),
        (Row("plane-all", "relative"), "short"),
        (Row("prefix-all", "relative"), "short"),
        (Row("causal"), "tiled"),
    ],
    ids=str,
)
@pytest.mark.skipif(native is None, reason="there are no C++ kernels")
def test_which_kernel_is_chosen(row: Row, kernel: str):
    built = Built(row)
    options = {name: value for name, value in built.options.items() if name != "seed"}
    said = explain(*built.tensors, over=built.over, score=built.score, position=built.position, **options)
    assert said.kernel == kernel, str(said)


Point = tuple[int, ...]


def _allowed(over: Neighbourhood, head: int, query: Point | None, key: Point | None) -> bool:
    """The definition, written independently in coordinates; None has no coordinates."""
    if query is None or key is None:
        return True
    if isinstance(over, Offsets):
        return any(key == _folded(over, query, offset) for offset in OFFSETS[repr(over)][head])
    assert isinstance(over, Grid)
    if over.window is None:
        return True
    apart = [k - q * s for k, q, s in zip(key, query, over.stride, strict=True)]
    each = zip(apart, over.window, over.dilation, strict=True)
    return all(n is None or (abs(a) <= n // 2 * d and a % d == 0) for a, n, d in each)


def _folded(over: Offsets, query: tuple[int, ...], offset: tuple[int, ...]) -> tuple[int, ...] | None:
    """The point that a query sees at an offset, with the padding modes of numpy.pad."""
    found = []
    for q, stride, apart, n in zip(query, over.stride, offset, over.sizes, strict=True):
        mode = {"zeros": "constant", "replicate": "edge", "circular": "wrap", "reflect": "reflect"}[over.padding]
        more = {"constant_values": -1} if mode == "constant" else {}
        found.append(int(np.pad(np.arange(n), 40, mode=mode, **more)[q * stride + apart + 40]))
    return None if -1 in found else tuple(found)


def _number(point: tuple[int, ...], sizes: tuple[int, ...]) -> int:
    return int(np.ravel_multi_index(point, sizes))


@pytest.mark.parametrize("name", [name for name in GRIDS if name not in ("causal", "padded", "offsets-padded")])
@pytest.mark.parametrize(
    "position", ["none", "rotary", "relative", "quadratic", "quadratic-circular", "quadratic-reflect"]
)
def test_the_reference_equals_numpy_point_by_point(name: str, position: str):
    built = Built(Row(name, position, dtype=torch.float64), batch=1)
    over, lattice = built.over, built.over.lattice
    assert lattice is not None
    nowhere: list[Point | None] = [None] * lattice.prefix
    queries = nowhere + list(itertools.product(*map(range, lattice.outputs)))
    keys = nowhere + list(itertools.product(*map(range, lattice.sizes)))
    with torch.no_grad():
        out = built.attend("reference")[0]
        weights = attention_weights(*built.tensors[:2], over=over, position=built.position)[0]
    mask = over.mask(Sizes((1,), HEADS, len(queries), len(keys)), torch.device("cpu")).expand(HEADS, len(queries), -1)
    for h in range(HEADS):
        allowed = np.array([[_allowed(over, h, q, k) for k in keys] for q in queries])
        assert (mask[h].numpy() == allowed).all()
        Q, K, V = (x[0, h].detach().numpy() for x in built.tensors)
        at = [q and tuple(a * s for a, s in zip(q, lattice.stride, strict=True)) for q in queries]
        if position == "rotary":
            Q, K = (_rotated(x, places, len(lattice.sizes)) for x, places in ((Q, at), (K, keys)))
        bias = np.array([[_added(built.position, h, q, k, lattice.sizes) for k in keys] for q in at])
        np.testing.assert_allclose(weights[h].numpy(), definition.weights(Q, K, allowed=allowed, bias=bias), atol=1e-12)
        np.testing.assert_allclose(
            out[h].numpy(), definition.attention(Q, K, V, allowed=allowed, bias=bias), atol=1e-12
        )


def _rotated(x: np.ndarray, points: list[Point | None], axes: int) -> np.ndarray:
    """Each part of the features rotated by the coordinate along one axis; items without coordinates are not rotated."""
    parts = np.split(x, axes, axis=1)
    rows = [
        np.concatenate(
            [
                definition.rotary(part[i : i + 1], place)
                for part, place in zip(parts, point or (0,) * axes, strict=True)
            ],
            1,
        )
        for i, point in enumerate(points)
    ]
    return np.concatenate(rows)


def _added(position: Position | None, head: int, query: Point | None, key: Point | None, sizes: Point) -> float:
    if query is None or key is None:
        return 0.0
    if isinstance(position, RelativeBias):
        assert position.window is not None
        apart = [
            min(max(k - q, -(n // 2)), n // 2) + n // 2 for k, q, n in zip(key, query, position.window, strict=True)
        ]
        return position.weight[_number(tuple(apart), position.window), head].item()
    if isinstance(position, QuadraticOffset):
        total = 0.0
        for axis, n in enumerate(sizes):
            at = query[axis] + position.centres[head, axis].item()
            if position.padding == "reflect" and n > 1:
                at = at % (2 * (n - 1))
                at = min(at, 2 * (n - 1) - at)
            apart = key[axis] - at
            if position.padding == "circular":
                apart = min(abs(apart + n * turn) for turn in range(-9, 10))
            total += apart**2
        return -position.alpha[head].item() * total
    return 0.0


def test_every_public_option_is_in_the_table():
    used = {type(part) for make in GRIDS.values() for part in polyhead.neighbourhood.intersection_parts(make())}
    assert {Grid, Offsets} <= used
    with_axes = {type(p) for make in POSITIONS.values() if (p := make(2)) is not None and p.axes is not None}
    assert with_axes == {Rotary, RelativeBias, QuadraticOffset}
