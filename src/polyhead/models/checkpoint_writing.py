"""A model written as a checkpoint that transformers reads: whole, or not at all."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, nn

from polyhead import _files
from polyhead.models import checkpoint_files as files
from polyhead.models.checkpoint_reading import renamed


def named_tensors(model: nn.Module, fresh: nn.Module, names: Mapping[str, str]) -> dict[str, Tensor]:
    """A model's tensors under the names of a checkpoint.

    Args:
        fresh: a model of the same configuration, on the meta device: what a checkpoint has places for.
        names: the model's modules under the checkpoint's names.

    Raises:
        ValueError: where the model is not what its configuration says: heads were pruned, gates set, modules replaced.
    """
    expected, tensors = fresh.state_dict(), model.state_dict()
    hint = "a checkpoint of this kind has no place for heads that were pruned or gated, nor for other modules; safetensors.torch.save_model keeps them"
    for name in (*tensors, *expected):
        if name not in tensors or name not in expected:
            raise ValueError(f"{name}: {'it is gone' if name in expected else 'the model was given it'}; {hint}")
        shape, wanted = tuple(tensors[name].shape), tuple(expected[name].shape)
        if shape != wanted:
            raise ValueError(f"{name}: its shape is {shape}, and was {wanted}; {hint}")
        if tensors[name].is_meta:
            raise ValueError(f"{name}: it is on the meta device; there must be numbers to be written")
    return {str(renamed(name, names)): tensor.detach() for name, tensor in tensors.items()}


def save(folder: str | Path, fields: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write config.json and model.safetensors into a folder, which is made where it is not there.

    Both are written beside their places and moved there when they are whole. An older checkpoint stays until then, and comes
    back where moving fails; nothing is left of folders that were made. Should the process itself be killed while the files
    are moved, which no two files can be at once, then there is no config.json, and the folder is refused when it is read:
    new weights never meet an old configuration. The older files are then in the folder `.polyhead-…` in it, until a
    checkpoint is whole again.

    Raises:
        ValueError: where something other than a regular file is in the place of one; symbolic links are followed.
        OSError: where the files cannot be written, such as on a full disk.
    """
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"folder: {folder} is a file; it must be a folder, or the path of a new one")
    safetensors = files.library("safetensors.torch")
    dtype = next(iter(tensors.values())).dtype
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        places = {name: _files.target(folder / name, "folder") for name in (files.CONFIG, files.WEIGHTS)}
        # without a config.json, what a killed process has left may be all that there is of a checkpoint
        if places[files.CONFIG].exists():
            _sweep(places)
        with contextlib.ExitStack() as stack:
            moves = {name: _move(place, stack.enter_context(_files.workspace(place))) for name, place in places.items()}
            whole = {**fields, "dtype": str(dtype).removeprefix("torch.")}
            config, weights = moves[files.CONFIG], moves[files.WEIGHTS]
            config.new.write_text(json.dumps(whole, indent=2, sort_keys=True) + "\n", encoding="utf-8")
            with _errors_of_the_disk(places[files.WEIGHTS]):
                safetensors.save_file(_apart(tensors), weights.new, metadata={"format": "pt"})
            for move in (config, weights):
                _files.settle(move.new, move.place)
            _exchange(config, weights)
        _sweep(places)
    except BaseException:
        # not where somebody else has written meanwhile
        with contextlib.suppress(OSError):
            for path in made:
                path.rmdir()
        raise


class _Move(NamedTuple):
    """A file that takes a place: where it is written, and where what was there goes."""

    place: Path
    new: Path
    old: Path


def _move(place: Path, workspace: Path) -> _Move:
    for name in ("new", "old"):
        (workspace / name).mkdir()
    return _Move(place, workspace / "new" / place.name, workspace / "old" / place.name)


def _sweep(places: Mapping[str, Path]) -> None:
    for place in places.values():
        _files.sweep(place)


@contextlib.contextmanager
def _errors_of_the_disk(path: Path) -> Iterator[None]:
    """What safetensors says of a disk, as Python says it: OSError, such as "No space left on device"."""
    try:
        yield
    except files.library("safetensors").SafetensorError as error:
        number = re.search(r"os error (\d+)", str(error))
        if number is None:
            raise OSError(f"{path} cannot be written: {error}") from error
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error


def _exchange(config: _Move, weights: _Move) -> None:
    """Move older files away and new ones to their places: config.json goes first and comes last."""
    try:
        for move in (config, weights):
            if move.place.exists():
                move.place.replace(move.old)
        for move in (weights, config):
            move.new.replace(move.place)
    except BaseException:
        for move in (weights, config):
            if move.old.exists():
                move.old.replace(move.place)
            elif not move.new.exists():
                move.place.unlink()
        raise


def _apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors as safetensors takes them: each with memory of its own, in order."""
    seen: set[int] = set()
    apart = {}
    for name, tensor in tensors.items():
        tensor = tensor.cpu().contiguous()
        if tensor.data_ptr() in seen:
            tensor = tensor.clone()
        seen.add(tensor.data_ptr())
        apart[name] = tensor
    return apart
