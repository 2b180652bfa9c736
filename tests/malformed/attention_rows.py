"""Malformed inputs of attend and its kin, of neighbourhoods, positions and scores."""

from __future__ import annotations

import warnings

import numpy as np
import torch
from malformed_row import HEADS, INF, LARGEST, NAN, Row, integers, numbers, tensors

from polyhead import (
    GAT,
    ALiBi,
    Causal,
    Dot,
    GATv2,
    Graph,
    Grid,
    Mask,
    Offsets,
    Padding,
    QuadraticOffset,
    RelativeBias,
    RopeScaling,
    Rotary,
    Segments,
    Window,
    attend,
    attention_weights,
    explain,
)

X = torch.randn(2, 4, 5, 8)
PAIRS = torch.tensor([[0, 1, 2], [1, 2, 0]])
GRAPH = Graph(PAIRS)
ON_GRAPH = torch.randn(4, 3, 8)


def strided_nested() -> torch.Tensor:
    """A nested tensor whose layout is that of a dense one."""
    with warnings.catch_warnings():
        # torch calls them a prototype
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor([X[0], X[1]])


def to(q=X, k=X, v=X, **options):
    return attend(q, k, v, **options)


ATTEND = [
    *tensors("attend", "q", lambda x: to(q=x)),
    *tensors("attend", "k", lambda x: to(k=x)),
    *tensors("attend", "v", lambda x: to(v=x)),
    Row("attend", "q has two axes", lambda: to(q=X[0, 0]), r"^q must have shape .*, got \(5, 8\)"),
    *(
        Row("attend", f"{name} is nested", lambda name=name: to(**{name: strided_nested()}), f"^{name} must be a dense tensor .*nested")
        for name in ("k", "v")
    ),
    Row("attend", "q is nested", lambda: to(q=torch.nested.nested_tensor([X[0], X[1]], layout=torch.jagged)), "^q must be a dense tensor .*nested"),
    Row("attend", "q is int", lambda: to(X.int(), X.int(), X.int()), "^q, k and v must be of one dtype, .* got torch.int32"),
    Row("attend", "q is complex", lambda: to(*[X.cfloat()] * 3), "^q, k and v must be of one dtype, .* got torch.complex64"),
    Row("attend", "k of another batch", lambda: to(k=X[:1]), "^q, k, v must have the same batch axes"),
    Row("attend", "k has two axes", lambda: to(k=X[0, 0]), "^q, k, v must have the same batch axes"),
    Row("attend", "k of other features", lambda: to(k=X[..., :7]), "^k must have as many features as q, 8, got 7"),
    Row("attend", "v of other items", lambda: to(v=X[:, :, :3]), "^v must have as many items as k, 5, got 3"),
    Row("attend", "heads that do not divide", lambda: to(k=X[:, :3], v=X[:, :3]), "^k, v must have a number of heads that divides the 4 heads of q, got 3 and 3"),
    Row("attend", "k without heads", lambda: to(k=X[:, :0]), "^k, v must have a number of heads .*, got 0 and 4"),
    Row("attend", "v of another dtype", lambda: to(v=X.double()), "^q, k and v must be of one dtype"),
    Row("attend", "k on another device", lambda: to(k=X.to("meta")), "^q, k, v must be on one device, got cpu, meta"),
    Row("attend", "over is a string", lambda: to(over="causal"), "^over must be a neighbourhood .*, got str"),
    Row("attend", "over is a class", lambda: to(over=Causal), "^over must be a neighbourhood .*, got the class Causal"),
    Row("attend", "over is a list", lambda: to(over=[[True]]), "^over must be a neighbourhood .*, got list"),
    Row("attend", "over is a number", lambda: to(over=3), "^over must be a neighbourhood .*, got int"),
    Row("attend", "over is an array", lambda: to(over=np.ones((5, 5), bool)), "^over must be a neighbourhood .*, got ndarray"),
    Row("attend", "over is an additive mask", lambda: to(over=torch.zeros(5, 5)), "^Mask: keep must be bool, .*got torch.float32"),
    Row("attend", "over is sparse", lambda: to(over=torch.eye(5).bool().to_sparse()), "^Mask: keep must be a dense tensor"),
    Row("attend", "over of other keys", lambda: to(over=torch.ones(5, 6).bool()), r"^Mask: keep must broadcast to .*got shape \(5, 6\)"),
    Row("attend", "over of another batch", lambda: to(over=Padding([1, 2, 3])), "^Padding: its leading axes must broadcast to the batch"),
    Row("attend", "over longer than the keys", lambda: to(over=Padding([1, 2**62])), "^Padding: lengths must be at most .*, got 4611686018427387904"),
    Row("attend", "segments of other keys", lambda: to(over=Segments([0, 1])), "^Segments: ids must cover 5 keys, got 2"),
    Row("attend", "a grid of other points", lambda: to(over=Grid(2, 3)), "^Grid: the number of keys must be 6, 2 x 3 points, got 5"),
    Row("attend", "offsets for other heads", lambda: to(over=Offsets([[0]], (5,))), "^Offsets: offsets must be for .* heads, got 1"),
    Row("attend", "a graph of other nodes", lambda: to(over=GRAPH), "^Graph: num_nodes must be the number of items, 5, got 3"),
    Row("attend", "score is None", lambda: to(score=None), "^score must be a Score such as Dot.., got None", TypeError),
    Row("attend", "score is a string", lambda: to(score="dot"), "^score must be a Score", TypeError),
    Row("attend", "score is a class", lambda: to(score=Dot), "^score must be a Score", TypeError),
    Row("attend", "score for other heads", lambda: to(score=GAT(3, 8)), "^score: GAT must be for 4 heads of 8 features, got one for 3 heads"),
    Row("attend", "score takes features", lambda: to(score=GATv2(4, 8, edge_dim=2)), "^over must be a graph with 2 features per edge for GATv2, got none"),
    Row("attend", "position is a string", lambda: to(position="rotary"), "^position must be a Position", TypeError),
    Row("attend", "position is a class", lambda: to(position=Rotary), "^position must be a Position", TypeError),
    Row("attend", "position for other heads", lambda: to(position=ALiBi(3)), "^ALiBi: num_heads must equal the layer's 4 heads, got 3"),
    Row("attend", "position for more features", lambda: to(position=Rotary(10)), "^Rotary: dim must be at most head_dim, 8, got 10"),
    Row("attend", "position on no grid", lambda: to(position=Rotary(axes=2)), "^over must be a Grid of 2 axes for Rotary"),
    *[row for row in tensors("attend", "bias", lambda x: to(bias=x)) if "None" not in row.case],
    Row("attend", "bias is bool", lambda: to(bias=torch.ones(5, 5).bool()), "^bias must be floating-point .*, got torch.bool; .*over="),
    Row("attend", "bias is int", lambda: to(bias=torch.ones(5, 5).int()), "^bias must be floating-point .*, got torch.int32"),
    Row("attend", "bias of another shape", lambda: to(bias=torch.ones(5, 6)), "^bias must broadcast to .*, got shape"),
    Row("attend", "bias on another device", lambda: to(bias=torch.ones(5, 5, device="meta")), "^bias must be on cpu"),
    Row("attend", "bias of other edges", lambda: to(*[ON_GRAPH] * 3, over=GRAPH, bias=torch.ones(4, 2)), "^bias must broadcast to .*, got shape"),
    *numbers("attend", "sink", lambda x: to(sink=x), "[-inf, inf]", NAN, "learned", True, [0.0]),
    Row("attend", "sink of other heads", lambda: to(sink=torch.zeros(3)), "^sink must be floating-point numbers, one per head"),
    Row("attend", "sink of integers", lambda: to(sink=torch.zeros(4).int()), "^sink must be floating-point"),
    *numbers("attend", "dropout", lambda x: to(dropout=x), "[0, 1)", -0.1, 1.0, 2, NAN, INF, "0.1", None, [0.1], torch.ones(2)),
    *integers("attend", "seed", lambda x: to(seed=x, dropout=0.5), -(2**63), 2**63 - 1),
    Row("attend", "seed without dropout", lambda: to(seed=2.5), "^seed must be an integer", TypeError),
    Row("attend", "seed of 70 bits", lambda: to(seed=2**70, dropout=0.5), "^seed must be an integer"),
    Row("attend", "seed is a float tensor", lambda: to(seed=torch.rand(())), "^seed must be an integer, or a tensor of one"),
    Row("attend", "seed is two", lambda: to(seed=torch.tensor([1, 2])), "^seed must be an integer, or a tensor of one"),
    Row("attend", "kernel is unknown", lambda: to(kernel="quick"), "^kernel must be one of .*, got 'quick'"),
    Row("attend", "kernel is a number", lambda: to(kernel=3), "^kernel must be one of .*, got 3"),
    Row("attend", "kernel refuses", lambda: to(kernel="tiled", bias=torch.rand(5, 5), over=Causal(), sink=0.0, score=GAT(4, 8)), "^kernel 'tiled' refuses"),
    *tensors("attention_weights", "q", lambda x: attention_weights(x, X)),
    *tensors("attention_weights", "k", lambda x: attention_weights(X, x)),
    Row("attention_weights", "bias is a list", lambda: attention_weights(X, X, bias=[0.0]), "^bias must be a tensor", TypeError),
    Row("attention_weights", "over is a string", lambda: attention_weights(X, X, over="all"), "^over must be a neighbourhood .*, got str"),
    *tensors("explain", "v", lambda x: explain(X, X, x)),
    *numbers("explain", "dropout", lambda x: explain(X, X, X, dropout=x), "[0, 1)", 1.0, NAN, "x"),
]  # fmt: skip

NEIGHBOURHOODS = [
    *integers("Window", "left", Window, 0, 2**63 - 1, "Window: left"),
    *integers("Window", "right", lambda x: Window(1, x), 0, 2**63 - 1, "Window: right"),
    Row("Window", "left is NaN", lambda: Window(NAN), "^Window: left must be an integer", TypeError),
    Row("Window", "left is two", lambda: Window(torch.tensor([1, 2])), "^Window: left must be an integer", TypeError),
    Row("Window", "left has thousands of digits", lambda: Window(10**5000), "^Window: left must be an integer .*got int"),
    Row("Padding", "None", lambda: Padding(None), "^Padding: lengths_or_keep must be a tensor", TypeError),
    Row("Padding", "a string", lambda: Padding("ab"), "^Padding: lengths_or_keep must be", TypeError),
    Row("Padding", "a dict", lambda: Padding({1: 2}), "^Padding: lengths_or_keep must be", TypeError),
    Row("Padding", "rows of different lengths", lambda: Padding([[1], [1, 2]]), "^Padding: lengths_or_keep must be", TypeError),
    Row("Padding", "a length of 70 bits", lambda: Padding([2**70]), "^Padding: lengths_or_keep must be", TypeError),
    Row("Padding", "floats", lambda: Padding([1.5]), "^Padding: lengths_or_keep must be .*float32"),
    Row("Padding", "nothing", lambda: Padding([]), "^Padding: lengths_or_keep must be"),
    Row("Padding", "complex", lambda: Padding(torch.ones(2).cfloat()), "^Padding: lengths_or_keep must be .*complex64"),
    Row("Padding", "one bool", lambda: Padding(True), "^Padding: lengths_or_keep must be .*bool"),
    Row("Padding", "a negative length", lambda: Padding([3, -1]), "^Padding: lengths must be 0 or more, got -1"),
    Row("Padding", "sparse", lambda: Padding(torch.eye(3).bool().to_sparse()), "^Padding: lengths_or_keep must be a dense tensor"),
    Row("Segments", "None", lambda: Segments(None), "^Segments: ids must be a tensor of integers", TypeError),
    Row("Segments", "a string", lambda: Segments("aab"), "^Segments: ids must be", TypeError),
    Row("Segments", "floats", lambda: Segments([0.5]), "^Segments: ids must be .*float32"),
    Row("Segments", "complex", lambda: Segments(torch.ones(2).cfloat()), "^Segments: ids must be .*complex64"),
    Row("Segments", "one id", lambda: Segments(3), "^Segments: ids must be"),
    Row("Segments", "query_ids of floats", lambda: Segments([0], [0.5]), "^Segments: query_ids must be"),
    Row("Segments", "query_ids is a string", lambda: Segments([0], "a"), "^Segments: query_ids must be", TypeError),
    Row("Mask", "None", lambda: Mask(None), "^over must be a neighbourhood .*, got None"),
    Row("Mask", "a list", lambda: Mask([[True]]), "^over must be a neighbourhood .*, got list"),
    Row("Mask", "floats", lambda: Mask(torch.zeros(2, 2)), "^Mask: keep must be bool, .*got torch.float32"),
    Row("Mask", "complex", lambda: Mask(torch.zeros(2, 2).cfloat()), "^Mask: keep must be bool, .*got torch.complex64"),
    Row("Mask", "twos", lambda: Mask(torch.full((2, 2), 2)), "^Mask: keep must be bool, or 0 and 1 .*got torch.int64 with other values"),
    Row("Mask", "one axis", lambda: Mask(torch.ones(3).bool()), r"^Mask: keep must have shape .*got \(3,\)"),
    Row("Mask", "no axis", lambda: Mask(torch.tensor(True)), r"^Mask: keep must have shape .*got \(\)"),
    Row("Mask", "one two", lambda: Mask(torch.tensor(2)), "^Mask: keep must be bool, .*got torch.int64"),
    Row("Mask", "sparse", lambda: Mask(torch.eye(3).bool().to_sparse()), "^Mask: keep must be a dense tensor"),
    *integers("Grid", "sizes", lambda x: Grid(4, x), name="Grid: sizes[1]"),
    Row("Grid", "no sizes", lambda: Grid(), r"^Grid: sizes must be one integer per axis, got \(\)"),
    Row("Grid", "sizes is None", lambda: Grid(None), "^Grid: sizes.0. must be an integer", TypeError),
    Row("Grid", "sizes is a string", lambda: Grid("44"), "^Grid: sizes.0. must be an integer", TypeError),
    Row("Grid", "sizes is an image", lambda: Grid(torch.ones(3, 8, 8)), "^Grid: sizes must be integers, got an array of shape"),
    Row("Grid", "sizes twice", lambda: Grid((4, 4), (3, 3)), "^Grid: sizes must be integers .*pass the window by name"),
    *integers("Grid", "window", lambda x: Grid(4, 4, window=x), name="Grid: window"),
    Row("Grid", "window is even", lambda: Grid(4, 4, window=2), "^Grid: window must be odd, .*got 2"),
    Row("Grid", "window for other axes", lambda: Grid(4, 4, window=(3,)), "^Grid: window must be one integer, or one for each of 2"),
    *integers("Grid", "dilation", lambda x: Grid(4, 4, window=3, dilation=x), name="Grid: dilation"),
    Row("Grid", "dilation without a window", lambda: Grid(4, dilation=2), "^Grid: dilation must be 1 without a window, got 2"),
    *integers("Grid", "stride", lambda x: Grid(4, 4, stride=x), name="Grid: stride"),
    Row("Grid", "stride for other axes", lambda: Grid(4, 4, stride=(1, 1, 1)), "^Grid: stride must be one integer, or one for each of 2"),
    *integers("Grid", "outputs", lambda x: Grid(4, outputs=(x,)), name="Grid: outputs[0]"),
    Row("Grid", "outputs beyond all numbers", lambda: Grid(4, stride=2**20, outputs=(2**20,)), "outputs - 1.* must be an integer in"),
    *integers("Grid", "prefix", lambda x: Grid(4, prefix=x), 0, name="Grid: prefix"),
    Row("Grid", "prefix with a stride", lambda: Grid(4, stride=2, prefix=1), "^Grid: prefix must be 0 with a stride or outputs, got 1"),
    Row("Offsets", "None", lambda: Offsets(None, (4,)), "^Offsets: offsets must be a tensor of integers", TypeError),
    Row("Offsets", "a string", lambda: Offsets("ab", (4,)), "^Offsets: offsets must be", TypeError),
    Row("Offsets", "rows of different lengths", lambda: Offsets([[1], [1, 2]], (4,)), "^Offsets: offsets must be", TypeError),
    Row("Offsets", "floats", lambda: Offsets([[0.5]], (4,)), "^Offsets: offsets must be .*float32"),
    Row("Offsets", "bool", lambda: Offsets([[True]], (4,)), "^Offsets: offsets must be .*bool"),
    Row("Offsets", "one axis", lambda: Offsets([1, 2], (4,)), "^Offsets: offsets must be"),
    Row("Offsets", "nothing", lambda: Offsets(torch.zeros(0, 1).long(), (4,)), "^Offsets: offsets must be"),
    Row("Offsets", "for other axes", lambda: Offsets([[1, 2]], (4,)), "^Offsets: offsets must be .*with 1 axes"),
    Row("Offsets", "2**62 away", lambda: Offsets([[2**62]], (4,)), r"^Offsets: offsets must be in \[-2147483647"),
    Row("Offsets", "as far back as there is", lambda: Offsets([[-(2**63)]], (4,)), "^Offsets: offsets must be in"),
    *integers("Offsets", "sizes", lambda x: Offsets([[0]], (x,)), name="Offsets: sizes[0]"),
    *integers("Offsets", "stride", lambda x: Offsets([[0]], (4,), stride=x), name="Offsets: stride"),
    Row("Offsets", "padding is unknown", lambda: Offsets([[0]], (4,), padding="mirror"), "^Offsets: padding must be one of .*, got 'mirror'"),
    Row("Offsets", "padding is None", lambda: Offsets([[0]], (4,), padding=None), "^Offsets: padding must be one of .*, got None"),
]  # fmt: skip

GRAPHS = [
    Row("Graph", "edge_index is None", lambda: Graph(None), "^edge_index must be a tensor of integers", TypeError),
    Row("Graph", "edge_index is a string", lambda: Graph("ab"), "^edge_index must be", TypeError),
    Row("Graph", "edge_index of different lengths", lambda: Graph([[0], [1, 2]]), "^edge_index must be", TypeError),
    Row("Graph", "edge_index of 70 bits", lambda: Graph([[2**70], [0]]), "^edge_index must be", TypeError),
    Row("Graph", "edge_index has one axis", lambda: Graph([0, 1]), r"^edge_index must have shape \(2, edges\), got \(2,\)"),
    Row("Graph", "edge_index is transposed", lambda: Graph(PAIRS.T[:, :2]), "^edge_index must have shape .*pass edge_index.T"),
    Row("Graph", "edge_index of floats", lambda: Graph(PAIRS.float()), "^edge_index must be integers, .*got torch.float32"),
    Row("Graph", "edge_index of bool", lambda: Graph(PAIRS.bool()), "^edge_index must be integers, .*got torch.bool"),
    Row("Graph", "edge_index is negative", lambda: Graph([[0], [-1]]), "^edge_index must have nodes in .*, got 0 -> -1 at edge 0"),
    Row("Graph", "edge_index beyond num_nodes", lambda: Graph([[0], [5]], 3), "^edge_index must have nodes in .*, got 0 -> 5 at edge 0"),
    Row("Graph", "a sparse tensor of three axes", lambda: Graph(torch.ones(2, 2, 2).to_sparse()), "^edge_index must have two axes as a sparse matrix"),
    *integers("Graph", "num_nodes", lambda x: Graph(PAIRS, x), 0, LARGEST - 1, "Graph: num_nodes"),
    Row("Graph", "num_nodes of three", lambda: Graph(PAIRS, (3, 3, 3)), "^Graph: num_nodes must be an integer, or"),
    Row("Graph", "num_nodes of a sparse matrix", lambda: Graph(torch.eye(3).to_sparse(), 4), r"^num_nodes must be \(3, 3\), .*sparse matrix, got 4"),
    Row("Graph", "features of other edges", lambda: Graph(PAIRS, features=torch.ones(2, 4)), "^features must be floating-point numbers .*got torch.float32 of shape"),
    Row("Graph", "features of integers", lambda: Graph(PAIRS, features=torch.ones(3, 4).int()), "^features must be floating-point numbers .*got torch.int32"),
    Row("Graph", "features is a string", lambda: Graph(PAIRS, features="abc"), "^features must be a tensor", TypeError),
    Row("Graph", "weights of other edges", lambda: Graph(PAIRS, weights=torch.ones(2)), "^weights must be floating-point numbers .*got torch.float32 of shape"),
    Row("Graph", "weights are NaN", lambda: Graph(PAIRS, weights=torch.full((3,), NAN)), "^weights must not contain NaN, got 3 of 3"),
    Row("Graph", "weights is a string", lambda: Graph(PAIRS, weights="abc"), "^weights must be a tensor", TypeError),
    Row("Graph", "batch of nothing", lambda: Graph.batch([]), "^Graph.batch: graphs must have at least one graph, got an empty list"),
    Row("Graph", "batch of tensors", lambda: Graph.batch([PAIRS]), "^Graph.batch: graphs must be a list of Graph, got", TypeError),
    Row("Graph", "batch of one", lambda: Graph.batch(GRAPH), "^Graph.batch: graphs must be a list", TypeError),
    Row("Graph", "self-loops filled by an unknown word", lambda: GRAPH.with_self_loops("max"), "^fill"),
    Row("Graph", "self-loops filled by a list of words", lambda: Graph(PAIRS, features=torch.ones(3, 2)).with_self_loops(["a"]), "^fill must be", TypeError),
    Row("Graph", "self-loops of two kinds of nodes", lambda: Graph(PAIRS, (3, 4)).with_self_loops(), "^with_self_loops: sources and destinations must be the same nodes, got 3 sources"),
    Row("Graph", "normalised two kinds of nodes", lambda: Graph(PAIRS, (3, 4)).gcn_normalise(), "^gcn_normalise: sources and destinations must be the same nodes, got 3 sources"),
    Row("Graph", "normalised negative degrees", lambda: Graph(PAIRS, weights=-torch.ones(3)).gcn_normalise(), "^gcn_normalise: degrees must be 0 or more, got -"),
    Row("Graph", "joined with rows of a batch", lambda: GRAPH & Padding([1, 2]), "^Graph: .*the same in the whole batch, got Padding.* differs by batch entry"),
    Row("Graph", "moved to no device", lambda: GRAPH.to("nowhere"), "^device must be"),
]  # fmt: skip

POSITIONS = [
    *integers("Rotary", "dim", Rotary, 2, name="Rotary: dim"),
    Row("Rotary", "dim is odd", lambda: Rotary(3), "^Rotary: dim must be even, got 3"),
    *numbers("Rotary", "base", lambda x: Rotary(base=x), "(0, inf)", 0, -1.0, NAN, INF, "x", None, True, name="Rotary: base"),
    *integers("Rotary", "axes", lambda x: Rotary(axes=x), name="Rotary: axes"),
    Row("Rotary", "scaling is a number", lambda: Rotary(scaling=2.0), "^Rotary: scaling must be a RopeScaling", TypeError),
    *numbers("RopeScaling", "factor", RopeScaling, "(0, inf)", 0, -1, NAN, INF, "2", None, True, name="RopeScaling: factor"),
    *integers("RopeScaling", "trained", lambda x: RopeScaling(2.0, x), name="RopeScaling: original_length"),
    *numbers("RopeScaling", "low", lambda x: RopeScaling(2.0, 8, low=x), "(0, inf)", 0, NAN, "1", name="RopeScaling: low"),
    *numbers("RopeScaling", "low", lambda x: RopeScaling(2.0, 8, low=x), "(0, 4)", 4.0, 5, name="RopeScaling: low"),
    *numbers("RopeScaling", "high", lambda x: RopeScaling(2.0, 8, high=x), "(0, inf)", 0, NAN, None, name="RopeScaling: high"),
    *integers("ALiBi", "num_heads", ALiBi, 1, HEADS, "ALiBi: num_heads"),
    Row("ALiBi", "num_heads=-1", lambda: ALiBi(-1), "^ALiBi: num_heads must be an integer"),
    *integers("RelativeBias", "num_heads", RelativeBias, 1, HEADS, "RelativeBias: num_heads"),
    *integers("RelativeBias", "buckets", lambda x: RelativeBias(2, buckets=x), 4, name="RelativeBias: buckets"),
    Row("RelativeBias", "buckets=6", lambda: RelativeBias(2, buckets=6), "^RelativeBias: buckets must be a multiple of 4"),
    *integers("RelativeBias", "max_distance", lambda x: RelativeBias(2, max_distance=x), 33, name="RelativeBias: max_distance"),
    *integers("RelativeBias", "window", lambda x: RelativeBias(2, window=(3, x)), name="RelativeBias: window[1]"),
    Row("RelativeBias", "window is one number", lambda: RelativeBias(2, window=7), "^RelativeBias: window must be a list", TypeError),
    Row("RelativeBias", "window is empty", lambda: RelativeBias(2, window=()), "^RelativeBias: window must be one odd integer"),
    Row("RelativeBias", "window is even", lambda: RelativeBias(2, window=(2, 3)), "^RelativeBias: window must be one odd integer"),
    Row("QuadraticOffset", "None", lambda: QuadraticOffset(None), "^QuadraticOffset: centres must be", TypeError),
    Row("QuadraticOffset", "a string", lambda: QuadraticOffset("ab"), "^QuadraticOffset: centres must be", TypeError),
    Row("QuadraticOffset", "rows of different lengths", lambda: QuadraticOffset([[0.0], [0.0, 1.0]]), "^QuadraticOffset: centres must be", TypeError),
    Row("QuadraticOffset", "one axis", lambda: QuadraticOffset([0.0, 1.0]), "^QuadraticOffset: centres must be"),
    Row("QuadraticOffset", "nothing", lambda: QuadraticOffset(torch.ones(0, 2)), "^QuadraticOffset: centres must be"),
    Row("QuadraticOffset", "NaN", lambda: QuadraticOffset([[NAN, 0.0]]), "^QuadraticOffset: centres must be finite"),
    Row("QuadraticOffset", "complex", lambda: QuadraticOffset(torch.ones(2, 2).cfloat()), "^QuadraticOffset: centres must be"),
    Row("QuadraticOffset", "bool", lambda: QuadraticOffset(torch.ones(2, 2).bool()), "^QuadraticOffset: centres must be"),
    *numbers("QuadraticOffset", "alpha", lambda x: QuadraticOffset([[0.0]], alpha=x), "(0, inf)", 0, -1.0, NAN, INF, "x", True, name="QuadraticOffset: alpha"),
    Row("QuadraticOffset", "padding is unknown", lambda: QuadraticOffset([[0.0]], padding="mirror"), "^QuadraticOffset: padding must be one of .*, got 'mirror'"),
]  # fmt: skip

SCORES = [
    *numbers("Dot", "scale", Dot, "(-inf, inf)", NAN, INF, -INF, "x", True, [1.0], torch.ones(2), 10**400, name="Dot: scale"),
    *(
        row
        for kind in (GAT, GATv2)
        for row in (
            *integers(kind.__name__, "num_heads", lambda x, kind=kind: kind(x, 4), 1, HEADS, f"{kind.__name__}: num_heads"),
            *integers(kind.__name__, "head_dim", lambda x, kind=kind: kind(2, x), name=f"{kind.__name__}: head_dim"),
            *integers(kind.__name__, "edge_dim", lambda x, kind=kind: kind(2, 4, edge_dim=x), name=f"{kind.__name__}: edge_dim"),
            *numbers(kind.__name__, "negative_slope", lambda x, kind=kind: kind(2, 4, negative_slope=x), "(-inf, inf)", NAN, INF, "x", None, name=f"{kind.__name__}: negative_slope"),
        )
    ),
    Row("GAT", "of a list", lambda: GAT.from_tensors([[1.0]], torch.ones(1, 1)), "^GAT.from_tensors: destination must be a tensor", TypeError),
    Row("GAT", "of one axis", lambda: GAT.from_tensors(torch.ones(3), torch.ones(3)), "^GAT.from_tensors: destination must be a tensor"),
    Row("GAT", "of other heads", lambda: GAT.from_tensors(torch.ones(2, 3), torch.ones(3, 3)), "^GAT.from_tensors: source must be a tensor"),
    Row("GAT", "of another edge", lambda: GAT.from_tensors(torch.ones(2, 3), torch.ones(2, 3), torch.ones(3, 1)), "^GAT.from_tensors: edge must be a tensor"),
    Row("GATv2", "of None", lambda: GATv2.from_tensors(None), "^GATv2.from_tensors: weight must be a tensor", TypeError),
    Row("GATv2", "of another edge", lambda: GATv2.from_tensors(torch.ones(2, 3), torch.ones(2, 3)), "^GATv2.from_tensors: edge must be a tensor"),
]  # fmt: skip

ROWS = [*ATTEND, *NEIGHBOURHOODS, *GRAPHS, *POSITIONS, *SCORES]
