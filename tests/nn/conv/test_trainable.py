"""Convolutions as heads that score all points: certificates, training, and the way back to a convolution."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from conv_cases import KINDS, MODES, differences
from torch import nn

import polyhead
from polyhead import Grid, MultiHeadAttention, QuadraticOffset, from_conv, to_conv


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("alpha", [2.0, 8.0, 30.0])
@pytest.mark.parametrize("axes", [1, 2, 3])
def test_certificate_bounds_the_error(mode: str, stride: int, alpha: float, axes: int):
    torch.manual_seed(0)
    conv = KINDS[axes - 1](3, 4, 3, stride, 1, padding_mode=mode).double()
    attention = from_conv(conv, alpha=alpha)
    x = torch.randn(2, 3, *(6, 7, 5)[:axes], dtype=torch.float64)
    error = (attention(x)[0] - conv(x)).norm(dim=1).max()
    leaked, bound = attention.certificate(x)
    assert error <= bound + 1e-12
    # the bound is useful: within a factor of 60 of the error, for noise images
    assert bound <= 60 * error or error < 1e-12
    _, heads = attention(x)
    exact = from_conv(conv)(x)[1].weights
    middle = 3**axes // 2
    assert torch.allclose((exact - heads.weights).clamp(min=0).amax((0, 2, 3))[middle], leaked[middle], atol=1e-12)
    # the weight of the nearest points, or of the sink
    known = torch.tensor(2 * axes * math.exp(-alpha) if mode != "zeros" else math.exp(-alpha / 2), dtype=torch.float64)
    if alpha >= 8:
        assert torch.allclose(leaked[middle], known, rtol=0.15)


@pytest.mark.parametrize(
    "pool", [nn.AvgPool2d(3, 1, 0), nn.AvgPool2d(2), nn.AvgPool2d(3, 2, 1), nn.AvgPool1d(3, padding=1)], ids=repr
)
def test_certificate_bounds_the_error_of_a_pooling(pool: nn.Module):
    attention = from_conv(pool, alpha=3.0).double()
    # all channels leak alike
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
def test_sharp_heads_equal_the_convolution(mode: str, padding: int | str, axes: int, stride: int):
    conv = KINDS[axes - 1](3, 4, (3, 2, 3)[:axes], stride, padding, padding_mode=mode).double()
    attention = from_conv(conv, alpha=70.0)
    x = torch.randn(1, 3, *(6, 7, 5)[:axes], dtype=torch.float64, requires_grad=True)
    assert max(differences(conv, attention, x)) < 1e-11
    back = to_conv(attention)
    assert repr(back) == repr(conv) and torch.equal(back.weight, conv.weight)


@pytest.mark.parametrize(
    ("padding", "sink", "accepted"),
    [
        ("replicate", None, True), ("zeros", 0.0, True), ("circular", -60.0, True), ("replicate", 0.0, False),
        ("replicate", "learned", False), ("zeros", None, False), ("zeros", 40.0, False), ("zeros", -40.0, False),
    ],
)  # fmt: skip
def test_to_conv_refuses_sinks_that_take_too_much_or_too_little(padding: str, sink: Any, accepted: bool):
    position = QuadraticOffset([(0, 0), (0, 1)], alpha=60.0, padding=padding)
    layer = MultiHeadAttention(4, 2, position=position, sink=sink, bias=False).double()
    nn.init.zeros_(layer.q_proj.weight)
    if not accepted:
        with pytest.raises(ValueError, match="layer must have heads that look at fixed points, with at most leak="):
            to_conv(layer)
        return
    x = torch.randn(2, 4, 5, 6, dtype=torch.float64)
    y, _ = layer(x.flatten(2).transpose(1, 2), over=Grid(5, 6))
    assert torch.allclose(y.transpose(1, 2).unflatten(2, (5, 6)), to_conv(layer)(x), atol=1e-9)


def test_training_changes_scores_and_ends_the_conversion():
    torch.manual_seed(0)
    conv = nn.Conv2d(2, 3, 3, padding=1)
    attention = from_conv(conv, alpha=2.0)
    x = torch.randn(2, 2, 5, 5)
    attention(x)[0].square().sum().backward()
    unmoved = [name for name, p in attention.named_parameters() if p.grad is None or not p.grad.any()]
    # W_Q is zero, so the gradient of W_K is zero
    assert set(unmoved) <= {"attention.k_proj.weight", "attention.k_proj.bias"}
    optimizer = torch.optim.SGD(attention.parameters(), lr=1e-2)
    optimizer.step()
    with pytest.raises(
        ValueError, match=r"layer must have W_Q or W_K equal to zero, biases included: its scores depend on the content"
    ):
        to_conv(attention)
    with pytest.raises(ValueError, match=r"its scores depend on the content"):
        attention.certificate(x)


def test_layer_on_a_grid_converts_to_a_convolution():
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
    # the gate also scales the bias of W_V
    assert torch.allclose(y.transpose(1, 2).unflatten(2, (7, 5)), conv(x), atol=1e-10)


def test_to_conv_reports_how_much_weight_leaks():
    layer = MultiHeadAttention(4, 2, position=QuadraticOffset([(0.0, 0.2), (1.0, 0.0)], alpha=3.0))
    nn.init.zeros_(layer.q_proj.weight)
    with pytest.raises(ValueError, match=r"head 0 puts 0\.\d+ elsewhere than on \(0, 0\) \(alpha 3, centre"):
        to_conv(layer)
    assert to_conv(layer, leak=0.5).kernel_size == (3, 1)
    # the reported leak equals the measured one, far from the border
    _, heads = layer(torch.randn(1, 441, 4), over=Grid(21, 21))
    reported = polyhead.nn.conv.extract.leaked_weight_per_head(layer.position, layer.sink)
    assert torch.allclose(1 - heads[0, 0, 220, 220], reported[0].float(), atol=1e-6)
    assert torch.allclose(1 - heads[0, 1, 220, 241], reported[1].float(), atol=1e-6)


def test_head_outside_its_kernel_is_refused():
    attention = from_conv(nn.Conv2d(2, 2, 3, padding=1), alpha=60.0)
    position = attention.attention.position
    with torch.no_grad():
        position.centres[3] = torch.tensor([0.0, 4.0])
    with pytest.raises(ValueError, match=r"taps of its 3 x 3 kernel, got a head at \(0, 4\)"):
        to_conv(attention)
    assert to_conv(attention.attention).kernel_size == (3, 9)


def test_groups_mixed_by_training_become_dense():
    attention = from_conv(nn.Conv2d(4, 4, 3, groups=4, bias=False))
    with torch.no_grad():
        attention.attention.o_proj.weight += 0.1
    assert to_conv(attention).groups == 1
    x = torch.randn(1, 4, 6, 6)
    assert torch.allclose(to_conv(attention)(x), attention(x)[0], atol=1e-5)


def test_pruned_heads_are_zero_taps():
    conv = nn.Conv2d(2, 3, 3, padding=1, bias=False)
    x = torch.randn(1, 2, 5, 5)
    pruned = nn.Conv2d(2, 3, 3, padding=1, bias=False)
    with torch.no_grad():
        pruned.weight.copy_(conv.weight)
        pruned.weight[:, :, 0, 0] = 0
        pruned.weight[:, :, 2, 1] = 0
    for attention in (from_conv(conv), from_conv(conv, alpha=60.0), from_conv(conv, head_dim=2)):
        attention.attention.prune([0, 7])
        assert torch.allclose(attention(x)[0], pruned(x), atol=1e-5)
        assert torch.allclose(to_conv(attention).weight, pruned.weight, atol=1e-6)
        assert attention.certificate(x).leaked.shape == (7,)


def test_gated_and_folded_layers_convert():
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


@pytest.mark.parametrize("leak", [-1, 2, float("nan"), None, "all"])
def test_leak_must_be_in_the_unit_interval(leak: Any):
    with pytest.raises(ValueError, match=r"leak must be a number in \[0, 1\], got "):
        to_conv(from_conv(nn.Conv2d(2, 2, 3)), leak=leak)
