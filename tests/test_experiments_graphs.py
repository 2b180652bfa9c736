"""Experiments on graphs run in seconds on small data, and on the real data in the folder of POLYHEAD_DATA."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from experiment_helpers import EXPERIMENTS, assert_is_png, complete_lines, kill_when

pytest.importorskip("matplotlib")
pytest.importorskip("rich")
pytestmark = pytest.mark.usefixtures("experiments")
SMALL = ["--epochs", "3", "--seeds", "2"]


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """cora.npz and citeseer.npz in the format of Planetoid: two classes of nodes, with their own words and citations."""
    folder = tmp_path_factory.mktemp("planetoid")
    draw = np.random.default_rng(0)
    nodes, words = 61, 37
    labels = np.arange(nodes) % 2
    uses = draw.random((nodes, words)) < np.where(np.arange(words) % 2 == labels[:, None], 0.3, 0.05)
    # a node without words, edges and label, as in Citeseer
    uses[-1], labels[-1] = False, -1
    pairs = draw.integers(0, nodes - 1, (2, 300))
    pairs = pairs[:, (labels[pairs[0]] == labels[pairs[1]]) & (pairs[0] < pairs[1])]
    rows, columns = uses.nonzero()
    arrays = {
        "features_data": np.ones(len(rows), np.float32),
        "features_indices": columns.astype(np.int32),
        "features_indptr": np.concatenate(([0], np.bincount(rows, minlength=nodes).cumsum())),
        "features_shape": np.array((nodes, words)),
        "edge_index": np.unique(np.concatenate((pairs, pairs[::-1]), 1), axis=1),
        "labels": labels,
        "train": np.arange(20),
        "valid": np.arange(20, 40),
        "test": np.arange(40, 60),
    }
    for name in ("cora", "citeseer"):
        np.savez(folder / f"{name}.npz", **arrays)
    return folder


def test_rows_of_features_sum_to_one(folder):
    from common import planetoid

    data = planetoid(folder, "citeseer")
    sums = data.features.to_dense().sum(-1)
    assert torch.allclose(sums[:-1], torch.ones(60)) and sums[-1] == 0
    assert data.classes == 2


def test_citation(folder, tmp_path, capsys):
    import citation

    arms = [arm for arm in citation.ARMS if not arm.startswith("PyG")]
    files = ["--runs", str(tmp_path / "runs"), "--out", str(tmp_path / "a.png"), "--json", str(tmp_path / "a.json")]
    assert citation.main(["--data", str(folder), "--arms", *arms, *files, *SMALL]) == 0
    assert_is_png(tmp_path / "a.png")
    lines = json.loads((tmp_path / "a.json").read_text())
    assert len(lines) == 2 * 2 * len(arms)
    assert all(line["trained"] == 3 and 0 <= line["accuracy"] <= 1 for line in lines)
    printed = capsys.readouterr().out
    assert "83.0 ± 0.7" in printed and "72.5 ± 0.7" in printed
    # no temporary files remain
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.json", "a.png", "runs"]


def test_citation_with_pygs_layers(folder, tmp_path):
    pytest.importorskip("torch_geometric")
    import citation

    arms = ["PyG GATConv", "PyG GATv2Conv"]
    files = ["--runs", str(tmp_path / "runs"), "--out", str(tmp_path / "a.png")]
    assert citation.main(["--data", str(folder), "--arms", *arms, *files, *SMALL]) == 0


def test_citation_learns(folder):
    import citation
    from common import planetoid

    fitted = citation.fit(citation.ARMS["GAT"], planetoid(folder, "cora"), 0, epochs=100, patience=50)
    assert fitted.accuracy > 0.8


def test_citation_resumes_after_being_killed(folder, tmp_path):
    runs = tmp_path / "runs"
    # with so many seeds it cannot end before it is killed
    options = [
        "--data", str(folder), "--sets", "cora", "--arms", "GAT", "--runs", str(runs),
        "--out", str(tmp_path / "a.png"), "--epochs", "20", "--patience", "1000", "--seeds",
    ]  # fmt: skip
    two_lines = lambda: runs.exists() and len(runs.read_text().splitlines()) >= 2
    kill_when("citation.py", [*options, "100000"], two_lines, 120)
    before = complete_lines(runs)
    # an unfinished line
    with runs.open("a") as file:
        file.write('{"wanted": {"da')
    seeds = len(before) + 1
    command = [sys.executable, str(EXPERIMENTS / "citation.py"), *options, f"{seeds}"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    lines = complete_lines(runs)
    assert lines[: len(before)] == before and len(lines) == seeds
    assert [json.loads(line)["wanted"]["seed"] for line in lines] == list(range(seeds))


def test_citation_runs_again_with_changed_settings(folder, tmp_path):
    import citation

    runs = tmp_path / "runs"
    fixed = [
        "--data",
        str(folder),
        "--sets",
        "cora",
        "--arms",
        "GAT",
        "--runs",
        str(runs),
        "--out",
        str(tmp_path / "a.png"),
    ]
    for epochs, lines in ((2, 1), (2, 1), (3, 2)):
        assert citation.main([*fixed, "--seeds", "1", "--epochs", f"{epochs}"]) == 0
        assert len(runs.read_text().splitlines()) == lines


@pytest.mark.parametrize("name", ["citation", "static_attention"])
def test_missing_data_gives_an_error_message(name, tmp_path, capsys):
    module = __import__(name)
    assert module.main(["--data", str(tmp_path), "--out", str(tmp_path / "a.png")]) == 1
    said = capsys.readouterr().err
    assert f"{tmp_path / 'cora.npz'} does not exist" in said and "github.com/kimiyoung/planetoid" in said
    assert not (tmp_path / "a.png").exists()


def test_malformed_data_gives_an_error_message(tmp_path, capsys):
    import citation

    np.savez(tmp_path / "cora.npz", labels=np.arange(3))
    assert citation.main(["--data", str(tmp_path), "--out", str(tmp_path / "a.png")]) == 1
    assert "cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize("k", [4, 9])
def test_dictionaries_are_split_by_pairs(k):
    from dictionary_lookup import dictionaries

    data = dictionaries(k, seed=0)
    assert data.seen.sum() == int(0.8 ** (1 / k) * k * k)
    everyone = torch.arange(k)
    assert data.seen[everyone, data.train].all()
    assert (~data.seen[everyone, data.test]).any(-1).all()
    assert len(data.train) + len(data.test) == {4: 24, 9: 32_000}[k]
    assert torch.equal(data.train.sort(-1).values, everyone.expand_as(data.train))


def test_dictionary_lookup(tmp_path):
    import dictionary_lookup

    files = ["--runs", str(tmp_path / "runs"), "--out", str(tmp_path / "a.png"), "--json", str(tmp_path / "a.json")]
    assert dictionary_lookup.main(["--sizes", "4", "6", "--steps", "400", *files]) == 0
    lines = {(line["k"], line["arm"]): line for line in json.loads((tmp_path / "a.json").read_text())}
    assert len(lines) == 6
    assert lines[6, "GAT, 1 head"]["train"] < 0.8
    assert lines[6, "GATv2, 1 head"]["train"] > 0.9
    assert (tmp_path / "a.png").exists()


def test_static_attention(folder, tmp_path):
    import static_attention

    files = ["--out", str(tmp_path / "a.png"), "--json", str(tmp_path / "a.json")]
    assert (
        static_attention.main(["--data", str(folder), "--size", "4", "--steps", "150", "--epochs", "20", *files]) == 0
    )
    found = json.loads((tmp_path / "a.json").read_text())
    assert found["dictionary"]["GAT"]["agreement"] == pytest.approx(1.0)
    assert found["dictionary"]["GATv2"]["agreement"] < 0.9
    assert found["cora"]["GAT"]["hidden"] == pytest.approx([1.0] * 8)
    assert max(found["cora"]["GATv2"]["hidden"]) < 1.0
    # one row per query, which sums to one
    assert np.allclose(np.sum(found["dictionary"]["GATv2"]["weights"], -1), 1.0)


def test_citation_on_the_real_data():
    if "POLYHEAD_DATA" not in os.environ:
        pytest.skip("POLYHEAD_DATA does not name a folder with cora.npz and citeseer.npz: the real data is NOT tested")
    import citation
    from common import planetoid

    for name, nodes, words, edges, classes in (("cora", 2708, 1433, 10556, 7), ("citeseer", 3327, 3703, 9104, 6)):
        data = planetoid(Path(os.environ["POLYHEAD_DATA"]), name)
        assert data.features.shape == (nodes, words) and data.edge_index.shape == (2, edges)
        assert (data.classes, len(data.valid), len(data.test)) == (classes, 500, 1000)
        fitted = citation.fit(citation.ARMS["GAT"], data, 0, epochs=60, patience=60)
        assert fitted.accuracy > 0.5
