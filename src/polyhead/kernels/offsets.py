"""Attention at fixed offsets: each head and query has one key, whose value is fetched, or a few, which are gathered."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from polyhead._torch import widened, without_autocast
from polyhead.kernels.call import Call, Result, to_heads
from polyhead.kernels.dropout import keeps
from polyhead.kernels.reference import softmax
from polyhead.neighbourhood import Offsets


class AtOffsets:
    """Any score over `Offsets`: memory and time are linear in the points."""

    name = "offsets"

    def refuses(self, call: Call) -> str | None:
        return None if call.bias is None else "it adds no bias"

    def __call__(self, call: Call) -> Result:
        assert isinstance(call.over, Offsets)
        index = call.over.index.to(call.q.device)
        if call.over.several > 1:
            with without_autocast(call.q.device):
                return attend_gathered(call, index)
        # the softmax of one number is 1
        out = _fetched(*_bordered(call.v, index[..., 0]))
        if call.dropout > 0:
            out = out * _kept(call, index)
        return out.to(call.v.dtype), None if call.sink is None else _scores(call, index)[..., 0]


def _bordered(
    x: Float[Tensor, "... own keys dim"], index: Int[Tensor, "*any"]
) -> tuple[Float[Tensor, "... own keys+1 dim"], Int[Tensor, "*any"]]:
    """Keys or values in at least fp32 with a row of zeros behind them, which whoever looks beyond the border finds."""
    return F.pad(widened(x), (0, 0, 0, 1)), index.masked_fill(index < 0, x.shape[-2])


def _fetched(
    v: Float[Tensor, "... value_heads keys dim"], index: Int[Tensor, "heads queries"]
) -> Float[Tensor, "... heads queries dim"]:
    """Of each head and query the value of its key, heads inside items so that joining the heads is free."""
    heads, queries = index.shape
    if v.shape[-3] == 1:
        rows = v.squeeze(-3).index_select(-2, index.T.flatten())
        return rows.unflatten(-2, (queries, heads)).transpose(-3, -2)
    head = torch.arange(heads, device=v.device) // (heads // v.shape[-3])
    return v.transpose(-3, -2)[..., index.T, head, :].transpose(-3, -2)


def attend_gathered(call: Call, index: Int[Tensor, "heads queries several"]) -> Result:
    """Attention of each query to the keys of these numbers, -1 for none, whatever the neighbourhood of the call says."""
    p, lse = softmax(_scores(call, index))
    if call.dropout > 0:
        p = p * _kept(call, index)
    head = torch.arange(call.sizes.heads, device=index.device)[:, None, None]
    v, at = _bordered(call.v, index)
    v = to_heads(v, call.sizes.heads)[..., head, at, :]
    return (p[..., None] * v).sum(-2).to(call.v.dtype), lse


def _kept(call: Call, index: Int[Tensor, "heads queries several"]) -> Float[Tensor, "... heads queries several"]:
    """What dropout multiplies each weight with."""
    assert call.seed is not None
    batch, heads, queries, _ = call.sizes
    device = call.q.device
    number = torch.arange(math.prod((*batch, heads)), device=device).reshape(*batch, heads, 1, 1)
    kept = keeps(call.seed, number, torch.arange(queries, device=device)[:, None], index, call.dropout)
    return kept.to(torch.promote_types(call.v.dtype, torch.float32)) / (1 - call.dropout)


def _scores(call: Call, index: Int[Tensor, "heads queries several"]) -> Float[Tensor, "... heads queries several"]:
    """The score of each pair; -inf where there is no key."""
    _, heads, queries, keys = call.sizes
    several = index.shape[-1]
    head = torch.arange(heads, device=index.device)[:, None]
    k, at = _bordered(call.k, index)
    with without_autocast(call.q.device):
        q = widened(call.q).repeat_interleave(several, -2)
        s = call.score.pairs(q, to_heads(k, heads)[..., head, at.flatten(1), :])
    s = s.unflatten(-1, (queries, several))
    if call.table is not None:
        position = torch.arange(keys - queries, keys, device=index.device)[:, None]
        s = s + call.table.to(s.dtype)[head[..., None], index.clamp(min=0) - position + (keys - 1)]
    return s.masked_fill(index < 0, -torch.inf)
