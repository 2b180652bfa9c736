"""W_O of anyone's model: follow what the heads put out to the first linear map that takes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

Found = Callable[[Float[Tensor, "out heads_dim"]], None]

# What moves numbers to other places and changes none.
_LAYOUT = {
    *(getattr(Tensor, name) for name in (
        "transpose", "permute", "movedim", "moveaxis", "swapaxes", "swapdims", "reshape", "view", "flatten", "unflatten",
        "contiguous", "clone", "squeeze", "unsqueeze", "to", "type_as", "detach", "reshape_as", "view_as",
    )),
    *(getattr(torch, name) for name in (
        "transpose", "permute", "movedim", "moveaxis", "swapaxes", "swapdims", "reshape", "flatten", "unflatten", "clone",
        "squeeze", "unsqueeze",
    )),
}  # fmt: skip


class Tracer:
    """Watches torch functions go by, and tells who asked about the linear map behind a tensor."""

    def __init__(self) -> None:
        # by the number of a tensor, which lives as long as it is followed
        self._followed: dict[int, tuple[Tensor, Tensor, Found]] = {}

    def start(self, held: Tensor, outputs: Float[Tensor, "... heads queries dim"], found: Found) -> None:
        """Follow `held`, which holds the heads' outputs in some order."""
        self._followed[id(held)] = (held, outputs, found)

    def stop(self) -> None:
        """Forget all."""
        self._followed.clear()

    def see(self, function: Any, arguments: tuple[Any, ...], result: Any) -> None:
        """A torch function has been called."""
        if not self._followed:
            return
        at = next((a for a in arguments[:2] if isinstance(a, Tensor) and id(a) in self._followed), None)
        if at is None:
            return
        _, outputs, found = self._followed[id(at)]
        if function in _LAYOUT and isinstance(result, Tensor):
            self.start(result, outputs, found)
            return
        weight = _weight(function, arguments, at)
        if weight is not None and _is_heads_in_order(at, outputs, weight):
            found(weight)
            self._followed = {key: held for key, held in self._followed.items() if held[2] is not found}


def _weight(function: Any, arguments: tuple[Any, ...], x: Tensor) -> Float[Tensor, "out in"] | None:
    """The matrix that a function multiplies `x` with, if it is one of those that do."""
    if function is F.linear and arguments[0] is x:
        return arguments[1]
    if function is torch.addmm and arguments[1] is x:
        return arguments[2].T
    if function in (torch.matmul, torch.mm, Tensor.matmul, Tensor.mm, Tensor.__matmul__) and arguments[0] is x:
        return arguments[1].T if arguments[1].dim() == 2 else None
    return None


def _is_heads_in_order(x: Tensor, outputs: Float[Tensor, "... heads queries dim"], weight: Tensor) -> bool:
    """Whether a row of `x` is the outputs of all heads for one query, one after the other."""
    width = outputs.shape[-3] * outputs.shape[-1]
    if x.shape[-1] != width or weight.shape[-1] != width or not x.numel():
        return False
    first = outputs.reshape(-1, *outputs.shape[-3:])[0, :, 0].flatten()
    return bool(torch.equal(x.reshape(-1, width)[0], first.to(x.dtype)))
