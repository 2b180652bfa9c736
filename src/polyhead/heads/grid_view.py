"""Where the items of a view stand: points of a grid, behind special tokens that stand nowhere."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from polyhead._checks import check_integer, check_integers, is_integer, shown
from polyhead.metrics import blockwise
from polyhead.metrics.blockwise import Part
from polyhead.metrics.compute import AnyPart
from polyhead.metrics.edges import EdgePart
from polyhead.neighbourhood import Lattice
from polyhead.neighbourhood.grid import points as grid_points
from polyhead.neighbourhood.grid import written
from polyhead.plots import Asking, plot_around, plot_over

if TYPE_CHECKING:
    from matplotlib.figure import Figure

At = int | Sequence[int]
# Points around a query that are told apart at most.
_AROUND = 2**24


class Points(NamedTuple):
    """A lattice, and how many of the queries and keys, the first ones, are no points of it: tokens such as [CLS]."""

    lattice: Lattice
    queries: int
    keys: int

    def number(self, at: At | None) -> int:
        """A query's number: given as one, or as a point; the point in the middle unless given."""
        outputs = self.lattice.outputs
        if is_integer(at):
            total = self.queries + math.prod(outputs)
            return check_integer("at", at, 0, total - 1, hint=f"there are {total} queries")
        if not math.prod(outputs):
            raise ValueError("at: no query is a point of the grid; pass a query's number, such as 0 for [CLS]")
        place: Any = tuple(n // 2 for n in outputs) if at is None else at
        if not isinstance(place, Sequence) or isinstance(place, str) or len(place) != len(outputs):
            raise ValueError(
                f"at must be a point of {written(outputs)} queries, (row, column), or a query's number, got {shown(at)}"
            )
        number = 0
        for axis, (i, n) in enumerate(zip(place, outputs, strict=True)):
            number = number * n + check_integer(f"at[{axis}]", i, 0, n - 1)
        return self.queries + number

    def asking(self, number: int) -> Asking:
        """A query for a picture; where the queries stand on fewer points than the keys, with its place among these."""
        if number < self.queries:
            return Asking(None, f"token {number}")
        point = grid_points(torch.tensor(number - self.queries), self.lattice.outputs)
        among_keys = point * torch.tensor(self.lattice.stride)
        named = lambda at: f"({', '.join(map(str, at.tolist()))})"
        stands = f", at point {named(among_keys)}" if max(self.lattice.stride) > 1 else ""
        return Asking(tuple(among_keys.tolist()), f"query {named(point)}{stands}")


def points_of(part: AnyPart, grid: Sequence[int] | None) -> Points:
    """Where the items of a part stand: as its neighbourhood says, or on a grid that fills its last keys."""
    if isinstance(part, EdgePart):
        raise ValueError("grid: this attention is on a graph, whose nodes stand nowhere; it needs a Grid, or grid=")
    own, sizes = part.call.over.grid, part.call.sizes
    if own is not None:
        if grid is not None and (not isinstance(grid, Sequence) or tuple(grid) != own.sizes):
            raise ValueError(f"grid: it is {grid!r}, but the keys of this attention stand on {own.sizes}")
        return Points(own._replace(prefix=0), own.prefix, own.prefix)
    if grid is None:
        raise ValueError(
            f"grid: {part.call.over!r} does not say where items stand; pass grid=(height, width), such as (14, 14) for 196 "
            "patches behind [CLS]"
        )
    given = tuple(check_integers("grid", [grid] if is_integer(grid) else grid, hint="it is (height, width)"))
    if not given:
        raise ValueError("grid must be (height, width), got ()")
    number = math.prod(given)
    if number > sizes.keys:
        raise ValueError(f"grid: {written(given)} are {number} points, but there are {sizes.keys} keys")
    # queries that are not as many as the points are tokens of their own, such as [CLS] asking all patches
    outputs = given if sizes.queries >= number else (0,) * len(given)
    return Points(Lattice(given, outputs, (1,) * len(given)), sizes.queries - math.prod(outputs), sizes.keys - number)


def averaged_around(
    part: AnyPart, points: Points, reach: int | Sequence[int], name: str = "reach"
) -> Float[Tensor, "... heads *window"]:
    """The weights by where the key stands from the query: see `Heads.around`; `name` is what the caller calls the reach."""
    assert isinstance(part, Part)
    sizes = points.lattice.sizes
    each = (check_integer(name, reach, 0),) * len(sizes) if is_integer(reach) else tuple(check_integers(name, reach, 0))
    if len(each) != len(sizes):
        raise ValueError(f"{name} must be an integer, or one for each of {len(sizes)} axes, got {shown(reach)}")
    check_integer(f"{name}: the number of points around a query", math.prod(2 * n + 1 for n in each), 1, _AROUND)
    asking = part.numbers("queries")
    asking = asking[asking >= points.queries]
    at = points.lattice.queries(part.call.q.device)
    # special tokens have no place, but are counted
    at = torch.cat((at.new_zeros(points.queries, len(sizes)), at))
    return blockwise.around(part._replace(queries=asking), at, sizes, points.keys, each)


def from_one(
    part: AnyPart, points: Points, number: int
) -> tuple[Float[Tensor, "... heads *sizes"], Float[Tensor, "... heads"]]:
    """One query's weights on the points, and what it has on special tokens."""
    assert isinstance(part, Part)
    if number not in part.numbers("queries").tolist():
        raise ValueError(f"at: query {number} is not among those that this view looks at")
    w = part._replace(queries=torch.tensor([number], device=part.call.q.device)).weights()[..., 0, :]
    if part.keys is not None:
        w = w.new_zeros(*w.shape[:-1], part.call.sizes.keys).index_copy(-1, part.keys, w)
    return w[..., points.keys :].unflatten(-1, points.lattice.sizes), w[..., : points.keys].sum(-1)


def drawn_from(part: AnyPart, points: Points, at: At | None, image: Any, measure: str) -> Figure:
    """Where one query looks, over the image; of one row of a batch."""
    _check_flat(points, (2,))
    number = points.number(at)
    on_points, on_special = (x.detach() for x in from_one(part, points, number))
    special = on_special.flatten().tolist() if points.keys else None
    numbers = part.numbers("heads").tolist()
    return plot_over(on_points.flatten(0, -3), numbers, image, points.asking(number), special, measure)


def drawn_around(part: AnyPart, points: Points, reach: int | Sequence[int], measure: str) -> Figure:
    """Where queries look on average, seen from themselves; of one row of a batch."""
    _check_flat(points, (1, 2))
    maps = averaged_around(part, points, reach, "around").detach()
    # a grid of one axis is drawn as one row
    maps = maps.unsqueeze(-2) if len(points.lattice.sizes) == 1 else maps
    return plot_around(maps.flatten(0, -3), part.numbers("heads").tolist(), measure)


def _check_flat(points: Points, axes: tuple[int, ...]) -> None:
    number = len(points.lattice.sizes)
    if number not in axes:
        raise ValueError(
            f"plot: the grid has {number} {'axis' if number == 1 else 'axes'}, and this picture two; heads.around and "
            "heads.weights have the numbers"
        )
