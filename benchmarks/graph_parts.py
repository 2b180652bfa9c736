"""The table `graph-parts`: the parts of a layer on a graph: sorting, projections, attention; and the gain of threads."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from benchmarks.case import Case, Forward, Results, Side, Sides, inference
from benchmarks.graph import GATV2, KINDS, TOLERANCE, Kind, checked, kernel_here, our_layer
from benchmarks.graphs import WORKLOADS, Workload, drawn, gather_sum, no_kernels, random_graph
from benchmarks.measure import cores
from benchmarks.placement import CPU, cpu_only, here
from polyhead import GATv2, Graph, MultiHeadAttention, attend

NODES, EDGES = 20_000, 500_000
SIZES = (100_000, 1_000_000, 10_000_000)
DEGREE = 25
HEADS, DIM = 4, 16


def layer_and_its_functions(kind: Kind, workload: Workload) -> Sides:
    """The layer compared with the functions it calls; the floor projects and gathers."""
    edge_index, x = workload.make()
    graph = Graph(edge_index, len(x))
    layer = checked(our_layer(kind, workload, x), x, graph).eval()

    def bound() -> Tensor:
        with torch.no_grad():
            if layer.q_proj is not None:
                layer.q_proj(x)
            return gather_sum(graph, layer.k_proj(x))

    ours, peer = inference(lambda: layer(x, over=graph)[0]), inference(partial(_functions, layer, x, graph))
    return Sides(ours, peer, bounds=(bound,) if here() == CPU else ())


def _functions(layer: MultiHeadAttention, x: Tensor, graph: Graph) -> Tensor:
    assert layer.o_bias is not None
    split = lambda y: y.unflatten(-1, (layer.num_heads, -1)).transpose(0, 1)
    k = split(layer.k_proj(x))
    q = k if layer.q_proj is None else split(layer.q_proj(x))
    # (heads, nodes, dim) -> (nodes, heads · dim)
    return attend(q, k, k, over=graph, score=layer.score).transpose(0, 1).flatten(1) + layer.o_bias


def sorting(nodes: int, edges: int) -> Sides:
    """`Graph(…)` compared with the same six arrays by torch; ours also checks node numbers."""
    torch.manual_seed(0)
    edge_index = drawn(nodes, edges)
    return Sides(_arrays(lambda: tuple(Graph(edge_index, nodes).csr)), _arrays(lambda: _argsorted(edge_index, nodes)))


def _arrays(make: Callable[[], tuple[Tensor, ...]]) -> Side:
    made: list[Tensor] = []

    def run() -> Tensor:
        made.clear()
        made.extend(make())
        return made[0]

    return Side(run, lambda out: Results(torch.cat(made).long(), {}))


def _argsorted(edge_index: Tensor, nodes: int) -> tuple[Tensor, ...]:
    source, destination = edge_index
    edge = destination.argsort(stable=True)
    sorted_source = source[edge]
    place = sorted_source.argsort(stable=True)
    starts = [
        torch.cat((node.new_zeros(1), node.bincount(minlength=nodes).cumsum(0))) for node in (destination, source)
    ]
    return starts[0], sorted_source, edge, starts[1], place, destination[edge[place]]


def attention_and_its_tenth(edges: int) -> Sides:
    """The attention of GATv2 compared with itself on a tenth of the edges: 0.1 of the time, if the cost per edge is constant.

    The first hundredth of the nodes has the same in-edges in both graphs, and is compared. All other edges are random.
    """
    torch.manual_seed(0)
    nodes = edges // DEGREE
    few, common = nodes // 10, nodes // 100
    small = drawn(few, edges // 10)
    kept = small[:, small[1] < common]
    rest = drawn(nodes - common, edges - kept.shape[1])
    # destinations are the other nodes, sources are any
    rest = torch.stack((torch.randint(nodes, rest.shape[1:]), rest[1] + common))
    score = GATv2(HEADS, DIM)
    q, k = torch.randn(2, nodes, HEADS, DIM)

    def parts(edge_index: Tensor, size: int) -> tuple[Side, Forward]:
        graph, own_q, own_k = Graph(edge_index, size), q[:size].clone(), k[:size].clone()
        side = inference(
            lambda: _attention(own_q, own_k, graph, score),
            # (heads, nodes, dim)
            lambda out: out[:, :common],
        )
        return side, lambda: gather_sum(graph, own_k.flatten(1))

    ours, bound = parts(torch.cat((kept, rest), 1), nodes)
    tenth, _ = parts(small, few)
    return Sides(ours, tenth, bounds=(bound,) if here() == CPU else ())


def _attention(q: Tensor, k: Tensor, graph: Graph, score: GATv2) -> Tensor:
    """On (nodes, heads, dim), as after a projection; requires the kernel for this device."""
    k = k.transpose(0, 1)
    return attend(q.transpose(0, 1), k, k, over=graph, score=score, kernel=kernel_here())


def threads(workload: Workload, part: str) -> Sides:
    """The attention of GATv2, or the floor, with all threads compared with one."""
    edge_index, x = workload.make()
    graph = Graph(edge_index, len(x))
    q, k = torch.randn(2, len(x), workload.heads, workload.dim)
    score = GATv2(workload.heads, workload.dim)
    bound = lambda: gather_sum(graph, k.flatten(1))
    run = bound if part == "floor" else lambda: _attention(q, k, graph, score)
    return Sides(inference(run), inference(partial(_alone, run)), bounds=() if part == "floor" else (bound,))


def _alone(run: Forward) -> Tensor:
    """In one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return run()
    finally:
        torch.set_num_threads(before)


def _one_core() -> str | None:
    if here() != CPU:
        return cpu_only("it compares threads of the CPU")
    return no_kernels() or ("there is only one core, so threads cannot help" if cores() < 2 else None)


def _lacks(workload: Workload) -> str | None:
    return no_kernels() or workload.lacks()


def _cases() -> list[Case]:
    cases = []
    for kind in KINDS:
        for workload in WORKLOADS:
            name = f"{kind.score}-with-projections-{workload.name}"
            setup = partial(layer_and_its_functions, kind, workload)
            cases.append(Case(name, "nn.Linear + attend", setup, TOLERANCE, partial(_lacks, workload)))
    # integers: equal or not
    setup = partial(sorting, NODES, EDGES)
    cases.append(Case(f"sort-{NODES}x{EDGES}", "2 argsorts + 2 bincounts", setup, 0.5, no_kernels))
    for edges in SIZES:
        name = f"{GATV2.score}-attention-{edges}-{HEADS}x{DIM}"
        setup = partial(attention_and_its_tenth, edges)
        cases.append(Case(name, f"ours, {edges // 10} edges", setup, TOLERANCE, no_kernels))
    workload = random_graph(NODES, EDGES, 8, 16)
    for part in ("attention", "floor"):
        setup = partial(threads, workload, part)
        cases.append(Case(f"threads-{part}-{workload.name}", "one thread", setup, TOLERANCE, _one_core))
    return cases


CASES = tuple(_cases())
