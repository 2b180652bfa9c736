"""The files of a checkpoint: where they are, whether they are what they should be, and tensors by name. Never a pickle."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

CONFIG, WEIGHTS, TOKENIZER = "config.json", "model.safetensors", "tokenizer.json"
INDEX = f"{WEIGHTS}.index.json"
_FLOATS = ("F64", "F32", "F16", "BF16")
_SAVED = "a model is a folder as transformers' save_pretrained writes it"
# how files begin that are often taken for safetensors
_KINDS = {
    b"PK": "a zip, such as torch.save writes",
    b"\x80": "a pickle, such as torch.save writes",
    b"version https://git-lfs": "a pointer of Git LFS; `git lfs pull` fetches the file itself",
}


def library(name: str) -> Any:
    """An optional library, imported when first needed."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(f"models are read with {name}: pip install 'polyhead[inspect]'") from error


def expect(path: Path, hint: str) -> None:
    """Raise where a file is not there."""
    if not path.is_file():
        raise FileNotFoundError(f"{path}: there is no such file; {hint}")


def folder(path_or_package: str | Path) -> Path:
    """The folder of a checkpoint: the path itself, or the one that an installed package of this name carries."""
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
        {config.parent for root in roots for config in root.rglob(CONFIG) if _weights(config.parent) is not None}
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


def _weights(root: Path) -> Path | None:
    """The file that holds the tensors of a checkpoint, or says which files do."""
    return next((root / name for name in (WEIGHTS, INDEX) if (root / name).is_file()), None)


def _json(path: Path) -> dict[str, Any]:
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: it is not JSON: {error}; it must be what save_pretrained writes") from error
    if not isinstance(fields, dict):
        raise ValueError(f"{path}: it holds a {type(fields).__name__}; it must hold an object, {{…}}")
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
            if theirs not in self.values:
                if ours not in like._field_defaults:
                    raise ValueError(f"{self.path}: it has no {theirs!r}; it must say the model's {ours}")
                continue
            value, kind = self.values[theirs], type(getattr(like, ours))
            fits, rule = _RULES[kind]
            if isinstance(value, bool) or not fits(value):
                raise ValueError(f"{self.path}: {theirs} is {value!r:.60}; it must be {rule}")
            arguments[ours] = kind(value)
        return arguments

    def expect(self, **only: Any) -> None:
        """Raise where a setting is there and is not the only one that can be read."""
        for name, value in only.items():
            if self.values.get(name, value) != value:
                raise ValueError(f"{self.path}: {name} is {self.values[name]!r}; it must be {value!r} to be read here")


_RULES: dict[type, tuple[Callable[[Any], bool], str]] = {
    int: (lambda x: isinstance(x, int) and x >= 1, "a whole number, 1 or more"),
    float: (lambda x: isinstance(x, (int, float)) and 0 <= x < 1, "a number, at least 0 and less than 1"),
    str: (lambda x: isinstance(x, str), "a text"),
}


def config(root: Path, kinds: Sequence[str]) -> Fields:
    """The config.json of a folder, of one of the kinds (`model_type`) that the caller can read."""
    path = root / CONFIG
    expect(path, _SAVED)
    values = _json(path)
    kind = values.get("model_type")
    if not isinstance(kind, str) or kind not in kinds:
        said = "it has no model_type" if kind is None else f"model_type is {kind!r}"
        raise ValueError(f"{path}: {said}; what can be read here is {', '.join(map(repr, kinds))}")
    return Fields(path, kind, values)


class Weights:
    """The tensors of an open checkpoint by name, each read when it is asked for."""

    def __init__(self, path: Path, opened: Sequence[Any]) -> None:
        self.path = path
        self._of = {name: file for file in opened for name in file.keys()}  # noqa: SIM118, a file is no dict

    @property
    def names(self) -> list[str]:
        return sorted(self._of)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._of[name].get_slice(name).get_shape())

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        """A copy: the file may change or go away afterwards."""
        stored = self._of[name].get_slice(name).get_dtype()
        if stored not in _FLOATS:
            raise ValueError(
                f"{self.path}: {name} is {stored}; it must be one of {', '.join(_FLOATS)} (a quantised checkpoint cannot be read)"
            )
        return self._of[name].get_tensor(name).to(dtype, copy=True)


@contextlib.contextmanager
def opened(root: Path) -> Iterator[Weights]:
    """The tensors of the checkpoint in a folder: of model.safetensors, or of the shards that its index names."""
    path = _weights(root)
    if path is None:
        pickled = sorted(file.name for pattern in ("*.bin", "*.pt", "*.ckpt") for file in root.glob(pattern))
        hint = f"{pickled[0]} is a pickle, which may run code when it is read, and is not; " if pickled else ""
        raise FileNotFoundError(f"{root / WEIGHTS}: there is no such file; {hint}{_SAVED}")
    with contextlib.ExitStack() as stack:
        yield Weights(path, [stack.enter_context(_open(file)) for file in _shards(path)])


def _shards(path: Path) -> list[Path]:
    if path.name == WEIGHTS:
        return [path]
    listed = _json(path).get("weight_map")
    names = listed.values() if isinstance(listed, dict) else ()
    # a plain name: an index does not lead out of its folder
    if not names or not all(isinstance(name, str) and Path(name).name == name for name in names):
        raise ValueError(
            f"{path}: it has no weight_map from tensors to files beside it; it must be what save_pretrained writes"
        )
    shards = [path.parent / name for name in sorted(set(names))]
    for shard in shards:
        expect(shard, f"{path.name} says that it holds tensors; all the files that it names must be there")
    return shards


def _open(path: Path) -> Any:
    safetensors = library("safetensors")
    try:
        return safetensors.safe_open(path, "pt")
    except safetensors.SafetensorError as error:
        with path.open("rb") as file:
            start = file.read(64)
        if _header_begins(start):
            raise ValueError(
                f"{path}: it is truncated or damaged, it has {path.stat().st_size:,} bytes ({error}); fetch it again"
            ) from error
        kind = next((kind for begin, kind in _KINDS.items() if start.startswith(begin)), None)
        what = f"it is {kind}" if kind else f"it is not safetensors ({error})"
        raise ValueError(f"{path}: {what}; it must be safetensors, the one format read here") from error


def _header_begins(start: bytes) -> bool:
    """Whether bytes may be those of a safetensors file: a length, and the beginning of an object."""
    return len(start) < 9 or start[8:9] == b"{"


def renamed(name: str, names: Mapping[str, str]) -> str | None:
    """A parameter's name in another naming of modules, where `{}` stands for the number of a layer; None: not in it."""
    module, _, parameter = name.rpartition(".")
    numbers = re.findall("[0-9]+", module)
    other = names.get(re.sub("[0-9]+", "{}", module))
    return f"{other.format(*numbers)}.{parameter}" if other is not None and other.count("{}") == len(numbers) else None


def fill(
    model: nn.Module,
    weights: Weights,
    names: Mapping[str, str],
    today: Mapping[str, str],
    *,
    dtype: torch.dtype,
) -> None:
    """Give a model that was built on the meta device the tensors of a checkpoint.

    Args:
        names: the model's modules under the checkpoint's names.
        today: the checkpoint's tensors that are to be read -> their names in `names`, which older versions spelt otherwise.

    Raises:
        ValueError: for tensors that are missing, not known or of another shape, with what was expected.
    """
    if not dtype.is_floating_point:
        raise ValueError(f"dtype: it is {dtype}; it must be floating-point, such as torch.float32")
    expected = model.state_dict()
    back = {theirs: ours for ours, theirs in names.items()}
    stored: dict[str, str] = {}
    unknown, misshapen = [], []
    for name in today:
        ours = renamed(today[name], back)
        if ours is None or ours not in expected or ours in stored:
            unknown.append(f"{name} {weights.shape(name)}")
            continue
        stored[ours] = name
        wanted = tuple(expected[ours].shape)
        if weights.shape(name) != wanted:
            misshapen.append(f"{name} is {weights.shape(name)}, it must be {wanted}")
    missing = [
        f"{renamed(ours, names)}, it must be {tuple(tensor.shape)}"
        for ours, tensor in expected.items()
        if ours not in stored
    ]
    wrong = {"missing": missing, "not known": unknown, "misshapen": misshapen}
    if any(wrong.values()):
        lines = [f"  {kind}: {line}" for kind, found in wrong.items() for line in _some(found)]
        raise ValueError(f"{weights.path}: its tensors are not those that {CONFIG} speaks of\n" + "\n".join(lines))
    model.load_state_dict({ours: weights.read(name, dtype) for ours, name in stored.items()}, assign=True)


def _some(lines: list[str], most: int = 5) -> list[str]:
    return lines if len(lines) <= most else [*lines[:most], f"and {len(lines) - most} more"]
