"""NaN and inf: one rule for all kernels.

A query that holds NaN gives a row of NaN; a key that holds NaN gives rows of NaN to all that may see it, and a value gives
them NaN in its feature. A forbidden pair never contributes, forward or backward. A query with no key gives zeros.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

import polyhead.numpy as definition
from polyhead import (
    GAT,
    ALiBi,
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
    attention_weights,
)
from polyhead.kernels import Call, candidate_kernels, fused
from polyhead.neighbourhood import Sizes
from polyhead.score import Score

BATCH, HEADS, ITEMS, DIM = 2, 2, 37, 8
DTYPES = {torch.float64: 1e-10, torch.float32: 2e-5, torch.bfloat16: 4e-2, torch.float16: 6e-3}

LENGTHS, IDS = torch.tensor([23, 0]), torch.arange(ITEMS) // 13
NEIGHBOURHOODS: dict[str, Callable[[], Neighbourhood]] = {
    "dense": Dense,
    "causal": Causal,
    "window": lambda: Window(5),
    "window-ahead": lambda: Window(0, 3),
    "padding": lambda: Padding(LENGTHS),
    "padding-self": lambda: Padding(LENGTHS, queries=True),
    "padding-holes": lambda: Padding(torch.rand(BATCH, ITEMS) > 0.4, queries=True),
    "mask": lambda: Mask(torch.rand(BATCH, 1, ITEMS, ITEMS) > 0.6),
    "mask-by-head": lambda: Mask(torch.rand(1, HEADS, ITEMS, ITEMS) > 0.6),
    "segments": lambda: Segments(IDS),
    "segments-apart": lambda: Segments(torch.arange(ITEMS) % 3),
    "causal-window-padding": lambda: Causal() & Window(7) & Padding(LENGTHS, queries=True),
    "causal-segments": lambda: Causal() & Segments(IDS),
    "grid": lambda: Grid(ITEMS, window=5),
    "grid-dilated": lambda: Grid(1, ITEMS, window=3, dilation=2),
    "grid-prefix": lambda: Grid(6, 6, window=3, prefix=1),
    "graph": lambda: Graph(torch.randint(0, ITEMS, (2, 90)).unique(dim=1), ITEMS),
    "offsets": lambda: Offsets([[[0], [-3], [2]], [[1], [5], [-40]]], (ITEMS,)),
}

# where the first head holds NaN or inf: (q, k or v; the item; its features)
ALL = slice(None)
POISONS: dict[str, list[tuple[str, int, slice]]] = {
    "query": [("q", 11, ALL)],
    "query-first": [("q", 0, slice(0, 1))],
    "query-last": [("q", ITEMS - 1, ALL)],
    "key": [("k", 11, slice(2, 3))],
    "key-first": [("k", 0, ALL)],
    "key-last": [("k", ITEMS - 1, ALL)],
    "value": [("v", 11, slice(2, 3))],
    "value-last": [("v", ITEMS - 1, ALL)],
    "token": [("q", 30, ALL), ("k", 30, ALL), ("v", 30, ALL)],
    "padding": [(name, item, ALL) for name in "qkv" for item in range(23, ITEMS)],
    "everything": [("k", item, ALL) for item in range(ITEMS)],
}


class Poisoned:
    """A call in which some items hold NaN or inf, and the rows that the rule makes NaN."""

    oracle = "reference"

    def __init__(
        self, over: Neighbourhood, poison: str, dtype: torch.dtype, value: float = torch.nan, items: int = ITEMS
    ) -> None:
        self.over, self.dtype, self.items = over, dtype, items
        clean = {name: torch.randn(BATCH, HEADS, items, DIM).to(dtype) for name in "qkv"}
        spoilt = {name: x.clone() for name, x in clean.items()}
        for name, item, features in POISONS[poison]:
            spoilt[name][:, 0, min(item, items - 1), features] = value
            clean[name][:, 0, min(item, items - 1), features] = 0
        self.clean = [x.double().requires_grad_() for x in clean.values()]
        self.tensors = [x.requires_grad_() for x in spoilt.values()]
        self.allowed = over.mask(Sizes((BATCH,), HEADS, items, items), torch.device("cpu")).expand(
            BATCH, HEADS, items, items
        )
        q, k, v = (~x.detach().isfinite() for x in self.tensors)
        self.live = self.allowed.any(-1)
        # rows with NaN in their scores, rows with NaN in some feature, and both
        self.scores = self.live & (q.any(-1) | (self.allowed & k.any(-1)[..., None, :]).any(-1))
        self.features = self.allowed.double() @ v.double() > 0
        self.rows = self.scores | self.features.any(-1)
        self.towards = torch.linspace(-1, 1, q.numel(), dtype=torch.float64).reshape(q.shape).to(dtype)

    def takes(self, **options: object) -> list[str]:
        """The kernels that accept the call."""
        given = {name: value for name, value in options.items() if name not in ("position", "seed")}
        position = options.get("position")
        table = None if position is None else position.by_distance(torch.arange(1 - self.items, self.items))
        call = Call(*self.tensors, self.over, **{"score": Dot(), "relative_bias": table, **given})
        return [kernel.name for kernel in candidate_kernels(call) if kernel.refuses(call) is None]

    def check(self, kernel: str, *, nan: bool = True, across_heads: bool = False, **options: object) -> None:
        """Compare with the same call without NaN.

        `nan`: rows that see it must hold NaN, and not only may. `across_heads`: gradients may reach an item's other heads.
        """
        out = attend(*self.tensors, over=self.over, kernel=kernel, **options)
        wide = {name: x.double() if name in ("bias", "sink") else x for name, x in options.items()}
        # forbidden pairs hold NaN in the bias too
        wide |= {"bias": wide["bias"].nan_to_num(0.0, 0.0, 0.0)} if "bias" in wide else {}
        expected = attend(*self.clean, over=self.over, kernel=self.oracle, **wide)
        off = self.scores[..., None] | self.features
        self._compare(f"{kernel}: out", out, expected, off, off if nan else None)
        got = torch.autograd.grad(out, self.tensors, self.towards)
        # rows that see NaN do not contribute to the gradients of the others
        towards = self.towards.double().masked_fill(self.rows[..., None], 0.0)
        expected = torch.autograd.grad(expected, self.clean, towards)
        # a key may get NaN from any row that sees it
        reached = (self.allowed & self.rows[..., None]).any(-2)
        for name, a, b, off in zip("qkv", got, expected, (self.rows, reached, reached), strict=True):
            off = off.any(1, keepdim=True) if across_heads else off
            self._compare(f"{kernel}: d{name}", a, b, off[..., None].expand_as(a), None)

    def _compare(self, name: str, got: Tensor, expected: Tensor, off: Tensor, nan: Tensor | None) -> None:
        assert got.dtype == self.dtype
        leaks = ~got.isfinite() & ~off
        assert not leaks.any(), f"{name}: {leaks.nonzero()[:4].tolist()} of {int(leaks.sum())} are not finite"
        apart = (got.double() - expected).masked_fill(off, 0.0).abs().max()
        assert apart <= DTYPES[self.dtype] * max(1.0, expected.abs().max()), f"{name}: {apart} off"
        if nan is not None:
            assert got[nan].isnan().all(), f"{name}: {(nan & ~got.isnan()).nonzero()[:4].tolist()} are not NaN"


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize("name", NEIGHBOURHOODS)
def test_one_rule_for_all_kernels(name: str, poison: str, dtype: torch.dtype):
    case = Poisoned(NEIGHBOURHOODS[name](), poison, dtype)
    known = case.takes()
    assert known
    for kernel in known:
        case.check(kernel)


@pytest.mark.parametrize("items", [1, 2, 5, 15, 16, 17])
@pytest.mark.parametrize("poison", ["query", "query-first", "key-first", "key-last", "value", "everything"])
@pytest.mark.parametrize("over", [Dense(), Causal(), Window(1), Mask(torch.ones(1, 1, dtype=torch.bool))], ids=repr)
def test_few_keys(over: Neighbourhood, poison: str, items: int):
    """torch's kernel treats a row of NaN as one without keys, if the keys do not fill a SIMD vector."""
    over = Mask(torch.ones(items, items, dtype=torch.bool)) if isinstance(over, Mask) else over
    for dtype in DTYPES:
        case = Poisoned(over, poison, dtype, items=items)
        for kernel in case.takes():
            case.check(kernel)


@pytest.mark.parametrize("name", ["q", "k"])
def test_many_queries_with_few_keys(name: str):
    given = {"q": torch.randn(2, 4, 300, 8), "k": torch.randn(2, 2, 5, 8), "v": torch.randn(2, 2, 5, 8)}
    assert given["q"].numel() > fused.MAX_CHECKED_NUMBERS
    given[name][0, 1] = torch.nan
    # two query heads share one key head
    rows = slice(1, 2) if name == "q" else slice(2, 4)
    for dtype, kernel in itertools.product(DTYPES, ("fused", "short", "tiled", "reference")):
        out = attend(*(x.to(dtype) for x in given.values()), kernel=kernel)
        assert out[0, rows].isnan().all()
        assert out.isnan().sum() == out[0, rows].numel()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("poison", ["query", "key", "value-last", "token"])
@pytest.mark.parametrize(
    "over", [Causal(), Window(70), Causal() & Window(150), Segments(torch.arange(600) // 130)], ids=str
)
def test_long_rows(over: Neighbourhood, poison: str, dtype: torch.dtype):
    """Enough keys for several tiles, and several blocks of torch's kernel."""
    case = Poisoned(over, poison, dtype, items=600)
    for kernel in case.takes():
        case.check(kernel)


OPTIONS: dict[str, Callable[[torch.dtype], dict[str, object]]] = {
    "sink": lambda dtype: {"sink": torch.randn(HEADS).to(dtype).requires_grad_()},
    "bias": lambda dtype: {"bias": torch.randn(HEADS, ITEMS, ITEMS).to(dtype)},
    "learned-bias": lambda dtype: {"bias": torch.randn(HEADS, 1, ITEMS).to(dtype).requires_grad_()},
    "alibi": lambda dtype: {"position": ALiBi(HEADS)},
    "dropout": lambda dtype: {"dropout": 0.3, "seed": torch.tensor(7)},
    "gat": lambda dtype: {"score": GAT(HEADS, DIM, bias=True).double()},
    "gatv2": lambda dtype: {"score": GATv2(HEADS, DIM).double()},
}


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("poison", ["query", "key", "value", "token", "padding"])
@pytest.mark.parametrize("name", NEIGHBOURHOODS)
def test_the_rule_holds_with_options(name: str, poison: str, option: str):
    over = NEIGHBOURHOODS[name]()
    if isinstance(over, Graph) and "bias" in option:
        # one number per edge, and no edge is forbidden
        return
    for dtype in (torch.float32, torch.bfloat16):
        case, options = Poisoned(over, poison, dtype), OPTIONS[option](dtype)
        for kernel in case.takes(**options):
            # as documented: one matrix product computes the terms of all heads
            case.check(kernel, across_heads=option == "gat" and kernel in ("edges_native", "windows"), **options)


@pytest.mark.parametrize("name", ["causal", "window", "mask", "padding-self", "causal-segments"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("learned", [False, True])
def test_a_bias_of_a_forbidden_pair(name: str, value: float, learned: bool):
    case = Poisoned(NEIGHBOURHOODS[name](), "query", torch.float32)
    case.tensors = [x.detach().float().requires_grad_() for x in case.clean]
    case.scores, case.rows = torch.zeros_like(case.scores), torch.zeros_like(case.rows)
    bias = torch.randn(BATCH, HEADS, ITEMS, ITEMS).masked_fill(~case.allowed, value).requires_grad_(learned)
    for kernel in case.takes(bias=bias):
        case.check(kernel, bias=bias)
        if learned:
            out = attend(*case.tensors, over=case.over, bias=bias, kernel=kernel)
            (given,) = torch.autograd.grad(out, bias, torch.ones_like(out))
            assert torch.equal(given[~case.allowed], torch.zeros_like(given[~case.allowed]))


@pytest.mark.parametrize("value", [torch.inf, -torch.inf])
@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize("name", NEIGHBOURHOODS)
def test_inf_reaches_only_rows_that_see_it(name: str, poison: str, value: float):
    """Rows that see it are not checked here."""
    for dtype in (torch.float32, torch.float16):
        case = Poisoned(NEIGHBOURHOODS[name](), poison, dtype, value)
        for kernel in case.takes():
            case.check(kernel, nan=False)


@pytest.mark.parametrize("name", sorted(NEIGHBOURHOODS.keys() - {"causal"}))
def test_a_nan_gradient_reaches_only_keys_that_the_query_sees(name: str):
    """Keys and values that a query may not see get nothing from its gradient."""
    case = Poisoned(NEIGHBOURHOODS[name](), "query", torch.float32)
    case.tensors = [x.detach().float().requires_grad_() for x in case.clean]
    case.towards[..., 11, :] = torch.nan
    case.scores = torch.zeros_like(case.scores)
    case.rows = torch.zeros_like(case.rows).index_fill(-1, torch.tensor([11]), True) & case.live
    for sink in ({}, {"sink": torch.randn(HEADS, requires_grad=True)}):
        for kernel in case.takes(**sink):
            case.check(kernel, **sink)


@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize("name", sorted(NEIGHBOURHOODS.keys() - {"graph"}))
def test_the_numpy_definition_follows_the_rule(name: str, poison: str):
    case = Poisoned(NEIGHBOURHOODS[name](), poison, torch.float64)
    q, k, v = (x.detach() for x in case.tensors)
    weights = attention_weights(q, k, over=case.over)
    out = attend(q, k, v, over=case.over, kernel="reference")
    # forbidden pairs have weight zero even in a row of NaN
    assert torch.equal(weights[~case.allowed], torch.zeros_like(weights[~case.allowed]))
    for b, h in np.ndindex(BATCH, HEADS):
        Q, K, V, allowed = (x[b, h].numpy() for x in (q, k, v, case.allowed))
        np.testing.assert_allclose(definition.weights(Q, K, allowed=allowed), weights[b, h], atol=1e-12)
        np.testing.assert_allclose(definition.attention(Q, K, V, allowed=allowed), out[b, h], atol=1e-12)


def test_the_numpy_definition_on_graphs_follows_the_rule():
    A = np.array([[1.0, 1.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]])
    X, W, a = np.random.default_rng(0).normal(size=(3, 4)), np.eye(4), np.ones(4)
    X[2] = np.nan
    for out in (definition.gat(X, A, W, a, a), definition.gatv2(X, A, W, W, a)):
        assert np.isfinite(out[:2]).all() and np.isnan(out[2]).all()


@pytest.mark.parametrize("poison", ["query", "key", "value", "token"])
@pytest.mark.parametrize("name", ["dense", "causal", "window", "segments-apart", "causal-segments"])
def test_transforms_follow_the_rule(name: str, poison: str):
    case = Poisoned(NEIGHBOURHOODS[name](), poison, torch.float32)

    def loss(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        out = attend(*tensors[:3], over=case.over)
        return (out * tensors[3]).sum(), out

    tensors = [x.detach() for x in case.tensors]
    given, out = torch.vmap(torch.func.grad(loss, argnums=(0, 1, 2), has_aux=True))(*tensors, case.towards)
    off = case.scores[..., None] | case.features
    assert torch.equal(out.isnan(), off)
    reached = (case.allowed & case.rows[..., None]).any(-2)
    for x, rows in zip(given, (case.rows, reached, reached), strict=True):
        assert x[~rows].isfinite().all()


@pytest.mark.parametrize("over", [Window(5), Mask(torch.rand(ITEMS, ITEMS) > 0.6)], ids=str)
def test_a_compiled_call_follows_the_rule(over: Neighbourhood):
    case = Poisoned(over, "token", torch.float32)
    compiled = torch.compile(lambda *given: attend(*given, over=over), fullgraph=True, backend="aot_eager")
    out = compiled(*case.tensors)
    assert torch.equal(out.isnan(), case.scores[..., None] | case.features)
    given = torch.autograd.grad(out, case.tensors, case.towards)
    assert given[0][~case.rows].isfinite().all()


def test_a_dispatch_mode_changes_nothing():
    case = Poisoned(Causal(), "value-last", torch.float32)
    with torch.device("cpu"):
        case.check("fused")


# documented exceptions


def test_exception_torchs_kernel_when_compiled():
    q, k, v = (torch.randn(1, 1, n, DIM) for n in (3, 5, 5))
    q[0, 0, 1] = torch.nan
    compiled = torch.compile(lambda: attend(q, k, v), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled()[0, 0, 1], torch.zeros(DIM))
    assert attend(q, k, v)[0, 0, 1].isnan().all()


def test_exception_torchs_kernel_with_nan_gradients():
    q, k, v = (torch.randn(1, 1, ITEMS, DIM, requires_grad=True) for _ in range(3))
    towards = torch.ones(1, 1, ITEMS, DIM)
    towards[0, 0, 3] = torch.nan
    for kernel, clean in (("fused", False), ("short", True), ("tiled", True), ("reference", True)):
        (given,) = torch.autograd.grad(attend(q, k, v, over=Causal(), kernel=kernel), v, towards)
        assert given[0, 0, :4].isnan().all()
        assert bool(given[0, 0, 4:].isfinite().all()) == clean


def test_one_offset_per_head_needs_no_score():
    """The softmax of a single score is 1: neither queries nor keys are read."""
    q, k, v = torch.randn(3, 1, ITEMS, DIM)
    q[0, 3] = k[0, 4] = torch.nan
    v[0, 8] = torch.nan
    out = attend(q, k, v, over=Offsets([[1]], (ITEMS,)), kernel="offsets")
    assert torch.equal(out[0, :-1].isnan(), v[0, 1:].isnan())
    assert torch.equal(out[0, -1], torch.zeros(DIM))


def test_finite_numbers_whose_sum_overflows_fp16():
    """Their sum overflows fp16; `fused` must not treat them as inf and leave the call to `tiled`."""
    q, k, v = (torch.full((1, 2, 600, 64), 2.0, dtype=torch.float16, requires_grad=True) for _ in range(3))
    assert q.sum().isinf()
    assert "Flash" in attend(q, k, v, over=Causal(), kernel="fused").grad_fn.name()


class Capped(Score):
    """Gemma 2's score, for which no fast kernel has code."""

    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        return (q @ k.mT / 10).tanh() * 10


@pytest.mark.parametrize("score", [Capped(), GAT(2, 4), GATv2(2, 4)], ids=lambda score: type(score).__name__)
def test_other_scores_propagate_no_nan_gradient(score: Score):
    q, k, v = torch.randn(3, 1, 2, 6, 4)
    for x in (q, k, v):
        x[0, :, 5] = torch.nan
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    out = attend(q, k, v, over=Padding([5], queries=True), score=score)
    given = torch.autograd.grad(out.sum(), (q, k, v, *score.parameters()))
    assert out.isfinite().all() and all(x.isfinite().all() for x in given)
