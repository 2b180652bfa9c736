"""The heads of an attention over items on several ranks: gathered, or summed up over ranks without being gathered."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float, Int
from torch import Tensor

from polyhead.distributed.block_attention import ItemProblem, Terms
from polyhead.distributed.item_plan import Block, Intervals, make_item_plan
from polyhead.distributed.item_shard import ItemShard
from polyhead.distributed.key_value_rows import KeyValueRows
from polyhead.distributed.row_exchange import start_send
from polyhead.heads import Heads, Origin
from polyhead.kernels import Call
from polyhead.kernels.call import flatten_batch
from polyhead.metrics.compute import check_offset
from polyhead.neighbourhood.shapes import flatten_batch_unless_shared


def gather_item_heads(heads: Heads) -> Heads:
    """A view of all queries and keys, on every rank, from the own ones of each; without gradients."""
    call, origin = _call(heads), heads.origin
    shard = _shard(call)
    k = shard.gather_keys(call.k)
    v = k if call.v is call.k else shard.gather_keys(call.v)
    q = shard.gather(call.q)
    bias = call.bias
    if bias is not None and bias.shape[-2] > 1:
        bias = shard.gather(bias)
    indices = None if call.global_indices is None else call.global_indices._replace(queries=None, keys=None)
    whole = call._replace(q=q, k=k, v=v, over=shard.over, bias=bias, global_indices=indices)
    lse = None if origin.lse is None else shard.gather(origin.lse, -1)
    return Heads(whole, origin._replace(outputs=shard.gather(origin.outputs), lse=lse))


def item_received(heads: Heads) -> Float[Tensor, "... heads keys"]:
    """The weight that each key receives from the queries of all ranks, on every rank: `heads.received()` of the whole."""
    rows = fetch_own_rows(heads)
    own = rows.heads.received()
    total = own.new_zeros(*own.shape[:-1], rows.shard.layouts.keys.length)
    total[..., rows.key_index.to(own.device)] = own
    dist.all_reduce(total, group=rows.shard.group)
    return total.reshape(*rows.batch, *total.shape[1:])


def item_mean_mass(heads: Heads, on: str | int | Bool[Tensor, " keys"]) -> Float[Tensor, "... heads"]:
    """The mean, over the queries of all ranks, of their weight on certain keys: `heads.mass(on).mean(-1)` of the whole.

    Args:
        on: `"self"`, `"previous"`, `"next"` or `"first"`; or the offset of the key from the query; or a bool tensor of all keys.
    """
    rows = fetch_own_rows(heads)
    total = rows.heads.mass(rows.keys_to_sum(on)).sum(-1)
    dist.all_reduce(total, group=rows.shard.group)
    mean = total / max(1, rows.shard.layouts.queries.length)
    return mean.reshape(*rows.batch, -1)


class OwnRows(NamedTuple):
    """The own queries over all keys that they may see, in a batch with one axis."""

    heads: Heads
    shard: ItemShard
    query_index: Int[Tensor, " queries"]
    key_index: Int[Tensor, " keys"]
    """The indices of the view's queries and keys in the whole attention."""
    batch: tuple[int, ...]

    def keys_to_sum(self, on: str | int | Bool[Tensor, " keys"]) -> Tensor:
        """Keys as `Heads.mass` takes them, but given for the whole attention: the view has only some."""
        keys = self.shard.layouts.keys.length
        if isinstance(on, Tensor):
            if on.dtype != torch.bool or on.shape[-1:] != (keys,):
                raise ValueError(f"on must be a bool tensor of {keys} keys, got {on.dtype} of shape {tuple(on.shape)}")
            return on[..., self.key_index.to(on.device)]
        if on == "first":
            return self.key_index == 0
        offset = check_offset(on)
        wanted = self.query_index + self.shard.layouts.query_offset + offset
        place = torch.searchsorted(self.key_index, wanted).clamp(max=max(0, len(self.key_index) - 1))
        found = self.key_index[place] == wanted if len(self.key_index) else torch.zeros_like(wanted, dtype=torch.bool)
        return torch.where(found, place, -1)[None]


def fetch_own_rows(heads: Heads) -> OwnRows:
    """Fetch the keys that the own queries may see; every rank must call it. The result has no gradients."""
    call = _call(heads)
    shard = _shard(call)
    intervals = Intervals.of(shard.over, shard.layouts)
    plan = make_item_plan(shard.over, shard.layouts, shard.rank, intervals, None)
    k = flatten_batch(call.k.detach())
    v = k if call.v is call.k else flatten_batch(call.v.detach())
    rows = KeyValueRows(k, v)
    own = rows.pack(k, v)
    received = start_send(own[plan.rows.send.to(own.device)], plan.rows, shard.group).wait()
    received = received if plan.order is None else received[plan.order.to(received.device)]
    query_index, own_keys = shard.item_indices
    key_index, order = torch.cat((own_keys, plan.key_index)).sort()
    k, v = rows.unpack(torch.cat((own, received))[order.to(own.device)])
    ends = (torch.searchsorted(key_index, x[:, query_index].contiguous()) for x in intervals[:2])
    block = Block(slice(0, len(query_index)), slice(0, len(key_index)), query_index, key_index, *ends)
    return OwnRows(_view(call, shard, block, k, v), shard, query_index, key_index, call.sizes.batch)


def _view(call: Call, shard: ItemShard, block: Block, k: Tensor, v: Tensor) -> Heads:
    """The heads of the own queries over fetched keys."""
    batch, q = call.sizes.batch, flatten_batch(call.q.detach())
    bias = None if call.bias is None else flatten_batch_unless_shared(call.bias.detach(), batch, 3)
    layouts = shard.layouts
    problem = ItemProblem(call, shard.over, layouts.queries.length, layouts.query_offset, batch)
    table = None if call.relative_bias is None else call.relative_bias.detach()
    if table is not None:
        # queries of several runs have no common table: their bias is per pair
        pairs = block.key_index - block.query_index[:, None] + (layouts.queries.length - 1)
        added = table[:, pairs.to(table.device)]
        whole_bias = bias if bias is None or bias.shape[-1] == 1 else bias[..., block.key_index.to(bias.device)]
        local = problem.block_call(block, q, k, v, Terms(None, None))
        local = local._replace(bias=added[None] if whole_bias is None else whole_bias + added)
    else:
        local = problem.block_call(block, q, k, v, Terms(None, bias))
    return Heads(local._replace(sink=call.sink), Origin(q.new_empty(*q.shape[:-1], v.shape[-1])))


def _call(heads: Heads) -> Call:
    return heads.part.call


def _shard(call: Call) -> ItemShard:
    assert isinstance(call.over, ItemShard)
    return call.over
