"""The tables `graph` and `graph-compiled`: GATv2 and GAT as whole layers, with projections, compared with PyG.

PyG's layers run unchanged, or after `torch.compile`, which makes them several times as fast once it has compiled them. The floor of inference is `gather_sum`: a C++ loop that only sums the rows of each node's sources.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from benchmarks.case import Case, CaseError, Results, Side, Sides, grad, inference, training
from benchmarks.graphs import WORKLOADS, Workload, drawn, gather_sum, no_kernels, random_graph
from benchmarks.placement import CPU, here
from polyhead import Graph, MultiHeadAttention
from polyhead.device_check.times import PYG_PARAMETER_NAMES

# Sums of up to 20,000 numbers in fp32, in another order than PyG's, differ by about √20,000 · 2⁻²⁴ = 8e-6 of their size,
# which is about 1. A wrong edge or weight changes the third digit.
TOLERANCE = 5e-5
HANDFUL = 4


@dataclass(frozen=True)
class Kind:
    """A score, the layer of PyG for it, and the names of the parameters in PyG."""

    score: Literal["gatv2", "gat"]
    conv: str
    names: dict[str, str]
    """Our names by PyG's."""


GATV2 = Kind(
    "gatv2",
    "GATv2Conv",
    PYG_PARAMETER_NAMES,
)
GAT = Kind(
    "gat",
    "GATConv",
    {
        "lin.weight": "k_proj.weight",
        "att_src": "score.source",
        "att_dst": "score.destination",
        "bias": "o_bias",
    },
)
KINDS = (GATV2, GAT)


def kernel_here() -> str:
    """The kernel that is timed: in C++ on the CPU, in torch elsewhere."""
    return "edges_native" if here() == CPU else "edges_torch"


def no_pyg() -> str | None:
    """The reason why a case is skipped without PyG."""
    try:
        importlib.import_module("torch_geometric")
    except ImportError:
        return "the peer, PyG, is not installed: pip install torch_geometric"
    return None


def no_compiler() -> str | None:
    """The reason why a case is skipped without a compiler for `torch.compile`."""
    if here() != CPU:
        return (
            None
            if importlib.util.find_spec("triton")
            else f"torch.compile needs triton on {here()}: pip install triton"
        )
    known = (os.environ.get("CXX", "g++"), "clang++")
    return None if any(map(shutil.which, known)) else "torch.compile needs a C++ compiler, and none was found"


@torch.no_grad()
def our_layer(kind: Kind, workload: Workload, x: Tensor) -> MultiHeadAttention:
    """Our layer. Biases are not zero, and projections have unit variance; otherwise all weights on Cora would be equal."""
    torch.manual_seed(1)
    layer = MultiHeadAttention(x.shape[1], workload.heads, head_dim=workload.dim, score=kind.score, combine="concat")
    if kind is GAT:
        # PyG's projection has no bias
        layer.k_proj.register_parameter("bias", None)
    assert {name for name, _ in layer.named_parameters()} == {*kind.names.values()}
    for linear in (layer.k_proj, layer.q_proj):
        if linear is not None:
            linear.weight /= linear(x).std()
    for name, parameter in layer.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter, std=0.1)
    return layer


def pyg_layer(kind: Kind, layer: MultiHeadAttention) -> Any:
    """PyG's layer with copies of the same parameters."""
    make = getattr(importlib.import_module("torch_geometric.nn"), kind.conv)
    conv = make(layer.d_model, layer.head_dim, heads=layer.num_heads, add_self_loops=False)
    ours = dict(layer.named_parameters())
    theirs = dict(conv.named_parameters())
    assert theirs.keys() == kind.names.keys()
    conv.load_state_dict({name: ours[kind.names[name]].reshape(own.shape) for name, own in theirs.items()})
    # imports at the first call do not count as memory of a call
    conv(torch.zeros(1, layer.d_model), torch.zeros(2, 1, dtype=torch.long)).sum().backward()
    conv.zero_grad()
    return conv


def checked(layer: MultiHeadAttention, x: Tensor, graph: Graph) -> MultiHeadAttention:
    """The layer, after a check that the C++ kernel is used, or on another device the kernel that runs there."""
    explanation = layer.explain(x, over=graph)
    if explanation.kernel != kernel_here():
        raise CaseError(f"ours must run in {kernel_here()} on {here()}, got {explanation}")
    return layer


def by_destination(edge_index: Tensor) -> Tensor:
    """The edges sorted for PyG, which is about a tenth faster; an `EdgeIndex` or a sparse matrix gains no more."""
    return edge_index[:, edge_index[1].argsort(stable=True)].contiguous()


def _side(forward: Callable[[], Tensor], parameters: dict[str, Tensor], x: Tensor, train: bool) -> Side:
    """A whole layer: the forward pass, or also the gradients of the input and of all parameters, flat, by our names."""
    if not train:
        return inference(forward)
    gradients = lambda: {"x": grad(x), **{name: grad(parameter).flatten() for name, parameter in parameters.items()}}
    return training(forward, (x, *parameters.values()), gradients)


def against_pyg(kind: Kind, workload: Workload, train: bool, compiled: bool = False) -> Sides:
    edge_index, x = workload.make()
    graph, edges = Graph(edge_index, len(x)), by_destination(edge_index)
    layer = checked(our_layer(kind, workload, x), x, graph).train(train)
    conv = pyg_layer(kind, layer).train(train)
    x.requires_grad_(train)
    theirs = {kind.names[name]: parameter for name, parameter in conv.named_parameters()}
    ours = _side(lambda: layer(x, over=graph)[0], dict(layer.named_parameters()), x, train)
    call = torch.compile(conv) if compiled else conv
    peer = _side(lambda: call(x, edges), theirs, x, train)
    if compiled:
        # compilation at the first call does not count as time or memory of a call
        peer.run()
        x.grad = None
        conv.zero_grad()
    if train or here() != CPU:
        return Sides(ours, peer)
    rows = layer.k_proj(x).detach()
    return Sides(ours, peer, bounds=(lambda: gather_sum(graph, rows),))


def new_graphs(kind: Kind, workload: Workload) -> Sides:
    """Inference on a different graph in every call, from a few: ours has to sort the edges first."""
    edge_index, x = workload.make()
    nodes, edges = len(x), edge_index.shape[1]
    handful = [edge_index, *(drawn(nodes, edges) for _ in range(HANDFUL - 1))]
    layer = checked(our_layer(kind, workload, x), x, Graph(edge_index, nodes)).eval()
    conv = pyg_layer(kind, layer).eval()

    def side(forward: Callable[[Tensor], Tensor]) -> Side:
        turns = itertools.cycle(handful)
        # all of the graphs are compared
        every = inference(lambda: torch.stack([forward(each) for each in handful]))
        return Side(inference(lambda: forward(next(turns))).run, lambda out: Results(every.run(), {}))

    return Sides(side(lambda each: layer(x, over=Graph(each, nodes))[0]), side(lambda each: conv(x, each)))


def sparse_inputs(kind: Kind, workload: Workload, train: bool) -> Sides:
    """Bags of words are mostly zeros: ours gets them as a sparse matrix, which PyG's layers do not accept."""
    edge_index, x = workload.make()
    graph, edges, bags = Graph(edge_index, len(x)), by_destination(edge_index), x.to_sparse_coo().coalesce()
    layer = checked(our_layer(kind, workload, x), x, graph).train(train)
    conv = pyg_layer(kind, layer).train(train)
    theirs = {kind.names[name]: parameter for name, parameter in conv.named_parameters()}

    def side(forward: Callable[[], Tensor], parameters: dict[str, Tensor]) -> Side:
        if not train:
            return inference(forward)
        gradients = lambda: {name: grad(parameter).flatten() for name, parameter in parameters.items()}
        return training(forward, parameters.values(), gradients)

    ours = side(lambda: layer(bags, over=graph)[0], dict(layer.named_parameters()))
    return Sides(ours, side(lambda: conv(x, edges), theirs))


def case_of_sparse_inputs(kind: Kind, workload: Workload, train: bool) -> Case:
    name = f"{kind.score}-{'training' if train else 'inference'}-sparse-{workload.name}"
    peer, setup = f"{kind.conv}, dense inputs", partial(sparse_inputs, kind, workload, train)
    return Case(name, peer, setup, TOLERANCE, partial(_lacks, workload))


def case(kind: Kind, workload: Workload, train: bool, compiled: bool = False) -> Case:
    how = f"{'compiled-' if compiled else ''}{'training' if train else 'inference'}"
    peer = f"{'compiled ' if compiled else ''}{kind.conv}, edges sorted"
    setup = partial(against_pyg, kind, workload, train, compiled)
    return Case(f"{kind.score}-{how}-{workload.name}", peer, setup, TOLERANCE, partial(_lacks, workload, compiled))


def case_of_new_graphs(kind: Kind, workload: Workload) -> Case:
    name = f"{kind.score}-new-graph-{workload.name}"
    return Case(name, kind.conv, partial(new_graphs, kind, workload), TOLERANCE, partial(_lacks, workload))


def _lacks(workload: Workload, compiled: bool = False) -> str | None:
    return no_kernels() or no_pyg() or (no_compiler() if compiled else None) or workload.lacks()


def _cases(compiled: bool) -> list[Case]:
    cases = []
    for kind in KINDS:
        cases += [case(kind, workload, train, compiled) for train in (False, True) for workload in WORKLOADS]
        if not compiled:
            cases += [case_of_sparse_inputs(kind, WORKLOADS[0], train) for train in (False, True)]
            cases.append(case_of_new_graphs(kind, random_graph(20_000, 500_000, 8, 16)))
    return cases


CASES = tuple(_cases(compiled=False))
COMPILED = tuple(_cases(compiled=True))
