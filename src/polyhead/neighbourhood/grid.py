"""Who may attend to whom in an image: items are the points of a grid of one, two, three or more axes, row by row."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise, product
from typing import Any, NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from polyhead._checks import LARGEST, as_tensor, check_integer, check_integers, kind_of, shown
from polyhead._torch import values_unavailable
from polyhead.neighbourhood.base import Interval, Neighbourhood, Sizes

# So many items too many are taken for tokens that stand nowhere.
_TOKENS = 8
PADDINGS = ("zeros", "replicate", "circular", "reflect")


class Lattice(NamedTuple):
    """Where items stand: keys at every point of a grid, queries at `stride` times the points of another.

    The first `prefix` of both are tokens that stand nowhere, such as [CLS].
    """

    sizes: tuple[int, ...]
    outputs: tuple[int, ...]
    stride: tuple[int, ...]
    prefix: int = 0

    @property
    def sparse(self) -> bool:
        """Whether the queries are not the keys."""
        return self.sizes != self.outputs or max(self.stride) > 1

    def keys(self, device: torch.device) -> Int[Tensor, "keys axes"]:
        """The keys' points; tokens that stand nowhere have the first."""
        return self._behind(points(torch.arange(math.prod(self.sizes), device=device), self.sizes))

    def queries(self, device: torch.device) -> Int[Tensor, "queries axes"]:
        """The queries' points, counted as the keys' are; beyond the last key where the outputs are more."""
        number = torch.arange(math.prod(self.outputs), device=device)
        return self._behind(points(number, self.outputs) * torch.tensor(self.stride, device=device))

    def _behind(self, points: Int[Tensor, "points axes"]) -> Int[Tensor, "items axes"]:
        return torch.nn.functional.pad(points, (0, 0, self.prefix, 0)) if self.prefix else points

    def check(self, name: str, sizes: Sizes) -> None:
        """Raise where there are not as many keys and queries as points."""
        for what, each, number in (("keys", self.sizes, sizes.keys), ("queries", self.outputs, sizes.queries)):
            wanted = math.prod(each) + self.prefix
            if wanted != number:
                tokens = f" and {self.prefix} before them" if self.prefix else ""
                hint = "an image (batch, channels, *sizes) becomes items by x.flatten(2).transpose(1, 2)"
                if what == "queries" and number == math.prod(self.sizes):
                    hint = "with a stride, pass the points that ask as query, x.unflatten(1, sizes)[:, ::2, ::2].flatten(1, 2), and all as key"
                elif 0 < number - wanted <= _TOKENS and name == "Grid":
                    hint = f"for tokens such as [CLS] in front pass prefix={number - wanted + self.prefix}"
                raise ValueError(
                    f"{name}: {written(each)} are {math.prod(each)} points{tokens}, but there are {number} {what}; {hint}"
                )


def points(number: Int[Tensor, "*any"], sizes: tuple[int, ...]) -> Int[Tensor, "*any axes"]:
    """Items' numbers, counted row by row, as points of the grid."""
    axes = []
    for size in reversed(sizes):
        axes.append(number % max(size, 1))
        number = number // max(size, 1)
    return torch.stack(axes[::-1], -1)


def numbers(points: Int[Tensor, "*any axes"], sizes: tuple[int, ...]) -> Int[Tensor, "*any"]:
    """Points of the grid as items' numbers."""
    number = torch.zeros_like(points[..., 0])
    for axis, size in enumerate(sizes):
        number = number * size + points[..., axis]
    return number


class _OnLattice(Neighbourhood):
    """What neighbourhoods of points share: a lattice, written out and checked."""

    sizes: tuple[int, ...]
    outputs: tuple[int, ...]
    stride: tuple[int, ...]
    prefix: int = 0

    @property
    def grid(self) -> Lattice:
        return Lattice(self.sizes, self.outputs, self.stride, self.prefix)

    def check(self, sizes: Sizes) -> None:
        self.grid.check(type(self).__name__, sizes)

    def _place(self, sizes: Any, stride: object, outputs: Sequence[int] | None) -> None:
        name = type(self).__name__
        self.sizes = _each(name, "sizes", sizes, None)
        self.stride = _each(name, "stride", stride, len(self.sizes))
        if outputs is None:
            self.outputs = tuple(-(-n // step) for n, step in zip(self.sizes, self.stride, strict=True))
        else:
            self.outputs = _each(name, "outputs", outputs, len(self.sizes))
            for n, step in zip(self.outputs, self.stride, strict=True):
                check_integer(f"{name}: (outputs - 1) * stride, where the last query stands,", (n - 1) * step, 0)

    def _number(self, query: Tensor) -> Tensor:
        """A query's own number, where it is given as counted along the keys."""
        return query - (math.prod(self.sizes) - math.prod(self.outputs))


class Grid(_OnLattice):
    """Pixels, patches or voxels: each attends to those within a window around it, or to all.

    Args:
        sizes: how many points along each axis: `Grid(height, width)`, or `Grid(image.shape[-2:])`; items are counted row by row.
        window: how many points a query sees along each axis, itself in the middle: an odd number, or one an axis, where None is
            all of that axis; None for all points. At a border the window is cut off.
        dilation: how far apart the points of a window are.
        stride: how far apart the queries are, where they are not the keys: `mha(x[:, ::2], x, over=Grid(64, stride=2))`.
        outputs: how many queries there are along each axis; as many as the stride leaves of the points, unless given.
        prefix: how many tokens there are before the points that stand nowhere, such as [CLS]. They see all and are seen by all;
            positions leave them alone.
    """

    def __init__(
        self,
        *sizes: int | Sequence[int],
        window: int | Sequence[int | None] | None = None,
        dilation: int | Sequence[int] = 1,
        stride: int | Sequence[int] = 1,
        outputs: Sequence[int] | None = None,
        prefix: int = 0,
    ) -> None:
        self._place(_sizes(sizes), stride, outputs)
        prefix = check_integer("Grid: prefix", prefix, 0)
        if prefix and self.grid.sparse:
            raise ValueError(f"Grid: prefix is {prefix}, but queries that are not the keys have no tokens before them")
        self.prefix = prefix
        self.dilation = _each("Grid", "dilation", dilation, len(self.sizes))
        self.window = None if window is None else _window(window, len(self.sizes))
        if self.window is not None:
            # of an axis without a window all points are seen
            self.dilation = tuple(1 if n is None else d for n, d in zip(self.window, self.dilation, strict=True))
        if self.window is None and any(step > 1 for step in self.dilation):
            raise ValueError(f"Grid: dilation is {dilation!r}, but there is no window whose points could be apart")
        self.full = self.window is None
        self.exact = self.full or (len(self.sizes) == 1 and self.dilation == (1,) and not self.prefix)

    def _restore(self, state: dict[str, Any]) -> None:
        options = {name: state[name] for name in ("window", "dilation", "stride", "outputs", "prefix")}
        Grid.__init__(self, *state["sizes"], **options)

    def __eq__(self, other: object) -> bool:
        return type(other) is Grid and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash((self.grid, self.window, self.dilation))

    @property
    def reach(self) -> tuple[int, ...]:
        """How far a query sees to either side, in points of the window; no further than points can be apart."""
        window = (None,) * len(self.sizes) if self.window is None else self.window
        each = zip(window, self.sizes, self.outputs, self.stride, self.dilation, strict=True)
        far = [(n, (max(size, (number - 1) * stride + 1) - 1) // step) for n, size, number, stride, step in each]
        return tuple(most if n is None else min(n // 2, most) for n, most in far)

    @property
    def offset_is_unique(self) -> bool:
        """Whether the difference of two items' numbers tells their difference along each axis, within the window."""
        wide = zip(self.sizes[1:], self.reach[1:], self.dilation[1:], strict=True)
        return not self.grid.sparse and not self.prefix and all(2 * reach * step < n for n, reach, step in wide)

    def offset_of(self, distance: Int[Tensor, "*any"]) -> Int[Tensor, "*any axes"]:
        """The difference along each axis, from that of two items' numbers, where these are told apart."""
        axes = []
        for size in reversed(self.sizes[1:]):
            rest = (distance + size // 2) % size - size // 2
            axes.append(rest)
            distance = torch.div(distance - rest, size, rounding_mode="floor")
        return torch.stack([distance, *reversed(axes)], -1)

    def allows(self, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        if self.window is None:
            return torch.ones(torch.broadcast_shapes(query.shape, key.shape), dtype=torch.bool, device=key.device)
        # small numbers, an axis at a time: what is made here is of queries x keys
        number = self._number(query)
        at = points((number - self.prefix).clamp(min=0), self.outputs).int()
        there = points((key - self.prefix).clamp(min=0), self.sizes).int()
        allowed: Tensor | None = None
        for axis, (stride, reach, step) in enumerate(zip(self.stride, self.reach, self.dilation, strict=True)):
            apart = there[..., axis] - at[..., axis] * stride
            near = apart.abs() <= reach * step
            near = near if step == 1 else near & (apart % step == 0)
            allowed = near if allowed is None else allowed & near
        assert allowed is not None
        return allowed | (number < self.prefix) | (key < self.prefix) if self.prefix else allowed

    def interval(self, queries: int, keys: int, device: torch.device) -> Interval:
        if self.window is None or self.prefix:
            return super().interval(queries, keys, device)
        middle = self.grid.queries(device)
        reach = torch.tensor([n * step for n, step in zip(self.reach, self.dilation, strict=True)], device=device)
        last = torch.tensor(self.sizes, device=device) - 1
        low, high = (middle - reach).clamp(min=0), torch.minimum(middle + reach, last)
        first = numbers(torch.minimum(low, last), self.sizes)
        return first, torch.where((low <= high).all(-1), numbers(high, self.sizes) + 1, first)

    def offsets(self) -> Int[Tensor, "window axes"]:
        """Where the points of a window stand from its middle, row by row."""
        sides = (range(-n * step, n * step + 1, step) for n, step in zip(self.reach, self.dilation, strict=True))
        return torch.tensor(list(product(*sides)))

    def window_index(self, device: torch.device) -> Int[Tensor, "queries window"]:
        """The points in each query's window by their numbers, row by row; -1 beyond the border."""
        at = self.grid._replace(prefix=0).queries(device)[:, None] + self.offsets().to(device)
        inside = ((at >= 0) & (at < torch.tensor(self.sizes, device=device))).all(-1)
        return numbers(at, self.sizes).masked_fill(~inside, -1)

    def pairs(self, device: torch.device) -> Int[Tensor, "2 pairs"]:
        """All that is allowed, as keys above queries."""
        index = self.window_index(device)
        query, place = (index >= 0).nonzero(as_tuple=True)
        near = torch.stack((index[query, place], query)) + self.prefix
        if not self.prefix:
            return near
        token, item = (torch.arange(n, device=device) for n in (self.prefix, math.prod(self.sizes) + self.prefix))
        seeing, seen = torch.cartesian_prod(item, token).T, torch.cartesian_prod(token, item[self.prefix :]).T
        return torch.cat((seeing, seen, near), 1)

    def __repr__(self) -> str:
        more = [f"window={_short(self.window)}"] if self.window is not None else []
        more += [f"dilation={_short(self.dilation)}"] if max(self.dilation) > 1 else []
        if max(self.stride) > 1 or self.outputs != self.sizes:
            more.append(f"stride={_short(self.stride)}, outputs={self.outputs}")
        more += [f"prefix={self.prefix}"] if self.prefix else []
        return f"Grid({', '.join([*map(str, self.sizes), *more])})"


class Offsets(_OnLattice):
    """Each head sees one point, so far from the query: a tap of a convolution. A head may also see several.

    A query at point p, and a head with offset Δ, see the key at p + Δ. `padding` says what stands there beyond the border:
    nothing ("zeros": a query with no key gets zero), the nearest point ("replicate"), the other side ("circular"), or the
    points once more in reverse ("reflect").

    Args:
        offsets: whole numbers (heads, axes), or (heads, several, axes).
        sizes: how many points along each axis.
        stride: how far apart the queries are; the first stands at the first point.
        outputs: how many queries there are along each axis; as many as the stride leaves of the points, unless given.
        padding: what stands beyond the border.
    """

    tensors = ("index",)

    def __init__(
        self,
        offsets: Sequence[Sequence[int]] | Sequence[Sequence[Sequence[int]]] | Tensor,
        sizes: Sequence[int],
        *,
        stride: int | Sequence[int] = 1,
        outputs: Sequence[int] | None = None,
        padding: str = "zeros",
    ) -> None:
        self._place(sizes, stride, outputs)
        given = _offsets(offsets, len(self.sizes))
        if padding not in PADDINGS:
            raise ValueError(f"Offsets: padding is {padding!r}; it must be one of {', '.join(map(repr, PADDINGS))}")
        self.padding = padding
        self.heads, self.several = len(given), 1 if given.dim() == 2 else given.shape[1]
        self.by_head = self.heads > 1
        entries = self.heads * self.several * math.prod(self.outputs)
        check_integer("Offsets: heads * several * outputs, the entries of its table,", entries, 0)
        # of each head and query the keys' numbers, -1 for none
        self.index: Int[Tensor, "heads queries several"] = self._index(
            given.reshape(self.heads, 1, -1, len(self.sizes))
        )

    def _index(self, offsets: Int[Tensor, "heads 1 several axes"]) -> Int[Tensor, "heads queries several"]:
        at = self.grid.queries(offsets.device)[:, None] + offsets
        found = torch.stack([folded(at[..., axis], n, self.padding) for axis, n in enumerate(self.sizes)], -1)
        index = numbers(found, self.sizes).masked_fill((found < 0).any(-1), -1)
        for place in range(1, self.several):
            # a key that a head sees at two offsets is one key
            seen = (index[..., :place] == index[..., place, None]).any(-1)
            index[..., place] = index[..., place].masked_fill(seen, -1)
        return index

    def _restore(self, state: dict[str, Any]) -> None:
        self._place(state["sizes"], state["stride"], state["outputs"])
        index = self._checked(state["index"].clone())
        # offsets are not kept, but the keys that they lead to: any will do for what else there is to check
        any_offset = torch.zeros(1, len(self.sizes), dtype=torch.long, device=index.device)
        Offsets.__init__(
            self, any_offset, self.sizes, stride=self.stride, outputs=self.outputs, padding=state["padding"]
        )
        self.heads, _, self.several = index.shape
        self.by_head, self.index = self.heads > 1, index

    def _checked(self, index: Int[Tensor, "heads queries several"]) -> Int[Tensor, "heads queries several"]:
        """An index from elsewhere, if it could be one of `_index`: it names keys that are there, and none of them twice."""
        queries, last = math.prod(self.outputs), math.prod(self.sizes) - 1
        if index.dtype != torch.long or index.dim() != 3 or index.shape[1] != queries or not index.numel():
            raise ValueError(
                f"Offsets: index must be int64 (heads, {queries}, several), got {index.dtype} of shape {tuple(index.shape)}"
            )
        if values_unavailable(index):
            return index
        low, high = (int(end) for end in index.aminmax())
        if low < -1 or high > last:
            raise ValueError(f"Offsets: index must lie from -1 to {last}, got {low} to {high}")
        ranked = index.sort(-1).values
        if bool(((ranked.diff(dim=-1) == 0) & (ranked[..., 1:] >= 0)).any()):
            raise ValueError("Offsets: index must name a key once per head and query, got one twice")
        return index

    def check(self, sizes: Sizes) -> None:
        super().check(sizes)
        if self.heads != sizes.heads:
            raise ValueError(f"Offsets: there are offsets for {self.heads} heads, but there are {sizes.heads} heads")

    def allows(self, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        number = self._number(query.flatten()).clamp(0, max(self.index.shape[1] - 1, 0))
        # (heads, queries, several)
        index = self.index.to(key.device)[head.flatten()][:, number]
        return (index[..., None, :] == key.flatten()[:, None]).any(-1)

    def interval(self, queries: int, keys: int, device: torch.device) -> Interval:
        index = self.index.to(device).movedim(1, 0).flatten(1)
        seen = index >= 0
        stop = torch.where(seen, index + 1, 0).amax(-1)
        return torch.minimum(torch.where(seen, index, keys).amin(-1), stop), stop

    def __repr__(self) -> str:
        several = "" if self.several == 1 else f" x {self.several}"
        heads = "1 head" if self.heads == 1 else f"{self.heads} heads"
        return (
            f"Offsets({heads}{several}, {written(self.sizes)}, stride={_short(self.stride)}, padding={self.padding!r})"
        )


def _offsets(offsets: Any, axes: int) -> Int[Tensor, "heads *several axes"]:
    what = f"of integers (heads, axes) or (heads, several, axes), with {axes} axes"
    given = as_tensor("Offsets: offsets", offsets, what)
    numbers = given.dtype in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
    if not numbers or given.dim() not in (2, 3) or given.shape[-1] != axes or not given.numel():
        raise ValueError(f"Offsets: offsets must be a tensor {what}, got {kind_of(given)}")
    given = given.long()
    hidden = values_unavailable() or type(given) is not Tensor or given.is_meta
    if not hidden and bool((given.clamp(-LARGEST, LARGEST) != given).any()):
        raise ValueError(
            f"Offsets: offsets must be in [{-LARGEST}, {LARGEST}], got {int(given.min())} to {int(given.max())}"
        )
    return given


def folded(at: Int[Tensor, "*any"], size: int, padding: str) -> Int[Tensor, "*any"]:
    """The point that stands where `at` says, along one axis; -1 for none."""
    if padding == "replicate":
        return at.clamp(0, size - 1)
    if padding == "circular":
        return at % size
    if padding == "reflect":
        period = max(2 * (size - 1), 1)
        return size - 1 - (at % period - (size - 1)).abs()
    return at.masked_fill((at < 0) | (at >= size), -1)


def written(sizes: tuple[int, ...]) -> str:
    """Sizes as people write them: 64 x 64."""
    return " x ".join(map(str, sizes))


def _short(each: tuple[Any, ...]) -> Any:
    return each[0] if all(a == b for a, b in pairwise(each)) else each


def _sizes(given: tuple[Any, ...]) -> tuple[Any, ...]:
    """Sizes as they were passed: each by itself, or all in one."""
    first = given[0] if given else None
    if isinstance(first, Sequence) and len(given) == 1:
        return tuple(first)
    if isinstance(first, Sequence):
        raise ValueError(f"Grid: sizes is {given!r}; the window is passed by its name: Grid({first!r}, window=…)")
    # torch's compiler can ask no such thing of an integer
    if not isinstance(first, int) and getattr(first, "ndim", 0) > 0:
        shape = tuple(getattr(first, "shape", ()))
        raise ValueError(
            f"Grid: sizes is something of shape {shape}; pass the sizes of an image: Grid(*image.shape[-2:])"
        )
    return given


def _window(given: Any, axes: int) -> tuple[int | None, ...]:
    """One odd number an axis, or None for all of it."""
    listed = isinstance(given, Sequence) and not isinstance(given, str)
    numbers = tuple(1 if n is None else n for n in given) if listed else given
    known = _each("Grid", "window", numbers, axes)
    if any(n % 2 == 0 for n in known):
        raise ValueError(
            f"Grid: window is {given!r}; it must be odd, for the query to be its middle (7 reaches 3 to each side). "
            "Windows of any form are Offsets"
        )
    return tuple(None if n is None else known[axis] for axis, n in enumerate(given)) if numbers is not given else known


def _each(owner: str, name: str, given: Any, axes: int | None) -> tuple[int, ...]:
    """One integer an axis, 1 or more, from one for all or one each."""
    if not isinstance(given, Sequence) or isinstance(given, str):
        return (check_integer(f"{owner}: {name}", given),) * (axes or 1)
    if not given or (axes is not None and len(given) != axes):
        wanted = "one integer per axis" if axes is None else f"one integer, or one for each of {axes} axes"
        raise ValueError(f"{owner}: {name} must be {wanted}, got {shown(given)}")
    return tuple(check_integers(f"{owner}: {name}", given))
