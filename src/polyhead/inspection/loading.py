"""A model by its name, for the command line: one of ours, or one of transformers'."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from polyhead import models
from polyhead.models import Tokenizer, files
from polyhead.models.pretrained import ARCHITECTURES


class Loaded(NamedTuple):
    """A model in evaluation mode, its tokenizer, and what it is called."""

    model: nn.Module
    tokenizer: Tokenizer
    name: str


def load(name: str | None = None) -> Loaded:
    """The default model, or one by a folder, an installed package, or an id that transformers knows.

    Raises:
        FileNotFoundError: where there is no such model, or a file is missing from it.
        ValueError: where a file is not what it should be.
        ImportError: where a library is needed, with the command that installs it.
    """
    if name is None:
        return Loaded(*models.default(), "MiniLM-L6")
    try:
        folder = files.folder(name)
    except FileNotFoundError:
        # such as google-bert/bert-base-uncased
        if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) or name.startswith("."):
            raise
        return _of_transformers(name)
    if _kind(folder) in (None, *ARCHITECTURES):
        return Loaded(*models.load(folder), name)
    return _of_transformers(str(folder))


def _kind(folder: Path) -> str | None:
    """The architecture that a folder names; None where its config.json is not what it should be."""
    try:
        return str(json.loads((folder / files.CONFIG).read_text(encoding="utf-8"))["model_type"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _of_transformers(name: str) -> Loaded:
    """A text model that transformers reads."""
    model = of_transformers(name)
    tokenizer = beside(name, files.TOKENIZER)
    if tokenizer is None:
        raise ValueError(f"model: {name!r} has no {files.TOKENIZER}; a text is read with one (an image with --image F)")
    return Loaded(model, Tokenizer(tokenizer), name)


def of_transformers(name: str) -> nn.Module:
    """A model that transformers reads: from a folder, or by an id, from its cache or the net."""
    try:
        # safetensors only: a pickle can run code
        model: nn.Module = _transformers(name).AutoModel.from_pretrained(name, use_safetensors=True)
    except (OSError, ValueError) as error:
        first = str(error).strip().splitlines()[0]
        raise ValueError(
            f"model: {name!r} is no folder and no installed package, and transformers says: {first}"
        ) from error
    return model.eval()


def beside(name: str, file: str) -> Path | None:
    """A file of a model that transformers reads; None where there is none."""
    folder = Path(name)
    if folder.is_dir():
        return folder / file if (folder / file).is_file() else None
    try:
        found = _transformers(name).utils.cached_file(name, file)
    except (OSError, ValueError):
        return None
    return None if found is None else Path(found)


def _transformers(name: str) -> Any:
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise ImportError(f"model: {name!r} is read with transformers: pip install transformers") from error
