"""Adam and AdamW."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor

from polyhead._checks import check_number, short_repr
from polyhead.linalg.stiefel import StepRule
from polyhead.manifold import Manifold
from polyhead.optim.base import Optimizer, ParamGroup, number
from polyhead.optim.sharded_tensors import zeros_with_axes_of_one


class Adam(Optimizer):
    """Adam (Kingma 2015) with moments of Riemannian gradients; optionally one second moment per matrix (Bécigneul 2019).

    On `Euclidean` parameters it is `torch.optim.Adam`.

    Args:
        params: a model, whose layers declare manifolds; `optim.groups(model)`; or tensors, or groups with their own options.
        lr: the learning rate.
        betas: the decay rates of the running means of gradients and of their squares.
        eps: added to the root of the mean square.
        weight_decay: the factor of the parameter that is added to its gradient. It has no effect on manifolds of constant norm.
        second_moment: `"elementwise"`: a mean square per number, as in torch. `"scalar"`: one per matrix, the mean of the
            manifold's inner product, so that steps do not depend on the choice of coordinates.
        maximize: whether to maximise the objective.
        manifold: the manifold of groups that do not set one; `Euclidean()` by default.
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
        manifold: Manifold | None = None,
    ) -> None:
        super().__init__(
            params,
            {
                "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "second_moment": second_moment,
                "maximize": maximize, "manifold": manifold,
            },
        )  # fmt: skip

    def check_options(self, group: ParamGroup) -> None:
        super().check_options(group)
        betas = group["betas"]
        if not isinstance(betas, (tuple, list)) or len(betas) != 2:
            raise ValueError(f"betas must be two numbers in [0, 1), got {short_repr(betas)}")
        for index, beta in enumerate(betas):
            check_number(f"betas[{index}]", beta, 0, 1, "[)")
        check_number("eps", group["eps"], 0, math.inf, "[)")
        if group["second_moment"] not in ("elementwise", "scalar"):
            raise ValueError(f"second_moment must be 'elementwise' or 'scalar', got {group['second_moment']!r}")

    def init_state(self, group: ParamGroup, p: Tensor) -> dict[str, Tensor]:
        zeros = torch.zeros_like(p)
        if group["second_moment"] == "elementwise":
            return {"exp_avg": zeros, "exp_avg_sq": zeros.clone()}
        like = torch.empty(p.shape, device="meta")
        shape = group["manifold"].inner(like, like, like, keepdim=True).shape
        return {"exp_avg": zeros, "exp_avg_sq": zeros_with_axes_of_one(p, shape)}

    def move(self, group: ParamGroup, x: Tensor, g: Tensor, steps: int | Tensor, state: dict[str, Tensor]) -> Tensor:
        manifold, lr, decay = group["manifold"], number(group["lr"]), group["weight_decay"]
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
            # the mean over the entries of a matrix, so that lr has the same meaning as elementwise
            matrices = manifold.inner(x, g, g).numel()
            second.mul_(beta2).add_(square, alpha=(1 - beta2) * matrices / max(1, g.numel()))
        bias1, bias2 = (_remaining_share(beta, steps) for beta in (beta1, beta2))
        size = second.sqrt().div_(bias2**0.5).add_(group["eps"])
        step = torch.div(first, size).mul_(-lr / bias1)
        # moments of earlier steps are transported to x: the projection removes their normal component
        return manifold.retract(x, manifold.tangent(x, step))

    def step_rule(self, group: ParamGroup, steps: int) -> StepRule:
        beta1, beta2 = group["betas"]
        return StepRule(
            scale=-float(group["lr"]) / (1 - beta1**steps), momentum=beta1, gradient_factor=1 - beta1, second=group["second_moment"],
            beta2=beta2, root_factor=1 / math.sqrt(1 - beta2**steps), eps=float(group["eps"]), tangent=True,
        )  # fmt: skip


def _remaining_share(beta: float, steps: int | Tensor) -> Any:
    """1 − βᵗ: the share that a running mean of t numbers has by now."""
    if isinstance(steps, int):
        return 1 - beta**steps
    # exact to rounding for β near 1 too
    return -torch.expm1(steps * (math.log(beta) if beta else -math.inf))


class AdamW(Adam):
    """Adam with decoupled weight decay (Loshchilov 2019), which has no effect on manifolds of constant norm.

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
        manifold: Manifold | None = None,
    ) -> None:
        super().__init__(
            params, lr, betas, eps, weight_decay, second_moment=second_moment, maximize=maximize, manifold=manifold
        )
