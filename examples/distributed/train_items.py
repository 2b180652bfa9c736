"""Train a small Llama on long sequences whose tokens are on several ranks (context parallelism), with checkpoints.

    torchrun --nproc-per-node 2 --max-restarts 3 examples/distributed/train_items.py --checkpoints /tmp/items

A sequence has several documents, and a token attends to those before it in its own document, at most a window of them. Every
document counts: from a random token on, by a random stride.
"""

from __future__ import annotations

import argparse
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from training import Task, make_parser, positive, step_seed, train

from polyhead import Segments, Window
from polyhead.distributed import shard_items
from polyhead.models.llama import Config, Llama

VOCAB, WINDOW, DOCUMENTS = 24, 64, 8
# cross_entropy ignores it
NO_LABEL = -100


class Sequence(NamedTuple):
    """Documents in one sequence: the document, the token and the next token at each position, each (1, length)."""

    documents: Tensor
    ids: Tensor
    labels: Tensor


def make_task(arguments: argparse.Namespace) -> Task:
    """The model, the same on every rank, and the loss of the rank's own tokens."""
    length = arguments.length
    model = Llama(Config(32, 4, 2, 64, vocab=VOCAB, positions=length, kv_heads=2, attention_dropout=0.05))

    def loss(step: int) -> Tensor:
        whole = make_sequence(length, step_seed(arguments.seed, step))
        shard = shard_items(Segments(whole.documents) & Window(WINDOW), length)
        # shifted before sharding, since the next token may be on another rank
        labels = shard.take(whole.labels, dim=-1)
        logits = model.logits(model(shard.take(whole.ids, dim=-1), over=shard))
        count = (whole.labels != NO_LABEL).sum()
        return cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=NO_LABEL, reduction="sum") / count

    return Task(model, loss, sums_over_ranks=True)


def make_sequence(length: int, seed: int) -> Sequence:
    """The sequence of one step. The last token of a document has no label."""
    draw = torch.Generator().manual_seed(seed)
    ends = torch.randint(1, length, (DOCUMENTS - 1,), generator=draw).sort()[0]
    position = torch.arange(length)
    documents = torch.bucketize(position, ends, right=True)
    start = torch.randint(VOCAB, (DOCUMENTS,), generator=draw)
    stride = torch.randint(1, 5, (DOCUMENTS,), generator=draw)
    ids = (start[documents] + stride[documents] * position) % VOCAB
    labels = ids.roll(-1).masked_fill(documents != documents.roll(-1), NO_LABEL)
    labels[-1] = NO_LABEL
    return Sequence(documents[None], ids[None], labels[None])


if __name__ == "__main__":
    parser = make_parser(__doc__, steps=100, lr=1e-2)
    parser.add_argument("--length", type=positive, default=2000, help="tokens of a sequence (default: %(default)s)")
    train(parser.parse_args(), make_task)
