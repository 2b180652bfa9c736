"""Read the tensors of a checkpoint by name and load them into a model. Pickles are never read."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from polyhead import _limits
from polyhead.models import checkpoint_files
from polyhead.models.file_formats import describe_other_weights, recognise_file_format

# the longest file name that file systems accept
_MAX_NAME_LENGTH = 255
# the index of a layer, but not the 1 of ln_1
_LAYER_INDEX = re.compile(r"(?<![^.])[0-9]+(?![^.])")
_FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")


class StoredTensor(NamedTuple):
    """A tensor of an open checkpoint, or a part of one; its data are read by `read`.

    Attributes:
        file, path, name: the open file, its path, and the tensor's name in it.
        part: `(index, count)`: the index of this part, and into how many equal parts the last axis is split.
        transposed: whether the file holds the transpose.
    """

    file: Any
    path: Path
    name: str
    part: tuple[int, int] = (0, 1)
    transposed: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        shape = list(self.file.get_slice(self.name).get_shape())
        # an axis that cannot be split evenly keeps its size, and the shape check fails
        if shape and not shape[-1] % self.part[1]:
            shape[-1] //= self.part[1]
        return tuple(shape[::-1] if self.transposed else shape)

    def read(self, dtype: torch.dtype | None) -> Tensor:
        """A copy of the data, independent of the file; in the stored dtype if `dtype` is None."""
        stored = self.file.get_slice(self.name).get_dtype()
        if stored not in _FLOAT_DTYPES:
            raise ValueError(
                f"{self.path}: {self.name} must be one of {', '.join(_FLOAT_DTYPES)}, got {stored}; quantised checkpoints are not supported"
            )
        index, parts = self.part
        tensor: Tensor = self.file.get_tensor(self.name)
        tensor = tensor if parts == 1 else tensor.chunk(parts, -1)[index]
        tensor = tensor.mT if self.transposed else tensor
        return tensor.to(dtype or tensor.dtype, copy=True, memory_format=torch.contiguous_format)

    def __str__(self) -> str:
        part = "" if self.part[1] == 1 else f", part {self.part[0] + 1} of {self.part[1]}"
        return f"{self.name}{part}{', transposed' if self.transposed else ''}"


class OpenCheckpoint:
    """The tensors of an open checkpoint by name."""

    def __init__(self, path: Path, opened: Mapping[Path, Any]) -> None:
        self.path = path
        self._files: dict[str, Any] = {}
        shards: dict[str, Path] = {}
        for shard, file in opened.items():
            for name in file.keys():  # noqa: SIM118, a file is not a dict
                # error messages print it
                if not name.isprintable() or len(name) > _MAX_NAME_LENGTH:
                    raise ValueError(
                        f"{shard}: names of tensors must be printable and have at most {_MAX_NAME_LENGTH} characters, got {name!r:.60}; download the file again"
                    )
                if name in shards:
                    raise ValueError(
                        f"{path}: each tensor must be in one shard, got {name} in {shards[name].name} and {shard.name}; download them again"
                    )
                self._files[name], shards[name] = file, shard
        if len(self._files) > _limits.CHECKPOINT_TENSORS:
            raise ValueError(
                f"{path}: a checkpoint must have at most {_limits.CHECKPOINT_TENSORS:,} tensors, got {len(self._files):,}"
            )

    @property
    def names(self) -> list[str]:
        return sorted(self._files)

    def __getitem__(self, name: str) -> StoredTensor:
        return StoredTensor(self._files[name], self.path, name)


@contextlib.contextmanager
def open_checkpoint(root: Path) -> Iterator[OpenCheckpoint]:
    """Open the checkpoint in a folder: model.safetensors, or the shards that its index names."""
    path = checkpoint_files.find_weights_file(root)
    if path is None:
        path = root / checkpoint_files.WEIGHTS_FILE
        checkpoint_files.check_regular_file(path, describe_other_weights(root) or checkpoint_files.SAVE_PRETRAINED_HINT)
    with contextlib.ExitStack() as stack:
        yield OpenCheckpoint(path, {file: stack.enter_context(_open_safetensors(file)) for file in _list_shards(path)})


def _list_shards(path: Path) -> list[Path]:
    if path.name == checkpoint_files.WEIGHTS_FILE:
        return [path]
    listed = checkpoint_files.read_json(path).get("weight_map")
    names = listed.values() if isinstance(listed, dict) else ()
    if not names or not all(isinstance(name, str) and _is_bare_file_name(name) for name in names):
        raise ValueError(
            f"{path}: weight_map must map names of tensors to files in the same folder, got {listed!r:.60}; download the index again"
        )
    shards = [path.parent / name for name in sorted(set(names))]
    if len(shards) > _limits.CHECKPOINT_SHARDS:
        raise ValueError(
            f"{path}: weight_map must name at most {_limits.CHECKPOINT_SHARDS:,} files, got {len(shards):,}"
        )
    for shard in shards:
        checkpoint_files.check_regular_file(shard, f"{path.name} names it; download all files of the checkpoint")
    return shards


def _is_bare_file_name(name: str) -> bool:
    """Whether a name is a plain file name: an index must not point outside its folder."""
    return Path(name).name == name and name not in ("", "..") and name.isprintable() and len(name) <= _MAX_NAME_LENGTH


def _open_safetensors(path: Path) -> Any:
    safetensors = checkpoint_files.import_optional_library("safetensors")
    _check_safetensors_header(path)
    try:
        return safetensors.safe_open(path, "pt")
    except safetensors.SafetensorError as error:
        with path.open("rb") as file:
            start = file.read(64)
        if _starts_like_safetensors(start):
            raise ValueError(
                f"{path} must be a complete safetensors file, got {path.stat().st_size:,} bytes that are truncated or damaged ({error}); "
                "download it again"
            ) from error
        kind = recognise_file_format(path)
        description = f"another format ({error})" if kind is None else kind.description
        remedy = "save the model with save_pretrained" if kind is None else kind.remedy
        raise ValueError(f"{path} must be a safetensors file, got {description}; {remedy}") from error


def _check_safetensors_header(path: Path) -> None:
    """Raise if a header is too long or repeats a tensor; safetensors itself reports files without a header."""
    with path.open("rb") as file:
        start = file.read(9)
        length = int.from_bytes(start[:8], "little")
        if len(start) < 9 or start[8:] != b"{" or length > path.stat().st_size:
            return
        if length > _limits.SAFETENSORS_HEADER_BYTES:
            raise ValueError(
                f"{path}: the header must have at most {_limits.SAFETENSORS_HEADER_BYTES:,} bytes, got {length:,}"
            )
        content = b"{" + file.read(length - 1)
    try:
        checkpoint_files.parse_json(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{path}: the header must be JSON, got {content[:20]!r}…: {error}; download the file again"
        ) from error


def _starts_like_safetensors(start: bytes) -> bool:
    """Whether a file may be safetensors by its first bytes: a length, then a JSON object."""
    return len(start) < 9 or start[8:9] == b"{"


def translate_parameter_name(name: str, names: Mapping[str, str]) -> str | None:
    """Translate a parameter's name by its module, where `{}` is the index of a layer; None if `names` lacks the module."""
    module, _, parameter = name.rpartition(".")
    indices = _LAYER_INDEX.findall(module)
    other = names.get(_LAYER_INDEX.sub("{}", module))
    return f"{other.format(*indices)}.{parameter}" if other is not None and other.count("{}") == len(indices) else None


def drop_tied_copy(tensors: list[tuple[str, StoredTensor]], copy: str, original: str) -> list[tuple[str, StoredTensor]]:
    """The tensors without the copy of a tied weight, if the checkpoint stores it; it is renamed if it is the only one.

    Raises:
        ValueError: if the two differ.
    """
    by_name = dict(tensors)
    if copy not in by_name:
        return tensors
    if original not in by_name:
        return [(original if name == copy else name, tensor) for name, tensor in tensors]
    if not torch.equal(by_name[copy].read(torch.float32), by_name[original].read(torch.float32)):
        raise ValueError(
            f"{by_name[copy].path}: {by_name[copy].name} must be equal to {by_name[original].name}, got other values; only "
            "models with tied embeddings are supported"
        )
    return [(name, tensor) for name, tensor in tensors if name != copy]


def load_into_model(
    model: nn.Module, weights: OpenCheckpoint, names: Mapping[str, str], tensors: Sequence[tuple[str, StoredTensor]],
    *, dtype: torch.dtype | None,
) -> None:  # fmt: skip
    """Load the tensors of a checkpoint into a model that was built on the meta device.

    Args:
        names: the model's modules -> the checkpoint's modules.
        tensors: the tensors to read, each under its name in `names`.
        dtype: the dtype of the parameters; None keeps the stored dtype.

    Raises:
        ValueError: for tensors that are missing, unexpected or of the wrong shape, with the shapes that were expected.
    """
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ValueError(f"dtype must be floating-point, such as torch.float32, or None, got {dtype!r}")
    expected = model.state_dict()
    back = {theirs: ours for ours, theirs in names.items()}
    found: dict[str, StoredTensor] = {}
    unexpected, misshapen = [], []
    for name, tensor in tensors:
        ours = translate_parameter_name(name, back)
        if ours is None or ours not in expected or ours in found:
            unexpected.append(f"{tensor.name} {tensor.shape}")
            continue
        found[ours] = tensor
        shape = tuple(expected[ours].shape)
        if tensor.shape != shape:
            misshapen.append(f"{tensor} must be {shape}, got {tensor.shape}")
    missing = [
        f"{translate_parameter_name(ours, names)} {tuple(x.shape)}" for ours, x in expected.items() if ours not in found
    ]
    problems = {"missing": missing, "unexpected": unexpected, "misshapen": misshapen}
    if any(problems.values()):
        lines = [f"  {kind}: {line}" for kind, found_lines in problems.items() for line in _shorten_lines(found_lines)]
        raise ValueError(
            f"{weights.path}: the tensors must be those of {checkpoint_files.CONFIG_FILE}; check that both files belong to one model\n"
            + "\n".join(lines)
        )
    model.load_state_dict({ours: tensor.read(dtype) for ours, tensor in found.items()}, assign=True)


def _shorten_lines(lines: list[str], limit: int = 5) -> list[str]:
    """At most `limit` lines, each cut: a shape may have any number of axes."""
    shown = [
        line if len(line) <= 2 * _MAX_NAME_LENGTH else f"{line[: 2 * _MAX_NAME_LENGTH]}…" for line in lines[:limit]
    ]
    return shown if len(lines) <= limit else [*shown, f"and {len(lines) - limit} more"]
