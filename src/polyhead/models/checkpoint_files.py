"""The files of a checkpoint: find them, read config.json, and check a configuration."""

from __future__ import annotations

import importlib
import importlib.util
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from polyhead import _files, _limits
from polyhead._checks import (
    LARGEST_INT32,
    MAX_HEADS,
    MAX_LAYERS,
    WrongType,
    check_integer,
    check_integers,
    check_number,
    check_numel,
    describe_type,
    is_integer,
    short_repr,
)
from polyhead.models.file_formats import describe_other_weights, recognise_file_format

Model = TypeVar("Model", bound=nn.Module)
CONFIG_FILE, WEIGHTS_FILE, TOKENIZER_FILE = "config.json", "model.safetensors", "tokenizer.json"
SHARD_INDEX_FILE = f"{WEIGHTS_FILE}.index.json"
SAVE_PRETRAINED_HINT = "pass a folder that transformers' save_pretrained wrote"
_REPAIR_HINT = "correct the file, or download it again"


def import_optional_library(name: str) -> Any:
    """Import an optional library when it is first needed."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(f"{name} must be installed to read models: pip install 'polyhead[inspect]'") from error


def check_regular_file(path: Path, hint: str) -> None:
    """Raise unless the path is a regular file: reading a device or a FIFO may never end."""
    found = _files.file_type(path)
    if found is None:
        raise FileNotFoundError(f"{path}: file not found; {hint}")
    if found != "regular file":
        raise ValueError(f"{path} must be a regular file, got a {found}; {hint}")


def find_checkpoint_folder(path_or_package: str | Path) -> Path:
    """The folder of a checkpoint: the path itself, or the folder inside the installed package of this name."""
    if not isinstance(path_or_package, (str, PathLike)):
        raise WrongType(f"path_or_package must be a str or a path, got {describe_type(path_or_package)}")
    path = Path(path_or_package)
    if path.is_dir():
        return path
    if path.exists():
        found_format = recognise_file_format(path) if path.is_file() else None
        if found_format is not None:
            raise ValueError(
                f"{path} must be a folder with {CONFIG_FILE} and {WEIGHTS_FILE}, got {found_format.description}; {found_format.remedy}"
            )
        raise ValueError(f"{path} must be a folder, got a file; pass the folder that holds it and {CONFIG_FILE}")
    name = str(path_or_package)
    roots = find_package_folders(name)
    if not roots:
        raise FileNotFoundError(
            f"{name}: found neither a folder nor an installed package of that name; pass the path of a folder or the name of a "
            f"package (download a model of the Hugging Face Hub first: hf download {name} --local-dir FOLDER)"
        )
    found = sorted(
        {
            config.parent
            for root in roots
            for config in root.rglob(CONFIG_FILE)
            if find_weights_file(config.parent) is not None
        }
    )
    if not found:
        raise FileNotFoundError(
            f"{name}: the package in {roots[0]} must contain a folder with {CONFIG_FILE} and {WEIGHTS_FILE}, found none; pass the path of a folder"
        )
    if len(found) > 1:
        raise ValueError(
            f"{name}: the package must contain one model, found {len(found)}; pass the path of one: {', '.join(map(str, found))}"
        )
    return found[0]


def find_package_folders(package: str) -> list[Path]:
    """The folders of an installed package, found without importing it; an empty list if it is not installed."""
    name = package.replace("-", "_")
    # find_spec would import the parents of a dotted name
    if not name.isidentifier():
        return []
    try:
        spec = importlib.util.find_spec(name)
    # the module is loaded but has no __spec__
    except ValueError:
        return []
    return [Path(root) for root in (spec.submodule_search_locations if spec else None) or ()]


def find_weights_file(root: Path) -> Path | None:
    """The file that holds the tensors of a checkpoint, or the index of its shards."""
    return next((root / name for name in (WEIGHTS_FILE, SHARD_INDEX_FILE) if (root / name).is_file()), None)


def read_json(path: Path, limit: int = _limits.JSON_BYTES) -> dict[str, Any]:
    """Read a JSON object from a file of at most `limit` bytes."""
    content = _files.read_bytes_up_to(path, limit)
    try:
        fields = parse_json(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: the file must be JSON, got: {error}; {_REPAIR_HINT}") from error
    if not isinstance(fields, dict):
        raise ValueError(f"{path}: the file must hold a JSON object, got a {type(fields).__name__}; {_REPAIR_HINT}")
    return fields


def parse_json(content: bytes) -> Any:
    """Parse JSON in UTF-8 and reject duplicate keys: readers differ in which of the two values they take."""
    return json.loads(content.decode(), object_pairs_hook=_object_without_duplicate_keys)


def _object_without_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        key = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"duplicate key {key!r:.60}")
    return fields


class ConfigFile(NamedTuple):
    """The content of a config.json."""

    path: Path
    kind: str
    values: dict[str, Any]

    def config_arguments(self, names: Mapping[str, str], like: NamedTuple) -> dict[str, Any]:
        """The arguments of a configuration: `names` maps each to its name in the file, `like` has a value of its type.

        An argument that the file omits is omitted if the configuration has a default for it.
        """
        arguments: dict[str, Any] = {}
        for ours, theirs in names.items():
            value, kind = self.values.get(theirs), type(getattr(like, ours))
            if theirs not in self.values or (value is None and like._field_defaults.get(ours, ...) is None):
                if ours not in like._field_defaults:
                    raise ValueError(f"{self.path} must have {theirs!r}, the model's {ours}; {_REPAIR_HINT}")
                continue
            fits, rule = _FIELD_RULES[ours if ours in _FIELD_RULES else kind]
            if isinstance(value, bool) != (kind is bool) or not fits(value):
                raise self.field_error(theirs, rule, value)
            arguments[ours] = ACTIVATION_BY_CONFIG_NAME[str(value)] if ours == "activation" else kind(value)
        return arguments

    def field_error(self, name: str, rule: str, value: Any) -> ValueError:
        """The error for a field that breaks its rule."""
        return ValueError(f"{self.path}: {name} must be {rule}, got {value!r:.60}; {_REPAIR_HINT}")

    def read_flag(self, name: str) -> bool:
        """A boolean setting; False if omitted."""
        value = self.values.get(name)
        if not (value is None or isinstance(value, bool)):
            raise self.field_error(name, "true or false", value)
        return bool(value)

    def read_start_and_stop(self, vocab: int) -> dict[str, Any]:
        """The tokens that start and end a text, as arguments of a configuration.

        Ids outside the vocabulary of `vocab` tokens are omitted: small models keep the ids of large ones.
        """
        start, stop = (self.values.get(name) for name in ("bos_token_id", "eos_token_id"))
        stops = stop if isinstance(stop, list) else [] if stop is None else [stop]
        for name, ids in (("bos_token_id", [] if start is None else [start]), ("eos_token_id", stops)):
            if not all(is_integer(number) and number >= 0 for number in ids):
                raise self.field_error(name, "the id of a token, or null", self.values[name])
        known = start is not None and start < vocab
        return {"start": start if known else None, "stop": tuple(number for number in stops if number < vocab)}

    def build_on_meta(self, model: Callable[[Any], Model], config: Any, tensors: int) -> Model:
        """Build a model from its configuration on the meta device: the checkpoint replaces all weights.

        `tensors` is the number of tensors in the checkpoint: a model cannot have more layers than that.
        """
        if config.layers > tensors:
            raise ValueError(
                f"{self.path}: layers must be at most {tensors}, the number of tensors in the checkpoint, got {config.layers}; {_REPAIR_HINT}"
            )
        if config.layers > _limits.CONFIG_LAYERS:
            raise ValueError(
                f"{self.path}: layers must be at most {_limits.CONFIG_LAYERS:,}, got {config.layers:,}; {_REPAIR_HINT}"
            )
        try:
            with torch.device("meta"):
                return model(config)
        # torch raises other errors for impossible tensor sizes
        except (ValueError, RuntimeError, OverflowError, TypeError) as error:
            raise ValueError(f"{self.path}: {error}") from None

    def require_values(self, **supported: Any) -> None:
        """Raise if a setting is present with a value other than the supported one."""
        for name, value in supported.items():
            if self.values.get(name, value) != value:
                raise ValueError(
                    f"{self.path}: {name} must be {value!r}, got {self.values[name]!r:.60}; other values are not supported, "
                    "use transformers"
                )


# activation in config.json -> activation of FeedForward
ACTIVATION_BY_CONFIG_NAME = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}


# type of a value, or name of an argument -> check, and rule in words
_FIELD_RULES: dict[type | str, tuple[Callable[[Any], bool], str]] = {
    "activation": (
        lambda x: isinstance(x, str) and x in ACTIVATION_BY_CONFIG_NAME,
        f"one of {', '.join(ACTIVATION_BY_CONFIG_NAME)}",
    ),
    bool: (lambda x: isinstance(x, bool), "true or false"),
    int: (lambda x: isinstance(x, int) and 1 <= x < 2**31, "an integer, 1 or more"),
    float: (lambda x: isinstance(x, (int, float)) and 0 <= x < 1, "a number in [0, 1)"),
}


def config_json_fields(names: Mapping[str, str], config: NamedTuple) -> dict[str, Any]:
    """The fields of config.json for a configuration: the inverse of `ConfigFile.config_arguments`."""
    values = {theirs: getattr(config, ours) for ours, theirs in names.items()}
    if "activation" in names:
        theirs = names["activation"]
        values[theirs] = next(name for name, ours in ACTIVATION_BY_CONFIG_NAME.items() if ours == values[theirs])
    return values


def bos_and_eos_fields(start: int | None, stop: tuple[int, ...]) -> dict[str, Any]:
    """The fields of config.json for the tokens around a text: the inverse of `ConfigFile.read_start_and_stop`."""
    ids: Any = None if not stop else stop[0] if len(stop) == 1 else list(stop)
    return {"bos_token_id": start, "eos_token_id": ids}


# the integer fields of a configuration, if it has them; a field whose default is None may be None
_INTEGER_FIELDS = (
    "d_model", "heads", "layers", "d_feedforward", "vocab", "positions", "token_types", "kv_heads", "head_dim", "window"
)  # fmt: skip
_INTEGER_MAXIMA = {"heads": MAX_HEADS, "kv_heads": MAX_HEADS, "layers": MAX_LAYERS}
# the floating-point fields, each with its interval
_FLOAT_INTERVALS = {
    "eps": (0, float("inf"), "[)"),
    "rope_base": (0, float("inf"), "()"),
    "dropout": (0, 1, "[)"),
    "attention_dropout": (0, 1, "[)"),
}


def check_config(config: Any) -> None:
    """Raise if a field of a model's configuration is invalid."""
    if not hasattr(config, "_field_defaults"):
        raise WrongType(f"config must be a Config, such as one of SIZES, got {describe_type(config)}")
    defaults, values = config._field_defaults, config._asdict()
    for name in _INTEGER_FIELDS:
        value = values.get(name)
        omitted = value is None and defaults.get(name, ...) is None
        if name in values and not omitted:
            check_integer(name, value, 1, _INTEGER_MAXIMA.get(name, LARGEST_INT32))
    for name, interval in _FLOAT_INTERVALS.items():
        if name in values:
            check_number(name, values[name], *interval)
    check_numel("the word embeddings", (config.vocab, config.d_model), hint="vocab or d_model is too large")
    # with an explicit head_dim, heads need not divide d_model
    if values.get("head_dim") is None and config.d_model % config.heads:
        raise ValueError(f"heads must divide d_model {config.d_model}, got {config.heads}; change heads or d_model")
    if values.get("head") not in ("own", "tied", None):
        raise ValueError(f"head must be 'own', 'tied' or None, got {config.head!r:.60}")
    start, stop = values.get("start"), values.get("stop", ())
    if not isinstance(stop, tuple):
        raise WrongType(f"stop must be a tuple of ids in [0, {config.vocab - 1}], got {short_repr(stop)}")
    check_integers("stop", stop, 0, config.vocab - 1)
    if start is not None:
        check_integer("start", start, 0, config.vocab - 1)


def read_config(root: Path, kinds: Sequence[str]) -> ConfigFile:
    """Read the config.json of a folder, whose `model_type` must be one of `kinds`."""
    path = root / CONFIG_FILE
    check_regular_file(path, describe_other_weights(root) or SAVE_PRETRAINED_HINT)
    values = read_json(path)
    kind = values.get("model_type")
    if not isinstance(kind, str) or kind not in kinds:
        supported = ", ".join(map(repr, kinds))
        raise ValueError(
            f"{path}: model_type must be one of {supported}, got {kind!r:.60}; load other models with transformers"
        )
    return ConfigFile(path, kind, values)
