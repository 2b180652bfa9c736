"""Keys and values sent by one uneven all-to-all: each rank receives exactly those that its queries may see."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from polyhead.distributed.block_attention import ItemProblem
from polyhead.distributed.item_attention import GradientSum
from polyhead.distributed.item_plan import ItemPlan
from polyhead.distributed.key_value_rows import KeyValueRows
from polyhead.distributed.row_exchange import add_returned, start_return, start_send
from polyhead.distributed.row_sums import RowMerge


class ExchangeTransport:
    """Own keys are attended to while the others' are under way; their gradients travel back while own ones are computed."""

    def __init__(self, plan: ItemPlan, group: dist.ProcessGroup) -> None:
        self.plan, self.group = plan, group

    def forward(self, problem: ItemProblem, merge: RowMerge) -> tuple[Tensor, ...]:
        k, v = problem.call.k, problem.call.v
        rows = KeyValueRows(k, v)
        pending = start_send(rows.pack(k, v, self.plan.rows.send), self.plan.rows, self.group)
        for block in self.plan.own_blocks:
            merge.add(block.queries, *problem.attend(block, k, v))
        received = self._in_order(pending.wait())
        k, v = rows.unpack(received)
        for block in self.plan.received_blocks:
            merge.add(block.queries, *problem.attend(block, k, v))
        return (received,)

    def backward(
        self, problem: ItemProblem, gradients: GradientSum, saved: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor | None]:
        k, v = problem.call.k, problem.call.v
        rows, (received,) = KeyValueRows(k, v), saved
        d_received, d_own = rows.empty_sum(len(received), k), rows.empty_sum(k.shape[-2], k)
        for block in self.plan.received_blocks:
            gradients.add(block, *rows.unpack(received), d_received)
        pending = start_return(self._by_sender(d_received.total()), self.plan.rows, self.group)
        for block in self.plan.own_blocks:
            gradients.add(block, k, v, d_own)
        total = d_own.total()
        add_returned(total, pending.wait(), self.plan.rows)
        dk, dv = rows.unpack(total)
        return dk, None if rows.values_are_keys else dv

    def _in_order(self, rows: Tensor) -> Tensor:
        """Rows grouped by sender, in the order of the sequence."""
        return rows if self.plan.order is None else rows.index_select(0, self.plan.order.to(rows.device))

    def _by_sender(self, rows: Tensor) -> Tensor:
        if self.plan.order is None:
            return rows
        grouped = rows.new_empty(rows.shape)
        grouped[self.plan.order.to(rows.device)] = rows
        return grouped
