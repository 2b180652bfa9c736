"""The kernel `flex` against the reference, in value and gradient, for every neighbourhood and option.

`flex` runs here on the CPU: everything of ours, and torch's flex_attention up to the code for the device, in place of which torch
computes its dense definition.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from table import DTYPES, LAYOUTS, NEIGHBOURHOODS, OPTIONS, POSITIONS, Row
from test_conformance import Built, differs
from test_grids import GRIDS, HEADS

from polyhead import ALiBi, Causal, Padding, RelativeBias, attend, explain

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")

EMPTY = [name for name, layout in LAYOUTS.items() if 0 in (*layout.batch, layout.queries, layout.keys)]
SIZED = [name for name in LAYOUTS if name not in EMPTY]
SOME_LAYOUTS = ("groups-apart", "far-wider-values", "one-query", "two-batches")
# every neighbourhood, position, option and dtype once, and some layouts
SOME = [
    *(Row(name, "none", "sink", "plain", torch.float64) for name in NEIGHBOURHOODS),
    *(Row("causal-window-padding", "relative", option, "grouped", torch.float64) for option in OPTIONS),
    *(Row("mask-window", position, "bias", "plain", torch.float64) for position in POSITIONS),
    *(Row("causal-segments", "rotary", "sink", layout, torch.float64) for layout in SOME_LAYOUTS),
    *(Row("window", "relative", "dropout", "strided", dtype) for dtype in DTYPES),
]  # fmt: skip
ALL = [
    *(Row(*row, "plain", torch.float64) for row in itertools.product(NEIGHBOURHOODS, POSITIONS, OPTIONS)),
    *(Row(n, "relative", o, layout, torch.float64) for n, o, layout in itertools.product(NEIGHBOURHOODS, ("sink", "dropout"), SIZED)),
    *(Row(n, p, "sink", "plain", dtype) for n, p, dtype in itertools.product(NEIGHBOURHOODS, ("none", "relative"), DTYPES)),
]  # fmt: skip


def check(row: Row) -> None:
    built = Built(row)
    expected = built.attend("reference")
    towards = torch.randn_like(expected)
    out = built.attend("flex")
    assert out.dtype == row.dtype
    got = [out, *built.gradients(out, towards)]
    expected = [expected, *built.gradients(expected, towards)]
    wrong = [i for i, (a, b) in enumerate(zip(got, expected, strict=True)) if differs(a, b, DTYPES[row.dtype])]
    assert not wrong, f"{row}: the results {wrong} of (out, gradients...) differ"


@pytest.mark.parametrize("row", SOME, ids=str)
def test_flex_equals_the_reference(row: Row, flex_on_cpu: None):
    check(row)


@pytest.mark.slow(f"{len(ALL)} rows")
def test_flex_equals_the_reference_in_every_row(flex_on_cpu: None):
    for row in ALL:
        check(row)


@pytest.mark.parametrize("layout", EMPTY)
def test_empty_tensors_are_refused(layout: str, flex_on_cpu: None):
    built = Built(Row("causal", "none", "plain", layout))
    with pytest.raises(ValueError, match="kernel 'flex' refuses this call: a tensor is empty"):
        built.attend("flex")


def check_grid(name: str, position: str, dropout: float) -> None:
    over = GRIDS[name]()
    lattice = over.lattice
    queries, keys = (torch.Size(axes).numel() + lattice.prefix for axes in (lattice.outputs, lattice.sizes))
    q = torch.randn(2, HEADS, queries, 12, dtype=torch.float64, requires_grad=True)
    k, v = torch.randn(2, 2, HEADS, keys, 12, dtype=torch.float64, requires_grad=True).unbind()
    sink = torch.randn(HEADS, dtype=torch.float64, requires_grad=True)
    of = {
        "none": lambda: None,
        "relative": lambda: RelativeBias(HEADS, window=(5,) * len(lattice.sizes)).double(),
        "alibi": lambda: ALiBi(HEADS).double(),
    }
    options = {"over": over, "position": of[position](), "sink": sink, "dropout": dropout, "seed": 3}
    learned = [q, k, v, sink, *(options["position"].parameters() if position == "relative" else ())]
    results = []
    towards = torch.randn(2, HEADS, queries, 12, dtype=torch.float64)
    for kernel in ("flex", "reference"):
        out = attend(q, k, v, kernel=kernel, **options)
        results.append([out, *torch.autograd.grad(out, learned, towards)])
    assert not any(differs(a, b, 1e-11) for a, b in zip(*results, strict=True)), name


@pytest.mark.parametrize("name", ["plane-uneven", "prefix", "offsets-several"])
def test_flex_equals_the_reference_on_grids(name: str, flex_on_cpu: None):
    check_grid(name, "relative", 0.0)


@pytest.mark.slow(f"{len(GRIDS)} grids with positions and dropout")
def test_flex_equals_the_reference_on_every_grid(flex_on_cpu: None):
    for name, position, dropout in itertools.product(GRIDS, ("none", "relative"), (0.0, 0.3)):
        check_grid(name, position, dropout)


def test_rows_without_keys_give_zero_and_no_nan(flex_on_cpu: None):
    """Under a sink, dropout and half precision, in the output and in every gradient."""
    over = Causal() & Padding([9, 0], queries=True)
    q, k, v = (torch.randn(2, 3, 9, 8, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    for dropout in (0.0, 0.9):
        out = attend(q, k, v, over=over, kernel="flex", sink=torch.zeros(3), dropout=dropout, seed=1)
        assert torch.equal(out[1], torch.zeros_like(out[1]))
        gradients = torch.autograd.grad(out.float().square().sum(), (q, k, v))
        assert all(x.isfinite().all() for x in gradients)
        assert not any(x[1].any() for x in gradients)


@pytest.mark.parametrize("scale", [0.0, -0.7, 1e-40])
def test_scales_that_are_not_positive(scale: float, flex_on_cpu: None):
    from polyhead import Dot

    q, k, v = torch.randn(3, 2, 3, 9, 8, dtype=torch.float64)
    out, expected = (
        attend(q, k, v, over=Causal(), score=Dot(scale), kernel=kernel) for kernel in ("flex", "reference")
    )
    torch.testing.assert_close(out, expected)


def test_explain_names_flex_before_tiled(flex_on_cpu: None):
    q = torch.randn(1, 2, 300, 40)
    said = explain(q, q, q, over=torch.rand(300, 300) > 0.5)
    assert said.kernel == "flex" and "tiled" not in said.refused
