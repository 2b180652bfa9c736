"""ItemShard: a neighbourhood whose queries and keys lie on several ranks, each with some of them."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from polyhead._checks import check_integer, count_of, short_repr
from polyhead.distributed.agreement import check_agreement, communication_device, fingerprint
from polyhead.distributed.item_layout import ItemLayout, Order
from polyhead.distributed.item_plan import Layouts
from polyhead.distributed.item_transport import TransportName, TransportPlan, make_transport_plan
from polyhead.distributed.own_rows import gather_rows, item_axis, take_rows
from polyhead.distributed.process_group import process_group
from polyhead.kernels import Call
from polyhead.neighbourhood import (
    Graph,
    Lattice,
    MaskModNeighbourhood,
    Neighbourhood,
    Sizes,
    as_neighbourhood,
    operands,
)
from polyhead.neighbourhood.shapes import KeyInterval

# Neighbourhoods of one shard whose plans are kept.
_KEPT_PLANS = 8
_TRANSPORTS = ("exchange", "ring")
_ORDERS = ("contiguous", "zigzag")


def shard_items(
    over: Neighbourhood | Tensor | None,
    length: int | tuple[int, int],
    mesh: DeviceMesh | dist.ProcessGroup | None = None,
    *,
    order: Order = "zigzag",
    transport: TransportName | None = None,
) -> ItemShard:
    """Distribute the items of a sequence over ranks (context parallelism).

    Each rank passes its own items and `over=shard` to the same layer or model, and gets the outputs of its own items back:

        shard = shard_items(Causal(), length=16384, mesh=mesh)
        y, heads = layer(shard.take(x), over=shard)

    Every rank of the mesh must make the same calls.

    Args:
        over: who may attend to whom in the whole sequence.
        length: the number of items in the whole sequence, or (queries, keys) where keys are other items.
        mesh: a mesh of one dimension, or a process group; None for all ranks.
        order: `"contiguous"`: each rank has one stretch of the sequence. `"zigzag"`: each has two, one from the beginning and
            one from the end, so that causal attention is equal work for all.
        transport: how keys reach other ranks, `"exchange"` or `"ring"`; by default the cheaper one, see `explain`.

    Raises:
        ValueError: if an argument does not fit the others; the message names it and the rule.
    """
    if order not in _ORDERS:
        raise ValueError(f"order must be one of {', '.join(map(repr, _ORDERS))}, got {order!r}")
    if transport is not None and transport not in _TRANSPORTS:
        raise ValueError(f"transport must be None or one of {', '.join(map(repr, _TRANSPORTS))}, got {transport!r}")
    over = as_neighbourhood(over)
    if isinstance(over, ItemShard):
        raise ValueError("over must be a neighbourhood of the whole sequence, got one that is sharded already")
    if isinstance(over, Graph):
        raise ValueError(f"over must not be a Graph, got {over!r}; use polyhead.distributed.partition for graphs")
    if isinstance(length, (tuple, list)) and len(length) != 2:
        raise ValueError(f"length must be an integer or (queries, keys), got {length!r}")
    queries, keys = length if isinstance(length, (tuple, list)) else (length, length)
    queries, keys = check_integer("length", queries, 0), check_integer("length", keys, 0)
    group = process_group(mesh)
    ranks = dist.get_world_size(group)
    layouts = Layouts(ItemLayout(queries, ranks, order), ItemLayout(keys, ranks, order))
    return ItemShard(over, layouts, group, transport)


class ItemShard(Neighbourhood):
    """A neighbourhood of a whole sequence, of which this rank has some queries and keys; made by `shard_items`."""

    tensors = ("over",)

    def __init__(
        self, over: Neighbourhood, layouts: Layouts, group: dist.ProcessGroup, transport: TransportName | None
    ) -> None:
        self.over, self.layouts, self.group, self.transport = over, layouts, group, transport
        self.exact, self.by_head, self.along_keys = over.exact, over.by_head, over.along_keys
        self.rank = dist.get_rank(group)
        self._own = layouts.queries.items(self.rank), layouts.keys.items(self.rank)
        self._plans: dict[int, TransportPlan] = {}
        self._checked: set[tuple[str, ...]] = set()
        self._versions: tuple[int | None, ...] = ()
        self._joined: OrderedDict[object, ItemShard] = OrderedDict()

    # which items are here

    def take(self, x: Tensor, dim: int | None = None) -> Tensor:
        """The own queries of a tensor of all of them. `dim` is -2 by default, 0 for a tensor with one axis; -1 for token ids."""
        return take_rows(x, item_axis(x, dim), self._own[0], self.layouts.queries.length, "items")

    def take_keys(self, x: Tensor, dim: int | None = None) -> Tensor:
        """The own keys of a tensor of all keys, where these are other items."""
        return take_rows(x, item_axis(x, dim), self._own[1], self.layouts.keys.length, "items")

    def gather(self, x: Tensor, dim: int | None = None) -> Tensor:
        """All queries on every rank, from the own ones of each; without gradients. Every rank must call it."""
        return gather_rows(x.detach(), item_axis(x, dim), self._own[0], self.layouts.queries.length, self.group)

    def gather_keys(self, x: Tensor, dim: int | None = None) -> Tensor:
        """All keys on every rank, where these are other items."""
        return gather_rows(x.detach(), item_axis(x, dim), self._own[1], self.layouts.keys.length, self.group)

    @property
    def item_indices(self) -> tuple[Tensor, Tensor]:
        return self._own

    @property
    def whole(self) -> Neighbourhood:
        return self.over

    def whole_sizes(self, queries: int, keys: int) -> tuple[int, int]:
        return self.layouts.queries.length, self.layouts.keys.length

    @property
    def lattice(self) -> Lattice | None:
        return self.over.lattice

    def attention_axes(self, heads: int, queries: int, keys: int) -> tuple[str, tuple[int, ...]]:
        return "(..., heads, own queries, all keys)", (heads, queries, self.layouts.keys.length)

    # what is sent

    def plan(self, call: Call) -> TransportPlan:
        """What this rank sends, receives and computes for a call. The first call with a new description is a collective."""
        versions = tuple(None if x.is_inference() else x._version for x in self.over.leaves())
        if versions != self._versions:
            # a mask has been changed in place
            self._plans, self._checked, self._versions = {}, set(), versions
        description = _describe_call(call)
        signature = tuple(description.values())
        if signature not in self._checked:
            check_agreement(self.group, {**self._description, **description})
            self._checked.add(signature)
        heads = call.sizes.heads if self.by_head else 1
        if heads not in self._plans:
            device = communication_device(self.group)
            self._plans[heads] = make_transport_plan(
                self.over, self.layouts, self.rank, heads, self.transport, lambda own: _largest(own, self.group, device)
            )
        return self._plans[heads]

    @property
    def _description(self) -> dict[str, str]:
        return {
            "over": fingerprint(self.over),
            "length": f"{self.layouts.queries.length}, {self.layouts.keys.length}",
            "order": self.layouts.keys.order,
            "transport": str(self.transport),
        }

    # as a neighbourhood

    def check(self, sizes: Sizes) -> None:
        for name, items, layout, own in zip(
            ("query", "key"), (sizes.queries, sizes.keys), self.layouts, self._own, strict=True
        ):
            if items != len(own):
                raise ValueError(
                    f"{name} must have the {len(own)} items of rank {self.rank} out of {layout.length}, got {items}; "
                    "shard.take(x) selects them"
                )
        queries, keys = self.whole_sizes(sizes.queries, sizes.keys)
        self.over.check(Sizes(sizes.batch, sizes.heads, queries, keys))

    def check_device(self, device: torch.device) -> None:
        self.over.check_device(device)

    def leaves(self) -> tuple[Tensor, ...]:
        return self.over.leaves()

    def bind_self_attention(self, self_attention: bool) -> Neighbourhood:
        bound = self.over.bind_self_attention(self_attention)
        return self if bound is self.over else self._replace_over(bound)

    def filter_edges(self, other: Neighbourhood) -> Neighbourhood:
        """`other & shard`, where `other` is for the whole sequence."""
        return self._replace_over(other & self.over)

    def __and__(self, other: Neighbourhood | Tensor) -> Neighbourhood:
        if not isinstance(other, (Neighbourhood, Tensor)):
            return NotImplemented
        return self._replace_over(self.over & self._for_whole_sequence("&", as_neighbourhood(other)))

    def absorb_union(self, other: Neighbourhood) -> Neighbourhood:
        """`other | shard`, where `other` is for the whole sequence."""
        return self._replace_over(self.over | self._for_whole_sequence("|", other))

    def __invert__(self) -> Neighbourhood:
        return self._replace_over(~self.over)

    def _for_whole_sequence(self, symbol: str, other: Neighbourhood) -> Neighbourhood:
        if isinstance(other, ItemShard):
            raise ValueError(
                f"{symbol}: one of both must be for the whole sequence, got {self!r} and {other!r}; join them before shard_items"
            )
        return other

    def bind_sizes(self, sizes: Sizes) -> Neighbourhood:
        queries, keys = self.whole_sizes(sizes.queries, sizes.keys)
        bound = self.over.bind_sizes(sizes._replace(queries=queries, keys=keys))
        return self if bound is self.over else self._replace_over(bound)

    def _replace_over(self, over: Neighbourhood) -> ItemShard:
        """The same items with another neighbourhood. Equal ones share one plan: a model joins its own in every call."""
        key = _identify(over)
        if key not in self._joined:
            joined = ItemShard(over, self.layouts, self.group, self.transport)
            joined._joined = self._joined
            self._joined[key] = joined
            if len(self._joined) > _KEPT_PLANS:
                self._joined.popitem(last=False)
        self._joined.move_to_end(key)
        return self._joined[key]

    def allows(self, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        self._refuse()

    def interval(self, queries: int, keys: int, device: torch.device) -> KeyInterval:
        self._refuse()

    def mask(self, sizes: Sizes, device: torch.device) -> Tensor:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise ValueError(
            f"this attention needs keys of {count_of(self.layouts.keys.ranks, 'rank')}, and rank {self.rank} has its own alone; "
            "polyhead.distributed.gather(heads) collects the heads of all ranks, received and mean_mass sum over them"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> ItemShard:
        # process groups cannot be copied
        return self

    def __getstate__(self) -> dict[str, Any]:
        raise ValueError(
            "an ItemShard belongs to running ranks and cannot be pickled; pickle its `over` and shard it again"
        )

    def __repr__(self) -> str:
        whole = f"{self.layouts.queries.length} x {self.layouts.keys.length}"
        return f"ItemShard({short_repr(self.over)}, {whole}, rank {self.rank} of {self.layouts.keys.ranks})"


def _describe_call(call: Call) -> dict[str, str]:
    """What must be the same on every rank."""
    learned = (call.q, call.k, call.v, call.relative_bias, call.bias, *call.score.learned())
    return {
        "batch": str(call.sizes.batch),
        "heads of q, k, v": f"{call.q.shape[-3]}, {call.k.shape[-3]}, {call.v.shape[-3]}",
        "features of k, v": f"{call.k.shape[-1]}, {call.v.shape[-1]}",
        "dtype": str(call.q.dtype),
        "dropout": str(call.dropout),
        # a rank that skips the backward pass would leave the others waiting
        "requires_grad": str(torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in learned)),
    }


def _identify(over: Neighbourhood) -> object:
    """A key that is equal for equal neighbourhoods: without reading the tensors of classes that say which they are."""
    leaves = over.leaves()
    # tensors made under torch.inference_mode() have no version
    if any(x.is_inference() for x in leaves) or not all(map(_is_ours, operands(over))):
        return fingerprint(over)
    return repr(over), tuple((id(x), x._version) for x in leaves)


def _is_ours(over: Neighbourhood) -> bool:
    return type(over).__module__.startswith("polyhead.") and not isinstance(over, MaskModNeighbourhood)


def _largest(values: tuple[int, ...], group: dist.ProcessGroup, device: torch.device) -> tuple[int, ...]:
    """The largest of each value over all ranks."""
    largest = torch.tensor(values, device=device)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    return tuple(largest.tolist())
