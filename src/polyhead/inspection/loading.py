"""A model by its name, for the command line: one of ours, or one of transformers'."""

from __future__ import annotations

import contextlib
import importlib
import json
import re
from collections.abc import Iterator
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
    found = folder_or_id(name)
    if isinstance(found, Path) and _kind(found) in (None, *ARCHITECTURES):
        return Loaded(*models.load(found), name)
    return _of_transformers(str(found))


def folder_or_id(name: str) -> Path | str:
    """The folder of a model, its own or an installed package's; or its name, where that could be an id of the Hub.

    Raises:
        FileNotFoundError: where it is neither.
    """
    try:
        return files.folder(name)
    except FileNotFoundError:
        # such as google-bert/bert-base-uncased
        if re.fullmatch(r"\w[\w.-]*/[\w.-]+", name):
            return name
        if re.fullmatch(r"\w[\w.-]*", name) and not files.places(name):
            raise FileNotFoundError(
                f"model: {name!r} is no folder and no installed package, and no id of the Hugging Face Hub: these are owner/name"
            ) from None
        raise


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
    folder = Path(name) if Path(name).is_dir() else None
    if folder is not None and files.weights(folder) is None:
        raise ValueError(f"model: {name} has no {files.WEIGHTS}; pickles are not read, since they can run code")
    transformers = _transformers(name)
    try:
        with _quiet(transformers.utils.logging):
            # safetensors only: a pickle can run code
            model: nn.Module = transformers.AutoModel.from_pretrained(name, use_safetensors=True)
    except (OSError, ValueError) as error:
        first = str(error).strip().splitlines()[0]
        where = "" if folder is not None else " is no folder and no installed package, and"
        raise ValueError(f"model: {name!r}{where or ':'} transformers says: {first}") from error
    return model.eval()


@contextlib.contextmanager
def _quiet(logging: Any) -> Iterator[None]:
    """transformers' logging without reports and progress bars, until the end of the block."""
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def beside(name: str, file: str) -> Path | None:
    """A file of a model that transformers reads; None where there is none."""
    folder = Path(name)
    if folder.is_dir():
        return folder / file if (folder / file).is_file() else None
    transformers = _transformers(name)
    try:
        with _quiet(transformers.utils.logging):
            found = transformers.utils.cached_file(name, file)
    except (OSError, ValueError):
        return None
    return None if found is None else Path(found)


def _transformers(name: str) -> Any:
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise ImportError(f"model: {name!r} is read with transformers: pip install transformers") from error
