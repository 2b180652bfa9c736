"""Train a small Llama whose heads are on several ranks (tensor parallelism), with checkpoints.

    torchrun --nproc-per-node 2 --max-restarts 3 examples/distributed/train_heads.py --checkpoints /tmp/heads

Every text counts: from a random token on, by a random stride. The model has to find the stride in the tokens before. The ranks
must divide the 4 heads.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import cross_entropy
from training import Task, make_parser, step_seed, train

from polyhead.distributed import shard_heads
from polyhead.models.llama import Config, Llama

VOCAB, LENGTH, BATCH = 24, 24, 32


def make_task(arguments: argparse.Namespace) -> Task:
    """The sharded model, and its loss: every rank has the same texts, and so the whole loss."""
    model = Llama(Config(32, 4, 2, 64, vocab=VOCAB, positions=LENGTH, kv_heads=2, attention_dropout=0.05))
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    model = shard_heads(model, mesh)

    def loss(step: int) -> Tensor:
        ids = make_texts(step_seed(arguments.seed, step))
        logits = model.logits(model(ids[:, :-1]))
        return cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())

    return Task(model, loss, sums_over_ranks=False)


def make_texts(seed: int) -> Tensor:
    """Texts (batch, tokens) of one step."""
    draw = torch.Generator().manual_seed(seed)
    start = torch.randint(VOCAB, (BATCH, 1), generator=draw)
    stride = torch.randint(1, 5, (BATCH, 1), generator=draw)
    return (start + stride * torch.arange(LENGTH + 1)) % VOCAB


if __name__ == "__main__":
    train(make_parser(__doc__, steps=150, lr=1e-2).parse_args(), make_task)
