"""Dropout of activations with few random bits."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor


def dropout_16bit(x: Float[Tensor, "*any"], p: float) -> Float[Tensor, "*any"]:
    """Dropout with 16 random bits per number, which cost a fraction of a random float.

    The probability p is rounded to a multiple of 1/65536; the scale of the remaining numbers is that of the rounded p.
    """
    return x * draw_dropout_factors(x.shape, p, x)


def draw_dropout_factors(shape: Sequence[int], p: float, like: Tensor) -> Float[Tensor, "*any"]:
    """What `dropout_16bit` multiplies numbers of this shape with: 0, or the scale of those that remain."""
    steps, count = min(round(p * 65536), 65535), math.prod(shape)
    drawn = torch.empty(-(-count // 4), dtype=torch.int64, device=like.device).random_(-(2**63), None)
    keep = drawn.view(torch.int16)[:count].view(shape) >= steps - 32768
    return keep.to(like.dtype).mul_(65536 / (65536 - steps))


def dropout_of_heads(
    x: Float[Tensor, "... heads items dim"], p: float, heads: Sequence[int], total: int
) -> Float[Tensor, "... heads items dim"]:
    """`dropout_16bit` of these heads of `total`: drops what it would drop of them if `x` had all heads."""
    factors = draw_dropout_factors((*x.shape[:-3], total, *x.shape[-2:]), p, x)
    return x * factors.index_select(-3, torch.tensor(heads, device=x.device))
