"""Generation token by token: how the next token is chosen, and when to stop."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from polyhead._checks import (
    WrongType,
    check_dense_tensor,
    check_integer,
    check_integers,
    check_number,
    describe_type,
    is_integer,
)
from polyhead._torch import assert_on_device

# On a device: the tokens that are generated between two questions whether every row has ended.
_TOKENS_PER_QUESTION = 16


class Sampler(NamedTuple):
    """How the next token is chosen: greedily at temperature 0, else sampled, from the `top_k` or `top_p` most likely tokens."""

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    generator: torch.Generator | None = None

    def check(self) -> None:
        """Raise a `ValueError` for invalid options."""
        check_number("temperature", self.temperature, 0, math.inf, "[)", hint="0 takes the most likely token")
        if not self.temperature and (self.top_k is not None or self.top_p is not None):
            raise ValueError("top_k, top_p need a temperature above 0, got 0; pass a temperature such as 1.0 to sample")
        if self.top_k is not None:
            check_integer("top_k", self.top_k)
        if self.top_p is not None:
            check_number("top_p", self.top_p, 0, 1, "(]")
        if self.generator is not None and not isinstance(self.generator, torch.Generator):
            raise WrongType(f"generator must be a torch.Generator or None, got {describe_type(self.generator)}")

    def sample(self, logits: Float[Tensor, "batch vocab"]) -> Int[Tensor, " batch"]:
        """One token per row."""
        # a smaller temperature is zero in fp32
        if self.temperature < torch.finfo(torch.float32).tiny:
            return logits.argmax(-1)
        # the largest logit becomes 0, so no temperature makes the quotient overflow
        logits = (logits - logits.amax(-1, keepdim=True)).float() / self.temperature
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            top = logits.topk(self.top_k)
            logits = torch.full_like(logits, -torch.inf).scatter(1, top.indices, top.values)
        probabilities = logits.softmax(-1)
        if self.top_p is not None:
            sorted_, order = probabilities.sort(descending=True)
            # a token is excluded if the more likely ones already reach top_p
            excluded = sorted_.cumsum(-1) - sorted_ >= self.top_p
            excluded[:, 0] = False
            probabilities = probabilities.masked_fill(torch.zeros_like(excluded).scatter(1, order, excluded), 0.0)
        if probabilities.is_cpu:
            return torch.multinomial(probabilities, 1, generator=self.generator)[:, 0]
        # the same numbers, without a check of the values for which the host waits
        assert_on_device((probabilities >= 0).all(), "logits must not contain NaN")
        noise = torch.empty_like(probabilities).exponential_(1, generator=self.generator)
        return (probabilities / noise).argmax(-1)


def check_eval_mode(model: nn.Module) -> None:
    """Raise if the model is in training mode."""
    if model.training:
        raise ValueError("generate: the model is in training mode, with dropout; call model.eval() first")


def check_generate_arguments(
    prompt: Int[Tensor, "batch tokens"], max_new_tokens: int, stop: int | Sequence[int] | None, sampler: Sampler, *, vocab: int,
    max_positions: int | None = None,
) -> Int[Tensor, " stops"] | None:  # fmt: skip
    """Check the arguments of `generate`; return the stop tokens as a tensor.

    Args:
        max_positions: the longest sequence that the model can read; None for no limit.
    """
    check_dense_tensor("ids", prompt, "(batch, tokens)")
    if prompt.dim() != 2 or not prompt.shape[0]:
        raise ValueError(f"ids must have shape (batch, tokens), got {tuple(prompt.shape)}; pass ids[None] for one text")
    tokens = prompt.shape[1]
    if not tokens:
        raise ValueError("ids must have at least 1 token per row, got an empty prompt; pass a start token")
    check_integer("max_new_tokens", max_new_tokens)
    if max_positions is not None and tokens > max_positions:
        raise ValueError(
            f"ids must have at most {max_positions} tokens, the positions of the model, got {tokens}; ids[:, -n:] keeps the last n"
        )
    if max_positions is not None and tokens + max_new_tokens > max_positions:
        raise ValueError(
            f"max_new_tokens must be at most {max_positions - tokens}, got {max_new_tokens}: the prompt has {tokens} tokens, "
            f"the model {max_positions} positions"
        )
    sampler.check()
    if stop is None:
        return None
    last = vocab - 1
    stops = [check_integer("stop", stop, 0, last)] if is_integer(stop) else check_integers("stop", stop, 0, last)
    return torch.tensor(stops, dtype=torch.long, device=prompt.device)


def generate_tokens(
    step: Callable[[Int[Tensor, "batch tokens"]], Float[Tensor, "batch vocab"]],
    prompt: Int[Tensor, "batch tokens"],
    max_new_tokens: int,
    stops: Int[Tensor, " stops"] | None,
    sampler: Sampler,
) -> Int[Tensor, "batch new"]:
    """The tokens that follow a prompt: at most `max_new_tokens`, fewer if every row reaches a stop token.

    Args:
        step: returns the logits after the tokens given so far. It is called with the prompt, then with one token at a time, and
            keeps the earlier ones in a cache.
        stops: the tokens that end a row. The row is then filled with its stop token.
    """
    generated: list[Tensor] = []
    inputs, ended = prompt, None
    for _ in range(max_new_tokens):
        new = sampler.sample(step(inputs))
        if stops is not None:
            if ended is not None:
                new = torch.where(ended, generated[-1], new)
            ended = torch.isin(new, stops)
        generated.append(new)
        # on a device the host waits for the answer, so it asks rarely
        asks = prompt.is_cpu or len(generated) % _TOKENS_PER_QUESTION == 0
        if ended is not None and asks and bool(ended.all()):
            break
        inputs = new[:, None]
    tokens = torch.stack(generated, 1)
    if stops is None or prompt.is_cpu:
        return tokens
    # up to the first token at which every row has ended; further ones repeat it
    ended_rows = torch.isin(tokens, stops).int().cummax(1).values
    return tokens[:, : int((ended_rows.amin(0) == 0).sum()) + 1]
