"""Find W_O of any model: trace the outputs of the heads to the first linear map that takes them.

Only shapes and the order of axes are followed. No number is read, so the host never waits for a device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

FoundCallback = Callable[[Float[Tensor, "out heads_dim"]], None]


def _functions(*names: str) -> set[Any]:
    """The functions of these names in `torch` and `Tensor`."""
    return {getattr(owner, name) for name in names for owner in (torch, Tensor) if hasattr(owner, name)}


# Functions that keep the numbers in their row-major order.
_ORDER_KEEPING_FUNCTIONS = _functions(
    "reshape", "view", "flatten", "unflatten", "contiguous", "clone", "squeeze", "unsqueeze", "to", "type_as", "detach",
    "reshape_as", "view_as",
)  # fmt: skip
_AXIS_ORDERING_FUNCTIONS = _functions("transpose", "permute", "movedim", "moveaxis", "swapaxes", "swapdims")


class _Reordering(NamedTuple):
    """Axes in another order: axis i of the result is axis `order[i]` of a tensor of this shape."""

    shape: tuple[int, ...]
    order: tuple[int, ...]


class _Traced(NamedTuple):
    """A tensor that holds the outputs of the heads, and how its numbers were reordered since."""

    # kept alive, so that its id is not used again
    tensor: Tensor
    version: int | None
    outputs: Float[Tensor, "... heads queries dim"]
    reorderings: tuple[_Reordering, ...]
    found: FoundCallback

    def has_changed(self) -> bool:
        """Whether the tensor was changed in place."""
        return self.version != _version_of(self.tensor)


class OutputProjectionTracer:
    """Traces tensors through torch functions, and reports the linear map that is applied to them."""

    def __init__(self) -> None:
        self._traced: dict[int, _Traced] = {}

    def start(self, held: Tensor, outputs: Float[Tensor, "... heads queries dim"], found: FoundCallback) -> None:
        """Trace `held`, which holds the heads' outputs in their row-major order."""
        self._trace(held, outputs, (), found)

    def stop(self) -> None:
        """Trace nothing."""
        self._traced.clear()

    def process_call(self, function: Any, arguments: tuple[Any, ...], options: Mapping[str, Any], result: Any) -> None:
        """Process one call of a torch function."""
        if not self._traced:
            return
        if _writes_to_first_argument(function) and arguments and isinstance(arguments[0], Tensor):
            # tensors of inference mode do not count such changes
            written = arguments[0]
            self._traced = {key: held for key, held in self._traced.items() if not _share_memory(held.tensor, written)}
            return
        at = next((a for a in arguments[:2] if isinstance(a, Tensor) and id(a) in self._traced), None)
        if at is None:
            return
        traced = self._traced[id(at)]
        _, _, outputs, reorderings, found = traced
        if function in _ORDER_KEEPING_FUNCTIONS or function in _AXIS_ORDERING_FUNCTIONS:
            if isinstance(result, Tensor) and result.numel() == at.numel() and not traced.has_changed():
                if function in _AXIS_ORDERING_FUNCTIONS:
                    order = _order_of_axes(function, at.dim(), arguments[1:], options)
                    reorderings = (*reorderings, _Reordering(tuple(at.shape), order))
                self._trace(result, outputs, reorderings, found)
            return
        weight = _matrix_applied_to(function, arguments, at)
        if weight is not None and not traced.has_changed() and _is_concatenation_of_heads(traced, weight):
            found(weight)
            self._traced = {key: held for key, held in self._traced.items() if held.found is not found}

    def _trace(self, held: Tensor, outputs: Tensor, reorderings: tuple[_Reordering, ...], found: FoundCallback) -> None:
        self._traced[id(held)] = _Traced(held, _version_of(held), outputs, reorderings, found)


def _writes_to_first_argument(function: Any) -> bool:
    """Whether a function changes its first argument in place, by its name in torch: `mul_`, `__imul__`, `__setitem__`."""
    name = getattr(function, "__name__", "")
    if name.startswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and hasattr(Tensor, name.replace("__i", "__", 1)))
    return name.endswith("_")


def _share_memory(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors are views of the same memory."""
    if any(z.layout != torch.strided or z.is_nested for z in (x, y)):
        return x is y
    return bool(x.untyped_storage()._cdata == y.untyped_storage()._cdata)


def _version_of(x: Tensor) -> int | None:
    return None if x.is_inference() else x._version


def _order_of_axes(function: Any, axes: int, arguments: tuple[Any, ...], options: Mapping[str, Any]) -> tuple[int, ...]:
    """How a function orders axes, found by what it does to a tensor without data whose axes all have different sizes."""
    probe = torch.empty(tuple(range(axes)), device="meta")
    return tuple(function(probe, *arguments, **options).shape)


def _matrix_applied_to(function: Any, arguments: tuple[Any, ...], x: Tensor) -> Float[Tensor, "out in"] | None:
    """The matrix by which a function multiplies `x`; None for other functions."""
    if function is F.linear and arguments[0] is x:
        return arguments[1]
    if function is torch.addmm and arguments[1] is x:
        return arguments[2].T
    if function in (torch.matmul, torch.mm, Tensor.matmul, Tensor.mm, Tensor.__matmul__) and arguments[0] is x:
        return arguments[1].T if arguments[1].dim() == 2 else None
    return None


def _is_concatenation_of_heads(traced: _Traced, weight: Tensor) -> bool:
    """Whether the first row of the tensor is the concatenated outputs of all heads for one query."""
    x = traced.tensor
    heads, queries, dim = traced.outputs.shape[-3:]
    width = heads * dim
    if x.shape[-1] != width or weight.shape[-1] != width or not x.numel():
        return False
    place = np.arange(width)
    for shape, order in reversed(traced.reorderings):
        index = np.unravel_index(place, [shape[axis] for axis in order])
        place = np.ravel_multi_index([index[order.index(axis)] for axis in range(len(shape))], shape)
    head, feature = np.divmod(np.arange(width), dim)
    return bool((place == head * queries * dim + feature).all())
