"""Neighbourhoods that are copied, pickled and read from files: equal to the original, and checked like constructor arguments."""

import copy
import io
import pickle
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
from torch.utils import _pytree as pytree

from polyhead import (
    Causal,
    Dense,
    Dot,
    GATv2,
    Graph,
    Grid,
    Mask,
    Neighbourhood,
    Offsets,
    Padding,
    Segments,
    Window,
    attend,
)
from polyhead.neighbourhood import BatchRows, Both, Complement, Either
from polyhead.neighbourhood.csr import CSR

PAIRS = torch.tensor([[0, 1, 2, 2, 0, 5, 3], [1, 0, 0, 1, 0, 4, 5]])
HOLES = torch.tensor([[True, False, True, True, False, False], [False, True, True, True, True, False]])
IDS = torch.tensor([[0, 0, 1, 1, 1, 2], [3, 3, 3, 4, 4, 4]])


def graph(**options):
    return Graph(PAIRS, 6, **options)


# each for six queries and keys, two heads and a batch of two
NEIGHBOURHOODS = {
    "dense": Dense,
    "causal": Causal,
    "window": lambda: Window(2, 1),
    "lengths": lambda: Padding(torch.tensor([2, 6])),
    "padded queries": lambda: Padding([2, 6], queries=True),
    "holes": lambda: Padding(HOLES),
    "left padding": lambda: Padding(torch.arange(6) > torch.tensor([[1], [3]]), queries=True),
    "segments": lambda: Segments(IDS),
    "segments across": lambda: Segments(IDS, IDS.flip(1)),
    "scattered segments": lambda: Segments(torch.tensor([0, 1, 0, 1, 2, 2])),
    "mask": lambda: Mask(torch.rand(6, 6) > 0.3),
    "mask by head": lambda: Mask(torch.rand(1, 2, 6, 6) > 0.3),
    "masks": lambda: Mask(torch.rand(2, 1, 6, 6) > 0.3),
    "joined": lambda: Causal() & Window(2) & Padding([4, 6]) & Mask(torch.rand(6, 6) > 0.3),
    "union": lambda: Causal() | Padding([4, 6]) | Mask(torch.rand(6, 6) > 0.3),
    "complement": lambda: ~(Window(1) & Segments(IDS)),
    "nested": lambda: ~(Causal() | Padding(HOLES)) & (Mask(torch.rand(6, 6) > 0.3) | ~Window(1)),
    "rows": lambda: BatchRows(Padding([2, 6, 3]), (3,), (slice(0, 2),)),
    "graph": graph,
    "rich graph": lambda: graph(features=torch.randn(7, 3), weights=torch.rand(7)),
    "filtered graph": lambda: graph(weights=torch.rand(7)) & Window(1),
    "graph without edges": lambda: Graph(torch.zeros(2, 0), 6),
    "grid": lambda: Grid(2, 3, window=(1, None)),
    "dilated grid": lambda: Grid(6, window=5, dilation=2),
    "grid with a token": lambda: Grid(5, window=3, prefix=1),
    "whole grid": lambda: Grid(2, 3),
    "offsets": lambda: Offsets([[0, 1], [1, 0]], (2, 3)),
    "several offsets": lambda: Offsets([[[0, 1], [1, 0]], [[0, 0], [0, 0]]], (2, 3), padding="circular"),
}  # fmt: skip


def saved(x):
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    return file


def loaded(x):
    return torch.load(saved(x), weights_only=True)


WAYS = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "old pickle": lambda x: pickle.loads(pickle.dumps(x, protocol=2)),
    "processes": lambda x: pickle.loads(ForkingPickler.dumps(x)),
    "torch": lambda x: torch.load(saved(x), weights_only=False),
    "weights only": loaded,
}


def result(over):
    torch.manual_seed(3)
    q, k, v = torch.randn(3, 2, 2, 6, 8)
    featured = getattr(over, "features", None) is not None
    return attend(q, k, v, over=over, score=GATv2(2, 8, edge_dim=3) if featured else Dot())


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", NEIGHBOURHOODS)
def test_a_copy_equals_the_original(name, way):
    if name == "rows" and way == "weights only":
        pytest.skip("slices are not weights")
    over = NEIGHBOURHOODS[name]()
    again = WAYS[way](over)
    assert type(again) is type(over) and again is not over and repr(again) == repr(over)
    # an exported program accepts the copy in place of the original
    (leaves, structure), (copied, copied_structure) = pytree.tree_flatten(over), pytree.tree_flatten(again)
    assert copied_structure == structure and list(vars(again)) == list(vars(over))
    for a, b in zip(leaves, copied, strict=True):
        assert torch.equal(a, b) and a.dtype == b.dtype
    torch.testing.assert_close(result(again), result(over), rtol=0, atol=0)


@pytest.mark.parametrize("way", ["deepcopy", "pickle", "weights only"])
def test_the_ids_of_a_copy_are_not_shared(way):
    over = {"graph": graph(), "offsets": Offsets([[0, 1], [1, 0]], (2, 3))}
    over |= {"csr": over["graph"].csr, "index": over["offsets"].index}
    again = WAYS[way](over)
    for ids in (*again["csr"], again["index"]):
        ids.fill_(2**30)
    torch.testing.assert_close(result(again["graph"]), result(graph()))
    assert torch.equal(again["offsets"].index, over["offsets"].index)


def unchecked(kind, **state):
    """An object with these attributes, unchecked, as a file may hold it."""
    over = object.__new__(kind)
    vars(over).update(state)
    return over


def graph_state(**changed):
    """The state of a pickled graph, with some of its arrays changed."""
    csr = CSR(*(x.clone() for x in graph().csr))._replace(**changed)
    return {"sources": 6, "destinations": 6, "csr": csr, "features": None, "weights": None, "edge_ids": None}


def int32(*numbers):
    return torch.tensor(numbers, dtype=torch.int32)


GRID = {"sizes": (2, 3), "stride": (1, 1), "outputs": (2, 3), "prefix": 0, "dilation": (1, 1), "window": (1, 3)}
INDEX = torch.tensor([[[1], [2], [-1], [4], [5], [-1]]])
OFFSETS = {
    "sizes": (2, 3), "stride": (1, 1), "outputs": (2, 3), "padding": "zeros", "heads": 1, "several": 1, "by_head": False,
    "index": INDEX,
}  # fmt: skip
RUN = {"queries": None, "keep": None, "keys": 6, "exact": True}


def test_pickled_states_of_earlier_releases_are_read():
    """A pickle holds the attributes of a neighbourhood, then and now."""
    old = [
        (unchecked(Graph, **graph_state()), graph()),
        (unchecked(Grid, **GRID, full=False, exact=False), Grid(2, 3, window=(1, 3))),
        (unchecked(Offsets, **OFFSETS), Offsets([[0, 1]], (2, 3))),
        (unchecked(Window, left=2, right=1), Window(2, 1)),
        (unchecked(Causal, left=None, right=0), Causal()),
        (
            unchecked(Padding, **RUN, first=torch.tensor([0, 1]), stop=torch.tensor([2, 6])),
            Padding(torch.tensor([[1, 1, 0, 0, 0, 0], [0, 1, 1, 1, 1, 1]]).bool()),
        ),
        (unchecked(Segments, ids=IDS, query_ids=None, exact=True, along_keys=True), Segments(IDS)),
        (unchecked(Mask, keep=HOLES[None, :, None], by_head=False, _pairs=False), Mask(HOLES[None, :, None])),
    ]
    for pickled, expected in old:
        again = loaded(pickled)
        assert repr(again) == repr(expected)
        assert pytree.tree_structure(again) == pytree.tree_structure(expected)
        for a, b in zip(pytree.tree_leaves(again), pytree.tree_leaves(expected), strict=True):
            assert torch.equal(a, b)


INVALID = {
    "a source": (Graph, graph_state(indices=int32(0, 1, 2, 6, 0, 5, 3)), r"csr.indices must hold numbers in \[0, 6\), got 0 to 6"),
    "a negative edge": (Graph, graph_state(edge_id=int32(-1, 1, 2, 3, 4, 5, 6)), "csr.edge_id must hold numbers"),
    "an edge twice": (Graph, graph_state(edge_id=int32(0, 0, 2, 3, 4, 5, 6)), "csr.edge_id must hold each number in"),
    "decreasing indptr": (Graph, graph_state(indptr=int32(0, 3, 5, 4, 5, 6, 7)), "csr.indptr must increase from 0 to 7"),
    "a long indptr": (Graph, graph_state(out_indptr=int32(0, 1, 2, 3, 4, 5, 6, 7)), "csr.out_indptr must be contiguous int32 of shape"),
    "int64 ids": (Graph, graph_state(indices=torch.zeros(7, dtype=torch.long)), "csr.indices must be contiguous int32"),
    "another order": (Graph, graph_state(out_slot=int32(6, 5, 4, 3, 2, 1, 0)), "sorted by destination and by source"),
    "five arrays": (Graph, {**graph_state(), "csr": tuple(graph_state()["csr"])[:5]}, "its pickled state"),
    "no csr": (Graph, {"sources": 6, "destinations": 6}, "its pickled state must be one that Graph writes, got sources"),
    "negative nodes": (Graph, {**graph_state(), "sources": -1}, "csr.out_indptr must be contiguous int32 of shape"),
    "rows of features": (Graph, {**graph_state(), "features": torch.rand(3, 2)}, "features"),
    "a string for weights": (Graph, {**graph_state(), "weights": "all"}, "weights|pickled state"),
    "edge_ids": (Graph, {**graph_state(), "edge_ids": torch.zeros(3)}, "edge_ids must be integers"),
    "negative dilation": (Grid, {**GRID, "dilation": (-1, -1)}, "dilation"),
    "no dilation": (Grid, {**GRID, "dilation": (0, 0)}, "dilation"),
    "an even window": (Grid, {**GRID, "window": (2, 2)}, "window"),
    "no sizes": (Grid, {**GRID, "sizes": ()}, "sizes"),
    "negative outputs": (Grid, {**GRID, "outputs": (-2, 3)}, "outputs"),
    "a negative prefix": (Grid, {**GRID, "prefix": -1}, "prefix"),
    "half a grid": (Grid, {"sizes": (2, 3)}, "its pickled state must be one that Grid writes, got sizes"),
    "a key beyond": (Offsets, {**OFFSETS, "index": INDEX + 1}, r"index must be in \[-1, 5\], got 0 to 6"),
    "a key before": (Offsets, {**OFFSETS, "index": INDEX - 1}, r"index must be in \[-1, 5\], got -2 to 4"),
    "another index": (Offsets, {**OFFSETS, "index": INDEX[:, :4]}, r"index must be int64 \(heads, 6, several\)"),
    "an index of floats": (Offsets, {**OFFSETS, "index": INDEX.float()}, "index must be int64"),
    "a key twice": (Offsets, {**OFFSETS, "index": INDEX.expand(1, 6, 2)}, "index must name a key once"),
    "a padding": (Offsets, {**OFFSETS, "padding": "marmalade"}, "padding"),
    "no stride": (Offsets, {**OFFSETS, "stride": (0, 1)}, "stride"),
    "a negative window": (Window, {"left": -1, "right": 2}, "left"),
    "strings for a window": (Window, {"left": "a", "right": "b"}, "left"),
    "a causal window": (Causal, {"left": 3, "right": 0}, "its pickled state must be left=None and right=0"),
    "a length": (Padding, {**RUN, "keys": None, "first": INDEX, "stop": torch.tensor([-3])}, "length"),
    "a run beyond the keys": (Padding, {**RUN, "first": torch.tensor([0]), "stop": torch.tensor([7])}, r"first and stop must be in \[0, 6\]"),
    "an end before": (Padding, {**RUN, "first": torch.tensor([4]), "stop": torch.tensor([2])}, "first and stop must be in"),
    "two shapes": (Padding, {**RUN, "first": torch.tensor(4), "stop": torch.tensor([5])}, "first and stop must be in"),
    "numbers to keep": (Padding, {**RUN, "keep": IDS, "first": INDEX, "stop": INDEX}, "keep must be bool"),
    "ids": (Segments, {"ids": torch.rand(3), "query_ids": None}, "ids"),
    "a float mask": (Mask, {"keep": torch.rand(1, 3, 3), "_pairs": True}, "keep"),
    "parts": (Both, {"parts": (torch.rand(3),)}, "parts must be neighbourhoods"),
    "no parts": (Both, {"parts": ()}, "parts must be neighbourhoods"),
    "parts of a union": (Either, {"parts": (Causal(), torch.rand(3))}, "Either: its parts must be neighbourhoods"),
    "no parts of a union": (Either, {"parts": (), "exact": True}, "Either: its parts must be neighbourhoods"),
    "a complement of a tensor": (Complement, {"over": torch.rand(3)}, "Complement: over must be a neighbourhood"),
    "a complement of nothing": (Complement, {"exact": True}, "its pickled state must be one that Complement writes"),
}  # fmt: skip


@pytest.mark.parametrize("read", ["pickle", "weights only", "deepcopy"])
@pytest.mark.parametrize("name", INVALID)
def test_an_invalid_state_is_refused(name, read):
    kind, state, message = INVALID[name]
    with pytest.raises(ValueError, match=message):
        WAYS[read](unchecked(kind, **state))


def test_a_state_that_is_not_a_dict_is_refused():
    with pytest.raises(ValueError, match="its pickled state must be one that Window writes, got list"):
        object.__new__(Window).__setstate__([3])


def test_derived_flags_are_computed_and_not_read():
    causal = loaded(unchecked(Causal, left=None, right=0, full=True, exact=False, check=3))
    assert not causal.full and causal.exact and callable(causal.check)
    segments = loaded(unchecked(Segments, ids=torch.tensor([0, 1, 0]), query_ids=None, exact=True))
    assert not segments.exact
    union = loaded(unchecked(Either, parts=(Window(0), Padding([3])), exact=True, full=True))
    assert not union.exact and not union.full
    assert not loaded(unchecked(Complement, over=Window(0), exact=True)).exact


class Even(Neighbourhood):
    """A neighbourhood of another package."""

    def __init__(self, step):
        self.step, self.exact = step, False

    def allows(self, head, query, key):
        return (key - query) % self.step == 0


class Narrow(Window):
    """A window of another package."""

    def __init__(self, name):
        super().__init__(1)
        self.name, self.exact = name, False


@pytest.mark.parametrize("way", ["copy", "deepcopy", "pickle", "processes"])
def test_attributes_that_callers_add_are_copied(way):
    marked = graph()
    marked.name = "a graph of mine"
    for over in (marked, Even(2), Narrow("mine")):
        assert vars(WAYS[way](over)).keys() == vars(over).keys()
    assert WAYS[way](marked).name == "a graph of mine"
    assert WAYS[way](Even(2)).step == 2
    assert WAYS[way](Narrow("mine")).name == "mine" and not WAYS[way](Narrow("mine")).exact


def test_a_graph_on_the_meta_device_is_copied():
    again = copy.deepcopy(graph(weights=torch.rand(7)).to("meta"))
    assert again.csr.indices.is_meta and again.num_edges == 7


def test_the_classes_that_weights_only_accepts():
    ours = {x for x in torch.serialization.get_safe_globals() if getattr(x, "__module__", "").startswith("polyhead")}
    assert ours == {Dense, Causal, Window, Padding, Segments, Mask, Both, Either, Complement, Graph, CSR, Grid, Offsets}
    with pytest.raises(pickle.UnpicklingError, match="GATv2"):
        loaded(GATv2(2, 8))
