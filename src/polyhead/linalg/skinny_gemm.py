"""Linear maps of few rows, as a model makes them for every token that it writes: as fast as the weights can be read.

torch's own product with one vector reads the weights at half of the memory's speed, or less.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from polyhead._torch import intercepted, native, values_unavailable

# More rows make a product of matrices, at which torch is good.
ROWS = 8
# Smaller matrices are in the cache already, and need no second thread.
_SMALL = 1 << 15


def apply_linear(module: nn.Module, x: Float[Tensor, "... features"]) -> Float[Tensor, "... out"]:
    """What a module makes of an input. A plain `nn.Linear`, at which nobody looks, takes few rows the quick way."""
    if type(module) is nn.Linear and is_skinny(x) and _alone(module):
        return skinny_product(x, module.weight, module.bias)
    y: Tensor = module(x)
    return y


def linear(
    x: Float[Tensor, "... features"], weight: Float[Tensor, "out features"], bias: Float[Tensor, " out"] | None = None
) -> Float[Tensor, "... out"]:
    """x Wᵀ + b."""
    return skinny_product(x, weight, bias) if is_skinny(x) else F.linear(x, weight, bias)


def is_skinny(x: Float[Tensor, "... features"]) -> bool:
    """Whether an input may go the quick way: few rows of fp32 on the CPU, no gradient, and nobody that watches."""
    return (
        native is not None
        and not torch.is_grad_enabled()
        and type(x) is Tensor
        and x.dtype == torch.float32
        and x.is_cpu
        and 0 < x.numel() <= ROWS * x.shape[-1]
        and not values_unavailable()
        and not torch.is_autocast_enabled("cpu")
        and not intercepted()
    )


def skinny_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x Wᵀ + b by the C++ kernel; by torch where the weights are not what it reads."""
    fits = weight.dim() == 2 and weight.shape[1] == x.shape[-1] and _plain(weight)
    if not fits or (bias is not None and not (bias.shape == weight.shape[:1] and _plain(bias))):
        return F.linear(x, weight, bias)
    rows, columns = weight.shape
    x = x.contiguous()
    out = x.new_empty(*x.shape[:-1], rows)
    native.thin(
        x.numel() // columns, rows, columns, x.data_ptr(), weight.data_ptr(), 0 if bias is None else bias.data_ptr(),
        out.data_ptr(), torch.get_num_threads() if weight.numel() > _SMALL else 1,
    )  # fmt: skip
    return out


def _plain(x: Tensor) -> bool:
    return type(x) in (Tensor, nn.Parameter) and x.dtype == torch.float32 and x.is_cpu and x.is_contiguous()


def _alone(module: nn.Module) -> bool:
    """Whether nothing is hooked to a module: a hook must see its call."""
    hooked = module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__
    return not hooked and not _has_any_global_hook()
