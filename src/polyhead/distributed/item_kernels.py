"""The kernels for attention over items on several ranks: `exchange` and `ring`."""

from __future__ import annotations

import math

from polyhead._checks import count_of
from polyhead.distributed.exchange_transport import ExchangeTransport
from polyhead.distributed.head_pieces import count_pieces
from polyhead.distributed.item_attention import attend_items
from polyhead.distributed.item_plan import ItemPlan
from polyhead.distributed.item_shard import ItemShard
from polyhead.distributed.item_transport import TransportPlan
from polyhead.distributed.key_value_rows import KeyValueRows
from polyhead.distributed.ring_transport import RingTransport
from polyhead.kernels import Call, OutputAndLse, register_kernels
from polyhead.kernels.call import flatten_batch


class _ItemKernel:
    name: str

    def refuses(self, call: Call) -> str | None:
        plan = _plan(call)
        return None if plan.name == self.name else plan.reason

    def __call__(self, call: Call) -> OutputAndLse:
        assert isinstance(call.over, ItemShard)
        made, group = _plan(call), call.over.group
        plan = made.plan
        transport = (
            ExchangeTransport(plan, group, _pieces(call, made))
            if isinstance(plan, ItemPlan)
            else RingTransport(plan, group)
        )
        return attend_items(call, transport, call.over.layouts, group)

    def describe_messages(self, call: Call) -> str:
        """What this rank sends in the forward pass of a call, and why so."""
        plan = _plan(call)
        size = plan.sent_rows * _row_bytes(call)
        messages = plan.messages * (_pieces(call, plan) if plan.name == "exchange" else 1)
        return f"{count_of(plan.sent_rows, 'key')}, {size:,} bytes, in {count_of(messages, 'message')}: {plan.reason}"


class Exchange(_ItemKernel):
    """Keys and values sent by one uneven all-to-all."""

    name = "exchange"


class Ring(_ItemKernel):
    """Keys and values passed around a ring of ranks."""

    name = "ring"


def _plan(call: Call) -> TransportPlan:
    assert isinstance(call.over, ItemShard)
    return call.over.plan(call)


def _row_bytes(call: Call) -> int:
    """The bytes of one key and its value, in the whole batch and all heads."""
    k = flatten_batch(call.k)
    rows = KeyValueRows(k, k if call.v is call.k else flatten_batch(call.v))
    return rows.features * call.k.element_size()


def _pieces(call: Call, plan: TransportPlan) -> int:
    """In how many pieces the heads are exchanged."""
    assert isinstance(call.over, ItemShard)
    row = math.prod(call.sizes.batch) * call.sizes.heads * call.v.shape[-1] * call.q.element_size()
    output = max(call.over.layouts.queries.counts()) * row
    return count_pieces(call, plan.most_received * _row_bytes(call), output, plan.threads)


register_kernels(ItemShard, (Exchange(), Ring()))
