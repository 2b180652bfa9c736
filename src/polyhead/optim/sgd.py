"""Gradient descent, with and without momentum."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from polyhead._checks import check_number
from polyhead.linalg.stiefel import Rule
from polyhead.manifold import Euclidean, Manifold
from polyhead.optim.base import Group, Optimizer


class SGD(Optimizer):
    """Gradient descent; the momentum is a tangent vector, which travels along. On `Euclidean` it is `torch.optim.SGD`.

    Args:
        params: tensors, or groups with options of their own; `optim.groups(model)` reads the manifolds off the layers.
        lr: how far a step goes.
        momentum: how much of the last step's direction is kept.
        weight_decay: this much of a parameter is added to its gradient. Where all points have one norm it moves nothing.
        dampening: how much of the gradient is left out of the momentum.
        nesterov: whether to look ahead along the momentum.
        maximize: whether to climb.
        manifold: where parameters lie whose group does not say so.
    """

    state_names = ("momentum_buffer",)

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        manifold: Manifold = Euclidean(),
    ) -> None:
        super().__init__(
            params,
            {
                "lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay, "nesterov": nesterov,
                "maximize": maximize, "manifold": manifold,
            },
        )  # fmt: skip

    def check_options(self, group: Group) -> None:
        super().check_options(group)
        for name in ("momentum", "dampening"):
            check_number(name, group[name], 0, math.inf, "[)")
        if group["nesterov"] and (group["momentum"] == 0 or group["dampening"] != 0):
            raise ValueError(
                f"nesterov: it needs a momentum, and no dampening; they are {group['momentum']} and {group['dampening']}"
            )

    def begin(self, group: Group, p: Tensor) -> dict[str, Tensor]:
        return {"momentum_buffer": torch.zeros_like(p)}

    def kept(self, group: Group) -> tuple[str, ...]:
        return self.state_names if group["momentum"] else ()

    def move(self, group: Group, x: Tensor, g: Tensor, steps: int, state: dict[str, Tensor]) -> Tensor:
        manifold, lr = group["manifold"], float(group["lr"])
        if group["weight_decay"] and not manifold.constant_norm:
            g = g.add(x, alpha=group["weight_decay"])
        step = manifold.gradient(x, g)
        velocity = state.get("momentum_buffer")
        if velocity is not None:
            # the first step is not dampened
            velocity.mul_(group["momentum"]).add_(step, alpha=1 if steps == 1 else 1 - group["dampening"])
            step = step.add(velocity, alpha=group["momentum"]) if group["nesterov"] else velocity
        y = manifold.retract(x, step * -lr)
        if velocity is not None:
            moved = manifold.transport(x, y, velocity)
            if moved is not velocity:
                velocity.copy_(moved)
        return y

    def rule(self, group: Group, steps: int) -> Rule:
        momentum, ahead = float(group["momentum"]), group["nesterov"]
        return Rule(
            scale=-float(group["lr"]), keep=momentum, add=1 if steps == 1 else 1 - float(group["dampening"]), now=1 if ahead else 0,
            ahead=momentum if ahead else 1, transport=True,
        )  # fmt: skip
