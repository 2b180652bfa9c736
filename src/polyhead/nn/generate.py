"""Writing token by token: how the next token is chosen, and when to stop."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor


def check_request(
    prompt: Int[Tensor, "batch tokens"], max_new_tokens: int, room: int | None, temperature: float, top_k: int | None,
    top_p: float | None,
) -> None:  # fmt: skip
    """Raise where tokens cannot be written as asked for; `room` is how many tokens a model has positions for."""
    if prompt.dim() != 2 or not prompt.shape[0]:
        raise ValueError(
            f"ids: their shape is {tuple(prompt.shape)}; it must be (batch, tokens), ids[None] for one text"
        )
    tokens = prompt.shape[1]
    if not tokens:
        raise ValueError("ids: the prompt is empty; it must have 1 token or more, such as the one that starts a text")
    if not isinstance(max_new_tokens, int) or max_new_tokens < 1:
        raise ValueError(f"max_new_tokens: it is {max_new_tokens!r}; it must be a whole number, 1 or more")
    if room is not None and tokens > room:
        raise ValueError(f"ids: the prompt has {tokens} tokens; the model has positions for {room}")
    if room is not None and tokens + max_new_tokens > room:
        raise ValueError(
            f"max_new_tokens: it is {max_new_tokens}, after a prompt of {tokens} tokens; the model has positions for {room}, "
            f"so it must be at most {room - tokens}"
        )
    if not temperature >= 0:
        raise ValueError(f"temperature: it is {temperature!r}; it must be 0 (take the likeliest) or more")
    if not temperature and (top_k is not None or top_p is not None):
        raise ValueError("top_k, top_p: they say what to draw from; pass a temperature, such as 1.0, to draw")
    if top_k is not None and (not isinstance(top_k, int) or top_k < 1):
        raise ValueError(f"top_k: it is {top_k!r}; it must be a whole number, 1 or more")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p: it is {top_p!r}; it must be more than 0 and at most 1")


def continued(
    step: Callable[[Int[Tensor, "batch tokens"]], Float[Tensor, "batch vocab"]],
    prompt: Int[Tensor, "batch tokens"],
    max_new_tokens: int,
    *,
    stop: int | Sequence[int] | None,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    generator: torch.Generator | None,
) -> Int[Tensor, "batch new"]:
    """The tokens that follow a prompt: at most `max_new_tokens`, fewer where every row has come to a stop.

    Args:
        step: gives the logits of what follows the tokens it was given so far, by a cache; first the prompt, then a token at a time.
    """
    stops = (
        None if stop is None else torch.as_tensor([stop] if isinstance(stop, int) else list(stop), device=prompt.device)
    )
    written: list[Tensor] = []
    fed, ended = prompt, None
    for _ in range(max_new_tokens):
        new = chosen(step(fed), temperature, top_k, top_p, generator)
        if stops is not None:
            if ended is not None:
                # a row that has ended repeats its last token
                new = torch.where(ended, written[-1], new)
            ended = torch.isin(new, stops)
        written.append(new)
        if ended is not None and bool(ended.all()):
            break
        fed = new[:, None]
    return torch.stack(written, 1)


def chosen(
    logits: Float[Tensor, "batch vocab"], temperature: float, top_k: int | None, top_p: float | None,
    generator: torch.Generator | None,
) -> Int[Tensor, " batch"]:  # fmt: skip
    """One token a row: the likeliest at temperature 0, else drawn."""
    if not temperature:
        return logits.argmax(-1)
    logits = logits.float() / temperature
    if top_k is not None and top_k < logits.shape[-1]:
        least = logits.topk(top_k).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    probabilities = logits.softmax(-1)
    if top_p is not None:
        sorted_, order = probabilities.sort(descending=True)
        # a token is left out where those before it have enough already
        beyond = sorted_.cumsum(-1) - sorted_ >= top_p
        probabilities = probabilities.masked_fill(torch.zeros_like(beyond).scatter(1, order, beyond), 0.0)
    return torch.multinomial(probabilities, 1, generator=generator)[:, 0]
