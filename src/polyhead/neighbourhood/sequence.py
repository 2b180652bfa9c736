"""Who may attend to whom in a sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Bool, Int, Integer
from torch import Tensor

from polyhead._checks import LARGEST, LARGEST_INT64, as_tensor, check_integer, kind_of
from polyhead._torch import values_unavailable
from polyhead.neighbourhood.base import Interval, Neighbourhood, Sizes, check_batch, hull


class _Band(Neighbourhood):
    """Keys from `left` before the query (None: from the first) to `right` after it."""

    exact = True
    along_keys = True

    def __init__(self, left: int | None, right: int) -> None:
        self.left, self.right = left, right

    def allows(self, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        near = key <= query + self.right
        return near if self.left is None else near & (key >= query - self.left)

    def interval(self, queries: int, keys: int, device: torch.device) -> Interval:
        position = torch.arange(keys - queries, keys, device=device)
        first = torch.zeros_like(position) if self.left is None else (position - self.left).clamp(0, keys)
        return first, (position + self.right + 1).clamp(0, keys)


class Causal(_Band):
    """Nobody looks ahead. With more keys than queries, the last query stands at the last key."""

    def __init__(self) -> None:
        super().__init__(None, 0)

    def _restore(self, state: dict[str, Any]) -> None:
        if (state["left"], state["right"]) != (None, 0):
            raise ValueError(f"Causal: it must reach from the first key to the query, got {state!r:.80}")
        Causal.__init__(self)

    def __repr__(self) -> str:
        return "Causal()"


class Window(_Band):
    """`left` keys before the query, the query's own, and `right` (the same number, unless given) after it.

    A window may be larger than any sequence: `Window(sys.maxsize, 0)` sees all that came before.
    """

    def __init__(self, left: int, right: int | None = None) -> None:
        super().__init__(_reach("left", left), _reach("right", left if right is None else right))

    def _restore(self, state: dict[str, Any]) -> None:
        Window.__init__(self, state["left"], state["right"])


def _reach(name: str, given: object) -> Any:
    number: Any = check_integer(f"Window: {name}", given, 0, LARGEST_INT64)
    # no sequence is longer than that, and a position plus more would overflow; what torch traces is a size
    return number if isinstance(number, torch.SymInt) else min(number, LARGEST)


class Padding(Neighbourhood):
    """Rows of different lengths in one batch: padded keys are never attended to.

    Args:
        lengths_or_keep: whole numbers `(...batch)`: how many leading keys of each row are real (right padding); or a
            bool tensor `(...batch, keys)`, True where the key is real (any padding: left, right, with holes).
        queries: whether the queries are padded too, so that a padded query gets zero. By default they are where the
            layer attends from a sequence to itself, and are not elsewhere.
    """

    tensors = ("keep", "first", "stop")

    def __init__(self, lengths_or_keep: Tensor | Sequence[int], *, queries: bool | None = None) -> None:
        what = "of integer lengths, or of bool (..., keys) that is True where a key is real"
        given = as_tensor("Padding: lengths_or_keep", lengths_or_keep, what)
        if given.is_floating_point() or given.is_complex() or (given.dtype == torch.bool and not given.dim()):
            raise ValueError(f"Padding: lengths_or_keep must be a tensor {what}, got {kind_of(given)}")
        self.queries = queries
        # where the real keys are not one stretch from `first` to `stop`, which they are
        self.keep: Bool[Tensor, "... keys"] | None = None
        self.keys: int | None = None
        if given.dtype == torch.bool:
            self.keys = given.shape[-1]
            self.first, self.stop = hull(given)
            if values_unavailable(given) or not torch.equal(given.sum(-1), self.stop - self.first):
                self.keep = given
        else:
            given = given.long()
            if not values_unavailable(given) and bool((given < 0).any()):
                raise ValueError(f"Padding: a length is {int(given.min())}; lengths must be 0 or more")
            self.first, self.stop = torch.zeros_like(given), given
        self.exact = self.keep is None

    def _restore(self, state: dict[str, Any]) -> None:
        keep, first, stop, keys = (state[name] for name in ("keep", "first", "stop", "keys"))
        given = stop if keep is None else keep
        if (given.dtype == torch.bool) == (keep is None):
            raise ValueError(f"Padding: keep must be bool and stop whole numbers, got {given.dtype}")
        Padding.__init__(self, given, queries=state["queries"])
        if keep is None and keys is not None:
            # of a bool tensor whose real keys are one stretch, only the ends were kept
            lost = (first < 0) | (first > stop) | (stop > keys)
            form = first.dtype == stop.dtype == torch.long and first.shape == stop.shape and type(keys) is int
            if not form or (not values_unavailable(lost) and bool(lost.any())):
                raise ValueError(f"Padding: first and stop must lie from 0 to {keys!r} keys, got {first} and {stop}")
            self.first, self.keys = first, keys

    def check(self, sizes: Sizes) -> None:
        if self.keys is None and tuple(self.stop.shape) == (*sizes.batch, sizes.keys):
            raise ValueError(
                f"Padding: its shape is {tuple(self.stop.shape)}, which reads as (batch, keys), but its numbers are integers; "
                "lengths are one a row, and a tensor that marks the real keys must be bool: keep.bool()"
            )
        check_batch("Padding", tuple(self.stop.shape), sizes)
        if self.keys is not None and self.keys != sizes.keys:
            raise ValueError(f"Padding: keep covers {self.keys} keys, but there are {sizes.keys}")
        if self.keys is None and not values_unavailable(self.stop) and self.stop.numel():
            longest = int(self.stop.max())
            if longest > sizes.keys:
                raise ValueError(f"Padding: a length is {longest}, but there are only {sizes.keys} keys")

    def _real(self, position: Tensor) -> Tensor:
        first, stop = (bound[..., None, None, None] for bound in (self.first, self.stop))
        real = (position >= first) & (position < stop)
        if self.keep is None:
            return real
        inside = position.clamp(0, self.keep.shape[-1] - 1)
        # (..., 1, *position): the axes of a position are the last two or three of (heads, queries, keys)
        held = self.keep[..., inside].reshape(*self.keep.shape[:-1], *(1,) * (3 - position.dim()), *position.shape)
        return real & held

    def allows(self, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        real = self._real(key)
        return real & self._real(query) if self.queries else real.expand(*real.shape[:-2], query.shape[-2], -1)

    def interval(self, queries: int, keys: int, device: torch.device) -> Interval:
        first = self.first[..., None].expand(*self.first.shape, queries).to(device)
        stop = self.stop[..., None].expand(*self.stop.shape, queries).to(device)
        if not self.queries:
            return first, stop
        position = torch.arange(keys - queries, keys, device=device)
        return first, torch.where((position >= first) & (position < stop), stop, first)

    def real_queries(self, shape: tuple[int, ...]) -> Tensor | None:
        if not self.queries:
            return None
        real = self._real(torch.arange(shape[-1], device=self.stop.device)).flatten(-3)
        return real.expand(shape)

    def __repr__(self) -> str:
        what = f"lengths <{tuple(self.stop.shape)}>" if self.keys is None else f"keep <{(*self.stop.shape, self.keys)}>"
        return f"Padding({what}, queries={self.queries})"

    def within(self, self_attention: bool) -> Neighbourhood:
        if self.queries is not None:
            return self
        known = object.__new__(Padding)
        known.__dict__.update(vars(self), queries=self_attention)
        return known


class Segments(Neighbourhood):
    """Several documents packed in one row: everyone attends within the own document.

    Args:
        ids: whole numbers `(...batch, keys)`, equal for the keys of one document.
        query_ids: the same for the queries `(...batch, queries)`, where they are not keys (cross-attention between packed
            rows). By default the queries are the last keys.
    """

    tensors = ("ids", "query_ids")

    def __init__(
        self, ids: Integer[Tensor, "... keys"], query_ids: Integer[Tensor, "... queries"] | None = None
    ) -> None:
        self.ids = _ids("ids", ids)
        self.query_ids = None if query_ids is None else _ids("query_ids", query_ids)
        self.exact = not values_unavailable(self.ids) and _contiguous(self.ids)
        self.along_keys = query_ids is None

    def _restore(self, state: dict[str, Any]) -> None:
        Segments.__init__(self, state["ids"], state["query_ids"])

    def check(self, sizes: Sizes) -> None:
        for name, ids, items, size in (
            ("ids", self.ids, "keys", sizes.keys),
            ("query_ids", self.query_ids, "queries", sizes.queries),
        ):
            if ids is not None:
                check_batch("Segments", tuple(ids.shape[:-1]), sizes)
                if ids.shape[-1] != size:
                    raise ValueError(f"Segments: {name} covers {ids.shape[-1]} {items}, but there are {size}")
        if self.query_ids is None and sizes.queries > sizes.keys:
            raise ValueError(
                f"Segments: {sizes.queries} queries are more than the {sizes.keys} keys; pass their own ids as query_ids"
            )

    def _of_queries(self, queries: int) -> Tensor:
        return self.ids[..., self.ids.shape[-1] - queries :] if self.query_ids is None else self.query_ids

    def allows(self, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        keys = self.ids.shape[-1]
        if self.query_ids is None:
            mine = self.ids[..., query.flatten().clamp(0, keys - 1)]
        else:
            number = self.query_ids.shape[-1]
            mine = self.query_ids[..., (query.flatten() - (keys - number)).clamp(0, number - 1)]
        theirs = self.ids[..., key.flatten()]
        return (mine[..., :, None] == theirs[..., None, :]).unsqueeze(-3)

    def interval(self, queries: int, keys: int, device: torch.device) -> Interval:
        mine = self._of_queries(queries)
        rows = torch.broadcast_shapes(self.ids.shape[:-1], mine.shape[:-1])
        mine, ids = mine.expand(*rows, queries).contiguous(), self.ids.expand(*rows, keys)
        order = ids.argsort(dim=-1, stable=True)
        ranked = ids.gather(-1, order)
        start = torch.searchsorted(ranked, mine)
        end = torch.searchsorted(ranked, mine, right=True)
        # a stable order lists the keys of one document by position: its first and last are the hull
        first = order.gather(-1, start.clamp(max=max(keys - 1, 0)))
        stop = order.gather(-1, (end - 1).clamp(min=0)) + 1
        return first, torch.where(start < end, stop, first)


def _ids(name: str, given: object) -> Int[Tensor, "... items"]:
    ids = as_tensor(f"Segments: {name}", given, "of integers (..., items)")
    if ids.is_floating_point() or ids.is_complex() or ids.dim() == 0:
        raise ValueError(f"Segments: {name} must be a tensor of integers (..., items), got {kind_of(ids)}")
    return ids.long()


def _contiguous(ids: Tensor) -> bool:
    """Whether every id stands in one unbroken run: as many changes between neighbours as once sorted."""
    changes = ids.diff(dim=-1).ne(0).sum(-1)
    return torch.equal(changes, ids.sort(-1).values.diff(dim=-1).ne(0).sum(-1))
