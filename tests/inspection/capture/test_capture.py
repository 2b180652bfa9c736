"""Capture: every attention call of any model, by name, with the weights of the model's own eager attention."""

import pytest
import torch
import torch.nn.functional as F
from capture_examples import NAMES, TRANSFORMERS, Own
from torch import nn
from torch.testing import assert_close

from polyhead import Causal, Graph, MultiHeadAttention, Padding, attend
from polyhead.inspection.capture.capture import capture
from polyhead.interop.torch import MultiheadAttention as DropIn


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("kind", TRANSFORMERS)
def test_models_of_transformers_with_sdpa(kind, padded):
    model = TRANSFORMERS[kind]().eval()
    ids, mask = torch.randint(0, 89, (3, 13)), torch.ones(3, 13, dtype=torch.long)
    if padded:
        mask[1, 7:] = 0
    model.set_attn_implementation("eager")
    expected = model(ids, attention_mask=mask, output_attentions=True)
    model.set_attn_implementation("sdpa")
    plain = model(ids, attention_mask=mask).last_hidden_state
    with capture(model) as seen:
        output = model(ids, attention_mask=mask).last_hidden_state
    assert torch.equal(output, plain)
    assert list(seen) == [NAMES[kind].format(layer) for layer in range(2)]
    for heads, weights in zip(seen.values(), expected.attentions, strict=True):
        assert heads.shape == (3, 4, 13, 13)
        assert_close(heads.weights, weights, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", TRANSFORMERS)
def test_w_o_is_found_in_models_of_transformers(kind):
    model = TRANSFORMERS[kind]().eval()
    with capture(model) as seen:
        model(torch.randint(0, 89, (2, 7)))
    output = {
        "bert": lambda n: model.encoder.layer[n].attention.output.dense.weight,
        "gpt2": lambda n: model.h[n].attn.c_proj.weight.T,
        "llama": lambda n: model.layers[n].self_attn.o_proj.weight,
    }[kind]
    for layer, heads in enumerate(seen.values()):
        by_head = output(layer).unflatten(-1, (4, -1)).movedim(-2, 0)
        v = heads._part.call.v.repeat_interleave(4 // heads._part.call.v.shape[1], 1)
        moved = torch.einsum("hod,bhkd->bhko", by_head, v).norm(dim=-1)
        assert_close(heads.contribution().weights, heads.weights * moved[..., None, :], atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("mask", ["none", "causal", "padding", "both", "float"])
def test_torch_multihead_attention(mask, need_weights, batch_first):
    module = nn.MultiheadAttention(24, 3, batch_first=batch_first).eval()
    x = torch.randn(2, 5, 24) if batch_first else torch.randn(5, 2, 24)
    options = {"need_weights": need_weights, "average_attn_weights": False}
    if mask in ("causal", "both"):
        options["attn_mask"] = torch.ones(5, 5, dtype=torch.bool).triu(1)
    if mask == "float":
        options["attn_mask"] = torch.randn(2 * 3, 5, 5)
    if mask in ("padding", "both"):
        options["key_padding_mask"] = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    expected = module(x, x, x, **{**options, "need_weights": True})
    with capture(module) as seen:
        output, weights = module(x, x, x, **options)
    assert_close(output, expected[0], atol=1e-6, rtol=1e-5)
    assert (weights is None) is not need_weights
    assert list(seen) == ["MultiheadAttention"]
    assert_close(seen["MultiheadAttention"].weights, expected[1], atol=1e-5, rtol=1e-5)
    assert torch.equal(seen["MultiheadAttention"]._origin.w_o, module.out_proj.weight)


def test_torch_encoder_and_transformer():
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(24, 4, 32, batch_first=True), 2).eval()
    x = torch.randn(2, 7, 24)
    plain = encoder(x)
    with capture(encoder) as seen:
        assert_close(encoder(x), plain, atol=1e-5, rtol=1e-5)
    assert list(seen) == ["layers.0.self_attn", "layers.1.self_attn"]
    first = encoder.layers[0].self_attn
    _, expected = first(x, x, x, average_attn_weights=False)
    assert_close(seen["layers.0"].weights, expected, atol=1e-5, rtol=1e-5)

    model = nn.Transformer(24, 4, 1, 2, 32, batch_first=True).eval()
    causal = nn.Transformer.generate_square_subsequent_mask(5)
    with capture(model) as seen:
        model(x, x[:, :5], tgt_mask=causal, tgt_is_causal=True)
    assert {name: tuple(heads.shape) for name, heads in seen.items()} == {
        "encoder.layers.0.self_attn": (2, 4, 7, 7),
        "decoder.layers.0.self_attn": (2, 4, 5, 5),
        "decoder.layers.0.multihead_attn": (2, 4, 5, 7),
        "decoder.layers.1.self_attn": (2, 4, 5, 5),
        "decoder.layers.1.multihead_attn": (2, 4, 5, 7),
    }
    _, expected = model.decoder.layers[0].self_attn(
        x[:, :5], x[:, :5], x[:, :5], attn_mask=causal, average_attn_weights=False
    )
    assert_close(seen["decoder.layers.0.self_attn"].weights, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("causal", [False, True])
def test_a_custom_model(causal):
    model = Own(causal=causal)
    x = torch.randn(2, 3, 6, 20)
    plain = model(x)
    with capture(model) as seen:
        assert torch.equal(model(x), plain)
    assert list(seen) == ["Own", "Own#1"]
    q, k, _ = model.packed[0](x).unflatten(-1, (3, 5, -1)).movedim(-3, 0).transpose(-3, -2)
    scores = q @ k.transpose(-2, -1) / 2
    if causal:
        scores = scores.masked_fill(torch.ones(6, 6, dtype=torch.bool).triu(1), -torch.inf)
    assert_close(seen["Own"].weights, scores.softmax(-1), atol=1e-5, rtol=1e-5)
    assert torch.equal(seen["Own"]._origin.w_o, model.out[0].weight)
    assert torch.equal(seen["Own#1"]._origin.w_o, model.out[1].weight)


def sdpa_arguments():
    """Arguments of SDPA: missing, broadcast and grouped axes, masks of all ranks."""
    q, k = torch.randn(2, 4, 5, 8), torch.randn(2, 4, 7, 8)
    yield q, k, {}
    yield q[0, 0], k[0, 0], {}
    yield q[0], k[0], {}
    yield q, k[:, :2], {"enable_gqa": True}
    yield q[:1], k, {"scale": 0.3}
    yield q[:, :1], k[:, :1], {}
    yield q, k, {"is_causal": True}
    for shape in ((5, 7), (1, 7), (4, 5, 7), (2, 1, 5, 7), (2, 1, 1, 7), (1, 4, 5, 7)):
        yield q, k, {"attn_mask": torch.rand(shape) < 0.7}
        yield q, k, {"attn_mask": torch.randn(shape)}
    yield q[0], k[0], {"attn_mask": torch.randn(4, 5, 7)}


@pytest.mark.parametrize("q, k, options", list(sdpa_arguments()))
def test_weights_reproduce_the_output_of_sdpa(q, k, options):
    """The recorded weights times the values equal the output."""

    class Call(nn.Module):
        def forward(self):
            return F.scaled_dot_product_attention(q, k, v, **options)

    v = torch.randn(*k.shape[:-1], 3)
    call = Call()
    with capture(call) as seen:
        out = call()
    (heads,) = seen.values()
    values = v if v.dim() > 3 else v.unsqueeze(-3)
    values = values.repeat_interleave(heads.shape[-3] // values.shape[-3], -3)
    again = heads.weights @ values
    # without a key, SDPA returns NaN and we return 0
    assert_close(again.reshape(out.shape), out.nan_to_num(0.0), atol=1e-5, rtol=1e-5)


def test_polyhead_layers_attend_and_drop_ins():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = MultiHeadAttention(24, 4, sink="learned")
            self.drop_in = DropIn(24, 4, batch_first=True)
            self.graph = MultiHeadAttention(24, 2, score="gatv2")

        def forward(self, x):
            x, self.heads = self.layer(x, over=Causal() & Padding(torch.tensor([5, 3])))
            x = self.drop_in(x, x, x)[0]
            x = attend(*[x.unflatten(-1, (3, 8)).transpose(1, 2)] * 3).transpose(1, 2).flatten(-2)
            return self.graph(x, over=Graph(torch.tensor([[0, 1, 2, 3], [1, 2, 3, 4]]), 5))[0]

    model = Model().eval()
    model.layer.gate = torch.tensor([1.0, 0.5, 0.0, 2.0])
    x = torch.randn(2, 5, 24)
    plain = model(x)
    with capture(model) as seen:
        assert torch.equal(model(x), plain)
    assert {name: tuple(heads.shape) for name, heads in seen.items()} == {
        "layer": (2, 4, 5, 5),
        "drop_in": (2, 4, 5, 5),
        "Model": (2, 3, 5, 5),
        "graph": (2, 2, 4),
    }
    assert torch.equal(seen["layer"].weights, model.heads.weights)
    assert torch.equal(seen["layer"].contribution().weights, model.heads.contribution().weights)
    assert torch.equal(seen["drop_in"]._origin.w_o, model.drop_in.out_proj.weight)
