"""Neighbourhoods and positions on grids, with masks and numbers from the documented definitions."""

from __future__ import annotations

import itertools
from random import Random
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fuzz.oracle import Inputs
from fuzz.position_setup import PositionSetup
from fuzz.positions import along_axes
from fuzz.scores import parameter
from polyhead import Position, QuadraticOffset, RelativeBias, Rotary

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


class Points(NamedTuple):
    """Coordinates of keys and queries, row by row; `prefix` tokens before them have no coordinates."""

    keys: Ints
    queries: Ints
    sizes: tuple[int, ...]
    prefix: int = 0

    @property
    def offset(self) -> Ints:
        """Offset of each key from each query along each axis (queries, keys, axes); 0 for tokens."""
        apart = self.keys[None] - self.queries[:, None]
        return np.pad(apart, ((self.prefix, 0), (self.prefix, 0), (0, 0)))

    @property
    def placed(self) -> Bools:
        """Which pairs (queries, keys) consist of two points."""
        return np.pad(
            np.ones((len(self.queries), len(self.keys)), bool),
            ((self.prefix, 0), (self.prefix, 0)),
            constant_values=False,
        )


def points(sizes: tuple[int, ...], outputs: tuple[int, ...], stride: tuple[int, ...], prefix: int = 0) -> Points:
    """Keys at every point; queries at multiples of the stride."""
    of = lambda each: np.array(list(itertools.product(*(range(n) for n in each))), np.int64).reshape(-1, len(each))
    return Points(of(sizes), of(outputs) * np.array(stride), sizes, prefix)


def window_mask(at: Points, window: tuple[int | None, ...] | None, dilation: tuple[int, ...]) -> Bools:
    """Pairs (queries, keys) within a window: half the window to either side along each axis, in steps of the dilation. Tokens
    attend to all keys, and all queries to tokens."""
    allowed = np.ones(at.placed.shape, bool)
    if window is not None:
        for axis, (wide, step) in enumerate(zip(window, dilation, strict=True)):
            apart = at.offset[..., axis]
            near = np.ones_like(allowed) if wide is None else np.abs(apart) <= (wide // 2) * step
            allowed &= near & (apart % step == 0)
    return allowed | ~at.placed


def fold(place: int, size: int, padding: str) -> int | None:
    """The index along one axis that a place maps to, inside or beyond the border; None outside with zero padding."""
    if 0 <= place < size:
        return place
    if padding == "zeros":
        return None
    if padding == "replicate":
        return 0 if place < 0 else size - 1
    if padding == "circular":
        return place % size
    # reflected at the border points, without repeating them
    while not 0 <= place < size:
        place = 0 if size == 1 else -place if place < 0 else 2 * (size - 1) - place
    return place


def offsets_mask(at: Points, offsets: Ints, padding: str) -> Bools:
    """Which keys each head may attend to from each query (heads, queries, keys); `offsets` are (heads, several, axes)."""
    allowed = np.zeros((len(offsets), len(at.queries), len(at.keys)), bool)
    number = {tuple(point): place for place, point in enumerate(at.keys.tolist())}
    for head, query, one in itertools.product(range(len(offsets)), range(len(at.queries)), range(offsets.shape[1])):
        there = at.queries[query] + offsets[head, one]
        found = [fold(int(p), size, padding) for p, size in zip(there, at.sizes, strict=True)]
        if None not in found:
            allowed[head, query, number[tuple(p for p in found if p is not None)]] = True
    return allowed


def on_grid(choice: tuple[Any, ...], at: Points, heads: int, dim: int) -> PositionSetup:
    """A position along the axes of a grid."""
    kind, *options = choice
    if kind == "rotary axes":
        return _rotary(at, dim, *options)
    if kind == "window bias":
        return _window_bias(at, heads, *options)
    return _quadratic(at, heads, *options)


def _rotary(at: Points, dim: int, rotary_dim: int | None, base: float, interleaved: bool) -> PositionSetup:
    axes = len(at.sizes)
    position = Rotary(rotary_dim, base=base, interleaved=interleaved, axes=axes)
    # tokens are not rotated
    lone = lambda where: np.pad(where, ((at.prefix, 0), (0, 0)))
    matrices = [along_axes(lone(where), dim, rotary_dim or dim, base, interleaved) for where in (at.queries, at.keys)]
    return PositionSetup(lambda given: position, {}, torch.as_tensor(matrices[0]), torch.as_tensor(matrices[1]))


def _window_bias(at: Points, heads: int, window: tuple[int, ...]) -> PositionSetup:
    row = np.zeros(at.placed.shape, np.int64)
    for axis, wide in enumerate(window):
        # larger offsets share the value at the border
        row = row * wide + np.clip(at.offset[..., axis], -(wide // 2), wide // 2) + wide // 2
    place, placed = torch.as_tensor(row), torch.as_tensor(at.placed)

    def position(given: Inputs) -> Position:
        made = RelativeBias(heads, window=window)
        made.weight = parameter(given["table"])
        return made

    shapes = {"table": (int(np.prod(window)), heads)}
    return PositionSetup(position, shapes, added=lambda given, _: given["table"][place].movedim(-1, 0) * placed)


def _quadratic(at: Points, heads: int, padding: str) -> PositionSetup:
    """−α|δ − Δ|², with the target folded according to the padding; with "zeros", α/2 is added."""
    axes, placed = len(at.sizes), torch.as_tensor(at.placed)
    from_, to = torch.as_tensor(at.queries).double(), torch.as_tensor(at.keys).double()

    def position(given: Inputs) -> Position:
        made = QuadraticOffset(torch.zeros(heads, axes), padding=padding)
        made.centres, made.alpha = parameter(given["centres"]), parameter(given["alpha"])
        return made

    def added(given: Inputs, absolute: bool) -> Tensor:
        square = torch.zeros((), dtype=torch.float64)
        for axis, size in enumerate(at.sizes):
            selected = from_[:, axis] + given["centres"][:, axis, None]
            if absolute:
                square = square + (selected[..., None] + to[:, axis] + 2 * size).square()
                continue
            if padding == "reflect" and size > 1:
                # a triangle wave of period 2(size − 1)
                wave = selected.remainder(2 * (size - 1))
                selected = torch.where(wave > size - 1, 2 * (size - 1) - wave, wave)
            apart = to[:, axis] - selected[..., None]
            if padding == "circular":
                apart = apart - size * torch.round(apart.detach() / size)
            square = square + apart.square()
        alpha = given["alpha"][:, None, None]
        more = 0.5 if padding == "zeros" else 0.0
        pairs = alpha * (square + more) if absolute else alpha * (more - square)
        return torch.nn.functional.pad(pairs, (at.prefix, 0, at.prefix, 0)) * placed

    return PositionSetup(position, {"centres": (heads, axes), "alpha": (heads,)}, added=added)


def draw_grid_position(random: Random, axes: int, dim: int) -> tuple[Any, ...]:
    """Draw a position on a grid as plain data."""
    kind = random.choice(("rotary axes", "window bias", "quadratic"))
    step = 2 * axes
    if kind == "rotary axes" and dim >= step:
        rotary_dim = None if dim % step == 0 and random.random() < 0.6 else random.randrange(step, dim + 1, step)
        return (kind, rotary_dim, random.choice((10_000.0, 100.0)), random.random() < 0.4)
    if kind == "quadratic":
        return (kind, random.choice(("replicate", "zeros", "circular", "reflect")))
    return ("window bias", tuple(random.choice((1, 3, 5, 7)) for _ in range(axes)))
