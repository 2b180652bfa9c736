"""PyG's linear map and weight initialisation."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter, is_lazy

from polyhead.neighbourhood.graph_inputs import check_sparse_indices


class Linear(nn.Module):
    """PyG's linear map, with PyG's initialisation; `in_channels=-1` is inferred from the first input."""

    weight: nn.Parameter | UninitializedParameter
    bias: Tensor | None

    def __init__(self, in_channels: int, out_channels: int, bias: bool = False, glorot: bool = True) -> None:
        super().__init__()
        self.in_channels, self.out_channels, self.glorot = in_channels, out_channels, glorot
        known = in_channels >= 0
        self.weight = nn.Parameter(torch.empty(out_channels, in_channels)) if known else UninitializedParameter()
        self.register_parameter("bias", nn.Parameter(torch.empty(out_channels)) if bias else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise the weights."""
        if self.in_channels <= 0:
            return
        bias_bound = self.in_channels**-0.5
        bound = (6 / (self.in_channels + self.out_channels)) ** 0.5 if self.glorot else bias_bound
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.uniform_(self.bias, -bias_bound, bias_bound)

    def forward(self, x: Float[Tensor, "nodes in"]) -> Float[Tensor, "nodes out"]:
        if self.in_channels < 0:
            self._materialize(x.shape[-1])
            self.reset_parameters()
        if x.layout != torch.strided:
            check_sparse_indices("x", x)
        return F.linear(x, self.weight, self.bias)

    def _materialize(self, in_channels: int) -> None:
        self.in_channels = in_channels
        assert isinstance(self.weight, UninitializedParameter)
        self.weight.materialize((self.out_channels, in_channels))

    def weight_by_head(self, heads: int) -> Float[Tensor, "heads channels in"]:
        """The weight, head by head."""
        return self.weight.unflatten(0, (heads, self.out_channels // heads))

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars or self.in_channels < 0)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        weight = state_dict.get(f"{prefix}weight")
        if weight is not None and is_lazy(weight):
            # saved before the first input: there is nothing to load
            return
        if weight is not None and self.in_channels < 0:
            self._materialize(weight.shape[-1])
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        return f"{self.in_channels}, {self.out_channels}, bias={self.bias is not None}"


def init_glorot(*weights: Tensor | None) -> None:
    """Initialise them like PyG's attention vectors."""
    for weight in weights:
        if weight is not None:
            bound = (6 / (weight.shape[-2] + weight.shape[-1])) ** 0.5
            nn.init.uniform_(weight, -bound, bound)
