"""Neighbourhoods as mask_mods, the form in which torch's flex_attention takes a predicate.

A mask_mod gets the numbers of a row of the batch, a head, a query and a key as tensors without axes, and returns whether
the pair is allowed. It must only index tensors and compute with scalars, since it is compiled into the attention kernel.
Numbers such as the reach of a window are read from a tensor: as constants, each would need a compilation of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from polyhead._torch import can_keep_tensors
from polyhead.neighbourhood.shapes import flatten_batch_unless_shared

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

# No sequence is longer. A larger reach would overflow int32 when it is added to a position.
_LARGEST_REACH = 1 << 30
_numbers_by_device: dict[tuple[tuple[int, ...], torch.device], Tensor] = {}
_MAX_KEPT_NUMBERS = 1024


def allow_all(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """The mask_mod that allows every pair."""
    return query >= 0


def look_up(mask: Bool[Tensor, "... #heads #queries #keys"], batch: tuple[int, ...]) -> MaskMod:
    """The mask_mod that reads a mask; axes of size 1 are not read."""
    mask = flatten_batch_unless_shared(mask, batch, 3)
    varying = tuple(n != 1 for n in mask.shape)
    mask = mask[tuple(slice(None) if vary else 0 for vary in varying)]

    def is_marked(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        index = tuple(at for at, vary in zip((row, head, query, key), varying, strict=True) if vary)
        return mask[index] if index else mask & (query >= 0)

    return is_marked


def select_rows(mod: MaskMod, batch: tuple[int, ...], at: tuple[slice, ...], device: torch.device) -> MaskMod:
    """The mask_mod of some rows of a batch, from that of all its rows."""
    rows = torch.arange(math.prod(batch), device=device).reshape(batch)[at].flatten()
    return lambda row, head, query, key: mod(rows[row], head, query, key)


def in_band(left: int | None, right: int, shift: int, device: torch.device) -> MaskMod:
    """Keys from `left` before the query (None: from the first) to `right` after it; queries begin at key `shift`."""
    last = shift + torch.sym_min(right, _LARGEST_REACH)
    if left is None:
        numbers = device_numbers((last,), device)
        return lambda row, head, query, key: key <= query + numbers[0]
    numbers = device_numbers((last, shift - torch.sym_min(left, _LARGEST_REACH)), device)
    return lambda row, head, query, key: (key <= query + numbers[0]) & (key >= query + numbers[1])


def by_row(x: Int[Tensor, "rows *own"]) -> Callable[[Tensor], Tensor]:
    """The entry of a row of the batch; `x` has one row if all rows of the batch share it."""
    return (lambda row: x[0]) if x.shape[0] == 1 else (lambda row: x[row])


def device_numbers(numbers: tuple[int, ...], device: torch.device) -> Int[Tensor, " numbers"]:
    """Integers as an int32 tensor on a device, filled there: a copy from the host would wait for the device.

    They are kept, so that a call which uses the same numbers again launches nothing.
    """
    if not can_keep_tensors(device):
        return _fill(numbers, device)
    at = (numbers, device)
    if at not in _numbers_by_device:
        if len(_numbers_by_device) >= _MAX_KEPT_NUMBERS:
            _numbers_by_device.clear()
        # a tensor made in inference mode could not be saved for a backward pass later
        with torch.inference_mode(False):
            _numbers_by_device[at] = _fill(numbers, device)
    # a tensor object of its own: a compiler distinguishes calls whose arguments are one object
    return _numbers_by_device[at].detach()


def _fill(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.stack([torch.full((), number, dtype=torch.int32, device=device) for number in numbers])
