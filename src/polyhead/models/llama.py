"""Llama (Touvron 2023) and Mistral (Jiang 2023) from MultiHeadAttention: the model, its sizes, the names of its checkpoints.

As GPT, with other parts: positions turn queries and keys (rotary), heads share keys and values in groups, norms know no
mean (RMSNorm), and the feed-forward network is gated (SwiGLU). Mistral's tokens see no further than a window.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from polyhead.linalg.skinny_gemm import apply_linear, linear
from polyhead.models import checkpoint_files as files
from polyhead.models import checkpoint_reading as weights
from polyhead.models import checkpoint_writing as saving
from polyhead.models.causal_model import CausalModel
from polyhead.nn import FeedForward, MultiHeadAttention, TransformerLayer
from polyhead.nn.transformer import embedding
from polyhead.position import RopeScaling, Rotary


class Config(NamedTuple):
    """The numbers that make a Llama.

    `kv_heads` are as many as `heads`, and `head_dim` is d_model / heads, unless given. `rope_base` and `scaling` are those of
    `Rotary`; `window` is how many keys a token sees, its own with them. The head scores what comes next by weights of its
    own, by those of the word embeddings (`"tied"`), or is left out. `start` and `stop` are the tokens around a text.
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


_llama2 = partial(Config, positions=4096, eps=1e-5)
_llama3 = partial(Config, vocab=128256, positions=8192, kv_heads=8, eps=1e-5, rope_base=500_000.0)
SIZES = {
    # Touvron 2023
    "llama2-7b": _llama2(4096, 32, 32, 11008),
    "llama2-13b": _llama2(5120, 40, 40, 13824),
    "llama2-70b": _llama2(8192, 64, 80, 28672, kv_heads=8),
    # Grattafiori 2024
    "llama3-8b": _llama3(4096, 32, 32, 14336),
    "llama3-70b": _llama3(8192, 64, 80, 28672),
    "llama3.2-1b": _llama3(2048, 32, 16, 8192, positions=131072, scaling=RopeScaling(32.0, 8192), head="tied"),
    # Zhang 2024
    "tinyllama": Config(2048, 32, 22, 5632, kv_heads=4, eps=1e-5),
    # Jiang 2023
    "mistral-7b": Config(4096, 32, 32, 14336, positions=32768, kv_heads=8, eps=1e-5, window=4096),
}
# what their makers say of them
PUBLISHED = {
    "llama2-7b": "7B",
    "llama2-13b": "13B",
    "llama2-70b": "70B",
    "llama3-8b": "8B",
    "llama3-70b": "70B",
    "llama3.2-1b": "1.23B",
    "tinyllama": "1.1B",
    "mistral-7b": "7.3B",
}

# the model's modules, as checkpoints name them; {} is the number of a layer
NAMES = {
    "words": "embed_tokens",
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

# the fields of Config, as config.json names them
FIELDS = {
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
# those that only one of the two kinds has
KINDS = {
    "llama": {"attention_bias": "attention_bias", "feedforward_bias": "mlp_bias"},
    "mistral": {"window": "sliding_window"},
}
# what a Mistral's config.json means by leaving a field out
_MISTRAL = {"num_key_value_heads": 8, "sliding_window": 4096, "max_position_embeddings": 131072}


class Llama(CausalModel):
    """Llama, or Mistral: ids of tokens to a vector for each, that has read those before it; `logits` says what comes next.

    Weights start normal with deviation 0.02, biases at zero. Build it under `torch.device("meta")` to count what a size
    needs without allocating it.

    Attributes:
        head: the map of `logits`; None where the word embeddings serve, or there is none.
    """

    config: Config

    def __init__(self, config: Config) -> None:
        super().__init__()
        files.check(config)
        self.config = config = config._replace(
            kv_heads=config.kv_heads or config.heads, head_dim=config.head_dim or config.d_model // config.heads
        )
        self.window = config.window
        self.words = embedding(config.vocab, config.d_model)
        # one for all layers: they share its table of turns
        rotary = Rotary(base=config.rope_base, scaling=config.scaling)
        self.layers = nn.ModuleList(_layer(config, rotary) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.d_model, config.eps)
        self.head = nn.Linear(config.d_model, config.vocab, bias=False) if config.head == "own" else None
        self._reset(0.02, deep=0.02)

    def embedded(
        self, ids: Int[Tensor, "... tokens"], where: slice | Int[Tensor, "... tokens"]
    ) -> Float[Tensor, "... tokens d_model"]:
        """Words alone; attention knows their positions."""
        embedded: Tensor = self.words(ids)
        return embedded

    def logits(self, hidden: Float[Tensor, "... d_model"]) -> Float[Tensor, "... vocab"]:
        """How likely each token is to come next."""
        if self.config.head is None:
            raise ValueError("head: this model has none; its checkpoint, or Config(head='own'), must bring it")
        self._check(hidden)
        return linear(hidden, self.words.weight) if self.head is None else apply_linear(self.head, hidden)

    @classmethod
    def from_pretrained(cls, path_or_package: str | Path, *, dtype: torch.dtype | None = torch.float32) -> Llama:
        """A trained Llama or Mistral, in evaluation mode, from a folder with config.json and model.safetensors, or a package.

        Checkpoints of the bare model and of models with heads are read alike. With `dtype=None` the numbers stay as they
        are stored.

        Raises:
            FileNotFoundError: where there is no such folder, or a file is missing from it.
            ValueError: where a file is not what it should be; a tensor that is missing, extra or misshapen is named.
        """
        folder = files.folder(path_or_package)
        fields = files.config(folder, tuple(KINDS))
        if fields.kind == "mistral":
            fields = fields._replace(values={**_MISTRAL, **fields.values})
        names = FIELDS | KINDS[fields.kind]
        arguments = fields.as_arguments(names, SIZES["mistral-7b"]._replace(head_dim=128)) | _turns(fields)
        config = Config(**arguments)
        config = config._replace(**fields.ends(config.vocab))
        tied = fields.flag("tie_word_embeddings")
        with weights.opened(folder) as stored:
            tensors = _today(stored, tied)
            config = config._replace(head="tied" if tied else "own" if "lm_head.weight" in dict(tensors) else None)
            model = fields.build(cls, config, len(stored.names))
            weights.fill(model, stored, NAMES, tensors, dtype=dtype)
        return model.eval()

    def to_pretrained(self, folder: str | Path) -> None:
        """Write config.json and model.safetensors, as transformers reads them and `from_pretrained` does.

        A model with a window is written as a Mistral, one without as a Llama.

        Raises:
            ValueError: where the model is not what its configuration says, as with heads that were pruned or gated; and for
                a Mistral with biases.
        """
        config = self.config
        kind = "llama" if config.window is None else "mistral"
        if kind == "mistral" and (config.attention_bias or config.feedforward_bias):
            raise ValueError(
                "attention_bias, feedforward_bias: with a window there must be none, for Mistral has no biases"
            )
        with torch.device("meta"):
            fresh = type(self)(config)
        tensors = saving.named_tensors(self, fresh, NAMES)
        body, title = ("", "Model") if config.head is None else ("model.", "ForCausalLM")
        fields = {
            "model_type": kind,
            "architectures": [f"{kind.capitalize()}{title}"],
            **files.named(FIELDS | KINDS[kind], config),
            "rope_parameters": _named_turns(config),
            "tie_word_embeddings": config.head == "tied",
            **files.named_ends(config.start, config.stop),
        }
        saving.save(
            folder, fields, {name if name.startswith("lm_head") else body + name: x for name, x in tensors.items()}
        )


def _layer(config: Config, rotary: Rotary) -> TransformerLayer:
    attention = MultiHeadAttention(
        config.d_model, config.heads, kv_heads=config.kv_heads, head_dim=config.head_dim, position=rotary,
        bias=config.attention_bias, dropout=config.attention_dropout,
    )  # fmt: skip
    feedforward = FeedForward(
        config.d_model, config.d_feedforward, activation=config.activation, gated=True, bias=config.feedforward_bias
    )
    return TransformerLayer(attention, feedforward, norm=partial(nn.RMSNorm, eps=config.eps))


# frequencies that old versions stored, and heads of fine-tuned models
_BUFFER, _OTHER_HEADS = "rotary_emb.inv_freq", ("score.", "classifier.", "qa_outputs.")


def _today(stored: weights.Weights, tied: bool) -> list[tuple[str, weights.Stored]]:
    """The tensors of a checkpoint that are read, each under its name in NAMES."""
    tensors = [(old.removeprefix("model."), stored[old]) for old in stored.names]
    tensors = [(name, x) for name, x in tensors if not name.endswith(_BUFFER) and not name.startswith(_OTHER_HEADS)]
    return weights.without_copy(tensors, "lm_head.weight", "embed_tokens.weight") if tied else tensors


def _turns(fields: files.Fields) -> dict[str, Any]:
    """`rope_base` and `scaling` of a config.json: of `rope_parameters`, or of older files' `rope_theta` and `rope_scaling`."""
    said: dict[str, Any] = {}
    for name in ("rope_parameters", "rope_scaling"):
        given = fields.values.get(name)
        given = {} if given is None else given
        if not isinstance(given, dict) or any(isinstance(value, dict) for value in given.values()):
            raise ValueError(f"{fields.path}: {name} is {given!r:.60}; it must be one object for all layers")
        said = given or said
    kind = said.get("rope_type", said.get("type", "default"))
    if kind not in ("default", "linear", "llama3") or said.get("partial_rotary_factor", 1) != 1:
        raise ValueError(
            f"{fields.path}: rope_type is {kind!r}, partial_rotary_factor {said.get('partial_rotary_factor', 1)!r}; what can be "
            "read here is 'default', 'linear' and 'llama3', and 1"
        )

    def number(name: str, otherwise: Any = None) -> float:
        value = said.get(name, otherwise)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
            raise ValueError(f"{fields.path}: {name} is {value!r:.60}; it must be a number, more than 0")
        return float(value)

    base = number("rope_theta", fields.values.get("rope_theta", 10_000.0))
    if kind == "default":
        return {"rope_base": base, "scaling": None}
    if kind == "linear":
        return {"rope_base": base, "scaling": RopeScaling(number("factor"))}
    trained = number("original_max_position_embeddings", fields.values.get("max_position_embeddings"))
    low, high = number("low_freq_factor"), number("high_freq_factor")
    if not low < high:
        raise ValueError(f"{fields.path}: low_freq_factor is {low}, high_freq_factor {high}; it must be less")
    return {"rope_base": base, "scaling": RopeScaling(number("factor"), int(trained), low, high)}


def _named_turns(config: Config) -> dict[str, Any]:
    """The same, as config.json says it."""
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
