"""torch's attention functions as a `Call`."""

from __future__ import annotations

import torch
from torch import Tensor

from polyhead.kernels.call import Call
from polyhead.kernels.fused import flash_attention_cpu
from polyhead.neighbourhood import Causal, Dense, Mask, Neighbourhood
from polyhead.score import Dot


def call_from_sdpa(
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
    """The call that `F.scaled_dot_product_attention` computes for these arguments, always with an axis of heads."""
    q, k, v = (_add_head_axis(x) for x in (query, key, value))
    batch = torch.broadcast_shapes(q.shape[:-3], k.shape[:-3], v.shape[:-3])
    heads = max(q.shape[-3], k.shape[-3], v.shape[-3])
    q = q.expand(*batch, heads, *q.shape[-2:])
    k, v = (x.expand(*batch, *x.shape[-3:]) for x in (k, v))
    over: Neighbourhood = Dense()
    bias = None
    if attn_mask is not None:
        queries, keys = q.shape[-2], k.shape[-2]
        # all batch axes are written out, so that none is mistaken for another
        mask = (
            attn_mask if query.dim() > 3 else _add_head_axis(attn_mask) if attn_mask.dim() == query.dim() else attn_mask
        )
        mask = mask.reshape(*(1,) * (len(batch) + 3 - mask.dim()), *mask.shape)
        if mask.dtype == torch.bool:
            over = Mask(mask.expand(*mask.shape[:-2], queries, keys))
        else:
            bias = mask
    if is_causal:
        over = over & _upper_left_causal(q.shape[-2], k.shape[-2], q.device)
    return Call(q, k, v, over, Dot(scale), bias=bias)


def sdpa_with_lse(
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
    """The output of `F.scaled_dot_product_attention` and the log-sum-exp; (None, None) if it would not call flash attention."""
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
    # torch.nn.attention.sdpa_kernel may have disabled it
    if not torch.backends.cuda.flash_sdp_enabled():
        return None, None
    if (
        not (plain and same and on_cpu)
        or torch.is_autocast_enabled("cpu")
        or (is_causal and query.shape[2] != key.shape[2])
    ):
        return None, None
    return flash_attention_cpu(*tensors, 0.0, is_causal, scale=scale)


def _add_head_axis(x: Tensor) -> Tensor:
    """Add the implicit head of (queries, keys) and (batch, queries, keys)."""
    return x.unsqueeze(-3) if x.dim() < 4 else x


def _upper_left_causal(queries: int, keys: int, device: torch.device) -> Neighbourhood:
    """torch's causal mask: query i attends to keys 0 to i, however many keys there are."""
    if queries == keys:
        return Causal()
    return Mask(torch.ones(queries, keys, dtype=torch.bool, device=device).tril())


def call_from_bmm_operands(
    q_scaled: Tensor, k_transposed: Tensor, v: Tensor, mask: Tensor | None, batch: int, heads: int
) -> Call:
    """The call that nn.MultiheadAttention computes by two products with need_weights; its tensors are (batch · heads, …)."""
    split = lambda x: x.unflatten(0, (batch, heads))
    if mask is not None:
        mask = split(mask) if len(mask) == batch * heads and mask.dim() == 3 else mask.reshape(1, 1, *mask.shape[-2:])
    return Call(split(q_scaled), split(k_transposed.transpose(-2, -1)), split(v), Dense(), Dot(1.0), bias=mask)
