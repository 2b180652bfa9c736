"""Steps of parameters on a device: a bounded number of launches, and no number that the host reads.

The host cannot look whether a gradient or a result is finite. The device decides, and leaves everything as it was where one is
not; the host learns of it later (`DeviceFailures`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from polyhead._torch import move_to
from polyhead.optim.device_failures import DeviceFailures
from polyhead.optim.sharded_tensors import is_sharded

# Parameters of one shape are stacked up to this many numbers, 64 MB of fp32: a step takes about eight times that for a moment.
MAX_STACK_NUMEL = 1 << 24

# The points that x moves to given gradients and the numbers of steps, which broadcast with x; updates the moments in place.
Move = Callable[[Tensor, Tensor, Tensor, list[Tensor]], Tensor]


def is_stepped_on_device(p: Tensor) -> bool:
    """Whether a parameter is on a device whose numbers the host does not read. Processes that share a DTensor must agree: they do."""
    return not p.is_cpu and not is_sharded(p)


def check_state_device(p: Tensor, state: Mapping[str, Tensor], name_of: Callable[[Tensor], str]) -> None:
    """Raise where the state of a parameter is on another device, as after `model.to(device)`."""
    for name, x in state.items():
        if x.device != p.device:
            raise ValueError(
                f"{name_of(p)}: {name} must be on {p.device}, as the parameter is, got {x.device}; make the optimizer after "
                "model.to(device), or load its state_dict() again"
            )


def check_gradients(
    params: Sequence[Tensor], failures: DeviceFailures, describe: Callable[[Tensor], str]
) -> dict[torch.device, Bool[Tensor, ""]]:
    """Whether the gradients of all parameters on devices are finite, as a number on each of their devices.

    Args:
        params: parameters with gradients; those on the CPU are left out.
        failures: takes the gradients that are not finite.
        describe: the error message for the gradient of a parameter.
    """
    by_device: dict[torch.device, list[Tensor]] = {}
    for p in filter(is_stepped_on_device, params):
        by_device.setdefault(p.device, []).append(p)
    finite = []
    for device, own in by_device.items():
        # inf and NaN make the largest absolute value inf or NaN; empty tensors have none
        full = [p for p in own if p.numel()]
        sizes = torch._foreach_norm(_gradients(full), ord=math.inf) if full else ()
        flags = torch.stack(sizes).isfinite() if full else torch.ones(0, dtype=torch.bool, device=device)
        failures.add(~flags, lambda index, full=full: describe(full[index]))  # type: ignore[misc]
        finite.append(flags.all())
    return {device: torch.stack([move_to(x, device) for x in finite]).all() for device in by_device}


def step_on_device(
    move: Move, columns: Sequence[list[Tensor]], counters: list[Tensor], usable: Bool[Tensor, ""], *, may_fail: bool
) -> Bool[Tensor, " stacks"]:
    """One step of parameters of one shape, where `usable` is true; return which stacks of them did not move though it is.

    Args:
        move: computes the step of a stack.
        columns: the parameters, and each of their state tensors.
        counters: the number of steps of each parameter, which is counted up.
        usable: whether the gradients are.
        may_fail: leave parameters and states as they were where the result is not finite.
    """
    size = max(1, MAX_STACK_NUMEL // max(1, columns[0][0].numel()))
    failed = []
    for first in range(0, len(counters), size):
        some = [column[first : first + size] for column in columns]
        x, *moments = (torch.stack([y.detach() for y in column]) for column in some)
        g = torch.stack(_gradients(some[0]))
        counted = counters[first : first + size]
        before = torch.stack(counted)
        steps = (before + 1).to(torch.promote_types(x.dtype, torch.float32))
        new = [moment.clone() for moment in moments]
        y = move(x, g, steps.view(-1, *(1,) * (x.dim() - 1)), new)
        keep = usable & y.isfinite().all() if may_fail else usable
        for column, now, was in zip(some, (y, *new), (x, *moments), strict=True):
            torch._foreach_copy_(column, list(torch.where(keep, now, was).unbind()))
        torch._foreach_copy_(counted, list((before + keep).unbind()))
        failed.append(usable & ~keep)
    return torch.stack(failed)


def _gradients(params: Sequence[Tensor]) -> list[Float[Tensor, "..."]]:
    return [p.grad for p in params if p.grad is not None]
