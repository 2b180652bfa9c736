"""Every kernel against the reference, in value and gradient; the reference against plain NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from on_device import fast_kernels, on_device
from table import DTYPES, LAYOUTS, NEIGHBOURHOODS, OPTIONS, POSITIONS, Row, rows

import polyhead
import polyhead.numpy as definition
from polyhead import attend, attention_weights, explain
from polyhead._torch import native
from polyhead.kernels import SEQUENCE_KERNELS, short, tile_problem
from polyhead.neighbourhood import Neighbourhood
from polyhead.prepare import AttentionOptions, check_and_make_call

ROWS = rows()
# neighbourhoods whose intervals differ between the rows of a batch
APART = (
    "padding-right",
    "padding-left-self",
    "padding-holes",
    "mask",
    "causal-window-padding",
    "causal-or-prefix",
    "not-window-or-segments-and-padding",
)


class Built:
    """The tensors of a row of the table."""

    def __init__(self, row: Row) -> None:
        torch.manual_seed(sum(map(ord, str(row))))
        self.layout = LAYOUTS[row.layout]
        self.tensors = self.layout.tensors(row.dtype)
        self.over = NEIGHBOURHOODS[row.neighbourhood](self.layout)
        self.position = POSITIONS[row.position](self.layout)
        if self.position is not None:
            self.position.to(row.dtype)
        self.arguments = OPTIONS[row.option].arguments(self.layout, row.dtype)
        self.learned = [
            *self.tensors,
            *(x for x in self.arguments.values() if isinstance(x, torch.Tensor) and x.requires_grad),
        ]
        if self.position is not None:
            self.learned += list(self.position.parameters())

    def attend(self, kernel: str | None):
        return attend(*self.tensors, over=self.over, position=self.position, kernel=kernel, **self.arguments)

    def explain(self):
        arguments = {name: value for name, value in self.arguments.items() if name != "seed"}
        return explain(*self.tensors, over=self.over, position=self.position, **arguments)

    def fast_kernels(self) -> list[str]:
        options = AttentionOptions(self.over, position=self.position, **self.arguments)
        return fast_kernels(SEQUENCE_KERNELS, check_and_make_call(*self.tensors, options))

    def gradients(self, out: torch.Tensor, towards: torch.Tensor):
        return torch.autograd.grad(out, self.learned, towards, allow_unused=True, materialize_grads=True)


def expected_kernel(row: Row, built: Built) -> str:
    """The rule by which a kernel is chosen, written independently."""
    layout = built.layout
    if 0 in (*layout.batch, layout.queries, layout.keys):
        return "reference"
    unmasked = type(built.over) is polyhead.Dense or (
        row.neighbourhood == "causal" and layout.queries in (1, layout.keys)
    )
    biased = row.position in ("alibi", "relative") or row.option == "bias"
    padded = not 0.5 <= layout.value_dim / layout.dim <= 2
    pairs = torch.Size(layout.batch).numel() * layout.heads * layout.queries * layout.keys
    narrow = max(layout.dim, layout.value_dim) <= 16 and layout.keys <= min(128, layout.queries)
    sooner = narrow and pairs >= 2**18 and row.dtype == torch.float32 and native is not None
    if unmasked and not biased and not padded and not sooner and row.option not in ("sink", "dropout"):
        return "fused"
    few = layout.keys * max(layout.dim, layout.value_dim) <= short.MAX_KEY_NUMBERS
    return "short" if few and built.over.exact and native is not None else "tiled"


def differs(a: torch.Tensor, b: torch.Tensor, tolerance: float) -> bool:
    if a.shape != b.shape or not a.isfinite().all() or not b.isfinite().all():
        return True
    a, b = a.cpu().double(), b.cpu().double()
    size = max(1.0, b.abs().max().item() if b.numel() else 0.0)
    return a.numel() > 0 and (a - b).abs().max().item() > tolerance * size


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_kernels_equal_the_reference(row: Row, monkeypatch: pytest.MonkeyPatch):
    built = Built(row)
    there = on_device(built)
    said, fast = there.explain(), there.fast_kernels()
    if there is built:
        assert said.kernel == expected_kernel(row, built), str(said)
        assert "tiled" in (*fast, *said.refused)

    reference = built.attend("reference")
    assert reference.dtype == row.dtype
    towards = torch.randn_like(reference)
    expected = [reference, *built.gradients(reference, towards)]
    for kernel in fast:
        out = there.attend(kernel)
        got = [out, *there.gradients(out, towards.to(out.device))]
        names = ["out", *(f"gradient {i}" for i in range(len(got) - 1))]
        wrong = [n for n, a, b in zip(names, got, expected, strict=True) if differs(a, b, DTYPES[row.dtype])]
        assert not wrong, f"{kernel}: {wrong}"
    chosen = there.attend(None)
    assert torch.equal(chosen, there.attend(said.kernel))
    if "tiled" in fast and row.neighbourhood in APART:
        # rows of the batch that differ get their own tiles, as large rows do
        monkeypatch.setattr(tile_problem, "MIN_WORK_PER_ROW", 0)
        out = there.attend("tiled")
        got = [out, *there.gradients(out, towards.to(out.device))]
        assert not any(differs(a, b, DTYPES[row.dtype]) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize(
    "row", [r for r in ROWS if r.dtype == torch.float64 and r.layout in ("grouped", "strided") and r.option != "dropout"], ids=str
)  # fmt: skip
def test_the_reference_equals_numpy(row: Row):
    built = Built(row)
    arguments = {name: value for name, value in built.arguments.items() if name not in ("dropout", "seed")}
    with torch.no_grad():
        out = built.attend("reference")
        weights = attention_weights(*built.tensors[:2], over=built.over, position=built.position, **arguments)
    q, k, v = (x.detach().numpy() for x in built.tensors)
    layout = built.layout
    group = layout.heads // layout.key_heads
    sizes = polyhead.neighbourhood.Sizes(layout.batch, layout.heads, layout.queries, layout.keys)
    allowed = built.over.mask(sizes, torch.device("cpu")).expand(
        *layout.batch, layout.heads, layout.queries, layout.keys
    )
    for b in range(layout.batch[0]):
        for h in range(layout.heads):
            Q, K, V = _rotated(row, q[b, h], layout.keys - layout.queries), k[b, h // group], v[b, h // group]
            K = _rotated(row, K, 0)
            options = {
                "allowed": allowed[b, h].numpy(),
                "bias": _bias(row, built, h),
                "sink": built.arguments["sink"][h].item() if "sink" in built.arguments else None,
                "scale": OPTIONS[row.option].scale,
            }
            np.testing.assert_allclose(weights[b, h].numpy(), definition.weights(Q, K, **options), atol=1e-12)
            np.testing.assert_allclose(out[b, h].numpy(), definition.attention(Q, K, V, **options), atol=1e-12)


def _rotated(row: Row, x: np.ndarray, start: int) -> np.ndarray:
    if row.position == "rotary":
        return definition.rotary(x, start)
    if row.position == "rotary-partial":
        return np.concatenate([definition.rotary(x[:, :4], start, interleaved=True), x[:, 4:]], axis=1)
    return x


def _bias(row: Row, built: Built, head: int) -> np.ndarray:
    layout = built.layout
    bias = np.zeros((layout.queries, layout.keys))
    if row.position == "alibi":
        bias = bias + definition.alibi(layout.queries, layout.keys, built.position.slopes[head].item())
    if row.position == "relative":
        distance = torch.arange(layout.keys) - (torch.arange(layout.queries)[:, None] + layout.keys - layout.queries)
        bias = bias + built.position.weight.detach()[built.position.bucket(distance), head].numpy()
    if row.option == "bias":
        bias = bias + built.arguments["bias"][head].detach().numpy()
    return bias


def test_every_neighbourhood_and_position_is_in_the_table():
    layout = LAYOUTS["plain"]
    used = {type(make(layout)) for make in NEIGHBOURHOODS.values()}
    public = {
        kind for kind in vars(polyhead).values() if isinstance(kind, type) and issubclass(kind, Neighbourhood)
    } - {Neighbourhood, polyhead.Graph, polyhead.Grid, polyhead.Offsets}  # graphs and grids have their own tables
    assert public <= used
    used = {type(make(layout)) for make in POSITIONS.values()}
    public = {
        kind for kind in vars(polyhead).values() if isinstance(kind, type) and issubclass(kind, polyhead.Position)
    }
    assert public - {polyhead.Position, polyhead.QuadraticOffset} <= used
    assert {row.option for row in ROWS} == set(OPTIONS)
    assert {row.layout for row in ROWS} == set(LAYOUTS)
