"""Layers under torch's tracers: export with dynamic sizes, tensors without values, symbolic traces, scripting."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from polyhead import (
    ALiBi,
    Causal,
    GATv2,
    Graph,
    Grid,
    MultiHeadAttention,
    Neighbourhood,
    Offsets,
    Padding,
    RelativeBias,
    Rotary,
    Segments,
    Window,
    from_conv,
)
from polyhead.interop.pyg import GATConv, GATv2Conv, TransformerConv
from polyhead.interop.torch import MultiheadAttention
from polyhead.models import Bert, Gpt, Llama, bert, gpt, llama
from polyhead.nn import FeedForward, Transformer, TransformerLayer

HEADS, DIM, ITEMS = 4, 8, 20
MODEL = HEADS * DIM


class Over(nn.Module):
    """A model with the layer and a fixed neighbourhood."""

    def __init__(self, layer: nn.Module, over: Neighbourhood | None = None) -> None:
        super().__init__()
        self.layer, self.over, self.out = layer, over, nn.Linear(MODEL, MODEL)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.layer(x, over=self.over)[0])


class Padded(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        return self.layer(x, over=Padding(real))[0]


class DropIn(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.layer, self.options = MultiheadAttention(MODEL, HEADS, batch_first=True), options

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, x, x, **self.options)[0]


# wide heads, narrow ones (whose kernel depends on the length), and every position
EXPORTED: dict[str, Callable[[], nn.Module]] = {
    "dense": lambda: Over(MultiHeadAttention(MODEL, HEADS)),
    "wide": lambda: Over(MultiHeadAttention(MODEL, 1)),
    "causal": lambda: Over(MultiHeadAttention(MODEL, HEADS), Causal()),
    "window": lambda: Over(MultiHeadAttention(MODEL, HEADS), Window(3)),
    "union": lambda: Over(MultiHeadAttention(MODEL, HEADS), Causal() & ~Window(5) | Window(0, 2)),
    "causal-window": lambda: Over(MultiHeadAttention(MODEL, HEADS), Causal() & Window(5)),
    "rotary": lambda: Over(MultiHeadAttention(MODEL, HEADS, position=Rotary())),
    "alibi": lambda: Over(MultiHeadAttention(MODEL, HEADS, position=ALiBi(HEADS))),
    "relative": lambda: Over(MultiHeadAttention(MODEL, HEADS, position=RelativeBias(HEADS))),
    "sink": lambda: Over(MultiHeadAttention(MODEL, HEADS, sink="learned"), Causal()),
    "drop-in": lambda: DropIn(),
    "drop-in-without-weights": lambda: DropIn(need_weights=False),
}


# a few cases only: Dynamo is slow
STRICT = ("dense", "causal", "window", "drop-in")


@pytest.mark.parametrize(
    ("name", "strict"), [*((name, False) for name in EXPORTED), *((name, True) for name in STRICT)]
)
def test_exports_with_dynamic_length(name: str, strict: bool):
    torch.manual_seed(0)
    model = EXPORTED[name]().eval()
    length, rows = torch.export.Dim("length", min=2, max=512), torch.export.Dim("rows", min=2, max=64)
    example = torch.randn(3, ITEMS, MODEL)
    program = torch.export.export(model, (example,), dynamic_shapes=({0: rows, 1: length},), strict=strict).module()
    for shape in ((2, 7), (5, 33), (3, 200)):
        x = torch.randn(*shape, MODEL)
        torch.testing.assert_close(program(x), model(x), atol=1e-5, rtol=1e-4)


def test_exports_padding_with_dynamic_length():
    torch.manual_seed(0)
    model = Padded(MultiHeadAttention(MODEL, HEADS)).eval()
    length = torch.export.Dim("length", min=2, max=512)
    example = torch.randn(2, ITEMS, MODEL), torch.arange(ITEMS) < torch.tensor([[ITEMS], [5]])
    program = torch.export.export(model, example, dynamic_shapes=({1: length}, {1: length})).module()
    for n in (7, 150):
        x, real = torch.randn(2, n, MODEL), torch.arange(n) < torch.tensor([[n], [3]])
        torch.testing.assert_close(program(x, real), model(x, real), atol=1e-5, rtol=1e-4)


def padded() -> Tensor:
    return torch.zeros(2, ITEMS, dtype=torch.bool)


def loops() -> Graph:
    return Graph(torch.zeros(2, 30, dtype=torch.long), ITEMS)


OVERS: dict[str, Callable[[], Neighbourhood | Tensor | None]] = {
    "dense": lambda: None,
    "causal": Causal,
    "window": lambda: Window(3),
    "lengths": lambda: Padding(torch.full((2,), 5)),
    "padding": lambda: Padding(~padded()),
    "padding-causal": lambda: Padding(~padded()) & Causal(),
    "segments": lambda: Segments(torch.zeros(2, ITEMS, dtype=torch.long)),
    "mask": lambda: torch.ones(ITEMS, ITEMS, dtype=torch.bool),
    "grid": lambda: Grid(4, 5, window=3),
    "offsets": lambda: Offsets(torch.zeros(HEADS, 2, dtype=torch.long), (4, 5)),
    "graph": loops,
}


@pytest.fixture(params=["fake", "meta"])
def without_values(request: pytest.FixtureRequest):
    """A context in which tensors have no values."""
    with FakeTensorMode() if request.param == "fake" else torch.device("meta"):
        yield


@pytest.mark.parametrize("name", OVERS)
def test_the_layer_without_values(name: str, without_values: None):
    for score in ("dot", "gatv2"):
        layer = MultiHeadAttention(MODEL, HEADS, score=score, dropout=0.1)
        x = torch.randn(2, ITEMS, MODEL).requires_grad_()
        output, heads = layer(x, over=OVERS[name]())
        assert output.shape == x.shape
        keys = 30 if name == "graph" else ITEMS
        assert heads.weights.shape == (2, HEADS, *(() if name == "graph" else (ITEMS,)), keys)
        assert heads.entropy().shape == (2, HEADS, ITEMS)
        output.sum().backward()
        assert x.grad is not None and x.grad.shape == x.shape


@pytest.mark.parametrize("position", [Rotary, lambda: ALiBi(HEADS), lambda: RelativeBias(HEADS)])
def test_positions_without_values(position: Callable[[], Any], without_values: None):
    layer = MultiHeadAttention(MODEL, HEADS, position=position(), sink="learned", qk_norm=True, residual=True)
    output, heads = layer(torch.randn(2, ITEMS, MODEL), over=Causal())
    assert output.shape == (2, ITEMS, MODEL) and heads.received().shape == (2, HEADS, ITEMS)


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("mask", ["none", "padding", "pairs", "both"])
def test_the_drop_in_without_values(mask: str, need_weights: bool, without_values: None):
    layer = MultiheadAttention(MODEL, HEADS, batch_first=True)
    x = torch.randn(2, ITEMS, MODEL)
    options: dict[str, Any] = {}
    if mask in ("padding", "both"):
        options["key_padding_mask"] = padded()
    if mask in ("pairs", "both"):
        options["attn_mask"] = torch.ones(ITEMS, ITEMS, dtype=torch.bool).triu(1)
    output, weights = layer(x, x, x, need_weights=need_weights, **options)
    assert output.shape == x.shape and (weights is None) == (not need_weights)


def test_blocks_and_models_without_values(without_values: None):
    x, ids = torch.randn(2, ITEMS, MODEL), torch.zeros(2, ITEMS, dtype=torch.long)
    block = TransformerLayer(
        MultiHeadAttention(MODEL, HEADS), FeedForward(MODEL, 64), cross=MultiHeadAttention(MODEL, HEADS)
    )
    assert block(x, x, Padding(~padded()), memory_over=Padding(~padded())).shape == x.shape
    whole = Transformer(50, d_model=MODEL, num_heads=HEADS, layers=1, d_feedforward=64)
    assert whole(ids, ids, source_over=Padding(~padded())).shape[:2] == ids.shape


def test_convolutions_and_models_on_the_meta_device():
    small = {"d_model": MODEL, "heads": HEADS, "layers": 2, "d_feedforward": 64, "vocab": 50}
    with torch.device("meta"):
        assert from_conv(nn.Conv2d(3, 5, 3, padding=1))(torch.randn(2, 3, 6, 7))[0].shape == (2, 5, 6, 7)
        ids = torch.zeros(2, ITEMS, dtype=torch.long)
        for model in (
            Bert(bert.SIZES["base"]._replace(**small)),
            Gpt(gpt.SIZES["small"]._replace(**small, start=None, stop=())),
            Llama(llama.SIZES["llama2-7b"]._replace(**small, kv_heads=2, start=None, stop=())),
        ):
            assert model(ids, over=Padding(~padded())).shape[:2] == ids.shape


def test_symbolic_trace_records_the_layer_as_one_node():
    torch.manual_seed(0)
    x = torch.randn(2, ITEMS, MODEL)
    block = TransformerLayer(MultiHeadAttention(MODEL, HEADS), FeedForward(MODEL, 64))
    models = (
        Over(MultiHeadAttention(MODEL, HEADS)),
        Over(MultiHeadAttention(MODEL, HEADS), Causal() & Window(2)),
        DropIn(),
        nn.Sequential(block, nn.Linear(MODEL, 5)),
    )
    for model in models:
        model.eval()
        traced = torch.fx.symbolic_trace(model)
        torch.testing.assert_close(traced(x), model(x))
        called = [node.target for node in traced.graph.nodes if node.op == "call_module"]
        assert called[0] in ("layer", "0")
    image = torch.randn(2, 3, 6, 6)
    conv = nn.Sequential(from_conv(nn.Conv2d(3, 4, 3)))
    torch.testing.assert_close(torch.fx.symbolic_trace(conv)(image)[0], conv(image)[0])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    "model",
    [
        MultiHeadAttention(MODEL, HEADS),
        DropIn(),
        nn.Sequential(TransformerLayer(MultiHeadAttention(MODEL, HEADS), FeedForward(MODEL, 64))),
        from_conv(nn.Conv2d(3, 4, 3)),
        FeedForward(MODEL, 64),
    ],
    ids=lambda model: type(model).__name__,
)
def test_scripting_is_refused_in_one_sentence(model: nn.Module):
    with pytest.raises(TypeError, match=r"^torch\.jit\.script cannot compile \w+; use torch\.export\.export, [^\n]*$"):
        torch.jit.script(model)


@pytest.mark.parametrize("length", [1, 10, 40, 200])
@pytest.mark.parametrize("over", [None, Causal(), Window(2)], ids=str)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_jit_trace(over: Any, length: int):
    x = torch.randn(2, length, MODEL)
    for model in (Over(MultiHeadAttention(MODEL, HEADS), over), DropIn()):
        # torch compares with a second trace without gradients, name by name
        with torch.no_grad():
            traced = torch.jit.trace(model.eval(), (x,))
        torch.testing.assert_close(traced(x), model(x))


def test_symbolic_trace_of_a_bare_layer_is_refused():
    layer = TransformerLayer(MultiHeadAttention(MODEL, HEADS), FeedForward(MODEL, 64))
    with pytest.raises(TypeError, match=r"records TransformerLayer as one node; trace a model that holds it$"):
        torch.fx.symbolic_trace(layer)


class OnGraph(nn.Module):
    def __init__(self, layer: MultiHeadAttention):
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.layer(x, over=Graph(edge_index, num_nodes=x.shape[0]))[0]


@pytest.mark.parametrize(
    "model",
    [
        OnGraph(MultiHeadAttention(MODEL, HEADS)),
        OnGraph(MultiHeadAttention(MODEL, HEADS, score=GATv2(HEADS, MODEL // HEADS))),
        GATConv(MODEL, 8, heads=2),
        GATv2Conv(MODEL, 8, heads=2, add_self_loops=False),
        TransformerConv(MODEL, 8, heads=2),
    ],
    ids=["dot", "gatv2", "GATConv", "GATv2Conv", "TransformerConv"],
)
def test_exports_with_dynamic_graph_size(model: nn.Module):
    model = model.eval()
    given = torch.randn(50, MODEL), torch.randint(0, 50, (2, 200))
    sizes = ({0: torch.export.Dim("nodes")}, {1: torch.export.Dim("edges")})
    program = torch.export.export(model, given, dynamic_shapes=sizes).module()
    for nodes, edges in ((5, 9), (77, 400), (50, 200)):
        x, edge_index = torch.randn(nodes, MODEL), torch.randint(0, nodes, (2, edges))
        torch.testing.assert_close(program(x, edge_index), model(x, edge_index))


class Cross(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = MultiHeadAttention(MODEL, HEADS)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        return self.layer(x, memory)[0]


class Masked(Cross):
    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        return self.layer(x, over=keep)[0]


def test_exported_programs_accept_equal_sizes():
    dim = torch.export.Dim
    cross, masked = Cross().eval(), Masked().eval()
    given = torch.randn(2, 10, MODEL), torch.randn(2, 7, MODEL)
    program = torch.export.export(cross, given, dynamic_shapes=({1: dim("L")}, {1: dim("K")})).module()
    x, memory = torch.randn(2, 2, 9, MODEL)
    torch.testing.assert_close(program(x, memory), cross(x, memory))
    length = dim("L")
    given = torch.randn(4, 10, MODEL), torch.rand(10, 10) > 0.4
    program = torch.export.export(masked, given, dynamic_shapes=({1: length}, {0: length, 1: length})).module()
    x, keep = torch.randn(4, 4, MODEL), torch.rand(4, 4) > 0.4
    torch.testing.assert_close(program(x, keep), masked(x, keep))


def test_export_without_gradients_keeps_sizes_dynamic():
    batch, length = torch.export.Dim("B"), torch.export.Dim("L")
    layer = MultiHeadAttention(16, 2).eval()
    with torch.no_grad():
        given = (torch.randn(3, 10, 16),)
        program = torch.export.export(layer, given, dynamic_shapes=({0: batch, 1: length},), strict=False).module()
        for shape in ((1, 2, 16), (5, 33, 16)):
            x = torch.randn(shape)
            torch.testing.assert_close(program(x)[0], layer(x)[0])
