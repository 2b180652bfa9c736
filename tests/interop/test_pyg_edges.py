"""The edges of the drop-ins: sparse matrices and `EdgeIndex`, and the cache of sorted edges."""

from __future__ import annotations

import gc
import re
import weakref
from collections.abc import Iterator
from typing import Any

import pyg_pairs as pairs
import pytest
import torch
from torch import Tensor
from torch_geometric.edge_index import EdgeIndex

import polyhead.kernels.edges_native
import polyhead.kernels.edges_torch
import polyhead.neighbourhood.graph
from polyhead.interop import pyg as interop
from polyhead.interop.pyg import edge_index as edge_cache

pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse CS. tensor support is in beta:UserWarning"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled:UserWarning"),
]


@pytest.fixture(autouse=True)
def empty_cache() -> Iterator[None]:
    edge_cache._edges_cache.clear()
    yield
    edge_cache._edges_cache.clear()


@pytest.mark.parametrize("shape", ["one", "two"])
@pytest.mark.parametrize("layout", ["coo", "csr", "csc"])
@pytest.mark.parametrize("loops", [False, True])
@pytest.mark.parametrize("kind", pairs.KINDS)
def test_sparse_matrices(kind: str, loops: bool, layout: str, shape: str) -> None:
    options = {"add_self_loops": loops} if kind in pairs.LOOPING else {}
    channels, x, edge_index = pairs.inputs(shape)
    peer, ours = pairs.pair(kind, channels, **options)
    sizes = (pairs.OTHERS if shape == "two" else pairs.NODES, pairs.NODES)
    # PyG does not use the entries as weights
    matrix = torch.sparse_coo_tensor(edge_index.flip(0), torch.rand(pairs.EDGES), sizes).coalesce()
    given = {"coo": lambda: matrix, "csr": matrix.to_sparse_csr, "csc": matrix.to_sparse_csc}[layout]()
    # PyG does not support CSC
    theirs = matrix if layout == "csc" else given
    pairs.assert_same(pairs.everything(ours, x, given), pairs.everything(peer, x, theirs))
    output, (where, alpha) = ours(x, given, return_attention_weights=True)
    exact, (their_where, their_alpha) = peer(x, theirs, return_attention_weights=True)
    torch.testing.assert_close(output, exact, **pairs.CLOSE[torch.float64])
    if kind == "TransformerConv":
        assert where is given
    else:
        assert where.layout == given.layout
        torch.testing.assert_close(where.to_dense(), their_where.to_dense(), **pairs.CLOSE[torch.float64])
    if layout != "csc":
        torch.testing.assert_close(alpha, their_alpha, **pairs.CLOSE[torch.float64])


@pytest.mark.parametrize("loops", [False, True])
@pytest.mark.parametrize("kind", pairs.LOOPING)
def test_features_in_a_sparse_matrix(kind: str, loops: bool) -> None:
    _, x, edge_index = pairs.inputs("one")
    peer, ours = pairs.pair(kind, edge_dim=pairs.EDGE_DIM, add_self_loops=loops)
    values = torch.randn(pairs.EDGES, pairs.EDGE_DIM, dtype=torch.float64)
    matrix = torch.sparse_coo_tensor(edge_index.flip(0), values, (pairs.NODES, pairs.NODES, pairs.EDGE_DIM)).coalesce()
    pairs.assert_same(pairs.everything(ours, x, matrix), pairs.everything(peer, x, matrix))


@pytest.mark.parametrize("kind", pairs.KINDS)
def test_edge_index_objects_and_int32(kind: str) -> None:
    _, x, edge_index = pairs.inputs("one")
    peer, ours = pairs.pair(kind)
    expected = pairs.everything(peer, x, edge_index)
    pairs.assert_same(
        pairs.everything(ours, x, EdgeIndex(edge_index, sparse_size=(pairs.NODES, pairs.NODES))), expected
    )
    pairs.assert_same(pairs.everything(ours, x, edge_index.int()), expected)


# the number of nodes that edge_index declares


def with_size(kind: str, edge_index: Tensor, sources: int, destinations: int) -> Any:
    """The same edges in a format that declares the number of nodes."""
    if kind == "EdgeIndex":
        return EdgeIndex(edge_index, sparse_size=(sources, destinations))
    size = (destinations, sources)
    matrix = torch.sparse_coo_tensor(edge_index.flip(0), torch.rand(edge_index.shape[1]), size).coalesce()
    return {"coo": lambda: matrix, "csr": matrix.to_sparse_csr, "csc": matrix.to_sparse_csc}[kind]()


@pytest.mark.parametrize("size", [None, (pairs.NODES, pairs.OTHERS)])
@pytest.mark.parametrize("loops", [False, True])
@pytest.mark.parametrize("channels", [pairs.IN, (pairs.IN, pairs.IN_OTHER)], ids=["one map", "two maps"])
@pytest.mark.parametrize("format", ["coo", "csr", "csc", "EdgeIndex"])
def test_edge_index_declares_the_number_of_destinations_without_features(
    format: str, channels: Any, loops: bool, size: Any
) -> None:
    peer, ours = pairs.pair("GATConv", channels, add_self_loops=loops)
    x, edge_index = (pairs.randn(pairs.NODES, pairs.IN), None), pairs.some_edges(pairs.NODES, pairs.OTHERS)
    given = with_size(format, edge_index, pairs.NODES, pairs.OTHERS)
    # PyG does not support CSC
    theirs = with_size("coo", edge_index, pairs.NODES, pairs.OTHERS) if format == "csc" else given
    expected = pairs.everything(peer, x, theirs, size=size)
    # PyG adds a self-loop for every source to an EdgeIndex, which then has as many destinations
    assert len(expected["output"]) == (
        pairs.NODES if format == "EdgeIndex" and loops and size is None else pairs.OTHERS
    )
    pairs.assert_same(pairs.everything(ours, x, given, size=size), expected)
    output, (where, alpha) = ours(x, given, size=size, return_attention_weights=True)
    exact, (_, exact_alpha) = peer(x, theirs, size=size, return_attention_weights=True)
    assert torch.equal(output, ours(x, given, size=size))
    assert where.shape[:2] == (given.shape if format != "EdgeIndex" else (2, len(alpha)))
    torch.testing.assert_close(output, exact, **pairs.CLOSE[torch.float64])
    if format != "csc":
        torch.testing.assert_close(alpha, exact_alpha, **pairs.CLOSE[torch.float64])


@pytest.mark.parametrize(
    "sizes",
    [(pairs.NODES + 1, pairs.OTHERS), (pairs.NODES, pairs.OTHERS + 2), (pairs.NODES - 1, pairs.OTHERS)],
    ids=str,
)
@pytest.mark.parametrize("format", ["coo", "csr", "EdgeIndex"])
@pytest.mark.parametrize("kind", pairs.KINDS)
def test_a_declared_size_must_match_x(kind: str, format: str, sizes: tuple[int, int]) -> None:
    channels, x, edge_index = pairs.inputs("two")
    given = with_size(format, edge_index, *sizes)
    rule, got = (
        (f"an EdgeIndex with sparse_size ({pairs.NODES}, {pairs.OTHERS})", sizes)
        if format == "EdgeIndex"
        else (f"a matrix of (destinations, sources) = ({pairs.OTHERS}, {pairs.NODES})", sizes[::-1])
    )
    rule = f"edge_index must be {rule}, the numbers of nodes in x, got {got}"
    for layer, message in zip(pairs.pair(kind, channels), ("Encountered tensor with size", rule), strict=True):
        with pytest.raises(ValueError, match=re.escape(message)):
            layer(x, given)


@pytest.mark.parametrize("kind", pairs.LOOPING)
def test_self_loops_enlarge_an_edge_index(kind: str) -> None:
    """Its size need not include nodes without edges at the end."""
    _, x, edge_index = pairs.inputs("one")
    peer, ours = pairs.pair(kind)
    given = EdgeIndex(edge_index, sparse_size=(pairs.NODES - 1, pairs.NODES - 1))
    pairs.assert_same(pairs.everything(ours, x, given), pairs.everything(peer, x, given))
    peer.add_self_loops = ours.add_self_loops = False
    for layer in (peer, ours):
        with pytest.raises(ValueError, match=r"(?s)12.*13|13.*12"):
            layer(x, given)


@pytest.mark.parametrize(
    "options",
    [{}, {"sparse_size": (pairs.NODES, pairs.NODES)}, {"sparse_size": (pairs.NODES, None)}, {"sort_order": "row"},
     {"sort_order": "col", "sparse_size": (pairs.NODES, pairs.NODES)}, {"is_undirected": True}],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("loops", [False, True])
@pytest.mark.parametrize("kind", pairs.KINDS)
def test_an_edge_index_is_returned_as_in_pyg(kind: str, loops: bool, options: dict) -> None:
    options = dict(options)
    peer, ours = pairs.pair(kind, **({"add_self_loops": loops} if kind in pairs.LOOPING else {}))
    x, edge_index = pairs.randn(pairs.NODES, pairs.IN), pairs.some_edges()
    if "is_undirected" in options:
        edge_index = torch.cat((edge_index, edge_index.flip(0)), 1)
    elif "sort_order" in options:
        row = edge_index[0] if options["sort_order"] == "row" else edge_index[1]
        edge_index = edge_index[:, row.argsort()]
    given = EdgeIndex(edge_index, **options)
    _, (expected, _) = peer(x, given, return_attention_weights=True)
    _, (where, _) = ours(x, given, return_attention_weights=True)
    assert type(where) is type(expected) is EdgeIndex
    assert torch.equal(where.as_tensor(), expected.as_tensor()) and where.dtype == expected.dtype
    for name in ("sparse_size", "sort_order", "is_undirected"):
        theirs, mine = (getattr(of, name) for of in (expected, where))
        assert (mine() if callable(mine) else mine) == (theirs() if callable(theirs) else theirs), name


@pytest.mark.parametrize(
    "options, size, message",
    [
        ({}, (pairs.NODES,), "size must be (sources, destinations), got (13,)"),
        ({}, (pairs.NODES, None), "size must be (sources, destinations), got (13, None)"),
        (
            {"flow": "target_to_source"}, (pairs.NODES, pairs.OTHERS),
            "size must be (N, N) if flow is 'target_to_source' and x[1] is None, got (13, 7)",
        ),
    ],
)  # fmt: skip
def test_invalid_sizes_are_refused(options: dict, size: Any, message: str) -> None:
    _, ours = pairs.pair("GATConv", **options)
    with pytest.raises(ValueError) as error:
        ours((pairs.randn(pairs.NODES, pairs.IN), None), pairs.some_edges(), size=size)
    assert message in str(error.value)


def test_size_must_match_the_matrix() -> None:
    """PyG ignores `size` for a sparse matrix."""
    _, ours = pairs.pair("GATConv")
    with pytest.raises(
        ValueError, match=r"\(destinations, sources\) = \(9, 13\), the numbers of nodes in x, got \(7, 13\)"
    ):
        ours(
            (pairs.randn(pairs.NODES, pairs.IN), None),
            with_size("coo", pairs.some_edges(pairs.NODES, pairs.OTHERS), pairs.NODES, pairs.OTHERS),
            size=(pairs.NODES, 9),
        )


# edges are sorted once


@pytest.fixture
def sorts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """One entry per sort of edges."""
    seen: list[tuple[int, int]] = []
    real = polyhead.neighbourhood.graph.build_csr

    def counted(edge_index: Tensor, sources: int, destinations: int) -> Any:
        seen.append((sources, destinations))
        return real(edge_index, sources, destinations)

    monkeypatch.setattr(polyhead.neighbourhood.graph, "build_csr", counted)
    return seen


def test_two_layers_in_a_training_loop_sort_once(sorts: list) -> None:
    first, second = (
        interop.GATConv(pairs.IN, pairs.CHANNELS, pairs.HEADS),
        interop.GATv2Conv(pairs.HEADS * pairs.CHANNELS, pairs.CHANNELS, pairs.HEADS),
    )
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], 0.1)
    x, edge_index = torch.randn(pairs.NODES, pairs.IN), pairs.some_edges()
    for step in range(5):
        output = second(first(x, edge_index).relu(), edge_index if step % 2 else edge_index[:])
        optimizer.zero_grad()
        output.square().mean().backward()
        optimizer.step()
    assert len(sorts) == 1
    first.add_self_loops = False
    first(x, edge_index)
    interop.TransformerConv(pairs.IN, pairs.CHANNELS)(x, edge_index)
    assert len(sorts) == 2


@pytest.mark.parametrize("layout", ["coo", "csr", "csc", "EdgeIndex"])
def test_other_kinds_of_edge_index_are_sorted_once(sorts: list, layout: str) -> None:
    edge_index = pairs.some_edges()
    matrix = torch.sparse_coo_tensor(edge_index.flip(0), torch.ones(pairs.EDGES), (pairs.NODES, pairs.NODES)).coalesce()
    given: dict[str, Any] = {"coo": matrix, "EdgeIndex": EdgeIndex(edge_index)}
    given |= {"csr": matrix.to_sparse_csr(), "csc": matrix.to_sparse_csc()}
    ours, x = interop.GATConv(pairs.IN, pairs.CHANNELS), torch.randn(pairs.NODES, pairs.IN)
    first = ours(x, given[layout])
    assert torch.equal(ours(x, given[layout]), first)
    assert len(sorts) == 1


def test_a_change_in_place_sorts_again(sorts: list) -> None:
    peer, ours = pairs.pair("GATConv")
    x, edge_index = pairs.randn(pairs.NODES, pairs.IN), pairs.some_edges()
    ours(x, edge_index)
    for change in (
        lambda: edge_index[0].fill_(5),
        lambda: edge_index.copy_(pairs.some_edges()),
        lambda: edge_index[:, :1].add_(1),
    ):
        change()
        torch.testing.assert_close(ours(x, edge_index), peer(x, edge_index), **pairs.CLOSE[torch.float64])
    assert len(sorts) == 4
    ours(x, edge_index[:, 1:])
    ours(x, edge_index[:, :-1])
    ours(x, edge_index.clone())
    assert len(sorts) == 7
    # the same edges with more nodes
    ours(pairs.randn(pairs.NODES + 2, pairs.IN), edge_index)
    assert sorts[-1] == (pairs.NODES + 2, pairs.NODES + 2)


def test_edges_at_a_reused_address_are_sorted_again() -> None:
    peer, ours = pairs.pair("GATConv")
    x, addresses, reused = pairs.randn(pairs.NODES, pairs.IN), set(), 0
    # the allocator decides when it gives out an address again
    for _ in range(3000):
        edge_index = pairs.some_edges()
        reused += edge_index.data_ptr() in addresses
        addresses.add(edge_index.data_ptr())
        torch.testing.assert_close(ours(x, edge_index), peer(x, edge_index), **pairs.CLOSE[torch.float64])
        del edge_index
        if reused == 3:
            break
    assert reused == 3


def test_the_cache_is_bounded_and_holds_weak_references() -> None:
    ours, x = interop.GATConv(pairs.IN, pairs.CHANNELS), torch.randn(pairs.NODES, pairs.IN)
    alive = [pairs.some_edges() for _ in range(edge_cache.EDGES_CACHE_SIZE + 5)]
    for edge_index in alive:
        ours(x, edge_index)
    assert len(edge_cache._edges_cache) == edge_cache.EDGES_CACHE_SIZE
    last = weakref.ref(alive[-1])
    del edge_index, alive
    gc.collect()
    assert last() is None
    ours(x, pairs.some_edges())
    assert len(edge_cache._edges_cache) <= 1


def test_tensors_without_a_version_counter_are_not_cached(sorts: list) -> None:
    ours, x = interop.GATConv(pairs.IN, pairs.CHANNELS), torch.randn(pairs.NODES, pairs.IN)
    with torch.inference_mode():
        edge_index = pairs.some_edges()
        ours(x, edge_index)
        ours(x, edge_index)
    assert len(sorts) == 2 and not edge_cache._edges_cache


def test_edges_sorted_in_inference_mode_can_be_used_in_training(sorts: list) -> None:
    peer, ours = pairs.pair("GATConv")
    x, edge_index = pairs.randn(pairs.NODES, pairs.IN), pairs.some_edges()
    expected = pairs.everything(peer, x, edge_index)
    with torch.inference_mode():
        ours(x, edge_index)
    pairs.assert_same(pairs.everything(ours, x, edge_index), expected)
    assert len(sorts) == 1
    edge_cache._edges_cache.clear()
    torch.func.grad(lambda x: ours(x, edge_index).sum())(x.detach())
    # the sorted tensors belong to the transform
    assert not edge_cache._edges_cache
    pairs.assert_same(pairs.everything(ours, x, edge_index), expected)
    edge_cache._edges_cache.clear()
    torch.func.vmap(lambda x: ours(x, edge_index))(x[None])
    pairs.assert_same(pairs.everything(ours, x, edge_index), expected)


def test_layers_with_other_options_on_the_same_edges() -> None:
    x, edge_index, edge_attr = (
        pairs.randn(pairs.NODES, pairs.IN),
        pairs.some_edges(),
        pairs.randn(pairs.EDGES, pairs.EDGE_DIM),
    )
    for options in (
        {"edge_dim": pairs.EDGE_DIM}, {}, {"flow": "target_to_source"}, {"add_self_loops": False},
        {"add_self_loops": False, "flow": "target_to_source"}, {"edge_dim": pairs.EDGE_DIM}, {},
    ):  # fmt: skip
        peer, ours = pairs.pair("GATConv", **options)
        given = (x, edge_index, edge_attr if "edge_dim" in options else None)
        pairs.assert_same(pairs.everything(ours, *given), pairs.everything(peer, *given))
