"""Positions by the formulas of the papers: rotation matrices, and numbers added to a score by distance."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


def frequencies(dim: int, base: float, factor: float | None = None, original_length: int | None = None) -> list[float]:
    """Radians per position of each of dim/2 pairs (Su 2021), scaled as in Chen 2023 or as in Llama 3.1."""
    found = []
    for pair in range(dim // 2):
        frequency = base ** (-2 * pair / dim)
        if factor is not None and original_length is None:
            frequency /= factor
        elif factor is not None and original_length is not None:
            wavelength = 2 * math.pi / frequency
            # Llama 3.1: short waves are unchanged, long ones scaled, and blended between 1 and 4 periods
            if wavelength > original_length / 1.0:
                frequency /= factor
            elif wavelength > original_length / 4.0:
                smooth = (original_length / wavelength - 1.0) / (4.0 - 1.0)
                frequency = (1 - smooth) * frequency / factor + smooth * frequency
        found.append(frequency)
    return found


def rotations(
    places: Sequence[float] | Ints, width: int, rates: Sequence[float], interleaved: bool, first: int = 0
) -> Floats:
    """One matrix (width, width) per item: rotates pairs of features from `first` on by place x rate, and leaves the others."""
    matrices = np.tile(np.eye(width), (len(places), 1, 1))
    for pair, rate in enumerate(rates):
        a, b = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + len(rates))
        a, b = a + first, b + first
        angle = np.asarray(places, dtype=np.float64) * rate
        matrices[:, a, a] = matrices[:, b, b] = np.cos(angle)
        matrices[:, a, b], matrices[:, b, a] = -np.sin(angle), np.sin(angle)
    return matrices


def along_axes(points: Ints, width: int, dim: int, base: float, interleaved: bool) -> Floats:
    """Rotations on a grid: the first `dim` features are split into one part per axis, rotated by that coordinate."""
    axes = points.shape[1]
    part = dim // axes
    matrices = np.tile(np.eye(width), (len(points), 1, 1))
    for axis in range(axes):
        matrices = rotations(points[:, axis], width, frequencies(part, base), interleaved, axis * part) @ matrices
    return matrices


def rotate(x: Tensor, matrices: Tensor | None, absolute: bool) -> Tensor:
    """Items (..., items, dim) times one matrix each; with `absolute`, the absolute values of the matrices."""
    if matrices is None:
        return x
    return torch.einsum("ide,...ie->...id", matrices.abs() if absolute else matrices, x)


def slopes(heads: int) -> list[float]:
    """The slopes of ALiBi (Press 2022): a geometric sequence. If the number of heads is not a power of two: those of the next
    lower power, then every other one of the next higher power."""
    power = 1
    while power * 2 <= heads:
        power *= 2
    lower = [2 ** (-8 * (head + 1) / power) for head in range(power)]
    higher = [2 ** (-8 * (head + 1) / (2 * power)) for head in range(2 * power)]
    return lower + higher[0::2][: heads - power]


def bucket(distance: int, buckets: int, max_distance: int, bidirectional: bool) -> int:
    """T5's bucket of a key `distance` after its query (Raffel 2020): half of the buckets have one distance each, the others are
    logarithmic."""
    start = 0
    if bidirectional:
        buckets //= 2
        start = buckets if distance > 0 else 0
        distance = abs(distance)
    else:
        distance = max(0, -distance)
    exact = buckets // 2
    if distance < exact:
        return start + distance
    far = math.log(distance / exact) / math.log(max_distance / exact) * (buckets - exact)
    return start + min(exact + int(far), buckets - 1)


def distances(queries: int, keys: int) -> Ints:
    """Positions of each key relative to each query (queries, keys); the last query is at the last key."""
    return np.arange(keys)[None, :] - (np.arange(queries)[:, None] + keys - queries)
