"""Adam and AdamW."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor

from polyhead._checks import check_number, shown
from polyhead.linalg.stiefel import Rule
from polyhead.manifold import Euclidean, Manifold
from polyhead.optim.base import Group, Optimizer


class Adam(Optimizer):
    """Adam (Kingma 2015), with the moments of gradients along the manifold; with one second moment a matrix as by Bécigneul 2019.

    On `Euclidean` parameters it is `torch.optim.Adam`.

    Args:
        params: tensors, or groups with options of their own; `optim.groups(model)` reads the manifolds off the layers.
        lr: how far a step goes.
        betas: how much of the means of gradients and of their squares is kept from step to step.
        eps: added to the root of the mean square.
        weight_decay: this much of a parameter is added to its gradient. Where all points have one norm it moves nothing.
        second_moment: `"elementwise"`: each number has its own mean square, as in torch. `"scalar"`: one for each matrix, the
            mean of the manifold's inner product, so that steps do not depend on the choice of coordinates.
        maximize: whether to climb.
        manifold: where parameters lie whose group does not say so.
    """

    state_names = ("exp_avg", "exp_avg_sq")
    decoupled = False

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        second_moment: Literal["elementwise", "scalar"] = "elementwise",
        maximize: bool = False,
        manifold: Manifold = Euclidean(),
    ) -> None:
        super().__init__(
            params,
            {
                "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "second_moment": second_moment,
                "maximize": maximize, "manifold": manifold,
            },
        )  # fmt: skip

    def check_options(self, group: Group) -> None:
        super().check_options(group)
        betas = group["betas"]
        if not isinstance(betas, (tuple, list)) or len(betas) != 2:
            raise ValueError(f"betas must be two numbers in [0, 1), got {shown(betas)}")
        for place, beta in enumerate(betas):
            check_number(f"betas[{place}]", beta, 0, 1, "[)")
        check_number("eps", group["eps"], 0, math.inf, "[)")
        if group["second_moment"] not in ("elementwise", "scalar"):
            raise ValueError(f"second_moment: it is {group['second_moment']!r}; it must be 'elementwise' or 'scalar'")

    def begin(self, group: Group, p: Tensor) -> dict[str, Tensor]:
        zeros = torch.zeros_like(p)
        scalar = group["second_moment"] == "scalar"
        return {
            "exp_avg": zeros,
            "exp_avg_sq": group["manifold"].inner(p, zeros, zeros, keepdim=True).to(p.dtype)
            if scalar
            else zeros.clone(),
        }

    def move(self, group: Group, x: Tensor, g: Tensor, steps: int, state: dict[str, Tensor]) -> Tensor:
        manifold, lr, decay = group["manifold"], float(group["lr"]), group["weight_decay"]
        beta1, beta2 = group["betas"]
        first, second = state["exp_avg"], state["exp_avg_sq"]
        if decay and not manifold.constant_norm:
            if self.decoupled:
                x = x * (1 - lr * decay)
            else:
                g = g.add(x, alpha=decay)
        g = manifold.gradient(x, g)
        first.lerp_(g, 1 - beta1)
        if group["second_moment"] == "elementwise":
            second.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        else:
            square = manifold.inner(x, g, g, keepdim=True)
            # the mean over the numbers of a matrix, so that lr means what it means elementwise
            matrices = manifold.inner(x, g, g).numel()
            second.mul_(beta2).add_(square, alpha=(1 - beta2) * matrices / max(1, g.numel()))
        size = second.sqrt().div_(math.sqrt(1 - beta2**steps)).add_(group["eps"])
        step = torch.div(first, size).mul_(-lr / (1 - beta1**steps))
        # here the moments of earlier steps come over to x: what has become normal by now is taken out
        return manifold.retract(x, manifold.tangent(x, step))

    def rule(self, group: Group, steps: int) -> Rule:
        beta1, beta2 = group["betas"]
        return Rule(
            scale=-float(group["lr"]) / (1 - beta1**steps), keep=beta1, add=1 - beta1, second=group["second_moment"],
            keep_second=beta2, root=1 / math.sqrt(1 - beta2**steps), eps=float(group["eps"]), tangent=True,
        )  # fmt: skip


class AdamW(Adam):
    """Adam whose weight decay shrinks the parameters themselves (Loshchilov 2019), and leaves manifolds of one norm alone.

    The arguments are those of `Adam`.
    """

    decoupled = True

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        second_moment: Literal["elementwise", "scalar"] = "elementwise",
        maximize: bool = False,
        manifold: Manifold = Euclidean(),
    ) -> None:
        super().__init__(
            params, lr, betas, eps, weight_decay, second_moment=second_moment, maximize=maximize, manifold=manifold
        )
