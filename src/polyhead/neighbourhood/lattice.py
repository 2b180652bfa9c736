"""Coordinates of the points of an image: items are numbered row by row, along one, two, three or more axes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from polyhead._checks import check_integer, check_integers, short_repr
from polyhead._torch import can_keep_tensors, current_stream_id
from polyhead.neighbourhood.base import Neighbourhood
from polyhead.neighbourhood.shapes import Sizes

# Suggest `prefix=` for up to this many surplus items.
_MAX_SUGGESTED_PREFIX = 8


class Lattice(NamedTuple):
    """The coordinates of items: keys at every point of a grid, queries at `stride` times the points of another.

    The first `prefix` queries and keys are special tokens without coordinates, such as [CLS].
    """

    sizes: tuple[int, ...]
    outputs: tuple[int, ...]
    stride: tuple[int, ...]
    prefix: int = 0

    @property
    def queries_differ_from_keys(self) -> bool:
        """Whether the queries differ from the keys."""
        return self.sizes != self.outputs or max(self.stride) > 1

    def key_coordinates(self, device: torch.device) -> Int[Tensor, "keys axes"]:
        """The coordinates of the keys; prefix tokens get those of the first point. They are kept: do not change them."""
        return self._query_and_key_coordinates(device)[1]

    def query_coordinates(self, device: torch.device) -> Int[Tensor, "queries axes"]:
        """The coordinates of the queries among the keys; beyond the last key where there are more outputs."""
        return self._query_and_key_coordinates(device)[0]

    def _query_and_key_coordinates(
        self, device: torch.device
    ) -> tuple[Int[Tensor, "queries axes"], Int[Tensor, "keys axes"]]:
        if can_keep_tensors(device):
            return _kept_coordinates(self, device, current_stream_id(device))
        return _coordinates(self, device)

    def check(self, name: str, sizes: Sizes) -> None:
        """Raise unless there are as many keys and queries as points and prefix tokens."""
        for what, each, number in (("keys", self.sizes, sizes.keys), ("queries", self.outputs, sizes.queries)):
            expected = math.prod(each) + self.prefix
            if expected != number:
                tokens = f" and a prefix of {self.prefix}" if self.prefix else ""
                hint = "an image (batch, channels, *sizes) becomes items by x.flatten(2).transpose(1, 2)"
                if what == "queries" and number == math.prod(self.sizes):
                    hint = "with a stride, pass every second point as query, x.unflatten(1, sizes)[:, ::2, ::2].flatten(1, 2), and all as key"
                elif 0 < number - expected <= _MAX_SUGGESTED_PREFIX and name == "Grid":
                    hint = f"for tokens such as [CLS] in front pass prefix={number - expected + self.prefix}"
                raise ValueError(
                    f"{name}: the number of {what} must be {expected}, {format_sizes(each)} points{tokens}, got {number}; {hint}"
                )


def _coordinates(
    lattice: Lattice, device: torch.device
) -> tuple[Int[Tensor, "queries axes"], Int[Tensor, "keys axes"]]:
    """The coordinates of queries and keys; one tensor where these are the same items."""
    ones = (1,) * len(lattice.sizes)

    def points(sizes: tuple[int, ...], stride: tuple[int, ...]) -> Tensor:
        at = unravel_index(torch.arange(math.prod(sizes), device=device), sizes, stride)
        return torch.nn.functional.pad(at, (0, 0, lattice.prefix, 0)) if lattice.prefix else at

    keys = points(lattice.sizes, ones)
    return points(lattice.outputs, lattice.stride) if lattice.queries_differ_from_keys else keys, keys


@lru_cache(maxsize=16)
def _kept_coordinates(lattice: Lattice, device: torch.device, stream: int) -> tuple[Tensor, Tensor]:
    """The coordinates, for one stream of the device each."""
    # a tensor made in inference mode could not be saved for a backward pass later
    with torch.inference_mode(False):
        return _coordinates(lattice, device)


def unravel_index(
    index: Int[Tensor, "*any"], sizes: tuple[int, ...], stride: tuple[int, ...] | None = None
) -> Int[Tensor, "*any axes"]:
    """Indices of items, row by row, as coordinates of points, which are `stride` apart along each axis."""
    axes = []
    for axis in reversed(range(len(sizes))):
        size, step = max(sizes[axis], 1), 1 if stride is None else stride[axis]
        axes.append(index % size if step == 1 else index % size * step)
        index = index // size
    return torch.stack(axes[::-1], -1)


def ravel_index(points: Int[Tensor, "*any axes"], sizes: tuple[int, ...]) -> Int[Tensor, "*any"]:
    """Coordinates of points as indices of items, row by row."""
    index = torch.zeros_like(points[..., 0])
    for axis, size in enumerate(sizes):
        index = index * size + points[..., axis]
    return index


class LatticeNeighbourhood(Neighbourhood):
    """The base of neighbourhoods of points: it checks and holds the fields of a lattice."""

    sizes: tuple[int, ...]
    outputs: tuple[int, ...]
    stride: tuple[int, ...]
    prefix: int = 0

    @property
    def lattice(self) -> Lattice:
        return Lattice(self.sizes, self.outputs, self.stride, self.prefix)

    def check(self, sizes: Sizes) -> None:
        self.lattice.check(type(self).__name__, sizes)

    def _set_lattice(self, sizes: Any, stride: object, outputs: Sequence[int] | None) -> None:
        name = type(self).__name__
        self.sizes = integers_per_axis(name, "sizes", sizes, None)
        self.stride = integers_per_axis(name, "stride", stride, len(self.sizes))
        if outputs is None:
            self.outputs = tuple(-(-n // step) for n, step in zip(self.sizes, self.stride, strict=True))
        else:
            self.outputs = integers_per_axis(name, "outputs", outputs, len(self.sizes))
            for n, step in zip(self.outputs, self.stride, strict=True):
                check_integer(f"{name}: (outputs - 1) * stride, the position of the last query,", (n - 1) * step, 0)

    def _query_index(self, query: Tensor) -> Tensor:
        """The index of a query among the queries, from its position along the keys."""
        return query - (math.prod(self.sizes) - math.prod(self.outputs))


def format_sizes(sizes: tuple[int, ...]) -> str:
    """Sizes as people write them: 64 x 64."""
    return " x ".join(map(str, sizes))


def integers_per_axis(owner: str, name: str, value: Any, axes: int | None) -> tuple[int, ...]:
    """One integer per axis, 1 or more, from one integer for all axes or a sequence."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        return (check_integer(f"{owner}: {name}", value),) * (axes or 1)
    if not value or (axes is not None and len(value) != axes):
        rule = "one integer per axis" if axes is None else f"one integer, or one for each of {axes} axes"
        raise ValueError(f"{owner}: {name} must be {rule}, got {short_repr(value)}")
    return tuple(check_integers(f"{owner}: {name}", value))
