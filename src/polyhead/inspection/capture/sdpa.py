"""Attention of torch's as a call of ours: who attends to whom, how strongly."""

from __future__ import annotations

import torch
from torch import Tensor

from polyhead.kernels.call import Call
from polyhead.kernels.fused import flash
from polyhead.neighbourhood import Causal, Dense, Mask, Neighbourhood
from polyhead.score import Dot


def from_sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Call:
    """What `F.scaled_dot_product_attention` computes for these arguments, with an axis of heads in any case."""
    q, k, v = (_with_heads(x) for x in (query, key, value))
    batch = torch.broadcast_shapes(q.shape[:-3], k.shape[:-3], v.shape[:-3])
    heads = max(q.shape[-3], k.shape[-3], v.shape[-3])
    q = q.expand(*batch, heads, *q.shape[-2:])
    k, v = (x.expand(*batch, *x.shape[-3:]) for x in (k, v))
    over: Neighbourhood = Dense()
    bias = None
    if attn_mask is not None:
        queries, keys = q.shape[-2], k.shape[-2]
        # all axes in front: none can be taken for another
        mask = attn_mask if query.dim() > 3 else _with_heads(attn_mask) if attn_mask.dim() == query.dim() else attn_mask
        mask = mask.reshape(*(1,) * (len(batch) + 3 - mask.dim()), *mask.shape)
        if mask.dtype == torch.bool:
            over = Mask(mask.expand(*mask.shape[:-2], queries, keys))
        else:
            bias = mask
    if is_causal:
        over = over & _upper_left(q.shape[-2], k.shape[-2], q.device)
    return Call(q, k, v, over, Dot(scale), bias=bias)


def with_lse(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """What `F.scaled_dot_product_attention` gives, and the log-sum-exp, where it would call an operator that knows it."""
    tensors = (query, key, value)
    plain = (
        attn_mask is None and dropout_p == 0 and not (torch.is_grad_enabled() and any(x.requires_grad for x in tensors))
    )
    same = (
        query.dim() == 4
        and key.shape == value.shape
        and query.shape[:2] == key.shape[:2]
        and query.shape[3] == key.shape[3]
    )
    on_cpu = all(x.is_cpu and not x.is_nested and x.stride(-1) == 1 and x.numel() for x in tensors)
    # torch.nn.attention.sdpa_kernel may have chosen another way
    if not torch.backends.cuda.flash_sdp_enabled():
        return None, None
    if (
        not (plain and same and on_cpu)
        or torch.is_autocast_enabled("cpu")
        or (is_causal and query.shape[2] != key.shape[2])
    ):
        return None, None
    return flash(*tensors, 0.0, is_causal, scale=scale)


def _with_heads(x: Tensor) -> Tensor:
    """(queries, keys) and (batch, queries, keys) have one head that is not written."""
    return x.unsqueeze(-3) if x.dim() < 4 else x


def _upper_left(queries: int, keys: int, device: torch.device) -> Neighbourhood:
    """torch's causal attention: query number i sees the keys up to number i, however many there are."""
    if queries == keys:
        return Causal()
    return Mask(torch.ones(queries, keys, dtype=torch.bool, device=device).tril())


def from_products(
    q_scaled: Tensor, k_transposed: Tensor, v: Tensor, mask: Tensor | None, batch: int, heads: int
) -> Call:
    """What torch's module computes by two products when it is asked for weights; its tensors are (batch · heads, …)."""
    split = lambda x: x.unflatten(0, (batch, heads))
    if mask is not None:
        mask = split(mask) if len(mask) == batch * heads and mask.dim() == 3 else mask.reshape(1, 1, *mask.shape[-2:])
    return Call(split(q_scaled), split(k_transposed.transpose(-2, -1)), split(v), Dense(), Dot(1.0), bias=mask)
