"""BERT (Devlin 2018) from MultiHeadAttention: the model, its sizes, and the names that its checkpoints use.

Each token is the sum of a word, a position and a type embedding, normalised. Each layer adds to it what attention
finds, normalises, adds what a feed-forward network makes of it, and normalises again (post-norm).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from polyhead._torch import numbers_hidden
from polyhead.models import files
from polyhead.neighbourhood import Neighbourhood
from polyhead.nn import MultiHeadAttention


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

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_new": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}

# the model's modules, as checkpoints name them; {} is the number of a layer
NAMES = {
    "embeddings.words": "embeddings.word_embeddings",
    "embeddings.positions": "embeddings.position_embeddings",
    "embeddings.token_types": "embeddings.token_type_embeddings",
    "embeddings.norm": "embeddings.LayerNorm",
    "layers.{}.attention.q_proj": "encoder.layer.{}.attention.self.query",
    "layers.{}.attention.k_proj": "encoder.layer.{}.attention.self.key",
    "layers.{}.attention.v_proj": "encoder.layer.{}.attention.self.value",
    "layers.{}.attention.o_proj": "encoder.layer.{}.attention.output.dense",
    "layers.{}.attention_norm": "encoder.layer.{}.attention.output.LayerNorm",
    "layers.{}.up": "encoder.layer.{}.intermediate.dense",
    "layers.{}.down": "encoder.layer.{}.output.dense",
    "layers.{}.norm": "encoder.layer.{}.output.LayerNorm",
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
        if config.heads < 1 or config.d_model % config.heads:
            raise ValueError(f"heads: {config.heads} does not divide d_model {config.d_model}; it must, in a BERT")
        if config.activation not in ACTIVATIONS:
            raise ValueError(f"activation: it is {config.activation!r}; it must be one of {', '.join(ACTIVATIONS)}")
        self.config = config
        self.embeddings = Embeddings(config)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
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
        self._check("ids", ids, self.config.vocab, "the vocabulary's")
        if ids.dim() < 1 or ids.shape[-1] > self.config.positions:
            raise ValueError(
                f"ids: their shape is {tuple(ids.shape)}; it must be (..., tokens), with at most {self.config.positions} tokens, "
                "for the model has no more positions (Tokens.shortened cuts a text)"
            )
        if token_types is not None:
            self._check("token_types", token_types, self.config.token_types, "the types'")
            if token_types.shape != ids.shape:
                raise ValueError(
                    f"token_types: their shape is {tuple(token_types.shape)}; it must be that of ids, {tuple(ids.shape)}"
                )
        x = self.embeddings(ids, token_types)
        for layer in self.layers:
            x = layer(x, over)
        return x

    def pooled(self, hidden: Float[Tensor, "... tokens d_model"]) -> Float[Tensor, "... d_model"]:
        """A text's vector as BERT was trained to make it from the first token: tanh(W h)."""
        if self.pooler is None:
            raise ValueError("pooler: this model has none; its checkpoint, or Config(pooler=True), must bring it")
        return torch.tanh(self.pooler(hidden[..., 0, :]))

    def logits(self, hidden: Float[Tensor, "... tokens d_model"]) -> Float[Tensor, "... tokens vocab"]:
        """What could stand in each place: masked language modelling."""
        if self.masked_lm is None:
            raise ValueError("masked_lm: this model has none; its checkpoint, or Config(masked_lm=True), must bring it")
        return self.masked_lm(hidden, self.embeddings.words.weight)

    @classmethod
    def from_pretrained(cls, path_or_package: str | Path, *, dtype: torch.dtype = torch.float32) -> Bert:
        """A trained BERT, in evaluation mode, from a folder with config.json and model.safetensors, or from a package.

        Checkpoints of the bare model and of models with heads are read alike; of the heads only the one for masked
        language modelling is kept.

        Raises:
            FileNotFoundError: where there is no such folder, or a file is missing from it.
            ValueError: where a file is not what it should be; a tensor that is missing, extra or misshapen is named.
        """
        folder = files.folder(path_or_package)
        fields = files.config(folder, ("bert",))
        fields.expect(position_embedding_type="absolute", is_decoder=False, add_cross_attention=False)
        arguments = fields.as_arguments(FIELDS, SIZES["base"])
        with files.opened(folder) as weights:
            names = _today(weights)
            modules = {name.rpartition(".")[0] for name in names.values()}
            arguments |= {head: NAMES[head] in modules for head in ("pooler", "masked_lm")}
            try:
                # nothing is drawn that the checkpoint would replace
                with torch.device("meta"):
                    model = cls(Config(**arguments))
            except ValueError as error:
                raise ValueError(f"{fields.path}: {error}") from None
            files.fill(model, weights, NAMES, names, dtype=dtype)
        return model.eval()

    def _check(self, name: str, numbers: Tensor, count: int, whose: str) -> None:
        if numbers.dtype not in (torch.int64, torch.int32):
            raise ValueError(f"{name}: they are {numbers.dtype}; they must be torch.int64 or torch.int32")
        if numbers_hidden() or numbers.is_meta or not numbers.numel():
            return
        low, high = (int(bound) for bound in numbers.aminmax())
        if low < 0 or high >= count:
            raise ValueError(f"{name}: they lie between {low} and {high}; they must be {whose}, 0 to {count - 1}")


class Embeddings(nn.Module):
    """What a token is before it has read any other: word + position + type, normalised."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.words = _embedding(config.vocab, config.d_model)
        self.positions = _embedding(config.positions, config.d_model)
        self.token_types = _embedding(config.token_types, config.d_model)
        self.norm = nn.LayerNorm(config.d_model, config.eps)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, ids: Tensor, token_types: Tensor | None) -> Tensor:
        types = self.token_types.weight[0] if token_types is None else self.token_types(token_types)
        x = self.words(ids) + types + self.positions.weight[: ids.shape[-1]]
        return self.dropout(self.norm(x))


class Layer(nn.Module):
    """Attention, then a feed-forward network for each token; both are added to the token and normalised."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.attention = MultiHeadAttention(config.d_model, config.heads, dropout=config.attention_dropout)
        self.attention_norm = nn.LayerNorm(config.d_model, config.eps)
        self.up = nn.Linear(config.d_model, config.d_feedforward)
        self.down = nn.Linear(config.d_feedforward, config.d_model)
        self.norm = nn.LayerNorm(config.d_model, config.eps)
        self.dropout = nn.Dropout(config.dropout)
        self.activation = config.activation

    def forward(self, x: Tensor, over: Neighbourhood | Tensor | None) -> Tensor:
        found, _ = self.attention(x, over=over)
        x = self.attention_norm(x + self.dropout(found))
        made = self.down(ACTIVATIONS[self.activation](self.up(x)))
        return self.norm(x + self.dropout(made))


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


def _embedding(count: int, features: int) -> nn.Embedding:
    """An embedding that is not drawn yet: `_reset` does it. nn.Embedding's own draw loads torch's compiler on the meta device."""
    return nn.Embedding.from_pretrained(torch.empty(count, features), freeze=False)


def _reset(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.trunc_normal_(module.weight, std=0.02, a=-0.04, b=0.04)
    if isinstance(module, nn.Linear):
        nn.init.zeros_(module.bias)


# heads of fine-tuned models and of next-sentence prediction, which this model has no module for
_OTHER_HEADS = ("cls.seq_relationship.", "classifier.", "qa_outputs.")
_WORDS, _DECODER = "embeddings.word_embeddings.weight", "cls.predictions.decoder."


def _today(weights: files.Weights) -> dict[str, str]:
    """The tensors of a checkpoint that are read, each with its name in NAMES."""
    names = {}
    for stored in weights.names:
        name = stored.removeprefix("bert.").replace("LayerNorm.gamma", "LayerNorm.weight")
        name = name.replace("LayerNorm.beta", "LayerNorm.bias")
        if name != "embeddings.position_ids" and not name.startswith(_OTHER_HEADS):
            names[stored] = name
    for copy, original in ((f"{_DECODER}weight", _WORDS), (f"{_DECODER}bias", "cls.predictions.bias")):
        _drop_copy(weights, names, copy, original)
    return names


def _drop_copy(weights: files.Weights, names: dict[str, str], copy: str, original: str) -> None:
    """Leave out a tensor that the checkpoint holds twice; the decoder's are those of other modules."""
    stored = {name: key for key, name in names.items()}
    if copy not in stored:
        return
    if original not in stored:
        names[stored[copy]] = original
        return
    same = (weights.read(stored[name], torch.float32) for name in (copy, original))
    if not torch.equal(*same):
        raise ValueError(
            f"{weights.path}: {stored[copy]} is not {stored[original]}; they must be equal, for the decoder is the embeddings"
        )
    del names[stored[copy]]
