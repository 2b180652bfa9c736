"""Experiments on translation run in seconds on small data."""

import argparse
import gzip
import json
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from experiment_helpers import EXPERIMENTS, assert_is_png, kill_at_line

pytest.importorskip("matplotlib")
pytest.importorskip("rich")
pytestmark = pytest.mark.usefixtures("experiments")


@pytest.fixture(scope="session")
def sentences(tmp_path_factory):
    """Sentence pairs in the format of Multi30k: a small language, and the same with other words."""
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
    assert_is_png(tmp_path / "a.png")
    lines = json.loads((tmp_path / "a.json").read_text())
    assert [line["heads"] for line in lines] == [1, 2]
    # heads split the features, so their number does not change the shapes of weights
    assert lines[0]["weights"] == lines[1]["weights"]
    for line in lines:
        history = [epoch["train"] for epoch in line["history"]]
        assert len(history) == 3 and history[2] < history[0]
        assert line["gap"] == line["test_loss"] - line["train_loss"]
        assert 0 <= line["bleu"] <= 100
    assert "BLEU test" in capsys.readouterr().out


def test_translation_resumes_after_being_killed(sentences, tmp_path):
    import translation as experiment

    # during the third epoch, or a little later
    kill_at_line("translation.py", translation(sentences, tmp_path / "killed", "--epochs", "20"), "epoch 2 of 20")
    assert not (tmp_path / "killed" / "results.jsonl").exists()
    for name in ("killed", "whole"):
        assert experiment.main(translation(sentences, tmp_path / name, "--epochs", "20")) == 0
    killed, whole = weights(tmp_path / "killed"), weights(tmp_path / "whole")
    assert killed.keys() == whole.keys()
    assert all(torch.equal(killed[name], whole[name]) for name in whole)


def test_sentences_are_encoded_and_decoded(sentences, tmp_path):
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


def test_translation_without_data_gives_an_error_message(tmp_path, capsys):
    import translation as experiment

    assert experiment.main(translation(tmp_path, tmp_path)) == 1
    said = capsys.readouterr().err
    assert "does not exist" in said and "github.com/multi30k/dataset" in said and "--data" in said


def of_heads(sentences, out, *more):
    """The options of translation_heads.py for a trained run."""
    given = translation(sentences, out)
    given[given.index("--seeds") : given.index("--seeds") + 2] = ["--seed", "0"]
    return [*given, "--sentences", "1", "2", *more]


@pytest.fixture(scope="session")
def trained(sentences, tmp_path_factory):
    """The folder of a finished run."""
    out = tmp_path_factory.mktemp("trained")
    command = [sys.executable, str(EXPERIMENTS / "translation.py"), *translation(sentences, out, "--epochs", "12")]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return out


@pytest.fixture
def run(trained, tmp_path):
    for file in (*trained.glob("*.safetensors"), *trained.glob("tokenizer-*")):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def test_translation_heads(sentences, run, capsys):
    import translation_heads

    command = of_heads(sentences, run, "--epochs", "12")
    assert translation_heads.main(command) == 0
    printed = capsys.readouterr().out
    assert "BLEU lost" in printed and "the word with the largest weight" in printed
    assert_is_png(run / "a.png")
    assert len(list(run.glob("*sentence-*.html"))) == 2
    found = json.loads((run / "a.json").read_text())
    assert [(line["kind"], line["off"]) for line in found["gates"]["one"]] == [
        (kind, [head]) for kind in translation_heads.KINDS for head in (0, 1)
    ]
    for lines in found["gates"].values():
        for line in lines:
            assert line["lost"] == line["whole"] - line["bleu"] and line["low"] <= line["lost"] <= line["high"]
    assert all(line["whole"] == found["gates"]["one"][0]["bleu"] + found["gates"]["one"][0]["lost"] for line in lines)
    # with two heads, removing all but one is removing one, which was already measured
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


def test_a_head_is_removed_only_inside_the_context(task):
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


def test_bleu_of_counts_equals_that_of_sacrebleu(task):
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
        # the two languages have the same word order
        of, to = (corpus.words(ids).word_of for ids in (source, target))
        hits += [of[place] == word for place, word in zip(known.tolist(), to[:-1], strict=True)]
    assert sum(hits) / len(hits) > 0.8


def test_a_page_has_one_row_per_target_word(task, tmp_path):
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
    assert record["initial_head"] == [0, 1]
    # the first row writes the first word, after reading only the start token
    (ids,) = task.corpus.ids([source])
    with capture(task.model) as seen:
        task.model.decode(torch.tensor([[0]]), task.model.encode(torch.tensor([ids])))
    first = one.heads["decoder.0.cross_attn"].weights[0, :, :1]
    assert torch.allclose(first, seen["decoder.0.cross_attn"].weights[0], atol=1e-6)
    print_sentence(one)


def test_a_missing_run_gives_an_error_message(sentences, tmp_path, capsys):
    import translation_heads

    assert translation_heads.main(of_heads(sentences, tmp_path)) == 1
    said = capsys.readouterr().err
    assert "does not exist" in said and "experiments/translation.py" in said and "--heads 2" in said
    assert not (tmp_path / "heads.jsonl").exists()


def test_an_unknown_sentence_gives_an_error_message(sentences, run, capsys):
    import translation_heads

    assert translation_heads.main([*of_heads(sentences, run, "--epochs", "12"), "--sentences", "5"]) == 1
    assert "--sentences must be from 0 to 4, got 5" in capsys.readouterr().err
