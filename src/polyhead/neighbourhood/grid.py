"""Who may attend to whom in an image: `Grid` and `Offsets`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise, product
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from polyhead._checks import LARGEST_INT32, as_tensor, check_integer, count_of, describe_type
from polyhead._torch import are_values_readable, is_tracing_or_dataless
from polyhead.neighbourhood.lattice import (
    LatticeNeighbourhood,
    format_sizes,
    integers_per_axis,
    ravel_index,
    unravel_index,
)
from polyhead.neighbourhood.mask_mods import MaskMod, allow_all, device_numbers
from polyhead.neighbourhood.shapes import Band, KeyInterval, Sizes

PADDING_MODES = ("zeros", "replicate", "circular", "reflect")


class Grid(LatticeNeighbourhood):
    """Pixels, patches or voxels: each attends to those in a window around it, or to all.

    Args:
        sizes: the number of points along each axis: `Grid(height, width)`, or `Grid(image.shape[-2:])`. Items are numbered row by
            row.
        window: the number of points that a query sees along each axis, centred on the query: an odd integer, or one per axis, where
            None means the whole axis. None: all points. At a border the window is cut off.
        dilation: the distance between neighbouring points of a window.
        stride: the distance between neighbouring queries, where queries are not the keys: `mha(x[:, ::2], x, over=Grid(64, stride=2))`.
        outputs: the number of queries along each axis; by default as many as the stride leaves.
        prefix: the number of special tokens before the points, such as [CLS]. They attend to all and all attend to them; positions
            do not affect them.
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
        self._set_lattice(_unpack_sizes(sizes), stride, outputs)
        prefix = check_integer("Grid: prefix", prefix, 0)
        if prefix and self.lattice.queries_differ_from_keys:
            raise ValueError(
                f"Grid: prefix must be 0 with a stride or outputs, got {prefix}; prefix tokens are both queries and keys"
            )
        self.prefix = prefix
        self.dilation = integers_per_axis("Grid", "dilation", dilation, len(self.sizes))
        self.window = None if window is None else _check_odd_window(window, len(self.sizes))
        if self.window is not None:
            # an axis without a window has no dilation: all of its points are seen
            self.dilation = tuple(1 if n is None else d for n, d in zip(self.window, self.dilation, strict=True))
        if self.window is None and any(step > 1 for step in self.dilation):
            raise ValueError(f"Grid: dilation must be 1 without a window, got {dilation!r}; pass window= too")
        self.full = self.window is None
        self.exact = self.full or (len(self.sizes) == 1 and self.dilation == (1,) and not self.prefix)

    def _restore(self, state: dict[str, Any]) -> None:
        options = {name: state[name] for name in ("window", "dilation", "stride", "outputs", "prefix")}
        Grid.__init__(self, *state["sizes"], **options)

    def __eq__(self, other: object) -> bool:
        return type(other) is Grid and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash((self.lattice, self.window, self.dilation))

    @property
    def reach(self) -> tuple[int, ...]:
        """How far a query sees to either side, in points of the window; at most the largest distance on the grid."""
        window = (None,) * len(self.sizes) if self.window is None else self.window
        each = zip(window, self.sizes, self.outputs, self.stride, self.dilation, strict=True)
        limits = [(n, (max(size, (number - 1) * stride + 1) - 1) // step) for n, size, number, stride, step in each]
        return tuple(limit if n is None else min(n // 2, limit) for n, limit in limits)

    @property
    def offset_is_unique(self) -> bool:
        """Whether the difference of two item indices determines their offset along each axis, within the window."""
        later_axes = zip(self.sizes[1:], self.reach[1:], self.dilation[1:], strict=True)
        return (
            not self.lattice.queries_differ_from_keys
            and not self.prefix
            and all(2 * reach * step < n for n, reach, step in later_axes)
        )

    def offset_of(self, distance: Int[Tensor, "*any"]) -> Int[Tensor, "*any axes"]:
        """The offset along each axis for a difference of two item indices; valid where `offset_is_unique`."""
        axes = []
        for size in reversed(self.sizes[1:]):
            rest = (distance + size // 2) % size - size // 2
            axes.append(rest)
            distance = torch.div(distance - rest, size, rounding_mode="floor")
        return torch.stack([distance, *reversed(axes)], -1)

    def allows(self, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        if self.window is None:
            return torch.ones(torch.broadcast_shapes(query.shape, key.shape), dtype=torch.bool, device=key.device)
        # int32 and one axis at a time: these tensors are queries x keys
        number = self._query_index(query)
        at = unravel_index((number - self.prefix).clamp(min=0), self.outputs).int()
        there = unravel_index((key - self.prefix).clamp(min=0), self.sizes).int()
        allowed: Tensor | None = None
        for axis, (stride, reach, step) in enumerate(zip(self.stride, self.reach, self.dilation, strict=True)):
            apart = there[..., axis] - at[..., axis] * stride
            near = apart.abs() <= reach * step
            near = near if step == 1 else near & (apart % step == 0)
            allowed = near if allowed is None else allowed & near
        assert allowed is not None
        return allowed | (number < self.prefix) | (key < self.prefix) if self.prefix else allowed

    def mask_mod(self, sizes: Sizes, device: torch.device) -> MaskMod:
        if self.window is None:
            return allow_all
        each = zip(self.outputs, self.sizes, self.stride, self.reach, self.dilation, strict=True)
        axes = [
            (device_numbers(f"axis {axis}", (count, size, stride, reach * step, step), device), step > 1)
            for axis, (count, size, stride, reach, step) in enumerate(each)
        ]
        prefix = device_numbers("prefix", (self.prefix,), device)[0] if self.prefix else None

        def is_near(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            rest, key_rest = query, key
            if prefix is not None:
                rest, key_rest = (query - prefix).clamp(min=0), (key - prefix).clamp(min=0)
            near = query >= 0
            for (count, size, stride, reach, step), dilated in reversed(axes):
                at, there = rest % count * stride, key_rest % size
                rest, key_rest = rest // count, key_rest // size
                near = near & (there <= at + reach) & (there >= at - reach)
                # of a query and of a key alone: a remainder for each pair would take longer than its dot product
                near = near & (at % step == there % step) if dilated else near
            return near if prefix is None else near | (query < prefix) | (key < prefix)

        return is_near

    def interval(self, queries: int, keys: int, device: torch.device) -> KeyInterval:
        if self.window is None or self.prefix:
            return super().interval(queries, keys, device)
        # axis by axis: a tensor of sizes would be copied to the device
        middle = self.lattice.query_coordinates(device).unbind(-1)
        reach = [n * step for n, step in zip(self.reach, self.dilation, strict=True)]
        low = [(at - n).clamp(min=0) for at, n in zip(middle, reach, strict=True)]
        high = [(at + n).clamp(max=size - 1) for at, n, size in zip(middle, reach, self.sizes, strict=True)]
        inside = torch.stack([a <= b for a, b in zip(low, high, strict=True)]).all(0)
        low = [at.clamp(max=size - 1) for at, size in zip(low, self.sizes, strict=True)]
        first = ravel_index(torch.stack(low, -1), self.sizes)
        return first, torch.where(inside, ravel_index(torch.stack(high, -1), self.sizes) + 1, first)

    @property
    def band(self) -> Band:
        if self.window is None or self.prefix or self.lattice.queries_differ_from_keys:
            return None, None
        # the point of the window that is farthest along each axis
        distance = 0
        for size, reach, step in zip(self.sizes, self.reach, self.dilation, strict=True):
            distance = distance * size + reach * step
        return distance, distance

    def offsets(self) -> Int[Tensor, "window axes"]:
        """The offsets of the points of a window from its centre, row by row."""
        sides = (range(-n * step, n * step + 1, step) for n, step in zip(self.reach, self.dilation, strict=True))
        return torch.tensor(list(product(*sides)))

    def window_index(self, device: torch.device) -> Int[Tensor, "queries window"]:
        """The item indices of the points in each query's window, row by row; -1 beyond the border."""
        # listed on the host, and moved once
        at = self.lattice._replace(prefix=0).query_coordinates(torch.device("cpu"))[:, None] + self.offsets()
        inside = ((at >= 0) & (at < torch.tensor(self.sizes))).all(-1)
        return ravel_index(at, self.sizes).masked_fill(~inside, -1).to(device)

    def pairs(self, device: torch.device) -> Int[Tensor, "2 pairs"]:
        """All allowed pairs: keys in the first row, queries in the second."""
        index = self.window_index(device)
        query, place = (index >= 0).nonzero(as_tuple=True)
        near = torch.stack((index[query, place], query)) + self.prefix
        if not self.prefix:
            return near
        token, item = (torch.arange(n, device=device) for n in (self.prefix, math.prod(self.sizes) + self.prefix))
        seeing, seen = torch.cartesian_prod(item, token).T, torch.cartesian_prod(token, item[self.prefix :]).T
        return torch.cat((seeing, seen, near), 1)

    def __repr__(self) -> str:
        more = [f"window={_collapse_equal_axes(self.window)}"] if self.window is not None else []
        more += [f"dilation={_collapse_equal_axes(self.dilation)}"] if max(self.dilation) > 1 else []
        if max(self.stride) > 1 or self.outputs != self.sizes:
            more.append(f"stride={_collapse_equal_axes(self.stride)}, outputs={self.outputs}")
        more += [f"prefix={self.prefix}"] if self.prefix else []
        return f"Grid({', '.join([*map(str, self.sizes), *more])})"


class Offsets(LatticeNeighbourhood):
    """Each head sees one point at a fixed offset from the query: a tap of a convolution. A head may also see several.

    In a head with offset Δ, a query at point p sees the key at p + Δ. `padding` says which key that is beyond the border: none
    ("zeros": a query with no key gets zero), the nearest point ("replicate"), the opposite side ("circular"), or the mirrored
    point ("reflect").

    Args:
        offsets: integers (heads, axes), or (heads, several, axes).
        sizes: the number of points along each axis.
        stride: the distance between neighbouring queries; the first query is at the first point.
        outputs: the number of queries along each axis; by default as many as the stride leaves.
        padding: "zeros", "replicate", "circular" or "reflect".
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
        self._set_lattice(sizes, stride, outputs)
        given = _check_offsets(offsets, len(self.sizes))
        if padding not in PADDING_MODES:
            raise ValueError(f"Offsets: padding must be one of {', '.join(map(repr, PADDING_MODES))}, got {padding!r}")
        self.padding = padding
        self.heads, self.several = len(given), 1 if given.dim() == 2 else given.shape[1]
        self.by_head = self.heads > 1
        entries = self.heads * self.several * math.prod(self.outputs)
        check_integer("Offsets: heads * several * outputs, the entries of its table,", entries, 0)
        # the item index of each key per head and query, -1 for no key
        self.index: Int[Tensor, "heads queries several"] = self._index(
            given.reshape(self.heads, 1, -1, len(self.sizes))
        )

    def _index(self, offsets: Int[Tensor, "heads 1 several axes"]) -> Int[Tensor, "heads queries several"]:
        at = self.lattice.query_coordinates(offsets.device)[:, None] + offsets
        found = torch.stack(
            [index_with_padding(at[..., axis], n, self.padding) for axis, n in enumerate(self.sizes)], -1
        )
        index = ravel_index(found, self.sizes).masked_fill((found < 0).any(-1), -1)
        for place in range(1, self.several):
            # a key that a head sees at two offsets is one key
            seen = (index[..., :place] == index[..., place, None]).any(-1)
            index[..., place] = index[..., place].masked_fill(seen, -1)
        return index

    def _restore(self, state: dict[str, Any]) -> None:
        self._set_lattice(state["sizes"], state["stride"], state["outputs"])
        index = self._check_index(state["index"].clone())
        # the index is stored instead of the offsets, so any offsets do to check the other arguments
        any_offset = torch.zeros(1, len(self.sizes), dtype=torch.long, device=index.device)
        Offsets.__init__(
            self, any_offset, self.sizes, stride=self.stride, outputs=self.outputs, padding=state["padding"]
        )
        self.heads, _, self.several = index.shape
        self.by_head, self.index = self.heads > 1, index

    def _check_index(self, index: Int[Tensor, "heads queries several"]) -> Int[Tensor, "heads queries several"]:
        """An unpickled index, checked: it names existing keys, and none of them twice per head and query."""
        queries, last = math.prod(self.outputs), math.prod(self.sizes) - 1
        if index.dtype != torch.long or index.dim() != 3 or index.shape[1] != queries or not index.numel():
            raise ValueError(
                f"Offsets: index must be int64 (heads, {queries}, several), got {index.dtype} of shape {tuple(index.shape)}"
            )
        if is_tracing_or_dataless(index):
            return index
        low, high = (int(end) for end in index.aminmax())
        if low < -1 or high > last:
            raise ValueError(f"Offsets: index must be in [-1, {last}], got {low} to {high}")
        ranked = index.sort(-1).values
        if bool(((ranked.diff(dim=-1) == 0) & (ranked[..., 1:] >= 0)).any()):
            raise ValueError("Offsets: index must name a key once per head and query, got one twice")
        return index

    def check(self, sizes: Sizes) -> None:
        super().check(sizes)
        if self.heads != sizes.heads:
            raise ValueError(f"Offsets: offsets must be for {sizes.heads} heads, got {self.heads}; pass a row per head")

    def allows(self, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        number = self._query_index(query.flatten()).clamp(0, max(self.index.shape[1] - 1, 0))
        # (heads, queries, several)
        index = self.index.to(key.device)[head.flatten()][:, number]
        return (index[..., None, :] == key.flatten()[:, None]).any(-1)

    def mask_mod(self, sizes: Sizes, device: torch.device) -> MaskMod:
        # (several, heads, queries)
        taps = self.index.to(device).movedim(-1, 0).contiguous().unbind()

        def is_tap(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            allowed = taps[0][head, query] == key
            for tap in taps[1:]:
                allowed = allowed | (tap[head, query] == key)
            return allowed

        return is_tap

    def interval(self, queries: int, keys: int, device: torch.device) -> KeyInterval:
        index = self.index.to(device).movedim(1, 0).flatten(1)
        seen = index >= 0
        stop = torch.where(seen, index + 1, 0).amax(-1)
        return torch.minimum(torch.where(seen, index, keys).amin(-1), stop), stop

    def __repr__(self) -> str:
        several = "" if self.several == 1 else f" x {self.several}"
        return f"Offsets({count_of(self.heads, 'head')}{several}, {format_sizes(self.sizes)}, stride={_collapse_equal_axes(self.stride)}, padding={self.padding!r})"


def _check_offsets(offsets: Any, axes: int) -> Int[Tensor, "heads *several axes"]:
    what = f"of integers (heads, axes) or (heads, several, axes), with {axes} axes"
    given = as_tensor("Offsets: offsets", offsets, what)
    integers = given.dtype in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
    if not integers or given.dim() not in (2, 3) or given.shape[-1] != axes or not given.numel():
        raise ValueError(f"Offsets: offsets must be a tensor {what}, got {describe_type(given)}")
    given = given.long()
    readable = type(given) is Tensor and are_values_readable(given)
    if readable and bool((given.clamp(-LARGEST_INT32, LARGEST_INT32) != given).any()):
        raise ValueError(
            f"Offsets: offsets must be in [{-LARGEST_INT32}, {LARGEST_INT32}], got {int(given.min())} to {int(given.max())}"
        )
    return given


def index_with_padding(at: Int[Tensor, "*any"], size: int, padding: str) -> Int[Tensor, "*any"]:
    """The index of the point at coordinate `at` of one axis, by the rule of `padding` beyond the border; -1 for no point."""
    if padding == "replicate":
        return at.clamp(0, size - 1)
    if padding == "circular":
        return at % size
    if padding == "reflect":
        period = max(2 * (size - 1), 1)
        return size - 1 - (at % period - (size - 1)).abs()
    return at.masked_fill((at < 0) | (at >= size), -1)


def _collapse_equal_axes(each: tuple[Any, ...]) -> Any:
    """One value for all axes where they are equal."""
    return each[0] if all(a == b for a, b in pairwise(each)) else each


def _unpack_sizes(given: tuple[Any, ...]) -> tuple[Any, ...]:
    """Sizes from `Grid(4, 5)` and from `Grid((4, 5))`."""
    first = given[0] if given else None
    if isinstance(first, Sequence) and len(given) == 1:
        return tuple(first)
    if isinstance(first, Sequence):
        raise ValueError(
            f"Grid: sizes must be integers or one sequence of them, got {given!r}; pass the window by name: Grid({first!r}, window=…)"
        )
    # torch's compiler has no getattr on an integer that it traces
    if not isinstance(first, int) and getattr(first, "ndim", 0) > 0:
        shape = tuple(getattr(first, "shape", ()))
        raise ValueError(
            f"Grid: sizes must be integers, got an array of shape {shape}; pass the sizes of an image: Grid(*image.shape[-2:])"
        )
    return given


def _check_odd_window(given: Any, axes: int) -> tuple[int | None, ...]:
    """One odd integer per axis, or None for the whole axis."""
    listed = isinstance(given, Sequence) and not isinstance(given, str)
    numbers = tuple(1 if n is None else n for n in given) if listed else given
    known = integers_per_axis("Grid", "window", numbers, axes)
    if any(n % 2 == 0 for n in known):
        raise ValueError(
            f"Grid: window must be odd, with the query at its centre (7 reaches 3 to each side), got {given!r}; "
            "for windows of any form use Offsets"
        )
    return tuple(None if n is None else known[axis] for axis, n in enumerate(given)) if numbers is not given else known
