"""Target `backend`: models of transformers on "polyhead" against the same models on "eager": states, gradients, texts."""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Callable
from random import Random
from typing import Any

# before transformers is imported: no network access
os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import transformers as hf
from torch import Tensor

from fuzz.case import Case as BaseCase
from fuzz.case import Mismatch
from fuzz.compare import error_ratio
from fuzz.run import Report
from polyhead.interop import huggingface

hf.logging.set_verbosity_error()
huggingface.register()


@dataclasses.dataclass(frozen=True, repr=False)
class Case(BaseCase):
    """An architecture with its sizes, and a batch."""

    kind: str = "bert"
    heads: int = 1
    group: int = 1
    dim: int = 2
    layers: int = 1
    d_hidden: int = 2
    window: int = 4
    batch: int = 1
    tokens: int = 2
    padding: str = "none"
    requires_grad: bool = False
    new_tokens: int = 0


Settings = dict[str, Any]


def _encoder(case: Case) -> Settings:
    return {
        "vocab_size": 31, "hidden_size": case.heads * case.dim, "num_hidden_layers": case.layers, "num_attention_heads": case.heads,
        "intermediate_size": case.d_hidden, "max_position_embeddings": 64, "initializer_range": 0.3, "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }  # fmt: skip


def _decoder(case: Case) -> Settings:
    return {
        "vocab_size": 31, "hidden_size": case.heads * case.dim, "num_hidden_layers": case.layers, "num_attention_heads": case.heads,
        "num_key_value_heads": case.heads // case.group, "intermediate_size": case.d_hidden, "max_position_embeddings": 64,
        "initializer_range": 0.3, "head_dim": case.dim, "bos_token_id": 1, "eos_token_id": None, "pad_token_id": None,
    }  # fmt: skip


def _qwen2(case: Case) -> Settings:
    # every layer except the first has a window
    more = {"use_sliding_window": True, "sliding_window": case.window, "max_window_layers": 1}
    return {name: value for name, value in _decoder(case).items() if name != "head_dim"} | more


def _neox(case: Case) -> Settings:
    own = ("num_key_value_heads", "head_dim")
    plain = {name: value for name, value in _decoder(case).items() if name not in own}
    return plain | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}}


def _gpt2(case: Case) -> Settings:
    return {
        "vocab_size": 31, "n_embd": case.heads * case.dim, "n_layer": case.layers, "n_head": case.heads, "n_inner": case.d_hidden,
        "n_positions": 64, "initializer_range": 0.3, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 1,
        "eos_token_id": None, "pad_token_id": None,
    }  # fmt: skip


def _opt(case: Case) -> Settings:
    return {
        "vocab_size": 31, "hidden_size": case.heads * case.dim, "word_embed_proj_dim": case.heads * case.dim, "ffn_dim": case.d_hidden,
        "num_hidden_layers": case.layers, "num_attention_heads": case.heads, "max_position_embeddings": 64, "init_std": 0.3,
        "dropout": 0.0, "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 1,
    }  # fmt: skip


def _t5(case: Case) -> Settings:
    return {
        "vocab_size": 31, "d_model": case.heads * case.dim, "d_kv": case.dim, "d_ff": case.d_hidden, "num_layers": case.layers,
        "num_heads": case.heads, "dropout_rate": 0.0, "initializer_factor": 1.5, "relative_attention_num_buckets": 8,
        "decoder_start_token_id": 0,
    }  # fmt: skip


def _bart(case: Case) -> Settings:
    both = {"layers": case.layers, "attention_heads": case.heads, "ffn_dim": case.d_hidden}
    sides = {f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in both.items()}
    return {
        **sides, "vocab_size": 31, "d_model": case.heads * case.dim, "max_position_embeddings": 64, "init_std": 0.3, "dropout": 0.0,
        "decoder_start_token_id": 0, "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 1, "forced_eos_token_id": None,
    }  # fmt: skip


def _image(case: Case) -> Settings:
    left = ("vocab_size", "max_position_embeddings")
    own = {"image_size": 3 * case.tokens, "patch_size": 3, "num_channels": 1}
    return {name: value for name, value in _encoder(case).items() if name not in left} | own


def _distilbert(case: Case) -> Settings:
    return {
        "vocab_size": 31, "dim": case.heads * case.dim, "n_layers": case.layers, "n_heads": case.heads, "hidden_dim": case.d_hidden,
        "max_position_embeddings": 64, "dropout": 0.0, "attention_dropout": 0.0, "initializer_range": 0.3,
    }  # fmt: skip


# by name: the configuration class, and its settings; models in WRITERS generate text
ENCODERS: dict[str, tuple[Any, Callable[[Case], Settings]]] = {
    "bert": (hf.BertConfig, _encoder),
    "roberta": (hf.RobertaConfig, lambda case: _encoder(case) | {"pad_token_id": 1}),
    "electra": (hf.ElectraConfig, lambda case: _encoder(case) | {"embedding_size": case.heads * case.dim}),
    "distilbert": (hf.DistilBertConfig, _distilbert),
    "vit": (hf.ViTConfig, _image),
    "deit": (hf.DeiTConfig, _image),
    "t5": (hf.T5Config, _t5),
    "bart": (hf.BartConfig, _bart),
}
WRITERS: dict[str, tuple[Any, Callable[[Case], Settings]]] = {
    "gpt2": (hf.GPT2Config, _gpt2),
    "gpt_neox": (hf.GPTNeoXConfig, _neox),
    "opt": (hf.OPTConfig, _opt),
    "llama": (hf.LlamaConfig, _decoder),
    "mistral": (hf.MistralConfig, lambda case: _decoder(case) | {"sliding_window": case.window}),
    "gemma2": (
        hf.Gemma2Config,
        lambda case: (
            _decoder(case) | {"sliding_window": case.window, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 3}
        ),
    ),
    "qwen2": (hf.Qwen2Config, _qwen2),
    "phi3": (hf.Phi3Config, lambda case: _decoder(case) | {"sliding_window": case.window}),
}
IMAGES, PAIRS = ("vit", "deit"), ("t5", "bart")


def draw(random: Random) -> Case:
    """Draw a configuration that transformers can build."""
    kind = random.choice((*ENCODERS, *WRITERS))
    heads = random.choice((1, 2, 3, 4))
    return Case(
        seed=random.randrange(100_000), kind=kind, heads=heads, dim=random.choice((4, 8)), layers=random.choice((1, 2)),
        group=random.choice([n for n in range(1, heads + 1) if heads % n == 0]), d_hidden=random.choice((3, 8)),
        window=random.randint(2, 10), batch=random.randint(1, 3), tokens=random.randint(1, 4 if kind in IMAGES else 18),
        padding="none" if kind in IMAGES else random.choice(("none", "right", "left")), requires_grad=random.random() < 0.5,
        new_tokens=random.randint(1, 4) if kind in WRITERS and random.random() < 0.3 else 0,
    )  # fmt: skip


def check(case: Case) -> Report:
    """Compare the two attention implementations; raise `Mismatch` if they differ."""
    torch.set_num_threads(1)
    torch.manual_seed(case.seed)
    with warnings.catch_warnings():
        # warnings of transformers
        warnings.simplefilter("ignore")
        theirs, ours = _models(case)
        max_error = _compare(case, theirs, ours)
        if case.new_tokens:
            _compare_generated(case, theirs, ours)
    return Report(frozenset({case.kind}), max_error)


def _models(case: Case) -> tuple[Any, Any]:
    """One model with two attention implementations."""
    config, settings = (ENCODERS | WRITERS)[case.kind]
    auto = hf.AutoModelForCausalLM if case.kind in WRITERS else hf.AutoModel
    made = [
        auto.from_config(config(**settings(case)), attn_implementation=name).eval() for name in ("eager", "polyhead")
    ]
    made[1].load_state_dict(made[0].state_dict())
    return made[0], made[1]


def _batch(case: Case) -> tuple[dict[str, Tensor], Tensor | None]:
    """The arguments of a call, and which tokens of the output are real; None for all."""
    if case.kind in IMAGES:
        return {"pixel_values": torch.randn(case.batch, 1, 3 * case.tokens, 3 * case.tokens)}, None
    given = {"input_ids": torch.randint(3, 31, (case.batch, case.tokens))}
    if case.kind in PAIRS:
        given["decoder_input_ids"] = torch.randint(3, 31, (case.batch, 1 + case.tokens // 2))
    if case.padding == "none":
        return given, None
    lengths, at = torch.randint(1, case.tokens + 1, (case.batch, 1)), torch.arange(case.tokens)
    real = at < lengths if case.padding == "right" else at >= case.tokens - lengths
    given["attention_mask"] = real.long()
    return given, None if case.kind in PAIRS else real


def _compare(case: Case, theirs: Any, ours: Any) -> float:
    """Compare all hidden states of real tokens, and the gradients of all parameters."""
    given, real = _batch(case)
    found = []
    for model in (theirs, ours):
        with torch.set_grad_enabled(case.requires_grad):
            out = model(**given, output_hidden_states=True)
            states = getattr(out, "decoder_hidden_states", None) or out.hidden_states
            states = [x if real is None else x[real] for x in states]
        if case.requires_grad:
            last = states[-1]
            (last * torch.linspace(-1, 1, last.numel()).view_as(last)).sum().backward()
        found.append(([x.detach().double() for x in states], {n: p.grad for n, p in model.named_parameters()}))
    (expected, gradients), (got, ours_gradients) = found
    max_error = 0.0
    for a, b in zip(got, expected, strict=True):
        max_error = max(max_error, error_ratio(case.kind, "hidden states", a, b, _bound(b)))
    scale = max((float(g.abs().max()) for g in gradients.values() if g is not None and g.numel()), default=0.0)
    for name, expected_gradient in gradients.items():
        gradient = ours_gradients[name]
        if expected_gradient is None or gradient is None:
            if case.requires_grad and (expected_gradient is None) != (gradient is None):
                raise Mismatch(case.kind, "gradients", f"{name} has a gradient with one attention implementation only")
            continue
        max_error = max(
            max_error,
            error_ratio(case.kind, "gradients", gradient, expected_gradient.double(), _bound(expected_gradient, scale)),
        )
    return max_error


def _bound(expected: Tensor, scale: float = 0.0) -> Tensor:
    size = max(1.0, scale, float(expected.abs().max()) if expected.numel() else 0.0)
    return torch.full_like(expected, 2e-4 * size, dtype=torch.float64)


def _compare_generated(case: Case, theirs: Any, ours: Any) -> None:
    """Compare greedy texts generated with caches; where a token differs, two must be about equally likely."""
    given, _ = _batch(dataclasses.replace(case, padding="left" if case.padding != "none" else "none"))
    options = {
        "max_new_tokens": case.new_tokens,
        "do_sample": False,
        "pad_token_id": 0,
        "return_dict_in_generate": True,
        "output_logits": True,
    }
    a, b = (model.generate(**given, **options) for model in (theirs, ours))
    for step in range(case.new_tokens):
        for row in range(case.batch):
            place = case.tokens + step
            same_before = torch.equal(a.sequences[row, :place], b.sequences[row, :place])
            likely = a.logits[step][row].topk(2).values
            clear = float(likely[0] - likely[1]) > 1e-3 * (1 + float(likely.abs().max()))
            if same_before and clear and a.sequences[row, place] != b.sequences[row, place]:
                raise Mismatch(case.kind, "generated text", f"{b.sequences.tolist()}, expected {a.sequences.tolist()}")
