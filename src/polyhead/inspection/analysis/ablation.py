"""What is lost without a head: heads taken out one by one, all in a row, or asked by their gradients.

All of it is about a loss: any function without arguments that calls the model and returns one number. `causal_lm`,
`masked_lm` and `embedding_change` make such functions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from polyhead._checks import LARGEST_INT64, WrongType, check_integer, check_number, check_tensor, kind_of, shown
from polyhead.inspection.capture.capture import NOTHING_SEEN, Capture, capture

Loss = Callable[[], Tensor]
Ablation = Literal["zero", "mean"]
Progress = Callable[[Sequence[Any]], Iterable[Any]]
# Tokens that are read in one batch.
_TOKENS = 4096


class Head(NamedTuple):
    """One head of a model: the name of its attention, as `capture` gives it, and its number."""

    name: str
    head: int


class Effect(NamedTuple):
    """What a loss is with all heads, and how much more it is without each."""

    base: float
    # by the name of the attention
    without: dict[str, Float[Tensor, " heads"]]

    def ranked(self) -> list[Head]:
        """All heads, the one that is missed least first."""
        return ranked(self.without)


def ablate(model: nn.Module, loss: Loss, by: Ablation = "zero", progress: Progress | None = None) -> Effect:
    """Take out each head of a model in turn: how much does the loss grow?

    Args:
        model: whose heads; any that `capture` sees.
        loss: calls the model and returns its loss, a tensor of one number.
        by: `"zero"` puts zeros in the place of the head's output; `"mean"` its mean over all queries, which leaves what the next
            layers are used to.
        progress: wraps the list of heads, as `rich.progress.track` and `tqdm` do.
    """
    off = _off(by)
    with torch.no_grad():
        sizes, base = _looked_at(model, loss)
        without = {name: torch.full((heads,), math.nan) for name, heads in sizes.items()}
        every = [Head(name, head) for name, heads in sizes.items() for head in range(heads)]
        for name, head in every if progress is None else progress(every):
            without[name][head] = _changed(model, loss, {name: partial(off, [head])}) - base
    return Effect(base, without)


def ablate_embedding(
    model: nn.Module,
    embed: Callable[[Int[Tensor, "rows tokens"]], Float[Tensor, "rows dim"]],
    ids: Int[Tensor, " tokens"],
    by: Ablation = "zero",
) -> Effect:
    """How far the vector of one text turns, 1 − cos, without each head: `ablate` with `embedding_change`, and much faster.

    The text is read many times in one batch, with another head gone in each row.
    """
    off = _off(by)
    check_tensor("ids", ids, "(tokens,)")
    with torch.no_grad():
        with capture(model) as seen:
            before = embed(ids[None]).double()
        if not seen:
            raise ValueError(f"model: {NOTHING_SEEN}")
        every = [Head(name, head) for name in seen for head in range(_heads(seen, name))]
        sizes = {name: _heads(seen, name) for name in seen}
        changes = []
        rows = max(1, _TOKENS // max(1, len(ids)))
        for start in range(0, len(every), rows):
            batch = every[start : start + rows]
            with capture(model, layers=[]) as seen:
                seen._called.update(dict.fromkeys(sizes))
                for name in sizes:
                    gone = [(row, head.head) for row, head in enumerate(batch) if head.name == name]
                    seen.edit(name, partial(_row_by_row, off, gone))
                changes.append(1 - F.cosine_similarity(embed(ids.expand(len(batch), -1)).double(), before, dim=-1))
    split = torch.cat(changes).float().cpu().split(list(sizes.values()))
    return Effect(0.0, dict(zip(sizes, split, strict=True)))


def _row_by_row(
    off: Callable[[list[int], Tensor], Tensor],
    gone: list[tuple[int, int]],
    out: Float[Tensor, "rows heads queries dim"],
) -> Float[Tensor, "rows heads queries dim"]:
    out = out.clone()
    for row, head in gone:
        out[row] = off([head], out[row])
    return out


def importance(model: nn.Module, loss: Loss) -> dict[str, Float[Tensor, " heads"]]:
    """How much each head matters by its gradient (Michel 2019): E|⟨z, ∂L/∂z⟩| of its output z, over a layer's norm.

    One forward and one backward pass for all heads. The mean is over the rows of the batch.
    """
    gates: dict[str, Tensor] = {}

    def gated(name: str) -> Callable[[Tensor], Tensor]:
        def change(out: Tensor) -> Tensor:
            gate = torch.ones(*out.shape[:-2], 1, 1, dtype=out.dtype, device=out.device, requires_grad=True)
            gates[name] = gate
            return out * gate

        return change

    with torch.no_grad():
        names, _ = _looked_at(model, loss)
    with torch.enable_grad(), capture(model, layers=[]) as seen:
        seen._called.update(dict.fromkeys(names))
        for name in names:
            seen.edit(name, gated(name))
        value = loss()
        # ∂L/∂gate = ⟨z, ∂L/∂z⟩
        gradients = torch.autograd.grad(value, [gates[name] for name in names])
    by_head = (gradient[..., 0, 0].abs().flatten(0, -2).mean(0) if gradient.dim() > 3 else gradient[..., 0, 0].abs()
               for gradient in gradients)  # fmt: skip
    return {name: score.detach() / score.norm().clamp(min=1e-30) for name, score in zip(names, by_head, strict=True)}


def ranked(scores: dict[str, Float[Tensor, " heads"]]) -> list[Head]:
    """All heads by their scores, the lowest first: the order in which they are missed least."""
    if not isinstance(scores, Mapping):
        raise WrongType(f"scores must be a dict from the names of layers to a number per head, got {kind_of(scores)}")
    every = [(float(score), Head(name, number)) for name, heads in scores.items() for number, score in enumerate(heads)]
    return [head for _, head in sorted(every, key=lambda pair: pair[0])]


def prune(
    model: nn.Module, loss: Loss, order: Sequence[Head], by: Ablation = "zero", progress: Progress | None = None
) -> list[float]:
    """Take out one head after the other, in this order: the loss with 0, 1, 2, … heads gone."""
    off, gone = _off(by), dict[str, list[int]]()
    with torch.no_grad():
        sizes, base = _looked_at(model, loss)
        order = [_head(head, sizes) for head in order]
        values = [base]
        for name, head in order if progress is None else progress(order):
            gone.setdefault(name, []).append(head)
            values.append(_changed(model, loss, {name: partial(off, heads) for name, heads in gone.items()}))
    return values


def _head(given: Any, sizes: dict[str, int]) -> Head:
    """A head of those that a loss makes use of."""
    if not isinstance(given, (tuple, list)) or len(given) != 2:
        raise WrongType(f"order must be a list of Head(name, number), got {shown(given)} in it")
    name, number = given
    if name not in sizes:
        raise ValueError(f"order: {name} made no attention call in this loss")
    return Head(name, check_integer(f"order: the number of a head of {name}", number, 0, sizes[name] - 1))


def _off(by: Ablation) -> Callable[[list[int], Tensor], Tensor]:
    """Puts nothing, or the mean over all queries of the batch, in the place of some heads' outputs."""
    if by not in ("zero", "mean"):
        raise ValueError(f"by: it is {by!r}; it must be 'zero' or 'mean'")

    def off(heads: list[int], out: Float[Tensor, "... heads queries dim"]) -> Float[Tensor, "... heads queries dim"]:
        changed = out.clone()
        for head in heads:
            part = changed[..., head, :, :]
            part.copy_(part.flatten(0, -2).mean(0) if by == "mean" else torch.zeros_like(part))
        return changed

    return off


def _changed(model: nn.Module, loss: Loss, edits: dict[str, Callable[[Tensor], Tensor]]) -> float:
    """The loss with changed heads. Nothing is recorded, and calls are counted anew, whatever part of the model is called."""
    applied = set()

    def noted(name: str, change: Callable[[Tensor], Tensor], out: Tensor) -> Tensor:
        applied.add(name)
        return change(out)

    with capture(model, layers=[]) as seen:
        # so that an edit is of the call of that name, and of none inside it
        seen._called.update(dict.fromkeys(edits))
        for name, change in edits.items():
            seen.edit(name, partial(noted, name, change))
        value = _number(loss())
    if applied != set(edits):
        raise ValueError(f"order: {', '.join(set(edits) - applied)} made no attention call in this loss")
    return value


def _looked_at(model: nn.Module, loss: Loss) -> tuple[dict[str, int], float]:
    """The heads that a loss makes use of, and the loss."""
    _check_function("loss", loss)
    with capture(model) as seen:
        value = _number(loss())
    if not seen:
        raise ValueError(f"model: {NOTHING_SEEN}")
    return {name: _heads(seen, name) for name in seen}, value


def _check_function(name: str, given: object) -> None:
    if not callable(given):
        raise WrongType(f"{name} must be a function without arguments, got {kind_of(given)}")


def _heads(seen: Capture, name: str) -> int:
    outputs = seen[name].outputs
    return int(outputs.shape[-3])


def _number(loss: Tensor) -> float:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        given = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        raise ValueError(f"loss: it returned {given}; it must return a tensor of one number")
    return float(loss)


# ready losses


def causal_lm(logits: Callable[[Int[Tensor, "batch tokens"]], Tensor], ids: Int[Tensor, "batch tokens"]) -> Loss:
    """How badly a model guesses each next token: the mean cross-entropy, in nats.

    Args:
        logits: ids to logits (batch, tokens, vocabulary); a language model of transformers is such a function.
        ids: the texts.
    """
    check_tensor("ids", ids, "(batch, tokens)")
    return lambda: F.cross_entropy(_logits(logits(ids))[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


def masked_lm(
    logits: Callable[[Int[Tensor, "batch tokens"]], Tensor], ids: Int[Tensor, "batch tokens"], mask_id: int, *,
    share: float = 0.15, keep: Tensor | None = None, seed: int = 0,
) -> Loss:  # fmt: skip
    """How badly a model guesses tokens that are hidden from it: the mean cross-entropy, in nats, of the same ones each time.

    Args:
        logits: ids to logits (batch, tokens, vocabulary); a language model of transformers is such a function.
        ids: the texts.
        mask_id: what stands for a hidden token.
        share: how many are hidden.
        keep: True for tokens that are never hidden, such as special ones and padding.
        seed: which ones.
    """
    check_tensor("ids", ids, "(batch, tokens)")
    check_integer("mask_id", mask_id, 0)
    check_number("share", share, 0, 1)
    generator = torch.Generator().manual_seed(check_integer("seed", seed, 0, LARGEST_INT64))
    hidden = (torch.rand(ids.shape, generator=generator) < share).to(ids.device)
    hidden = hidden if keep is None else hidden & ~keep
    if not hidden.any():
        raise ValueError(
            f"share: with {share} none of {ids.numel()} tokens is hidden; more of them, or more text, is needed"
        )
    masked = ids.masked_fill(hidden, mask_id)
    return lambda: F.cross_entropy(_logits(logits(masked))[hidden].float(), ids[hidden])


def _logits(output: Any) -> Tensor:
    """Logits as they are, or in what a model of transformers' returns."""
    return output if isinstance(output, Tensor) else output.logits


def embedding_change(embed: Callable[[], Float[Tensor, "... dim"]]) -> Loss:
    """How far vectors of a model turn from where they were: the mean of 1 − cos, 0 as long as nothing is changed.

    Args:
        embed: calls the model and returns vectors: one for each text, or for each token.
    """
    _check_function("embed", embed)
    with torch.no_grad():
        before = embed().detach().clone()
    return lambda: 1 - F.cosine_similarity(embed().double(), before.double(), dim=-1).mean()
