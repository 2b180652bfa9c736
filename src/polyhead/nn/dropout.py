"""Dropout of activations with few random bits."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor


def dropout_16bit(x: Float[Tensor, "*any"], p: float) -> Float[Tensor, "*any"]:
    """Dropout with 16 random bits per number, which cost a fraction of a random float.

    The probability p is rounded to a multiple of 1/65536; the scale of the remaining numbers is that of the rounded p.
    """
    steps = min(round(p * 65536), 65535)
    drawn = torch.empty(-(-x.numel() // 4), dtype=torch.int64, device=x.device).random_(-(2**63), None)
    keep = drawn.view(torch.int16)[: x.numel()].view(x.shape) >= steps - 32768
    return x * keep.to(x.dtype).mul_(65536 / (65536 - steps))
