"""BERT (Devlin 2018) from MultiHeadAttention: the model, its sizes, and the names that its checkpoints use.

Each token is the sum of a word, a position and a type embedding, normalised. Each layer adds to it what attention
finds, normalises, adds what a feed-forward network makes of it, and normalises again (post-norm).
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from polyhead._checks import kind_of
from polyhead.models import checkpoint_files as files
from polyhead.models import checkpoint_reading as weights
from polyhead.models import checkpoint_writing as saving
from polyhead.models.tokenizer import check_length
from polyhead.neighbourhood import Neighbourhood
from polyhead.nn import FeedForward, MultiHeadAttention, TransformerLayer
from polyhead.nn.transformer import ACTIVATIONS, check_ids, embedding


class Config(NamedTuple):
    """The numbers that make a BERT; those with defaults are the same in nearly all of them."""

    d_model: int
    heads: int
    layers: int
    d_feedforward: int
    vocab: int = 30522
    positions: int = 512
    token_types: int = 2
    eps: float = 1e-12
    activation: str = "gelu"
    dropout: float = 0.1
    attention_dropout: float = 0.1
    pooler: bool = True
    masked_lm: bool = False


SIZES = {
    # Devlin 2018
    "base": Config(768, 12, 12, 3072),
    "large": Config(1024, 16, 24, 4096),
    # Turc 2019
    "tiny": Config(128, 2, 2, 512),
    "mini": Config(256, 4, 4, 1024),
    "small": Config(512, 8, 4, 2048),
    "medium": Config(512, 8, 8, 2048),
    # Wang 2020, of which the default model has six layers
    "minilm-l12": Config(384, 12, 12, 1536),
    "minilm-l6": Config(384, 12, 6, 1536),
}

# what Devlin 2018, Turc 2019 and Wang 2020 say of them; Turc counts the head for masked words too
PUBLISHED = {
    "base": "110M",
    "large": "340M",
    "tiny": "4.4M",
    "mini": "11.3M",
    "small": "29.1M",
    "medium": "41.7M",
    "minilm-l12": "33M",
}

# the model's modules, as checkpoints name them; {} is the number of a layer
NAMES = {
    "embeddings.words": "embeddings.word_embeddings",
    "embeddings.positions": "embeddings.position_embeddings",
    "embeddings.token_types": "embeddings.token_type_embeddings",
    "embeddings.norm": "embeddings.LayerNorm",
    "layers.{}.self_attn.q_proj": "encoder.layer.{}.attention.self.query",
    "layers.{}.self_attn.k_proj": "encoder.layer.{}.attention.self.key",
    "layers.{}.self_attn.v_proj": "encoder.layer.{}.attention.self.value",
    "layers.{}.self_attn.o_proj": "encoder.layer.{}.attention.output.dense",
    "layers.{}.self_attn_norm": "encoder.layer.{}.attention.output.LayerNorm",
    "layers.{}.feedforward.up": "encoder.layer.{}.intermediate.dense",
    "layers.{}.feedforward.down": "encoder.layer.{}.output.dense",
    "layers.{}.feedforward_norm": "encoder.layer.{}.output.LayerNorm",
    "pooler": "pooler.dense",
    "masked_lm": "cls.predictions",
    "masked_lm.dense": "cls.predictions.transform.dense",
    "masked_lm.norm": "cls.predictions.transform.LayerNorm",
}

# the fields of Config, as config.json names them
FIELDS = {
    "d_model": "hidden_size",
    "heads": "num_attention_heads",
    "layers": "num_hidden_layers",
    "d_feedforward": "intermediate_size",
    "vocab": "vocab_size",
    "positions": "max_position_embeddings",
    "token_types": "type_vocab_size",
    "eps": "layer_norm_eps",
    "activation": "hidden_act",
    "dropout": "hidden_dropout_prob",
    "attention_dropout": "attention_probs_dropout_prob",
}


class Bert(nn.Module):
    """BERT: ids of tokens to a vector for each, that has read all the others.

    Weights start as in Devlin 2018: normal with deviation 0.02, cut at two deviations; biases at zero. Build it under
    `torch.device("meta")` to count what a size needs without allocating it.

    Attributes:
        pooler: the map of `pooled`, or None.
        masked_lm: the head of `logits`, or None; its decoder is the word embeddings.
    """

    def __init__(self, config: Config) -> None:
        super().__init__()
        files.check(config)
        self.config = config
        self.embeddings = Embeddings(config)
        self.layers = nn.ModuleList(_layer(config) for _ in range(config.layers))
        self.pooler = nn.Linear(config.d_model, config.d_model) if config.pooler else None
        self.masked_lm = MaskedLM(config) if config.masked_lm else None
        self.apply(_reset)

    def forward(
        self,
        ids: Int[Tensor, "... tokens"],
        over: Neighbourhood | Tensor | None = None,
        *,
        token_types: Int[Tensor, "... tokens"] | None = None,
    ) -> Float[Tensor, "... tokens d_model"]:
        """The hidden states of the last layer.

        Args:
            ids: numbers of tokens, with the special ones around each text, as a `Tokenizer` gives them.
            over: which tokens may attend to which, as in `MultiHeadAttention`: `Padding(lengths)` for texts of different
                lengths; a bool tensor is a mask of pairs, True = may attend.
            token_types: which of two texts each token is part of; 0 unless given.

        Raises:
            ValueError: for ids that the model has no embedding for, and texts longer than its positions.
        """
        check_ids("ids", ids, self.config.vocab)
        check_length(ids, self.config.positions)
        if token_types is not None:
            check_ids("token_types", token_types, self.config.token_types, "the types'")
            if token_types.shape != ids.shape:
                raise ValueError(
                    f"token_types: their shape is {tuple(token_types.shape)}; it must be that of ids, {tuple(ids.shape)}"
                )
        x = self.embeddings(ids, token_types)
        for layer in self.layers:
            x = layer(x, over=over)
        return x

    def pooled(self, hidden: Float[Tensor, "... tokens d_model"]) -> Float[Tensor, "... d_model"]:
        """A text's vector as BERT was trained to make it from the first token: tanh(W h)."""
        if self.pooler is None:
            raise ValueError("pooler: this model has none; its checkpoint, or Config(pooler=True), must bring it")
        self._check(hidden)
        return torch.tanh(self.pooler(hidden[..., 0, :]))

    def logits(self, hidden: Float[Tensor, "... tokens d_model"]) -> Float[Tensor, "... tokens vocab"]:
        """What could stand in each place: masked language modelling."""
        if self.masked_lm is None:
            raise ValueError("masked_lm: this model has none; its checkpoint, or Config(masked_lm=True), must bring it")
        self._check(hidden)
        return self.masked_lm(hidden, self.embeddings.words.weight)

    def _check(self, hidden: Tensor) -> None:
        if not isinstance(hidden, Tensor) or hidden.dim() < 2 or hidden.shape[-1] != self.config.d_model:
            raise ValueError(
                f"hidden must be a tensor (..., tokens, {self.config.d_model}), as the model gave it, got {kind_of(hidden)}"
            )

    @classmethod
    def from_pretrained(cls, path_or_package: str | Path, *, dtype: torch.dtype | None = torch.float32) -> Bert:
        """A trained BERT, in evaluation mode, from a folder with config.json and model.safetensors, or from a package.

        Checkpoints of the bare model and of models with heads are read alike; of the heads only the one for masked
        language modelling is kept. With `dtype=None` the numbers stay as they are stored.

        Raises:
            FileNotFoundError: where there is no such folder, or a file is missing from it.
            ValueError: where a file is not what it should be; a tensor that is missing, extra or misshapen is named.
        """
        folder = files.folder(path_or_package)
        fields = files.config(folder, ("bert",))
        fields.expect(position_embedding_type="absolute", is_decoder=False, add_cross_attention=False)
        arguments = fields.as_arguments(FIELDS, SIZES["base"])
        with weights.opened(folder) as stored:
            tensors = _today(stored)
            modules = {name.rpartition(".")[0] for name, _ in tensors}
            arguments |= {head: NAMES[head] in modules for head in ("pooler", "masked_lm")}
            model = fields.build(cls, Config(**arguments), len(stored.names))
            weights.fill(model, stored, NAMES, tensors, dtype=dtype)
        return model.eval()

    def to_pretrained(self, folder: str | Path) -> None:
        """Write config.json and model.safetensors, as transformers reads them and `from_pretrained` does.

        Raises:
            ValueError: where the model is not what its configuration says, as with heads that were pruned or gated.
        """
        with torch.device("meta"):
            fresh = type(self)(self.config)
        tensors = saving.named_tensors(self, fresh, NAMES)
        if self.masked_lm is not None:
            tensors = {name if name.startswith("cls.") else f"bert.{name}": tensor for name, tensor in tensors.items()}
        fields = {
            "model_type": "bert",
            "architectures": ["BertModel" if self.masked_lm is None else "BertForMaskedLM"],
            **files.named(FIELDS, self.config),
        }
        saving.save(folder, fields, tensors)


class Embeddings(nn.Module):
    """What a token is before it has read any other: word + position + type, normalised."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.words = embedding(config.vocab, config.d_model)
        self.positions = embedding(config.positions, config.d_model)
        self.token_types = embedding(config.token_types, config.d_model)
        self.norm = nn.LayerNorm(config.d_model, config.eps)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, ids: Tensor, token_types: Tensor | None) -> Tensor:
        types = self.token_types.weight[0] if token_types is None else self.token_types(token_types)
        x = self.words(ids) + types + self.positions.weight[: ids.shape[-1]]
        return self.dropout(self.norm(x))


def _layer(config: Config) -> TransformerLayer:
    return TransformerLayer(
        MultiHeadAttention(config.d_model, config.heads, dropout=config.attention_dropout),
        FeedForward(config.d_model, config.d_feedforward, activation=config.activation),
        norm=partial(nn.LayerNorm, eps=config.eps),
        norm_first=False,
        dropout=config.dropout,
    )


class MaskedLM(nn.Module):
    """The head for masked language modelling; it ends in the word embeddings, which the model owns."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.dense = nn.Linear(config.d_model, config.d_model)
        self.norm = nn.LayerNorm(config.d_model, config.eps)
        self.bias = nn.Parameter(torch.zeros(config.vocab))
        self.activation = config.activation

    def forward(self, hidden: Tensor, words: Float[Tensor, "vocab d_model"]) -> Tensor:
        return F.linear(self.norm(ACTIVATIONS[self.activation](self.dense(hidden))), words, self.bias)


def _reset(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.trunc_normal_(module.weight, std=0.02, a=-0.04, b=0.04)
    if isinstance(module, nn.Linear):
        nn.init.zeros_(module.bias)


# heads of fine-tuned models and of next-sentence prediction, which this model has no module for
_OTHER_HEADS = ("cls.seq_relationship.", "classifier.", "qa_outputs.")
_WORDS, _DECODER = "embeddings.word_embeddings.weight", "cls.predictions.decoder."


def _today(stored: weights.Weights) -> list[tuple[str, weights.Stored]]:
    """The tensors of a checkpoint that are read, each under its name in NAMES."""
    tensors = []
    for old in stored.names:
        name = old.removeprefix("bert.").replace("LayerNorm.gamma", "LayerNorm.weight")
        name = name.replace("LayerNorm.beta", "LayerNorm.bias")
        if name != "embeddings.position_ids" and not name.startswith(_OTHER_HEADS):
            tensors.append((name, stored[old]))
    for copy, original in ((f"{_DECODER}weight", _WORDS), (f"{_DECODER}bias", "cls.predictions.bias")):
        tensors = weights.without_copy(tensors, copy, original)
    return tensors
