"""Attention over few keys by a C++ kernel, as a torch operator: schema, shapes, gradients.

Batches of sentences are many short sequences. Each head of each sentence is computed in the cache of one core: scores,
softmax, dropout and sum in one pass. Keys outside a query's interval are skipped. A bias is read with its own strides: one that
is the same for the whole batch is not repeated, and neither is its gradient.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

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
from polyhead.kernels.dropout import keep_threshold, unpack_seed
from polyhead.kernels.fused import dot_product_refuses, with_unit_stride
from polyhead.kernels.operand_checks import check_native_qkv, check_operand
from polyhead.kernels.operator_registration import OperatorPass, register_attention_operator
from polyhead.kernels.reference import attend_intervals
from polyhead.neighbourhood import broadcasts_to
from polyhead.neighbourhood.shapes import flatten_batch_unless_shared
from polyhead.score import Dot

# The largest number of key features per head whose intermediates fit into a core's caches.
MAX_KEY_NUMBERS = 1 << 13
# Fewer products are not worth a second thread.
_MIN_PARALLEL_WORK = 1 << 15


class Short:
    """Dot products with few keys, on the CPU: any interval of keys per query, any bias, and dropout."""

    name = "short"

    def refuses(self, call: Call) -> str | None:
        if native is None:
            return f"there are no C++ kernels: {native_missing_reason}"
        q, k, v = call.q, call.k, call.v
        if not q.is_cpu:
            return f"it runs on the CPU, and q is on {q.device.type}"
        if not call.over.exact:
            return "it takes one interval of keys per query, and over needs a mask"
        if torch.compiler.is_exporting():
            return "it is for few keys, and an exported program must work for any number"
        if call.dropout > 0 and any(index is not None for index in call.item_indices):
            return "its dropout counts queries and keys from 0"
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
        table = None if call.relative_bias is None else call.relative_bias.to(dtype)
        bias = None if call.bias is None else flatten_batch_unless_shared(call.bias.to(dtype), call.sizes.batch, 3)
        out, lse = torch.ops.polyhead.short(
            q, k, v, first, stop, table, bias, call.seed_and_heads, call.score.factor(q.shape[-1]), call.dropout
        )
        if call.q.dim() != 4:
            out, lse = out.reshape(*call.q.shape[:-1], out.shape[-1]), lse.reshape(call.q.shape[:-1])
        return out.to(call.v.dtype), lse


class _Operands(NamedTuple):
    """The tensors of the operator, as C++ reads them."""

    q: Tensor
    k: Tensor
    v: Tensor
    first: Tensor
    stop: Tensor
    table: Tensor | None
    bias: Tensor | None

    def readable(self) -> _Operands:
        """Copies where features, or the keys of a bias, are not contiguous."""
        q, k, v, first, stop, table, bias = self
        table = None if table is None else table.contiguous()
        bias = bias if bias is None or bias.stride(-1) in (0, 1) else bias.contiguous()
        return _Operands(
            with_unit_stride(q),
            with_unit_stride(k),
            with_unit_stride(v),
            first.contiguous(),
            stop.contiguous(),
            table,
            bias,
        )

    def check(self, dropout: float) -> None:
        """Raise unless C++ can read them: anyone can call the operator through torch.ops."""
        q, k, v, first, stop, table, bias = self
        check_native_qkv(q, k, v, dropout)
        batch, heads, queries, _ = q.shape
        keys = k.shape[2]
        rows = self.interval_rows
        for name, x in (("first", first), ("stop", stop)):
            if x.shape != (rows, queries) or x.dtype != torch.int32 or not x.is_cpu:
                raise ValueError(
                    f"{name} must be int32 of shape ({rows}, {queries}) on the CPU, got {x.dtype} of shape {tuple(x.shape)} on {x.device}"
                )
        if table is not None:
            # distances do not broadcast
            fits = table.dim() == 2 and table.shape[0] in (1, heads) and table.shape[1] == queries + keys - 1
            _check_term("table", table, fits, (heads, queries + keys - 1), q)
        if bias is not None:
            pairs = (batch, heads, queries, keys)
            _check_term("bias", bias, bias.dim() == 4 and broadcasts_to(tuple(bias.shape), pairs), pairs, q)

    @property
    def interval_rows(self) -> int:
        return 1 if self.first.dim() and len(self.first) == 1 else self.q.shape[0]

    def terms(self, table: Tensor | None, bias: Tensor | None) -> list[int]:
        """A table and a bias, or their gradients, as C++ takes them: address and four strides each, 0 for absent tensors."""
        if table is None and bias is None:
            return []
        described = [0] * 10
        if table is not None:
            # the row of query i begins one entry before that of query i - 1
            start = table.data_ptr() + (self.q.shape[2] - 1) * table.element_size()
            described[:5] = start, 0, table.stride(0) if len(table) > 1 else 0, -1, 1
        if bias is not None:
            steps = (step if n > 1 else 0 for n, step in zip(bias.shape, bias.stride(), strict=True))
            described[5:] = bias.data_ptr(), *steps
        return described


def _check_term(name: str, x: Tensor, fits: bool, shape: tuple[int, ...], q: Tensor) -> None:
    """Raise unless a table or a bias fits and is like q."""
    if not fits or x.dtype != q.dtype or not x.is_cpu:
        raise ValueError(
            f"{name} must be {q.dtype} on the CPU, of a shape that broadcasts to {shape}, got {x.dtype} of shape {tuple(x.shape)} on "
            f"{x.device}"
        )


def _native_arguments(
    operands: _Operands, seed: Tensor | None, scale: float, dropout: float
) -> tuple[_Operands, dict[str, Any]]:
    """The operands in readable form, and the C++ arguments that both passes share."""
    operands.check(dropout)
    operands = operands.readable()
    q, k, v, first, stop, table, bias = operands
    batch, heads, queries, dim = q.shape
    _, key_heads, keys, width = v.shape
    work = batch * heads * queries * keys * (dim + width)
    seed_bits, first_head, num_heads = unpack_seed(seed, heads)
    return operands, {
        "double": q.dtype == torch.float64, "sizes": [batch, heads, key_heads, queries, keys, dim, width, first_head, num_heads],
        "q": pointer_and_strides(q), "k": pointer_and_strides(k), "v": pointer_and_strides(v), "first": first.data_ptr(), "stop": stop.data_ptr(),
        "rows": operands.interval_rows, "bias": operands.terms(table, bias), "scale": scale, "dropout": dropout, "threshold": keep_threshold(dropout),
        "seed": seed_bits, "threads": torch.get_num_threads() if work > _MIN_PARALLEL_WORK else 1,
    }  # fmt: skip


def _short_forward(*args: Any) -> tuple[Tensor, Tensor]:
    operands, options = _native_arguments(_Operands(*args[:7]), *args[7:])
    q, v = operands.q, operands.v
    out, lse = empty_item_major(q, v.shape[-1]), q.new_empty(q.shape[:3])
    native.short_forward(**options, out=pointer_and_strides(out), lse=lse.data_ptr())
    return out, lse


def _short_forward_fake(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return empty_item_major(q, v.shape[-1]), q.new_empty(q.shape[:3])


def _short_backward(d_out: Tensor, d_lse: Tensor | None, out: Tensor, lse: Tensor, *args: Any) -> tuple[Tensor, ...]:
    *options, needed = args[7:]
    operands, arguments = _native_arguments(_Operands(*args[:7]), *options)
    d_out, lse, d_lse = with_unit_stride(d_out), lse.contiguous(), None if d_lse is None else d_lse.contiguous()
    q, v = operands.q, operands.v
    rows = tuple(q.shape[:3])
    for name, x, shape in (("d_out", d_out, (*rows, v.shape[3])), ("lse", lse, rows), ("d_lse", d_lse, rows)):
        check_operand(name, x, shape, q)
    dq, dk, dv, d_table, d_bias = gradients = _empty_gradients(operands, needed)
    d_terms = operands.terms(d_table if d_table.numel() else None, d_bias if d_bias.numel() else None)
    native.short_backward(
        **arguments, lse=lse.data_ptr(), d_out=pointer_and_strides(d_out), d_lse=0 if d_lse is None else d_lse.data_ptr(),
        dq=pointer_and_strides(dq), dk=pointer_and_strides(dk), dv=pointer_and_strides(dv), d_bias=d_terms,
    )  # fmt: skip
    return gradients


def _empty_gradients(operands: _Operands, needed: list[bool]) -> tuple[Tensor, ...]:
    """The gradients, uninitialised; those of a table and a bias that are absent, or not needed, are empty."""
    q, k, v, _, _, table, bias = operands
    added = [
        q.new_empty(0) if x is None or not need else q.new_empty(x.shape)
        for x, need in zip((table, bias), needed[3:], strict=True)
    ]
    return empty_item_major(q), empty_item_major(k), empty_item_major(v), *added


def _short_backward_fake(
    d_out: Tensor, d_lse: Tensor | None, out: Tensor, lse: Tensor, *args: Any
) -> tuple[Tensor, ...]:
    return _empty_gradients(_Operands(*args[:7]), args[-1])


def _attend_by_reference(q: Tensor, k: Tensor, v: Tensor, first: Tensor, stop: Tensor, *rest: Any) -> OutputAndLse:
    table, bias, seed, scale, dropout = rest
    return attend_intervals(q, k, v, first, stop, None, table, bias, seed, None, None, scale, dropout)


register_attention_operator(
    "short",
    "Tensor q, Tensor k, Tensor v, Tensor first, Tensor stop, Tensor? table, Tensor? bias, Tensor? seed, float scale, float dropout",
    learned=("q", "k", "v", "table", "bias"),
    forward=OperatorPass(_short_forward, _short_forward_fake),
    backward=OperatorPass(_short_backward, _short_backward_fake),
    definition=_attend_by_reference,
)
