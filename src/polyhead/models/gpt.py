"""GPT-2 (Radford 2019) from MultiHeadAttention: the model, its sizes, and the names that its checkpoints use.

Each token is the sum of a word and a position embedding. Each layer adds to it what attention finds before it, then what
a feed-forward network makes of it, each of the normalised token (pre-norm). GPT-3 is the same, larger.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from polyhead.linalg.skinny_gemm import linear
from polyhead.models import checkpoint_files as files
from polyhead.models import checkpoint_reading as weights
from polyhead.models import checkpoint_writing as saving
from polyhead.models.causal_model import CausalModel
from polyhead.nn import FeedForward, MultiHeadAttention, TransformerLayer
from polyhead.nn.transformer import embedding
from polyhead.score import Dot


class Config(NamedTuple):
    """The numbers that make a GPT; those with defaults are GPT-2's.

    `d_feedforward` is four times `d_model` unless given. With `scale_by_layer` the scores of layer n are divided by n + 1.
    `start` and `stop` are the tokens around a text; `generate` ends with one of `stop` unless told otherwise.
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
    # Brown 2020; every other layer of it attends within a band, which changes no weight
    "gpt3": Config(12288, 96, 96, positions=2048),
}
# what was released, which is not what the paper of GPT-2 says
PUBLISHED = {"small": "124M", "medium": "355M", "large": "774M", "xl": "1558M", "distilgpt2": "82M", "gpt3": "175B"}

# the model's modules, as checkpoints name them; {} is the number of a layer. q, k and v are one tensor there, `c_attn`.
NAMES = {
    "words": "wte",
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

# the fields of Config, as config.json names them
FIELDS = {
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


class Gpt(CausalModel):
    """GPT: ids of tokens to a vector for each, that has read those before it; `logits` says what could come next.

    Weights start as in Radford 2019: normal with deviation 0.02, over √(2 · layers) for maps that add to the token; biases
    at zero. Build it under `torch.device("meta")` to count what a size needs without allocating it.
    """

    config: Config

    def __init__(self, config: Config) -> None:
        super().__init__()
        files.check(config)
        self.config = config = config._replace(d_feedforward=config.d_feedforward or 4 * config.d_model)
        self.words = embedding(config.vocab, config.d_model)
        self.positions = embedding(config.positions, config.d_model)
        self.dropout = nn.Dropout(config.embedding_dropout)
        self.layers = nn.ModuleList(_layer(config, number) for number in range(config.layers))
        self.norm = nn.LayerNorm(config.d_model, config.eps)
        self._reset(0.02, deep=0.02 * (2 * config.layers) ** -0.5)

    def embedded(
        self, ids: Int[Tensor, "... tokens"], where: slice | Int[Tensor, "... tokens"]
    ) -> Float[Tensor, "... tokens d_model"]:
        """Word + position."""
        embedded: Tensor = self.dropout(self.words(ids) + self.positions.weight[where])
        return embedded

    def logits(self, hidden: Float[Tensor, "... d_model"]) -> Float[Tensor, "... vocab"]:
        """How likely each token is to come next, by the word embeddings."""
        self._check(hidden)
        return linear(hidden, self.words.weight)

    @classmethod
    def from_pretrained(cls, path_or_package: str | Path, *, dtype: torch.dtype | None = torch.float32) -> Gpt:
        """A trained GPT-2, in evaluation mode, from a folder with config.json and model.safetensors, or from a package.

        Checkpoints of the bare model and of models with heads are read alike. With `dtype=None` the numbers stay as they
        are stored.

        Raises:
            FileNotFoundError: where there is no such folder, or a file is missing from it.
            ValueError: where a file is not what it should be; a tensor that is missing, extra or misshapen is named.
        """
        folder = files.folder(path_or_package)
        fields = files.config(folder, ("gpt2",))
        fields.expect(add_cross_attention=False, scale_attn_weights=True, tie_word_embeddings=True)
        arguments = fields.as_arguments(FIELDS, SIZES["small"]._replace(d_feedforward=3072))
        config = Config(**arguments)
        config = config._replace(**fields.ends(config.vocab))
        with weights.opened(folder) as stored:
            model = fields.build(cls, config, len(stored.names))
            weights.fill(model, stored, NAMES, _today(stored), dtype=dtype)
        return model.eval()

    def to_pretrained(self, folder: str | Path) -> None:
        """Write config.json and model.safetensors, as transformers reads them and `from_pretrained` does.

        Raises:
            ValueError: where the model is not what its configuration says, as with heads that were pruned or gated.
        """
        with torch.device("meta"):
            fresh = type(self)(self.config)
        tensors = _fused(saving.named_tensors(self, fresh, NAMES))
        fields = {
            "model_type": "gpt2",
            "architectures": ["GPT2LMHeadModel"],
            **files.named(FIELDS, self.config),
            **files.named_ends(self.config.start, self.config.stop),
        }
        saving.save(folder, fields, {f"transformer.{name}": tensor for name, tensor in tensors.items()})


def _layer(config: Config, number: int) -> TransformerLayer:
    assert config.d_feedforward is not None
    scale = (config.d_model // config.heads) ** -0.5 / (number + 1) if config.scale_by_layer else None
    return TransformerLayer(
        MultiHeadAttention(config.d_model, config.heads, score=Dot(scale), dropout=config.attention_dropout),
        FeedForward(config.d_model, config.d_feedforward, activation=config.activation),
        norm=partial(nn.LayerNorm, eps=config.eps),
        dropout=config.dropout,
    )


_FUSED, _QKV = ".attn.c_attn.", ("q", "k", "v")
# maps whose weights GPT-2 keeps as (in, out), what torch's Linear has as (out, in)
_TURNED = (
    *(f"{_FUSED}{part}.weight" for part in _QKV),
    ".attn.c_proj.weight",
    ".mlp.c_fc.weight",
    ".mlp.c_proj.weight",
)
# masks that old versions stored, and heads that this model has no module for
_BUFFERS = (".attn.bias", ".attn.masked_bias")
_OTHER_HEADS = ("multiple_choice_head.", "score.", "classifier.", "qa_outputs.")


def _today(stored: weights.Weights) -> list[tuple[str, weights.Stored]]:
    """The tensors of a checkpoint that are read, each under its name in NAMES."""
    tensors = []
    for old in stored.names:
        name = old.removeprefix("transformer.")
        if name.endswith(_BUFFERS) or name.startswith(_OTHER_HEADS):
            continue
        before, fused, kind = name.partition(_FUSED)
        parts = [f"{before}{fused}{part}.{kind}" for part in _QKV] if fused else [name]
        tensors += [
            (part, stored[old]._replace(part=(number, len(parts)), turned=part.endswith(_TURNED)))
            for number, part in enumerate(parts)
        ]
    return weights.without_copy(tensors, "lm_head.weight", "wte.weight")


def _fused(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors under the names of NAMES as a checkpoint has them: the other way of `_today`."""
    stored: dict[str, Tensor] = {}
    parts: dict[str, list[Tensor]] = {}
    for name, tensor in tensors.items():
        turned = tensor.T if name.endswith(_TURNED) else tensor
        before, fused, kind = name.partition(_FUSED)
        if fused:
            parts.setdefault(f"{before}{fused}{kind[2:]}", []).append(turned)
        else:
            stored[name] = turned
    return stored | {name: torch.cat(three, -1) for name, three in parts.items()}
