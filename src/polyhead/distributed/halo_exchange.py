"""Rows of own nodes, joined with those of the halo: fetched from the ranks that own them, with gradients that go back."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor

from polyhead.distributed.row_exchange import PendingRows, RowPlan, add_returned, start_all_to_all, start_return


class HaloExchange:
    """One exchange of the rows of several tensors, side by side in one message per pair of ranks.

    `start` sends and `finish` waits; in the backward pass, `finish` sends the gradients of the halo to their owners, and
    `start` waits for them. What is computed in between is computed while rows are under way, in both passes.
    """

    def __init__(self, plan: RowPlan, group: dist.ProcessGroup | None) -> None:
        self.plan, self.group = plan, group
        self.widths: list[int] = []
        self.pending: PendingRows | None = None
        self.pending_return: PendingRows | None = None

    def start(self, *rows: Float[Tensor, "own features"]) -> tuple[Float[Tensor, "own features"], ...]:
        """Start sending. Go on with the returned tensors: they are the same, with a gradient that includes the other ranks'."""
        self.widths = [x.shape[1] for x in rows]
        started: tuple[Tensor, ...] = _Start.apply(self, *rows)
        return started

    def finish(self, *rows: Float[Tensor, "own features"]) -> tuple[Float[Tensor, "all features"], ...]:
        """Wait, and join the rows that `start` returned with those that have arrived."""
        joined: tuple[Tensor, ...] = _Finish.apply(self, *rows)
        return joined


# The gradient of each of these four is another of them, so that an exchange can be differentiated any number of times.


class _Start(torch.autograd.Function):
    """Send rows to the ranks that read them, and go on."""

    @staticmethod
    def forward(ctx: Any, exchange: HaloExchange, *rows: Tensor) -> tuple[Tensor, ...]:
        ctx.exchange, plan = exchange, exchange.plan
        sent = [x.index_select(0, plan.send) for x in rows]
        exchange.pending = start_all_to_all(
            sent[0] if len(sent) == 1 else torch.cat(sent, 1), plan.receive_counts, plan.send_counts, exchange.group
        )
        return tuple(x.view_as(x) for x in rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, *_FinishReturn.apply(ctx.exchange, *gradients)


class _Finish(torch.autograd.Function):
    """Wait for the rows that this rank reads, and append them to its own."""

    @staticmethod
    def forward(ctx: Any, exchange: HaloExchange, *rows: Tensor) -> tuple[Tensor, ...]:
        ctx.exchange = exchange
        assert exchange.pending is not None
        received, exchange.pending = exchange.pending.wait(), None
        return tuple(torch.cat((x, y)) for x, y in zip(rows, received.split(exchange.widths, 1), strict=True))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, *_StartReturn.apply(ctx.exchange, *gradients)


class _StartReturn(torch.autograd.Function):
    """Send the gradients of received rows to their owners, and go on with those of the own ones."""

    @staticmethod
    def forward(ctx: Any, exchange: HaloExchange, *gradients: Tensor) -> tuple[Tensor, ...]:
        ctx.exchange, own = exchange, len(gradients[0]) - exchange.plan.received
        halo = [x[own:] for x in gradients]
        sent = halo[0] if len(halo) == 1 else torch.cat(halo, 1)
        exchange.pending_return = start_return(sent, exchange.plan, exchange.group)
        return tuple(x[:own] for x in gradients)

    @staticmethod
    def backward(ctx: Any, *rows: Tensor) -> tuple[Tensor | None, ...]:
        return None, *_Finish.apply(ctx.exchange, *rows)


class _FinishReturn(torch.autograd.Function):
    """Wait for the gradients that return, and add them to those of the own rows."""

    @staticmethod
    def forward(ctx: Any, exchange: HaloExchange, *gradients: Tensor) -> tuple[Tensor, ...]:
        ctx.exchange = exchange
        assert exchange.pending_return is not None
        returned, exchange.pending_return = exchange.pending_return.wait(), None
        totals = []
        for gradient, part in zip(gradients, returned.split(exchange.widths, 1), strict=True):
            # summed in at least fp32: a row may have gone to many ranks
            total = gradient.to(part.dtype, copy=True)
            add_returned(total, part, exchange.plan)
            totals.append(total.to(gradient.dtype))
        return tuple(totals)

    @staticmethod
    def backward(ctx: Any, *rows: Tensor) -> tuple[Tensor | None, ...]:
        return None, *_Start.apply(ctx.exchange, *rows)
