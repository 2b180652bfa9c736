"""Load a model by name for the command line: one of Polyhead, or one of transformers."""

from __future__ import annotations

import contextlib
import importlib
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from polyhead import _limits, models
from polyhead.models import Tokenizer, checkpoint_files
from polyhead.models.file_formats import describe_other_weights
from polyhead.models.pretrained import CLASS_BY_MODEL_TYPE

# parameters that checkpoints may leave out, such as a pooler's
_MAX_UNSTORED_PARAMETERS = 1 << 24


def load_model_and_tokenizer(name: str | None = None) -> tuple[nn.Module, Tokenizer]:
    """The default model in evaluation mode and its tokenizer, or those of a folder, an installed package, or an id that transformers knows.

    Raises:
        FileNotFoundError: if the model does not exist, or lacks a file.
        ValueError: if a file is malformed.
        ImportError: if a library is missing, with the command that installs it.
    """
    if name is None:
        return models.load_default()
    found = resolve_model_folder_or_hub_id(name)
    if isinstance(found, Path) and _read_model_type(found) in (None, *CLASS_BY_MODEL_TYPE):
        return models.load(found)
    return _load_transformers_with_tokenizer(str(found))


def resolve_model_folder_or_hub_id(name: str) -> Path | str:
    """The folder of a model, possibly in an installed package; or the name itself if it has the form of a Hub id.

    Raises:
        FileNotFoundError: if it is neither.
    """
    try:
        return checkpoint_files.find_checkpoint_folder(name)
    except FileNotFoundError:
        # such as google-bert/bert-base-uncased
        if re.fullmatch(r"\w[\w.-]*/[\w.-]+", name):
            return name
        if re.fullmatch(r"\w[\w.-]*", name) and not checkpoint_files.find_package_folders(name):
            raise FileNotFoundError(
                f"model must be a folder, an installed package or a Hugging Face Hub id, owner/name, got {name!r}"
            ) from None
        raise


def _read_model_type(folder: Path) -> str | None:
    """The architecture in the config.json of a folder; None if it cannot be read."""
    try:
        return str(checkpoint_files.read_json(folder / checkpoint_files.CONFIG_FILE)["model_type"])
    except (OSError, ValueError, KeyError):
        return None


def _load_transformers_with_tokenizer(name: str) -> tuple[nn.Module, Tokenizer]:
    """A text model of transformers and its tokenizer."""
    model = load_transformers_model(name)
    tokenizer = find_model_file(name, checkpoint_files.TOKENIZER_FILE)
    if tokenizer is None:
        raise ValueError(
            f"model must have a {checkpoint_files.TOKENIZER_FILE} to read a text, got {name!r} without one; pass an image with --image F"
        )
    return model, Tokenizer(tokenizer)


def load_transformers_model(name: str) -> nn.Module:
    """Load a model with transformers: from a folder, or by an id from its cache or the network."""
    folder = Path(name) if Path(name).is_dir() else None
    if folder is not None and checkpoint_files.find_weights_file(folder) is None:
        found = describe_other_weights(folder) or "only safetensors files are read"
        raise ValueError(f"model must have a {checkpoint_files.WEIGHTS_FILE}, got {name} without one; {found}")
    transformers = _import_transformers(name)
    config = find_model_file(name, checkpoint_files.CONFIG_FILE)
    if config is not None:
        _check_layer_count(config, checkpoint_files.read_json(config))
    if folder is not None:
        _check_parameter_count(transformers, folder)
    model: nn.Module
    with _translate_transformers_errors(transformers, name):
        # safetensors only: pickles and remote code can run anything
        model, found = transformers.AutoModel.from_pretrained(
            name, use_safetensors=True, trust_remote_code=False, output_loading_info=True
        )
    _check_no_layer_tensor_is_missing(name, found["missing_keys"])
    return model.eval()


@contextlib.contextmanager
def _translate_transformers_errors(transformers: Any, name: str) -> Iterator[None]:
    """Silence the logging of transformers, and raise its errors about a model as ValueErrors."""
    try:
        with _silence_logging(transformers.utils.logging):
            yield
    except ImportError:
        raise
    # a malformed configuration may raise anything
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        first = " ".join(line.strip() for line in lines[: 2 if lines[0].endswith(":") else 1])
        which = "" if Path(name).is_dir() else ", which is neither a folder nor an installed package,"
        raise ValueError(f"model {name!r}{which} cannot be read by transformers: {first}") from error


def _check_layer_count(path: Path, fields: dict[str, Any]) -> None:
    """Raise if a config.json, or an object in it, asks for too many layers: building them would take hours."""
    for key, value in fields.items():
        if isinstance(value, dict):
            _check_layer_count(path, value)
        elif re.search(r"(^|_)layers?$", key) and isinstance(value, int) and value > _limits.CONFIG_LAYERS:
            raise ValueError(f"{path}: {key} must be at most {_limits.CONFIG_LAYERS:,}, got {value:,}")


def _check_parameter_count(transformers: Any, folder: Path) -> None:
    """Raise if a config.json asks for many more parameters than the files can hold: the rest would be random."""
    stored = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    with _translate_transformers_errors(transformers, str(folder)), torch.device("meta"):
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
        model = transformers.AutoModel.from_config(config, trust_remote_code=False)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    # at least two bits each, besides parameters that are not stored
    if parameters > 4 * stored + _MAX_UNSTORED_PARAMETERS:
        raise ValueError(
            f"{folder / checkpoint_files.CONFIG_FILE}: its {parameters:,} parameters must be in the weights beside it, got {stored:,} bytes"
        )


def _check_no_layer_tensor_is_missing(name: str, missing: Iterable[str]) -> None:
    """Raise if a checkpoint lacks tensors of layers: transformers would initialise them at random."""
    lacking = sorted(tensor for tensor in missing if re.search(r"\.\d+\.", tensor))
    if lacking:
        raise ValueError(
            f"model {name!r} must have all tensors of its layers, but lacks {len(lacking):,}, such as {lacking[0]}"
        )


@contextlib.contextmanager
def _silence_logging(logging: Any) -> Iterator[None]:
    """No log messages and progress bars of transformers until the end of the block."""
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def find_model_file(name: str, file: str) -> Path | None:
    """The path of a file of a model of transformers; None if it does not have it."""
    folder = Path(name)
    if folder.is_dir():
        return folder / file if (folder / file).is_file() else None
    transformers = _import_transformers(name)
    try:
        with _silence_logging(transformers.utils.logging):
            found = transformers.utils.cached_file(name, file)
    except (OSError, ValueError):
        return None
    return None if found is None else Path(found)


def _import_transformers(name: str) -> Any:
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise ImportError(f"model {name!r} needs transformers: pip install transformers") from error
