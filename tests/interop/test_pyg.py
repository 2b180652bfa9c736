"""The drop-ins against PyG's layers, for all constructor and call options."""

from __future__ import annotations

from typing import Any

import pyg_pairs as pairs
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch_geometric import nn as pyg

import polyhead.kernels.edges_native
import polyhead.kernels.edges_torch
import polyhead.neighbourhood.graph
from polyhead.interop import pyg as interop


@pytest.mark.parametrize("kind, shape, options", pairs.cases("same features", "two", "more destinations", "one as two"))
def test_equals_pyg_in_values_and_gradients(kind: str, shape: str, options: dict) -> None:
    channels, x, edge_index = pairs.inputs(shape)
    if options["edge_dim"] and options.get("add_self_loops") and shape == "more destinations":
        pytest.skip("PyG cannot fill in the features of these loops")
    peer, ours = pairs.pair(kind, channels, **options)
    edge_attr = pairs.features(options["edge_dim"] is not None)
    for call in ({}, {"return_attention_weights": True}):
        expected = pairs.everything(peer, x, edge_index, edge_attr, **call)
        pairs.assert_same(pairs.everything(ours, x, edge_index, edge_attr, **call), expected)


@pytest.mark.parametrize("edge_dim", [None, pairs.EDGE_DIM])
@pytest.mark.parametrize("kind", pairs.KINDS)
def test_equals_pyg_in_single_precision(kind: str, edge_dim: int | None) -> None:
    channels, x, edge_index = pairs.inputs("two", torch.float32)
    peer, ours = pairs.pair(kind, channels, torch.float32, edge_dim=edge_dim)
    edge_attr = pairs.features(edge_dim is not None, dtype=torch.float32)
    for call in ({}, {"return_attention_weights": True}):
        expected = pairs.everything(peer, x, edge_index, edge_attr, **call)
        pairs.assert_same(pairs.everything(ours, x, edge_index, edge_attr, **call), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("edge_dim", [None, pairs.EDGE_DIM])
@pytest.mark.parametrize("kind", pairs.KINDS)
def test_half_precision(kind: str, edge_dim: int | None, dtype: torch.dtype) -> None:
    channels, x, edge_index = pairs.inputs("one", torch.float32)
    peer, ours = pairs.pair(kind, channels, torch.float32, edge_dim=edge_dim)
    edge_attr = pairs.features(edge_dim is not None, dtype=torch.float32)
    exact, (_, exact_alpha) = peer(x, edge_index, edge_attr, return_attention_weights=True)
    given = (x.to(dtype), edge_index, None if edge_attr is None else edge_attr.to(dtype))
    half = ours.to(dtype)(*given)
    again, (_, alpha) = ours(*given, return_attention_weights=True)
    assert half.dtype == again.dtype == alpha.dtype == dtype
    for output in (half, again):
        torch.testing.assert_close(output.float(), exact, atol=0.2, rtol=5e-2)
    torch.testing.assert_close(alpha.float(), exact_alpha, atol=5e-2, rtol=5e-2)


@pytest.mark.parametrize("edge_dim", [None, pairs.EDGE_DIM])
@pytest.mark.parametrize("kind", pairs.KINDS)
def test_autocast(kind: str, edge_dim: int | None) -> None:
    channels, x, edge_index = pairs.inputs("one", torch.float32)
    peer, ours = pairs.pair(kind, channels, torch.float32, edge_dim=edge_dim)
    edge_attr = pairs.features(edge_dim is not None, dtype=torch.float32)
    exact = pairs.everything(peer, x, edge_index, edge_attr)
    with torch.autocast("cpu", torch.bfloat16):
        seen = pairs.everything(ours, x, edge_index, edge_attr)
    for name, expected in exact.items():
        if expected is not None:
            torch.testing.assert_close(seen[name].float(), expected, atol=0.5, rtol=0.1, msg=name)


@pytest.mark.parametrize("edge_dim", [None, pairs.EDGE_DIM])
@pytest.mark.parametrize("loops", [False, True])
@pytest.mark.parametrize("kind", pairs.KINDS)
def test_flow_from_target_to_source(kind: str, loops: bool, edge_dim: int | None) -> None:
    options = {"add_self_loops": loops} if kind in pairs.LOOPING else {}
    _, x, edge_index = pairs.inputs("one")
    peer, ours = pairs.pair(kind, edge_dim=edge_dim, flow="target_to_source", **options)
    edge_attr = pairs.features(edge_dim is not None)
    for call in ({}, {"return_attention_weights": True}):
        expected = pairs.everything(peer, x, edge_index, edge_attr, **call)
        pairs.assert_same(pairs.everything(ours, x, edge_index, edge_attr, **call), expected)


@pytest.mark.parametrize("kind", pairs.KINDS)
def test_target_to_source_swaps_the_rows(kind: str) -> None:
    channels, x, edge_index = pairs.inputs("two")
    _, ours = pairs.pair(kind, channels)
    output, (where, alpha) = ours(x, edge_index, return_attention_weights=True)
    ours.flow = "target_to_source"
    reverse, (back, same) = ours(x, edge_index.flip(0), return_attention_weights=True)
    assert torch.equal(reverse, output) and torch.equal(back, where.flip(0)) and torch.equal(same, alpha)


@pytest.mark.parametrize("aggr", ["sum", "mean", "max"])
@pytest.mark.parametrize("edge_dim", [None, pairs.EDGE_DIM])
@pytest.mark.parametrize("kind", pairs.KINDS)
def test_other_aggregations(kind: str, edge_dim: int | None, aggr: str) -> None:
    _, x, edge_index = pairs.inputs("one")
    peer, ours = pairs.pair(kind, edge_dim=edge_dim, aggr=aggr)
    edge_attr = pairs.features(edge_dim is not None)
    pairs.assert_same(
        pairs.everything(ours, x, edge_index, edge_attr), pairs.everything(peer, x, edge_index, edge_attr)
    )


FILLS = {
    "float": 0.5, "int": 3, "scalar": torch.tensor(0.5), "vector": torch.tensor([0.5, -2.0]),
    "row": torch.tensor([[0.5, -2.0]]), "nodes": torch.randn(pairs.NODES, pairs.EDGE_DIM, generator=torch.Generator().manual_seed(0)),
    **{name: name for name in ("add", "sum", "mean", "min", "max", "mul")},
}  # fmt: skip


@pytest.mark.parametrize("flow", ["source_to_target", "target_to_source"])
@pytest.mark.parametrize("fill", FILLS.values(), ids=FILLS)
@pytest.mark.parametrize("kind", pairs.LOOPING)
def test_features_of_self_loops(kind: str, fill: Any, flow: str) -> None:
    _, x, edge_index = pairs.inputs("one")
    peer, ours = pairs.pair(kind, edge_dim=pairs.EDGE_DIM, fill_value=fill, flow=flow)
    edge_attr = pairs.features(True)
    pairs.assert_same(
        pairs.everything(ours, x, edge_index, edge_attr), pairs.everything(peer, x, edge_index, edge_attr)
    )


@pytest.mark.parametrize("fill", ["mean", "max", 0.5])
@pytest.mark.parametrize("kind", pairs.LOOPING)
def test_one_feature_per_edge_can_be_a_vector(kind: str, fill: Any) -> None:
    _, x, edge_index = pairs.inputs("one")
    peer, ours = pairs.pair(kind, edge_dim=1, fill_value=fill)
    edge_attr = pairs.randn(pairs.EDGES)
    pairs.assert_same(
        pairs.everything(ours, x, edge_index, edge_attr), pairs.everything(peer, x, edge_index, edge_attr)
    )


@pytest.mark.parametrize("flow", ["source_to_target", "target_to_source"])
@pytest.mark.parametrize("shape", ["two", "more destinations"])
def test_features_of_self_loops_between_two_sets_of_nodes(shape: str, flow: str) -> None:
    """PyG scatters from all destinations into one row per source, which may be too few."""
    channels, x, edge_index = pairs.inputs(shape)
    edge_index = edge_index.flip(0) if flow == "target_to_source" else edge_index
    _, ours = pairs.pair("GATv2Conv", channels, edge_dim=pairs.EDGE_DIM, flow=flow)
    edge_attr = pairs.features(True)
    _, (where, alpha) = ours(x, edge_index, edge_attr, return_attention_weights=True)
    not_loops = edge_index[0] != edge_index[1]
    assert torch.equal(where, torch.cat((edge_index[:, not_loops], torch.arange(pairs.OTHERS).expand(2, -1)), 1))
    mean = torch.stack(
        [edge_attr[not_loops & (edge_index[1] == node)].mean(0).nan_to_num() for node in range(pairs.OTHERS)]
    )
    ours.add_self_loops = False
    _, (_, expected) = ours(x, where, torch.cat((edge_attr[not_loops], mean)), return_attention_weights=True)
    torch.testing.assert_close(alpha, expected, **pairs.CLOSE[torch.float64])


@pytest.mark.parametrize("requested", [None, False, True])
@pytest.mark.parametrize("kind", pairs.KINDS)
def test_return_type_equals_pyg(kind: str, requested: bool | None) -> None:
    """TransformerConv returns the weights for False, too."""
    _, x, edge_index = pairs.inputs("one")
    peer, ours = (layer(x, edge_index, return_attention_weights=requested) for layer in pairs.pair(kind))
    assert type(ours) is type(peer)


@pytest.mark.parametrize("edge_dim", [None, pairs.EDGE_DIM])
@pytest.mark.parametrize("kind", pairs.KINDS)
def test_returning_weights_does_not_change_the_output(kind: str, edge_dim: int | None) -> None:
    channels, x, edge_index = pairs.inputs("one", torch.float32)
    for layer in pairs.pair(kind, channels, torch.float32, edge_dim=edge_dim, dropout=0.3):
        edge_attr, outputs = pairs.features(edge_dim is not None, dtype=torch.float32), []
        for requested in (None, True):
            torch.manual_seed(4)
            outputs.append(layer(x, edge_index, edge_attr, return_attention_weights=requested))
        assert torch.equal(outputs[0], outputs[1][0])


@pytest.mark.parametrize("loops", [False, True])
@pytest.mark.parametrize("size", [None, (pairs.NODES, pairs.NODES), (pairs.NODES, pairs.OTHERS)])
def test_destinations_without_features(size: tuple[int, int] | None, loops: bool) -> None:
    peer, ours = pairs.pair("GATConv", (pairs.IN, pairs.IN_OTHER), add_self_loops=loops, residual=True)
    x, edge_index = (
        (pairs.randn(pairs.NODES, pairs.IN), None),
        pairs.some_edges(pairs.NODES, size[1] if size else pairs.NODES),
    )
    for call in ({}, {"return_attention_weights": True}):
        expected = pairs.everything(peer, x, edge_index, size=size, **call)
        pairs.assert_same(pairs.everything(ours, x, edge_index, size=size, **call), expected)


@pytest.mark.parametrize("slope", [0.0, 0.01, 1.5])
@pytest.mark.parametrize("kind", pairs.LOOPING)
def test_negative_slope_and_one_head(kind: str, slope: float) -> None:
    _, x, edge_index = pairs.inputs("one")
    peer, ours = pairs.pair(kind, heads=1, negative_slope=slope)
    pairs.assert_same(pairs.everything(ours, x, edge_index), pairs.everything(peer, x, edge_index))


@pytest.mark.parametrize("loops", [False, True])
@pytest.mark.parametrize("nodes, edges", [(0, 0), (1, 0), (7, 0), (1, 1)])
@pytest.mark.parametrize("kind", pairs.KINDS)
def test_small_graphs(kind: str, nodes: int, edges: int, loops: bool) -> None:
    options = {"add_self_loops": loops} if kind in pairs.LOOPING else {}
    peer, ours = pairs.pair(kind, edge_dim=pairs.EDGE_DIM, **options)
    x, edge_index, edge_attr = (
        pairs.randn(nodes, pairs.IN),
        torch.zeros(2, edges, dtype=torch.long),
        pairs.features(True, edges),
    )
    for call in ({}, {"return_attention_weights": True}):
        expected = pairs.everything(peer, x, edge_index, edge_attr, **call)
        pairs.assert_same(pairs.everything(ours, x, edge_index, edge_attr, **call), expected)


def test_a_node_without_in_edges_gets_the_bias_as_in_pyg() -> None:
    _, x, edge_index = pairs.inputs("one")
    _, ours = pairs.pair("GATConv", add_self_loops=False)
    assert torch.equal(ours(x, edge_index)[0], ours.bias)


# dropout


@pytest.mark.parametrize("edge_dim", [None, pairs.EDGE_DIM])
@pytest.mark.parametrize("kind", pairs.LOOPING)
def test_returned_weights_give_the_output(kind: str, edge_dim: int | None) -> None:
    _, x, edge_index = pairs.inputs("one")
    _, ours = pairs.pair(kind, dropout=0.4, edge_dim=edge_dim, bias=False)
    edge_attr = pairs.features(edge_dim is not None)
    torch.manual_seed(3)
    output, ((source, destination), alpha) = ours(x, edge_index, edge_attr, return_attention_weights=True)
    values = (ours.lin if kind == "GATConv" else ours.lin_l)(x).unflatten(-1, (pairs.HEADS, pairs.CHANNELS))
    expected = torch.zeros_like(values).index_add(0, destination, alpha[..., None] * values[source])
    torch.testing.assert_close(output, expected.flatten(1), **pairs.CLOSE[torch.float64])
    torch.manual_seed(3)
    torch.testing.assert_close(ours(x, edge_index, edge_attr), output, **pairs.CLOSE[torch.float64])
    whole = ours.eval()(x, edge_index, edge_attr, return_attention_weights=True)[1][1]
    assert 0.2 < (alpha == 0).double().mean() < 0.6
    torch.testing.assert_close(alpha[alpha > 0], whole[alpha > 0] / 0.6, **pairs.CLOSE[torch.float64])


@pytest.mark.parametrize("edge_dim", [None, pairs.EDGE_DIM])
def test_transformer_conv_returns_weights_before_dropout(edge_dim: int | None) -> None:
    _, x, edge_index = pairs.inputs("one")
    peer, ours = pairs.pair("TransformerConv", dropout=0.4, edge_dim=edge_dim)
    edge_attr = pairs.features(edge_dim is not None)
    torch.manual_seed(3)
    output, (_, alpha) = ours(x, edge_index, edge_attr, return_attention_weights=True)
    torch.testing.assert_close(
        alpha, peer(x, edge_index, edge_attr, return_attention_weights=True)[1][1], **pairs.CLOSE[torch.float64]
    )
    torch.manual_seed(3)
    torch.testing.assert_close(ours(x, edge_index, edge_attr), output, **pairs.CLOSE[torch.float64])
    assert not torch.allclose(ours.eval()(x, edge_index, edge_attr), output)


@pytest.mark.parametrize("edge_dim", [None, pairs.EDGE_DIM])
@pytest.mark.parametrize("kind", pairs.KINDS)
def test_dropout_keeps_the_mean(kind: str, edge_dim: int | None) -> None:
    _, x, edge_index = pairs.inputs("one")
    _, ours = pairs.pair(kind, dropout=0.3, edge_dim=edge_dim)
    edge_attr = pairs.features(edge_dim is not None)
    with torch.no_grad():
        draws = torch.stack([ours(x, edge_index, edge_attr) for _ in range(400)])
        exact = ours.eval()(x, edge_index, edge_attr)
    error = draws.std(0) / len(draws) ** 0.5
    assert (draws.std(0) > 0).any()
    assert ((draws.mean(0) - exact).abs() <= 5 * error + 1e-9).all()


# memory


class Largest(TorchDispatchMode):
    """The largest number of elements in a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = op(*args, **(kwargs or {}))
        for made in tree_leaves(result):
            if isinstance(made, Tensor):
                self.elements = max(self.elements, made.untyped_storage().nbytes() // made.element_size())
        return result


@pytest.mark.parametrize("call", [{}, {"return_attention_weights": True}], ids=["", "weights"])
@pytest.mark.parametrize("edge_dim", [None, pairs.EDGE_DIM])
@pytest.mark.parametrize("kind", pairs.KINDS)
def test_no_tensor_of_edges_x_heads_x_channels(
    kind: str, edge_dim: int | None, call: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    # allocations of the C++ kernels are not visible here
    monkeypatch.setattr(polyhead.kernels.edges_native, "native", None)
    monkeypatch.setattr(polyhead.kernels.edges_torch, "BLOCK_NUMEL", 1 << 14)
    nodes, edges, heads, channels = 50, 3000, 4, 8
    peer, ours = (getattr(of, kind)(pairs.IN, channels, heads, edge_dim=edge_dim) for of in (pyg, interop))
    x, edge_index = torch.randn(nodes, pairs.IN, requires_grad=True), torch.randint(nodes, (2, edges))
    edge_attr = None if edge_dim is None else torch.randn(edges, edge_dim, requires_grad=True)
    largest = {}
    for layer in (peer, ours):
        with Largest() as seen:
            given = layer(x, edge_index, edge_attr, **call)
            output, alpha = (given[0], given[1][1]) if call else (given, torch.zeros(()))
            (output.square().sum() + alpha.square().sum()).backward()
        largest[layer] = seen.elements
    assert largest[peer] >= 0.9 * edges * heads * channels
    assert largest[ours] <= 2 * edges * heads


@pytest.mark.parametrize("edge_dim", [None, pairs.EDGE_DIM])
@pytest.mark.parametrize("kind", pairs.KINDS)
def test_compiles_to_one_graph(kind: str, edge_dim: int | None) -> None:
    _, x, edge_index = pairs.inputs("one")
    _, ours = pairs.pair(kind, edge_dim=edge_dim)
    edge_attr = pairs.features(edge_dim is not None)
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    expected = pairs.everything(ours, x, edge_index, edge_attr)
    pairs.assert_same(pairs.everything(compiled, x, edge_index, edge_attr), expected)


# the compiler inspects tensors before a graph break
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf Tensor:UserWarning")
@pytest.mark.parametrize(
    "options, call", [({"aggr": "mean"}, {}), ({}, {"return_attention_weights": True})], ids=["mean", "weights"]
)
def test_compiles_with_graph_breaks_if_self_loops_must_be_removed(options: dict, call: dict) -> None:
    """The compiler does not know their number."""
    _, x, edge_index = pairs.inputs("one")
    _, ours = pairs.pair("GATConv", **options)
    compiled = torch.compile(ours, backend="eager")
    pairs.assert_same(pairs.everything(compiled, x, edge_index, **call), pairs.everything(ours, x, edge_index, **call))


@pytest.mark.parametrize("kind", pairs.KINDS)
def test_batches_by_vmap_and_gradients_by_torch_func(kind: str) -> None:
    _, ours = pairs.pair(kind, edge_dim=pairs.EDGE_DIM)
    x, edge_index, edge_attr = (
        torch.randn(3, pairs.NODES, pairs.IN, dtype=torch.float64),
        pairs.some_edges(),
        pairs.features(True).detach(),
    )
    together = torch.func.vmap(lambda signal: ours(signal, edge_index, edge_attr))(x)
    torch.testing.assert_close(together, torch.stack([ours(row, edge_index, edge_attr) for row in x]))
    parameters = {name: p.detach() for name, p in ours.named_parameters()}
    loss = lambda p: torch.func.functional_call(ours, p, (x[0], edge_index, edge_attr)).square().sum()
    gradients = torch.func.grad(loss)(parameters)
    expected = torch.autograd.grad(ours(x[0], edge_index, edge_attr).square().sum(), list(ours.parameters()))
    for name, gradient in zip(parameters, expected, strict=True):
        torch.testing.assert_close(gradients[name], gradient, **pairs.CLOSE[torch.float64])
