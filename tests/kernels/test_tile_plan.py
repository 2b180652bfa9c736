"""Pairs that are skipped cost nothing: the area of the tiles."""

import numpy as np
import pytest
import torch

from polyhead import Causal, Padding, Segments, Window
from polyhead.kernels.tile_plan import BLOCK_QUERIES, plan_tiles


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
