"""BERT (Devlin 2018) from MultiHeadAttention: the model, its sizes, and the names in its checkpoints.

The input is the normalised sum of token, position and type embeddings. Each layer is attention and a feed-forward network,
each with a residual connection followed by a LayerNorm (post-norm).
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from polyhead._checks import describe_type
from polyhead._old_checkpoints import MODEL_KEYS, accept_old_state_dict_keys
from polyhead.models import checkpoint_files, checkpoint_reading
from polyhead.models.checkpoint_model import CheckpointModel, NamedTensors
from polyhead.models.tokenizer import check_sequence_length
from polyhead.neighbourhood import Neighbourhood
from polyhead.nn import FeedForward, MultiHeadAttention, TransformerLayer
from polyhead.nn.embedding_helpers import check_embedding_ids, uninitialised_embedding
from polyhead.nn.transformer_layer import ACTIVATIONS


class Config(NamedTuple):
    """The sizes and options of a BERT; the defaults are the same in nearly all of them."""

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
    # Wang 2020; the default model is minilm-l6
    "minilm-l12": Config(384, 12, 12, 1536),
    "minilm-l6": Config(384, 12, 6, 1536),
}

# parameters as published by Devlin 2018, Turc 2019 and Wang 2020; Turc includes the masked-LM head
PUBLISHED_PARAMETERS = {
    "base": "110M",
    "large": "340M",
    "tiny": "4.4M",
    "mini": "11.3M",
    "small": "29.1M",
    "medium": "41.7M",
    "minilm-l12": "33M",
}

# the model's modules -> the modules of a checkpoint; {} is the index of a layer
CHECKPOINT_NAMES = {
    "embeddings.token_embedding": "embeddings.word_embeddings",
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

# the fields of Config -> the fields of config.json
CONFIG_FIELDS = {
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


# heads of fine-tuned models and of next-sentence prediction, which are not read
_IGNORED_HEADS = ("cls.seq_relationship.", "classifier.", "qa_outputs.")
_EMBEDDING_NAME, _DECODER_PREFIX = "embeddings.word_embeddings.weight", "cls.predictions.decoder."


class Bert(CheckpointModel):
    """BERT: maps token ids to hidden states, with attention in both directions.

    Weights are initialised as in Devlin 2018: normal with standard deviation 0.02, truncated at two deviations; biases are
    zero. Under `torch.device("meta")` a model is built without allocating memory. Of the heads in a checkpoint, the pooler
    and the masked-LM head are read, others are ignored.

    Attributes:
        pooler: the linear map of `pool`, or None.
        masked_lm: the head of `logits`, or None; its decoder is tied to the token embedding.
    """

    config: Config
    _model_types, _module_names = ("bert",), CHECKPOINT_NAMES

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.embeddings = Embeddings(config)
        self.layers = nn.ModuleList(_build_layer(config) for _ in range(config.layers))
        self.pooler = nn.Linear(config.d_model, config.d_model) if config.pooler else None
        self.masked_lm = MaskedLMHead(config) if config.masked_lm else None
        self.apply(_init_weights)

    def forward(
        self,
        ids: Int[Tensor, "... tokens"],
        over: Neighbourhood | Tensor | None = None,
        *,
        token_types: Int[Tensor, "... tokens"] | None = None,
    ) -> Float[Tensor, "... tokens d_model"]:
        """The hidden states of the last layer.

        Args:
            ids: token ids with the special tokens around each text, as a `Tokenizer` returns them.
            over: which tokens may attend to which, as in `MultiHeadAttention`: `Padding(lengths)` for texts of different
                lengths; a bool tensor is a mask of pairs, True = may attend.
            token_types: the index of the text that each token belongs to; 0 by default.

        Raises:
            ValueError: for ids outside the vocabulary, and texts longer than the model's positions.
        """
        check_embedding_ids("ids", ids, self.config.vocab)
        check_sequence_length(ids, self.config.positions, over=over)
        if token_types is not None:
            check_embedding_ids("token_types", token_types, self.config.token_types, "the token types")
            if token_types.shape != ids.shape:
                raise ValueError(
                    f"token_types must have the shape of ids, {tuple(ids.shape)}, got {tuple(token_types.shape)}"
                )
        own = over.item_indices if isinstance(over, Neighbourhood) else None
        # a process that has some tokens of a sequence takes their positions in it
        x = self.embeddings(ids, token_types, None if own is None else own[0])
        for layer in self.layers:
            x = layer(x, over=over)
        return x

    def pool(self, hidden: Float[Tensor, "... tokens d_model"]) -> Float[Tensor, "... d_model"]:
        """The vector of a text, as BERT was trained to compute it from the first token: tanh(W h)."""
        if self.pooler is None:
            raise ValueError(
                "pool needs a pooler, got a model without one; use Config(pooler=True) or a checkpoint that has it"
            )
        self._check_hidden(hidden)
        return torch.tanh(self.pooler(hidden[..., 0, :]))

    def logits(self, hidden: Float[Tensor, "... tokens d_model"]) -> Float[Tensor, "... tokens vocab"]:
        """The logits of the token at each position: masked language modelling."""
        if self.masked_lm is None:
            raise ValueError(
                "logits needs a masked-LM head, got a model without one; use Config(masked_lm=True) or a checkpoint that has it"
            )
        self._check_hidden(hidden)
        return self.masked_lm(hidden, self.embeddings.token_embedding.weight)

    def _check_hidden(self, hidden: Tensor) -> None:
        if not isinstance(hidden, Tensor) or hidden.dim() < 2 or hidden.shape[-1] != self.config.d_model:
            raise ValueError(
                f"hidden must be a tensor (..., tokens, {self.config.d_model}), as the model returns it, got {describe_type(hidden)}"
            )

    @classmethod
    def _read_config(cls, fields: checkpoint_files.ConfigFile) -> Config:
        fields.require_values(position_embedding_type="absolute", is_decoder=False, add_cross_attention=False)
        return Config(**fields.config_arguments(CONFIG_FIELDS, SIZES["base"]))

    @classmethod
    def _select_tensors(cls, config: Config, stored: checkpoint_reading.OpenCheckpoint) -> tuple[Config, NamedTensors]:
        tensors = []
        for old in stored.names:
            name = old.removeprefix("bert.").replace("LayerNorm.gamma", "LayerNorm.weight")
            name = name.replace("LayerNorm.beta", "LayerNorm.bias")
            if name != "embeddings.position_ids" and not name.startswith(_IGNORED_HEADS):
                tensors.append((name, stored[old]))
        for copy, original in (
            (f"{_DECODER_PREFIX}weight", _EMBEDDING_NAME),
            (f"{_DECODER_PREFIX}bias", "cls.predictions.bias"),
        ):
            tensors = checkpoint_reading.drop_tied_copy(tensors, copy, original)
        modules = {name.rpartition(".")[0] for name, _ in tensors}
        pooler, masked_lm = CHECKPOINT_NAMES["pooler"] in modules, CHECKPOINT_NAMES["masked_lm"] in modules
        return config._replace(pooler=pooler, masked_lm=masked_lm), tensors

    def _config_json_fields(self) -> dict[str, Any]:
        return {
            "model_type": "bert",
            "architectures": ["BertModel" if self.masked_lm is None else "BertForMaskedLM"],
            **checkpoint_files.config_json_fields(CONFIG_FIELDS, self.config),
        }

    def _convert_to_stored(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        if self.masked_lm is None:
            return tensors
        return {name if name.startswith("cls.") else f"bert.{name}": x for name, x in tensors.items()}


class Embeddings(nn.Module):
    """The input of the first layer: token + position + type embedding, normalised."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        accept_old_state_dict_keys(self, MODEL_KEYS)
        self.token_embedding = uninitialised_embedding(config.vocab, config.d_model)
        self.positions = uninitialised_embedding(config.positions, config.d_model)
        self.token_types = uninitialised_embedding(config.token_types, config.d_model)
        self.norm = nn.LayerNorm(config.d_model, config.eps)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, ids: Tensor, token_types: Tensor | None, positions: Tensor | None = None) -> Tensor:
        types = self.token_types.weight[0] if token_types is None else self.token_types(token_types)
        x = (
            self.token_embedding(ids)
            + types
            + self.positions.weight[slice(ids.shape[-1]) if positions is None else positions]
        )
        return self.dropout(self.norm(x))


def _build_layer(config: Config) -> TransformerLayer:
    return TransformerLayer(
        MultiHeadAttention(config.d_model, config.heads, dropout=config.attention_dropout),
        FeedForward(config.d_model, config.d_feedforward, activation=config.activation),
        norm=partial(nn.LayerNorm, eps=config.eps),
        norm_first=False,
        dropout=config.dropout,
    )


class MaskedLMHead(nn.Module):
    """The head for masked language modelling; its decoder is the token embedding, which the model owns."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.dense = nn.Linear(config.d_model, config.d_model)
        self.norm = nn.LayerNorm(config.d_model, config.eps)
        self.bias = nn.Parameter(torch.zeros(config.vocab))
        self.activation = config.activation

    def forward(self, hidden: Tensor, embedding: Float[Tensor, "vocab d_model"]) -> Tensor:
        return F.linear(self.norm(ACTIVATIONS[self.activation](self.dense(hidden))), embedding, self.bias)


def _init_weights(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.trunc_normal_(module.weight, std=0.02, a=-0.04, b=0.04)
    if isinstance(module, nn.Linear):
        nn.init.zeros_(module.bias)
