"""The kernel `flex`: torch's flex_attention, which computes only the blocks of pairs that a neighbourhood allows."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from polyhead._torch import is_torch_dispatch_intercepted, without_autocast
from polyhead.kernels.call import Call, OutputAndLse, flatten_batch, repeat_grouped_heads
from polyhead.kernels.flex.compiled import FlexProblem, StaticOptions, run_flex
from polyhead.kernels.flex.list_cache import block_lists_of
from polyhead.kernels.flex.mods import make_keep_mod, make_score_mod
from polyhead.kernels.flex.shared_memory import kernel_options, shared_memory_per_block, width_refuses
from polyhead.kernels.flex.support import MIN_WIDTH, device_refuses
from polyhead.kernels.fused import dot_product_refuses, with_unit_stride
from polyhead.score import Dot


class Flex:
    """Any neighbourhood, bias, sink and dropout, with dot products, in one kernel of a GPU."""

    name = "flex"

    def refuses(self, call: Call) -> str | None:
        reason = dot_product_refuses(call) or device_refuses(call.q.device, call.q.dtype)
        if reason is not None:
            return reason
        width = max(call.q.shape[-1], call.v.shape[-1])
        reason = width_refuses(width, call.q.dtype, shared_memory_per_block(call.q.device))
        if reason is not None:
            return reason
        learned = any(x is not None and x.requires_grad for x in (call.relative_bias, call.bias))
        if learned and torch.is_grad_enabled() and torch.are_deterministic_algorithms_enabled():
            return "it sums the gradient of a learned bias in any order, and deterministic algorithms are on"
        if torch.compiler.is_exporting():
            return "an exported program keeps operators that run on every device"
        if not torch.compiler.is_compiling() and is_torch_dispatch_intercepted():
            return "another mode intercepts torch's operators, and would not see those of a compiled kernel"
        return None

    def __call__(self, call: Call) -> OutputAndLse:
        assert isinstance(call.score, Dot)
        q, k, v = _fit_operands(call)
        keep_share = None
        if call.dropout:
            dtype = torch.promote_types(q.dtype, torch.float32)
            keep_share = torch.full((), 1 - call.dropout, dtype=dtype, device=q.device)
        problem = FlexProblem(
            call.over.mask_mod(call.sizes, q.device),
            make_score_mod(call),
            make_keep_mod(call),
            block_lists_of(call),
            keep_share,
        )
        available = shared_memory_per_block(q.device)
        options = StaticOptions(
            call.score.factor(call.q.shape[-1]),
            call.sink is not None,
            kernel_options(max(q.shape[-1], v.shape[-1]), q.dtype, available),
        )
        with without_autocast(q.device):
            out, lse = run_flex(q, k, v, problem, options)
        out = out[..., : call.v.shape[-1]]
        if out.requires_grad and not torch.compiler.is_compiling():
            out.register_hook(_refuse_second_derivatives)
        return out.reshape(*call.q.shape[:-1], out.shape[-1]), lse.reshape(call.q.shape[:-1])


def _fit_operands(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v with one batch axis, as many key heads as value heads, and the features that Triton needs at least."""
    q, k, v = (with_unit_stride(flatten_batch(x)) for x in (call.q, call.k, call.v))
    if k.shape[1] != v.shape[1]:
        heads = math.lcm(k.shape[1], v.shape[1])
        k, v = repeat_grouped_heads(k, heads), repeat_grouped_heads(v, heads)
    q, k, v = (F.pad(x, (0, MIN_WIDTH - x.shape[-1])) if x.shape[-1] < MIN_WIDTH else x for x in (q, k, v))
    # the gradient of q is laid out like q, so no two of its rows may share memory
    return q.contiguous() if 0 in q.stride() else q, k, v


def _refuse_second_derivatives(gradient: Tensor) -> None:
    """Raise in a backward pass that is itself recorded: the compiled kernel has first derivatives only."""
    if torch.is_grad_enabled():
        raise RuntimeError("flex has no second derivatives; pass kernel='tiled' to attend, which has them")
