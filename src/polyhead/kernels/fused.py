"""torch's fused attention, for calls that need no mask."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from polyhead._torch import native, under_transform, values_readable
from polyhead.kernels.call import Call, Result, flat, to_heads
from polyhead.kernels.operator_registration import differentiate_definition
from polyhead.kernels.reference import Reference
from polyhead.linalg.foreach import small_finite
from polyhead.neighbourhood import Causal, Dense
from polyhead.score import Dot

flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
# Beyond this ratio of key to value width, padding the narrower one costs more than the fused kernel saves.
WIDTHS = 2
# So many queries take longer than the choice between two ways to call the kernel.
LONG = 128
# Heads of so few features and keys are quicker in `short`, where so many pairs outweigh its dearer call.
NARROW, FEW_KEYS, MANY = 16, 128, 1 << 18
# Numbers in a vector of torch's kernel, on any CPU at most.
VECTOR = 16
# So many numbers are looked at in a few microseconds.
FEW_NUMBERS = 1 << 14
# The smallest scale that is a normal number in fp32.
TINY = torch.finfo(torch.float32).tiny


class Fused:
    """One call of torch's flash attention: everyone, or nobody ahead."""

    name = "fused"

    def refuses(self, call: Call) -> str | None:
        q, k, v, over, _, table, bias, sink, dropout, _ = call
        if not over.full and not (type(over) is Causal and q.shape[-2] in (k.shape[-2], 1)):
            # a compiler cannot trace the writing of shapes
            known = type(over).__name__ if torch.compiler.is_compiling() else repr(over)
            return f"it skips no blocks and takes no masks, and over is {known}"
        if table is not None or bias is not None:
            return "it adds no bias"
        if dropout > 0:
            return "it drops no pairs"
        if sink is not None and (not q.is_cpu or torch.is_grad_enabled()):
            return "a sink needs the log-sum-exp and its gradient"
        if not comparable(q.shape[-1], v.shape[-1]):
            return f"keys of {q.shape[-1]} and values of {v.shape[-1]} features are too different to pad"
        if _narrow(call):
            return f"many heads of {q.shape[-1]} features and {k.shape[-2]} keys are quicker in `short`"
        return refuses(call)

    def __call__(self, call: Call) -> Result:
        assert isinstance(call.score, Dot)
        shape, width = call.q.shape, call.v.shape[-1]
        causal = type(call.over) is Causal
        # A single query sees all the keys. Not `and`, which a tracer takes for a number; a program of other lengths is not asked.
        if causal and shape[-2] != call.k.shape[-2]:
            causal = False
        q, scale = call.q, call.score.factor(shape[-1])
        if scale < TINY:
            q, scale = with_positive_scale(q, scale)
        q, k, v = even(q, call.k, call.v)
        if len(shape) != 4:
            q, k, v = flat(q), flat(k), flat(v)
        # Torch's kernel follows the rule for NaN unless keys are few or hidden; a compiler would fix their number.
        compiling = torch.compiler.is_compiling()
        doubtful = not compiling and q.is_cpu and (causal or k.shape[-2] < VECTOR) and not _known_finite(q, k, v)
        mask = nan_kept(q, k) if doubtful else None
        # torch's function takes no mask beside a triangle
        if q.is_cpu and (_wants_operator(call) or (causal and mask is not None)):
            out, lse = flash(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)
            # who looks at the heads later is spared a pass; gradients do not go through it
            lse = lse.detach() if call.sink is None else lse
        else:
            # not the comparison itself, which a tracer takes for a number
            grouped = True if k.shape[1] != shape[-3] else False  # noqa: SIM210
            out = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=grouped
            )
            lse = None
        if causal and doubtful and _leaks(q, k, out):
            from polyhead.kernels.tiled import Tiled  # which imports this file

            return Tiled()(call)
        if out.requires_grad and not compiling:
            _allow_second_derivatives(out)
        if len(shape) != 4:
            out = out.reshape(*shape[:-1], out.shape[-1])
            lse = None if lse is None else lse.reshape(shape[:-1])
        return (out if width >= shape[-1] else out[..., :width]), lse


def _allow_second_derivatives(out: Tensor) -> None:
    """Let a backward pass that is recorded itself go through the definition: torch's kernel has first derivatives only.

    A hook on torch's own node costs 3 µs; an autograd function around the kernel would cost 30.
    """
    node: Any = out.grad_fn
    # the other kernels of scaled_dot_product_attention can be differentiated twice
    if node.name() == "ScaledDotProductFlashAttentionForCpuBackward0":
        node.register_hook(_differentiate_again)


def _differentiate_again(
    gradients: tuple[Tensor | None, ...], towards: tuple[Tensor | None, ...]
) -> tuple[Tensor | None, ...] | None:
    """The gradients of the kernel's node in a form that can be differentiated; None, for no change, where nobody will."""
    if not torch.is_grad_enabled():
        return None
    # the node holds the tensors only as long as the graph is kept
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
    """Whether a look at all numbers is worth its time, and finds that they are finite."""
    few = v.numel() <= FEW_NUMBERS and type(k) is type(v) is Tensor
    return few and values_readable(q) and small_finite(q, k, v)


def _leaks(q: Tensor, k: Tensor, out: Tensor) -> bool:
    """Whether NaN or inf may have reached earlier queries through weights of zero, or may in the backward pass."""
    if not values_readable(q):
        return False
    # the last query sees all keys and values; what is in a query, or makes a weight of zero, leaks through gradients alone
    return not small_finite(out[..., -1, :]) or (out.requires_grad and not small_finite(q, k))


def _wants_operator(call: Call) -> bool:
    """Whether to call the operator below scaled_dot_product_attention, which hands out the log-sum-exp.

    Autocast would narrow what scaled_dot_product_attention is given. For few tokens its own way is quicker.
    """
    if call.sink is not None or torch.is_autocast_enabled("cpu"):
        return True
    return not torch.compiler.is_compiling() and call.q.shape[-2] >= LONG


def _narrow(call: Call) -> bool:
    """Whether the C++ kernel for few keys computes this sooner."""
    q, k, v = call.q, call.k, call.v
    # an exported program serves any length
    if native is None or not q.is_cpu or q.dtype != torch.float32 or torch.compiler.is_exporting():
        return False
    few = max(q.shape[-1], v.shape[-1]) <= NARROW and k.shape[-2] <= min(FEW_KEYS, q.shape[-2])
    return few and q.shape[:-1].numel() * k.shape[-2] >= MANY


def refuses(call: Call) -> str | None:
    """What no kernel made of torch's operators for dot products can do."""
    if type(call.score) is not Dot:
        return f"it computes dot products, and score is {type(call.score).__name__}"
    if not (call.q.numel() and call.k.numel() and call.v.numel()):
        return "a tensor is empty"
    if under_transform():
        return "it has no rules for torch.func transforms and forward-mode differentiation"
    return None


def nan_kept(q: Tensor, k: Tensor) -> Tensor | None:
    """A mask of zero, where torch's kernel would take a row of NaN scores for one without keys; else None.

    It looks for the largest score by whole vectors of keys, and for those that fill none it passes over NaN; not so
    where it adds a mask.
    """
    if k.shape[-2] >= VECTOR:
        return None
    return _ZERO[q.dtype] if type(q) is Tensor and q.dtype in _ZERO else q.new_zeros(1, 1, 1, 1)


_ZERO = {
    dtype: torch.zeros(1, 1, 1, 1, dtype=dtype, device="cpu")
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)
}


def with_positive_scale(q: Tensor, scale: float) -> tuple[Tensor, float]:
    """Queries and a scale whose products with keys are the same; what the scale is not is in the queries.

    torch's kernel masks before it scales: a factor that is negative, or zero in fp32, would make inf or NaN of -inf.
    """
    if scale >= TINY:
        return q, scale
    return (-q, -scale) if scale <= -TINY else (q * scale, 1.0)


def comparable(dim: int, width: int) -> bool:
    """Whether keys and values are near enough in width to pad the narrower."""
    return dim <= WIDTHS * width and width <= WIDTHS * dim


def even(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The three as the fused kernel wants them: one width (zeros change no product), as many keys' heads as values'."""
    ks, vs = k.shape, v.shape
    dim, width = ks[-1], vs[-1]
    if dim < width:
        q, k = F.pad(q, (0, width - dim)), F.pad(k, (0, width - dim))
    elif width < dim:
        v = F.pad(v, (0, dim - width))
    if ks[-3] != vs[-3]:
        heads = math.lcm(ks[-3], vs[-3])
        k, v = to_heads(k, heads), to_heads(v, heads)
    if q.stride(-1) == k.stride(-1) == v.stride(-1) == 1 and 1 not in q.stride()[:-1]:
        return q, k, v
    return _apart(strided(q)), strided(k), strided(v)


def _apart(q: Tensor) -> Tensor:
    """The fused kernel lays its output out as q is, and takes another axis of stride 1 for that of the features."""
    overlaps = any(n > 1 and step == 1 for n, step in zip(q.shape[:-1], q.stride()[:-1], strict=True))
    return q.contiguous() if overlaps else q


def strided(x: Tensor) -> Tensor:
    """The fused kernel reads features that lie side by side, and strides wrongly over any others."""
    return x if x.stride(-1) == 1 else x.contiguous()
