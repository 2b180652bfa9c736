"""The encoder-decoder of Vaswani 2017."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from polyhead._checks import (
    MAX_LAYERS,
    WrongType,
    check_dense_tensor,
    check_integer,
    check_integers,
    check_numel,
    describe_type,
)
from polyhead.linalg.skinny_gemm import linear
from polyhead.neighbourhood import Causal, Padding
from polyhead.nn.attention import MultiHeadAttention
from polyhead.nn.cache import KeyValueCache, KeyValues, restore_caches_on_error
from polyhead.nn.checks import check_dropout_rates, check_optional_sizes, explain_input_mismatch
from polyhead.nn.dropout import dropout_16bit
from polyhead.nn.embedding_helpers import check_embedding_ids, sinusoidal_positions, uninitialised_embedding
from polyhead.nn.generate import Sampler, check_eval_mode, check_generate_arguments, generate_tokens
from polyhead.nn.transformer_layer import FeedForward, TransformerLayer


class Transformer(nn.Module):
    """The encoder-decoder of Vaswani 2017: reads a source and generates a target token by token.

    Token embeddings are scaled by √d_model, and sinusoidal positions are added. The output projection is tied to the target
    embedding. In `capture` the heads are `encoder.3.self_attn`, `decoder.2.self_attn` and `decoder.2.cross_attn`.

    Args:
        vocab: size of the target vocabulary. The source shares it, and its embedding, unless `source_vocab` is given.
        d_model: features per token.
        num_heads: heads per attention.
        layers: layers of the encoder and of the decoder; a pair for different numbers.
        d_feedforward: hidden features of the feed-forward networks; 4 · `d_model` by default.
        source_vocab: size of a separate source vocabulary, with its own embedding.
        activation: activation of the feed-forward networks.
        norm_first: normalise the input of each sublayer (pre-norm), or the residual sum (post-norm).
        dropout: dropout rate of the embeddings and of each sublayer's output.
        attention_dropout: dropout rate of query-key pairs; `dropout` by default.
    """

    def __init__(
        self,
        vocab: int,
        *,
        d_model: int = 512,
        num_heads: int = 8,
        layers: int | tuple[int, int] = 6,
        d_feedforward: int | None = None,
        source_vocab: int | None = None,
        activation: str = "relu",
        norm_first: bool = True,
        dropout: float = 0.1,
        attention_dropout: float | None = None,
    ) -> None:
        super().__init__()
        encoder_layers, decoder_layers = _check_layer_counts(layers)
        vocab, d_model = check_integer("vocab", vocab), check_integer("d_model", d_model)
        source_vocab, d_feedforward = check_optional_sizes(source_vocab=source_vocab, d_feedforward=d_feedforward)
        check_numel("embedding", (max(vocab, source_vocab or 0), d_model), hint="vocab or d_model is too large")
        attention_dropout = dropout if attention_dropout is None else attention_dropout
        dropout, attention_dropout = check_dropout_rates(dropout=dropout, attention_dropout=attention_dropout)
        self.vocab, self.d_model = vocab, d_model
        self.source_vocab = vocab if source_vocab is None else source_vocab

        def attention() -> MultiHeadAttention:
            return MultiHeadAttention(d_model, num_heads, dropout=attention_dropout)

        def layer(cross: MultiHeadAttention | None) -> TransformerLayer:
            hidden = 4 * d_model if d_feedforward is None else d_feedforward
            feedforward = FeedForward(d_model, hidden, activation=activation)
            return TransformerLayer(attention(), feedforward, cross=cross, norm_first=norm_first, dropout=dropout)

        self.embedding = uninitialised_embedding(vocab, d_model)
        self.source_embedding = None if source_vocab is None else uninitialised_embedding(source_vocab, d_model)
        self.encoder = nn.ModuleList(layer(None) for _ in range(encoder_layers))
        self.encoder_norm = nn.LayerNorm(d_model) if norm_first else None
        self.decoder = nn.ModuleList(layer(attention()) for _ in range(decoder_layers))
        self.decoder_norm = nn.LayerNorm(d_model) if norm_first else None
        self.dropout = dropout
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Reinitialise: embeddings normal with standard deviation 1/√d_model, linear maps Xavier-uniform, biases zero."""
        for module in self.modules():
            if isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=self.d_model**-0.5)
            elif isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)

    def forward(
        self,
        source: Int[Tensor, "batch keys"],
        target: Int[Tensor, "batch queries"],
        *,
        source_over: Padding | None = None,
        target_over: Padding | None = None,
    ) -> Float[Tensor, "batch queries vocab"]:
        """Logits of the token after each target token, which sees the source and the target up to itself.

        Args:
            source, target: ids. In training the target begins with a start token and lacks its last token.
            source_over, target_over: `Padding(lengths)` of padded batches.
        """
        memory = self.encode(source, source_over)
        return self.logits(self.decode(target, memory, target_over, memory_over=source_over))

    def encode(
        self, source: Int[Tensor, "batch keys"], over: Padding | None = None
    ) -> Float[Tensor, "batch keys d_model"]:
        """Hidden states of the source: the memory of the decoder."""
        _check_padding_argument("source_over", over)
        check_embedding_ids("source", source, self.source_vocab)
        x = self._embed(self.source_embedding or self.embedding, source, 0)
        for layer in self.encoder:
            x = layer(x, over=over)
        return x if self.encoder_norm is None else self.encoder_norm(x)

    def decode(
        self,
        target: Int[Tensor, "batch queries"],
        memory: Float[Tensor, "batch keys d_model"] | Sequence[KeyValues],
        over: Padding | None = None,
        *,
        memory_over: Padding | None = None,
        caches: Sequence[KeyValueCache] | None = None,
    ) -> Float[Tensor, "batch queries d_model"]:
        """Hidden states of the target, the input of `logits`.

        Args:
            target: ids; with caches, those after the cached ones.
            memory: the output of `encode`, or its keys and values from `begin`.
            over, memory_over: `Padding(lengths)` of the target and of the source.
            caches: the caches from `begin`, to decode a target in steps.
        """
        _check_padding_argument("target_over", over)
        _check_padding_argument("memory_over", memory_over)
        check_embedding_ids("target", target, self.vocab)
        if not isinstance(memory, (Tensor, Sequence)):
            raise WrongType(
                f"memory must be the output of encode, or the keys and values from begin, got {describe_type(memory)}"
            )
        for name, per_layer in (("memory", memory), ("caches", caches)):
            if per_layer is not None and not isinstance(per_layer, Tensor) and len(per_layer) != len(self.decoder):
                raise ValueError(
                    f"{name} must have one entry for each of {len(self.decoder)} layers, got {len(per_layer)}"
                )
        causal = Causal() if over is None else Causal() & over
        x = self._embed(self.embedding, target, 0 if caches is None else caches[0].length)
        with restore_caches_on_error(caches):
            for number, layer in enumerate(self.decoder):
                layer_memory = memory if isinstance(memory, Tensor) else memory[number]
                cache = None if caches is None else caches[number]
                x = layer(x, layer_memory, causal, memory_over=memory_over, cache=cache)
        return x if self.decoder_norm is None else self.decoder_norm(x)

    def prepare_decoding(
        self, memory: Float[Tensor, "batch keys d_model"], length: int
    ) -> tuple[list[KeyValues], list[KeyValueCache]]:
        """Keys and values of the memory, and empty caches for `length` tokens, per decoder layer: the arguments of `decode`."""
        layers = [layer for layer in self.decoder if isinstance(layer, TransformerLayer)]
        projected = [layer.cross_attn.project_kv(memory) for layer in layers if layer.cross_attn is not None]
        return projected, [layer.self_attn.cache(len(memory), length) for layer in layers]

    def logits(self, hidden: Float[Tensor, "... d_model"]) -> Float[Tensor, "... vocab"]:
        """Logits of the next token."""
        with explain_input_mismatch(self, self.d_model, hidden=hidden):
            return linear(hidden, self.embedding.weight)

    @torch.no_grad()
    def generate(
        self,
        source: Int[Tensor, "batch keys"],
        *,
        start: int,
        stop: int | Sequence[int] | None = None,
        max_new_tokens: int,
        source_over: Padding | None = None,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        generator: torch.Generator | None = None,
    ) -> Int[Tensor, "batch new"]:
        """Generate a target for each source, token by token. The model must be in evaluation mode.

        Args:
            source: ids.
            start: the first token of every target; not part of the result.
            stop: the token, or tokens, that end a target. The rest of the row is filled with it.
            max_new_tokens: the maximum number of tokens.
            source_over: `Padding(lengths)` of a padded batch.
            temperature: 0 takes the most likely token each time (greedy); else tokens are sampled from softmax(logits / temperature).
            top_k: sample from the `top_k` most likely tokens.
            top_p: sample from the most likely tokens that together have this probability.
            generator: the random number generator.
        """
        check_eval_mode(self)
        check_dense_tensor("source", source, "of ids (batch, tokens)")
        if source.dim() != 2 or not source.numel():
            raise ValueError(f"source must have shape (batch, tokens), 1 or more of each, got {tuple(source.shape)}")
        check_embedding_ids("source", source, self.source_vocab)
        sampler = Sampler(temperature, top_k, top_p, generator)
        start = check_integer("start", start, 0, self.vocab - 1)
        first = source.new_tensor([[start]]).expand(len(source), 1)
        stops = check_generate_arguments(first, max_new_tokens, stop, sampler, vocab=self.vocab)
        memory, caches = self.prepare_decoding(self.encode(source, source_over), max_new_tokens)

        def step(ids: Tensor) -> Tensor:
            return self.logits(self.decode(ids, memory, memory_over=source_over, caches=caches)[:, -1])

        return generate_tokens(step, first, max_new_tokens, stops, sampler)

    def _embed(self, embedding: nn.Embedding, ids: Tensor, first: int) -> Tensor:
        positions = sinusoidal_positions(first, first + ids.shape[-1], self.d_model, embedding.weight)
        x = embedding(ids) * math.sqrt(self.d_model) + positions
        return dropout_16bit(x, self.dropout) if self.training and self.dropout else x


def _check_layer_counts(layers: object) -> list[int]:
    """Numbers of layers of the encoder and of the decoder."""
    if isinstance(layers, Sequence) and len(layers) == 2:
        return check_integers("layers", layers, 1, MAX_LAYERS)
    return [check_integer("layers", layers, 1, MAX_LAYERS, hint="a pair is for the encoder and the decoder")] * 2


def _check_padding_argument(name: str, over: object) -> None:
    if over is not None and not isinstance(over, Padding):
        raise ValueError(f"{name} must be Padding(lengths), or None if no token is padded, got {over!r:.80}")
