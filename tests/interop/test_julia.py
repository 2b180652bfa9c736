"""GeometricMachineLearning.jl's layer: its formula in NumPy, and conversion to our layer and back."""

import itertools

import numpy as np
import pytest
import torch
from torch import nn

import polyhead.numpy as definition
from polyhead import ALiBi, Dot, MultiHeadAttention, Rotary, optim
from polyhead.interop.julia import layer_from_julia, layer_to_julia

HEADS, DIM, ITEMS = 3, 5, 11
N = HEADS * DIM
SCALES = {"model": N**-0.5, "head": None, None: 1.0}


def drawn(orthonormal=True, dtype=np.float64):
    """Julia's parameters."""
    rng = np.random.default_rng(0)

    def matrix():
        normal = rng.normal(size=(N, DIM))
        return (np.linalg.qr(normal)[0] if orthonormal else normal).astype(dtype)

    return {name: {f"head_{head}": matrix() for head in range(1, HEADS + 1)} for name in ("PQ", "PK", "PV")}


def by_columns(parameters, x, **options):
    matrices = [[parameters[name][f"head_{head}"] for head in range(1, HEADS + 1)] for name in ("PQ", "PK", "PV")]
    return definition.column_attention(x, *matrices, **options)


def loop_attention(parameters, x):
    """The formula of the library as plain loops."""
    output = np.zeros((N, ITEMS))
    for head in range(HEADS):
        q, k, v = (parameters[name][f"head_{head + 1}"].T @ x for name in ("PQ", "PK", "PV"))
        for n in range(ITEMS):
            powers = np.exp([q[:, m] @ k[:, n] / np.sqrt(N) for m in range(ITEMS)])
            output[head * DIM : (head + 1) * DIM, n] = sum(p * v[:, m] for m, p in enumerate(powers / powers.sum()))
    return output + x


def test_column_attention_equals_the_library():
    x = np.random.default_rng(1).normal(size=(N, ITEMS))
    found = by_columns(drawn(), x, scale=N**-0.5, order="QK", residual=True)
    np.testing.assert_allclose(found, loop_attention(drawn(), x), atol=1e-13)


def test_column_attention_is_row_attention_transposed():
    parameters, x = drawn(), np.random.default_rng(1).normal(size=(N, ITEMS))
    heads = [definition.Head(*(parameters[p][f"head_{h}"] for p in ("PQ", "PK", "PV"))) for h in range(1, HEADS + 1)]
    expected = definition.multi_head(x.T, x.T, heads, combine="concat").T
    np.testing.assert_allclose(by_columns(parameters, x), expected, atol=1e-13)
    with pytest.raises(ValueError, match="order must be 'KQ' or 'QK', got 'qk'"):
        by_columns(parameters, x, order="qk")


@pytest.mark.parametrize(
    ("scale", "order", "residual", "orthonormal"),
    list(itertools.product(SCALES, ("QK", "KQ"), (False, True), (False, True))),
)
def test_the_layer_equals_the_formula_and_converts_back(scale, order, residual, orthonormal):
    parameters = drawn(orthonormal)
    x = np.random.default_rng(1).normal(size=(N, ITEMS))
    layer = layer_from_julia(parameters, scale=scale, order=order, residual=residual)
    output, heads = layer(torch.from_numpy(x).T)
    expected = by_columns(parameters, x, scale=SCALES[scale], order=order, residual=residual)
    np.testing.assert_allclose(output.detach().T, expected, atol=1e-12)
    assert heads.shape == (HEADS, ITEMS, ITEMS)
    assert set(layer.manifold) == (set("qkv") if orthonormal else set())
    assert optim.check(layer) == (True, None)

    back = layer_to_julia(layer, scale=scale, order=order)
    for name, matrices in parameters.items():
        assert list(back[name]) == list(matrices)
        for key, matrix in matrices.items():
            np.testing.assert_array_equal(back[name][key], matrix)


def test_the_defaults_equal_the_library():
    parameters, x = drawn(dtype=np.float32), np.random.default_rng(1).normal(size=(N, ITEMS)).astype(np.float32)
    layer = layer_from_julia(parameters)
    assert layer.q_proj.weight.dtype == torch.float32
    assert set(layer.manifold) == set("qkv")
    np.testing.assert_allclose(layer(torch.from_numpy(x).T)[0].detach().T, loop_attention(parameters, x), atol=1e-5)


def test_projections_without_orthonormal_columns_are_unconstrained():
    parameters = {**drawn(), "PQ": drawn(False)["PQ"]}
    assert set(layer_from_julia(parameters).manifold) == {"q", "v"}
    assert set(layer_from_julia(parameters, order="KQ").manifold) == {"k", "v"}


def test_tensors_lists_and_read_only_arrays_are_accepted():
    parameters, expected = drawn(), layer_from_julia(drawn())
    parameters["PQ"]["head_1"] = torch.from_numpy(parameters["PQ"]["head_1"])
    parameters["PK"]["head_2"] = parameters["PK"]["head_2"].tolist()
    parameters["PV"]["head_3"] = np.asfortranarray(parameters["PV"]["head_3"])
    parameters["PV"]["head_3"].flags.writeable = False
    parameters["PV"] = dict(reversed(parameters["PV"].items()))
    x = torch.randn(7, N, dtype=torch.float64)
    assert torch.equal(layer_from_julia(parameters)(x)[0], expected(x)[0])


def test_conversion_copies_the_weights():
    parameters = drawn()
    layer = layer_from_julia(parameters)
    parameters["PV"]["head_1"][:] = 0
    back = layer_to_julia(layer)
    back["PV"]["head_2"][:] = 0
    assert optim.check(layer) == (True, None)


def changed(name, key, matrix):
    parameters = drawn()
    parameters[name][key] = matrix
    return parameters


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ([], r"parameters must be .*, got no dict of heads for PQ"),
        ({"PQ": drawn()["PQ"], "PK": drawn()["PK"]}, r"parameters must be .*, got no dict of heads for PV"),
        ({**drawn(), "PK": {}}, r"parameters: PK must have head_1, head_2 and so on, got \[\]"),
        (
            changed("PK", "head_5", np.eye(5)),
            r"parameters: PK must have .*, got \['head_1', 'head_2', 'head_3', 'head_5'\]",
        ),
        (changed("PV", "head_2", np.eye(5)), r"parameters: PV.head_2 must be .*, got torch.float64 of shape \(5, 5\)"),
        (
            changed("PV", "head_1", np.ones((N, DIM), int)),
            r"parameters: PV.head_1 must be .*, got torch.int64 of shape \(15, 5\)",
        ),
        (
            changed("PQ", "head_4", np.ones((N, DIM))),
            r"parameters: PK must match PQ, 4 heads of .*, got 3 heads of \(15, 5\)",
        ),
        (
            {**drawn(), "PV": drawn(dtype=np.float32)["PV"]},
            "PV must match PQ, 3 heads of .* in torch.float64, got 3 heads .* in torch.float32",
        ),
        (
            {name: {key: matrix.T for key, matrix in heads.items()} for name, heads in drawn().items()},
            r"the 3 heads of PQ must be \(N, N ÷ 3\), got \(5, 15\); they look transposed",
        ),
        (
            {name: {key: matrix[:, :3] for key, matrix in heads.items()} for name, heads in drawn().items()},
            r"the 3 heads of PQ must be \(N, N ÷ 3\), got \(15, 3\)$",
        ),
    ],
)
def test_wrong_parameters_are_refused(parameters, message):
    with pytest.raises(ValueError, match=message):
        layer_from_julia(parameters)


def test_wrong_options_are_refused():
    for convert, source in ((layer_from_julia, drawn()), (layer_to_julia, layer_from_julia(drawn()))):
        with pytest.raises(ValueError, match="scale must be 'model', 'head' or None, got 'sqrt'"):
            convert(source, scale="sqrt")
        with pytest.raises(ValueError, match="order must be 'QK' or 'KQ', got 'kq'"):
            convert(source, order="kq")


def like_julia(**changes):
    options = {"score": Dot(12**-0.5), "combine": "concat", "bias": False, **changes}
    return MultiHeadAttention(12, 3, **options)


def gated():
    layer = like_julia()
    layer.gate = torch.ones(3)
    return layer


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (nn.Linear(2, 2), "layer must be a MultiHeadAttention .*, got Linear"),
        (like_julia(combine="project"), "combine must be 'concat', .*, got 'project'"),
        (like_julia(bias=True), "q_proj must be an nn.Linear without a bias, .*, got one with a bias"),
        (like_julia(score="gat"), "q_proj must be an nn.Linear .*, got NoneType"),
        (like_julia(head_dim=5), "d_model must be 15, .*, got 12"),
        (like_julia(d_key=7, d_value=12), "d_key must be 12, .*, got 7"),
        (like_julia(d_value=7), "d_value must be 12, .*, got 7"),
        (like_julia(kv_heads=1), "kv_heads must be 3, .*, got 1"),
        (like_julia(value_dim=5), "value_dim must be 4, .*, got 5"),
        (like_julia(position=Rotary()), "position must be None, .*, got Rotary"),
        (like_julia(position=ALiBi(3)), "position must be None, .*, got ALiBi"),
        (like_julia(sink=0.0), "sink must be None, .*, got Tensor"),
        (like_julia(qk_norm=True), "q_norm must be None, .*, got RMSNorm"),
        (gated(), "gate must be None, .*, got Tensor"),
        (like_julia(score="dot"), r"score must be Dot\(0.288675\) for scale='model', got Dot\(\)"),
    ],
)
def test_layers_that_julia_cannot_express_are_refused(layer, message):
    with pytest.raises(ValueError, match=message):
        layer_to_julia(layer)


def test_round_trip_of_an_expressible_layer():
    layer, x = like_julia(residual=True, manifold="stiefel"), torch.randn(2, 7, 12)
    again = layer_from_julia(layer_to_julia(layer))
    torch.testing.assert_close(again(x)[0], layer(x)[0])
