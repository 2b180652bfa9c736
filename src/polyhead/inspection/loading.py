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
    """A model that transformers reads: from a folder, or by an id, from its cache or the net."""
    try:
        transformers: Any = importlib.import_module("transformers")
    except ImportError as error:
        raise ImportError(f"model: {name!r} is read with transformers: pip install transformers") from error
    try:
        # safetensors only: a pickle can run code
        model = transformers.AutoModel.from_pretrained(name, use_safetensors=True)
        path = Path(name)
        tokenizer = path / files.TOKENIZER if path.is_dir() else transformers.utils.cached_file(name, files.TOKENIZER)
    except (OSError, ValueError) as error:
        first = str(error).strip().splitlines()[0]
        raise ValueError(
            f"model: {name!r} is no folder and no installed package, and transformers says: {first}"
        ) from error
    return Loaded(model.eval(), Tokenizer(tokenizer), name)
