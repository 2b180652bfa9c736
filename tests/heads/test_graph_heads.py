"""The view on a graph: its weights and metrics equal those of the same pairs as a mask."""

import copy
import pickle

import pytest
import torch

from polyhead import Graph, MultiHeadAttention

NODES, HEADS = 9, 3


def _pairs():
    every = torch.randperm(NODES * NODES)[:37]
    pairs = torch.stack((every % NODES, every // NODES))
    # node 4 has no in-edges
    return pairs[:, pairs[1] != 4]


@pytest.fixture(params=[(), (2,)])
def views(request):
    """A view on a graph, one on the same pairs as a mask, and the pairs."""
    pairs = _pairs()
    layer = MultiHeadAttention(6, num_heads=HEADS, head_dim=4, score="gatv2")
    x = torch.randn(*request.param, NODES, 6)
    adjacency = torch.zeros(NODES, NODES, dtype=torch.bool)
    adjacency[pairs[1], pairs[0]] = True
    return layer(x, over=Graph(pairs, NODES))[1], layer(x, over=adjacency)[1], pairs


def test_weights_are_in_the_order_of_the_edges(views):
    heads, dense, (source, destination) = views
    assert heads.shape == (*dense.shape[:-2], len(source))
    torch.testing.assert_close(heads.weights, dense.weights[..., destination, source])
    assert torch.equal(heads.edge_index, torch.stack((source, destination)))
    assert (heads.ndim, len(heads), heads.dtype) == (len(heads.shape), heads.shape[0], torch.float32)


@pytest.mark.parametrize("metric", ["entropy", "received", "diversity", "distance", "heatmap", "agreement"])
def test_metrics_equal_those_of_the_mask(views, metric):
    heads, dense, _ = views
    torch.testing.assert_close(getattr(heads, metric)(), getattr(dense, metric)())


@pytest.mark.parametrize("on", ["self", "previous", "first", 2, torch.arange(NODES) % 2 == 0])
def test_mass_equals_that_of_the_mask(views, on):
    heads, dense, _ = views
    torch.testing.assert_close(heads.mass(on), dense.mass(on))


def test_mass_refuses_other_numbers_of_nodes(views):
    with pytest.raises(ValueError, match=r"on must be a bool tensor \(..., 9\)"):
        views[0].mass(torch.ones(3, dtype=torch.bool))


@pytest.mark.parametrize("k", [1, 3, NODES])
def test_top_equals_that_of_the_mask(views, k):
    heads, dense, _ = views
    for a, b in zip(heads.top(k), dense.top(k), strict=True):
        torch.testing.assert_close(a, b)


def test_contribution_equals_that_of_the_mask(views):
    heads, dense, (source, destination) = views
    torch.testing.assert_close(heads.contribution().weights, dense.contribution().weights[..., destination, source])


def test_select_and_indexing_by_heads_edges_and_nodes(views):
    heads, _, (source, destination) = views
    whole = heads.weights
    torch.testing.assert_close(heads.select(heads=[2, 0]).weights, whole[..., [2, 0], :])
    torch.testing.assert_close(heads.select(edges=slice(3, 9)).weights, whole[..., 3:9])
    into = heads.select(queries=[3, 5])
    chosen = torch.isin(destination, torch.tensor([3, 5]))
    torch.testing.assert_close(into.weights, whole[..., chosen])
    assert torch.equal(into.edge_index, torch.stack((source, destination))[:, chosen])
    both = heads.select(heads=1, queries=[3, 5], keys=[0, 1, 2])
    chosen &= source < 3
    torch.testing.assert_close(both.weights, whole[..., 1:2, chosen])
    torch.testing.assert_close(heads[..., 1, 4:7], whole[..., 1, 4:7])
    torch.testing.assert_close(heads[..., -1], whole[..., -1])
    with pytest.raises(ValueError, match=r"edges must be integers in \[-30, 29\], for there are 30, got 99"):
        heads.select(edges=99)


def test_edges_need_a_graph(views):
    _, dense, _ = views
    with pytest.raises(ValueError, match="edges must be left out where the attention is not over a Graph"):
        dense.select(edges=[0])
    with pytest.raises(ValueError, match="edge_index needs an attention over a Graph"):
        _ = dense.edge_index


def test_copies_are_permanent(views):
    heads, _, _ = views
    whole = heads.weights
    for copied in (heads.detach(), heads.cpu(), pickle.loads(pickle.dumps(heads)), copy.deepcopy(heads)):
        torch.testing.assert_close(copied.weights, whole.detach(), check_stride=False)
    assert heads.numpy().shape == tuple(heads.shape)
    torch.testing.assert_close(torch.as_tensor(heads * 2), whole * 2)


def test_a_stale_view_raises():
    weights = torch.rand(5)
    graph = Graph(torch.tensor([[0, 1, 2, 2, 0], [1, 0, 0, 1, 0]]), 3, weights=weights)
    layer = MultiHeadAttention(6, num_heads=2, score="gat")
    _, heads = layer(torch.randn(3, 6), over=graph)
    permanent = heads.detach()
    before = heads.weights
    weights.mul_(2)
    with pytest.raises(ValueError, match="stale: over changed in place"):
        _ = heads.weights
    torch.testing.assert_close(permanent.weights, before.detach())
    _, heads = layer(torch.randn(3, 6), over=graph)
    with torch.no_grad():
        layer.score.source.add_(1.0)
    with pytest.raises(ValueError, match="stale: score changed in place"):
        heads.entropy()


def test_edge_weights_multiply_the_weights():
    graph = Graph(torch.tensor([[0, 1, 2], [0, 0, 1]]), 3, weights=torch.tensor([2.0, 2.0, 0.5]))
    _, heads = MultiHeadAttention(6, num_heads=2, score="gat")(torch.randn(3, 6), over=graph)
    torch.testing.assert_close(heads.weights[:, :2].sum(-1), torch.full((2,), 2.0))
    torch.testing.assert_close(heads.weights[:, 2], torch.full((2,), 0.5))


def test_gradients_of_entropy_equal_those_of_the_mask(views):
    heads, dense, _ = views
    layer_grad = lambda view: torch.autograd.grad(view.entropy().square().sum(), view._part.call.q, retain_graph=True)[
        0
    ]
    torch.testing.assert_close(layer_grad(heads), layer_grad(dense), atol=1e-5, rtol=1e-4)


def test_plot_and_html_have_a_picture_per_head(views):
    heads, _, _ = views
    assert len(heads.plot().axes) >= HEADS
    assert heads._repr_html_().count("<img") == HEADS


def test_agreement_is_one_for_static_attention():
    x = torch.randn(40, 6)
    graph = Graph(torch.randint(0, 40, (2, 100)), 40)
    static = MultiHeadAttention(6, num_heads=2, score="gat")(x, over=graph)[1]
    torch.testing.assert_close(static.agreement(), torch.ones(2))
    dynamic = MultiHeadAttention(6, num_heads=2, score="gatv2")(x, over=graph)[1]
    assert (dynamic.agreement() < 0.999).all()
    assert dynamic.select(heads=[1]).agreement().shape == (1,)
    with pytest.raises(ValueError, match=r"queries must be an integer in \[2, 2147483647\], got 1"):
        dynamic.agreement(1)


def test_edge_weights_that_are_learned_or_replaced():
    graph = Graph(torch.tensor([[0, 1], [1, 0]]), 2, weights=torch.ones(2, requires_grad=True))
    layer = MultiHeadAttention(6, num_heads=2, score="gat").requires_grad_(False)
    _, heads = layer(torch.randn(2, 6), over=graph)
    assert heads.requires_grad
    assert heads.weights.requires_grad
    graph.weights = torch.full((2,), 7.0)
    with pytest.raises(ValueError, match="stale: over changed"):
        _ = heads.weights


def test_entropy_of_negative_edge_weights():
    graph = Graph(torch.tensor([[0, 1, 0], [0, 0, 1]]), 2, weights=torch.tensor([-1.0, -1.0, 1.0]))
    _, heads = MultiHeadAttention(6, num_heads=2, score="gat")(torch.zeros(2, 6), over=graph)
    torch.testing.assert_close(
        heads.entropy(), torch.tensor([[0.5, 0.5]]).new_tensor([[0.6931, 0.0]] * 2), atol=1e-4, rtol=0
    )


def test_top_without_edges_or_rows():
    layer = MultiHeadAttention(4, 2)
    for x, edges in ((torch.randn(5, 4), 0), (torch.randn(0, 5, 4), 7)):
        _, heads = layer(x, over=Graph(torch.randint(5, (2, edges)), 5))
        values, keys = heads.top(2)
        assert values.shape == keys.shape == (*x.shape[:-2], 2, 5, 2)
        assert (values == 0).all() and (keys == -1).all()
