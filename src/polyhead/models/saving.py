"""A model written as a checkpoint that transformers reads: whole, or not at all."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from polyhead.models import files
from polyhead.models.weights import renamed


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
    new weights never meet an old configuration. The older files are then in the folder `.saving-…` in it.
    """
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"folder: {folder} is a file; it must be a folder, or the path of a new one")
    safetensors = files.library("safetensors.torch")
    dtype = next(iter(tensors.values())).dtype
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".saving-") as beside:
            new, old = Path(beside, "new"), Path(beside, "old")
            new.mkdir()
            old.mkdir()
            whole = {**fields, "dtype": str(dtype).removeprefix("torch.")}
            (new / files.CONFIG).write_text(json.dumps(whole, indent=2, sort_keys=True) + "\n", encoding="utf-8")
            safetensors.save_file(_apart(tensors), new / files.WEIGHTS, metadata={"format": "pt"})
            _exchange(folder, new, old)
    except BaseException:
        # not where somebody else has written meanwhile
        with contextlib.suppress(OSError):
            for path in made:
                path.rmdir()
        raise


def _exchange(folder: Path, new: Path, old: Path) -> None:
    """Move a checkpoint's files from `folder` to `old` and from `new` to `folder`: config.json goes first and comes last."""
    try:
        for name in (files.CONFIG, files.WEIGHTS):
            if os.path.lexists(folder / name):
                (folder / name).replace(old / name)
        for name in (files.WEIGHTS, files.CONFIG):
            (new / name).replace(folder / name)
    except BaseException:
        for name in (files.WEIGHTS, files.CONFIG):
            if os.path.lexists(old / name):
                (old / name).replace(folder / name)
            elif not (new / name).exists():
                (folder / name).unlink()
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
