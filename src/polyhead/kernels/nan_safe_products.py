"""Products over allowed pairs alone: what stands in a forbidden pair, NaN and inf too, reaches no sum and no gradient.

Zero times NaN is NaN: a weight of zero does not keep a value out of a sum.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from polyhead._torch import values_readable, values_unavailable
from polyhead.linalg.foreach import finite


def dots(
    q: Float[Tensor, "... queries dim"], k: Float[Tensor, "... keys dim"], hidden: Bool[Tensor, "... queries keys"]
) -> Float[Tensor, "... queries keys"]:
    """q kᵀ, of which nobody may use what is hidden: neither q nor k is given a gradient through it."""
    if _differentiated(q, k):
        s: Tensor = _Dots.apply(q, k, hidden)
        return s
    if not values_unavailable():
        return q @ k.mT
    # a transform or a compiler differentiates what it sees, and ds k is NaN where k is
    return scored_apart(lambda q, k: q @ k.mT, q, k)


def scored_apart(
    score: Callable[[Tensor, Tensor], Tensor], q: Float[Tensor, "... queries dim"], k: Float[Tensor, "... keys dim"]
) -> Float[Tensor, "... queries keys"]:
    """Scores that are NaN where a query or a key is not finite, and hand on no gradient there."""
    off = ~(_all_finite(q)[..., :, None] & _all_finite(k)[..., None, :])
    return score(_cleared(q), _cleared(k)).masked_fill(off, torch.nan)


def weighted_sum(
    p: Float[Tensor, "... queries keys"], v: Float[Tensor, "... keys dim"], hidden: Bool[Tensor, "... queries keys"]
) -> Float[Tensor, "... queries dim"]:
    """p v over the pairs that are not hidden, where p is zero; NaN in a feature that is not finite in one of these."""
    if _differentiated(p, v):
        out: Tensor = _WeightedSum.apply(p, v, hidden)
        return out
    return _weighted_sum(p, v, hidden)


def _weighted_sum(p: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
    if values_readable(v) and finite([v.detach()]):
        return p @ v
    seen = (~hidden).to(p.dtype) @ (~v.isfinite()).to(p.dtype)
    return (p @ _cleared(v)).masked_fill(seen > 0, torch.nan)


def _all_finite(x: Tensor) -> Tensor:
    return x.isfinite().all(-1)


def _cleared(x: Tensor) -> Tensor:
    return x.masked_fill(~x.isfinite(), 0.0)


def _differentiated(*given: Tensor) -> bool:
    """Whether autograd records this."""
    return torch.is_grad_enabled() and not values_unavailable() and any(x.requires_grad for x in given)


class _Dots(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, hidden: Tensor) -> Tensor:
        ctx.save_for_backward(q, k, hidden)
        return q @ k.mT

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        q, k, hidden = ctx.saved_tensors
        ds = grads[0].masked_fill(hidden, 0.0)
        dq = weighted_sum(ds, k, hidden) if ctx.needs_input_grad[0] else None
        return dq, weighted_sum(ds.mT, q, hidden.mT) if ctx.needs_input_grad[1] else None, None


class _WeightedSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, p: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
        ctx.save_for_backward(p, v, hidden)
        return _weighted_sum(p, v, hidden)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        p, v, hidden = ctx.saved_tensors
        dp = dots(grads[0], v, hidden).masked_fill(hidden, 0.0) if ctx.needs_input_grad[0] else None
        return dp, weighted_sum(p.mT, grads[0], hidden.mT) if ctx.needs_input_grad[1] else None, None
