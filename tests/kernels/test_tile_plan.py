"""Pairs that are skipped cost nothing: the area of the tiles."""

import numpy as np
import pytest
import torch

from polyhead import Causal, Padding, Segments, Window
from polyhead.kernels.tile_plan import BAND_BLOCK_QUERIES, BLOCK_QUERIES, plan_tiles


def area(over, queries, batch=1):
    first, stop = over.interval(queries, queries, torch.device("cpu"))
    tiles = plan_tiles(first.expand(batch, queries).numpy(), stop.expand(batch, queries).numpy(), batch)
    return sum((t.b1 - t.b0) * (t.q1 - t.q0) * (t.k1 - t.k0) for t in tiles), tiles


@pytest.mark.parametrize("tokens", [4099, 8209])
def test_a_window_costs_its_width(tokens):
    computed, _ = area(Window(256), tokens)
    assert computed <= tokens * (2 * 256 + 1 + BLOCK_QUERIES)


def test_padding_costs_the_real_keys():
    lengths = torch.tensor([100, 37, 512, 0])
    computed, tiles = area(Padding(lengths, queries=True), 512, batch=4)
    assert computed == 100**2 + 37**2 + 512**2
    assert {t.shape for t in tiles} == {"full"}


def test_documents_cost_their_own_squares():
    ids = torch.tensor([0] * 300 + [1] * 100 + [2] * 50)
    computed, tiles = area(Segments(ids), 450)
    assert computed == 300**2 + 100**2 + 50**2
    assert [t.shape for t in tiles] == ["full"] * 3


def test_causal_documents_stay_whole_triangles():
    ids = torch.tensor([0] * 300 + [1] * 150)
    _, tiles = area(Causal() & Segments(ids), 450)
    assert [t.shape for t in tiles] == ["causal"] * 2


def test_causal_decoding_of_a_chunk_skips_future_keys():
    first, stop = Causal().interval(1024, 4096, torch.device("cpu"))
    tiles = plan_tiles(first[None].numpy(), stop[None].numpy(), 1)
    computed = sum((t.q1 - t.q0) * (t.k1 - t.k0) for t in tiles)
    assert computed <= (3072 + 512 + BLOCK_QUERIES) * 1024


def test_short_runs_share_a_tile():
    ids = np.arange(4000) // 5
    _, tiles = area(Segments(torch.from_numpy(ids)), 4000)
    assert len(tiles) <= 4000 // BLOCK_QUERIES + 1


def test_small_rows_that_differ_share_one_tile():
    first, stop = Padding(torch.tensor([3, 0, 7]), queries=True).interval(9, 9, torch.device("cpu"))
    (tile,) = plan_tiles(first.numpy(), stop.numpy(), 3, together=True)
    assert tile == (0, 3, 0, 9, 0, 7, "ragged")


def split(first, stop):
    """The tiles of intervals, cut along the keys; checks that they hold each allowed pair once and no others where they say so."""
    first, stop = np.asarray(first), np.asarray(stop)
    tiles = plan_tiles(first[None], stop[None], 1, split_keys=True)
    key = np.arange(stop.max())
    inside = (key >= first[:, None]) & (key < stop[:, None])
    covered = np.zeros(inside.shape, dtype=int)
    for tile in tiles:
        part = slice(tile.q0, tile.q1), slice(tile.k0, tile.k1)
        covered[part] += 1
        size = tile.q1 - tile.q0, tile.k1 - tile.k0
        shapes = {"full": np.ones(size), "causal": np.tri(*size), "reversed": np.tri(*size).T}
        if tile.shape != "ragged":
            assert (inside[part] == shapes[tile.shape].astype(bool)).all()
    assert covered.max() == 1
    assert covered[inside].all()
    return tiles


def test_the_last_queries_of_a_causal_call_are_a_rectangle_and_a_triangle():
    queries = np.arange(2048)
    assert split(0 * queries, 2049 + queries) == [
        (0, 1, 0, 2048, 0, 2048, "full"),
        (0, 1, 0, 2048, 2048, 4096, "causal"),
    ]


def test_the_first_queries_of_a_reversed_causal_call_are_a_rectangle_and_a_triangle():
    queries = np.arange(1500)
    assert split(queries, 0 * queries + 2000) == [
        (0, 1, 0, 1500, 1500, 2000, "full"),
        (0, 1, 0, 1500, 0, 1500, "reversed"),
    ]


def test_a_wide_band_has_two_triangles_per_block():
    queries = np.arange(2 * BAND_BLOCK_QUERIES + 77)
    tiles = split(queries, queries + 2500)
    assert [tile.shape for tile in tiles] == ["full", "reversed", "causal"] * 3
    assert len({tile.rows for tile in tiles}) == 3


def test_a_narrow_band_stays_in_blocks():
    queries = np.arange(1000)
    assert {tile.shape for tile in split(queries, queries + 257)} == {"ragged"}


@pytest.mark.parametrize("before", [0, 1, 40])
@pytest.mark.parametrize("after", [0, 1, 40, 500])
def test_a_run_is_cut_where_its_end_ceases_to_slide(before, after):
    """Queries that see the same keys, then a slide, then the same keys: a chunk of own queries against a part of the keys."""
    stop = np.concatenate((np.full(before, 301), 301 + np.arange(300), np.full(after, 600)))
    tiles = split(np.zeros_like(stop), stop)
    assert "causal" in {tile.shape for tile in tiles}
    assert len(tiles) <= 4


def test_queries_without_keys_do_not_prevent_a_cut():
    stop = np.concatenate((np.zeros(50, dtype=int), 400 + np.arange(300)))
    assert [tile.shape for tile in split(np.zeros_like(stop), stop)] == ["full", "causal"]


def test_uneven_slides_stay_in_blocks():
    queries = np.arange(600)
    assert {tile.shape for tile in split(queries // 2, 700 + queries)} == {"ragged"}
