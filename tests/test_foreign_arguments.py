"""Arguments of torch, transformers and PyG raise errors that translate them."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import nn
from torch.nn.attention.flex_attention import flex_attention
from torch_geometric.data import Batch, Data, HeteroData
from torch_geometric.nn import GATConv, GATv2Conv, TransformerConv

from polyhead import Causal, Graph, MultiHeadAttention, _foreign_arguments, attend
from polyhead.nn import FeedForward, TransformerLayer

MHA = MultiHeadAttention(12, 3)
LAYER = TransformerLayer(MHA, FeedForward(12, 8))
X, NODES = torch.randn(2, 5, 12), torch.randn(3, 12)
EDGES = torch.tensor([[0, 1, 2, 2], [1, 2, 0, 1]])
Q = torch.randn(2, 3, 5, 4)


def names(function) -> set[str]:
    kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return {name for name, each in inspect.signature(function).parameters.items() if each.kind not in kinds}


def words(known) -> list[str]:
    return sorted(name for library in known.values() for name in library)


ENTRIES = {
    "ATTENTION_LAYER": (lambda **options: MultiHeadAttention(12, 3, **options), MultiHeadAttention),
    "ATTENTION_LAYER_CALL": (lambda **options: MHA(X, **options), MHA.forward),
    "ATTEND": (lambda **options: attend(Q, Q, Q, **options), attend),
    "TRANSFORMER_LAYER": (lambda **options: TransformerLayer(MHA, FeedForward(12, 8), **options), TransformerLayer),
    "TRANSFORMER_LAYER_CALL": (lambda **options: LAYER(X, **options), LAYER.forward),
    "GRAPH": (lambda **options: Graph(EDGES, 3, **options), Graph),
}


@pytest.mark.parametrize("table", ENTRIES)
def test_each_argument_of_another_library_is_translated(table):
    call, ours = ENTRIES[table]
    known = getattr(_foreign_arguments, table)
    assert not set(words(known)) & names(ours)
    for name in words(known):
        with pytest.raises(ValueError, match=rf"^unsupported arguments of .*:\n  {name}= becomes ") as raised:
            call(**{name: None})
        assert not isinstance(raised.value, TypeError)
    with pytest.raises(TypeError, match=r"takes no argument 'wrong'; see help\("):
        call(wrong=1)


@pytest.mark.parametrize(
    ("theirs", "table", "ours"),
    [
        (nn.MultiheadAttention, "ATTENTION_LAYER", MultiHeadAttention),
        (nn.MultiheadAttention(12, 3).forward, "ATTENTION_LAYER_CALL", MHA.forward),
        (nn.TransformerEncoderLayer, "TRANSFORMER_LAYER", TransformerLayer),
        (nn.TransformerEncoderLayer(12, 3).forward, "TRANSFORMER_LAYER_CALL", LAYER.forward),
        (nn.TransformerDecoderLayer(12, 3).forward, "TRANSFORMER_LAYER_CALL", LAYER.forward),
        (GATConv, "ATTENTION_LAYER", MultiHeadAttention),
        (GATv2Conv, "ATTENTION_LAYER", MultiHeadAttention),
        (TransformerConv, "ATTENTION_LAYER", MultiHeadAttention),
        (GATConv(4, 4).forward, "ATTENTION_LAYER_CALL", MHA.forward),
        (GATv2Conv(4, 4).forward, "ATTENTION_LAYER_CALL", MHA.forward),
    ],
)
def test_no_argument_of_the_other_layers_is_missing(theirs, table, ours):
    assert names(theirs) - names(ours) - set(words(getattr(_foreign_arguments, table))) == set()


def test_no_argument_of_the_other_operators_is_missing():
    # torch's operator has no signature for `inspect`
    sdpa = {"attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa"}
    flex = names(flex_attention) - {"query", "key", "value", "return_lse", "return_aux", "kernel_options"}
    assert sdpa | flex <= set(words(_foreign_arguments.ATTEND))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: MultiHeadAttention(embed_dim=12, num_heads=3), r"torch.nn.MultiheadAttention:\n  embed_dim= becomes d_model\n"),
        (lambda: MultiHeadAttention(in_channels=12, out_channels=4, heads=3), r"of PyG:\n  in_channels= becomes d_model.*\n.*head_dim\n  heads= becomes num_heads\n.*interop\.pyg"),
        (lambda: MultiHeadAttention(12, heads=3, embed_dim=12), r"of torch.nn.MultiheadAttention and PyG:"),
        (lambda: MHA(X, mask=None, is_causal=True), r"mask= becomes over=mask .*\n  is_causal= becomes over=Causal\(\)\n  several neighbourhoods are joined with &"),
        (lambda: MHA(X, edge_index=EDGES), r"edge_index= becomes over=Graph\(edge_index, num_nodes\)"),
        (lambda: attend(Q, Q, Q, mask=None), r"mask= becomes over=mask"),
    ],
)  # fmt: skip
def test_translations(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_constructors_keep_their_signatures():
    assert [*inspect.signature(MultiHeadAttention).parameters][:3] == ["d_model", "num_heads", "kv_heads"]
    assert "foreign" not in inspect.signature(MultiHeadAttention).parameters
    assert [*inspect.signature(Graph).parameters] == ["edge_index", "num_nodes", "features", "weights"]


def test_positional_arguments_of_other_layers_are_refused():
    with pytest.raises(TypeError, match=r"^MultiHeadAttention takes d_model, num_heads by position, got 3 arguments; pass the others by name$"):  # fmt: skip
        MultiHeadAttention(12, 3, 0.1)
    with pytest.raises(TypeError, match=r"^TransformerLayer takes attention, feedforward by position, got 4 arguments"):
        TransformerLayer(12, 3, 8, 0.1)


def hetero() -> HeteroData:
    data = HeteroData()
    data["paper"].x = NODES
    data["paper", "cites", "paper"].edge_index = EDGES
    return data


@pytest.mark.parametrize(
    ("argument", "hint"),
    [
        (Graph(EDGES, 3), r"got Graph; pass over=graph$"),
        (Causal(), r"got Causal; pass a neighbourhood as over=$"),
        (EDGES, r"got \(2, 4\); pass over=Graph\(edge_index, num_nodes\)$"),
        # as many edges as features
        (EDGES.repeat(1, 3), r"got torch.int64 on cpu; pass over=Graph\(edge_index, num_nodes\)$"),
        (torch.ones(3, 3).bool(), r"got \(3, 3\); pass a mask as over=$"),
        (Data(NODES, EDGES), r"got Data; pass over=Graph\(data\)$"),
        (NODES.numpy(), r"got ndarray .*; pass torch.as_tensor\(key\)$"),
    ],
)
def test_second_positional_argument_is_the_key(argument, hint):
    with pytest.raises(ValueError, match=f"^key must .*{hint}"):
        MHA(NODES, argument)
    if not isinstance(argument, Graph | Causal):
        memory = hint.split("pass ")[1].replace("key", "memory")
        with pytest.raises(ValueError, match=f"^memory must be None: .*pass {memory}"):
            LAYER(NODES, argument)


def test_data_as_query_and_as_over():
    with pytest.raises(TypeError, match=r"^query must be .*, got Data; pass data\.x, and over=Graph\(data\)$"):
        MHA(Data(NODES, EDGES))
    with pytest.raises(ValueError, match=r"^over must be .*, got Data; pass over=Graph\(data\)$"):
        MHA(NODES, over=Data(NODES, EDGES))


def test_graph_of_pyg_data():
    # node 3 has no edge, so the largest index would give three nodes
    data = Data(torch.randn(4, 12), EDGES)
    assert (Graph(data).sources, Graph(data).destinations, Graph(data).num_edges) == (4, 4, 4)
    assert torch.equal(Graph(data).edge_index, EDGES)
    torch.testing.assert_close(MHA(data.x, over=Graph(data))[0], MHA(data.x, over=Graph(EDGES, 4))[0])
    assert Graph(Batch.from_data_list([data, data])).sources == 8
    assert Graph(data, 6).sources == 6
    with pytest.raises(ValueError, match=r"^edge_index must be the edges of one kind, got HeteroData of several; pass Graph\(data\[edge_type\]\.edge_index"):  # fmt: skip
        Graph(hetero())
    with pytest.raises(ValueError, match=r"^edge_index must be given, got Data without it; pass a tensor of integers"):
        Graph(Data(NODES))
    with pytest.raises(ValueError, match=r"^edge_index must be given, got Data without it; pass Graph\(data\.adj_t\)"):
        Graph(Data(NODES, adj_t=torch.eye(3).to_sparse()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_autocast_converts_the_inputs(dtype):
    with torch.autocast("cpu", torch.bfloat16):
        assert MHA(X.to(dtype))[0].dtype == torch.bfloat16
    for x in (X.double(), X.long()):
        with (
            torch.autocast("cpu", torch.bfloat16),
            pytest.raises(ValueError, match=r"^query must be torch.float32 on cpu"),
        ):
            MHA(x)
