"""Graphs of the package, with their definition: lists of edges, changed as documented."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from random import Random
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fuzz.case import Mismatch
from fuzz.neighbourhoods import Part, Sizes, build, draw_expression, draw_part
from fuzz.oracle import Inputs
from polyhead import Graph

Ints = NDArray[np.int64]
Of = Callable[[Inputs], Tensor | None]
OfSize = Callable[[Inputs, bool], Tensor | None]


@dataclasses.dataclass(frozen=True)
class Edges:
    """Edges by definition: sources and destinations, and features and weights as functions of the inputs.

    Weights are also computed from absolute values, where every derivative must be positive.
    """

    source: Ints
    destination: Ints
    sources: int
    destinations: int
    features: Of
    weights: OfSize

    @property
    def count(self) -> int:
        return len(self.source)


KINDS = ("random", "random", "into one", "from one", "few", "path", "all", "none", "twice", "loops")


def draw_pairs(kind: str, sources: int, destinations: int, count: int, rng: np.random.Generator) -> tuple[Ints, Ints]:
    """Sources and destinations of edges of a kind, unsorted."""
    if kind == "none" or not sources or not destinations:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    source, destination = rng.integers(0, sources, count), rng.integers(0, destinations, count)
    if kind == "into one":
        destination[:] = destination[:1]
    elif kind == "from one":
        source[:] = source[:1]
    elif kind == "few":
        source, destination = source % max(1, sources // 3), destination % max(1, destinations // 3)
    elif kind == "path":
        source, destination = np.arange(min(sources, destinations)), np.arange(min(sources, destinations))[::-1].copy()
    elif kind == "all":
        source, destination = (x.ravel() for x in np.meshgrid(np.arange(sources), np.arange(destinations)))
    elif kind == "twice":
        source, destination = np.tile(source, 2), np.tile(destination, 2)
    elif kind == "loops":
        source = destination = np.minimum(source, destinations - 1)
    return source, destination


def given(pairs: tuple[Ints, Ints], size: tuple[int, int], made: str, inputs: Inputs) -> Graph:
    """The package's graph of these edges, built in one of several ways."""
    features, weights = inputs.get("features"), inputs.get("weights")
    index = torch.as_tensor(np.stack(pairs))
    if made == "int32":
        index = index.int()
    elif made == "strided":
        index = index.T.contiguous().T
    elif made == "batch":
        half = len(pairs[0]) // 2
        cut = lambda x, part: None if x is None else x[part]
        parts = [
            Graph(index[:, part], size, cut(features, part), cut(weights, part))
            for part in (slice(half), slice(half, None))
        ]
        return Graph.batch(parts)
    return Graph(index, size, features, weights)


def defined(pairs: tuple[Ints, Ints], size: tuple[int, int], made: str) -> Edges:
    """The same edges by definition."""
    (source, destination), (sources, destinations) = pairs, size
    if made == "batch":
        # nodes of the second graph are numbered after those of the first
        second = np.arange(len(source)) >= len(source) // 2
        source, destination = source + second * sources, destination + second * destinations
        sources, destinations = 2 * sources, 2 * destinations
    return Edges(source, destination, sources, destinations, lambda x: x.get("features"), lambda x, _: x.get("weights"))


def reversed_(edges: Edges) -> Edges:
    """Every edge reversed."""
    return dataclasses.replace(
        edges,
        source=edges.destination,
        destination=edges.source,
        sources=edges.destinations,
        destinations=edges.sources,
    )


def with_loops(edges: Edges) -> Edges:
    """Append a loop for every node without one, with the mean features of its in-edges and the weight 1."""
    have = {int(a) for a, b in zip(edges.source, edges.destination, strict=True) if a == b}
    new = np.array([node for node in range(edges.sources) if node not in have], np.int64)
    mean = torch.zeros(len(new), edges.count, dtype=torch.float64)
    for row, node in enumerate(new):
        into = np.flatnonzero(edges.destination == node)
        mean[row, into] = 1 / max(len(into), 1)

    def features(inputs: Inputs) -> Tensor | None:
        own = edges.features(inputs)
        return None if own is None else torch.cat((own, mean.to(own.dtype) @ own))

    def weights(inputs: Inputs, absolute: bool) -> Tensor | None:
        own = edges.weights(inputs, absolute)
        return None if own is None else torch.cat((own, own.new_ones(len(new))))

    ends = np.concatenate((edges.source, new)), np.concatenate((edges.destination, new))
    return Edges(*ends, edges.sources, edges.destinations, features, weights)


def normalised(edges: Edges) -> Edges:
    """Weights divided by the roots of the degrees of both ends; an end of degree 0 leaves nothing."""
    into = torch.as_tensor((edges.destination[None] == np.arange(edges.destinations)[:, None]).astype(float))

    def weights(inputs: Inputs, absolute: bool) -> Tensor:
        own = edges.weights(inputs, absolute)
        own = torch.ones(edges.count, dtype=torch.float64) if own is None else own
        degree = into @ own
        root = torch.where(degree > 0, torch.where(degree > 0, degree, 1.0) ** -0.5, 0.0)
        if absolute:
            # its derivative is −½ root³
            root = root.detach() + 0.5 * root.detach() ** 3 * degree
        return own * root[edges.source] * root[edges.destination]

    return dataclasses.replace(edges, weights=weights)


def kept(edges: Edges, allowed: NDArray[np.bool_]) -> tuple[Edges, Ints]:
    """The edges whose pair (destination, source) is allowed, and their numbers."""
    numbers = np.flatnonzero(allowed[edges.destination, edges.source]) if edges.count else np.zeros(0, np.int64)
    cut = lambda of: lambda *given: None if of(*given) is None else of(*given)[numbers]
    fewer = dataclasses.replace(
        edges,
        source=edges.source[numbers], destination=edges.destination[numbers], features=cut(edges.features),
        weights=cut(edges.weights),
    )  # fmt: skip
    return fewer, numbers


def draw_filter(random: Random) -> Part:
    """Draw a neighbourhood to intersect a graph with: one that is the same for all heads and rows."""
    return draw_expression(random, _draw_shared_part)


def _draw_shared_part(random: Random) -> Part:
    while True:
        part = draw_part(random)
        if part[0] == "mask" and part[1] not in ("pairs", "keys"):
            continue
        if part[0] == "segments":
            return (*part[:3], False)
        if part[0] == "mask_mod":
            return (part[0], 0, 0, *part[3:])
        return part


class Made(NamedTuple):
    """A graph and its definition."""

    edges: Edges
    # builds the package's graph from inputs that may require gradients
    graph: Callable[[Inputs], Graph]


def build_graph(
    pairs: tuple[Ints, Ints], size: tuple[int, int], made: str, changes: tuple[str, ...], filters: tuple[Part, ...], seed: int
) -> Made:  # fmt: skip
    """Build a graph from edges, apply the changes, then the filters."""
    edges = defined(pairs, size, made)
    for change in changes:
        edges = {"reverse": reversed_, "loops": with_loops, "normalised": normalised}[change](edges)
    joins: list[Any] = []
    ids = None
    for place, part in enumerate(filters):
        sizes = Sizes((), 1, edges.destinations, edges.sources, edges.destinations == edges.sources)
        drawn = build((part,), sizes, seed + place)
        edges, numbers = kept(edges, np.broadcast_to(drawn.allowed[0], (edges.destinations, edges.sources)))
        ids = numbers if ids is None else ids[numbers]
        joins.append(drawn.over)

    def graph(inputs: Inputs) -> Graph:
        found = given(pairs, size, made, inputs)
        for change in changes:
            found = {"reverse": Graph.reverse, "loops": Graph.with_self_loops, "normalised": Graph.gcn_normalise}[
                change
            ](found)
        for place, over in enumerate(joins):
            # `&` takes a graph on either side
            joined = found & over if place % 2 == 0 else over & found
            assert isinstance(joined, Graph)
            found = joined
        return found

    return Made(edges, graph)


def check_graph(graph: Graph, edges: Edges) -> None:
    """Check that the package's graph has the edges of the definition, in the same order."""
    expected = torch.as_tensor(np.stack((edges.source, edges.destination)))
    if (graph.sources, graph.destinations) != (edges.sources, edges.destinations):
        raise Mismatch(
            "Graph", "nodes", f"{(graph.sources, graph.destinations)}, expected {(edges.sources, edges.destinations)}"
        )
    if not torch.equal(graph.edge_index, expected):
        raise Mismatch("Graph", "edge_index", f"{graph.edge_index.tolist()}, expected {expected.tolist()}")
