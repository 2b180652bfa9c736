"""Attention with one key a head and query: the softmax of one number is 1, and what is left is to fetch the value."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from polyhead.kernels.call import Call, Result, to_heads
from polyhead.kernels.dropout import keeps
from polyhead.neighbourhood import Offsets


class Single:
    """Any score over `Offsets` of one point a head: memory and time are linear in the points."""

    name = "single"

    def refuses(self, call: Call) -> str | None:
        assert isinstance(call.over, Offsets)
        if call.over.several > 1:
            return f"each head sees {call.over.several} points"
        if call.bias is not None:
            return "a bias may be -inf, which leaves a query without its only key"
        return None

    def __call__(self, call: Call) -> Result:
        assert isinstance(call.over, Offsets)
        index = call.over.index[..., 0].to(call.q.device)
        # what looks beyond the border finds a row of zeros
        last = call.k.shape[-2]
        out = _fetched(F.pad(call.v, (0, 0, 0, 1)), index.masked_fill(index < 0, last))
        if call.dropout > 0:
            out = out * _kept(call, index)
        return out, None if call.sink is None else _scores(call, index)


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


def _kept(call: Call, index: Int[Tensor, "heads queries"]) -> Float[Tensor, "... heads queries 1"]:
    """What dropout multiplies each fetched value with."""
    assert call.seed is not None
    batch, heads, queries, _ = call.sizes
    device = call.q.device
    number = torch.arange(math.prod((*batch, heads)), device=device).reshape(*batch, heads, 1)
    kept = keeps(call.seed, number, torch.arange(queries, device=device), index, call.dropout)
    return (kept.to(call.v.dtype) / (1 - call.dropout))[..., None]


def _scores(call: Call, index: Int[Tensor, "heads queries"]) -> Float[Tensor, "... heads queries"]:
    """The score of each pair, which is its log-sum-exp; -inf where there is no key."""
    _, heads, queries, keys = call.sizes
    wide = torch.promote_types(call.q.dtype, torch.float32)
    at, head = index.clamp(min=0), torch.arange(heads, device=index.device)[:, None]
    with torch.autocast(call.q.device.type, enabled=False):
        s = call.score.pairs(call.q.to(wide), to_heads(call.k, heads)[..., head, at, :].to(wide))
    row = torch.arange(queries, device=index.device)
    if call.table is not None:
        s = s + call.table.to(wide).gather(-1, at - (row + keys - queries) + (keys - 1))
    return s.masked_fill(index < 0, -torch.inf)
