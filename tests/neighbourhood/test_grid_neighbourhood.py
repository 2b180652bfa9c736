"""Masks of grids and offsets in small pictures, error messages, and positions along the axes of a grid."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch
from torch.utils import _pytree as pytree

from polyhead import (
    Causal,
    Dense,
    Graph,
    Grid,
    MultiHeadAttention,
    Offsets,
    Padding,
    QuadraticOffset,
    RelativeBias,
    Rotary,
    Window,
    attend,
    explain,
)
from polyhead.neighbourhood import Sizes

CPU = torch.device("cpu")


def seen(over, query, head=0):
    """The points that one query sees, as a picture of the grid."""
    lattice = over.lattice
    queries, keys = torch.Size(lattice.outputs).numel(), torch.Size(lattice.sizes).numel()
    sizes = Sizes((), getattr(over, "heads", 1), queries, keys)
    over.check(sizes)
    mask = over.mask(sizes, CPU).expand(sizes.heads, queries, keys)
    number = query[0] * lattice.outputs[1] + query[1]
    return ["".join(".x"[int(x)] for x in row) for row in mask[head, number].reshape(lattice.sizes)]


def test_a_window_is_cut_off_at_the_border():
    assert seen(Grid(4, 5, window=3), (1, 2)) == [".xxx.", ".xxx.", ".xxx.", "....."]
    assert seen(Grid(4, 5, window=3), (0, 4)) == ["...xx", "...xx", ".....", "....."]
    assert seen(Grid(4, 5, window=(1, 5)), (2, 1)) == [".....", ".....", "xxxx.", "....."]
    assert seen(Grid(5, 5, window=3, dilation=2), (2, 1)) == [".x.x.", ".....", ".x.x.", ".....", ".x.x."]
    assert seen(Grid(2, 3), (0, 0)) == ["xxx", "xxx"]


def test_equivalent_ways_to_write_sizes_and_windows():
    image = torch.zeros(1, 3, 4, 5)
    assert repr(Grid(image.shape[-2:], window=3)) == repr(Grid([4, 5], window=(3, 3))) == repr(Grid(4, 5, window=3))
    assert repr(Grid(np.int64(4), 5, window=np.int64(3))) == "Grid(4, 5, window=3)"
    assert seen(Grid(4, 5, window=(1, None)), (2, 1)) == [".....", ".....", "xxxxx", "....."]
    assert seen(Grid(4, 5, window=(None, 3)), (2, 0)) == ["xx..."] * 4
    assert seen(Grid(4, 5, window=(None, 3), dilation=2), (2, 0)) == ["x.x.."] * 4
    # a window far larger than the grid costs no more than the grid
    assert len(Grid(4, 4, window=100_001).offsets()) == 49
    assert Rotary(axes=np.int64(2)).axes == 2


def test_prefix_tokens_see_all_and_are_seen_by_all():
    over = Grid(2, 3, window=1, prefix=1)
    mask = over.mask(Sizes((), 1, 7, 7), CPU)
    assert mask[0].all() and mask[:, 0].all()
    assert torch.equal(mask[1:, 1:], torch.eye(6).bool())
    # a ViT whose patches are rotated by their coordinates; [CLS] is not rotated
    layer = MultiHeadAttention(16, 2, position=Rotary(axes=2))
    x = torch.randn(2, 1 + 12, 16)
    _, heads = layer(x, over=Grid(3, 4, prefix=1))
    plain = MultiHeadAttention(16, 2)
    plain.load_state_dict(layer.state_dict())
    # the first patch, at (0, 0), is not rotated either: the ratio of its weight to that of [CLS] is the ratio without a position
    rotated, unrotated = heads.weights[:, :, 0], plain(x)[1].weights[:, :, 0]
    assert torch.allclose(rotated[..., 1] / rotated[..., 0], unrotated[..., 1] / unrotated[..., 0], rtol=1e-4)
    assert not torch.allclose(rotated[..., 2] / rotated[..., 0], unrotated[..., 2] / unrotated[..., 0], rtol=1e-4)
    assert heads.average_by_offset(1).shape == (2, 2, 3, 3)
    assert "on special tokens" in heads.plot(at=0).axes[0].get_title()


def test_a_stride_gives_fewer_queries():
    assert Grid(5, 4, stride=2).lattice.outputs == (3, 2)
    assert seen(Grid(5, 4, window=3, stride=2), (1, 1)) == ["....", ".xxx", ".xxx", ".xxx", "...."]
    assert seen(Grid(3, 3, window=3, stride=3, outputs=(2, 2)), (1, 1)) == ["...", "...", "..x"]


def test_an_offset_is_one_point_per_head():
    over = Offsets([(0, 0), (-1, 1)], (3, 4))
    assert seen(over, (1, 1), 0) == ["....", ".x..", "...."]
    assert seen(over, (1, 1), 1) == ["..x.", "....", "...."]
    assert seen(over, (0, 1), 1) == ["....", "....", "...."]
    assert seen(Offsets([(-1, 1)], (3, 4), padding="replicate"), (0, 3)) == ["...x", "....", "...."]
    assert seen(Offsets([(-1, 1)], (3, 4), padding="circular"), (0, 3)) == ["....", "....", "x..."]
    assert seen(Offsets([(-1, 1)], (3, 4), padding="reflect"), (0, 3)) == ["....", "..x.", "...."]
    assert seen(Offsets([[(0, 0), (0, 1)]], (3, 4)), (2, 3)) == ["....", "....", "...x"]


def test_repr():
    assert repr(Grid(64, 64, window=7)) == "Grid(64, 64, window=7)"
    assert repr(Grid(9, 8, window=(3, 5), dilation=2)) == "Grid(9, 8, window=(3, 5), dilation=2)"
    assert repr(Grid(9, 8, stride=2)) == "Grid(9, 8, stride=2, outputs=(5, 4))"
    assert repr(Offsets([(0, 1)], (5, 7))) == "Offsets(1 head, 5 x 7, stride=1, padding='zeros')"
    assert repr(Grid(2, 3, window=3) & Causal()) == "Grid(2, 3, window=3) & Causal()"


def call(over, heads=2, queries=6, keys=6, **more):
    q, k = torch.randn(1, heads, queries, 4), torch.randn(1, heads, keys, 4)
    return attend(q, k, k, over=over, **more)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Grid(), r"Grid: sizes must be one integer per axis, got \(\)"),
        (lambda: Grid(0, 3), r"Grid: sizes\[0\] must be an integer in \[1, 2147483647\], got 0"),
        (lambda: Grid(4.0), r"Grid: sizes\[0\] must be an integer in \[1, 2147483647\], got 4\.0"),
        (lambda: Grid(4, 4, window=2), r"Grid: window must be odd, with the query at its centre \(7 reaches 3 to each side\), got 2"),
        (lambda: Grid(4, 4, window=(3, 3, 3)), r"Grid: window must be one integer, or one for each of 2 axes, got \(3, 3, 3\)"),
        (lambda: Grid(4, 4, window=0), r"Grid: window must be an integer in \[1, 2147483647\], got 0"),
        (lambda: Grid(4, 4, dilation=2), r"Grid: dilation must be 1 without a window, got 2; pass window= too"),
        (lambda: call(Grid(2, 4)), r"Grid: the number of keys must be 8, 2 x 4 points, got 6; an image \(batch, channels"),
        (lambda: call(Grid(2, 3, stride=2)), r"Grid: the number of queries must be 2, 1 x 2 points, got 6"),
        (lambda: call(Offsets([(0, 0)], (2, 3))), r"Offsets: offsets must be for 2 heads, got 1"),
        (lambda: Offsets([(0, 0)], (2, 3, 4)), r"Offsets: offsets must be a tensor of integers \(heads, axes\) or \(heads, several, axes\), with 3 axes, got Tensor of torch\.int64 and shape \(1, 2\)"),
        (lambda: Offsets([(0.5, 0)], (2, 3)), r"Offsets: offsets must be a tensor of integers \(heads, axes\) or \(heads, several, axes\), with 2 axes, got Tensor of torch\.float32 and shape \(1, 2\)"),
        (lambda: Offsets([(0, 0)], (2, 3), padding="constant"), r"Offsets: padding must be one of 'zeros', 'replicate', 'circular', 'reflect', got 'constant'"),
        (lambda: call(None, position=Rotary(axes=2)), r"over must be a Grid of 2 axes for Rotary, got Dense\(\); pass over=Grid\(height, width\)"),
        (lambda: call(Grid(6), position=Rotary(axes=2)), r"over must be a Grid of 2 axes for Rotary, got Grid\(6\)"),
        (lambda: call(Grid(2, 3), position=QuadraticOffset([(0, 0)])), r"QuadraticOffset: centres must have one row per head, 2, got 1"),
        (lambda: Rotary(axes=0), r"Rotary: axes must be an integer in \[1, 2147483647\], got 0"),
        (lambda: Rotary(6, axes=2), "Rotary: dim must be a multiple of 4, two for each of 2 axes, got 6"),
        (lambda: MultiHeadAttention(12, 2, position=Rotary(axes=2)), r"Rotary: head_dim must be a multiple of 4, two for each of 2 axes, got 6"),
        (lambda: RelativeBias(2, window=(4, 3)), r"RelativeBias: window must be one odd integer per axis, got \(4, 3\); \(7,\) is for a line, \(7, 7\) for an image"),
        (lambda: RelativeBias(2, window=7), r"RelativeBias: window must be a list of integers in \[1, 2147483647\], got 7; \(7,\) is for a line, \(7, 7\) for an image"),
        (lambda: QuadraticOffset([0.0, 1.0]), r"QuadraticOffset: centres must be finite numbers \(heads, axes\), got Tensor of torch\.float32 and shape \(2,\)"),
        (lambda: QuadraticOffset([(0.0, float("nan"))]), r"QuadraticOffset: centres must be finite numbers \(heads, axes\), got Tensor of torch\.float32 and shape \(1, 2\)"),
        (lambda: QuadraticOffset([(0.0,)], padding="same"), r"QuadraticOffset: padding must be one of .*, got 'same'"),
        (lambda: Graph(torch.zeros(2, 1).long(), 6) & Offsets([(0, 0), (0, 1)], (2, 3)), r"differs by head"),
        (lambda: Grid(8, stride=2) & Causal(), r"&: Causal\(\) counts queries along the keys, but the queries of Grid\(8, stride=2"),
        (lambda: Window(2) & Offsets([(0,)], (8,), stride=2), r"&: Window\(left=2, right=2\) counts queries along the keys"),
        (lambda: Grid(2, 3) & Grid(3, 2), r"&: all parts must be on one grid, got Grid\(2, 3\) and Grid\(3, 2\)"),
        (lambda: call(Grid(6, stride=2), queries=3, position=Rotary()), r"position must have axes for Grid.* such as Rotary\(axes=1\)"),
        (lambda: call(Grid(2, 3), position=Rotary()), r"position must have 2 axes for Grid\(2, 3\), got Rotary along the sequence.*; pass Rotary\(axes=2\), or a bool mask"),
        (lambda: call(Grid(1, 2, 3) & Causal(), position=Rotary()), r"position must have 3 axes for .*; pass Rotary\(axes=3\)"),
        (lambda: call(Grid(2, 3), position=RelativeBias(2)), r"position must have 2 axes for .*; pass RelativeBias\(num_heads, window=\(7, 7\)\)"),
        (lambda: Grid((8, 8), 7), r"Grid: sizes must be integers or one sequence of them, got \(\(8, 8\), 7\); pass the window by name: Grid\(\(8, 8\), window=…\)"),
        (lambda: Grid(torch.ones(2, 3, 8, 8), window=3), r"Grid: sizes must be integers, got an array of shape \(2, 3, 8, 8\); pass the sizes of an image: Grid\(\*image.shape"),
        (lambda: Grid(np.array([8, 8])), r"Grid: sizes must be integers, got an array of shape \(2,\)"),
        (lambda: call(Grid(2, 3, stride=2)), r"the number of queries must be 2, .*got 6; with a stride, pass every second point as query"),
        (lambda: MultiHeadAttention(8, 2)(torch.ones(1, 8, 5, 5)), r"query must have shape \(..., items, 8\), got \(1, 8, 5, 5\); pass an image as query.flatten"),
        (lambda: Grid(2, 3, prefix=-1), r"Grid: prefix must be an integer in \[0, 2147483647\], got -1"),
        (lambda: Grid(4, stride=2, prefix=1), r"Grid: prefix must be 0 with a stride or outputs, got 1; prefix tokens are both queries and keys"),
        (lambda: call(Grid(1, 5)), r"Grid: the number of keys must be 5, 1 x 5 points, got 6; for tokens such as \[CLS\] in front pass prefix=1"),
        (lambda: call(Grid(2, 3, prefix=1)), r"Grid: the number of keys must be 7, 2 x 3 points and a prefix of 1, got 6"),
        (lambda: Offsets([(True, False)], (2, 3)), r"Offsets: offsets must be a tensor of integers \(heads, axes\) or \(heads, several, axes\), with 2 axes, got Tensor of torch\.bool and shape \(1, 2\)"),
        (lambda: Offsets(None, (2, 3)), r"Offsets: offsets must be a tensor of integers \(heads, axes\) or \(heads, several, axes\), with 2 axes, got None"),
        (lambda: Offsets([[(0, 0)], [(0, 0), (1, 1)]], (2, 3)), r"Offsets: offsets must be a tensor of integers \(heads, axes\) or \(heads, several, axes\), with 2 axes, got \[\[\(0, 0\)\], \[\(0, 0\), \(1, 1\)\]\]"),
        (lambda: RelativeBias(2, window=(True, 3)), r"RelativeBias: window\[0\] must be an integer in \[1, 2147483647\], got True; \(7,\) is for a line, \(7, 7\) for an image"),
        (lambda: QuadraticOffset([(0.0,)], alpha="x"), r"QuadraticOffset: alpha must be a number in \(0, inf\), got 'x'"),
        (lambda: MultiHeadAttention(8, 2, position=Rotary(axes=2)).project_kv(torch.ones(1, 6, 8)), r"project_kv works for positions along a sequence, got Rotary"),
    ],
)  # fmt: skip
def test_invalid_arguments_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_grid_filters_a_graph():
    pairs = torch.tensor([[0, 1, 5], [0, 3, 0]])
    assert (Graph(pairs, 6) & Grid(2, 3, window=3)).edge_index.tolist() == [[0, 1], [0, 3]]


@pytest.mark.parametrize("over", [Grid(4, 5, window=3), Grid(4, 5), Grid(2, 9, prefix=2), Grid(20)], ids=repr)
def test_distances_on_a_grid_are_between_points(over):
    torch.manual_seed(0)
    lattice = over.lattice
    points = lattice.key_coordinates(CPU).float()
    distance = torch.cdist(points, points)
    distance[: lattice.prefix] = distance[:, : lattice.prefix] = 0
    layer = MultiHeadAttention(8, 2)
    x = torch.randn(2, 20, 8)
    _, heads = layer(x, over=over)
    assert torch.allclose(heads.distance(), (heads.weights * distance).sum(-1), atol=1e-5)
    with torch.no_grad():
        assert torch.allclose(layer(x, over=over)[1].distance(), heads.distance(), atol=1e-5)
    head = MultiHeadAttention(8, 2)(torch.randn(1, 64, 8), over=Offsets([(1, 1), (0, 1)], (8, 8)))[1].distance()
    assert torch.allclose(head[0, :, 0], torch.tensor([2**0.5, 1.0]))


def test_equal_grids_are_equal():
    assert Grid(4, 5, window=3) == Grid((4, 5), window=(3, 3)) and len({Grid(4, 5), Grid(4, 5)}) == 1
    assert Grid(4, 5) != Grid(5, 4) and Grid(4, 5) != Grid(4, 5, prefix=1) and Grid(4, 5) != "Grid(4, 5)"


def test_a_difference_of_indices_determines_the_offset():
    # as long as a window fits into a row
    for over in (
        Grid(4, 5, window=3),
        Grid(3, 4, 7, window=(3, 3, 5)),
        Grid(9, window=3),
        Grid(4, 9, window=3, dilation=3),
    ):
        assert over.offset_is_unique
        points = over.lattice.key_coordinates(CPU)
        key, query = over.pairs(CPU)
        assert torch.equal(over.offset_of(key - query), points[key] - points[query])
    assert not Grid(4, 5, window=(3, 7)).offset_is_unique and not Grid(4, 5).offset_is_unique


@pytest.mark.parametrize(
    "over", [Grid(3, 4, window=3), Offsets([(0, 1), (1, 0)], (3, 4)), Grid(3, 4) & Padding([5])], ids=repr
)
def test_they_can_be_copied_pickled_compiled_and_vmapped(over):
    q = torch.randn(1, 2, 12, 4)
    expected = attend(q, q, q, over=over)
    for other in (copy.deepcopy(over), pickle.loads(pickle.dumps(over)), pytree.tree_map(lambda x: x, over)):
        assert repr(other) == repr(over)
        assert torch.equal(attend(q, q, q, over=other), expected)
    compiled = torch.compile(lambda q: attend(q, q, q, over=over), fullgraph=True, backend="aot_eager")
    assert torch.allclose(compiled(q), expected, atol=1e-6)
    assert torch.allclose(
        torch.vmap(lambda q: attend(q, q, q, over=over))(q[None].expand(2, *q.shape)),
        expected.expand(2, *expected.shape),
        atol=1e-6,
    )


@pytest.mark.parametrize("score", ["dot", "gat", "gatv2"])
def test_a_layer_over_a_window_equals_one_under_its_mask(score):
    torch.manual_seed(0)
    layer = MultiHeadAttention(12, 3, score=score)
    x = torch.randn(2, 35, 12)
    over = Grid(5, 7, window=3)
    y, heads = layer(x, over=over)
    z, masked = layer(x, over=over.mask(Sizes((), 1, 35, 35), CPU))
    assert torch.allclose(y, z, atol=1e-5)
    assert torch.allclose(heads.weights, masked.weights, atol=1e-6)
    assert torch.allclose(heads.entropy(), masked.entropy(), atol=1e-5)
    assert torch.allclose(heads.received(), masked.received(), atol=1e-5)
    assert heads.shape == (2, 3, 35, 35)


@pytest.mark.parametrize("position", [Rotary(axes=2), RelativeBias(2, window=(5, 5)), QuadraticOffset([(0, 1), (1, 0.5)], alpha=0.5)], ids=lambda p: type(p).__name__)  # fmt: skip
def test_positions_on_a_grid_depend_on_offsets_only(position):
    """The output at the centre of a patch does not depend on where the patch lies."""
    torch.manual_seed(0)
    patch = torch.randn(1, 2, 3, 3, 8)
    outputs = []
    for down, right in ((1, 1), (4, 2), (3, 5)):
        image = torch.zeros(1, 2, 8, 9, 8)
        image[:, :, down : down + 3, right : right + 3] = patch
        x = image.flatten(2, 3)
        out = attend(x, x, x, over=Grid(8, 9, window=3), position=position)
        outputs.append(out.unflatten(2, (8, 9))[:, :, down + 1, right + 1])
    for out in outputs[1:]:
        assert torch.allclose(out, outputs[0], atol=1e-5)


@pytest.mark.parametrize("window", [3, None])
def test_compiled_for_images_of_several_sizes(window):
    layer = MultiHeadAttention(8, 2, position=RelativeBias(2, window=(3, 3))).eval()
    run = lambda image: layer(image.flatten(2).transpose(1, 2), over=Grid(image.shape[-2:], window=window))[0]
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for sizes in ((5, 6), (7, 8), (4, 9)):
        image = torch.randn(1, 8, *sizes)
        assert torch.allclose(compiled(image), run(image), atol=1e-5)


def test_rotary_along_one_axis_is_rotary_along_a_sequence():
    q = torch.randn(2, 3, 17, 8)
    assert torch.allclose(
        attend(q, q, q, over=Grid(17), position=Rotary(axes=1)), attend(q, q, q, position=Rotary()), atol=1e-6
    )


def test_a_grid_without_a_window_is_dense():
    q = torch.randn(2, 3, 35, 8)
    assert torch.equal(attend(q, q, q, over=Grid(5, 7)), attend(q, q, q, over=Dense()))
    assert explain(q, q, q, over=Grid(5, 7)).kernel == explain(q, q, q).kernel
