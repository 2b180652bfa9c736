"""The drop-ins' edges: other kinds of `edge_index` than a tensor, and how they are kept from call to call."""

from __future__ import annotations

import gc
import re
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from pyg_pairs import (
    CHANNELS,
    CLOSE,
    EDGE_DIM,
    EDGES,
    HEADS,
    IN,
    IN_OTHER,
    KINDS,
    LOOPING,
    NODES,
    OTHERS,
    assert_same,
    everything,
    inputs,
    pair,
    randn,
    some_edges,
)
from torch import Tensor
from torch_geometric.edge_index import EdgeIndex

import polyhead.kernels.edges_native
import polyhead.kernels.edges_torch
import polyhead.neighbourhood.graph
from polyhead.interop import pyg as interop
from polyhead.interop.pyg import edge_index as kept_edges

pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse CS. tensor support is in beta:UserWarning"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled:UserWarning"),
]


@pytest.fixture(autouse=True)
def nothing_kept() -> Iterator[None]:
    kept_edges._kept.clear()
    yield
    kept_edges._kept.clear()


@pytest.mark.parametrize("shape", ["one", "two"])
@pytest.mark.parametrize("layout", ["coo", "csr", "csc"])
@pytest.mark.parametrize("loops", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_sparse_matrices(kind: str, loops: bool, layout: str, shape: str) -> None:
    options = {"add_self_loops": loops} if kind in LOOPING else {}
    channels, x, edge_index = inputs(shape)
    peer, ours = pair(kind, channels, **options)
    sizes = (OTHERS if shape == "two" else NODES, NODES)
    # entries are no weights for PyG
    matrix = torch.sparse_coo_tensor(edge_index.flip(0), torch.rand(EDGES), sizes).coalesce()
    given = {"coo": lambda: matrix, "csr": matrix.to_sparse_csr, "csc": matrix.to_sparse_csc}[layout]()
    # PyG does not read columns
    theirs = matrix if layout == "csc" else given
    assert_same(everything(ours, x, given), everything(peer, x, theirs))
    output, (where, alpha) = ours(x, given, return_attention_weights=True)
    exact, (their_where, their_alpha) = peer(x, theirs, return_attention_weights=True)
    torch.testing.assert_close(output, exact, **CLOSE[torch.float64])
    if kind == "TransformerConv":
        assert where is given
    else:
        assert where.layout == given.layout
        torch.testing.assert_close(where.to_dense(), their_where.to_dense(), **CLOSE[torch.float64])
    if layout != "csc":
        torch.testing.assert_close(alpha, their_alpha, **CLOSE[torch.float64])


@pytest.mark.parametrize("loops", [False, True])
@pytest.mark.parametrize("kind", LOOPING)
def test_features_in_a_sparse_matrix(kind: str, loops: bool) -> None:
    _, x, edge_index = inputs("one")
    peer, ours = pair(kind, edge_dim=EDGE_DIM, add_self_loops=loops)
    values = torch.randn(EDGES, EDGE_DIM, dtype=torch.float64)
    matrix = torch.sparse_coo_tensor(edge_index.flip(0), values, (NODES, NODES, EDGE_DIM)).coalesce()
    assert_same(everything(ours, x, matrix), everything(peer, x, matrix))


@pytest.mark.parametrize("kind", KINDS)
def test_pygs_edge_index_and_narrow_numbers(kind: str) -> None:
    _, x, edge_index = inputs("one")
    peer, ours = pair(kind)
    expected = everything(peer, x, edge_index)
    assert_same(everything(ours, x, EdgeIndex(edge_index, sparse_size=(NODES, NODES))), expected)
    assert_same(everything(ours, x, edge_index.int()), expected)


# how many nodes an edge_index says that there are


def stating(kind: str, edge_index: Tensor, sources: int, destinations: int) -> Any:
    """The same edges in a form that says of how many nodes they are."""
    if kind == "EdgeIndex":
        return EdgeIndex(edge_index, sparse_size=(sources, destinations))
    size = (destinations, sources)
    matrix = torch.sparse_coo_tensor(edge_index.flip(0), torch.rand(edge_index.shape[1]), size).coalesce()
    return {"coo": lambda: matrix, "csr": matrix.to_sparse_csr, "csc": matrix.to_sparse_csc}[kind]()


@pytest.mark.parametrize("size", [None, (NODES, OTHERS)])
@pytest.mark.parametrize("loops", [False, True])
@pytest.mark.parametrize("channels", [IN, (IN, IN_OTHER)], ids=["one map", "two maps"])
@pytest.mark.parametrize("stated", ["coo", "csr", "csc", "EdgeIndex"])
def test_destinations_without_features_are_those_that_the_edges_state(
    stated: str, channels: Any, loops: bool, size: Any
) -> None:
    peer, ours = pair("GATConv", channels, add_self_loops=loops)
    x, edge_index = (randn(NODES, IN), None), some_edges(NODES, OTHERS)
    given = stating(stated, edge_index, NODES, OTHERS)
    # PyG does not read columns
    theirs = stating("coo", edge_index, NODES, OTHERS) if stated == "csc" else given
    expected = everything(peer, x, theirs, size=size)
    # an EdgeIndex, to which PyG adds a self-loop for every source, then has as many destinations
    assert len(expected["output"]) == (NODES if stated == "EdgeIndex" and loops and size is None else OTHERS)
    assert_same(everything(ours, x, given, size=size), expected)
    output, (where, alpha) = ours(x, given, size=size, return_attention_weights=True)
    exact, (_, exact_alpha) = peer(x, theirs, size=size, return_attention_weights=True)
    assert torch.equal(output, ours(x, given, size=size))
    assert where.shape[:2] == (given.shape if stated != "EdgeIndex" else (2, len(alpha)))
    torch.testing.assert_close(output, exact, **CLOSE[torch.float64])
    if stated != "csc":
        torch.testing.assert_close(alpha, exact_alpha, **CLOSE[torch.float64])


@pytest.mark.parametrize("sizes", [(NODES + 1, OTHERS), (NODES, OTHERS + 2), (NODES - 1, OTHERS)], ids=str)
@pytest.mark.parametrize("stated", ["coo", "csr", "EdgeIndex"])
@pytest.mark.parametrize("kind", KINDS)
def test_edges_of_other_nodes_than_x_has(kind: str, stated: str, sizes: tuple[int, int]) -> None:
    channels, x, edge_index = inputs("two")
    given = stating(stated, edge_index, *sizes)
    rule, got = (
        (f"an EdgeIndex with sparse_size ({NODES}, {OTHERS})", sizes)
        if stated == "EdgeIndex"
        else (f"a matrix of (destinations, sources) = ({OTHERS}, {NODES})", sizes[::-1])
    )
    rule = f"edge_index must be {rule}, as many nodes as there are in x, got {got}"
    for layer, words in zip(pair(kind, channels), ("Encountered tensor with size", rule), strict=True):
        with pytest.raises(ValueError, match=re.escape(words)):
            layer(x, given)


@pytest.mark.parametrize("kind", LOOPING)
def test_self_loops_make_place_in_pygs_edge_index(kind: str) -> None:
    """Nodes at the end, without an edge, need not be counted by it."""
    _, x, edge_index = inputs("one")
    peer, ours = pair(kind)
    given = EdgeIndex(edge_index, sparse_size=(NODES - 1, NODES - 1))
    assert_same(everything(ours, x, given), everything(peer, x, given))
    peer.add_self_loops = ours.add_self_loops = False
    for layer in (peer, ours):
        with pytest.raises(ValueError, match=r"(?s)12.*13|13.*12"):
            layer(x, given)


@pytest.mark.parametrize(
    "options",
    [{}, {"sparse_size": (NODES, NODES)}, {"sparse_size": (NODES, None)}, {"sort_order": "row"},
     {"sort_order": "col", "sparse_size": (NODES, NODES)}, {"is_undirected": True}],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("loops", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_pygs_edge_index_is_returned(kind: str, loops: bool, options: dict) -> None:
    options = dict(options)
    peer, ours = pair(kind, **({"add_self_loops": loops} if kind in LOOPING else {}))
    x, edge_index = randn(NODES, IN), some_edges()
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
        ({}, (NODES,), "size must be (sources, destinations), got (13,)"),
        ({}, (NODES, None), "size must be (sources, destinations), got (13, None)"),
        (
            {"flow": "target_to_source"}, (NODES, OTHERS),
            "size must be the same number twice where flow is 'target_to_source' and x[1] is None, got (13, 7)",
        ),
    ],
)  # fmt: skip
def test_sizes_that_say_nothing_of_use(options: dict, size: Any, message: str) -> None:
    _, ours = pair("GATConv", **options)
    with pytest.raises(ValueError) as error:
        ours((randn(NODES, IN), None), some_edges(), size=size)
    assert message in str(error.value)


def test_a_size_must_be_that_of_the_matrix() -> None:
    """PyG does not look at `size` where there is a matrix."""
    _, ours = pair("GATConv")
    with pytest.raises(ValueError, match=r"\(destinations, sources\) = \(9, 13\), as many .*, got \(7, 13\)"):
        ours((randn(NODES, IN), None), stating("coo", some_edges(NODES, OTHERS), NODES, OTHERS), size=(NODES, 9))


# edges are sorted once


@pytest.fixture
def sorts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """How often edges were sorted: one entry a time."""
    seen: list[tuple[int, int]] = []
    real = polyhead.neighbourhood.graph.build_csr

    def counted(edge_index: Tensor, sources: int, destinations: int) -> Any:
        seen.append((sources, destinations))
        return real(edge_index, sources, destinations)

    monkeypatch.setattr(polyhead.neighbourhood.graph, "build_csr", counted)
    return seen


def test_two_layers_in_a_training_loop_sort_once(sorts: list) -> None:
    first, second = interop.GATConv(IN, CHANNELS, HEADS), interop.GATv2Conv(HEADS * CHANNELS, CHANNELS, HEADS)
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], 0.1)
    x, edge_index = torch.randn(NODES, IN), some_edges()
    for step in range(5):
        output = second(first(x, edge_index).relu(), edge_index if step % 2 else edge_index[:])
        optimizer.zero_grad()
        output.square().mean().backward()
        optimizer.step()
    assert len(sorts) == 1
    first.add_self_loops = False
    first(x, edge_index)
    interop.TransformerConv(IN, CHANNELS)(x, edge_index)
    assert len(sorts) == 2


@pytest.mark.parametrize("layout", ["coo", "csr", "csc", "EdgeIndex"])
def test_other_kinds_of_edge_index_are_sorted_once(sorts: list, layout: str) -> None:
    edge_index = some_edges()
    matrix = torch.sparse_coo_tensor(edge_index.flip(0), torch.ones(EDGES), (NODES, NODES)).coalesce()
    given: dict[str, Any] = {"coo": matrix, "EdgeIndex": EdgeIndex(edge_index)}
    given |= {"csr": matrix.to_sparse_csr(), "csc": matrix.to_sparse_csc()}
    ours, x = interop.GATConv(IN, CHANNELS), torch.randn(NODES, IN)
    first = ours(x, given[layout])
    assert torch.equal(ours(x, given[layout]), first)
    assert len(sorts) == 1


def test_a_change_in_place_sorts_again(sorts: list) -> None:
    peer, ours = pair("GATConv")
    x, edge_index = randn(NODES, IN), some_edges()
    ours(x, edge_index)
    for change in (
        lambda: edge_index[0].fill_(5),
        lambda: edge_index.copy_(some_edges()),
        lambda: edge_index[:, :1].add_(1),
    ):
        change()
        torch.testing.assert_close(ours(x, edge_index), peer(x, edge_index), **CLOSE[torch.float64])
    assert len(sorts) == 4
    ours(x, edge_index[:, 1:])
    ours(x, edge_index[:, :-1])
    ours(x, edge_index.clone())
    assert len(sorts) == 7
    # the same edges among more nodes
    ours(randn(NODES + 2, IN), edge_index)
    assert sorts[-1] == (NODES + 2, NODES + 2)


def test_edges_in_the_place_of_others_are_not_mistaken_for_them() -> None:
    peer, ours = pair("GATConv")
    x, places = randn(NODES, IN), set()
    for _ in range(30):
        edge_index = some_edges()
        places.add(edge_index.data_ptr())
        torch.testing.assert_close(ours(x, edge_index), peer(x, edge_index), **CLOSE[torch.float64])
        del edge_index
    assert len(places) < 30


def test_edges_are_not_kept_alive_nor_all_of_them_kept() -> None:
    ours, x = interop.GATConv(IN, CHANNELS), torch.randn(NODES, IN)
    alive = [some_edges() for _ in range(kept_edges.KEPT + 5)]
    for edge_index in alive:
        ours(x, edge_index)
    assert len(kept_edges._kept) == kept_edges.KEPT
    last = weakref.ref(alive[-1])
    del edge_index, alive
    gc.collect()
    assert last() is None
    ours(x, some_edges())
    assert len(kept_edges._kept) <= 1


def test_what_torch_does_not_count_is_not_kept(sorts: list) -> None:
    ours, x = interop.GATConv(IN, CHANNELS), torch.randn(NODES, IN)
    with torch.inference_mode():
        edge_index = some_edges()
        ours(x, edge_index)
        ours(x, edge_index)
    assert len(sorts) == 2 and not kept_edges._kept


def test_what_was_sorted_in_another_mode_serves_in_training(sorts: list) -> None:
    peer, ours = pair("GATConv")
    x, edge_index = randn(NODES, IN), some_edges()
    expected = everything(peer, x, edge_index)
    with torch.inference_mode():
        ours(x, edge_index)
    assert_same(everything(ours, x, edge_index), expected)
    assert len(sorts) == 1
    kept_edges._kept.clear()
    torch.func.grad(lambda x: ours(x, edge_index).sum())(x.detach())
    # its tensors belong to the transform
    assert not kept_edges._kept
    assert_same(everything(ours, x, edge_index), expected)
    kept_edges._kept.clear()
    torch.func.vmap(lambda x: ours(x, edge_index))(x[None])
    assert_same(everything(ours, x, edge_index), expected)


def test_layers_that_differ_on_the_same_edges() -> None:
    x, edge_index, edge_attr = randn(NODES, IN), some_edges(), randn(EDGES, EDGE_DIM)
    for options in (
        {"edge_dim": EDGE_DIM}, {}, {"flow": "target_to_source"}, {"add_self_loops": False},
        {"add_self_loops": False, "flow": "target_to_source"}, {"edge_dim": EDGE_DIM}, {},
    ):  # fmt: skip
        peer, ours = pair("GATConv", **options)
        given = (x, edge_index, edge_attr if "edge_dim" in options else None)
        assert_same(everything(ours, *given), everything(peer, *given))
