"""Stands for the kernel `flex` on the simulated device: one launch per pass, where a GPU would run compiled code.

What it computes is the definition of flex_attention with the mods that the call was given, so that results can be compared. It
is not what a GPU runs, and the block lists, which are made as for a GPU, are not read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from benchmarks import simulated_device
from polyhead.kernels.flex import kernel as flex_kernel
from polyhead.kernels.flex import support
from polyhead.kernels.flex.compiled import FlexProblem, StaticOptions


@contextmanager
def flex_on(device: torch.device) -> Iterator[None]:
    """A context in which the kernel `flex` takes calls on the simulated device, as it does on CUDA."""
    kernel: Any = flex_kernel
    types, reasons, run = support.DEVICE_TYPES, support._reasons, kernel.run_flex
    support.DEVICE_TYPES = (*types, device.type)  # type: ignore[assignment]
    # whether Triton is installed does not matter here
    support._reasons = {(device, dtype): None for dtype in support.DTYPES}
    kernel.run_flex = _run_flex
    try:
        yield
    finally:
        support.DEVICE_TYPES, support._reasons, kernel.run_flex = types, reasons, run


def _run_flex(q: Tensor, k: Tensor, v: Tensor, problem: FlexProblem, options: StaticOptions) -> tuple[Tensor, Tensor]:
    # with dropout the sum over all pairs, that over the kept ones, and what joins them
    launches = 1 if problem.kept is None else 3
    q, k, v = _EndOfBackward.apply(q, k, v)
    for _ in range(launches):
        simulated_device.record("launched", "flex_attention")
    with simulated_device.uncounted():
        out, lse = _attend(q, k, v, problem, options)
    out, lse = _BeginningOfBackward.apply(out, lse, launches)
    return out, lse if options.differentiable_lse else lse.detach()


def _attend(q: Tensor, k: Tensor, v: Tensor, problem: FlexProblem, options: StaticOptions) -> tuple[Tensor, Tensor]:
    heads = q.shape[1]
    at = [torch.arange(n, device=q.device) for n in (*q.shape[:3], k.shape[2])]
    k, v = (x.repeat_interleave(heads // x.shape[1], 1) for x in (k, v))
    s = (q * options.scale) @ k.mT
    if problem.added is not None:
        s = _over_all_pairs(problem.added, 1)(s, *at)
    s = s.masked_fill(~_over_all_pairs(problem.allowed, 0)(*at), -torch.inf)
    lse = s.logsumexp(-1)
    empty = lse == -torch.inf
    p = (s - lse.masked_fill(empty, 0.0)[..., None]).exp()
    if problem.kept is not None:
        assert problem.keep_share is not None
        p = p * _over_all_pairs(problem.kept, 0)(*at) / problem.keep_share
    return (p @ v).to(v.dtype), lse


def _over_all_pairs(mod: Callable[..., Tensor], scores: int) -> Callable[..., Tensor]:
    """A mod, which takes one pair, for all pairs; with `scores` it takes the score of the pair first."""
    for axis in reversed(range(4)):
        mod = torch.vmap(mod, in_dims=(*(0,) * scores, *(0 if i == axis else None for i in range(4))))
    return mod


class _BeginningOfBackward(torch.autograd.Function):
    """The identity; in the backward pass, where the kernel begins."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, lse: Tensor, launches: int) -> tuple[Tensor, Tensor]:
        ctx.launches = launches
        return out.view_as(out), lse.view_as(lse)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        for _ in range(ctx.launches):
            simulated_device.record("launched", "flex_attention_backward")
        simulated_device.suspend()
        return *grads, None  # type: ignore[return-value]


class _EndOfBackward(torch.autograd.Function):
    """The identity; in the backward pass, where the kernel ends."""

    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> tuple[Tensor, ...]:
        return tuple(x.view_as(x) for x in inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        simulated_device.resume()
        return grads
