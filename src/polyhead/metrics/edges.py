"""Head metrics on a graph: the metrics of `blockwise`, summed along edges.

They are computed in at least fp32, and hold one number per head and edge, never queries x keys.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from polyhead.metrics.attention_parts import EdgePart
from polyhead.metrics.blockwise import clamp_to_tiny, group_sizes


class WeightedEdges(NamedTuple):
    """The edges of a part, and the weights or contributions to measure."""

    part: EdgePart
    p: Float[Tensor, "... heads edges"]
    source: Int[Tensor, " edges"]
    destination: Int[Tensor, " edges"]

    def sum_by_query(self, x: Float[Tensor, "... heads edges"]) -> Float[Tensor, "... heads queries"]:
        """Sums over the in-edges of each destination."""
        return x.new_zeros(*x.shape[:-1], self.part.call.sizes.queries).index_add(-1, self.destination, x)

    def offsets(self) -> Int[Tensor, " edges"]:
        """How far each source is from its destination, between node indices."""
        graph = self.part.graph
        if graph.item_indices is not None:
            # of a graph on several ranks: nodes count as in the whole graph
            query, key = graph.item_indices
            return key[self.source] - query[self.destination]
        return self.source - self.destination - (graph.sources - graph.destinations)


def compute(part: EdgePart, requests: Sequence[tuple[str, tuple[Any, ...], bool]]) -> list[Any]:
    """Metrics from one computation of the weights: each by its name in `METRICS`, its arguments, and whether it is of contributions."""
    edges = moved = WeightedEdges(part, part.attention_weights(), *part.edge_index)
    norm = part.norm_per_edge() if any(contribution for _, _, contribution in requests) else None
    if norm is not None:
        moved = edges._replace(p=edges.p * norm)
    return [METRICS[name](moved if contribution else edges, *arguments) for name, arguments, contribution in requests]


def _entropy(edges: WeightedEdges) -> Float[Tensor, "... heads queries"]:
    """−Σ p log p of each query's weights, in nats."""
    # edge weights may be negative: the entropy is that of the absolute values
    p = edges.p.abs()
    return edges.sum_by_query(-(p * clamp_to_tiny(p).log()))


def _distance(edges: WeightedEdges) -> Float[Tensor, "... heads queries"]:
    """Σ p |key − query| of each query, between node indices."""
    return edges.sum_by_query(edges.p * edges.offsets().abs())


def _mass(edges: WeightedEdges, offset: int) -> Float[Tensor, "... heads queries"]:
    """The weight of each query on the node whose index is `offset` above its own."""
    return edges.sum_by_query(edges.p * (edges.offsets() == offset))


def _mass_on_keys(edges: WeightedEdges, marked: Float[Tensor, "... keys"]) -> Float[Tensor, "... heads queries"]:
    """The weight of each query on the marked keys (1: marked)."""
    factor = marked.to(edges.p.dtype)[..., None, :].index_select(-1, edges.source)
    return edges.sum_by_query(edges.p * factor)


def _mass_at_key(edges: WeightedEdges, at: Int[Tensor, "... #heads queries"]) -> Float[Tensor, "... heads queries"]:
    """The weight of each query on one key, given by its index; 0 for -1."""
    return edges.sum_by_query(edges.p * (at.index_select(-1, edges.destination) == edges.source))


def _received(
    edges: WeightedEdges, counts: Float[Tensor, "... #heads queries"] | None = None
) -> Float[Tensor, "... heads keys"]:
    """The weight that each key receives from all queries; `counts` multiplies the weights of each query."""
    p = edges.p
    if counts is not None:
        p = p * counts.to(p.dtype).index_select(-1, edges.destination)
    return p.new_zeros(*p.shape[:-1], edges.part.call.sizes.keys).index_add(-1, edges.source, p)


def _top(
    edges: WeightedEdges, k: int
) -> tuple[Float[Tensor, "... heads queries k"], Int[Tensor, "... heads queries k"]]:
    """The k largest weights of each query and the indices of their keys, -1 where a query has fewer edges."""
    _, p, source, destination = edges
    queries, rows = edges.part.call.sizes.queries, p.reshape(p.shape[:-1].numel(), p.shape[-1])
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


def _heatmap(edges: WeightedEdges, size: int) -> Float[Tensor, "... heads height width"]:
    """The weights as queries x keys, zero where there is no edge, averaged to at most size x size cells."""
    (_, p, source, destination), sizes = edges, edges.part.call.sizes
    height, width = (min(size, max(n, 1)) for n in (sizes.queries, sizes.keys))
    row, column = destination * height // max(sizes.queries, 1), source * width // max(sizes.keys, 1)
    total = p.new_zeros(*p.shape[:-1], height * width).index_add(-1, row * width + column, p)
    pairs = group_sizes(sizes.queries, height, p)[:, None] * group_sizes(sizes.keys, width, p)
    return total.unflatten(-1, (height, width)) / pairs


def _diversity(edges: WeightedEdges) -> Float[Tensor, "... heads heads"]:
    """How differently two heads attend: the squared Hellinger distance 1 − Σ √(p p′), averaged over queries."""
    p = edges.p
    total = edges.sum_by_query(p)
    share = p / clamp_to_tiny(total).index_select(-1, edges.destination)
    root = clamp_to_tiny(share).sqrt() * (p > 0)
    live = (total > 0).to(p.dtype)
    queries = live @ live.transpose(-2, -1)
    return 1 - (root @ root.transpose(-2, -1)) / queries.clamp(min=1)


METRICS: dict[str, Callable[..., Any]] = {
    "entropy": _entropy, "distance": _distance, "mass": _mass, "mass_on_keys": _mass_on_keys, "mass_at_key": _mass_at_key,
    "received": _received, "top": _top, "heatmap": _heatmap, "diversity": _diversity,
}  # fmt: skip
"""Metrics by name, each as a function of a part, its weights, and the metric's arguments."""
