"""Gradient descent, with and without momentum."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from polyhead._checks import check_number
from polyhead.linalg.stiefel import StepRule
from polyhead.manifold import Manifold
from polyhead.optim.base import Optimizer, ParamGroup, number


class SGD(Optimizer):
    """Gradient descent whose momentum is a tangent vector, transported at each step. On `Euclidean` it is `torch.optim.SGD`.

    Args:
        params: a model, whose layers declare manifolds; `optim.groups(model)`; or tensors, or groups with their own options.
        lr: the learning rate.
        momentum: the momentum factor.
        weight_decay: the factor of the parameter that is added to its gradient. It has no effect on manifolds of constant norm.
        dampening: the share of the gradient that is left out of the momentum.
        nesterov: whether to use Nesterov momentum.
        maximize: whether to maximise the objective.
        manifold: the manifold of groups that do not set one; `Euclidean()` by default.
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
        manifold: Manifold | None = None,
    ) -> None:
        super().__init__(
            params,
            {
                "lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay, "nesterov": nesterov,
                "maximize": maximize, "manifold": manifold,
            },
        )  # fmt: skip

    def check_options(self, group: ParamGroup) -> None:
        super().check_options(group)
        for name in ("momentum", "dampening"):
            check_number(name, group[name], 0, math.inf, "[)")
        if group["nesterov"] and (group["momentum"] == 0 or group["dampening"] != 0):
            raise ValueError(
                f"nesterov must be used with a momentum above 0 and a dampening of 0, got momentum={group['momentum']} and "
                f"dampening={group['dampening']}"
            )

    def init_state(self, group: ParamGroup, p: Tensor) -> dict[str, Tensor]:
        return {"momentum_buffer": torch.zeros_like(p)}

    def used_state_names(self, group: ParamGroup) -> tuple[str, ...]:
        return self.state_names if group["momentum"] else ()

    def move(self, group: ParamGroup, x: Tensor, g: Tensor, steps: int | Tensor, state: dict[str, Tensor]) -> Tensor:
        manifold, lr, dampening = group["manifold"], number(group["lr"]), float(group["dampening"])
        if group["weight_decay"] and not manifold.constant_norm:
            g = g.add(x, alpha=group["weight_decay"])
        step = manifold.gradient(x, g)
        velocity = state.get("momentum_buffer")
        if velocity is not None:
            # the first step is not dampened
            if isinstance(steps, int):
                velocity.mul_(group["momentum"]).add_(step, alpha=1 if steps == 1 else 1 - dampening)
            else:
                velocity.mul_(group["momentum"]).add_(step * (1 - dampening * (steps > 1).to(steps.dtype)))
            step = step.add(velocity, alpha=group["momentum"]) if group["nesterov"] else velocity
        y = manifold.retract(x, step * -lr)
        if velocity is not None:
            transported = manifold.transport(x, y, velocity)
            if transported is not velocity:
                velocity.copy_(transported)
        return y

    def step_rule(self, group: ParamGroup, steps: int) -> StepRule:
        momentum, nesterov = float(group["momentum"]), group["nesterov"]
        return StepRule(
            scale=-float(group["lr"]), momentum=momentum, gradient_factor=1 if steps == 1 else 1 - float(group["dampening"]),
            direct_factor=1 if nesterov else 0, momentum_factor=momentum if nesterov else 1, transport=True,
        )  # fmt: skip
