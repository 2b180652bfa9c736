"""Experiments on the Stiefel manifold run in seconds on small data, and on MNIST in the folder of POLYHEAD_DATA."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from experiment_helpers import assert_is_png, kill_at_line

import polyhead

pytest.importorskip("matplotlib")
pytest.importorskip("rich")
pytestmark = pytest.mark.usefixtures("experiments")


@pytest.fixture(scope="session")
def images(drawn_digits):
    return drawn_digits(train=70, test=30)


def stiefel(images, out, *more):
    return [
        *("--data", str(images), "--out", str(out), "--picture", str(out / "a.png")),
        *("--blocks", "2", "--batch", "16", "--epochs", "3", *more),
    ]


def test_stiefel_mnist(images, tmp_path, capsys):
    import stiefel_mnist

    assert stiefel_mnist.main(stiefel(images, tmp_path, "--seeds", "2")) == 0
    assert_is_png(tmp_path / "a.png")
    printed = capsys.readouterr().out
    assert "86.13" in printed and "patches apart" in printed and "0 of 3" not in printed
    lines = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    # one seed of every arm, then the next
    assert [(line["arm"], line["seed"]) for line in lines] == [(n, s) for s in (0, 1) for n in stiefel_mnist.NAMES]
    for arm, line in zip((*stiefel_mnist.ARMS, *stiefel_mnist.ARMS), lines, strict=True):
        history, signals = line["history"], line["signals"]
        assert [one["epoch"] for one in history] == [1, 2, 3]
        assert all(0 <= one["accuracy"] <= 1 and one["loss"] < 2 for one in history)
        assert history[0]["seconds"] <= history[1]["seconds"] <= history[2]["seconds"]
        assert all(len(signals["gradients"][when]) == 2 for when in ("start", "last"))
        for when in ("start", "first", "last"):
            # before each block and before the classification
            assert len(signals[when]["apart"]) == len(signals[when]["norm"]) == 3
            assert all(0 <= apart <= 1 for apart in signals[when]["apart"])
            on = {name for name, off in zip("qkv", signals[when]["gram"], strict=True) if off < 1e-5}
            assert on == set("qkv" if arm.start == "orthogonal" and when == "start" else arm.stiefel)


def test_stiefel_arms_match_their_descriptions():
    import stiefel_mnist
    from stiefel_signals import gram_errors

    arms = {arm.name: arm for arm in stiefel_mnist.ARMS}

    def start(name):
        torch.manual_seed(0)
        return stiefel_mnist.Network(arms[name], 2)

    on, free = start("stiefel-adam"), start("orthogonal-start")
    assert all(torch.equal(a, b) for a, b in zip(on.parameters(), free.parameters(), strict=True))
    (group,) = stiefel_mnist.optimizer_of(arms["orthogonal-start"], free).param_groups
    assert group["manifold"] == polyhead.Euclidean()
    weight = start("adam").blocks[1].attention.k_proj.weight[14:21]
    found = gram_errors(start("adam"))
    assert found.shape == (2, 3, 7)
    assert found[1, 1, 2].item() == pytest.approx((weight @ weight.T - torch.eye(7)).square().sum().item(), rel=1e-5)
    # always the same of ten equally frequent digits
    logits = torch.zeros(50, 10).index_fill(1, torch.tensor([3]), 1e4)
    assert stiefel_mnist.error(logits, torch.arange(10).repeat(5)).item() == pytest.approx((2 * 9 / 10) ** 0.5)
    assert [n for n in range(1, 24) if stiefel_mnist.is_tested(n, 23)] == [*range(1, 11), 15, 20, 23]


def test_images_are_split_into_patches():
    import mnist

    image = np.arange(28 * 28).reshape(1, 28, 28)
    patches = mnist.patches(image) * 255
    assert patches.shape == (1, 16, 49)
    assert torch.allclose(patches[0, 0].view(7, 7), torch.from_numpy(image[0, :7, :7]).float())
    assert torch.allclose(patches[0, 6].view(7, 7), torch.from_numpy(image[0, 7:14, 14:21]).float())


def test_stiefel_mnist_resumes_after_being_killed(images, tmp_path, capsys):
    import stiefel_mnist

    more = ("--arms", "stiefel-adam,stiefel-momentum", "--epochs", "40")
    kill_at_line("stiefel_mnist.py", stiefel(images, tmp_path / "killed", *more), "epoch 2 of 40")
    assert not (tmp_path / "killed" / "results.jsonl").exists()
    arguments = stiefel(images, tmp_path / "killed", *more)
    assert stiefel_mnist.main([*arguments[2:], "--report"]) == 0
    assert "of 40" in capsys.readouterr().out
    # a finished run can be extended to more epochs
    assert stiefel_mnist.main(stiefel(images, tmp_path / "longer", *more, "--epochs", "12")) == 0
    for name in ("killed", "longer", "whole"):
        assert stiefel_mnist.main(stiefel(images, tmp_path / name, *more)) == 0
    load = pytest.importorskip("safetensors.torch").load_file
    files = sorted((tmp_path / "whole").glob("*.safetensors"))
    assert len(files) == 2
    for file in files:
        whole = load(file)
        for name in ("killed", "longer"):
            other = load(tmp_path / name / file.name)
            assert other.keys() == whole.keys()
            assert all(torch.equal(other[key], whole[key]) for key in whole)


def test_stiefel_mnist_skips_runs_of_another_process(images, tmp_path, capsys):
    import common
    import stiefel_mnist
    from stiefel_mnist import Settings, run_file

    digits = stiefel_mnist.mnist.read(images)
    file = run_file(Settings(digits.digest, 2, 16), stiefel_mnist.ARMS[0], 0, tmp_path)
    command = stiefel(images, tmp_path, "--arms", "adam,residual")
    with common.claimed(file.with_suffix(".lock")) as mine:
        assert mine
        assert stiefel_mnist.main(command) == 0
    assert "adam, seed 0: another command is running it" in capsys.readouterr().err
    read = lambda: [line["arm"] for line in common.read_lines(tmp_path / "results.jsonl")]
    assert read() == ["residual"]
    assert stiefel_mnist.main(command) == 0
    assert read() == ["residual", "adam"]
    # finished runs are not repeated
    assert stiefel_mnist.main(command) == 0
    assert read() == ["residual", "adam"]


def test_stiefel_mnist_without_data_gives_an_error_message(tmp_path, capsys):
    import stiefel_mnist

    assert stiefel_mnist.main(stiefel(tmp_path / "mnist.npz", tmp_path)) == 1
    said = capsys.readouterr().err
    assert "does not exist" in said and "train_images (60,000 x 28 x 28" in said and "--data" in said
    assert stiefel_mnist.main(["--report", "--out", str(tmp_path)]) == 1
    assert "no matching run" in capsys.readouterr().err
    for arguments, message in ((["--arms", "adm"], "unknown arm 'adm'; the arms are adam,"), ([], "--data: the file")):
        with pytest.raises(SystemExit):
            stiefel_mnist.main(arguments)
        assert message in capsys.readouterr().err


def test_stiefel_mnist_on_the_real_digits():
    if not (file := Path(os.environ.get("POLYHEAD_DATA", "")) / "mnist.npz").exists():
        pytest.skip("POLYHEAD_DATA does not name a folder with mnist.npz: the real digits are NOT tested")
    import mnist
    import stiefel_mnist

    digits = mnist.read(file)
    assert digits.images.shape == (60_000, 16, 49) and digits.test_images.shape == (10_000, 16, 49)
    assert (digits.images.min(), digits.images.max()) == (0, 1)
    torch.manual_seed(0)
    arm = next(arm for arm in stiefel_mnist.ARMS if arm.name == "stiefel-adam")
    network = stiefel_mnist.Network(arm, 2)
    optimizer = stiefel_mnist.optimizer_of(arm, network)
    for rows in torch.arange(20_480).split(256):
        optimizer.zero_grad()
        stiefel_mnist.error(network(digits.images[rows]), digits.labels[rows]).backward()
        optimizer.step()
    assert stiefel_mnist.tested(network, digits)["accuracy"] > 0.25
