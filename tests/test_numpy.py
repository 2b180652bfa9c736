"""The definition in NumPy: against its own formulas, and the layer against it."""

import numpy as np
import pytest
import torch

import polyhead.numpy as definition
from polyhead import Causal, MultiHeadAttention, Window


def heads_of(layer):
    split = lambda linear, number: linear.weight.detach().double().unflatten(0, (number, -1)).transpose(1, 2).numpy()
    group = layer.num_heads // layer.kv_heads
    q, k, v = (
        split(layer.q_proj, layer.num_heads),
        split(layer.k_proj, layer.kv_heads),
        split(layer.v_proj, layer.kv_heads),
    )
    return [definition.Head(q[h], k[h // group], v[h // group]) for h in range(layer.num_heads)]


def test_the_basic_operator():
    X = np.random.default_rng(0).normal(size=(5, 3))
    E = np.exp(X @ X.T)
    np.testing.assert_allclose(definition.attention(X, X, X, scale=1.0), E / E.sum(1, keepdims=True) @ X)


def test_a_row_without_keys_is_zero_and_a_sink_takes_its_share():
    S = np.zeros((2, 3))
    allowed = np.array([[True, True, False], [False, False, False]])
    np.testing.assert_allclose(definition.softmax(S, allowed), [[0.5, 0.5, 0], [0, 0, 0]])
    np.testing.assert_allclose(definition.softmax(S, sink=0.0), np.full((2, 3), 0.25))


@pytest.mark.parametrize("combine", ["project", "concat", "mean"])
@pytest.mark.parametrize("kv_heads", [6, 2])
@pytest.mark.parametrize("cross", [False, True])
def test_the_layer_equals_the_definition(combine, kv_heads, cross):
    layer = MultiHeadAttention(30, 6, kv_heads=kv_heads, head_dim=7, value_dim=11, combine=combine, bias=False).double()
    x = torch.randn(13, 30, dtype=torch.float64)
    y = torch.randn(17, 30, dtype=torch.float64) if cross else x
    out, _ = layer(x, y, over=Causal() & Window(4, 0))
    allowed = definition.causal(len(x), len(y)) & definition.window(len(x), len(y), 4, 0)
    W_O = None if layer.o_proj is None else layer.o_proj.weight.detach().numpy().T
    wanted = definition.multi_head(x.numpy(), y.numpy(), heads_of(layer), combine=combine, W_O=W_O, allowed=allowed)
    np.testing.assert_allclose(out.detach().numpy(), wanted, atol=1e-12)


def test_combine_is_checked():
    with pytest.raises(ValueError, match=r"combine must be 'project' .*got 'sum'"):
        definition.multi_head(
            np.ones((2, 3)), np.ones((2, 3)), [definition.Head(*[np.ones((3, 2))] * 3)], combine="sum"
        )
