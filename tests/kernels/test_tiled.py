"""The operator itself, by torch's opcheck, and tiles that share queries against the definition."""

import math

import pytest
import torch

from polyhead import Causal, Window, attend
from polyhead.kernels import tiled
from polyhead.kernels.reference import attend_intervals
from polyhead.kernels.tile_plan import plan_tiles


@pytest.mark.parametrize("plain", [True, False])
def test_the_operator_passes_opcheck(plain):
    q, k, v = (torch.randn(2, heads, 37, 8, requires_grad=True) for heads in (4, 2, 2))
    first, stop = (Causal() & Window(9)).interval(37, 37, torch.device("cpu"))
    table = torch.randn(4, 73, requires_grad=True) if plain else None
    arguments = (q, k, v, first[None], stop[None], None, table, None, None, None, None, 0.3, 0.0, plain, [])
    torch.library.opcheck(torch.ops.polyhead.tiled.default, arguments)


def slide(queries, start, width=None):
    """Intervals that end one key later from query to query, and begin so too if they have a width."""
    query = torch.arange(queries)
    stop = start + 1 + query
    return (torch.zeros_like(query) if width is None else stop - width)[None], stop[None]


# intervals of (rows or 1, queries); the number of keys; the shapes of the tiles
SPLIT = {
    "rectangle + triangle": (slide(149, 131), 280, {"full", "causal"}),
    "rectangle + upper triangle": (slide(37, 2200, 2101), 2250, {"full", "reversed", "causal"}),
    "first slides": ((torch.arange(67)[None], torch.full((1, 67), 1100)), 1103, {"full", "reversed"}),
    "rows that differ": (
        tuple(torch.cat(pair) for pair in zip(slide(149, 131), slide(149, 40), strict=True)),
        283,
        {"full", "causal"},
    ),
    "ceases to slide": (
        (torch.zeros(1, 300, dtype=torch.long), torch.cat((200 + torch.arange(140), torch.full((160,), 339)))[None]),
        339,
        {"full", "causal"},
    ),
}


def operands(name, dtype, dim=8):
    (first, stop), keys, shapes = SPLIT[name]
    torch.manual_seed(0)
    q = torch.randn(2, 4, first.shape[1], dim, dtype=torch.float64)
    k, v = torch.randn(2, 2, 2, keys, dim, dtype=torch.float64)
    tiles = plan_tiles(first.numpy(), stop.numpy(), 2, split_keys=True)
    assert {tile.shape for tile in tiles} == shapes
    assert len({tile.rows for tile in tiles}) < len(tiles)
    return tuple(x.to(dtype).requires_grad_() for x in (q, k, v)), (first, stop)


def results(function, tensors, intervals):
    """The output, the log-sum-exp and the gradients of q, k and v from both."""
    out, lse = function(*tensors, *intervals, None, None, None, None, None, None, 0.4, 0.0)
    torch.manual_seed(1)
    towards = torch.randn(out.shape, dtype=torch.float64), torch.randn(lse.shape, dtype=torch.float64)
    found = torch.autograd.grad((out, lse), tensors, [g.to(y.dtype) for g, y in zip(towards, (out, lse), strict=True)])
    return out, lse, *found


def by_tiles(*arguments):
    return torch.ops.polyhead.tiled(*arguments, False, [])


@pytest.mark.parametrize("name", SPLIT)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-5), (torch.bfloat16, 4e-2)]
)
def test_tiles_that_share_queries_equal_the_definition(name, dtype, tolerance):
    tensors, intervals = operands(name, dtype)
    wide = tuple(x.detach().double().requires_grad_() for x in tensors)
    for ours, exact in zip(
        results(by_tiles, tensors, intervals), results(attend_intervals, wide, intervals), strict=True
    ):
        torch.testing.assert_close(ours.double(), exact, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("name", SPLIT)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_nan_and_infinity_reach_only_the_rows_that_see_them(name, bad, which):
    """The last key is seen by the last queries only, or by none; the outputs and gradients of the others stay finite."""
    tensors, intervals = operands(name, torch.float64)
    with torch.no_grad():
        tensors[which][0, 1, -1 if which else 3] = bad
    ours, exact = results(by_tiles, tensors, intervals), results(attend_intervals, tensors, intervals)
    if math.isnan(bad):
        for x, y in zip(ours, exact, strict=True):
            torch.testing.assert_close(x, y, atol=1e-10, rtol=1e-10, equal_nan=True)
        return
    # sums with an infinite score are infinite or NaN, depending on their order
    for x, y in zip(ours[:2], exact[:2], strict=True):
        torch.testing.assert_close(x[y.isfinite()], y[y.isfinite()], atol=1e-10, rtol=1e-10)


def test_large_scores_merge_without_overflow():
    """Weights of exp(±2000) between the tiles: the smaller share vanishes, nothing is NaN."""
    tensors, intervals = operands("rectangle + triangle", torch.float32)
    with torch.no_grad():
        tensors[1][:, :, :131] *= 300
    wide = tuple(x.detach().double().requires_grad_() for x in tensors)
    ours, exact = results(by_tiles, tensors, intervals), results(attend_intervals, wide, intervals)
    assert all(x.isfinite().all() for x in ours)
    torch.testing.assert_close(ours[0].double(), exact[0], atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("chunk", [160, 300])
def test_a_chunk_with_a_cache_computes_only_tiles_without_a_mask(chunk, monkeypatch):
    shapes = []
    compute = tiled.forward_flash
    monkeypatch.setattr(
        tiled, "forward_flash", lambda *a, shape, scale: shapes.append(shape) or compute(*a, shape=shape, scale=scale)
    )
    q, (k, v) = torch.randn(1, 2, chunk, 16), torch.randn(2, 1, 2, 700, 16)
    out = attend(q, k, v, over=Causal())
    assert shapes == ["full", "causal"]
    torch.testing.assert_close(out, attend(q, k, v, over=Causal(), kernel="reference"), atol=1e-5, rtol=1e-5)
