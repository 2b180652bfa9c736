"""Why does a deep network of attention learn, or not? Statistics of the networks of `stiefel_mnist.py`, layer by layer.

Attention without a residual averages patches: in a deep stack they become equal. Projections that amplify make the rest ever
larger, until the softmax of the digits is 0 or 1 and has no gradient. These statistics show whether either happens, how far
the projections are from orthonormal, and whether the first block still gets a gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def gram_errors(network: nn.Module) -> Tensor:
    """‖W Wᵀ − I‖² of the rows of each head: (blocks, 3, heads), for queries, keys and values; differentiable."""
    blocks = list(network.blocks)  # type: ignore[arg-type]
    weights = torch.stack(
        [torch.stack([getattr(block.attention, f"{name}_proj").weight for name in "qkv"]) for block in blocks]
    )
    # (blocks, 3, heads, dim, features)
    rows = weights.unflatten(2, (blocks[0].attention.num_heads, -1))
    return (rows @ rows.mT - torch.eye(rows.shape[-2])).square().sum((-2, -1))


@torch.no_grad()
def signals(network: nn.Module, images: Tensor) -> dict[str, Any]:
    """Statistics of the hidden states: before each block, and before the classification.

    `apart` is ‖x − its mean over patches‖ / ‖x‖ (0: all patches are the same), `norm` is ‖x‖, both averaged over images.
    `gram` is ‖W Wᵀ − I‖ for q, k and v, averaged over heads and blocks.
    """
    x, apart, norm = images, [], []
    for block in (*network.blocks, None):  # type: ignore[misc]
        size = x.flatten(1).norm(dim=1)
        off = (x - x.mean(1, keepdim=True)).flatten(1).norm(dim=1)
        # in an image of zeros all patches are equal
        apart.append((off / size.clamp_min(1e-30)).mean().item())
        norm.append(size.mean().item())
        x = x if block is None else block(x)
    return {"apart": apart, "norm": norm, "gram": gram_errors(network).sqrt().mean((0, 2)).tolist()}


def gradient_norms(network: nn.Module) -> list[float]:
    """The norm of the gradient of each block's parameters together."""
    blocks: Any = network.blocks
    of = [[p.grad for p in block.parameters() if p.grad is not None] for block in blocks]
    return [torch.stack([gradient.norm() for gradient in each]).norm().item() for each in of]
