"""NumPy's integers are integers: one row per public entry that takes integers, and none is missing."""

from __future__ import annotations

import inspect
import re

import numpy as np
import pytest
import torch
from torch import nn

import polyhead
import polyhead.inspection
import polyhead.models
import polyhead.nn
import polyhead.optim
from polyhead import (
    GAT,
    ALiBi,
    Euclidean,
    GATv2,
    Graph,
    Grid,
    KeyValueCache,
    MultiHeadAttention,
    Offsets,
    Padding,
    RelativeBias,
    RopeScaling,
    Rotary,
    Stiefel,
    Window,
    attend,
    capture,
    from_conv,
    report,
)
from polyhead.inspection import add_text_evidence, find_induction_heads, find_roles_in_text, rollout
from polyhead.interop import pyg
from polyhead.models import Bert, Gpt, Llama, Tokens, bert, gpt, llama
from polyhead.nn import FeedForward, Transformer

PAIRS = torch.tensor([[0, 1, 2], [1, 2, 0]])
X = torch.randn(2, 9, 12)
MHA = MultiHeadAttention(12, 3)
PLAIN, ON_GRID = MHA(X)[1], MHA(X, over=Grid(3, 3))[1]
WRITER = Transformer(7, d_model=12, num_heads=3, layers=1).eval()


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.attention = nn.Embedding(9, 12), MultiHeadAttention(12, 3)

    def forward(self, ids):
        return self.attention(self.embedding(ids))[0]


def captured(**options):
    with capture(MHA, **options) as seen:
        MHA(X)
    return seen


def metrics():
    with capture(MHA, metrics=[("top", 2), ("heatmap", 3)]) as seen:
        MHA(X)
    return seen["MultiHeadAttention"]


def conv(kind, **options):
    layer = kind(**{"in_channels": 4, "out_channels": 5, **options})
    size = options.pop("size", None)
    return layer(torch.randn(3, 4), PAIRS, torch.randn(3, 2) if "edge_dim" in options else None, size)


CONV = {"in_channels": 4, "out_channels": 5, "heads": 2, "edge_dim": 2, "decomposed_layers": 1}
# the call, and the integers that it is given by name
ENTRIES = {
    "ALiBi": (ALiBi, {"num_heads": 3}),
    "Euclidean.random": (lambda shape: Euclidean().random(*shape), {"shape": (4, 3)}),
    "FeedForward": (FeedForward, {"d_model": 4, "d_hidden": 3}),
    "GAT": (GAT, {"num_heads": 2, "head_dim": 3, "edge_dim": 4}),
    "GATv2": (GATv2, {"num_heads": 2, "head_dim": 3, "edge_dim": 4}),
    "GATConv": (lambda **n: conv(pyg.GATConv, **n), CONV),
    "GATConv.forward": (lambda size: pyg.GATConv(4, 5)((torch.randn(3, 4),) * 2, PAIRS, size=size), {"size": (3, 3)}),
    "GATv2Conv": (lambda **n: conv(pyg.GATv2Conv, **n), CONV),
    "Graph": (lambda num_nodes: Graph(PAIRS, num_nodes), {"num_nodes": 3}),
    "Grid": (lambda sizes, **n: Grid(*sizes, **n), {"sizes": (6, 4), "window": 3, "dilation": 2, "stride": 2, "outputs": (3, 2), "prefix": 0}),
    "HeadMetrics.top": (lambda k: metrics().top(k), {"k": 2}),
    "HeadMetrics.heatmap": (lambda size: metrics().heatmap(size), {"size": 3}),
    "Heads.agreement": (PLAIN.agreement, {"queries": 3}),
    "Heads.average_by_offset": (PLAIN.average_by_offset, {"reach": 1, "grid": (3, 3)}),
    "Heads.heatmap": (PLAIN.heatmap, {"size": 3}),
    "Heads.plot": (PLAIN.plot, {"batch": 1, "size": 3}),
    "Heads.plot on a grid": (PLAIN.plot, {"batch": 1, "grid": (3, 3), "around": 4}),
    "Heads.select_batch_entry": (PLAIN.select_batch_entry, {"batch": 1}),
    "Heads.top": (PLAIN.top, {"k": 2}),
    "KeyValueCache.keys_after": (lambda new: KeyValueCache(X, X).keys_after(new), {"new": 1}),
    "KeyValueCache.positions_of": (lambda new: KeyValueCache(X, X).positions_of(new), {"new": 1}),
    "KeyValueCache.visible_keys": (lambda new: KeyValueCache(X, X).visible_keys(Window(1), new), {"new": 1}),
    "KeyValueCache.rewind": (lambda mark: KeyValueCache(X, X).rewind(mark), {"mark": 0}),
    "KeyValueCache.truncate": (lambda length: KeyValueCache(X, X).truncate(length), {"length": 0}),
    "MultiHeadAttention": (
        lambda **n: MultiHeadAttention(**n)(X, X, X),
        {"d_model": 12, "num_heads": 4, "kv_heads": 2, "head_dim": 3, "value_dim": 5, "d_key": 12, "d_value": 12, "d_out": 7},
    ),
    "MultiHeadAttention.cache": (lambda **n: torch.no_grad()(MHA)(X, cache=MHA.cache(**n)), {"batch": 2, "length": 9}),
    "MultiHeadAttention.prune": (lambda heads: MultiHeadAttention(12, 3).prune(heads), {"heads": [0, 2]}),
    "Offsets": (Offsets, {"offsets": [[0], [1]], "sizes": [6], "stride": 2, "outputs": [3]}),
    "Padding": (lambda lengths_or_keep: MHA(X, over=Padding(lengths_or_keep)), {"lengths_or_keep": [9, 4]}),
    "RelativeBias": (RelativeBias, {"num_heads": 3, "buckets": 16, "max_distance": 20}),
    "RelativeBias on a grid": (RelativeBias, {"num_heads": 3, "window": (3, 3)}),
    "RopeScaling": (lambda original_length: RopeScaling(2.0, original_length), {"original_length": 64}),
    "Rotary": (Rotary, {"dim": 8, "axes": 2}),
    "Stiefel": (lambda heads: Stiefel(heads=heads).random(6, 3), {"heads": 2}),
    "Stiefel.random": (lambda shape: Stiefel().random(*shape), {"shape": (4, 3)}),
    "Tokens.from_pieces": (lambda word_of: Tokens.from_pieces(["a", "b", "c"], word_of, ["ab", "c"]), {"word_of": [0, 0, 1]}),
    "Tokens.truncate": (Tokens.from_pieces(["a", "b", "c"]).truncate, {"limit": 2}),
    "Transformer": (Transformer, {"vocab": 7, "d_model": 12, "num_heads": 3, "layers": 1, "d_feedforward": 5, "source_vocab": 8}),
    "Transformer.generate": (
        lambda **n: WRITER.generate(torch.tensor([[1, 2]]), temperature=1.0, **n), {"start": 0, "stop": 6, "max_new_tokens": 2, "top_k": 3},
    ),
    "Transformer.prepare_decoding": (lambda length: WRITER.prepare_decoding(torch.randn(1, 3, 12), length), {"length": 4}),
    "TransformerConv": (lambda **n: conv(pyg.TransformerConv, **n), CONV),
    "Window": (lambda **n: MHA(X, over=Window(**n)), {"left": 3, "right": 2}),
    "add_text_evidence": (lambda batch: add_text_evidence(find_roles_in_text(PLAIN), PLAIN, batch=batch), {"batch": 1}),
    "attend": (lambda seed: attend(X, X, X, dropout=0.5, seed=seed), {"seed": 5}),
    "capture": (captured, {"layers": [0], "heads": [1, 2]}),
    "find_induction_heads": (lambda **n: find_induction_heads(Words(), **n), {"ids": 9, "length": 4, "rows": 2}),
    "find_roles_in_text": (lambda batch: find_roles_in_text(PLAIN, batch=batch), {"batch": 1}),
    "from_conv": (lambda head_dim: from_conv(nn.Conv2d(2, 2, 3), head_dim=head_dim), {"head_dim": 3}),
    "report": (lambda **n: report(ON_GRID, image=torch.rand(3, 3, 3), **n), {"batch": 1, "grid": (3, 3), "at": 4}),
    "rollout": (lambda token: rollout(captured(), token), {"token": 3}),
    "Bert": (lambda **n: Bert(bert.Config(**n)), {"d_model": 12, "heads": 3, "layers": 1, "d_feedforward": 16, "vocab": 9}),
    "Gpt": (lambda **n: Gpt(gpt.Config(**n)), {"d_model": 12, "heads": 3, "layers": 1, "vocab": 9}),
    "Llama": (lambda **n: Llama(llama.Config(**n)), {"d_model": 12, "heads": 3, "layers": 1, "d_feedforward": 16, "vocab": 9}),
}  # fmt: skip
# methods that layers, kernels and optimizers call with sizes of tensors, and what is made by the library itself
INTERNAL = re.compile(
    r"(check|interval|allows_pairs|attention_axes|select_batch_rows|unpadded_queries|rotate|factor|move|of_part|step_rule|neighbourhood)\."
    r"|^(Neighbourhood|Position|Score|Manifold|ConvolutionalAttention)\.|^Tokens\.(word_of|closing|unknown_id)$|^TransformerLayer\.norm$"
    r"|^Tokenizer\.decode"
)


def integer_parameters() -> set[str]:
    """`entry.parameter` of every public signature with an integer in its annotation."""
    found = set()

    def scan(entry, function):
        for parameter in inspect.signature(function).parameters.values():
            if re.search(r"\bint\b", str(parameter.annotation)):
                found.add(f"{entry}.{parameter.name}")

    for package in (polyhead, polyhead.nn, polyhead.optim, polyhead.inspection, polyhead.models, pyg):
        for name in package.__all__:
            entry = getattr(package, name)
            if inspect.isfunction(entry):
                scan(name, entry)
            if inspect.isclass(entry):
                scan(name, entry.__init__)
                for method, function in vars(entry).items():
                    function = getattr(function, "__func__", function)
                    if method[0] != "_" and inspect.isfunction(function):
                        scan(f"{name}.{method}", function)
    return {name for name in found if not INTERNAL.search(name)}


def convert(value, kind):
    return type(value)(convert(x, kind) for x in value) if isinstance(value, (tuple, list)) else kind(value)


def test_every_public_integer_has_a_row():
    rows = {f"{entry.split(' ')[0]}.{name}" for entry, (_, integers) in ENTRIES.items() for name in integers}
    assert sorted(integer_parameters() - rows) == []
    assert len(integer_parameters()) > 80


@pytest.mark.parametrize("kind", [np.int64, np.int32, np.uint8], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("entry", ENTRIES)
def test_integers_of_numpy_are_accepted(entry, kind):
    call, integers = ENTRIES[entry]
    call(**{name: convert(value, kind) for name, value in integers.items()})
