"""CausalModel: the forward pass, caches and generation that GPT and Llama share."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from polyhead._checks import describe_type
from polyhead.models.checkpoint_model import CheckpointModel
from polyhead.models.tokenizer import check_sequence_length
from polyhead.neighbourhood import Causal, Neighbourhood, Padding, Window, as_neighbourhood, intersection_parts
from polyhead.nn import KeyValueCache, TransformerLayer
from polyhead.nn.cache import restore_caches_on_error
from polyhead.nn.embedding_helpers import check_embedding_ids
from polyhead.nn.generate import Sampler, check_eval_mode, check_generate_arguments, generate_tokens


class CausalModel(CheckpointModel):
    """The base class of causal language models: embeddings, pre-norm layers, a final norm, logits.

    Attributes:
        config: its `vocab` and `positions` bound ids and lengths.
        window: the number of keys that a token attends to, its own included; None for all keys before it.
    """

    token_embedding: nn.Embedding
    layers: nn.ModuleList
    norm: nn.Module
    window: int | None = None

    @abstractmethod
    def embed(
        self, ids: Int[Tensor, "... tokens"], positions: slice | Int[Tensor, "... tokens"]
    ) -> Float[Tensor, "... tokens d_model"]:
        """The input of the first layer, for tokens at these positions."""

    @abstractmethod
    def logits(self, hidden: Float[Tensor, "... d_model"]) -> Float[Tensor, "... vocab"]:
        """The logits of the next token."""

    def _check_hidden(self, hidden: Tensor) -> None:
        """Raise unless this is a tensor of hidden states."""
        features = self.config.d_model
        if not isinstance(hidden, Tensor) or hidden.dim() < 1 or hidden.shape[-1] != features:
            raise ValueError(
                f"hidden must be a tensor (..., {features}), as the model returns it, got {describe_type(hidden)}"
            )

    def forward(
        self,
        ids: Int[Tensor, "... tokens"],
        over: Neighbourhood | Tensor | None = None,
        *,
        caches: Sequence[KeyValueCache] | None = None,
    ) -> Float[Tensor, "... tokens d_model"]:
        """The hidden states of the last layer, the input of `logits`.

        Args:
            ids: token ids; with caches, those that follow the cached tokens.
            over: a neighbourhood in addition to the causal one: `Padding(lengths)` for texts of different lengths, or
                `Padding(real)`, a bool tensor that covers the cached tokens too. Positions count real tokens, from 0.
            caches: the result of `caches`, to process a text in parts.

        Raises:
            ValueError: for ids outside the vocabulary, and texts longer than the model's positions.
        """
        check_embedding_ids("ids", ids, self.config.vocab)
        if caches is not None and len(caches) != len(self.layers):
            raise ValueError(
                f"caches must have one cache per layer, {len(self.layers)}, got {len(caches)}; model.caches(batch, length) makes them"
            )
        # how much of a static cache is filled only the device knows
        first = 0 if caches is None or caches[0].positions_of(0) is not None else caches[0].length
        check_sequence_length(ids, self.config.positions, first, over)
        return self._run_layers(ids, over, caches)

    def _run_layers(
        self, ids: Tensor, over: Neighbourhood | Tensor | None, caches: Sequence[KeyValueCache] | None
    ) -> Tensor:
        tokens, keys = ids.shape[-1], ids.shape[-1] if caches is None else caches[0].keys_after(ids.shape[-1])
        at = None if caches is None else caches[0].positions_of(tokens)
        positions = _token_positions(over, slice(keys - tokens, keys) if at is None else at)
        over = self._causal_neighbourhood(over, tokens, keys)
        x = self.embed(ids, positions)
        with restore_caches_on_error(caches):
            for index, layer in enumerate(self.layers):
                x = layer(x, over=over, cache=None if caches is None else caches[index])
        hidden: Tensor = self.norm(x)
        return hidden

    def _causal_neighbourhood(
        self, over: Neighbourhood | Tensor | None, tokens: int, keys: int
    ) -> Neighbourhood | None:
        """Causal attention within the window, intersected with `over`; None if a single token attends to all keys."""
        if isinstance(over, Neighbourhood):
            tokens, keys = over.whole_sizes(tokens, keys)
        beyond_window = self.window is not None and keys > self.window
        if over is None and tokens == 1 and not beyond_window:
            return None
        causal: Neighbourhood = Causal()
        if self.window is not None and beyond_window:
            causal = causal & Window(self.window - 1, 0)
        return causal if over is None else causal & as_neighbourhood(over)

    def caches(self, batch: int | tuple[int, ...] | None, length: int, *, static: bool = False) -> list[KeyValueCache]:
        """Empty caches for the keys and values of `length` tokens, one per layer; `batch=None` for ids without a batch axis.

        `static` is that of `MultiHeadAttention.cache`: for steps that are captured in a CUDA graph.
        """
        layers = [layer for layer in self.layers if isinstance(layer, TransformerLayer)]
        return [layer.self_attn.cache(batch, length, static=static) for layer in layers]

    def generate(
        self,
        ids: Int[Tensor, "batch tokens"],
        max_new_tokens: int,
        *,
        over: Padding | None = None,
        stop: int | Sequence[int] | None = None,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        generator: torch.Generator | None = None,
    ) -> Int[Tensor, "batch tokens+new"]:
        """Continue each text token by token; returns the prompts followed by the new tokens. Requires evaluation mode.

        Args:
            ids: the prompts; shorter prompts are padded on the left, with any id.
            max_new_tokens: the number of tokens to generate; fewer if every text reaches a stop token.
            over: `Padding(real)` if prompts are padded: a bool tensor (batch, tokens), True for real tokens.
            stop: the token or tokens that end a text; the rest of its row repeats that token. By default those of the
                configuration; `()` for none.
            temperature: 0 takes the likeliest token each time (greedy); otherwise tokens are drawn from
                softmax(logits / temperature).
            top_k: draw from the k likeliest tokens.
            top_p: draw from the likeliest tokens that together have this probability.
            generator: the random number generator.

        Raises:
            ValueError: for an empty prompt, and if prompt and new tokens exceed the model's positions.
        """
        check_eval_mode(self)
        sampler, stop = Sampler(temperature, top_k, top_p, generator), self.config.stop if stop is None else stop
        stops = check_generate_arguments(
            ids, max_new_tokens, stop, sampler, vocab=self.config.vocab, max_positions=self.config.positions
        )
        check_embedding_ids("ids", ids, self.config.vocab)
        # the last token is returned and never read
        length = ids.shape[1] + max_new_tokens - 1
        real = None if over is None else _left_padding_mask(over, ids, length)
        with torch.inference_mode():
            caches = self.caches(len(ids), length)

            def step(new: Tensor) -> Tensor:
                keys = caches[0].length + new.shape[1]
                padding = None if real is None else Padding(real[:, :keys])
                return self.logits(self._run_layers(new, padding, caches)[:, -1])

            new = generate_tokens(step, ids, max_new_tokens, stops, sampler)
        # outside inference mode, so that the result can be used in training
        return torch.cat((ids, new), 1)

    def _init_weights(self, std: float, *, output_std: float) -> None:
        """Initialise the weights: normal, with `output_std` for output projections; biases are zero."""
        for name, module in self.named_modules():
            # on the meta device normal_ would load torch's compiler
            if not isinstance(module, (nn.Linear, nn.Embedding)) or module.weight.is_meta:
                continue
            nn.init.normal_(module.weight, std=output_std if name.endswith(("o_proj", "down")) else std)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)


def _token_positions(
    over: Neighbourhood | Tensor | None, at: slice | Int[Tensor, " tokens"]
) -> slice | Int[Tensor, "... tokens"]:
    """The positions of the tokens `at` these keys: real tokens count from 0 in each text, wherever it is padded."""
    if isinstance(over, Neighbourhood) and over.item_indices is not None:
        # this process has some tokens of a sequence: it takes theirs of the positions of all
        own = over.item_indices[0]
        positions = _token_positions(over.whole, slice(0, over.whole_sizes(len(own), len(own))[0]))
        return own if isinstance(positions, slice) else positions[..., own.to(positions.device)]
    parts = intersection_parts(over) if isinstance(over, Neighbourhood) else ()
    padding = next((part for part in parts if isinstance(part, Padding)), None)
    # texts given by their lengths start at 0
    if padding is None or padding.keys is None:
        return at
    if padding.keep is not None:
        return (padding.keep.cumsum(-1) - 1).clamp(min=0)[..., at]
    key = torch.arange(at.start, at.stop, device=padding.first.device) if isinstance(at, slice) else at
    return (key - padding.first[..., None]).clamp(min=0)


def _left_padding_mask(over: Padding, ids: Tensor, length: int) -> Bool[Tensor, "batch length"]:
    """Which of the first `length` tokens of each text are real, for padding on the left."""
    if not isinstance(over, Padding) or over.keys != ids.shape[1] or over.stop.shape != ids.shape[:1]:
        raise ValueError(
            f"over must be Padding(real), with a bool tensor of the shape of ids, {tuple(ids.shape)}, got {over!r:.80}"
        )
    if over.keep is not None or not bool((over.stop == over.keys).all()):
        raise ValueError(
            "over must be padding on the left only, so that new tokens follow the prompts, got padding elsewhere; move it to the left"
        )
    return torch.arange(length, device=ids.device) >= over.first[:, None].to(ids.device)
