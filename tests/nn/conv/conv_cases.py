"""Convolutions of one, two and three axes, and their comparison with attention."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn

KINDS: tuple[Any, ...] = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
SIZES = ((13,), (9, 11), (5, 7, 6))
MODES = ("zeros", "replicate", "circular", "reflect")
# rounding errors of short sums of products
TOLERANCES = {torch.float32: 1e-5, torch.float64: 1e-12}


def _within_groups(dense: torch.Tensor, conv: Any) -> torch.Tensor:
    """(taps, out, in of a group): the blocks on the diagonal of (taps, out, in)."""
    blocks = dense.unflatten(2, (conv.groups, -1)).unflatten(1, (conv.groups, -1))
    return torch.cat([blocks[:, g, :, g] for g in range(conv.groups)], 1)


def differences(conv: Any, attention: Any, x: torch.Tensor) -> tuple[float, float]:
    """The largest differences of the outputs and of the input gradients; asserts equal gradients of the kernel."""
    with warnings.catch_warnings():
        # torch warns that "same" with even kernels may copy
        warnings.filterwarnings("ignore", message="Using padding='same'")
        y = conv(x)
    z, _ = attention(x)
    assert y.shape == z.shape and y.dtype == z.dtype
    towards = torch.randn_like(y)
    (dy,), (dz,) = (torch.autograd.grad(out, x, towards, retain_graph=True) for out in (y, z))
    o_proj = attention.attention.o_proj
    if isinstance(attention.attention.v_proj, nn.Identity) and o_proj is not None:
        # (out, taps · in) -> (taps, out, in), as a dense kernel
        found = (
            torch.autograd.grad(z, o_proj.weight, towards, retain_graph=True)[0]
            .unflatten(1, (-1, x.shape[1]))
            .movedim(1, 0)
        )
        (wanted,) = torch.autograd.grad(y, conv.weight, towards)
        scale = max(1.0, wanted.abs().max().item())
        difference = (
            _within_groups(found, conv).movedim(0, -1).reshape(wanted.shape) - wanted
        ).abs().max().item() / scale
        assert difference <= TOLERANCES[x.dtype], "the gradient of the kernel"
    return (y - z).detach().abs().max().item(), (dy - dz).abs().max().item()
