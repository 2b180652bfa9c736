"""Keys and values sent by one uneven all-to-all: each rank receives exactly those that its queries may see."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from polyhead.distributed.block_attention import ItemProblem, Rows, Terms
from polyhead.distributed.head_pieces import cut_heads
from polyhead.distributed.item_attention import Gradients, GradientSum
from polyhead.distributed.item_plan import ItemPlan
from polyhead.distributed.key_value_rows import KeyValueRows
from polyhead.distributed.row_exchange import PendingRows, start_return, start_send
from polyhead.distributed.row_sums import RowMerge, empty_merge, empty_rows


class ExchangeTransport:
    """Own keys are attended to while the others' are under way; their gradients travel back while own ones are computed.

    Heads may be exchanged in several pieces, one after the other: a rank then holds the others' keys for a few heads only, and
    fetches them again for the backward pass. In one piece they are kept for it.
    """

    def __init__(self, plan: ItemPlan, group: dist.ProcessGroup, pieces: int = 1) -> None:
        self.plan, self.group, self.pieces = plan, group, pieces

    def forward(self, problem: ItemProblem, saves: bool) -> tuple[tuple[Tensor, Tensor], list[Tensor]]:
        call, saved = problem.call, []
        whole = None if self.pieces == 1 else empty_merge(call.q, call.v.shape[-1])
        parts = cut_heads(call, self.pieces)
        pending = self._start(problem.select_heads(parts[0]))
        for number, piece in enumerate(parts):
            part = problem.select_heads(piece)
            k, v = part.call.k, part.call.v
            merge = RowMerge(part.call.q, v, None if whole is None else (whole[0][:, piece.q], whole[1][:, piece.q]))
            for block in self.plan.own_blocks:
                merge.add(block.queries, *part.attend(block, k, v))
            received = self._in_order(pending.wait())
            if number + 1 < self.pieces:
                pending = self._start(problem.select_heads(parts[number + 1]))
            k, v = KeyValueRows(k, v).unpack(received)
            for block in self.plan.received_blocks:
                merge.add(block.queries, *part.attend(block, k, v))
            result = merge.result()
            if saves and self.pieces == 1:
                saved.append(received)
        return result if whole is None else whole, saved

    def backward(self, problem: ItemProblem, terms: Terms, rows: Rows, saved: tuple[Tensor, ...]) -> Gradients:
        if self.pieces == 1:
            return self._piece_backward(problem, terms, rows, saved[0], None)
        call = problem.call
        values_are_keys = call.v is call.k
        whole = [empty_rows(x) for x in ((call.q, call.k) if values_are_keys else (call.q, call.k, call.v))]
        found: list[list[Tensor | None]] = []
        parts = cut_heads(call, self.pieces)
        pending = self._start(problem.select_heads(parts[0]))
        for number, piece in enumerate(parts):
            received = self._in_order(pending.wait())
            if number + 1 < self.pieces:
                pending = self._start(problem.select_heads(parts[number + 1]))
            target = tuple(x[:, heads] for x, heads in zip(whole, piece, strict=False))
            part = problem.select_heads(piece)
            own_terms = terms.select_heads(piece, call.q.shape[-3])
            found.append(self._piece_backward(part, own_terms, rows.select_heads(piece.q), received, target).terms)
        d_terms = terms.join_gradients(found)
        return Gradients(whole[0], whole[1], None if values_are_keys else whole[2], d_terms)

    def _piece_backward(
        self, problem: ItemProblem, terms: Terms, rows: Rows, received: Tensor, target: tuple[Tensor, ...] | None
    ) -> Gradients:
        """The gradients of some heads, in the memory of `target` if given: those of q and k, and of v if it is not k."""
        k, v = problem.call.k, problem.call.v
        layout = KeyValueRows(k, v)
        gradients = GradientSum(problem, terms, rows, None if target is None else target[0])
        d_received = layout.sum_of_rows(len(received), k)
        for block in self.plan.received_blocks:
            gradients.add(block, *layout.unpack(received), d_received)
        pending = start_return(self._by_sender(d_received.total_rows()), self.plan.rows, self.group)
        del d_received
        d_own = layout.own_sum(k, v, None if target is None else target[1:])
        for block in self.plan.own_blocks:
            gradients.add(block, k, v, d_own)
        d_own.add_rows(self.plan.rows.send, pending.wait())
        return gradients.total(*d_own.total())

    def _start(self, problem: ItemProblem) -> PendingRows:
        k, v = problem.call.k, problem.call.v
        return start_send(KeyValueRows(k, v).pack(k, v, self.plan.rows.send), self.plan.rows, self.group)

    def _in_order(self, rows: Tensor) -> Tensor:
        """Rows grouped by sender, in the order of the sequence."""
        return rows if self.plan.order is None else rows.index_select(0, self.plan.order.to(rows.device))

    def _by_sender(self, rows: Tensor) -> Tensor:
        if self.plan.order is None:
            return rows
        grouped = rows.new_empty(rows.shape)
        grouped[self.plan.order.to(rows.device)] = rows
        return grouped
