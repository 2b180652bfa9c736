"""Attention rollout: how much of each input token reaches a token of the last layer."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import torch
from jaxtyping import Float
from torch import Tensor

from polyhead._checks import WrongType, check_integer, describe_type
from polyhead.heads import Heads


def rollout(seen: Mapping[str, Heads], token: int) -> Float[Tensor, "... tokens"]:
    """How much of each input token reaches one token of the last layer (Abnar 2020): R_l = rownorm(mean_h A + I) R_(l-1).

    The heads of a layer have equal weight, and the residual connection as much as all of them together. Only one row of R is
    propagated through the layers, so no tensor of tokens x tokens is built.

    Args:
        seen: self-attention from the first layer to the last, as `capture` records it.
        token: the index of the token.
    """
    if not isinstance(seen, Mapping) or not all(isinstance(heads, Heads) for heads in seen.values()):
        raise WrongType(f"seen must be what capture records, a mapping to Heads, got {describe_type(seen)}")
    layers = list(seen.values())
    if not layers:
        raise ValueError("seen must have at least one layer, got an empty mapping")
    sizes = {tuple(heads.shape[-2:]) for heads in layers}
    tokens = layers[-1].shape[-1]
    if sizes != {(tokens, tokens)}:
        raise ValueError(
            f"seen must be self-attention of one length in all layers, got (queries, keys) {sorted(sizes)}"
        )
    _check_self_attention(seen)
    token = check_integer("token", token, -tokens, tokens - 1)
    last = layers[-1]
    row = torch.zeros(
        *last.shape[:-3], tokens, dtype=torch.promote_types(last.dtype, torch.float32), device=last.device
    )
    row[..., token] = 1
    everything = torch.ones(tokens, dtype=torch.bool, device=last.device)
    for heads in reversed(layers):
        # with a sink, rows of weights sum to less than 1
        total = heads.mass(everything).mean(-2) + 1
        row = row / total
        row = row + heads.received(row[..., None, :]).mean(-2)
    return row


def _check_self_attention(seen: Mapping[str, Heads]) -> None:
    cross = [name for name, heads in seen.items() if heads.is_self_attention is False]
    if cross:
        raise ValueError(
            f"seen must be self-attention, got layers that attend to other tokens: {', '.join(cross[:3])}; pass a mapping without them"
        )
    unknown = [name for name, heads in seen.items() if heads.is_self_attention is None]
    if unknown:
        warnings.warn(
            f"rollout: it is not known whether the queries and keys of {', '.join(unknown[:3])} are the same tokens; the result is "
            "meaningful only if they are",
            stacklevel=3,
        )
