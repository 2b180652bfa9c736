"""Who may attend to whom in a sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Bool, Int, Integer
from torch import Tensor

from polyhead._checks import LARGEST_INT32, LARGEST_INT64, as_tensor, check_integer, describe_type
from polyhead._torch import are_values_readable, is_tracing_or_dataless
from polyhead.neighbourhood.base import Neighbourhood
from polyhead.neighbourhood.mask_mods import MaskMod, by_row, device_numbers, in_band
from polyhead.neighbourhood.shapes import (
    Band,
    KeyInterval,
    Sizes,
    check_broadcasts_to_batch,
    flatten_batch_unless_shared,
    interval_around_true,
)


class _Band(Neighbourhood):
    """Keys from `left` before the query (None: from the first) to `right` after it."""

    exact = True
    along_keys = True

    def __init__(self, left: int | None, right: int) -> None:
        self.left, self.right = left, right

    @property
    def anchors(self) -> frozenset[str]:
        return frozenset({"first", "own"} if self.left is None else {"own"})

    def allows(self, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        near = key <= query + self.right
        return near if self.left is None else near & (key >= query - self.left)

    def mask_mod(self, sizes: Sizes, device: torch.device) -> MaskMod:
        return in_band(self.left, self.right, sizes.keys - sizes.queries, device)

    def interval(self, queries: int, keys: int, device: torch.device) -> KeyInterval:
        position = torch.arange(keys - queries, keys, device=device)
        first = torch.zeros_like(position) if self.left is None else (position - self.left).clamp(0, keys)
        return first, (position + self.right + 1).clamp(0, keys)

    @property
    def band(self) -> Band:
        return self.left, self.right


class Causal(_Band):
    """Every query sees its own key and those before it. With more keys than queries, the last query is at the last key."""

    def __init__(self) -> None:
        super().__init__(None, 0)

    def _restore(self, state: dict[str, Any]) -> None:
        if (state["left"], state["right"]) != (None, 0):
            raise ValueError(f"Causal: its pickled state must be left=None and right=0, got {state!r:.80}")
        Causal.__init__(self)

    def __repr__(self) -> str:
        return "Causal()"


class Window(_Band):
    """`left` keys before the query, the query's own key, and `right` keys (default: `left`) after it.

    A window may be larger than any sequence: `Window(sys.maxsize, 0)` sees all earlier keys.
    """

    def __init__(self, left: int, right: int | None = None) -> None:
        super().__init__(
            _check_window_reach("left", left), _check_window_reach("right", left if right is None else right)
        )

    def _restore(self, state: dict[str, Any]) -> None:
        Window.__init__(self, state["left"], state["right"])


def _check_window_reach(name: str, value: object) -> Any:
    reach: Any = check_integer(f"Window: {name}", value, 0, LARGEST_INT64)
    # clamped to the longest sequence: position + reach must not overflow; a traced integer is a size already
    return reach if isinstance(reach, torch.SymInt) else min(reach, LARGEST_INT32)


class Padding(Neighbourhood):
    """Sequences of different lengths in one batch: padded keys are never attended to.

    Args:
        lengths_or_keep: integers `(...batch)`: the number of real leading keys per sequence (right padding); or a bool tensor
            `(...batch, keys)`, True where the key is real (any padding: left, right, with holes).
        queries: whether the queries are padded too, so that a padded query gets zero. By default True in self-attention of a
            layer, and False elsewhere.
    """

    tensors = ("keep", "first", "stop")

    def __init__(self, lengths_or_keep: Tensor | Sequence[int], *, queries: bool | None = None) -> None:
        what = "of integer lengths, or of bool (..., keys) that is True where a key is real"
        value = as_tensor("Padding: lengths_or_keep", lengths_or_keep, what)
        if value.is_floating_point() or value.is_complex() or (value.dtype == torch.bool and not value.dim()):
            raise ValueError(f"Padding: lengths_or_keep must be a tensor {what}, got {describe_type(value)}")
        self.queries = queries
        # None where the real keys are exactly those from `first` to `stop`
        self.keep: Bool[Tensor, "... keys"] | None = None
        self.keys: int | None = None
        if value.dtype == torch.bool:
            self.keys = value.shape[-1]
            self.first, self.stop = interval_around_true(value)
            if not are_values_readable(value) or not torch.equal(value.sum(-1), self.stop - self.first):
                self.keep = value
        else:
            value = value.long()
            if are_values_readable(value) and bool((value < 0).any()):
                raise ValueError(f"Padding: lengths must be 0 or more, got {int(value.min())}")
            self.first, self.stop = torch.zeros_like(value), value
        self.exact = self.keep is None

    def _restore(self, state: dict[str, Any]) -> None:
        keep, first, stop, keys = (state[name] for name in ("keep", "first", "stop", "keys"))
        value = stop if keep is None else keep
        if (value.dtype == torch.bool) == (keep is None):
            raise ValueError(f"Padding: keep must be bool and stop integers, got {value.dtype}")
        Padding.__init__(self, value, queries=state["queries"])
        if keep is None and keys is not None:
            # a bool tensor whose real keys are one run is stored by its ends
            invalid = (first < 0) | (first > stop) | (stop > keys)
            fits = first.dtype == stop.dtype == torch.long and first.shape == stop.shape and type(keys) is int
            if not fits or (not is_tracing_or_dataless(invalid) and bool(invalid.any())):
                raise ValueError(f"Padding: first and stop must be in [0, {keys!r}], got {first} and {stop}")
            self.first, self.keys = first, keys

    def check(self, sizes: Sizes) -> None:
        if self.keys is None and tuple(self.stop.shape) == (*sizes.batch, sizes.keys):
            raise ValueError(
                f"Padding: lengths must be one integer per sequence, got shape {tuple(self.stop.shape)}, which looks like "
                "(batch, keys); to mark the real keys pass a bool tensor: keep.bool()"
            )
        check_broadcasts_to_batch("Padding", tuple(self.stop.shape), sizes)
        if self.keys is not None and self.keys != sizes.keys:
            raise ValueError(f"Padding: keep must cover {sizes.keys} keys, got {self.keys}")
        if self.keys is None and are_values_readable(self.stop) and self.stop.numel():
            longest = int(self.stop.max())
            if longest > sizes.keys:
                raise ValueError(f"Padding: lengths must be at most the number of keys, {sizes.keys}, got {longest}")

    @property
    def anchors(self) -> frozenset[str]:
        return frozenset({"first"} if self.keys is None else ())

    def _is_real(self, position: Tensor) -> Tensor:
        first, stop = (bound[..., None, None, None] for bound in (self.first, self.stop))
        real = (position >= first) & (position < stop)
        if self.keep is None:
            return real
        inside = position.clamp(0, self.keep.shape[-1] - 1)
        # (..., 1, *position): `position` has the last two or three axes of (heads, queries, keys)
        kept = self.keep[..., inside].reshape(*self.keep.shape[:-1], *(1,) * (3 - position.dim()), *position.shape)
        return real & kept

    def allows(self, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        real = self._is_real(key)
        return real & self._is_real(query) if self.queries else real.expand(*real.shape[:-2], query.shape[-2], -1)

    def mask_mod(self, sizes: Sizes, device: torch.device) -> MaskMod:
        first, stop = (
            by_row(flatten_batch_unless_shared(x.to(device), sizes.batch, 0)) for x in (self.first, self.stop)
        )
        kept_in = (
            None if self.keep is None else by_row(flatten_batch_unless_shared(self.keep.to(device), sizes.batch, 1))
        )

        def is_real(row: Tensor, position: Tensor) -> Tensor:
            real = (position >= first(row)) & (position < stop(row))
            if kept_in is None:
                return real
            kept = kept_in(row)
            return real & kept[position.clamp(0, kept.shape[-1] - 1)]

        if not self.queries:
            return lambda row, head, query, key: is_real(row, key)
        (shift,) = device_numbers("padding", (sizes.keys - sizes.queries,), device)
        return lambda row, head, query, key: is_real(row, key) & is_real(row, query + shift)

    def interval(self, queries: int, keys: int, device: torch.device) -> KeyInterval:
        first = self.first[..., None].expand(*self.first.shape, queries).to(device)
        stop = self.stop[..., None].expand(*self.stop.shape, queries).to(device)
        if not self.queries:
            return first, stop
        position = torch.arange(keys - queries, keys, device=device)
        return first, torch.where((position >= first) & (position < stop), stop, first)

    def unpadded_queries(self, shape: tuple[int, ...]) -> Tensor | None:
        if not self.queries:
            return None
        real = self._is_real(torch.arange(shape[-1], device=self.stop.device)).flatten(-3)
        return real.expand(shape)

    def __repr__(self) -> str:
        what = f"lengths <{tuple(self.stop.shape)}>" if self.keys is None else f"keep <{(*self.stop.shape, self.keys)}>"
        return f"Padding({what}, queries={self.queries})"

    def bind_self_attention(self, self_attention: bool) -> Neighbourhood:
        if self.queries is not None:
            return self
        known = object.__new__(Padding)
        known.__dict__.update(vars(self), queries=self_attention)
        return known


class Segments(Neighbourhood):
    """Several documents packed in one sequence: every item attends within its own document.

    Args:
        ids: integers `(...batch, keys)`, equal for the keys of one document.
        query_ids: the same for the queries `(...batch, queries)`, where they are not keys (cross-attention between packed
            sequences). By default the queries are the last keys.
    """

    tensors = ("ids", "query_ids")

    def __init__(
        self, ids: Integer[Tensor, "... keys"], query_ids: Integer[Tensor, "... queries"] | None = None
    ) -> None:
        self.ids = _check_segment_ids("ids", ids)
        self.query_ids = None if query_ids is None else _check_segment_ids("query_ids", query_ids)
        self.exact = are_values_readable(self.ids) and _ids_are_contiguous(self.ids)
        self.along_keys = query_ids is None

    def _restore(self, state: dict[str, Any]) -> None:
        Segments.__init__(self, state["ids"], state["query_ids"])

    def check(self, sizes: Sizes) -> None:
        for name, ids, items, size in (
            ("ids", self.ids, "keys", sizes.keys),
            ("query_ids", self.query_ids, "queries", sizes.queries),
        ):
            if ids is not None:
                check_broadcasts_to_batch("Segments", tuple(ids.shape[:-1]), sizes)
                if ids.shape[-1] != size:
                    raise ValueError(f"Segments: {name} must cover {size} {items}, got {ids.shape[-1]}")
        if self.query_ids is None and sizes.queries > sizes.keys:
            raise ValueError(
                f"Segments: the queries must be among the {sizes.keys} keys, got {sizes.queries} queries; pass their ids as query_ids"
            )

    @property
    def anchors(self) -> frozenset[str]:
        return frozenset({"own"} if self.query_ids is None else ())

    def _ids_of_queries(self, queries: int) -> Tensor:
        return self.ids[..., self.ids.shape[-1] - queries :] if self.query_ids is None else self.query_ids

    def allows(self, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        keys = self.ids.shape[-1]
        if self.query_ids is None:
            query_ids = self.ids[..., query.flatten().clamp(0, keys - 1)]
        else:
            queries = self.query_ids.shape[-1]
            query_ids = self.query_ids[..., (query.flatten() - (keys - queries)).clamp(0, queries - 1)]
        key_ids = self.ids[..., key.flatten()]
        return (query_ids[..., :, None] == key_ids[..., None, :]).unsqueeze(-3)

    def mask_mod(self, sizes: Sizes, device: torch.device) -> MaskMod:
        both = self.ids, self._ids_of_queries(sizes.queries)
        key_id, query_id = (by_row(flatten_batch_unless_shared(x.to(device), sizes.batch, 1)) for x in both)
        return lambda row, head, query, key: query_id(row)[query] == key_id(row)[key]

    def interval(self, queries: int, keys: int, device: torch.device) -> KeyInterval:
        query_ids = self._ids_of_queries(queries)
        rows = torch.broadcast_shapes(self.ids.shape[:-1], query_ids.shape[:-1])
        query_ids, ids = query_ids.expand(*rows, queries).contiguous(), self.ids.expand(*rows, keys)
        order = ids.argsort(dim=-1, stable=True)
        ranked = ids.gather(-1, order)
        start = torch.searchsorted(ranked, query_ids)
        end = torch.searchsorted(ranked, query_ids, right=True)
        # a stable sort lists the keys of one document by position, so its first and last are the hull
        first = order.gather(-1, start.clamp(max=max(keys - 1, 0)))
        stop = order.gather(-1, (end - 1).clamp(min=0)) + 1
        return first, torch.where(start < end, stop, first)


def _check_segment_ids(name: str, value: object) -> Int[Tensor, "... items"]:
    ids = as_tensor(f"Segments: {name}", value, "of integers (..., items)")
    if ids.is_floating_point() or ids.is_complex() or ids.dim() == 0:
        raise ValueError(f"Segments: {name} must be a tensor of integers (..., items), got {describe_type(ids)}")
    return ids.long()


def _ids_are_contiguous(ids: Tensor) -> bool:
    """Whether each id occupies one run: the ids change as often between neighbours as when they are sorted."""
    changes = ids.diff(dim=-1).ne(0).sum(-1)
    return torch.equal(changes, ids.sort(-1).values.diff(dim=-1).ne(0).sum(-1))
