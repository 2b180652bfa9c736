"""Train a GAT of two layers on a graph whose nodes are on several ranks, with checkpoints.

    torchrun --nproc-per-node 2 --max-restarts 3 examples/distributed/train_nodes.py --checkpoints /tmp/nodes

The nodes of the graph are in groups, most edges are within a group, and the features alone say little about the group that is to
be found. Rank 0 cuts the graph and writes a file per part, once for each number of ranks; then each rank reads its own.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from checkpoints import whole_folder
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, elu
from training import Task, make_parser, positive, train

from polyhead import Graph, MultiHeadAttention
from polyhead.distributed import GraphPart, load_part, partition, save_parts

GROUPS, FEATURES, NEIGHBOURS = 6, 16, 8


class Nodes(NamedTuple):
    """The whole graph, and what is known of its nodes."""

    graph: Graph
    rows: dict[str, Tensor]


class Gat(nn.Module):
    """Two layers of graph attention (Veličković 2018) that classify nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = MultiHeadAttention(FEATURES, 4, head_dim=8, score="gat", combine="concat", dropout=0.3)
        self.output = MultiHeadAttention(32, 1, head_dim=GROUPS, score="gat", combine="mean", dropout=0.3)

    def forward(self, x: Tensor, part: GraphPart) -> Tensor:
        """The logits of a rank's own nodes, from their features."""
        hidden, _ = self.hidden(x, over=part)
        logits: Tensor = self.output(elu(hidden), over=part)[0]
        return logits


def make_task(arguments: argparse.Namespace) -> Task:
    """The model, the same on every rank, and the loss of the rank's own nodes."""
    folder = arguments.checkpoints / f"parts-{arguments.nodes}-{arguments.seed}-{dist.get_world_size()}"
    write_parts(folder, arguments.nodes, arguments.seed)
    part, rows = load_part(folder)
    x, labels, is_train = rows["x"].to(torch.get_default_dtype()), rows["y"], rows["train"]
    count = is_train.sum()
    dist.all_reduce(count)
    model = Gat()

    def loss(step: int) -> Tensor:
        return cross_entropy(model(x, part)[is_train], labels[is_train], reduction="sum") / count

    return Task(model, loss, sums_over_ranks=True)


def write_parts(folder: Path, nodes: int, seed: int) -> None:
    """Cut the graph for the ranks that there are, unless that is done. Only rank 0 has the whole graph."""
    is_written = torch.tensor(folder.is_dir())
    dist.broadcast(is_written, 0)
    if not is_written:
        with whole_folder(folder) as unfinished:
            if dist.get_rank() == 0:
                whole = make_nodes(nodes, seed)
                save_parts(partition(whole.graph, dist.get_world_size()), unfinished, whole.rows)


def make_nodes(count: int, seed: int) -> Nodes:
    """A graph of `count` nodes in groups: seven of eight edges stay within a group."""
    draw = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % GROUPS
    target = torch.arange(count).repeat_interleave(NEIGHBOURS)
    # the next node of a group is GROUPS further
    near = target + GROUPS * torch.randint(-20, 21, target.shape, generator=draw)
    far = torch.randint(count, target.shape, generator=draw)
    is_far = torch.rand(target.shape, generator=draw) < 1 / 8
    source = torch.where(is_far, far, near % (count - count % GROUPS))
    graph = Graph(torch.stack((source, target)), count).with_self_loops()
    features = torch.randn(count, FEATURES, generator=draw, dtype=torch.float64)
    features[torch.arange(count), labels] += 1
    return Nodes(graph, {"x": features, "y": labels, "train": torch.rand(count, generator=draw) < 0.3})


if __name__ == "__main__":
    parser = make_parser(__doc__, steps=100, lr=1e-2)
    parser.add_argument("--nodes", type=positive, default=1200, help="nodes of the graph (default: %(default)s)")
    train(parser.parse_args(), make_task)
