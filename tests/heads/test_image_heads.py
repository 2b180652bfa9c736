"""Heads on a grid: one query over an image, and weights by offset."""

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg

from polyhead import Graph, MultiHeadAttention, Padding
from polyhead.metrics import blocks
from polyhead.neighbourhood import Grid, Offsets
from polyhead.pixels import to_rgb_pixels

TAPS = [(-1, 0), (0, 0), (2, 1)]


def make_heads(*shape, over=None, heads=6, queries=None):
    torch.manual_seed(0)
    mha = MultiHeadAttention(30, heads)
    x = torch.randn(*shape, 30)
    return mha(*((x,) if queries is None else (torch.randn(*shape[:-1], queries, 30), x)), over=over)[1]


def average_by_definition(weights, sizes, reach, outputs=None, stride=None, special=0):
    """`average_by_offset` by its definition: loops over queries and steps."""
    outputs, stride = outputs or sizes, stride or (1,) * len(sizes)
    result = torch.zeros(*weights.shape[:-2], *(2 * n + 1 for n in reach))
    places = list(itertools.product(*map(range, outputs)))
    first = weights.shape[-2] - len(places)
    for number, point in enumerate(places):
        for step in itertools.product(*(range(-n, n + 1) for n in reach)):
            at = [p * s + d for p, s, d in zip(point, stride, step, strict=True)]
            if all(0 <= a < n for a, n in zip(at, sizes, strict=True)):
                cell = tuple(d + n for d, n in zip(step, reach, strict=True))
                key = special + int(np.ravel_multi_index(at, sizes))
                result[(..., *cell)] += weights[..., first + number, key] / len(places)
    return result


@pytest.mark.parametrize(
    "sizes, reach, options",
    [
        ((5, 7), (2, 3), {}),
        ((5, 7), (1, 1), {"window": 3}),
        ((5, 7), (2, 2), {"window": 3, "dilation": 2}),
        ((5, 7), (2, 2), {"window": 5, "stride": 2}),
        ((11,), (3,), {"window": 5}),
        ((3, 2, 4), (1, 1, 2), {"window": 3}),
    ],
    ids=str,
)
def test_around_equals_its_definition(sizes, reach, options, monkeypatch):
    over = Grid(*sizes, **options)
    heads = make_heads(2, int(np.prod(sizes)), over=over, queries=int(np.prod(over.outputs)))
    want = average_by_definition(heads.weights.detach(), sizes, reach, over.outputs, over.stride)
    assert heads.average_by_offset(reach).shape == (2, 6, *(2 * n + 1 for n in reach))
    torch.testing.assert_close(heads.average_by_offset(reach).detach(), want)
    # in blocks of a few queries
    monkeypatch.setattr(blocks, "BLOCK_WEIGHTS", 100)
    torch.testing.assert_close(heads.average_by_offset(reach).detach(), want)
    part = heads.select(heads=[4, 1])
    torch.testing.assert_close(part.average_by_offset(reach).detach(), want[:, [4, 1]])


def test_around_of_offsets_is_one_cell_per_head():
    heads = make_heads(2, 35, over=Offsets(TAPS, (5, 7)), heads=3)
    around = heads.average_by_offset(2)
    for head, (down, right) in enumerate(TAPS):
        inside = (5 - abs(down)) * (7 - abs(right)) / 35
        want = torch.zeros(5, 5)
        want[2 + down, 2 + right] = inside
        torch.testing.assert_close(around[:, head].detach(), want.expand(2, 5, 5))


def test_around_with_special_tokens_and_selected_queries():
    heads = make_heads(2, 37)
    torch.testing.assert_close(
        heads.average_by_offset(1, grid=(5, 7)).detach(),
        average_by_definition(heads.weights.detach(), (5, 7), (1, 1), special=2),
    )
    # the sum over all offsets is the weight of points on points
    total = heads.average_by_offset((4, 6), grid=(5, 7)).sum((-2, -1))
    torch.testing.assert_close(total, heads.weights[..., 2:, 2:].sum(-1).mean(-1))
    some = heads.select(queries=[0, 20, 9], keys=[9, 0, 21, 20])
    want = torch.zeros(37, 37)
    want[20, 20] = want[20, 21] = want[9, 9] = 1
    want = (heads.weights * want).detach()
    torch.testing.assert_close(
        some.average_by_offset(1, grid=(5, 7)).detach(), average_by_definition(want, (5, 7), (1, 1), special=2) * 35 / 2
    )


def test_around_has_gradients_and_takes_contributions():
    heads = make_heads(1, 12, over=Grid(3, 4, window=3))
    (by_blocks,) = torch.autograd.grad(
        heads.average_by_offset(1)[..., 0, 0].sum(), heads._part.call.q, retain_graph=True
    )
    whole = average_by_definition(heads.weights, (3, 4), (1, 1))[..., 0, 0].sum()
    torch.testing.assert_close(by_blocks, torch.autograd.grad(whole, heads._part.call.q, retain_graph=True)[0])
    moved = heads.contribution()
    torch.testing.assert_close(
        moved.average_by_offset(1).detach(), average_by_definition(moved.weights.detach(), (3, 4), (1, 1))
    )


def drawn(axis):
    """The weights in a panel, and the frames of points."""
    return np.asarray(axis.images[-1].get_array()), {patch.get_xy() for patch in axis.patches}


def test_one_query_over_an_image():
    heads = make_heads(2, 35, over=Offsets(TAPS, (5, 7)), heads=3)
    photo = torch.rand(3, 50, 70)
    figure = heads.plot(image=photo, at=(2, 3), batch=1)
    first, *rest = figure.axes[:4]
    assert [axis.get_title() for axis in figure.axes[:4]] == ["query (2, 3)", "head 0", "head 1", "head 2"]
    np.testing.assert_array_equal(first.images[0].get_array(), to_rgb_pixels(photo))
    for axis, (down, right) in zip(rest, TAPS, strict=True):
        weights, frames = drawn(axis)
        assert np.unravel_index(weights.argmax(), (5, 7)) == (2 + down, 3 + right)
        assert weights.max() == 1 and weights.sum() == 1
        assert frames == {(2.5, 1.5)}
        assert len(axis.images) == 2 and axis.images[0].get_extent() == axis.images[1].get_extent()
        assert axis.get_aspect() == 1
    # on the rendered figure, the reddest point is where the weight is
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    seen = np.asarray(canvas.buffer_rgba())[..., :3].astype(int)
    for axis, (down, right) in zip(rest, TAPS, strict=True):
        x, y = axis.transData.transform((3 + right, 2 + down))
        red, green, _ = seen[int(len(seen) - y), int(x)]
        assert red > green + 60
    assert figure.axes[-1].get_ylabel() == "weight of query (2, 3)"


def test_the_default_query_is_in_the_middle_and_the_image_is_optional():
    heads = make_heads(35, over=Grid(5, 7, window=3))
    figure = heads.plot(at=(2, 3))
    np.testing.assert_allclose(drawn(figure.axes[4])[0], heads[4, 17].detach().view(5, 7), atol=1e-6)
    assert len(figure.axes[4].images) == 1 and figure.axes[0].get_title() == "head 0"
    middle = heads.plot(image=torch.rand(5, 7))
    np.testing.assert_allclose(drawn(middle.axes[5])[0], heads[4, 17].detach().view(5, 7), atol=1e-6)
    by_number = heads.plot(at=17)
    np.testing.assert_array_equal(drawn(by_number.axes[4])[0], drawn(figure.axes[4])[0])
    assert "contribution" in heads.contribution().plot(at=(1, 1)).axes[-1].get_ylabel()


def test_with_a_stride_the_query_is_at_a_point_of_the_keys():
    over = Grid(6, 8, window=3, stride=2)
    heads = make_heads(48, over=over, queries=12)
    figure = heads.plot(at=(1, 3), image=torch.rand(6, 8))
    assert figure.axes[0].get_title() == "query (1, 3), at point (2, 6)"
    weights, frames = drawn(figure.axes[1])
    assert frames == {(5.5, 1.5)}
    np.testing.assert_allclose(weights, heads[0, 7].detach().view(6, 8), atol=1e-6)


def test_patches_after_special_tokens():
    heads = make_heads(2, 37)
    figure = heads.plot(image=np.zeros((35, 49), np.uint8), grid=(5, 7), at=(4, 6))
    weights, frames = drawn(figure.axes[3])
    np.testing.assert_allclose(weights, heads[0, 2, 36, 2:].detach().view(5, 7), atol=1e-6)
    assert frames == {(5.5, 3.5)}
    share = float(heads[0, 2, 36, :2].detach().sum())
    assert figure.axes[3].get_title() == f"head 2, {share:.0%} on special tokens"
    cls = heads.plot(image=np.zeros((35, 49), np.uint8), grid=(5, 7), at=0)
    weights, frames = drawn(cls.axes[1])
    np.testing.assert_allclose(weights, heads[0, 0, 0, 2:].detach().view(5, 7), atol=1e-6)
    assert not frames and cls.axes[0].get_title() == "token 0"
    # one token attends to all patches
    cls = make_heads(36, queries=1)
    np.testing.assert_allclose(
        drawn(cls.plot(grid=(5, 7), at=0).axes[0])[0], cls[0, 0, 1:].detach().view(5, 7), atol=1e-6
    )
    keys = heads.select(keys=[0, 5, 9]).plot(grid=(5, 7), at=(0, 0))
    assert (drawn(keys.axes[0])[0] > 0).sum() == 2


def test_pictures_of_weights_by_offset():
    heads = make_heads(2, 35, over=Offsets(TAPS, (5, 7)), heads=3)
    figure = heads.plot(around=2)
    for axis, (down, right) in zip(figure.axes, TAPS, strict=False):
        weights, frames = drawn(axis)
        row, column = np.unravel_index(weights.argmax(), (5, 5))
        assert (row - 2, column - 2) == (down, right)
        assert frames == {(-0.5, -0.5)} and list(axis.images[0].get_extent()) == [-2.5, 2.5, 2.5, -2.5]
    line = make_heads(11, over=Grid(11, window=5))
    np.testing.assert_allclose(
        drawn(line.plot(around=3).axes[0])[0][0], line.average_by_offset(3)[0].detach(), atol=1e-6
    )
    # a grid of one axis is drawn as any sequence
    assert drawn(line.plot().axes[0])[0].shape == (11, 11)


@pytest.mark.parametrize(
    "image",
    [
        torch.rand(3, 4, 6), torch.rand(4, 6, 3), torch.rand(4, 6), torch.rand(1, 4, 6), torch.rand(4, 4, 6),
        torch.rand(3, 4, 6, dtype=torch.bfloat16), torch.rand(3, 4, 6, requires_grad=True), np.random.default_rng(0).random((4, 6, 3)),
    ],
    ids=lambda image: f"{image.dtype} {tuple(image.shape)}",
)  # fmt: skip
def test_images_of_all_layouts_and_dtypes(image):
    seen = to_rgb_pixels(image)
    assert seen.shape == (4, 6, 3) and seen.dtype == np.uint8
    values = image.detach().float().numpy() if isinstance(image, torch.Tensor) else image
    value = values[2, 5] if values.shape[:2] == (4, 6) else values[..., 2, 5]
    assert np.allclose(seen[2, 5], 255 * np.atleast_1d(value)[:3], atol=0.6)


def test_values_of_an_image_are_scaled_to_bytes():
    bytes_ = np.arange(24, dtype=np.uint8).reshape(4, 6)
    assert (to_rgb_pixels(bytes_)[..., 0] == bytes_).all()
    assert (to_rgb_pixels(bytes_.astype(np.int64))[..., 0] == bytes_).all()
    normalised = torch.linspace(-2.1, 2.6, 24).view(4, 6)
    assert to_rgb_pixels(normalised).min() == 0 and to_rgb_pixels(normalised).max() == 255
    assert to_rgb_pixels(torch.full((4, 6), 7.0)).max() == 0
    assert to_rgb_pixels(torch.ones(4, 6, dtype=torch.bool)).min() == 255
    # a mask of integers is scaled: 0 and 1 become 0 and 255
    for kind in (np.uint8, np.int64):
        mask = np.eye(4, 6, dtype=kind)
        assert (to_rgb_pixels(mask)[..., 0] == 255 * mask).all()
    assert to_rgb_pixels(np.zeros((4, 6), np.uint8)).max() == 0


def test_a_large_image_is_shrunk_before_plotting():
    heads = make_heads(35, over=Grid(5, 7, window=3))
    photo = np.zeros((3000, 4200, 3), np.uint8)
    photo[:1500] = 200
    figure = heads.plot(image=photo, at=(2, 3))
    for axis in figure.axes[:7]:
        assert max(axis.images[0].get_array().shape[:2]) <= 640
    shown = figure.axes[0].images[0].get_array()
    assert shown.shape == (428, 600, 3) and shown[0, 0, 0] == 200 and shown[-1, 0, 0] == 0
    # one grey image for all heads
    greys = [axis.images[0].get_array() for axis in figure.axes[1:7]]
    assert all((grey == greys[0]).all() for grey in greys)


def test_uniform_attention_is_shown_as_weak():
    mha = MultiHeadAttention(30, 2)
    torch.nn.init.zeros_(mha.q_proj.weight)
    heads = mha(torch.randn(35, 30), over=Grid(5, 7))[1]
    figure = heads.plot(image=torch.rand(3, 50, 70), at=(2, 3))
    norm = figure.axes[1].images[-1].norm
    assert norm.vmax == pytest.approx(4 / 35) and norm(1 / 35) == pytest.approx(0.5)
    assert heads.contribution().plot(at=(2, 3)).axes[0].images[-1].norm(0) == 0
    # a large weight is the top of the scale
    one = make_heads(35, over=Offsets(TAPS, (5, 7)), heads=3).plot(at=(2, 3))
    assert one.axes[0].images[-1].norm.vmax == 1


@pytest.mark.parametrize("number, tall", [(49, 1), (49, 2), (144, 1), (3, 1)])
def test_many_heads_fit_on_a_figure(number, tall):
    mha = MultiHeadAttention(2 * number, number)
    heads = mha(torch.randn(12, 2 * number), over=Grid(3, 4))[1]
    for figure in (heads.plot(at=(1, 1), image=torch.rand(30 * tall, 30)), heads.plot()):
        assert max(figure.get_size_inches()) <= 20.01
        assert sum(axis.get_title().startswith("head ") for axis in figure.axes) == number


def test_error_messages_on_grids():
    on_grid, plain, on_graph = (
        make_heads(35, over=over) for over in (Grid(5, 7), None, Graph(torch.tensor([[0, 1], [1, 2]]), 35))
    )
    solid, photo = make_heads(24, over=Grid(2, 3, 4)), torch.rand(3, 50, 70)
    for make, message in [
        (
            lambda: plain.plot(image=photo),
            r"grid must be \(height, width\) where over has no coordinates, got None for Dense\(\); pass",
        ),
        (
            lambda: make_heads(35, over=Padding(torch.tensor(30))).average_by_offset(1),
            "where over has no coordinates, got None for Padding",
        ),
        (lambda: on_graph.average_by_offset(1), "over must be a Grid for results on a grid, got Graph"),
        (lambda: on_graph.plot(image=photo), "over must be a Grid for results on a grid, got Graph"),
        (
            lambda: plain.average_by_offset(1, grid=(6, 7)),
            "at most as many points as there are keys, 35, got 6 x 7 = 42",
        ),
        (
            lambda: plain.average_by_offset(1, grid=(0, 7)),
            r"grid\[0\] must be an integer in \[1, 2147483647\], got 0; it is \(height, width\)",
        ),
        (
            lambda: on_grid.average_by_offset(1, grid=(7, 5)),
            r"grid must be \(5, 7\), the grid of this attention's keys, got \(7, 5\)",
        ),
        (
            lambda: on_grid.average_by_offset(-1),
            r"reach must be an integer in \[0, 2147483647\], got -1",
        ),
        (lambda: on_grid.average_by_offset((1, 1, 1)), "or one for each of 2 axes"),
        (lambda: on_grid.plot(at=(5, 0)), r"at\[0\] must be an integer in \[0, 4\], got 5"),
        (
            lambda: on_grid.plot(at="cls"),
            r"at must be a point of 5 x 7 queries, \(row, column\), or the index of a query, got 'cls'",
        ),
        (lambda: on_grid.plot(at=35), r"at must be an integer in \[0, 34\], got 35; there are 35 queries"),
        (
            lambda: on_grid.select(queries=[3]).plot(at=(1, 1)),
            "at must be one of the queries that this view selects, got query 8",
        ),
        (
            lambda: make_heads(36, queries=1).plot(grid=(5, 7)),
            r"at must be the index of a query, .* where only keys are points of the grid, got None",
        ),
        (lambda: solid.plot(image=photo), "grid must have 2 axes for this picture, got 3"),
        (lambda: solid.plot(around=1), "grid must have 1 or 2 axes for this picture, got 3"),
        (lambda: make_heads(11, over=Grid(11)).plot(at=(3,)), "grid must have 2 axes for this picture, got 1"),
        (lambda: on_grid.plot(image=torch.rand(2, 3, 8, 8)), r"shape \(2, 3, 8, 8\); of a batch pass one image"),
        (lambda: on_grid.plot(image=torch.rand(8, 8, 2)), "with 1, 3 or 4 channels"),
        (lambda: on_grid.plot(image=photo.log() / 0), "image must be finite, got NaN or inf"),
        (
            lambda: on_grid.plot(image="photo.png"),
            "image must be a NumPy array, a tensor or a PIL image, got the path 'photo.png'; open it first: PIL.Image.open",
        ),
        (
            lambda: on_grid.plot(image=Path("photo.png")),
            "image must be a NumPy array, a tensor or a PIL image, got the path 'photo.png'",
        ),
        (lambda: on_grid.plot(around=-1), r"around must be an integer in \[0, 2147483647\], got -1"),
        (
            lambda: on_grid.plot(image=photo, around=1),
            "around must be left out with image or at, got 1; it draws the mean over all queries",
        ),
        (lambda: on_grid.plot(at=(1, 1), around=1), "around must be left out with image or at, got 1"),
        (
            lambda: on_grid.plot(image=photo, tokens=["a"]),
            "tokens must be left out with image, at, grid or around, got .*; it is for heat-maps",
        ),
        (
            lambda: on_grid.plot(image=photo, size=64),
            "size must be left out with image, at, grid or around, got 64; it is for heat-maps",
        ),
        (
            lambda: on_grid.plot(around=1, size=64),
            "size must be left out with image, at, grid or around, got 64; it is for heat-maps",
        ),
        (lambda: on_grid.plot(image=photo, batch=1), r"batch must be an integer in \[0, 0\], got 1"),
    ]:
        with pytest.raises(ValueError, match=message):
            make()


def test_grids_that_leave_many_keys_are_refused():
    """More surplus keys than special tokens hint at a wrong grid; the error lists some that fit."""
    for keys, grid, message in [
        (
            1024,
            (12, 48),
            r"at most 16 of 1024 keys .*, got 12 x 48 = 576, which leaves 448; 32 x 32 or 16 x 64 would fit",
        ),
        (197, (7, 7), "which leaves 148; 14 x 14 after 1 special token or 7 x 28 after 1 special token would fit"),
        (50, (4, 8), r"which leaves 18; 7 x 7 after 1 special token or .* pass grid=Grid\(4, 8, prefix=18\)"),
        (40, Grid(5, 7, prefix=2), "grid must leave 2 of 40 keys for special tokens, got 5 x 7 = 35, which leaves 5"),
    ]:
        heads = make_heads(keys, heads=1)
        for call in (lambda h=heads, g=grid: h.plot(grid=g), lambda h=heads, g=grid: h.average_by_offset(1, g)):
            with pytest.raises(ValueError, match=message):
                call()
    # text tokens before the patches are given by a prefix
    heads = make_heads(35 + 77, heads=2)
    weights, _ = drawn(heads.plot(grid=Grid(5, 7, prefix=77), at=(0, 0)).axes[0])
    np.testing.assert_allclose(weights, heads[0, 77, 77:].detach().view(5, 7), atol=1e-6)


def test_the_row_of_the_batch_is_named():
    """Its rows may be windows of one image."""
    windows = make_heads(64, 49, heads=2)
    assert windows.plot(image=torch.rand(8, 8), grid=(7, 7), batch=3).get_suptitle() == "row 3 of 64 of the batch"
    assert make_heads(1, 49, heads=2).plot(image=torch.rand(8, 8), grid=(7, 7)).get_suptitle() == ""
