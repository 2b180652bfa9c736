"""Lower rotary frequencies, for sequences longer than those of pretraining."""

from __future__ import annotations

import math
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from polyhead._checks import check_integer, check_number


@dataclass(frozen=True)
class RopeScaling:
    """Lower rotary frequencies, for sequences longer than the pretraining context length.

    Args:
        factor: what frequencies are divided by: all of them where `original_length` is None (Chen 2023, "linear").
        original_length: the pretraining context length (Llama 3.1's `original_max_position_embeddings`). Frequencies with fewer
            than `low` rotations over it are divided by `factor`, those with more than `high` stay, the others are blended.
        low, high: numbers of rotations over `original_length`.
    """

    factor: float
    original_length: int | None = None
    low: float = 1.0
    high: float = 4.0

    def __post_init__(self) -> None:
        for name in ("factor", "low", "high"):
            check_number(f"RopeScaling: {name}", getattr(self, name), 0, math.inf, "()")
        if self.original_length is not None:
            check_integer("RopeScaling: original_length", self.original_length)
            check_number("RopeScaling: low", self.low, 0, self.high, "()", hint="it must be less than high")

    def __call__(self, frequency: Float[Tensor, " pairs"]) -> Float[Tensor, " pairs"]:
        """Scale frequencies, in radians per position."""
        if self.original_length is None:
            return frequency / self.factor
        rotations = self.original_length * frequency / (2 * math.pi)
        unscaled = ((rotations - self.low) / (self.high - self.low)).clamp(0, 1)
        return frequency * (unscaled + (1 - unscaled) / self.factor)
