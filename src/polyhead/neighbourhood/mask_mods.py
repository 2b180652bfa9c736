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

from polyhead._torch import can_keep_tensors, current_stream_id
from polyhead.neighbourhood.shapes import flatten_batch_unless_shared

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

# No sequence is longer. A larger reach would overflow int32 when it is added to a position.
_LARGEST_REACH = 1 << 30
_kept_numbers: dict[tuple[str, tuple[int, ...], torch.device, int], tuple[Tensor, ...]] = {}
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
        (after,) = device_numbers("band", (last,), device)
        return lambda row, head, query, key: key <= query + after
    before, after = device_numbers("band", (shift - torch.sym_min(left, _LARGEST_REACH), last), device)
    return lambda row, head, query, key: (key >= query + before) & (key <= query + after)


def by_row(x: Int[Tensor, "rows *own"]) -> Callable[[Tensor], Tensor]:
    """The entry of a row of the batch; `x` has one row if all rows of the batch share it."""
    if x.shape[0] > 1:
        return lambda row: x[row]
    # an index that is a constant would become a tensor inside of the kernel
    shared = x[0]
    return lambda row: shared


def device_numbers(role: str, numbers: tuple[int, ...], device: torch.device) -> tuple[Int[Tensor, ""], ...]:
    """Integers as int32 tensors without axes, filled on the device: a copy from the host would wait for it.

    They are kept, so that a call which uses the same numbers again launches nothing. `role` is what they are for: a
    compiler distinguishes calls by which arguments are one object.
    """
    if not can_keep_tensors(device):
        return _fill(numbers, device)
    at = (role, numbers, device, current_stream_id(device))
    kept = _kept_numbers.get(at)
    if kept is None:
        # a tensor made in inference mode could not be saved for a backward pass later
        with torch.inference_mode(False):
            kept = _fill(numbers, device)
        if len(_kept_numbers) >= _MAX_KEPT_NUMBERS:
            _kept_numbers.clear()
        _kept_numbers[at] = kept
    return kept


def _fill(numbers: tuple[int, ...], device: torch.device) -> tuple[Tensor, ...]:
    return tuple(torch.full((), number, dtype=torch.int32, device=device) for number in numbers)
