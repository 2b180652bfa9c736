"""Turns a neighbourhood into skipped blocks.

A neighbourhood gives each query the interval of keys it may attend to (`Neighbourhood.interval`). `plan_tiles` cuts the
intervals into rectangles of queries x keys. Pairs outside all rectangles are never computed, forward or backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Bounds = npt.NDArray[np.int64]

# Queries per rectangle where the intervals slide: fewer waste less work outside the band, more use the cores better.
BLOCK_QUERIES = 128
# Shorter runs of queries are not worth a rectangle of their own.
MIN_RUN_LENGTH = 32


class Tile(NamedTuple):
    """Queries [q0, q1) against keys [k0, k1), in the rows [b0, b1) of the batch."""

    b0: int
    b1: int
    q0: int
    q1: int
    k0: int
    k1: int
    shape: str
    """`"full"`: every pair; `"causal"`: a lower triangle; `"ragged"`: given by the intervals."""


def plan_tiles(
    first: Bounds, stop: Bounds, batch: int, *, block: int = BLOCK_QUERIES, whole: bool = True, together: bool = False
) -> list[Tile]:
    """Cut the intervals (rows, queries) of a batch into tiles.

    Args:
        first, stop: the interval `[first, stop)` of each query; one row for the whole batch, or one per batch row.
        batch: the number of rows of the batch.
        block: the largest number of queries in a ragged tile.
        whole: leave full and causal tiles in one piece.
        together: make one tile for rows that differ, if they are so small that a call costs more than their work.
    """
    if len(first) > 1 and (first == first[0]).all() and (stop == stop[0]).all():
        first, stop = first[:1], stop[:1]
    if len(first) == 1:
        return list(_tiles_of_batch_row(first[0], stop[0], 0, batch, block, whole))
    if together and (stop > first).any():
        live = stop > first
        k0, k1 = int(first[live].min()), int(stop[live].max())
        return [Tile(0, batch, 0, first.shape[1], k0, k1, "ragged")]
    return [tile for b in range(batch) for tile in _tiles_of_batch_row(first[b], stop[b], b, b + 1, block, whole)]


def _tiles_of_batch_row(first: Bounds, stop: Bounds, b0: int, b1: int, block: int, whole: bool) -> Iterator[Tile]:
    for q0, q1 in _runs_of_queries(first, stop):
        tile = _bounding_tile(first, stop, b0, b1, q0, q1)
        if tile is None:
            continue
        if tile.q1 - tile.q0 <= block or (whole and tile.shape != "ragged"):
            yield tile
            continue
        blocks = (
            _bounding_tile(first, stop, b0, b1, q, min(q + block, tile.q1)) for q in range(tile.q0, tile.q1, block)
        )
        yield from (tile for tile in blocks if tile is not None)


def _runs_of_queries(first: Bounds, stop: Bounds) -> Iterator[tuple[int, int]]:
    """Runs of queries whose intervals stay or slide by one; a jump of either end starts a new run."""
    jumps = (np.diff(first) >> 1 != 0) | (np.diff(stop) >> 1 != 0)
    edges = [0, *(np.flatnonzero(jumps) + 1).tolist(), len(first)]
    begin = 0
    for edge, following in zip(edges[1:], [*edges[2:], None], strict=True):
        if following is None or (edge - begin >= MIN_RUN_LENGTH and following - edge >= MIN_RUN_LENGTH):
            yield begin, edge
            begin = edge


def _bounding_tile(first: Bounds, stop: Bounds, b0: int, b1: int, q0: int, q1: int) -> Tile | None:
    """The bounding rectangle of these queries' intervals, without queries at either end that have no key."""
    live = np.flatnonzero(stop[q0:q1] > first[q0:q1])
    if not len(live):
        return None
    k0, k1 = int(first[q0:q1][live].min()), int(stop[q0:q1][live].max())
    q0, q1 = q0 + int(live[0]), q0 + int(live[-1]) + 1
    low, high = first[q0:q1], stop[q0:q1]
    shape = "ragged"
    if (low == k0).all():
        if (high == k1).all():
            shape = "full"
        elif k1 - k0 == q1 - q0 and (np.diff(high) == 1).all() and high[0] == k0 + 1:
            shape = "causal"
    return Tile(b0, b1, q0, q1, k0, k1, shape)
