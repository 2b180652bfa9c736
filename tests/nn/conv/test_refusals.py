"""Modules, images and layers that cannot be converted, and the error messages."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from polyhead import MultiHeadAttention, QuadraticOffset, RelativeBias, from_conv, to_conv


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: from_conv(nn.MaxPool2d(2)), r"conv must be an nn.Conv1d.*, got MaxPool2d: a head computes a weighted mean of its values, not a maximum"),
        (lambda: from_conv(nn.ConvTranspose2d(2, 3, 3)), r"conv must be .*, got ConvTranspose2d: with a stride, the taps that reach .* With stride 1"),
        (lambda: from_conv(nn.AdaptiveAvgPool2d(3)), r"conv must be .*, got AdaptiveAvgPool2d: its windows differ from point to point"),
        (lambda: from_conv(nn.LazyConv2d(3, 3)), r"conv must be .*, got LazyConv2d: its sizes are not known yet"),
        (lambda: from_conv(nn.Linear(2, 3)), r"conv must be an nn.Conv1d, Conv2d or Conv3d, or an nn.AvgPool1d, .* got Linear$"),
        (lambda: from_conv(torch.ones(2, 2, 3, 3)), r"conv must be .*, got Tensor$"),
        (lambda: from_conv(nn.Conv2d(2, 2, 3, dtype=torch.complex64)), r"conv must have floating-point weights, got torch.complex64"),
        (lambda: from_conv(nn.AvgPool2d(3, 2, 1, ceil_mode=True)), r"conv must have count_include_pad=False if it has ceil_mode=True"),
        (lambda: from_conv(nn.AvgPool2d(3, 2, 1, count_include_pad=False), alpha=3.0), r"alpha must be None for this pooling: its windows average different numbers"),
        (lambda: from_conv(nn.Conv2d(2, 2, 3), alpha=-1.0), r"QuadraticOffset: alpha must be a number in \(0, inf\), got -1\.0"),
        (lambda: from_conv(nn.Conv2d(2, 2, 3), head_dim=0), r"head_dim must be an integer in \[1, 2147483647\], got 0"),
        (lambda: from_conv(nn.Conv2d(2, 2, 3))(torch.ones(1, 2, 2, 9)), r"image must be at least as large as the kernel, which spans 3 x 3, got 2 x 9, 2 x 9 with padding"),
        (lambda: from_conv(nn.Conv2d(2, 2, 3))(torch.ones(1, 3, 9, 9)), r"image must have shape \(batch, 2, height, width\) .*, got \(1, 3, 9, 9\)"),
        (lambda: from_conv(nn.Conv2d(2, 2, 3))(torch.ones(1, 2, 9, 9, dtype=torch.uint8)), r"image must be a tensor of floating-point numbers, got torch\.uint8"),
        (lambda: from_conv(nn.Conv2d(2, 2, 3))([[1.0]]), "image must be a tensor of floating-point numbers, got list"),
        (lambda: from_conv(nn.Conv2d(2, 2, 3))(torch.ones(9, 9)), r"image must have shape .*, got \(9, 9\)"),
        (
            lambda: from_conv(nn.Conv2d(2, 2, 9, padding=4, padding_mode="reflect"))(torch.ones(2, 4, 9)),
            r"image must be at least 5 x 5 for padding_mode='reflect' with padding 4 x 4, got 4 x 9",
        ),
        (lambda: to_conv(nn.Linear(2, 2)), "layer must be a result of from_conv or a MultiHeadAttention, got Linear"),
        (lambda: to_conv(MultiHeadAttention(4, 2)), r"layer must have heads that look at fixed points, as with .*; here `over` and the inputs decide"),
        (lambda: to_conv(MultiHeadAttention(4, 2, score="gat")), r"layer must have dot-product scores, got GAT, whose scores depend on the content"),
        (
            lambda: to_conv(MultiHeadAttention(4, 2, position=RelativeBias(2, window=(3, 3)))),
            r"layer must have a QuadraticOffset as position, .*, got RelativeBias",
        ),
        (
            lambda: to_conv(MultiHeadAttention(4, 2, position=QuadraticOffset([(0, 0), (1, 1)]))),
            r"layer must have W_Q or W_K equal to zero, .* depend on the content \(the largest entry of W_Qᵀ W_K of a head is",
        ),
        (lambda: to_conv(from_conv(nn.AvgPool2d(2))), r"layer must not be a pooling, which averages each channel separately"),
    ],
)  # fmt: skip
def test_unsupported_modules_images_and_layers_are_refused(make: Any, message: str):
    with pytest.raises(ValueError, match=message):
        make()


def test_convolution_with_overridden_forward_is_refused():
    class Standardised(nn.Conv2d):
        def forward(self, x):
            return F.conv2d(x, self.weight - self.weight.mean())

    with pytest.raises(
        ValueError, match=r"conv must be a plain nn\.Conv2d, got Standardised, which overrides its computation"
    ):
        from_conv(Standardised(2, 2, 3))


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
    with pytest.raises(ValueError, match="which overrides its computation or has hooks"):
        from_conv(conv)
    parametrized = nn.utils.parametrizations.weight_norm(nn.Conv2d(2, 2, 3))
    x = torch.randn(1, 2, 5, 5)
    assert torch.allclose(from_conv(parametrized)(x)[0], parametrized(x), atol=1e-6)


def test_value_bias_with_zero_padding_is_refused():
    layer = MultiHeadAttention(4, 2, position=QuadraticOffset([(0, 0), (0, 1)], alpha=60.0, padding="zeros"), sink=0.0)
    nn.init.zeros_(layer.q_proj.weight)
    assert to_conv(layer).padding_mode == "zeros"
    nn.init.ones_(layer.v_proj.bias)
    with pytest.raises(ValueError, match="layer must have v_proj without a bias for zero padding"):
        to_conv(layer)
