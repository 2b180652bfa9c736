"""Attention over few keys by a C++ kernel, as a torch operator: schema, shapes, gradients.

Short sequences are what batches of sentences are made of. Each head of each sentence is computed in a core's own cache:
scores, softmax, dropout and sum in one visit, with what lies outside of a query's interval of keys left out.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from polyhead._torch import missing, native
from polyhead.kernels.call import Call, Result, axes, flat, intervals, room, to_heads
from polyhead.kernels.dropout import threshold
from polyhead.kernels.fused import refuses, strided
from polyhead.kernels.operand_checks import check_native_operands, check_operand
from polyhead.kernels.operator_registration import define_attention
from polyhead.kernels.reference import attend_intervals
from polyhead.score import Dot

# Numbers of one head's keys: what is made of them fits into a core's caches.
FEW = 1 << 13
# Fewer products are not worth a second thread.
_PARALLEL = 1 << 15


class Short:
    """Dot products with few keys, on the CPU: any stretch of keys a query, and dropout."""

    name = "short"

    def refuses(self, call: Call) -> str | None:
        if native is None:
            return f"there are no C++ kernels: {missing}"
        q, k, v = call.q, call.k, call.v
        if not q.is_cpu:
            return f"it runs on the CPU, and q is on {q.device.type}"
        if call.table is not None or call.bias is not None:
            return "it adds no bias"
        if not call.over.exact:
            return f"it takes stretches of keys, and {type(call.over).__name__} is a mask"
        if torch.compiler.is_exporting():
            return "it is for few keys, and an exported program serves any number"
        if k.shape[-2] * max(k.shape[-1], v.shape[-1]) > FEW:
            return f"it is for few keys, at most {FEW} numbers a head"
        return refuses(call)

    def __call__(self, call: Call) -> Result:
        assert isinstance(call.score, Dot)
        # halves are computed in fp32
        dtype = torch.promote_types(call.q.dtype, torch.float32)
        heads = math.lcm(call.k.shape[-3], call.v.shape[-3])
        q, k, v = (x.to(dtype) for x in (call.q, call.k, call.v))
        q, k, v = flat(q), flat(to_heads(k, heads)), flat(to_heads(v, heads))
        first, stop = (end.clamp(0, k.shape[-2]).int() for end in intervals(call))
        out, lse = torch.ops.polyhead.short(
            q, k, v, first, stop, call.seed, call.score.factor(q.shape[-1]), call.dropout
        )
        if call.q.dim() != 4:
            out, lse = out.reshape(*call.q.shape[:-1], out.shape[-1]), lse.reshape(call.q.shape[:-1])
        return out.to(call.v.dtype), lse


def _options(
    q: Tensor, k: Tensor, v: Tensor, first: Tensor, stop: Tensor, seed: Tensor | None, scale: float, dropout: float
) -> dict[str, Any]:
    """The arguments that both passes share."""
    check_native_operands(q, k, v, dropout)
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
        "q": axes(q), "k": axes(k), "v": axes(v), "first": first.data_ptr(), "stop": stop.data_ptr(), "rows": rows,
        "scale": scale, "dropout": dropout, "threshold": threshold(dropout),
        "seed": 0 if seed is None else int(seed.to(torch.int32)), "threads": torch.get_num_threads() if work > _PARALLEL else 1,
    }  # fmt: skip


def _short(q: Tensor, k: Tensor, v: Tensor, first: Tensor, stop: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    q, k, v, first, stop = strided(q), strided(k), strided(v), first.contiguous(), stop.contiguous()
    options = _options(q, k, v, first, stop, *rest)
    out, lse = room(q, v.shape[-1]), q.new_empty(q.shape[:3])
    native.short_forward(**options, out=axes(out), lse=lse.data_ptr())
    return out, lse


def _short_fake(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return room(q, v.shape[-1]), q.new_empty(q.shape[:3])


def _short_backward(
    d_out: Tensor, d_lse: Tensor | None, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, first: Tensor, stop: Tensor,
    seed: Tensor | None, scale: float, dropout: float, needed: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    d_out, q, k, v = (strided(x) for x in (d_out, q, k, v))
    lse, first, stop = lse.contiguous(), first.contiguous(), stop.contiguous()
    d_lse = None if d_lse is None else d_lse.contiguous()
    options = _options(q, k, v, first, stop, seed, scale, dropout)
    rows = tuple(q.shape[:3])
    for name, x, shape in (("d_out", d_out, (*rows, v.shape[3])), ("lse", lse, rows), ("d_lse", d_lse, rows)):
        check_operand(name, x, shape, q)
    dq, dk, dv = room(q), room(k), room(v)
    native.short_backward(
        **options, lse=lse.data_ptr(), d_out=axes(d_out),
        d_lse=0 if d_lse is None else d_lse.data_ptr(), dq=axes(dq), dk=axes(dk), dv=axes(dv),
    )  # fmt: skip
    return dq, dk, dv


def _short_backward_fake(
    d_out: Tensor, d_lse: Tensor | None, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return room(q), room(k), room(v)


def _definition(
    q: Tensor, k: Tensor, v: Tensor, first: Tensor, stop: Tensor, seed: Tensor | None, scale: float, dropout: float
) -> Result:
    return attend_intervals(q, k, v, first, stop, None, None, None, seed, scale, dropout)


define_attention(
    "short",
    "Tensor q, Tensor k, Tensor v, Tensor first, Tensor stop, Tensor? seed, float scale, float dropout",
    learned=("q", "k", "v"),
    forward=_short,
    forward_fake=_short_fake,
    backward=_short_backward,
    backward_fake=_short_backward_fake,
    definition=_definition,
)
