"""The device that the cases run on: `python -m benchmarks --device cuda`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.utils import _pytree as pytree

CPU = torch.device("cpu")
_device = CPU


def here() -> torch.device:
    """The device of this run."""
    return _device


@contextmanager
def on(device: torch.device) -> Iterator[None]:
    """A context in which cases run on a device."""
    global _device
    before, _device = _device, device
    try:
        yield
    finally:
        _device = before


def making() -> Any:
    """A context in which tensors and modules are made on the device. On the CPU it is empty: it would slow every call down."""
    return nullcontext() if _device.type == "cpu" else _device


def moved(tree: Any) -> Any:
    """Tensors that were read from files, or made by other libraries, on the device."""
    return pytree.tree_map_only(torch.Tensor, lambda x: x.to(_device), tree)


def cpu_only(reason: str) -> str | None:
    """The reason why a case is skipped on other devices; None on the CPU."""
    return None if _device.type == "cpu" else f"it cannot run on {_device}: {reason}"
