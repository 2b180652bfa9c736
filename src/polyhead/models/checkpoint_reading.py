"""The tensors of a checkpoint by name, and how a model gets them. Never a pickle."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from polyhead import _limits
from polyhead.models import checkpoint_files as files

# what a file system takes as a name
_LONGEST_NAME = 255
# the number of a layer, and not that of ln_1
_NUMBER = re.compile(r"(?<![^.])[0-9]+(?![^.])")
_FLOATS = ("F64", "F32", "F16", "BF16")
# how files begin that are often taken for safetensors
_KINDS = {
    b"PK": "a zip, such as torch.save writes",
    b"\x80": "a pickle, such as torch.save writes",
    b"version https://git-lfs": "a pointer of Git LFS; `git lfs pull` fetches the file itself",
}


class Stored(NamedTuple):
    """A tensor of an open checkpoint, or a part of one, read when it is asked for.

    Attributes:
        file, path, name: what holds it, and as what.
        part: which of so many equal parts of its last axis it is.
        turned: whether the file holds its transpose.
    """

    file: Any
    path: Path
    name: str
    part: tuple[int, int] = (0, 1)
    turned: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        shape = list(self.file.get_slice(self.name).get_shape())
        # what cannot be divided keeps a shape that does not fit
        if shape and not shape[-1] % self.part[1]:
            shape[-1] //= self.part[1]
        return tuple(shape[::-1] if self.turned else shape)

    def read(self, dtype: torch.dtype | None) -> Tensor:
        """A copy, which the file may change or go away after; as it is stored unless a dtype is given."""
        stored = self.file.get_slice(self.name).get_dtype()
        if stored not in _FLOATS:
            raise ValueError(
                f"{self.path}: {self.name} is {stored}; it must be one of {', '.join(_FLOATS)} (a quantised checkpoint cannot be read)"
            )
        number, parts = self.part
        tensor: Tensor = self.file.get_tensor(self.name)
        tensor = tensor if parts == 1 else tensor.chunk(parts, -1)[number]
        tensor = tensor.mT if self.turned else tensor
        return tensor.to(dtype or tensor.dtype, copy=True, memory_format=torch.contiguous_format)

    def __str__(self) -> str:
        part = "" if self.part[1] == 1 else f", part {self.part[0] + 1} of {self.part[1]}"
        return f"{self.name}{part}{', transposed,' if self.turned else ''}"


class Weights:
    """The tensors of an open checkpoint by name."""

    def __init__(self, path: Path, opened: Mapping[Path, Any]) -> None:
        self.path = path
        self._of: dict[str, Any] = {}
        holder: dict[str, Path] = {}
        for shard, file in opened.items():
            for name in file.keys():  # noqa: SIM118, a file is no dict
                # it is printed where it does not fit
                if not name.isprintable() or len(name) > _LONGEST_NAME:
                    raise ValueError(
                        f"{shard}: names of tensors must be printable and have at most {_LONGEST_NAME} characters, got {name!r:.60}"
                    )
                if name in holder:
                    raise ValueError(
                        f"{path}: {name} is in {holder[name].name} and in {shard.name}; it must be in one of them"
                    )
                self._of[name], holder[name] = file, shard
        if len(self._of) > _limits.TENSORS:
            raise ValueError(
                f"{path}: a checkpoint must have at most {_limits.TENSORS:,} tensors, got {len(self._of):,}"
            )

    @property
    def names(self) -> list[str]:
        return sorted(self._of)

    def __getitem__(self, name: str) -> Stored:
        return Stored(self._of[name], self.path, name)


@contextlib.contextmanager
def opened(root: Path) -> Iterator[Weights]:
    """The tensors of the checkpoint in a folder: of model.safetensors, or of the shards that its index names."""
    path = files.weights(root)
    if path is None:
        pickled = sorted(file.name for pattern in ("*.bin", "*.pt", "*.ckpt") for file in root.glob(pattern))
        hint = f"{pickled[0]} is a pickle, which may run code when it is read, and is not; " if pickled else ""
        path = root / files.WEIGHTS
        files.expect(path, f"{hint}{files.SAVED}")
    with contextlib.ExitStack() as stack:
        yield Weights(path, {file: stack.enter_context(_open(file)) for file in _shards(path)})


def _shards(path: Path) -> list[Path]:
    if path.name == files.WEIGHTS:
        return [path]
    listed = files.read_json(path).get("weight_map")
    names = listed.values() if isinstance(listed, dict) else ()
    if not names or not all(isinstance(name, str) and _is_plain(name) for name in names):
        raise ValueError(
            f"{path}: it has no weight_map from tensors to files beside it; it must be what save_pretrained writes"
        )
    shards = [path.parent / name for name in sorted(set(names))]
    if len(shards) > _limits.SHARDS:
        raise ValueError(f"{path}: weight_map must name at most {_limits.SHARDS:,} files, got {len(shards):,}")
    for shard in shards:
        files.expect(shard, f"{path.name} says that it holds tensors; all the files that it names must be there")
    return shards


def _is_plain(name: str) -> bool:
    """Whether a name is that of a file: an index does not lead out of its folder."""
    return Path(name).name == name and name not in ("", "..") and name.isprintable() and len(name) <= _LONGEST_NAME


def _open(path: Path) -> Any:
    safetensors = files.library("safetensors")
    _check_header(path)
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


def _check_header(path: Path) -> None:
    """Raise where a header is too long, or has a tensor twice; what is no header is left for safetensors to name."""
    with path.open("rb") as file:
        start = file.read(9)
        length = int.from_bytes(start[:8], "little")
        if len(start) < 9 or start[8:] != b"{" or length > path.stat().st_size:
            return
        if length > _limits.HEADER_BYTES:
            raise ValueError(f"{path}: the header must have at most {_limits.HEADER_BYTES:,} bytes, got {length:,}")
        content = b"{" + file.read(length - 1)
    try:
        files.parse_json(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{path}: the header must be JSON, got {content[:20]!r}…: {error}; fetch the file again"
        ) from error


def _header_begins(start: bytes) -> bool:
    """Whether bytes may be those of a safetensors file: a length, and the beginning of an object."""
    return len(start) < 9 or start[8:9] == b"{"


def renamed(name: str, names: Mapping[str, str]) -> str | None:
    """A parameter's name in another naming of modules, where `{}` stands for the number of a layer; None: not in it."""
    module, _, parameter = name.rpartition(".")
    numbers = _NUMBER.findall(module)
    other = names.get(_NUMBER.sub("{}", module))
    return f"{other.format(*numbers)}.{parameter}" if other is not None and other.count("{}") == len(numbers) else None


def without_copy(tensors: list[tuple[str, Stored]], copy: str, original: str) -> list[tuple[str, Stored]]:
    """The tensors of a checkpoint without the one that it may hold a second time, since another module has it."""
    held = dict(tensors)
    if copy not in held:
        return tensors
    if original not in held:
        return [(original if name == copy else name, tensor) for name, tensor in tensors]
    if not torch.equal(held[copy].read(torch.float32), held[original].read(torch.float32)):
        raise ValueError(
            f"{held[copy].path}: {held[copy].name} is not {held[original].name}; they must be equal, for the decoder is the "
            "embeddings"
        )
    return [(name, tensor) for name, tensor in tensors if name != copy]


def fill(
    model: nn.Module, weights: Weights, names: Mapping[str, str], tensors: Sequence[tuple[str, Stored]],
    *, dtype: torch.dtype | None,
) -> None:  # fmt: skip
    """Give a model that was built on the meta device the tensors of a checkpoint.

    Args:
        names: the model's modules under the checkpoint's names.
        tensors: what is to be read, each with its name in `names`.
        dtype: what the numbers become; None leaves them as they are stored.

    Raises:
        ValueError: for tensors that are missing, not known or of another shape, with what was expected.
    """
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ValueError(f"dtype: it is {dtype!r}; it must be floating-point, such as torch.float32, or None")
    expected = model.state_dict()
    back = {theirs: ours for ours, theirs in names.items()}
    found: dict[str, Stored] = {}
    unknown, misshapen = [], []
    for name, tensor in tensors:
        ours = renamed(name, back)
        if ours is None or ours not in expected or ours in found:
            unknown.append(f"{tensor.name} {tensor.shape}")
            continue
        found[ours] = tensor
        wanted = tuple(expected[ours].shape)
        if tensor.shape != wanted:
            misshapen.append(f"{tensor} is {tensor.shape}, it must be {wanted}")
    missing = [
        f"{renamed(ours, names)}, it must be {tuple(tensor.shape)}"
        for ours, tensor in expected.items()
        if ours not in found
    ]
    wrong = {"missing": missing, "not known": unknown, "misshapen": misshapen}
    if any(wrong.values()):
        lines = [f"  {kind}: {line}" for kind, some in wrong.items() for line in _some(some)]
        raise ValueError(
            f"{weights.path}: its tensors are not those that {files.CONFIG} speaks of\n" + "\n".join(lines)
        )
    model.load_state_dict({ours: tensor.read(dtype) for ours, tensor in found.items()}, assign=True)


def _some(lines: list[str], most: int = 5) -> list[str]:
    # a shape may have any number of axes
    shown = [line if len(line) <= 2 * _LONGEST_NAME else f"{line[: 2 * _LONGEST_NAME]}…" for line in lines[:most]]
    return shown if len(lines) <= most else [*shown, f"and {len(lines) - most} more"]
