"""Leaves the padded rows of a batch out of linear maps and feed-forward networks; attention itself stays padded."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from polyhead._torch import are_values_readable
from polyhead.neighbourhood import Neighbourhood

# Unpadding copies rows: it pays where the share of padded rows times the number of features is at least this, and the input
# has at least this many numbers.
_MIN_UNPADDING_SAVING = 32
_MIN_UNPADDING_NUMEL = 1 << 17


class Unpadding:
    """Valid and padded rows of (..., items). Unpadded tensors end with one row of zeros, shared by all padded rows.

    A linear map gives its bias for that row. So `pad(linear(unpad(x)))` equals `linear` of `x` with its padded rows set to zero.

    Attributes:
        valid: flat indices of the valid rows.
        padded: flat indices of the padded rows.
        index: for each row, its row in the unpadded tensor.
    """

    def __init__(self, is_valid: Bool[Tensor, "... items"]) -> None:
        self.shape = is_valid.shape
        self.valid: Int[Tensor, " valid"] = is_valid.flatten().nonzero()[:, 0]
        self.padded: Int[Tensor, " padded"] = (~is_valid).flatten().nonzero()[:, 0]
        index = torch.full((is_valid.numel(),), len(self.valid), device=is_valid.device)
        index[self.valid] = torch.arange(len(self.valid), device=is_valid.device)
        self.index: Int[Tensor, " items"] = index

    def unpad(self, x: Float[Tensor, "... items features"]) -> Float[Tensor, "valid+1 features"]:
        unpadded: Tensor = _Unpad.apply(x, self)
        return unpadded

    def pad(self, y: Float[Tensor, "valid+1 features"]) -> Float[Tensor, "... items features"]:
        padded: Tensor = _Pad.apply(y, self)
        return padded


def find_unpadding(over: Neighbourhood, x: Float[Tensor, "... items features"]) -> Unpadding | None:
    """The padded rows of self-attention to leave out of the projections; None where all rows are projected.

    `over` has been checked against the shape of `x`.
    """
    if type(over).unpadded_queries is Neighbourhood.unpadded_queries:
        # most neighbourhoods have no padding
        return None
    if not are_values_readable(x, *over.leaves()) or x.numel() < _MIN_UNPADDING_NUMEL:
        return None
    real = over.unpadded_queries(x.shape[:-1])
    if real is None or not real.numel() or (1 - real.float().mean()) * x.shape[-1] < _MIN_UNPADDING_SAVING:
        return None
    return Unpadding(real)


class _Unpad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Unpadding) -> Tensor:
        ctx.rows = rows
        flat = x.reshape(-1, x.shape[-1])
        return torch.cat((flat.index_select(0, rows.valid), flat.new_zeros(1, flat.shape[-1])))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        rows = ctx.rows
        padded = grad.new_zeros(rows.index.shape[0], grad.shape[-1])
        padded.index_copy_(0, rows.valid, grad[:-1])
        return padded.reshape(*rows.shape, -1), None


class _Pad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, rows: Unpadding) -> Tensor:
        ctx.rows = rows
        return y.index_select(0, rows.index).reshape(*rows.shape, -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        rows, flat = ctx.rows, grad.reshape(-1, grad.shape[-1])
        shared = flat.index_select(0, rows.padded).sum(0, keepdim=True)
        return torch.cat((flat.index_select(0, rows.valid), shared)), None
