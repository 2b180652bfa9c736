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
from polyhead.kernels.fused import refuses, strided
from polyhead.neighbourhood import Grid
from polyhead.score import Dot

# Neighbours in a sequence, which needs no mask, beyond which torch's products of whole tiles are quicker.
WIDE = 256
# Fewer products are not worth a second thread.
_PARALLEL = 1 << 15


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
        q, k, v = (flat(x).to(dtype) for x in (call.q, to_heads(call.k, heads), to_heads(call.v, heads)))
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
    steps = list(over.dilation)
    reach = [min(far, (n - 1) // step) for far, n, step in zip(over.reach, over.sizes, steps, strict=True)]
    more = max(2 - len(steps), 0)
    return [1] * more + list(over.sizes), [0] * more + reach, [1] * more + steps


def _distances(sizes: Sequence[int], reach: Sequence[int], steps: Sequence[int]) -> Tensor:
    """Of each offset in a window, row by row, the place of its distance in a table."""
    place = torch.zeros(1, dtype=torch.long)
    for size, n, step in zip(sizes, reach, steps, strict=True):
        place = (place[:, None] * size + step * torch.arange(-n, n + 1)).flatten()
    return place + (math.prod(sizes) - 1)


_INPUTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? table, Tensor? seed, int[] sizes, int[] reach, int[] steps, float scale, "
    "float dropout"
)
# torch.library.custom_op would import the whole compiler at the first call
_library = torch.library.Library("polyhead", "FRAGMENT")
_library.define(f"grid({_INPUTS}) -> (Tensor, Tensor)")
_library.define(
    f"grid_backward(Tensor d_out, Tensor? d_lse, Tensor out, Tensor lse, {_INPUTS}) -> (Tensor, Tensor, Tensor, Tensor)"
)


def _options(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, table: Tensor | None, seed: Tensor | None, sizes: list[int],
    reach: list[int], steps: list[int], scale: float, dropout: float,
) -> dict[str, Any]:  # fmt: skip
    """The arguments that both passes share."""
    batch, heads, points, dim = q.shape
    offsets = math.prod(2 * n + 1 for n in reach)
    assert points == k.shape[2] == v.shape[2] == math.prod(sizes) and len(sizes) == len(reach) == len(steps) >= 2
    assert table is None or (table.shape == (heads, offsets) and table.is_contiguous()), "out of bounds"
    work = batch * heads * points * offsets * (dim + v.shape[3])
    return {
        "double": q.dtype == torch.float64, "sizes": [batch, heads, k.shape[1], dim, v.shape[3]],
        "window": [*sizes, *reach, *steps], "q": axes(q), "k": axes(k), "v": axes(v), "out": axes(out),
        "lse": lse.data_ptr(), "table": 0 if table is None else table.data_ptr(), "scale": scale, "dropout": dropout,
        "threshold": round(dropout * 2**32) - 2**31, "seed": 0 if seed is None else int(seed.to(torch.int32)),
        "threads": torch.get_num_threads() if work > _PARALLEL else 1,
    }  # fmt: skip


@torch.library.impl("polyhead::grid", "cpu", lib=_library)
def _grid(q: Tensor, k: Tensor, v: Tensor, table: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor]:
    q, k, v, table = strided(q), strided(k), strided(v), _packed(table)
    out, lse = room(q, v.shape[-1]), q.new_empty(q.shape[:3])
    native.grid_forward(**_options(q, k, v, out, lse, table, *rest))
    return out, lse


@torch.library.register_fake("polyhead::grid", lib=_library)
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return room(q, v.shape[-1]), q.new_empty(q.shape[:3])


@torch.library.impl("polyhead::grid_backward", "cpu", lib=_library)
def _grid_backward(
    d_out: Tensor, d_lse: Tensor | None, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, table: Tensor | None,
    *rest: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    d_out, out, q, k, v = (strided(x) for x in (d_out, out, q, k, v))
    lse, table, d_lse = lse.contiguous(), _packed(table), _packed(d_lse)
    dq, dk, dv = room(q), room(k), room(v)
    d_table = q.new_empty(0) if table is None else torch.empty_like(table)
    native.grid_backward(
        **_options(q, k, v, out, lse, table, *rest), d_out=axes(d_out), d_lse=0 if d_lse is None else d_lse.data_ptr(),
        dq=axes(dq), dk=axes(dk), dv=axes(dv), d_table=d_table.data_ptr(),
    )  # fmt: skip
    return dq, dk, dv, d_table


def _packed(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


@torch.library.register_fake("polyhead::grid_backward", lib=_library)
def _(
    d_out: Tensor, d_lse: Tensor | None, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, table: Tensor | None,
    *_: Any,
) -> Any:  # fmt: skip
    return room(q), room(k), room(v), q.new_empty(0) if table is None else table.new_empty(table.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:5], *output)
    ctx.options = inputs[5:]


def _backward(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None) -> tuple[Any, ...]:
    *tensors, out, lse = ctx.saved_tensors
    d_out = torch.zeros_like(out) if d_out is None else d_out
    *given, d_table = torch.ops.polyhead.grid_backward(d_out, d_lse, out, lse, *tensors, *ctx.options)
    return (*given, None if tensors[3] is None else d_table, *(None,) * 6)


def _no_second_derivatives(ctx: Any, *gradients: Any) -> Any:
    raise RuntimeError(
        "the kernel for grids has first derivatives only; for second ones call attend(…, kernel='reference'), or torch.func"
    )


# without a rule of its own it would count as constant, and second derivatives as zero
torch.library.register_autograd("polyhead::grid_backward", _no_second_derivatives, lib=_library)
torch.library.register_autograd("polyhead::grid", _backward, setup_context=_save, lib=_library)
