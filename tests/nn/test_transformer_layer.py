"""TransformerLayer against torch's layers, unpadding, and its error messages."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from polyhead import Causal, MultiHeadAttention, Padding, Rotary
from polyhead.interop.torch_transformer_layers import layer_from_torch
from polyhead.nn import FeedForward, TransformerLayer


def layer(*, cross: bool, norm_first: bool) -> TransformerLayer:
    attentions = [MultiHeadAttention(12, 3) for _ in range(1 + cross)]
    return TransformerLayer(
        attentions[0], FeedForward(12, 31), cross=attentions[1] if cross else None, norm_first=norm_first
    )  # fmt: skip


@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("norm_first", [True, False])
def test_encoder_layer_equals_torch(norm_first: bool, activation: str) -> None:
    torch.manual_seed(0)
    theirs = nn.TransformerEncoderLayer(
        12, 3, 31, dropout=0.0, activation=activation, batch_first=True, norm_first=norm_first
    )
    ours = layer_from_torch(theirs)
    x, lengths = torch.randn(5, 7, 12), torch.tensor([7, 1, 4, 6, 3])
    real = torch.arange(7) < lengths[:, None]
    torch.testing.assert_close(ours(x), theirs(x))
    wanted = theirs(x, src_key_padding_mask=~real)[real]
    found = ours(x, over=Padding(lengths))[real]
    torch.testing.assert_close(found, wanted)
    weights = torch.randn_like(found)
    (own,) = torch.autograd.grad((found * weights).sum(), ours.feedforward.up.weight)
    (other,) = torch.autograd.grad((wanted * weights).sum(), theirs.linear1.weight)
    torch.testing.assert_close(own, other)


@pytest.mark.parametrize("norm_first", [True, False])
def test_decoder_layer_equals_torch_in_value_and_gradient(norm_first: bool) -> None:
    torch.manual_seed(0)
    theirs = nn.TransformerDecoderLayer(12, 3, 31, dropout=0.0, batch_first=True, norm_first=norm_first)
    ours = layer_from_torch(theirs)
    x, memory = torch.randn(5, 7, 12, requires_grad=True), torch.randn(5, 11, 12, requires_grad=True)
    lengths = torch.tensor([11, 2, 5, 9, 1])
    ahead = torch.ones(7, 7, dtype=torch.bool).triu(1)
    padded = torch.arange(11) >= lengths[:, None]
    wanted = theirs(x, memory, tgt_mask=ahead, memory_key_padding_mask=padded)
    found = ours(x, memory, Causal(), memory_over=Padding(lengths))
    torch.testing.assert_close(found, wanted)
    weights = torch.randn_like(found)
    for own, other in zip(
        torch.autograd.grad((found * weights).sum(), (x, memory)),
        torch.autograd.grad((wanted * weights).sum(), (x, memory)),
        strict=True,
    ):
        torch.testing.assert_close(own, other)


def test_unsupported_torch_layers_are_refused() -> None:
    for wrong, message in (
        (nn.Linear(2, 2), "layer must be a torch.nn.TransformerEncoderLayer .*, got Linear"),
        (
            nn.TransformerEncoderLayer(12, 3, activation=torch.tanh, batch_first=True),
            "layer must have the activation relu or gelu, got .*tanh",
        ),
        (nn.TransformerEncoderLayer(12, 3), "module must have batch_first=True.*, got False"),
    ):
        with pytest.raises(ValueError, match=message):
            layer_from_torch(wrong)
    theirs = nn.TransformerEncoderLayer(12, 3, 31, 0.0, nn.GELU(), batch_first=True, bias=False, layer_norm_eps=0.1)
    x = torch.randn(2, 5, 12)
    torch.testing.assert_close(layer_from_torch(theirs)(x), theirs(x))


@pytest.mark.parametrize("norm_first", [True, False])
def test_unpadding_keeps_valid_rows_and_gradients(norm_first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    ours, lengths = layer(cross=False, norm_first=norm_first).double(), torch.tensor([13, 2, 0, 5])
    real = torch.arange(13) < lengths[:, None]
    x = torch.randn(4, 13, 12, dtype=torch.float64, requires_grad=True)

    def run() -> tuple[torch.Tensor, list[torch.Tensor]]:
        out = ours(x, over=Padding(lengths))[real]
        return out, list(torch.autograd.grad(out.pow(3).sum(), [x, *ours.parameters()]))

    wanted, gradients = run()
    shapes = []
    ours.feedforward.register_forward_pre_hook(lambda _, given: shapes.append(given[0].shape))
    monkeypatch.setattr("polyhead.nn.skip_padded_rows._MIN_UNPADDING_NUMEL", 0)
    monkeypatch.setattr("polyhead.nn.skip_padded_rows._MIN_UNPADDING_SAVING", 0)
    found, own = run()
    assert shapes == [(13 + 2 + 0 + 5 + 1, 12)]
    torch.testing.assert_close(found, wanted)
    for one, other in zip(own, gradients, strict=True):
        torch.testing.assert_close(one, other)


def test_memory_activation_and_cross_are_checked() -> None:
    with pytest.raises(ValueError, match="memory must be given: this layer has cross-attention"):
        layer(cross=True, norm_first=True)(torch.randn(1, 3, 12))
    with pytest.raises(ValueError, match="memory must be None: this layer has no cross-attention"):
        layer(cross=False, norm_first=True)(torch.randn(1, 3, 12), torch.randn(1, 3, 12))
    with pytest.raises(ValueError, match=r"activation must be one of relu, gelu, .*got 'tanh'"):
        FeedForward(12, 31, activation="tanh")
    with pytest.raises(ValueError, match="cross must have the d_model of attention, 12, got 9"):
        TransformerLayer(MultiHeadAttention(12, 3), FeedForward(12, 31), cross=MultiHeadAttention(9, 3))


def test_sublayers_that_do_not_fit_are_refused() -> None:
    mha, up = MultiHeadAttention(12, 3), FeedForward(12, 31)
    for arguments, options, message in (
        (
            (nn.MultiheadAttention(12, 3), up),
            {},
            "attention must be a MultiHeadAttention, got MultiheadAttention",
        ),
        ((MultiHeadAttention(12, 3, residual=True), up), {}, "attention must have residual=False"),
        (
            (MultiHeadAttention(12, 3, combine="mean"), up),
            {},
            "attention must have as many output features as its query, 12, got 4",
        ),
        (
            (MultiHeadAttention(12, 3, d_out=5), up),
            {},
            "attention must have as many output features as its query, 12, got 5",
        ),
        ((mha, FeedForward(9, 31)), {}, "feedforward must have the d_model of attention, 12, got 9"),
        (
            (mha, up),
            {"norm": nn.LayerNorm(12)},
            r"norm must make a module from a number of features, such as nn\.LayerNorm, got LayerNorm",
        ),
        ((mha, up), {"cross": MultiHeadAttention(12, 3, position=Rotary())}, "cross must have position=None"),
    ):
        with pytest.raises(ValueError, match=message):
            TransformerLayer(*arguments, **options)
    TransformerLayer(MultiHeadAttention(12, 3, combine="concat"), up)
    with pytest.raises(ValueError, match=r"memory must be a tensor or KeyValues, got Causal.*over="):
        TransformerLayer(mha, up)(torch.randn(1, 3, 12), Causal())


class ConvolutionalFeedForward(nn.Module):
    """A feed-forward network that needs all three axes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(256, 256, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x.transpose(1, 2)).transpose(1, 2)


def test_custom_feedforward_gets_padded_batches() -> None:
    one = TransformerLayer(MultiHeadAttention(256, 2), ConvolutionalFeedForward())
    x = torch.randn(8, 128, 256)
    assert one(x, over=Padding(torch.arange(1, 9))).shape == x.shape
