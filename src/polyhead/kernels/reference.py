"""The definition: score, softmax, sum. Any device, dtype, score and neighbourhood; never optimised."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from polyhead._torch import can_branch_on_values, without_autocast
from polyhead.kernels.call import Call, OutputAndLse, global_indices_of, repeat_grouped_heads
from polyhead.kernels.dropout import keep_mask, pair_numbers
from polyhead.kernels.nan_safe_products import masked_dot_products, masked_weighted_sum, nan_safe_scores
from polyhead.linalg.foreach import all_finite
from polyhead.neighbourhood import Graph, Mask
from polyhead.score import Dot


class Reference:
    """out = softmax(score(q, k) + bias, over the allowed keys) v; a query with no key gets zero."""

    name = "reference"

    def refuses(self, call: Call) -> str | None:
        if not isinstance(call.over, Graph):
            return None
        if call.over.features is not None or call.over.weights is not None or call.bias is not None:
            return "it sees which pairs are edges, and nothing else of a Graph"
        return "the graph has duplicate edges" if call.over.duplicates else None

    def __call__(self, call: Call) -> OutputAndLse:
        s, hidden = _scores_and_forbidden_pairs(call)
        p, lse = softmax_and_lse(s)
        if call.dropout > 0:
            p = p * pair_keep_mask(call) / (1 - call.dropout)
        with without_autocast(p.device):
            v = repeat_grouped_heads(call.v.to(p.dtype), call.q.shape[-3])
            out = p @ v if call.over.full else masked_weighted_sum(p, v, hidden)
            return out.to(call.v.dtype), lse


def attend_intervals(
    q: Float[Tensor, "batch heads queries dim"],
    k: Float[Tensor, "batch key_heads keys dim"],
    v: Float[Tensor, "batch value_heads keys value_dim"],
    first: Int[Tensor, "rows queries"],
    stop: Int[Tensor, "rows queries"],
    mask: Bool[Tensor, "#rows #heads #queries #keys"] | None,
    table: Float[Tensor, "heads distances"] | None,
    bias: Float[Tensor, "#rows #heads #queries #keys"] | None,
    seed: Int[Tensor, ""] | Int[Tensor, " 3"] | None,
    query_index: Int[Tensor, " queries"] | None,
    key_index: Int[Tensor, " keys"] | None,
    scale: float,
    dropout: float,
) -> OutputAndLse:
    """Dot-product attention over the keys `[first, stop)` of each query that the mask allows: the definition of `short` and `tiled`."""
    key = torch.arange(k.shape[-2], device=q.device)
    allowed = ((key >= first[..., None]) & (key < stop[..., None]))[:, None]
    over = Mask(allowed if mask is None else allowed & mask)
    indices = global_indices_of(seed, query_index, key_index)
    return Reference()(
        Call(
            q,
            k,
            v,
            over,
            Dot(scale),
            table,
            bias,
            None,
            dropout,
            None if seed is None else seed.reshape(-1)[0],
            indices,
        )
    )


def masked_scores(
    call: Call,
    queries: Int[Tensor, " rows"] | None = None,
    heads: Int[Tensor, " some"] | None = None,
    span: tuple[int, int] | None = None,
) -> Float[Tensor, "... heads queries keys"]:
    """The scores in at least fp32, -inf at forbidden pairs; of all queries, heads and keys, or of some.

    `span` is an interval of keys, [first, stop).
    """
    return _scores_and_forbidden_pairs(call, queries, heads, span)[0]


def _scores_and_forbidden_pairs(
    call: Call,
    queries: Int[Tensor, " rows"] | None = None,
    heads: Int[Tensor, " some"] | None = None,
    span: tuple[int, int] | None = None,
) -> tuple[Float[Tensor, "... heads queries keys"], Bool[Tensor, "... queries keys"]]:
    """The scores, and which pairs are forbidden."""
    _, number, rows, keys = call.sizes
    device = call.q.device
    head = torch.arange(number, device=device) if heads is None else heads
    row = torch.arange(rows, device=device) if queries is None else queries
    begin, end = (0, keys) if span is None else span
    q = select_unless_broadcast(call.q, -2, queries)
    compute_dtype = torch.promote_types(q.dtype, torch.float32)
    k = (call.k if span is None else call.k[..., begin:end, :]).to(compute_dtype)
    # other scores may have parameters per head: they compute all heads
    early = heads if type(call.score) is Dot else None
    q = select_unless_broadcast(q, -3, early)
    k = repeat_grouped_heads(k, number) if early is None else k.index_select(-3, early // (number // k.shape[-3]))
    key, position = torch.arange(begin, end, device=device), row[:, None] + (keys - rows)
    hidden = ~call.over.allows(head[:, None, None], position, key)
    with without_autocast(device):
        s = _unmasked_scores(call, q.to(compute_dtype), k, hidden)
    if heads is not None and early is None:
        s = s.index_select(-3, heads)
    if call.relative_bias is not None:
        s = (
            s
            + select_unless_broadcast(call.relative_bias, -2, heads).to(compute_dtype)[..., key - position + (keys - 1)]
        )
    if call.bias is not None:
        bias = call.bias if call.bias.shape[-1] == 1 else call.bias[..., begin:end]
        s = s + select_unless_broadcast(select_unless_broadcast(bias, -3, heads), -2, queries).to(compute_dtype)
    return s.masked_fill(hidden, -torch.inf), hidden


def _unmasked_scores(call: Call, q: Tensor, k: Tensor, hidden: Tensor) -> Tensor:
    if type(call.score) is Dot and not call.over.full:
        return masked_dot_products(q * call.score.factor(q.shape[-1]), k, hidden)
    if call.over.full or (can_branch_on_values(q) and all_finite([q.detach()]) and all_finite([k.detach()])):
        s: Tensor = call.score(q, k)
        return s
    return nan_safe_scores(call.score, q, k)


def select_unless_broadcast(x: Tensor, axis: int, index: Tensor | None) -> Tensor:
    """`x` at `index` along `axis`, or `x` if it broadcasts there."""
    if index is None or x.dim() < -axis or x.shape[axis] == 1:
        return x
    return x.index_select(axis, index)


def pair_weights(
    call: Call,
    queries: Int[Tensor, " rows"] | None = None,
    heads: Int[Tensor, " some"] | None = None,
    span: tuple[int, int] | None = None,
) -> Float[Tensor, "... heads queries keys"]:
    """The attention weights before dropout, in at least fp32; of all queries, heads and keys, or of some.

    A `span` must contain every key that these queries may attend to.
    """
    p, lse = softmax_and_lse(masked_scores(call, queries, heads, span))
    if call.sink is not None:
        p = p * non_sink_share(lse, select_unless_broadcast(call.sink, -1, heads))
    return p


def softmax_and_lse(s: Float[Tensor, "... keys"]) -> tuple[Float[Tensor, "... keys"], Float[Tensor, "..."]]:
    """The weights and the log-sum-exp of each row; a row of -inf gives zeros and -inf, without NaN in its gradient."""
    if s.shape[-1] == 0:
        return s, s.new_full(s.shape[:-1], -torch.inf)
    empty = s.amax(-1) == -torch.inf
    safe = s.masked_fill(empty[..., None], 0.0)
    # exp(s - lse) would lose the log of the number of keys where all scores are far from zero
    p = safe.softmax(-1).masked_fill(s == -torch.inf, 0.0)
    return p, safe.logsumexp(-1).masked_fill(empty, -torch.inf)


def pair_keep_mask(call: Call) -> Tensor:
    """Which pairs dropout keeps, for every head of every row of the batch."""
    assert call.seed is not None
    head, query, key = pair_numbers(call)
    return keep_mask(call.seed, head[..., None, None], query[:, None], key, call.dropout)


def non_sink_share(
    lse: Float[Tensor, "... heads queries"], sink: Float[Tensor, "... heads"]
) -> Float[Tensor, "... heads queries 1"]:
    """The share of attention that does not go to the sink: e^lse / (e^lse + e^sink)."""
    # -inf - -inf is NaN; the output of a query without keys is zero, so its share may be anything
    above = lse.masked_fill(lse == -torch.inf, 0.0) - sink.to(lse.dtype)[..., :, None]
    return torch.sigmoid(above)[..., None]
