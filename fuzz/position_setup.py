"""Positions of the package, each with its definition: rotation matrices, or numbers added to the scores."""

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


class PositionSetup(NamedTuple):
    """A position of the package, and its definition for given numbers of queries and keys."""

    # builds the package's position, with weights from the inputs
    position: Callable[[Inputs], Position | None] = lambda given: None
    # shapes of the inputs that it owns
    shapes: Mapping[str, tuple[int, ...]] = MappingProxyType({})
    # rotation matrices of queries and keys, one per item
    queries: Tensor | None = None
    keys: Tensor | None = None
    # the numbers added to the scores (heads, queries, keys)
    added: Callable[[Inputs, bool], Tensor] | None = None


def along_sequence(choice: tuple[Any, ...], heads: int, queries: int, keys: int, dim: int) -> PositionSetup:
    """A position along the keys; the queries are the last of them."""
    kind, *options = choice
    if kind == "rotary":
        return _rotary(queries, keys, dim, *options)
    if kind == "alibi":
        return _alibi(heads, queries, keys)
    if kind == "relative":
        return _relative(heads, queries, keys, *options)
    return PositionSetup()


def _rotary(
    queries: int, keys: int, dim: int, rotary_dim: int | None, base: float, interleaved: bool, factor: float | None, original_length: int | None
) -> PositionSetup:  # fmt: skip
    scaling = None if factor is None else RopeScaling(factor, original_length=original_length)
    position = Rotary(rotary_dim, base=base, interleaved=interleaved, scaling=scaling)
    rates = frequencies(rotary_dim or dim, base, factor, original_length)
    of_queries = rotations(np.arange(keys - queries, keys), dim, rates, interleaved)
    of_keys = rotations(np.arange(keys), dim, rates, interleaved)
    return PositionSetup(lambda given: position, {}, torch.as_tensor(of_queries), torch.as_tensor(of_keys))


def _alibi(heads: int, queries: int, keys: int) -> PositionSetup:
    position, expected = ALiBi(heads), torch.tensor(slopes(heads), dtype=torch.float64)
    # a buffer in fp32, independent of the dtype of the call
    if not torch.allclose(position.slopes.double(), expected, rtol=1e-6, atol=0):
        raise Mismatch("ALiBi", "slopes", f"they are {position.slopes.tolist()}, expected {expected.tolist()}")
    down = position.slopes.double()[:, None, None] * torch.as_tensor(distances(queries, keys)).abs()
    return PositionSetup(lambda given: position, added=lambda given, absolute: down if absolute else -down)


def _relative(
    heads: int, queries: int, keys: int, buckets: int, max_distance: int, bidirectional: bool
) -> PositionSetup:
    apart = distances(queries, keys)
    rows = [[bucket(int(d), buckets, max_distance, bidirectional) for d in row] for row in apart]
    place = torch.tensor(rows, dtype=torch.long).reshape(apart.shape)

    def position(given: Inputs) -> Position:
        made = RelativeBias(heads, buckets=buckets, max_distance=max_distance, bidirectional=bidirectional)
        made.weight = parameter(given["table"])
        return made

    return PositionSetup(
        position, {"table": (buckets, heads)}, added=lambda given, _: given["table"][place].movedim(-1, 0)
    )


def draw_position(random: Random, dim: int) -> tuple[Any, ...]:
    """Draw a position along a sequence as plain data."""
    kind = random.choices(("none", "rotary", "alibi", "relative"), (4, 3, 1, 2))[0]
    if kind == "rotary" and dim >= 2:
        rotary_dim = None if dim % 2 == 0 and random.random() < 0.6 else random.randrange(2, dim + 1, 2)
        factor, original_length = random.choice(((None, None), (None, None), (4.0, None), (8.0, 32)))
        return (kind, rotary_dim, random.choice((10_000.0, 100.0)), random.random() < 0.4, factor, original_length)
    if kind == "relative":
        buckets = random.choice((4, 8, 16, 32))
        return (kind, buckets, random.choice((buckets + 1, 64, 128)), random.random() < 0.6)
    return (kind,) if kind in ("none", "alibi") else ("none",)
