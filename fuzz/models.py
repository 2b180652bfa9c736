"""Target `models`: small BERT, GPT-2, Llama and Mistral models against transformers' own: loading, saving, padding, text generation."""

from __future__ import annotations

import dataclasses
import os
import tempfile
import warnings
from random import Random
from typing import Any

# before transformers is imported: no network access
os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import transformers
from torch import Tensor

from fuzz.case import Case as BaseCase
from fuzz.case import Mismatch
from fuzz.compare import error_ratio
from fuzz.run import Report
from polyhead import Padding
from polyhead.models import Bert, Gpt, Llama

transformers.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()

KINDS: dict[str, Any] = {
    "bert": (transformers.BertConfig, transformers.BertModel, transformers.BertForMaskedLM, Bert),
    "gpt2": (transformers.GPT2Config, transformers.GPT2Model, transformers.GPT2LMHeadModel, Gpt),
    "llama": (transformers.LlamaConfig, transformers.LlamaModel, transformers.LlamaForCausalLM, Llama),
    "mistral": (transformers.MistralConfig, transformers.MistralModel, transformers.MistralForCausalLM, Llama),
}


@dataclasses.dataclass(frozen=True, repr=False)
class Case(BaseCase):
    """A model, and a batch of texts."""

    kind: str = "bert"
    heads: int = 1
    group: int = 1
    dim: int = 2
    layers: int = 1
    d_hidden: int = 2
    vocab: int = 5
    activation: str = "gelu"
    eps: float = 1e-5
    # with an LM head, tied to the embeddings or separate
    head: bool = True
    tied: bool = True
    biased: bool = False
    by_layer: bool = False
    window: int | None = None
    rope: str = "default"
    batch: int = 1
    tokens: int = 2
    padding: str = "none"
    new_tokens: int = 0
    # whether the model is also saved again and read by transformers
    round_trip: bool = False


def draw(random: Random) -> Case:
    """Draw a configuration that transformers can build."""
    kind = random.choice(tuple(KINDS))
    has_rope = kind in ("llama", "mistral")
    heads = random.choice((1, 2, 3, 4))
    head = kind == "gpt2" or random.random() < 0.8
    causal = kind != "bert"
    return Case(
        seed=random.randrange(100_000), kind=kind, heads=heads,
        group=random.choice([n for n in range(1, heads + 1) if heads % n == 0]) if has_rope else 1,
        dim=random.choice((2, 4, 6, 8) if has_rope else (1, 2, 3, 5, 8)), layers=random.choice((1, 2, 3)),
        d_hidden=random.choice((1, 4, 7, 16)), vocab=random.randint(5, 40),
        activation=random.choice(("silu", "gelu", "relu") if has_rope else ("gelu", "gelu_new", "relu")),
        eps=random.choice((1e-5, 1e-2) if has_rope else (1e-12, 1e-5, 1e-2)), head=head, tied=not has_rope or random.random() < 0.5,
        biased=kind == "llama" and random.random() < 0.3, by_layer=kind == "gpt2" and random.random() < 0.3,
        # with a window of 1 the cache of transformers fails
        window=random.randint(2, 12) if kind == "mistral" and random.random() < 0.7 else None,
        rope=random.choice(("default", "linear", "llama3")) if has_rope else "default", batch=random.randint(1, 3),
        tokens=random.randint(1, 16), padding=random.choice(("none", "right", "left")),
        new_tokens=random.randint(1, 6) if causal and head and random.random() < 0.4 else 0, round_trip=random.random() < 0.25,
    )  # fmt: skip


def check(case: Case) -> Report:
    """Compare hidden states, logits and generated texts; raise `Mismatch` if they differ."""
    torch.set_num_threads(1)
    torch.manual_seed(case.seed)
    config, bare, headed, ours = KINDS[case.kind]
    with tempfile.TemporaryDirectory() as folder:
        theirs = _drawn((headed if case.head else bare)(_config(case, config)), _dtype(case))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            theirs.save_pretrained(folder)
        model = ours.from_pretrained(folder, dtype=None)
        if case.round_trip:
            model.to_pretrained(f"{folder}/round_trip")
            again = type(theirs).from_pretrained(
                f"{folder}/round_trip", attn_implementation="eager", dtype=_dtype(case)
            )
            _check_same(theirs, again)
    with torch.no_grad():
        max_error = _compare_states(case, theirs, model)
        if case.new_tokens:
            _compare_generated(case, theirs, model)
    return Report(frozenset({case.kind, *(("to_pretrained",) if case.round_trip else ())}), max_error)


def _config(case: Case, kind: Any) -> Any:
    """The configuration of transformers."""
    width, ends = case.heads * case.dim, {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": None}
    if case.kind == "gpt2":
        return kind(
            vocab_size=case.vocab, n_embd=width, n_layer=case.layers, n_head=case.heads, n_inner=case.d_hidden, n_positions=64,
            activation_function=case.activation, layer_norm_epsilon=case.eps, scale_attn_by_inverse_layer_idx=case.by_layer,
            attn_implementation="eager", **ends,
        )  # fmt: skip
    common = {
        "vocab_size": case.vocab, "hidden_size": width, "num_hidden_layers": case.layers, "num_attention_heads": case.heads,
        "intermediate_size": case.d_hidden, "max_position_embeddings": 64, "hidden_act": case.activation, "attn_implementation": "eager",
    }  # fmt: skip
    if case.kind == "bert":
        return kind(**common, layer_norm_eps=case.eps, pad_token_id=0)
    rope: dict[str, Any] = {"rope_type": case.rope, "rope_theta": 1000.0}
    if case.rope != "default":
        rope["factor"] = 4.0
    if case.rope == "llama3":
        rope |= {"original_max_position_embeddings": 16, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    own = (
        {"attention_bias": case.biased, "mlp_bias": case.biased}
        if case.kind == "llama"
        else {"sliding_window": case.window}
    )
    return kind(
        **common, **own, **ends, num_key_value_heads=case.heads // case.group, head_dim=case.dim, rms_norm_eps=case.eps,
        tie_word_embeddings=case.tied, rope_parameters=rope,
    )  # fmt: skip


def _dtype(case: Case) -> torch.dtype:
    # the softmax of transformers' Llama is in fp32: masks in fp64 are infinite there, and padded rows NaN
    return torch.float32 if case.kind in ("llama", "mistral") else torch.float64


def _drawn(model: Any, dtype: torch.dtype) -> Any:
    """Add noise to all parameters, so that none is zero or one and no two tokens are nearly equally likely."""
    model = model.to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


def _check_same(theirs: Any, again: Any) -> None:
    """Check that transformers reads the original tensors from a model that we saved."""
    state = again.state_dict()
    for name, tensor in theirs.state_dict().items():
        if name not in state or not torch.equal(state[name], tensor):
            raise Mismatch("to_pretrained", "tensors", f"{name} has changed")


def _real(case: Case) -> Tensor:
    """Which tokens are real: all of the first row, and at least one of every other."""
    lengths = torch.randint(1, case.tokens + 1, (case.batch,))
    lengths[0] = case.tokens
    at = torch.arange(case.tokens)
    if case.padding == "left":
        return at >= case.tokens - lengths[:, None]
    return at < lengths[:, None] if case.padding == "right" else torch.ones(case.batch, case.tokens, dtype=torch.bool)


def _compare_states(case: Case, theirs: Any, model: Any) -> float:
    """Compare hidden states and logits of real tokens."""
    ids, real = torch.randint(0, case.vocab, (case.batch, case.tokens)), _real(case)
    given: dict[str, Any] = {"attention_mask": real.long()}
    if case.kind == "bert":
        given["token_type_ids"] = torch.randint(0, 2, ids.shape)
        hidden = model(ids, Padding(real), token_types=given["token_type_ids"])
    else:
        # positions count from the first real token
        given["position_ids"] = (real.long().cumsum(-1) - 1).clamp(min=0)
        hidden = model(ids, None if case.padding == "none" else Padding(real))
    found = theirs(ids, **given, output_hidden_states=True)
    pairs = [("hidden states", hidden, found.hidden_states[-1])]
    if case.head:
        pairs.append(("logits", model.logits(hidden), found.logits))
    max_error = 0.0
    for what, got, expected in pairs:
        max_error = max(
            max_error, error_ratio(case.kind, what, got[real], expected[real], _bound(case, expected[real]))
        )
    return max_error


def _bound(case: Case, expected: Tensor) -> Tensor:
    share = 1e-4 if _dtype(case) == torch.float32 else 1e-10
    return torch.full_like(expected, share * (1 + float(expected.abs().max())))


def _compare_generated(case: Case, theirs: Any, model: Any) -> None:
    """Compare greedy texts generated with caches; where a token differs, two must be about equally likely."""
    ids, real = torch.randint(0, case.vocab, (case.batch, case.tokens)), _real(case)
    if case.padding == "right":
        real = real.flip(1)
    over = None if real.all() else Padding(real)
    got = model.generate(ids, case.new_tokens, over=over, stop=())
    expected = theirs.generate(
        ids, attention_mask=real.long(), max_new_tokens=case.new_tokens, min_new_tokens=case.new_tokens, do_sample=False, pad_token_id=0
    )  # fmt: skip
    if got.shape != expected.shape:
        raise Mismatch(case.kind, "generated shape", f"{tuple(got.shape)}, expected {tuple(expected.shape)}")
    for row in range(case.batch):
        differs = (got[row] != expected[row]).nonzero()
        if not len(differs):
            continue
        place = int(differs[0])
        before = expected[row : row + 1, :place][:, ~(torch.arange(place) < case.tokens - real[row].sum())]
        likely = theirs(before).logits[0, -1].topk(2).values
        if float(likely[0] - likely[1]) > 1e-4 * (1 + float(likely.abs().max())):
            raise Mismatch(
                case.kind, "generated text", f"row {row} is {got[row].tolist()}, expected {expected[row].tolist()}"
            )
