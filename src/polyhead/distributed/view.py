"""Views of heads that lie on several ranks: the whole where somebody asks for it, sums over ranks elsewhere."""

from __future__ import annotations

from jaxtyping import Bool, Float
from torch import Tensor

from polyhead._checks import describe_type
from polyhead.distributed.item_heads import gather_item_heads, item_mean_mass, item_received
from polyhead.distributed.item_shard import ItemShard
from polyhead.heads import Heads


def gather(heads: Heads) -> Heads:
    """A view of the whole attention, on every rank, from the parts of all of them; without gradients.

    Every rank must call it. It sends all queries, keys and values, and holds them: for pictures and small inputs.
    """
    _check_sharded(heads)
    return gather_item_heads(heads)


def received(heads: Heads) -> Float[Tensor, "... heads keys"]:
    """`heads.received()` of the whole attention, on every rank: sums over own queries are added up, nothing is gathered.

    Every rank must call it.
    """
    _check_sharded(heads)
    return item_received(heads)


def mean_mass(heads: Heads, on: str | int | Bool[Tensor, " keys"]) -> Float[Tensor, "... heads"]:
    """`heads.mass(on).mean(-1)` of the whole attention, on every rank: the mean weight of all queries on certain keys.

    Args:
        on: `"self"`, `"previous"`, `"next"` or `"first"`; or the offset of the key from the query; or a bool tensor of all keys.
    """
    _check_sharded(heads)
    return item_mean_mass(heads, on)


def _check_sharded(heads: Heads) -> None:
    if not isinstance(heads, Heads):
        raise ValueError(f"heads must be the view that a layer returns, got {describe_type(heads)}")
    if not isinstance(heads.part.call.over, ItemShard):
        raise ValueError(
            f"heads must be those of a call over=shard_items(…), got {heads.part.call.over!r}; they are whole already"
        )
