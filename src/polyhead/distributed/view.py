"""Views of heads that lie on several ranks: the whole where somebody asks for it, sums over ranks elsewhere.

The heads of a call may be divided over ranks, and its items or nodes too, over other ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import overload

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from polyhead._checks import WrongType, describe_type
from polyhead.distributed.graph_part import GraphPart
from polyhead.distributed.head_gatherer import HeadGatherer
from polyhead.distributed.item_heads import gather_item_heads, item_mean_mass, item_received
from polyhead.distributed.item_shard import ItemShard
from polyhead.distributed.node_heads import gather_node_heads, node_mean_mass, node_received
from polyhead.heads import Heads


@overload
def gather(heads: Heads) -> Heads: ...


@overload
def gather(heads: Mapping[str, Heads]) -> dict[str, Heads]: ...


@torch.no_grad()
def gather(heads: Heads | Mapping[str, Heads]) -> Heads | dict[str, Heads]:
    """A view of the whole attention, on every rank, from the parts of all of them; without gradients.

    Every rank must call it. It sends all queries, keys and values, and every rank holds them: for pictures and small inputs.
    Heads that are whole already are returned as they are.

    Args:
        heads: what a layer returns, or what `capture` has recorded: layers by name.
    """
    if isinstance(heads, Mapping):
        return {name: gather(view) for name, view in heads.items()}
    head_gatherer = _check_whole_view(heads)
    whole = heads if head_gatherer is None else head_gatherer.gather(heads)
    if isinstance(whole.over, ItemShard):
        return gather_item_heads(whole)
    return gather_node_heads(whole) if isinstance(whole.over, GraphPart) else whole


@torch.no_grad()
def received(heads: Heads) -> Float[Tensor, "... heads keys"]:
    """`heads.received()` of the whole attention, on every rank: sums over own queries are added up, nothing is gathered.

    Every rank must call it.
    """
    head_gatherer = _check_whole_view(heads)
    if isinstance(heads.over, ItemShard):
        own = item_received(heads)
    else:
        own = node_received(heads) if isinstance(heads.over, GraphPart) else heads.received()
    return own if head_gatherer is None else head_gatherer.concatenate(own, -2)


@torch.no_grad()
def mean_mass(heads: Heads, on: str | int | Bool[Tensor, " keys"]) -> Float[Tensor, "... heads"]:
    """`heads.mass(on).mean(-1)` of the whole attention, on every rank: the mean weight of all queries on certain keys.

    Every rank must call it.

    Args:
        on: `"self"`, `"previous"`, `"next"` or `"first"`; or the offset of the key from the query; or a bool tensor of all keys.
    """
    head_gatherer = _check_whole_view(heads)
    if isinstance(heads.over, ItemShard):
        own = item_mean_mass(heads, on)
    else:
        own = node_mean_mass(heads, on) if isinstance(heads.over, GraphPart) else heads.mass(on).mean(-1)
    return own if head_gatherer is None else head_gatherer.concatenate(own, -1)


def _check_whole_view(heads: Heads) -> HeadGatherer | None:
    """What finds the heads of other ranks, if there are such heads. Raises unless `heads` is the view of a call, unchanged."""
    if not isinstance(heads, Heads):
        raise WrongType(f"heads must be the view that a layer returns, got {describe_type(heads)}")
    call, *selected = heads.part
    if any(x is not None for x in selected):
        raise ValueError(
            "heads must be the view of a whole call, got a selection or contributions; take them of what gather returns"
        )
    heads.check_unchanged()
    at = call.global_indices
    if at is None or at.num_heads is None:
        return None
    if at.head_gatherer is None:
        raise ValueError(
            "heads must be on the ranks that computed them, got a copy that was loaded; gather them before they are saved"
        )
    found: HeadGatherer = at.head_gatherer
    return found
