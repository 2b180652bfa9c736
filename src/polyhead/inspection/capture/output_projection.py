"""Find W_O of any model: trace the outputs of the heads to the first linear map that takes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

FoundCallback = Callable[[Float[Tensor, "out heads_dim"]], None]

# Functions that change the layout and no values.
_LAYOUT_FUNCTIONS = {
    *(getattr(Tensor, name) for name in (
        "transpose", "permute", "movedim", "moveaxis", "swapaxes", "swapdims", "reshape", "view", "flatten", "unflatten",
        "contiguous", "clone", "squeeze", "unsqueeze", "to", "type_as", "detach", "reshape_as", "view_as",
    )),
    *(getattr(torch, name) for name in (
        "transpose", "permute", "movedim", "moveaxis", "swapaxes", "swapdims", "reshape", "flatten", "unflatten", "clone",
        "squeeze", "unsqueeze",
    )),
}  # fmt: skip


class OutputProjectionTracer:
    """Traces tensors through torch functions, and reports the linear map that is applied to them."""

    def __init__(self) -> None:
        # by id; the tensor is kept alive while it is traced
        self._traced: dict[int, tuple[Tensor, Tensor, FoundCallback]] = {}

    def start(self, held: Tensor, outputs: Float[Tensor, "... heads queries dim"], found: FoundCallback) -> None:
        """Trace `held`, which holds the heads' outputs in some layout."""
        self._traced[id(held)] = (held, outputs, found)

    def stop(self) -> None:
        """Trace nothing."""
        self._traced.clear()

    def process_call(self, function: Any, arguments: tuple[Any, ...], result: Any) -> None:
        """Process one call of a torch function."""
        if not self._traced:
            return
        at = next((a for a in arguments[:2] if isinstance(a, Tensor) and id(a) in self._traced), None)
        if at is None:
            return
        _, outputs, found = self._traced[id(at)]
        if function in _LAYOUT_FUNCTIONS and isinstance(result, Tensor):
            self.start(result, outputs, found)
            return
        weight = _matrix_applied_to(function, arguments, at)
        if weight is not None and _is_concatenation_of_heads(at, outputs, weight):
            found(weight)
            self._traced = {key: held for key, held in self._traced.items() if held[2] is not found}


def _matrix_applied_to(function: Any, arguments: tuple[Any, ...], x: Tensor) -> Float[Tensor, "out in"] | None:
    """The matrix by which a function multiplies `x`; None for other functions."""
    if function is F.linear and arguments[0] is x:
        return arguments[1]
    if function is torch.addmm and arguments[1] is x:
        return arguments[2].T
    if function in (torch.matmul, torch.mm, Tensor.matmul, Tensor.mm, Tensor.__matmul__) and arguments[0] is x:
        return arguments[1].T if arguments[1].dim() == 2 else None
    return None


def _is_concatenation_of_heads(x: Tensor, outputs: Float[Tensor, "... heads queries dim"], weight: Tensor) -> bool:
    """Whether a row of `x` is the concatenated outputs of all heads for one query."""
    width = outputs.shape[-3] * outputs.shape[-1]
    if x.shape[-1] != width or weight.shape[-1] != width or not x.numel():
        return False
    first = outputs.reshape(-1, *outputs.shape[-3:])[0, :, 0].flatten()
    return bool(torch.equal(x.reshape(-1, width)[0], first.to(x.dtype)))
