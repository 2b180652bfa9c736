"""Helpers: batch size, graph and grid layout, and allowed keys of a `Heads` view."""

from __future__ import annotations

from collections.abc import Sequence

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
