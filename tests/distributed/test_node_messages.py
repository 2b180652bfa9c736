"""What the parts of a graph send: the rows that edges need, while other work is done, with gradients in fp32; and disagreements."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from node_cases import Case, make_graph, make_layer

from polyhead import Graph, MultiHeadAttention, attend
from polyhead.distributed import partition, row_exchange


def count_bytes(case: Case) -> tuple[list[int], list[int], int, int]:
    """Bytes that this rank sends in forward and in backward, its rows for other ranks, and the rows that it reads."""
    graph, layer = make_graph(case.graph, case.edge_dim, case.weights, case.dtype), make_layer(case)
    part = partition(graph, dist.get_world_size())[dist.get_rank()].on()
    x = torch.randn(*case.batch, len(part.nodes), case.d_model, dtype=case.dtype, requires_grad=True)
    layer(x, over=part)
    send, sent = dist.all_to_all_single, []

    def count(output, input, *args, **options):
        sent.append(input.numel() * input.element_size())
        return send(output, input, *args, **options)

    dist.all_to_all_single = count
    try:
        y, _ = layer(x, over=part)
        forward = list(sent)
        y.sum().backward()
    finally:
        dist.all_to_all_single = send
    return forward, sent[len(forward) :], len(part.send), len(part.halo)


@pytest.mark.parametrize(
    ("case", "width"),
    [
        (Case("gatv2"), 15),  # k, 3 x 5, which is v too
        (Case("gat", dtype=torch.float32), 15),
        (Case("gatv2", batch=(2,)), 30),
        (Case("dot"), 30),  # k and v, as wide as the input: the receiver would have to project
        (Case("dot", d_model=29), 29),  # the input
        (Case("gatv2", d_model=7), 7),
        (Case("dot", heads=(4, 2), d_model=21), 20),  # grouped heads: 2 x 5 for k and v each
    ],
    ids=lambda value: f"{value.score}-{value.d_model}-{value.batch}" if isinstance(value, Case) else str(value),
)
def test_bytes_are_those_of_the_neighbourhood(case, width, four_ranks):
    graph = make_graph(case.graph, None, False, case.dtype)
    owner, (source, destination) = partition(graph, 4).owner, graph.edge_index
    # by definition: the distinct nodes elsewhere from which an edge comes to a rank
    pairs = {(int(owner[d]), int(s)) for s, d in zip(source, destination, strict=True) if owner[s] != owner[d]}
    size = case.dtype.itemsize
    for rank, (forward, backward, sent, halo) in enumerate(four_ranks.run(count_bytes, case)):
        assert halo == sum(reader == rank for reader, _ in pairs)
        assert sent == sum(owner[node] == rank for _, node in pairs)
        assert forward == [sent * width * size] and backward == [halo * width * size]


def record_events(case: Case) -> tuple[list[str], list[str]]:
    """What a layer does in forward and in backward, in order."""
    layer = make_layer(case)
    part = partition(make_graph(case.graph, None, False, case.dtype), dist.get_world_size())[dist.get_rank()].on()
    x = torch.randn(len(part.nodes), case.d_model, dtype=case.dtype, requires_grad=True)
    layer(x, over=part)
    events: list[str] = []
    for name in ("q_proj", "k_proj"):
        module = getattr(layer, name)
        module.register_forward_hook(lambda *_, name=name: events.append(name))
        module.weight.register_hook(lambda _, name=name: events.append(f"gradient of {name}"))
    send, wait = dist.all_to_all_single, row_exchange.PendingRows.wait
    dist.all_to_all_single = lambda *args, **options: (events.append("send"), send(*args, **options))[1]
    row_exchange.PendingRows.wait = lambda pending: (events.append("wait"), wait(pending))[1]
    try:
        y, _ = layer(x, over=part)
        forward = list(events)
        y.sum().backward()
    finally:
        dist.all_to_all_single, row_exchange.PendingRows.wait = send, wait
    return forward, events[len(forward) :]


def test_queries_are_projected_while_rows_are_under_way(two_ranks):
    for forward, backward in two_ranks.run(record_events, Case("gatv2")):
        assert forward == ["k_proj", "send", "q_proj", "wait"]
        assert backward == ["send", "gradient of q_proj", "wait", "gradient of k_proj"]
    for forward, backward in two_ranks.run(record_events, Case("dot", d_model=7)):
        assert forward == ["send", "q_proj", "wait", "k_proj"]
        assert [event for event in backward if "k_proj" not in event] == ["send", "gradient of q_proj", "wait"]


def hub_gradient(dtype: torch.dtype) -> float:
    """The gradient of a row that many ranks read, if each of them adds 1/256 to 1."""
    ranks = dist.get_world_size()
    nodes = ranks * 64
    # node 0 is read by every node, itself included
    graph = Graph(torch.stack((torch.zeros(nodes, dtype=torch.long), torch.arange(nodes))), nodes)
    part = partition(graph, ranks, method="contiguous")[dist.get_rank()].on()
    q, k = torch.zeros(1, 64, 4, dtype=dtype), torch.zeros(1, 64, 4, dtype=dtype)
    v = torch.ones(1, 64, 4, dtype=dtype, requires_grad=True)
    towards = 1.0 if dist.get_rank() == 0 else 1 / 256
    (attend(q, k, v, over=part)[:, :1] * towards).sum().backward()
    return float(v.grad[0, 0, 0])


def test_gradients_are_summed_in_fp32(four_ranks):
    # in bf16, 1 + 1/256 is 1
    for dtype in (torch.bfloat16, torch.float32):
        expected = float(torch.tensor(1 + 3 / 256).to(dtype))
        assert four_ranks.run(hub_gradient, dtype) == [expected, 0.0, 0.0, 0.0]


def disagreement(kind: str) -> str:
    part = partition(make_graph("random", None, False, torch.float64), dist.get_world_size())[dist.get_rank()].on()
    odd = dist.get_rank() == 1
    dtype = torch.float64 if kind == "dtype" and odd else torch.float32
    layer = MultiHeadAttention(8, 2, head_dim=3 if kind == "width" and odd else 4, score="gatv2", d_out=8).to(dtype)
    x = torch.randn(len(part.nodes), 8, dtype=dtype)
    with pytest.raises(ValueError) as error, torch.set_grad_enabled(not (kind == "grad" and odd)):
        layer(x[1:] if kind == "rows" else x, over=part)
    return str(error.value)


def test_layers_that_differ_are_refused_on_every_rank(two_ranks):
    for kind, expected in (
        ("dtype", "dtype must be the same on every rank, got torch.float32 on rank 0, torch.float64 on rank 1"),
        (
            "width",
            "the shape of rows must be the same on every rank, got (2, nodes, 4) on rank 0, (2, nodes, 3) on rank 1",
        ),
        ("grad", "requires_grad must be the same on every rank, got True on rank 0, False on rank 1"),
    ):
        first, second = two_ranks.run(disagreement, kind)
        assert first == second and expected in first
    assert all("own nodes of part" in error for error in two_ranks.run(disagreement, "rows"))
