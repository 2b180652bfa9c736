"""GPT-2 (Radford 2019) from MultiHeadAttention: the model, its sizes, and the names in its checkpoints.

The input is the sum of token and position embeddings. Each layer is causal attention and a feed-forward network, each with a
LayerNorm on its input and a residual connection (pre-norm). GPT-3 has the same architecture, larger.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from polyhead._old_checkpoints import MODEL_KEYS, accept_old_state_dict_keys
from polyhead.linalg.skinny_gemm import linear
from polyhead.models import checkpoint_files, checkpoint_reading
from polyhead.models.causal_model import CausalModel
from polyhead.models.checkpoint_model import NamedTensors
from polyhead.nn import FeedForward, MultiHeadAttention, TransformerLayer
from polyhead.nn.embedding_helpers import uninitialised_embedding
from polyhead.score import Dot


class Config(NamedTuple):
    """The sizes and options of a GPT; the defaults are GPT-2's.

    `d_feedforward` is four times `d_model` by default. With `scale_by_layer` the scores of layer n are divided by n + 1.
    `start` and `stop` are the tokens around a text; by default `generate` ends at one of `stop`.
    """

    d_model: int
    heads: int
    layers: int
    d_feedforward: int | None = None
    vocab: int = 50257
    positions: int = 1024
    eps: float = 1e-5
    activation: str = "gelu_tanh"
    dropout: float = 0.1
    embedding_dropout: float = 0.1
    attention_dropout: float = 0.1
    scale_by_layer: bool = False
    start: int | None = None
    stop: tuple[int, ...] = ()


SIZES = {
    # Radford 2019
    "small": Config(768, 12, 12),
    "medium": Config(1024, 16, 24),
    "large": Config(1280, 20, 36),
    "xl": Config(1600, 25, 48),
    # Sanh 2019
    "distilgpt2": Config(768, 12, 6),
    # Brown 2020; every other layer has banded attention, which does not change the weights
    "gpt3": Config(12288, 96, 96, positions=2048),
}
# parameters of the released models; the GPT-2 paper has other numbers
PUBLISHED_PARAMETERS = {
    "small": "124M",
    "medium": "355M",
    "large": "774M",
    "xl": "1558M",
    "distilgpt2": "82M",
    "gpt3": "175B",
}

# the model's modules -> the modules of a checkpoint; {} is the index of a layer. There q, k and v are one tensor, `c_attn`.
CHECKPOINT_NAMES = {
    "token_embedding": "wte",
    "positions": "wpe",
    "layers.{}.self_attn_norm": "h.{}.ln_1",
    "layers.{}.self_attn.q_proj": "h.{}.attn.c_attn.q",
    "layers.{}.self_attn.k_proj": "h.{}.attn.c_attn.k",
    "layers.{}.self_attn.v_proj": "h.{}.attn.c_attn.v",
    "layers.{}.self_attn.o_proj": "h.{}.attn.c_proj",
    "layers.{}.feedforward_norm": "h.{}.ln_2",
    "layers.{}.feedforward.up": "h.{}.mlp.c_fc",
    "layers.{}.feedforward.down": "h.{}.mlp.c_proj",
    "norm": "ln_f",
}

# the fields of Config -> the fields of config.json
CONFIG_FIELDS = {
    "d_model": "n_embd",
    "heads": "n_head",
    "layers": "n_layer",
    "d_feedforward": "n_inner",
    "vocab": "vocab_size",
    "positions": "n_positions",
    "eps": "layer_norm_epsilon",
    "activation": "activation_function",
    "dropout": "resid_pdrop",
    "embedding_dropout": "embd_pdrop",
    "attention_dropout": "attn_pdrop",
    "scale_by_layer": "scale_attn_by_inverse_layer_idx",
}


_FUSED_QKV, _QKV = ".attn.c_attn.", ("q", "k", "v")
# weights that GPT-2 stores as (in, out); torch's Linear has (out, in)
_TRANSPOSED_WEIGHTS = (
    *(f"{_FUSED_QKV}{part}.weight" for part in _QKV),
    ".attn.c_proj.weight",
    ".mlp.c_fc.weight",
    ".mlp.c_proj.weight",
)
# masks that old versions stored, and heads that are not read
_IGNORED_BUFFERS = (".attn.bias", ".attn.masked_bias")
_IGNORED_HEADS = ("multiple_choice_head.", "score.", "classifier.", "qa_outputs.")


class Gpt(CausalModel):
    """GPT: maps token ids to hidden states with causal attention; `logits` scores the next token.

    Weights are initialised as in Radford 2019: normal with standard deviation 0.02, divided by √(2 · layers) for the output
    projections of attention and feed-forward networks; biases are zero. Under `torch.device("meta")` a model is built
    without allocating memory.
    """

    config: Config
    _model_types, _module_names = ("gpt2",), CHECKPOINT_NAMES

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.config = config = config._replace(d_feedforward=config.d_feedforward or 4 * config.d_model)
        accept_old_state_dict_keys(self, MODEL_KEYS)
        self.token_embedding = uninitialised_embedding(config.vocab, config.d_model)
        self.positions = uninitialised_embedding(config.positions, config.d_model)
        self.dropout = nn.Dropout(config.embedding_dropout)
        self.layers = nn.ModuleList(_build_layer(config, index) for index in range(config.layers))
        self.norm = nn.LayerNorm(config.d_model, config.eps)
        self._init_weights(0.02, output_std=0.02 * (2 * config.layers) ** -0.5)

    def embed(
        self, ids: Int[Tensor, "... tokens"], positions: slice | Int[Tensor, "... tokens"]
    ) -> Float[Tensor, "... tokens d_model"]:
        """Token + position embedding."""
        embedded: Tensor = self.dropout(self.token_embedding(ids) + self.positions.weight[positions])
        return embedded

    def logits(self, hidden: Float[Tensor, "... d_model"]) -> Float[Tensor, "... vocab"]:
        """The logits of the next token, by the token embedding."""
        self._check_hidden(hidden)
        return linear(hidden, self.token_embedding.weight)

    @classmethod
    def _read_config(cls, fields: checkpoint_files.ConfigFile) -> Config:
        fields.require_values(add_cross_attention=False, scale_attn_weights=True, tie_word_embeddings=True)
        config = Config(**fields.config_arguments(CONFIG_FIELDS, SIZES["small"]._replace(d_feedforward=3072)))
        return config._replace(**fields.read_start_and_stop(config.vocab))

    @classmethod
    def _select_tensors(cls, config: Config, stored: checkpoint_reading.OpenCheckpoint) -> tuple[Config, NamedTensors]:
        tensors = []
        for old in stored.names:
            name = old.removeprefix("transformer.")
            if name.endswith(_IGNORED_BUFFERS) or name.startswith(_IGNORED_HEADS):
                continue
            before, fused, kind = name.partition(_FUSED_QKV)
            parts = [f"{before}{fused}{part}.{kind}" for part in _QKV] if fused else [name]
            tensors += [
                (part, stored[old]._replace(part=(index, len(parts)), transposed=part.endswith(_TRANSPOSED_WEIGHTS)))
                for index, part in enumerate(parts)
            ]
        return config, checkpoint_reading.drop_tied_copy(tensors, "lm_head.weight", "wte.weight")

    def _config_json_fields(self) -> dict[str, Any]:
        return {
            "model_type": "gpt2",
            "architectures": ["GPT2LMHeadModel"],
            **checkpoint_files.config_json_fields(CONFIG_FIELDS, self.config),
            **checkpoint_files.bos_and_eos_fields(self.config.start, self.config.stop),
        }

    def _convert_to_stored(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        stored: dict[str, Tensor] = {}
        parts: dict[str, list[Tensor]] = {}
        for name, tensor in tensors.items():
            weight = tensor.T if name.endswith(_TRANSPOSED_WEIGHTS) else tensor
            before, fused, kind = name.partition(_FUSED_QKV)
            if fused:
                parts.setdefault(f"{before}{fused}{kind[2:]}", []).append(weight)
            else:
                stored[name] = weight
        stored |= {name: torch.cat(qkv, -1) for name, qkv in parts.items()}
        return {f"transformer.{name}": tensor for name, tensor in stored.items()}


def _build_layer(config: Config, index: int) -> TransformerLayer:
    assert config.d_feedforward is not None
    scale = (config.d_model // config.heads) ** -0.5 / (index + 1) if config.scale_by_layer else None
    return TransformerLayer(
        MultiHeadAttention(config.d_model, config.heads, score=Dot(scale), dropout=config.attention_dropout),
        FeedForward(config.d_model, config.d_feedforward, activation=config.activation),
        norm=partial(nn.LayerNorm, eps=config.eps),
        dropout=config.dropout,
    )
