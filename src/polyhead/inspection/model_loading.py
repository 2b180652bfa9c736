"""A model by its name, for the command line: one of ours, or one of transformers'."""

from __future__ import annotations

import contextlib
import importlib
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from polyhead import _limits, models
from polyhead.models import Tokenizer
from polyhead.models import checkpoint_files as files
from polyhead.models.pretrained import ARCHITECTURES

# parameters that checkpoints leave out, such as a pooler's
_UNSTORED = 1 << 24


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
        return str(files.read_json(folder / files.CONFIG)["model_type"])
    except (OSError, ValueError, KeyError):
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
    config = beside(name, files.CONFIG)
    if config is not None:
        _check_layers(config, files.read_json(config))
    if folder is not None:
        _check_size(transformers, folder)
    model: nn.Module
    with _said(transformers, name):
        # safetensors only, and none of its own code: a pickle can run code too
        model, found = transformers.AutoModel.from_pretrained(
            name, use_safetensors=True, trust_remote_code=False, output_loading_info=True
        )
    _check_filled(name, found["missing_keys"])
    return model.eval()


@contextlib.contextmanager
def _said(transformers: Any, name: str) -> Iterator[None]:
    """transformers without its own reports; what it raises about a model as an error of ours."""
    try:
        with _quiet(transformers.utils.logging):
            yield
    except ImportError:
        raise
    # of a configuration that is not what it should be, any other may come
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        first = " ".join(line.strip() for line in lines[: 2 if lines[0].endswith(":") else 1])
        where = ":" if Path(name).is_dir() else " is no folder and no installed package, and"
        raise ValueError(f"model: {name!r}{where} transformers says: {first}") from error


def _check_layers(path: Path, fields: dict[str, Any]) -> None:
    """Raise where a config.json, or an object in it, speaks of more layers than any model has: building them would take hours."""
    for key, value in fields.items():
        if isinstance(value, dict):
            _check_layers(path, value)
        elif re.search(r"(^|_)layers?$", key) and isinstance(value, int) and value > _limits.LAYERS:
            raise ValueError(f"{path}: {key} must be at most {_limits.LAYERS:,}, got {value:,}")


def _check_size(transformers: Any, folder: Path) -> None:
    """Raise where a config.json speaks of many more parameters than the files can hold: the rest would be drawn at random."""
    stored = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    with _said(transformers, str(folder)), torch.device("meta"):
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
        model = transformers.AutoModel.from_config(config, trust_remote_code=False)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    # two bits each at the least, and what is not stored
    if parameters > 4 * stored + _UNSTORED:
        raise ValueError(
            f"{folder / files.CONFIG}: the weights beside it must hold the {parameters:,} parameters that it speaks of, got {stored:,} bytes"
        )


def _check_filled(name: str, missing: Iterable[str]) -> None:
    """Raise where a checkpoint lacks tensors of layers: transformers draws them at random, and what heads do would be nonsense."""
    lacking = sorted(tensor for tensor in missing if re.search(r"\.\d+\.", tensor))
    if lacking:
        raise ValueError(
            f"model: {name!r} must have all tensors of its layers, got none of the {len(lacking):,} such as {lacking[0]}"
        )


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
