"""Write a model as a checkpoint that transformers can read, atomically."""

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
from polyhead.models import checkpoint_files
from polyhead.models.checkpoint_reading import translate_parameter_name


def name_tensors_for_checkpoint(model: nn.Module, fresh: nn.Module, names: Mapping[str, str]) -> dict[str, Tensor]:
    """A model's tensors under the names of a checkpoint.

    Args:
        fresh: a model of the same configuration, on the meta device: it has the tensors that a checkpoint can hold.
        names: the model's modules -> the checkpoint's modules.

    Raises:
        ValueError: if the model differs from its configuration: heads were pruned, gates set, or modules replaced; or if its
            parameters are sharded over processes.
    """
    expected, tensors = fresh.state_dict(), model.state_dict()
    sharded = next((name for name, x in tensors.items() if hasattr(x, "full_tensor")), None)
    if sharded is not None:
        raise ValueError(
            f"the model must be whole to be saved, got {sharded} as a DTensor; load the whole state into an unsharded model first, "
            "from torch's get_model_state_dict with full_state_dict=True"
        )
    hint = "this format cannot hold pruned or gated heads, nor other modules; use safetensors.torch.save_model"
    for name in (*tensors, *expected):
        if name not in tensors:
            raise ValueError(f"{name} must be in the model, as its config says; {hint}")
        if name not in expected:
            raise ValueError(f"{name} is in the model, but not in its config; {hint}")
        shape, expected_shape = tuple(tensors[name].shape), tuple(expected[name].shape)
        if shape != expected_shape:
            raise ValueError(f"{name} must have shape {expected_shape}, as the config says, got {shape}; {hint}")
        if tensors[name].is_meta:
            raise ValueError(
                f"{name} must hold values to be saved, got a tensor on the meta device; load weights first"
            )
    return {str(translate_parameter_name(name, names)): tensor.detach() for name, tensor in tensors.items()}


def save_checkpoint(folder: str | Path, fields: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write config.json and model.safetensors into a folder, which is created if needed.

    Both are first written to temporary files beside their targets, then moved. An older checkpoint stays until then; if a
    move fails, it is restored, and folders that were created are removed. If the process is killed between the moves (two
    files cannot be moved atomically), config.json is missing and the folder cannot be loaded: new weights are never
    combined with an old configuration. The older files are then in its subfolder `.polyhead-…`, until the next complete save.

    Raises:
        ValueError: if a target exists and is not a regular file; symbolic links are followed.
        OSError: if the files cannot be written, for example on a full disk.
    """
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"folder must be a folder or a new path, got a file: {folder}")
    safetensors = checkpoint_files.import_optional_library("safetensors.torch")
    dtype = next(iter(tensors.values())).dtype
    created = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        targets = {
            name: _files.resolve_writable_path(folder / name, "folder")
            for name in (checkpoint_files.CONFIG_FILE, checkpoint_files.WEIGHTS_FILE)
        }
        # without config.json, the files of a killed process may be the only copy of a checkpoint
        if targets[checkpoint_files.CONFIG_FILE].exists():
            _remove_leftovers(targets)
        with contextlib.ExitStack() as stack:
            moves = {
                name: _plan_replacement(path, stack.enter_context(_files.locked_temporary_folder(path)))
                for name, path in targets.items()
            }
            with_dtype = {**fields, "dtype": str(dtype).removeprefix("torch.")}
            config, weights = moves[checkpoint_files.CONFIG_FILE], moves[checkpoint_files.WEIGHTS_FILE]
            config.new.write_text(json.dumps(with_dtype, indent=2, sort_keys=True) + "\n", encoding="utf-8")
            with _reraise_as_os_error(targets[checkpoint_files.WEIGHTS_FILE]):
                safetensors.save_file(_contiguous_and_unshared(tensors), weights.new, metadata={"format": "pt"})
            for move in (config, weights):
                _files.flush_and_copy_permissions(move.new, move.target)
            _replace_files(config, weights)
        _remove_leftovers(targets)
    except BaseException:
        # rmdir keeps folders into which others have written meanwhile
        with contextlib.suppress(OSError):
            for path in created:
                path.rmdir()
        raise


class _FileReplacement(NamedTuple):
    """The replacement of a file: its target, the new file, and where the old one goes."""

    target: Path
    new: Path
    old: Path


def _plan_replacement(target: Path, workspace: Path) -> _FileReplacement:
    for name in ("new", "old"):
        (workspace / name).mkdir()
    return _FileReplacement(target, workspace / "new" / target.name, workspace / "old" / target.name)


def _remove_leftovers(targets: Mapping[str, Path]) -> None:
    for target in targets.values():
        _files.remove_abandoned_folders(target)


@contextlib.contextmanager
def _reraise_as_os_error(path: Path) -> Iterator[None]:
    """Raise the disk errors of safetensors as OSError, such as "No space left on device"."""
    try:
        yield
    except checkpoint_files.import_optional_library("safetensors").SafetensorError as error:
        number = re.search(r"os error (\d+)", str(error))
        if number is None:
            raise OSError(f"{path} cannot be written: {error}") from error
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error


def _replace_files(config: _FileReplacement, weights: _FileReplacement) -> None:
    """Move the old files away, config.json first, then the new files to their targets, config.json last."""
    try:
        for move in (config, weights):
            if move.target.exists():
                move.target.replace(move.old)
        for move in (weights, config):
            move.new.replace(move.target)
    except BaseException:
        for move in (weights, config):
            if move.old.exists():
                move.old.replace(move.target)
            elif not move.new.exists():
                move.target.unlink()
        raise


def _contiguous_and_unshared(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors as safetensors requires them: contiguous, and none shares memory with another."""
    seen: set[int] = set()
    unshared = {}
    for name, tensor in tensors.items():
        tensor = tensor.cpu().contiguous()
        if tensor.data_ptr() in seen:
            tensor = tensor.clone()
        seen.add(tensor.data_ptr())
        unshared[name] = tensor
    return unshared
