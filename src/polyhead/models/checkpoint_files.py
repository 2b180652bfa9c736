"""The files of a checkpoint: where they are, what their config.json says, and what a configuration must be."""

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
    HEADS,
    LARGEST,
    LAYERS,
    WrongType,
    check_integer,
    check_integers,
    check_number,
    check_numel,
    is_integer,
    kind_of,
    shown,
)

Model = TypeVar("Model", bound=nn.Module)
CONFIG, WEIGHTS, TOKENIZER = "config.json", "model.safetensors", "tokenizer.json"
INDEX = f"{WEIGHTS}.index.json"
SAVED = "a model is a folder as transformers' save_pretrained writes it"


def library(name: str) -> Any:
    """An optional library, imported when first needed."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(f"models are read with {name}: pip install 'polyhead[inspect]'") from error


def expect(path: Path, hint: str) -> None:
    """Raise where a file is not there, or is a device or the like, which may never end."""
    found = _files.kind(path)
    if found is None:
        raise FileNotFoundError(f"{path}: there is no such file; {hint}")
    if found != "regular file":
        raise ValueError(f"{path} must be a regular file, got a {found}; {hint}")


def folder(path_or_package: str | Path) -> Path:
    """The folder of a checkpoint: the path itself, or the one that an installed package of this name carries."""
    if not isinstance(path_or_package, (str, PathLike)):
        raise WrongType(f"path_or_package must be a str or a path, got {kind_of(path_or_package)}")
    path = Path(path_or_package)
    if path.is_dir():
        return path
    if path.exists():
        raise ValueError(f"{path}: it is a file; it must be the folder that holds it, with its {CONFIG}")
    name = str(path_or_package)
    roots = places(name)
    if not roots:
        raise FileNotFoundError(
            f"{name}: there is no such folder, and no installed package of that name; it must be a path or a package (a model "
            f"of the Hugging Face hub is fetched first: hf download {name} --local-dir FOLDER)"
        )
    found = sorted(
        {config.parent for root in roots for config in root.rglob(CONFIG) if weights(config.parent) is not None}
    )
    if not found:
        raise FileNotFoundError(
            f"{name}: the package in {roots[0]} has no folder with {CONFIG} and {WEIGHTS}; it must carry one"
        )
    if len(found) > 1:
        raise ValueError(
            f"{name}: the package carries {len(found)} models; pass the path of one: {', '.join(map(str, found))}"
        )
    return found[0]


def places(package: str) -> list[Path]:
    """The folders of an installed package, found without importing it; none where it is not installed."""
    name = package.replace("-", "_")
    # a name with dots would import the packages above it
    if not name.isidentifier():
        return []
    try:
        spec = importlib.util.find_spec(name)
    # a module that is loaded but does not say from where
    except ValueError:
        return []
    return [Path(root) for root in (spec.submodule_search_locations if spec else None) or ()]


def weights(root: Path) -> Path | None:
    """The file that holds the tensors of a checkpoint, or says which files do."""
    return next((root / name for name in (WEIGHTS, INDEX) if (root / name).is_file()), None)


def read_json(path: Path, most: int = _limits.JSON_BYTES) -> dict[str, Any]:
    """The object that a file of at most `most` bytes holds."""
    content = _files.read_bytes(path, most)
    try:
        fields = parse_json(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: it is not JSON: {error}; it must be what save_pretrained writes") from error
    if not isinstance(fields, dict):
        raise ValueError(f"{path}: it holds a {type(fields).__name__}; it must hold an object, {{…}}")
    return fields


def parse_json(content: bytes) -> Any:
    """JSON in UTF-8, in which no object has a key twice: readers differ in which of the two they take."""
    return json.loads(content.decode(), object_pairs_hook=_object)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        key = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"{key!r:.60} is there twice")
    return fields


class Fields(NamedTuple):
    """What a config.json says."""

    path: Path
    kind: str
    values: dict[str, Any]

    def as_arguments(self, names: Mapping[str, str], like: NamedTuple) -> dict[str, Any]:
        """The arguments of a configuration: `names` has each one's name in the file, `like` a value of its kind.

        What the file leaves out is left out, where the configuration has a default for it.
        """
        arguments: dict[str, Any] = {}
        for ours, theirs in names.items():
            value, kind = self.values.get(theirs), type(getattr(like, ours))
            if theirs not in self.values or (value is None and like._field_defaults.get(ours, ...) is None):
                if ours not in like._field_defaults:
                    raise ValueError(f"{self.path}: it has no {theirs!r}; it must say the model's {ours}")
                continue
            fits, rule = _RULES[ours if ours in _RULES else kind]
            if isinstance(value, bool) != (kind is bool) or not fits(value):
                raise ValueError(f"{self.path}: {theirs} is {value!r:.60}; it must be {rule}")
            arguments[ours] = ACTIVATIONS[str(value)] if ours == "activation" else kind(value)
        return arguments

    def flag(self, name: str) -> bool:
        """A setting that is false where it is left out."""
        value = self.values.get(name)
        if not (value is None or isinstance(value, bool)):
            raise ValueError(f"{self.path}: {name} is {value!r:.60}; it must be true or false")
        return bool(value)

    def ends(self, vocab: int) -> dict[str, Any]:
        """The tokens that start and end a text, arguments of a configuration.

        Those that are none of the vocabulary's `vocab` tokens are left out: small models keep large ones' numbers.
        """
        start, stop = (self.values.get(name) for name in ("bos_token_id", "eos_token_id"))
        stops = stop if isinstance(stop, list) else [] if stop is None else [stop]
        for name, ids in (("bos_token_id", [] if start is None else [start]), ("eos_token_id", stops)):
            if not all(is_integer(number) and number >= 0 for number in ids):
                raise ValueError(
                    f"{self.path}: {name} is {self.values[name]!r:.60}; it must be the number of a token, or null"
                )
        known = start is not None and start < vocab
        return {"start": start if known else None, "stop": tuple(number for number in stops if number < vocab)}

    def build(self, model: Callable[[Any], Model], config: Any, tensors: int) -> Model:
        """A model of a configuration that was read, on the meta device: nothing is drawn that the checkpoint would replace.

        `tensors` is how many the checkpoint has: a file that speaks of more layers than that is not followed.
        """
        if config.layers > tensors:
            raise ValueError(
                f"{self.path}: layers: it is {config.layers}, more than the {tensors} tensors of the checkpoint; it must be how many layers that has"
            )
        if config.layers > _limits.LAYERS:
            raise ValueError(f"{self.path}: layers must be at most {_limits.LAYERS:,}, got {config.layers:,}")
        try:
            with torch.device("meta"):
                return model(config)
        # torch has other errors for sizes that no tensor can have
        except (ValueError, RuntimeError, OverflowError, TypeError) as error:
            raise ValueError(f"{self.path}: {error}") from None

    def expect(self, **only: Any) -> None:
        """Raise where a setting is there and is not the only one that can be read."""
        for name, value in only.items():
            if self.values.get(name, value) != value:
                raise ValueError(f"{self.path}: {name} is {self.values[name]!r}; it must be {value!r} to be read here")


# how config.json names what a feed-forward network applies -> how FeedForward does
ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}


# by the kind of a value, or by the name of the argument
_RULES: dict[type | str, tuple[Callable[[Any], bool], str]] = {
    "activation": (lambda x: isinstance(x, str) and x in ACTIVATIONS, f"one of {', '.join(ACTIVATIONS)}"),
    bool: (lambda x: isinstance(x, bool), "true or false"),
    int: (lambda x: isinstance(x, int) and 1 <= x < 2**31, "a whole number, 1 or more"),
    float: (lambda x: isinstance(x, (int, float)) and 0 <= x < 1, "a number, at least 0 and less than 1"),
}


def named(names: Mapping[str, str], config: NamedTuple) -> dict[str, Any]:
    """A configuration as config.json says it: what `Fields.as_arguments` reads."""
    values = {theirs: getattr(config, ours) for ours, theirs in names.items()}
    if "activation" in names:
        theirs = names["activation"]
        values[theirs] = next(name for name, ours in ACTIVATIONS.items() if ours == values[theirs])
    return values


def named_ends(start: int | None, stop: tuple[int, ...]) -> dict[str, Any]:
    """The tokens around a text as config.json says them: what `Fields.ends` reads."""
    ids: Any = None if not stop else stop[0] if len(stop) == 1 else list(stop)
    return {"bos_token_id": start, "eos_token_id": ids}


# the fields of a configuration that count something, where it has them; a field whose default is None may be None
_COUNTS = (
    "d_model", "heads", "layers", "d_feedforward", "vocab", "positions", "token_types", "kv_heads", "head_dim", "window"
)  # fmt: skip
_MOST = {"heads": HEADS, "kv_heads": HEADS, "layers": LAYERS}
# the fields that are numbers, with the interval of each
_NUMBERS = {
    "eps": (0, float("inf"), "[)"),
    "rope_base": (0, float("inf"), "()"),
    "dropout": (0, 1, "[)"),
    "attention_dropout": (0, 1, "[)"),
}


def check(config: Any) -> None:
    """Raise where a field of a model's configuration cannot be what it is."""
    if not hasattr(config, "_field_defaults"):
        raise WrongType(f"config must be a Config, such as one of SIZES, got {kind_of(config)}")
    defaults, values = config._field_defaults, config._asdict()
    for name in _COUNTS:
        value = values.get(name)
        left_out = value is None and defaults.get(name, ...) is None
        if name in values and not left_out:
            check_integer(name, value, 1, _MOST.get(name, LARGEST))
    for name, interval in _NUMBERS.items():
        if name in values:
            check_number(name, values[name], *interval)
    check_numel("the word embeddings", (config.vocab, config.d_model), hint="vocab or d_model is too large")
    # with a size of their own, heads need not share the features of a token evenly
    if values.get("head_dim") is None and config.d_model % config.heads:
        raise ValueError(f"heads: {config.heads} does not divide d_model {config.d_model}; it must")
    if values.get("head") not in ("own", "tied", None):
        raise ValueError(f"head: it is {config.head!r:.60}; it must be 'own', 'tied' or None")
    start, stop = values.get("start"), values.get("stop", ())
    if not isinstance(stop, tuple):
        raise WrongType(f"stop must be a tuple of ids in [0, {config.vocab - 1}], got {shown(stop)}")
    check_integers("stop", stop, 0, config.vocab - 1)
    if start is not None:
        check_integer("start", start, 0, config.vocab - 1)


def config(root: Path, kinds: Sequence[str]) -> Fields:
    """The config.json of a folder, of one of the kinds (`model_type`) that the caller can read."""
    path = root / CONFIG
    expect(path, SAVED)
    values = read_json(path)
    kind = values.get("model_type")
    if not isinstance(kind, str) or kind not in kinds:
        said = "it has no model_type" if kind is None else f"model_type is {kind!r}"
        raise ValueError(f"{path}: {said}; what can be read here is {', '.join(map(repr, kinds))}")
    return Fields(path, kind, values)
