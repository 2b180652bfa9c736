"""What the heads found: principal angles against SciPy, variances against PCA, and the picture."""

import builtins
import math

import numpy as np
import pytest
import torch
from scipy.linalg import subspace_angles
from torch import nn
from torch.testing import assert_close

from polyhead import MultiHeadAttention, Stiefel
from polyhead.inspection import captured_variance, plot_subspaces, principal_angles

LAYERS = {
    "euclidean": lambda: MultiHeadAttention(17, 3, head_dim=5, value_dim=7),
    "stiefel": lambda: MultiHeadAttention(17, 3, head_dim=5, value_dim=7, manifold="stiefel"),
    "grouped": lambda: MultiHeadAttention(17, 6, kv_heads=2, head_dim=5, value_dim=3, manifold="stiefel"),
    "overlapping": lambda: MultiHeadAttention(11, 3, head_dim=7, manifold="stiefel"),
    "wider than the input": lambda: MultiHeadAttention(5, 3, head_dim=7),
    "gat": lambda: MultiHeadAttention(17, 3, head_dim=5, score="gat"),
    "gatv2": lambda: MultiHeadAttention(17, 3, head_dim=5, score="gatv2"),
    "inputs of three kinds": lambda: MultiHeadAttention(17, 3, head_dim=5, d_key=13, d_value=11),
}
CASES = [
    (name, letter) for name, make in LAYERS.items() for letter in "qkv" if getattr(make(), f"{letter}_proj") is not None
]


def matrices(layer, letter):
    """A head's rows as columns, (heads, features, dim)."""
    heads = {"q": layer.num_heads, "k": layer.kv_heads, "v": layer.value_heads}[letter]
    return getattr(layer, f"{letter}_proj").weight.detach().unflatten(0, (heads, -1)).mT


def spanning(*bases):
    """A layer whose heads' values span these subspaces."""
    layer = MultiHeadAttention(bases[0].shape[0], len(bases), head_dim=bases[0].shape[1], bias=False).to(bases[0].dtype)
    with torch.no_grad():
        layer.v_proj.weight.copy_(torch.cat([basis.mT for basis in bases]))
    return layer


@pytest.mark.parametrize(("name", "letter"), CASES)
def test_angles_are_those_of_scipy(name, letter):
    layer = LAYERS[name]().double()
    angles, maps = principal_angles(layer, letter), matrices(layer, letter).numpy()
    # SciPy takes some cosines of angles that are zero
    allowed = 1e-7 if name == "overlapping" else 1e-12
    assert angles.shape == (len(maps), len(maps), min(maps.shape[1:]))
    for i, a in enumerate(maps):
        for j, b in enumerate(maps):
            np.testing.assert_allclose(angles[i, j], subspace_angles(a, b)[::-1], atol=allowed)
    assert_close(angles, angles.transpose(0, 1), atol=0, rtol=0)
    assert angles.diagonal().count_nonzero() == 0


@pytest.mark.parametrize("angle", [1e-12, 1e-8, 1e-3, 1.0, math.pi / 2 - 1e-8, math.pi / 2])
def test_any_angle_is_exact(angle):
    turn = Stiefel().random(13, 13, dtype=torch.float64)
    a = torch.eye(13, dtype=torch.float64)[:, :2]
    b = torch.zeros(13, 2, dtype=torch.float64)
    b[0, 0], b[5, 0], b[1, 1] = math.cos(angle), math.sin(angle), 1
    (found,) = principal_angles(spanning(turn @ a, turn @ b))[0, 1:]
    assert_close(found, torch.tensor([0, angle], dtype=torch.float64), atol=2e-15, rtol=1e-14)


def test_the_choice_of_bases_and_of_axes_changes_nothing():
    a, b = torch.randn(2, 13, 4, dtype=torch.float64)
    turn = Stiefel().random(13, 13, dtype=torch.float64)
    other = [turn @ basis @ torch.randn(4, 4, dtype=torch.float64) * size for basis, size in ((a, 1e-6), (b, 1e6))]
    assert_close(principal_angles(spanning(*other)), principal_angles(spanning(a, b)), atol=1e-11, rtol=0)


def test_angles_to_another_layer():
    layer, other = LAYERS["grouped"]().double(), LAYERS["euclidean"]().double()
    angles = principal_angles(layer, "v", to=other)
    assert angles.shape == (2, 3, 3)
    for i, a in enumerate(matrices(layer, "v").numpy()):
        for j, b in enumerate(matrices(other, "v").numpy()):
            np.testing.assert_allclose(angles[i, j], subspace_angles(a, b)[::-1], atol=1e-12)
    assert_close(principal_angles(other, "v", to=layer), angles.transpose(0, 1))
    assert_close(principal_angles(layer, "k", to=layer), principal_angles(layer, "k"), atol=1e-14, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_dtypes(dtype):
    layer = LAYERS["euclidean"]().to(dtype)
    x = torch.randn(2, 9, 17, dtype=dtype)
    assert principal_angles(layer, "q").dtype == captured_variance(layer, x).heads.dtype == torch.float32
    assert_close(principal_angles(layer, "q").double(), principal_angles(layer.double(), "q"), atol=1e-5, rtol=0)


@pytest.mark.parametrize(("name", "letter"), CASES)
def test_variance_is_that_of_projections_and_pca(name, letter):
    layer = LAYERS[name]().double()
    maps = matrices(layer, letter).numpy()
    features, dim = maps.shape[1], min(maps.shape[1:])
    x = torch.randn(3, 19, features, dtype=torch.float64) @ torch.randn(features, features, dtype=torch.float64) + 5
    found = captured_variance(layer, x, letter)

    centred = x.reshape(-1, features).numpy()
    centred = centred - centred.mean(0)
    share = lambda matrix: np.linalg.norm(centred @ matrix @ np.linalg.pinv(matrix)) ** 2 / np.linalg.norm(centred) ** 2
    np.testing.assert_allclose(found.heads, [share(one) for one in maps], atol=1e-12)
    assert found.together == pytest.approx(share(np.concatenate(maps, 1)), abs=1e-12)
    squares = np.linalg.svd(centred, compute_uv=False) ** 2
    assert found.best == pytest.approx(squares[:dim].sum() / squares.sum(), abs=1e-12)
    assert found.chance == dim / features
    assert (found.heads <= found.best + 1e-12).all()
    assert found.together >= found.heads.max() - 1e-12


def test_the_principal_components_capture_the_most():
    x = torch.randn(50, 11, dtype=torch.float64) * torch.arange(11, dtype=torch.float64)
    _, _, right = torch.linalg.svd(x - x.mean(0), full_matrices=False)
    found = captured_variance(spanning(right[:3].mT, right[-3:].mT), x)
    assert found.heads[0] == pytest.approx(found.best)
    assert found.heads[1] < 0.02
    assert found.together == pytest.approx(float(found.heads.sum()))


def test_the_mean_the_scale_and_the_batch_change_nothing():
    layer, x = LAYERS["stiefel"]().double(), torch.randn(4, 9, 17, dtype=torch.float64)
    wanted = captured_variance(layer, x)
    for other in (3 * x + 7, x.flatten(0, 1), x.flip(1), torch.cat((x, x))):
        found = captured_variance(layer, other)
        assert_close(found.heads, wanted.heads)
        assert found[1:] == pytest.approx(wanted[1:])


def test_random_subspaces_hold_their_share():
    x = torch.randn(50, 12, dtype=torch.float64) * torch.arange(12, dtype=torch.float64)
    layer = MultiHeadAttention(12, 500, head_dim=3, manifold={"v": "stiefel"}).double()
    layer.v_proj.weight.data = Stiefel(heads=500).project(layer.v_proj.weight.data)
    found = captured_variance(layer, x)
    assert float(found.heads.mean()) == pytest.approx(found.chance, abs=0.02)


@pytest.mark.parametrize("name", LAYERS)
def test_the_picture_shows_every_projection(name):
    layer = LAYERS[name]()
    own = [letter for letter in "qkv" if getattr(layer, f"{letter}_proj") is not None]
    x = {letter: torch.randn(2, 9, getattr(layer, f"{letter}_proj").in_features) for letter in own}
    for data, rows in ((None, 1), (x, 2), ({own[-1]: x[own[-1]]}, 2)):
        figure = plot_subspaces(layer, data)
        figure.canvas.draw()
        titles = [axis.get_title().split("\n")[0] for axis in figure.axes[: len(own)]]
        assert titles == [f"W_{letter.upper()}" for letter in own]
        assert len(figure.axes) == rows * len(own) + 1
    bars = [len(axis.patches) for axis in plot_subspaces(layer, x).axes[len(own) : 2 * len(own)]]
    assert bars == [len(matrices(layer, letter)) for letter in own]


def test_the_picture_says_angles_in_degrees():
    axis = np.eye(4)
    half = (axis[:, :1] + axis[:, 1:2]) / math.sqrt(2)
    layer = spanning(*(torch.tensor(one) for one in (axis[:, :1], half)))
    values = plot_subspaces(layer, torch.randn(9, 4)).axes[2]
    assert [text.get_text() for text in values.texts] == ["45", "45"]
    assert values.get_title().startswith("W_V\nmean 45°, at random ")


def test_one_head_and_many():
    one = plot_subspaces(MultiHeadAttention(12, 1), torch.randn(9, 12))
    assert one.axes[0].get_title() == "W_Q\none head"
    assert not plot_subspaces(MultiHeadAttention(34, 17)).axes[0].texts


def test_without_matplotlib_it_says_what_to_install(monkeypatch):
    real = builtins.__import__

    def missing(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(ImportError, match=r"pip install polyhead\[plot\]"):
        plot_subspaces(LAYERS["stiefel"]())


def test_error_messages():
    layer, x = LAYERS["euclidean"](), torch.randn(9, 17)
    several = LAYERS["inputs of three kinds"]()
    empty, endless = LAYERS["euclidean"](), LAYERS["euclidean"]()
    nn.init.zeros_(empty.v_proj.weight[7:9])
    nn.init.constant_(endless.q_proj.weight, torch.nan)
    refused = [
        (lambda: principal_angles(nn.Linear(2, 2)), "layer must be a MultiHeadAttention, got Linear"),
        (lambda: plot_subspaces(nn.Linear(2, 2)), "layer must be a MultiHeadAttention, got Linear"),
        (lambda: principal_angles(layer, to=x), "to must be a MultiHeadAttention, got Tensor"),
        (
            lambda: principal_angles(layer, "o"),
            "of must be a projection of this layer, 'q' or 'k' or 'v', got 'o'",
        ),
        (lambda: principal_angles(LAYERS["gat"]()), "of must be a projection of this layer, 'k', got 'v'"),
        (
            lambda: principal_angles(layer.fold_value_projection()),
            "layer must have an nn.Linear as v_proj, got AppendOne; W_V is folded",
        ),
        (lambda: principal_angles(layer, to=several), "to must have a v_proj of 17 features, as layer has, got 11"),
        (
            lambda: principal_angles(empty),
            "layer must have linearly independent rows in v_proj, got 5 dimensions of 7 in head 1",
        ),
        (lambda: principal_angles(endless, "q"), "layer must have finite weights in q_proj, got NaN or inf"),
        (lambda: captured_variance(layer, x[:, :5]), r"x must have shape \(..., items, 17\) for v_proj, got \(9, 5\)"),
        (lambda: captured_variance(layer, x[0]), r"x must have shape \(..., items, 17\) for v_proj, got \(17,\)"),
        (lambda: captured_variance(layer, x.long()), "x must be a real floating-point tensor, got torch.int64"),
        (lambda: captured_variance(layer, x / 0), "x must be finite, got NaN or inf"),
        (lambda: captured_variance(layer, x[:1]), "x must have items that differ, got 1 equal ones"),
        (
            lambda: plot_subspaces(several, x),
            "x must be a dict, since projections take .* 'q': 17, 'k': 13, 'v': 11, got one tensor",
        ),
        (lambda: plot_subspaces(layer, {"o": x}), "x must name projections of this layer, 'q', 'k', 'v', got 'o'"),
    ]
    for call, message in refused:
        with pytest.raises(ValueError, match=message):
            call()
