"""Convolutions as attention, and back: one table of them all; what cannot be, in messages."""

from __future__ import annotations

import itertools
import math
import pickle
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import polyhead
from polyhead import Grid, MultiHeadAttention, QuadraticOffset, RelativeBias, from_conv, to_conv
from polyhead.nn import ConvolutionalAttention

KINDS: tuple[Any, ...] = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
SIZES = ((13,), (9, 11), (5, 7, 6))
KERNELS: tuple[tuple[tuple[int, ...], ...], ...] = (
    ((1,), (3,), (4,)),
    ((1, 1), (3, 3), (2, 4), (1, 5)),
    ((1, 1, 1), (3, 3, 3), (2, 1, 3)),
)
MODES = ("zeros", "replicate", "circular", "reflect")
# fp32 and fp64, as far as a sum of so few products may be off
TOLERANCES = {torch.float32: 1e-5, torch.float64: 1e-12}


def table() -> list[tuple[Any, ...]]:
    """dimension x kernel x stride x dilation x groups x padding x mode x bias."""
    rows = []
    for axes, (number, kernels) in enumerate(zip((1, 2, 3), KERNELS, strict=True)):
        for kernel, stride, dilation, groups, padding, mode, bias in itertools.product(
            kernels, (1, 2), (1, 2), (1, 2, 4), (0, 1, "same"), MODES, (True, False)
        ):
            lonely = number == 3 and (dilation == 2 or groups == 2)
            # torch has no "same" with a stride; padding nothing is one mode; the third dimension is large enough with less
            if (padding == "same" and stride > 1) or (padding == 0 and mode != "zeros") or lonely:
                continue
            rows.append((axes, kernel, stride, dilation, groups, padding, mode, bias))
    return rows


ROWS = table()


def made(row: tuple[Any, ...], dtype: torch.dtype) -> Any:
    axes, kernel, stride, dilation, groups, padding, mode, bias = row
    return KINDS[axes](4, 8, kernel, stride, padding, dilation, groups, bias, mode, dtype=dtype)


def _within_groups(dense: torch.Tensor, conv: Any) -> torch.Tensor:
    """(taps, out, in of a group): the blocks on the diagonal of (taps, out, in)."""
    blocks = dense.unflatten(2, (conv.groups, -1)).unflatten(1, (conv.groups, -1))
    return torch.cat([blocks[:, g, :, g] for g in range(conv.groups)], 1)


def both(conv: Any, attention: Any, x: torch.Tensor) -> tuple[float, float]:
    """How far apart the outputs are, and the gradients to the input."""
    with warnings.catch_warnings():
        # torch says that "same" with even kernels may copy
        warnings.filterwarnings("ignore", message="Using padding='same'")
        y = conv(x)
    z, _ = attention(x)
    assert y.shape == z.shape and y.dtype == z.dtype
    towards = torch.randn_like(y)
    (dy,), (dz,) = (torch.autograd.grad(out, x, towards, retain_graph=True) for out in (y, z))
    join = attention.attention.o_proj
    if isinstance(attention.attention.v_proj, nn.Identity) and join is not None:
        # (out, taps · in) -> (taps, out, in), as of a dense kernel
        made = (
            torch.autograd.grad(z, join.weight, towards, retain_graph=True)[0]
            .unflatten(1, (-1, x.shape[1]))
            .movedim(1, 0)
        )
        (wanted,) = torch.autograd.grad(y, conv.weight, towards)
        size = max(1.0, wanted.abs().max().item())
        apart = (_within_groups(made, conv).movedim(0, -1).reshape(wanted.shape) - wanted).abs().max().item() / size
        assert apart <= TOLERANCES[x.dtype], "the gradient of the kernel"
    return (y - z).detach().abs().max().item(), (dy - dz).abs().max().item()


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("axes", [0, 1, 2], ids=["1d", "2d", "3d"])
def test_every_convolution_is_attention_and_comes_back(axes: int, dtype: torch.dtype):
    torch.manual_seed(axes)
    rows = [row for row in ROWS if row[0] == axes]
    wrong = []
    for row in rows:
        conv = made(row, dtype)
        attention = from_conv(conv)
        x = torch.randn(2, 4, *SIZES[axes], dtype=dtype, requires_grad=True)
        apart = both(conv, attention, x)
        back = to_conv(attention)
        same = repr(back) == repr(conv) and torch.equal(back.weight, conv.weight)
        same = same and (conv.bias is None or torch.equal(back.bias, conv.bias))
        if not max(apart) <= TOLERANCES[dtype] or not same:
            wrong.append((row, apart, same))
    assert not wrong


def test_the_table_is_as_large_as_was_asked():
    assert len(ROWS) >= 300
    assert len(set(ROWS)) == len(ROWS)


@pytest.mark.parametrize(
    "pool",
    [
        nn.AvgPool1d(3, 2, 1), nn.AvgPool2d(2), nn.AvgPool2d((3, 2), 2, (1, 0)), nn.AvgPool3d(2, padding=1),
        nn.AvgPool2d(3, 2, 1, count_include_pad=False), nn.AvgPool2d(3, 2, ceil_mode=True),
        nn.AvgPool2d(3, 2, 1, ceil_mode=True, count_include_pad=False), nn.AvgPool2d(3, 2, 1, divisor_override=4),
        nn.AvgPool2d(3, 3, 1, ceil_mode=True, divisor_override=4),
    ],
    ids=repr,
)  # fmt: skip
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_average_pooling(pool: nn.Module, dtype: torch.dtype):
    axes = int(type(pool).__name__[-2])
    x = torch.randn(2, 3, *SIZES[axes - 1], dtype=dtype, requires_grad=True)
    assert max(both(pool, from_conv(pool).to(dtype), x)) <= TOLERANCES[dtype]
    assert from_conv(pool).to(dtype)(x[0])[0].shape == pool(x[0]).shape


def test_which_kernel():
    assert from_conv(nn.Conv2d(2, 2, 3)).explain(torch.ones(1, 2, 5, 5)).kernel == "offsets"
    assert from_conv(nn.Conv2d(2, 2, 3), alpha=3.0).explain(torch.ones(1, 2, 5, 5)).kernel == "tiled"


def test_heads_look_at_the_taps():
    conv = nn.Conv2d(3, 5, 3, padding=1)
    image = torch.randn(2, 3, 6, 7)
    _, heads = from_conv(conv)(image)
    assert heads.shape == (2, 9, 42, 42)
    weights = heads.weights.unflatten(-1, (6, 7)).unflatten(2, (6, 7))
    for head, (down, right) in enumerate(itertools.product((-1, 0, 1), repeat=2)):
        assert weights[0, head, 3, 4, 3 + down, 4 + right] == 1
    assert weights.sum((-1, -2)).amax() == 1
    # beyond the border there is nothing: zero padding
    assert weights[0, 0, 0, 0].sum() == 0
    assert heads.entropy().abs().max() == 0


def test_an_image_without_a_batch_and_images_of_any_size():
    conv = nn.Conv2d(3, 5, 3, padding=1, stride=2)
    attention = from_conv(conv)
    for shape in ((3, 8, 8), (1, 3, 1, 1), (4, 3, 5, 12), (0, 3, 5, 4)):
        x = torch.randn(shape)
        assert torch.allclose(attention(x)[0], conv(x), atol=1e-6)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("alpha", [2.0, 8.0, 30.0])
@pytest.mark.parametrize("axes", [1, 2, 3])
def test_the_certificate_holds(mode: str, stride: int, alpha: float, axes: int):
    torch.manual_seed(0)
    conv = KINDS[axes - 1](3, 4, 3, stride, 1, padding_mode=mode).double()
    attention = from_conv(conv, alpha=alpha)
    x = torch.randn(2, 3, *(6, 7, 5)[:axes], dtype=torch.float64)
    error = (attention(x)[0] - conv(x)).norm(dim=1).max()
    leaked, bound = attention.certificate(x)
    assert error <= bound + 1e-12
    # and says something: the bound is no more than some tens of times the truth, for images that are noise
    assert bound <= 60 * error or error < 1e-12
    _, heads = attention(x)
    exact = from_conv(conv)(x)[1].weights
    middle = 3**axes // 2
    assert torch.allclose((exact - heads.weights).clamp(min=0).amax((0, 2, 3))[middle], leaked[middle], atol=1e-12)
    # of the nearest points, or of the sink
    known = torch.tensor(2 * axes * math.exp(-alpha) if mode != "zeros" else math.exp(-alpha / 2), dtype=torch.float64)
    if alpha >= 8:
        assert torch.allclose(leaked[middle], known, rtol=0.15)


@pytest.mark.parametrize(
    "pool", [nn.AvgPool2d(3, 1, 0), nn.AvgPool2d(2), nn.AvgPool2d(3, 2, 1), nn.AvgPool1d(3, padding=1)], ids=repr
)
def test_the_certificate_of_a_pooling(pool: nn.Module):
    attention = from_conv(pool, alpha=3.0).double()
    # channels that leak alike
    x = torch.ones(1, 64, *(6, 6)[: int(type(pool).__name__[-2])], dtype=torch.float64)
    x[..., 3:] = -1
    error = (attention(x)[0] - pool(x)).norm(dim=1).max()
    assert 0 < error <= attention.certificate(x).error
    assert attention.certificate(x[:0]).error == 0


@pytest.mark.parametrize("mode", MODES)
# torch has no "same" with a stride
@pytest.mark.parametrize(
    ("axes", "stride", "padding"),
    [(a, s, p) for a, s in ((1, 1), (1, 2), (2, 1), (2, 2), (3, 1)) for p in (0, 1, "same") if s == 1 or p != "same"],
)
def test_sharp_heads_are_the_convolution(mode: str, padding: int | str, axes: int, stride: int):
    conv = KINDS[axes - 1](3, 4, (3, 2, 3)[:axes], stride, padding, padding_mode=mode).double()
    attention = from_conv(conv, alpha=70.0)
    x = torch.randn(1, 3, *(6, 7, 5)[:axes], dtype=torch.float64, requires_grad=True)
    assert max(both(conv, attention, x)) < 1e-11
    back = to_conv(attention)
    assert repr(back) == repr(conv) and torch.equal(back.weight, conv.weight)


@pytest.mark.parametrize(
    ("padding", "sink", "accepted"),
    [
        ("replicate", None, True), ("zeros", 0.0, True), ("circular", -60.0, True), ("replicate", 0.0, False),
        ("replicate", "learned", False), ("zeros", None, False), ("zeros", 40.0, False), ("zeros", -40.0, False),
    ],
)  # fmt: skip
def test_a_sink_that_takes_what_is_not_its_own(padding: str, sink: Any, accepted: bool):
    position = QuadraticOffset([(0, 0), (0, 1)], alpha=60.0, padding=padding)
    layer = MultiHeadAttention(4, 2, position=position, sink=sink, bias=False).double()
    nn.init.zeros_(layer.q_proj.weight)
    if not accepted:
        with pytest.raises(ValueError, match="its heads do not look at fixed points"):
            to_conv(layer)
        return
    x = torch.randn(2, 4, 5, 6, dtype=torch.float64)
    y, _ = layer(x.flatten(2).transpose(1, 2), over=Grid(5, 6))
    assert torch.allclose(y.transpose(1, 2).unflatten(2, (5, 6)), to_conv(layer)(x), atol=1e-9)


def test_the_start_can_be_trained():
    torch.manual_seed(0)
    conv = nn.Conv2d(2, 3, 3, padding=1)
    attention = from_conv(conv, alpha=2.0)
    x = torch.randn(2, 2, 5, 5)
    attention(x)[0].square().sum().backward()
    silent = [name for name, p in attention.named_parameters() if p.grad is None or not p.grad.any()]
    # W_Q is zero: the keys and the sink's neighbours wait for it
    assert set(silent) <= {"attention.k_proj.weight", "attention.k_proj.bias"}
    optimizer = torch.optim.SGD(attention.parameters(), lr=1e-2)
    optimizer.step()
    with pytest.raises(
        ValueError, match=r"its scores depend on the content: W_Q and W_K, or their biases, are not zero"
    ):
        to_conv(attention)
    with pytest.raises(ValueError, match=r"its scores depend on the content"):
        attention.certificate(x)


def test_narrow_heads_through_w_v():
    torch.manual_seed(0)
    conv = nn.Conv2d(8, 6, 3, padding=1).double()
    with torch.no_grad():
        # taps of rank 2
        conv.weight.copy_(torch.einsum("otxy,ti->oixy", torch.randn(6, 2, 3, 3).double(), torch.randn(2, 8).double()))
    attention = from_conv(conv, head_dim=2)
    x = torch.randn(2, 8, 5, 5, dtype=torch.float64, requires_grad=True)
    assert max(both(conv, attention, x)) < 1e-12
    assert attention.attention.value_dim == 2
    assert torch.allclose(to_conv(attention).weight, conv.weight, atol=1e-13)
    assert max(both(conv, from_conv(conv, head_dim=11), x)) < 1e-12
    with pytest.raises(ValueError, match=r"head_dim: it is 1, but the tap at \(-1, -1\) has rank 2, .* at least 2"):
        from_conv(conv, head_dim=1)
    # the usual width of a head, d_model / heads, is too narrow for a dense convolution
    dense = nn.Conv2d(18, 18, 3)
    with pytest.raises(ValueError, match=r"head_dim: it is 2, but the tap at \(0, 0\) has rank 18"):
        from_conv(dense, head_dim=18 // 9)


def test_a_layer_on_a_grid_becomes_a_convolution():
    torch.manual_seed(0)
    centres = [(0, 0), (-2, 1), (1, 1), (1, 1)]
    layer = MultiHeadAttention(6, 4, head_dim=3, position=QuadraticOffset(centres, alpha=40.0)).double()
    nn.init.zeros_(layer.q_proj.weight)
    nn.init.normal_(layer.v_proj.bias)
    layer.gate = torch.tensor([1.0, 0.5, 2.0, -1.0], dtype=torch.float64)
    conv = to_conv(layer)
    assert repr(conv) == "Conv2d(6, 6, kernel_size=(5, 3), stride=(1, 1), padding=(2, 1), padding_mode=replicate)"
    x = torch.randn(2, 6, 7, 5, dtype=torch.float64)
    y, _ = layer(x.flatten(2).transpose(1, 2), over=Grid(7, 5))
    # the gate acts on W_V's bias as well as on its values
    assert torch.allclose(y.transpose(1, 2).unflatten(2, (7, 5)), conv(x), atol=1e-10)


def test_how_far_from_a_convolution():
    layer = MultiHeadAttention(4, 2, position=QuadraticOffset([(0.0, 0.2), (1.0, 0.0)], alpha=3.0))
    nn.init.zeros_(layer.q_proj.weight)
    with pytest.raises(
        ValueError, match=r"head 0 puts 0\.\d+ of its weight elsewhere than on \(0, 0\) \(alpha 3, centre"
    ):
        to_conv(layer)
    assert to_conv(layer, leak=0.5).kernel_size == (3, 1)
    # what it says is what heads do, far from the border
    _, heads = layer(torch.randn(1, 441, 4), over=Grid(21, 21))
    said = polyhead.nn.conv.extract.leaks(layer.position, layer.sink)
    assert torch.allclose(1 - heads[0, 0, 220, 220], said[0].float(), atol=1e-6)
    assert torch.allclose(1 - heads[0, 1, 220, 241], said[1].float(), atol=1e-6)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: from_conv(nn.MaxPool2d(2)), r"conv: it is MaxPool2d; a head gives a weighted mean of its values, and a maximum is none"),
        (lambda: from_conv(nn.ConvTranspose2d(2, 3, 3)), r"conv: it is ConvTranspose2d; which taps reach a point .* With stride 1"),
        (lambda: from_conv(nn.AdaptiveAvgPool2d(3)), r"conv: it is AdaptiveAvgPool2d; its windows differ from point to point"),
        (lambda: from_conv(nn.LazyConv2d(3, 3)), r"conv: it is LazyConv2d; its sizes are not known yet"),
        (lambda: from_conv(nn.Linear(2, 3)), r"conv: it is Linear; it must be an nn.Conv1d, Conv2d or Conv3d, or an nn.AvgPool1d"),
        (lambda: from_conv(torch.ones(2, 2, 3, 3)), r"conv: it is Tensor; it must be"),
        (lambda: from_conv(nn.Conv2d(2, 2, 3, dtype=torch.complex64)), r"conv: its numbers are torch.complex64"),
        (lambda: from_conv(nn.AvgPool2d(3, 2, 1, ceil_mode=True)), r"conv: with ceil_mode, padding is counted in some windows"),
        (lambda: from_conv(nn.AvgPool2d(3, 2, 1, count_include_pad=False), alpha=3.0), r"alpha: this pooling averages as many points"),
        (lambda: from_conv(nn.Conv2d(2, 2, 3), alpha=-1.0), r"QuadraticOffset: alpha must be a number in \(0, inf\), got -1\.0"),
        (lambda: from_conv(nn.Conv2d(2, 2, 3), head_dim=0), r"head_dim must be an integer in \[1, 2147483647\], got 0"),
        (lambda: from_conv(nn.Conv2d(2, 2, 3))(torch.ones(1, 2, 2, 9)), r"image: its size is 2 x 9, 2 x 9 with padding; the kernel spans 3 x 3"),
        (lambda: from_conv(nn.Conv2d(2, 2, 3))(torch.ones(1, 3, 9, 9)), r"image: its shape is \(1, 3, 9, 9\); it must be \(batch, 2, height, width\)"),
        (lambda: from_conv(nn.Conv2d(2, 2, 3))(torch.ones(1, 2, 9, 9, dtype=torch.uint8)), r"image must be a tensor of floating-point numbers, got torch\.uint8"),
        (lambda: from_conv(nn.Conv2d(2, 2, 3))([[1.0]]), "image must be a tensor of floating-point numbers, got list"),
        (lambda: from_conv(nn.Conv2d(2, 2, 3))(torch.ones(9, 9)), r"image: its shape is \(9, 9\)"),
        (
            lambda: from_conv(nn.Conv2d(2, 2, 9, padding=4, padding_mode="reflect"))(torch.ones(2, 4, 9)),
            r"image: its size is 4 x 9; padding_mode='reflect' with padding 4 x 4 needs at least 5 x 5",
        ),
        (lambda: to_conv(nn.Linear(2, 2)), "layer must be what from_conv made, or a MultiHeadAttention, got Linear"),
        (lambda: to_conv(MultiHeadAttention(4, 2)), r"layer: its heads look wherever its inputs and `over` say"),
        (lambda: to_conv(MultiHeadAttention(4, 2, score="gat")), r"layer: its scores are GAT, which depend on the content"),
        (
            lambda: to_conv(MultiHeadAttention(4, 2, position=RelativeBias(2, window=(3, 3)))),
            r"layer: its position is RelativeBias; heads look at fixed points with a QuadraticOffset",
        ),
        (
            lambda: to_conv(MultiHeadAttention(4, 2, position=QuadraticOffset([(0, 0), (1, 1)]))),
            r"layer: its scores depend on the content: W_Q and W_K, or their biases, are not zero \(the largest entry of W_Qᵀ W_K of a head is",
        ),
        (lambda: to_conv(from_conv(nn.AvgPool2d(2))), r"layer: it averages each channel by itself"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(make: Any, message: str):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_convolution_with_a_way_of_its_own_is_refused():
    class Standardised(nn.Conv2d):
        def forward(self, x):
            return F.conv2d(x, self.weight - self.weight.mean())

    with pytest.raises(ValueError, match="conv: Standardised computes its output in a way of its own"):
        from_conv(Standardised(2, 2, 3))


def test_a_head_that_has_moved_out_of_its_kernel():
    attention = from_conv(nn.Conv2d(2, 2, 3, padding=1), alpha=60.0)
    position = attention.attention.position
    with torch.no_grad():
        position.centres[3] = torch.tensor([0.0, 4.0])
    with pytest.raises(ValueError, match=r"a head looks at \(0, 4\), which is no tap of the 3 x 3 kernel"):
        to_conv(attention)
    assert to_conv(attention.attention).kernel_size == (3, 9)


def test_groups_that_training_has_mixed_are_gone():
    attention = from_conv(nn.Conv2d(4, 4, 3, groups=4, bias=False))
    with torch.no_grad():
        attention.attention.o_proj.weight += 0.1
    assert to_conv(attention).groups == 1
    x = torch.randn(1, 4, 6, 6)
    assert torch.allclose(to_conv(attention)(x), attention(x)[0], atol=1e-5)


def test_pruned_heads_are_taps_that_are_gone():
    conv = nn.Conv2d(2, 3, 3, padding=1, bias=False)
    x = torch.randn(1, 2, 5, 5)
    less = nn.Conv2d(2, 3, 3, padding=1, bias=False)
    with torch.no_grad():
        less.weight.copy_(conv.weight)
        less.weight[:, :, 0, 0] = 0
        less.weight[:, :, 2, 1] = 0
    for attention in (from_conv(conv), from_conv(conv, alpha=60.0), from_conv(conv, head_dim=2)):
        attention.attention.prune([0, 7])
        assert torch.allclose(attention(x)[0], less(x), atol=1e-5)
        assert torch.allclose(to_conv(attention).weight, less.weight, atol=1e-6)
        assert attention.certificate(x).leaked.shape == (7,)


def test_merged_and_gated():
    attention = from_conv(nn.Conv2d(3, 2, 3), head_dim=3)
    x = torch.randn(1, 3, 6, 6)
    attention.attention.gate = torch.linspace(-1, 1, 9)
    wanted = attention(x)[0]
    assert torch.allclose(to_conv(attention)(x), wanted, atol=1e-5)
    layer = MultiHeadAttention(4, 2, position=QuadraticOffset([(0, 0), (0, 1)], alpha=60.0))
    nn.init.zeros_(layer.q_proj.weight)
    nn.init.normal_(layer.v_proj.bias)
    assert torch.allclose(to_conv(layer.fold_value_projection()).weight, to_conv(layer).weight, atol=1e-6)
    assert torch.allclose(to_conv(layer.fold_value_projection()).bias, to_conv(layer).bias, atol=1e-6)


def test_a_bias_that_is_lost_at_the_border_is_no_convolutions():
    layer = MultiHeadAttention(4, 2, position=QuadraticOffset([(0, 0), (0, 1)], alpha=60.0, padding="zeros"), sink=0.0)
    nn.init.zeros_(layer.q_proj.weight)
    assert to_conv(layer).padding_mode == "zeros"
    nn.init.ones_(layer.v_proj.bias)
    with pytest.raises(ValueError, match="v_proj has a bias, which is lost where a head looks beyond the border"):
        to_conv(layer)


def test_what_is_frozen_stays_so_and_nothing_is_left_over():
    conv = nn.Conv2d(3, 4, 3).requires_grad_(False)
    assert not any(p.requires_grad for p in from_conv(conv).parameters())
    assert not any(p.requires_grad for p in from_conv(conv, alpha=3.0).parameters())
    conv.weight.requires_grad_()
    attention = from_conv(conv)
    attention(torch.randn(1, 3, 5, 5))[0].sum().backward()
    # every parameter that can be trained has a gradient: DistributedDataParallel asks for it
    assert all(p.grad is not None for p in attention.parameters() if p.requires_grad)
    assert sum(p.numel() for p in attention.parameters()) == sum(p.numel() for p in conv.parameters())
    assert not list(from_conv(nn.AvgPool2d(2)).parameters())


def test_numbers_that_nobody_asks_for_are_not_drawn():
    conv = nn.Conv2d(3, 4, 3)
    torch.manual_seed(3)
    wanted = torch.rand(1)
    torch.manual_seed(3)
    from_conv(conv)
    assert torch.equal(torch.rand(1), wanted)


def test_pooling_takes_what_torchs_takes():
    for pool in (nn.AvgPool2d([3, 2], [2, 1]), nn.AvgPool2d(2, padding=1, count_include_pad=False)):
        attention = from_conv(pool)
        for dtype in (torch.float64, torch.bfloat16):
            x = torch.randn(2, 3, 6, 6).to(dtype)
            assert torch.allclose(attention(x)[0], pool(x), atol=1e-2 if dtype == torch.bfloat16 else 1e-12)
        with torch.autocast("cpu"):
            assert attention(torch.randn(2, 3, 6, 6))[0].dtype == torch.float32


def test_half_numbers_default_devices_and_meta():
    conv = nn.Conv2d(4, 4, 3).to(torch.bfloat16)
    assert from_conv(conv, head_dim=4).attention.v_proj.weight.dtype == torch.bfloat16
    from_conv(conv, alpha=5.0).certificate(torch.randn(1, 4, 5, 5).bfloat16())
    plain = nn.Conv2d(2, 3, 3, stride=2)
    x = torch.randn(1, 2, 7, 7)
    with torch.device("meta"):
        attention = from_conv(plain)
        assert torch.allclose(attention(x)[0], plain(x), atol=1e-6)
    abstract = from_conv(nn.Conv2d(2, 3, 3, device="meta"), head_dim=2)
    assert abstract.attention.o_proj.weight.is_meta


def test_the_output_lies_as_the_convolutions_does():
    conv = nn.Conv2d(3, 4, 3, padding=1)
    x = torch.randn(2, 3, 6, 5)
    assert from_conv(conv)(x)[0].is_contiguous()
    inside = x.contiguous(memory_format=torch.channels_last)
    assert from_conv(conv)(inside)[0].is_contiguous(memory_format=torch.channels_last)
    assert torch.allclose(from_conv(conv)(inside)[0], conv(x), atol=1e-6)


def test_what_was_made_by_a_transform_does_not_stay_behind():
    attention = from_conv(nn.Conv2d(3, 4, 3, padding=1))
    x = torch.randn(1, 3, 9, 11)
    torch.func.grad(lambda image: attention(image)[0].sum())(x)
    pickle.dumps(attention.over((9, 11)))
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        attention(x)
    assert type(attention(x)[0]) is torch.Tensor
    with torch.inference_mode():
        attention(torch.randn(1, 3, 12, 13))
    y = attention(torch.randn(1, 3, 12, 13, requires_grad=True))[0]
    y.sum().backward()


@pytest.mark.parametrize("change", ["hook", "pre-hook", "weight norm"])
def test_convolutions_with_hooks_are_refused(change: str):
    conv = nn.Conv2d(2, 2, 3)
    if change == "hook":
        conv.register_forward_hook(lambda module, given, out: 2 * out)
    elif change == "pre-hook":
        conv.register_forward_pre_hook(lambda module, given: None)
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            conv = nn.utils.weight_norm(conv)
    with pytest.raises(ValueError, match="in a way of its own, or has hooks that change it"):
        from_conv(conv)
    parametrized = nn.utils.parametrizations.weight_norm(nn.Conv2d(2, 2, 3))
    x = torch.randn(1, 2, 5, 5)
    assert torch.allclose(from_conv(parametrized)(x)[0], parametrized(x), atol=1e-6)


@pytest.mark.parametrize("leak", [-1, 2, float("nan"), None, "all"])
def test_a_leak_is_a_share(leak: Any):
    with pytest.raises(ValueError, match=r"leak must be a number in \[0, 1\], got "):
        to_conv(from_conv(nn.Conv2d(2, 2, 3)), leak=leak)


def test_compiled_for_images_of_several_sizes():
    conv = nn.Conv2d(3, 4, 3, padding=1)
    attention = from_conv(conv).eval()
    compiled = torch.compile(lambda image: attention(image)[0], fullgraph=True, backend="aot_eager")
    for sizes in ((5, 6), (7, 8), (4, 9)):
        x = torch.randn(1, 3, *sizes)
        assert torch.allclose(compiled(x), conv(x), atol=1e-6)


def test_compiled_saved_and_moved(tmp_path):
    conv = nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect")
    attention = from_conv(conv).eval()
    x = torch.randn(2, 3, 6, 5)
    compiled = torch.compile(lambda image: attention(image)[0], fullgraph=True, backend="aot_eager")
    assert torch.allclose(compiled(x), conv(x), atol=1e-6)
    other = from_conv(nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect"))
    other.load_state_dict(attention.state_dict())
    assert torch.equal(other(x)[0], attention(x)[0])
    assert isinstance(other, ConvolutionalAttention) and "kernel=3 x 3" in repr(other)
    half = from_conv(conv.to(torch.bfloat16))
    assert half(x.bfloat16())[0].dtype == torch.bfloat16
