"""The base class of neighbourhoods, and the general ones: all pairs, a mask, some rows of a batch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.utils import _pytree as pytree

from polyhead._checks import check_dense_tensor, describe_type, short_repr
from polyhead._foreign_arguments import hint_for_mask, hint_for_over
from polyhead._torch import register_pytree_class
from polyhead.neighbourhood import mask_mods, shapes
from polyhead.neighbourhood.shapes import Band, KeyInterval, Sizes

if TYPE_CHECKING:
    from typing_extensions import Self

    from polyhead.neighbourhood.lattice import Lattice


class Neighbourhood(ABC):
    """The base of all neighbourhoods. A subclass defines `allows`; the defaults of all other methods are correct for any."""

    exact: bool = False
    """Whether a pair is allowed exactly when its key lies in `interval`."""
    full: bool = False
    """Whether all pairs are allowed."""
    by_head: bool = False
    """Whether the allowed pairs differ between heads."""
    along_keys: bool = False
    """Whether it counts queries along the keys: the last query is at the last key."""
    has_remote_keys: bool = False
    """Whether some keys lie elsewhere: `start_fetch` gets their rows."""
    tensors: ClassVar[tuple[str, ...]] = ()
    """The attributes that hold tensors or None: vmap and export pass them along, and a view watches them for changes."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        register_pytree_class(cls, cls.tensors)

    @abstractmethod
    def allows(
        self, head: Int[Tensor, "#heads 1 1"], query: Int[Tensor, "#queries 1"], key: Int[Tensor, "#keys"]
    ) -> Bool[Tensor, "..."]:
        """Whether `query` may attend to `key` in `head`: index tensors that broadcast over (heads, queries, keys).

        The result may have leading batch axes. `query` counts along the keys: with n queries and m keys, query i is at
        position i + m - n.
        """

    @property
    def anchors(self) -> frozenset[str]:
        """Which keys its intervals contain, of any query and at any size, if it is `exact`.

        `"first"` and `"last"`: the first or the last key, unless the interval is empty. `"own"`: the interval is cut from a run of
        positions around the query's own. So a union of neighbourhoods with a common anchor has no gaps.
        """
        return frozenset()

    @property
    def lattice(self) -> Lattice | None:
        """The coordinates of items that are points of a grid; None for other items."""
        return None

    @property
    def whole(self) -> Neighbourhood:
        """The neighbourhood of the whole attention, if this one is a part of it."""
        return self

    def whole_sizes(self, queries: int, keys: int) -> tuple[int, int]:
        """The queries and keys of the whole attention."""
        return queries, keys

    @property
    def item_indices(self) -> tuple[Tensor, Tensor] | None:
        """The indices of queries and keys in the whole attention, if it has further parts elsewhere; None if it is whole."""
        return None

    @property
    def query_shift(self) -> Int[Tensor, ""] | None:
        """How far the last query is before the last key, where only the device knows it; None where it is at the last key."""
        return None

    def start_fetch(self, *rows: Float[Tensor, "... own features"]) -> Callable[[], tuple[Tensor, ...]]:
        """Start to fetch the rows of remote keys. The result waits for them: it returns the rows of all keys, own ones first."""
        return lambda: rows

    def check(self, sizes: Sizes) -> None:  # noqa: B027 - most neighbourhoods fit any size
        """Raise a `ValueError` where this neighbourhood does not fit the tensors."""

    def check_device(self, device: torch.device) -> None:
        """Raise a `ValueError` where a tensor of this neighbourhood is not on the queries' device."""
        self._check_on_device(device, self.leaves())

    def _check_on_device(self, device: torch.device, tensors: tuple[Tensor, ...]) -> None:
        for x in tensors:
            if x.device != device and device.type != "meta":
                raise ValueError(
                    f"over must be on {device}, as q is, got {type(self).__name__} on {x.device}; pass over.to({str(device)!r})"
                )

    def to(self, device: torch.device | str) -> Self:
        """The same neighbourhood on another device. Move it once, not in every call: a copy to a device may wait for it."""
        try:
            target = torch.device(device)
        except (RuntimeError, TypeError):
            raise ValueError(f"device must be a torch.device, or the name of one, got {short_repr(device)}") from None
        moved: Self = pytree.tree_map_only(Tensor, lambda x: x.to(device=target), self)
        return moved

    @property
    def edge_dim(self) -> int | None:
        """Features per edge, on a graph that has them."""
        return None

    def attention_axes(self, heads: int, queries: int, keys: int) -> tuple[str, tuple[int, ...]]:
        """The axes of the attention weights over it: their names, and their sizes without the batch."""
        return "(..., heads, queries, keys)", (heads, queries, keys)

    def interval(self, queries: int, keys: int, device: torch.device) -> KeyInterval:
        """Per query, the first key that it may attend to and the one past the last: a hull, `[first, stop)`."""
        first = torch.zeros(queries, dtype=torch.long, device=device)
        return first, torch.full_like(first, keys)

    @property
    def band(self) -> Band:
        """How many keys before and after its own position a query may see at most; None where only the ends bound it."""
        return None, None

    def mask(self, sizes: Sizes, device: torch.device) -> Bool[Tensor, "... #heads queries keys"]:
        """The predicate as a tensor, True where attention is allowed."""
        head = torch.arange(sizes.heads, device=device)[:, None, None]
        query = torch.arange(sizes.keys - sizes.queries, sizes.keys, device=device)[:, None]
        key = torch.arange(sizes.keys, device=device)
        return self.bind_sizes(sizes).allows(head, query, key)

    def mask_mod(self, sizes: Sizes, device: torch.device) -> mask_mods.MaskMod:
        """`allows` as torch's flex_attention takes it (`mask_mods.py`), where the batch is one axis and queries count from 0."""
        return mask_mods.look_up(self.mask(sizes, device), sizes.batch)

    def allows_pairs(
        self, query: Int[Tensor, " pairs"], key: Int[Tensor, " pairs"], heads: int = 1
    ) -> Bool[Tensor, "... pairs"]:
        """`allows` for a list of pairs, in the first `heads` heads; the result has a head axis only where heads differ."""
        head = torch.arange(heads, device=key.device)[:, None, None]
        on_pair = lambda query, key: self.allows(head, query.view(1, 1), key.view(1))[..., 0, 0]
        allowed: Tensor = torch.vmap(on_pair, chunk_size=1 << 16)(query, key)
        return allowed.movedim(0, -1)

    def filter_edges(self, other: Neighbourhood) -> Neighbourhood | None:
        """This list of pairs, intersected with `other`; None for a neighbourhood that is not a pair list."""
        return None

    def absorb_union(self, other: Neighbourhood) -> Neighbourhood | None:
        """The union with `other`, for a neighbourhood that cannot be a part of an `Either`; None for all others."""
        return None

    def select_batch_rows(self, batch: tuple[int, ...], at: tuple[slice, ...]) -> Neighbourhood:
        """This neighbourhood in some rows of a batch."""
        return BatchRows(self, batch, at)

    def bind_self_attention(self, self_attention: bool) -> Neighbourhood:
        """This neighbourhood with the information whether the queries are the keys."""
        return self

    def bind_sizes(self, sizes: Sizes) -> Neighbourhood:
        """This neighbourhood for an attention of these sizes, if its `allows` must know them."""
        return self

    def unpadded_queries(self, shape: tuple[int, ...]) -> Bool[Tensor, "... queries"] | None:
        """Which of the queries (...batch, queries) are not padding; None where no query is known to be padding."""
        return None

    def leaves(self) -> tuple[Tensor, ...]:
        """The tensors that it refers to."""
        return tuple(tensor for name in self.tensors if (tensor := getattr(self, name)) is not None)

    def __copy__(self) -> Neighbourhood:
        """A copy that shares the tensors, without checking them again."""
        twin = object.__new__(type(self))
        vars(twin).update(vars(self))
        return twin

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Check an unpickled state like constructor arguments: a file may hold anything, and kernels trust the result."""
        try:
            self._restore(state)
        except (KeyError, IndexError, TypeError, AttributeError, RuntimeError) as error:
            name, got = type(self).__name__, ", ".join(state) if isinstance(state, dict) else type(state).__name__
            raise ValueError(f"{name}: its pickled state must be one that {name} writes, got {got}") from error
        # attributes that callers have added; only classes of other packages may override the flags above
        foreign = "_restore" not in vars(type(self))
        added = {
            name: x
            for name, x in state.items()
            if name not in vars(self) and (foreign or not hasattr(type(self), name))
        }
        vars(self).update(added)

    def _restore(self, state: dict[str, Any]) -> None:
        """Build this from the `vars` of another, through the constructor where that checks its arguments."""
        vars(self).update(state)

    # algebra.py imports this file
    def __and__(self, other: Neighbourhood | Tensor) -> Neighbourhood:
        from polyhead.neighbourhood.algebra import intersect

        return intersect(self, other)

    def __rand__(self, other: Tensor) -> Neighbourhood:
        from polyhead.neighbourhood.algebra import intersect

        return intersect(other, self)

    def __or__(self, other: Neighbourhood | Tensor) -> Neighbourhood:
        from polyhead.neighbourhood.algebra import unite

        return unite(self, other)

    def __ror__(self, other: Tensor) -> Neighbourhood:
        from polyhead.neighbourhood.algebra import unite

        return unite(other, self)

    def __invert__(self) -> Neighbourhood:
        from polyhead.neighbourhood.algebra import Complement

        return Complement(self)

    def __repr__(self) -> str:
        fields = ", ".join(
            f"{name}={_repr_without_values(value)}"
            for name, value in vars(self).items()
            if name not in ("exact", "full", "by_head", "along_keys") and name[0] != "_"
        )
        return f"{type(self).__name__}({fields})"


def _repr_without_values(value: object) -> str:
    return f"<{tuple(value.shape)}>" if isinstance(value, Tensor) else repr(value)


class Dense(Neighbourhood):
    """Every query attends to every key."""

    exact = True
    full = True

    @property
    def anchors(self) -> frozenset[str]:
        return frozenset({"first", "own", "last"})

    def allows(self, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return torch.ones(torch.broadcast_shapes(query.shape, key.shape), dtype=torch.bool, device=key.device)

    def mask_mod(self, sizes: Sizes, device: torch.device) -> mask_mods.MaskMod:
        return mask_mods.allow_all

    def _restore(self, state: dict[str, Any]) -> None:
        pass


class Mask(Neighbourhood):
    """Any pattern, as a tensor `(..., heads or 1, queries, keys)` that is True where attention is allowed."""

    tensors = ("keep",)

    def __init__(self, keep: Bool[Tensor, "... queries keys"]) -> None:
        value: object = keep
        if not isinstance(value, Tensor):
            raise ValueError(
                "over must be a neighbourhood such as Causal() or Padding(lengths), or a bool tensor that is True where attention "
                f"is allowed, got {describe_type(value)}{hint_for_over(value)}"
            )
        if keep.layout != torch.strided or keep.is_nested:
            check_dense_tensor("Mask: keep", keep, "(..., queries, keys)", hint=hint_for_mask(keep))
        if keep.dtype != torch.bool:
            raise ValueError(
                f"Mask: keep must be bool, True where attention is allowed, got {keep.dtype}; {hint_for_mask(keep)}"
            )
        if keep.dim() < 2:
            raise ValueError(
                f"Mask: keep must have shape (..., queries, keys), got {tuple(keep.shape)}; for padded keys use Padding(keep)"
            )
        # always with a head axis, so that any further axis is a batch axis
        self.keep = keep[None] if keep.dim() == 2 else keep
        self.by_head = self.keep.shape[-3] > 1
        self._pairs = keep.dim() == 2

    def _restore(self, state: dict[str, Any]) -> None:
        keep = state["keep"]
        Mask.__init__(self, keep[0] if state["_pairs"] and len(keep) == 1 else keep)

    def check(self, sizes: Sizes) -> None:
        shapes.check_mask_shape(tuple(self.keep.shape), self._pairs, sizes)

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

    def allows_pairs(self, query: Tensor, key: Tensor, heads: int = 1) -> Tensor:
        queries, keys = self.keep.shape[-2:]
        return self.keep[..., :heads, (query - (keys - queries)).clamp(0, queries - 1), key]

    def mask_mod(self, sizes: Sizes, device: torch.device) -> mask_mods.MaskMod:
        return mask_mods.look_up(self.keep.to(device), sizes.batch)

    def interval(self, queries: int, keys: int, device: torch.device) -> KeyInterval:
        # (..., queries, keys): a key is in the hull if any head may see it
        keep = self.keep.any(-3)
        keep = keep.expand(*keep.shape[:-2], queries, keys)
        return shapes.interval_around_true(keep)

    def select_batch_rows(self, batch: tuple[int, ...], at: tuple[slice, ...]) -> Neighbourhood:
        return Mask(self.keep.expand(*batch, *self.keep.shape[-3:])[at]) if self.keep.dim() > 3 else self


class BatchRows(Neighbourhood):
    """A neighbourhood in some rows of its batch."""

    tensors = ("over",)

    def __init__(self, over: Neighbourhood, batch: tuple[int, ...], rows: tuple[slice, ...]) -> None:
        self.over, self.batch, self.at, self.exact = over, batch, rows, over.exact
        self.by_head = over.by_head

    def _restore(self, state: dict[str, Any]) -> None:
        BatchRows.__init__(self, state["over"], state["batch"], state["at"])

    @property
    def anchors(self) -> frozenset[str]:
        return self.over.anchors

    @property
    def lattice(self) -> Lattice | None:
        return self.over.lattice

    def allows(self, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        allowed = self.over.allows(head, query, key)
        return allowed.expand(*self.batch, *allowed.shape[-3:])[self.at] if allowed.dim() > 3 else allowed

    def allows_pairs(self, query: Tensor, key: Tensor, heads: int = 1) -> Tensor:
        allowed = self.over.allows_pairs(query, key, heads)
        return allowed.expand(*self.batch, *allowed.shape[-2:])[self.at] if allowed.dim() > 2 else allowed

    def mask_mod(self, sizes: Sizes, device: torch.device) -> mask_mods.MaskMod:
        return mask_mods.select_rows(
            self.over.mask_mod(sizes._replace(batch=self.batch), device), self.batch, self.at, device
        )

    def interval(self, queries: int, keys: int, device: torch.device) -> KeyInterval:
        first, stop = self.over.interval(queries, keys, device)
        if first.dim() == 1:
            return first, stop
        first, stop = (bound.expand(*self.batch, queries)[self.at] for bound in (first, stop))
        return first, stop

    @property
    def band(self) -> Band:
        return self.over.band

    def bind_sizes(self, sizes: Sizes) -> Neighbourhood:
        over = self.over.bind_sizes(sizes._replace(batch=self.batch))
        return self if over is self.over else BatchRows(over, self.batch, self.at)

    def leaves(self) -> tuple[Tensor, ...]:
        return self.over.leaves()

    def __repr__(self) -> str:
        return repr(self.over)


def as_neighbourhood(over: Neighbourhood | Tensor | None) -> Neighbourhood:
    """The neighbourhood for an argument `over`: None is `Dense()`, a tensor is a `Mask`."""
    if isinstance(over, Neighbourhood):
        return over
    return _DENSE if over is None else Mask(over)


_DENSE = Dense()
