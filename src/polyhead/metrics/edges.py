"""Head metrics on a graph: the metrics of `blockwise`, summed along edges.

They are computed in at least fp32, and hold one number per head and edge, never queries x keys.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from polyhead.metrics.attention_parts import EdgePart
from polyhead.metrics.blockwise import clamp_to_tiny


def _sum_by_query(part: EdgePart, x: Float[Tensor, "... heads edges"]) -> Float[Tensor, "... heads queries"]:
    return x.new_zeros(*x.shape[:-1], part.call.sizes.queries).index_add(-1, part.edge_index[1], x)


def entropy(part: EdgePart) -> Float[Tensor, "... heads queries"]:
    """−Σ p log p of each query's weights, in nats."""
    # edge weights may be negative: the entropy is that of the absolute values
    p = part.weights().abs()
    return _sum_by_query(part, -(p * clamp_to_tiny(p).log()))


def distance(part: EdgePart) -> Float[Tensor, "... heads queries"]:
    """Σ p |key − query| of each query, between node indices."""
    p = part.weights()
    return _sum_by_query(part, p * _edge_offsets(part).abs())


def _edge_offsets(part: EdgePart) -> Int[Tensor, " edges"]:
    source, destination = part.edge_index
    if part.graph.item_indices is not None:
        # of a graph on several ranks: nodes count as in the whole graph
        query, key = part.graph.item_indices
        return key[source] - query[destination]
    return source - destination - (part.graph.sources - part.graph.destinations)


def mass(part: EdgePart, offset: int) -> Float[Tensor, "... heads queries"]:
    """The weight of each query on the node whose index is `offset` above its own."""
    return _sum_by_query(part, part.weights() * (_edge_offsets(part) == offset))


def mass_on_keys(part: EdgePart, marked: Float[Tensor, "... keys"]) -> Float[Tensor, "... heads queries"]:
    """The weight of each query on the marked keys (1: marked)."""
    p = part.weights()
    return _sum_by_query(part, p * marked.to(p.dtype)[..., None, :].index_select(-1, part.edge_index[0]))


def mass_at_key(part: EdgePart, at: Int[Tensor, "... #heads queries"]) -> Float[Tensor, "... heads queries"]:
    """The weight of each query on one key, given by its index; 0 for -1."""
    source, destination = part.edge_index
    return _sum_by_query(part, part.weights() * (at.index_select(-1, destination) == source))


def received(
    part: EdgePart, counts: Float[Tensor, "... #heads queries"] | None = None
) -> Float[Tensor, "... heads keys"]:
    """The weight that each key receives from all queries; `counts` multiplies the weights of each query."""
    p = part.weights()
    if counts is not None:
        p = p * counts.to(p.dtype).index_select(-1, part.edge_index[1])
    return p.new_zeros(*p.shape[:-1], part.call.sizes.keys).index_add(-1, part.edge_index[0], p)


def top(part: EdgePart, k: int) -> tuple[Float[Tensor, "... heads queries k"], Int[Tensor, "... heads queries k"]]:
    """The k largest weights of each query and the indices of their keys, -1 where a query has fewer edges."""
    p, (source, destination) = part.weights(), part.edge_index
    queries, rows = part.call.sizes.queries, p.reshape(p.shape[:-1].numel(), p.shape[-1])
    descending = rows.argsort(dim=-1, descending=True, stable=True)
    # by destination, and per destination by descending weight
    order = descending.gather(-1, destination[descending].argsort(dim=-1, stable=True))
    to = destination[order]
    first = torch.searchsorted(
        to.contiguous(), torch.arange(queries, device=p.device).expand(len(rows), -1).contiguous()
    )
    rank = torch.arange(p.shape[-1], device=p.device) - first.gather(-1, to)
    # edges beyond the k-th go to one extra slot, which is cut off
    slot = torch.where(rank < k, to * k + rank, queries * k)
    values = rows.new_zeros(len(rows), queries * k + 1).scatter(-1, slot, rows.gather(-1, order))[:, :-1]
    keys = source.new_full((len(rows), queries * k + 1), -1).scatter(-1, slot, source[order])[:, :-1]
    shape = (*p.shape[:-1], queries, k)
    return values.reshape(shape), keys.masked_fill(values == 0, -1).reshape(shape)


def heatmap(part: EdgePart, size: int) -> Float[Tensor, "... heads height width"]:
    """The weights as queries x keys, zero where there is no edge, averaged to at most size x size cells."""
    p, sizes = part.weights(), part.call.sizes
    height, width = (min(size, max(n, 1)) for n in (sizes.queries, sizes.keys))
    source, destination = part.edge_index
    row, column = destination * height // max(sizes.queries, 1), source * width // max(sizes.keys, 1)
    total = p.new_zeros(*p.shape[:-1], height * width).index_add(-1, row * width + column, p)
    pairs = _group_sizes(sizes.queries, height)[:, None] * _group_sizes(sizes.keys, width)
    return total.unflatten(-1, (height, width)) / pairs.to(p)


def _group_sizes(items: int, cells: int) -> Int[Tensor, " cells"]:
    group = torch.arange(items) * cells // max(items, 1)
    return group.bincount(minlength=cells).clamp(min=1)


def diversity(part: EdgePart) -> Float[Tensor, "... heads heads"]:
    """How differently two heads attend: the squared Hellinger distance 1 − Σ √(p p′), averaged over queries."""
    p = part.weights()
    total = _sum_by_query(part, p)
    share = p / clamp_to_tiny(total).index_select(-1, part.edge_index[1])
    root = clamp_to_tiny(share).sqrt() * (p > 0)
    live = (total > 0).to(p.dtype)
    queries = live @ live.transpose(-2, -1)
    return 1 - (root @ root.transpose(-2, -1)) / queries.clamp(min=1)
