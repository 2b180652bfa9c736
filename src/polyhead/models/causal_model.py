"""Models that read from left to right and write what comes next: what GPT and Llama share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from polyhead._checks import kind_of
from polyhead.models.tokenizer import check_length
from polyhead.neighbourhood import Causal, Neighbourhood, Padding, Window, neighbourhood
from polyhead.neighbourhood.base import Both
from polyhead.nn import KeyValueCache, TransformerLayer
from polyhead.nn.cache import all_or_none
from polyhead.nn.generate import Sampler, check_evaluation, check_request, generate_tokens
from polyhead.nn.transformer import check_ids


class CausalModel(nn.Module, ABC):
    """The base of models whose tokens see those before them: embeddings, pre-norm layers, a last norm, scores.

    Attributes:
        config: its `vocab` and `positions` are what ids and lengths are held against.
        window: how many keys a token sees, its own with them; None for all before it.
    """

    config: Any
    words: nn.Embedding
    layers: nn.ModuleList
    norm: nn.Module
    window: int | None = None

    @abstractmethod
    def embedded(
        self, ids: Int[Tensor, "... tokens"], where: slice | Int[Tensor, "... tokens"]
    ) -> Float[Tensor, "... tokens d_model"]:
        """What tokens are before they have read any other; `where` are their positions."""

    @abstractmethod
    def logits(self, hidden: Float[Tensor, "... d_model"]) -> Float[Tensor, "... vocab"]:
        """How likely each token is to come next."""

    def _check(self, hidden: Tensor) -> None:
        """Raise where these are not hidden states."""
        features = self.config.d_model
        if not isinstance(hidden, Tensor) or hidden.dim() < 1 or hidden.shape[-1] != features:
            raise ValueError(f"hidden must be a tensor (..., {features}), as the model gave it, got {kind_of(hidden)}")

    def forward(
        self,
        ids: Int[Tensor, "... tokens"],
        over: Neighbourhood | Tensor | None = None,
        *,
        caches: Sequence[KeyValueCache] | None = None,
    ) -> Float[Tensor, "... tokens d_model"]:
        """The hidden states, of which `logits` makes the next tokens.

        Args:
            ids: numbers of tokens; with caches, those that follow the ones in them.
            over: who may attend to whom of those that come before: `Padding(lengths)` for texts of different lengths, or
                `Padding(real)`, a bool tensor that covers the cached tokens too. Real tokens count from position 0. That nobody
                looks ahead need not be said.
            caches: what `caches` made, to read a text a part at a time.

        Raises:
            ValueError: for ids that the model has no embedding for, and texts longer than its positions.
        """
        check_ids("ids", ids, self.config.vocab)
        if caches is not None and len(caches) != len(self.layers):
            raise ValueError(
                f"caches: there are {len(caches)}; there must be one for each of {len(self.layers)} layers"
            )
        first = 0 if caches is None else caches[0].length
        check_length(ids, self.config.positions, first)
        return self._read(ids, over, caches)

    def _read(self, ids: Tensor, over: Neighbourhood | Tensor | None, caches: Sequence[KeyValueCache] | None) -> Tensor:
        tokens, first = ids.shape[-1], 0 if caches is None else caches[0].length
        near = self._before(over, tokens, first + tokens)
        x = self.embedded(ids, _places(over, first, tokens))
        with all_or_none(caches):
            for number, layer in enumerate(self.layers):
                x = layer(x, over=near, cache=None if caches is None else caches[number])
        hidden: Tensor = self.norm(x)
        return hidden

    def _before(self, over: Neighbourhood | Tensor | None, tokens: int, keys: int) -> Neighbourhood | None:
        """Who may attend to whom: nobody ahead, nobody further than the window. One token may attend to all before it."""
        far = self.window is not None and keys > self.window
        if over is None and tokens == 1 and not far:
            return None
        before: Neighbourhood = Causal()
        if self.window is not None and far:
            before = before & Window(self.window - 1, 0)
        return before if over is None else before & neighbourhood(over)

    def caches(self, batch: int | tuple[int, ...] | None, length: int) -> list[KeyValueCache]:
        """Room for the keys and values of `length` tokens in every layer, empty; None for ids without a batch axis."""
        return [layer.self_attn.cache(batch, length) for layer in self.layers if isinstance(layer, TransformerLayer)]

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
        """Go on with each text, one token after the other: the prompts with what follows. Call it in evaluation mode.

        Args:
            ids: the prompts; those of different lengths are padded at the left, with any id.
            max_new_tokens: how many tokens to write; fewer where every text has come to a stop.
            over: `Padding(real)`, where prompts are padded: a bool tensor (batch, tokens), True for real tokens.
            stop: the token, or tokens, that end a text; what comes after it is filled with it. By default those that the
                configuration names; `()` for none.
            temperature: 0 takes the likeliest token each time (greedy); else tokens are drawn from softmax(logits / temperature).
            top_k: draw from so many likeliest tokens.
            top_p: draw from the likeliest tokens that together have this probability.
            generator: what draws.

        Raises:
            ValueError: for a prompt that is empty, and where prompt and new tokens are more than the model's positions.
        """
        check_evaluation(self)
        sampler, stop = Sampler(temperature, top_k, top_p, generator), self.config.stop if stop is None else stop
        stops = check_request(ids, max_new_tokens, stop, sampler, vocab=self.config.vocab, room=self.config.positions)
        check_ids("ids", ids, self.config.vocab)
        # the last token is written and never read
        length = ids.shape[1] + max_new_tokens - 1
        real = None if over is None else _at_the_left(over, ids, length)
        with torch.inference_mode():
            caches = self.caches(len(ids), length)

            def step(new: Tensor) -> Tensor:
                keys = caches[0].length + new.shape[1]
                padding = None if real is None else Padding(real[:, :keys])
                return self.logits(self._read(new, padding, caches)[:, -1])

            new = generate_tokens(step, ids, max_new_tokens, stops, sampler)
        # outside: a tensor like any other, which training may use
        return torch.cat((ids, new), 1)

    def _reset(self, deviation: float, *, deep: float) -> None:
        """Draw the weights anew: normal, those that end a part of a layer with a deviation of their own; biases at zero."""
        for name, module in self.named_modules():
            # nothing is drawn on the meta device, where normal_ would load torch's compiler
            if not isinstance(module, (nn.Linear, nn.Embedding)) or module.weight.is_meta:
                continue
            nn.init.normal_(module.weight, std=deep if name.endswith(("o_proj", "down")) else deviation)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)


def _places(over: Neighbourhood | Tensor | None, first: int, tokens: int) -> slice | Int[Tensor, "... tokens"]:
    """The positions of tokens, of which `first` came before: real ones count from 0 in each text, however it is padded."""
    parts = over.parts if isinstance(over, Both) else (over,)
    padding = next((part for part in parts if isinstance(part, Padding)), None)
    # lengths are of texts that begin at 0
    if padding is None or padding.keys is None:
        return slice(first, first + tokens)
    if padding.keep is not None:
        return (padding.keep.cumsum(-1) - 1).clamp(min=0)[..., first : first + tokens]
    return (torch.arange(first, first + tokens, device=padding.first.device) - padding.first[..., None]).clamp(min=0)


def _at_the_left(over: Padding, ids: Tensor, length: int) -> Bool[Tensor, "batch length"]:
    """Which of so many tokens of each text are real, where all that is padded comes first."""
    if not isinstance(over, Padding) or over.keys != ids.shape[1] or over.stop.shape != ids.shape[:1]:
        raise ValueError(
            f"over: it is {over!r:.80}; it must be Padding(real), with a bool tensor of the shape of ids, {tuple(ids.shape)}"
        )
    if over.keep is not None or not bool((over.stop == over.keys).all()):
        raise ValueError("over: prompts must be padded at the left, and nowhere else, so that new tokens follow them")
    return torch.arange(length, device=ids.device) >= over.first[:, None].to(ids.device)
