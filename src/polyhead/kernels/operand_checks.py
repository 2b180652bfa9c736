"""Argument checks of the torch operators: anyone can call them through torch.ops, and neither the C++ nor torch's fused kernels check shapes."""

from __future__ import annotations

import torch
from torch import Tensor


def check_qkv_shapes(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise unless the shapes of q, k and v fit together."""
    fits = q.dim() == k.dim() == v.dim() == 4 and 0 not in (*q.shape, *k.shape, *v.shape)
    if fits:
        (batch, heads, _, dim), (_, key_heads, keys, _), (_, value_heads, _, width) = q.shape, k.shape, v.shape
        fits = k.shape == (batch, key_heads, keys, dim) and v.shape == (batch, value_heads, keys, width)
        fits = fits and heads % key_heads == 0 == heads % value_heads
    if not fits:
        raise ValueError(
            "q, k and v must be (batch, heads, queries, dim), (batch, key_heads, keys, dim) and (batch, value_heads, keys, width), "
            "none of them empty, and heads a multiple of key_heads and value_heads, "
            f"got {tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}"
        )


def check_native_qkv(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> None:
    """The same for the C++ operators, which take fp32 or fp64 on the CPU, and as many key heads as value heads."""
    check_qkv_shapes(q, k, v)
    dtypes = q.dtype == k.dtype == v.dtype and q.dtype in (torch.float32, torch.float64)
    if not dtypes or not (q.is_cpu and k.is_cpu and v.is_cpu):
        raise ValueError(
            "q, k and v must be all fp32 or all fp64, on the CPU, got "
            f"{q.dtype} on {q.device}, {k.dtype} on {k.device} and {v.dtype} on {v.device}"
        )
    if k.shape[1] != v.shape[1]:
        raise ValueError(f"v must have the {k.shape[1]} heads of k, got {v.shape[1]}")
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout must be in [0, 1), got {dropout}")


def check_operand(name: str, x: Tensor | None, shape: tuple[int, ...], like: Tensor) -> None:
    """Raise unless `x` is None, or has this shape and the dtype and device of `like`."""
    if x is not None and (x.shape != shape or x.dtype != like.dtype or x.device != like.device):
        raise ValueError(
            f"{name} must be {like.dtype} of shape {shape} on {like.device}, got {x.dtype} of shape {tuple(x.shape)} on {x.device}"
        )
