"""Llama (Touvron 2023) and Mistral (Jiang 2023) from MultiHeadAttention: the model, its sizes, the names in its checkpoints.

A GPT with rotary positions, grouped key-value heads, RMSNorm and a gated feed-forward network (SwiGLU). Mistral has
sliding-window attention.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal, NamedTuple

from jaxtyping import Float, Int
from torch import Tensor, nn

from polyhead._old_checkpoints import MODEL_KEYS, accept_old_state_dict_keys
from polyhead.linalg.skinny_gemm import apply_linear, linear
from polyhead.models import checkpoint_files, checkpoint_reading
from polyhead.models.causal_model import CausalModel
from polyhead.models.checkpoint_model import NamedTensors
from polyhead.nn import FeedForward, MultiHeadAttention, TransformerLayer
from polyhead.nn.embedding_helpers import uninitialised_embedding
from polyhead.position import RopeScaling, Rotary


class Config(NamedTuple):
    """The sizes and options of a Llama.

    By default `kv_heads` equals `heads`, and `head_dim` is d_model / heads. `rope_base` and `scaling` are those of `Rotary`;
    `window` is the number of keys that a token attends to, its own included. `head` says which weights compute logits:
    its own (`"own"`), those of the token embedding (`"tied"`), or None for a model without logits. `start` and `stop` are
    the tokens around a text.
    """

    d_model: int
    heads: int
    layers: int
    d_feedforward: int
    vocab: int = 32000
    positions: int = 2048
    kv_heads: int | None = None
    head_dim: int | None = None
    eps: float = 1e-6
    activation: str = "silu"
    rope_base: float = 10_000.0
    scaling: RopeScaling | None = None
    window: int | None = None
    attention_bias: bool = False
    feedforward_bias: bool = False
    attention_dropout: float = 0.0
    head: Literal["own", "tied"] | None = "own"
    start: int | None = None
    stop: tuple[int, ...] = ()


_llama2_config = partial(Config, positions=4096, eps=1e-5)
_llama3_config = partial(Config, vocab=128256, positions=8192, kv_heads=8, eps=1e-5, rope_base=500_000.0)
SIZES = {
    # Touvron 2023
    "llama2-7b": _llama2_config(4096, 32, 32, 11008),
    "llama2-13b": _llama2_config(5120, 40, 40, 13824),
    "llama2-70b": _llama2_config(8192, 64, 80, 28672, kv_heads=8),
    # Grattafiori 2024
    "llama3-8b": _llama3_config(4096, 32, 32, 14336),
    "llama3-70b": _llama3_config(8192, 64, 80, 28672),
    "llama3.2-1b": _llama3_config(2048, 32, 16, 8192, positions=131072, scaling=RopeScaling(32.0, 8192), head="tied"),
    # Zhang 2024
    "tinyllama": Config(2048, 32, 22, 5632, kv_heads=4, eps=1e-5),
    # Jiang 2023
    "mistral-7b": Config(4096, 32, 32, 14336, positions=32768, kv_heads=8, eps=1e-5, window=4096),
}
# parameters as published
PUBLISHED_PARAMETERS = {
    "llama2-7b": "7B",
    "llama2-13b": "13B",
    "llama2-70b": "70B",
    "llama3-8b": "8B",
    "llama3-70b": "70B",
    "llama3.2-1b": "1.23B",
    "tinyllama": "1.1B",
    "mistral-7b": "7.3B",
}

# the model's modules -> the modules of a checkpoint; {} is the index of a layer
CHECKPOINT_NAMES = {
    "token_embedding": "embed_tokens",
    "layers.{}.self_attn_norm": "layers.{}.input_layernorm",
    "layers.{}.self_attn.q_proj": "layers.{}.self_attn.q_proj",
    "layers.{}.self_attn.k_proj": "layers.{}.self_attn.k_proj",
    "layers.{}.self_attn.v_proj": "layers.{}.self_attn.v_proj",
    "layers.{}.self_attn.o_proj": "layers.{}.self_attn.o_proj",
    "layers.{}.feedforward_norm": "layers.{}.post_attention_layernorm",
    "layers.{}.feedforward.gate": "layers.{}.mlp.gate_proj",
    "layers.{}.feedforward.up": "layers.{}.mlp.up_proj",
    "layers.{}.feedforward.down": "layers.{}.mlp.down_proj",
    "norm": "norm",
    "head": "lm_head",
}

# the fields of Config -> the fields of config.json
CONFIG_FIELDS = {
    "d_model": "hidden_size",
    "heads": "num_attention_heads",
    "layers": "num_hidden_layers",
    "d_feedforward": "intermediate_size",
    "vocab": "vocab_size",
    "positions": "max_position_embeddings",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "eps": "rms_norm_eps",
    "activation": "hidden_act",
    "attention_dropout": "attention_dropout",
}
# the fields that only one of the two has
CONFIG_FIELDS_BY_TYPE = {
    "llama": {"attention_bias": "attention_bias", "feedforward_bias": "mlp_bias"},
    "mistral": {"window": "sliding_window"},
}
# the defaults of fields that a Mistral's config.json omits
_MISTRAL_DEFAULTS = {"num_key_value_heads": 8, "sliding_window": 4096, "max_position_embeddings": 131072}


# frequencies that old versions stored, and heads of fine-tuned models
_IGNORED_BUFFER, _IGNORED_HEADS = "rotary_emb.inv_freq", ("score.", "classifier.", "qa_outputs.")


class Llama(CausalModel):
    """Llama, or Mistral: maps token ids to hidden states with causal attention; `logits` scores the next token.

    Weights are initialised from a normal distribution with standard deviation 0.02, biases are zero. Under
    `torch.device("meta")` a model is built without allocating memory. A model with a window is saved as a Mistral, which
    cannot have biases, one without as a Llama.

    Attributes:
        head: the linear map of `logits`; None if it is tied to the token embedding, or if the model has no logits.
    """

    config: Config
    _model_types, _module_names = tuple(CONFIG_FIELDS_BY_TYPE), CHECKPOINT_NAMES

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.config = config = config._replace(
            kv_heads=config.kv_heads or config.heads, head_dim=config.head_dim or config.d_model // config.heads
        )
        self.window = config.window
        accept_old_state_dict_keys(self, MODEL_KEYS)
        self.token_embedding = uninitialised_embedding(config.vocab, config.d_model)
        # all layers share one table of rotations
        rotary = Rotary(base=config.rope_base, scaling=config.scaling)
        self.layers = nn.ModuleList(_build_layer(config, rotary) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.d_model, config.eps)
        self.head = nn.Linear(config.d_model, config.vocab, bias=False) if config.head == "own" else None
        self._init_weights(0.02, output_std=0.02)

    def embed(
        self, ids: Int[Tensor, "... tokens"], positions: slice | Int[Tensor, "... tokens"]
    ) -> Float[Tensor, "... tokens d_model"]:
        """The token embedding alone; attention applies the positions."""
        embedded: Tensor = self.token_embedding(ids)
        return embedded

    def logits(self, hidden: Float[Tensor, "... d_model"]) -> Float[Tensor, "... vocab"]:
        """The logits of the next token."""
        if self.config.head is None:
            raise ValueError(
                "logits needs a head, got a model without one; use Config(head='own') or a checkpoint that has it"
            )
        self._check_hidden(hidden)
        return linear(hidden, self.token_embedding.weight) if self.head is None else apply_linear(self.head, hidden)

    @classmethod
    def _read_config(cls, fields: checkpoint_files.ConfigFile) -> Config:
        if fields.kind == "mistral":
            fields = fields._replace(values={**_MISTRAL_DEFAULTS, **fields.values})
        names = CONFIG_FIELDS | CONFIG_FIELDS_BY_TYPE[fields.kind]
        arguments = fields.config_arguments(names, SIZES["mistral-7b"]._replace(head_dim=128)) | _read_rope(fields)
        config = Config(**arguments)
        tied = fields.read_flag("tie_word_embeddings")
        return config._replace(**fields.read_start_and_stop(config.vocab), head="tied" if tied else "own")

    @classmethod
    def _select_tensors(cls, config: Config, stored: checkpoint_reading.OpenCheckpoint) -> tuple[Config, NamedTensors]:
        tensors = [(old.removeprefix("model."), stored[old]) for old in stored.names]
        tensors = [
            (name, x)
            for name, x in tensors
            if not name.endswith(_IGNORED_BUFFER) and not name.startswith(_IGNORED_HEADS)
        ]
        if config.head == "tied":
            return config, checkpoint_reading.drop_tied_copy(tensors, "lm_head.weight", "embed_tokens.weight")
        return config._replace(head="own" if "lm_head.weight" in dict(tensors) else None), tensors

    def _config_json_fields(self) -> dict[str, Any]:
        config = self.config
        kind = "llama" if config.window is None else "mistral"
        if kind == "mistral" and (config.attention_bias or config.feedforward_bias):
            raise ValueError(
                "attention_bias and feedforward_bias must be False to save a model with a window, since Mistral has no biases; "
                "use safetensors.torch.save_model"
            )
        return {
            "model_type": kind,
            "architectures": [f"{kind.capitalize()}{'Model' if config.head is None else 'ForCausalLM'}"],
            **checkpoint_files.config_json_fields(CONFIG_FIELDS | CONFIG_FIELDS_BY_TYPE[kind], config),
            "rope_parameters": _rope_fields(config),
            "tie_word_embeddings": config.head == "tied",
            **checkpoint_files.bos_and_eos_fields(config.start, config.stop),
        }

    def _convert_to_stored(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        body = "" if self.config.head is None else "model."
        return {name if name.startswith("lm_head") else body + name: x for name, x in tensors.items()}


def _build_layer(config: Config, rotary: Rotary) -> TransformerLayer:
    attention = MultiHeadAttention(
        config.d_model, config.heads, kv_heads=config.kv_heads, head_dim=config.head_dim, position=rotary,
        bias=config.attention_bias, dropout=config.attention_dropout,
    )  # fmt: skip
    feedforward = FeedForward(
        config.d_model, config.d_feedforward, activation=config.activation, gated=True, bias=config.feedforward_bias
    )
    return TransformerLayer(attention, feedforward, norm=partial(nn.RMSNorm, eps=config.eps))


def _read_rope(fields: checkpoint_files.ConfigFile) -> dict[str, Any]:
    """`rope_base` and `scaling` of a config.json: from `rope_parameters`, or in older files `rope_theta` and `rope_scaling`."""
    rope: dict[str, Any] = {}
    for name in ("rope_parameters", "rope_scaling"):
        value = fields.values.get(name)
        value = {} if value is None else value
        if not isinstance(value, dict) or any(isinstance(item, dict) for item in value.values()):
            raise fields.field_error(name, "one object for all layers", value)
        rope = value or rope
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "linear", "llama3"):
        raise fields.field_error("rope_type", "'default', 'linear' or 'llama3'", kind)
    if rope.get("partial_rotary_factor", 1) != 1:
        raise fields.field_error("partial_rotary_factor", "1", rope["partial_rotary_factor"])

    def number(name: str, default: Any = None) -> float:
        value = rope.get(name, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
            raise fields.field_error(name, "a number in (0, inf)", value)
        return float(value)

    base = number("rope_theta", fields.values.get("rope_theta", 10_000.0))
    if kind == "default":
        return {"rope_base": base, "scaling": None}
    if kind == "linear":
        return {"rope_base": base, "scaling": RopeScaling(number("factor"))}
    original = number("original_max_position_embeddings", fields.values.get("max_position_embeddings"))
    low, high = number("low_freq_factor"), number("high_freq_factor")
    if not low < high:
        raise fields.field_error("low_freq_factor", f"less than high_freq_factor, {high}", low)
    return {"rope_base": base, "scaling": RopeScaling(number("factor"), int(original), low, high)}


def _rope_fields(config: Config) -> dict[str, Any]:
    """`rope_parameters` of config.json: the inverse of `_read_rope`."""
    scaling = config.scaling
    if scaling is None:
        return {"rope_type": "default", "rope_theta": config.rope_base}
    if scaling.original_length is None:
        return {"rope_type": "linear", "rope_theta": config.rope_base, "factor": scaling.factor}
    return {
        "rope_type": "llama3",
        "rope_theta": config.rope_base,
        "factor": scaling.factor,
        "original_max_position_embeddings": scaling.original_length,
        "low_freq_factor": scaling.low,
        "high_freq_factor": scaling.high,
    }
