"""Small models of transformers with random weights, with eager and polyhead attention, and batches for them."""

from __future__ import annotations

import copy
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoModel, PreTrainedConfig, PreTrainedModel

from polyhead.interop import huggingface

huggingface.register()
transformers.logging.set_verbosity_error()

VOCABULARY, BATCH, ITEMS, WINDOW = 97, 3, 19, 5
# weights so large that heads differ
LARGE_WEIGHTS = {"vocab_size": VOCABULARY, "initializer_range": 0.3}
DEEP = {"hidden_size": 48, "intermediate_size": 36, "num_hidden_layers": 2, "max_position_embeddings": 160}
GROUPED = {**LARGE_WEIGHTS, **DEEP, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 10}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}

CONFIGS: dict[str, PreTrainedConfig] = {
    "bert": transformers.BertConfig(**LARGE_WEIGHTS, **DEEP, **NO_DROPOUT, num_attention_heads=3),
    "gpt2": transformers.GPT2Config(
        **LARGE_WEIGHTS, n_embd=33, n_layer=2, n_head=3, n_positions=160, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    ),
    "llama": transformers.LlamaConfig(**GROUPED),
    "mistral": transformers.MistralConfig(**GROUPED, sliding_window=WINDOW),
    "gemma2": transformers.Gemma2Config(**GROUPED, sliding_window=WINDOW, attn_logit_softcapping=1.5),
    "gpt_oss": transformers.GptOssConfig(
        **GROUPED, sliding_window=WINDOW, num_local_experts=2, num_experts_per_tok=1,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "modernbert": transformers.ModernBertConfig(
        **LARGE_WEIGHTS, **DEEP, num_attention_heads=3, local_attention=2 * WINDOW, global_attn_every_n_layers=2, pad_token_id=0
    ),
    "t5": transformers.T5Config(
        vocab_size=VOCABULARY, d_model=33, d_kv=7, d_ff=31, num_layers=2, num_heads=3, dropout_rate=0.0,
        initializer_factor=1.5, relative_attention_num_buckets=8, decoder_start_token_id=0,
    ),
    "bart": transformers.BartConfig(
        vocab_size=VOCABULARY, d_model=33, encoder_layers=1, decoder_layers=2, encoder_attention_heads=3,
        decoder_attention_heads=3, encoder_ffn_dim=31, decoder_ffn_dim=31, max_position_embeddings=160, init_std=0.3,
        dropout=0.0,
    ),
    "vit": transformers.ViTConfig(
        **NO_DROPOUT, hidden_size=33, num_hidden_layers=2, num_attention_heads=3, intermediate_size=31, image_size=15,
        patch_size=5, initializer_range=0.3,
    ),
}  # fmt: skip
TEXT = [name for name in CONFIGS if name != "vit"]


def pair(name: str, kind: Any = AutoModel, **options: Any) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A model with eager attention and the same model with ours."""
    made = []
    for attention in ("eager", "polyhead"):
        config = copy.deepcopy(CONFIGS[name])
        for option, value in options.items():
            setattr(config, option, value)
        made.append(kind.from_config(config, attn_implementation=attention).eval())
    theirs, ours = made
    for parameter_name, parameter in theirs.named_parameters():
        if parameter_name.endswith("sinks"):
            torch.nn.init.normal_(parameter)
    ours.load_state_dict(theirs.state_dict())
    assert (theirs.config._attn_implementation, ours.config._attn_implementation) == ("eager", "polyhead")
    return theirs, ours


def padding(left: bool = False) -> Tensor:
    """A row without padding, one padded on the left, and one padded on the right, or on the left if `left`."""
    real = torch.ones(BATCH, ITEMS, dtype=torch.long)
    real[1, :7] = 0
    real[2, slice(0, 2) if left else slice(ITEMS - 4, ITEMS)] = 0
    return real


def batch(name: str, padded: bool, left: bool = False) -> dict[str, Tensor]:
    """The arguments of a model."""
    if name == "vit":
        return {"pixel_values": torch.randn(BATCH, 3, 15, 15)}
    given = {"input_ids": torch.randint(3, VOCABULARY, (BATCH, ITEMS))}
    if padded:
        given["attention_mask"] = padding(left)
    if name in ("t5", "bart"):
        given["decoder_input_ids"] = torch.randint(3, VOCABULARY, (BATCH, ITEMS - 2))
    return given


def real(given: dict[str, Tensor], outputs: Tensor) -> Tensor:
    """The rows of an output that are not padding."""
    mask = given.get("attention_mask")
    whole = mask is None or mask.shape != outputs.shape[:2]
    return outputs.flatten(0, 1) if whole else outputs[mask.bool()]
