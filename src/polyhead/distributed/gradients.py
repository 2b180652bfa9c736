"""sum_gradients: the sum of the ranks' gradients, where each rank has a part of the loss."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from polyhead.distributed.process_group import process_group


def sum_gradients(
    parameters: nn.Module | Iterable[nn.Parameter], mesh: DeviceMesh | dist.ProcessGroup | None = None
) -> None:
    """Replace each gradient by the sum of those of all ranks, in at least fp32. Every rank must call it, after `backward`.

    For items and nodes: every rank has the loss of its own tokens or nodes, and all have the same parameters, which may be
    DTensors over other ranks. A parameter that needs a gradient and has none counts as zero.

    Args:
        parameters: a model, or parameters, in the same order on every rank.
        mesh: the ranks of the items or nodes: a mesh of one dimension, or a process group, such as `shard.group`; None for all.
    """
    group = process_group(mesh)
    own = parameters.parameters() if isinstance(parameters, nn.Module) else parameters
    gradients: dict[tuple[torch.dtype, torch.device], list[Tensor]] = defaultdict(list)
    for parameter in own:
        if parameter.requires_grad:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradient = parameter.grad
            local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
            gradients[torch.promote_types(local.dtype, torch.float32), local.device].append(local)
    for (dtype, _), found in gradients.items():
        # one message for all of them
        flat = torch.cat([x.flatten().to(dtype) for x in found])
        dist.all_reduce(flat, group=group)
        for x, total in zip(found, flat.split([x.numel() for x in found]), strict=True):
            x.copy_(total.view_as(x))
