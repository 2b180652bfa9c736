"""Whether all ranks were given the same: one small collective, and the same error on every rank where they were not."""

from __future__ import annotations

import functools
import hashlib
import json
from collections import defaultdict
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from polyhead.neighbourhood import Neighbourhood
from polyhead.neighbourhood.captured_values import captured_values

# Characters of a value in the error message.
_MAX_VALUE_CHARACTERS = 120
# Elements that are copied at once to be hashed: a mask that is expanded over a batch is larger than its memory.
_HASHED_ELEMENTS = 1 << 22
_DIGEST_BYTES = 16
_MAX_ERROR_BYTES = 500


def check_agreement(group: dist.ProcessGroup | None, what: Mapping[str, str]) -> None:
    """Raise on every rank of a group unless all of them have the same values. Every rank of the group must call it.

    The versions of torch and polyhead are compared too. Where all agree, 24 bytes per rank are sent; the values themselves
    are sent only where some differ.

    Args:
        group: None is the default group.
        what: short values by the name of their argument: `{"over": fingerprint(over), "dtype": str(x.dtype)}`.

    Raises:
        ValueError: the same one on every rank. It names the arguments that differ, their values and the ranks.
    """
    if dist.get_world_size(group) == 1:
        return
    own = {"torch": torch.__version__, "polyhead": version("polyhead")}
    own.update((name, value[:_MAX_VALUE_CHARACTERS]) for name, value in what.items())
    text = json.dumps(own, sort_keys=True).encode()
    # the digest is of all values, the text of their beginnings
    digest = hashlib.blake2b(json.dumps(dict(what), sort_keys=True).encode() + text, digest_size=_DIGEST_BYTES).digest()
    headers = _all_gather_bytes(digest + len(text).to_bytes(8, "little"), group)
    if len({header[:_DIGEST_BYTES] for header in headers}) == 1:
        return
    lengths = [int.from_bytes(header[_DIGEST_BYTES:], "little") for header in headers]
    texts = _all_gather_bytes(text.ljust(max(lengths)), group)
    found = [json.loads(text) for text in texts]
    raise ValueError(_describe_difference(found, dist.get_process_group_ranks(group)))


def raise_on_every_rank(group: dist.ProcessGroup | None, error: Exception | None) -> None:
    """Raise the same error on every rank of a group if any of them has one: it names the rank, unless all have the same one.

    Every rank must call it.
    """
    own = b"" if error is None else str(error).encode()[:_MAX_ERROR_BYTES]
    texts = _all_gather_bytes(len(own).to_bytes(4, "little") + own.ljust(_MAX_ERROR_BYTES), group)
    ranks_of_text = defaultdict(list)
    for rank, text in zip(dist.get_process_group_ranks(group), texts, strict=True):
        content = text[4 : 4 + int.from_bytes(text[:4], "little")]
        if content:
            ranks_of_text[content.decode(errors="replace")].append(rank)
    if error is not None and len(ranks_of_text) == 1 and len(*ranks_of_text.values()) == len(texts):
        raise error
    if ranks_of_text:
        raise ValueError(
            "; ".join(f"on {name_ranks(ranks)}: {text}" for text, ranks in ranks_of_text.items())
        ) from error


def fingerprint(over: Neighbourhood) -> str:
    """A neighbourhood as a short text that is equal on two ranks only where type, parameters and contents of tensors are.

    It depends on every attribute, on those of the parts of an intersection too. Where a tensor is stored, on which device and
    with which strides, does not matter.
    """
    digest = hashlib.blake2b(digest_size=8)
    _update(digest, over)
    name = " ".join(repr(over).split())
    short = name if len(name) <= 80 else f"{name[:79]}…"
    return f"{short} #{digest.hexdigest()}"


def _update(digest: hashlib.blake2b, value: Any) -> None:
    """Add a value to a hash: tensors by their contents, containers and objects by their parts, all others by their repr."""
    # a length or a count before each part: ("a", "b") and ("ab", "") must differ
    if isinstance(value, Tensor):
        _update_text(digest, f"{value.dtype} {tuple(value.shape)} {value.layout}")
        if not value.is_meta:
            _update_contents(digest, value.detach())
    elif isinstance(value, (tuple, list)):
        _update_text(digest, f"{len(value)} items")
        for item in value:
            _update(digest, item)
    elif isinstance(value, dict):
        _update_text(digest, f"{len(value)} entries")
        for key in sorted(value, key=repr):
            _update_text(digest, repr(key))
            _update(digest, value[key])
    elif isinstance(value, (type, torch.dtype, torch.device)) or not hasattr(value, "__dict__"):
        _update_text(digest, repr(value))
    elif callable(value) and (hasattr(value, "__qualname__") or isinstance(value, functools.partial)):
        _update_text(digest, f"{value.__module__}.{getattr(value, '__qualname__', '')}")
        _update(digest, captured_values(value))
    else:
        _update_text(digest, f"{type(value).__module__}.{type(value).__qualname__}")
        _update(digest, vars(value))


def _update_text(digest: hashlib.blake2b, text: str) -> None:
    content = text.encode()
    digest.update(len(content).to_bytes(8, "little") + content)


def _update_contents(digest: hashlib.blake2b, x: Tensor) -> None:
    if x.layout != torch.strided:
        x = x.to_dense()
    if x.numel() > _HASHED_ELEMENTS and x.dim():
        rows = max(1, _HASHED_ELEMENTS * len(x) // x.numel())
        for part in x if rows == 1 else x.split(rows):
            _update_contents(digest, part)
        return
    digest.update(x.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)


def _all_gather_bytes(content: bytes, group: dist.ProcessGroup | None) -> list[bytes]:
    """The bytes of every rank, which are equally many on each."""
    device = communication_device(group)
    own = torch.frombuffer(bytearray(content), dtype=torch.uint8).to(device)
    everyone = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, own, group=group)
    return [x.cpu().numpy().tobytes() for x in everyone]


def communication_device(group: dist.ProcessGroup | None) -> torch.device:
    """A device whose tensors a group sends: the CPU where it can, else this rank's accelerator, as with NCCL."""
    types = [entry.partition(":")[0] for entry in dist.get_backend_config(group).split(",")]
    if "cpu" in types:
        return torch.device("cpu")
    return torch.device(types[0], torch.get_device_module(types[0]).current_device())


def _describe_difference(found: list[dict[str, str]], ranks: list[int]) -> str:
    differences = []
    for name in dict.fromkeys(name for values in found for name in values):
        owners = defaultdict(list)
        for rank, values in zip(ranks, found, strict=True):
            owners[values.get(name, "nothing")].append(rank)
        if len(owners) > 1:
            got = ", ".join(f"{value} on {name_ranks(owner)}" for value, owner in owners.items())
            differences.append(f"{name} must be the same on every rank, got {got}")
    if not differences:
        # the values differ beyond the characters that were sent
        return f"arguments must be the same on every rank, got others beyond their first {_MAX_VALUE_CHARACTERS} characters"
    remedy = (
        "install the same version on all"
        if differences[0].startswith(("torch", "polyhead"))
        else "pass the same to all"
    )
    return f"{'; '.join(differences)}; {remedy}"


def name_ranks(ranks: list[int]) -> str:
    """Ranks in an error message: `rank 3`, `ranks 0, 2`, `ranks 4 to 9`."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 2 and ranks == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]} to {ranks[-1]}"
    return f"ranks {', '.join(map(str, ranks))}"
