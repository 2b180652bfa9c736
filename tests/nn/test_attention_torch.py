"""The layer under torch's machinery: dtypes, autocast, compilation, export, vmap, copies and state dicts."""

import copy
import pickle

import pytest
import torch
from attention_cases import NEIGHBOURHOODS, POSITIONS, layer
from torch import nn

from polyhead import ALiBi, Causal, MultiHeadAttention, Padding, RelativeBias, Rotary, Segments, Window


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("over", ["dense", "window", "padding"])
def test_dtypes(dtype, over):
    mha, x = layer(), torch.randn(3, 11, 30)
    wanted, _ = mha(x, over=NEIGHBOURHOODS[over]())
    output, heads = mha.to(dtype)(x.to(dtype), over=NEIGHBOURHOODS[over]())
    assert output.dtype == heads.weights.dtype == heads.dtype == dtype
    torch.testing.assert_close(output.float(), wanted, atol=3e-2, rtol=3e-2)


@pytest.mark.parametrize("over", NEIGHBOURHOODS)
def test_autocast(over):
    mha, x = layer(position=Rotary(4)), torch.randn(3, 11, 30, requires_grad=True)
    neighbourhood = NEIGHBOURHOODS[over]()
    wanted, _ = mha(x, over=neighbourhood)
    with torch.autocast("cpu", torch.bfloat16):
        output, heads = mha(x, over=neighbourhood)
        assert heads.weights.shape == (3, 6, 11, 11)
    assert output.dtype == torch.bfloat16
    output.float().square().mean().backward()
    torch.testing.assert_close(output.float(), wanted, atol=3e-2, rtol=3e-2)


@pytest.mark.parametrize("over", NEIGHBOURHOODS)
@pytest.mark.parametrize("position", POSITIONS)
def test_compiles_into_one_graph(over, position):
    torch._dynamo.reset()
    mha = layer(position=Rotary(4) if position == "rotary" else POSITIONS[position](), kv_heads=2)
    x, neighbourhood = torch.randn(3, 11, 30, requires_grad=True), NEIGHBOURHOODS[over]()

    def function(x):
        output, heads = mha(x, over=neighbourhood)
        return output, heads.weights, heads

    wanted, weights, _ = function(x)
    output, seen, heads = torch.compile(function, fullgraph=True, backend="aot_eager")(x)
    torch.testing.assert_close(output, wanted)
    torch.testing.assert_close(seen, weights)
    torch.testing.assert_close(heads.weights, weights)
    (got,) = torch.autograd.grad(output.square().sum(), x)
    (gradient,) = torch.autograd.grad(wanted.square().sum(), x)
    torch.testing.assert_close(got, gradient, atol=1e-5, rtol=1e-4)


def test_compiles_with_neighbourhoods_built_inside_and_dropout():
    torch._dynamo.reset()
    mha = layer(dropout=0.5)

    def function(x, lengths, ids):
        return mha(x, over=Causal() & Padding(lengths) & Segments(ids))[0]

    x, lengths, ids = torch.randn(3, 11, 30), torch.tensor([3, 11, 0]), torch.arange(11).expand(3, 11) // 4
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    torch.manual_seed(5)
    first = compiled(x, lengths, ids)
    assert not torch.equal(first, compiled(x, lengths, ids))
    mha.eval()
    torch.testing.assert_close(compiled(x, lengths, ids), function(x, lengths, ids))


def test_compiles_with_the_default_backend():
    torch._dynamo.reset()
    mha, x = layer(), torch.randn(3, 11, 30)
    compiled = torch.compile(lambda x: mha(x, over=Window(3))[0], fullgraph=True)
    torch.testing.assert_close(compiled(x), mha(x, over=Window(3))[0])


@pytest.mark.parametrize("over", NEIGHBOURHOODS)
def test_exports(over, tmp_path):
    mha, x, neighbourhood = layer().eval(), torch.randn(3, 11, 30), NEIGHBOURHOODS[over]()

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.mha = mha

        def forward(self, x):
            return self.mha(x, over=neighbourhood)

    wanted, heads = mha(x, over=neighbourhood)
    program = torch.export.export(Model(), (x,))
    torch.export.save(program, tmp_path / "layer.pt2")
    output, seen = torch.export.load(tmp_path / "layer.pt2").module()(x)
    torch.testing.assert_close(output, wanted)
    torch.testing.assert_close(seen.weights, heads.weights)


@pytest.mark.parametrize("over", ["dense", "causal", "window", "segments", "mask"])
def test_vmap_and_per_sample_gradients(over):
    mha, x, neighbourhood = layer(sink=0.2, position=ALiBi(6)), torch.randn(3, 11, 30), NEIGHBOURHOODS[over]()
    output, heads = mha(x, over=neighbourhood)
    mapped, seen = torch.func.vmap(lambda one: mha(one, over=neighbourhood))(x)
    torch.testing.assert_close(mapped, output)
    torch.testing.assert_close(seen.weights, heads.weights)
    torch.testing.assert_close(seen.contribution().weights, heads.contribution().weights)

    weights = dict(mha.named_parameters())

    def loss(weights, one):
        return torch.func.functional_call(mha, weights, (one,), {"over": neighbourhood})[0].square().sum()

    by_sample = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(weights, x)
    for row in range(3):
        one = torch.autograd.grad(loss(weights, x[row]), list(weights.values()))
        for name, gradient in zip(weights, one, strict=True):
            torch.testing.assert_close(by_sample[name][row], gradient, atol=1e-4, rtol=1e-4)


def test_copies_pickles_and_state_dicts():
    mha = MultiHeadAttention(30, 6, position=RelativeBias(6), sink="learned", qk_norm=True, kv_heads=2)
    x = torch.randn(2, 11, 30)
    wanted = mha(x)[0]
    other = MultiHeadAttention(30, 6, position=RelativeBias(6), sink="learned", qk_norm=True, kv_heads=2)
    other.load_state_dict(mha.state_dict())
    for same in (copy.deepcopy(mha), pickle.loads(pickle.dumps(mha)), other):
        assert torch.equal(same(x)[0], wanted)
