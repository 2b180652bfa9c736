"""Steps on the Stiefel manifold by a C++ kernel: in place, one matrix at a time, in the cache of one core.

`manifold.Stiefel` and the optimizers' `move` define the result.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from polyhead._torch import is_torch_intercepted, is_tracing_or_dataless, native, native_missing_reason
from polyhead.manifold import Manifold, Stiefel

# Wider matrices do not fit into a core's cache, and torch's products are faster.
MAX_COLUMNS = 128
# Fewer products are not worth a second thread.
_MIN_PARALLEL_WORK = 1 << 16


@dataclasses.dataclass(frozen=True)
class StepRule:
    """How an optimizer turns a gradient r into a step of `scale` · d.

    first = momentum · first + gradient_factor · r, and d = direct_factor · r + momentum_factor · first; without a first
    moment, d = r. second = beta2 · second + (1 − beta2) · r², and d is divided by √second · root_factor + eps.
    """

    scale: float
    """The learning rate, with its sign and Adam's bias correction."""
    momentum: float = 0.0
    """SGD's momentum, Adam's beta1."""
    gradient_factor: float = 1.0
    """1 − dampening, or 1 − beta1."""
    direct_factor: float = 0.0
    """1 for Nesterov momentum, else 0."""
    momentum_factor: float = 1.0
    """The momentum for Nesterov momentum, else 1."""
    second: Literal["elementwise", "scalar"] | None = None
    beta2: float = 0.0
    root_factor: float = 1.0
    """The bias correction of √second."""
    eps: float = 0.0
    tangent: bool = False
    """Whether d is projected onto the tangent space."""
    transport: bool = False
    """Whether `first` is projected onto the tangent space at the new point."""


def refuses_step(on: Manifold, rule: StepRule, columns: Sequence[Sequence[Tensor]]) -> str | None:
    """The reason why the kernel cannot move these parameters, or None.

    Args:
        on: their manifold.
        rule: the rule of the step.
        columns: the parameters, their gradients, and, if the optimizer has them, their first and second moments. The
            parameters have one shape, layout, dtype and device.
    """
    if native is None:
        return f"there are no C++ kernels: {native_missing_reason}"
    if type(on) is not Stiefel or on.retraction != "polar":
        return f"only Stiefel with retraction='polar' is supported, got {on!r}"
    if is_tracing_or_dataless() or is_torch_intercepted():
        return "torch compiles, transforms or intercepts the step"
    x = columns[0][0]
    if x.dtype not in (torch.float32, torch.float64):
        return f"only float32 and float64 are supported, got {x.dtype}"
    for place, column in enumerate(columns):
        if not {type(y) for y in column} <= {Tensor, nn.Parameter} or {y.is_cpu for y in column} != {True}:
            return "it takes plain tensors on the CPU"
        scalar = place == 3 and rule.second == "scalar"
        shape = _one_per_matrix_shape(on, x) if scalar else x.shape
        if place and ({y.shape for y in column} != {shape} or {y.dtype for y in column} != {x.dtype}):
            return "a gradient or moment differs from its parameter in shape or dtype"
        if place and len({y.stride() for y in column}) > 1:
            return "the tensors differ in their strides"
        if (scalar or x.dim() > 2) and not column[0].is_contiguous():
            return "it takes contiguous batches of matrices"
        if place != 1 and 0 in column[0].stride():
            return "elements of a tensor share memory"
    if len(columns) > (3 if rule.second is None else 4):
        return "it does not support all of the optimizer's state"
    if True in {g.is_neg() for g in columns[1]}:
        return "a gradient has its negative bit set"
    _, _, k = _matrix_sizes(on, x)
    if not 0 < k <= MAX_COLUMNS or not x.numel():
        return f"it takes matrices of 1 to {MAX_COLUMNS} columns"
    return None


def step_in_place(
    on: Stiefel, rule: StepRule, columns: Sequence[Sequence[Tensor]], *, maximize: bool = False
) -> list[tuple[int, int]]:
    """Move parameters along their gradients, in place, and update their moments.

    The arguments are those of `refuses_step`, which must have returned None.

    Returns:
        The matrices that were skipped because their step is too long, as (index of the parameter, index of the matrix).
    """
    params, gradients, first, second = (*columns, (), ())[:4]
    x = params[0]
    count, n, k = _matrix_sizes(on, x)
    scalar = rule.second == "scalar"
    copies = 0 if not scalar else 1 if on.heads is None else k
    work = len(params) * x.numel() * k
    skipped = native.stiefel_step(
        double=x.dtype == torch.float64, count=count, n=n, k=k,
        x=_addresses(params), x_strides=_matrix_strides(on, params), g=_addresses(gradients), g_strides=_matrix_strides(on, gradients),
        first=_addresses(first), first_strides=_matrix_strides(on, first),
        second=_addresses(second), second_strides=[copies, 1, 0] if scalar else _matrix_strides(on, second),
        canonical=on.metric == "canonical", copies=copies, tangent=rule.tangent, transport=rule.transport and len(first) > 0,
        sign=-1.0 if maximize else 1.0, momentum=rule.momentum, gradient_factor=rule.gradient_factor,
        direct_factor=rule.direct_factor, momentum_factor=rule.momentum_factor, beta2=rule.beta2, root_factor=rule.root_factor, eps=rule.eps, scale=rule.scale,
        threads=torch.get_num_threads() if work > _MIN_PARALLEL_WORK else 1,
    )  # fmt: skip
    # autograd must notice if it has saved one of these tensors
    for written in (params, first, second):
        torch.autograd.graph.increment_version(written)
    return [divmod(number, count) for number in skipped]


def select_matrix(on: Stiefel, x: Tensor, number: int) -> Tensor:
    """One matrix of a tensor, as a view; with heads, the rows of one head."""
    if on.heads is not None:
        x = x.unflatten(-2, (on.heads, -1))
    return x.flatten(0, -3)[number] if x.dim() > 2 else x


def _matrix_sizes(on: Stiefel, x: Tensor) -> tuple[int, int, int]:
    """The number of matrices of a tensor, n and k."""
    n, k = x.shape[-2:] if on.heads is None else (x.shape[-1], x.shape[-2] // on.heads)
    return math.prod(x.shape[:-2]) * (on.heads or 1), n, k


def _one_per_matrix_shape(on: Stiefel, x: Tensor) -> tuple[int, ...]:
    """The shape of a tensor with one number per matrix, which broadcasts with x."""
    return (*x.shape[:-2], 1 if on.heads is None else x.shape[-2], 1)


def _addresses(tensors: Sequence[Tensor]) -> list[int]:
    return [x.data_ptr() for x in tensors]


def _matrix_strides(on: Stiefel, tensors: Sequence[Tensor]) -> list[int]:
    """The strides of matrices, rows and columns."""
    if not tensors:
        return [0, 0, 0]
    x = tensors[0]
    row, column = x.stride()[-2:]
    return [math.prod(x.shape[-2:]), row, column] if on.heads is None else [x.shape[-2] // on.heads * row, column, row]
