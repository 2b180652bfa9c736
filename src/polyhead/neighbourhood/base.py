"""The base of all neighbourhoods, and what any of them may be: everyone, a mask, a join, some rows of a batch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from polyhead._checks import check_tensor, kind_of
from polyhead._torch import register, values_unavailable

if TYPE_CHECKING:
    from polyhead.neighbourhood.grid import Lattice


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
    full: bool = False
    """Whether everyone may attend to everyone."""
    by_head: bool = False
    """Whether heads see different keys."""
    along_keys: bool = False
    """Whether it counts queries along the keys, of which they are the last."""
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

    @property
    def grid(self) -> Lattice | None:
        """Where items stand, if they are points of a grid."""
        return None

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

    def on_pairs(
        self, query: Int[Tensor, " pairs"], key: Int[Tensor, " pairs"], heads: int = 1
    ) -> Bool[Tensor, "... pairs"]:
        """`allows` for a list of pairs, in the first so many heads; an axis for these only where they differ."""
        head = torch.arange(heads, device=key.device)[:, None, None]
        one = lambda query, key: self.allows(head, query.view(1, 1), key.view(1))[..., 0, 0]
        allowed: Tensor = torch.vmap(one, chunk_size=1 << 16)(query, key)
        return allowed.movedim(0, -1)

    def filtered(self, other: Neighbourhood) -> Neighbourhood | None:
        """What a list of pairs is once another neighbourhood has had its say; None for what is no list."""
        return None

    def rows(self, batch: tuple[int, ...], at: tuple[slice, ...]) -> Neighbourhood:
        """This neighbourhood in some rows of a batch."""
        return Rows(self, batch, at)

    def within(self, self_attention: bool) -> Neighbourhood:
        """This neighbourhood where the queries are known to be keys too, or known not to be."""
        return self

    def real_queries(self, shape: tuple[int, ...]) -> Bool[Tensor, "... queries"] | None:
        """Which of the queries (...batch, queries) are not padding; None where nothing is known to be."""
        return None

    def leaves(self) -> tuple[Tensor, ...]:
        """The tensors that it points to."""
        return tuple(tensor for name in self.tensors if (tensor := getattr(self, name)) is not None)

    def __copy__(self) -> Neighbourhood:
        """Another one with the same tensors, which need no second check."""
        twin = object.__new__(type(self))
        vars(twin).update(vars(self))
        return twin

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Check what is unpickled as what is constructed: a file may hold anything, and kernels follow what it says."""
        try:
            self._restore(state)
        except (KeyError, IndexError, TypeError, AttributeError, RuntimeError) as error:
            name, got = type(self).__name__, ", ".join(state) if isinstance(state, dict) else type(state).__name__
            raise ValueError(f"{name}: its pickled state must be one that {name} writes, got {got}") from error
        # what a caller has hung on it; of the flags above only a class of somebody's own may have other values
        free = "_restore" not in vars(type(self))
        more = {
            name: x for name, x in state.items() if name not in vars(self) and (free or not hasattr(type(self), name))
        }
        vars(self).update(more)

    def _restore(self, state: dict[str, Any]) -> None:
        """Build this from `vars` of another; where a constructor checks its arguments, by that constructor."""
        vars(self).update(state)

    def __and__(self, other: Neighbourhood | Tensor) -> Neighbourhood:
        if not isinstance(other, (Neighbourhood, Tensor)):
            return NotImplemented
        other = neighbourhood(other)
        filtered = other.filtered(self)
        if filtered is not None:
            return filtered
        joined = [part for part in (*parts(self), *parts(other)) if not isinstance(part, Dense)]
        if len(joined) < 2:
            return joined[0] if joined else Dense()
        return Both(*joined)

    def __repr__(self) -> str:
        fields = ", ".join(
            f"{name}={_brief(value)}"
            for name, value in vars(self).items()
            if name not in ("exact", "full", "by_head", "along_keys") and name[0] != "_"
        )
        return f"{type(self).__name__}({fields})"


def _brief(value: object) -> str:
    return f"<{tuple(value.shape)}>" if isinstance(value, Tensor) else repr(value)


def parts(over: Neighbourhood) -> tuple[Neighbourhood, ...]:
    """What a join is made of; of anything else, itself."""
    return over.parts if isinstance(over, Both) else (over,)


class Dense(Neighbourhood):
    """Everyone attends to everyone."""

    exact = True
    full = True

    def allows(self, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return torch.ones(torch.broadcast_shapes(query.shape, key.shape), dtype=torch.bool, device=key.device)

    def _restore(self, state: dict[str, Any]) -> None:
        pass


class Mask(Neighbourhood):
    """Any pattern, as a tensor `(..., heads or 1, queries, keys)` that is True where attention may go."""

    tensors = ("keep",)

    def __init__(self, keep: Bool[Tensor, "... queries keys"]) -> None:
        given: object = keep
        if not isinstance(given, Tensor):
            raise ValueError(
                f"over: got {kind_of(given)}; pass a neighbourhood such as Causal() or Padding(lengths), "
                "or a bool tensor that is True where attention may go"
            )
        check_tensor("Mask: keep", keep, "(..., queries, keys)")
        if keep.is_floating_point() or keep.is_complex():
            raise ValueError(
                f"Mask: keep is {keep.dtype}; it must be bool, True where attention may go. To add numbers to the scores pass "
                "them as bias=...; for an additive mask, 0 where attention may go, pass keep = mask == 0"
            )
        if keep.dtype != torch.bool:
            if not values_unavailable(keep) and not bool(((keep == 0) | (keep == 1)).all()):
                raise ValueError(
                    f"Mask: keep is {keep.dtype} with values other than 0 and 1; 1 (True) = may attend. "
                    + ("Edges go to Graph(edge_index)" if keep.shape[:1] == (2,) else "Lengths go to Padding(lengths)")
                )
            keep = keep.bool()
        if keep.dim() < 2:
            raise ValueError(
                f"Mask: keep has shape {tuple(keep.shape)}; it must end in (queries, keys). For padded keys use Padding(keep)"
            )
        # always with the axis of the heads, so that an axis more is a batch's
        self.keep = keep[None] if keep.dim() == 2 else keep
        self.by_head = self.keep.shape[-3] > 1
        self._pairs = keep.dim() == 2

    def _restore(self, state: dict[str, Any]) -> None:
        keep = state["keep"]
        Mask.__init__(self, keep[0] if state["_pairs"] and len(keep) == 1 else keep)

    def check(self, sizes: Sizes) -> None:
        shape, wanted = tuple(self.keep.shape), (*sizes.batch, sizes.heads, sizes.queries, sizes.keys)
        batch = sizes.batch[-1] if sizes.batch else None
        if self._pairs and len(shape) == 3:
            shape = shape[1:]
        # what fits is asked first: a program of any length is not guarded against that of its batch
        if len(shape) == 2 and shape != (sizes.queries, sizes.keys) and shape == (batch, sizes.keys):
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

    def on_pairs(self, query: Tensor, key: Tensor, heads: int = 1) -> Tensor:
        queries, keys = self.keep.shape[-2:]
        return self.keep[..., :heads, (query - (keys - queries)).clamp(0, queries - 1), key]

    def interval(self, queries: int, keys: int, device: torch.device) -> Interval:
        # (..., queries, keys) without the heads: a key is in reach if any head may see it
        keep = self.keep.any(-3)
        keep = keep.expand(*keep.shape[:-2], queries, keys)
        return hull(keep)

    def rows(self, batch: tuple[int, ...], at: tuple[slice, ...]) -> Neighbourhood:
        return Mask(self.keep.expand(*batch, *self.keep.shape[-3:])[at]) if self.keep.dim() > 3 else self


class Both(Neighbourhood):
    """What every part allows: `a & b`."""

    tensors = ("parts",)

    def __init__(self, *parts: Neighbourhood) -> None:
        self.parts = parts
        self.exact = all(part.exact for part in parts)
        self.by_head = any(part.by_head for part in parts)
        self.along_keys = any(part.along_keys for part in parts)
        _check_places(parts)

    def _restore(self, state: dict[str, Any]) -> None:
        if not state["parts"] or not all(isinstance(part, Neighbourhood) for part in state["parts"]):
            raise ValueError(f"Both: its parts must be neighbourhoods, got {state['parts']!r:.80}")
        Both.__init__(self, *state["parts"])

    @property
    def grid(self) -> Lattice | None:
        return next((part.grid for part in self.parts if part.grid is not None), None)

    def allows(self, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        allowed = self.parts[0].allows(head, query, key)
        for part in self.parts[1:]:
            allowed = allowed & part.allows(head, query, key)
        return allowed

    def on_pairs(self, query: Tensor, key: Tensor, heads: int = 1) -> Tensor:
        allowed = self.parts[0].on_pairs(query, key, heads)
        for part in self.parts[1:]:
            allowed = allowed & part.on_pairs(query, key, heads)
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

    def rows(self, batch: tuple[int, ...], at: tuple[slice, ...]) -> Neighbourhood:
        return Both(*(part.rows(batch, at) for part in self.parts))

    def within(self, self_attention: bool) -> Neighbourhood:
        return Both(*(part.within(self_attention) for part in self.parts))

    def __repr__(self) -> str:
        return " & ".join(repr(part) for part in self.parts)


def _check_places(parts: tuple[Neighbourhood, ...]) -> None:
    """Raise where parts do not agree where the queries stand."""
    grids = {part.grid for part in parts} - {None}
    if len(grids) > 1:
        raise ValueError(f"&: {' and '.join(map(repr, parts))} are joined, whose items stand on different grids")
    grid = next(iter(grids), None)
    counting = next((part for part in parts if part.along_keys), None)
    if grid is not None and grid.sparse and counting is not None:
        raise ValueError(
            f"&: {counting!r} counts queries along the keys, but those of {' and '.join(repr(p) for p in parts if p.grid)} stand elsewhere; "
            "pass a Mask in its place"
        )


class Rows(Neighbourhood):
    """A neighbourhood in some rows of its batch."""

    tensors = ("over",)

    def __init__(self, over: Neighbourhood, batch: tuple[int, ...], rows: tuple[slice, ...]) -> None:
        self.over, self.batch, self.at, self.exact = over, batch, rows, over.exact
        self.by_head = over.by_head

    def _restore(self, state: dict[str, Any]) -> None:
        Rows.__init__(self, state["over"], state["batch"], state["at"])

    @property
    def grid(self) -> Lattice | None:
        return self.over.grid

    def allows(self, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        allowed = self.over.allows(head, query, key)
        return allowed.expand(*self.batch, *allowed.shape[-3:])[self.at] if allowed.dim() > 3 else allowed

    def on_pairs(self, query: Tensor, key: Tensor, heads: int = 1) -> Tensor:
        allowed = self.over.on_pairs(query, key, heads)
        return allowed.expand(*self.batch, *allowed.shape[-2:])[self.at] if allowed.dim() > 2 else allowed

    def interval(self, queries: int, keys: int, device: torch.device) -> Interval:
        first, stop = self.over.interval(queries, keys, device)
        if first.dim() == 1:
            return first, stop
        first, stop = (bound.expand(*self.batch, queries)[self.at] for bound in (first, stop))
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


def check_batch(name: str, shape: tuple[int, ...], sizes: Sizes) -> None:
    """Raise where rows of this shape do not fit the batch."""
    if not broadcasts(shape, sizes.batch):
        raise ValueError(f"{name}: its rows have shape {shape}, but the batch has {sizes.batch}")


def hull(keep: Bool[Tensor, "... keys"]) -> Interval:
    """The first True and the one past the last; two equal numbers where there is none."""
    keys = keep.shape[-1]
    if keys == 0:
        return keep.sum(-1), keep.sum(-1)
    position = torch.arange(keys, device=keep.device)
    stop = torch.where(keep, position + 1, 0).amax(-1)
    return torch.minimum(torch.where(keep, position, keys).amin(-1), stop), stop


_DENSE = Dense()
