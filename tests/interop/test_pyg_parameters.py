"""The parameters of the drop-ins: initialised and saved as in PyG, and loaded from PyG, older versions of it, and DGL."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pyg_pairs as pairs
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric import nn as pyg

from polyhead.interop import pyg as interop


@pytest.mark.parametrize("kind, shape, options", pairs.cases("two"))
def test_parameters_and_initialisation_equal_pyg(kind: str, shape: str, options: dict) -> None:
    channels = (pairs.IN, pairs.IN_OTHER) if shape == "two" else pairs.IN
    layers = []
    for of in (pyg, interop):
        torch.manual_seed(1)
        layers.append(getattr(of, kind)(channels, pairs.CHANNELS, heads=pairs.HEADS, **options))
    peer, ours = layers
    assert list(ours.state_dict()) == list(peer.state_dict())
    for name, parameter in peer.state_dict().items():
        assert torch.equal(ours.state_dict()[name], parameter), name
    fresh, back = (getattr(of, kind)(channels, pairs.CHANNELS, pairs.HEADS, **options) for of in (interop, pyg))
    fresh.load_state_dict(peer.state_dict(), strict=True)
    back.load_state_dict(ours.state_dict(), strict=True)
    assert repr(ours) == repr(peer)
    torch.manual_seed(2)
    peer.reset_parameters()
    torch.manual_seed(2)
    ours.reset_parameters()
    assert all(torch.equal(ours.state_dict()[name], parameter) for name, parameter in peer.state_dict().items())


@pytest.mark.parametrize("channels", [-1, (-1, -1), (pairs.IN, -1)], ids=str)
@pytest.mark.parametrize("kind", pairs.KINDS)
def test_in_channels_are_inferred_from_the_first_input(kind: str, channels: Any) -> None:
    residual = {"residual": True} if kind in pairs.LOOPING else {}
    x = (
        (torch.randn(pairs.NODES, pairs.IN), torch.randn(pairs.OTHERS, pairs.IN))
        if channels == -1
        else tuple(pairs.inputs("two", torch.float32)[1])
    )
    edge_index = pairs.some_edges(pairs.NODES, pairs.OTHERS)
    layers, outputs = [], []
    for of in (pyg, interop):
        torch.manual_seed(1)
        layers.append(getattr(of, kind)(channels, pairs.CHANNELS, pairs.HEADS, **residual))
        outputs.append(layers[-1](x, edge_index))
    torch.testing.assert_close(outputs[1], outputs[0], **pairs.CLOSE[torch.float32])
    for later in (copy.deepcopy(layers[1]), getattr(interop, kind)(channels, pairs.CHANNELS, pairs.HEADS, **residual)):
        later.load_state_dict(layers[0].state_dict(), strict=True)
        torch.testing.assert_close(later(x, edge_index), outputs[0], **pairs.CLOSE[torch.float32])
    early = getattr(pyg, kind)(channels, pairs.CHANNELS, pairs.HEADS, **residual).state_dict()
    waiting = copy.deepcopy(getattr(interop, kind)(channels, pairs.CHANNELS, pairs.HEADS, **residual))
    waiting.load_state_dict(early, strict=True)
    assert waiting.state_dict().keys() == early.keys()
    assert waiting(x, edge_index).shape == outputs[0].shape


@pytest.mark.parametrize("lin", ["lin_src/lin_dst", "lin_l/lin_r"])
@pytest.mark.parametrize("channels", [pairs.IN, (pairs.IN, pairs.IN_OTHER)], ids=["one", "two"])
def test_checkpoints_of_older_pyg_are_read(channels: Any, lin: str) -> None:
    peer, _ = pairs.pair("GATConv", channels)
    new = nn.Sequential(interop.GATConv(channels, pairs.CHANNELS, pairs.HEADS).double())
    source, destination = lin.split("/")
    old = {f"0.{name}": value for name, value in peer.state_dict().items()}
    weight = old.pop("0.lin.weight", None)
    if weight is None:
        old |= {
            f"0.{source}.weight": old.pop("0.lin_src.weight"),
            f"0.{destination}.weight": old.pop("0.lin_dst.weight"),
        }
    else:
        old |= {f"0.{source}.weight": weight, f"0.{destination}.weight": weight}
    if lin == "lin_l/lin_r":
        old |= {"0.att_l": old.pop("0.att_src"), "0.att_r": old.pop("0.att_dst")}
    before = dict(old)
    new.load_state_dict(old, strict=True)
    assert old == before
    for name, value in peer.state_dict().items():
        assert torch.equal(new[0].state_dict()[name], value), name


def test_a_shared_map_cannot_load_two_different_maps() -> None:
    peer, _ = pairs.pair("GATConv", (pairs.IN, pairs.IN))
    with pytest.raises(RuntimeError, match="got different values; build the layer with in_channels"):
        interop.GATConv(pairs.IN, pairs.CHANNELS, pairs.HEADS).load_state_dict(peer.state_dict())


def dgl_forward(state: dict[str, Tensor], x: Tensor, edge_index: Tensor, kind: str) -> Tensor:
    """The output of DGL, edge by edge: (nodes, heads, channels)."""
    bias = lambda name: state.get(f"{name}.bias")
    source, destination = edge_index
    if kind == "GATConv":
        h = F.linear(x, state["fc.weight"]).unflatten(-1, (pairs.HEADS, pairs.CHANNELS))
        s = F.leaky_relu(((h * state["attn_l"]).sum(-1)[source] + (h * state["attn_r"]).sum(-1)[destination]), 0.2)
    else:
        h, g = (
            F.linear(x, state[f"{n}.weight"], bias(n)).unflatten(-1, (pairs.HEADS, pairs.CHANNELS))
            for n in ("fc_src", "fc_dst")
        )
        s = (F.leaky_relu(h[source] + g[destination], 0.2) * state["attn"]).sum(-1)
    out = torch.zeros_like(h)
    for node in range(len(x)):
        to = destination == node
        out[node] = (s[to].softmax(0)[..., None] * h[source[to]]).sum(0)
    if "res_fc.weight" in state:
        out = out + F.linear(x, state["res_fc.weight"], bias("res_fc")).unflatten(-1, (pairs.HEADS, pairs.CHANNELS))
    return out + state["bias"].view(pairs.HEADS, pairs.CHANNELS) if "bias" in state else out


@pytest.mark.parametrize("concat", [False, True])
@pytest.mark.parametrize("form", ["GATConv", "GATConv with a bias in its residual", "GATv2Conv", "GATv2Conv alone"])
def test_checkpoints_of_dgl_are_read(form: str, concat: bool) -> None:
    kind, features = form.split()[0], pairs.HEADS * pairs.CHANNELS
    vector = lambda: torch.randn(1, pairs.HEADS, pairs.CHANNELS)
    state: dict[str, Tensor] = {}
    if kind == "GATConv":
        state |= {"fc.weight": torch.randn(features, pairs.IN), "attn_l": vector(), "attn_r": vector()}
        state |= {"bias": torch.randn(features)} if form == kind else {}
    else:
        state |= {f"{side}.weight": torch.randn(features, pairs.IN) for side in ("fc_src", "fc_dst")}
        state |= {f"{side}.bias": torch.randn(features) for side in ("fc_src", "fc_dst")} | {"attn": vector()}
    residual = "alone" not in form
    if residual:
        state["res_fc.weight"] = torch.randn(features, pairs.IN)
    if residual and form != "GATConv":
        state["res_fc.bias"] = torch.randn(features)
    ours = getattr(interop, kind)(
        pairs.IN, pairs.CHANNELS, pairs.HEADS, concat=concat, add_self_loops=False, residual=residual
    )
    ours.load_state_dict(state, strict=True)
    x, edge_index = torch.randn(pairs.NODES, pairs.IN), pairs.some_edges()
    expected = dgl_forward(state, x, edge_index, kind)
    expected = expected.flatten(1) if concat else expected.mean(1)
    torch.testing.assert_close(ours(x, edge_index), expected, **pairs.CLOSE[torch.float32])


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
@pytest.mark.parametrize("kind", pairs.KINDS)
def test_layers_can_be_copied_and_pickled(kind: str, copied: Any) -> None:
    _, x, edge_index = pairs.inputs("one")
    _, ours = pairs.pair(kind)
    twin = copied(ours)
    assert type(twin) is type(ours) and torch.equal(twin(x, edge_index), ours(x, edge_index))
