"""Views on a grid: the coordinates of tokens, weights by offset, and pictures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from polyhead._checks import check_integer, check_integers, is_integer, short_repr
from polyhead.metrics import blockwise
from polyhead.metrics.attention_parts import DensePart, Part
from polyhead.neighbourhood import Grid, Lattice
from polyhead.neighbourhood.lattice import format_sizes, unravel_index
from polyhead.plots import QueryMarker, plot_around_query, plot_over_image

if TYPE_CHECKING:
    from matplotlib.figure import Figure

IndexOrPoint = int | Sequence[int]
# Rows and columns, or a `Grid`, whose prefix says how many special tokens are before its points.
GridArgument = Sequence[int] | Grid
# The largest number of offsets in `average_by_offset`.
_MAX_OFFSETS = 2**24
# Keys beyond a grid that are taken for special tokens: [CLS], a distillation token and registers. More of them hint at a wrong grid.
MAX_SPECIAL_TOKENS = 16
# Numbers of special tokens of common models, and the largest ratio of the sides of a grid that is suggested.
_COMMON_SPECIAL_TOKENS, _MAX_SUGGESTED_RATIO = (0, 1, 2, 5), 4


class TokenGrid(NamedTuple):
    """A lattice, and the number of queries and keys before it that have no coordinates: special tokens such as [CLS]."""

    lattice: Lattice
    queries: int
    keys: int

    def query_index(self, at: IndexOrPoint | None) -> int:
        """The index of a query, given as an index or as a point; by default the point in the middle."""
        outputs = self.lattice.outputs
        if is_integer(at):
            total = self.queries + math.prod(outputs)
            return check_integer("at", at, 0, total - 1, hint=f"there are {total} queries")
        if not math.prod(outputs):
            raise ValueError(
                f"at must be the index of a query, such as 0 for [CLS], where only keys are points of the grid, got {short_repr(at)}"
            )
        point: Any = tuple(n // 2 for n in outputs) if at is None else at
        if not isinstance(point, Sequence) or isinstance(point, str) or len(point) != len(outputs):
            raise ValueError(
                f"at must be a point of {format_sizes(outputs)} queries, (row, column), or the index of a query, got {short_repr(at)}"
            )
        index = 0
        for axis, (i, n) in enumerate(zip(point, outputs, strict=True)):
            index = index * n + check_integer(f"at[{axis}]", i, 0, n - 1)
        return self.queries + index

    def query_marker(self, index: int) -> QueryMarker:
        """A query for a picture; with a stride, its name includes its point among the keys."""
        if index < self.queries:
            return QueryMarker(None, f"token {index}")
        point = unravel_index(torch.tensor(index - self.queries), self.lattice.outputs)
        key_point = point * torch.tensor(self.lattice.stride)
        format_point = lambda x: f"({', '.join(map(str, x.tolist()))})"
        among_keys = f", at point {format_point(key_point)}" if max(self.lattice.stride) > 1 else ""
        return QueryMarker(tuple(key_point.tolist()), f"query {format_point(point)}{among_keys}")


def find_token_grid(part: Part, grid: GridArgument | None) -> TokenGrid:
    """The grid of a part: that of its neighbourhood, or one of the sizes `grid`, which fills its last keys."""
    if not isinstance(part, DensePart):
        raise ValueError(
            f"over must be a Grid for results on a grid, got {part.call.over!r}, whose nodes have no coordinates; for tokens in a "
            "sequence pass grid="
        )
    own, sizes = part.call.over.lattice, part.call.sizes
    if own is not None:
        if grid is not None and (not isinstance(grid, Sequence) or tuple(grid) != own.sizes):
            raise ValueError(
                f"grid must be {own.sizes}, the grid of this attention's keys, got {short_repr(grid)}; leave it out"
            )
        return TokenGrid(own._replace(prefix=0), own.prefix, own.prefix)
    if grid is None:
        raise ValueError(
            f"grid must be (height, width) where over has no coordinates, got None for {part.call.over!r}; pass (14, 14) for "
            "196 patches after [CLS]"
        )
    shape, prefix = read_grid_argument(grid)
    points = math.prod(shape)
    special = sizes.keys - points
    if special < 0:
        raise ValueError(
            f"grid must have at most as many points as there are keys, {sizes.keys}, got {format_sizes(shape)} = {points}"
        )
    if special > MAX_SPECIAL_TOKENS if prefix is None else special != prefix:
        rule = f"at most {MAX_SPECIAL_TOKENS}" if prefix is None else f"{prefix}"
        raise ValueError(
            f"grid must leave {rule} of {sizes.keys} keys for special tokens, got {format_sizes(shape)} = {points}, which leaves "
            f"{special}; {suggest_grids(sizes.keys)}for that many tokens in front pass grid=Grid({', '.join(map(str, shape))}, "
            f"prefix={special})"
        )
    # with fewer queries than points, all queries are special tokens, such as [CLS] attending to all patches
    outputs = shape if sizes.queries >= points else (0,) * len(shape)
    return TokenGrid(Lattice(shape, outputs, (1,) * len(shape)), sizes.queries - math.prod(outputs), special)


def read_grid_argument(grid: GridArgument) -> tuple[tuple[int, ...], int | None]:
    """The sizes of a grid and the number of special tokens before it; None if it is not given."""
    if isinstance(grid, Grid):
        return grid.sizes, grid.prefix
    shape = tuple(check_integers("grid", [grid] if is_integer(grid) else grid, hint="it is (height, width)"))
    if not shape:
        raise ValueError("grid must be (height, width), got ()")
    return shape, None


def fits_keys(grid: GridArgument, keys: int) -> bool:
    """Whether a grid and a plausible number of special tokens make up this many keys."""
    shape, prefix = read_grid_argument(grid)
    special = keys - math.prod(shape)
    return 0 <= special <= MAX_SPECIAL_TOKENS if prefix is None else special == prefix


def suggest_grids(keys: int) -> str:
    """Grids of rows and columns that fit a number of keys, for an error message: "32 x 32 or 16 x 64 would fit; "; "" if none does."""
    fitting = []
    for special in _COMMON_SPECIAL_TOKENS:
        for height in range(2, math.isqrt(max(0, keys - special)) + 1):
            width, rest = divmod(keys - special, height)
            if not rest and width <= _MAX_SUGGESTED_RATIO * height:
                fitting.append((height != width, special, width / height, height, width))
    names = [
        f"{height} x {width}" + (f" after {special} special token{'s' * (special > 1)}" if special else "")
        for _, special, _, height, width in sorted(fitting)[:2]
    ]
    return f"{' or '.join(names)} would fit; " if names else ""


def average_by_offset(
    part: Part, grid: TokenGrid, reach: int | Sequence[int], name: str = "reach"
) -> Float[Tensor, "... heads *window"]:
    """The weights by offset of the key from the query: see `Heads.average_by_offset`. `name` is the caller's argument for the reach."""
    assert isinstance(part, DensePart)
    sizes = grid.lattice.sizes
    reaches = (
        (check_integer(name, reach, 0),) * len(sizes) if is_integer(reach) else tuple(check_integers(name, reach, 0))
    )
    if len(reaches) != len(sizes):
        raise ValueError(f"{name} must be an integer, or one for each of {len(sizes)} axes, got {short_repr(reach)}")
    offsets = math.prod(2 * n + 1 for n in reaches)
    check_integer(f"{name}: the number of points around a query", offsets, 1, _MAX_OFFSETS)
    points = grid.lattice.query_coordinates(part.call.q.device)
    # special tokens have rows too, so that the index of a query is its row
    points = torch.cat((points.new_zeros(grid.queries, len(sizes)), points))
    arguments = points, sizes, (grid.queries, grid.keys), reaches
    by_offset: Tensor = blockwise.compute_one(part, "mean_weights_by_offset", *arguments)
    return by_offset


def query_weights(
    part: Part, grid: TokenGrid, index: int
) -> tuple[Float[Tensor, "... heads *sizes"], Float[Tensor, "... heads"]]:
    """The weights of one query on the points, and its weight on special tokens."""
    assert isinstance(part, DensePart)
    if part.queries is not None and index not in part.queries.tolist():
        raise ValueError(f"at must be one of the queries that this view selects, got query {index}")
    query = torch.full((1,), index, device=part.call.q.device)
    w = part._replace(queries=query).weights()[..., 0, :]
    if part.keys is not None:
        w = w.new_zeros(*w.shape[:-1], part.call.sizes.keys).index_copy(-1, part.keys, w)
    return w[..., grid.keys :].unflatten(-1, grid.lattice.sizes), w[..., : grid.keys].sum(-1)


def plot_query(
    part: Part, grid: TokenGrid, at: IndexOrPoint | None, image: Any, measure: str, row: tuple[int, int]
) -> Figure:
    """The weights of one query over the image; the part has one row of a batch: `row` is its index and the number of rows."""
    _check_plottable(grid, (2,))
    index = grid.query_index(at)
    on_points, on_special = (x.detach() for x in query_weights(part, grid, index))
    special = on_special.flatten().tolist() if grid.keys else None
    heads = part.head_numbers
    figure = plot_over_image(on_points.flatten(0, -3), heads, image, grid.query_marker(index), special, measure)
    if row[1] > 1:
        # the rows may be windows of one image
        figure.suptitle(f"row {row[0]} of {row[1]} of the batch", fontsize=9)
    return figure


def plot_offsets(part: Part, grid: TokenGrid, reach: int | Sequence[int], measure: str) -> Figure:
    """The weights by offset, averaged over the queries; the part has one row of a batch."""
    _check_plottable(grid, (1, 2))
    maps = average_by_offset(part, grid, reach, "around").detach()
    # a grid with one axis becomes a picture with one row
    maps = maps.unsqueeze(-2) if len(grid.lattice.sizes) == 1 else maps
    return plot_around_query(maps.flatten(0, -3), part.head_numbers, measure)


def _check_plottable(grid: TokenGrid, axes: tuple[int, ...]) -> None:
    number = len(grid.lattice.sizes)
    if number not in axes:
        raise ValueError(
            f"grid must have {' or '.join(map(str, axes))} axes for this picture, got {number}; heads.average_by_offset and heads.weights "
            "return the numbers"
        )
