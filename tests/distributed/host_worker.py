"""The script that torchrun starts on each host: a small Llama in fp64 whose tokens lie on two hosts.

`python host_worker.py FOLDER STEPS TIMEOUT` trains under a `RankWatch`. It writes the result of the first `COMPARED_STEPS` steps to
`FOLDER/result-RANK.pt`, and an error to `FOLDER/error-RANK.json`.
"""

import datetime
import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F

from polyhead.distributed import RankWatch, shard_items
from polyhead.models import llama

LENGTH, VOCAB, COMPARED_STEPS = 26, 31, 4
# of the message that measures the link
MESSAGE_BYTES = 40_000


class Training:
    """A model and its data. Without a group, one process has all tokens."""

    def __init__(self, group=None):
        torch.manual_seed(0)
        config = llama.Config(32, 4, 2, 48, vocab=VOCAB, positions=LENGTH, kv_heads=2, attention_dropout=0.2)
        self.model, self.group, self.losses = llama.Llama(config).double(), group, []
        self._ids = torch.randint(VOCAB, (2, LENGTH))
        # labels are shifted before they are sharded: the next token may lie on another rank
        self._labels, self._over = F.pad(self._ids[:, 1:], (0, 1), value=-100), None
        self._count = (self._labels != -100).sum()
        if group is not None:
            self._over = shard_items(None, LENGTH, group)
            self._ids, self._labels = (self._over.take(x, dim=-1) for x in (self._ids, self._labels))

    def step(self, number):
        """One step of gradient descent."""
        torch.manual_seed(number)
        self.model.zero_grad()
        logits = self.model.logits(self.model(self._ids, over=self._over))
        loss = F.cross_entropy(logits.flatten(0, 1), self._labels.flatten(), reduction="sum") / self._count
        loss.backward()
        parameters = [p for p in self.model.parameters() if p.grad is not None]
        # the loss and the gradients, in one message
        sums = torch.cat([loss.detach().view(1), *(p.grad.flatten() for p in parameters)])
        if self.group is not None:
            dist.all_reduce(sums, group=self.group)
        self.losses.append(sums[0].item())
        gradients = sums[1:].split([p.numel() for p in parameters])
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter -= 0.5 * gradient.view_as(parameter)

    def result(self):
        return {"losses": self.losses, "parameters": self.model.state_dict()}


def measure_link(group):
    """Seconds that a message from the first rank to the second and back takes."""
    x = torch.zeros(MESSAGE_BYTES, dtype=torch.uint8)
    dist.barrier(group)
    start = time.monotonic()
    for source in range(2):
        dist.broadcast(x, source, group=group)
    dist.barrier(group)
    return time.monotonic() - start


def train(folder, steps, timeout):
    rank = dist.get_rank()
    group = dist.new_group(timeout=datetime.timedelta(seconds=timeout))
    training, seconds = Training(group), measure_link(group)
    with RankWatch(timeout, group) as watch:
        for step in range(steps):
            with watch.step(step):
                training.step(step)
            if step == COMPARED_STEPS - 1:
                result = {"seconds": seconds, **training.result()}
                write(folder / f"result-{rank}.pt", lambda path, result=result: torch.save(result, path))
            if step >= COMPARED_STEPS:
                # leave the processors to the hosts that still start
                time.sleep(0.05)


def write(path, save):
    """Write a file that others see only when it is complete."""
    partial = path.with_suffix(".partial")
    save(partial)
    partial.rename(path)


def main(folder, steps, timeout):
    # processes take long to start on a busy machine: the short timeout is for training
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    dist.barrier()
    try:
        train(folder, steps, timeout)
    except Exception as error:
        report = {"text": str(error), "cause": str(error.__cause__), "time": time.monotonic()}
        write(folder / f"error-{dist.get_rank()}.json", lambda path: path.write_text(json.dumps(report)))
        raise
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
