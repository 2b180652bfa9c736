"""Conversion from torch's module to a layer and back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from polyhead import Dot, Mask, MultiHeadAttention, Padding, Rotary
from polyhead.interop.torch import MultiheadAttention, from_torch, to_torch

HEADS, DIM, BATCH, QUERIES, KEYS, KDIM, VDIM = 3, 7, 5, 11, 13, 17, 19
MODEL = HEADS * DIM
SIZES: dict[str, dict[str, int]] = {"same": {}, "kdim": {"kdim": KDIM}, "kdim+vdim": {"kdim": KDIM, "vdim": VDIM}}


def some(*shape: int, share: float = 0.4) -> Tensor:
    """A bool mask that hides some keys, never the first."""
    hidden = torch.rand(shape) < share
    hidden[..., 0] = False
    return hidden


@pytest.mark.parametrize("kind", [nn.MultiheadAttention, MultiheadAttention])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_from_torch_and_to_torch_keep_the_function(bias: bool, zero: bool, size: str, kind: type) -> None:
    module = kind(MODEL, HEADS, bias=bias, add_zero_attn=zero, batch_first=True, **SIZES[size])
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.uniform_(-0.5, 0.5)
    random = torch.get_rng_state()
    layer = from_torch(module)
    back = to_torch(layer)
    assert torch.equal(torch.get_rng_state(), random)
    assert type(layer) is MultiHeadAttention and type(back) is nn.MultiheadAttention and back.batch_first
    assert list(back.state_dict()) == list(module.state_dict())
    assert all(torch.equal(back.state_dict()[name], value) for name, value in module.state_dict().items())
    x = [torch.randn(BATCH, QUERIES, MODEL), *(torch.randn(BATCH, KEYS, n) for n in (module.kdim, module.vdim))]
    call = {"attn_mask": some(QUERIES, KEYS), "key_padding_mask": some(BATCH, KEYS)}
    over = Mask(~call["attn_mask"]) & Padding(~call["key_padding_mask"], queries=False)
    (expected, weights), (output, heads), (again, _) = module(*x, **call), layer(*x, over=over), back(*x, **call)
    torch.testing.assert_close(output, expected, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(again, expected, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(heads.weights.mean(1), weights[..., :KEYS], atol=1e-6, rtol=1e-6)
    with torch.no_grad():
        layer.q_proj.weight.add_(1)
        back.out_proj.weight.add_(1)
    torch.testing.assert_close(module(*x, **call)[0], expected)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("training", [False, True])
def test_conversion_keeps_mode_dropout_dtype_and_requires_grad(training: bool, size: str) -> None:
    module = nn.MultiheadAttention(
        MODEL, HEADS, 0.375, batch_first=True, dtype=torch.float64, add_zero_attn=True, **SIZES[size]
    )
    module.train(training)
    module.in_proj_bias.requires_grad_(False)
    module.out_proj.weight.requires_grad_(False)
    with torch.no_grad():
        layer = from_torch(module)
        back = to_torch(layer)
    trainable = {name: p.requires_grad for name, p in layer.named_parameters()}
    frozen = {f"{part}_proj.bias" for part in "qkv"} | {"o_proj.weight"}
    assert {name for name, learned in trainable.items() if not learned} == frozen and len(trainable) == 8
    assert {n: p.requires_grad for n, p in back.named_parameters()} == {
        n: p.requires_grad for n, p in module.named_parameters()
    }
    for made in (layer, back):
        assert all(part.training is training for part in made.modules())
        assert made.dropout == 0.375
        assert {t.dtype for t in (*made.parameters(), *made.buffers())} == {torch.float64}
        assert {t.device.type for t in (*made.parameters(), *made.buffers())} == {"cpu"}


def test_conversion_keeps_the_device() -> None:
    module = nn.MultiheadAttention(MODEL, HEADS, batch_first=True, device="meta", add_zero_attn=True)
    layer = from_torch(module)
    assert {t.device.type for t in (*layer.parameters(), *layer.buffers())} == {"meta"} and layer.sink is not None
    assert {
        p.device.type
        for p in to_torch(from_torch(nn.MultiheadAttention(MODEL, HEADS, batch_first=True, device="meta"))).parameters()
    } == {"meta"}


class Other(nn.MultiheadAttention):
    def forward(self, query: Tensor) -> Tensor:
        return query


@pytest.mark.parametrize(
    "module, message",
    [
        (
            nn.MultiheadAttention(MODEL, HEADS),
            "batch_first=True, since a polyhead layer takes (batch, items, features), got False",
        ),
        (nn.MultiheadAttention(MODEL, HEADS), "set module.batch_first = True"),
        (MultiheadAttention(MODEL, HEADS), "x.transpose(0, 1)"),
        (
            MultiheadAttention(MODEL, HEADS, add_bias_kv=True, batch_first=True),
            "add_bias_kv=False, since a polyhead layer has no learned key and value, got True",
        ),
        (
            Other(MODEL, HEADS, batch_first=True),
            "a torch.nn.MultiheadAttention that does not override forward, got test_torch_conversion.Other",
        ),
        (
            nn.Linear(3, 5),
            "a torch.nn.MultiheadAttention that does not override forward, got torch.nn.modules.linear.Linear",
        ),
    ],
)
def test_from_torch_refuses_with_the_reason(module: Any, message: str) -> None:
    with pytest.raises(ValueError) as error:
        from_torch(module)
    assert str(error.value).startswith("module must ") and message in str(error.value)


def changed(**attributes: Any) -> MultiHeadAttention:
    layer = MultiHeadAttention(MODEL, HEADS)
    for name, value in attributes.items():
        setattr(layer, name, value)
    return layer


def pruned() -> MultiHeadAttention:
    layer = MultiHeadAttention(MODEL, HEADS)
    layer.prune([1])
    return layer


def partly_frozen(name: str) -> MultiHeadAttention:
    layer = MultiHeadAttention(MODEL, HEADS)
    layer.get_parameter(name).requires_grad_(False)
    return layer


@pytest.mark.parametrize(
    "layer, message",
    [
        (MultiHeadAttention(42, 6, kv_heads=2), "kv_heads must be num_heads, 6, since torch's module has no grouped heads, got 2"),
        (MultiHeadAttention(MODEL, HEADS, head_dim=5), "num_heads * head_dim must be d_model, 21, as in torch's module, got 3 * 5 = 15"),
        (pruned(), "num_heads * head_dim must be d_model, 21, as in torch's module, got 2 * 7 = 14"),
        (MultiHeadAttention(MODEL, HEADS, value_dim=5), "value_dim must be head_dim, 7, since torch's module has one size for both, got 5"),
        (MultiHeadAttention(MODEL, HEADS, d_out=5), "d_out must be d_model, 21, since torch's module has one size for both, got 5"),
        (MultiHeadAttention(42, HEADS, position=Rotary()), "position must be None, since torch's module has none, got polyhead.position.Rotary"),
        (MultiHeadAttention(MODEL, HEADS, sink=0.5), "sink must be None or 0, since torch's add_zero_attn is a fixed logit of 0, got [0.5, 0.5, 0.5]"),
        (MultiHeadAttention(MODEL, HEADS, sink="learned"), "sink must be None or 0, since torch's add_zero_attn is a fixed logit of 0, got a learned one"),
        (MultiHeadAttention(MODEL, HEADS, qk_norm=True), "qk_norm must be False, since torch's module does not normalise queries and keys, got True"),
        (changed(gate=torch.ones(HEADS)), "gate must be None, since torch's module has none, got torch.Tensor"),
        (MultiHeadAttention(MODEL, HEADS, combine="concat"), "combine must be 'project', as in torch's module, got 'concat'"),
        (MultiHeadAttention(MODEL, HEADS, combine="mean"), "combine must be 'project', as in torch's module, got 'mean'"),
        (MultiHeadAttention(MODEL, HEADS, score=Dot(1.0)), "score must be Dot() with the default scale, 1/√head_dim, as in torch's module, got Dot(scale=1.0)"),
        (MultiHeadAttention(MODEL, HEADS).fold_value_projection(), "v_proj must be an nn.Linear, since torch's module holds plain weights, got "),
        (changed(k_proj=nn.Linear(MODEL, MODEL, bias=False)), "bias must be the same for all projections, since torch's module has one flag, got {'q_proj': True, 'k_proj': False"),
        (changed(q_proj=nn.Sequential()), "q_proj must be an nn.Linear, since torch's module holds plain weights, got torch.nn.modules.container.Sequential"),
        (partly_frozen("k_proj.weight"), "requires_grad must be the same for the weight of q, k and v, since torch's module packs them, got [True, False, True]"),
        (partly_frozen("v_proj.bias"), "requires_grad must be the same for the bias of q, k and v, since torch's module packs them, got [True, True, False]"),
        (nn.MultiheadAttention(MODEL, HEADS), "layer must be a polyhead.MultiHeadAttention that does not override forward, got torch.nn.modules.activation.MultiheadAttention"),
    ],
)  # fmt: skip
def test_to_torch_refuses_with_the_reason(layer: Any, message: str) -> None:
    with pytest.raises(ValueError) as error:
        to_torch(layer)
    assert message in str(error.value)


def test_to_torch_converts_equivalent_options() -> None:
    layer = MultiHeadAttention(MODEL, HEADS, head_dim=DIM, d_key=KDIM, d_value=KDIM, score=Dot(DIM**-0.5), sink=0.0)
    layer.k_proj.weight.requires_grad_(False)
    module = to_torch(layer)
    assert module.add_zero_attn and not module.k_proj_weight.requires_grad and module.q_proj_weight.requires_grad
    x, memory = torch.randn(BATCH, QUERIES, MODEL), torch.randn(BATCH, KEYS, KDIM)
    torch.testing.assert_close(module(x, memory, memory)[0], layer(x, memory)[0], atol=1e-6, rtol=1e-6)
