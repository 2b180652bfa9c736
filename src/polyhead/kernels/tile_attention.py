"""Attention within one tile, forward and backward: by torch's fused kernel, or in plain torch."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from polyhead.kernels.fused import flash_attention_cpu, nan_preserving_mask
from polyhead.kernels.nan_safe_products import masked_weighted_sum

_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def forward_flash(
    q: Tensor, k: Tensor, v: Tensor, add: Tensor | None, *, shape: str, scale: float
) -> tuple[Tensor, Tensor]:
    """The output and the log-sum-exp by torch's kernel, for a tile of shape `shape`.

    `add` is added to the scores, -inf where a pair is forbidden; None for a reversed tile.
    """
    if shape == "reversed":
        q, k, v = (x.flip(-2) for x in (q, k, v))
    mask = nan_preserving_mask(q, k) if add is None else add
    out, lse = flash_attention_cpu(q, k, v, 0.0, shape in ("causal", "reversed"), attn_mask=mask, scale=scale)
    if shape == "reversed":
        return out.flip(-2), lse.flip(-1)
    # the log-sum-exp of a query without keys is -inf
    return out, lse if add is None else lse.masked_fill(add.amax(-1) == -torch.inf, -torch.inf)


def backward_flash(
    d_out: Tensor, d_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, add: Tensor | None,
    *, shape: str, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of q, k and v by torch's kernel. `out` and `lse` are those of the whole rows, of which a tile may be a part."""
    if shape == "reversed":
        d_lse = None if d_lse is None else d_lse.flip(-1)
        d_out, q, k, v, out = (x.flip(-2) for x in (d_out, q, k, v, out))
        gradients = backward_flash(d_out, d_lse, q, k, v, out, lse.flip(-1), add, shape="causal", scale=scale)
        dq, dk, dv = (x.flip(-2) for x in gradients)
        return dq, dk, dv
    causal = shape == "causal"
    if d_lse is None:
        dq, dk, dv = _flash_backward(d_out, q, k, v, out, lse, 0.0, causal, attn_mask=add, scale=scale)
        return dq, dk, dv
    # The kernel subtracts Σ d_out·out from each row of dp. One more feature, zero in q, k and v, one in out and
    # -d_lse in d_out, leaves dp unchanged and adds the gradient of the log-sum-exp.
    dim = q.shape[-1]
    q, k, v = (F.pad(x, (0, 1)) for x in (q, k, v))
    out, d_out = F.pad(out, (0, 1), value=1.0), torch.cat((d_out, -d_lse[..., None].to(d_out.dtype)), -1)
    dq, dk, dv = _flash_backward(d_out, q, k, v, out, lse, 0.0, causal, attn_mask=add, scale=scale)
    return dq[..., :dim], dk[..., :dim], dv[..., :dim]


def merge_rows_(out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor) -> None:
    """Merge the output and the log-sum-exp of further keys of the same queries into `out` and `lse`, in place.

    A row in which both log-sum-exps are infinite becomes NaN.
    """
    merged = torch.logaddexp(lse, part_lse)
    out.mul_((lse - merged).exp_()[..., None]).addcmul_(part_out.to(out.dtype), (part_lse - merged).exp_()[..., None])
    lse.copy_(merged)


def forward_plain(
    q: Tensor, k: Tensor, v: Tensor, add: Tensor | None, hidden: Tensor | None, keep: Tensor | None, *, scale: float,
    dropout: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The output and the log-sum-exp.

    Args:
        add: added to the scores, -inf where a pair is forbidden.
        hidden: forbidden pairs whose values must not reach the sums even if they are NaN; None if all are finite.
        keep: the pairs that dropout keeps.
    """
    s = _tile_scores(q, k, add, hidden, scale)
    row_max = s.amax(-1, keepdim=True)
    row_max.masked_fill_(row_max == -torch.inf, 0.0)
    p = _exp_(s.sub_(row_max))
    row_sum = p.sum(-1, keepdim=True)
    lse = (row_sum.log() + row_max)[..., 0]
    p.div_(row_sum.masked_fill_(row_sum == 0, 1.0))
    if hidden is not None:
        p.masked_fill_(hidden, 0.0)
    if keep is not None:
        p = p * keep / (1 - dropout)
    return _sum_over_keys(p, v, hidden), lse


def backward_plain(
    d_out: Tensor, d_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, add: Tensor | None,
    hidden: Tensor | None, keep: Tensor | None, *, scale: float, dropout: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of q, k, v and of the scores; for the arguments see `forward_plain`."""
    p = _exp_(_tile_scores(q, k, add, hidden, scale).sub_(lse[..., None]))
    dp = (_group_queries(d_out, v.shape[1]) @ v.transpose(-2, -1)).view_as(p)
    if hidden is not None:
        p.masked_fill_(hidden, 0.0)
    dropped = p
    if keep is not None:
        factor = keep.to(p.dtype) / (1 - dropout)
        dropped, dp = p * factor, dp * factor
    dv = _sum_over_queries(dropped, d_out, hidden, v.shape[1])
    delta = (d_out * out).sum(-1, keepdim=True)
    ds = p * dp.sub_(delta if d_lse is None else delta - d_lse[..., None])
    if hidden is not None:
        ds.masked_fill_(hidden, 0.0)
    dq = _sum_over_keys(ds, k, hidden) * scale
    return dq, _sum_over_queries(ds, q, hidden, k.shape[1]) * scale, dv, ds


def _tile_scores(q: Tensor, k: Tensor, add: Tensor | None, hidden: Tensor | None, scale: float) -> Tensor:
    s = (_group_queries(q * scale, k.shape[1]) @ k.transpose(-2, -1)).view(*q.shape[:-1], k.shape[-2])
    s = s if add is None else s.add_(add)
    return s if hidden is None else s.masked_fill_(hidden, -torch.inf)


def _group_queries(x: Tensor, key_heads: int) -> Tensor:
    """(batch, heads, queries, n) as (batch, key_heads, group·queries, n): the queries of one key head in one matrix."""
    return x.reshape(x.shape[0], key_heads, -1, x.shape[-1])


def _sum_over_keys(p: Tensor, x: Tensor, hidden: Tensor | None) -> Tensor:
    """p (batch, heads, queries, keys) times x (batch, key_heads, keys, n), without the `hidden` pairs if given."""
    key_heads = x.shape[1]
    grouped = _group_queries(p, key_heads)
    if hidden is None:
        y = grouped @ x
    else:
        y = masked_weighted_sum(grouped, x, _group_queries(hidden.expand_as(p), key_heads))
    return y.view(*p.shape[:-1], x.shape[-1])


def _sum_over_queries(p: Tensor, x: Tensor, hidden: Tensor | None, key_heads: int) -> Tensor:
    """pᵀ (batch, heads, keys, queries) times x (batch, heads, queries, n), summed over the heads of each group."""
    grouped, x = _group_queries(p, key_heads).mT, _group_queries(x, key_heads)
    if hidden is None:
        return grouped @ x
    return masked_weighted_sum(grouped, x, _group_queries(hidden.expand_as(p), key_heads).mT)


def _exp_(s: Tensor) -> Tensor:
    """exp in place, zero where the result would be subnormal: torch is ten times slower there."""
    return F.threshold(s, math.log(torch.finfo(s.dtype).tiny), -torch.inf, inplace=True).exp_()
