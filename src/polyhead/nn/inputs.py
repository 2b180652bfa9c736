"""How inputs reach the projections: dense or sparse, and dropped anew for each head."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn


def project(
    linear: nn.Module, x: Float[Tensor, "... items features"] | list[Tensor]
) -> Float[Tensor, "... items heads_dim"]:
    """A linear map of an input; of one copy of it a head, each by the head's own rows of the map."""
    if isinstance(x, list):
        assert isinstance(linear, nn.Linear)
        maps = linear.weight.chunk(len(x))
        biases = [None] * len(x) if linear.bias is None else linear.bias.chunk(len(x))
        return torch.cat([_linear(one, w, b) for one, w, b in zip(x, maps, biases, strict=True)], -1)
    if x.layout == torch.strided:
        y: Tensor = linear(x)
        return y
    assert isinstance(linear, nn.Linear)
    return _linear(x, linear.weight, linear.bias)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if x.layout == torch.strided:
        return F.linear(x, weight, bias)
    if x.dim() != 2:
        raise ValueError(
            f"query: a sparse input of shape {tuple(x.shape)}; it must be (items, features), without a batch"
        )
    y = torch.sparse.mm(x, weight.T)
    return y if bias is None else y + bias


def dropped(x: Float[Tensor, "... items features"], heads: int, share: float) -> list[Tensor]:
    """One copy of the input a head, with numbers of its own set to zero and the rest scaled up."""
    if x.layout == torch.strided:
        return [F.dropout(x, share) for _ in range(heads)]
    x = x.to_sparse_coo().coalesce()
    # what is zero already need not be dropped
    return [
        torch.sparse_coo_tensor(
            x.indices(), F.dropout(x.values(), share), x.shape, is_coalesced=True, check_invariants=False
        )
        for _ in range(heads)
    ]
