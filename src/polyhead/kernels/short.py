"""Attention over few keys by a C++ kernel, as a torch operator: schema, shapes, gradients.

Batches of sentences are many short sequences. Each head of each sentence is computed in the cache of one core: scores,
softmax, dropout and sum in one pass. Keys outside a query's interval are skipped.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from polyhead._torch import native, native_missing_reason
from polyhead.kernels.call import (
    Call,
    OutputAndLse,
    empty_item_major,
    flatten_batch,
    key_intervals,
    pointer_and_strides,
    repeat_grouped_heads,
)
from polyhead.kernels.dropout import keep_threshold
from polyhead.kernels.fused import dot_product_refuses, with_unit_stride
from polyhead.kernels.operand_checks import check_native_qkv, check_operand
from polyhead.kernels.operator_registration import OperatorPass, register_attention_operator
from polyhead.kernels.reference import attend_intervals
from polyhead.score import Dot

# The largest number of key features per head whose intermediates fit into a core's caches.
MAX_KEY_NUMBERS = 1 << 13
# Fewer products are not worth a second thread.
_MIN_PARALLEL_WORK = 1 << 15


class Short:
    """Dot products with few keys, on the CPU: any interval of keys per query, and dropout."""

    name = "short"

    def refuses(self, call: Call) -> str | None:
        if native is None:
            return f"there are no C++ kernels: {native_missing_reason}"
        q, k, v = call.q, call.k, call.v
        if not q.is_cpu:
            return f"it runs on the CPU, and q is on {q.device.type}"
        if call.relative_bias is not None or call.bias is not None:
            return "it adds no bias"
        if not call.over.exact:
            return f"it takes intervals of keys, and {type(call.over).__name__} is a mask"
        if torch.compiler.is_exporting():
            return "it is for few keys, and an exported program must work for any number"
        if k.shape[-2] * max(k.shape[-1], v.shape[-1]) > MAX_KEY_NUMBERS:
            return f"it is for few keys, at most {MAX_KEY_NUMBERS} numbers per head"
        return dot_product_refuses(call)

    def __call__(self, call: Call) -> OutputAndLse:
        assert isinstance(call.score, Dot)
        # bf16 and fp16 are computed in fp32
        dtype = torch.promote_types(call.q.dtype, torch.float32)
        heads = math.lcm(call.k.shape[-3], call.v.shape[-3])
        q, k, v = (x.to(dtype) for x in (call.q, call.k, call.v))
        q, k, v = (
            flatten_batch(q),
            flatten_batch(repeat_grouped_heads(k, heads)),
            flatten_batch(repeat_grouped_heads(v, heads)),
        )
        first, stop = (end.clamp(0, k.shape[-2]).int() for end in key_intervals(call))
        out, lse = torch.ops.polyhead.short(
            q, k, v, first, stop, call.seed, call.score.factor(q.shape[-1]), call.dropout
        )
        if call.q.dim() != 4:
            out, lse = out.reshape(*call.q.shape[:-1], out.shape[-1]), lse.reshape(call.q.shape[:-1])
        return out.to(call.v.dtype), lse


def _native_arguments(
    q: Tensor, k: Tensor, v: Tensor, first: Tensor, stop: Tensor, seed: Tensor | None, scale: float, dropout: float
) -> dict[str, Any]:
    """The C++ arguments that both passes share."""
    check_native_qkv(q, k, v, dropout)
    batch, heads, queries, dim = q.shape
    _, key_heads, keys, width = v.shape
    rows = 1 if first.dim() and len(first) == 1 else batch
    for name, x in (("first", first), ("stop", stop)):
        if x.shape != (rows, queries) or x.dtype != torch.int32 or not x.is_cpu:
            raise ValueError(
                f"{name} must be int32 of shape ({rows}, {queries}) on the CPU, got {x.dtype} of shape {tuple(x.shape)} on {x.device}"
            )
    work = batch * heads * queries * keys * (dim + width)
    return {
        "double": q.dtype == torch.float64, "sizes": [batch, heads, key_heads, queries, keys, dim, width],
        "q": pointer_and_strides(q), "k": pointer_and_strides(k), "v": pointer_and_strides(v), "first": first.data_ptr(), "stop": stop.data_ptr(), "rows": rows,
        "scale": scale, "dropout": dropout, "threshold": keep_threshold(dropout),
        "seed": 0 if seed is None else int(seed.to(torch.int32)), "threads": torch.get_num_threads() if work > _MIN_PARALLEL_WORK else 1,
    }  # fmt: skip


def _short_forward(q: Tensor, k: Tensor, v: Tensor, first: Tensor, stop: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    q, k, v, first, stop = (
        with_unit_stride(q),
        with_unit_stride(k),
        with_unit_stride(v),
        first.contiguous(),
        stop.contiguous(),
    )
    options = _native_arguments(q, k, v, first, stop, *rest)
    out, lse = empty_item_major(q, v.shape[-1]), q.new_empty(q.shape[:3])
    native.short_forward(**options, out=pointer_and_strides(out), lse=lse.data_ptr())
    return out, lse


def _short_forward_fake(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return empty_item_major(q, v.shape[-1]), q.new_empty(q.shape[:3])


def _short_backward(
    d_out: Tensor, d_lse: Tensor | None, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, first: Tensor, stop: Tensor,
    seed: Tensor | None, scale: float, dropout: float, needed: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    d_out, q, k, v = (with_unit_stride(x) for x in (d_out, q, k, v))
    lse, first, stop = lse.contiguous(), first.contiguous(), stop.contiguous()
    d_lse = None if d_lse is None else d_lse.contiguous()
    options = _native_arguments(q, k, v, first, stop, seed, scale, dropout)
    rows = tuple(q.shape[:3])
    for name, x, shape in (("d_out", d_out, (*rows, v.shape[3])), ("lse", lse, rows), ("d_lse", d_lse, rows)):
        check_operand(name, x, shape, q)
    dq, dk, dv = empty_item_major(q), empty_item_major(k), empty_item_major(v)
    native.short_backward(
        **options, lse=lse.data_ptr(), d_out=pointer_and_strides(d_out),
        d_lse=0 if d_lse is None else d_lse.data_ptr(), dq=pointer_and_strides(dq), dk=pointer_and_strides(dk), dv=pointer_and_strides(dv),
    )  # fmt: skip
    return dq, dk, dv


def _short_backward_fake(
    d_out: Tensor, d_lse: Tensor | None, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return empty_item_major(q), empty_item_major(k), empty_item_major(v)


def _attend_by_reference(
    q: Tensor, k: Tensor, v: Tensor, first: Tensor, stop: Tensor, seed: Tensor | None, scale: float, dropout: float
) -> OutputAndLse:
    return attend_intervals(q, k, v, first, stop, None, None, None, seed, scale, dropout)


register_attention_operator(
    "short",
    "Tensor q, Tensor k, Tensor v, Tensor first, Tensor stop, Tensor? seed, float scale, float dropout",
    learned=("q", "k", "v"),
    forward=OperatorPass(_short_forward, _short_forward_fake),
    backward=OperatorPass(_short_backward, _short_backward_fake),
    definition=_attend_by_reference,
)
