"""Neighbourhoods of the package, each with a mask from the documented definition."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from random import Random
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from polyhead import Causal, Dense, Mask, Neighbourhood, Padding, Segments, Window, from_mask_mod

Bools = NDArray[np.bool_]
Part = tuple[Any, ...]


class Sizes(NamedTuple):
    """The axes of an attention."""

    batch: tuple[int, ...]
    heads: int
    queries: int
    keys: int
    # whether the queries are known to be the keys: padding then applies to both
    to_itself: bool = False

    @property
    def places(self) -> NDArray[np.int64]:
        """Positions of the queries along the keys, as a column: the last query is at the last key."""
        return (np.arange(self.queries) + self.keys - self.queries)[:, None]


class Drawn(NamedTuple):
    """A neighbourhood and the pairs (..., heads or 1, queries, keys) that its definition allows."""

    over: Neighbourhood
    allowed: Bools


def _dense(sizes: Sizes, rng: np.random.Generator) -> Drawn:
    return Drawn(Dense(), np.ones((1, sizes.queries, sizes.keys), bool))


def _causal(sizes: Sizes, rng: np.random.Generator) -> Drawn:
    return Drawn(Causal(), (np.arange(sizes.keys) <= sizes.places)[None])


def _window(sizes: Sizes, rng: np.random.Generator, left: int, right: int) -> Drawn:
    # Python's integers do not overflow
    near = [[-left <= key - int(place) <= right for key in range(sizes.keys)] for place in sizes.places[:, 0]]
    return Drawn(Window(left, right), np.array(near, bool).reshape(1, sizes.queries, sizes.keys))


def _padding(sizes: Sizes, rng: np.random.Generator, kind: str, queries: bool | None) -> Drawn:
    """Padding on the right by lengths, or anywhere by a bool tensor: left, right, holes, no real key at all."""
    keys = sizes.keys
    lengths = np.asarray(rng.integers(0, keys + 1, sizes.batch))
    key = np.arange(keys)
    real = key < lengths[..., None]
    if kind == "left":
        real = real[..., ::-1].copy()
    elif kind == "holes":
        real = rng.random((*sizes.batch, keys)) < 0.7
    elif kind == "middle":
        start = np.asarray(rng.integers(0, keys + 1, sizes.batch))
        real = real & (key >= start[..., None])
    given = torch.as_tensor(lengths) if kind == "lengths" else torch.as_tensor(real)
    allowed = np.broadcast_to(real[..., None, None, :], (*sizes.batch, 1, sizes.queries, keys))
    if sizes.to_itself if queries is None else queries:
        place = sizes.places[:, 0]
        inside = (place >= 0) & (place < keys)
        asks = (
            real[..., np.clip(place, 0, max(keys - 1, 0))] & inside
            if keys
            else np.zeros((*sizes.batch, len(place)), bool)
        )
        allowed = allowed & asks[..., None, :, None]
    return Drawn(Padding(given, queries=queries), allowed)


def _segments(sizes: Sizes, rng: np.random.Generator, kind: str, own: bool, rows: bool) -> Drawn:
    """Contiguous or scattered documents; queries that are the last keys, or have separate ids."""
    batch = sizes.batch if rows else ()
    ids = rng.integers(-2, 3, (*batch, sizes.keys))
    if kind == "sorted":
        ids = np.sort(ids, -1)
    if own or sizes.queries > sizes.keys:
        mine = rng.integers(-2, 4, (*batch, sizes.queries))
        over = Segments(torch.as_tensor(ids), query_ids=torch.as_tensor(mine))
    else:
        mine = ids[..., sizes.keys - sizes.queries :]
        over = Segments(torch.as_tensor(ids))
    return Drawn(over, (mine[..., :, None] == ids[..., None, :])[..., None, :, :])


def _mask(sizes: Sizes, rng: np.random.Generator, kind: str, share: float) -> Drawn:
    """A bool tensor in one of the documented shapes; some of its rows may be empty."""
    pairs = (sizes.queries, sizes.keys)
    shape = {
        "pairs": pairs,
        "keys": (1, 1, sizes.keys),
        "heads": (*(1,) * len(sizes.batch), sizes.heads, *pairs),
        "rows": (*sizes.batch, 1, *pairs),
        "both": (*sizes.batch, sizes.heads, *pairs),
    }[kind]
    keep = rng.random(shape) < share
    if kind != "keys":
        keep &= rng.random((*shape[:-1], 1)) < 0.9
    allowed = keep[None] if keep.ndim == 2 else keep
    return Drawn(Mask(torch.as_tensor(keep)), np.broadcast_to(allowed, (*allowed.shape[:-2], *pairs)))


def _mask_mod(sizes: Sizes, rng: np.random.Generator, *numbers: int) -> Drawn:
    """A mask_mod of flex_attention, whose queries count from 0 and whose batch is one axis."""
    *weights, modulus = numbers

    def mod(*indices: Any) -> Any:
        return sum(weight * index for weight, index in zip(weights, indices, strict=True) if weight) % modulus != 0

    axes = (math.prod(sizes.batch) if weights[0] else 1, sizes.heads if weights[1] else 1, sizes.queries, sizes.keys)
    allowed = np.broadcast_to(mod(*np.ogrid[tuple(slice(n) for n in axes)]), axes)
    allowed = allowed.reshape(*(sizes.batch if weights[0] else (1,) * len(sizes.batch)), *axes[1:])
    return Drawn(from_mask_mod(mod), allowed)


_KINDS: dict[str, Callable[..., Drawn]] = {
    "dense": _dense, "causal": _causal, "window": _window, "padding": _padding, "segments": _segments, "mask": _mask,
    "mask_mod": _mask_mod,
}  # fmt: skip


def _make(part: Part, sizes: Sizes, rng: np.random.Generator) -> Drawn:
    """One part: a neighbourhood, or `~` or `|` of parts."""
    kind, *options = part
    if kind == "not":
        inner = _make(options[0], sizes, rng)
        return Drawn(~inner.over, ~inner.allowed)
    if kind == "or":
        made = [_make(option, sizes, rng) for option in options]
        return functools.reduce(lambda a, b: Drawn(a.over | b.over, a.allowed | b.allowed), made)
    return _KINDS[kind](sizes, rng, *options)


def build(parts: tuple[Part, ...], sizes: Sizes, seed: int) -> Drawn:
    """The intersection of all parts; `Dense()` without any."""
    made = [
        _make(part, sizes, np.random.default_rng([seed, place])) for place, part in enumerate(parts or (("dense",),))
    ]
    joined = functools.reduce(lambda a, b: Drawn(a.over & b.over, a.allowed & b.allowed), made)
    return joined


def draw_part(random: Random) -> Part:
    """Draw one neighbourhood as plain data."""
    kind = random.choice(tuple(_KINDS))
    if kind == "window":
        far = (0, 1, 2, random.randrange(70), random.choice((2**31 - 1, 2**31, 2**40, 2**63 - 1)))
        reach = lambda: random.choices(far, (4, 4, 4, 8, 1))[0]
        return (kind, reach(), reach())
    if kind == "padding":
        return (
            kind,
            random.choice(("lengths", "left", "right", "holes", "middle")),
            random.choice((None, True, False)),
        )
    if kind == "segments":
        return (kind, random.choice(("sorted", "scattered")), random.random() < 0.3, random.random() < 0.5)
    if kind == "mask":
        kinds = ("pairs", "keys", "heads", "rows", "both")
        return (kind, random.choice(kinds), random.choice((0.0, 0.1, 0.5, 0.9, 1.0)))
    if kind == "mask_mod":
        by = lambda: random.choice((0, 0, 1, 2))
        return (kind, by(), by(), random.randrange(4), 1, random.choice((2, 3, 5)))
    return (kind,)


def draw_expression(random: Random, draw: Callable[[Random], Part] = draw_part) -> Part:
    """Draw a neighbourhood, or one in three times a union or a complement of some."""
    kind = random.choices(("", "not", "or"), (6, 1, 2))[0]
    if not kind:
        return draw(random)
    return (kind, *(draw_expression(random, draw) for _ in range(1 if kind == "not" else 2)))


def draw_parts(random: Random) -> tuple[Part, ...]:
    """Draw up to three neighbourhoods to intersect."""
    number = random.choices((0, 1, 2, 3), (2, 5, 4, 2))[0]
    return tuple(draw_expression(random) for _ in range(number))
