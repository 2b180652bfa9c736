"""Attention over the parts of a graph on several ranks: equal to one process in value and gradient."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from node_cases import Case, largest, make_graph, make_layer, make_owner
from rank_pool import run_on_threads

from polyhead import Graph, MultiHeadAttention, attend
from polyhead.distributed import partition

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}


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


def two_layers(features: int, hidden: int, classes: int, score: str) -> torch.nn.ModuleList:
    torch.manual_seed(6)
    first = MultiHeadAttention(features, 3, head_dim=hidden, score=score, combine="concat", dropout=0.3)
    last = MultiHeadAttention(3 * hidden, 1, head_dim=classes, score=score, combine="mean", dropout=0.3)
    return torch.nn.ModuleList((first, last)).double()


def train(layers, x, labels, mask, over, steps: int, join) -> list[float]:
    """Full-graph training; `join` sums over ranks. Returns the losses."""
    losses, count = [], join(mask.sum())
    for step in range(steps):
        torch.manual_seed(step)
        hidden = torch.nn.functional.elu(layers[0](x, over=over)[0])
        logits = layers[1](hidden, over=over)[0]
        loss = torch.nn.functional.cross_entropy(logits[mask], labels[mask], reduction="sum") / count
        gradients = torch.autograd.grad(loss, list(layers.parameters()))
        for parameter, gradient in zip(layers.parameters(), gradients, strict=True):
            parameter.data -= 0.3 * join(gradient)
        losses.append(float(join(loss.detach())))
    return losses


def make_task(kind: str) -> tuple[Graph, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A graph, and the features, labels and training mask of its nodes."""
    if kind == "cora":
        data = np.load(Path(os.environ["POLYHEAD_DATA"]) / "cora.npz", allow_pickle=False)
        arrays = [torch.from_numpy(data[f"features_{name}"]) for name in ("indptr", "indices", "data")]
        x = torch.sparse_csr_tensor(arrays[0], arrays[1].long(), arrays[2], tuple(data["features_shape"].tolist()))
        labels, nodes = torch.from_numpy(data["labels"]), len(data["labels"])
        mask = torch.zeros(nodes, dtype=torch.bool)
        mask[torch.from_numpy(data["train"])] = True
        return Graph(data["edge_index"], nodes).with_self_loops(), x.to_dense().double(), labels, mask
    graph = make_graph(kind, None, False, torch.float64)
    torch.manual_seed(8)
    x, labels = torch.randn(graph.sources, 12, dtype=torch.float64), torch.randint(7, (graph.sources,))
    # all labels are on the rank of the first nodes
    return graph, x, labels, torch.arange(graph.sources) < 10


def sum_over_ranks(x: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    dist.all_reduce(x)
    return x


def train_both(score: str, kind: str, steps: int) -> tuple[float, float, float]:
    """By how much losses and parameters differ after training, and by how much the parameters moved."""
    graph, x, labels, mask = make_task(kind)
    one, many, start = (two_layers(x.shape[1], 5, 7, score) for _ in range(3))
    losses = train(one, x, labels, mask, graph, steps, lambda x: x)
    part = partition(graph, dist.get_world_size(), method="contiguous")[dist.get_rank()].on()
    own = train(many, part.take(x), part.take(labels), part.take(mask), part, steps, sum_over_ranks)
    distance = lambda a, b: max(largest(p - q) for p, q in zip(a.parameters(), b.parameters(), strict=True))
    return max(abs(a - b) for a, b in zip(losses, own, strict=True)), distance(one, many), distance(one, start)


@pytest.mark.parametrize("ranks", ["two_ranks", "four_ranks"])
@pytest.mark.parametrize("score", ["gat", "gatv2"])
@pytest.mark.parametrize("graph", ["random", "clustered"])
def test_training_of_two_layers_equals_one_process(ranks, score, graph, request):
    for losses, parameters, moved in request.getfixturevalue(ranks).run(train_both, score, graph, 8):
        assert losses < 1e-12 and parameters < 1e-10 and moved > 0.05


@pytest.mark.parametrize("ranks", ["two_ranks", "four_ranks"])
def test_training_on_cora_equals_one_process(ranks, request):
    if "POLYHEAD_DATA" not in os.environ:
        pytest.skip("POLYHEAD_DATA does not name a folder with cora.npz: training on Cora over ranks is NOT tested")
    for losses, parameters, moved in request.getfixturevalue(ranks).run(train_both, "gat", "cora", 3):
        assert losses < 1e-12 and parameters < 1e-12 and moved > 1e-3


def other_inputs() -> None:
    """Sparse inputs, dropout of inputs and values, no gradients, other keys, checkpointing: each equals one process or runs."""
    graph = make_graph("random", None, False, torch.float64)
    part, layer = partition(graph, dist.get_world_size())[dist.get_rank()].on(), make_layer(Case(d_model=7)).eval()
    torch.manual_seed(1)
    x, y = torch.randn(2, graph.sources, 7, dtype=torch.float64)
    expected = layer(x, over=graph)[0]
    close = lambda a, b: torch.testing.assert_close(a, b, atol=1e-12, rtol=0)
    close(layer(part.take(x).to_sparse(), over=part)[0], part.take(expected))
    with torch.no_grad():
        close(layer(part.take(x), over=part)[0], part.take(expected))
    close(layer(part.take(x), part.take(y), over=part)[0], part.take(layer(x, y, over=graph)[0]))
    own = part.take(x).requires_grad_()
    saved = torch.utils.checkpoint.checkpoint(lambda x: layer(x, over=part)[0], own, use_reentrant=False)
    (gradient,) = torch.autograd.grad(saved.sum(), own)
    whole = x.clone().requires_grad_()
    close(gradient, part.take(torch.autograd.grad(layer(whole, over=graph)[0].sum(), whole)[0]))
    assert layer.explain(part.take(x), over=part).kernel == layer.explain(x, over=graph).kernel
    drops = MultiHeadAttention(7, 1, score="gat", input_dropout=0.5, value_dropout=0.5).double()
    assert torch.isfinite(drops(part.take(x), over=part)[0]).all()


@pytest.mark.parametrize("ranks", ["two_ranks", "four_ranks"])
def test_other_inputs(ranks, request):
    request.getfixturevalue(ranks).run(other_inputs)


def second_derivatives(case: Case) -> float:
    """By how much the gradients of a penalty on the gradient of the input differ from one process."""
    graph, layer = make_graph(case.graph, None, False, case.dtype), make_layer(case)
    torch.manual_seed(4)
    x = torch.randn(graph.sources, case.d_model, dtype=case.dtype)
    part = partition(graph, dist.get_world_size())[dist.get_rank()].on()

    def penalty_gradients(x, over):
        x = x.requires_grad_()
        (gradient,) = torch.autograd.grad(layer(x, over=over)[0].pow(2).sum(), x, create_graph=True)
        return torch.autograd.grad(gradient.pow(2).sum(), (x, *layer.parameters()), allow_unused=True)

    (whole_x, *whole), (own_x, *own) = penalty_gradients(x.clone(), graph), penalty_gradients(part.take(x), part)
    errors = [largest(own_x - part.take(whole_x)) / largest(whole_x)]
    # of the largest one: dot products have a gradient of zero for the bias of keys, a sum of terms in the thousands
    scale = max(largest(x) for x in whole if x is not None)
    for expected, gradient in zip(whole, own, strict=True):
        assert (expected is None) == (gradient is None)
        if expected is not None:
            errors.append(largest(sum_over_ranks(gradient) - expected) / scale)
    return max(errors)


@pytest.mark.parametrize("case", [Case("gat"), Case("gatv2", d_model=7), Case("dot")], ids=lambda case: case.score)
def test_second_derivatives_equal_one_process(case, two_ranks):
    assert max(two_ranks.run(second_derivatives, case)) < 1e-12


def attend_on_eight() -> float:
    # threads share one generator: everything is drawn from one of their own
    graph, generator = make_graph("random", None, False, torch.float64), torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 2, graph.sources, 5, dtype=torch.float64, generator=generator).requires_grad_()
    options = {"dropout": 0.3, "seed": 9}
    out = attend(q, k, v, over=graph, **options)
    part = partition(graph, dist.get_world_size())[dist.get_rank()].on()
    own = attend(*(part.take(x) for x in (q, k, v)), over=part, **options)
    errors = [largest(own - part.take(out))]
    whole, found = (torch.autograd.grad(y.pow(2).sum(), (q, k, v)) for y in (out, own))
    for expected, gradient in zip(whole, found, strict=True):
        dist.all_reduce(gradient)
        errors.append(largest(gradient - expected))
    return max(errors)


def test_eight_ranks_by_threads():
    assert max(run_on_threads(attend_on_eight, 8)) < 1e-12
