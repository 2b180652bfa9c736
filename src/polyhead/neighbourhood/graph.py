"""Who may attend to whom on a graph: an explicit list of pairs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, NoReturn

import torch
from jaxtyping import Bool, Float, Int, Integer
from torch import Tensor

from polyhead._checks import WrongType, as_tensor, short_repr
from polyhead._foreign_arguments import GRAPH, PyGData, read_pyg_data, translate_foreign_arguments
from polyhead._old_checkpoints import GRAPH_FIELDS
from polyhead._torch import are_values_readable, assert_on_device, is_tracing_or_dataless, to_at_least_fp32
from polyhead.neighbourhood.algebra import intersection_parts
from polyhead.neighbourhood.base import Neighbourhood, as_neighbourhood
from polyhead.neighbourhood.csr import CSR, build_csr, check_csr_dtypes_and_shapes, check_csr_values
from polyhead.neighbourhood.graph_inputs import (
    check_edge_features,
    check_edge_index,
    check_edge_weights,
    check_num_nodes,
    edges_of_sparse_matrix,
)
from polyhead.neighbourhood.shapes import Sizes


class Graph(Neighbourhood):
    """Every node attends to the sources of its in-edges; an edge that is passed twice counts twice.

    Edges keep their order: attention weights are `(..., heads, edges)` in the order of `edge_index`. The constructor checks
    and sorts the edges once; later changes to `edge_index` do not affect the graph.

    Args:
        edge_index: integers `(2, edges)`, sources in the first row and destinations in the second; or a sparse matrix with a
            row per destination and a column per source, whose entries are the `weights` of the edges; or PyG's `Data`, of which
            `edge_index` and `num_nodes` are used.
        num_nodes: the number of nodes (default: the largest index + 1); `(sources, destinations)` for a bipartite graph, in
            which keys are sources and queries are destinations.
        features: numbers `(edges, dim)` for a score with edge features: `GATv2(…, edge_dim=dim)`.
        weights: numbers `(edges,)` that multiply the attention weights after the softmax.
    """

    tensors: ClassVar[tuple[str, ...]] = ("csr", "features", "weights", "edge_ids")

    @translate_foreign_arguments(GRAPH)
    def __init__(
        self,
        edge_index: Integer[Tensor, "2 edges"] | Tensor | PyGData,
        num_nodes: int | tuple[int, int] | None = None,
        features: Float[Tensor, "edges dim"] | None = None,
        weights: Float[Tensor, " edges"] | None = None,
    ) -> None:
        pyg_data = read_pyg_data(edge_index)
        if pyg_data is not None:
            edge_index, num_nodes = pyg_data[0], pyg_data[1] if num_nodes is None else num_nodes
        if isinstance(edge_index, Tensor) and edge_index.layout != torch.strided:
            edge_index, num_nodes, weights = edges_of_sparse_matrix(edge_index, num_nodes, weights)
        edge_index = check_edge_index(edge_index)
        self.sources, self.destinations = check_num_nodes(num_nodes, edge_index)
        self.csr = build_csr(edge_index, self.sources, self.destinations)
        self.features = None if features is None else check_edge_features(features, edge_index.shape[1])
        self.weights = None if weights is None else check_edge_weights(weights, edge_index.shape[1])
        # of a filtered graph: the indices of its edges in the original graph
        self.edge_ids: Int[Tensor, " edges"] | None = None

    def __setstate__(self, state: dict[str, Any]) -> None:
        if isinstance(state, dict):
            state = {GRAPH_FIELDS.get(name, name): value for name, value in state.items()}
        super().__setstate__(state)

    def _restore(self, state: dict[str, Any]) -> None:
        csr, ids, size = CSR(*state["csr"]), state["edge_ids"], (state["sources"], state["destinations"])
        check_csr_dtypes_and_shapes(csr, *size)
        (self.sources, self.destinations), self.csr = size, csr
        if is_tracing_or_dataless(csr.edge_id):
            return super()._restore(state)
        check_csr_values(csr, *size)
        # sorted again, into arrays that no other object shares
        Graph.__init__(self, self.edge_index, size, state["features"], state["weights"])
        if not all(map(torch.equal, self.csr, csr)):
            raise ValueError(
                "Graph: csr must be sorted by destination and by source, got another order; build the graph again by "
                "Graph(edge_index)"
            )
        if ids is not None and (ids.shape != (self.num_edges,) or ids.is_floating_point()):
            raise ValueError(
                f"Graph: edge_ids must be integers ({self.num_edges},), got {ids.dtype} of shape {tuple(ids.shape)}"
            )
        self.edge_ids = ids
        return None

    @property
    def num_edges(self) -> int:
        return self.csr.edge_id.shape[0]

    @property
    def edge_index(self) -> Int[Tensor, "2 edges"]:
        """The edges in their original order."""
        return self.csr.edge_index

    @property
    def duplicates(self) -> bool:
        """Whether some edge occurs more than once."""
        code = self._pair_codes()
        return code.unique().numel() < code.numel()

    def _pair_codes(self) -> Int[Tensor, " edges"]:
        source, destination = self.edge_index
        return destination * self.sources + source

    def allows(self, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return self.allows_pairs(query, key)

    def allows_pairs(self, query: Tensor, key: Tensor, heads: int = 1) -> Tensor:
        destination = query - (self.sources - self.destinations)
        return torch.isin(destination * self.sources + key, self._pair_codes())

    def check(self, sizes: Sizes) -> None:
        if (sizes.keys, sizes.queries) == (self.sources, self.destinations):
            return
        if self.sources == self.destinations:
            nodes = (
                f"{sizes.queries}" if sizes.queries == sizes.keys else f"{sizes.queries} queries and {sizes.keys} keys"
            )
            raise ValueError(
                f"Graph: num_nodes must be the number of items, {nodes}, got {self.sources}; pass num_nodes to Graph"
            )
        raise ValueError(
            f"Graph: (sources, destinations) must be (keys, queries), ({sizes.keys}, {sizes.queries}), got ({self.sources}, "
            f"{self.destinations}); pass num_nodes=(sources, destinations) to Graph"
        )

    def check_device(self, device: torch.device) -> None:
        self._check_on_device(device, (self.csr.edge_id, *self.leaves()))

    @property
    def edge_dim(self) -> int | None:
        return None if self.features is None else self.features.shape[-1]

    def attention_axes(self, heads: int, queries: int, keys: int) -> tuple[str, tuple[int, ...]]:
        return "(..., heads, edges)", (heads, self.num_edges)

    def select_batch_rows(self, batch: tuple[int, ...], at: tuple[slice, ...]) -> Neighbourhood:
        # one graph serves every row of a batch
        return self

    def leaves(self) -> tuple[Tensor, ...]:
        return tuple(x for x in (self.features, self.weights) if x is not None)

    def __and__(self, other: Neighbourhood | Tensor) -> Graph:
        """The edges that `other` allows too; `edge_ids` holds their indices in this graph."""
        if not isinstance(other, (Neighbourhood, Tensor)):
            return NotImplemented
        return self.filter_edges(as_neighbourhood(other))

    def filter_edges(self, other: Neighbourhood) -> Graph:
        """The edges that `other` allows too."""
        source, destination = self.edge_index
        other = other.bind_self_attention(self.sources == self.destinations)
        other = other.bind_sizes(Sizes((), 1, self.destinations, self.sources))
        if other.by_head:
            raise ValueError(
                f"Graph: a graph can only be joined with pairs that are the same for all heads, got {other!r}, which differs by head"
            )
        for part in intersection_parts(other):
            if isinstance(part, Graph):
                part.check(Sizes((), 1, self.destinations, self.sources))
        if not isinstance(other, Graph) and self.sources and self.destinations:
            _check_fits_graph(other, self)
        if self.num_edges == 0:
            return self._select_edges(self.csr.edge_id.long())
        allowed = other.allows_pairs(destination + (self.sources - self.destinations), source)
        if allowed.numel() != self.num_edges:
            raise ValueError(
                f"Graph: a graph can only be joined with pairs that are the same in the whole batch, got {other!r}, which differs "
                "by batch entry; join several graphs with Graph.batch"
            )
        return self._select_edges(allowed.reshape(-1).nonzero()[:, 0])

    def absorb_union(self, other: Neighbourhood) -> NoReturn:
        raise ValueError(
            f"|: a graph is a list of edges and cannot be a part of a union, got {self!r}; append edges, "
            "Graph(torch.cat((graph.edge_index, more), 1), num_nodes), or pass its pairs as a bool mask (queries, keys)"
        )

    def __invert__(self) -> NoReturn:
        raise ValueError(
            f"~: a graph is a list of edges and has no complement, got {self!r}; pass its pairs as a bool mask "
            "(queries, keys), and invert that"
        )

    def _select_edges(self, edges: Int[Tensor, " selected"]) -> Graph:
        take = lambda x: None if x is None else x[edges]
        selected = Graph(self.edge_index[:, edges], self._num_nodes(), take(self.features), take(self.weights))
        selected.edge_ids = edges if self.edge_ids is None else self.edge_ids[edges]
        return selected

    def _num_nodes(self) -> tuple[int, int]:
        return self.sources, self.destinations

    def with_self_loops(self, fill: float | Tensor | str = "mean") -> Graph:
        """Add a self-loop to every node without one, after all other edges.

        Args:
            fill: the features of the new edges: a number or a tensor, or "mean" for the mean over the node's in-edges. Their
                weight is 1.
        """
        if self.sources != self.destinations:
            raise ValueError(
                f"with_self_loops: sources and destinations must be the same nodes, got {self.sources} sources and "
                f"{self.destinations} destinations"
            )
        if isinstance(fill, str) and fill != "mean":
            raise ValueError(f"fill must be a number, a tensor or 'mean', got {fill!r}")
        source, destination = pairs = self.edge_index
        without_loop = torch.ones(self.sources, dtype=torch.bool, device=pairs.device)
        without_loop[source[source == destination]] = False
        new = without_loop.nonzero()[:, 0]
        features, weights = self.features, self.weights
        if features is not None:
            features = torch.cat((features, self._self_loop_features(fill, features)[new]))
        if weights is not None:
            weights = torch.cat((weights, weights.new_ones(len(new))))
        return Graph(torch.cat((pairs, torch.stack((new, new))), 1), self.sources, features, weights)

    def _self_loop_features(
        self, fill: float | Tensor | str, features: Float[Tensor, "edges dim"]
    ) -> Float[Tensor, "nodes dim"]:
        if isinstance(fill, str):
            promoted = to_at_least_fp32(features)
            total = promoted.new_zeros(self.destinations, promoted.shape[1]).index_add(0, self.edge_index[1], promoted)
            return (total / self.csr.indptr.diff().clamp(min=1)[:, None]).to(features.dtype)
        filled = as_tensor("fill", fill, "of an edge's features").to(features.device, features.dtype)
        if filled.dim() and filled.shape[-1] not in (1, features.shape[1]):
            raise ValueError(
                f"fill must have 1 or {features.shape[1]} features, as the edges have, got shape {tuple(filled.shape)}"
            )
        return filled.expand(self.destinations, features.shape[1])

    def reverse(self) -> Graph:
        """The graph with every edge reversed, in the same order."""
        reversed_ = Graph(self.edge_index.flip(0), (self.destinations, self.sources), self.features, self.weights)
        reversed_.edge_ids = self.edge_ids
        return reversed_

    def gcn_normalise(self) -> Graph:
        """The same edges with weights 1/√(degree of source · degree of destination): Ã = D^−½ A D^−½ (Kipf 2017).

        The degree of a node is the number of its in-edges, or the sum of their weights in a weighted graph. Self-loops count if
        they are added before.
        """
        if self.sources != self.destinations:
            raise ValueError(
                f"gcn_normalise: sources and destinations must be the same nodes, got {self.sources} sources and "
                f"{self.destinations} destinations"
            )
        source, destination = self.edge_index
        like = self.weights if self.weights is not None else torch.ones(self.num_edges, device=source.device)
        promoted = to_at_least_fp32(like)
        degree = promoted.new_zeros(self.sources).index_add(0, destination, promoted)
        rule = "gcn_normalise: degrees must be 0 or more"
        if are_values_readable(degree) and bool((degree < 0).any()):
            raise ValueError(f"{rule}, got {float(degree.min()):g}; check the weights")
        if not is_tracing_or_dataless(degree) and not degree.is_cpu:
            assert_on_device((degree >= 0).all(), rule)
        # the edges of a node of degree zero get weight zero and no gradient
        zero = degree == 0
        root = degree.masked_fill(zero, 1.0).pow(-0.5).masked_fill(zero, 0.0)
        weights = (promoted * root[source] * root[destination]).to(like.dtype)
        scaled = Graph(self.edge_index, self.sources, self.features, weights)
        scaled.edge_ids = self.edge_ids
        return scaled

    @staticmethod
    def batch(graphs: Sequence[Graph]) -> Graph:
        """The disjoint union of several graphs: the indices of nodes and edges continue from graph to graph."""
        if not isinstance(graphs, Sequence) or not all(isinstance(graph, Graph) for graph in graphs):
            raise WrongType(f"Graph.batch: graphs must be a list of Graph, got {short_repr(graphs)}")
        if not graphs:
            raise ValueError("Graph.batch: graphs must have at least one graph, got an empty list")
        for name in ("features", "weights"):
            if len({getattr(graph, name) is None for graph in graphs}) > 1:
                raise ValueError(f"Graph.batch: all graphs or none must have {name}, got some with and some without")
        pairs, sources, destinations = [], 0, 0
        for graph in graphs:
            source, destination = graph.edge_index
            pairs.append(torch.stack((source + sources, destination + destinations)))
            sources, destinations = sources + graph.sources, destinations + graph.destinations
        features = [graph.features for graph in graphs if graph.features is not None]
        weights = [graph.weights for graph in graphs if graph.weights is not None]
        return Graph(
            torch.cat(pairs, 1),
            (sources, destinations),
            torch.cat(features) if features else None,
            torch.cat(weights) if weights else None,
        )

    def __repr__(self) -> str:
        nodes = f"{self.sources}" if self.sources == self.destinations else f"{self.sources} → {self.destinations}"
        more = "".join(f", {name}" for name in ("features", "weights") if getattr(self, name) is not None)
        return f"Graph({nodes} nodes, {self.num_edges} edges{more})"


def _check_fits_graph(other: Neighbourhood, graph: Graph) -> None:
    """Raise a `ValueError` where `other` does not fit the nodes; the batch is not known yet."""
    one = torch.zeros(1, 1, dtype=torch.long, device=graph.csr.edge_id.device)
    batch: Bool[Tensor, "..."] = other.allows(one[None], one + (graph.sources - graph.destinations), one[0])
    other.check(Sizes(tuple(batch.shape[:-3]), 1, graph.destinations, graph.sources))
