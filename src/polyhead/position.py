"""Where a key stands: what a score may rotate by, or add.

A position acts in one of two ways: `rotate` turns queries and keys before the score, and `by_distance` adds a number to
it for each head and distance. One number a distance is all that a kernel needs: no tensor of queries x keys is ever built
for it. On a grid (`axes`) items stand at points, which the neighbourhood knows, and a distance is one number an axis.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from polyhead._checks import (
    HEADS,
    WrongType,
    as_tensor,
    check_integer,
    check_integers,
    check_number,
    check_numel,
    kind_of,
    shown,
)
from polyhead._torch import values_unavailable, widened


class Points(Protocol):
    """Where items stand on a grid, as neighbourhoods tell it."""

    @property
    def sizes(self) -> tuple[int, ...]: ...

    @property
    def outputs(self) -> tuple[int, ...]: ...

    @property
    def stride(self) -> tuple[int, ...]: ...

    def queries(self, device: torch.device) -> Int[Tensor, "queries axes"]: ...

    def keys(self, device: torch.device) -> Int[Tensor, "keys axes"]: ...


class Position(nn.Module):
    """The base of all positions; it does nothing."""

    axes: int | None = None
    """On a grid: how many axes it has. None along a sequence."""

    def rotate(
        self, x: Float[Tensor, "... items dim"], start: int, points: Int[Tensor, "items axes"] | None = None
    ) -> Float[Tensor, "... items dim"]:
        """Queries or keys turned by their positions: the first stands at `start`, or all at these points of a grid."""
        return x

    def by_distance(self, distance: Int[Tensor, " distances"]) -> Float[Tensor, "heads distances"] | None:
        """What is added to the score of a key that stands `distance` after its query (negative: before it)."""
        return None

    def by_offset(self, offset: Int[Tensor, "*any axes"]) -> Float[Tensor, "heads *any"] | None:
        """On a grid: the same for a key so far from its query along each axis; None where that alone does not tell."""
        return None

    def on_grid(self, grid: Points, device: torch.device) -> Float[Tensor, "heads queries keys"] | None:
        """On a grid: what is added to the score of each pair."""
        return self.by_offset(grid.keys(device) - grid.queries(device)[:, None])

    def check(self, heads: int, dim: int) -> None:
        """Raise a `ValueError` where this position does not fit the layer."""

    def keep_heads(self, heads: Int[Tensor, " kept"]) -> None:
        """Forget all heads but these."""


@dataclass(frozen=True)
class RopeScaling:
    """Rotary turns made slower, for texts longer than those a model was first trained on.

    Args:
        factor: how many times slower; of all turns, where `trained` is None (Chen 2023, "linear").
        original_length: the length of the first texts (Llama 3.1): turns that go round less than `low` times in it become slower,
            those that go round more than `high` times stay, and between the two the frequencies are blended.
        low, high: so many times.
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
        """The frequencies, in radians a position, as they become."""
        if self.original_length is None:
            return frequency / self.factor
        rounds = self.original_length * frequency / (2 * math.pi)
        kept = ((rounds - self.low) / (self.high - self.low)).clamp(0, 1)
        return frequency * (kept + (1 - kept) / self.factor)


class Rotary(Position):
    """Rotary position embedding (Su 2021): pairs of features turn by position x frequency, base^(-2i/dim).

    Args:
        dim: how many leading features turn; by default all.
        base: the ratio between the fastest and the slowest turn.
        interleaved: pairs are (0, 1), (2, 3), … as in the paper and GPT-J, instead of (i, i + dim/2) as in Llama.
        scaling: how turns are made slower, for long texts.
        axes: on a grid, how many axes it has: the features that turn are cut into as many parts, one turned along each.
    """

    def __init__(
        self,
        dim: int | None = None,
        *,
        base: float = 10_000.0,
        interleaved: bool = False,
        scaling: RopeScaling | None = None,
        axes: int | None = None,
    ) -> None:
        super().__init__()
        axes = None if axes is None else check_integer("Rotary: axes", axes)
        step = 2 * (axes or 1)
        dim = None if dim is None else check_integer("Rotary: dim", dim, step)
        if dim is not None and dim % step:
            even = "even" if step == 2 else f"a multiple of {step}, two for each of {axes} axes"
            raise ValueError(f"Rotary: dim must be {even}, got {dim}")
        base = check_number("Rotary: base", base, 0, math.inf, "()")
        if not (scaling is None or isinstance(scaling, RopeScaling)):
            raise WrongType(
                f"Rotary: scaling must be a RopeScaling, such as RopeScaling(2.0), or None, got {shown(scaling)}"
            )
        self.dim, self.base, self.interleaved, self.scaling, self.axes = dim, base, interleaved, scaling, axes
        self._table: tuple[Tensor, Tensor] | None = None
        self._table_of: tuple[object, ...] = ()

    def check(self, heads: int, dim: int) -> None:
        step = 2 * (self.axes or 1)
        if self.dim is None and dim % step:
            even = "even" if step == 2 else f"a multiple of {step}, two for each of {self.axes} axes"
            raise ValueError(
                f"Rotary: head_dim is {dim}; it must be {even}, or pass Rotary(dim=...) to turn fewer features"
            )
        if self.dim is not None and self.dim > dim:
            raise ValueError(f"Rotary: dim is {self.dim}, more than head_dim {dim}")

    def _turns(self, start: int, stop: int, dim: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine (positions, dim/2) for the positions from `start` to `stop`, kept from call to call."""
        if values_unavailable() or start < 0:
            return self._angles(torch.arange(start, stop, device=like.device), dim, like)
        kept, own = self._table, (dim // 2, like.device, like.dtype, self.base, self.scaling)
        fits = kept is not None and self._table_of == own
        if kept is None or not fits or kept[0].shape[0] < stop:
            # a table made under inference_mode could not be used in training
            with torch.inference_mode(False):
                grown = 2 * kept[0].shape[0] if kept is not None and fits else 0
                kept = self._angles(torch.arange(max(stop, grown), device=like.device), dim, like)
            # not one of fake tensors, which would stay behind
            if type(kept[0]) is Tensor:
                self._table, self._table_of = kept, own
        return kept[0][start:stop], kept[1][start:stop]

    def _angles(self, at: Int[Tensor, " items"], dim: int, like: Tensor) -> tuple[Tensor, Tensor]:
        frequency = self.base ** (-torch.arange(0, dim, 2, dtype=torch.float64, device=like.device) / dim)
        if self.scaling is not None:
            frequency = self.scaling(frequency)
        angle = at.to(torch.float64)[:, None] * frequency
        return angle.cos().to(like.dtype), angle.sin().to(like.dtype)

    def rotate(self, x: Tensor, start: int, points: Tensor | None = None) -> Tensor:
        dim = self.dim or x.shape[-1]
        if points is None:
            turned = self._turned(x[..., :dim], *self._turns(start, start + x.shape[-2], dim, x))
        else:
            parts = x[..., :dim].chunk(points.shape[-1], -1)
            turned = torch.cat([self._along(part, at) for part, at in zip(parts, points.unbind(-1), strict=True)], -1)
        return turned if self.dim is None else torch.cat((turned, x[..., dim:]), -1)

    def _along(self, x: Float[Tensor, "... items part"], at: Int[Tensor, " items"]) -> Float[Tensor, "... items part"]:
        """Features turned along one axis of a grid."""
        if values_unavailable(at):
            cos, sin = self._angles(at, x.shape[-1], x)
        else:
            # one row a point of the axis, of which there are far fewer than items
            cos, sin = (table[at] for table in self._turns(0, int(at.max()) + 1 if at.numel() else 0, x.shape[-1], x))
        return self._turned(x, cos, sin)

    def _turned(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        a, b = (x[..., 0::2], x[..., 1::2]) if self.interleaved else x.chunk(2, -1)
        a, b = a * cos - b * sin, b * cos + a * sin
        return torch.stack((a, b), -1).flatten(-2) if self.interleaved else torch.cat((a, b), -1)

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_table": None}

    def extra_repr(self) -> str:
        stretched = "" if self.scaling is None else f", scaling={self.scaling}"
        axes = "" if self.axes is None else f", axes={self.axes}"
        return f"dim={self.dim}, base={self.base:g}, interleaved={self.interleaved}{stretched}{axes}"


class ALiBi(Position):
    """Attention with linear biases (Press 2022): −slope · |distance|, with one slope a head and no weights."""

    slopes: Float[Tensor, " heads"]

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.register_buffer("slopes", torch.tensor(_slopes(check_integer("ALiBi: num_heads", num_heads, 1, HEADS))))

    def by_distance(self, distance: Tensor) -> Tensor:
        slopes = widened(self.slopes)
        return -slopes[:, None] * distance.abs().to(slopes.dtype)

    def check(self, heads: int, dim: int) -> None:
        _check_heads("ALiBi", self.slopes.shape[0], heads)

    def keep_heads(self, heads: Tensor) -> None:
        self.slopes = self.slopes[heads]


def _slopes(heads: int) -> list[float]:
    """2^(-8/n), 2^(-16/n), … for n heads; between two powers of two the paper takes every other one of the larger."""
    whole = 1 << heads.bit_length() - 1
    slopes = [2.0 ** (-8 * (i + 1) / whole) for i in range(whole)]
    return slopes + [2.0 ** (-4 * (i + 1) / whole) for i in range(0, 2 * (heads - whole), 2)]


class RelativeBias(Position):
    """T5's relative position bias (Raffel 2020): one learned number for each head and bucket of distances.

    Half of the buckets hold one distance each, the others grow as powers up to `max_distance`. On a grid (`window`) there is
    one number for each head and point of the window; what is further off shares the window's border. (A table
    like Swin's for windows of 7 x 7, in which points are up to 6 apart, is `window=(13, 13)`.)

    Args:
        num_heads: one column of `weight` (buckets, heads) a head.
        buckets: how many distances are told apart.
        max_distance: what is further shares the last bucket.
        bidirectional: half of the buckets for keys behind the query, half for keys ahead; without it, all behind.
        window: on a grid, how many points along each axis are told apart, in place of buckets: `(7, 7)`, odd numbers.
    """

    def __init__(
        self,
        num_heads: int,
        *,
        buckets: int = 32,
        max_distance: int = 128,
        bidirectional: bool = True,
        window: Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        num_heads = check_integer("RelativeBias: num_heads", num_heads, 1, HEADS)
        buckets = check_integer("RelativeBias: buckets", buckets, 4)
        if buckets % 4:
            raise ValueError(f"RelativeBias: buckets must be a multiple of 4, got {buckets}")
        max_distance = check_integer(
            "RelativeBias: max_distance", max_distance, buckets + 1, hint="it must be more than buckets"
        )
        self.window = None if window is None else _odd(window)
        self.axes = None if self.window is None else len(self.window)
        self.buckets = buckets if self.window is None else math.prod(self.window)
        self.max_distance, self.bidirectional = max_distance, bidirectional
        check_numel("RelativeBias: weight", (self.buckets, num_heads))
        self.weight = nn.Parameter(torch.empty(self.buckets, num_heads))
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
        return widened(self.weight)[self.bucket(distance)].T

    def by_offset(self, offset: Tensor) -> Tensor:
        assert self.window is not None
        place = torch.zeros_like(offset[..., 0])
        for axis, n in enumerate(self.window):
            place = place * n + offset[..., axis].clamp(-(n // 2), n // 2) + n // 2
        return widened(self.weight)[place].movedim(-1, 0)

    def check(self, heads: int, dim: int) -> None:
        _check_heads("RelativeBias", self.weight.shape[1], heads)

    def keep_heads(self, heads: Tensor) -> None:
        self.weight = nn.Parameter(self.weight.detach()[:, heads].clone(), self.weight.requires_grad)

    def extra_repr(self) -> str:
        if self.window is not None:
            return f"window={self.window}"
        return f"buckets={self.buckets}, max_distance={self.max_distance}, bidirectional={self.bidirectional}"


def _odd(window: object) -> tuple[int, ...]:
    """One odd number an axis."""
    hint = "(7,) is for a line, (7, 7) for an image"
    each = tuple(check_integers("RelativeBias: window", window, hint=hint))
    if not each or not all(n % 2 for n in each):
        raise ValueError(f"RelativeBias: window must be one odd number per axis, got {shown(window)}; {hint}")
    return each


class QuadraticOffset(Position):
    """−α|δ − Δ|² for a key at δ from its query on a grid: each head looks at one point Δ, and learns which (Cordonnier 2020).

    The larger α, the less of the weight lies elsewhere: with whole numbers in Δ this is a tap of a convolution. Beyond the
    border it looks at the nearest point, at the other side or at the points once more in reverse, as `padding` says. With
    "zeros" α/2 is added, for a layer with `sink=0.0`: the sink, of value zero, then takes what looks beyond the border.

    Args:
        centres: Δ, where each head looks from the query (heads, axes).
        alpha: α at the start; one is learned a head.
        padding: "replicate", "zeros", "circular" or "reflect".
    """

    def __init__(
        self,
        centres: Float[Tensor, "heads axes"] | Sequence[Sequence[float]],
        *,
        alpha: float = 1.0,
        padding: str = "replicate",
    ) -> None:
        super().__init__()
        given = as_tensor("QuadraticOffset: centres", centres, "of finite numbers (heads, axes)")
        real = not given.is_complex() and given.dtype != torch.bool
        given = given.to(torch.get_default_dtype()) if real and not given.is_floating_point() else given
        if not real or given.dim() != 2 or not given.numel() or not bool(given.isfinite().all()):
            raise ValueError(f"QuadraticOffset: centres must be finite numbers (heads, axes), got {kind_of(given)}")
        alpha = check_number("QuadraticOffset: alpha", alpha, 0, math.inf, "()")
        known = ("replicate", "zeros", "circular", "reflect")
        if padding not in known:
            raise ValueError(
                f"QuadraticOffset: padding is {padding!r}; it must be one of {', '.join(map(repr, known))}"
            )
        self.axes, self.padding = given.shape[1], padding
        self.centres = nn.Parameter(given.detach().clone())
        self.alpha = nn.Parameter(torch.full_like(given[:, 0], alpha))

    def by_offset(self, offset: Tensor) -> Tensor | None:
        if self.padding not in ("replicate", "zeros"):
            return None
        across, centres = (1,) * (offset.dim() - 1), widened(self.centres)
        apart = offset.to(centres.dtype) - centres.reshape(-1, *across, offset.shape[-1])
        return self._score(apart.square().sum(-1))

    def on_grid(self, grid: Points, device: torch.device) -> Tensor:
        axes, centres = len(grid.sizes), widened(self.centres)
        total = torch.zeros((), dtype=centres.dtype, device=device)
        for axis, (keys, queries, step) in enumerate(zip(grid.sizes, grid.outputs, grid.stride, strict=True)):
            at = torch.arange(queries, device=device) * step + centres[:, axis, None]
            # (heads, queries along this axis, keys along it): far fewer than pairs
            square = self._apart(torch.arange(keys, device=device) - self._folded(at, keys)[..., None], keys).square()
            shape = [1] * (2 * axes)
            shape[axis], shape[axes + axis] = queries, keys
            total = total + square.reshape(-1, *shape)
        return self._score(total.flatten(axes + 1).flatten(1, axes))

    def _folded(self, at: Tensor, size: int) -> Tensor:
        if self.padding != "reflect" or size == 1:
            return at
        return size - 1 - (at.remainder(2 * (size - 1)) - (size - 1)).abs()

    def _apart(self, apart: Tensor, size: int) -> Tensor:
        return apart if self.padding != "circular" else (apart + size / 2).remainder(size) - size / 2

    def _score(self, square: Float[Tensor, "heads *any"]) -> Float[Tensor, "heads *any"]:
        alpha = widened(self.alpha).reshape(-1, *(1,) * (square.dim() - 1))
        return alpha * ((0.5 if self.padding == "zeros" else 0.0) - square)

    def check(self, heads: int, dim: int) -> None:
        _check_heads("QuadraticOffset", len(self.centres), heads)

    def keep_heads(self, heads: Tensor) -> None:
        for name in ("centres", "alpha"):
            old = getattr(self, name)
            setattr(self, name, nn.Parameter(old.detach()[heads.to(old.device)].clone(), old.requires_grad))

    def extra_repr(self) -> str:
        return f"{len(self.centres)} heads, axes={self.axes}, padding={self.padding!r}"


def _check_heads(name: str, own: int, heads: int) -> None:
    if own != heads:
        raise ValueError(f"{name}: num_heads is {own}, but there are {heads} heads")
