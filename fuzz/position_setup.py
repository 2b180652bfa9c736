"""Positions: what the package is given, beside the matrices that turn and the numbers that are added by definition."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from random import Random
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fuzz.case import Mismatch
from fuzz.oracle import Inputs
from fuzz.positions import bucket, distances, frequencies, rotations, slopes
from fuzz.scores import parameter
from polyhead import ALiBi, Position, RelativeBias, RopeScaling, Rotary


class Placing(NamedTuple):
    """A position, and what it means for so many queries and keys."""

    # the package's, with weights from among the inputs
    position: Callable[[Inputs], Position | None] = lambda given: None
    # the inputs that it owns
    shapes: Mapping[str, tuple[int, ...]] = MappingProxyType({})
    # matrices that queries and keys are turned by, one an item
    queries: Tensor | None = None
    keys: Tensor | None = None
    # what is added to the scores (heads, queries, keys)
    added: Callable[[Inputs, bool], Tensor] | None = None


def along_sequence(choice: tuple[Any, ...], heads: int, queries: int, keys: int, dim: int) -> Placing:
    """A position that counts along the keys, of which the queries are the last."""
    kind, *options = choice
    if kind == "rotary":
        return _rotary(queries, keys, dim, *options)
    if kind == "alibi":
        return _alibi(heads, queries, keys)
    if kind == "relative":
        return _relative(heads, queries, keys, *options)
    return Placing()


def _rotary(
    queries: int, keys: int, dim: int, turned: int | None, base: float, interleaved: bool, factor: float | None, trained: int | None
) -> Placing:  # fmt: skip
    stretch = None if factor is None else RopeScaling(factor, original_length=trained)
    position = Rotary(turned, base=base, interleaved=interleaved, scaling=stretch)
    rates = frequencies(turned or dim, base, factor, trained)
    of_queries = rotations(np.arange(keys - queries, keys), dim, rates, interleaved)
    of_keys = rotations(np.arange(keys), dim, rates, interleaved)
    return Placing(lambda given: position, {}, torch.as_tensor(of_queries), torch.as_tensor(of_keys))


def _alibi(heads: int, queries: int, keys: int) -> Placing:
    position, wanted = ALiBi(heads), torch.tensor(slopes(heads), dtype=torch.float64)
    # they are a buffer of fp32, whatever the dtype of the call
    if not torch.allclose(position.slopes.double(), wanted, rtol=1e-6, atol=0):
        raise Mismatch("ALiBi", "slopes", f"they are {position.slopes.tolist()}, wanted {wanted.tolist()}")
    down = position.slopes.double()[:, None, None] * torch.as_tensor(distances(queries, keys)).abs()
    return Placing(lambda given: position, added=lambda given, absolute: down if absolute else -down)


def _relative(heads: int, queries: int, keys: int, buckets: int, max_distance: int, bidirectional: bool) -> Placing:
    apart = distances(queries, keys)
    rows = [[bucket(int(d), buckets, max_distance, bidirectional) for d in row] for row in apart]
    place = torch.tensor(rows, dtype=torch.long).reshape(apart.shape)

    def position(given: Inputs) -> Position:
        made = RelativeBias(heads, buckets=buckets, max_distance=max_distance, bidirectional=bidirectional)
        made.weight = parameter(given["table"])
        return made

    return Placing(position, {"table": (buckets, heads)}, added=lambda given, _: given["table"][place].movedim(-1, 0))


def draw_position(random: Random, dim: int) -> tuple[Any, ...]:
    """A position along a sequence as plain data."""
    kind = random.choices(("none", "rotary", "alibi", "relative"), (4, 3, 1, 2))[0]
    if kind == "rotary" and dim >= 2:
        turned = None if dim % 2 == 0 and random.random() < 0.6 else random.randrange(2, dim + 1, 2)
        factor, trained = random.choice(((None, None), (None, None), (4.0, None), (8.0, 32)))
        return (kind, turned, random.choice((10_000.0, 100.0)), random.random() < 0.4, factor, trained)
    if kind == "relative":
        buckets = random.choice((4, 8, 16, 32))
        return (kind, buckets, random.choice((buckets + 1, 64, 128)), random.random() < 0.6)
    return (kind,) if kind in ("none", "alibi") else ("none",)
