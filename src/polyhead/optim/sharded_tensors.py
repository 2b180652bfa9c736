"""Parameters that are DTensors: the part of each that this process has, and the whole where a matrix is cut.

DTensors are known by their methods, so that nothing here imports torch.distributed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from polyhead.manifold import Manifold


class Part(NamedTuple):
    """What a process computes with for one parameter."""

    manifold: Manifold
    """The manifold of its own part; of the whole where `is_cut`."""
    is_cut: bool
    """Whether a matrix lies on several processes, which then gather the parameter, and all compute the whole step."""


def is_sharded(x: Tensor) -> bool:
    """Whether a tensor is a DTensor."""
    # the first test is quick
    return type(x) not in (Tensor, nn.Parameter) and hasattr(x, "device_mesh") and hasattr(x, "to_local")


def own_part(x: Tensor) -> Tensor:
    """This process's part of a DTensor, which shares its memory; any other tensor is its own part."""
    if not is_sharded(x):
        return x
    sharded: Any = x
    part: Tensor = sharded.to_local()
    return part


def whole(x: Tensor) -> Tensor:
    """All numbers of a DTensor, gathered from its processes; any other tensor is whole."""
    if not is_sharded(x):
        return x
    sharded: Any = x
    gathered: Tensor = sharded.full_tensor()
    return gathered


def gradient_like(p: Tensor) -> Tensor:
    """The gradient of a parameter, placed as the parameter is."""
    gradient: Any = p.grad
    sharded: Any = p
    if is_sharded(p) and gradient.placements != sharded.placements:
        gradient = gradient.redistribute(placements=sharded.placements)
    assert isinstance(gradient, Tensor)
    return gradient


def write_whole(full: Tensor, into: Tensor) -> None:
    """Write this process's part of a tensor that is whole on every process, in place."""
    target: Any = into.detach()
    if is_sharded(target):
        replicated = type(target).from_local(full, target.device_mesh, run_check=False)
        full, target = replicated.redistribute(placements=target.placements).to_local(), target.to_local()
    target.copy_(full)


def find_part(p: Tensor, manifold: Manifold) -> Part:
    """How the processes of a parameter share the work of a step. It is the same on all of them."""
    if not is_sharded(p):
        return Part(manifold, is_cut=False)
    cuts: dict[int, int] = {}
    for placement, size in _placements(p):
        axis = getattr(placement, "dim", None)
        if axis is not None:
            cuts[axis] = cuts.get(axis, 1) * size
    of_part = manifold.of_part(tuple(p.shape), {axis: parts for axis, parts in cuts.items() if parts > 1})
    return Part(manifold if of_part is None else of_part, is_cut=of_part is None)


def zeros_with_axes_of_one(p: Tensor, shape: Sequence[int]) -> Tensor:
    """Zeros of a shape that is that of `p`, or 1 along some axes; cut as `p` is."""
    part = own_part(p)
    local = part.new_zeros([1 if size == 1 else own for size, own in zip(shape, part.shape, strict=True)])
    if not is_sharded(p):
        return local
    sharded: Any = p.detach()
    replicate = _replicated(sharded, local).placements
    placements = [
        replicate[0] if shape[getattr(placement, "dim", 0)] == 1 else placement for placement, _ in _placements(p)
    ]
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    made: Tensor = type(sharded).from_local(
        local, sharded.device_mesh, placements, run_check=False, shape=torch.Size(shape), stride=tuple(strides)
    )
    return made


def any_process(flags: Sequence[bool], params: Iterable[Tensor]) -> list[bool]:
    """Which of these flags are True on any process that has a part of the parameters: one small sum per axis of a mesh."""
    meshes: dict[Any, list[Any]] = {}
    for p in params:
        if is_sharded(p):
            meshes.setdefault(p.device_mesh, []).append(p)  # type: ignore[attr-defined]
    counts = torch.tensor(flags, dtype=torch.float32)
    for mesh, sharded in meshes.items():
        made_by, on_mesh = type(sharded[0].detach()), counts.to(mesh.device_type)
        by_axis = list(zip(*(p.placements for p in sharded), strict=True))
        plain = [x for axis in by_axis for x in axis if hasattr(x, "dim") and not hasattr(x, "split_factor")]
        for index, placements in enumerate(by_axis):
            if not any(hasattr(placement, "dim") for placement in placements):
                # all processes along this axis have the same numbers
                continue
            where = list(_replicated(sharded[0], on_mesh).placements)
            where[index] = plain[0]
            leading = plain[0].dim + 1
            stacked = made_by.from_local(on_mesh.reshape(*(1,) * leading, -1), mesh, where, run_check=False)
            on_mesh = stacked.sum(tuple(range(leading))).full_tensor()
        counts = on_mesh.cpu()
    return [count > 0 for count in counts.tolist()]


def _placements(p: Any) -> list[tuple[Any, int]]:
    """The placement along each axis of the mesh, and the size of the axis."""
    return [(placement, p.device_mesh.size(axis)) for axis, placement in enumerate(p.placements)]


def _replicated(like: Any, x: Tensor) -> Any:
    return type(like.detach()).from_local(x, like.device_mesh, run_check=False)
