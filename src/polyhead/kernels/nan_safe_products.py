"""Products over the allowed pairs only: nothing from a forbidden pair, not even NaN or inf, reaches a sum or a gradient.

Zero times NaN is NaN, so a weight of zero does not keep a value out of a sum.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from polyhead._torch import can_branch_on_values, is_tracing_or_dataless
from polyhead.linalg.foreach import all_finite


def masked_dot_products(
    q: Float[Tensor, "... queries dim"], k: Float[Tensor, "... keys dim"], hidden: Bool[Tensor, "... queries keys"]
) -> Float[Tensor, "... queries keys"]:
    """q kᵀ, where no gradient flows through hidden pairs. Callers must not read the scores of hidden pairs."""
    if _autograd_records(q, k):
        s: Tensor = _MaskedDotProducts.apply(q, k, hidden)
        return s
    if not is_tracing_or_dataless():
        return q @ k.mT
    # a transform or a compiler differentiates these operations, and ds k is NaN where k is
    return nan_safe_scores(lambda q, k: q @ k.mT, q, k)


def nan_safe_scores(
    score: Callable[[Tensor, Tensor], Tensor], q: Float[Tensor, "... queries dim"], k: Float[Tensor, "... keys dim"]
) -> Float[Tensor, "... queries keys"]:
    """Scores that are NaN, without a gradient, where a query or a key is not finite."""
    off = ~(_rows_are_finite(q)[..., :, None] & _rows_are_finite(k)[..., None, :])
    return score(_zero_nonfinite(q), _zero_nonfinite(k)).masked_fill(off, torch.nan)


def masked_weighted_sum(
    p: Float[Tensor, "... queries keys"], v: Float[Tensor, "... keys dim"], hidden: Bool[Tensor, "... queries keys"]
) -> Float[Tensor, "... queries dim"]:
    """p v over the pairs that are not hidden; p is zero at the hidden ones. NaN in every feature where an allowed value is not finite."""
    if _autograd_records(p, v):
        out: Tensor = _MaskedWeightedSum.apply(p, v, hidden)
        return out
    return _compute_masked_weighted_sum(p, v, hidden)


def _compute_masked_weighted_sum(p: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
    if can_branch_on_values(v) and all_finite([v.detach()]):
        return p @ v
    seen = (~hidden).to(p.dtype) @ (~v.isfinite()).to(p.dtype)
    return (p @ _zero_nonfinite(v)).masked_fill(seen > 0, torch.nan)


def _rows_are_finite(x: Tensor) -> Tensor:
    return x.isfinite().all(-1)


def _zero_nonfinite(x: Tensor) -> Tensor:
    return x.masked_fill(~x.isfinite(), 0.0)


def _autograd_records(*inputs: Tensor) -> bool:
    return torch.is_grad_enabled() and not is_tracing_or_dataless() and any(x.requires_grad for x in inputs)


class _MaskedDotProducts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, hidden: Tensor) -> Tensor:
        ctx.save_for_backward(q, k, hidden)
        return q @ k.mT

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        q, k, hidden = ctx.saved_tensors
        ds = grads[0].masked_fill(hidden, 0.0)
        dq = masked_weighted_sum(ds, k, hidden) if ctx.needs_input_grad[0] else None
        return dq, masked_weighted_sum(ds.mT, q, hidden.mT) if ctx.needs_input_grad[1] else None, None


class _MaskedWeightedSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, p: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
        ctx.save_for_backward(p, v, hidden)
        return _compute_masked_weighted_sum(p, v, hidden)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        p, v, hidden = ctx.saved_tensors
        dp = masked_dot_products(grads[0], v, hidden).masked_fill(hidden, 0.0) if ctx.needs_input_grad[0] else None
        return dp, masked_weighted_sum(p.mT, grads[0], hidden.mT) if ctx.needs_input_grad[1] else None, None
