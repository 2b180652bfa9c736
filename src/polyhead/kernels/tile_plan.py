"""Turns a neighbourhood into skipped blocks.

A neighbourhood gives each query the interval of keys it may attend to (`Neighbourhood.interval`). `plan_tiles` cuts the
intervals into rectangles of queries x keys. Pairs outside all rectangles are never computed, forward or backward.

Where the intervals slide, a rectangle holds forbidden pairs, and torch's kernel is slower with a mask than without. A wide run of
such queries is better cut along the keys too: keys that every query sees, and a triangle at either end that slides. The tiles then
share queries, and whoever computes them merges their outputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Bounds = npt.NDArray[np.int64]

# Queries per rectangle where the intervals slide: fewer waste less work outside the band, more use the cores better.
BLOCK_QUERIES = 128
# Shorter runs of queries are not worth a rectangle of their own.
MIN_RUN_LENGTH = 32
# Keys that all queries of a run share, from which on full + causal tiles are faster than one ragged tile.
MIN_SHARED_KEYS = 512
# The same where the first key slides: items of an upper triangle are reversed, which costs copies.
MIN_SHARED_KEYS_REVERSED = 1024
# Queries per block where both ends slide and the shared keys suffice.
BAND_BLOCK_QUERIES = 1024


class Tile(NamedTuple):
    """Queries [q0, q1) against keys [k0, k1), in the rows [b0, b1) of the batch."""

    b0: int
    b1: int
    q0: int
    q1: int
    k0: int
    k1: int
    shape: str
    """`"full"`: every pair; `"causal"`: a lower triangle; `"reversed"`: an upper triangle; `"ragged"`: given by the intervals."""

    @property
    def rows(self) -> tuple[int, int, int, int]:
        """The rows of the batch and the queries."""
        return self[:4]


# The shapes of tiles, by their numbers in a flat list.
_SHAPES = ("full", "causal", "reversed", "ragged")


def flatten_tiles(tiles: Sequence[Tile]) -> list[int]:
    """Tiles as integers, which a torch operator takes."""
    return [number for tile in tiles for number in (*tile[:6], _SHAPES.index(tile.shape))]


def unflatten_tiles(numbers: Sequence[int]) -> list[Tile]:
    """Tiles from the integers of `flatten_tiles`."""
    if len(numbers) % 7 or any(number < 0 for number in numbers) or any(n >= len(_SHAPES) for n in numbers[6::7]):
        raise ValueError(
            f"tiles must be seven numbers per tile, as flatten_tiles lists them, got {len(numbers)} numbers"
        )
    each = [numbers[at : at + 7] for at in range(0, len(numbers), 7)]
    return [Tile(b0, b1, q0, q1, k0, k1, _SHAPES[shape]) for b0, b1, q0, q1, k0, k1, shape in each]


def tiles_of_all_keys(batch: int, queries: int, keys: int, block: int) -> list[Tile]:
    """Blocks of queries against all keys, in any pattern."""
    return [Tile(0, batch, q, min(q + block, queries), 0, keys, "ragged") for q in range(0, queries, block)]


def plan_tiles(
    first: Bounds, stop: Bounds, batch: int, *, block: int = BLOCK_QUERIES, whole: bool = True, together: bool = False,
    split_keys: bool = False,
) -> list[Tile]:  # fmt: skip
    """Cut the intervals (rows, queries) of a batch into tiles.

    Args:
        first, stop: the interval `[first, stop)` of each query; one row for the whole batch, or one per batch row.
        batch: the number of rows of the batch.
        block: the largest number of queries in a ragged tile.
        whole: leave full and causal tiles in one piece.
        together: make one tile for rows that differ, if they are so small that a call costs more than their work.
        split_keys: cut wide runs along the keys too, into full tiles and triangles. Tiles that share queries have equal `rows` and
            follow each other.
    """
    if len(first) > 1 and (first == first[0]).all() and (stop == stop[0]).all():
        first, stop = first[:1], stop[:1]
    if len(first) == 1:
        return list(_tiles_of_batch_row(first[0], stop[0], 0, batch, block, whole, split_keys))
    if together and (stop > first).any():
        live = stop > first
        k0, k1 = int(first[live].min()), int(stop[live].max())
        return [Tile(0, batch, 0, first.shape[1], k0, k1, "ragged")]
    rows = ((first[b], stop[b], b, b + 1) for b in range(batch))
    return [tile for row in rows for tile in _tiles_of_batch_row(*row, block, whole, split_keys)]


def _tiles_of_batch_row(
    first: Bounds, stop: Bounds, b0: int, b1: int, block: int, whole: bool, split_keys: bool
) -> Iterator[Tile]:
    for q0, q1 in _runs_of_queries(first, stop):
        tile = _bounding_tile(first, stop, b0, b1, q0, q1)
        if tile is None:
            continue
        if whole and tile.shape != "ragged":
            yield tile
        elif split_keys:
            yield from _split_run(first, stop, tile, block)
        else:
            yield from _blocks_of_queries(first, stop, tile, block)


def _blocks_of_queries(first: Bounds, stop: Bounds, run: Tile, block: int) -> Iterator[Tile]:
    for q in range(run.q0, run.q1, block):
        tile = _bounding_tile(first, stop, run.b0, run.b1, q, min(q + block, run.q1))
        if tile is not None:
            yield tile


def _split_run(first: Bounds, stop: Bounds, run: Tile, block: int) -> Iterator[Tile]:
    """Cut a run where an end of the intervals begins or ceases to slide, and the wide pieces along the keys."""
    begin = run.q0
    slopes = np.stack((np.diff(first[run.q0 : run.q1]), np.diff(stop[run.q0 : run.q1])))
    changes = np.flatnonzero((slopes[:, 1:] != slopes[:, :-1]).any(0)) + run.q0 + 2
    edges = [run.q0, *changes.tolist(), run.q1]
    for q0, q1 in pairwise(edges):
        tiles = list(_split_piece(first[q0:q1], stop[q0:q1], run, q0, block)) if q1 - q0 >= MIN_RUN_LENGTH else []
        if tiles:
            yield from _blocks_of_queries(first, stop, run._replace(q0=begin, q1=q0), block)
            yield from tiles
            begin = q1
    yield from _blocks_of_queries(first, stop, run._replace(q0=begin), block)


def _split_piece(low: Bounds, high: Bounds, run: Tile, q0: int, block: int) -> Iterator[Tile]:
    """The tiles of queries from `q0` on whose intervals stay or slide uniformly; none if ragged tiles are faster."""
    queries = len(low)
    slides = int(low[1] - low[0]), int(high[1] - high[0])
    if slides not in ((0, 0), (0, 1), (1, 0), (1, 1)) or low[0] >= high[0] or low[-1] >= high[-1]:
        return
    if slides == (1, 1):
        size = BAND_BLOCK_QUERIES
        if high[0] - low[0] < size + MIN_SHARED_KEYS_REVERSED:
            return
    else:
        size, shared = queries, int(high[0] - low[-1])
        if slides[0] and max(queries, shared) < MIN_SHARED_KEYS_REVERSED:
            return
        if not slides[0] and queries <= block and shared < MIN_SHARED_KEYS:
            return
    for a in range(0, queries, size):
        b = min(a + size, queries)
        yield from _triangles_and_core(low[a:b], high[a:b], run._replace(q0=q0 + a, q1=q0 + b), slides)


def _triangles_and_core(low: Bounds, high: Bounds, run: Tile, slides: tuple[int, int]) -> Iterator[Tile]:
    """The keys that all queries see, and a triangle for each end that slides; its diagonal is one key of each query."""
    k0, k1 = int(low[-1]) + slides[0], int(high[0]) - slides[1]
    if k1 > k0:
        yield run._replace(k0=k0, k1=k1, shape="full")
    if slides[0]:
        yield run._replace(k0=int(low[0]), k1=k0, shape="reversed")
    if slides[1]:
        yield run._replace(k0=k1, k1=int(high[-1]), shape="causal")


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
