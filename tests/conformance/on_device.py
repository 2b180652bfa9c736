"""A built row of a table on the device of `make test DEVICE=cuda`."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import TypeVar

from table import DEVICE
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from polyhead.kernels import Call, Kernel

Built = TypeVar("Built")


def on_device(built: Built) -> Built:
    """A copy whose tensors lie on the device; on the CPU the row itself."""
    if DEVICE.type == "cpu":
        return built
    moved: dict[int, Tensor] = {}

    def move(x: Tensor) -> Tensor:
        # a tensor that is also in a list of learned ones stays one tensor
        if id(x) not in moved:
            moved[id(x)] = x.detach().to(DEVICE).requires_grad_(x.requires_grad)
        return moved[id(x)]

    there = copy.copy(built)
    for name, value in vars(built).items():
        if isinstance(value, nn.Module):
            setattr(there, name, module := copy.deepcopy(value).to(DEVICE))
            moved |= {id(old): new for old, new in zip(value.parameters(), module.parameters(), strict=True)}
    for name, value in vars(built).items():
        if not isinstance(value, nn.Module):
            setattr(there, name, pytree.tree_map_only(Tensor, move, value))
    return there


def fast_kernels(candidates: Iterable[Kernel], call: Call) -> list[str]:
    """The names of the kernels besides the reference that take a call."""
    return [kernel.name for kernel in candidates if kernel.name != "reference" and kernel.refuses(call) is None]
