"""GPT, Llama and Mistral against transformers' own: hidden states, logits, what is written; and what their calls refuse."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

# before transformers is imported: nothing here may ask the network
os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
from torch import Tensor, nn

import polyhead
from polyhead import Causal, Padding, Segments
from polyhead.models import Gpt, Llama, gpt, llama
from polyhead.models.causal_model import CausalModel
from polyhead.position import RopeScaling, Rotary

GPT = gpt.Config(d_model=15, heads=3, layers=2, d_feedforward=23, vocab=101, positions=137)
LLAMA = llama.Config(d_model=18, heads=6, layers=3, d_feedforward=29, vocab=101, positions=137, kv_heads=2, head_dim=10)
CONFIGS: dict[str, Any] = {
    "gpt": GPT,
    "llama": LLAMA,
    "tied": LLAMA._replace(head="tied", scaling=RopeScaling(8.0, 64)),
    "mistral": LLAMA._replace(window=7),
}

# what transformers calls the numbers above
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
    "Llama, one key a head": ("Llama", {**_llama, "num_key_value_heads": None, "head_dim": 4, "rms_norm_eps": 1e-2}),
    "Llama, biased": ("Llama", {**_llama, "attention_bias": True, "mlp_bias": True, "hidden_act": "gelu_new"}),
    "Llama 3.2": ("Llama", {**_llama, "tie_word_embeddings": True, "rope_parameters": _llama3}),
    "Llama, linear": ("Llama", {**_llama, "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}}),
    "Mistral": ("Mistral", {**_llama, "sliding_window": 7}),
    "Mistral, no window": ("Mistral", {**_llama, "sliding_window": None, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
}  # fmt: skip


@pytest.fixture(scope="module")
def transformers() -> Any:
    return pytest.importorskip("transformers", reason="parity is tested against transformers: pip install transformers")


def drawn(module: Any) -> Any:
    """A module none of whose parameters is zero or one, and whose tokens to come are never nearly equally likely."""
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return module.eval()


def peer_of(transformers: Any, peer: str, kind: str = "") -> Any:
    family, settings = PEERS[peer]
    heads = {"GPT2": "GPT2LMHeadModel", "Llama": "LlamaForCausalLM", "Mistral": "MistralForCausalLM"}
    config = getattr(transformers, f"{family}Config")(**copy.deepcopy(settings), bos_token_id=1, eos_token_id=None)
    return drawn(getattr(transformers, kind or heads[family])(config))


def ours(peer: str) -> type[Gpt] | type[Llama]:
    return Gpt if peer.startswith("GPT") else Llama


def built(name: str) -> Any:
    return drawn((Gpt if name == "gpt" else Llama)(CONFIGS[name]))


def difference(a: Tensor, b: Tensor) -> float:
    assert a.shape == b.shape
    return float((a - b).detach().abs().max())


def agree(model: CausalModel, peer: Any) -> None:
    """Hidden states, logits and 64 tokens that are written."""
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
def test_checkpoints_of_transformers(transformers: Any, tmp_path: Path, peer: str) -> None:
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
    # a part at a time, with holes
    real[0, 3] = False
    whole, caches = model(ids, Padding(real) & Causal()), model.caches(4, 11)
    parts = [model(ids[:, a:b], Padding(real[:, :b]), caches=caches) for a, b in ((0, 6), (6, 7), (7, 11))]
    assert difference(torch.cat(parts, 1)[real], whole[real]) < 2e-5


@torch.no_grad()
def test_padding_that_new_tokens_cannot_follow() -> None:
    model, ids = built("gpt"), torch.randint(0, 101, (2, 5))
    for over in (Padding([5, 3]), Causal(), Padding(torch.ones(2, 4).bool())):
        with pytest.raises(
            ValueError, match=r"over: it is .*; it must be Padding\(real\).*of the shape of ids, \(2, 5\)"
        ):
            model.generate(ids, 3, over=over)
    for gap in (4, 2):
        real = torch.ones(2, 5).bool()
        real[0, gap] = False
        with pytest.raises(ValueError, match="over: prompts must be padded at the left"):
            model.generate(ids, 3, over=Padding(real))


@torch.no_grad()
def test_a_text_ends_where_its_configuration_says(transformers: Any, tmp_path: Path) -> None:
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
def test_checkpoints_for_transformers(transformers: Any, tmp_path: Path, peer: str) -> None:
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
def test_bare_models_of_transformers(transformers: Any, tmp_path: Path, peer: str, kind: str) -> None:
    theirs = peer_of(transformers, peer, kind)
    theirs.save_pretrained(tmp_path, max_shard_size="5KB")
    model = ours(peer).from_pretrained(tmp_path)
    ids = torch.randint(0, 101, (3, 41))
    body = getattr(theirs, "transformer", theirs)
    assert difference(model(ids), body(ids).last_hidden_state) < 2e-5
    if peer == "GPT-2":
        return
    with pytest.raises(ValueError, match="head: this model has none"):
        model.logits(model(ids))
    model.to_pretrained(tmp_path / "ours")
    read, info = transformers.AutoModel.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert type(read).__name__ == kind
    assert not any(info.values()), info
    assert difference(model(ids), read.eval()(ids).last_hidden_state) < 2e-5


@pytest.mark.parametrize("kind", ["llama3", "linear"])
@pytest.mark.parametrize("factor", [1.0, 2.5, 32.0])
def test_stretched_turns_are_transformers(transformers: Any, kind: str, factor: float) -> None:
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


def test_turns_that_cannot_be_stretched() -> None:
    for bad in (
        {"factor": 0.0},
        {"factor": 2.0, "original_length": 0},
        {"factor": 2.0, "original_length": 8, "low": 4.0},
    ):
        with pytest.raises(ValueError, match="RopeScaling: "):
            RopeScaling(**bad)
    with pytest.raises(ValueError, match=r"Rotary: base must be a number in \(0, inf\), got 0"):
        Rotary(base=0)
    with pytest.raises(
        ValueError, match=r"Rotary: scaling must be a RopeScaling, such as RopeScaling\(2\.0\), or None, got 2\.0"
    ):
        Rotary(scaling=2.0)  # type: ignore[arg-type]


@pytest.mark.parametrize("size", gpt.SIZES | llama.SIZES)
def test_sizes_are_transformers(transformers: Any, size: str) -> None:
    """Counted the same by transformers, from the config.json that such a model would have."""
    from polyhead.models import checkpoint_files as files

    if size in gpt.SIZES:
        config, fields, kind = gpt.SIZES[size], files.named(gpt.FIELDS, gpt.SIZES[size]), "GPT2LMHeadModel"
        own: type[CausalModel] = Gpt
    else:
        config, fields, kind = llama.SIZES[size], files.named(llama.FIELDS, llama.SIZES[size]), "LlamaForCausalLM"  # type: ignore[assignment]
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


def test_the_largest_is_built_quickly() -> None:
    """GPT-3 on the meta device, in a process of its own: torch's compiler is not loaded for it."""
    code = (
        "import sys, time, torch\nfrom polyhead.models import gpt\nstart = time.perf_counter()\n"
        "with torch.device('meta'): gpt.Gpt(gpt.SIZES['gpt3'])\n"
        "print(time.perf_counter() - start)\nassert 'torch._dynamo' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    # 0.1 s on an idle machine
    assert float(done.stdout) < 1


def test_new_models_start_as_theirs() -> None:
    model = Gpt(gpt.Config(64, 4, 8, vocab=999))
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            deviation = 0.02 / 4 if "o_proj" in name or "down" in name else 0.02
            assert 0.95 * deviation < parameter.std() < 1.05 * deviation, name
        else:
            assert torch.equal(parameter, torch.full_like(parameter, float("norm.weight" in name))), name
    new = Llama(llama.Config(64, 4, 2, 128, vocab=999))
    assert all(0.019 < p.std() < 0.021 for p in new.parameters() if p.dim() == 2)


@pytest.mark.parametrize("name", CONFIGS)
def test_names(name: str) -> None:
    model = built(name)
    names = [name for name, module in model.named_modules() if type(module).__name__ == "MultiHeadAttention"]
    assert names == [f"layers.{n}.self_attn" for n in range(model.config.layers)]


@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_a_text_a_part_at_a_time(name: str) -> None:
    model = built(name)
    ids = torch.randint(0, 101, (2, 23))
    whole = model(ids)
    caches = model.caches(2, 23)
    parts = [model(part, caches=caches) for part in ids.split([5, 1, 1, 9, 7], 1)]
    assert difference(torch.cat(parts, 1), whole) < 2e-5
    assert difference(model(ids[0]), whole[0]) < 2e-5
    alone = model.caches(None, 23)
    assert difference(torch.cat([model(part, caches=alone) for part in ids[0].split(6)]), whole[0]) < 2e-5


@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_nobody_looks_ahead(name: str) -> None:
    model = built(name)
    ids = torch.randint(0, 101, (2, 23))
    other = torch.cat((ids[:, :11], torch.randint(0, 101, (2, 12))), 1)
    assert torch.allclose(model(ids)[:, :11], model(other)[:, :11], atol=1e-5)
    assert torch.allclose(model(ids, Causal()), model(ids), atol=1e-5)
    if name == "mistral":
        # 3 layers reach 3 · 6 back
        far = ids.clone()
        far[:, 0] = (ids[:, 0] + 1) % 101
        assert torch.allclose(model(far)[:, 19:], model(ids)[:, 19:], atol=1e-5)
        assert not torch.allclose(model(far)[:, 18], model(ids)[:, 18], atol=1e-5)


@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_padding_and_documents(name: str) -> None:
    model = built(name)
    texts = [torch.randint(0, 101, (n,)) for n in (5, 31, 1)]
    ids = nn.utils.rnn.pad_sequence(texts, batch_first=True)
    hidden = model(ids, over=Padding([len(text) for text in texts]))
    for row, text in enumerate(texts):
        assert difference(hidden[row, : len(text)], model(text)) < 2e-5
    mask = torch.ones(31, 31, dtype=torch.bool)
    assert difference(model(ids, mask), model(ids)) < 2e-5
    if name != "gpt":
        # rotary positions are relative: two documents in one row read as each alone
        packed = torch.cat(texts[:2])
        parts = model(packed, over=Segments(torch.tensor([0] * 5 + [1] * 31)))
        assert difference(parts[5:], model(texts[1])) < 1e-4


@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_written_tokens_are_the_likeliest(name: str) -> None:
    """Without a cache, each token by a pass of its own; and the caches are as long as is needed."""
    model = built(name)
    ids = torch.randint(0, 101, (2, 4))
    slow = ids
    for _ in range(20):
        slow = torch.cat((slow, model.logits(model(slow)[:, -1]).argmax(-1, keepdim=True)), 1)
    assert torch.equal(model.generate(ids, 20), slow)
    assert torch.equal(model.generate(ids.int(), 20), slow)
    assert torch.equal(model.generate(ids, 1), slow[:, :5])
    assert model.generate(ids[:, :1], 136).shape == (2, 137)
    assert not model.generate(ids, 3).is_inference()


def test_stops_and_draws() -> None:
    model = built("gpt")
    ids = torch.randint(0, 101, (2, 4))
    greedy = model.generate(ids, 12)
    stop = int(greedy[0, 6])
    stopped = model.generate(ids[:1], 12, stop=stop)[0, 4:]
    end = stopped.tolist().index(stop)
    assert torch.equal(stopped, greedy[0, 4 : 4 + end + 1])
    assert torch.equal(model.generate(ids, 12, temperature=1.0, top_k=1), greedy)
    drawn_twice = [model.generate(ids, 12, temperature=1.5, generator=torch.Generator().manual_seed(5)) for _ in "ab"]
    assert torch.equal(*drawn_twice)


@pytest.mark.parametrize("name", CONFIGS)
def test_training(name: str) -> None:
    """Every parameter learns, and dropout acts in training alone; what was written may be learned from."""
    config = CONFIGS[name]._replace(attention_dropout=0.1)
    model: Any = (Gpt if name == "gpt" else Llama)(config)
    ids = model.eval().generate(torch.randint(0, 101, (4, 7)), 9)
    model.train()
    hidden = model(ids)
    assert not torch.equal(hidden, model(ids))
    model.logits(hidden).logsumexp(-1).sum().backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    assert all(grad is not None and grad.isfinite().all() for grad in grads.values())


@pytest.mark.parametrize("name", CONFIGS)
def test_copies_and_compiling(name: str) -> None:
    model = built(name)
    ids = torch.randint(0, 101, (2, 13))
    expected = model(ids)
    assert torch.equal(copy.deepcopy(model)(ids), expected)
    assert torch.equal(pickle.loads(pickle.dumps(model))(ids), expected)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert difference(compiled(ids), expected) < 1e-5


@pytest.mark.parametrize("rows", [1, 23])
@torch.no_grad()
def test_the_head_is_called(rows: int) -> None:
    """It may be hooked, given a bias or replaced."""
    model = built("llama")
    hidden = torch.randn(rows, 18)
    plain = model.logits(hidden)
    seen: list[Tensor] = []
    hook = model.head.register_forward_hook(lambda module, args, out: seen.append(out))
    model.logits(hidden)
    hook.remove()
    assert torch.allclose(seen[0], plain, atol=1e-5)
    model.head.bias = nn.Parameter(torch.randn(101))
    assert torch.allclose(model.logits(hidden), plain + model.head.bias, atol=1e-5)
    model.head = nn.Sequential(model.head, nn.Tanh())
    assert torch.allclose(model.logits(hidden), torch.tanh(plain + model.head[0].bias), atol=1e-5)


def test_heads_are_seen_while_it_writes() -> None:
    model = built("llama")
    with polyhead.capture(model) as seen:
        model.generate(torch.randint(0, 101, (1, 4)), 2)
    first, last = seen["layers.0.self_attn"], seen["layers.2.self_attn#1"]
    assert (first.shape, last.shape) == ((1, 6, 4, 4), (1, 6, 1, 5))
    assert torch.allclose(last.weights.sum(-1), torch.ones(1, 6, 1))


@pytest.mark.parametrize("name", ["gpt", "mistral"])
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: m(torch.zeros(2, 5)), "ids: they are torch.float32; they must be torch.int64 or torch.int32"),
        (lambda m: m(torch.tensor([3, 101])), "ids: they lie between 3 and 101; they must be the vocabulary's, 0 to 100"),
        (lambda m: m(torch.tensor(3)), r"ids must be a tensor of ids \(\.\.\., tokens\), got shape \(\)"),
        (lambda m: m(torch.zeros(2, 138).long()), r"ids: their shape is \(2, 138\); .* with at most 137 tokens"),
        (lambda m: m(torch.zeros(2, 5).long(), caches=m.caches(2, 9)[1:]), "caches: there are [12]; there must be one for each of [23] layers"),
        (lambda m: m(torch.zeros(2, 5).long(), caches=m.caches(2, 4)), "cache: 5 more do not fit"),
        (lambda m: m.generate(torch.zeros(2, 0).long(), 5), "ids: the prompt is empty"),
        (lambda m: m.generate(torch.zeros(5).long(), 5), r"ids: their shape is \(5,\); it must be \(batch, tokens\)"),
        (lambda m: m.generate(torch.zeros(1, 138).long(), 5), "ids: the prompt has 138 tokens; the model has positions for 137"),
        (lambda m: m.generate(torch.zeros(1, 100).long(), 38), "max_new_tokens: it is 38, .* so it must be at most 37"),
        (lambda m: m.generate(torch.zeros(1, 5).long(), 0), r"max_new_tokens must be an integer in \[1, 2147483647\], got 0"),
        (lambda m: m.generate(torch.full((1, 5), 101), 5), "ids: they lie between 101 and 101; they must be the vocabulary's"),
        (lambda m: m.generate(torch.zeros(1, 5).long(), 5, top_k=3), "top_k, top_p: .* pass a temperature"),
    ],
)  # fmt: skip
def test_bad_calls(name: str, call: Any, message: str) -> None:
    with torch.no_grad(), pytest.raises(ValueError, match=message):
        call(built(name))


def test_caches_after_the_positions() -> None:
    model = built("gpt")
    caches = model.caches(1, 200)
    with torch.no_grad():
        model(torch.zeros(1, 130).long(), caches=caches)
        with pytest.raises(ValueError, match=r"\(1, 8\) after the 130 in the caches; .* with at most 7 tokens"):
            model(torch.zeros(1, 8).long(), caches=caches)


def test_bad_sizes() -> None:
    with pytest.raises(ValueError, match="heads: 4 does not divide d_model 15"):
        Gpt(GPT._replace(heads=4))
    with pytest.raises(ValueError, match="heads: 5 does not divide d_model 18"):
        Llama(LLAMA._replace(heads=5, head_dim=None))
    with pytest.raises(ValueError, match="kv_heads: 4 does not divide num_heads 6"):
        Llama(LLAMA._replace(kv_heads=4))
    with pytest.raises(ValueError, match="head_dim is 3; it must be even"):
        Llama(LLAMA._replace(head_dim=3))
    with pytest.raises(ValueError, match="activation: it is 'tanh'; it must be one of relu, gelu, "):
        Gpt(GPT._replace(activation="tanh"))
