"""How a score depends on the positions of query and key.

`rotate` rotates queries and keys before the score; `by_distance` adds a bias to the score per head and relative position, the
signed distance key − query, so that no tensor of queries x keys is built. On a grid (`axes`) the neighbourhood gives the
coordinates of items, and a distance is an offset along each axis.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from polyhead._checks import (
    MAX_HEADS,
    WrongType,
    as_tensor,
    check_integer,
    check_integers,
    check_number,
    check_numel,
    describe_type,
    short_repr,
)
from polyhead._rope_scaling import RopeScaling as RopeScaling
from polyhead._torch import (
    are_values_readable,
    can_keep_tensors,
    is_tracing_or_dataless,
    to_at_least_fp32,
    widest_float,
)


class GridLike(Protocol):
    """The coordinates of items on a grid: the lattice of a neighbourhood."""

    @property
    def sizes(self) -> tuple[int, ...]: ...

    @property
    def outputs(self) -> tuple[int, ...]: ...

    @property
    def stride(self) -> tuple[int, ...]: ...

    def query_coordinates(self, device: torch.device) -> Int[Tensor, "queries axes"]: ...

    def key_coordinates(self, device: torch.device) -> Int[Tensor, "keys axes"]: ...


class Position(nn.Module):
    """Base class of positional encodings; by default it neither rotates nor adds a bias."""

    axes: int | None = None
    """The number of axes of the grid; None along a sequence."""

    def rotate(
        self, x: Float[Tensor, "... items dim"], start: int, points: Int[Tensor, "items axes"] | None = None
    ) -> Float[Tensor, "... items dim"]:
        """Rotate queries or keys by their positions: the first is at `start`, or item i is at `points[i]` of a grid."""
        return x

    def by_distance(self, distance: Int[Tensor, " distances"]) -> Float[Tensor, "heads distances"] | None:
        """The bias at each relative position: `distance` is signed, key − query, negative for a key before its query."""
        return None

    def by_offset(self, offset: Int[Tensor, "*any axes"]) -> Float[Tensor, "heads *any"] | None:
        """On a grid: the bias for a key at `offset` from its query; None where the offset alone does not determine it."""
        return None

    def on_grid(self, grid: GridLike, device: torch.device) -> Float[Tensor, "heads queries keys"] | None:
        """On a grid: the bias of each pair."""
        return self.by_offset(grid.key_coordinates(device) - grid.query_coordinates(device)[:, None])

    def check(self, heads: int, dim: int) -> None:
        """Raise a `ValueError` where this position does not fit the layer."""

    def keep_heads(self, heads: Int[Tensor, " kept"]) -> None:
        """Keep the parameters of these heads only."""


_Tables = list[tuple[Tensor, Tensor]]
# Coordinates of grids whose tables are kept: queries and keys may differ.
_MAX_KEPT_TABLES = 2


class Rotary(Position):
    """Rotary position embedding (Su 2021): pairs of features are rotated by position x frequency, base^(-2i/dim).

    Args:
        dim: the number of leading features to rotate; by default all.
        base: the base of the geometric series of frequencies (theta in Llama's config).
        interleaved: pairs are (0, 1), (2, 3), … as in the paper and GPT-J, instead of (i, i + dim/2) as in Llama.
        scaling: lower frequencies, for long sequences.
        axes: the number of axes of a grid: the rotated features are split into one part per axis.
    """

    _tables_of_points: tuple[tuple[Tensor, tuple[object, ...], _Tables], ...] = ()

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
        self.axes = None if axes is None else check_integer("Rotary: axes", axes)
        if dim is not None:
            dim = check_integer("Rotary: dim", dim, 2 * (self.axes or 1))
            self._check_pairs("dim", dim)
        base = check_number("Rotary: base", base, 0, math.inf, "()")
        if not (scaling is None or isinstance(scaling, RopeScaling)):
            raise WrongType(f"Rotary: scaling must be a RopeScaling or None, got {short_repr(scaling)}")
        self.dim, self.base, self.interleaved, self.scaling = dim, base, interleaved, scaling
        self._table: tuple[Tensor, Tensor] | None = None
        self._table_of: tuple[object, ...] = ()

    def check(self, heads: int, dim: int) -> None:
        if self.dim is None:
            self._check_pairs("head_dim", dim, "; pass Rotary(dim=...) to rotate fewer features")
        elif self.dim > dim:
            raise ValueError(f"Rotary: dim must be at most head_dim, {dim}, got {self.dim}")

    def _check_pairs(self, name: str, dim: int, hint: str = "") -> None:
        step = 2 * (self.axes or 1)
        if dim % step:
            rule = "even" if step == 2 else f"a multiple of {step}, two for each of {self.axes} axes"
            raise ValueError(f"Rotary: {name} must be {rule}, got {dim}{hint}")

    def _cos_sin(self, start: int, stop: int, dim: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine (positions, dim/2) of the angles at positions `start` to `stop`, cached between calls."""
        if is_tracing_or_dataless() or start < 0:
            return self._compute_cos_sin(torch.arange(start, stop, device=like.device), dim, like)
        table, key = self._table, (dim // 2, like.device, like.dtype, self.base, self.scaling)
        fits = table is not None and self._table_of == key
        if table is None or not fits or table[0].shape[0] < stop:
            # a table that is created under inference_mode cannot be used in training
            with torch.inference_mode(False):
                doubled = 2 * table[0].shape[0] if table is not None and fits else 0
                table = self._compute_cos_sin(torch.arange(max(stop, doubled), device=like.device), dim, like)
            # fake tensors are not cached: they would outlive the trace
            if type(table[0]) is Tensor:
                self._table, self._table_of = table, key
        return table[0][start:stop], table[1][start:stop]

    def _compute_cos_sin(self, at: Int[Tensor, " items"], dim: int, like: Tensor) -> tuple[Tensor, Tensor]:
        wide = widest_float(like.device)
        frequency = self.base ** (-torch.arange(0, dim, 2, dtype=wide, device=like.device) / dim)
        if self.scaling is not None:
            frequency = self.scaling(frequency)
        angle = at.to(wide)[:, None] * frequency
        return angle.cos().to(like.dtype), angle.sin().to(like.dtype)

    def rotate(self, x: Tensor, start: int, points: Tensor | None = None) -> Tensor:
        dim = self.dim or x.shape[-1]
        if points is None:
            rotated = self._rotate(x[..., :dim], *self._cos_sin(start, start + x.shape[-2], dim, x))
        else:
            parts, tables = x[..., :dim].chunk(points.shape[-1], -1), self._cos_sin_at(points, dim, x)
            along_axes = [self._rotate(part, *table) for part, table in zip(parts, tables, strict=True)]
            rotated = along_axes[0] if len(along_axes) == 1 else torch.cat(along_axes, -1)
        return rotated if self.dim is None else torch.cat((rotated, x[..., dim:]), -1)

    def _cos_sin_at(self, points: Int[Tensor, "items axes"], dim: int, like: Tensor) -> _Tables:
        """Cosine and sine (items, dim/2/axes) by the coordinates along each axis of a grid; those of the last grids are kept."""
        key = (dim, like.dtype, self.base, self.scaling)
        keep = can_keep_tensors(points.device) and not points.is_inference()
        for kept, kept_key, tables in self._tables_of_points if keep else ():
            if kept is points and kept_key == key:
                return tables
        # tables that are created under inference_mode cannot be used in training
        with torch.inference_mode(False) if keep else nullcontext():
            tables = [self._cos_sin_along(at, dim // points.shape[-1], like) for at in points.unbind(-1)]
        if keep:
            self._tables_of_points = ((points, key, tables), *self._tables_of_points)[:_MAX_KEPT_TABLES]
        return tables

    def _cos_sin_along(self, at: Int[Tensor, " items"], dim: int, like: Tensor) -> tuple[Tensor, Tensor]:
        if not are_values_readable(at):
            return self._compute_cos_sin(at, dim, like)
        # a table with one row per point of the axis: far fewer than items
        cos, sin = self._cos_sin(0, int(at.max()) + 1 if at.numel() else 0, dim, like)
        return cos[at], sin[at]

    def _rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        a, b = (x[..., 0::2], x[..., 1::2]) if self.interleaved else x.chunk(2, -1)
        a, b = a * cos - b * sin, b * cos + a * sin
        return torch.stack((a, b), -1).flatten(-2) if self.interleaved else torch.cat((a, b), -1)

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_table": None, "_tables_of_points": ()}

    def extra_repr(self) -> str:
        scaling = "" if self.scaling is None else f", scaling={self.scaling}"
        axes = "" if self.axes is None else f", axes={self.axes}"
        return f"dim={self.dim}, base={self.base:g}, interleaved={self.interleaved}{scaling}{axes}"


class ALiBi(Position):
    """Attention with linear biases (Press 2022): −slope · |distance|, with one fixed slope per head."""

    slopes: Float[Tensor, " heads"]

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        num_heads = check_integer("ALiBi: num_heads", num_heads, 1, MAX_HEADS)
        self.register_buffer("slopes", torch.tensor(_alibi_slopes(num_heads)))

    def by_distance(self, distance: Tensor) -> Tensor:
        slopes = to_at_least_fp32(self.slopes)
        return -slopes[:, None] * distance.abs().to(slopes.dtype)

    def check(self, heads: int, dim: int) -> None:
        _check_num_heads("ALiBi", self.slopes.shape[0], heads)

    def keep_heads(self, heads: Tensor) -> None:
        self.slopes = self.slopes[heads]


def _alibi_slopes(heads: int) -> list[float]:
    """2^(-8/n), 2^(-16/n), … for n heads; between two powers of two, the paper adds every other slope of the larger one."""
    power = 1 << heads.bit_length() - 1
    slopes = [2.0 ** (-8 * (i + 1) / power) for i in range(power)]
    return slopes + [2.0 ** (-4 * (i + 1) / power) for i in range(0, 2 * (heads - power), 2)]


class RelativeBias(Position):
    """T5's relative position bias (Raffel 2020): one learned number per head and bucket of distances.

    Half of the buckets hold one distance each, the others are logarithmically spaced up to `max_distance`. On a grid (`window`) there is
    one number per head and point of the window; offsets beyond the window share its border. (A table like Swin's for
    windows of 7 x 7, with offsets up to 6, is `window=(13, 13)`.)

    Args:
        num_heads: the number of columns of `weight` (buckets, heads).
        buckets: the number of buckets of distances.
        max_distance: distances beyond share the last bucket.
        bidirectional: half of the buckets are for keys before the query, half for keys after it; False: all are for keys before.
        window: on a grid, the number of offsets along each axis, instead of buckets: odd integers such as `(7, 7)`.
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
        num_heads = check_integer("RelativeBias: num_heads", num_heads, 1, MAX_HEADS)
        buckets = check_integer("RelativeBias: buckets", buckets, 4)
        if buckets % 4:
            raise ValueError(f"RelativeBias: buckets must be a multiple of 4, got {buckets}")
        max_distance = check_integer("RelativeBias: max_distance", max_distance, buckets + 1, hint="more than buckets")
        self.window = None if window is None else _check_odd_window(window)
        self.axes = None if self.window is None else len(self.window)
        self.buckets = buckets if self.window is None else math.prod(self.window)
        self.max_distance, self.bidirectional = max_distance, bidirectional
        check_numel("RelativeBias: weight", (self.buckets, num_heads))
        self.weight = nn.Parameter(torch.empty(self.buckets, num_heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise the table again."""
        nn.init.normal_(self.weight, std=0.02)

    def bucket(self, distance: Int[Tensor, "..."]) -> Int[Tensor, "..."]:
        """The row of `weight` for each relative position: `distance` is signed, key − query."""
        buckets = self.buckets // 2 if self.bidirectional else self.buckets
        ahead = (distance > 0).long() * buckets if self.bidirectional else torch.zeros_like(distance)
        distance = distance.abs() if self.bidirectional else (-distance).clamp(min=0)
        near = buckets // 2
        growth = torch.log(distance.clamp(min=near).float() / near) / math.log(self.max_distance / near)
        far = (near + (growth * (buckets - near)).long()).clamp(max=buckets - 1)
        return ahead + torch.where(distance < near, distance, far)

    def by_distance(self, distance: Tensor) -> Tensor:
        return to_at_least_fp32(self.weight)[self.bucket(distance)].T

    def by_offset(self, offset: Tensor) -> Tensor:
        assert self.window is not None
        row = torch.zeros_like(offset[..., 0])
        for axis, n in enumerate(self.window):
            row = row * n + offset[..., axis].clamp(-(n // 2), n // 2) + n // 2
        return to_at_least_fp32(self.weight)[row].movedim(-1, 0)

    def check(self, heads: int, dim: int) -> None:
        _check_num_heads("RelativeBias", self.weight.shape[1], heads)

    def keep_heads(self, heads: Tensor) -> None:
        self.weight = nn.Parameter(self.weight.detach()[:, heads].clone(), self.weight.requires_grad)

    def extra_repr(self) -> str:
        if self.window is not None:
            return f"window={self.window}"
        return f"buckets={self.buckets}, max_distance={self.max_distance}, bidirectional={self.bidirectional}"


def _check_odd_window(window: object) -> tuple[int, ...]:
    hint = "(7,) is for a line, (7, 7) for an image"
    sizes = tuple(check_integers("RelativeBias: window", window, hint=hint))
    if not sizes or not all(n % 2 for n in sizes):
        raise ValueError(f"RelativeBias: window must be one odd integer per axis, got {short_repr(window)}; {hint}")
    return sizes


class QuadraticOffset(Position):
    """−α|δ − Δ|² for a key at offset δ from its query on a grid: each head attends around a learned offset Δ (Cordonnier 2020).

    The larger α, the more weight lies at Δ: with integers in Δ this tends to a tap of a convolution. Beyond the border a head
    attends to the nearest point, the opposite side or the mirrored point, as `padding` says. With "zeros" α/2 is added, for a
    layer with `sink=0.0`: the sink, of value zero, then takes the weight of points beyond the border.

    Args:
        centres: initial Δ, the offset of each head's centre from the query (heads, axes).
        alpha: initial α; one is learned per head.
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
        value = as_tensor("QuadraticOffset: centres", centres, "of finite numbers (heads, axes)")
        real = not value.is_complex() and value.dtype != torch.bool
        value = value.to(torch.get_default_dtype()) if real and not value.is_floating_point() else value
        if not real or value.dim() != 2 or not value.numel() or not bool(value.isfinite().all()):
            got = describe_type(value)
            raise ValueError(f"QuadraticOffset: centres must be finite numbers (heads, axes), got {got}")
        alpha = check_number("QuadraticOffset: alpha", alpha, 0, math.inf, "()")
        modes = ("replicate", "zeros", "circular", "reflect")
        if padding not in modes:
            raise ValueError(f"QuadraticOffset: padding must be one of {', '.join(map(repr, modes))}, got {padding!r}")
        self.axes, self.padding = value.shape[1], padding
        self.centres = nn.Parameter(value.detach().clone())
        self.alpha = nn.Parameter(torch.full_like(value[:, 0], alpha))

    def by_offset(self, offset: Tensor) -> Tensor | None:
        if self.padding not in ("replicate", "zeros"):
            return None
        ones, centres = (1,) * (offset.dim() - 1), to_at_least_fp32(self.centres)
        distance = offset.to(centres.dtype) - centres.reshape(-1, *ones, offset.shape[-1])
        return self._bias_from_squares(distance.square().sum(-1))

    def on_grid(self, grid: GridLike, device: torch.device) -> Tensor:
        axes, centres = len(grid.sizes), to_at_least_fp32(self.centres)
        total = torch.zeros((), dtype=centres.dtype, device=device)
        for axis, (keys, queries, step) in enumerate(zip(grid.sizes, grid.outputs, grid.stride, strict=True)):
            at = torch.arange(queries, device=device) * step + centres[:, axis, None]
            if self.padding == "reflect" and keys > 1:
                at = keys - 1 - (at.remainder(2 * (keys - 1)) - (keys - 1)).abs()
            # (heads, queries along this axis, keys along it): far fewer than pairs
            distance = torch.arange(keys, device=device) - at[..., None]
            if self.padding == "circular":
                distance = (distance + keys / 2).remainder(keys) - keys / 2
            shape = [1] * (2 * axes)
            shape[axis], shape[axes + axis] = queries, keys
            total = total + distance.square().reshape(-1, *shape)
        return self._bias_from_squares(total.flatten(axes + 1).flatten(1, axes))

    def _bias_from_squares(self, square: Float[Tensor, "heads *any"]) -> Float[Tensor, "heads *any"]:
        alpha = to_at_least_fp32(self.alpha).reshape(-1, *(1,) * (square.dim() - 1))
        return alpha * ((0.5 if self.padding == "zeros" else 0.0) - square)

    def check(self, heads: int, dim: int) -> None:
        if len(self.centres) != heads:
            raise ValueError(f"QuadraticOffset: centres must have one row per head, {heads}, got {len(self.centres)}")

    def keep_heads(self, heads: Tensor) -> None:
        for name in ("centres", "alpha"):
            old = getattr(self, name)
            setattr(self, name, nn.Parameter(old.detach()[heads.to(old.device)].clone(), old.requires_grad))

    def extra_repr(self) -> str:
        return f"{len(self.centres)} heads, axes={self.axes}, padding={self.padding!r}"


def _check_num_heads(name: str, own: int, heads: int) -> None:
    if own != heads:
        raise ValueError(f"{name}: num_heads must equal the layer's {heads} heads, got {own}")
