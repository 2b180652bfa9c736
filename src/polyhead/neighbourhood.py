"""Who may attend to whom.

A neighbourhood is a predicate, `allows(head, query, key)`, and everything else derives from it: the mask, and
the interval of keys outside which a kernel computes nothing. Positions are counted along the keys: the last query
stands at the last key ("lower-right"), so that one predicate serves self-attention and step-by-step decoding.
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from jaxtyping import Bool, Int, Integer
from torch import Tensor

from polyhead._torch import numbers_hidden, register


class Sizes(NamedTuple):
    """The axes of one attention: `batch` holds every leading axis."""

    batch: tuple[int, ...]
    heads: int
    queries: int
    keys: int


Interval = tuple[Int[Tensor, "... queries"], Int[Tensor, "... queries"]]


class Neighbourhood(ABC):
    """The base of all neighbourhoods. A subclass defines `allows`; the rest has answers that are right for any."""

    exact: bool = False
    """Whether a pair is allowed exactly when its key lies in `interval`."""
    tensors: ClassVar[tuple[str, ...]] = ()
    """The attributes that are tensors, or None: what vmap and export carry along, and a view watches for changes."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        register(cls, cls.tensors)

    @abstractmethod
    def allows(
        self, head: Int[Tensor, "#heads 1 1"], query: Int[Tensor, "#queries 1"], key: Int[Tensor, "#keys"]
    ) -> Bool[Tensor, "..."]:
        """Whether `query` may attend to `key` in `head`: index tensors that broadcast over (heads, queries, keys).

        The answer may have batch axes in front. `query` counts along the keys: of `n` queries and `m` keys, query
        number i stands at i + m - n.
        """

    def check(self, sizes: Sizes) -> None:  # noqa: B027 - most neighbourhoods fit any size
        """Raise a `ValueError` where this neighbourhood does not fit the tensors."""

    def interval(self, queries: int, keys: int, device: torch.device) -> Interval:
        """For each query the first key it may attend to and the one past the last: a hull, `[first, stop)`."""
        first = torch.zeros(queries, dtype=torch.long, device=device)
        return first, torch.full_like(first, keys)

    def mask(self, sizes: Sizes, device: torch.device) -> Bool[Tensor, "... #heads queries keys"]:
        """The predicate as a tensor, True where attention may go."""
        head = torch.arange(sizes.heads, device=device)[:, None, None]
        query = torch.arange(sizes.keys - sizes.queries, sizes.keys, device=device)[:, None]
        key = torch.arange(sizes.keys, device=device)
        return self.allows(head, query, key)

    def within(self, self_attention: bool) -> Neighbourhood:
        """This neighbourhood where the queries are known to be keys too, or known not to be."""
        return self

    def real_queries(self, shape: tuple[int, ...]) -> Bool[Tensor, "... queries"] | None:
        """Which of the queries (...batch, queries) are not padding; None where nothing is known to be."""
        return None

    def leaves(self) -> tuple[Tensor, ...]:
        """The tensors that it points to."""
        return tuple(tensor for name in self.tensors if (tensor := getattr(self, name)) is not None)

    def __and__(self, other: Neighbourhood | Tensor) -> Neighbourhood:
        if not isinstance(other, (Neighbourhood, Tensor)):
            return NotImplemented
        parts = [*_parts(self), *_parts(neighbourhood(other))]
        parts = [part for part in parts if not isinstance(part, Dense)]
        if len(parts) < 2:
            return parts[0] if parts else Dense()
        return Both(*parts)

    def __repr__(self) -> str:
        fields = ", ".join(
            f"{name}={_brief(value)}" for name, value in vars(self).items() if name != "exact" and name[0] != "_"
        )
        return f"{type(self).__name__}({fields})"


def _brief(value: object) -> str:
    return f"<{tuple(value.shape)}>" if isinstance(value, Tensor) else repr(value)


def _parts(over: Neighbourhood) -> tuple[Neighbourhood, ...]:
    return over.parts if isinstance(over, Both) else (over,)


class Dense(Neighbourhood):
    """Everyone attends to everyone."""

    exact = True

    def allows(self, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return torch.ones(torch.broadcast_shapes(query.shape, key.shape), dtype=torch.bool, device=key.device)


class _Band(Neighbourhood):
    """Keys from `left` before the query (None: from the first) to `right` after it."""

    exact = True

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

    def __repr__(self) -> str:
        return "Causal()"


class Window(_Band):
    """`left` keys before the query, the query's own, and `right` (the same number, unless given) after it."""

    def __init__(self, left: int, right: int | None = None) -> None:
        right = left if right is None else right
        for name, reach in (("left", left), ("right", right)):
            if not hasattr(reach, "__index__") or isinstance(reach, bool) or reach < 0:
                raise ValueError(f"Window: {name} is {reach!r}; it must be a whole number of keys, 0 or more")
        super().__init__(operator.index(left), operator.index(right))


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
        given = torch.as_tensor(lengths_or_keep)
        if given.is_floating_point():
            raise ValueError(
                f"Padding: got {given.dtype}; pass integer lengths, or a bool tensor that is True where a key is real"
            )
        self.queries = queries
        # where the real keys are not one stretch from `first` to `stop`, which they are
        self.keep: Bool[Tensor, "... keys"] | None = None
        self.keys: int | None = None
        if given.dtype == torch.bool:
            self.keys = given.shape[-1]
            self.first, self.stop = _hull(given)
            if numbers_hidden() or not torch.equal(given.sum(-1), self.stop - self.first):
                self.keep = given
        else:
            if not numbers_hidden() and bool((given < 0).any()):
                raise ValueError(f"Padding: a length is {int(given.min())}; lengths must be 0 or more")
            self.first, self.stop = torch.zeros_like(given, dtype=torch.long), given.long()
        self.exact = self.keep is None

    def check(self, sizes: Sizes) -> None:
        if self.keys is None and tuple(self.stop.shape) == (*sizes.batch, sizes.keys):
            raise ValueError(
                f"Padding: its shape is {tuple(self.stop.shape)}, which reads as (batch, keys), but its numbers are integers; "
                "lengths are one a row, and a tensor that marks the real keys must be bool: keep.bool()"
            )
        _check_batch("Padding", tuple(self.stop.shape), sizes)
        if self.keys is not None and self.keys != sizes.keys:
            raise ValueError(f"Padding: keep covers {self.keys} keys, but there are {sizes.keys}")
        if self.keys is None and not numbers_hidden() and self.stop.numel():
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


def _hull(keep: Bool[Tensor, "... keys"]) -> Interval:
    """The first True and the one past the last; two equal numbers where there is none."""
    keys = keep.shape[-1]
    if keys == 0:
        return keep.sum(-1), keep.sum(-1)
    position = torch.arange(keys, device=keep.device)
    stop = torch.where(keep, position + 1, 0).amax(-1)
    return torch.minimum(torch.where(keep, position, keys).amin(-1), stop), stop


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
        self.exact = not numbers_hidden() and _contiguous(self.ids)

    def check(self, sizes: Sizes) -> None:
        for name, ids, items, size in (
            ("ids", self.ids, "keys", sizes.keys),
            ("query_ids", self.query_ids, "queries", sizes.queries),
        ):
            if ids is not None:
                _check_batch("Segments", tuple(ids.shape[:-1]), sizes)
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
    ids = torch.as_tensor(given)
    if ids.is_floating_point() or ids.dim() == 0:
        raise ValueError(
            f"Segments: {name} is {ids.dtype} of shape {tuple(ids.shape)}; it must hold integers (..., items)"
        )
    return ids.long()


def _contiguous(ids: Tensor) -> bool:
    """Whether every id stands in one unbroken run: as many changes between neighbours as once sorted."""
    changes = ids.diff(dim=-1).ne(0).sum(-1)
    return torch.equal(changes, ids.sort(-1).values.diff(dim=-1).ne(0).sum(-1))


class Mask(Neighbourhood):
    """Any pattern, as a tensor `(..., heads or 1, queries, keys)` that is True where attention may go."""

    tensors = ("keep",)

    def __init__(self, keep: Bool[Tensor, "... queries keys"]) -> None:
        given: object = keep
        if not isinstance(given, Tensor):
            kind = f"the class {given.__name__}" if isinstance(given, type) else type(given).__name__
            raise ValueError(
                f"over: got {kind}; pass a neighbourhood such as Causal() or Padding(lengths), "
                "or a bool tensor that is True where attention may go"
            )
        if keep.is_floating_point():
            raise ValueError(
                f"Mask: keep is {keep.dtype}; it must be bool, True where attention may go. To add numbers to the scores pass "
                "them as bias=...; for an additive mask, 0 where attention may go, pass keep = mask == 0"
            )
        if keep.dtype != torch.bool:
            if not numbers_hidden() and not bool(((keep == 0) | (keep == 1)).all()):
                raise ValueError(
                    f"Mask: keep is {keep.dtype} with values other than 0 and 1; 1 (True) = may attend. Lengths go to Padding(lengths)"
                )
            keep = keep.bool()
        if keep.dim() < 2:
            raise ValueError(
                f"Mask: keep has shape {tuple(keep.shape)}; it must end in (queries, keys). For padded keys use Padding(keep)"
            )
        # always with the axis of the heads, so that an axis more is a batch's
        self.keep = keep[None] if keep.dim() == 2 else keep
        self._pairs = keep.dim() == 2

    def check(self, sizes: Sizes) -> None:
        shape, wanted = tuple(self.keep.shape), (*sizes.batch, sizes.heads, sizes.queries, sizes.keys)
        batch = sizes.batch[-1] if sizes.batch else None
        if self._pairs and len(shape) == 3:
            shape = shape[1:]
        if len(shape) == 2 and shape == (batch, sizes.keys) != (sizes.queries, sizes.keys):
            raise ValueError(
                f"Mask: keep has shape {shape}, which reads as (batch, keys); it must end in (queries, keys). For padded keys "
                "use Padding(keep), True = a real key; torch's key_padding_mask, True = padded, is Padding(~mask)"
            )
        if len(shape) == 3 and batch is not None and shape[0] == batch and shape[0] != 1:
            hint = "unsqueeze(1) makes it (batch, 1, queries, keys)"
            if batch != sizes.heads:
                raise ValueError(f"Mask: keep has shape {shape}, which reads as (batch, queries, keys); {hint}")
            raise ValueError(
                f"Mask: keep has shape {shape} and there are as many heads as rows in the batch; {hint}, keep[None] (1, heads, queries, keys)"
            )
        if not broadcasts(shape, wanted) or shape[-1] != sizes.keys:
            by_head = batch is not None and len(shape) == 3 and shape[0] == batch * sizes.heads
            hint = f"; keep.unflatten(0, ({batch}, {sizes.heads})) splits batch and heads" if by_head else ""
            raise ValueError(
                f"Mask: keep has shape {shape}; it must broadcast to (..., heads, queries, keys) = {wanted}{hint}"
            )

    def allows(self, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        queries, keys = self.keep.shape[-2:]
        row = (
            (query.flatten() - (keys - queries)).clamp(0, queries - 1)
            if queries > 1
            else torch.zeros_like(query.flatten())
        )
        keep = self.keep[..., row, :][..., key.flatten()]
        if keep.shape[-3] > 1:
            keep = keep.index_select(-3, head.flatten())
        return keep

    def interval(self, queries: int, keys: int, device: torch.device) -> Interval:
        # (..., queries, keys) without the heads: a key is in reach if any head may see it
        keep = self.keep.any(-3)
        keep = keep.expand(*keep.shape[:-2], queries, keys)
        return _hull(keep)


class Both(Neighbourhood):
    """What every part allows: `a & b`."""

    tensors = ("parts",)

    def __init__(self, *parts: Neighbourhood) -> None:
        self.parts = parts
        self.exact = all(part.exact for part in parts)

    def allows(self, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        allowed = self.parts[0].allows(head, query, key)
        for part in self.parts[1:]:
            allowed = allowed & part.allows(head, query, key)
        return allowed

    def check(self, sizes: Sizes) -> None:
        for part in self.parts:
            part.check(sizes)

    def interval(self, queries: int, keys: int, device: torch.device) -> Interval:
        first, stop = self.parts[0].interval(queries, keys, device)
        for part in self.parts[1:]:
            a, b = part.interval(queries, keys, device)
            first, stop = torch.maximum(first, a), torch.minimum(stop, b)
        return first, torch.maximum(first, stop)

    def leaves(self) -> tuple[Tensor, ...]:
        return tuple(tensor for part in self.parts for tensor in part.leaves())

    def real_queries(self, shape: tuple[int, ...]) -> Tensor | None:
        known = [real for part in self.parts if (real := part.real_queries(shape)) is not None]
        return torch.stack(known).all(0) if known else None

    def within(self, self_attention: bool) -> Neighbourhood:
        return Both(*(part.within(self_attention) for part in self.parts))

    def __repr__(self) -> str:
        return " & ".join(repr(part) for part in self.parts)


class Rows(Neighbourhood):
    """A neighbourhood in some rows of its batch."""

    tensors = ("over",)

    def __init__(self, over: Neighbourhood, batch: tuple[int, ...], rows: tuple[slice, ...]) -> None:
        self.over, self.batch, self.rows = over, batch, rows

    def allows(self, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        allowed = self.over.allows(head, query, key)
        return allowed.expand(*self.batch, *allowed.shape[-3:])[self.rows] if allowed.dim() > 3 else allowed

    def interval(self, queries: int, keys: int, device: torch.device) -> Interval:
        first, stop = self.over.interval(queries, keys, device)
        if first.dim() == 1:
            return first, stop
        first, stop = (bound.expand(*self.batch, queries)[self.rows] for bound in (first, stop))
        return first, stop

    def leaves(self) -> tuple[Tensor, ...]:
        return self.over.leaves()

    def __repr__(self) -> str:
        return repr(self.over)


def neighbourhood(over: Neighbourhood | Tensor | None) -> Neighbourhood:
    """What a caller gave for `over`: nothing is `Dense()`, a tensor is a `Mask`."""
    if isinstance(over, Neighbourhood):
        return over
    return _DENSE if over is None else Mask(over)


def broadcasts(shape: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    """Whether a tensor of one shape can be expanded to another."""
    return len(shape) <= len(wanted) and all(a in (1, b) for a, b in zip(shape[::-1], wanted[::-1], strict=False))


def _check_batch(name: str, shape: tuple[int, ...], sizes: Sizes) -> None:
    if not broadcasts(shape, sizes.batch):
        raise ValueError(f"{name}: its rows have shape {shape}, but the batch has {sizes.batch}")


_DENSE = Dense()

# an exported program that takes a neighbourhood keeps an example of it, which torch.export.load reads as weights only
torch.serialization.add_safe_globals([Dense, Causal, Window, Padding, Segments, Mask, Both])
