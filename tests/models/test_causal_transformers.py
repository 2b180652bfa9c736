"""GPT, Llama and Mistral agree with transformers: hidden states, logits, generated tokens, checkpoints and sizes."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

# before transformers is imported: tests must not use the network
os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
from causal_models import difference, drawn

from polyhead import Causal, Padding
from polyhead.models import Gpt, Llama, gpt, llama
from polyhead.models.causal_model import CausalModel
from polyhead.position import RopeScaling, Rotary

# the sizes of causal_models under transformers' names
_gpt = {"vocab_size": 101, "n_embd": 15, "n_layer": 2, "n_head": 3, "n_inner": 23, "n_positions": 137}
_llama = {
    "vocab_size": 101, "hidden_size": 18, "num_hidden_layers": 3, "num_attention_heads": 6, "intermediate_size": 29,
    "max_position_embeddings": 137, "num_key_value_heads": 2, "head_dim": 10,
}  # fmt: skip
_llama3 = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "original_max_position_embeddings": 64, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}  # fmt: skip
PEERS: dict[str, tuple[str, dict[str, Any]]] = {
    "GPT-2": ("GPT2", _gpt),
    "GPT-2, four times as wide inside, relu": ("GPT2", {**_gpt, "n_inner": None, "activation_function": "relu"}),
    "GPT-2, scaled by layer": ("GPT2", {**_gpt, "scale_attn_by_inverse_layer_idx": True, "layer_norm_epsilon": 1e-2}),
    "Llama": ("Llama", _llama),
    "Llama, one key per head": ("Llama", {**_llama, "num_key_value_heads": None, "head_dim": 4, "rms_norm_eps": 1e-2}),
    "Llama, biased": ("Llama", {**_llama, "attention_bias": True, "mlp_bias": True, "hidden_act": "gelu_new"}),
    "Llama 3.2": ("Llama", {**_llama, "tie_word_embeddings": True, "rope_parameters": _llama3}),
    "Llama, linear": ("Llama", {**_llama, "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}}),
    "Mistral": ("Mistral", {**_llama, "sliding_window": 7}),
    "Mistral, no window": ("Mistral", {**_llama, "sliding_window": None, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
}  # fmt: skip


@pytest.fixture(scope="module")
def transformers() -> Any:
    return pytest.importorskip("transformers", reason="parity is tested against transformers: pip install transformers")


def peer_of(transformers: Any, peer: str, kind: str = "") -> Any:
    family, settings = PEERS[peer]
    heads = {"GPT2": "GPT2LMHeadModel", "Llama": "LlamaForCausalLM", "Mistral": "MistralForCausalLM"}
    config = getattr(transformers, f"{family}Config")(**copy.deepcopy(settings), bos_token_id=1, eos_token_id=None)
    return drawn(getattr(transformers, kind or heads[family])(config))


def ours(peer: str) -> type[Gpt] | type[Llama]:
    return Gpt if peer.startswith("GPT") else Llama


def agree(model: CausalModel, peer: Any) -> None:
    """Compare hidden states, logits and 64 generated tokens."""
    ids = torch.randint(0, 101, (3, 41))
    theirs = peer(ids, output_hidden_states=True)
    hidden = model(ids)
    assert difference(hidden, theirs.hidden_states[-1]) < 2e-5
    assert difference(model.logits(hidden), theirs.logits) < 1e-4
    prompt = ids[:, :5]
    expected = peer.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=64, do_sample=False, pad_token_id=0
    )
    assert torch.equal(model.generate(prompt, 64), expected)


@pytest.mark.parametrize("peer", PEERS)
@torch.no_grad()
def test_checkpoints_of_transformers_are_read(transformers: Any, tmp_path: Path, peer: str) -> None:
    theirs = peer_of(transformers, peer)
    theirs.save_pretrained(tmp_path)
    model = ours(peer).from_pretrained(tmp_path)
    assert not model.training
    agree(model, theirs)


@pytest.mark.parametrize("peer", ["GPT-2", "Llama", "Mistral"])
@torch.no_grad()
def test_prompts_of_different_lengths(transformers: Any, tmp_path: Path, peer: str) -> None:
    theirs = peer_of(transformers, peer)
    theirs.save_pretrained(tmp_path)
    model = ours(peer).from_pretrained(tmp_path)
    ids, lengths = torch.randint(0, 101, (4, 11)), torch.tensor([11, 1, 7, 4])
    real = torch.arange(11) >= 11 - lengths[:, None]
    written = model.generate(ids, 40, over=Padding(real))
    expected = theirs.generate(ids, attention_mask=real.long(), max_new_tokens=40, do_sample=False, pad_token_id=0)
    assert torch.equal(written, expected)
    for row, length in enumerate(lengths.tolist()):
        alone = ids[row : row + 1, 11 - length :]
        assert torch.equal(model.generate(alone, 40)[0, length:], written[row, 11:])
        hidden = model(ids, Padding(real))[row, 11 - length :]
        assert difference(hidden, model(alone)[0]) < 2e-5
    # in parts, with padding between real tokens
    real[0, 3] = False
    whole, caches = model(ids, Padding(real) & Causal()), model.caches(4, 11)
    parts = [model(ids[:, a:b], Padding(real[:, :b]), caches=caches) for a, b in ((0, 6), (6, 7), (7, 11))]
    assert difference(torch.cat(parts, 1)[real], whole[real]) < 2e-5


@torch.no_grad()
def test_generate_ends_at_the_stop_tokens_of_the_config(transformers: Any, tmp_path: Path) -> None:
    theirs, prompt = peer_of(transformers, "Llama"), torch.tensor([[1, 2, 3]])
    options = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 60, "do_sample": False, "pad_token_id": 0}
    end = int(theirs.generate(prompt, **options)[0, 10])
    theirs.config.eos_token_id = theirs.generation_config.eos_token_id = [end, 100]
    theirs.save_pretrained(tmp_path)
    model = Llama.from_pretrained(tmp_path)
    assert model.config.stop == (end, 100)
    expected, written = theirs.generate(prompt, **options), model.generate(prompt, 60)
    assert torch.equal(written, expected) and written.shape[1] < 63
    assert model.generate(prompt, 60, stop=()).shape[1] == 63
    with pytest.raises(ValueError, match="generate: the model is in training mode"):
        model.train().generate(prompt, 3)


@pytest.mark.parametrize("peer", PEERS)
@torch.no_grad()
def test_transformers_reads_saved_checkpoints(transformers: Any, tmp_path: Path, peer: str) -> None:
    theirs = peer_of(transformers, peer)
    theirs.save_pretrained(tmp_path / "theirs")
    model = ours(peer).from_pretrained(tmp_path / "theirs")
    model.to_pretrained(tmp_path / "ours")
    read, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(info.values()), info
    agree(model, read.eval())
    again = ours(peer).from_pretrained(tmp_path / "ours")
    assert again.config == model.config
    state, first = again.state_dict(), model.state_dict()
    assert state.keys() == first.keys()
    assert all(torch.equal(state[name], first[name]) for name in state)


@pytest.mark.parametrize(
    ("peer", "kind"), [("GPT-2", "GPT2Model"), ("GPT-2", "GPT2ForSequenceClassification"), ("Llama", "LlamaModel"), ("Mistral", "MistralModel")]
)  # fmt: skip
@torch.no_grad()
def test_bare_models_of_transformers_are_read(transformers: Any, tmp_path: Path, peer: str, kind: str) -> None:
    theirs = peer_of(transformers, peer, kind)
    theirs.save_pretrained(tmp_path, max_shard_size="5KB")
    model = ours(peer).from_pretrained(tmp_path)
    ids = torch.randint(0, 101, (3, 41))
    body = getattr(theirs, "transformer", theirs)
    assert difference(model(ids), body(ids).last_hidden_state) < 2e-5
    if peer == "GPT-2":
        return
    with pytest.raises(ValueError, match="logits needs a head, got a model without one"):
        model.logits(model(ids))
    model.to_pretrained(tmp_path / "ours")
    read, info = transformers.AutoModel.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert type(read).__name__ == kind
    assert not any(info.values()), info
    assert difference(model(ids), read.eval()(ids).last_hidden_state) < 2e-5


@pytest.mark.parametrize("kind", ["llama3", "linear"])
@pytest.mark.parametrize("factor", [1.0, 2.5, 32.0])
def test_rope_scaling_agrees_with_transformers(transformers: Any, kind: str, factor: float) -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    settings = {"rope_type": kind, "rope_theta": 5e5, "factor": factor}
    scaling = RopeScaling(factor)
    if kind == "llama3":
        settings |= {"original_max_position_embeddings": 8192, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        scaling = RopeScaling(factor, 8192)
    config = transformers.LlamaConfig(
        hidden_size=2048, num_attention_heads=32, max_position_embeddings=131072, rope_parameters=settings
    )
    expected, _ = ROPE_INIT_FUNCTIONS[kind](config, "cpu")
    plain = 5e5 ** (-torch.arange(0, 64, 2, dtype=torch.float64) / 64)
    assert torch.allclose(scaling(plain).float(), expected, rtol=1e-5, atol=0)
    assert "scaling=RopeScaling(factor=" in repr(Rotary(scaling=scaling))


@pytest.mark.parametrize("size", gpt.SIZES | llama.SIZES)
def test_sizes_agree_with_transformers(transformers: Any, size: str) -> None:
    """transformers counts the same parameters, from the config.json of such a model."""
    from polyhead.models import checkpoint_files

    if size in gpt.SIZES:
        config, fields, kind = (
            gpt.SIZES[size],
            checkpoint_files.config_json_fields(gpt.CONFIG_FIELDS, gpt.SIZES[size]),
            "GPT2LMHeadModel",
        )
        own: type[CausalModel] = Gpt
    else:
        config, fields, kind = (
            llama.SIZES[size],
            checkpoint_files.config_json_fields(llama.CONFIG_FIELDS, llama.SIZES[size]),
            "LlamaForCausalLM",
        )  # type: ignore[assignment]
        fields |= {"tie_word_embeddings": config.head == "tied"}  # type: ignore[attr-defined]
        own = Llama
    layers = 2
    with torch.device("meta"):
        model = own(config._replace(layers=layers))  # type: ignore[call-arg]
        settings = getattr(transformers, kind).config_class(
            **{**fields, "n_layer" if size in gpt.SIZES else "num_hidden_layers": layers}
        )
        peer = getattr(transformers, kind)(settings)
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in peer.parameters())
    assert model(torch.empty(2, 7, dtype=torch.long, device="meta")).shape == (2, 7, config.d_model)
