"""The graphs of the tables: random ones, and real ones from the folder in POLYHEAD_DATA."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from benchmarks.case import nothing
from benchmarks.placement import CPU, here, moved
from polyhead import Graph
from polyhead._torch import native

FOLDER = "POLYHEAD_DATA"
FEATURES = 128


class Data(NamedTuple):
    """Edges (2, edges), sources in the first row, unsorted; and the features of the nodes (nodes, features)."""

    edge_index: Tensor
    x: Tensor


@dataclass(frozen=True)
class Workload:
    """A graph, and the heads that attend along it."""

    name: str
    heads: int
    dim: int
    make: Callable[[], Data]
    """Creates the data, deterministically."""
    lacks: Callable[[], str | None] = nothing
    """The missing file, if any."""


def drawn(nodes: int, edges: int) -> Tensor:
    """Edges between uniformly random nodes."""
    return torch.randint(nodes, (2, edges))


def drawn_with_hub(nodes: int, edges: int) -> Tensor:
    """Power-law degrees (exponent 3, as in preferential attachment), and node 0 connected to every other in both directions."""
    weights = torch.arange(1, nodes + 1).pow(-0.5)[torch.randperm(nodes)]
    others = torch.arange(1, nodes)
    hub = torch.zeros_like(others)
    spokes = torch.stack((torch.cat((hub, others)), torch.cat((others, hub))))
    rest = edges - spokes.shape[1]
    pairs = torch.stack([weights.multinomial(rest, replacement=True) for _ in range(2)])
    return torch.cat((spokes, pairs), 1)[:, torch.randperm(edges)]


def random_graph(nodes: int, edges: int, heads: int, dim: int) -> Workload:
    return Workload(f"random-{nodes}x{edges}-{heads}x{dim}", heads, dim, partial(_featured, drawn, nodes, edges))


def hub_graph(nodes: int, edges: int, heads: int, dim: int) -> Workload:
    return Workload(f"hub-{nodes}x{edges}-{heads}x{dim}", heads, dim, partial(_featured, drawn_with_hub, nodes, edges))


def _featured(draw: Callable[[int, int], Tensor], nodes: int, edges: int) -> Data:
    torch.manual_seed(0)
    return Data(draw(nodes, edges), torch.randn(nodes, FEATURES))


def _cora() -> Data:
    """Bags of words as dense numbers, each row divided by its sum."""
    with CPU, np.load(_file("cora"), allow_pickle=False) as file:
        shape = tuple(file["features_shape"].tolist())
        rows = np.arange(shape[0]).repeat(np.diff(file["features_indptr"]))
        x = torch.zeros(shape)
        x[torch.from_numpy(rows), torch.from_numpy(file["features_indices"]).long()] = torch.from_numpy(
            file["features_data"]
        )
        data = Data(_with_loops(file["edge_index"], shape[0]), x / x.sum(1, keepdim=True).clamp(min=1))
    return moved(data)


def _amazon_computers() -> Data:
    torch.manual_seed(0)
    with CPU, np.load(_file("amazon-computers"), allow_pickle=False) as file:
        nodes = int(file["nodes"])
        data = Data(_with_loops(file["edge_index"], nodes), torch.randn(nodes, FEATURES))
    return moved(data)


def _with_loops(edge_index: np.ndarray[tuple[int, ...], np.dtype[np.integer]], nodes: int) -> Tensor:
    """Add self-loops, which neither file has."""
    return torch.cat((torch.from_numpy(edge_index).long(), torch.arange(nodes).expand(2, -1)), 1)


def _file(name: str) -> Path:
    return Path(os.environ.get(FOLDER, "")) / f"{name}.npz"


def _no_file(name: str, contents: str) -> str | None:
    if FOLDER in os.environ and _file(name).is_file():
        return None
    state = f"{_file(name)} does not exist" if FOLDER in os.environ else f"{FOLDER} is not set"
    return f"{state}: {FOLDER} must be the folder of {name}.npz, with {contents}"


CORA = Workload(
    "cora-8x8", 8, 8, _cora,
    partial(_no_file, "cora", "edge_index (2, edges) and, as CSR, features_data, _indices, _indptr and _shape (from kimiyoung/planetoid)"),
)  # fmt: skip
AMAZON_COMPUTERS = Workload(
    "amazon-computers-8x16", 8, 16, _amazon_computers,
    partial(_no_file, "amazon-computers", "edge_index (2, edges) and nodes, the number of nodes (from EdisonLeeeee/GraphData)"),
)  # fmt: skip
WORKLOADS = (
    CORA,
    AMAZON_COMPUTERS,
    random_graph(20_000, 500_000, 8, 16),
    random_graph(50_000, 1_000_000, 4, 32),
    hub_graph(20_000, 400_000, 8, 16),
)


def no_kernels() -> str | None:
    """The reason why a case is skipped without the C++ kernels; graphs on other devices run in torch."""
    if here() != CPU:
        return None
    return "polyhead was installed without a compiler, so there are no C++ kernels to time" if native is None else None


def gather_sum(graph: Graph, rows: Tensor) -> Tensor:
    """The floor: for each node the sum of the rows (nodes, width) of its sources, by a C++ loop that does nothing else."""
    assert rows.is_contiguous() and rows.dtype == torch.float32 and rows.shape[1] % 8 == 0
    out = rows.new_empty(graph.destinations, rows.shape[1])
    done = native.gather_sum(
        double=False, sources=len(rows), destinations=graph.destinations, edges=graph.num_edges, width=rows.shape[1],
        v=rows.data_ptr(), indptr=graph.csr.indptr.data_ptr(), indices=graph.csr.indices.data_ptr(), out=out.data_ptr(),
        threads=torch.get_num_threads(),
    )  # fmt: skip
    assert done, "the graph was changed"
    return out
