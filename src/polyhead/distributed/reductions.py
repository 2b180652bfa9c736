"""Sums and concatenations over ranks that autograd knows, for tensors of which every rank goes on with the same copy.

Every rank computes the same from such a copy, so that its gradient is the same on every rank too. Half precision is summed in
fp32: gloo sums bf16 in bf16, in which 256 + 1 is 256.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor


def sum_over_ranks(x: Float[Tensor, "*any"], group: dist.ProcessGroup, *, owned: bool = False) -> Float[Tensor, "*any"]:
    """The sum of the ranks' tensors, on every rank; in the memory of `x` where it is `owned`, and nothing is differentiated."""
    if owned and not torch.is_grad_enabled() and x.is_contiguous() and x.dtype in (torch.float32, torch.float64):
        dist.all_reduce(x, group=group)
        return x
    y: Tensor = _Sum.apply(x, group)
    return y


def sum_gradient_over_ranks(x: Float[Tensor, "*any"], group: dist.ProcessGroup) -> Float[Tensor, "*any"]:
    """`x`, the same on every rank, for computations that differ between ranks: its gradient is the sum of theirs."""
    if not (torch.is_grad_enabled() and x.requires_grad):
        return x
    y: Tensor = _SumGradient.apply(x, group)
    return y


def gather_features(x: Float[Tensor, "... features"], group: dist.ProcessGroup) -> Float[Tensor, "... all_features"]:
    """The features of all ranks side by side, on every rank."""
    y: Tensor = _Gather.apply(x, group)
    return y


def _all_reduce(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    # a copy: what is reduced in place may be a view, or saved for backward
    wide = x.to(torch.promote_types(x.dtype, torch.float32), copy=True, memory_format=torch.contiguous_format)
    dist.all_reduce(wide, group=group)
    return wide.to(x.dtype)


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        # differentiated again, what every rank computes from this gradient differs
        return sum_gradient_over_ranks(grad, ctx.group), None


class _SumGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return sum_over_ranks(grad, ctx.group), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group, ctx.features = group, x.shape[-1]
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        first = dist.get_rank(ctx.group) * ctx.features
        part = sum_gradient_over_ranks(grad, ctx.group).narrow(-1, first, ctx.features)
        return part, None
