"""Every kernel along edges against the definition on dense masks, in value and gradient."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from on_device import on_device
from table import DTYPES
from test_conformance import differs
from torch import Tensor

import polyhead
from polyhead import GAT, Dot, GATv2, Graph, Score, attend, attention_weights, explain
from polyhead._torch import native
from polyhead.kernels.dropout import keep_mask

HEADS = 3


def _simple(sources: int, destinations: int, edges: int) -> Tensor:
    pairs = torch.randperm(sources * destinations)[:edges]
    return torch.stack((pairs % sources, pairs // sources))


def _hub() -> Tensor:
    others = torch.arange(1, 83)
    to_hub = torch.stack((others, torch.zeros_like(others)))
    return torch.cat((to_hub, to_hub.flip(0)), 1)[:, torch.randperm(164)]


GRAPHS: dict[str, Callable[[], tuple[Tensor, tuple[int, int]]]] = {
    "random": lambda: (_simple(37, 37, 211), (37, 37)),
    "mostly-isolated": lambda: (_simple(37, 37, 11), (37, 37)),
    "complete": lambda: (_simple(7, 7, 49), (7, 7)),
    "hub": lambda: (_hub(), (83, 83)),
    "bipartite": lambda: (_simple(41, 11, 101), (41, 11)),
    "bipartite-wide": lambda: (_simple(11, 41, 101), (11, 41)),
    "one-node": lambda: (torch.zeros(2, 1, dtype=torch.long), (1, 1)),
    "duplicates": lambda: (torch.randint(0, 7, (2, 97)), (7, 7)),
    "no-edges": lambda: (torch.zeros(2, 0, dtype=torch.long), (5, 5)),
    "no-nodes": lambda: (torch.zeros(2, 0, dtype=torch.long), (0, 0)),
    "no-destinations": lambda: (torch.zeros(2, 0, dtype=torch.long), (5, 0)),
}


class Shifted(Score):
    """A score that no fast kernel has code for."""

    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        return -(q[..., :, None, :] - k[..., None, :, :]).square().mean(-1)


SCORES: dict[str, Callable[[int, int | None], Score]] = {
    "dot": lambda dim, edge_dim: Dot(),
    "dot-scale": lambda dim, edge_dim: Dot(1.3),
    "gat": lambda dim, edge_dim: GAT(HEADS, dim, edge_dim=edge_dim),
    "gat-bias": lambda dim, edge_dim: GAT(HEADS, dim, bias=True, negative_slope=0.4, edge_dim=edge_dim),
    "gatv2": lambda dim, edge_dim: GATv2(HEADS, dim, edge_dim=edge_dim),
    "gatv2-slope": lambda dim, edge_dim: GATv2(HEADS, dim, negative_slope=-0.3, edge_dim=edge_dim),
    "other": lambda dim, edge_dim: Shifted(),
}


@dataclass(frozen=True)
class Layout:
    """The shapes of q, k and v besides the nodes."""

    batch: tuple[int, ...] = ()
    key_heads: int = HEADS
    dim: int = 10
    value_dim: int = 10
    # values are the keys, as in a layer with one projection for both
    tied: bool = False
    strided: bool = False


LAYOUTS = {
    "plain": Layout(),
    "tied": Layout(tied=True, dim=16, value_dim=16),
    "narrow": Layout(dim=1, value_dim=1, tied=True),
    "batch": Layout(batch=(2,), dim=8, value_dim=8),
    "two-batches": Layout(batch=(2, 3), dim=5, value_dim=5),
    "empty-batch": Layout(batch=(0,)),
    "grouped": Layout(key_heads=1),
    "wide-values": Layout(value_dim=19),
    "narrow-values": Layout(dim=24, value_dim=7),
    "wide": Layout(dim=72, value_dim=72, tied=True),
    "strided": Layout(strided=True, batch=(2,)),
}

OPTIONS = ("plain", "weights", "features", "dropout", "sink", "bias", "all")


@dataclass(frozen=True)
class Row:
    graph: str
    score: str
    layout: str
    option: str
    dtype: torch.dtype = torch.float64

    def __str__(self) -> str:
        return f"{self.graph}-{self.score}-{self.layout}-{self.option}-{str(self.dtype)[6:]}"


def rows() -> list[Row]:
    """Graphs x scores x options on two layouts, layouts x scores x options on one graph, dtypes on some."""
    every = [Row(g, s, "plain", o) for g in GRAPHS for s in SCORES for o in OPTIONS]
    every += [Row("random", s, layout, o) for s in SCORES for layout in LAYOUTS for o in OPTIONS]
    every += [
        Row(g, s, layout, o, dtype)
        for g in ("random", "hub", "duplicates")
        for s in ("dot", "gat", "gatv2")
        for layout in ("plain", "tied")
        for o in ("plain", "all")
        for dtype in DTYPES
    ]
    return [row for row in dict.fromkeys(every) if row.option != "features" or row.score.startswith("gat")]


class Built:
    """The tensors of a row of the table."""

    def __init__(self, row: Row) -> None:
        torch.manual_seed(sum(map(ord, str(row))))
        layout, dtype, every = LAYOUTS[row.layout], row.dtype, row.option == "all"
        pairs, self.nodes = GRAPHS[row.graph]()
        self.source, self.destination = pairs
        edges = pairs.shape[1]
        learned = lambda *shape: torch.randn(*shape).to(dtype).requires_grad_()
        self.q = self._items(layout, HEADS, self.nodes[1], layout.dim, dtype)
        self.k = self._items(layout, layout.key_heads, self.nodes[0], layout.dim, dtype)
        self.v = (
            self.k if layout.tied else self._items(layout, layout.key_heads, self.nodes[0], layout.value_dim, dtype)
        )
        has = lambda option: row.option == option or every
        edge_dim = 4 if has("features") and row.score.startswith("gat") else None
        self.score = SCORES[row.score](layout.dim, edge_dim).to(dtype)
        self.features = None if edge_dim is None else learned(edges, edge_dim)
        self.weights = learned(edges) if has("weights") else None
        self.graph = Graph(pairs, self.nodes, self.features, self.weights)
        self.bias = learned(HEADS, edges) if row.option == "bias" else None
        self.sink = learned(HEADS) if has("sink") else None
        self.dropout = 0.3 if has("dropout") else 0.0
        given = (self.q, self.k, self.v, self.features, self.weights, self.bias, self.sink, *self.score.learned())
        self.learned = list({id(x): x for x in given if x is not None}.values())

    @staticmethod
    def _items(layout: Layout, heads: int, items: int, dim: int, dtype: torch.dtype) -> Tensor:
        if layout.strided:
            return torch.randn(*layout.batch, heads, 2 * dim, items).to(dtype).requires_grad_()[..., ::2, :].mT
        return torch.randn(*layout.batch, items, heads, dim).to(dtype).requires_grad_().transpose(-3, -2)

    def attend(self, kernel: str | None) -> Tensor:
        return attend(
            self.q, self.k, self.v, over=self.graph, score=self.score, bias=self.bias, sink=self.sink,
            dropout=self.dropout, seed=5 if self.dropout else None, kernel=kernel,
        )  # fmt: skip

    def definition(self) -> tuple[Tensor, Tensor]:
        """Dense attention in which every edge is its own key: the output, and the weights (..., heads, edges)."""
        wide = torch.promote_types(self.q.dtype, torch.float32)
        q, k, v = (x.to(wide) for x in (self.q, self.k, self.v))
        k, v = (x.repeat_interleave(HEADS // x.shape[-3], -3)[..., self.source, :] for x in (k, v))
        s = self._scores(q, k, wide)
        if self.bias is not None:
            s = s + self.bias.to(wide)[:, None, :]
        mine = self.destination == torch.arange(self.nodes[1])[:, None]
        s = s.masked_fill(~mine, -torch.inf)
        if self.sink is not None:
            last = self.sink.to(wide)[:, None, None].expand(*s.shape[:-1], 1)
            p = torch.cat((s, last), -1).softmax(-1)[..., :-1]
        else:
            p = s.masked_fill(~mine.any(-1, keepdim=True), 0.0).softmax(-1)
        p = p.masked_fill(~mine, 0.0)
        if self.weights is not None:
            p = p * self.weights.to(wide)
        by_edge = p.sum(-2)
        if self.dropout:
            number = torch.arange(p.shape[:-2].numel()).reshape(*p.shape[:-2], 1, 1)
            p = (
                p
                * keep_mask(torch.tensor(5), number, torch.arange(self.nodes[1])[:, None], self.source, self.dropout)
                / 0.7
            )
        return p @ v, by_edge

    def _scores(self, q: Tensor, k: Tensor, wide: torch.dtype) -> Tensor:
        """Scores before masking: (..., heads, destinations, edges)."""
        if self.features is None:
            with torch.autocast("cpu", enabled=False):
                return self.score(q, k)
        f, edge = self.features.to(wide), self.score.edge.to(wide)
        if isinstance(self.score, GATv2):
            return self.score(q, k + torch.einsum("ec,hdc->hed", f, edge))
        s = torch.einsum("...hid,hd->...hi", q, self.score.destination.to(wide))[..., :, None]
        s = s + torch.einsum("...hed,hd->...he", k, self.score.source.to(wide))[..., None, :]
        s = s + torch.einsum("ec,hc->he", f, edge)[:, None, :]
        if self.score.bias is not None:
            s = s + self.score.bias.to(wide)[:, None, None]
        return F.leaky_relu(s, self.score.negative_slope)

    def gradients(self, out: Tensor, towards: Tensor) -> list[Tensor]:
        found = torch.autograd.grad(
            out, self.learned, towards, allow_unused=True, materialize_grads=True, retain_graph=True
        )
        return list(found)


def expected_kernel(row: Row) -> str:
    return "edges_native" if native is not None and row.score != "other" and row.option != "bias" else "edges_torch"


@pytest.mark.parametrize("row", rows(), ids=str)
def test_kernels_equal_the_definition(row: Row):
    built = Built(row)
    there = on_device(built)
    said = explain(
        there.q,
        there.k,
        there.v,
        over=there.graph,
        score=there.score,
        bias=there.bias,
        sink=there.sink,
        dropout=there.dropout,
    )
    if there is built:
        assert said.kernel == expected_kernel(row), str(said)
    wanted, weights = built.definition()
    towards = torch.randn_like(wanted)
    expected = [wanted, *built.gradients(wanted, towards)]
    for kernel in {said.kernel, "edges_torch"}:
        out = there.attend(kernel)
        assert out.dtype == row.dtype
        got = [out, *there.gradients(out, towards.to(out.device, row.dtype))]
        names = ["out", *(f"gradient {i}" for i in range(len(got) - 1))]
        wrong = [n for n, a, b in zip(names, got, expected, strict=True) if differs(a, b, DTYPES[row.dtype])]
        assert not wrong, f"{kernel}: {wrong}"
    seen = attention_weights(there.q, there.k, over=there.graph, score=there.score, bias=there.bias, sink=there.sink)
    assert not differs(seen, weights, DTYPES[row.dtype])


@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("graph", [name for name in GRAPHS if name != "duplicates"])
def test_the_reference_sees_a_graph_as_a_mask(graph: str, score: str, dropout: float):
    built = Built(Row(graph, score, "plain", "plain"))
    built.dropout = dropout
    assert not differs(built.attend("reference"), built.attend(None), 1e-11)
    adjacency = torch.zeros(built.nodes[::-1], dtype=torch.bool)
    adjacency[built.destination, built.source] = True
    masked = attend(built.q, built.k, built.v, over=adjacency, score=built.score, dropout=dropout, seed=5)
    assert not differs(masked, built.attend(None), 1e-11)


def test_the_reference_refuses_graphs_that_are_more_than_a_mask():
    for option, reason in (("weights", "nothing else of a Graph"), ("bias", "nothing else of a Graph")):
        with pytest.raises(ValueError, match=reason):
            Built(Row("random", "gat", "plain", option)).attend("reference")
    with pytest.raises(ValueError, match="the graph has duplicate edges"):
        Built(Row("duplicates", "gat", "plain", "plain")).attend("reference")


def test_every_score_is_in_the_table():
    public = {kind for kind in vars(polyhead).values() if isinstance(kind, type) and issubclass(kind, Score)} - {Score}
    assert public <= {type(make(8, None)) for make in SCORES.values()}
