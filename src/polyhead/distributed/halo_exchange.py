"""Rows of own nodes, joined with those of the halo: fetched from the ranks that own them, with gradients that go back."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

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


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: HaloExchange, *rows: Tensor) -> tuple[Tensor, ...]:
        ctx.exchange = exchange
        plan = exchange.plan
        sent = [x.index_select(0, plan.send) for x in rows]
        exchange.pending = start_all_to_all(
            sent[0] if len(sent) == 1 else torch.cat(sent, 1), plan.receive_counts, plan.send_counts, exchange.group
        )
        return tuple(x.view_as(x) for x in rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        exchange = ctx.exchange
        assert exchange.pending_return is not None
        returned, exchange.pending_return = exchange.pending_return.wait(), None
        totals = []
        for gradient, part in zip(gradients, returned.split(exchange.widths, 1), strict=True):
            # summed in at least fp32: a row may have gone to many ranks
            total = gradient.to(part.dtype, copy=True)
            add_returned(total, part, exchange.plan)
            totals.append(total.to(gradient.dtype))
        return None, *totals


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: HaloExchange, *rows: Tensor) -> tuple[Tensor, ...]:
        ctx.exchange, ctx.own = exchange, len(rows[0])
        assert exchange.pending is not None
        received, exchange.pending = exchange.pending.wait(), None
        return tuple(torch.cat((x, y)) for x, y in zip(rows, received.split(exchange.widths, 1), strict=True))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        exchange, halo = ctx.exchange, [x[ctx.own :] for x in gradients]
        sent = halo[0] if len(halo) == 1 else torch.cat(halo, 1)
        exchange.pending_return = start_return(sent, exchange.plan, exchange.group)
        return None, *(x[: ctx.own] for x in gradients)
