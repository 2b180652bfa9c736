"""Ablation: remove heads one by one or cumulatively, or rank them by their gradients.

A loss is any function without arguments that calls the model and returns one number. `causal_lm_loss`, `masked_lm_loss` and
`embedding_change_loss` make such functions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from polyhead._checks import (
    LARGEST_INT64,
    WrongType,
    check_dense_tensor,
    check_integer,
    check_number,
    describe_type,
    short_repr,
)
from polyhead._torch import widest_float
from polyhead.inspection.capture.capture import NO_ATTENTION_SEEN, Capture, capture
from polyhead.inspection.progress import Progress, wrap_with_progress

Loss = Callable[[], Tensor | float]
Ablation = Literal["zero", "mean"]
# Tokens in one batch.
_BATCH_TOKENS = 4096


class Head(NamedTuple):
    """One head of a model: the name of its attention, as `capture` records it, and its number."""

    name: str
    head: int


class Effect(NamedTuple):
    """A loss with all heads, and its increase without each head."""

    base: float
    # by the name of the attention
    without: dict[str, Float[Tensor, " heads"]]

    def rank_heads(self) -> list[Head]:
        """All heads, the least important first."""
        return rank_heads(self.without)


def ablate(model: nn.Module, loss: Loss, by: Ablation = "zero", progress: Progress | None = None) -> Effect:
    """Remove each head of a model in turn, and measure how much the loss increases.

    Args:
        model: any model that `capture` records.
        loss: calls the model and returns its loss: a float, a tensor of one number or a NumPy scalar.
        by: `"zero"` replaces the head's output by zeros; `"mean"` by its mean over all queries, which keeps the usual input of
            the next layers.
        progress: wraps the list of heads, as `rich.progress.track` and `tqdm` do.
    """
    remove = _make_head_remover(by)
    with torch.no_grad():
        sizes, base = _count_heads_and_compute_loss(model, loss)
        every = [Head(name, head) for name, heads in sizes.items() for head in range(heads)]
        losses = [
            _compute_loss_with_edits(model, loss, {name: partial(remove, [head])})
            for name, head in wrap_with_progress(every, progress)
        ]
    all_heads, *others = _read_losses([base, *losses])
    increases = torch.tensor([value - all_heads for value in others], dtype=torch.float64).float()
    return Effect(all_heads, dict(zip(sizes, increases.split(list(sizes.values())), strict=True)))


def ablate_embedding(
    model: nn.Module,
    embed: Callable[[Int[Tensor, "rows tokens"]], Float[Tensor, "rows dim"]],
    ids: Int[Tensor, " tokens"],
    by: Ablation = "zero",
) -> Effect:
    """Measure 1 − cos between the embeddings of one text with and without each head.

    The result is that of `ablate` with `embedding_change_loss`, but much faster: one batch reads the text many times, with another head
    removed in each row.
    """
    remove = _make_head_remover(by)
    check_dense_tensor("ids", ids, "(tokens,)")
    with torch.no_grad():
        with capture(model) as seen:
            before = _widen(embed(ids[None]))
        if not seen:
            raise ValueError(f"model: {NO_ATTENTION_SEEN}")
        every = [Head(name, head) for name in seen for head in range(_count_heads(seen, name))]
        sizes = {name: _count_heads(seen, name) for name in seen}
        changes = []
        rows = max(1, _BATCH_TOKENS // max(1, len(ids)))
        for start in range(0, len(every), rows):
            batch = every[start : start + rows]
            with capture(model, layers=[]) as seen:
                seen._called.update(dict.fromkeys(sizes))
                for name in sizes:
                    removed = [(row, head.head) for row, head in enumerate(batch) if head.name == name]
                    seen.edit(name, partial(_ablate_one_head_per_row, remove, removed))
                changed = _widen(embed(ids.expand(len(batch), -1)))
                changes.append(1 - F.cosine_similarity(changed, before, dim=-1))
    split = torch.cat(changes).float().cpu().split(list(sizes.values()))
    return Effect(0.0, dict(zip(sizes, split, strict=True)))


def _ablate_one_head_per_row(
    remove: Callable[[list[int], Tensor], Tensor],
    removed: list[tuple[int, int]],
    out: Float[Tensor, "rows heads queries dim"],
) -> Float[Tensor, "rows heads queries dim"]:
    out = out.clone()
    for row, head in removed:
        out[row] = remove([head], out[row])
    return out


def importance(model: nn.Module, loss: Loss) -> dict[str, Float[Tensor, " heads"]]:
    """The importance of each head by its gradient (Michel 2019): E|⟨z, ∂L/∂z⟩| of its output z, divided by the norm over its layer.

    One forward and one backward pass for all heads. The mean is over the rows of the batch. The loss must be a tensor with a gradient.
    """
    gates: dict[str, Tensor] = {}

    def make_gate(name: str) -> Callable[[Tensor], Tensor]:
        def apply_gate(out: Tensor) -> Tensor:
            gate = torch.ones(*out.shape[:-2], 1, 1, dtype=out.dtype, device=out.device, requires_grad=True)
            gates[name] = gate
            return out * gate

        return apply_gate

    with torch.no_grad():
        names, _ = _count_heads_and_compute_loss(model, loss)
    with torch.enable_grad(), capture(model, layers=[]) as seen:
        seen._called.update(dict.fromkeys(names))
        for name in names:
            seen.edit(name, make_gate(name))
        value = loss()
        if not isinstance(value, Tensor) or not value.requires_grad:
            given = "a tensor without one" if isinstance(value, Tensor) else describe_type(value)
            raise ValueError(f"loss must return a tensor with a gradient, got {given}; ablate takes any number")
        # ∂L/∂gate = ⟨z, ∂L/∂z⟩
        gradients = torch.autograd.grad(value, [gates[name] for name in names])
    by_head = (gradient[..., 0, 0].abs().flatten(0, -2).mean(0) if gradient.dim() > 3 else gradient[..., 0, 0].abs()
               for gradient in gradients)  # fmt: skip
    return {name: score.detach() / score.norm().clamp(min=1e-30) for name, score in zip(names, by_head, strict=True)}


def rank_heads(scores: Mapping[str, Float[Tensor, " heads"]] | Effect) -> list[Head]:
    """All heads by ascending score, as `importance` or `ablate` returns it: the least important first."""
    scores = scores.without if isinstance(scores, Effect) else scores
    if not isinstance(scores, Mapping):
        raise WrongType(
            "scores must be a dict from the names of layers to a number per head, as `importance` returns it, or an Effect, as `ablate` "
            f"returns it, got {describe_type(scores)}"
        )
    every = [(float(score), Head(name, number)) for name, heads in scores.items() for number, score in enumerate(heads)]
    return [head for _, head in sorted(every, key=lambda pair: pair[0])]


def ablate_cumulatively(
    model: nn.Module, loss: Loss, order: Sequence[Head], by: Ablation = "zero", progress: Progress | None = None
) -> list[float]:
    """Remove heads cumulatively, in this order: the loss with 0, 1, 2, … heads removed."""
    remove, removed = _make_head_remover(by), dict[str, list[int]]()
    with torch.no_grad():
        sizes, base = _count_heads_and_compute_loss(model, loss)
        order = [_check_head(head, sizes) for head in order]
        values = [base]
        for name, head in wrap_with_progress(order, progress):
            removed.setdefault(name, []).append(head)
            values.append(
                _compute_loss_with_edits(model, loss, {name: partial(remove, heads) for name, heads in removed.items()})
            )
    return _read_losses(values)


def _check_head(given: Any, sizes: dict[str, int]) -> Head:
    """A checked head of `order`."""
    if not isinstance(given, (tuple, list)) or len(given) != 2:
        raise WrongType(f"order must be a list of Head(name, number), got {short_repr(given)} in it")
    name, number = given
    if name not in sizes:
        raise ValueError(f"order: {name} made no attention call in this loss")
    return Head(name, check_integer(f"order: the number of a head of {name}", number, 0, sizes[name] - 1))


def _make_head_remover(by: Ablation) -> Callable[[list[int], Tensor], Tensor]:
    """A function that replaces the outputs of some heads by zeros, or by their mean over all queries of the batch."""
    if by not in ("zero", "mean"):
        raise ValueError(f"by must be 'zero' or 'mean', got {by!r}")

    def remove(heads: list[int], out: Float[Tensor, "... heads queries dim"]) -> Float[Tensor, "... heads queries dim"]:
        changed = out.clone()
        for head in heads:
            part = changed[..., head, :, :]
            part.copy_(part.flatten(0, -2).mean(0) if by == "mean" else torch.zeros_like(part))
        return changed

    return remove


def _compute_loss_with_edits(
    model: nn.Module, loss: Loss, edits: dict[str, Callable[[Tensor], Tensor]]
) -> float | Tensor:
    """The loss with edited heads; nothing is recorded."""
    applied = set()

    def track_edit(name: str, change: Callable[[Tensor], Tensor], out: Tensor) -> Tensor:
        applied.add(name)
        return change(out)

    with capture(model, layers=[]) as seen:
        # known names make an edit apply to the call of exactly that name
        seen._called.update(dict.fromkeys(edits))
        for name, change in edits.items():
            seen.edit(name, partial(track_edit, name, change))
        value = _check_loss(loss())
    if applied != set(edits):
        raise ValueError(f"order: {', '.join(set(edits) - applied)} made no attention call in this loss")
    return value


def _count_heads_and_compute_loss(model: nn.Module, loss: Loss) -> tuple[dict[str, int], float | Tensor]:
    """The number of heads of each attention that the loss calls, and the loss."""
    _check_callable("loss", loss)
    with capture(model) as seen:
        value = _check_loss(loss())
    if not seen:
        raise ValueError(f"model: {NO_ATTENTION_SEEN}")
    return {name: _count_heads(seen, name) for name in seen}, value


def _check_callable(name: str, given: object) -> None:
    if not callable(given):
        raise WrongType(f"{name} must be a function without arguments, got {describe_type(given)}")


def _count_heads(seen: Capture, name: str) -> int:
    outputs = seen[name].outputs
    return int(outputs.shape[-3])


def _check_loss(loss: Any) -> float | Tensor:
    """One number as a float; one that lies on a device as a tensor without axes, which is not read yet."""
    shape = getattr(loss, "shape", () if isinstance(loss, (int, float)) else None)
    if shape is None or math.prod(shape) != 1:
        given = describe_type(loss) if shape is None else f"shape {tuple(shape)}"
        raise ValueError(f"loss must return one number, such as a float or a tensor of one number, got {given}")
    number = loss.reshape(()) if shape else loss
    return number.detach() if isinstance(number, Tensor) and not number.is_cpu else float(number)


def _read_losses(losses: Sequence[float | Tensor]) -> list[float]:
    """Losses as floats: those on a device in one copy, so that the host waits once."""
    on_device = [x for x in losses if isinstance(x, Tensor)]
    if not on_device:
        return [float(x) for x in losses]
    read = iter(torch.stack([x.to(widest_float(x.device)) for x in on_device]).tolist())
    return [next(read) if isinstance(x, Tensor) else x for x in losses]


# ready losses


def causal_lm_loss(logits: Callable[[Int[Tensor, "batch tokens"]], Tensor], ids: Int[Tensor, "batch tokens"]) -> Loss:
    """Next-token prediction: the mean cross-entropy, in nats.

    Args:
        logits: maps ids to logits (batch, tokens, vocabulary), as language models of transformers do.
        ids: the texts.
    """
    check_dense_tensor("ids", ids, "(batch, tokens)")
    return lambda: F.cross_entropy(_get_logits(logits(ids))[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


def masked_lm_loss(
    logits: Callable[[Int[Tensor, "batch tokens"]], Tensor], ids: Int[Tensor, "batch tokens"], mask_id: int, *,
    share: float = 0.15, keep: Tensor | None = None, seed: int = 0,
) -> Loss:  # fmt: skip
    """Masked-token prediction: the mean cross-entropy, in nats, over the same masked tokens in each call.

    Args:
        logits: maps ids to logits (batch, tokens, vocabulary), as language models of transformers do.
        ids: the texts.
        mask_id: the id of the mask token.
        share: the fraction of tokens that is masked.
        keep: True for tokens that are never masked, such as special tokens and padding.
        seed: selects the masked tokens.
    """
    check_dense_tensor("ids", ids, "(batch, tokens)")
    check_integer("mask_id", mask_id, 0)
    check_number("share", share, 0, 1)
    generator = torch.Generator().manual_seed(check_integer("seed", seed, 0, LARGEST_INT64))
    hidden = (torch.rand(ids.shape, generator=generator) < share).to(ids.device)
    hidden = hidden if keep is None else hidden & ~keep
    if not hidden.any():
        raise ValueError(
            f"share must mask at least one of {ids.numel()} tokens, got {share}; raise it, or pass more text"
        )
    masked = ids.masked_fill(hidden, mask_id)
    return lambda: F.cross_entropy(_get_logits(logits(masked))[hidden].float(), ids[hidden])


def _get_logits(output: Any) -> Tensor:
    """The logits themselves, or those in an output of transformers."""
    return output if isinstance(output, Tensor) else output.logits


def embedding_change_loss(embed: Callable[[], Float[Tensor, "... dim"]]) -> Loss:
    """The change of a model's embeddings: the mean of 1 − cos to those at the time of this call, 0 without an edit.

    Args:
        embed: calls the model and returns vectors, one per text or per token.
    """
    _check_callable("embed", embed)
    with torch.no_grad():
        before = embed().detach().clone()
    return lambda: 1 - F.cosine_similarity(_widen(embed()), _widen(before), dim=-1).mean()


def _widen(x: Tensor) -> Tensor:
    return x.to(widest_float(x.device))
