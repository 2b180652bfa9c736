"""ItemShard: a neighbourhood whose queries and keys lie on several ranks, each with some of them."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from polyhead._checks import check_integer, describe_type, short_repr
from polyhead.distributed.agreement import check_agreement, communication_device, fingerprint
from polyhead.distributed.item_layout import ItemLayout, Order
from polyhead.distributed.item_plan import Layouts
from polyhead.distributed.item_transport import TransportName, TransportPlan, make_transport_plan
from polyhead.kernels import Call
from polyhead.neighbourhood import Graph, Lattice, Neighbourhood, Sizes, as_neighbourhood
from polyhead.neighbourhood.shapes import KeyInterval

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
    queries, keys = length if isinstance(length, tuple) and len(length) == 2 else (length, length)
    queries, keys = check_integer("length", queries, 0), check_integer("length", keys, 0)
    group = process_group(mesh)
    ranks = dist.get_world_size(group)
    layouts = Layouts(ItemLayout(queries, ranks, order), ItemLayout(keys, ranks, order))
    return ItemShard(over, layouts, group, transport)


def process_group(mesh: DeviceMesh | dist.ProcessGroup | None) -> dist.ProcessGroup:
    """The process group of a mesh of one dimension; None is the group of all ranks."""
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError("mesh needs ranks: call torch.distributed.init_process_group first, under torchrun")
    if mesh is None:
        assert dist.group.WORLD is not None
        return dist.group.WORLD
    if isinstance(mesh, DeviceMesh):
        if mesh.ndim != 1:
            raise ValueError(f'mesh must have one dimension, got {mesh}; pass one of them, such as mesh["items"]')
        return mesh.get_group()
    if not isinstance(mesh, dist.ProcessGroup):
        raise ValueError(f"mesh must be a DeviceMesh, a process group or None, got {describe_type(mesh)}")
    return mesh


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
        self._checked: set[tuple[object, ...]] = set()
        self._joined: dict[str, ItemShard] = {}

    # which items are here

    def take(self, x: Tensor, dim: int = -2) -> Tensor:
        """The own queries of a tensor of all of them: `dim` is -2 for features, -1 for token ids."""
        return _take(x, dim, self._own[0], self.layouts.queries.length)

    def take_keys(self, x: Tensor, dim: int = -2) -> Tensor:
        """The own keys of a tensor of all keys, where these are other items."""
        return _take(x, dim, self._own[1], self.layouts.keys.length)

    def gather(self, x: Tensor, dim: int = -2) -> Tensor:
        """All queries on every rank, from the own ones of each; without gradients. Every rank must call it."""
        return gather_items(x.detach(), dim, self.layouts.queries, self.group)

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
        """What this rank sends, receives and computes for a call. The first call for a neighbourhood is a collective."""
        signature = (
            call.sizes.batch,
            call.q.shape[-3],
            *call.k.shape[-3::2],
            *call.v.shape[-3::2],
            call.q.dtype,
            call.dropout,
        )
        if signature not in self._checked:
            check_agreement(self.group, {**self._description, "q, k and v": repr(signature)})
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
        return self._replace_over(self.over & as_neighbourhood(other))

    def _replace_over(self, over: Neighbourhood) -> ItemShard:
        """The same items with another neighbourhood. Equal ones share one plan: a model joins its own in every call."""
        key = fingerprint(over)
        if key not in self._joined:
            joined = ItemShard(over, self.layouts, self.group, self.transport)
            joined._joined = self._joined
            self._joined[key] = joined
        return self._joined[key]

    def allows(self, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        self._refuse()

    def interval(self, queries: int, keys: int, device: torch.device) -> KeyInterval:
        self._refuse()

    def mask(self, sizes: Sizes, device: torch.device) -> Tensor:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise ValueError(
            f"this attention needs keys of {self.layouts.keys.ranks} ranks, and rank {self.rank} has its own alone; "
            "polyhead.distributed.gather(heads) collects the heads of all ranks, received and mean_mass sum over them"
        )

    def __getstate__(self) -> dict[str, Any]:
        raise ValueError(
            "an ItemShard belongs to running ranks and cannot be pickled; pickle its `over` and shard it again"
        )

    def __repr__(self) -> str:
        whole = f"{self.layouts.queries.length} x {self.layouts.keys.length}"
        return f"ItemShard({short_repr(self.over)}, {whole}, rank {self.rank} of {self.layouts.keys.ranks})"


def gather_items(x: Tensor, dim: int, layout: ItemLayout, group: dist.ProcessGroup) -> Tensor:
    """The items of all ranks in the order of the sequence, on every rank, from the own ones of each."""
    own, counts = x.movedim(dim, 0).contiguous(), layout.counts()
    if own.shape[0] != counts[dist.get_rank(group)]:
        raise ValueError(
            f"x must have the {counts[dist.get_rank(group)]} own items along dim {dim}, got {own.shape[0]}"
        )
    # collectives want the same size on every rank
    padded = own.new_zeros(max(counts), *own.shape[1:])
    padded[: len(own)] = own
    parts = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(parts, padded, group=group)
    whole = own.new_empty(layout.length, *own.shape[1:])
    for rank, (part, count) in enumerate(zip(parts, counts, strict=True)):
        whole[layout.items(rank).to(whole.device)] = part[:count]
    return whole.movedim(0, dim)


def _take(x: Tensor, dim: int, own: Tensor, length: int) -> Tensor:
    if x.shape[dim] != length:
        raise ValueError(f"x must have {length} items along dim {dim}, got shape {tuple(x.shape)}; pass dim=")
    return x.index_select(dim, own.to(x.device))


def _largest(values: tuple[int, ...], group: dist.ProcessGroup, device: torch.device) -> tuple[int, ...]:
    """The largest of each value over all ranks."""
    largest = torch.tensor(values, device=device)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    return tuple(largest.tolist())
