"""The drop-ins against PyG's own layers, over constructor and call options."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pyg_pairs import (
    CHANNELS,
    CLOSE,
    EDGE_DIM,
    EDGES,
    HEADS,
    IN,
    IN_OTHER,
    KINDS,
    LOOPING,
    NODES,
    OTHERS,
    assert_same,
    cases,
    everything,
    features,
    inputs,
    pair,
    randn,
    some_edges,
)
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch_geometric import nn as pyg

import polyhead.kernels.edges_native
import polyhead.kernels.edges_torch
import polyhead.neighbourhood.graph
from polyhead.interop import pyg as interop


@pytest.mark.parametrize("kind, shape, options", cases("alike", "two", "more destinations", "one as two"))
def test_equals_pyg_in_values_and_gradients(kind: str, shape: str, options: dict) -> None:
    channels, x, edge_index = inputs(shape)
    if options["edge_dim"] and options.get("add_self_loops") and shape == "more destinations":
        pytest.skip("PyG cannot fill in the features of these loops")
    peer, ours = pair(kind, channels, **options)
    edge_attr = features(options["edge_dim"] is not None)
    for call in ({}, {"return_attention_weights": True}):
        expected = everything(peer, x, edge_index, edge_attr, **call)
        assert_same(everything(ours, x, edge_index, edge_attr, **call), expected)


@pytest.mark.parametrize("edge_dim", [None, EDGE_DIM])
@pytest.mark.parametrize("kind", KINDS)
def test_equals_pyg_in_single_precision(kind: str, edge_dim: int | None) -> None:
    channels, x, edge_index = inputs("two", torch.float32)
    peer, ours = pair(kind, channels, torch.float32, edge_dim=edge_dim)
    edge_attr = features(edge_dim is not None, dtype=torch.float32)
    for call in ({}, {"return_attention_weights": True}):
        expected = everything(peer, x, edge_index, edge_attr, **call)
        assert_same(everything(ours, x, edge_index, edge_attr, **call), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("edge_dim", [None, EDGE_DIM])
@pytest.mark.parametrize("kind", KINDS)
def test_half_precision(kind: str, edge_dim: int | None, dtype: torch.dtype) -> None:
    channels, x, edge_index = inputs("one", torch.float32)
    peer, ours = pair(kind, channels, torch.float32, edge_dim=edge_dim)
    edge_attr = features(edge_dim is not None, dtype=torch.float32)
    exact, (_, exact_alpha) = peer(x, edge_index, edge_attr, return_attention_weights=True)
    given = (x.to(dtype), edge_index, None if edge_attr is None else edge_attr.to(dtype))
    half = ours.to(dtype)(*given)
    again, (_, alpha) = ours(*given, return_attention_weights=True)
    assert half.dtype == again.dtype == alpha.dtype == dtype
    for output in (half, again):
        torch.testing.assert_close(output.float(), exact, atol=0.2, rtol=5e-2)
    torch.testing.assert_close(alpha.float(), exact_alpha, atol=5e-2, rtol=5e-2)


@pytest.mark.parametrize("edge_dim", [None, EDGE_DIM])
@pytest.mark.parametrize("kind", KINDS)
def test_autocast(kind: str, edge_dim: int | None) -> None:
    channels, x, edge_index = inputs("one", torch.float32)
    peer, ours = pair(kind, channels, torch.float32, edge_dim=edge_dim)
    edge_attr = features(edge_dim is not None, dtype=torch.float32)
    exact = everything(peer, x, edge_index, edge_attr)
    with torch.autocast("cpu", torch.bfloat16):
        seen = everything(ours, x, edge_index, edge_attr)
    for name, expected in exact.items():
        if expected is not None:
            torch.testing.assert_close(seen[name].float(), expected, atol=0.5, rtol=0.1, msg=name)


@pytest.mark.parametrize("edge_dim", [None, EDGE_DIM])
@pytest.mark.parametrize("loops", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_flow_from_target_to_source(kind: str, loops: bool, edge_dim: int | None) -> None:
    options = {"add_self_loops": loops} if kind in LOOPING else {}
    _, x, edge_index = inputs("one")
    peer, ours = pair(kind, edge_dim=edge_dim, flow="target_to_source", **options)
    edge_attr = features(edge_dim is not None)
    for call in ({}, {"return_attention_weights": True}):
        expected = everything(peer, x, edge_index, edge_attr, **call)
        assert_same(everything(ours, x, edge_index, edge_attr, **call), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_flow_is_the_order_of_the_rows(kind: str) -> None:
    channels, x, edge_index = inputs("two")
    _, ours = pair(kind, channels)
    output, (where, alpha) = ours(x, edge_index, return_attention_weights=True)
    ours.flow = "target_to_source"
    turned, (back, same) = ours(x, edge_index.flip(0), return_attention_weights=True)
    assert torch.equal(turned, output) and torch.equal(back, where.flip(0)) and torch.equal(same, alpha)


@pytest.mark.parametrize("aggr", ["sum", "mean", "max"])
@pytest.mark.parametrize("edge_dim", [None, EDGE_DIM])
@pytest.mark.parametrize("kind", KINDS)
def test_other_aggregations_go_by_messages(kind: str, edge_dim: int | None, aggr: str) -> None:
    _, x, edge_index = inputs("one")
    peer, ours = pair(kind, edge_dim=edge_dim, aggr=aggr)
    edge_attr = features(edge_dim is not None)
    assert_same(everything(ours, x, edge_index, edge_attr), everything(peer, x, edge_index, edge_attr))


FILLS = {
    "number": 0.5, "whole": 3, "scalar": torch.tensor(0.5), "vector": torch.tensor([0.5, -2.0]),
    "row": torch.tensor([[0.5, -2.0]]), "nodes": torch.randn(NODES, EDGE_DIM, generator=torch.Generator().manual_seed(0)),
    **{name: name for name in ("add", "sum", "mean", "min", "max", "mul")},
}  # fmt: skip


@pytest.mark.parametrize("flow", ["source_to_target", "target_to_source"])
@pytest.mark.parametrize("fill", FILLS.values(), ids=FILLS)
@pytest.mark.parametrize("kind", LOOPING)
def test_features_of_self_loops(kind: str, fill: Any, flow: str) -> None:
    _, x, edge_index = inputs("one")
    peer, ours = pair(kind, edge_dim=EDGE_DIM, fill_value=fill, flow=flow)
    edge_attr = features(True)
    assert_same(everything(ours, x, edge_index, edge_attr), everything(peer, x, edge_index, edge_attr))


@pytest.mark.parametrize("fill", ["mean", "max", 0.5])
@pytest.mark.parametrize("kind", LOOPING)
def test_one_feature_an_edge_may_be_a_vector(kind: str, fill: Any) -> None:
    _, x, edge_index = inputs("one")
    peer, ours = pair(kind, edge_dim=1, fill_value=fill)
    edge_attr = randn(EDGES)
    assert_same(everything(ours, x, edge_index, edge_attr), everything(peer, x, edge_index, edge_attr))


@pytest.mark.parametrize("flow", ["source_to_target", "target_to_source"])
@pytest.mark.parametrize("shape", ["two", "more destinations"])
def test_features_of_self_loops_between_two_sets_of_nodes(shape: str, flow: str) -> None:
    """PyG sums over all destinations into as many places as there are sources, and there may be fewer."""
    channels, x, edge_index = inputs(shape)
    edge_index = edge_index.flip(0) if flow == "target_to_source" else edge_index
    _, ours = pair("GATv2Conv", channels, edge_dim=EDGE_DIM, flow=flow)
    edge_attr = features(True)
    _, (where, alpha) = ours(x, edge_index, edge_attr, return_attention_weights=True)
    apart = edge_index[0] != edge_index[1]
    assert torch.equal(where, torch.cat((edge_index[:, apart], torch.arange(OTHERS).expand(2, -1)), 1))
    mean = torch.stack([edge_attr[apart & (edge_index[1] == node)].mean(0).nan_to_num() for node in range(OTHERS)])
    ours.add_self_loops = False
    _, (_, expected) = ours(x, where, torch.cat((edge_attr[apart], mean)), return_attention_weights=True)
    torch.testing.assert_close(alpha, expected, **CLOSE[torch.float64])


@pytest.mark.parametrize("wanted", [None, False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_returned(kind: str, wanted: bool | None) -> None:
    """TransformerConv takes False for a wish, too."""
    _, x, edge_index = inputs("one")
    peer, ours = (layer(x, edge_index, return_attention_weights=wanted) for layer in pair(kind))
    assert type(ours) is type(peer)


@pytest.mark.parametrize("edge_dim", [None, EDGE_DIM])
@pytest.mark.parametrize("kind", KINDS)
def test_asking_for_weights_does_not_change_the_output(kind: str, edge_dim: int | None) -> None:
    channels, x, edge_index = inputs("one", torch.float32)
    for layer in pair(kind, channels, torch.float32, edge_dim=edge_dim, dropout=0.3):
        edge_attr, outputs = features(edge_dim is not None, dtype=torch.float32), []
        for wanted in (None, True):
            torch.manual_seed(4)
            outputs.append(layer(x, edge_index, edge_attr, return_attention_weights=wanted))
        assert torch.equal(outputs[0], outputs[1][0])


@pytest.mark.parametrize("loops", [False, True])
@pytest.mark.parametrize("size", [None, (NODES, NODES), (NODES, OTHERS)])
def test_sources_alone(size: tuple[int, int] | None, loops: bool) -> None:
    peer, ours = pair("GATConv", (IN, IN_OTHER), add_self_loops=loops, residual=True)
    x, edge_index = (randn(NODES, IN), None), some_edges(NODES, size[1] if size else NODES)
    for call in ({}, {"return_attention_weights": True}):
        expected = everything(peer, x, edge_index, size=size, **call)
        assert_same(everything(ours, x, edge_index, size=size, **call), expected)


@pytest.mark.parametrize("slope", [0.0, 0.01, 1.5])
@pytest.mark.parametrize("kind", LOOPING)
def test_negative_slope_and_one_head(kind: str, slope: float) -> None:
    _, x, edge_index = inputs("one")
    peer, ours = pair(kind, heads=1, negative_slope=slope)
    assert_same(everything(ours, x, edge_index), everything(peer, x, edge_index))


@pytest.mark.parametrize("loops", [False, True])
@pytest.mark.parametrize("nodes, edges", [(0, 0), (1, 0), (7, 0), (1, 1)])
@pytest.mark.parametrize("kind", KINDS)
def test_small_graphs(kind: str, nodes: int, edges: int, loops: bool) -> None:
    options = {"add_self_loops": loops} if kind in LOOPING else {}
    peer, ours = pair(kind, edge_dim=EDGE_DIM, **options)
    x, edge_index, edge_attr = randn(nodes, IN), torch.zeros(2, edges, dtype=torch.long), features(True, edges)
    for call in ({}, {"return_attention_weights": True}):
        expected = everything(peer, x, edge_index, edge_attr, **call)
        assert_same(everything(ours, x, edge_index, edge_attr, **call), expected)


def test_a_node_without_in_edges_gets_the_bias_as_in_pyg() -> None:
    _, x, edge_index = inputs("one")
    _, ours = pair("GATConv", add_self_loops=False)
    assert torch.equal(ours(x, edge_index)[0], ours.bias)


# dropout


@pytest.mark.parametrize("edge_dim", [None, EDGE_DIM])
@pytest.mark.parametrize("kind", LOOPING)
def test_returned_weights_are_those_that_made_the_output(kind: str, edge_dim: int | None) -> None:
    _, x, edge_index = inputs("one")
    _, ours = pair(kind, dropout=0.4, edge_dim=edge_dim, bias=False)
    edge_attr = features(edge_dim is not None)
    torch.manual_seed(3)
    output, ((source, destination), alpha) = ours(x, edge_index, edge_attr, return_attention_weights=True)
    values = (ours.lin if kind == "GATConv" else ours.lin_l)(x).unflatten(-1, (HEADS, CHANNELS))
    expected = torch.zeros_like(values).index_add(0, destination, alpha[..., None] * values[source])
    torch.testing.assert_close(output, expected.flatten(1), **CLOSE[torch.float64])
    torch.manual_seed(3)
    torch.testing.assert_close(ours(x, edge_index, edge_attr), output, **CLOSE[torch.float64])
    whole = ours.eval()(x, edge_index, edge_attr, return_attention_weights=True)[1][1]
    assert 0.2 < (alpha == 0).double().mean() < 0.6
    torch.testing.assert_close(alpha[alpha > 0], whole[alpha > 0] / 0.6, **CLOSE[torch.float64])


@pytest.mark.parametrize("edge_dim", [None, EDGE_DIM])
def test_transformer_conv_returns_the_weights_before_dropout(edge_dim: int | None) -> None:
    _, x, edge_index = inputs("one")
    peer, ours = pair("TransformerConv", dropout=0.4, edge_dim=edge_dim)
    edge_attr = features(edge_dim is not None)
    torch.manual_seed(3)
    output, (_, alpha) = ours(x, edge_index, edge_attr, return_attention_weights=True)
    torch.testing.assert_close(
        alpha, peer(x, edge_index, edge_attr, return_attention_weights=True)[1][1], **CLOSE[torch.float64]
    )
    torch.manual_seed(3)
    torch.testing.assert_close(ours(x, edge_index, edge_attr), output, **CLOSE[torch.float64])
    assert not torch.allclose(ours.eval()(x, edge_index, edge_attr), output)


@pytest.mark.parametrize("edge_dim", [None, EDGE_DIM])
@pytest.mark.parametrize("kind", KINDS)
def test_dropout_is_right_on_average(kind: str, edge_dim: int | None) -> None:
    _, x, edge_index = inputs("one")
    _, ours = pair(kind, dropout=0.3, edge_dim=edge_dim)
    edge_attr = features(edge_dim is not None)
    with torch.no_grad():
        draws = torch.stack([ours(x, edge_index, edge_attr) for _ in range(400)])
        exact = ours.eval()(x, edge_index, edge_attr)
    error = draws.std(0) / len(draws) ** 0.5
    assert (draws.std(0) > 0).any()
    assert ((draws.mean(0) - exact).abs() <= 5 * error + 1e-9).all()


# what is made on the way


class Largest(TorchDispatchMode):
    """The most numbers in one tensor that was made."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = op(*args, **(kwargs or {}))
        for made in tree_leaves(result):
            if isinstance(made, Tensor):
                self.numbers = max(self.numbers, made.untyped_storage().nbytes() // made.element_size())
        return result


@pytest.mark.parametrize("call", [{}, {"return_attention_weights": True}], ids=["", "weights"])
@pytest.mark.parametrize("edge_dim", [None, EDGE_DIM])
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_of_edges_x_heads_x_channels(
    kind: str, edge_dim: int | None, call: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    # what a C++ kernel makes would not be seen
    monkeypatch.setattr(polyhead.kernels.edges_native, "native", None)
    monkeypatch.setattr(polyhead.kernels.edges_torch, "BLOCK", 1 << 14)
    nodes, edges, heads, channels = 50, 3000, 4, 8
    peer, ours = (getattr(of, kind)(IN, channels, heads, edge_dim=edge_dim) for of in (pyg, interop))
    x, edge_index = torch.randn(nodes, IN, requires_grad=True), torch.randint(nodes, (2, edges))
    edge_attr = None if edge_dim is None else torch.randn(edges, edge_dim, requires_grad=True)
    largest = {}
    for layer in (peer, ours):
        with Largest() as seen:
            given = layer(x, edge_index, edge_attr, **call)
            output, alpha = (given[0], given[1][1]) if call else (given, torch.zeros(()))
            (output.square().sum() + alpha.square().sum()).backward()
        largest[layer] = seen.numbers
    assert largest[peer] >= 0.9 * edges * heads * channels
    assert largest[ours] <= 2 * edges * heads


@pytest.mark.parametrize("edge_dim", [None, EDGE_DIM])
@pytest.mark.parametrize("kind", KINDS)
def test_compiles_to_one_graph(kind: str, edge_dim: int | None) -> None:
    _, x, edge_index = inputs("one")
    _, ours = pair(kind, edge_dim=edge_dim)
    edge_attr = features(edge_dim is not None)
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    expected = everything(ours, x, edge_index, edge_attr)
    assert_same(everything(compiled, x, edge_index, edge_attr), expected)


# the compiler looks at what comes before a break
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf Tensor:UserWarning")
@pytest.mark.parametrize(
    "options, call", [({"aggr": "mean"}, {}), ({}, {"return_attention_weights": True})], ids=["mean", "weights"]
)
def test_compiles_where_self_loops_have_to_be_gone(options: dict, call: dict) -> None:
    """How many there are is not known to the compiler: there is more than one graph."""
    _, x, edge_index = inputs("one")
    _, ours = pair("GATConv", **options)
    compiled = torch.compile(ours, backend="eager")
    assert_same(everything(compiled, x, edge_index, **call), everything(ours, x, edge_index, **call))


@pytest.mark.parametrize("kind", KINDS)
def test_batches_by_vmap_and_gradients_by_torch_func(kind: str) -> None:
    _, ours = pair(kind, edge_dim=EDGE_DIM)
    x, edge_index, edge_attr = torch.randn(3, NODES, IN, dtype=torch.float64), some_edges(), features(True).detach()
    together = torch.func.vmap(lambda signal: ours(signal, edge_index, edge_attr))(x)
    torch.testing.assert_close(together, torch.stack([ours(row, edge_index, edge_attr) for row in x]))
    parameters = {name: p.detach() for name, p in ours.named_parameters()}
    loss = lambda p: torch.func.functional_call(ours, p, (x[0], edge_index, edge_attr)).square().sum()
    gradients = torch.func.grad(loss)(parameters)
    expected = torch.autograd.grad(ours(x[0], edge_index, edge_attr).square().sum(), list(ours.parameters()))
    for name, gradient in zip(parameters, expected, strict=True):
        torch.testing.assert_close(gradients[name], gradient, **CLOSE[torch.float64])


# wrong input

X, INDEX, ATTR = torch.zeros(NODES, IN), torch.zeros(2, EDGES, dtype=torch.long), torch.zeros(EDGES, EDGE_DIM)
WRONG_CALLS: dict[str, tuple[dict, tuple]] = {
    "edge_index: it is torch.float32; it must hold the numbers of nodes: edge_index.long()": ({}, (X, INDEX.float())),
    "edge_index: its shape is (41, 2); it must be (2, edges): pass edge_index.T": ({}, (X, INDEX.T)),
    "edge_index: its shape is (41,); it must be (2, edges): sources in the first row": ({}, (X, INDEX[0])),
    "edge_index: it is builtins.list; it must be a tensor (2, edges) or a torch sparse matrix": ({}, (X, [[0], [1]])),
    "edge_index: edge 0 goes from 13 to 14, but nodes are 0 to 12": ({}, (X, torch.tensor([[13], [14]]))),
    "edge_index: edge 0 goes from -1 to 1, but nodes are 0 to 12": ({}, (X, torch.tensor([[-1], [1]]))),
    "x: its shape is (13, 4); it must be (nodes, 5)": ({}, (X[:, 1:], INDEX)),
    "x: its shape is (1, 13, 5); it must be (nodes, 5)": ({}, (X[None], INDEX)),
    "x[1]: its shape is (13, 4); it must be (nodes, 5)": ({}, ((X, X[:, 1:]), INDEX)),
    "x[0]: it is None; ": ({}, ((None, X), INDEX)),
    "edge_attr: it is given, but edge_dim is None; pass edge_dim to ": ({}, (X, INDEX, ATTR)),
    "edge_attr: it is None; it must be (edges, 2), for edge_dim is 2": ({"edge_dim": 2}, (X, INDEX)),
    "edge_attr: torch.float32 of shape (40, 2); it must be floating-point numbers (edges, edge_dim) = (41, 2)": (
        {"edge_dim": 2}, (X, INDEX, ATTR[1:]),
    ),
    "edge_attr: torch.float32 of shape (41, 2); it must be floating-point numbers (edges, edge_dim) = (41, 3)": (
        {"edge_dim": 3}, (X, INDEX, ATTR),
    ),
    "edge_attr: torch.int64 of shape (41, 2)": ({"edge_dim": 2}, (X, INDEX, ATTR.long())),
    "flow: it is 'target_to_source', but edge_index is a sparse matrix; pass its transpose": (
        {"flow": "target_to_source"}, (X, torch.eye(NODES).to_sparse()),
    ),
}  # fmt: skip


@pytest.mark.parametrize("message", WRONG_CALLS)
@pytest.mark.parametrize("kind", KINDS)
def test_wrong_calls_are_named(kind: str, message: str) -> None:
    options, call = WRONG_CALLS[message]
    ours = getattr(interop, kind)(IN, CHANNELS, **options)
    with pytest.raises(ValueError) as error:
        ours(*call)
    assert message in str(error.value)


@pytest.mark.filterwarnings("ignore:Sparse BSR tensor support is in beta:UserWarning")
def test_other_sparse_layouts_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"edge_index: its layout is torch.sparse_bsr; it must be sparse_coo, sparse_csr"
    ):
        interop.GATConv(IN, CHANNELS)(X, torch.eye(4).to_sparse_bsr((2, 2)))


@pytest.mark.parametrize("kind", ["GATv2Conv", "TransformerConv"])
def test_destinations_must_have_features(kind: str) -> None:
    with pytest.raises(ValueError, match=rf"x\[1\]: it is None; {kind} needs features of all nodes"):
        getattr(interop, kind)(IN, CHANNELS)((X, None), INDEX)
    with pytest.raises(ValueError, match=r"size: it is \(13, 7\), but x has 13 sources and 13 destinations"):
        interop.GATConv(IN, CHANNELS)(X, INDEX, size=(13, 7))


WRONG_OPTIONS: dict[str, dict] = {
    "heads must be an integer in [1, 1048576], got 0": {"heads": 0},
    "out_channels must be an integer in [1, 2147483647], got 0": {"out_channels": 0},
    "edge_dim must be an integer in [1, 2147483647], got 1.5": {"edge_dim": 1.5},
    "dropout must be a number in [0, 1), got 1.0": {"dropout": 1.0},
    "in_channels must be an integer, or (sources', destinations')": {"in_channels": (5, 4, 3)},
    "in_channels must be an integer, or (sources', destinations'), and -1 for as many as the first input has, got 0": {
        "in_channels": 0
    },
}


@pytest.mark.parametrize("message", WRONG_OPTIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_wrong_options_are_named(kind: str, message: str) -> None:
    with pytest.raises(ValueError) as error:
        getattr(interop, kind)(**{"in_channels": IN, "out_channels": CHANNELS, **WRONG_OPTIONS[message]})
    assert message in str(error.value)


@pytest.mark.parametrize("kind", LOOPING)
def test_an_unknown_fill_is_named(kind: str) -> None:
    message = "fill_value: it is 'median'; it must be a number, a tensor or one of add, sum, mean, min, max, mul"
    with pytest.raises(ValueError, match=message):
        getattr(interop, kind)(IN, CHANNELS, fill_value="median")
