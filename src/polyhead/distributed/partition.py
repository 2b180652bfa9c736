"""partition: a graph as parts for several ranks, each with its own nodes, their in-edges, and the halo that these read."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple, overload

import torch
from jaxtyping import Int, Integer
from torch import Tensor

from polyhead._checks import WrongType, as_tensor, check_integer, short_repr
from polyhead.distributed.graph_cut import CutMethod, cut_by_metis, cut_contiguously, metis_is_installed
from polyhead.distributed.graph_part import GraphPart, PartPlace
from polyhead.distributed.row_exchange import RowPlan
from polyhead.neighbourhood import Graph

# More parts have no use, and the codes of (part, part, node) fit 63 bits with any number of nodes that a graph may have.
MAX_PARTS = 1 << 16


def partition(
    graph: Graph,
    parts: int,
    *,
    method: CutMethod | None = None,
    owner: Integer[Tensor, " nodes"] | None = None,
) -> Partition:
    """Cut a graph into parts, one per rank: `partition(graph, 4)[rank]` has the nodes of a rank.

    A part has some nodes, all of their in-edges, and a halo: the nodes of other parts that these edges come from. With
    `over=part.on(mesh)` a layer computes the rows of the own nodes, and fetches those of the halo. A node without edges belongs
    to a part too; a part may be empty.

    Args:
        graph: the whole graph, with its features, weights and self-loops; sources and destinations are the same nodes.
        parts: the number of parts.
        method: `"metis"` cuts few edges; `"contiguous"` gives each part consecutive nodes. Both balance in-edges and nodes.
            By default METIS, if pymetis is installed.
        owner: the part of each node, if you know a better one.

    Raises:
        ValueError: if an argument does not fit the others; the message names it and the rule.
    """
    if not isinstance(graph, Graph):
        raise WrongType(f"graph must be a Graph, got {short_repr(graph)}")
    if isinstance(graph, GraphPart):
        raise ValueError(f"graph must be whole, got {graph!r}")
    if graph.sources != graph.destinations:
        raise ValueError(f"graph must have the same nodes as sources and destinations, got {graph!r}")
    parts = check_integer("parts", parts, 1, MAX_PARTS)
    if method not in ("metis", "contiguous", None):
        raise ValueError(f"method must be 'metis', 'contiguous' or None, got {method!r}")
    if owner is not None:
        if method is not None:
            raise ValueError(f"method must be left out where owner is given, got {method!r}")
        owner = _check_owner(owner, graph.sources, parts)
    elif method == "metis" or (method is None and metis_is_installed()):
        owner = cut_by_metis(graph, parts)
    else:
        owner = cut_contiguously(graph, parts)
    return Partition(graph, owner, parts)


class Partition(Sequence[GraphPart]):
    """The parts of a graph. A part is made when it is asked for: `parts[rank]`.

    Attributes:
        owner: the part of each node.
    """

    def __init__(self, graph: Graph, owner: Int[Tensor, " nodes"], parts: int) -> None:
        self.graph, self.owner = graph, owner
        self._nodes = _Groups.of(owner, parts)
        source, destination = graph.edge_index.cpu()
        at = owner[destination]
        self._edges = _Groups.of(at, parts)
        remote = (owner[source] != at).nonzero()[:, 0]
        # the rows that part p reads of part o, in the order (p, o, node), each once
        nodes = max(graph.sources, 1)
        reads, place = ((at[remote] * parts + owner[source[remote]]) * nodes + source[remote]).unique(
            return_inverse=True
        )
        self._reads_node, pair = reads % nodes, reads // nodes
        self._reader, self._sender = pair // parts, pair % parts
        self._reads = _Groups.of(self._reader, parts)
        self._sends = _Groups.of(self._sender, parts)
        # the local number of each edge's source and destination
        local = torch.empty_like(owner)
        local[self._nodes.items] = torch.arange(len(owner)) - self._nodes.start_of(owner[self._nodes.items])
        self._local = local
        self._source = local[source]
        own_counts = torch.tensor(self._nodes.counts)
        self._source[remote] = place - self._reads.start_of(at[remote]) + own_counts[at[remote]]
        self._destination = local[destination]
        self.partition_id = _hash(owner, graph, parts)

    def __len__(self) -> int:
        return len(self._nodes.counts)

    @overload
    def __getitem__(self, index: int) -> GraphPart: ...

    @overload
    def __getitem__(self, index: slice) -> list[GraphPart]: ...

    def __getitem__(self, index: int | slice) -> GraphPart | list[GraphPart]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        index = range(len(self))[index]
        device = self.graph.csr.edge_id.device
        nodes, edges = self._nodes.group(index), self._edges.group(index)
        reads, sends = self._reads.group(index), self._sends.group(index)
        take = lambda x: None if x is None else x.index_select(0, edges.to(x.device))
        local = torch.stack((self._source[edges], self._destination[edges])).to(device)
        graph = Graph(local, (len(nodes) + len(reads), len(nodes)), take(self.graph.features), take(self.graph.weights))
        graph.edge_ids = edges.to(device)
        plan = RowPlan(
            self._local[self._reads_node[sends]].to(device),
            self._count(self._reader[sends]),
            self._count(self._sender[reads]),
        )
        place = PartPlace(self.partition_id, index, self._nodes.counts, self.graph.num_edges)
        return GraphPart(graph, nodes.to(device), self._reads_node[reads].to(device), plan, place)

    def __iter__(self) -> Iterator[GraphPart]:
        return (self[index] for index in range(len(self)))

    def _count(self, part: Int[Tensor, " rows"]) -> tuple[int, ...]:
        return tuple(part.bincount(minlength=len(self)).tolist())

    @property
    def edge_counts(self) -> tuple[int, ...]:
        """The number of edges of each part."""
        return self._edges.counts

    @property
    def halo_counts(self) -> tuple[int, ...]:
        """The number of rows that each part receives in every exchange."""
        return self._reads.counts

    def __repr__(self) -> str:
        return f"Partition({self.graph!r}, {len(self)} parts, {sum(self.halo_counts)} rows per exchange)"


class _Groups(NamedTuple):
    """Indices grouped by part, ascending in each."""

    items: Int[Tensor, " items"]
    counts: tuple[int, ...]
    starts: Int[Tensor, " parts+1"]

    @staticmethod
    def of(part: Int[Tensor, " items"], parts: int) -> _Groups:
        counts = tuple(part.bincount(minlength=parts).tolist())
        return _Groups(part.argsort(stable=True), counts, torch.tensor((0, *accumulate(counts))))

    def group(self, part: int) -> Int[Tensor, " some"]:
        return self.items[int(self.starts[part]) : int(self.starts[part + 1])]

    def start_of(self, part: Int[Tensor, " some"]) -> Int[Tensor, " some"]:
        return self.starts[part]


def _check_owner(owner: object, nodes: int, parts: int) -> Int[Tensor, " nodes"]:
    owner = as_tensor("owner", owner, "of integers (nodes,)")
    if owner.shape != (nodes,) or owner.is_floating_point() or owner.dtype == torch.bool:
        raise ValueError(f"owner must be integers ({nodes},), got {owner.dtype} of shape {tuple(owner.shape)}")
    owner = owner.long().cpu()
    if nodes and not 0 <= int(owner.min()) <= int(owner.max()) < parts:
        raise ValueError(f"owner must be in [0, {parts}), got {int(owner.min())} to {int(owner.max())}")
    return owner


def _hash(owner: Tensor, graph: Graph, parts: int) -> str:
    digest = hashlib.blake2b(f"{parts} {graph.sources}".encode(), digest_size=16)
    for x in (owner, graph.edge_index.cpu()):
        digest.update(x.contiguous().numpy().data)
    for values in (graph.features, graph.weights):
        digest.update(b"none" if values is None else f"{values.dtype} {tuple(values.shape)}".encode())
    return digest.hexdigest()
