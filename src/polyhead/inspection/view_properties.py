"""Helpers: batch size, graph and grid layout, and allowed keys of a `Heads` view."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from polyhead.heads import Heads
from polyhead.heads.grid_view import TokenGrid, find_token_grid

# Additive biases below this count as -inf: transformers adds the lowest finite number to forbidden scores.
_MASK_BIAS_THRESHOLD = -1e4


def count_batch_entries(heads: Heads) -> int:
    """The number of batch entries, over all batch axes."""
    return heads.shape[: -len(heads.part.axes)].numel()


def is_on_graph(heads: Heads) -> bool:
    """Whether the weights are those of edges, (..., heads, edges)."""
    return "edges" in heads.part.axes


def is_self_attention_of(heads: Heads, tokens: int) -> bool:
    """Whether these tokens attend to themselves; False if that is not known."""
    return heads.is_self_attention is True and tuple(heads.shape[-2:]) == (tokens, tokens)


def describe_unknown_layers(heads: Mapping[str, Heads], tokens: int) -> list[str]:
    """A note about the layers that may be self-attention of these tokens, if there are any."""
    names = [
        name
        for name, view in heads.items()
        if view.is_self_attention is None and tuple(view.shape[-2:]) == (tokens, tokens)
    ]
    if not names:
        return []
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return [f"Left out: {shown}. It is not known whether their queries and keys are the same tokens."]


def find_token_grid_of_view(heads: Heads, grid: Sequence[int] | None) -> TokenGrid:
    """The grid positions of queries and keys."""
    return find_token_grid(heads.part, grid)


def allowed_keys_mask(heads: Heads, queries: Int[Tensor, " queries"], batch: int = 0) -> Bool[Tensor, "queries keys"]:
    """Which keys these queries may attend to, for head 0 of one batch entry."""
    call, keys = heads.part.call, heads.shape[-1]
    key, first = (
        torch.arange(keys, device=queries.device),
        torch.zeros(1, 1, 1, dtype=torch.long, device=queries.device),
    )
    allows = call.over.allows(first, queries[:, None], key).expand(*call.sizes.batch, 1, len(queries), keys)
    if call.bias is not None:
        bias = call.bias.expand(*call.sizes.batch, *call.bias.shape[-3:-2], *call.sizes[2:])
        allows = allows & (bias[..., :1, queries, :] > _MASK_BIAS_THRESHOLD)
    return allows.reshape(-1, len(queries), keys)[min(batch, allows.shape[:-3].numel() - 1)].cpu()
