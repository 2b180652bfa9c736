"""Attention over the parts of a graph on several ranks: equal to one process in value and gradient, with the fewest bytes sent."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist

from polyhead import GAT, ALiBi, Dot, GATv2, Graph, MultiHeadAttention, Rotary
from polyhead.distributed.partition import partition

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}


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


def run_case(case: Case) -> dict[str, float]:
    """The largest difference of the ranks from one process, by name: outputs and gradients."""
    graph = make_graph(case.graph, case.edge_dim, case.weights, case.dtype)
    layer, nodes = make_layer(case), graph.sources
    torch.manual_seed(4)
    x = torch.randn(*case.batch, nodes, case.d_model, dtype=case.dtype, requires_grad=True)
    bias = torch.randn(case.heads[0], graph.num_edges, dtype=case.dtype, requires_grad=True) if case.bias else None
    inputs = {"x": x, "bias": bias, "features": graph.features, "weights": graph.weights}
    tensors = {**{name: x for name, x in inputs.items() if x is not None}, **dict(layer.named_parameters())}

    torch.manual_seed(5)
    out, heads = layer(x, over=graph, bias=bias)
    towards = torch.randn_like(out)
    weights = heads.weights.detach()
    whole = torch.autograd.grad((out * towards).sum(), list(tensors.values()))

    parts = dist.get_world_size()
    owner = make_owner(case.graph, nodes, parts) if case.graph in ("an empty part", "one part has all edges") else None
    part = partition(graph, parts, owner=owner)[dist.get_rank()].on()
    torch.manual_seed(5)
    own, own_heads = layer(part.take(x), over=part, bias=None if bias is None else part.take_edges(bias))
    found = torch.autograd.grad((own * part.take(towards)).sum(), list(tensors.values()))
    errors = {
        "out": largest(own - part.take(out)),
        "gathered": largest(part.gather(own) - out),
        "heads": largest(own_heads.weights.detach() - part.take_edges(weights)),
        "gathered heads": largest(part.gather_edges(own_heads.weights) - weights),
    }
    for name, expected, gradient in zip(tensors, whole, found, strict=True):
        # each rank has the gradients of its own rows and edges, zero elsewhere, and a part of those of the parameters
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        errors[f"gradient of {name}"] = largest(gradient - expected) / max(1.0, largest(expected))
    return errors


def largest(x: torch.Tensor) -> float:
    return float(x.detach().abs().max()) if x.numel() else 0.0


def check_case(pool, case: Case) -> None:
    for rank, errors in enumerate(pool.run(run_case, case)):
        for name, error in errors.items():
            assert error < TOLERANCE[case.dtype], f"rank {rank}: {name} differs by {error}"


TABLE = [
    Case(score, edge_dim, dropout=dropout, bias=bias, heads=heads)
    for score, edge_dim, dropout, bias, heads in itertools.product(
        ("dot", "gat", "gatv2"), (None, 2), (0.0, 0.4), (False, True), ((3, 3), (4, 2))
    )
    # the sum of projections that grouped heads share needs scores without values that are keys
    if not (score == "dot" and edge_dim) and not (score != "dot" and heads == (4, 2))
]
OTHERS = {
    "fp32": Case(dtype=torch.float32, edge_dim=2, dropout=0.3),
    "fp32, dot": Case("dot", dtype=torch.float32, weights=True),
    "weights of edges": Case("gat", weights=True, dropout=0.2),
    "weights of edges and features": Case(edge_dim=3, weights=True),
    "inputs are sent, gatv2": Case(d_model=7, dropout=0.3),
    "inputs are sent, gat, whose queries are keys": Case("gat", d_model=7, edge_dim=2),
    "inputs are sent, shared": Case("gatv2 shared", d_model=7),
    "keys are sent, shared": Case("gatv2 shared"),
    "inputs are sent, dot": Case("dot", d_model=7, bias=True),
    "a batch": Case(batch=(2, 3), dropout=0.3),
    "a batch, inputs are sent": Case("dot", batch=(2,), d_model=7),
    "mean": Case("gat", combine="mean", sink=True),
    "concat": Case(combine="concat"),
    "rotary": Case("dot", head_dim=6, position="rotary", d_model=40),
    "rotary, inputs are sent": Case("dot", head_dim=6, position="rotary", d_model=8, dropout=0.2),
    "alibi": Case("dot", position="alibi", bias=True),
    "qk_norm": Case("dot", qk_norm=True, sink=True),
    **{
        graph: Case(graph=graph, edge_dim=2, dropout=0.2)
        for graph in ("star", "clustered", "hubs", "no edges", "few nodes", "an empty part", "one part has all edges")
    },
    **{
        f"{graph}, dot with a bias": Case("dot", graph=graph, bias=True)
        for graph in ("no edges", "few nodes", "an empty part", "one part has all edges")
    },
}


@pytest.mark.parametrize("ranks", ["two_ranks", "four_ranks"])
@pytest.mark.parametrize(
    "case", TABLE, ids=lambda case: f"{case.score}-{case.edge_dim}-{case.dropout}-{case.bias}-{case.heads}"
)
def test_ranks_equal_one_process(ranks, case, request):
    check_case(request.getfixturevalue(ranks), case)


@pytest.mark.parametrize("ranks", ["two_ranks", "four_ranks"])
@pytest.mark.parametrize("name", OTHERS)
def test_other_layers_and_graphs_equal_one_process(ranks, name, request):
    check_case(request.getfixturevalue(ranks), OTHERS[name])
