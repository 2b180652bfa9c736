"""Keys and values that travel around a ring of ranks, and their gradients with them.

A rank holds two blocks of keys at a time, and in the backward pass as many of gradients.
"""

from __future__ import annotations

import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor

from polyhead.distributed.block_attention import ItemProblem, Rows, Terms
from polyhead.distributed.item_attention import Gradients, GradientSum
from polyhead.distributed.key_value_rows import KeyValueRows
from polyhead.distributed.ring_plan import RingPlan
from polyhead.distributed.row_sums import RowMerge


class RingTransport:
    """At each hop the next block is under way while the one at hand is attended to.

    In the backward pass keys and values travel again, followed by the gradients that ranks have added so far. Rows that go no
    further are returned to their owner.
    """

    def __init__(self, plan: RingPlan, group: dist.ProcessGroup) -> None:
        self.plan, self.group = plan, group

    def forward(self, problem: ItemProblem, saves: bool) -> tuple[tuple[Tensor, Tensor], list[Tensor]]:
        merge = RowMerge(problem.call.q, problem.call.v)
        rows = KeyValueRows(problem.call.k, problem.call.v)
        held = rows.pack(problem.call.k, problem.call.v)
        for number, hop in enumerate(self.plan.hops):
            messages = self._start_pass_on(number, held)
            k, v = (problem.call.k, problem.call.v) if number == 0 else rows.unpack(held)
            for block in hop.blocks:
                merge.add(block.queries, *problem.attend(block, k, v))
            held = messages.wait()
        return merge.result(), []

    def backward(self, problem: ItemProblem, terms: Terms, rows: Rows, saved: tuple[Tensor, ...]) -> Gradients:
        gradients = GradientSum(problem, terms, rows)
        layout = KeyValueRows(problem.call.k, problem.call.v)
        held = layout.pack(problem.call.k, problem.call.v)
        own, pending = held.new_empty(0), None
        for number, hop in enumerate(self.plan.hops):
            messages = self._start_pass_on(number, held)
            into = layout.sum_of_rows(len(held), held)
            for block in hop.blocks:
                gradients.add(block, *layout.unpack(held), into)
            gradient = into.total_rows()
            own = gradient if number == 0 else own
            if pending is not None:
                gradient += pending.wait()
                own[self.plan.hops[number - 1].own_final] += pending.returned
            # at hop 0 rows are with their owner: there is nothing to add yet
            pending = None if number == 0 else self._start_gradients(number, gradient)
            held = messages.wait()
        if pending is not None:
            pending.wait()
            own[self.plan.hops[-1].own_final] += pending.returned
        dk, dv = layout.unpack(own)
        return gradients.total(dk, None if layout.values_are_keys else dv)

    def _start_pass_on(self, number: int, held: Float[Tensor, "keys features"]) -> Messages:
        """Start sending the keys that go on, and receiving those of the next hop."""
        messages = Messages(self.group, held)
        messages.send(held[self.plan.hops[number].forward], self.plan.next_rank)
        messages.receive(self._next_keys(number), self.plan.previous_rank)
        return messages.start()

    def _start_gradients(self, number: int, gradient: Float[Tensor, "keys features"]) -> Messages:
        """Start sending gradients after their keys, and those of keys that go no further to the owner; receive both likewise."""
        hop, plan = self.plan.hops[number], self.plan
        messages = Messages(self.group, gradient)
        messages.send(gradient[hop.forward], plan.next_rank)
        messages.receive(self._next_keys(number), plan.previous_rank)
        messages.send(gradient[hop.final], hop.owner, _RETURN)
        messages.receive(len(hop.own_final), plan.holder(number), _RETURN)
        return messages.start()

    def _next_keys(self, number: int) -> int:
        return len(self.plan.hops[number + 1].key_index) if number + 1 < self.plan.ranks else 0


_PASS_ON, _RETURN = 0, 1


class Messages:
    """Rows sent to and received from single ranks, under way at the same time; empty ones are not sent."""

    def __init__(self, group: dist.ProcessGroup, like: Float[Tensor, "rows features"]) -> None:
        self._group, self._like = group, like
        self._operations: list[dist.P2POp] = []
        self._received: list[Tensor] = []
        self._works: list[dist.Work] = []

    def send(self, rows: Tensor, rank: int, tag: int = _PASS_ON) -> None:
        if len(rows):
            self._operations.append(
                dist.P2POp(dist.isend, rows.contiguous(), group=self._group, tag=tag, group_peer=rank)
            )

    def receive(self, count: int, rank: int, tag: int = _PASS_ON) -> None:
        rows = self._like.new_empty(count, self._like.shape[1])
        self._received.append(rows)
        if count:
            self._operations.append(dist.P2POp(dist.irecv, rows, group=self._group, tag=tag, group_peer=rank))

    def start(self) -> Messages:
        self._works = dist.batch_isend_irecv(self._operations) if self._operations else []
        return self

    def wait(self) -> Float[Tensor, "rows features"]:
        """The rows of the first `receive`."""
        for work in self._works:
            work.wait()
        # what was sent is not needed any more
        self._works, self._operations = [], []
        return self._received[0]

    @property
    def returned(self) -> Float[Tensor, "rows features"]:
        """The rows of the second `receive`, after `wait`."""
        return self._received[1]
