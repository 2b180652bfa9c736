"""Checkpoints that are whole or absent, and can be read on another number of ranks.

A checkpoint is a folder, `step-00000040`, in the format of torch.distributed.checkpoint (DCP). It is written under another name
and renamed when every rank has finished, so a process that dies while it writes leaves no checkpoint that could be read.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

_NAME = re.compile(r"step-(\d{8})")
_UNFINISHED = ".unfinished"
# names of parameters as keys, so that no list has to be read before its tensors
_OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)


def save_step(folder: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, keep: int = 2) -> None:
    """Write the state after `step` steps, then remove all but the last `keep` checkpoints. Every rank must call it."""
    with whole_folder(folder / f"step-{step:08}") as unfinished:
        save(_tensors(*get_state_dict(model, optimizer, options=_OPTIONS)), checkpoint_id=unfinished)
    if dist.get_rank() == 0:
        for old in find_steps(folder)[:-keep]:
            path = folder / f"step-{old:08}"
            # a checkpoint of which some files are removed must not be read
            path.rename(path.with_name(path.name + _UNFINISHED))
        for path in find_incomplete(folder):
            if path.suffix == _UNFINISHED:
                shutil.rmtree(path)


def load_latest(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Read the newest complete checkpoint; returns its step, or 0 if there is none. Every rank must call it."""
    # rank 0 decides: ranks may see a shared folder differently for a moment
    newest = torch.zeros((), dtype=torch.long)
    if dist.get_rank() == 0:
        newest += max(find_steps(folder), default=0)
        for path in find_incomplete(folder):
            print(f"ignored {path}, which is incomplete", file=sys.stderr, flush=True)
    dist.broadcast(newest, 0)
    step = int(newest)
    if step:
        model_state, optimizer_state = get_state_dict(model, optimizer, options=_OPTIONS)
        # the tensors are read into those of the state, each rank its own part
        read = _tensors(model_state, optimizer_state)
        load(read, checkpoint_id=folder / f"step-{step:08}")
        set_state_dict(
            model,
            optimizer,
            model_state_dict=read["model"],
            optim_state_dict=optimizer_state | read["optimizer"],
            options=_OPTIONS,
        )
    return step


@contextlib.contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """A new folder for all ranks to write to, which gets the name `path` when every rank has finished."""
    unfinished = path.with_name(path.name + _UNFINISHED)
    if dist.get_rank() == 0:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
    dist.barrier()
    yield unfinished
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(path, ignore_errors=True)
        unfinished.rename(path)
        _sync(path.parent)
    dist.barrier()


def find_steps(folder: Path) -> list[int]:
    """The steps of the complete checkpoints in a folder, ascending."""
    return sorted(int(match[1]) for path in _paths(folder) if (match := _NAME.fullmatch(path.name)) and _is_whole(path))


def find_incomplete(folder: Path) -> list[Path]:
    """The folders of checkpoints that were not finished, or have lost their list of tensors."""
    return [
        path
        for path in _paths(folder)
        if _NAME.fullmatch(path.name.removesuffix(_UNFINISHED)) and (path.suffix == _UNFINISHED or not _is_whole(path))
    ]


def _paths(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


def _is_whole(path: Path) -> bool:
    # DCP writes this file last
    return (path / ".metadata").is_file()


def _tensors(model_state: dict[str, Any], optimizer_state: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What a checkpoint has: tensors alone. DCP would pickle other values, such as the learning rate, which the script knows."""
    states = {"model": model_state, "optimizer": optimizer_state}
    return {
        part: {name: x for name, x in state.items() if isinstance(x, torch.Tensor)} for part, state in states.items()
    }


def _sync(folder: Path) -> None:
    """Make a rename survive a power failure."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
