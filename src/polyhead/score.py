"""How strongly a query attends to a key, before the softmax."""

from __future__ import annotations

from abc import ABC, abstractmethod

from jaxtyping import Float
from torch import Tensor, nn


class Score(nn.Module, ABC):
    """The base of all scores: a module, since a score may own weights."""

    @abstractmethod
    def forward(
        self, q: Float[Tensor, "... heads queries dim"], k: Float[Tensor, "... heads keys dim"]
    ) -> Float[Tensor, "... heads queries keys"]:
        """One number a pair."""


class Dot(Score):
    """score(q, k) = scale · qᵀk, with scale = 1/√dim unless given (Vaswani 2017)."""

    def __init__(self, scale: float | None = None) -> None:
        super().__init__()
        self.scale = scale

    def factor(self, dim: int) -> float:
        """The number that multiplies the product."""
        return max(dim, 1) ** -0.5 if self.scale is None else self.scale

    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        return (q * self.factor(q.shape[-1])) @ k.transpose(-2, -1)

    def extra_repr(self) -> str:
        return "" if self.scale is None else f"scale={self.scale}"
