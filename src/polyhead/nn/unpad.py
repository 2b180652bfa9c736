"""Padded rows left out: gather the rows of a batch that live, spread the results back."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


class Unpadding:
    """Which rows of (..., items) live. What is gathered ends in one row of zeros that stands for all the others.

    A linear map of that row is what the map makes of nothing (its bias), so that `spread(map(gather(x)))` equals the
    map of `x` with its dead rows set to zero.
    """

    def __init__(self, live: Bool[Tensor, "... items"]) -> None:
        self.shape = live.shape
        self.rows: Int[Tensor, " live"] = live.flatten().nonzero()[:, 0]
        self.dead: Int[Tensor, " dead"] = (~live).flatten().nonzero()[:, 0]
        place = torch.full((live.numel(),), len(self.rows), device=live.device)
        place[self.rows] = torch.arange(len(self.rows), device=live.device)
        self.place: Int[Tensor, " items"] = place

    def unpad(self, x: Float[Tensor, "... items features"]) -> Float[Tensor, "live+1 features"]:
        gathered: Tensor = _Gather.apply(x, self)
        return gathered

    def pad(self, y: Float[Tensor, "live+1 features"]) -> Float[Tensor, "... items features"]:
        spread: Tensor = _Spread.apply(y, self)
        return spread


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, live: Unpadding) -> Tensor:
        ctx.live = live
        rows = x.reshape(-1, x.shape[-1])
        return torch.cat((rows.index_select(0, live.rows), rows.new_zeros(1, rows.shape[-1])))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        live = ctx.live
        whole = grad.new_zeros(live.place.shape[0], grad.shape[-1])
        whole.index_copy_(0, live.rows, grad[:-1])
        return whole.reshape(*live.shape, -1), None


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, live: Unpadding) -> Tensor:
        ctx.live = live
        return y.index_select(0, live.place).reshape(*live.shape, -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        live, rows = ctx.live, grad.reshape(-1, grad.shape[-1])
        nothing = rows.index_select(0, live.dead).sum(0, keepdim=True)
        return torch.cat((rows.index_select(0, live.rows), nothing)), None
