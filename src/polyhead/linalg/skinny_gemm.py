"""Linear maps of few rows, as in the generation of a token: at the speed of reading the weights.

torch's own matrix-vector product reads the weights at half of the memory bandwidth, or less.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from polyhead._torch import is_torch_intercepted, is_tracing_or_dataless, native

# From more rows on, torch's matrix products are faster.
MAX_SKINNY_ROWS = 8
# Smaller matrices are not worth a second thread.
_MIN_PARALLEL_NUMBERS = 1 << 15


def apply_linear(module: nn.Module, x: Float[Tensor, "... features"]) -> Float[Tensor, "... out"]:
    """`module(x)`. A plain `nn.Linear` without hooks uses the C++ kernel for few rows."""
    if not torch.is_grad_enabled() and type(module) is nn.Linear and is_skinny(x) and _has_no_hooks(module):
        return skinny_product(x, module.weight, module.bias)
    y: Tensor = module(x)
    return y


def linear(
    x: Float[Tensor, "... features"], weight: Float[Tensor, "out features"], bias: Float[Tensor, " out"] | None = None
) -> Float[Tensor, "... out"]:
    """x Wᵀ + b."""
    return skinny_product(x, weight, bias) if is_skinny(x) else F.linear(x, weight, bias)


def is_skinny(x: Float[Tensor, "... features"]) -> bool:
    """Whether the C++ kernel takes an input: few rows of fp32 on the CPU, without gradients, compilation, transforms or dispatch modes."""
    return (
        native is not None
        and not torch.is_grad_enabled()
        and type(x) is Tensor
        and x.dtype == torch.float32
        and x.is_cpu
        and 0 < x.numel() <= MAX_SKINNY_ROWS * x.shape[-1]
        and not is_tracing_or_dataless()
        and not torch.is_autocast_enabled("cpu")
        and not is_torch_intercepted()
    )


def skinny_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x Wᵀ + b by the C++ kernel; by torch if the kernel does not take the weights."""
    fits = weight.dim() == 2 and weight.shape[1] == x.shape[-1] and _is_plain_fp32(weight)
    if not fits or (bias is not None and not (bias.shape == weight.shape[:1] and _is_plain_fp32(bias))):
        return F.linear(x, weight, bias)
    rows, columns = weight.shape
    x = x.contiguous()
    out = x.new_empty(*x.shape[:-1], rows)
    native.skinny_gemm(
        x.numel() // columns, rows, columns, x.data_ptr(), weight.data_ptr(), 0 if bias is None else bias.data_ptr(),
        out.data_ptr(), torch.get_num_threads() if weight.numel() > _MIN_PARALLEL_NUMBERS else 1,
    )  # fmt: skip
    return out


def _is_plain_fp32(x: Tensor) -> bool:
    return type(x) in (Tensor, nn.Parameter) and x.dtype == torch.float32 and x.is_cpu and x.is_contiguous()


def _has_no_hooks(module: nn.Module) -> bool:
    """Whether a module has no hooks, which would have to see the call."""
    hooked = module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__
    return not hooked and not _has_any_global_hook()
