"""Malicious checkpoints, which exhaust memory or time or point outside their folder, are refused with the file and the limit."""

from __future__ import annotations

import json
import os
import re
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from polyhead import _limits
from polyhead.models import Bert, Gpt, bert, gpt

pytest.importorskip("safetensors", reason="pip install 'polyhead[inspect]'")

TINY = bert.Config(d_model=12, heads=3, layers=2, d_feedforward=17, vocab=29, positions=11)
TENSOR = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
EMPTY = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    Bert(TINY).to_pretrained(tmp_path)
    return tmp_path


def store(folder: Path, header: Any, data: bytes = b"", length: int | None = None) -> None:
    """A safetensors file with this header."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    length = len(text) if length is None else length
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", length) + text + data)


def configure(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


SCRIPT = "import sys; from polyhead.models import Bert; Bert.from_pretrained(sys.argv[1])"


@pytest.mark.parametrize(
    ("tensors", "layers", "message"),
    [
        (300_000, 300_000, r"model\.safetensors: the header must have at most 16,777,216 bytes, got "),
        (150_000, 150_000, r"model\.safetensors: a checkpoint must have at most 100,000 tensors, got 150,000"),
        (100_000, 100_000, r"config\.json: layers must be at most 1,000, got 100,000"),
    ],
)
def test_checkpoints_with_too_many_layers_are_refused(tensors: int, layers: int, message: str, folder: Path) -> None:
    """There are as many tensors as layers, and building the layers would take hours."""
    configure(folder, num_hidden_layers=layers)
    store(folder, {f"encoder.layer.{n}.x": EMPTY for n in range(tensors)})
    process = subprocess.run([sys.executable, "-c", SCRIPT, folder], capture_output=True, text=True, timeout=60)
    assert re.search(f"^ValueError: .*{message}", process.stderr, re.MULTILINE), process.stderr[-500:]


@pytest.mark.parametrize("name", ["a\0b", "\x1b[31mred", "line\nbreak", "x" * 256])
def test_unprintable_names_are_refused(name: str, folder: Path) -> None:
    store(folder, {name: TENSOR}, b"0000")
    with pytest.raises(
        ValueError, match=r"names of tensors must be printable and have at most 255 characters, got"
    ) as raised:
        Bert.from_pretrained(folder)
    assert str(raised.value).isprintable() and len(str(raised.value)) < 500


def test_errors_shorten_shapes_with_a_million_axes(folder: Path) -> None:
    tensors = {f"encoder.layer.{n}.x": EMPTY for n in range(3)}
    store(folder, {**tensors, "pooler.dense.bias": {**TENSOR, "shape": [1] * 1_000_000}}, b"0000")
    with pytest.raises(ValueError, match=r"misshapen: pooler\.dense\.bias must be \(12,\), got \(1, 1, 1.*…") as raised:
        Bert.from_pretrained(folder)
    assert len(str(raised.value)) < 10_000


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        ({"a": TENSOR, "b": TENSOR}, b"0000", "invalid offset"),
        (b'{"a": {"dtype":"F32","shape":[1],"data_offsets":[0,4]}, "a": {"dtype":"F32","shape":[1],"data_offsets":[0,4]}}', b"0000", "duplicate key 'a'"),
        (b'{"a": {"dtype":"F32","shape":[1],"shape":[2],"data_offsets":[0,4]}}', b"0000", "duplicate key 'shape'"),
        ({"a": {**TENSOR, "shape": [-1]}}, b"0000", "truncated or damaged"),
        ({"a": {**TENSOR, "shape": [float("nan")]}}, b"0000", "truncated or damaged"),
        ({"a": {**TENSOR, "shape": [1e308]}}, b"0000", "truncated or damaged"),
        ({"a": {**TENSOR, "shape": [2**62, 2**62]}}, b"0000", "overflow"),
        ({"a": {**TENSOR, "data_offsets": [4, 0]}}, b"0000", "truncated or damaged"),
        ({"a": {**TENSOR, "data_offsets": [0, 2**63]}}, b"0000", "truncated or damaged"),
        ({"a": {**TENSOR, "dtype": "Q4"}}, b"0000", "truncated or damaged"),
        (b'{"\\ud800": {"dtype":"F32","shape":[1],"data_offsets":[0,4]}}', b"0000", "truncated or damaged"),
        (b'{"a":' * 100_000, b"", "the header must be JSON"),
        (b"{}" + b" " * 20_000_000, b"", "the header must have at most 16,777,216 bytes, got 20,000,002"),
    ],
)  # fmt: skip
def test_invalid_headers_are_refused(header: Any, data: bytes, message: str, folder: Path) -> None:
    store(folder, header, data)
    with pytest.raises(ValueError, match=rf"model\.safetensors.*{message}"):
        Bert.from_pretrained(folder)


@pytest.mark.parametrize("length", [0, 1, 2**31, 2**63, 2**64 - 1])
def test_invalid_header_lengths_are_refused(length: int, folder: Path) -> None:
    store(folder, {"a": TENSOR}, b"0000", length)
    with pytest.raises(ValueError, match=r"model\.safetensors(:| must be) "):
        Bert.from_pretrained(folder)


def index(folder: Path, names: Any) -> None:
    """Move the checkpoint into one shard and write an index with these names."""
    (folder / "model.safetensors").rename(folder / "shard.safetensors")
    text = names if isinstance(names, bytes) else json.dumps({"weight_map": names}).encode()
    (folder / "model.safetensors.index.json").write_bytes(text)


@pytest.mark.parametrize(
    "name", ["/etc/passwd", "..", ".", "", "a/b", "../x/shard.safetensors", "a\0b", "\ud800", "x" * 300]
)
def test_an_index_cannot_point_outside_its_folder(name: str, folder: Path) -> None:
    index(folder, {"a": name})
    with pytest.raises(
        ValueError, match=r"index\.json: weight_map must map names of tensors to files in the same folder, got "
    ):
        Bert.from_pretrained(folder)


def test_shards_must_be_regular_files(folder: Path) -> None:
    index(folder, {"a": "shard.safetensors", "b": "fifo"})
    os.mkfifo(folder / "fifo")
    with pytest.raises(ValueError, match=r"/fifo must be a regular file, got a FIFO; "):
        Bert.from_pretrained(folder)
    (folder / "fifo").unlink()
    (folder / "fifo").symlink_to("/dev/zero")
    with pytest.raises(ValueError, match=r"/fifo must be a regular file, got a character device; "):
        Bert.from_pretrained(folder)
    # symbolic links are followed
    (folder / "elsewhere").mkdir()
    (folder / "shard.safetensors").rename(folder / "elsewhere" / "shard")
    (folder / "shard.safetensors").symlink_to("elsewhere/shard")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "shard.safetensors"}}))
    assert Bert.from_pretrained(folder).config == TINY


def test_too_many_shards_are_refused(folder: Path) -> None:
    index(folder, {str(n): f"shard-{n}" for n in range(1001)})
    with pytest.raises(ValueError, match=r"index\.json: weight_map must name at most 1,000 files, got 1,001"):
        Bert.from_pretrained(folder)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "model.safetensors.index.json"])
@pytest.mark.parametrize("kind", ["FIFO", "character device", "directory"])
def test_files_must_be_regular_files(name: str, kind: str, folder: Path) -> None:
    if name.endswith("index.json"):
        index(folder, {})
    path = folder / name
    path.unlink()
    if kind == "FIFO":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero")
    # an index that is not a regular file counts as missing
    message = r"must be a regular file, got a" if not name.endswith("index.json") else "file not found"
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        Bert.from_pretrained(folder)


def test_large_config_files_are_refused(folder: Path) -> None:
    with (folder / "config.json").open("a") as file:
        file.write(" " * _limits.JSON_BYTES)
    with pytest.raises(ValueError, match=r"config\.json must have at most 16,777,216 bytes, got more"):
        Bert.from_pretrained(folder)


def test_duplicate_keys_are_refused(folder: Path) -> None:
    path = folder / "config.json"
    path.write_text(path.read_text().replace('"hidden_size": 12', '"hidden_size": 13, "hidden_size": 12'))
    with pytest.raises(ValueError, match=r"config\.json: the file must be JSON, got: duplicate key 'hidden_size'; "):
        Bert.from_pretrained(folder)


@pytest.mark.parametrize(
    "fields",
    [
        {"hidden_size": 1e308}, {"hidden_size": float("inf")}, {"vocab_size": 2**31 - 1}, {"intermediate_size": 2**31 - 1},
        {"max_position_embeddings": 2**31 - 1}, {"vocab_size": 10**400}, {"hidden_act": "\ud800"}, {"model_type": ["bert"]},
        {"num_hidden_layers": 2.0}, {"layer_norm_eps": 1e308}, {"hidden_dropout_prob": float("nan")}, {"num_attention_heads": -12},
        {"hidden_size": {}}, {"type_vocab_size": [2]},
    ],
)  # fmt: skip
def test_impossible_sizes_are_refused(fields: dict[str, Any], folder: Path) -> None:
    configure(folder, **fields)
    with pytest.raises(ValueError, match=r"(config\.json|model\.safetensors): "):
        Bert.from_pretrained(folder)


def test_200_layers_are_allowed(tmp_path: Path) -> None:
    """More than any published model has."""
    model = Gpt(gpt.Config(d_model=1, heads=1, layers=200, vocab=3, positions=3, d_feedforward=1))
    model.to_pretrained(tmp_path)
    assert Gpt.from_pretrained(tmp_path).config.layers == 200
