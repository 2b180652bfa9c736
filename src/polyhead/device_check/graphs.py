"""The table of attention along the edges of graphs, for the check of a device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from polyhead.device_check.operands import Operands
from polyhead.neighbourhood import Graph
from polyhead.score import GAT, Dot, GATv2, Score

HEADS, DIM, EDGE_DIM = 4, 10, 3


def _simple(sources: int, destinations: int, edges: int) -> Tensor:
    pairs = torch.randperm(sources * destinations)[:edges]
    return torch.stack((pairs % sources, pairs // sources))


def _hub(nodes: int) -> Tensor:
    """Node 0 connected to every other, in both directions."""
    others = torch.arange(1, nodes)
    to_hub = torch.stack((others, torch.zeros_like(others)))
    return torch.cat((to_hub, to_hub.flip(0)), 1)


GRAPHS: dict[str, Callable[[], tuple[Tensor, tuple[int, int]]]] = {
    "random": lambda: (_simple(131, 131, 911), (131, 131)),
    "hub": lambda: (_hub(149), (149, 149)),
    "bipartite": lambda: (_simple(101, 43, 509), (101, 43)),
    "duplicates": lambda: (torch.randint(0, 31, (2, 401)), (31, 31)),
    "mostly isolated": lambda: (_simple(61, 61, 17), (61, 61)),
}


class Variant(NamedTuple):
    """A score, and options that are joined in one case. `tied`: the values are the keys, as in a layer of GAT."""

    score: Callable[[int | None], Score] = lambda edge_dim: Dot()
    tied: bool = False
    batch: tuple[int, ...] = ()
    key_heads: int = HEADS
    value_dim: int = DIM
    features: bool = False
    weights: bool = False
    bias: bool = False
    sink: bool = False
    dropout: float = 0.0


def _gat(edge_dim: int | None) -> Score:
    return GAT(HEADS, DIM, edge_dim=edge_dim)


def _gatv2(edge_dim: int | None) -> Score:
    return GATv2(HEADS, DIM, edge_dim=edge_dim)


VARIANTS = {
    "dot": Variant(),
    "dot, edge weights, dropout": Variant(weights=True, dropout=0.3),
    "dot, bias, grouped heads": Variant(bias=True, key_heads=2),
    "GAT, values are keys": Variant(_gat, tied=True),
    "GAT, edge features, sink": Variant(_gat, features=True, sink=True),
    "GATv2, values are keys": Variant(_gatv2, tied=True),
    "GATv2, batch, wide values": Variant(_gatv2, batch=(2,), value_dim=19),
    "GATv2, edge features, edge weights, dropout": Variant(_gatv2, features=True, weights=True, dropout=0.3),
}
# on which other dtypes than fp32 are checked
_FEW_VARIANTS = ("dot", "GAT, values are keys", "GATv2, values are keys")


def make_operands(graph: str, variant: Variant) -> Operands:
    """The attention of a row, on the CPU."""
    edge_index, (sources, destinations) = GRAPHS[graph]()
    edges = edge_index.shape[1]
    items = lambda heads, n, dim: torch.randn(*variant.batch, n, heads, dim).transpose(-3, -2)
    q, k = items(HEADS, destinations, DIM), items(variant.key_heads, sources, DIM)
    v = k if variant.tied else items(variant.key_heads, sources, variant.value_dim)
    over = Graph(
        edge_index, (sources, destinations),
        torch.randn(edges, EDGE_DIM) if variant.features else None,
        torch.rand(edges) if variant.weights else None,
    )  # fmt: skip
    score = variant.score(EDGE_DIM if variant.features else None)
    bias = torch.randn(HEADS, edges) if variant.bias else None
    return Operands(q, k, v, over, score, None, bias, torch.randn(HEADS) if variant.sink else None, variant.dropout)


def device_rows(dtypes: list[torch.dtype]) -> Iterator[tuple[str, torch.dtype, Callable[[], Operands]]]:
    """The rows for a device with these dtypes: a name, a dtype, and the attention on the CPU."""
    for dtype in dtypes:
        for graph in GRAPHS:
            for title, variant in VARIANTS.items():
                few = graph in ("random", "hub") and title in _FEW_VARIANTS
                if dtype == torch.float32 or few:
                    yield f"graph {graph}: {title}", dtype, partial(make_operands, graph, variant)
