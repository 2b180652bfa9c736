"""Writing token by token: how the next token is chosen, and when to stop."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from polyhead._checks import (
    WrongType,
    check_integer,
    check_integers,
    check_number,
    check_tensor,
    is_integer,
    kind_of,
)


class Sampler(NamedTuple):
    """How the next token is chosen: the likeliest at temperature 0, else drawn, from the likeliest `top_k` or `top_p`."""

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    generator: torch.Generator | None = None

    def check(self) -> None:
        """Raise a `ValueError` where no token can be chosen like this."""
        check_number("temperature", self.temperature, 0, math.inf, "[)", hint="0 takes the likeliest")
        if not self.temperature and (self.top_k is not None or self.top_p is not None):
            raise ValueError("top_k, top_p: they say what to draw from; pass a temperature, such as 1.0, to draw")
        if self.top_k is not None:
            check_integer("top_k", self.top_k)
        if self.top_p is not None:
            check_number("top_p", self.top_p, 0, 1, "(]")
        if self.generator is not None and not isinstance(self.generator, torch.Generator):
            raise WrongType(f"generator must be a torch.Generator or None, got {kind_of(self.generator)}")

    def sample(self, logits: Float[Tensor, "batch vocab"]) -> Int[Tensor, " batch"]:
        """One token a row."""
        # less would be zero in fp32
        if self.temperature < torch.finfo(torch.float32).tiny:
            return logits.argmax(-1)
        # the largest becomes 0: whatever the temperature, nothing overflows
        logits = (logits - logits.amax(-1, keepdim=True)).float() / self.temperature
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            likeliest = logits.topk(self.top_k)
            logits = torch.full_like(logits, -torch.inf).scatter(1, likeliest.indices, likeliest.values)
        probabilities = logits.softmax(-1)
        if self.top_p is not None:
            sorted_, order = probabilities.sort(descending=True)
            # a token is left out where those before it have enough already
            beyond = sorted_.cumsum(-1) - sorted_ >= self.top_p
            beyond[:, 0] = False
            probabilities = probabilities.masked_fill(torch.zeros_like(beyond).scatter(1, order, beyond), 0.0)
        return torch.multinomial(probabilities, 1, generator=self.generator)[:, 0]


def check_evaluation(model: nn.Module) -> None:
    """Raise where a model drops at random what it would write."""
    if model.training:
        raise ValueError(
            "generate: the model is in training mode, in which it drops parts at random; call model.eval() first"
        )


def check_request(
    prompt: Int[Tensor, "batch tokens"], max_new_tokens: int, stop: int | Sequence[int] | None, sampler: Sampler, *, vocab: int,
    room: int | None = None,
) -> Int[Tensor, " stops"] | None:  # fmt: skip
    """The tokens that end a text; a `ValueError` where it cannot be written as asked for.

    Args:
        room: how many tokens a model has positions for; None for any number.
    """
    check_tensor("ids", prompt, "(batch, tokens)")
    if prompt.dim() != 2 or not prompt.shape[0]:
        raise ValueError(
            f"ids: their shape is {tuple(prompt.shape)}; it must be (batch, tokens), ids[None] for one text"
        )
    tokens = prompt.shape[1]
    if not tokens:
        raise ValueError("ids: the prompt is empty; it must have 1 token or more, such as the one that starts a text")
    check_integer("max_new_tokens", max_new_tokens)
    if room is not None and tokens > room:
        raise ValueError(
            f"ids: the prompt has {tokens} tokens; the model has positions for {room} (ids[:, -n:] keeps the end of it)"
        )
    if room is not None and tokens + max_new_tokens > room:
        raise ValueError(
            f"max_new_tokens: it is {max_new_tokens}, after a prompt of {tokens} tokens; the model has positions for {room}, "
            f"so it must be at most {room - tokens}"
        )
    sampler.check()
    if stop is None:
        return None
    one, last = is_integer(stop), vocab - 1
    stops = [check_integer("stop", stop, 0, last)] if one else check_integers("stop", stop, 0, last)
    return torch.tensor(stops, dtype=torch.long, device=prompt.device)


def generate_tokens(
    step: Callable[[Int[Tensor, "batch tokens"]], Float[Tensor, "batch vocab"]],
    prompt: Int[Tensor, "batch tokens"],
    max_new_tokens: int,
    stops: Int[Tensor, " stops"] | None,
    sampler: Sampler,
) -> Int[Tensor, "batch new"]:
    """The tokens that follow a prompt: at most `max_new_tokens`, fewer where every row has come to a stop.

    Args:
        step: gives the logits of what follows the tokens it was given so far, by a cache; first the prompt, then a token at a time.
        stops: the tokens at which a row ends; it is then filled with the one it ended with.
    """
    written: list[Tensor] = []
    fed, ended = prompt, None
    for _ in range(max_new_tokens):
        new = sampler.sample(step(fed))
        if stops is not None:
            if ended is not None:
                new = torch.where(ended, written[-1], new)
            ended = torch.isin(new, stops)
        written.append(new)
        if ended is not None and bool(ended.all()):
            break
        fed = new[:, None]
    return torch.stack(written, 1)
