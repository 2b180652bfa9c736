"""save_parts and load_part: one safetensors file per part, written atomically, of which each rank reads its own."""

from __future__ import annotations

import hashlib
import importlib
import os
import re
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from jaxtyping import Shaped
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from polyhead import _files
from polyhead._checks import WrongType, check_dense_tensor, describe_type
from polyhead.distributed.agreement import check_agreement, raise_on_every_rank
from polyhead.distributed.graph_part import GraphPart, PartPlace
from polyhead.distributed.partition import Partition
from polyhead.distributed.process_group import process_group
from polyhead.distributed.row_exchange import RowPlan
from polyhead.neighbourhood import Graph

_FORMAT = "polyhead graph part 1"
_FILE_NAME = re.compile(r"part-(\d+)-of-(\d+)\.safetensors")
_HINT = "write the parts again by save_parts"
_TENSORS = ("edge_index", "edge_ids", "nodes", "halo", "send", "send_counts", "receive_counts", "node_counts")


class LoadedPart(NamedTuple):
    """The part of a rank, and the own rows of the tensors that were saved with it."""

    part: GraphPart
    rows: dict[str, Tensor]


def save_parts(
    parts: Partition, folder: str | os.PathLike[str], rows: Mapping[str, Shaped[Tensor, "nodes ..."]] | None = None
) -> None:
    """Write each part to a file, with the rows of its nodes. Call it in one process; `load_part` then reads one file per rank.

    Args:
        folder: is created if needed. Every file is written atomically; files of different calls are not loaded together.
        rows: tensors with a row per node of the whole graph, such as features, labels and masks.
    """
    if not isinstance(parts, Partition):
        raise WrongType(f"parts must be what partition returns, got {describe_type(parts)}")
    if rows is not None and not isinstance(rows, Mapping):
        raise WrongType(f"rows must be tensors by name, got {describe_type(rows)}")
    rows = {} if rows is None else dict(rows)
    nodes = parts.graph.sources
    for name, x in rows.items():
        check_dense_tensor(f"rows[{name!r}]", x, "with a row per node")
        if x.dim() == 0 or len(x) != nodes:
            raise ValueError(f"rows[{name!r}] must have a row per node, {nodes}, got shape {tuple(x.shape)}")
        if x.is_complex() or x.dtype in (torch.uint16, torch.uint32, torch.uint64):
            raise ValueError(
                f"rows[{name!r}] must be of a dtype that is stored and indexed, got {x.dtype}; convert it first"
            )
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"folder must be a folder or a new path, got a file: {folder}")
    folder.mkdir(parents=True, exist_ok=True)
    # files of two calls must not be mixed, even if the partition is the same and only rows differ
    save_id = uuid.uuid4().hex
    for part in parts:
        own = {f"rows.{name}": x.detach().index_select(0, part.nodes.to(x.device)) for name, x in rows.items()}
        _write(folder / _file_name(part.index, len(parts)), part, own, save_id)


def load_part(folder: str | os.PathLike[str], mesh: DeviceMesh | dist.ProcessGroup | None = None) -> LoadedPart:
    """Read the part of this rank, on the CPU, and put it on the ranks. Every rank must call it, and reads its own file alone.

    Args:
        folder: where `save_parts` has written; on several hosts each needs the files of its own ranks.
        mesh: a mesh of one dimension, or a process group; None for all ranks.

    Raises:
        ValueError: on every rank, if the file of some rank is missing, damaged or of another call of `save_parts`, or if there
            are more or fewer parts than ranks.
    """
    group = process_group(mesh)
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    save_id, loaded, error = "", None, None
    try:
        loaded, save_id = _read(_find_file(Path(folder), rank, ranks))
    except (TypeError, ValueError, OSError, ImportError) as found:
        error = found if isinstance(found, ValueError) else ValueError(str(found))
    raise_on_every_rank(group, error)
    check_agreement(group, {"the call of save_parts": save_id})
    assert loaded is not None
    return loaded._replace(part=loaded.part.on(group))


def _file_name(part: int, parts: int) -> str:
    return f"part-{part:05}-of-{parts:05}.safetensors"


def _find_file(folder: Path, rank: int, ranks: int) -> Path:
    path = folder / _file_name(rank, ranks)
    if path.exists():
        return path
    if not folder.is_dir():
        raise FileNotFoundError(f"folder must exist, got {folder}; {_HINT}")
    found = {int(match[2]) for file in folder.iterdir() if (match := _FILE_NAME.fullmatch(file.name))}
    if found and ranks not in found:
        parts = " or ".join(map(str, sorted(found)))
        raise ValueError(f"mesh must have one rank per part in {folder}, {parts}, got {ranks}; start as many ranks")
    raise FileNotFoundError(f"folder must have the file {path.name}, got {folder} without it; {_HINT}")


def _import_safetensors(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(
            "safetensors must be installed for parts in files: pip install 'polyhead[distributed]'"
        ) from error


def _write(path: Path, part: GraphPart, rows: dict[str, Tensor], save_id: str) -> None:
    place = part.place
    tensors = {
        "edge_index": part.edge_index, "edge_ids": part.edge_ids, "nodes": part.nodes, "halo": part.halo, "send": part.send,
        "send_counts": torch.tensor(part.send_counts), "receive_counts": torch.tensor(part.receive_counts),
        "node_counts": torch.tensor(place.node_counts), "features": part.features, "weights": part.weights, **rows,
    }  # fmt: skip
    stored = {name: x.detach().cpu().contiguous() for name, x in tensors.items() if x is not None}
    metadata = {
        "format": _FORMAT, "partition": place.partition_id, "part": str(place.part), "num_edges": str(place.num_edges),
        "save": save_id, "digest": _digest(stored),
    }  # fmt: skip
    _files.write_atomically(path, _import_safetensors("safetensors.torch").save(stored, metadata), "folder")


def _read(path: Path) -> tuple[LoadedPart, str]:
    safetensors = _import_safetensors("safetensors")
    if (kind := _files.file_type(path)) != "regular file":
        raise ValueError(f"{path} must be a regular file, got a {kind}; {_HINT}")
    try:
        with safetensors.safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != _FORMAT:
                raise ValueError(f"{path} must be a file of save_parts, got format {metadata.get('format')!r}; {_HINT}")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, safe_open is no dict
    except safetensors.SafetensorError as error:
        raise ValueError(
            f"{path} must be a complete safetensors file, got one that is damaged ({error}); {_HINT}"
        ) from error
    missing = [name for name in _TENSORS if name not in tensors]
    if missing or metadata.get("digest") != _digest(tensors):
        got = f"one without {', '.join(missing)}" if missing else "other contents than were written"
        raise ValueError(f"{path} must be a file as save_parts wrote it, got {got}; {_HINT}")
    try:
        return _make_part(tensors, metadata), metadata["save"]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} must be a file as save_parts wrote it, got {error}; {_HINT}") from error


def _make_part(tensors: dict[str, Tensor], metadata: dict[str, str]) -> LoadedPart:
    sends, receives, node_counts = (
        tuple(tensors[name].tolist()) for name in ("send_counts", "receive_counts", "node_counts")
    )
    nodes, halo = tensors["nodes"], tensors["halo"]
    num_nodes = (len(nodes) + len(halo), len(nodes))
    graph = Graph(tensors["edge_index"], num_nodes, tensors.get("features"), tensors.get("weights"))
    graph.edge_ids = tensors["edge_ids"]
    place = PartPlace(metadata["partition"], int(metadata["part"]), node_counts, int(metadata["num_edges"]))
    rows = {name.removeprefix("rows."): x for name, x in tensors.items() if name.startswith("rows.")}
    return LoadedPart(GraphPart(graph, nodes, halo, RowPlan(tensors["send"], sends, receives), place), rows)


def _digest(tensors: dict[str, Tensor]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(tensors):
        x = tensors[name]
        digest.update(f"{name} {x.dtype} {tuple(x.shape)} ".encode())
        digest.update(x.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
