"""Heads, items and nodes over the ranks of torch.distributed."""

from polyhead.distributed.agreement import check_agreement, fingerprint
from polyhead.distributed.head_sharding import shard_heads
from polyhead.distributed.item_kernels import Exchange, Ring
from polyhead.distributed.item_shard import ItemShard, shard_items
from polyhead.distributed.view import gather, mean_mass, received

__all__ = [
    "Exchange",
    "ItemShard",
    "Ring",
    "check_agreement",
    "fingerprint",
    "gather",
    "mean_mass",
    "received",
    "shard_heads",
    "shard_items",
]
