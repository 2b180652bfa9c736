"""The tensors of a checkpoint are found by name, in one file or in shards; wrong ones are listed."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from bert_checkpoints import TINY, equal, save, state

from polyhead.models import Bert, checkpoint_reading
from polyhead.models.bert import CHECKPOINT_NAMES

saving = pytest.importorskip("safetensors.torch", reason="pip install 'polyhead[inspect]'")


def test_parameters_get_the_requested_dtype(model: Bert, folder: Path) -> None:
    half = Bert.from_pretrained(folder, dtype=torch.bfloat16)
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
    narrow = save(folder.parent / "half", {name: x.half() for name, x in state(model).items()})
    assert equal(Bert.from_pretrained(narrow), model.half().float())
    with pytest.raises(ValueError, match=r"dtype must be floating-point, .*, got torch.int64"):
        Bert.from_pretrained(folder, dtype=torch.int64)
    with pytest.raises(
        ValueError, match=r"dtype must be floating-point, such as torch.float32, or None, got 'float32'"
    ):
        Bert.from_pretrained(folder, dtype="float32")  # type: ignore[arg-type]


def test_names_are_translated_both_ways(model: Bert) -> None:
    with torch.device("meta"):
        names = list(Bert(TINY._replace(masked_lm=True)).state_dict())
    back = {theirs: ours for ours, theirs in CHECKPOINT_NAMES.items()}
    theirs = [checkpoint_reading.translate_parameter_name(name, CHECKPOINT_NAMES) for name in names]
    assert len(set(theirs)) == len(names)
    assert [checkpoint_reading.translate_parameter_name(str(name), back) for name in theirs] == names
    assert checkpoint_reading.translate_parameter_name("encoder.layer.{}.output.dense.weight", back) is None
    assert checkpoint_reading.translate_parameter_name("encoder.layers.3.weight", back) is None


def old_name(name: str) -> str:
    name = name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
    return name if name.startswith("cls.") else f"bert.{name}"


def test_old_names_are_read(tmp_path: Path) -> None:
    """The prefix `bert.` of models with heads, TensorFlow's names, and buffers and heads that are ignored."""
    model = Bert(TINY._replace(masked_lm=True))
    tensors = {old_name(name): tensor for name, tensor in state(model).items()}
    tensors["bert.embeddings.position_ids"] = torch.arange(11)[None]
    tensors["cls.predictions.decoder.weight"] = model.embeddings.token_embedding.weight.detach().clone()
    tensors["cls.predictions.decoder.bias"] = tensors["cls.predictions.bias"].clone()
    tensors["cls.seq_relationship.weight"] = torch.zeros(2, 12)
    assert equal(Bert.from_pretrained(save(tmp_path, tensors)), model)
    del tensors["cls.predictions.bias"]
    assert equal(Bert.from_pretrained(save(tmp_path, tensors)), model)
    tensors["cls.predictions.decoder.weight"] += 1
    with pytest.raises(
        ValueError, match=r"decoder.weight must be equal to bert.embeddings.word_embeddings.weight, got other values"
    ):
        Bert.from_pretrained(save(tmp_path, tensors))


def test_heads_are_those_of_the_checkpoint(tmp_path: Path) -> None:
    model = Bert(TINY._replace(pooler=False))
    read = Bert.from_pretrained(save(tmp_path, state(model)))
    assert equal(read, model)
    assert read.config == model.config
    hidden = read(torch.tensor([1, 2]))
    with pytest.raises(ValueError, match="pool needs a pooler, got a model without one"):
        read.pool(hidden)
    with pytest.raises(ValueError, match="logits needs a masked-LM head, got a model without one"):
        read.logits(hidden)


def shard(folder: Path, model: Bert) -> Path:
    """The checkpoint of `folder` in two files, with their index."""
    tensors = state(model)
    index = {name: f"model-0000{number % 2 + 1}-of-00002.safetensors" for number, name in enumerate(tensors)}
    for file in set(index.values()):
        saving.save_file({name: tensors[name] for name in tensors if index[name] == file}, folder / file)
    (folder / "model.safetensors").unlink()
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return path


def test_shards_are_read_by_their_index(model: Bert, folder: Path) -> None:
    index = shard(folder, model)
    assert equal(Bert.from_pretrained(folder), model)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"model-00002-of-00002.safetensors: file not found; model.safet"):
        Bert.from_pretrained(folder)
    for bad in ({"a": "../secret.safetensors"}, {"a": 3}, {}, ["a"], None):
        index.write_text(json.dumps({"weight_map": bad}))
        with pytest.raises(
            ValueError, match=r"index.json: weight_map must map names of tensors to files in the same folder, got "
        ):
            Bert.from_pretrained(folder)


def test_a_tensor_in_two_shards_is_refused(model: Bert, folder: Path) -> None:
    shard(folder, model)
    second = folder / "model-00002-of-00002.safetensors"
    twice = {**saving.load_file(second), "pooler.dense.bias": torch.ones(12)}
    first = folder / "model-00001-of-00002.safetensors"
    saving.save_file({**saving.load_file(first), "pooler.dense.bias": torch.zeros(12)}, first)
    saving.save_file(twice, second)
    with pytest.raises(
        ValueError,
        match=r"one shard, got pooler.dense.bias in model-00001-of-00002.safetensors and model-00002-of-00002.saf",
    ):
        Bert.from_pretrained(folder)


def write_zip(path: Path) -> None:
    torch.save({"weight": torch.zeros(3)}, path)


def write_pickle(path: Path) -> None:
    path.write_bytes(pickle.dumps({"weight": [0.0]}))


def write_html(path: Path) -> None:
    path.write_text("<!DOCTYPE html><title>404</title>")


def write_lfs_pointer(path: Path) -> None:
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 12")


def cut_in_half(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def cut_after_100_bytes(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:100])


def empty(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (write_zip, "must be a safetensors file, got a zip file, as torch.save writes; "),
        (write_pickle, "must be a safetensors file, got a pickle, as torch.save writes; "),
        (write_html, r"must be a safetensors file, got another format \(.*\); save the model with save_pretrained"),
        (write_lfs_pointer, r"must be a safetensors file, got a Git LFS pointer \(git lfs pull downloads"),
        (
            cut_in_half,
            r"must be a complete .*, got [\d,]+ bytes that are truncated or damaged \(.*\); download it again",
        ),
        (cut_after_100_bytes, r"must be a complete .*, got 100 bytes that are truncated or damaged"),
        (empty, r"must be a complete .*, got 0 bytes that are truncated or damaged"),
    ],
)
def test_files_in_other_formats_are_named(folder: Path, damage: Any, message: str) -> None:
    damage(folder / "model.safetensors")
    with pytest.raises(ValueError, match=rf"model\.safetensors {message}"):
        Bert.from_pretrained(folder)


def test_wrong_tensors_are_listed(model: Bert, tmp_path: Path) -> None:
    tensors = state(model)
    del tensors["encoder.layer.1.output.dense.bias"]
    tensors["encoder.layer.2.output.dense.bias"] = torch.zeros(12)
    tensors["adapter"] = torch.zeros(3)
    tensors["pooler.dense.weight"] = torch.zeros(12, 13)
    with pytest.raises(
        ValueError,
        match=r"model\.safetensors: the tensors must be those of config\.json; check that both files belong to one model",
    ) as raised:
        Bert.from_pretrained(save(tmp_path, tensors))
    assert str(raised.value).splitlines()[1:] == [
        "  missing: encoder.layer.1.output.dense.bias (12,)",
        "  unexpected: adapter (3,)",
        "  unexpected: encoder.layer.2.output.dense.bias (12,)",
        "  misshapen: pooler.dense.weight must be (12, 12), got (12, 13)",
    ]


def test_many_wrong_tensors_are_counted(model: Bert, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"  missing: and 11 more$"):
        Bert.from_pretrained(save(tmp_path, state(model), num_hidden_layers=3))


def test_missing_tensors_of_a_head_are_listed(tmp_path: Path) -> None:
    tensors = state(Bert(TINY._replace(masked_lm=True)))
    del tensors["cls.predictions.transform.dense.weight"], tensors["pooler.dense.weight"]
    with pytest.raises(ValueError, match=r"missing: pooler.dense.weight.*\n  missing: cls.predictions.transform.dense"):
        Bert.from_pretrained(save(tmp_path, tensors))


def test_a_tensor_under_two_names_is_refused(model: Bert, tmp_path: Path) -> None:
    tensors = state(model)
    tensors["bert.pooler.dense.bias"] = torch.zeros(12)
    with pytest.raises(ValueError, match=r"unexpected: pooler.dense.bias \(12,\)"):
        Bert.from_pretrained(save(tmp_path, tensors))


def test_a_quantised_checkpoint_is_refused(model: Bert, tmp_path: Path) -> None:
    tensors = state(model)
    tensors["encoder.layer.0.output.dense.weight"] = torch.zeros(12, 17, dtype=torch.int8)
    with pytest.raises(
        ValueError, match=r"encoder.layer.0.output.dense.weight must be one of F64, F32, .*, got I8; quantised"
    ):
        Bert.from_pretrained(save(tmp_path, tensors))
