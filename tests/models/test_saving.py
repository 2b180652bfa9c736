"""`to_pretrained` writes checkpoints that `from_pretrained` and transformers read, atomically; other models are refused."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

# before transformers is imported: tests must not use the network
os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch

from polyhead import Padding
from polyhead.models import Bert, Gpt, Llama, bert, checkpoint_files, gpt, llama
from polyhead.position import RopeScaling

saving = pytest.importorskip("safetensors.torch", reason="pip install 'polyhead[inspect]'")

BERT = bert.Config(d_model=15, heads=3, layers=2, d_feedforward=23, vocab=101, positions=37)
GPT = gpt.Config(d_model=15, heads=3, layers=2, vocab=101, positions=37)
LLAMA = llama.Config(d_model=18, heads=6, layers=2, d_feedforward=29, vocab=101, positions=37, kv_heads=2)
MODELS: dict[str, tuple[Any, Any]] = {
    "bert": (Bert, BERT),
    "bert, masked-LM": (Bert, BERT._replace(masked_lm=True, pooler=False, activation="gelu_tanh")),
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
def test_saved_models_are_read(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
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
def test_transformers_reads_saved_models(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="pip install transformers")
    model = built(name)
    model.to_pretrained(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    (architecture,) = fields["architectures"]
    peer, info = getattr(transformers, architecture).from_pretrained(tmp_path, output_loading_info=True)
    # transformers' BertModel has a pooler, and its BertForMaskedLM has none
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
        assert (model.pool(hidden) - theirs.pooler_output).abs().max() < 1e-5


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


def test_old_gpt_checkpoints_are_read(tmp_path: Path) -> None:
    """Without the prefix `transformer.`, with stored masks and a stored copy of the tied head."""
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
    with pytest.raises(ValueError, match=r"lm_head.weight must be equal to wte.weight, got other values"):
        Gpt.from_pretrained(tmp_path)
    tensors["wte.weight"] = tensors.pop("lm_head.weight")
    tensors["h.1.attn.c_attn.weight"] = torch.zeros(15, 46)
    del tensors["h.0.mlp.c_fc.weight"]
    saving.save_file(tensors, path)
    with pytest.raises(ValueError, match=r"the tensors must be those of config.json") as raised:
        Gpt.from_pretrained(tmp_path)
    assert str(raised.value).splitlines()[1:] == [
        "  missing: h.0.mlp.c_fc.weight (60, 15)",
        *(
            f"  misshapen: h.1.attn.c_attn.weight, part {n} of 3, transposed must be (15, 15), got (46, 15)"
            for n in (1, 2, 3)
        ),
    ]


def test_old_llama_checkpoints_are_read(tmp_path: Path) -> None:
    """With `rope_theta` and `rope_scaling` at the top level, and stored frequencies."""
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
        ("gpt", {"add_cross_attention": True}, "add_cross_attention must be False, got True"),
        ("gpt", {"scale_attn_weights": False}, "scale_attn_weights must be True, got False"),
        ("gpt", {"tie_word_embeddings": False}, "tie_word_embeddings must be True, got False"),
        ("gpt", {"n_inner": -3}, "n_inner must be an integer, 1 or more, got -3"),
        ("gpt", {"n_embd": 3 * 2**29}, "out of memory|overflow|too large|numel|bytes|[Ss]torage"),
        ("gpt", {"n_layer": 10**40}, "n_layer must be an integer, 1 or more, got 1000"),
        ("gpt", {"layer_norm_epsilon": float("nan")}, "layer_norm_epsilon must be a number in .*, got nan"),
        ("gpt", {"n_head": 4}, "heads must divide d_model 15, got 4"),
        ("gpt", {"n_embd": 1.5}, "n_embd must be an integer, 1 or more, got 1.5"),
        ("gpt", {"n_embd": None}, "must have 'n_embd'|n_embd must be an integer, 1 or more, got None"),
        ("gpt", {"scale_attn_by_inverse_layer_idx": "yes"}, "scale_attn_by_inverse_layer_idx must be true or false, got 'yes'"),
        ("gpt", {"activation_function": "tanh"}, "activation_function must be one of gelu, gelu_new, .*, got 'tanh'"),
        ("gpt", {"eos_token_id": "</s>"}, "eos_token_id must be the id of a token, or null, got '</s>'"),
        ("llama", {"eos_token_id": [2, -1]}, r"eos_token_id must be the id of a token, or null, got \[2, -1\]"),
        ("llama", {"tie_word_embeddings": "false"}, "tie_word_embeddings must be true or false, got 'false'"),
        ("llama", {"tie_word_embeddings": 0}, "tie_word_embeddings must be true or false, got 0"),
        ("llama", {"rope_parameters": []}, r"rope_parameters must be one object for all layers, got \[\]"),
        ("llama", {"rope_scaling": False}, "rope_scaling must be one object for all layers, got False"),
        ("gpt", {"model_type": "t5"}, "model_type must be one of 'gpt2', got 't5'"),
        ("llama", {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "rope_type must be 'default', 'linear' or 'llama3', got 'yarn'"),
        ("llama", {"rope_parameters": {"rope_type": "linear"}}, r"factor must be a number in \(0, inf\), got None"),
        ("llama", {"rope_parameters": {"rope_type": "linear", "factor": "2"}}, r"factor must be a number in \(0, inf\), got '2'"),
        ("llama", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor must be 1, got 0.5"),
        ("llama", {"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rope_parameters must be one object for all layers, got "),
        ("llama", {"rope_parameters": [3]}, "rope_parameters must be one object for all layers, got "),
        ("llama", {"rope_parameters": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 1}}, "low_freq_factor must be less than high_freq_factor, 1.0, got 4.0"),
        ("llama", {"rope_parameters": {"rope_theta": float("inf")}}, r"rope_theta must be a number in \(0, inf\), got inf"),
        ("llama", {"rope_parameters": {"rope_theta": 0}}, r"rope_theta must be a number in \(0, inf\), got 0"),
        ("llama", {"num_key_value_heads": 4}, "kv_heads must divide num_heads = 6, got 4"),
        ("llama", {"attention_bias": 1}, "attention_bias must be true or false, got 1"),
        ("llama", {"head_dim": 5}, "head_dim must be even, got 5"),
        ("mistral", {"sliding_window": 0}, "sliding_window must be an integer, 1 or more, got 0"),
        ("mistral", {"model_type": "mixtral"}, "model_type must be one of 'llama', 'mistral', got 'mixtral'"),
    ],
)  # fmt: skip
def test_invalid_config_files_are_refused(name: str, changed: dict[str, Any], message: str, tmp_path: Path) -> None:
    model = built(name)
    model.to_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changed}))
    with pytest.raises(ValueError, match=rf"config\.json.*({message})"):
        type(model).from_pretrained(tmp_path)


def prune(model: Any) -> None:
    attention = model.layers[1].self_attn
    attention.prune(range(attention.num_heads // attention.kv_heads))


def set_gate(model: Any) -> None:
    model.layers[0].self_attn.gate = torch.ones(model.layers[0].self_attn.num_heads)


def replace_attention(model: Any) -> None:
    model.layers[0].self_attn = model.layers[0].self_attn.fold_value_projection()


def move_to_meta(model: Any) -> None:
    model.to("meta")


@pytest.mark.parametrize("name", ["bert", "gpt", "llama"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            prune,
            "layers.1.self_attn.* is in the model, but not in its config; this format cannot hold pruned or gated heads",
        ),
        (set_gate, "layers.0.self_attn.gate is in the model, but not in its config; this format cannot hold pruned or"),
        (replace_attention, "layers.0.self_attn.* must have shape .*; this format cannot hold"),
        (move_to_meta, "must hold values to be saved, got a tensor on the meta device"),
    ],
)
def test_models_that_differ_from_their_config_are_refused(name: str, change: Any, message: str, tmp_path: Path) -> None:
    model = built(name)
    change(model)
    with pytest.raises(ValueError, match=message):
        model.to_pretrained(tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_mistral_with_biases_is_refused(tmp_path: Path) -> None:
    model = Llama(LLAMA._replace(head_dim=4, window=5, attention_bias=True))
    with pytest.raises(ValueError, match="must be False to save a model with a window, since Mistral has no biases"):
        model.to_pretrained(tmp_path / "new")


@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_damaged_files_are_refused(name: str, tmp_path: Path) -> None:
    model = built(name)
    model.to_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"model\.safetensors must be a complete .* truncated or damaged"):
        type(model).from_pretrained(tmp_path)
    torch.save(model.state_dict(), path)
    with pytest.raises(
        ValueError, match=r"model\.safetensors must be a safetensors file, got a zip file, as torch.save writes"
    ):
        type(model).from_pretrained(tmp_path)
    path.unlink()
    with pytest.raises(FileNotFoundError, match=r"model\.safetensors: file not found"):
        type(model).from_pretrained(tmp_path)


def test_a_file_in_place_of_the_folder_is_kept(tmp_path: Path) -> None:
    (tmp_path / "model").write_text("precious")
    with pytest.raises(ValueError, match=r"folder must be a folder or a new path, got a file: .*model"):
        built("gpt").to_pretrained(tmp_path / "model")
    assert (tmp_path / "model").read_text() == "precious"


def test_a_full_disk_leaves_the_old_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An old checkpoint is unchanged, and a new folder is removed."""
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
def test_a_killed_save_never_mixes_checkpoints(old: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After every move the folder holds the old checkpoint, the new one, or one that is refused."""
    first = built("llama")
    # the same shapes: a mixed checkpoint would load
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
        with pytest.raises(FileNotFoundError, match=r"config.json: file not found"):
            Llama.from_pretrained(torn)


@pytest.mark.parametrize(("old", "move"), [*((True, n) for n in range(4)), (False, 0), (False, 1)])
def test_a_failed_move_restores_the_old_files(
    old: bool, move: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_shared_weights_are_saved_separately(tmp_path: Path) -> None:
    model = built("gpt")
    model.layers[1] = model.layers[0]
    model.to_pretrained(tmp_path)
    assert same(Gpt.from_pretrained(tmp_path), model)


def test_a_loaded_model_is_independent_of_its_file(tmp_path: Path) -> None:
    model = built("gpt")
    model.to_pretrained(tmp_path)
    read = Gpt.from_pretrained(tmp_path)
    file = tmp_path / checkpoint_files.WEIGHTS_FILE
    file.write_bytes(b"\xff" * file.stat().st_size)
    assert same(read, model)
    assert all(p.is_contiguous() and p.requires_grad for p in read.parameters())
