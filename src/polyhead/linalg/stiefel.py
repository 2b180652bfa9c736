"""Steps on the Stiefel manifold by a C++ kernel: each matrix where it lies, all of its step in a core's own cache.

What it computes is defined by `manifold.Stiefel` and the optimizers' `move`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from polyhead._torch import intercepted, missing, native, values_unavailable
from polyhead.manifold import Manifold, Stiefel

# Wider matrices do not stay in a core's cache: torch is better at their products.
WIDEST = 128
# Fewer products are not worth a second thread.
_PARALLEL = 1 << 16


@dataclasses.dataclass(frozen=True)
class Rule:
    """What an optimizer makes of a gradient r: a direction d, which is followed for a length of `scale`.

    first = keep · first + add · r, and d = now · r + ahead · first; where nothing is kept, d = r.
    second = keep_second · second + (1 − keep_second) · r², and d is divided by √second · root + eps.
    """

    scale: float
    keep: float = 0.0
    add: float = 1.0
    now: float = 0.0
    ahead: float = 1.0
    second: Literal["elementwise", "scalar"] | None = None
    keep_second: float = 0.0
    root: float = 1.0
    eps: float = 0.0
    tangent: bool = False
    """Whether what is normal to the manifold is taken out of d."""
    transport: bool = False
    """Whether it is taken out of `first` where the step has ended."""


def refuses(on: Manifold, rule: Rule, columns: Sequence[Sequence[Tensor]]) -> str | None:
    """Why the kernel does not move these parameters, if it does not.

    Args:
        on: where they lie.
        rule: how they move.
        columns: the parameters, their gradients, and what is kept for each: the first moments and the second, or nothing.
            The parameters are of one shape, layout and dtype, and on one device.
    """
    if native is None:
        return f"there are no C++ kernels: {missing}"
    if type(on) is not Stiefel or on.retraction != "polar":
        return f"it goes to the nearest point of the Stiefel manifold, and not as {on!r}"
    if values_unavailable() or intercepted():
        return "torch compiles, transforms or watches what is done"
    x = columns[0][0]
    if x.dtype not in (torch.float32, torch.float64):
        return f"it computes in fp32 and fp64, and not in {x.dtype}"
    for place, column in enumerate(columns):
        if not {type(y) for y in column} <= {Tensor, nn.Parameter} or {y.is_cpu for y in column} != {True}:
            return "it takes plain tensors on the CPU"
        scalar = place == 3 and rule.second == "scalar"
        wanted = _scalar_shape(on, x) if scalar else x.shape
        if place and ({y.shape for y in column} != {wanted} or {y.dtype for y in column} != {x.dtype}):
            return "what belongs to a parameter is not of its shape or dtype"
        if place and len({y.stride() for y in column}) > 1:
            return "the tensors are not alike"
        if (scalar or x.dim() > 2) and not column[0].is_contiguous():
            return "it takes batches of matrices without gaps"
        if place != 1 and 0 in column[0].stride():
            return "numbers share their memory"
    if len(columns) > (3 if rule.second is None else 4):
        return "it does not know of all that is kept"
    if True in {g.is_neg() for g in columns[1]}:
        return "a gradient is the negative of what is written in memory"
    _, _, k = _sizes(on, x)
    if not 0 < k <= WIDEST or not x.numel():
        return f"it takes matrices of 1 to {WIDEST} columns"
    return None


def step(
    on: Stiefel, rule: Rule, columns: Sequence[Sequence[Tensor]], *, maximize: bool = False
) -> list[tuple[int, int]]:
    """Move parameters along their gradients, in place, with all that is kept for them.

    Args: as those of `refuses`, which has not refused them.

    Returns:
        What was left as it is, for its step is too long: the numbers of parameters, and of matrices in them.
    """
    params, gradients, first, second = (*columns, (), ())[:4]
    x = params[0]
    count, n, k = _sizes(on, x)
    scalar = rule.second == "scalar"
    copies = 0 if not scalar else 1 if on.heads is None else k
    work = len(params) * x.numel() * k
    left = native.stiefel_step(
        double=x.dtype == torch.float64, count=count, n=n, k=k,
        x=_places(params), x_strides=_strides(on, params), g=_places(gradients), g_strides=_strides(on, gradients),
        first=_places(first), first_strides=_strides(on, first),
        second=_places(second), second_strides=[copies, 1, 0] if scalar else _strides(on, second),
        canonical=on.metric == "canonical", copies=copies, tangent=rule.tangent, transport=rule.transport and len(first) > 0,
        sign=-1.0 if maximize else 1.0, keep=rule.keep, add=rule.add, now=rule.now, ahead=rule.ahead,
        keep_second=rule.keep_second, root=rule.root, eps=rule.eps, scale=rule.scale,
        threads=torch.get_num_threads() if work > _PARALLEL else 1,
    )  # fmt: skip
    # autograd must know that what it may have kept is no more
    for written in (params, first, second):
        torch.autograd.graph.increment_version(written)
    return [divmod(number, count) for number in left]


def matrix(on: Stiefel, x: Tensor, number: int) -> Tensor:
    """One matrix of a tensor, as a view; of heads it is a head's rows."""
    if on.heads is not None:
        x = x.unflatten(-2, (on.heads, -1))
    return x.flatten(0, -3)[number] if x.dim() > 2 else x


def _sizes(on: Stiefel, x: Tensor) -> tuple[int, int, int]:
    """The matrices of a tensor, n and k."""
    n, k = x.shape[-2:] if on.heads is None else (x.shape[-1], x.shape[-2] // on.heads)
    return math.prod(x.shape[:-2]) * (on.heads or 1), n, k


def _scalar_shape(on: Stiefel, x: Tensor) -> tuple[int, ...]:
    """Of one number for each matrix, which broadcasts with x."""
    return (*x.shape[:-2], 1 if on.heads is None else x.shape[-2], 1)


def _places(tensors: Sequence[Tensor]) -> list[int]:
    return [x.data_ptr() for x in tensors]


def _strides(on: Stiefel, tensors: Sequence[Tensor]) -> list[int]:
    """From one matrix, row and column to the next."""
    if not tensors:
        return [0, 0, 0]
    x = tensors[0]
    row, column = x.stride()[-2:]
    return [math.prod(x.shape[-2:]), row, column] if on.heads is None else [x.shape[-2] // on.heads * row, column, row]
