"""The drop-ins with PyG's explainers, hooks and transformations, and without PyG."""

from __future__ import annotations

import itertools
import subprocess
import sys
from typing import Any

import pyg_pairs as pairs
import pytest
import torch
from torch import Tensor, nn
from torch_geometric import nn as pyg
from torch_geometric.data import HeteroData
from torch_geometric.explain import AttentionExplainer, Explainer, GNNExplainer, GraphMaskExplainer
from torch_geometric.explain.algorithm.utils import clear_masks, set_masks

from polyhead.interop import pyg as interop


class Net(nn.Module):
    """Two layers of one kind."""

    def __init__(self, of: Any, kind: str, **options: Any) -> None:
        super().__init__()
        self.first = getattr(of, kind)(pairs.IN, pairs.CHANNELS, pairs.HEADS, **options)
        self.second = getattr(of, kind)(pairs.HEADS * pairs.CHANNELS, 2, pairs.HEADS, concat=False, **options)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.second(self.first(x, edge_index).relu(), edge_index)


def nets(kind: str, **options: Any) -> tuple[Net, Net]:
    peer, ours = (Net(of, kind, **options).eval() for of in (pyg, interop))
    ours.load_state_dict(peer.state_dict())
    return peer, ours


@pytest.mark.parametrize("edge_dim", [None, pairs.EDGE_DIM])
@pytest.mark.parametrize("kind", pairs.KINDS)
def test_an_edge_mask_multiplies_the_messages(kind: str, edge_dim: int | None) -> None:
    _, x, edge_index = pairs.inputs("one")
    peer, ours = pairs.pair(kind, edge_dim=edge_dim)
    assert isinstance(ours, pyg.MessagePassing)
    edge_attr, plain = pairs.features(edge_dim is not None), ours(x, edge_index) if edge_dim is None else None
    mask = nn.Parameter(torch.randn(pairs.EDGES, dtype=torch.float64))
    for sigmoid, call in itertools.product((True, False), ({}, {"return_attention_weights": True})):
        for layer in (peer, ours):
            set_masks(layer, mask, edge_index, apply_sigmoid=sigmoid)
        # set_masks makes the mask a parameter of both
        expected = pairs.everything(peer, x, edge_index, edge_attr, **call)
        seen = pairs.everything(ours, x, edge_index, edge_attr, **call)
        assert seen["_edge_mask"].abs().max() > 0
        pairs.assert_same(seen, expected)
    clear_masks(ours)
    if plain is not None:
        assert torch.equal(ours(x, edge_index), plain)


def test_an_edge_mask_applies_to_the_right_edges_if_every_node_has_a_self_loop() -> None:
    """PyG assumes that a mask of the right length is in the right order."""
    x = pairs.randn(pairs.NODES, pairs.IN)
    edge_index = torch.cat((torch.arange(pairs.NODES).expand(2, -1), pairs.some_edges()[:, 20:]), 1)
    _, ours = pairs.pair("GATConv")
    mask = torch.rand(edge_index.shape[1], dtype=torch.float64)
    set_masks(ours, mask, edge_index, apply_sigmoid=False)
    not_loops = edge_index[0] != edge_index[1]
    seen = ours(x, edge_index)
    set_masks(ours, mask[not_loops], edge_index[:, not_loops], apply_sigmoid=False)
    torch.testing.assert_close(seen, ours(x, edge_index[:, not_loops]), **pairs.CLOSE[torch.float64])


CONFIG = {"mode": "regression", "task_level": "node", "return_type": "raw"}


@pytest.mark.parametrize("kind", pairs.KINDS)
def test_gnn_explainer(kind: str) -> None:
    x, edge_index = torch.randn(pairs.NODES, pairs.IN), pairs.some_edges()
    found = []
    for net in nets(kind):
        torch.manual_seed(5)
        explainer = Explainer(
            net, GNNExplainer(epochs=5), explanation_type="model", node_mask_type="attributes", edge_mask_type="object",
            model_config=CONFIG,
        )  # fmt: skip
        found.append(explainer(x, edge_index, index=4))
    assert found[0].edge_mask.max() > 0
    torch.testing.assert_close(found[1].edge_mask, found[0].edge_mask, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(found[1].node_mask, found[0].node_mask, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", pairs.KINDS)
def test_attention_explainer(kind: str) -> None:
    x, edge_index = torch.randn(pairs.NODES, pairs.IN), pairs.some_edges()
    found = []
    for net in nets(kind):
        explainer = Explainer(
            net, AttentionExplainer(), explanation_type="model", edge_mask_type="object", model_config=CONFIG
        )
        found.append(explainer(x, edge_index, index=4).edge_mask)
    assert found[0].max() > 0
    torch.testing.assert_close(found[1], found[0], **pairs.CLOSE[torch.float32])


@pytest.mark.filterwarnings("ignore::UserWarning:torch_geometric")
def test_an_explainer_that_overrides_messages() -> None:
    x, edge_index = torch.randn(pairs.NODES, pairs.IN), pairs.some_edges()
    found = []
    for net in nets("GATConv", add_self_loops=False):
        torch.manual_seed(5)
        algorithm = GraphMaskExplainer(2, epochs=2, log=False)
        explainer = Explainer(
            net, algorithm, explanation_type="model", node_mask_type="attributes", edge_mask_type="object",
            model_config=CONFIG,
        )  # fmt: skip
        found.append(explainer(x, edge_index, index=4).edge_mask)
    torch.testing.assert_close(found[1], found[0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("edge_dim", [None, pairs.EDGE_DIM])
@pytest.mark.parametrize("kind", pairs.KINDS)
def test_hooks_see_and_change_messages(kind: str, edge_dim: int | None) -> None:
    _, x, edge_index = pairs.inputs("one")
    layers, seen = pairs.pair(kind, edge_dim=edge_dim), []
    edge_attr = pairs.features(edge_dim is not None)
    for layer in layers:
        layer.register_message_forward_hook(lambda module, given, out: seen.append(out) or out * 2)
        layer.register_aggregate_forward_hook(lambda module, given, out: out + 1)
    expected, ours = (pairs.everything(layer, x, edge_index, edge_attr) for layer in layers)
    torch.testing.assert_close(seen[1], seen[0], **pairs.CLOSE[torch.float64])
    pairs.assert_same(ours, expected)


def test_hooks_of_edge_update_are_refused() -> None:
    _, x, edge_index = pairs.inputs("one")
    _, ours = pairs.pair("GATConv")
    ours.register_edge_update_forward_hook(lambda module, given, out: None)
    with pytest.raises(ValueError, match="hooks of edge_update are not supported"):
        ours(x, edge_index)


def test_a_subclass_that_overrides_message() -> None:
    class Doubled(interop.GATConv):
        def message(self, x_j: Tensor, alpha: Tensor) -> Tensor:
            return 2 * super().message(x_j, alpha)

    _, x, edge_index = pairs.inputs("one")
    _, ours = pairs.pair("GATConv", bias=False)
    doubled = Doubled(pairs.IN, pairs.CHANNELS, pairs.HEADS, bias=False).double()
    doubled.load_state_dict(ours.state_dict())
    torch.testing.assert_close(doubled(x, edge_index), 2 * ours(x, edge_index), **pairs.CLOSE[torch.float64])


@pytest.mark.parametrize("kind", pairs.KINDS)
def test_to_hetero(kind: str) -> None:
    data = HeteroData()
    data["paper"].x, data["author"].x = torch.randn(pairs.NODES, pairs.IN), torch.randn(pairs.OTHERS, pairs.IN_OTHER)
    data["author", "writes", "paper"].edge_index = pairs.some_edges(pairs.OTHERS, pairs.NODES)
    data["paper", "cites", "paper"].edge_index = pairs.some_edges()
    data["paper", "written", "author"].edge_index = pairs.some_edges(pairs.NODES, pairs.OTHERS)
    options = {"add_self_loops": False} if kind in pairs.LOOPING else {}

    class Lazy(nn.Module):
        def __init__(self, of: Any) -> None:
            super().__init__()
            self.first = getattr(of, kind)((-1, -1), pairs.CHANNELS, pairs.HEADS, **options)
            self.second = getattr(of, kind)((-1, -1), pairs.CHANNELS, **options)

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return self.second(self.first(x, edge_index).relu(), edge_index)

    outputs, states = [], []
    for of in (pyg, interop):
        net = pyg.to_hetero(Lazy(of), data.metadata())
        net(data.x_dict, data.edge_index_dict)
        if states:
            net.load_state_dict(states[0], strict=True)
        states.append(net.state_dict())
        outputs.append(net(data.x_dict, data.edge_index_dict))
    assert outputs[0].keys() == outputs[1].keys() == {"paper", "author"}
    for name, expected in outputs[0].items():
        torch.testing.assert_close(outputs[1][name], expected, **pairs.CLOSE[torch.float32])


# options of MessagePassing


@pytest.mark.parametrize("edge_dim", [None, pairs.EDGE_DIM])
@pytest.mark.parametrize("layers", [1, 2, 3])
@pytest.mark.parametrize("kind", pairs.KINDS)
def test_decomposed_layers_do_not_change_the_result(kind: str, layers: int, edge_dim: int | None) -> None:
    """PyG's layers fail with more than one, since attention cannot be split along the channels."""
    _, x, edge_index = pairs.inputs("one")
    peer, ours = pairs.pair(kind, edge_dim=edge_dim)
    options = {"edge_dim": edge_dim, "decomposed_layers": layers}
    decomposed = getattr(interop, kind)(pairs.IN, pairs.CHANNELS, pairs.HEADS, **options).double()
    decomposed.load_state_dict(peer.state_dict())
    edge_attr = pairs.features(edge_dim is not None)
    expected = pairs.everything(peer, x, edge_index, edge_attr)
    assert decomposed.decomposed_layers == layers
    pairs.assert_same(pairs.everything(decomposed, x, edge_index, edge_attr), expected)
    ours.decomposed_layers = layers
    pairs.assert_same(pairs.everything(ours, x, edge_index, edge_attr), expected)
    theirs = getattr(pyg, kind)(pairs.IN, pairs.CHANNELS, pairs.HEADS, **options).double()
    theirs.load_state_dict(peer.state_dict())
    if layers == 1:
        pairs.assert_same(pairs.everything(theirs, x, edge_index, edge_attr), expected)
    else:
        with pytest.raises((AttributeError, RuntimeError)):
            theirs(x, edge_index, edge_attr)


@pytest.mark.parametrize("kind", pairs.KINDS)
def test_invalid_decomposed_layers_are_refused(kind: str) -> None:
    for wrong in (0, -1, 2.0, "2"):
        with pytest.raises(ValueError, match=rf"decomposed_layers must be an integer in \[1, \d+\], got {wrong!r}"):
            getattr(interop, kind)(pairs.IN, pairs.CHANNELS, decomposed_layers=wrong)
    _, x, edge_index = pairs.inputs("one")
    _, ours = pairs.pair(kind, aggr="mean", decomposed_layers=2)
    with pytest.raises(
        ValueError, match=r"decomposed_layers must be 1 with a hook, an overridden message or .*, got 2"
    ):
        ours(x, edge_index)


@pytest.mark.parametrize("kind", pairs.KINDS)
def test_unknown_options_are_refused_as_in_pyg(kind: str) -> None:
    for wrong in ({"node_dim": 0}, {"nodes": 3}):
        for of in (pyg, interop):
            with pytest.raises(TypeError, match=next(iter(wrong))):
                getattr(of, kind)(pairs.IN, pairs.CHANNELS, **wrong)


@pytest.mark.parametrize("kind", pairs.KINDS)
def test_several_aggregations_must_keep_the_channels(kind: str) -> None:
    """With more channels PyG would reshape the rows of nodes."""
    _, x, edge_index = pairs.inputs("one")
    several = {"aggr": ["mean", "max"], "aggr_kwargs": {"mode": "sum"}}
    peer, ours = pairs.pair(kind, **several)
    pairs.assert_same(pairs.everything(ours, x, edge_index), pairs.everything(peer, x, edge_index))
    _, wider = pairs.pair(kind, aggr=["mean", "max"])
    with pytest.raises(
        ValueError, match=rf"aggr must return {pairs.CHANNELS} channels, got {2 * pairs.CHANNELS}; pass .*mode"
    ):
        wider(x, edge_index)


def test_hooks_read_the_weights_of_transformer_conv() -> None:
    """PyG's explainer reads this attribute."""
    _, x, edge_index = pairs.inputs("one")
    layers, seen = pairs.pair("TransformerConv", dropout=0.5), []
    for layer in layers:
        assert layer._alpha is None
        layer.register_message_forward_hook(lambda module, given, out: seen.append(module._alpha))
        layer(x, edge_index)
        assert layer._alpha is None
    torch.testing.assert_close(seen[1], seen[0], **pairs.CLOSE[torch.float64])


@pytest.mark.filterwarnings("ignore:.torch.jit.:DeprecationWarning")
@pytest.mark.parametrize("kind", pairs.KINDS)
def test_torchscript_is_refused(kind: str) -> None:
    x, edge_index = torch.randn(pairs.NODES, pairs.IN), pairs.some_edges()
    layer = getattr(interop, kind)(pairs.IN, pairs.CHANNELS)
    for module in (layer, Net(interop, kind)):
        with pytest.raises(TypeError, match=f"torch.jit.script cannot compile {kind}; use torch.export.export or"):
            torch.jit.script(module)
        with pytest.raises(TypeError, match=f"torch.jit.trace cannot trace {kind}; use torch.export.export or"):
            torch.jit.trace(module, (x, edge_index))
    exported, other = torch.export.export(layer, (x, edge_index)).module(), pairs.some_edges()
    torch.testing.assert_close(exported(x, other), layer(x, other), **pairs.CLOSE[torch.float32])


# without PyG

WITHOUT_PYG = """
import sys
sys.modules["torch_geometric"] = None
import torch
from polyhead.interop.pyg import GATConv, GATv2Conv, TransformerConv
cases = torch.load(sys.argv[1])
for kind, (state, options, x, edge_index, edge_attr, output) in cases.items():
    layer = {"GATConv": GATConv, "GATv2Conv": GATv2Conv, "TransformerConv": TransformerConv}[kind](-1, **options)
    layer.load_state_dict(state, strict=True)
    assert type(layer).__mro__[-3:-1] == (type(layer).__mro__[-3], torch.nn.Module)
    torch.testing.assert_close(layer(x, edge_index, edge_attr), output, atol=1e-5, rtol=1e-5)
    out, (where, alpha) = layer(x, edge_index, edge_attr, return_attention_weights=True)
    assert alpha.shape == (where.shape[1], 3)
    assert type(layer)(5, 4, decomposed_layers=2).decomposed_layers == 2
    for wrong in ({"aggr": "max"}, {"flow": "down"}):
        try:
            type(layer)(5, 4, **wrong)
        except ValueError as error:
            print(error)
assert not [name for name in sys.modules if name.startswith("torch_geometric.")]
"""


def test_without_pyg(tmp_path: Any) -> None:
    cases = {}
    x, edge_index = torch.randn(pairs.NODES, pairs.IN), pairs.some_edges()
    for kind in pairs.KINDS:
        options = {"out_channels": pairs.CHANNELS, "heads": pairs.HEADS, "edge_dim": pairs.EDGE_DIM}
        peer, edge_attr = getattr(pyg, kind)(pairs.IN, **options), torch.randn(pairs.EDGES, pairs.EDGE_DIM)
        cases[kind] = (peer.state_dict(), options, x, edge_index, edge_attr, peer(x, edge_index, edge_attr).detach())
    torch.save(cases, tmp_path / "cases.pt")
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_PYG, str(tmp_path / "cases.pt")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()[:2]
    assert first == "aggr must be 'add' without torch_geometric, got 'max'; install torch_geometric for others"
    assert second == "flow must be one of ('source_to_target', 'target_to_source'), got 'down'"


def test_polyhead_does_not_import_pyg() -> None:
    code = "import sys, polyhead; assert 'torch_geometric' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("kind", pairs.KINDS)
def test_on_the_meta_device(kind: str) -> None:
    with torch.device("meta"):
        x, edge_index = torch.randn(6, pairs.IN), torch.zeros(2, 12, dtype=torch.long)
        assert getattr(interop, kind)(pairs.IN, pairs.CHANNELS, heads=2)(x, edge_index).shape == (6, 2 * pairs.CHANNELS)
