"""What `to_pretrained` writes: the model itself, for transformers too; whole or not at all; what has no place is refused."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

# before transformers is imported: nothing here may ask the network
os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch

from polyhead import Padding
from polyhead.models import Bert, Gpt, Llama, bert, gpt, llama
from polyhead.models import checkpoint_files as files
from polyhead.position import RopeScaling

saving = pytest.importorskip("safetensors.torch", reason="pip install 'polyhead[inspect]'")

BERT = bert.Config(d_model=15, heads=3, layers=2, d_feedforward=23, vocab=101, positions=37)
GPT = gpt.Config(d_model=15, heads=3, layers=2, vocab=101, positions=37)
LLAMA = llama.Config(d_model=18, heads=6, layers=2, d_feedforward=29, vocab=101, positions=37, kv_heads=2)
MODELS: dict[str, tuple[Any, Any]] = {
    "bert": (Bert, BERT),
    "bert, masked words": (Bert, BERT._replace(masked_lm=True, pooler=False, activation="gelu_tanh")),
    "bert, both": (Bert, BERT._replace(masked_lm=True, eps=1e-3)),
    "bert, neither": (Bert, BERT._replace(pooler=False)),
    "gpt": (Gpt, GPT),
    "gpt, other": (Gpt, GPT._replace(d_feedforward=7, activation="silu", scale_by_layer=True, start=3, stop=(4,))),
    "llama": (Llama, LLAMA._replace(head_dim=4, start=1, stop=(2, 5))),
    "llama, biased": (Llama, LLAMA._replace(head_dim=4, attention_bias=True, feedforward_bias=True)),
    "llama, tied": (
        Llama,
        LLAMA._replace(head_dim=4, head="tied", rope_base=5e5, scaling=RopeScaling(8.0, 16, 1.5, 3.0)),
    ),
    "llama, bare": (Llama, LLAMA._replace(head_dim=4, head=None, scaling=RopeScaling(2.0))),
    "mistral": (Llama, LLAMA._replace(head_dim=4, window=5)),
}


def built(name: str) -> Any:
    kind, config = MODELS[name]
    torch.manual_seed(1)
    model = kind(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model.eval()


def same(a: Any, b: Any) -> bool:
    ours, theirs = a.state_dict(), b.state_dict()
    return ours.keys() == theirs.keys() and all(
        ours[name].dtype == theirs[name].dtype and torch.equal(ours[name], theirs[name]) for name in ours
    )


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_what_is_written_is_read(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = built(name).to(dtype)
    model.to_pretrained(tmp_path / "new" / "folder")
    read = type(model).from_pretrained(tmp_path / "new" / "folder", dtype=None)
    assert same(read, model)
    assert read.config == model.config
    assert sorted(path.name for path in (tmp_path / "new" / "folder").iterdir()) == ["config.json", "model.safetensors"]
    assert json.loads((tmp_path / "new" / "folder" / "config.json").read_text())["dtype"] in str(dtype)
    wide = type(model).from_pretrained(tmp_path / "new" / "folder")
    assert {p.dtype for p in wide.parameters()} == {torch.float32}


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_transformers_reads_what_is_written(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="pip install transformers")
    model = built(name)
    model.to_pretrained(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    (architecture,) = fields["architectures"]
    peer, info = getattr(transformers, architecture).from_pretrained(tmp_path, output_loading_info=True)
    # transformers' BertModel has a pooler, and its head for masked words has none
    missing = {"pooler.dense.weight", "pooler.dense.bias"} if name == "bert, neither" else set()
    extra = {"bert.pooler.dense.weight", "bert.pooler.dense.bias"} if name == "bert, both" else set()
    assert set(info["missing_keys"]) == missing
    assert set(info["unexpected_keys"]) == extra
    assert not info["mismatched_keys"]
    assert peer.config.to_dict()["model_type"] == fields["model_type"]
    peer.eval()
    ids, lengths = torch.randint(0, 101, (3, 29)), [29, 1, 13]
    keep = torch.arange(29) < torch.tensor(lengths)[:, None]
    theirs = peer(ids, attention_mask=keep.long(), output_hidden_states=True)
    hidden = model(ids, over=Padding(lengths))
    assert (hidden - theirs.hidden_states[-1])[keep].abs().max() < 1e-5
    if "logits" in theirs:
        assert (model.logits(hidden) - theirs.logits)[keep].abs().max() < 1e-4
    if "pooler_output" in theirs and name == "bert":
        assert (model.pooled(hidden) - theirs.pooler_output).abs().max() < 1e-5


@pytest.mark.parametrize("name", MODELS)
def test_tied_tensors_are_stored_once(name: str, tmp_path: Path) -> None:
    model = built(name)
    model.to_pretrained(tmp_path)
    with saving.safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
        names = list(file.keys())
        stored = sum(file.get_tensor(name).numel() for name in names)
    assert stored == sum(parameter.numel() for parameter in model.parameters())
    assert ("lm_head.weight" in names) == (model.config._asdict().get("head") == "own")


def test_old_gpt_checkpoints(tmp_path: Path) -> None:
    """Without `transformer.`, with masks that were stored, with the head a second time."""
    model = built("gpt")
    model.to_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = {name.removeprefix("transformer."): x for name, x in saving.load_file(path).items()}
    assert tuple(tensors["h.0.attn.c_attn.weight"].shape) == (15, 45)
    for layer in range(2):
        tensors[f"h.{layer}.attn.bias"] = torch.ones(1, 1, 37, 37).bool()
        tensors[f"h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)
    tensors["lm_head.weight"] = tensors["wte.weight"].clone()
    saving.save_file(tensors, path)
    assert same(Gpt.from_pretrained(tmp_path), model)
    del tensors["wte.weight"]
    saving.save_file(tensors, path)
    assert same(Gpt.from_pretrained(tmp_path), model)
    tensors["wte.weight"] = tensors["lm_head.weight"] + 1
    saving.save_file(tensors, path)
    with pytest.raises(ValueError, match=r"lm_head.weight is not wte.weight; they must be equal"):
        Gpt.from_pretrained(tmp_path)
    tensors["wte.weight"] = tensors.pop("lm_head.weight")
    tensors["h.1.attn.c_attn.weight"] = torch.zeros(15, 46)
    del tensors["h.0.mlp.c_fc.weight"]
    saving.save_file(tensors, path)
    with pytest.raises(ValueError, match=r"its tensors are not those") as raised:
        Gpt.from_pretrained(tmp_path)
    assert str(raised.value).splitlines()[1:] == [
        "  missing: h.0.mlp.c_fc.weight, it must be (60, 15)",
        *(
            f"  misshapen: h.1.attn.c_attn.weight, part {n} of 3, transposed, is (46, 15), it must be (15, 15)"
            for n in (1, 2, 3)
        ),
    ]


def test_old_llama_checkpoints(tmp_path: Path) -> None:
    """`rope_theta` and `rope_scaling` beside the rest, frequencies that were stored."""
    model = built("llama, tied")
    model.to_pretrained(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    rope = fields.pop("rope_parameters")
    fields |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope}
    rope["type"] = rope.pop("rope_type")
    (tmp_path / "config.json").write_text(json.dumps(fields))
    tensors = saving.load_file(tmp_path / "model.safetensors")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(2)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    saving.save_file(tensors, tmp_path / "model.safetensors")
    read = Llama.from_pretrained(tmp_path)
    assert same(read, model)
    assert read.config == model.config
    for name in ("rope_theta", "rope_scaling", "num_key_value_heads", "max_position_embeddings", "eos_token_id"):
        fields.pop(name)
    (tmp_path / "config.json").write_text(json.dumps({**fields, "num_key_value_heads": 2}))
    plain = Llama.from_pretrained(tmp_path).config
    assert (plain.rope_base, plain.scaling, plain.positions, plain.stop) == (10_000.0, None, 2048, ())


@pytest.mark.parametrize(
    ("name", "changed", "message"),
    [
        ("gpt", {"add_cross_attention": True}, "add_cross_attention is True; it must be False"),
        ("gpt", {"scale_attn_weights": False}, "scale_attn_weights is False; it must be True"),
        ("gpt", {"tie_word_embeddings": False}, "tie_word_embeddings is False; it must be True"),
        ("gpt", {"n_inner": -3}, "n_inner is -3; it must be a whole number, 1 or more"),
        ("gpt", {"n_embd": 3 * 2**29}, "out of memory|overflow|too large|numel|bytes|[Ss]torage"),
        ("gpt", {"n_layer": 10**40}, "n_layer is 1000.*; it must be a whole number, 1 or more"),
        ("gpt", {"layer_norm_epsilon": float("nan")}, "layer_norm_epsilon is nan; it must be a number"),
        ("gpt", {"n_head": 4}, "heads: 4 does not divide d_model 15"),
        ("gpt", {"n_embd": 1.5}, "n_embd is 1.5; it must be a whole number"),
        ("gpt", {"n_embd": None}, "it has no 'n_embd'|n_embd is None; it must be a whole number"),
        ("gpt", {"scale_attn_by_inverse_layer_idx": "yes"}, "scale_attn_by_inverse_layer_idx is 'yes'; it must be true or false"),
        ("gpt", {"activation_function": "tanh"}, "activation_function is 'tanh'; it must be one of gelu, gelu_new, "),
        ("gpt", {"eos_token_id": "</s>"}, "eos_token_id is '</s>'; it must be the number of a token, or null"),
        ("llama", {"eos_token_id": [2, -1]}, r"eos_token_id is \[2, -1\]; it must be the number of a token, or null"),
        ("llama", {"tie_word_embeddings": "false"}, "tie_word_embeddings is 'false'; it must be true or false"),
        ("llama", {"tie_word_embeddings": 0}, "tie_word_embeddings is 0; it must be true or false"),
        ("llama", {"rope_parameters": []}, r"rope_parameters is \[\]; it must be one object for all layers"),
        ("llama", {"rope_scaling": False}, "rope_scaling is False; it must be one object for all layers"),
        ("gpt", {"model_type": "t5"}, "model_type is 't5'; what can be read here is 'gpt2'"),
        ("llama", {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "rope_type is 'yarn', .* 'default', 'linear' and 'llama3'"),
        ("llama", {"rope_parameters": {"rope_type": "linear"}}, "factor is None; it must be a number, more than 0"),
        ("llama", {"rope_parameters": {"rope_type": "linear", "factor": "2"}}, "factor is '2'; it must be a number"),
        ("llama", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5"),
        ("llama", {"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "it must be one object for all layers"),
        ("llama", {"rope_parameters": [3]}, "it must be one object for all layers"),
        ("llama", {"rope_parameters": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 1}}, "low_freq_factor is 4.0, high_freq_factor 1.0; it must be less"),
        ("llama", {"rope_parameters": {"rope_theta": float("inf")}}, "rope_theta is inf; it must be a number, more than 0"),
        ("llama", {"rope_parameters": {"rope_theta": 0}}, "rope_theta is 0; it must be a number, more than 0"),
        ("llama", {"num_key_value_heads": 4}, "kv_heads: 4 does not divide num_heads 6"),
        ("llama", {"attention_bias": 1}, "attention_bias is 1; it must be true or false"),
        ("llama", {"head_dim": 5}, "head_dim is 5; it must be even"),
        ("mistral", {"sliding_window": 0}, "sliding_window is 0; it must be a whole number, 1 or more"),
        ("mistral", {"model_type": "mixtral"}, "model_type is 'mixtral'; what can be read here is 'llama', 'mistral'"),
    ],
)  # fmt: skip
def test_bad_configurations(name: str, changed: dict[str, Any], message: str, tmp_path: Path) -> None:
    model = built(name)
    model.to_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changed}))
    with pytest.raises(ValueError, match=rf"config\.json: .*({message})"):
        type(model).from_pretrained(tmp_path)


def pruned(model: Any) -> None:
    attention = model.layers[1].self_attn
    attention.prune(range(attention.num_heads // attention.kv_heads))


def gated(model: Any) -> None:
    model.layers[0].self_attn.gate = torch.ones(model.layers[0].self_attn.num_heads)


def replaced(model: Any) -> None:
    model.layers[0].self_attn = model.layers[0].self_attn.fold_value_projection()


def emptied(model: Any) -> None:
    model.to("meta")


@pytest.mark.parametrize("name", ["bert", "gpt", "llama"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            pruned,
            "layers.1.self_attn.*: .*; a checkpoint of this kind has no place for heads that were pruned or gated",
        ),
        (gated, "layers.0.self_attn.gate: the model was given it; a checkpoint of this kind has no place for heads"),
        (replaced, "layers.0.self_attn.*: its shape is .*; a checkpoint of this kind has no place for"),
        (emptied, "it is on the meta device; there must be numbers to be written"),
    ],
)
def test_what_has_no_place_is_refused(name: str, change: Any, message: str, tmp_path: Path) -> None:
    model = built(name)
    change(model)
    with pytest.raises(ValueError, match=message):
        model.to_pretrained(tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_mistral_with_biases(tmp_path: Path) -> None:
    model = Llama(LLAMA._replace(head_dim=4, window=5, attention_bias=True))
    with pytest.raises(ValueError, match="with a window there must be none, for Mistral has no biases"):
        model.to_pretrained(tmp_path / "new")


@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_damaged_files(name: str, tmp_path: Path) -> None:
    model = built(name)
    model.to_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"model\.safetensors: it is truncated or damaged"):
        type(model).from_pretrained(tmp_path)
    torch.save(model.state_dict(), path)
    with pytest.raises(ValueError, match=r"model\.safetensors: it is a zip, such as torch.save writes"):
        type(model).from_pretrained(tmp_path)
    path.unlink()
    with pytest.raises(FileNotFoundError, match=r"model\.safetensors: there is no such file"):
        type(model).from_pretrained(tmp_path)


def test_a_file_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "model").write_text("precious")
    with pytest.raises(ValueError, match="model is a file; it must be a folder, or the path of a new one"):
        built("gpt").to_pretrained(tmp_path / "model")
    assert (tmp_path / "model").read_text() == "precious"


def test_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that is full in the middle leaves what was there before, and nothing where nothing was."""
    first = built("gpt")
    first.to_pretrained(tmp_path / "old")
    (tmp_path / "old" / "tokenizer.json").write_text("{}")
    before = {path.name: path.read_bytes() for path in (tmp_path / "old").iterdir()}

    def full(tensors: Any, path: Path, metadata: Any) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(saving, "save_file", full)
    for name in ("old", "new"):
        with pytest.raises(OSError, match="No space left"):
            Gpt(GPT._replace(layers=1)).to_pretrained(tmp_path / name)
    assert {path.name: path.read_bytes() for path in (tmp_path / "old").iterdir()} == before
    assert not (tmp_path / "new").exists()
    monkeypatch.undo()
    Gpt(GPT._replace(layers=1)).to_pretrained(tmp_path / "old")
    assert Gpt.from_pretrained(tmp_path / "old").config.layers == 1
    assert (tmp_path / "old" / "tokenizer.json").exists()


def test_a_failed_save_leaves_no_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "there").mkdir()
    monkeypatch.setattr(saving, "save_file", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        built("gpt").to_pretrained(tmp_path / "there" / "a" / "b" / "c")
    assert list(tmp_path.rglob("*")) == [tmp_path / "there"]


@pytest.mark.parametrize("old", [True, False])
def test_a_save_that_is_killed(old: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before and after every move there is the old checkpoint, the new one, or one that is refused: never half of each."""
    first = built("llama")
    # the same shapes: nobody would notice
    second = Llama(LLAMA._replace(head_dim=4, rope_base=7.0, eps=1e-2))
    folder, replace = tmp_path / "model", Path.replace
    if old:
        first.to_pretrained(folder)
    left: list[Path] = []

    def snapshot() -> None:
        left.append(tmp_path / f"left-{len(left)}")
        shutil.copytree(folder, left[-1])

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", lambda self, target: [snapshot(), replace(self, target)][1])
        second.to_pretrained(folder)
    snapshot()
    assert len(left) == (5 if old else 3)
    assert same(Llama.from_pretrained(left.pop()), second)
    if old:
        read = Llama.from_pretrained(left.pop(0))
        assert same(read, first) and read.config == first.config
    for torn in left:
        with pytest.raises(FileNotFoundError, match=r"config.json: there is no such file"):
            Llama.from_pretrained(torn)


@pytest.mark.parametrize(("old", "move"), [*((True, n) for n in range(4)), (False, 0), (False, 1)])
def test_a_move_that_fails(old: bool, move: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, replace = tmp_path / "model", Path.replace
    if old:
        built("gpt").to_pretrained(folder)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    moves = iter(range(100))

    def failing(self: Path, target: Path) -> Path:
        if next(moves) == move:
            raise OSError(5, "Input/output error")
        return replace(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", failing)
        with pytest.raises(OSError, match="Input/output"):
            Gpt(GPT._replace(layers=1)).to_pretrained(folder)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    assert folder.exists() == old


def test_layers_that_share_weights_are_written_apart(tmp_path: Path) -> None:
    model = built("gpt")
    model.layers[1] = model.layers[0]
    model.to_pretrained(tmp_path)
    assert same(Gpt.from_pretrained(tmp_path), model)


def test_the_file_may_go_away(tmp_path: Path) -> None:
    model = built("gpt")
    model.to_pretrained(tmp_path)
    read = Gpt.from_pretrained(tmp_path)
    file = tmp_path / files.WEIGHTS
    file.write_bytes(b"\xff" * file.stat().st_size)
    assert same(read, model)
    assert all(p.is_contiguous() and p.requires_grad for p in read.parameters())
