"""Malformed inputs of views on heads and of the inspector."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from malformed_row import INF, LARGEST, NAN, Row, integers, numbers, tensors
from torch import nn

from polyhead import Causal, Graph, Grid, MultiHeadAttention, Padding, capture, report, self_dominance
from polyhead.inspection import (
    add_text_evidence,
    captured_variance,
    find_roles_in_text,
    plot_subspaces,
    principal_angles,
    rollout,
)
from polyhead.inspection.analysis.ablation import (
    ablate,
    ablate_cumulatively,
    ablate_embedding,
    causal_lm_loss,
    embedding_change_loss,
    importance,
    masked_lm_loss,
    rank_heads,
)
from polyhead.inspection.roles.corpus import (
    filter_by_length,
    find_shipped_sentence,
    read_gap,
    read_own_pairs,
    read_plain_text,
    read_treebank,
)
from polyhead.inspection.roles.find_roles import find_induction_heads, find_roles
from polyhead.inspection.roles.role_cards import Card
from polyhead.inspection.roles.text_model import TextModel
from polyhead.models import Tokens

X = torch.randn(2, 6, 12)
MHA = MultiHeadAttention(12, 3)
HEADS_SEEN = MHA(X)[1]
ON_GRAPH = MHA(X, over=Graph(torch.tensor([[0, 1], [1, 2]]), 6))[1]
ON_GRID = MHA(X, over=Grid(2, 3))[1]
IDS = torch.tensor([[1, 2, 3]])


def seen(**options):
    with capture(MHA, **options) as found:
        MHA(X)
    return found


def edited(*arguments, called=False, **options):
    with capture(MHA) as found:
        if called:
            MHA(X)
        found.edit(*arguments, **options)
        MHA(X)


def after_the_context():
    seen().edit("MultiHeadAttention", lambda x: x)


VIEWS = [
    *integers("Heads.top", "k", HEADS_SEEN.top, 1, 6),
    *integers("Heads.heatmap", "size", HEADS_SEEN.heatmap),
    *integers("Heads.agreement", "queries", HEADS_SEEN.agreement, 2),
    *integers("Heads.select_batch_entry", "batch", HEADS_SEEN.select_batch_entry, 0, 1),
    *integers("Heads.average_by_offset", "reach", lambda x: ON_GRID.average_by_offset((x, 1)), 0, name="reach[0]"),
    Row("Heads.average_by_offset", "reach is None", lambda: ON_GRID.average_by_offset(None), "^reach must be a list of integers", TypeError),
    Row("Heads.average_by_offset", "reach for other axes", lambda: ON_GRID.average_by_offset((1, 1, 1)), "^reach must be an integer, or one for each of 2 axes"),
    Row("Heads.average_by_offset", "no grid", lambda: HEADS_SEEN.average_by_offset(1), "^grid must be .* where over has no coordinates"),
    Row("Heads.average_by_offset", "on a graph", lambda: ON_GRAPH.average_by_offset(1), "^over must be a Grid for results on a grid, got Graph"),
    *integers("Heads.average_by_offset", "grid", lambda x: HEADS_SEEN.average_by_offset(1, grid=(x, 3)), name="grid[0]"),
    Row("Heads.average_by_offset", "grid of more points", lambda: HEADS_SEEN.average_by_offset(1, grid=(3, 3)), "^grid must have at most .* keys, 6, got 3 x 3 = 9$"),
    Row("Heads.average_by_offset", "grid is a string", lambda: HEADS_SEEN.average_by_offset(1, grid="33"), "^grid must be a list of integers", TypeError),
    Row("Heads.mass", "an unknown word", lambda: HEADS_SEEN.mass("last"), "^on must be one of", TypeError),
    Row("Heads.mass", "a float", lambda: HEADS_SEEN.mass(1.5), "^on must be one of", TypeError),
    Row("Heads.mass", "None", lambda: HEADS_SEEN.mass(None), "^on must be one of", TypeError),
    Row("Heads.mass", "a bool", lambda: HEADS_SEEN.mass(True), "^on must be one of", TypeError),
    Row("Heads.mass", "2**40 away", lambda: HEADS_SEEN.mass(2**40), "^on must be an integer in"),
    Row("Heads.mass", "a tensor of floats", lambda: HEADS_SEEN.mass(torch.ones(6)), "^on must be .*, got torch.float32"),
    Row("Heads.mass", "of other keys", lambda: HEADS_SEEN.mass(torch.ones(5).bool()), "^on must be .*, got torch.bool of shape"),
    Row("Heads.mass", "of another batch", lambda: HEADS_SEEN.mass(torch.ones(3, 6).bool()), "^on"),
    Row("Heads.mass", "keys of another batch", lambda: HEADS_SEEN.mass(torch.zeros(5, 1, 6).long()), "^on"),
    Row("Heads.received", "counts is a list", lambda: HEADS_SEEN.received([1.0]), "^counts must be .*, got list"),
    Row("Heads.received", "counts of other queries", lambda: HEADS_SEEN.received(torch.ones(5)), "^counts must be .*, got shape"),
    Row("Heads.select", "heads out of range", lambda: HEADS_SEEN.select(heads=3), r"^heads must be integers in \[-3, 2\]"),
    Row("Heads.select", "heads before the first", lambda: HEADS_SEEN.select(heads=-4), "^heads must be integers"),
    Row("Heads.select", "heads is a float", lambda: HEADS_SEEN.select(heads=[0.5]), "^heads must be integers"),
    Row("Heads.select", "heads is a string", lambda: HEADS_SEEN.select(heads="0"), "^heads must be a tensor of integers", TypeError),
    Row("Heads.select", "queries of 70 bits", lambda: HEADS_SEEN.select(queries=2**70), "^queries must be a tensor of integers", TypeError),
    Row("Heads.select", "keys are complex", lambda: HEADS_SEEN.select(keys=1j), "^keys must be integers"),
    Row("Heads.select", "keys are too few bools", lambda: HEADS_SEEN.select(keys=[True, False]), "^keys must be integers"),
    Row("Heads.select", "edges of no graph", lambda: HEADS_SEEN.select(edges=0), "^edges must be left out where"),
    Row("Heads.select", "edges out of range", lambda: ON_GRAPH.select(edges=2), "^edges must be integers"),
    Row("Heads.edge_index", "of no graph", lambda: HEADS_SEEN.edge_index, "^edge_index needs an attention over a Graph"),
    Row("Heads.measure", "an unknown metric", lambda: HEADS_SEEN.measure("spread"), "^metrics must be among .*, got 'spread'$"),
    Row("Heads.measure", "a number", lambda: HEADS_SEEN.measure(3), "^metrics must be names, .*, got 3$"),
    Row("Heads.measure", "an empty tuple", lambda: HEADS_SEEN.measure(()), r"^metrics must be names, .*, got \(\)$"),
    Row("Heads.measure", "a list", lambda: HEADS_SEEN.measure(["top", 3]), "^metrics must be names, .*, got .*top"),
    Row("Heads.measure", "an argument is missing", lambda: HEADS_SEEN.measure("top"), "^metrics must be among .*, got 'top'$"),
    Row("Heads.measure", "a tuple in a tuple", lambda: HEADS_SEEN.measure((("top",), 3)), "^metrics must be among "),
    Row("Heads.plot", "batch out of range", lambda: HEADS_SEEN.plot(batch=2), r"^batch must be an integer in \[0, 1\]"),
    Row("Heads.plot", "size is zero", lambda: HEADS_SEEN.plot(size=0), "^size must be an integer"),
    Row("Heads.plot", "tokens of other keys", lambda: HEADS_SEEN.plot(tokens=["a"]), "^tokens must have a name per key, 6, got 1"),
    Row("Heads.plot", "tokens is a number", lambda: HEADS_SEEN.plot(tokens=3), "^tokens must be", TypeError),
    Row("Heads.plot", "at without a grid", lambda: HEADS_SEEN.plot(at=(0, 0)), "^grid must be .* where over has no coordinates"),
    Row("Heads.plot", "at out of range", lambda: ON_GRID.plot(at=(2, 0)), r"^at\[0\] must be an integer in \[0, 1\]"),
    Row("Heads.plot", "at of other axes", lambda: ON_GRID.plot(at=(0, 0, 0)), "^at must be a point of 2 x 3 queries"),
    Row("Heads.plot", "at is a string", lambda: ON_GRID.plot(at="01"), "^at must be a point"),
    Row("Heads.plot", "at is a float", lambda: ON_GRID.plot(at=1.5), "^at must be a point"),
    Row("Heads.plot", "around and at", lambda: ON_GRID.plot(at=0, around=1), "^around must be left out with image or at"),
    Row("Heads.plot", "image is the name of a file", lambda: ON_GRID.plot(image="photo.png"), "^image must be a NumPy array, a tensor or a PIL image, got the path 'photo.png'"),
    Row("Heads.plot", "image has five axes", lambda: ON_GRID.plot(image=torch.ones(1, 1, 3, 2, 2)), "^image must be numbers .*got float32 of shape"),
    Row("Heads.plot", "image of words", lambda: ON_GRID.plot(image=[["a"]]), "^image must be numbers .*got <U1"),
    Row("Heads.plot", "image is NaN", lambda: ON_GRID.plot(image=torch.full((3, 4, 4), NAN)), "^image must be finite, got NaN or inf"),
    Row("Heads.plot", "image of different lengths", lambda: ON_GRID.plot(image=[[1.0], [1.0, 2.0]]), "^image"),
]  # fmt: skip

CAPTURE = [
    Row("capture", "model is None", lambda: capture(None).__enter__(), "^model must be a torch.nn.Module, got None"),
    Row("capture", "model is a function", lambda: capture(torch.relu).__enter__(), "^model must be a torch.nn.Module, got builtin_function_or_method"),
    Row("capture", "layers is unknown", lambda: seen(layers=["nope"]), r"^layers\[0\] must be the name of a module .*got 'nope'"),
    Row("capture", "layers is a pattern of nothing", lambda: seen(layers=["q_proj", "x.*"]), r"^layers\[1\] must be the name of a module"),
    Row("capture", "layers is a number", lambda: seen(layers=3), "^layers must be a list of .*, got 3"),
    Row("capture", "layers is a string", lambda: seen(layers="q_proj"), "^layers must be a list of .*, got 'q_proj'"),
    Row("capture", "layers is negative", lambda: seen(layers=[-1]), r"^layers\[0\] must be an integer in \[0,"),
    Row("capture", "layers is a float", lambda: seen(layers=[1.5]), "^layers must be a list of .*, got .1.5."),
    Row("capture", "layers is a bool", lambda: seen(layers=[True]), "^layers must be a list of .*, got .True."),
    Row("capture", "heads is a number", lambda: seen(heads=2), "^heads must be a list of integers", TypeError),
    Row("capture", "heads is a float", lambda: seen(heads=[0.5]), r"^heads\[0\] must be an integer", TypeError),
    Row("capture", "heads is a string", lambda: seen(heads="01"), "^heads must be a list", TypeError),
    Row("capture", "heads that are not there", lambda: seen(heads=[7]), "^heads must be integers in"),
    Row("capture", "metrics is a string", lambda: seen(metrics="entropy"), "^metrics must be a list of .*, got 'entropy'"),
    Row("capture", "metrics is unknown", lambda: seen(metrics=["spread"]), "^metrics must be among .*, got 'spread'"),
    Row("capture", "metrics is a number", lambda: seen(metrics=[3]), "^metrics must be a list of .*, got .3."),
    Row("capture", "a name that made no call", lambda: seen()["nope"], "'nope' made no attention call", KeyError),
    Row("capture", "a metric that was not kept", lambda: seen(metrics=["entropy"])["MultiHeadAttention"].top(2), "^metrics: .'top', 2. was not kept"),
    Row("Capture.edit", "change is a number", lambda: edited("MultiHeadAttention", 3), "^change must be a function from a tensor to a tensor, got int"),
    Row("Capture.edit", "of is unknown", lambda: edited("MultiHeadAttention", lambda x: x, "scores"), "^of must be 'outputs' or 'weights', got 'scores'"),
    Row("Capture.edit", "name is unknown", lambda: edited("nope", lambda x: x, called=True), "^name: 'nope' made no attention call"),
    Row("Capture.edit", "after the context", after_the_context, "^edit must be called inside the context of capture, which has ended"),
    Row("Capture.edit", "change returns nothing", lambda: edited("MultiHeadAttention", lambda x: None), "^change must return outputs of shape .*, got NoneType"),
    Row("Capture.edit", "change returns another shape", lambda: edited("MultiHeadAttention", lambda x: x[:1]), "^change must return outputs of shape .2, 3, 6, 4., got .1, 3, 6, 4."),
    Row("rollout", "nothing", lambda: rollout({}, 0), "^seen must have at least one layer"),
    Row("rollout", "a number", lambda: rollout(3, 0), "^seen must be what capture records", TypeError),
    Row("rollout", "numbers only", lambda: rollout(seen(metrics=["entropy"]), 0), "^seen must be what capture records", TypeError),
    Row("rollout", "layers of different lengths", lambda: rollout({"a": HEADS_SEEN, "b": MHA(X[:, :4])[1]}, 0), "^seen must be self-attention of one length in all layers, got"),
    *integers("rollout", "token", lambda x: rollout(seen(), x), -6, 5),
]  # fmt: skip

CARD = Card(0, 9, "broad", 0.5, 0.1, 3, 0.4, 0.6)
REPORT = [
    Row("report", "heads is a layer", lambda: report(MHA), "^heads must be a Heads, or a mapping.* got MultiHeadAttention", TypeError),
    Row("report", "heads is empty", lambda: report({}), "^heads must have at least one layer"),
    Row("report", "heads of tensors", lambda: report({"a": X}), r"^heads\['a'\] must be a Heads, got Tensor", TypeError),
    Row("report", "texts is a string", lambda: report(HEADS_SEEN, texts="abcdef"), "^texts must be Tokens, .*got str"),
    Row("report", "texts is a number", lambda: report(HEADS_SEEN, texts=3), "^texts must be Tokens, .*got int"),
    Row("report", "texts of other tokens", lambda: report(HEADS_SEEN, texts=["a"]), "^texts of .* must have 6 pieces, one per query, got 1"),
    Row("report", "texts without words", lambda: report(HEADS_SEEN, texts=Tokens.from_pieces(tuple("abcdef"), (0,), ("a",))), "^texts must have a word_of of 6 entries, one per piece, got 1"),
    Row("report", "initial_head out of range", lambda: report(HEADS_SEEN, initial_head=(0, 9)), "^initial_head must be .layer, head. of one of 1 layers"),
    Row("report", "initial_head is a number", lambda: report(HEADS_SEEN, initial_head=3), "^initial_head must be .layer, head."),
    Row("report", "initial_head of one", lambda: report(HEADS_SEEN, initial_head=(0,)), "^initial_head must be .layer, head."),
    Row("report", "initial_head is a string", lambda: report(HEADS_SEEN, initial_head="L0H0"), "^initial_head must be .layer, head."),
    Row("report", "cards of other heads", lambda: report(HEADS_SEEN, cards=[CARD]), "^cards.0. must be about a head of the 1 layers, got L0H9"),
    Row("report", "cards is a string", lambda: report(HEADS_SEEN, cards="a"), "^cards must be", TypeError),
    *integers("report", "batch", lambda x: report(HEADS_SEEN, batch=x), 0, 1),
    Row("report", "grid without an image", lambda: report(HEADS_SEEN, grid=(2, 3)), "^grid must be None without an image, got .*; pass image= too"),
    Row("report", "at without an image", lambda: report(HEADS_SEEN, at=0), "^at must be None without an image, got 0"),
    Row("report", "image of no layer", lambda: report(HEADS_SEEN, image=torch.ones(3, 4, 4)), "^image must have a layer over a grid"),
    Row("report", "image is the name of a file", lambda: report(ON_GRID, image="photo.png"), "^image must be a NumPy array, a tensor or a PIL image, got the path 'photo.png'"),
    Row("report", "at out of range", lambda: report(ON_GRID, image=torch.ones(3, 4, 4), at=(5, 5)), r"^at\[0\] must be an integer"),
    Row("report", "title is a number", lambda: report(HEADS_SEEN, title=3), "^title must be", TypeError),
    Row("report", "notes is a number", lambda: report(HEADS_SEEN, notes=3), "^notes must be", TypeError),
    Row("report", "path in no folder", lambda: report(HEADS_SEEN, "/no/such/folder/page.html"), "^path must be in a folder that exists", FileNotFoundError),
    Row("report", "path is a number", lambda: report(HEADS_SEEN, 3), "^path must be", TypeError),
]  # fmt: skip

FLAT = torch.ones(4, 12)
NUMBERS = [
    *tensors("self_dominance", "x", self_dominance),
    Row("self_dominance", "x has one axis", lambda: self_dominance(X[0, 0]), "^x must have shape .*, got .12,."),
    Row("self_dominance", "x without items", lambda: self_dominance(X[:, :0]), "^x must have at least one item"),
    Row("self_dominance", "x of integers", lambda: self_dominance(X.int()), "^x must be a real floating-point tensor, got torch.int32"),
    Row("self_dominance", "x is NaN", lambda: self_dominance(X * NAN), "^x must be finite, got NaN or inf"),
    Row("self_dominance", "x of other features", lambda: self_dominance(X[..., :7], MHA), "^x must have shape .*12.*, got .2, 6, 7."),
    Row("self_dominance", "layer is another module", lambda: self_dominance(X, nn.Linear(12, 12)), "^layer must be a MultiHeadAttention", TypeError),
    Row("self_dominance", "over is a string", lambda: self_dominance(X, over="causal"), "^over must be a neighbourhood .*, got str"),
    Row("self_dominance", "over of another batch", lambda: self_dominance(X, over=Padding([1, 2, 3])), "^Padding: its leading axes must broadcast to the batch"),
    *numbers("self_dominance", "scale", lambda x: self_dominance(X, scale=x), "(0, inf)", 0, -1, NAN, INF, "x"),
    Row("self_dominance", "scale of a layer", lambda: self_dominance(X, MHA, scale=1.0), "^scale must be None with a layer, .*got 1.0"),
    Row("principal_angles", "layer is a number", lambda: principal_angles(3), "^layer must be a MultiHeadAttention, got int"),
    Row("principal_angles", "of is unknown", lambda: principal_angles(MHA, "z"), "^of must be a projection of this layer, .*, got 'z'"),
    Row("principal_angles", "of is a list", lambda: principal_angles(MHA, ["q"]), "^of must be a projection of this layer, .*, got .'q'."),
    Row("principal_angles", "to is a number", lambda: principal_angles(MHA, to=3), "^to must be a MultiHeadAttention, got int"),
    Row("principal_angles", "to of other features", lambda: principal_angles(MHA, to=MultiHeadAttention(6, 3)), "^to must have a v_proj of 12 features, as layer has, got 6"),
    *tensors("captured_variance", "x", lambda x: captured_variance(MHA, x)),
    Row("captured_variance", "x of other features", lambda: captured_variance(MHA, X[..., :7]), "^x must have shape .*12.*, got .2, 6, 7."),
    Row("captured_variance", "x of integers", lambda: captured_variance(MHA, X.int()), "^x must be a real floating-point tensor, got torch.int32"),
    Row("captured_variance", "x is infinite", lambda: captured_variance(MHA, X * INF), "^x must be finite, got NaN or inf"),
    Row("captured_variance", "x is all the same", lambda: captured_variance(MHA, FLAT), "^x must have items that differ, got 4 equal ones"),
    Row("captured_variance", "layer is a number", lambda: captured_variance(3, X), "^layer must be a MultiHeadAttention, got int"),
    Row("plot_subspaces", "layer is a number", lambda: plot_subspaces(3), "^layer must be a MultiHeadAttention, got int"),
    Row("plot_subspaces", "x of another letter", lambda: plot_subspaces(MHA, {"z": X}), "^x must name projections of this layer, .*, got 'z'"),
    Row("plot_subspaces", "x is a string", lambda: plot_subspaces(MHA, "abc"), "^x must be a tensor", TypeError),
]  # fmt: skip


class Reader(nn.Module):
    """Reads ids, and pays attention to them."""

    def __init__(self):
        super().__init__()
        self.words, self.layer = nn.Embedding(7, 12), MultiHeadAttention(12, 3)

    def forward(self, ids):
        return self.layer(self.words(ids), over=Causal())[0]


VIEW = MultiHeadAttention(16, 4)(torch.randn(1, 5, 16))[1]
READER = Reader()
LOSS = lambda: READER(IDS).sum()
EFFECTS = [
    Row("ablate", "by is unknown", lambda: ablate(READER, LOSS, by="noise"), "^by must be 'zero' or 'mean', got 'noise'"),
    Row("find_roles_in_text", "heads is a number", lambda: find_roles_in_text(3), "^heads must be a Heads, or a mapping", TypeError),
    Row("find_roles_in_text", "text is a string", lambda: find_roles_in_text(VIEW, "text"), "^text must be Tokens or None, got", TypeError),
    Row("find_roles_in_text", "batch is too large", lambda: find_roles_in_text(VIEW, batch=7), r"^batch must be an integer in \[0, 0\], got 7"),
    Row("add_text_evidence", "found is a number", lambda: add_text_evidence(3, VIEW), "^found must be a FoundRoles", TypeError),
    Row("add_text_evidence", "heads is a number", lambda: add_text_evidence(find_roles_in_text(VIEW), 3), "^heads must be a Heads", TypeError),
    Row("ablate", "loss returns a list", lambda: ablate(READER, lambda: [1.0]), "^loss must return one number, such as a float or a tensor of one number, got list"),
    Row("ablate", "loss returns many", lambda: ablate(READER, lambda: READER(IDS)), "^loss must return one number, .*, got shape .1, 3, 12."),
    Row("ablate", "loss is a number", lambda: ablate(READER, 3), "^loss must be a function", TypeError),
    Row("ablate", "loss calls no attention", lambda: ablate(READER, lambda: torch.zeros(())), "^model: no attention call seen"),
    Row("ablate", "model is a string", lambda: ablate("bert", LOSS), "^model must be a torch.nn.Module, got str"),
    Row("importance", "loss is None", lambda: importance(READER, None), "^loss must be a function", TypeError),
    Row("importance", "loss returns many", lambda: importance(READER, lambda: READER(IDS)), "^loss must return one number, .*, got shape .1, 3, 12."),
    Row("rank_heads", "a list", lambda: rank_heads([1.0]), "^scores must be a dict", TypeError),
    Row("ablate_cumulatively", "by is unknown", lambda: ablate_cumulatively(READER, LOSS, [], by="noise"), "^by must be 'zero' or 'mean', got 'noise'"),
    Row("ablate_cumulatively", "order of another layer", lambda: ablate_cumulatively(READER, LOSS, [("nope", 0)]), "^order: nope made no attention call"),
    Row("ablate_cumulatively", "order of another head", lambda: ablate_cumulatively(READER, LOSS, [("layer", 9)]), r"^order: the number of a head of layer must be an integer in \[0, 2\]"),
    Row("ablate_cumulatively", "order of numbers", lambda: ablate_cumulatively(READER, LOSS, [3]), "^order must be", TypeError),
    Row("ablate_embedding", "by is unknown", lambda: ablate_embedding(READER, READER, IDS[0], by="noise"), "^by must be 'zero' or 'mean', got 'noise'"),
    Row("ablate_embedding", "ids is a list", lambda: ablate_embedding(READER, READER, [1, 2]), "^ids must be a tensor", TypeError),
    *tensors("causal_lm_loss", "ids", lambda x: causal_lm_loss(READER, x)),
    *tensors("masked_lm_loss", "ids", lambda x: masked_lm_loss(READER, x, 0)),
    *integers("masked_lm_loss", "mask_id", lambda x: masked_lm_loss(READER, IDS, x, share=1.0), 0),
    *numbers("masked_lm_loss", "share", lambda x: masked_lm_loss(READER, IDS, 0, share=x), "[0, 1]", -0.1, 1.5, NAN, "x", None),
    Row("masked_lm_loss", "share of nothing", lambda: masked_lm_loss(READER, IDS, 0, share=0.0), "^share must mask at least one of 3 tokens, got 0.0"),
    *integers("masked_lm_loss", "seed", lambda x: masked_lm_loss(READER, IDS, 0, seed=x), 0, 2**63 - 1),
    Row("embedding_change_loss", "embed is None", lambda: embedding_change_loss(None), "^embed must be a function", TypeError),
    Row("find_roles", "model is a module", lambda: find_roles(READER), "^model must be a TextModel, got Reader"),
    Row("find_roles", "no sentences", lambda: find_roles(TextModel(READER, None), sentences=[]), "^sentences must have a text that the model can read, got none"),
    Row("TextModel.of", "a slow tokenizer", lambda: TextModel.from_tokenizer(READER, SimpleNamespace()), "^tokenizer must map tokens to words, .* got SimpleNamespace"),
    Row("find_induction_heads", "model is None", lambda: find_induction_heads(None, 7), "^model must be a torch.nn.Module", TypeError),
    *integers("induction", "ids", lambda x: find_induction_heads(READER, x), 1, 2**24)[:2],
    *integers("induction", "ids", lambda x: find_induction_heads(READER, [1, x]), 0, name="ids[1]"),
    Row("find_induction_heads", "ids is None", lambda: find_induction_heads(READER, None), "^ids must be a list of integers", TypeError),
    Row("find_induction_heads", "ids of nothing", lambda: find_induction_heads(READER, []), "^ids must be 1 or more"),
    *integers("induction", "length", lambda x: find_induction_heads(READER, 7, length=x), 2, 2**20),
    *integers("induction", "rows", lambda x: find_induction_heads(READER, 7, rows=x), 1, 2**20),
    *integers("filter_by_length", "limit", lambda x: filter_by_length([], x), 0),
    *integers("filter_by_length", "shortest", lambda x: filter_by_length([], shortest=x, longest=LARGEST), 0),
    *integers("filter_by_length", "longest", lambda x: filter_by_length([], longest=x), 5),
    Row("find_shipped_sentence", "a string", lambda: find_shipped_sentence("the cat"), "^words must be a list of str", TypeError),
    Row("find_shipped_sentence", "None", lambda: find_shipped_sentence(None), "^words must be a list of str", TypeError),
    Row("read_treebank", "no file", lambda: read_treebank("/no/such/file"), "^/no/such/file cannot be read"),
    Row("read_treebank", "None", lambda: read_treebank(None), "^path must be", TypeError),
    Row("read_gap", "no file", lambda: read_gap("/no/such/file"), "^/no/such/file cannot be read"),
    Row("read_gap", "a number", lambda: read_gap(3), "^path must be", TypeError),
    Row("read_own_pairs", "no file", lambda: read_own_pairs("/no/such/file"), "^/no/such/file cannot be read"),
    Row("read_own_pairs", "a folder", lambda: read_own_pairs("/"), "^/ cannot be read"),
    Row("read_plain_text", "no file", lambda: read_plain_text("/no/such/file"), "^/no/such/file cannot be read"),
]  # fmt: skip

ROWS = [*VIEWS, *CAPTURE, *REPORT, *NUMBERS, *EFFECTS]
