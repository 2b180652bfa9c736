"""The hash that decides which pairs are dropped."""

import math

import numpy as np
import pytest
import torch

from polyhead import Graph, Grid, attend
from polyhead.kernels.dropout import keep_mask


def grid(seed=1, heads=3, queries=257, keys=263, dropout=0.3):
    return keep_mask(
        torch.tensor(seed),
        torch.arange(heads)[:, None, None],
        torch.arange(queries)[:, None],
        torch.arange(keys),
        dropout,
    )


@pytest.mark.parametrize("dropout", [0.01, 0.1, 0.5, 0.9])
def test_the_share_of_kept_pairs(dropout):
    kept = grid(dropout=dropout).double()
    error = (dropout * (1 - dropout) / kept.numel()) ** 0.5
    assert abs(kept.mean().item() - (1 - dropout)) < 5 * error


def test_rows_columns_heads_and_seeds_are_independent():
    kept = grid(dropout=0.5).double() - 0.5
    bound = 5 * 0.25 / (257 * 263) ** 0.5
    pairs = [
        (kept[0, :-1], kept[0, 1:]),
        (kept[0, :, :-1], kept[0, :, 1:]),
        (kept[0], kept[1]),
        (kept[0], grid(seed=2, dropout=0.5)[0].double() - 0.5),
        (kept[0, :257, :257], kept[0, :257, :257].T * (1 - torch.eye(257, dtype=torch.double))),
    ]
    for a, b in pairs:
        assert abs((a * b).mean().item()) < bound
    # all rows and columns keep about the same share
    assert kept.mean(-1).abs().max() < 6 * 0.5 / 263**0.5
    assert kept.mean(-2).abs().max() < 6 * 0.5 / 257**0.5


def test_it_equals_the_hash_in_python_integers():
    def mix(x):
        x = np.uint32(x)
        with np.errstate(over="ignore"):
            x = np.uint32((x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D))
            x = np.uint32((x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B))
        return np.uint32(x ^ (x >> np.uint32(16)))

    kept = grid(seed=12345, dropout=0.25)
    with np.errstate(over="ignore"):
        for head, query, key in [(0, 0, 0), (2, 100, 7), (1, 256, 262), (2, 3, 250)]:
            row = mix(np.uint32(mix(np.uint32(mix(12345) + np.uint32(head))) + np.uint32(query)))
            word = mix(row ^ np.uint32(np.uint32(key) * np.uint32(0x9E3779B1)))
            assert bool(kept[head, query, key]) == (np.int32(word) >= 2**30 - 2**31)


@pytest.mark.parametrize("dropout", [1 - 2**-33, 1 - 2**-40, math.nextafter(1.0, 0.0)])
def test_dropout_close_to_one_drops_everything(dropout):
    """The threshold stays an int32: beyond it nothing would be dropped."""
    q, graph, grid = torch.randn(2, 4, 10, 8), Graph(torch.randint(0, 10, (2, 30)), 10), Grid(2, 5, window=3)
    cases = [
        (None, "short"),
        (None, "tiled"),
        (None, "reference"),
        (graph, "edges_native"),
        (graph, "edges_torch"),
        (grid, "grid"),
    ]
    for over, kernel in cases:
        assert attend(q, q, q, over=over, dropout=dropout, seed=3, kernel=kernel).abs().max() == 0, kernel
