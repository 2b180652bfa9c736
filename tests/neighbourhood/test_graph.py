"""Graphs: construction, CSR, graphs derived from others, and error messages."""

import pytest
import torch

import polyhead
import polyhead.numpy as definition
from polyhead import GAT, Causal, Dense, GATv2, Graph, Mask, MultiHeadAttention, Padding, Segments, Window, attend
from polyhead._torch import native
from polyhead.neighbourhood import csr as sorting

PAIRS = torch.tensor([[0, 1, 2, 2, 0], [1, 0, 0, 1, 0]])


def csr_by_definition(pairs, sources, destinations):
    """The arrays of a CSR, in plain Python."""
    edges = range(pairs.shape[1])
    edge_id = sorted(edges, key=lambda e: (int(pairs[1, e]), e))
    out_slot = sorted(edges, key=lambda slot: (int(pairs[0, edge_id[slot]]), slot))
    indptr = [sum(int(d) < node for d in pairs[1]) for node in range(destinations + 1)]
    out_indptr = [sum(int(s) < node for s in pairs[0]) for node in range(sources + 1)]
    indices, out_indices = [int(pairs[0, e]) for e in edge_id], [int(pairs[1, edge_id[slot]]) for slot in out_slot]
    return indptr, indices, edge_id, out_indptr, out_slot, out_indices


@pytest.fixture(params=["native", "torch"])
def sorter(request, monkeypatch):
    if request.param == "torch":
        monkeypatch.setattr(sorting, "native", None)
    elif native is None:
        pytest.skip("the C++ kernels are not built")


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.int16])
@pytest.mark.parametrize(
    ("sources", "destinations", "edges"), [(7, 5, 31), (1, 1, 3), (40, 3, 11), (5, 0, 0), (0, 0, 0)]
)
def test_edges_are_sorted_both_ways(sorter, dtype, sources, destinations, edges):
    high = torch.tensor([[max(sources, 1)], [max(destinations, 1)]])
    pairs = (torch.rand(2, edges) * high).to(dtype)
    graph = Graph(pairs, (sources, destinations))
    for actual, expected in zip(graph.csr, csr_by_definition(pairs, sources, destinations), strict=True):
        assert actual.dtype == torch.int32
        assert actual.tolist() == expected
    assert torch.equal(graph.edge_index, pairs.long())


@pytest.mark.parametrize(
    "make", [lambda x: x.T.contiguous().T, lambda x: x.repeat_interleave(3, 1)[:, ::3], lambda x: x.flip(1).flip(1)]
)
def test_strides_do_not_matter(sorter, make):
    pairs = torch.randint(0, 9, (2, 50))
    graph, other = Graph(pairs, 9), Graph(make(pairs), 9)
    assert all(torch.equal(a, b) for a, b in zip(graph.csr, other.csr, strict=True))


@pytest.mark.parametrize(
    ("pairs", "nodes", "message"),
    [
        (torch.tensor([[0, 3], [1, 1]]), 3, r"edge_index must have nodes in \[0, 3\), got 3 -> 1 at edge 1"),
        (torch.tensor([[0, 1], [1, -1]]), 3, "got 1 -> -1 at edge 1"),
        (torch.tensor([[0, 1], [1, -1]]), None, "got 1 -> -1 at edge 1"),
        (torch.tensor([[-(2**40)], [0]]), 3, "got -1099511627776 -> 0 at edge 0"),
        (torch.tensor([[0], [2**33]]), 3, "got 0 -> 8589934592 at edge 0"),
        (
            torch.tensor([[4], [1]]),
            (5, 1),
            r"edge_index must have sources in \[0, 5\) and destinations in \[0, 1\), got 4 -> 1",
        ),
        (torch.tensor([[0], [0]]), 0, r"edge_index must have nodes in \[0, 0\), got 0 -> 0"),
    ],
)
def test_edges_to_unknown_nodes_are_refused(sorter, pairs, nodes, message):
    with pytest.raises(ValueError, match=message):
        Graph(pairs, nodes)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((PAIRS.float(),), "edge_index must be integers, the indices of nodes, got torch.float32"),
        ((PAIRS.bool(),), "edge_index must be integers, the indices of nodes, got torch.bool"),
        ((PAIRS.T,), r"edge_index must have shape \(2, edges\), got \(5, 2\); pass edge_index.T"),
        (
            (torch.zeros(3, 4).long(),),
            r"edge_index must have shape \(2, edges\), got \(3, 4\); sources in the first row",
        ),
        ((PAIRS, -1), r"Graph: num_nodes must be an integer in \[0, 2147483646\], got -1"),
        ((PAIRS, 2.5), r"Graph: num_nodes must be an integer in \[0, 2147483646\], got 2\.5"),
        ((PAIRS, (3, 3, 3)), r"Graph: num_nodes must be an integer, or \(sources, destinations\), got \(3, 3, 3\)"),
        (
            (PAIRS, 3, torch.randn(4, 2)),
            r"features must be floating-point numbers \(edges, dim\) = \(5, dim\), got torch.float32 of shape \(4, 2\)",
        ),
        ((PAIRS, 3, torch.ones(5, 2).long()), "features must be floating-point numbers .*got torch.int64"),
        (
            (PAIRS, 3, None, torch.randn(4)),
            r"weights must be floating-point numbers \(edges,\) = \(5,\), got torch.float32 of shape \(4,\)",
        ),
        ((PAIRS, 3, None, torch.tensor([1, torch.nan, 1, 1, torch.nan])), "weights must not contain NaN, got 2 of 5"),
    ],
)
def test_invalid_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Graph(*arguments)


def test_a_graph_with_another_number_of_nodes_is_refused():
    layer = MultiHeadAttention(6, num_heads=2, score="gat")
    with pytest.raises(ValueError, match="Graph: num_nodes must be the number of items, 4, got 3"):
        layer(torch.randn(4, 6), over=Graph(PAIRS))
    with pytest.raises(
        ValueError, match=r"Graph: \(sources, destinations\) must be \(keys, queries\), \(4, 2\), got \(5, 2\)"
    ):
        layer(torch.randn(2, 6), torch.randn(4, 6), over=Graph(PAIRS[:, :1], (5, 2)))


def test_features_and_scores_have_to_agree():
    plain, rich = Graph(PAIRS), Graph(PAIRS, features=torch.randn(5, 4))
    x = torch.randn(3, 6)
    with pytest.raises(ValueError, match=r"over must be a graph with no features per edge for GAT, got 4;.*edge_dim=4"):
        MultiHeadAttention(6, num_heads=2, score="gat")(x, over=rich)
    with pytest.raises(ValueError, match="over must be a graph with no features per edge for Dot, got 4"):
        MultiHeadAttention(6, num_heads=2)(x, over=rich)
    taking = MultiHeadAttention(6, num_heads=2, score=GATv2(2, 3, edge_dim=4))
    with pytest.raises(ValueError, match="over must be a graph with 4 features per edge for GATv2, got none"):
        taking(x, over=plain)
    with pytest.raises(ValueError, match="over must be a graph with 4 features per edge for GATv2, got none"):
        taking(x)
    assert taking(x, over=rich)[0].shape == (3, 6)


def test_later_changes_of_edge_index_do_not_affect_the_graph():
    pairs = PAIRS.clone()
    graph = Graph(pairs)
    pairs.fill_(10**6)
    assert torch.equal(graph.edge_index, PAIRS)


def test_the_number_of_nodes_is_inferred_from_the_edges():
    graph = Graph(PAIRS)
    assert (graph.sources, graph.destinations, graph.num_edges) == (3, 3, 5)
    assert repr(graph) == "Graph(3 nodes, 5 edges)"
    assert repr(Graph(PAIRS, (3, 2), weights=torch.ones(5))) == "Graph(3 → 2 nodes, 5 edges, weights)"


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc])
@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
def test_a_sparse_matrix_has_destinations_in_its_rows(layout):
    matrix = torch.tensor([[0.0, 2.0, 0.0, 0.5], [1.0, 0.0, 0.0, 0.0]])
    graph = Graph(matrix.to_sparse(layout=layout))
    assert (graph.sources, graph.destinations) == (4, 2)
    dense = torch.zeros(2, 4).index_put((graph.edge_index[1], graph.edge_index[0]), graph.weights)
    assert torch.equal(dense, matrix)
    assert Graph((matrix != 0).float().to_sparse(layout=layout)).weights is None
    with pytest.raises(
        ValueError, match=r"num_nodes must be \(4, 2\), the columns and rows of the sparse matrix, got 7"
    ):
        Graph(matrix.to_sparse(layout=layout), 7)


def test_self_loops_are_added_once():
    features, weights = torch.randn(5, 2), torch.rand(5)
    graph = Graph(PAIRS, 4, features, weights).with_self_loops()
    # node 0 has one already
    assert graph.edge_index.tolist() == [[0, 1, 2, 2, 0, 1, 2, 3], [1, 0, 0, 1, 0, 1, 2, 3]]
    torch.testing.assert_close(graph.features[5], features[[0, 3]].mean(0))
    assert graph.features[6:].eq(0).all()
    assert torch.equal(graph.weights, torch.cat((weights, torch.ones(3))))
    assert graph.with_self_loops().num_edges == 8
    filled = Graph(PAIRS, 4, features).with_self_loops(2.5)
    assert filled.features[5:].eq(2.5).all()
    with pytest.raises(ValueError, match="fill must be a number, a tensor or 'mean', got 'sum'"):
        Graph(PAIRS, 4, features).with_self_loops("sum")
    with pytest.raises(ValueError, match="must be the same nodes, got 3 sources and 2 destinations"):
        Graph(PAIRS, (3, 2)).with_self_loops()


def test_reverse_flips_every_edge():
    graph = Graph(PAIRS, (3, 2), torch.randn(5, 2), torch.rand(5))
    flipped = graph.reverse()
    assert torch.equal(flipped.edge_index, PAIRS.flip(0))
    assert (flipped.sources, flipped.destinations) == (2, 3)
    assert flipped.features is graph.features
    assert flipped.weights is graph.weights


def test_a_batch_of_graphs_gives_the_results_of_each_graph():
    one, two = Graph(PAIRS, 3, weights=torch.rand(5)), Graph(PAIRS[:, :2], 5, weights=torch.rand(2))
    both = Graph.batch([one, two])
    assert both.edge_index[:, 5:].tolist() == [[3, 4], [4, 3]]
    layer = MultiHeadAttention(6, num_heads=2, score="gatv2")
    x = torch.randn(8, 6)
    separate = torch.cat((layer(x[:3], over=one)[0], layer(x[3:], over=two)[0]))
    torch.testing.assert_close(layer(x, over=both)[0], separate)
    with pytest.raises(ValueError, match="all graphs or none must have weights, got some with and some without"):
        Graph.batch([one, Graph(PAIRS)])
    with pytest.raises(ValueError, match="graphs must have at least one graph, got an empty list"):
        Graph.batch([])


def test_normalised_adjacency():
    A = (torch.rand(6, 6, dtype=torch.float64) < 0.5).double()
    A.fill_diagonal_(1)
    A = torch.maximum(A, A.T)
    graph = Graph(A.to_sparse()).gcn_normalise()
    dense = torch.zeros_like(A).index_put((graph.edge_index[1], graph.edge_index[0]), graph.weights.double())
    torch.testing.assert_close(dense.numpy(), definition.gcn_normalise(A.numpy()), atol=1e-7, rtol=1e-6)


@pytest.mark.parametrize(
    "other",
    [
        Causal(), Window(1), Window(0, 2), Dense(), Padding(torch.tensor([True, False] * 4 + [True])), Padding(torch.tensor(5)),
        Segments(torch.arange(9) % 2), Mask(torch.rand(9, 9) > 0.5), Causal() & Window(2), Graph(torch.randint(0, 9, (2, 30)), 9),
    ],
    ids=repr,
)  # fmt: skip
@pytest.mark.parametrize("graph_last", [False, True])
def test_another_neighbourhood_filters_the_edges(other, graph_last):
    pairs = torch.randint(0, 9, (2, 60))
    graph = Graph(pairs, 9, torch.randn(60, 2), torch.rand(60))
    # of two graphs the left one is filtered
    both = other & graph if graph_last and not isinstance(other, Graph) else graph & other
    sizes = polyhead.neighbourhood.Sizes((), 1, 9, 9)
    allowed = other.bind_self_attention(True).mask(sizes, torch.device("cpu")).reshape(9, 9)
    kept = [e for e in range(60) if allowed[pairs[1, e], pairs[0, e]]]
    assert both.edge_ids.tolist() == kept
    assert torch.equal(both.edge_index, pairs[:, kept])
    assert torch.equal(both.features, graph.features[kept])
    assert torch.equal(both.weights, graph.weights[kept])


def test_edge_ids_refer_to_the_first_graph():
    graph = Graph(torch.randint(0, 9, (2, 60)), 9)
    twice = (graph & Causal()) & Window(3)
    assert torch.equal(graph.edge_index[:, twice.edge_ids], twice.edge_index)


def test_a_filter_that_differs_by_head_or_batch_entry_is_refused():
    graph = Graph(PAIRS)
    with pytest.raises(ValueError, match="differs by head"):
        graph & (torch.rand(4, 3, 3) > 0.5)
    with pytest.raises(ValueError, match="differs by batch entry"):
        graph & Padding(torch.tensor([1, 2]))
    with pytest.raises(ValueError, match="keep must cover 3 keys, got 7"):
        graph & Padding(torch.ones(7, dtype=torch.bool))


@pytest.mark.parametrize("weighted", [False, True])
def test_layers_equal_their_matrix_forms(weighted):
    """H = (A ∘ α) X Wᵀ, head by head, by the definition in NumPy."""
    A = (torch.rand(7, 7, dtype=torch.float64) < 0.4).double() * (torch.rand(7, 7, dtype=torch.float64) + 0.5)
    A[3] = 0
    A = A if weighted else (A > 0).double()
    graph, x = Graph(A.to_sparse()), torch.randn(7, 5, dtype=torch.float64)
    gat = MultiHeadAttention(5, num_heads=3, head_dim=4, score="gat", combine="concat", bias=False).double()
    v2 = MultiHeadAttention(5, num_heads=3, head_dim=4, score="gatv2", combine="mean", bias=False).double()
    split = lambda linear: linear.weight.detach().unflatten(0, (3, 4)).numpy()
    rows = lambda weight: weight.detach().numpy()
    heads = [
        definition.gat(x.numpy(), A.numpy(), W, a, b)
        for W, a, b in zip(split(gat.k_proj), rows(gat.score.destination), rows(gat.score.source), strict=True)
    ]
    torch.testing.assert_close(gat(x, over=graph)[0], torch.from_numpy(definition.np.concatenate(heads, axis=1)))
    heads = [
        definition.gatv2(x.numpy(), A.numpy(), R, L, a)
        for R, L, a in zip(split(v2.q_proj), split(v2.k_proj), rows(v2.score.weight), strict=True)
    ]
    torch.testing.assert_close(v2(x, over=graph)[0], torch.from_numpy(definition.np.mean(heads, axis=0)))


def test_a_node_with_a_million_neighbours():
    edges = 10**6
    source = torch.randint(0, 1000, (edges,))
    graph = Graph(torch.stack((source, torch.zeros(edges, dtype=torch.long))), (1000, 2))
    q, k, v = (torch.randn(1, items, 8, dtype=torch.float64) for items in (2, 1000, 1000))
    score = GAT(1, 8).double()
    out = attend(q, k, v, over=graph, score=score)
    # an edge that occurs n times counts n times, which adds log n to its score
    log_count = source.bincount(minlength=1000).double().log()
    expected = attend(q[:, :1], k, v, score=score, bias=log_count[None, None])
    torch.testing.assert_close(out[:, :1], expected)
    assert out[:, 1].eq(0).all()


def test_several_signals_on_one_graph():
    layer = MultiHeadAttention(6, num_heads=2, score="gatv2")
    graph, x = Graph(PAIRS), torch.randn(4, 5, 3, 6)
    out, heads = layer(x, over=graph)
    assert heads.shape == (4, 5, 2, 5)
    torch.testing.assert_close(out[2, 3], layer(x[2, 3], over=graph)[0])


def test_degrees_of_zero_and_other_devices():
    graph = Graph(torch.tensor([[0, 1], [1, 1]]), 3).gcn_normalise()
    torch.testing.assert_close(graph.weights, torch.tensor([0.0, 0.5]))
    A = torch.zeros(3, 3)
    A[1, 0] = A[1, 1] = 1
    torch.testing.assert_close(definition.gcn_normalise(A.numpy())[1].tolist(), [0.0, 0.5, 0.0])
    moved = graph.to("meta")
    assert moved.csr.edge_id.device.type == moved.weights.device.type == "meta"


def test_edges_passed_as_a_mask_are_refused():
    layer = MultiHeadAttention(6, num_heads=2)
    # two edges among two nodes have the shape of a mask, and may be zeros and ones
    for pairs, nodes in ((PAIRS, 3), (torch.tensor([[0, 1], [1, 0]]), 2), (torch.ones(2, 2).int(), 2)):
        with pytest.raises(ValueError, match=r"for edges pass Graph\(edge_index, num_nodes\)"):
            layer(torch.randn(nodes, 6), over=pairs)
    with pytest.raises(ValueError, match=r"for edges as a sparse matrix pass Graph\(matrix\)"):
        layer(torch.randn(3, 6), over=torch.eye(3).to_sparse())


def test_a_filter_of_another_size_is_refused():
    with pytest.raises(ValueError, match="Graph: num_nodes must be the number of items, 10, got 3"):
        Graph(torch.tensor([[4], [0]]), 10) & Graph(torch.tensor([[1], [1]]), 3)
    with pytest.raises(ValueError, match="keep must cover 3 keys, got 7"):
        Graph(torch.zeros(2, 0), 3) & Padding(torch.ones(7, dtype=torch.bool))
    assert (Graph(torch.zeros(2, 0), 3) & Causal()).edge_ids.tolist() == []


def test_gradients_of_normalised_weights():
    weights = torch.tensor([0.0, 1.0], requires_grad=True)
    graph = Graph(torch.tensor([[0, 1], [0, 1]]), 2, weights=weights).gcn_normalise()
    (gradient,) = torch.autograd.grad(graph.weights.sum(), weights)
    assert gradient.isfinite().all()
    with pytest.raises(ValueError, match="gcn_normalise: degrees must be 0 or more, got -1"):
        Graph(torch.tensor([[0], [0]]), 1, weights=torch.tensor([-1.0])).gcn_normalise()


def test_a_graph_without_destinations_is_filtered():
    graph = Graph(torch.empty(2, 0, dtype=torch.long), (3, 0))
    assert (graph & Segments(torch.zeros(3).long(), torch.zeros(0).long())).num_edges == 0
