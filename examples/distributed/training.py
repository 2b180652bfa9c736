"""The training loop of the examples: it goes on from the newest checkpoint, and names a rank that fails."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import checkpoints
import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor, nn

from polyhead.distributed import RankWatch, init_process_group, sum_gradients

# Where stderr is not a terminal, about so many lines tell the progress.
_LINES = 20
Show = Callable[[int, float], None]


class Task(NamedTuple):
    """What an example trains: a model, and a loss that depends on nothing but the number of the step."""

    model: nn.Module
    loss: Callable[[int], Tensor]
    sums_over_ranks: bool
    """Whether each rank has a part of the loss. Losses and gradients are then summed over ranks."""


def make_parser(description: str | None, *, steps: int, lr: float) -> argparse.ArgumentParser:
    """The options that all examples share."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--checkpoints", type=Path, required=True, metavar="FOLDER", help="read the newest checkpoint, write new ones")
    add("--steps", type=positive, default=steps, help="the last step (default: %(default)s)")
    add("--every", type=positive, default=10, help="steps between two checkpoints (default: %(default)s)")
    add("--keep", type=positive, default=2, help="checkpoints to keep (default: %(default)s)")
    add("--lr", type=float, default=lr, help="learning rate of AdamW (default: %(default)s)")
    add("--seed", type=int, default=0, help="of weights, data and dropout (default: %(default)s)")
    add("--dtype", choices=("float32", "float64"), default="float32", help="of weights (default: %(default)s)")
    add("--timeout", type=positive, default=120, help="seconds to wait for other ranks (default: %(default)s)")
    return parser


def positive(text: str) -> int:
    """A positive integer, for argparse."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a positive integer, got {text!r}")
    return int(text)


def train(arguments: argparse.Namespace, make_task: Callable[[argparse.Namespace], Task]) -> None:
    """Train from the newest checkpoint, or from the beginning, to the last step. Every rank must call it, under torchrun."""
    init_process_group("gloo", timeout=datetime.timedelta(seconds=arguments.timeout))
    torch.set_default_dtype(getattr(torch, arguments.dtype))
    # every rank starts from the same weights
    torch.manual_seed(arguments.seed)
    folder, last = arguments.checkpoints, arguments.steps
    with RankWatch(arguments.timeout) as watch:
        with watch.step(0):
            task = make_task(arguments)
            optimizer = torch.optim.AdamW(task.model.parameters(), lr=arguments.lr)
            done = checkpoints.load_latest(folder, task.model, optimizer)
        with show_progress(done, last) as show:
            for step in range(done + 1, last + 1):
                with watch.step(step):
                    loss = run_step(task, optimizer, step, arguments.seed)
                    if step % arguments.every == 0 or step == last:
                        checkpoints.save_step(folder, step, task.model, optimizer, arguments.keep)
                show(step, loss)
    if dist.get_rank() == 0:
        print(f"step {last}: loss {loss:.10f}" if done < last else f"step {done} is done: {folder}", flush=True)
    dist.destroy_process_group()


def run_step(task: Task, optimizer: torch.optim.Optimizer, step: int, seed: int) -> float:
    """Make one step; returns the loss of all ranks."""
    # a step that is made again, after a failure or on other ranks, drops the same
    torch.manual_seed(step_seed(seed, step))
    optimizer.zero_grad()
    loss = task.loss(step)
    loss.backward()
    total = loss.detach().clone()
    if task.sums_over_ranks:
        dist.all_reduce(total)
        sum_gradients(task.model)
    optimizer.step()
    return float(total)


def step_seed(seed: int, step: int) -> int:
    """The seed of one step's data and dropout."""
    return seed * 1_000_003 + step


@contextlib.contextmanager
def show_progress(done: int, last: int) -> Iterator[Show]:
    """Rank 0 shows the steps: as a bar on a terminal, else as lines."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if rank == 0 and done:
        print(f"resumed from step {done} on {ranks} ranks", file=sys.stderr, flush=True)
    if rank != 0:
        yield lambda step, loss: None
    elif not sys.stderr.isatty():
        yield lambda step, loss: _print_step(step, last, loss)
    else:
        columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(), TextColumn("loss {task.fields[loss]:.4f}"))
        with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True)) as bar:
            shown = bar.add_task("", total=last, completed=done, loss=float("nan"))
            yield lambda step, loss: bar.update(shown, completed=step, loss=loss)


def _print_step(step: int, last: int, loss: float) -> None:
    if step % max(1, last // _LINES) == 0 or step == last:
        print(f"step {step} of {last}: loss {loss:.6f}", file=sys.stderr, flush=True)
