"""Who may attend to whom on a graph: an explicit list of pairs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Int, Integer
from torch import Tensor
from torch.utils import _pytree as pytree

from polyhead._checks import LARGEST, WrongType, as_tensor, check_integer, shown
from polyhead._renamed import GRAPH
from polyhead._torch import values_unavailable, widened
from polyhead.neighbourhood.base import Neighbourhood, Sizes, neighbourhood, parts
from polyhead.neighbourhood.csr import CSR, build_csr, check_form, check_ids


class Graph(Neighbourhood):
    """Every node attends to the sources of its in-edges; an edge that is given twice counts twice.

    Edges keep the numbers in which they are given: weights are `(..., heads, edges)` in that order. They are checked and
    sorted here, once; later changes of `edge_index` do not reach the graph.

    Args:
        edge_index: whole numbers `(2, edges)`, sources above destinations; or a sparse matrix with destinations in its rows
            and sources in its columns, whose entries are the edges' `weights`.
        num_nodes: how many nodes there are (one more than the largest number, unless given); `(sources, destinations)` for
            a bipartite graph, on which keys are sources and queries are destinations.
        features: numbers `(edges, dim)` for a score that takes them: `GATv2(…, edge_dim=dim)`.
        weights: numbers `(edges,)` that multiply the coefficients after the softmax.
    """

    tensors = ("csr", "features", "weights", "edge_ids")

    def __init__(
        self,
        edge_index: Integer[Tensor, "2 edges"] | Tensor,
        num_nodes: int | tuple[int, int] | None = None,
        features: Float[Tensor, "edges dim"] | None = None,
        weights: Float[Tensor, " edges"] | None = None,
    ) -> None:
        if isinstance(edge_index, Tensor) and edge_index.layout != torch.strided:
            edge_index, num_nodes, weights = _from_sparse(edge_index, num_nodes, weights)
        edge_index = checked(edge_index)
        self.sources, self.destinations = _sizes(num_nodes, edge_index)
        self.csr = build_csr(edge_index, self.sources, self.destinations)
        self.features = None if features is None else _features(features, edge_index.shape[1])
        self.weights = None if weights is None else _weights(weights, edge_index.shape[1])
        # of a graph that was filtered: what its edges were numbered before
        self.edge_ids: Int[Tensor, " edges"] | None = None

    def _restore(self, state: dict[str, Any]) -> None:
        state = {GRAPH.get(name, name): value for name, value in state.items()}
        given, ids, size = CSR(*state["csr"]), state["edge_ids"], (state["sources"], state["destinations"])
        check_form(given, *size)
        (self.sources, self.destinations), self.csr = size, given
        if values_unavailable(given.edge_id):
            return super()._restore(state)
        check_ids(given, *size)
        # sorted anew, into arrays that nobody else holds
        Graph.__init__(self, self.edge_index, size, state["features"], state["weights"])
        if not all(map(torch.equal, self.csr, given)):
            raise ValueError("Graph: csr must be sorted by destination and by source, got another; make the graph anew")
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
        """The edges in the order in which they were given."""
        return self.csr.edge_index

    @property
    def duplicates(self) -> bool:
        """Whether an edge is there twice."""
        code = self._codes()
        return code.unique().numel() < code.numel()

    def _codes(self) -> Int[Tensor, " edges"]:
        source, destination = self.edge_index
        return destination * self.sources + source

    # the predicate

    def allows(self, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return self.on_pairs(query, key)

    def on_pairs(self, query: Tensor, key: Tensor, heads: int = 1) -> Tensor:
        destination = query - (self.sources - self.destinations)
        return torch.isin(destination * self.sources + key, self._codes())

    def check(self, sizes: Sizes) -> None:
        if (sizes.keys, sizes.queries) == (self.sources, self.destinations):
            return
        if self.sources == self.destinations:
            given = (
                f"{sizes.queries}" if sizes.queries == sizes.keys else f"{sizes.queries} queries and {sizes.keys} keys"
            )
            raise ValueError(f"Graph: it has {self.sources} nodes, but there are {given}; pass num_nodes to Graph")
        raise ValueError(
            f"Graph: it has {self.sources} sources and {self.destinations} destinations, but there are {sizes.keys} keys "
            f"(sources) and {sizes.queries} queries (destinations)"
        )

    def leaves(self) -> tuple[Tensor, ...]:
        return tuple(x for x in (self.features, self.weights) if x is not None)

    # other graphs made of this one

    def __and__(self, other: Neighbourhood | Tensor) -> Graph:
        """The edges that the other allows too; `edge_ids` tells which they were."""
        if not isinstance(other, (Neighbourhood, Tensor)):
            return NotImplemented
        return self.filtered(neighbourhood(other))

    def filtered(self, other: Neighbourhood) -> Graph:
        """The edges that the other allows too."""
        source, destination = self.edge_index
        other = other.within(self.sources == self.destinations)
        if other.by_head:
            raise ValueError(
                f"Graph: {other!r} differs from head to head, but the edges of a graph are the same for all"
            )
        for part in parts(other):
            if isinstance(part, Graph):
                part.check(Sizes((), 1, self.destinations, self.sources))
        if not isinstance(other, Graph) and self.sources and self.destinations:
            _check_fits(other, self)
        if self.num_edges == 0:
            return self._kept(self.csr.edge_id.long())
        allowed = other.on_pairs(destination + (self.sources - self.destinations), source)
        if allowed.numel() != self.num_edges:
            raise ValueError(
                f"Graph: {other!r} differs from row to row of a batch, but the edges of a graph are the same for all; "
                "join graphs of different signals with Graph.batch"
            )
        return self._kept(allowed.reshape(-1).nonzero()[:, 0])

    def _kept(self, edges: Int[Tensor, " kept"]) -> Graph:
        take = lambda x: None if x is None else x[edges]
        kept = Graph(self.edge_index[:, edges], self._size(), take(self.features), take(self.weights))
        kept.edge_ids = edges if self.edge_ids is None else self.edge_ids[edges]
        return kept

    def _size(self) -> tuple[int, int]:
        return self.sources, self.destinations

    def with_self_loops(self, fill: float | Tensor | str = "mean") -> Graph:
        """Every node that has no edge to itself gets one, numbered after all others.

        Args:
            fill: the features of the new edges: a number or a tensor, or "mean" for the mean over the node's in-edges. Their
                weight is 1.
        """
        if self.sources != self.destinations:
            raise ValueError(
                f"with_self_loops: {self.sources} sources are not the {self.destinations} destinations; only nodes that are "
                "both have self-loops"
            )
        if isinstance(fill, str) and fill != "mean":
            raise ValueError(f"fill: it is {fill!r}; it must be a number, a tensor or 'mean'")
        source, destination = pairs = self.edge_index
        bare = torch.ones(self.sources, dtype=torch.bool, device=pairs.device)
        bare[source[source == destination]] = False
        new = bare.nonzero()[:, 0]
        features, weights = self.features, self.weights
        if features is not None:
            features = torch.cat((features, self._fill(fill, features)[new]))
        if weights is not None:
            weights = torch.cat((weights, weights.new_ones(len(new))))
        return Graph(torch.cat((pairs, torch.stack((new, new))), 1), self.sources, features, weights)

    def _fill(self, fill: float | Tensor | str, features: Float[Tensor, "edges dim"]) -> Float[Tensor, "nodes dim"]:
        if isinstance(fill, str):
            wide = widened(features)
            total = wide.new_zeros(self.destinations, wide.shape[1]).index_add(0, self.edge_index[1], wide)
            return (total / self.csr.indptr.diff().clamp(min=1)[:, None]).to(features.dtype)
        filled = as_tensor("fill", fill, "of an edge's features").to(features.device, features.dtype)
        if filled.dim() and filled.shape[-1] not in (1, features.shape[1]):
            raise ValueError(f"fill: its shape is {tuple(filled.shape)}, but an edge has {features.shape[1]} features")
        return filled.expand(self.destinations, features.shape[1])

    def to(self, device: torch.device | str) -> Graph:
        """The same graph on another device."""
        try:
            there = torch.device(device)
        except (RuntimeError, TypeError):
            raise ValueError(f"device must be a torch.device, or the name of one, got {shown(device)}") from None
        moved: Graph = pytree.tree_map(lambda x: x.to(device=there), self)
        return moved

    def reverse(self) -> Graph:
        """Every edge the other way round, under the same number."""
        back = Graph(self.edge_index.flip(0), (self.destinations, self.sources), self.features, self.weights)
        back.edge_ids = self.edge_ids
        return back

    def normalised(self) -> Graph:
        """The same edges with weights 1/√(degree of source · degree of destination): Ã = D^−½ A D^−½ (Kipf 2017).

        Degrees are numbers of in-edges, or sums of their weights where there are any. Add self-loops first, if they are to count.
        """
        if self.sources != self.destinations:
            raise ValueError(f"normalised: {self.sources} sources are not the {self.destinations} destinations")
        source, destination = self.edge_index
        like = self.weights if self.weights is not None else torch.ones(self.num_edges, device=source.device)
        wide = widened(like)
        degree = wide.new_zeros(self.sources).index_add(0, destination, wide)
        if not values_unavailable(degree) and bool((degree < 0).any()):
            raise ValueError("normalised: some nodes have a negative degree, of which there is no root")
        # a node of degree zero has no share in anything, and passes no gradient on
        none = degree == 0
        root = degree.masked_fill(none, 1.0).pow(-0.5).masked_fill(none, 0.0)
        weights = (wide * root[source] * root[destination]).to(like.dtype)
        scaled = Graph(self.edge_index, self.sources, self.features, weights)
        scaled.edge_ids = self.edge_ids
        return scaled

    @staticmethod
    def batch(graphs: Sequence[Graph]) -> Graph:
        """Several graphs side by side as one: the nodes and edges of the second count on from the first's."""
        if not isinstance(graphs, Sequence) or not all(isinstance(graph, Graph) for graph in graphs):
            raise WrongType(f"Graph.batch: graphs must be a list of Graph, got {shown(graphs)}")
        if not graphs:
            raise ValueError("Graph.batch: there are no graphs; pass at least one")
        for name in ("features", "weights"):
            if len({getattr(graph, name) is None for graph in graphs}) > 1:
                raise ValueError(f"Graph.batch: some graphs have {name} and some have none")
        pairs, sources, destinations = [], 0, 0
        for graph in graphs:
            offset = torch.tensor([[sources], [destinations]], device=graph.csr.edge_id.device)
            pairs.append(graph.edge_index + offset)
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


def checked(edge_index: object) -> Integer[Tensor, "2 edges"]:
    """Edges as they were given, if they are whole numbers in two rows."""
    given = as_tensor("edge_index", edge_index, "of integers (2, edges)")
    if given.dim() != 2 or given.shape[0] != 2:
        turned = given.dim() == 2 and given.shape[1] == 2
        hint = "pass edge_index.T" if turned else "sources in the first row, destinations in the second"
        raise ValueError(f"edge_index: its shape is {tuple(given.shape)}; it must be (2, edges): {hint}")
    # a list of no edges is a tensor of floats
    if given.numel() == 0:
        return given.long()
    if given.is_floating_point() or given.is_complex() or given.dtype == torch.bool:
        raise ValueError(f"edge_index: it is {given.dtype}; it must hold the numbers of nodes: edge_index.long()")
    return given


def _sizes(num_nodes: object, edge_index: Tensor) -> tuple[int, int]:
    if num_nodes is None:
        if values_unavailable(edge_index):
            raise ValueError(
                "num_nodes: inside torch.compile and torch.func, and for tensors without values, it must be given"
            )
        nodes = int(edge_index.max()) + 1 if edge_index.numel() else 0
        return max(nodes, 0), max(nodes, 0)
    given = num_nodes if isinstance(num_nodes, (tuple, list)) else (num_nodes, num_nodes)
    if len(given) != 2:
        raise ValueError(f"Graph: num_nodes must be an integer, or (sources, destinations), got {shown(num_nodes)}")
    # the edges' own arrays count one place more than there are nodes, in 32 bits
    sources, destinations = (check_integer("Graph: num_nodes", n, 0, LARGEST - 1) for n in given)
    return sources, destinations


def _features(features: Tensor, edges: int) -> Float[Tensor, "edges dim"]:
    features = as_tensor("features", features, "(edges, dim)")
    features = features[:, None] if features.dim() == 1 else features
    if features.dim() != 2 or features.shape[0] != edges or not features.is_floating_point():
        raise ValueError(
            f"features: {features.dtype} of shape {tuple(features.shape)}; they must be floating-point numbers "
            f"(edges, dim), and there are {edges} edges"
        )
    return features


def _weights(weights: Tensor, edges: int) -> Float[Tensor, " edges"]:
    weights = as_tensor("weights", weights, "(edges,)")
    if tuple(weights.shape) != (edges,) or not weights.is_floating_point():
        raise ValueError(
            f"weights: {weights.dtype} of shape {tuple(weights.shape)}; they must be floating-point numbers (edges,), and "
            f"there are {edges} edges"
        )
    if not values_unavailable(weights) and bool(weights.isnan().any()):
        raise ValueError(f"weights: {int(weights.isnan().sum())} of them are NaN; every edge needs a number")
    return weights


def check_sparse(name: str, matrix: Tensor) -> None:
    """Raise where the indices of a sparse matrix point beyond it: torch follows them unless it is asked to look."""
    layout, size = matrix.layout, matrix.shape
    try:
        if layout == torch.sparse_coo:
            torch.sparse_coo_tensor(matrix._indices(), matrix._values(), size, check_invariants=True)
            return
        by_row = layout in (torch.sparse_csr, torch.sparse_bsr)
        starts = matrix.crow_indices() if by_row else matrix.ccol_indices()
        ends = matrix.col_indices() if by_row else matrix.row_indices()
        torch.sparse_compressed_tensor(starts, ends, matrix.values(), size, layout=layout, check_invariants=True)
    except RuntimeError as error:
        raise ValueError(
            f"{name} must be a sparse matrix whose indices lie within it, got one that torch refuses: {error}"
        ) from error


def _from_sparse(
    matrix: Tensor, num_nodes: object, weights: Tensor | None
) -> tuple[Tensor, tuple[int, int], Tensor | None]:
    """The edges of a sparse matrix, row by row; entries that are all one are no weights."""
    if matrix.dim() != 2:
        raise ValueError(f"edge_index: a sparse matrix must have two axes; its shape is {tuple(matrix.shape)}")
    size = (matrix.shape[1], matrix.shape[0])
    if num_nodes is not None and _sizes(num_nodes, matrix) != size:
        raise ValueError(
            f"num_nodes: it is {num_nodes!r}, but the sparse matrix has {size[1]} rows and {size[0]} columns"
        )
    check_sparse("edge_index", matrix)
    entries = matrix.to_sparse_coo().coalesce()
    values = entries.values()
    if weights is None and not bool((values == 1).all()):
        weights = values if values.is_floating_point() else values.to(torch.get_default_dtype())
    return entries.indices().flip(0), size, weights


def _check_fits(other: Neighbourhood, graph: Graph) -> None:
    """A `ValueError` where the other does not fit the nodes; the rows of a batch are not known yet."""
    one = torch.zeros(1, 1, dtype=torch.long, device=graph.csr.edge_id.device)
    batch: Bool[Tensor, "..."] = other.allows(one[None], one + (graph.sources - graph.destinations), one[0])
    other.check(Sizes(tuple(batch.shape[:-3]), 1, graph.destinations, graph.sources))
