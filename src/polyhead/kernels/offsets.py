"""Attention at fixed offsets: each head and query attends to one key, whose value is fetched, or to a few, which are gathered."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from polyhead._torch import to_at_least_fp32, without_autocast
from polyhead.kernels.call import Call, OutputAndLse, repeat_grouped_heads
from polyhead.kernels.dropout import keep_mask, pair_numbers
from polyhead.kernels.reference import softmax_and_lse
from polyhead.neighbourhood import Offsets


class AtOffsets:
    """Any score over `Offsets`, in time and memory linear in the points."""

    name = "offsets"

    def refuses(self, call: Call) -> str | None:
        return None if call.bias is None else "it adds no bias"

    def __call__(self, call: Call) -> OutputAndLse:
        assert isinstance(call.over, Offsets)
        index = call.over.index.to(call.q.device)
        if call.over.several > 1:
            with without_autocast(call.q.device):
                return attend_gathered(call, index)
        # the softmax of a single score is 1
        out = _gather_values(*_append_zero_row(call.v, index[..., 0]))
        if call.dropout > 0:
            out = out * _dropout_factor(call, index)
        return out.to(call.v.dtype), None if call.sink is None else _gathered_scores(call, index)[..., 0]


def _append_zero_row(
    x: Float[Tensor, "... own keys dim"], index: Int[Tensor, "*any"]
) -> tuple[Float[Tensor, "... own keys+1 dim"], Int[Tensor, "*any"]]:
    """Keys or values in at least fp32 with a row of zeros appended, to which offsets beyond the border (-1) point."""
    return F.pad(to_at_least_fp32(x), (0, 0, 0, 1)), index.masked_fill(index < 0, x.shape[-2])


def _gather_values(
    v: Float[Tensor, "... value_heads keys dim"], index: Int[Tensor, "heads queries"]
) -> Float[Tensor, "... heads queries dim"]:
    """The value of the key of each head and query, laid out with heads inside items: merging the heads copies nothing."""
    heads, queries = index.shape
    if v.shape[-3] == 1:
        rows = v.squeeze(-3).index_select(-2, index.T.flatten())
        return rows.unflatten(-2, (queries, heads)).transpose(-3, -2)
    head = torch.arange(heads, device=v.device) // (heads // v.shape[-3])
    return v.transpose(-3, -2)[..., index.T, head, :].transpose(-3, -2)


def attend_gathered(call: Call, index: Int[Tensor, "heads queries several"]) -> OutputAndLse:
    """Attention of each query to the keys with these indices (-1: no key). The neighbourhood of the call is ignored."""
    p, lse = softmax_and_lse(_gathered_scores(call, index))
    if call.dropout > 0:
        p = p * _dropout_factor(call, index)
    head = torch.arange(call.sizes.heads, device=index.device)[:, None, None]
    v, at = _append_zero_row(call.v, index)
    v = repeat_grouped_heads(v, call.sizes.heads)[..., head, at, :]
    return (p[..., None] * v).sum(-2).to(call.v.dtype), lse


def _dropout_factor(
    call: Call, index: Int[Tensor, "heads queries several"]
) -> Float[Tensor, "... heads queries several"]:
    """The dropout factor of each weight: 0, or 1 / (1 - dropout)."""
    assert call.seed is not None
    head, query, key = pair_numbers(call)
    keep = keep_mask(call.seed, head[..., None, None], query[:, None], key[index], call.dropout)
    return keep.to(torch.promote_types(call.v.dtype, torch.float32)) / (1 - call.dropout)


def _gathered_scores(
    call: Call, index: Int[Tensor, "heads queries several"]
) -> Float[Tensor, "... heads queries several"]:
    """The score of each pair, -inf where there is no key."""
    _, heads, queries, keys = call.sizes
    several = index.shape[-1]
    head = torch.arange(heads, device=index.device)[:, None]
    k, at = _append_zero_row(call.k, index)
    with without_autocast(call.q.device):
        q = to_at_least_fp32(call.q).repeat_interleave(several, -2)
        s = call.score.pairs(q, repeat_grouped_heads(k, heads)[..., head, at.flatten(1), :])
    s = s.unflatten(-1, (queries, several))
    if call.relative_bias is not None:
        position = torch.arange(keys - queries, keys, device=index.device)[:, None]
        s = s + call.relative_bias.to(s.dtype)[head[..., None], index.clamp(min=0) - position + (keys - 1)]
    return s.masked_fill(index < 0, -torch.inf)
