"""Attention over the windows of a grid by a C++ kernel, as a torch operator: schema, shapes, gradients.

Only pairs inside a window are computed. A SIMD vector holds adjacent queries, so that their keys at one offset are one load.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from polyhead._torch import native, native_missing_reason
from polyhead.kernels.call import (
    Call,
    OutputAndLse,
    empty_item_major,
    flatten_batch,
    global_indices_of,
    pointer_and_strides,
    repeat_grouped_heads,
)
from polyhead.kernels.dropout import keep_threshold, unpack_seed
from polyhead.kernels.fused import dot_product_refuses, with_unit_stride
from polyhead.kernels.offsets import attend_gathered
from polyhead.kernels.operand_checks import check_native_qkv, check_operand
from polyhead.kernels.operator_registration import OperatorPass, register_attention_operator
from polyhead.neighbourhood import Grid
from polyhead.score import Dot

# For wider windows along a sequence, which need no mask, torch's matrix products of whole tiles are faster.
MAX_SEQUENCE_WINDOW = 256
# Fewer products are not worth a second thread.
_MIN_PARALLEL_WORK = 1 << 15
# More pairs are refused: they would take years, and their counts could overflow 64 bits in C++.
_MAX_PAIRS = 1 << 52


class GridNative:
    """Dot products over a window around each point of a grid, on the CPU, with dropout and a relative bias."""

    name = "grid"

    def refuses(self, call: Call) -> str | None:
        if native is None:
            return f"there are no C++ kernels: {native_missing_reason}"
        if not call.q.is_cpu:
            return f"it runs on the CPU, and q is on {call.q.device.type}"
        over = call.over
        assert isinstance(over, Grid)
        if over.window is None:
            return "there is no window"
        if over.outputs != over.sizes or max(over.stride) > 1:
            return "its queries must be all points of the grid, without a stride"
        if over.prefix:
            return "it does not support prefix tokens"
        if call.dropout > 0 and any(index is not None for index in call.item_indices):
            return "its dropout counts queries and keys from 0"
        if call.bias is not None:
            return "the only bias it adds is a relative bias"
        if (
            over.exact
            and 2 * over.reach[0] + 1 > MAX_SEQUENCE_WINDOW
            and call.relative_bias is None
            and call.dropout == 0
        ):
            return f"windows of more than {MAX_SEQUENCE_WINDOW} along a sequence are faster in whole tiles"
        return dot_product_refuses(call)

    def __call__(self, call: Call) -> OutputAndLse:
        over = call.over
        assert isinstance(call.score, Dot) and isinstance(over, Grid)
        # bf16 and fp16 are computed in fp32
        dtype = torch.promote_types(call.q.dtype, torch.float32)
        heads = math.lcm(call.k.shape[-3], call.v.shape[-3])
        q, k, v = (x.to(dtype) for x in (call.q, call.k, call.v))
        q, k, v = (
            flatten_batch(q),
            flatten_batch(repeat_grouped_heads(k, heads)),
            flatten_batch(repeat_grouped_heads(v, heads)),
        )
        window = _window_geometry(over)
        table = None if call.relative_bias is None else call.relative_bias.to(dtype)[:, window.distances()]
        out, lse = torch.ops.polyhead.grid(
            q, k, v, table, call.seed_and_heads, *window, call.score.factor(q.shape[-1]), call.dropout
        )
        if call.q.dim() != 4:
            out, lse = out.reshape(*call.q.shape[:-1], out.shape[-1]), lse.reshape(call.q.shape[:-1])
        return out.to(call.v.dtype), lse


class _WindowGeometry(NamedTuple):
    """The windows of a grid with two or more axes: per axis the points, the neighbours to each side, and the dilation."""

    sizes: list[int]
    reach: list[int]
    steps: list[int]

    @property
    def num_offsets(self) -> int:
        return math.prod(2 * n + 1 for n in self.reach)

    def distances(self) -> Tensor:
        """For each offset in a window, in row-major order, the index of its distance in a relative bias."""
        index = torch.zeros(1, dtype=torch.long)
        for size, n, step in zip(*self, strict=True):
            index = (index[:, None] * size + step * torch.arange(-n, n + 1)).flatten()
        return index + (math.prod(self.sizes) - 1)

    def check(self, queries: int, keys: int) -> None:
        """Raise unless the windows fit a grid of this many points, and counts of pairs fit into 64 bits."""
        sizes, reach, steps = self
        fits = len(sizes) == len(reach) == len(steps) >= 2 and min(sizes) > 0 and min(steps) > 0 and min(reach) >= 0
        fits = fits and math.prod(sizes) == queries == keys
        fits = fits and all(far * step < n for n, far, step in zip(sizes, reach, steps, strict=True))
        if not fits or queries * self.num_offsets >= _MAX_PAIRS:
            raise ValueError(
                "sizes, reach and steps must be 1, 0 and 1 or more for each of two axes or more, with windows no larger than the grid and "
                f"as many points as q and k have, got {sizes}, {reach} and {steps}, and {queries} and {keys} points"
            )


def _window_geometry(over: Grid) -> _WindowGeometry:
    """The windows of `over`, with axes of size 1 prepended to make two. A reach is at most the size of the grid."""
    steps = over.dilation
    reach = [min(far, (n - 1) // step) for far, n, step in zip(over.reach, over.sizes, steps, strict=True)]
    missing = max(2 - len(steps), 0)
    return _WindowGeometry(
        [1] * missing + list(over.sizes), [0] * missing + reach, [1] * missing + _relevant_dilation(reach, steps)
    )


def _relevant_dilation(reach: Sequence[int], steps: Sequence[int]) -> list[int]:
    """The dilation of each axis, set to 1 where a window has a single point and it does not matter."""
    return [step if far else 1 for far, step in zip(reach, steps, strict=True)]


def _native_arguments(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, table: Tensor | None, seed: Tensor | None, window: _WindowGeometry,
    scale: float, dropout: float,
) -> dict[str, Any]:  # fmt: skip
    """The C++ arguments that both passes share."""
    check_native_qkv(q, k, v, dropout)
    batch, heads, points, dim = q.shape
    window.check(points, k.shape[2])
    offsets = window.num_offsets
    check_operand("table", table, (heads, offsets), q)
    check_operand("out", out, (*q.shape[:3], v.shape[3]), q)
    check_operand("lse", lse, tuple(q.shape[:3]), q)
    work = batch * heads * points * offsets * (dim + v.shape[3])
    seed_bits, first_head, num_heads = unpack_seed(seed, heads)
    return {
        "double": q.dtype == torch.float64, "sizes": [batch, heads, k.shape[1], dim, v.shape[3], first_head, num_heads],
        "window": [*window.sizes, *window.reach, *_relevant_dilation(window.reach, window.steps)], "q": pointer_and_strides(q),
        "k": pointer_and_strides(k), "v": pointer_and_strides(v), "out": pointer_and_strides(out), "lse": lse.data_ptr(),
        "table": 0 if table is None else table.data_ptr(), "scale": scale, "dropout": dropout,
        "threshold": keep_threshold(dropout), "seed": seed_bits,
        "threads": torch.get_num_threads() if work > _MIN_PARALLEL_WORK else 1,
    }  # fmt: skip


def _grid_forward(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor | None, seed: Tensor | None, sizes: list[int], reach: list[int],
    steps: list[int], scale: float, dropout: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    q, k, v, table = with_unit_stride(q), with_unit_stride(k), with_unit_stride(v), _contiguous_or_none(table)
    out, lse = empty_item_major(q, v.shape[-1]), q.new_empty(q.shape[:3])
    native.grid_forward(
        **_native_arguments(q, k, v, out, lse, table, seed, _WindowGeometry(sizes, reach, steps), scale, dropout)
    )
    return out, lse


def _grid_forward_fake(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return empty_item_major(q, v.shape[-1]), q.new_empty(q.shape[:3])


def _grid_backward(
    d_out: Tensor, d_lse: Tensor | None, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, table: Tensor | None,
    *rest: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    seed, sizes, reach, steps, scale, dropout, _ = rest
    d_out, out, q, k, v = (with_unit_stride(x) for x in (d_out, out, q, k, v))
    lse, table, d_lse = lse.contiguous(), _contiguous_or_none(table), _contiguous_or_none(d_lse)
    options = _native_arguments(q, k, v, out, lse, table, seed, _WindowGeometry(sizes, reach, steps), scale, dropout)
    check_operand("d_out", d_out, tuple(out.shape), q)
    check_operand("d_lse", d_lse, tuple(lse.shape), q)
    dq, dk, dv = empty_item_major(q), empty_item_major(k), empty_item_major(v)
    d_table = q.new_empty(0) if table is None else torch.empty_like(table)
    native.grid_backward(
        **options, d_out=pointer_and_strides(d_out), d_lse=0 if d_lse is None else d_lse.data_ptr(),
        dq=pointer_and_strides(dq), dk=pointer_and_strides(dk), dv=pointer_and_strides(dv), d_table=d_table.data_ptr(),
    )  # fmt: skip
    return dq, dk, dv, d_table


def _contiguous_or_none(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def _grid_backward_fake(
    d_out: Tensor, d_lse: Tensor | None, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, table: Tensor | None,
    *_: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    return (
        empty_item_major(q),
        empty_item_major(k),
        empty_item_major(v),
        q.new_empty(0) if table is None else table.new_empty(table.shape),
    )


def _attend_by_gathering(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor | None, seed: Tensor | None, sizes: list[int], reach: list[int],
    steps: list[int], scale: float, dropout: float,
) -> OutputAndLse:  # fmt: skip
    """The same attention by gathering the keys and values of each window."""
    over = Grid(*sizes, window=[2 * n + 1 for n in reach], dilation=steps)
    if table is not None:
        distances = table.new_zeros(table.shape[0], 2 * math.prod(sizes) - 1)
        table = distances.index_copy(1, _WindowGeometry(sizes, reach, steps).distances(), table)
    single = None if seed is None else seed.reshape(-1)[0]
    call = Call(q, k, v, over, Dot(scale), table, None, None, dropout, single, global_indices_of(seed))
    index = over.window_index(q.device).expand(q.shape[1], -1, -1)
    return attend_gathered(call, index)


register_attention_operator(
    "grid",
    "Tensor q, Tensor k, Tensor v, Tensor? table, Tensor? seed, int[] sizes, int[] reach, int[] steps, float scale, float dropout",
    learned=("q", "k", "v", "table"),
    forward=OperatorPass(_grid_forward, _grid_forward_fake),
    backward=OperatorPass(_grid_backward, _grid_backward_fake),
    definition=_attend_by_gathering,
)
