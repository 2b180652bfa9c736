"""torch's fused attention, for calls that need no mask."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from polyhead._torch import can_branch_on_values, native, under_transform
from polyhead.kernels.call import Call, OutputAndLse, flatten_batch, repeat_grouped_heads
from polyhead.kernels.operator_registration import differentiate_definition
from polyhead.kernels.reference import Reference
from polyhead.linalg.foreach import small_tensors_finite
from polyhead.neighbourhood import Causal, Dense
from polyhead.score import Dot

flash_attention_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
# Beyond this ratio of key to value width, padding the narrower one costs more than the fused kernel saves.
MAX_WIDTH_RATIO = 2
# From this many queries on, the log-sum-exp is worth the slower call of the operator itself.
MIN_QUERIES_FOR_LSE = 128
# Heads with at most this many features and keys are faster in `short`, from this many pairs on: its call costs more.
NARROW_HEAD, FEW_KEYS, MANY_PAIRS = 16, 128, 1 << 18
# The largest SIMD width of torch's kernel on any CPU, in numbers.
SIMD_WIDTH = 16
# Up to this many numbers are checked within a few microseconds.
MAX_CHECKED_NUMBERS = 1 << 14
# The smallest scale that is a normal number in fp32.
MIN_SCALE = torch.finfo(torch.float32).tiny


class Fused:
    """One call of torch's flash attention operator or `scaled_dot_product_attention`: all pairs, or a causal triangle."""

    name = "fused"

    def refuses(self, call: Call) -> str | None:
        q, k, v, over, _, table, bias, sink, dropout, *_ = call
        if not over.full and not (type(over) is Causal and q.shape[-2] in (k.shape[-2], 1)):
            return "it supports only full or causal attention"
        if table is not None or bias is not None:
            return "it adds no bias"
        if dropout > 0:
            return "it does not implement dropout"
        if sink is not None and (not q.is_cpu or torch.is_grad_enabled()):
            return "a sink needs the log-sum-exp and its gradient"
        if not can_pad_widths(q.shape[-1], v.shape[-1]):
            return f"keys of {q.shape[-1]} and values of {v.shape[-1]} features are too different to pad"
        if _is_faster_in_short(call):
            return f"many heads of {q.shape[-1]} features and {k.shape[-2]} keys are faster in `short`"
        return dot_product_refuses(call)

    def __call__(self, call: Call) -> OutputAndLse:
        assert isinstance(call.score, Dot)
        shape, width = call.q.shape, call.v.shape[-1]
        causal = type(call.over) is Causal
        # A single query sees all keys. An `and` of the two conditions would be traced as a number.
        if causal and shape[-2] != call.k.shape[-2]:
            causal = False
        q, scale = call.q, call.score.factor(shape[-1])
        if scale < MIN_SCALE:
            q, scale = with_positive_scale(q, scale)
        q, k, v = match_widths_and_heads(q, call.k, call.v)
        if len(shape) != 4:
            q, k, v = flatten_batch(q), flatten_batch(k), flatten_batch(v)
        # Torch's kernel treats NaN as docs/attend.md says, unless keys are few or hidden. A compiler would specialise on their number.
        compiling = torch.compiler.is_compiling()
        doubtful = not compiling and q.is_cpu and (causal or k.shape[-2] < SIMD_WIDTH) and not _known_finite(q, k, v)
        mask = nan_preserving_mask(q, k) if doubtful else None
        # torch's function does not combine a mask with is_causal
        if q.is_cpu and (_uses_lse_operator(call) or (causal and mask is not None)):
            out, lse = flash_attention_cpu(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)
            # saves the head metrics a pass; gradients do not go through it
            lse = lse.detach() if call.sink is None else lse
        else:
            # the comparison itself would be traced as a number
            grouped = True if k.shape[1] != shape[-3] else False  # noqa: SIM210
            out = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=grouped
            )
            lse = None
        if causal and doubtful and _nan_may_leak(q, k, out):
            from polyhead.kernels.tiled import Tiled  # tiled imports this file

            return Tiled()(call)
        if out.requires_grad and not compiling:
            _allow_second_derivatives(out)
        if len(shape) != 4:
            out = out.reshape(*shape[:-1], out.shape[-1])
            lse = None if lse is None else lse.reshape(shape[:-1])
        return (out if width >= shape[-1] else out[..., :width]), lse


def _allow_second_derivatives(out: Tensor) -> None:
    """Send a backward pass that is itself recorded through the definition: torch's kernel has first derivatives only.

    A hook on torch's own node costs 3 µs; an autograd function around the kernel would cost 30.
    """
    node: Any = out.grad_fn
    # the other kernels of scaled_dot_product_attention can be differentiated twice
    if node.name() == "ScaledDotProductFlashAttentionForCpuBackward0":
        node.register_hook(_differentiate_again)


def _differentiate_again(
    gradients: tuple[Tensor | None, ...], towards: tuple[Tensor | None, ...]
) -> tuple[Tensor | None, ...] | None:
    """The gradients of the kernel's node in differentiable form, or None (no change) if the backward pass is not recorded."""
    if not torch.is_grad_enabled():
        return None
    # the node holds its tensors only while the graph is retained
    node: Any = torch._C._current_autograd_node()
    over, score = Causal() if node._saved_is_causal else Dense(), Dot(node._saved_scale)
    places = [place for place, gradient in enumerate(gradients) if gradient is not None]
    found = differentiate_definition(
        lambda q, k, v: Reference()(Call(q, k, v, over, score))[:1],
        (node._saved_query, node._saved_key, node._saved_value), places, towards[:1],
    )  # fmt: skip
    by_place = dict(zip(places, found, strict=True))
    return tuple(by_place.get(place) for place in range(len(gradients)))


def _known_finite(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether all inputs are finite, if there are few enough numbers to check them."""
    few = v.numel() <= MAX_CHECKED_NUMBERS and type(k) is type(v) is Tensor
    return few and can_branch_on_values(q) and small_tensors_finite(q, k, v)


def _nan_may_leak(q: Tensor, k: Tensor, out: Tensor) -> bool:
    """Whether NaN or inf may have reached earlier queries through weights of zero, or may do so in the backward pass."""
    if not can_branch_on_values(q):
        return False
    # the last query sees all keys and values; a non-finite query, or a key that gets a weight of zero, leaks through gradients only
    return not small_tensors_finite(out[..., -1, :]) or (out.requires_grad and not small_tensors_finite(q, k))


def _uses_lse_operator(call: Call) -> bool:
    """Whether to call the operator below scaled_dot_product_attention, which returns the log-sum-exp.

    Autocast would narrow the inputs of scaled_dot_product_attention. For few tokens the function is faster.
    """
    if call.sink is not None or torch.is_autocast_enabled("cpu"):
        return True
    return not torch.compiler.is_compiling() and call.q.shape[-2] >= MIN_QUERIES_FOR_LSE


def _is_faster_in_short(call: Call) -> bool:
    """Whether `short`, the C++ kernel for few keys, is faster."""
    q, k, v = call.q, call.k, call.v
    # an exported program must work for any length
    if native is None or not q.is_cpu or q.dtype != torch.float32 or torch.compiler.is_exporting():
        return False
    few = max(q.shape[-1], v.shape[-1]) <= NARROW_HEAD and k.shape[-2] <= min(FEW_KEYS, q.shape[-2])
    return few and q.shape[:-1].numel() * k.shape[-2] >= MANY_PAIRS


def dot_product_refuses(call: Call) -> str | None:
    """The reason why no dot-product kernel can compute this call, or None."""
    if type(call.score) is not Dot:
        return f"it computes dot products, and score is {type(call.score).__name__}"
    if not (call.q.numel() and call.k.numel() and call.v.numel()):
        return "a tensor is empty"
    if under_transform():
        return "it has no rules for torch.func transforms and forward-mode differentiation"
    return None


def nan_preserving_mask(q: Tensor, k: Tensor) -> Tensor | None:
    """A mask of zeros where torch's kernel would otherwise treat a row of NaN scores as a row without keys; else None.

    For fewer keys than a SIMD vector holds, torch's search for the largest score skips NaN, unless it adds a mask.
    """
    if k.shape[-2] >= SIMD_WIDTH:
        return None
    return _ZERO_MASKS[q.dtype] if type(q) is Tensor and q.dtype in _ZERO_MASKS else q.new_zeros(1, 1, 1, 1)


_ZERO_MASKS = {
    dtype: torch.zeros(1, 1, 1, 1, dtype=dtype, device="cpu")
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)
}


def with_positive_scale(q: Tensor, scale: float) -> tuple[Tensor, float]:
    """Move a scale that is not positive into the queries: their scaled products with keys stay the same.

    torch's kernel masks before it scales: a factor that is negative, or zero in fp32, would turn -inf into inf or NaN.
    """
    if scale >= MIN_SCALE:
        return q, scale
    return (-q, -scale) if scale <= -MIN_SCALE else (q * scale, 1.0)


def can_pad_widths(dim: int, width: int) -> bool:
    """Whether the widths of keys and values are close enough to pad the narrower."""
    return dim <= MAX_WIDTH_RATIO * width and width <= MAX_WIDTH_RATIO * dim


def match_widths_and_heads(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v as the fused kernel needs them: one width (padding with zeros changes no product), as many key heads as value heads."""
    ks, vs = k.shape, v.shape
    dim, width = ks[-1], vs[-1]
    if dim < width:
        q, k = F.pad(q, (0, width - dim)), F.pad(k, (0, width - dim))
    elif width < dim:
        v = F.pad(v, (0, dim - width))
    if ks[-3] != vs[-3]:
        heads = math.lcm(ks[-3], vs[-3])
        k, v = repeat_grouped_heads(k, heads), repeat_grouped_heads(v, heads)
    if q.stride(-1) == k.stride(-1) == v.stride(-1) == 1 and 1 not in q.stride()[:-1]:
        return q, k, v
    return _copy_if_overlapping(with_unit_stride(q)), with_unit_stride(k), with_unit_stride(v)


def _copy_if_overlapping(q: Tensor) -> Tensor:
    """Copy q if another axis than the features has stride 1: the fused kernel lays its output out like q, and would confuse the axes."""
    overlaps = any(n > 1 and step == 1 for n, step in zip(q.shape[:-1], q.stride()[:-1], strict=True))
    return q.contiguous() if overlaps else q


def with_unit_stride(x: Tensor) -> Tensor:
    """Copy x unless its features are contiguous: the fused kernel reads others with the wrong strides."""
    return x if x.stride(-1) == 1 else x.contiguous()
