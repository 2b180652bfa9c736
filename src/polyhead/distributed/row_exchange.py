"""Rows sent to the ranks that need them by one uneven all-to-all, and their gradients sent back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from torch import Tensor


class RowPlan(NamedTuple):
    """Which rows of a tensor go to which rank, and how many arrive from each."""

    send: Int[Tensor, " sent"]
    """The rows that this rank sends, grouped by receiving rank; a row may go to several."""
    send_counts: tuple[int, ...]
    receive_counts: tuple[int, ...]

    @property
    def received(self) -> int:
        return sum(self.receive_counts)

    @property
    def messages(self) -> int:
        """How many other ranks this rank sends rows to."""
        return sum(count > 0 for count in self.send_counts)


class PendingRows:
    """Rows under way: `wait` returns them."""

    def __init__(self, rows: Tensor, sent: Tensor, work: dist.Work) -> None:
        # what is sent must live until it has been sent, and no longer
        self._rows, self._work = rows, work
        self._sent: Tensor | None = sent

    def wait(self) -> Tensor:
        self._work.wait()
        self._sent = None
        return self._rows


def start_send(x: Float[Tensor, "sent features"], plan: RowPlan, group: dist.ProcessGroup | None = None) -> PendingRows:
    """Start sending the rows `plan.send`. The result is (received, features), grouped by sending rank, in the order of its `send`."""
    return start_all_to_all(x, plan.receive_counts, plan.send_counts, group)


def start_return(
    gradient: Float[Tensor, "received features"], plan: RowPlan, group: dist.ProcessGroup | None = None
) -> PendingRows:
    """Start sending the gradients of received rows back to their owners, in at least fp32: the result is (sent, features)."""
    # gloo sums and sends bf16 as bf16, in which 256 + 1 is 256
    wide = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
    return start_all_to_all(wide.contiguous(), plan.send_counts, plan.receive_counts, group)


def add_returned(
    gradient: Float[Tensor, "rows features"], returned: Float[Tensor, "sent features"], plan: RowPlan
) -> None:
    """Add gradients that came back to those of the rows that were sent, in place."""
    gradient.index_add_(0, plan.send.to(gradient.device), returned.to(gradient.dtype))


def start_all_to_all(
    x: Float[Tensor, "sent features"],
    receive_counts: Sequence[int],
    send_counts: Sequence[int],
    group: dist.ProcessGroup | None = None,
) -> PendingRows:
    """Start sending rows that are grouped by receiving rank; the result is grouped by sending rank."""
    rows = x.new_empty(sum(receive_counts), *x.shape[1:])
    work = dist.all_to_all_single(rows, x, list(receive_counts), list(send_counts), group=group, async_op=True)
    assert work is not None
    return PendingRows(rows, x, work)
