"""Random combinations of arguments: every kernel against the reference."""

from __future__ import annotations

from unittest import mock

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from polyhead import (
    GAT,
    ALiBi,
    Causal,
    Dense,
    Dot,
    GATv2,
    Graph,
    Mask,
    Padding,
    RelativeBias,
    Rotary,
    Segments,
    Window,
    attend,
    explain,
)
from polyhead.kernels import tile_problem
from polyhead.kernels.tile_plan import plan_tiles
from polyhead.neighbourhood import Neighbourhood, Sizes

CPU = torch.device("cpu")

KINDS = ("dense", "causal", "window", "padding", "keep", "segments", "mask")


@st.composite
def plain_neighbourhoods(draw: st.DrawFn, batch: int, queries: int, keys: int) -> Neighbourhood:
    """A neighbourhood that fits these sizes, without operators."""
    random = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    kind = draw(st.sampled_from(KINDS))
    if kind == "dense":
        return Dense()
    if kind == "causal":
        return Causal()
    if kind == "window":
        return Window(draw(st.integers(0, keys + 2)), draw(st.integers(0, keys + 2)))
    if kind == "padding":
        return Padding(torch.randint(0, keys + 1, (batch,), generator=random), queries=draw(st.booleans()))
    if kind == "keep":
        return Padding(torch.rand(batch, keys, generator=random) > 0.3, queries=draw(st.booleans()))
    if kind == "segments":
        ids = torch.randint(0, 3, (batch, keys), generator=random)
        ids = ids.sort(-1).values if draw(st.booleans()) else ids
        apart = queries > keys or draw(st.booleans())
        return Segments(ids, torch.randint(0, 4, (batch, queries), generator=random) if apart else None)
    return Mask(torch.rand(batch, 1, queries, keys, generator=random) > 0.5)


@st.composite
def expressions(draw: st.DrawFn, batch: int, queries: int, keys: int, depth: int = 3) -> tuple[Neighbourhood, Tensor]:
    """A nested expression of `&`, `|` and `~`, and the pairs that it allows, by the same operators of bool tensors."""
    operation = draw(st.sampled_from(("none", "&", "&", "|", "~"))) if depth else "none"
    if operation == "none":
        over = draw(plain_neighbourhoods(batch, queries, keys))
        return over, over.mask(Sizes((batch,), 1, queries, keys), CPU).expand(batch, 1, queries, keys)
    over, allowed = draw(expressions(batch, queries, keys, depth - 1))
    if operation == "~":
        return ~over, ~allowed
    other, also = draw(expressions(batch, queries, keys, depth - 1))
    return (over & other, allowed & also) if operation == "&" else (over | other, allowed | also)


sizes = st.tuples(st.integers(1, 3), st.sampled_from([1, 2, 5, 33, 67, 131]), st.sampled_from([1, 3, 34, 70, 133]))


@settings(max_examples=150, deadline=None)
@given(data=st.data(), size=sizes, heads=st.sampled_from([(1, 1), (4, 2), (6, 1), (3, 3)]))
def test_any_call_equals_the_reference(data: st.DataObject, size, heads):
    batch, queries, keys = size
    over, _ = data.draw(expressions(batch, queries, keys))
    position = data.draw(
        st.sampled_from([None, Rotary(), ALiBi(heads[0]), RelativeBias(heads[0], buckets=8, max_distance=30)])
    )
    dropout = data.draw(st.sampled_from([0.0, 0.4]))
    sink = data.draw(st.sampled_from([None, 0.5]))
    torch.manual_seed(data.draw(st.integers(0, 10**6)))
    q = torch.randn(batch, heads[0], queries, 8, dtype=torch.float64, requires_grad=True)
    k = torch.randn(batch, heads[1], keys, 8, dtype=torch.float64, requires_grad=True)
    v = torch.randn(batch, heads[1], keys, 8, dtype=torch.float64, requires_grad=True)
    if position is not None:
        position = position.to(torch.float64)
    options = {"over": over, "position": position, "sink": sink, "dropout": dropout, "seed": 3}
    # the rows of a batch in one tile, or in their own tiles
    with mock.patch.object(
        tile_problem, "MIN_WORK_PER_ROW", data.draw(st.sampled_from([0, tile_problem.MIN_WORK_PER_ROW]))
    ):
        _equal(q, k, v, options, data.draw(st.sampled_from([None, "tiled"])))


def _equal(q, k, v, options, kernel=None):
    out, wanted = attend(q, k, v, kernel=kernel, **options), attend(q, k, v, kernel="reference", **options)
    towards = torch.randn_like(out)
    got = torch.autograd.grad(out, (q, k, v), towards)
    expected = torch.autograd.grad(wanted, (q, k, v), towards)
    for a, b in zip((out, *got), (wanted, *expected), strict=True):
        torch.testing.assert_close(a, b, atol=1e-9, rtol=1e-9)


@settings(max_examples=200, deadline=None)
@given(data=st.data(), size=sizes)
def test_intervals_and_tiles_contain_every_allowed_pair(data: st.DataObject, size):
    """Allowed pairs lie in the interval, the interval lies in the tiles, and an exact interval equals the predicate."""
    batch, queries, keys = size
    over, allowed = data.draw(expressions(batch, queries, keys))
    assert torch.equal(over.mask(Sizes((batch,), 1, queries, keys), CPU).expand_as(allowed), allowed)
    pairs = torch.cartesian_prod(torch.arange(keys - queries, keys), torch.arange(keys))[:500]
    listed = over.allows_pairs(*pairs.T).expand(batch, 1, len(pairs))
    assert torch.equal(listed, allowed.flatten(-2)[..., : len(pairs)])
    allowed = allowed[:, 0]
    first, stop = over.interval(queries, keys, CPU)
    first, stop = (x.expand(batch, queries) for x in (first, stop))
    key = torch.arange(keys)
    inside = (key >= first[..., None]) & (key < stop[..., None])
    assert not (allowed & ~inside).any()
    if over.exact:
        assert torch.equal(inside, allowed)

    covered = torch.zeros(batch, queries, keys, dtype=torch.int)
    whole, split_keys = data.draw(st.booleans()), data.draw(st.booleans())
    for tile in plan_tiles(first.numpy(), stop.numpy(), batch, block=16, whole=whole, split_keys=split_keys):
        part = (slice(tile.b0, tile.b1), slice(tile.q0, tile.q1), slice(tile.k0, tile.k1))
        covered[part] += 1
        if tile.shape == "full":
            assert inside[part].all()
        if tile.shape == "causal":
            assert torch.equal(inside[part], torch.ones_like(inside[part]).tril())
    assert covered.max() <= 1
    assert not (inside & (covered == 0)).any()


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_graph_equals_dense_attention(data: st.DataObject):
    """Every kernel along edges against dense attention in which each edge is its own key."""
    torch.manual_seed(data.draw(st.integers(0, 10**6)))
    sources, destinations = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 40))
    edges, heads = data.draw(st.integers(0, 300)), data.draw(st.integers(1, 5))
    dim = data.draw(st.sampled_from([1, 3, 8, 9, 16, 24, 33]))
    # some nodes have most of the edges
    skew = data.draw(st.sampled_from([1.0, 4.0]))
    source, destination = (
        (torch.rand(edges) ** skew * nodes).long().clamp(max=nodes - 1) for nodes in (sources, destinations)
    )
    score = data.draw(st.sampled_from([Dot(), GAT(heads, dim), GATv2(heads, dim)])).double()
    q = torch.randn(heads, destinations, dim, dtype=torch.float64, requires_grad=True)
    k = torch.randn(heads, sources, dim, dtype=torch.float64, requires_grad=True)
    tied = data.draw(st.booleans())
    v = k if tied else torch.randn(heads, sources, dim, dtype=torch.float64, requires_grad=True)
    graph = Graph(torch.stack((source, destination)), (sources, destinations))
    mine = destination == torch.arange(destinations)[:, None]
    wanted = attend(q, k[:, source], v[:, source], over=mine, score=score)
    learned = [q, k] if tied else [q, k, v]
    learned += list(score.parameters())
    towards = torch.randn_like(wanted)
    expected = torch.autograd.grad(wanted, learned, towards, allow_unused=True, materialize_grads=True)
    for kernel in {explain(q, k, v, over=graph, score=score).kernel, "edges_torch"}:
        out = attend(q, k, v, over=graph, score=score, kernel=kernel)
        got = torch.autograd.grad(out, learned, towards, allow_unused=True, materialize_grads=True)
        for a, b in zip((out, *got), (wanted, *expected), strict=True):
            torch.testing.assert_close(a, b, atol=1e-9, rtol=1e-9)
