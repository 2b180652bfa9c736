"""Formats of model files that are not read: recognise them, and say how to convert them."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple


class FileFormat(NamedTuple):
    """A format that is not read: what a file of it is, and how to get a folder that is read."""

    description: str
    remedy: str


_SAVE_REMEDY = "get the safetensors files of the model, or load it with its own library and save it with transformers' save_pretrained"
_PICKLE_REMEDY = "a pickle can run code when it is opened: load it with transformers or torch, and save the model with save_pretrained"
_EXPORT_REMEDY = "it holds a graph of operations: save the model that it was exported from with save_pretrained"
_GGUF = FileFormat(
    "a GGUF file of llama.cpp",
    "convert it with transformers: AutoModelForCausalLM.from_pretrained(folder, gguf_file=name).save_pretrained(new_folder), and "
    "AutoTokenizer likewise",
)
_GGML = FileFormat("a GGML file of an old llama.cpp", _SAVE_REMEDY)
_HDF5 = FileFormat("an HDF5 file of TensorFlow or Keras", _SAVE_REMEDY)
_LITE = FileFormat("a TensorFlow Lite file", _EXPORT_REMEDY)
_PICKLE = FileFormat("a pickle", _PICKLE_REMEDY)

# offset and value of the first bytes
_FORMAT_BY_FIRST_BYTES = {
    (0, b"GGUF"): _GGUF,
    (0, b"lmgg"): _GGML,
    (0, b"fmgg"): _GGML,
    (0, b"tjgg"): _GGML,
    (0, b"\x89HDF"): _HDF5,
    (4, b"TFL3"): _LITE,
    (0, b"\x93NUMPY"): FileFormat("a NumPy array", _SAVE_REMEDY),
    (0, b"version https://git-lfs"): FileFormat("a Git LFS pointer (git lfs pull downloads the file)", _SAVE_REMEDY),
}
_FORMAT_BY_SUFFIX = {
    ".gguf": _GGUF,
    ".ggml": _GGML,
    ".h5": _HDF5,
    ".keras": FileFormat("a Keras file", _SAVE_REMEDY),
    ".tflite": _LITE,
    ".pb": FileFormat("a TensorFlow graph", _EXPORT_REMEDY),
    ".onnx": FileFormat("an ONNX file", _EXPORT_REMEDY),
    ".mlmodel": FileFormat("a Core ML file", _EXPORT_REMEDY),
    ".msgpack": FileFormat("a Flax file", _SAVE_REMEDY),
    ".npz": FileFormat("a NumPy archive, as MLX writes", _SAVE_REMEDY),
    **dict.fromkeys((".bin", ".pt", ".pth", ".ckpt", ".pkl"), _PICKLE),
}
# of formats that other formats are made of: a file name says more
_FORMAT_BY_GENERIC_FIRST_BYTES = {
    (0, b"PK"): FileFormat("a zip file, as torch.save writes", _PICKLE_REMEDY),
    (0, b"\x80"): FileFormat("a pickle, as torch.save writes", _PICKLE_REMEDY),
}


def recognise_file_format(path: Path) -> FileFormat | None:
    """The format of a regular file, by its first bytes or its name; None if it is not one of these."""
    with path.open("rb") as file:
        start = file.read(64)
    by_bytes, by_generic_bytes = (
        next((found for (offset, value), found in table.items() if start[offset:].startswith(value)), None)
        for table in (_FORMAT_BY_FIRST_BYTES, _FORMAT_BY_GENERIC_FIRST_BYTES)
    )
    return by_bytes or _FORMAT_BY_SUFFIX.get(path.suffix.lower()) or by_generic_bytes


def describe_other_weights(folder: Path) -> str:
    """What the largest file of another format in a folder is, and how to convert it; "" if there is none."""
    files = [file for file in folder.iterdir() if file.suffix.lower() in _FORMAT_BY_SUFFIX and file.is_file()]
    if not files:
        return ""
    # the weights, not the state of an optimizer's scheduler or the arguments of a training
    largest = max(files, key=lambda file: (file.stat().st_size, file.name))
    found = recognise_file_format(largest)
    return "" if found is None else f"{largest.name} is {found.description} and is not read: {found.remedy}"
