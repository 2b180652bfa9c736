"""Malformed inputs that could end the process, hang it or take all of its memory: each is tried in a process of its own."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from malformed_row import HEADS, LARGEST, Row

from polyhead import (
    GAT,
    ALiBi,
    Euclidean,
    Graph,
    Grid,
    MultiHeadAttention,
    Offsets,
    Padding,
    RelativeBias,
    Segments,
    Stiefel,
    Window,
    attend,
)
from polyhead.inspection.roles.corpus import read_treebank
from polyhead.inspection.roles.find_roles import find_induction_heads
from polyhead.models import Bert, Llama
from polyhead.models.bert import Config as BertConfig
from polyhead.models.llama import Config as LlamaConfig
from polyhead.nn import FeedForward, Transformer

Q = torch.randn(1, 2, 16, 4)
HUGE = 2**62


def on_grid(**options):
    return attend(Q, Q, Q, over=Grid(4, 4, window=3, **options))


def heads():
    return MultiHeadAttention(8, 2)(torch.randn(16, 8), over=Grid(4, 4))[1]


def written(max_new_tokens):
    model = Transformer(7, d_model=12, num_heads=3, layers=1).eval()
    return model.generate(torch.tensor([[1]]), start=0, max_new_tokens=max_new_tokens)


def sentence(head):
    path = Path(tempfile.mkdtemp()) / "one.conllu"
    path.write_text("\t".join(["1", "a", "a", "NOUN", "_", "_", head, "root", "_", "_"]) + "\n\n")
    return read_treebank(path)


ROWS = [
    Row("Window", "2**63", lambda: attend(Q, Q, Q, over=Window(2**63)), r"^Window: left must be an integer in \[0, 9223372036854775807\]"),
    *(Row("Grid", f"dilation={n}", lambda n=n: on_grid(dilation=n), "^Grid: dilation must be an integer in") for n in (HUGE, 2**32, 3 * 2**32, 2**31, -1, 0)),
    *(Row("Grid", f"stride={n}", lambda n=n: on_grid(stride=n), "^Grid: stride must be an integer in") for n in (HUGE, -1)),
    Row("Grid", "window=2**62 + 1", lambda: attend(Q, Q, Q, over=Grid(4, 4, window=HUGE + 1)), "^Grid: window must be an integer in"),
    Row("Grid", "sizes=2**40", lambda: attend(Q, Q, Q, over=Grid(2**40)), r"^Grid: sizes\[0\] must be an integer in"),
    Row("Grid", "more points than keys", lambda: attend(Q, Q, Q, over=Grid(LARGEST, LARGEST, window=LARGEST)), "^Grid: the number of keys must be .* points, got 16"),
    Row("Grid", "prefix=2**62", lambda: attend(Q, Q, Q, over=Grid(4, 4, prefix=HUGE)), "^Grid: prefix must be an integer in"),
    Row("Offsets", "sizes as large as can be", lambda: Offsets([[0, 0]], (LARGEST, LARGEST)), "the entries of its table, must be an integer in"),
    Row("Offsets", "offsets=2**62", lambda: Offsets([[HUGE]], (4,), padding="reflect"), "^Offsets: offsets must be in"),
    Row("Padding", "a length of 2**62", lambda: attend(Q, Q, Q, over=Padding([HUGE])), "^Padding: lengths must be at most .*, got 4611686018427387904"),
    Row("Segments", "ids of 70 bits", lambda: Segments([2**70]), "^Segments: ids must be a tensor", TypeError),
    *(Row("Graph", f"num_nodes={n}", lambda n=n: Graph([[0], [1]], n), "^Graph: num_nodes must be an integer in") for n in (LARGEST, 2**40, HUGE)),
    *(Row("Graph", f"an edge to {n}", lambda n=n: Graph([[0], [n]]), "^edge_index must have fewer than .*nodes") for n in (2**40, HUGE, 2**63 - 1)),
    *(Row("ALiBi", f"num_heads={n}", lambda n=n: ALiBi(n), "^ALiBi: num_heads must be an integer in") for n in (HUGE, LARGEST)),
    Row("RelativeBias", "num_heads=2**62", lambda: RelativeBias(HUGE), "^RelativeBias: num_heads must be an integer in"),
    Row("RelativeBias", "buckets=2**62", lambda: RelativeBias(2, buckets=HUGE), "^RelativeBias: buckets must be an integer in"),
    Row("RelativeBias", "max_distance=2**62", lambda: RelativeBias(2, max_distance=HUGE), "^RelativeBias: max_distance must be an integer in"),
    Row("RelativeBias", "window of all points", lambda: RelativeBias(2, window=(LARGEST, LARGEST)), "^RelativeBias: weight must have at most"),
    Row("GAT", "more than can be counted", lambda: GAT(HEADS, LARGEST, edge_dim=LARGEST), "^GAT: its weight must have at most"),
    Row("attend", "seed=2**70", lambda: attend(Q, Q, Q, dropout=0.5, seed=2**70), "^seed must be an integer in"),
    Row("MultiHeadAttention", "d_model=2**31 - 1", lambda: MultiHeadAttention(LARGEST, 1), "^the largest projection must have at most"),
    Row("MultiHeadAttention", "head_dim=2**31 - 1", lambda: MultiHeadAttention(LARGEST, HEADS, head_dim=LARGEST), "^the largest projection must have at most"),
    Row("MultiHeadAttention.cache", "of all lengths", lambda: MultiHeadAttention(8, 2).cache(LARGEST, LARGEST), "^the cache must have at most"),
    Row("MultiHeadAttention.cache", "of more than there is room for", lambda: MultiHeadAttention(8, 2).cache(64, LARGEST), "^batch, length: not enough memory for keys and values", MemoryError),
    Row("FeedForward", "of all sizes", lambda: FeedForward(LARGEST, LARGEST), "^up must have at most"),
    Row("Transformer", "of all words", lambda: Transformer(LARGEST, d_model=LARGEST, num_heads=1), "^embedding must have at most"),
    Row("Transformer", "layers=2**31 - 1", lambda: Transformer(7, d_model=12, num_heads=3, layers=LARGEST), "^layers must be an integer in"),
    Row("Transformer.generate", "max_new_tokens=2**62", lambda: written(HUGE), "^max_new_tokens must be an integer in"),
    Row("Transformer.generate", "max_new_tokens=2**31 - 1", lambda: written(LARGEST), "^batch, length: not enough memory for keys and values", MemoryError),
    Row("Bert", "of all words", lambda: Bert(BertConfig(LARGEST, 1, 1, 16, vocab=LARGEST)), "^the word embeddings must have at most"),
    Row("Llama", "layers=2**31 - 1", lambda: Llama(LlamaConfig(12, 3, LARGEST, 16)), "^layers must be an integer in"),
    Row("Heads.average_by_offset", "reach=2**31 - 1", lambda: heads().average_by_offset(LARGEST), "^reach: the number of points around a query must be an integer in"),
    Row("Heads.average_by_offset", "reach=2**15", lambda: heads().average_by_offset(2**15), "^reach: the number of points around a query must be an integer in"),
    Row("Heads.heatmap", "size=2**62", lambda: heads().heatmap(HUGE), "^size must be an integer in"),
    Row("Heads.top", "k=2**62", lambda: heads().top(HUGE), "^k must be an integer in"),
    Row("Heads.plot", "size=2**62", lambda: heads().plot(size=HUGE), "^size must be an integer in"),
    Row("Stiefel.random", "of all sizes", lambda: Stiefel().random(LARGEST, LARGEST), "^the tensor must have at most"),
    Row("Euclidean.random", "of all sizes", lambda: Euclidean().random(LARGEST, LARGEST), "^the tensor must have at most"),
    Row("find_induction_heads", "ids=2**62", lambda: find_induction_heads(MultiHeadAttention(8, 2), HUGE), "^ids must be an integer in"),
    Row("read_treebank", "a head of thousands of digits", lambda: sentence("9" * 5000), "line 1: the head of the word must be an integer"),
]  # fmt: skip
