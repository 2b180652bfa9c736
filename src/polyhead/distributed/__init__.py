"""Heads, items and nodes over the ranks of torch.distributed."""

from polyhead.distributed import item_kernels  # noqa: F401 - registers the kernels of items on several ranks
from polyhead.distributed.agreement import check_agreement, fingerprint
from polyhead.distributed.gradients import sum_gradients
from polyhead.distributed.graph_part import GraphPart
from polyhead.distributed.head_sharding import shard_heads
from polyhead.distributed.item_shard import ItemShard, shard_items
from polyhead.distributed.missing_ranks import RankWatch, wait_for_ranks
from polyhead.distributed.part_files import LoadedPart, load_part, save_parts
from polyhead.distributed.partition import Partition, partition
from polyhead.distributed.process_group import init_process_group
from polyhead.distributed.view import gather, mean_mass, received

__all__ = [
    "GraphPart",
    "ItemShard",
    "LoadedPart",
    "Partition",
    "RankWatch",
    "check_agreement",
    "fingerprint",
    "gather",
    "init_process_group",
    "load_part",
    "mean_mass",
    "partition",
    "received",
    "save_parts",
    "shard_heads",
    "shard_items",
    "sum_gradients",
    "wait_for_ranks",
]
