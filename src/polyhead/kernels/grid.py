"""Attention over the windows of a grid by a C++ kernel, as a torch operator: schema, shapes, gradients.

Only pairs inside of a window are computed. A vector holds queries side by side, so that all keys at one distance from them are
one load.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from polyhead._torch import missing, native
from polyhead.kernels.call import Call, Result, axes, flat, room, to_heads
from polyhead.kernels.dropout import threshold
from polyhead.kernels.fused import refuses, strided
from polyhead.kernels.offsets import attend_gathered
from polyhead.kernels.operand_checks import check_native_operands, check_operand
from polyhead.kernels.operator_registration import define_attention
from polyhead.neighbourhood import Grid
from polyhead.score import Dot

# Neighbours in a sequence, which needs no mask, beyond which torch's products of whole tiles are quicker.
WIDE = 256
# Fewer products are not worth a second thread.
_PARALLEL = 1 << 15
# Pairs of points, in windows of many axes: nobody lives to see so many computed, and C++ counts parts of more in 64 bits.
_MOST = 1 << 52


class OnGrid:
    """Dot products over a window around each point of a grid, on the CPU, with dropout and a table of distances."""

    name = "grid"

    def refuses(self, call: Call) -> str | None:
        if native is None:
            return f"there are no C++ kernels: {missing}"
        if not call.q.is_cpu:
            return f"it runs on the CPU, and q is on {call.q.device.type}"
        over = call.over
        assert isinstance(over, Grid)
        if over.window is None:
            return "there is no window"
        if over.outputs != over.sizes or max(over.stride) > 1:
            return "its queries are all points of the grid, without a stride"
        if over.prefix:
            return "it knows no tokens before the points"
        if call.bias is not None:
            return "it adds no bias but a table of distances"
        if over.exact and 2 * over.reach[0] + 1 > WIDE and call.table is None and call.dropout == 0:
            return f"windows of more than {WIDE} along a sequence are quicker in whole tiles"
        return refuses(call)

    def __call__(self, call: Call) -> Result:
        over = call.over
        assert isinstance(call.score, Dot) and isinstance(over, Grid)
        # halves are computed in fp32
        dtype = torch.promote_types(call.q.dtype, torch.float32)
        heads = math.lcm(call.k.shape[-3], call.v.shape[-3])
        q, k, v = (x.to(dtype) for x in (call.q, call.k, call.v))
        q, k, v = flat(q), flat(to_heads(k, heads)), flat(to_heads(v, heads))
        sizes, reach, steps = _window(over)
        table = None if call.table is None else call.table.to(dtype)[:, _distances(sizes, reach, steps)]
        out, lse = torch.ops.polyhead.grid(
            q, k, v, table, call.seed, sizes, reach, steps, call.score.factor(q.shape[-1]), call.dropout
        )
        if call.q.dim() != 4:
            out, lse = out.reshape(*call.q.shape[:-1], out.shape[-1]), lse.reshape(call.q.shape[:-1])
        return out.to(call.v.dtype), lse


def _window(over: Grid) -> tuple[list[int], list[int], list[int]]:
    """Sizes, reach and dilation of two axes or more; no reach goes beyond the grid from all of its points."""
    steps = over.dilation
    reach = [min(far, (n - 1) // step) for far, n, step in zip(over.reach, over.sizes, steps, strict=True)]
    more = max(2 - len(steps), 0)
    return [1] * more + list(over.sizes), [0] * more + reach, [1] * more + _steps(reach, steps)


def _steps(reach: Sequence[int], steps: Sequence[int]) -> list[int]:
    """The dilation of each axis; it does not matter where a window has a single point."""
    return [step if far else 1 for far, step in zip(reach, steps, strict=True)]


def _distances(sizes: Sequence[int], reach: Sequence[int], steps: Sequence[int]) -> Tensor:
    """Of each offset in a window, row by row, the place of its distance in a table."""
    place = torch.zeros(1, dtype=torch.long)
    for size, n, step in zip(sizes, reach, steps, strict=True):
        place = (place[:, None] * size + step * torch.arange(-n, n + 1)).flatten()
    return place + (math.prod(sizes) - 1)


def _options(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, table: Tensor | None, seed: Tensor | None, sizes: list[int],
    reach: list[int], steps: list[int], scale: float, dropout: float,
) -> dict[str, Any]:  # fmt: skip
    """The arguments that both passes share."""
    check_native_operands(q, k, v, dropout)
    batch, heads, points, dim = q.shape
    _check_window(sizes, reach, steps, points, k.shape[2])
    offsets = math.prod(2 * n + 1 for n in reach)
    check_operand("table", table, (heads, offsets), q)
    check_operand("out", out, (*q.shape[:3], v.shape[3]), q)
    check_operand("lse", lse, tuple(q.shape[:3]), q)
    work = batch * heads * points * offsets * (dim + v.shape[3])
    return {
        "double": q.dtype == torch.float64, "sizes": [batch, heads, k.shape[1], dim, v.shape[3]],
        "window": [*sizes, *reach, *_steps(reach, steps)], "q": axes(q), "k": axes(k), "v": axes(v), "out": axes(out),
        "lse": lse.data_ptr(), "table": 0 if table is None else table.data_ptr(), "scale": scale, "dropout": dropout,
        "threshold": threshold(dropout), "seed": 0 if seed is None else int(seed.to(torch.int32)),
        "threads": torch.get_num_threads() if work > _PARALLEL else 1,
    }  # fmt: skip


def _check_window(sizes: list[int], reach: list[int], steps: list[int], queries: int, keys: int) -> None:
    """Raise unless windows lie on a grid of so many points, and numbers about all of them in 64 bits."""
    fits = len(sizes) == len(reach) == len(steps) >= 2 and min(sizes) > 0 and min(steps) > 0 and min(reach) >= 0
    fits = fits and math.prod(sizes) == queries == keys
    fits = fits and all(far * step < n for n, far, step in zip(sizes, reach, steps, strict=True))
    if not fits or queries * math.prod(2 * n + 1 for n in reach) >= _MOST:
        raise ValueError(
            "sizes, reach and steps must be 1, 0 and 1 or more for each of two axes or more, with windows no larger than the grid and "
            f"as many points as q and k have, got {sizes}, {reach} and {steps}, and {queries} and {keys} points"
        )


def _grid(q: Tensor, k: Tensor, v: Tensor, table: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor]:
    q, k, v, table = strided(q), strided(k), strided(v), _packed(table)
    out, lse = room(q, v.shape[-1]), q.new_empty(q.shape[:3])
    native.grid_forward(**_options(q, k, v, out, lse, table, *rest))
    return out, lse


def _grid_fake(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return room(q, v.shape[-1]), q.new_empty(q.shape[:3])


def _grid_backward(
    d_out: Tensor, d_lse: Tensor | None, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, table: Tensor | None,
    *rest: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    *window, _ = rest
    d_out, out, q, k, v = (strided(x) for x in (d_out, out, q, k, v))
    lse, table, d_lse = lse.contiguous(), _packed(table), _packed(d_lse)
    options = _options(q, k, v, out, lse, table, *window)
    check_operand("d_out", d_out, tuple(out.shape), q)
    check_operand("d_lse", d_lse, tuple(lse.shape), q)
    dq, dk, dv = room(q), room(k), room(v)
    d_table = q.new_empty(0) if table is None else torch.empty_like(table)
    native.grid_backward(
        **options, d_out=axes(d_out), d_lse=0 if d_lse is None else d_lse.data_ptr(),
        dq=axes(dq), dk=axes(dk), dv=axes(dv), d_table=d_table.data_ptr(),
    )  # fmt: skip
    return dq, dk, dv, d_table


def _packed(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def _grid_backward_fake(
    d_out: Tensor, d_lse: Tensor | None, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, table: Tensor | None,
    *_: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    return room(q), room(k), room(v), q.new_empty(0) if table is None else table.new_empty(table.shape)


def _definition(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor | None, seed: Tensor | None, sizes: list[int], reach: list[int],
    steps: list[int], scale: float, dropout: float,
) -> Result:  # fmt: skip
    """The same by gathering the keys and values of each window."""
    over = Grid(*sizes, window=[2 * n + 1 for n in reach], dilation=steps)
    if table is not None:
        distances = table.new_zeros(table.shape[0], 2 * math.prod(sizes) - 1)
        table = distances.index_copy(1, _distances(sizes, reach, steps), table)
    call = Call(q, k, v, over, Dot(scale), table, None, None, dropout, seed)
    index = over.window_index(q.device).expand(q.shape[1], -1, -1)
    return attend_gathered(call, index)


define_attention(
    "grid",
    "Tensor q, Tensor k, Tensor v, Tensor? table, Tensor? seed, int[] sizes, int[] reach, int[] steps, float scale, float dropout",
    learned=("q", "k", "v", "table"),
    forward=_grid,
    forward_fake=_grid_fake,
    backward=_grid_backward,
    backward_fake=_grid_backward_fake,
    definition=_definition,
)
