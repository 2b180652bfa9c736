"""Texts, treebanks and images that never end, or grow when they are opened: refused, with the file's name and the limit."""

import gzip
import itertools
import json
import os
import re
import struct
import zlib
from pathlib import Path

import pytest

from polyhead import _limits
from polyhead.inspection.roles.corpus import read_gap, read_own_pairs, read_treebank

WORD = "1\ta\t_\tX\t_\t_\t0\troot\t_\t_\n"
HEADER = "ID\tText\tPronoun\tPronoun-offset\tA\tA-offset\tA-coref\tB\tB-offset\tB-coref\tURL\n"


def device(path):
    path.symlink_to("/dev/zero")


def fifo(path):
    os.mkfifo(path)


def directory(path):
    path.mkdir()


def bomb(path):
    """8 GiB in as many megabytes."""
    path.write_bytes(gzip.compress(b"\n" * (1 << 26)) * 128)


def large(path):
    path.touch()
    os.truncate(path, 1 << 40)


KINDS = {
    "device": (device, "must be a regular file, got a character device; write its content to a file first"),
    "fifo": (fifo, "must be a regular file, got a FIFO; write its content to a file first"),
    "directory": (directory, "[Ii]s a directory"),
    "large": (large, "must have at most [0-9,]+ bytes, got more"),
}
READERS = """
from polyhead.cli.inspect import _read_text_file
from polyhead.inspection.roles.corpus import read_gap, read_own_pairs, read_treebank
from polyhead.inspection.vision_loading import read_image
readers = {"treebank": read_treebank, "gap": read_gap, "pairs": read_own_pairs, "text": _read_text_file, "image": read_image}

def call(path):
    return len(readers[Path(path).stem](Path(path)))
"""


@pytest.fixture(scope="module")
def said(bounded, tmp_path_factory):
    pytest.importorskip("PIL", reason="pip install 'polyhead[inspect]'")
    root = tmp_path_factory.mktemp("files")
    paths = []
    for reader in ("treebank", "gap", "pairs", "text", "image"):
        for kind, (make, _) in KINDS.items():
            paths.append(root / f"{reader}.{kind}")
            make(paths[-1])
    for reader in ("treebank", "gap", "pairs"):
        paths.append(root / f"{reader}.bomb")
        bomb(paths[-1])
    return {Path(path).name: rest for path, rest in bounded(READERS, map(str, paths)).items()}


@pytest.mark.parametrize("reader", ["treebank", "gap", "pairs", "text", "image"])
@pytest.mark.parametrize("kind", KINDS)
def test_files_that_do_not_end(reader, kind, said):
    name = f"{reader}.{kind}"
    assert name in said, "the process was ended, or did not end"
    error, message, _ = said[name]
    assert error in ("ValueError", "IsADirectoryError")
    assert name in message and re.search(KINDS[kind][1], message), message


@pytest.mark.parametrize("reader", ["treebank", "gap", "pairs"])
def test_files_that_grow_when_they_are_opened(reader, said):
    error, message, seconds = said[f"{reader}.bomb"]
    assert error == "ValueError" and seconds < 30
    assert f"{reader}.bomb must have at most 134,217,728 bytes after decompression, got more" in message


def test_a_file_of_many_parts_is_read_whole(tmp_path):
    (tmp_path / "file").write_bytes(gzip.compress((WORD + "\n").encode()) * 3)
    assert len(read_treebank(tmp_path / "file")) == 3


@pytest.mark.parametrize(
    ("read", "text", "message"),
    [
        (read_treebank, "x" * 1_000_001, "file, line 1: a line must have at most 1,000,000 characters, got 1,000,001"),
        (read_treebank, "".join(WORD.replace("1", str(n), 1) for n in range(1, 10_002)), "file, line 10001: a sentence must have at most 10,000 words"),
        (read_treebank, WORD.replace("\t0\t", f"\t{'9' * 5000}\t"), "file, line 1: the head of the word must be an integer, 0 for the root, got '9{59}"),
        (read_treebank, f"# coref = 1>{'9' * 5000}\n{WORD}", "file, line 1: .*9{20}"),
        (read_own_pairs, "a " * 10_001 + "\t1>2", "file, line 1: a sentence must have at most 10,000 words"),
        (read_own_pairs, f"a b\t1>{'9' * 5000}", "file, line 1: .*9{20}"),
        (read_own_pairs, "a " * 9_999 + "b\ta>b", "file, line 1: a pair must name one word, got 'a', which may be word 1, 'a' or .{,40}; write #1 or #2 or #3 or …"),
        (read_gap, f"{HEADER}1\t{'a ' * 10_001}\ta\t0\ta\t0\tTRUE\ta\t0\tFALSE\tu", "file, line 2: a sentence must have at most 10,000 words"),
        (read_gap, f"{HEADER}1\ta b c\ta\t{'9' * 5000}\tb\t2\tTRUE\tc\t4\tFALSE\tu", "file, line 2: Pronoun must be in the text at Pronoun-offset '9{59}, got 'a'"),
    ],
)  # fmt: skip
def test_lines_and_sentences_that_are_too_long(read, text, message, tmp_path):
    (tmp_path / "file").write_text(text)
    with pytest.raises(ValueError, match=message) as raised:
        read(tmp_path / "file")
    assert len(str(raised.value)) < 1000


def test_many_pairs_of_a_long_sentence(tmp_path):
    """Words are looked up, not searched for."""
    words = [f"w{n}" for n in range(9_999)]
    pairs = [f"{a}>{b}" for a, b in itertools.pairwise(words)] * 6
    (tmp_path / "file").write_text(f"{' '.join(words)}\t{' '.join(pairs)}")
    (sentence,) = read_own_pairs(tmp_path / "file")
    assert sentence.pairs["own pairs"] == tuple(itertools.pairwise(range(9_999))) * 6


def test_too_many_sentences(tmp_path, monkeypatch):
    (tmp_path / "file").write_text((WORD + "\n") * 11)
    assert len(read_treebank(tmp_path / "file")) == 11
    monkeypatch.setattr(_limits, "CORPUS_SENTENCES", 10)
    with pytest.raises(ValueError, match="file must have at most 10 sentences, got more; pass a part of it"):
        read_treebank(tmp_path / "file")


# images


def png(width, height):
    """A PNG that says it is so large, of zeros."""
    chunk = lambda kind, data: struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    pixels = zlib.compress(bytes(1000 * (3 * 1000 + 1)))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


@pytest.mark.parametrize("size", [(12_000, 10_001), (10**5, 10**5), (2**31 - 1, 2**31 - 1), (2**31 - 1, 1)])
def test_images_of_too_many_pixels(size, tmp_path):
    vision = pytest.importorskip("polyhead.inspection.vision_loading")
    pytest.importorskip("PIL", reason="pip install 'polyhead[inspect]'")
    (tmp_path / "image.png").write_bytes(png(*size))
    with pytest.raises(ValueError, match=r"image .*image\.png cannot be read: .*(pixels|exceeds limit)"):
        vision.read_image(tmp_path / "image.png")


def test_images_that_another_program_would_read(tmp_path):
    vision = pytest.importorskip("polyhead.inspection.vision_loading")
    pytest.importorskip("PIL", reason="pip install 'polyhead[inspect]'")
    (tmp_path / "image.png").write_text("%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\n%%EOF\n")
    with pytest.raises(ValueError, match=r"image\.png cannot be read: Pillow does not know its format"):
        vision.read_image(tmp_path / "image.png")


# models of transformers


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    transformers = pytest.importorskip("transformers")
    config = transformers.GPTNeoXConfig(
        vocab_size=32, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=64, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    transformers.GPTNeoXModel(config).save_pretrained(tmp_path)
    return tmp_path


def configure(folder, **fields):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_hidden_layers": 300_000}, r"config\.json: num_hidden_layers must be at most 1,000, got 300,000"),
        ({"text_config": {"n_layers": 10**9}}, r"config\.json: n_layers must be at most 1,000, got 1,000,000,000"),
        ({"num_hidden_layers": 3}, r"must have all tensors of its layers, but lacks \d+, such as layers\.2\."),
        ({"vocab_size": 10**9}, r"config\.json: its [\d,]+ parameters must be in the weights beside it, got [\d,]+ bytes"),
        ({"vocab_size": 33}, "cannot be read by transformers: "),
        ({"hidden_size": 10**9}, "cannot be read by transformers: "),
        ({"num_attention_heads": 0}, "cannot be read by transformers: "),
        ({"vocab_size": "x"}, "cannot be read by transformers: .*vocab_size.*"),
        ({"model_type": ["gpt_neox"]}, "cannot be read by transformers: "),
        ({"model_type": "own", "auto_map": {"AutoModel": "own.Own", "AutoConfig": "own.Config"}}, "cannot be read by transformers: .*custom code"),
    ],
)  # fmt: skip
def test_models_load_transformers(fields, message, folder):
    from polyhead.inspection.model_loading import load_transformers_model

    assert not load_transformers_model(str(folder)).training
    configure(folder, **fields)
    with pytest.raises(ValueError, match=message):
        load_transformers_model(str(folder))


def test_weights_that_are_not_there(folder):
    from polyhead.inspection.model_loading import load_transformers_model

    header = b'{"__metadata__":{"format":"pt"}}'
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    with pytest.raises(ValueError, match=r"must have all tensors of its layers, but lacks \d+, such as layers\.0\."):
        load_transformers_model(str(folder))
    (folder / "model.safetensors").write_bytes(b"\x10")
    with pytest.raises(ValueError, match="cannot be read by transformers: "):
        load_transformers_model(str(folder))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[" * 100_000, "the file must be JSON"),
        ("[]", "the file must hold a JSON object, got a list"),
        ('{"image_mean": [0.5, 0.5]}', r"image_mean must be one number or three, got \[0.5, 0.5\]"),
        ('{"image_std": ["x", 1, 1]}', r"image_std\[0\] must be a number, got 'x'"),
        ('{"image_std": NaN}', "image_std must be a number, got nan"),
        ('{"rescale_factor": 1e999}', "rescale_factor must be a number, got inf"),
        ('{"resample": 99}', "resample must be one of Pillow's filters, 0 to 5, got 99"),
        ('{"resample": []}', r"resample must be one of Pillow's filters, 0 to 5, got \[\]"),
    ],
)
def test_how_images_are_prepared(content, message, tmp_path):
    from polyhead.inspection.vision_loading import _read_preprocessing_options

    (tmp_path / "preprocessor_config.json").write_text(content)
    with pytest.raises(ValueError, match=rf"preprocessor_config\.json: {message}"):
        _read_preprocessing_options(str(tmp_path))
