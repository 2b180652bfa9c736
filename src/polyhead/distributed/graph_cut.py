"""Which part each node of a graph belongs to: by METIS, or in stretches of nodes."""

from __future__ import annotations

from typing import Any, Literal

import torch
from jaxtyping import Int
from torch import Tensor

from polyhead.neighbourhood import Graph
from polyhead.neighbourhood.csr import build_indptr

CutMethod = Literal["metis", "contiguous"]


def metis_is_installed() -> bool:
    """Whether pymetis can be imported."""
    try:
        import pymetis  # noqa: F401
    except ImportError:
        return False
    return True


def cut_by_metis(graph: Graph, parts: int) -> Int[Tensor, " nodes"]:
    """The part of each node such that few edges connect parts, and parts have about the same number of in-edges and nodes."""
    try:
        import pymetis
    except ImportError as error:
        raise ImportError(
            "pymetis must be installed for method='metis': pip install 'polyhead[distributed]'; or pass method='contiguous'"
        ) from error
    nodes = graph.sources
    if parts == 1 or nodes == 0 or graph.num_edges == 0:
        return cut_contiguously(graph, parts)
    source, destination = graph.edge_index.cpu()
    # METIS takes each pair of neighbours once in both directions, and no loops
    apart = source != destination
    source, destination = source[apart], destination[apart]
    codes = torch.cat((source * nodes + destination, destination * nodes + source)).unique()
    indptr = build_indptr(codes // nodes, nodes)
    dtype: Any = pymetis.zero_copy_dtype()
    adjacency = pymetis.CSRAdjacency(indptr.numpy().astype(dtype), (codes % nodes).numpy().astype(dtype))
    _, owner = pymetis.part_graph(parts, adjacency, vweights=_work(graph).numpy().astype(dtype))
    return torch.as_tensor(owner, dtype=torch.long)


def cut_contiguously(graph: Graph, parts: int) -> Int[Tensor, " nodes"]:
    """The part of each node such that every part has consecutive nodes, and about the same number of in-edges and nodes."""
    work = _work(graph)
    # a node belongs to the part in which the middle of its work lies
    middle = work.cumsum(0) * 2 - work
    return middle * parts // (2 * int(work.sum())) if len(work) else middle


def _work(graph: Graph) -> Int[Tensor, " nodes"]:
    """The work per node: an in-edge counts as much as the node itself."""
    return graph.csr.indptr.diff().long().cpu() + 1
