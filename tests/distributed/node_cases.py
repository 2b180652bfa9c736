"""Graphs and layers for tests of nodes on several ranks."""

from __future__ import annotations

from typing import NamedTuple

import torch

from polyhead import GAT, ALiBi, Dot, GATv2, Graph, MultiHeadAttention, Rotary


class Case(NamedTuple):
    score: str = "gatv2"
    edge_dim: int | None = None
    weights: bool = False
    dropout: float = 0.0
    bias: bool = False
    heads: tuple[int, int] = (3, 3)
    """Heads of queries and of keys."""
    head_dim: int = 5
    combine: str = "project"
    position: str | None = None
    sink: bool = False
    qk_norm: bool = False
    batch: tuple[int, ...] = ()
    graph: str = "random"
    dtype: torch.dtype = torch.float64
    d_model: int = 30
    """More than the projected keys: these are sent. Fewer: the inputs."""


def make_graph(kind: str, edge_dim: int | None, weighted: bool, dtype: torch.dtype) -> Graph:
    generator = torch.Generator().manual_seed(1)
    draw = lambda high, *size: torch.randint(high, size, generator=generator)
    # isolated nodes, duplicate edges and self-loops are among the random ones
    nodes = {"few nodes": 3}.get(kind, 41)
    if kind == "star":
        others = torch.arange(1, nodes)
        edges = torch.cat((torch.stack((others, 0 * others)), torch.stack((0 * others, others))), 1)
    elif kind == "clustered":
        start = draw(4, 150) * 10
        edges = torch.stack((start + draw(10, 150), start + draw(10, 150)))
        edges[0, :6] = draw(40, 6)
    elif kind == "hubs":
        edges = torch.stack((draw(nodes, 150), draw(2, 150)))
    elif kind == "no edges":
        edges = torch.empty(2, 0, dtype=torch.long)
    elif kind == "one part has all edges":
        edges = torch.stack((draw(nodes, 60), draw(5, 60)))
    else:
        edges = torch.cat((draw(max(nodes - 3, 2), 2, 130), torch.arange(12).expand(2, 12)), 1)
        edges = torch.cat((edges, edges[:, :9]), 1) % nodes
    count = edges.shape[1]
    randn = lambda *size: torch.randn(*size, generator=generator, dtype=dtype)
    features = None if edge_dim is None else randn(count, edge_dim).requires_grad_()
    weights = randn(count).abs().requires_grad_() if weighted else None
    return Graph(edges, nodes, features, weights)


def make_owner(kind: str, nodes: int, parts: int) -> torch.Tensor:
    if kind == "an empty part":
        return torch.arange(nodes) % max(parts - 1, 1)
    # every edge ends at one of the first five nodes
    return torch.where(torch.arange(nodes) < 5, 0, torch.arange(nodes) % parts)


def make_layer(case: Case) -> MultiHeadAttention:
    torch.manual_seed(3)
    heads, dim = case.heads[0], case.head_dim
    scores = {
        "dot": lambda: Dot(),
        "gat": lambda: GAT(heads, dim, edge_dim=case.edge_dim),
        "gatv2": lambda: GATv2(heads, dim, edge_dim=case.edge_dim),
        "gatv2 shared": lambda: GATv2(heads, dim, edge_dim=case.edge_dim, shares_queries=True),
    }
    layer = MultiHeadAttention(
        case.d_model, heads, kv_heads=case.heads[1], head_dim=dim, score=scores[case.score](), combine=case.combine,
        position={None: None, "rotary": Rotary(), "alibi": ALiBi(heads)}[case.position], dropout=case.dropout,
        sink="learned" if case.sink else None, qk_norm=case.qk_norm,
    ).to(case.dtype)  # fmt: skip
    for parameter in layer.parameters():
        # biases that are zero would hide errors
        parameter.data += 0.1 * torch.randn_like(parameter)
    return layer


def largest(x: torch.Tensor) -> float:
    return float(x.detach().abs().max()) if x.numel() else 0.0
