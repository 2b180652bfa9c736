"""Transformers from the layer: one kind of block for encoders and decoders, and the encoder-decoder (Vaswani 2017)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from polyhead._checks import LAYERS, WrongType, check_integer, check_integers, check_numel, check_tensor, kind_of
from polyhead._renamed import TRANSFORMER_LAYER, rename_keys
from polyhead._torch import is_symbolic, record_call, refuse_scripting, values_unavailable
from polyhead.linalg.skinny_gemm import apply_linear, linear
from polyhead.neighbourhood import Causal, Neighbourhood, Padding
from polyhead.nn.attention import MultiHeadAttention
from polyhead.nn.cache import KeyValueCache, KeyValues, all_or_none
from polyhead.nn.checks import check_features, check_shares, check_sizes
from polyhead.nn.generate import Sampler, check_evaluation, check_request, generate_tokens
from polyhead.nn.projection_inputs import dropout, live_rows

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
}


class FeedForward(nn.Module):
    """What is made of each item by itself: down(activation(up(x))), or down(activation(gate(x)) · up(x)).

    Args:
        d_model: features of the input and of the output.
        d_hidden: features between the two maps.
        activation: `"relu"`, `"gelu"`, `"gelu_tanh"` or `"silu"`.
        gated: whether a third map says how much of each hidden feature passes; with `"silu"` this is SwiGLU.
        bias: whether the maps have biases.
    """

    __prepare_scriptable__ = refuse_scripting

    def __init__(
        self, d_model: int, d_hidden: int, *, activation: str = "relu", gated: bool = False, bias: bool = True
    ) -> None:
        super().__init__()
        d_model, d_hidden = check_integer("d_model", d_model), check_integer("d_hidden", d_hidden)
        check_numel("up", (d_hidden, d_model), hint="d_model or d_hidden is too large")
        if not isinstance(activation, str) or activation not in ACTIVATIONS:
            raise ValueError(f"activation: it is {activation!r}; it must be one of {', '.join(ACTIVATIONS)}")
        self.activation = activation
        self.gate = nn.Linear(d_model, d_hidden, bias) if gated else None
        self.up = nn.Linear(d_model, d_hidden, bias)
        self.down = nn.Linear(d_hidden, d_model, bias)

    def forward(self, x: Float[Tensor, "... d_model"]) -> Float[Tensor, "... d_model"]:
        act = ACTIVATIONS[self.activation]
        try:
            up = apply_linear(self.up, x)
            return apply_linear(self.down, act(up) if self.gate is None else act(apply_linear(self.gate, x)) * up)
        except (RuntimeError, TypeError, AttributeError):
            check_features("x", x, self.up.in_features, self)
            raise

    def extra_repr(self) -> str:
        return f"activation={self.activation!r}"


def _rename_old_keys(module: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
    """Read state dicts of earlier releases."""
    rename_keys(state, prefix, TRANSFORMER_LAYER)


class TransformerLayer(nn.Module):
    """Attention to itself, in a decoder to a memory too, then a feed-forward network; each is added to what it was given.

    x + part(norm(x)) for each part with `norm_first` (pre-norm), else norm(x + part(x)) (post-norm, as in Vaswani 2017).
    An encoder's layer has no `cross`. A decoder's has one, and is called with `over=Causal()`.

    Args:
        attention: of the items to each other; it is called `self` among the modules.
        feedforward: what is made of each item, such as a `FeedForward`.
        cross: attention to a memory, such as the encoder's output.
        norm: makes a normalisation for a number of features.
        norm_first: whether parts are given what is normalised, or their sum is normalised.
        dropout: the share of each part's output that is dropped in training.
    """

    def __init__(
        self,
        attention: MultiHeadAttention,
        feedforward: nn.Module,
        *,
        cross: MultiHeadAttention | None = None,
        norm: Callable[[int], nn.Module] = nn.LayerNorm,
        norm_first: bool = True,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        (dropout,) = check_shares(dropout=dropout)
        _check_part("attention", attention)
        d_model = attention.d_model
        if cross is not None:
            _check_part("cross", cross)
            if cross.d_model != d_model:
                raise ValueError(f"cross: its d_model is {cross.d_model}; it must be that of the attention, {d_model}")
            if cross.position is not None:
                raise ValueError(
                    f"cross: it has the position {cross.position}; a memory's places are not the items' own, so it must have none"
                )
        if isinstance(feedforward, FeedForward) and feedforward.up.in_features != d_model:
            raise ValueError(
                f"feedforward: its d_model is {feedforward.up.in_features}; it must be that of the attention, {d_model}"
            )
        if not isinstance(feedforward, nn.Module):
            raise WrongType(f"feedforward must be a module such as FeedForward(…), got {kind_of(feedforward)}")
        if isinstance(norm, nn.Module) or not callable(norm):
            raise ValueError(
                f"norm must make a module for a number of features, such as nn.LayerNorm, got {kind_of(norm)}"
            )
        self.norm_first = norm_first
        self.register_load_state_dict_pre_hook(_rename_old_keys)
        self.self_attn = attention
        self.self_attn_norm = norm(d_model)
        self.cross_attn = cross
        self.cross_attn_norm = None if cross is None else norm(d_model)
        self.feedforward = feedforward
        self.feedforward_norm = norm(d_model)
        self.dropout = dropout

    def forward(
        self,
        x: Float[Tensor, "... items d_model"],
        memory: Float[Tensor, "... keys d_key"] | KeyValues | None = None,
        over: Neighbourhood | Tensor | None = None,
        *,
        memory_over: Neighbourhood | Tensor | None = None,
        cache: KeyValueCache | None = None,
    ) -> Float[Tensor, "... items d_model"]:
        """The items, each with what was found and made of it.

        Args:
            x: the items.
            memory: what `cross` attends to, or what `cross.project_kv` has kept of it.
            over: which items may attend to which. What stands in padded rows afterwards is of no meaning.
            memory_over: which items may attend to what of the memory.
            cache: keys and values of earlier items, made by `layer.self_attn.cache(batch, length)`.
        """
        if is_symbolic(x):
            recorded: Tensor = record_call(self, x, memory, over, memory_over=memory_over, cache=cache)
            return recorded
        if isinstance(memory, Neighbourhood):
            raise ValueError(f"memory: it is {memory!r}; who may attend to whom goes to over=, or memory_over=")
        if (memory is None) != (self.cross_attn is None):
            raise ValueError(
                "memory: this layer has cross-attention; pass what it attends to"
                if memory is None
                else "memory: this layer has no cross-attention; make it with cross=MultiHeadAttention(…)"
            )
        if not isinstance(x, Tensor) or x.dim() < 2 or x.shape[-1] != self.self_attn.d_model:
            check_features("x", x, self.self_attn.d_model, self)
        try:
            x = self._with(x, self.self_attn_norm, lambda y: self.self_attn(y, over=over, cache=cache)[0])
        except RuntimeError:
            check_features("x", x, self.self_attn.d_model, self)
            raise
        if self.cross_attn is not None:
            cross, norm = self.cross_attn, self.cross_attn_norm
            assert norm is not None
            x = self._with(x, norm, lambda y: cross(y, memory, over=memory_over)[0])
        # another module may look at its input's shape
        flat = cache is None and isinstance(self.feedforward, FeedForward)
        live = live_rows(over, x, self.self_attn.num_heads) if flat else None
        if live is None:
            return self._with(x, self.feedforward_norm, self.feedforward)
        return live.pad(self._with(live.unpad(x), self.feedforward_norm, self.feedforward))

    __prepare_scriptable__ = refuse_scripting

    def _with(self, x: Tensor, norm: nn.Module, part: Callable[[Tensor], Tensor]) -> Tensor:
        y = part(norm(x) if self.norm_first else x)
        if self.training and self.dropout:
            y = dropout(y, self.dropout)
        return x + y if self.norm_first else norm(x + y)

    def extra_repr(self) -> str:
        return f"norm_first={self.norm_first}, dropout={self.dropout}"


def _check_part(name: str, attention: object) -> None:
    """Raise where an attention cannot be a part that is added to what it was given."""
    if not isinstance(attention, MultiHeadAttention):
        raise ValueError(f"{name}: it is {type(attention).__name__}; it must be a MultiHeadAttention")
    width = attention.value_dim * (attention.num_heads if attention.combine == "concat" else 1)
    width = width if attention.o_proj is None else attention.o_proj.out_features
    if width != attention.d_model:
        raise ValueError(
            f"{name}: its output has {width} features; it must have those of its query, {attention.d_model}"
        )
    if attention.residual:
        raise ValueError(f"{name}: it adds its query by itself (residual=True); it must not, since the layer does")


class Transformer(nn.Module):
    """The encoder-decoder of Vaswani 2017: reads a source, writes a target token by token.

    Tokens are embedded (times √d_model), their positions added as sinusoids. The output is scored against the target's
    embeddings. In `capture` the heads are `encoder.3.self_attn`, `decoder.2.self_attn` and `decoder.2.cross_attn`.

    Args:
        vocab: how many ids a target has; the source has the same, with the same embeddings, unless `source_vocab` is given.
        d_model: features of a token.
        num_heads: heads of every attention.
        layers: of the encoder and of the decoder; a pair for different numbers.
        d_feedforward: hidden features of the feed-forward networks; four times `d_model` unless given.
        source_vocab: how many ids a source has, with embeddings of its own.
        activation: of the feed-forward networks.
        norm_first: normalise what a part is given (pre-norm), or the sum with it (post-norm).
        dropout: in training, the share dropped of embeddings and of each part's output.
        attention_dropout: the share of pairs dropped; as `dropout` unless given.
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
        encoder_layers, decoder_layers = _two(layers)
        vocab, d_model = check_integer("vocab", vocab), check_integer("d_model", d_model)
        source_vocab, d_feedforward = check_sizes(source_vocab=source_vocab, d_feedforward=d_feedforward)
        check_numel("embedding", (max(vocab, source_vocab or 0), d_model), hint="vocab or d_model is too large")
        attention_dropout = dropout if attention_dropout is None else attention_dropout
        dropout, attention_dropout = check_shares(dropout=dropout, attention_dropout=attention_dropout)
        self.vocab, self.d_model = vocab, d_model
        self.source_vocab = vocab if source_vocab is None else source_vocab

        def attention() -> MultiHeadAttention:
            return MultiHeadAttention(d_model, num_heads, dropout=attention_dropout)

        def layer(cross: MultiHeadAttention | None) -> TransformerLayer:
            hidden = 4 * d_model if d_feedforward is None else d_feedforward
            feedforward = FeedForward(d_model, hidden, activation=activation)
            return TransformerLayer(attention(), feedforward, cross=cross, norm_first=norm_first, dropout=dropout)

        self.embedding = embedding(vocab, d_model)
        self.source_embedding = None if source_vocab is None else embedding(source_vocab, d_model)
        self.encoder = nn.ModuleList(layer(None) for _ in range(encoder_layers))
        self.encoder_norm = nn.LayerNorm(d_model) if norm_first else None
        self.decoder = nn.ModuleList(layer(attention()) for _ in range(decoder_layers))
        self.decoder_norm = nn.LayerNorm(d_model) if norm_first else None
        self.dropout = dropout
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights anew: embeddings normal with deviation 1/√d_model, maps Xavier-uniform, biases zero."""
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
        """Logits of the token after each of the target's, which sees the source and the target up to itself.

        Args:
            source, target: ids. In training the target begins with a start token and is one token short of its end.
            source_over, target_over: `Padding(lengths)`, where they have different lengths.
        """
        memory = self.encode(source, source_over)
        return self.logits(self.decode(target, memory, target_over, memory_over=source_over))

    def encode(
        self, source: Int[Tensor, "batch keys"], over: Padding | None = None
    ) -> Float[Tensor, "batch keys d_model"]:
        """The source as the decoder reads it."""
        _check_padding("source_over", over)
        check_ids("source", source, self.source_vocab)
        x = self._embedded(self.source_embedding or self.embedding, source, 0)
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
        """The target's hidden states, of which `logits` makes the next tokens.

        Args:
            target: ids; with caches, those that follow the ones in them.
            memory: what `encode` gave, or what `begin` made of it.
            over, memory_over: `Padding(lengths)` of the target and of the source.
            caches: what `begin` made, to write a target a part at a time.
        """
        _check_padding("target_over", over)
        _check_padding("memory_over", memory_over)
        check_ids("target", target, self.vocab)
        if not isinstance(memory, (Tensor, Sequence)):
            raise WrongType(f"memory must be what encode gave, or what begin made of it, got {kind_of(memory)}")
        for name, given in (("memory", memory), ("caches", caches)):
            if given is not None and not isinstance(given, Tensor) and len(given) != len(self.decoder):
                raise ValueError(
                    f"{name}: there are {len(given)}; there must be one for each of {len(self.decoder)} layers"
                )
        causal = Causal() if over is None else Causal() & over
        x = self._embedded(self.embedding, target, 0 if caches is None else caches[0].length)
        with all_or_none(caches):
            for number, layer in enumerate(self.decoder):
                known = memory if isinstance(memory, Tensor) else memory[number]
                cache = None if caches is None else caches[number]
                x = layer(x, known, causal, memory_over=memory_over, cache=cache)
        return x if self.decoder_norm is None else self.decoder_norm(x)

    def begin(
        self, memory: Float[Tensor, "batch keys d_model"], length: int
    ) -> tuple[list[KeyValues], list[KeyValueCache]]:
        """What each layer of the decoder keeps while a target of so many tokens is written: to hand to `decode`."""
        layers = [layer for layer in self.decoder if isinstance(layer, TransformerLayer)]
        kept = [layer.cross_attn.project_kv(memory) for layer in layers if layer.cross_attn is not None]
        return kept, [layer.self_attn.cache(len(memory), length) for layer in layers]

    def logits(self, hidden: Float[Tensor, "... d_model"]) -> Float[Tensor, "... vocab"]:
        """How likely each token is to come next."""
        try:
            return linear(hidden, self.embedding.weight)
        except (RuntimeError, TypeError, AttributeError):
            check_features("hidden", hidden, self.d_model, self)
            raise

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
        """Write a target for each source, one token after the other. Call it in evaluation mode.

        Args:
            source: ids.
            start: the token that every target begins with; it is not part of what is returned.
            stop: the token, or tokens, that end a target; what comes after it is filled with it.
            max_new_tokens: where to stop at the latest.
            source_over: `Padding(lengths)`, where sources have different lengths.
            temperature: 0 takes the likeliest token each time (greedy); else tokens are drawn from softmax(logits / temperature).
            top_k: draw from so many likeliest tokens.
            top_p: draw from the likeliest tokens that together have this probability.
            generator: what draws.
        """
        check_evaluation(self)
        check_tensor("source", source, "of ids (batch, tokens)")
        if source.dim() != 2 or not source.numel():
            raise ValueError(
                f"source: its shape is {tuple(source.shape)}; it must be (batch, tokens), 1 or more of both"
            )
        check_ids("source", source, self.source_vocab)
        sampler = Sampler(temperature, top_k, top_p, generator)
        start = check_integer("start", start, 0, self.vocab - 1)
        first = source.new_tensor([[start]]).expand(len(source), 1)
        stops = check_request(first, max_new_tokens, stop, sampler, vocab=self.vocab)
        memory, caches = self.begin(self.encode(source, source_over), max_new_tokens)

        def step(ids: Tensor) -> Tensor:
            return self.logits(self.decode(ids, memory, memory_over=source_over, caches=caches)[:, -1])

        return generate_tokens(step, first, max_new_tokens, stops, sampler)

    def _embedded(self, tokens: nn.Embedding, ids: Tensor, first: int) -> Tensor:
        where = sinusoids(first, first + ids.shape[-1], self.d_model, tokens.weight)
        x = tokens(ids) * math.sqrt(self.d_model) + where
        return dropout(x, self.dropout) if self.training and self.dropout else x


def _two(layers: object) -> list[int]:
    """How many layers the encoder and the decoder have."""
    if isinstance(layers, Sequence) and len(layers) == 2:
        return check_integers("layers", layers, 1, LAYERS)
    return [check_integer("layers", layers, 1, LAYERS, hint="a pair is for the encoder and the decoder")] * 2


def _check_padding(name: str, over: object) -> None:
    if over is not None and not isinstance(over, Padding):
        raise ValueError(f"{name}: it is {over!r:.80}; it must be Padding(lengths), or None where all tokens are real")


def sinusoids(first: int, stop: int, features: int, like: Tensor) -> Float[Tensor, "positions features"]:
    """Positions as Vaswani 2017 has them: sines and cosines of position / 10000^(2i / features), side by side."""
    frequency = 10_000.0 ** (-torch.arange(0, features, 2, dtype=torch.float64, device=like.device) / features)
    angle = torch.arange(first, stop, dtype=torch.float64, device=like.device)[:, None] * frequency
    return torch.stack((angle.sin(), angle.cos()), -1).flatten(-2)[:, :features].to(like.dtype)


def embedding(count: int, features: int) -> nn.Embedding:
    """An embedding that is not drawn yet; nn.Embedding's own draw loads torch's compiler on the meta device."""
    return nn.Embedding.from_pretrained(torch.empty(count, features), freeze=False)


def check_ids(name: str, ids: Tensor, count: int, whose: str = "the vocabulary's") -> None:
    """Raise where numbers are not rows of an embedding, such as ids of a vocabulary."""
    if not check_tensor(name, ids, "of ids (..., tokens)").dim():
        raise ValueError(f"{name} must be a tensor of ids (..., tokens), got shape ()")
    if ids.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"{name}: they are {ids.dtype}; they must be torch.int64 or torch.int32")
    if values_unavailable(ids) or not ids.numel():
        return
    low, high = (int(bound) for bound in ids.aminmax())
    if low < 0 or high >= count:
        raise ValueError(f"{name}: they lie between {low} and {high}; they must be {whose}, 0 to {count - 1}")
