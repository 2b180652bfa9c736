"""Where a key stands: what a score may rotate by, or add.

A position acts in one of two ways, and both know only how far a key is from a query: `rotate` turns queries and
keys before the score, `by_distance` adds a number for each head and distance to it. One number a distance is all
that a kernel needs: no tensor of queries x keys is ever built for it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from polyhead._torch import numbers_hidden


class Position(nn.Module):
    """The base of all positions; it does nothing."""

    def rotate(self, x: Float[Tensor, "... items dim"], start: int) -> Float[Tensor, "... items dim"]:
        """Queries or keys, of which the first stands at position `start`, turned by their positions."""
        return x

    def by_distance(self, distance: Int[Tensor, " distances"]) -> Float[Tensor, "heads distances"] | None:
        """What is added to the score of a key that stands `distance` after its query (negative: before it)."""
        return None

    def check(self, heads: int, dim: int) -> None:
        """Raise a `ValueError` where this position does not fit the layer."""

    def keep_heads(self, heads: Int[Tensor, " kept"]) -> None:
        """Forget all heads but these."""


@dataclass(frozen=True)
class Stretch:
    """Rotary turns made slower, for texts longer than those a model was first trained on.

    Args:
        factor: how many times slower; of all turns, where `trained` is None (Chen 2023, "linear").
        trained: the length of the first texts (Llama 3.1): turns that go round less than `low` times in it become slower,
            those that go round more than `high` times stay, and between the two the frequencies are blended.
        low, high: so many times.
    """

    factor: float
    trained: int | None = None
    low: float = 1.0
    high: float = 4.0

    def __post_init__(self) -> None:
        if not self.factor > 0:
            raise ValueError(f"Stretch: factor is {self.factor}; it must be more than 0")
        if self.trained is not None and (self.trained < 1 or not 0 < self.low < self.high):
            raise ValueError(
                f"Stretch: trained is {self.trained}, low {self.low} and high {self.high}; trained must be 1 or more, and 0 < low < high"
            )

    def __call__(self, frequency: Float[Tensor, " pairs"]) -> Float[Tensor, " pairs"]:
        """The frequencies, in radians a position, as they become."""
        if self.trained is None:
            return frequency / self.factor
        rounds = self.trained * frequency / (2 * math.pi)
        kept = ((rounds - self.low) / (self.high - self.low)).clamp(0, 1)
        return frequency * (kept + (1 - kept) / self.factor)


class Rotary(Position):
    """Rotary position embedding (Su 2021): pairs of features turn by position x frequency, base^(-2i/dim).

    Args:
        dim: how many leading features turn; by default all.
        base: the ratio between the fastest and the slowest turn.
        interleaved: pairs are (0, 1), (2, 3), … as in the paper and GPT-J, instead of (i, i + dim/2) as in Llama.
        stretch: how turns are made slower, for long texts.
    """

    def __init__(
        self,
        dim: int | None = None,
        *,
        base: float = 10_000.0,
        interleaved: bool = False,
        stretch: Stretch | None = None,
    ) -> None:
        super().__init__()
        if dim is not None and (dim < 2 or dim % 2):
            raise ValueError(f"Rotary: dim is {dim}; it must be even, at least 2")
        if not base > 0:
            raise ValueError(f"Rotary: base is {base}; it must be more than 0")
        if not (stretch is None or isinstance(stretch, Stretch)):
            raise ValueError(f"Rotary: stretch is {stretch!r:.60}; it must be a Stretch, such as Stretch(2.0), or None")
        self.dim, self.base, self.interleaved, self.stretch = dim, base, interleaved, stretch
        self._table: tuple[Tensor, Tensor] | None = None

    def check(self, heads: int, dim: int) -> None:
        if self.dim is None and dim % 2:
            raise ValueError(
                f"Rotary: head_dim is {dim}; it must be even, or pass Rotary(dim=...) to turn fewer features"
            )
        if self.dim is not None and self.dim > dim:
            raise ValueError(f"Rotary: dim is {self.dim}, more than head_dim {dim}")

    def _turns(self, start: int, stop: int, dim: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine (positions, dim/2) for the positions from `start` to `stop`, kept from call to call."""
        if numbers_hidden() or start < 0:
            return self._angles(start, stop, dim, like)
        kept, own = self._table, (dim // 2, like.device, like.dtype)
        fits = kept is not None and (kept[0].shape[1], kept[0].device, kept[0].dtype) == own
        if kept is None or not fits or kept[0].shape[0] < stop:
            # a table made under inference_mode could not be used in training
            with torch.inference_mode(False):
                grown = 2 * kept[0].shape[0] if kept is not None and fits else 0
                kept = self._angles(0, max(stop, grown), dim, like)
            # not one of fake tensors, which would stay behind
            if type(kept[0]) is Tensor:
                self._table = kept
        return kept[0][start:stop], kept[1][start:stop]

    def _angles(self, start: int, stop: int, dim: int, like: Tensor) -> tuple[Tensor, Tensor]:
        frequency = self.base ** (-torch.arange(0, dim, 2, dtype=torch.float64, device=like.device) / dim)
        if self.stretch is not None:
            frequency = self.stretch(frequency)
        angle = torch.arange(start, stop, dtype=torch.float64, device=like.device)[:, None] * frequency
        return angle.cos().to(like.dtype), angle.sin().to(like.dtype)

    def rotate(self, x: Tensor, start: int) -> Tensor:
        dim = self.dim or x.shape[-1]
        cos, sin = self._turns(start, start + x.shape[-2], dim, x)
        turned, rest = x[..., :dim], x[..., dim:]
        a, b = (turned[..., 0::2], turned[..., 1::2]) if self.interleaved else turned.chunk(2, -1)
        a, b = a * cos - b * sin, b * cos + a * sin
        turned = torch.stack((a, b), -1).flatten(-2) if self.interleaved else torch.cat((a, b), -1)
        return turned if self.dim is None else torch.cat((turned, rest), -1)

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_table": None}

    def extra_repr(self) -> str:
        stretched = "" if self.stretch is None else f", stretch={self.stretch}"
        return f"dim={self.dim}, base={self.base:g}, interleaved={self.interleaved}{stretched}"


class ALiBi(Position):
    """Attention with linear biases (Press 2022): −slope · |distance|, with one slope a head and no weights."""

    slopes: Float[Tensor, " heads"]

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.register_buffer("slopes", torch.tensor(_slopes(num_heads)))

    def by_distance(self, distance: Tensor) -> Tensor:
        return -self.slopes[:, None] * distance.abs().to(self.slopes.dtype)

    def check(self, heads: int, dim: int) -> None:
        _check_heads("ALiBi", self.slopes.shape[0], heads)

    def keep_heads(self, heads: Tensor) -> None:
        self.slopes = self.slopes[heads]


def _slopes(heads: int) -> list[float]:
    """2^(-8/n), 2^(-16/n), … for n heads; between two powers of two the paper takes every other one of the larger."""
    whole = 2 ** math.floor(math.log2(heads)) if heads > 0 else 0
    slopes = [2.0 ** (-8 * (i + 1) / whole) for i in range(whole)]
    return slopes + [2.0 ** (-4 * (i + 1) / whole) for i in range(0, 2 * (heads - whole), 2)]


class RelativeBias(Position):
    """T5's relative position bias (Raffel 2020): one learned number for each head and bucket of distances.

    Half of the buckets hold one distance each, the others grow as powers up to `max_distance`.

    Args:
        num_heads: one column of `weight` (buckets, heads) a head.
        buckets: how many distances are told apart.
        max_distance: what is further shares the last bucket.
        bidirectional: half of the buckets for keys behind the query, half for keys ahead; without it, all behind.
    """

    def __init__(
        self, num_heads: int, *, buckets: int = 32, max_distance: int = 128, bidirectional: bool = True
    ) -> None:
        super().__init__()
        if buckets < 4 or buckets % 4:
            raise ValueError(f"RelativeBias: buckets is {buckets}; it must be a multiple of 4")
        if max_distance <= buckets:
            raise ValueError(f"RelativeBias: max_distance is {max_distance}; it must be more than buckets ({buckets})")
        self.buckets, self.max_distance, self.bidirectional = buckets, max_distance, bidirectional
        self.weight = nn.Parameter(torch.empty(buckets, num_heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the table anew."""
        nn.init.normal_(self.weight, std=0.02)

    def bucket(self, distance: Int[Tensor, "..."]) -> Int[Tensor, "..."]:
        """The row of `weight` for a key `distance` after its query."""
        buckets = self.buckets // 2 if self.bidirectional else self.buckets
        ahead = (distance > 0).long() * buckets if self.bidirectional else torch.zeros_like(distance)
        distance = distance.abs() if self.bidirectional else (-distance).clamp(min=0)
        near = buckets // 2
        growth = torch.log(distance.clamp(min=near).float() / near) / math.log(self.max_distance / near)
        far = (near + (growth * (buckets - near)).long()).clamp(max=buckets - 1)
        return ahead + torch.where(distance < near, distance, far)

    def by_distance(self, distance: Tensor) -> Tensor:
        return self.weight[self.bucket(distance)].T

    def check(self, heads: int, dim: int) -> None:
        _check_heads("RelativeBias", self.weight.shape[1], heads)

    def keep_heads(self, heads: Tensor) -> None:
        self.weight = nn.Parameter(self.weight.detach()[:, heads].clone(), self.weight.requires_grad)

    def extra_repr(self) -> str:
        return f"buckets={self.buckets}, max_distance={self.max_distance}, bidirectional={self.bidirectional}"


def _check_heads(name: str, own: int, heads: int) -> None:
    if own != heads:
        raise ValueError(f"{name}: num_heads is {own}, but there are {heads} heads")
