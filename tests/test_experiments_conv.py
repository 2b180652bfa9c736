"""Experiments on convolutions run in seconds on small data, and on MNIST in the folder of POLYHEAD_DATA."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from experiment_helpers import assert_is_png, complete_lines, kill_when

pytest.importorskip("matplotlib")
pytest.importorskip("rich")
pytestmark = pytest.mark.usefixtures("experiments")


@pytest.fixture(scope="session")
def images(drawn_digits):
    return drawn_digits(train=2070, test=60)


def hunger(images, out, *more):
    return [
        *("--data", str(images), "--out", str(out), "--picture", str(out / "a.png"), "--json", str(out / "a.json")),
        *("--images", "20", "50", "--choice", "50", "--rates", "0.01", "0.03", "--seeds", "2"),
        *("--steps", "8", "--batch", "8", "--channels", "9", "--layers", "1", *more),
    ]


def runs(out):
    return [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]


def test_data_hunger(images, tmp_path, capsys, monkeypatch):
    import data_hunger

    monkeypatch.setattr(data_hunger, "VALIDATION", 100)
    assert data_hunger.main(hunger(images, tmp_path)) == 0
    assert_is_png(tmp_path / "a.png")
    printed = capsys.readouterr().out
    assert "training images needed" in printed and "convolution, converted to attention" in printed
    lines, arms = json.loads((tmp_path / "a.json").read_text()), list(data_hunger.ARMS)
    # a whole table first, then the next seed
    asked = [(line["seed"], line["images"], line["arm"]) for line in lines]
    assert asked == [(seed, n, arm) for seed in (0, 1) for n in (20, 50) for arm in arms]
    tried = runs(tmp_path)[: 2 * len(arms)]
    for arm in arms:
        by_rate = {line["wanted"]["rate"]: line["validation"] for line in tried if line["wanted"]["arm"] == arm}
        assert len(by_rate) == 2
        (rate,) = {line["rate"] for line in lines if line["arm"] == arm}
        assert by_rate[rate] == max(by_rate.values())
    for line in lines:
        assert all(0 <= line[name] <= 1 for name in ("validation", "test", "train")) and line["ms"] > 0
        if line["arm"] == "convolution":
            # attention can do what the convolution has learned
            assert line["converted"] == pytest.approx(line["test"], abs=1 / 60)
        else:
            assert 0 < line["near"] <= 1
    sizes = {line["arm"]: line["parameters"] for line in lines}
    assert sizes["random centres"] == sizes["from a convolution"] > sizes["convolution"]


def test_arms_match_their_descriptions():
    import data_hunger
    from data_hunger import Network, near

    def network(arm):
        torch.manual_seed(0)
        return Network(data_hunger.ARMS[arm], 9, 2).eval()

    x = torch.rand(7, 49, 16)
    # untrained attention is uniform; initialised from a convolution, it attends to the convolution's pixels
    assert near(network("attention"), x) < 0.25
    assert near(network("from a convolution"), x) > 0.9
    one, other = network("from a convolution"), network("random centres")
    names = lambda of: {name: p.shape for name, p in of.named_parameters() if p.requires_grad}
    assert names(one) == names(other)
    assert not one.mixes[0].layer.q_proj.weight.any() and other.mixes[0].layer.q_proj.weight.any()
    conv = network("convolution")
    same = data_hunger.converted(conv, data_hunger.Settings("", channels=9))
    with torch.no_grad():
        assert (conv(x) - same(x)).abs().max() < 1e-5


def test_images_needed_are_interpolated_on_the_curve():
    from data_hunger_report import needed

    curve = {100: [0.7, 0.9], 1000: [0.9], 10_000: [0.98]}
    assert needed(curve, 0.8) == pytest.approx(100)
    assert needed(curve, 0.98) == pytest.approx(10_000)
    # half of the error on the way from 20 % to 10 %, in logarithms
    assert needed(curve, 1 - 0.02**0.5) == pytest.approx(1000**0.5 * 10)
    assert needed(curve, 0.5) is None and needed(curve, 0.99) is None


def test_data_hunger_learns(images, tmp_path):
    import data_hunger

    more = ("--images", "50", "--rates", "0.02", "--seeds", "1", "--steps", "120", "--arms", "convolution", "from a convolution")  # fmt: skip
    assert data_hunger.main(hunger(images, tmp_path, *more)) == 0
    assert all(line["test"] > 0.5 for line in runs(tmp_path))


def test_data_hunger_resumes_after_being_killed(images, tmp_path):
    import data_hunger

    # with so many seeds it cannot end before it is killed
    more = ("--arms", "convolution", "--rates", "0.01", "--seeds")
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    results = killed / "results.jsonl"
    has_result = lambda: results.exists() and len(complete_lines(results)) > 0
    kill_when("data_hunger.py", hunger(images, killed, *more, "100000"), has_result, 60)
    before = complete_lines(results)
    assert data_hunger.main(hunger(images, killed, *more, "2", "--report")) == 0
    seeds = len(before) // 2 + 1
    for out in (killed, whole):
        assert data_hunger.main(hunger(images, out, *more, str(seeds))) == 0
    assert complete_lines(results)[: len(before)] == before

    def numbers(out):
        return [(line["wanted"], line["test"], line["validation"]) for line in runs(out)]

    assert numbers(killed) == numbers(whole)


@pytest.mark.parametrize("name", ["data_hunger", "convolution"])
def test_malformed_data_gives_an_error_message(name, tmp_path, capsys):
    module = __import__(name)
    file = tmp_path / "mnist.npz"
    out = ["--out", str(tmp_path / "a.png")] if name == "convolution" else hunger(file, tmp_path)[2:]
    assert module.main(["--data", str(file), *out]) == 1
    said = capsys.readouterr().err
    assert "does not exist" in said and "train_images (60,000 x 28 x 28" in said and "--data" in said
    np.savez(file, labels=np.arange(3))
    whole = file.read_bytes()
    for content in (whole, whole[: len(whole) // 2], b""):
        file.write_bytes(content)
        assert module.main(["--data", str(file), *out]) == 1
        said = capsys.readouterr().err
        assert "cannot be read" in said and "train_images (60,000 x 28 x 28" in said
    assert not (tmp_path / "a.png").exists()


@pytest.mark.parametrize(
    ("name", "option"),
    [
        *(("convolution", option) for option in ("seeds", "steps", "threads")),
        *(("data_hunger", option) for option in ("images", "choice", "seeds", "steps", "batch", "channels", "layers")),
        *(("head_count", option) for option in ("channels", "starts", "steps", "draws")),
        *(("self_dominance", option) for option in ("sets", "sentences")),
    ],
)
@pytest.mark.parametrize("number", ["0", "-1", "some"])
def test_numbers_must_be_positive(name, option, number, capsys):
    with pytest.raises(SystemExit):
        __import__(name).main([f"--{option}", number])
    assert f"--{option}: must be a positive integer, got {number!r}" in capsys.readouterr().err


def test_too_many_images_give_an_error_message(images, tmp_path, capsys):
    import data_hunger

    assert data_hunger.main(hunger(images, tmp_path, "--images", "71")) == 1
    assert "must leave 2,000 of the 2,070 training images for validation" in capsys.readouterr().err
    assert data_hunger.main(hunger(images, tmp_path, "--report")) == 1
    assert "no matching run has finished" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        data_hunger.main(hunger(images, tmp_path, "--arms", "convolutions"))
    assert "from a convolution" in capsys.readouterr().err


def test_convolution(tmp_path, capsys):
    import convolution

    files = ["--out", str(tmp_path / "a.png"), "--json", str(tmp_path / "a.json")]
    assert convolution.main(["--seeds", "1", "--steps", "15", *files]) == 0
    for name in ("a.png", "a_learned.png"):
        assert_is_png(tmp_path / name)
    found = json.loads((tmp_path / "a.json").read_text())
    assert [found["equal"][name]["heads"] for name in ("1 x 1", "3 x 3", "2 x 3")] == [1, 9, 6]
    for name, of in found["equal"].items():
        if "alpha" not in name:
            assert of["64"] < 1e-14 and of["32"] < 1e-5 and of["leaked"] == of["bound"] == 0
        else:
            # of the bound, which holds but for rounding
            assert of["64"] <= of["bound"] + 1e-14 and of["32"] <= of["bound"] + 1e-5
    assert found["equal"]["3 x 3, alpha = 20"]["64"] < found["equal"]["3 x 3, alpha = 10"]["64"] < 0.1
    # as wide as usual, d_model / h, heads cannot move a dense tap
    assert "head_dim must be at least 9" in found["too narrow"]["said"] and found["too narrow"]["apart"] > 0.1
    assert [one["kind"] for one in found["learned"]] == ["narrow", "wide"]
    assert "must have heads that look at fixed points" in found["learned"][0]["said"]
    assert "all nine" in capsys.readouterr().out


def test_images_of_nine_channels(images):
    import convolution

    digits = convolution.digits(images)
    # as many bright rows as the digit says
    assert [int((row.mean(-1) > 0.3).sum()) for row in digits] == [2 * digit + 2 for digit in range(1, 10)]
    drawn = convolution.patterns()
    assert drawn.shape == digits.shape and 0 <= drawn.min() < drawn.max() <= 1


def test_narrow_heads_find_taps_and_wide_ones_need_not():
    import common
    import convolution

    with common.progress() as bar:
        narrow, wide = (convolution.learn(kind, 0, 400, bar) for kind in convolution.KINDS)
    assert narrow["loss"][-1] < 0.1 * narrow["loss"][0] and wide["loss"][-1] < 0.1 * wide["loss"][0]
    assert narrow["found"] > wide["found"]


def test_a_tap_is_found_if_a_head_is_near():
    from convolution import taps_found

    points = torch.cartesian_prod(torch.arange(-1, 2), torch.arange(-1, 2)).float()
    assert taps_found(points) == taps_found(points.flip(0) + 0.1) == 9
    assert taps_found(points + 0.3) == 0
    assert taps_found(points[:5].repeat(2, 1)) == 5


def test_convolution_on_the_real_digits():
    if not (file := Path(os.environ.get("POLYHEAD_DATA", "")) / "mnist.npz").exists():
        pytest.skip("POLYHEAD_DATA does not name a folder with mnist.npz: the real digits are NOT tested")
    import convolution
    import mnist

    image = convolution.digits(file)
    assert image.shape == (9, 28, 28) and 0 <= image.min() < image.max() <= 1
    assert mnist.read(file, 4).images.shape == (60_000, 49, 16)
    for size in (1, 3):
        found = convolution.compare(torch.nn.Conv2d(9, 9, size, padding="same"), image)
        assert found["heads"] == size**2 and found["64"] < 1e-14


def test_patches_of_any_size():
    import mnist

    image = np.arange(28 * 28).reshape(1, 28, 28)
    patches = mnist.patches(image, 4) * 255
    assert patches.shape == (1, 49, 16)
    assert torch.allclose(patches[0, 8].view(4, 4), torch.from_numpy(image[0, 4:8, 4:8]).float())
    whole = mnist.patches(image, 28) * 255
    assert torch.allclose(whole.view(28, 28), torch.from_numpy(image[0]).float())
