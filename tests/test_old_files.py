"""Files that release 0.6.1 wrote are read: state dicts, optimizer states, graphs and other neighbourhoods."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from polyhead import Dot, Graph, MultiHeadAttention, Padding, Rotary, optim
from polyhead.models import Bert, Gpt, Llama, bert, gpt, llama
from polyhead.neighbourhood import BatchRows
from polyhead.nn import FeedForward, Transformer, TransformerLayer

FILES = Path(__file__).parent / "data" / "0.6.1"
SMALL: dict[str, Any] = {"d_model": 8, "heads": 2, "layers": 2, "d_feedforward": 12, "vocab": 31, "positions": 16}


def read(name: str) -> Any:
    return torch.load(FILES / f"{name}.pt", weights_only=True)


@pytest.mark.parametrize("strict", [True, False])
def test_a_transformer_layer(strict: bool) -> None:
    held = read("transformer_layer")
    layer = TransformerLayer(MultiHeadAttention(8, 2), FeedForward(8, 12), cross=MultiHeadAttention(8, 2)).eval()
    assert layer.load_state_dict(held["state"], strict=strict) == ([], [])
    torch.testing.assert_close(layer(held["x"], held["memory"]), held["out"])
    # what is written now is read as it is
    assert "self_attn.q_proj.weight" in layer.state_dict()
    layer.load_state_dict(layer.state_dict())


def test_a_transformer() -> None:
    held = read("transformer")
    model = Transformer(17, d_model=8, num_heads=2, layers=1, d_feedforward=12).eval()
    model.load_state_dict(held["state"])
    torch.testing.assert_close(model(held["source"], held["target"]), held["out"])


MODELS: dict[str, nn.Module] = {
    "bert": Bert(bert.Config(**SMALL)),
    "gpt": Gpt(gpt.Config(**SMALL)),
    "llama": Llama(llama.Config(**SMALL, kv_heads=1)),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_model(name: str) -> None:
    held, model = read(name), MODELS[name].eval()
    model.load_state_dict(held["state"])
    torch.testing.assert_close(model(held["ids"]), held["out"])


def test_a_layer() -> None:
    held = read("layer")
    layer = MultiHeadAttention(8, 2, position=Rotary(), sink=0.0, score=Dot(), qk_norm=True).eval()
    layer.load_state_dict(held["state"])
    torch.testing.assert_close(layer(held["x"])[0], held["out"])


def test_an_optimizer_goes_on() -> None:
    held = read("adam_stiefel")
    layer = MultiHeadAttention(8, 2, manifold="stiefel")
    layer.load_state_dict(held["state"])
    optimizer = optim.Adam(layer, lr=0.1)
    optimizer.load_state_dict(held["optimizer"])
    layer(held["x"])[0].square().sum().backward()
    optimizer.step()
    # a bias of keys moves no weight: its gradient is rounding, which differs between CPUs and which Adam scales up
    for name, wanted in held["after"].items():
        if name != "k_proj.bias":
            torch.testing.assert_close(layer.state_dict()[name], wanted)


def test_a_graph() -> None:
    held = read("graph")
    wanted = Graph(held["edge_index"], 6, weights=held["weights"])
    for graph in (held["graph"], pickle.loads((FILES / "graph.pickle").read_bytes())):
        assert torch.equal(graph.edge_index, wanted.edge_index) and torch.equal(graph.weights, wanted.weights)
        assert all(torch.equal(a, b) for a, b in zip(graph.csr, wanted.csr, strict=True))
        # no attribute of the old release is left, here and in what is written again
        assert vars(graph).keys() == vars(pickle.loads(pickle.dumps(graph))).keys() == vars(wanted).keys()


def test_other_neighbourhoods() -> None:
    kinds = [type(over).__name__ for over in read("neighbourhoods")]
    assert kinds == ["Both", "Padding", "Grid", "Segments", "Offsets"]


def test_a_neighbourhood_in_some_rows_of_a_batch() -> None:
    rows = BatchRows(Padding([2, 6, 3]), (3,), (slice(0, 2),))
    # 0.6.1 called the class Rows
    held = pickle.loads(pickle.dumps(rows, protocol=0).replace(b"BatchRows", b"Rows"))
    assert type(held) is BatchRows and held.batch == (3,)
