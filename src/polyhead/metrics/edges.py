"""Numbers about heads on a graph: the same questions as in `metrics`, answered edge by edge.

They are in at least fp32, and hold one number a head and edge, no more.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from polyhead.kernels.call import Call
from polyhead.kernels.edges_torch import weights
from polyhead.metrics.blockwise import positive
from polyhead.neighbourhood import Graph


class EdgePart(NamedTuple):
    """What is looked at: an attention on a graph, or some of its heads and edges (None: all)."""

    call: Call
    heads: Int[Tensor, " some"] | None = None
    edges: Int[Tensor, " some"] | None = None
    # what a weight of 1 on a key moves: the weights are multiplied by it
    moved: Float[Tensor, "... all_heads all_keys"] | None = None

    @property
    def axes(self) -> tuple[str, ...]:
        return "heads", "edges"

    @property
    def graph(self) -> Graph:
        assert isinstance(self.call.over, Graph)
        return self.call.over

    @property
    def pairs(self) -> Int[Tensor, "2 some"]:
        """The sources and destinations of the edges that are looked at."""
        pairs = self.graph.edge_index
        return pairs if self.edges is None else pairs[:, self.edges]

    @property
    def keys_seen(self) -> int:
        return self.call.sizes.keys

    def numbers(self, axis: str) -> Int[Tensor, " some"]:
        """The numbers of the heads or edges that are looked at, or of all queries or keys."""
        device, sizes = self.call.q.device, self.call.sizes
        if axis == "edges":
            return torch.arange(self.graph.num_edges, device=device) if self.edges is None else self.edges
        if axis == "heads" and self.heads is not None:
            return self.heads
        return torch.arange(getattr(sizes, axis), device=device)

    @property
    def shape(self) -> torch.Size:
        sizes = self.call.sizes
        heads = sizes.heads if self.heads is None else len(self.heads)
        return torch.Size((*sizes.batch, heads, self.graph.num_edges if self.edges is None else len(self.edges)))

    def ending(self, axis: str, numbers: Int[Tensor, " some"]) -> EdgePart:
        """Only the edges that go to these queries, or come from these keys."""
        end = self.pairs[1 if axis == "queries" else 0]
        return self._replace(edges=self.numbers("edges")[torch.isin(end, numbers)])

    def weights(self) -> Float[Tensor, "... heads edges"]:
        """The weights that are looked at, in at least fp32."""
        p = weights(self.call, self.heads)
        p = p if self.edges is None else p.index_select(-1, self.edges)
        if self.moved is not None:
            moved = self.moved if self.heads is None else self.moved.index_select(-2, self.heads)
            p = p * moved.index_select(-1, self.pairs[0])
        return p


def _to_queries(part: EdgePart, x: Float[Tensor, "... heads edges"]) -> Float[Tensor, "... heads queries"]:
    return x.new_zeros(*x.shape[:-1], part.call.sizes.queries).index_add(-1, part.pairs[1], x)


def entropy(part: EdgePart) -> Float[Tensor, "... heads queries"]:
    """−Σ p log p of each query's weights, in nats."""
    # weights of edges may be negative: what is spread is their size
    p = part.weights().abs()
    return _to_queries(part, -(p * positive(p).log()))


def distance(part: EdgePart) -> Float[Tensor, "... heads queries"]:
    """Σ p |key − query|, by the numbers of the nodes."""
    p = part.weights()
    return _to_queries(part, p * _steps(part).abs())


def _steps(part: EdgePart) -> Int[Tensor, " edges"]:
    source, destination = part.pairs
    return source - destination - (part.graph.sources - part.graph.destinations)


def mass(part: EdgePart, offset: int) -> Float[Tensor, "... heads queries"]:
    """How much of each query's weight lies on the key whose number is `offset` more than its own."""
    return _to_queries(part, part.weights() * (_steps(part) == offset))


def mass_on(part: EdgePart, marked: Float[Tensor, "... keys"]) -> Float[Tensor, "... heads queries"]:
    """How much of each query's weight lies on the marked keys (1: marked)."""
    p = part.weights()
    return _to_queries(part, p * marked.to(p.dtype)[..., None, :].index_select(-1, part.pairs[0]))


def mass_at(part: EdgePart, at: Int[Tensor, "... #heads queries"]) -> Float[Tensor, "... heads queries"]:
    """How much of each query's weight lies on one key, by its number; 0 for -1."""
    source, destination = part.pairs
    return _to_queries(part, part.weights() * (at.index_select(-1, destination) == source))


def received(
    part: EdgePart, counts: Float[Tensor, "... #heads queries"] | None = None
) -> Float[Tensor, "... heads keys"]:
    """How much weight each key receives from all queries together, each of which counts 1 or as much as given."""
    p = part.weights()
    if counts is not None:
        p = p * counts.to(p.dtype).index_select(-1, part.pairs[1])
    return p.new_zeros(*p.shape[:-1], part.call.sizes.keys).index_add(-1, part.pairs[0], p)


def top(part: EdgePart, k: int) -> tuple[Float[Tensor, "... heads queries k"], Int[Tensor, "... heads queries k"]]:
    """The k largest weights of each query and their keys' numbers, -1 where it has fewer edges."""
    p, (source, destination) = part.weights(), part.pairs
    queries, rows = part.call.sizes.queries, p.reshape(p.shape[:-1].numel(), p.shape[-1])
    falling = rows.argsort(dim=-1, descending=True, stable=True)
    order = falling.gather(-1, destination[falling].argsort(dim=-1, stable=True))
    # by destination, and for each by falling weight
    to = destination[order]
    first = torch.searchsorted(
        to.contiguous(), torch.arange(queries, device=p.device).expand(len(rows), -1).contiguous()
    )
    rank = torch.arange(p.shape[-1], device=p.device) - first.gather(-1, to)
    # those beyond k fall into one more place, which is cut off
    place = torch.where(rank < k, to * k + rank, queries * k)
    values = rows.new_zeros(len(rows), queries * k + 1).scatter(-1, place, rows.gather(-1, order))[:, :-1]
    keys = source.new_full((len(rows), queries * k + 1), -1).scatter(-1, place, source[order])[:, :-1]
    shape = (*p.shape[:-1], queries, k)
    return values.reshape(shape), keys.masked_fill(values == 0, -1).reshape(shape)


def heatmap(part: EdgePart, size: int) -> Float[Tensor, "... heads height width"]:
    """The weights as queries x keys, zero where there is no edge, averaged to at most size x size cells."""
    p, sizes = part.weights(), part.call.sizes
    height, width = (min(size, max(n, 1)) for n in (sizes.queries, sizes.keys))
    source, destination = part.pairs
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
    total = _to_queries(part, p)
    share = p / positive(total).index_select(-1, part.pairs[1])
    root = positive(share).sqrt() * (p > 0)
    live = (total > 0).to(p.dtype)
    queries = live @ live.transpose(-2, -1)
    return 1 - (root @ root.transpose(-2, -1)) / queries.clamp(min=1)
