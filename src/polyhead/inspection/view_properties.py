"""Helpers: batch size, graph and grid layout, and allowed keys of a `Heads` view."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from polyhead.heads import Heads
from polyhead.heads.grid_view import GridArgument, TokenGrid, find_token_grid
from polyhead.kernels import Call
from polyhead.neighbourhood.shapes import interval_around_true

# Additive biases below this count as -inf: transformers adds the lowest finite number to forbidden scores.
_MASK_BIAS_THRESHOLD = -1e4
# Pairs of a mask that is searched for intervals: eight bytes each while it is searched.
_MAX_MASK_PAIRS = 1 << 24


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


def find_token_grid_of_view(heads: Heads, grid: GridArgument | None) -> TokenGrid:
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


def find_key_intervals(heads: Heads) -> Int[Tensor, "2 queries"] | None:
    """The first key that each query may attend to and the one past the last, as positions among the keys of the view.

    The view shows one batch entry. None if the allowed keys are not an interval, differ between heads, or have an additive bias that is
    not a mask. A bias of zeros and a mask that allows all keys are no restriction.
    """
    part = heads.part
    call, queries, keys = part.call, part.indices("queries"), part.indices("keys")
    if bool((keys.diff() <= 0).any()):
        return None
    has_bias = call.bias is not None and bool(call.bias.any())
    if call.over.exact and not has_bias:
        bounds = call.over.interval(*call.sizes[2:], keys.device)
        interval = torch.stack([bound.reshape(-1, call.sizes.queries)[0][queries] for bound in bounds])
    else:
        allowed = _allowed_keys_of_all_heads(call, queries, has_bias)
        if allowed is None:
            return None
        interval = torch.stack(interval_around_true(allowed))
        # softmax over keys that all have the same finite bias is not zero
        empty = not bool(allowed.any(-1).all())
        if bool((interval[1] - interval[0] != allowed.sum(-1)).any()) or (has_bias and empty):
            return None
    # positions among selected keys
    return torch.searchsorted(keys, interval.clamp(0, call.sizes.keys))


def _allowed_keys_of_all_heads(
    call: Call, queries: Int[Tensor, " queries"], has_bias: bool
) -> Bool[Tensor, "queries keys"] | None:
    """Which keys these queries may attend to; None if that differs between heads, or the bias is not a mask."""
    heads, keys = call.sizes.heads if call.over.by_head else 1, call.sizes.keys
    if heads * len(queries) * keys > _MAX_MASK_PAIRS:
        return None
    head, key = torch.arange(heads, device=queries.device), torch.arange(keys, device=queries.device)
    # queries count along the keys
    query = queries + keys - call.sizes.queries
    allowed = call.over.allows(head[:, None, None], query[:, None], key)
    allowed = allowed.expand(*allowed.shape[:-2], len(queries), keys).reshape(-1, len(queries), keys)
    if has_bias:
        assert call.bias is not None
        bias = call.bias.expand(*call.bias.shape[:-2], call.sizes.queries, keys)
        bias = bias.reshape(-1, call.sizes.queries, keys)[:, queries]
        if not bool(((bias == 0) | (bias < _MASK_BIAS_THRESHOLD)).all()):
            return None
        allowed = allowed & (bias == 0)
    return allowed[0] if bool((allowed == allowed[:1]).all()) else None
