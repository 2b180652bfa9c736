"""Sums over many items run in fp32 or wider and are rounded once: hubs of 5,000 edges, queries and points.

A sum in bf16 stops at 256 where ones are added to it, and one in fp16 at 2,048.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor

import polyhead
from polyhead import (
    GAT,
    ALiBi,
    Dense,
    Dot,
    GATv2,
    Graph,
    Grid,
    Mask,
    Neighbourhood,
    Offsets,
    Position,
    QuadraticOffset,
    RelativeBias,
    Score,
    attend,
)
from polyhead._torch import native
from polyhead.interop.pyg.edge_index import self_loop_features
from polyhead.kernels import Call
from polyhead.metrics import blocks, blockwise
from polyhead.metrics.attention_parts import DensePart
from polyhead.nn.skip_padded_rows import Unpadding

HUB = 5000
HEADS, DIM = 2, 4
# tolerance relative to the largest gradient in fp64: inputs and outputs of a kernel are rounded too
DTYPES = {torch.float64: 1e-11, torch.float32: 1e-4, torch.bfloat16: 2**-6, torch.float16: 2**-9}

needs_native = pytest.mark.skipif(native is None, reason="there are no C++ kernels")


def some(*shape: int) -> Tensor:
    """Positive numbers, exact in every dtype: their sums do not cancel."""
    return (torch.rand(*shape) / 2 + 0.5).to(torch.bfloat16).double()


@dataclass
class Case:
    """A call with a sum over 5,000 items, forward or backward."""

    kernels: tuple[str, ...]
    over: Neighbourhood | None = None
    q: tuple[int, int] = (HEADS, HUB)
    k: tuple[int, int] = (HEADS, 3)
    score: Callable[[], Score] = Dot
    position: Callable[[], Position] | None = None
    options: dict[str, Tensor] = field(default_factory=dict)
    # the kernel that computes the expected results, in fp64
    oracle: str = "reference"


def _hub_graph(**more: Tensor) -> Graph:
    """Node 0 sees and is seen by all others, each of which also sees itself."""
    others, hub = torch.arange(1, HUB + 1), torch.zeros(HUB, dtype=torch.long)
    pairs = torch.cat((torch.stack((others, hub)), torch.stack((hub, others)), torch.stack((others, others))), 1)
    return Graph(pairs, HUB + 1, **more)


def _on_edges(kernels: tuple[str, ...], *, graph: Graph | None = None, **more: object) -> Case:
    nodes = (HEADS, HUB + 1)
    return Case(kernels, graph or _hub_graph(), nodes, nodes, oracle="edges_torch", **more)


def cases() -> dict[str, Case]:
    torch.manual_seed(1)
    points, both = (HEADS, 71 * 71), ("edges_native", "edges_torch")
    plane, line = Grid(71, 71, window=141), Grid(HUB, window=2 * HUB - 1)
    around = (HEADS, 70 * 72 + 1)
    far = [[[100, 100], [100, 99]], [[-100, -100], [-99, -100]]]
    replicated = Offsets([each[0] for each in far], (71, 71), padding="replicate")
    some_keys = Mask(torch.rand(HUB, 3) > 0.3)
    return {
        "keys": Case(("fused", "short", "tiled", "reference")),
        "keys-masked": Case(("tiled", "reference"), some_keys),
        # (fused and tiled leave the sum over the heads of a group to torch's kernel, which sums in bf16 or fp16)
        "keys-of-many-heads": Case(("short", "reference"), q=(HUB, 2), k=(1, 3)),
        "all-keys-bias": Case(("short", "tiled", "reference"), options={"bias": some(HEADS, 1, 3)}),
        "all-keys-bias-of-all": Case(("short", "tiled", "reference"), options={"bias": some(1, 1, 3)}),
        "keys-bias": Case(("tiled", "reference"), some_keys, options={"bias": some(HEADS, 1, 3)}),
        "keys-bias-of-all": Case(("tiled", "reference"), some_keys, options={"bias": some(1, 1, 3)}),
        "keys-table": Case(("short", "tiled", "reference"), position=lambda: RelativeBias(HEADS)),
        "keys-sink": Case(("short", "tiled", "reference"), options={"sink": some(HEADS)}),
        "keys-gat": Case(("reference",), score=lambda: GAT(HEADS, DIM, bias=True)),
        "keys-gatv2": Case(("reference",), score=lambda: GATv2(HEADS, DIM)),
        "edges": _on_edges(both),
        "edges-grouped": replace(_on_edges(both), k=(1, HUB + 1)),
        "edges-bias": _on_edges(("edges_torch",), options={"bias": some(1, 3 * HUB)}),
        "edges-table": _on_edges(("edges_torch",), position=lambda: RelativeBias(HEADS)),
        "edges-weights": _on_edges(both, graph=_hub_graph(weights=some(3 * HUB))),
        "edges-gat": _on_edges(both, score=lambda: GAT(HEADS, DIM, bias=True)),
        "edges-gatv2": _on_edges(both, score=lambda: GATv2(HEADS, DIM)),
        "edges-gatv2-features": _on_edges(
            both, graph=_hub_graph(features=some(3 * HUB, 3)), score=lambda: GATv2(HEADS, DIM, edge_dim=3)
        ),
        "edges-gat-features": _on_edges(
            both, graph=_hub_graph(features=some(3 * HUB, 3)), score=lambda: GAT(HEADS, DIM, edge_dim=3)
        ),
        "grid": Case(("grid",), plane, points, points, oracle="grid"),
        "grid-table": Case(
            ("grid",),
            line,
            (HEADS, HUB),
            (HEADS, HUB),
            position=lambda: RelativeBias(HEADS, window=(3,)),
            oracle="grid",
        ),
        "grid-quadratic": Case(
            ("grid",),
            line,
            (HEADS, HUB),
            (HEADS, HUB),
            position=lambda: QuadraticOffset(torch.ones(HEADS, 1)),
            oracle="grid",
        ),
        "windows": Case(("windows",), Grid(70, 72, window=3, prefix=1), around, around, oracle="windows"),
        "offset": Case(("offsets",), replicated, points, points, oracle="offsets"),
        "offset-shared": Case(("offsets",), replicated, points, (1, 71 * 71), oracle="offsets"),
        "offsets": Case(("offsets",), Offsets(far, (71, 71), padding="replicate"), points, points, oracle="offsets"),
    }


CASES = cases()


class Built:
    """A case with its tensors in one dtype; the values are the same in every dtype."""

    def __init__(self, case: Case, dtype: torch.dtype) -> None:
        torch.manual_seed(2)
        made = [some(*size, DIM) for size in (case.q, case.k, case.k)]
        self.q, self.k, self.v = (x.to(dtype).requires_grad_() for x in made)
        self.options = {name: x.to(dtype).requires_grad_() for name, x in case.options.items()}
        self.over = case.over
        held: list[Tensor] = []
        if isinstance(case.over, Graph):
            features, weights = (
                None if x is None else x.detach().to(dtype).requires_grad_()
                for x in (case.over.features, case.over.weights)
            )
            self.over = Graph(case.over.edge_index, case.over.sources, features, weights)
            held = [x for x in (features, weights) if x is not None]
        self.score = case.score()
        self.position = None if case.position is None else case.position()
        modules = [self.score] if self.position is None else [self.score, self.position]
        with torch.no_grad():
            for module in modules:
                for parameter in module.parameters():
                    # of both signs, so that LeakyReLU uses both slopes
                    sign = torch.arange(parameter.numel()).reshape(parameter.shape) % 2 * 2 - 1
                    parameter.copy_(some(*parameter.shape) * sign / 8)
                module.to(dtype)
        self.learned = {"q": self.q, "k": self.k, "v": self.v, **self.options}
        self.learned |= {f"edge {n}": x for n, x in enumerate(held)}
        self.learned |= {name: p for module in modules for name, p in module.named_parameters()}

    def results(self, kernel: str) -> dict[str, Tensor]:
        out = attend(
            self.q, self.k, self.v, over=self.over, score=self.score, position=self.position, kernel=kernel, **self.options
        )  # fmt: skip
        torch.manual_seed(3)
        towards = some(*out.shape).to(out.dtype)
        given = torch.autograd.grad(out, list(self.learned.values()), towards, materialize_grads=True)
        return {"out": out.detach(), **dict(zip(self.learned, given, strict=True))}


_wanted: dict[str, dict[str, Tensor]] = {}


def wanted(name: str) -> dict[str, Tensor]:
    if name not in _wanted:
        _wanted[name] = Built(CASES[name], torch.float64).results(CASES[name].oracle)
    return _wanted[name]


def check(got: dict[str, Tensor], wanted: dict[str, Tensor], dtype: torch.dtype) -> None:
    off = {}
    for name, x in got.items():
        assert x.dtype == dtype
        # the common part of the score gradients cancels, but their errors do not
        least = 1.0 if name in ("out", "q", "k", "v") else HUB / 10
        size = wanted[name].abs().max().clamp(min=least)
        off[name] = float((x.double() - wanted[name]).abs().max() / size)
    wrong = {name: error for name, error in off.items() if not error <= DTYPES[dtype]}
    assert not wrong, wrong


@needs_native
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize(
    ("name", "kernel"), [(name, kernel) for name, case in CASES.items() for kernel in case.kernels]
)
def test_a_hub_is_summed_in_fp32(name: str, kernel: str, dtype: torch.dtype):
    check(Built(CASES[name], dtype).results(kernel), wanted(name), dtype)


def test_every_kernel_has_a_case_with_a_hub():
    kernels = {k.name for known in (polyhead.kernels.SEQUENCE_KERNELS, polyhead.kernels.GRID_KERNELS, polyhead.kernels.OFFSET_KERNELS, polyhead.kernels.GRAPH_KERNELS) for k in known}  # fmt: skip
    # flex is for GPUs
    assert {kernel for case in CASES.values() for kernel in case.kernels} == kernels - {"flex"}


HALVES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])


@HALVES
def test_a_table_sums_over_all_distances_of_a_bucket(dtype: torch.dtype):
    position = RelativeBias(HEADS).to(dtype)
    distance = torch.arange(1 - HUB, HUB)
    position.by_distance(distance).sum().backward()
    counts = position.bucket(distance).bincount(minlength=32).to(dtype)
    assert torch.equal(position.weight.grad, counts[:, None].expand(-1, HEADS))


@HALVES
def test_a_table_sums_over_all_points_of_a_border(dtype: torch.dtype):
    position = RelativeBias(HEADS, window=(3,)).to(dtype)
    position.by_offset(torch.arange(-HUB, HUB)[:, None]).sum().backward()
    counts = torch.tensor([HUB, 1, HUB - 1]).to(dtype)
    assert torch.equal(position.weight.grad, counts[:, None].expand(-1, HEADS))


@HALVES
def test_distances_are_not_rounded(dtype: torch.dtype):
    """5,000 and 5,001 are the same number in bf16."""
    table = ALiBi(8).to(dtype).by_distance(torch.arange(-HUB - 1, 1))
    assert torch.equal(table[0].diff(), torch.full((HUB + 1,), 0.5))
    table = QuadraticOffset([[0.0]]).to(dtype).by_offset(torch.arange(HUB + 1)[:, None])
    assert torch.equal(table[0], -torch.arange(HUB + 1.0).square())


@HALVES
def test_degrees_are_counted_in_fp32(dtype: torch.dtype):
    scaled = _hub_graph(weights=torch.ones(3 * HUB, dtype=dtype)).gcn_normalise()
    # 2 in-edges at one end, 5,000 at the other
    assert scaled.weights.dtype == dtype
    torch.testing.assert_close(scaled.weights[0], torch.tensor((2.0 * HUB) ** -0.5, dtype=dtype))


@HALVES
def test_means_over_edges_are_taken_in_fp32(dtype: torch.dtype):
    features = torch.full((3 * HUB, 1), 3.0, dtype=dtype).requires_grad_()
    filled = _hub_graph(features=features).with_self_loops(fill="mean").features
    assert filled[-1].item() == 3.0
    loops = self_loop_features("add", features, _hub_graph().edge_index, HUB + 1, HUB + 1)
    assert loops[0].item() == torch.tensor(3.0 * HUB, dtype=dtype).item()


def test_the_gradients_of_blocks_are_added_in_fp32(monkeypatch: pytest.MonkeyPatch):
    """The gradient of a key adds up over many blocks of queries."""
    # one query per block
    monkeypatch.setattr(blocks, "BLOCK_WEIGHTS", 3)
    q, k = (some(1, n, DIM).bfloat16().requires_grad_() for n in (HUB // 8, 3))
    given = []
    for dtype in (torch.bfloat16, torch.float64):
        call = Call(q.to(dtype), k.to(dtype), k.to(dtype), Dense(), Dot())
        given += torch.autograd.grad(
            blockwise.compute_one(DensePart(call), "mass_on_keys", torch.tensor([1.0, 0.0, 0.0])).sum(), k
        )
    torch.testing.assert_close(*given, rtol=2**-6, atol=0.1)


@HALVES
def test_padded_rows_are_summed_in_fp32(dtype: torch.dtype):
    """All rows that are left out share one row, whose gradient is their sum."""
    live = Unpadding(torch.arange(HUB + 1) == 0)
    y = torch.ones(2, DIM, dtype=dtype, requires_grad=True)
    live.pad(y).sum().backward()
    assert y.grad[1].tolist() == [torch.tensor(float(HUB), dtype=dtype).item()] * DIM
