"""The kernel for windows of a grid: torch's opcheck, every instruction set, and the calls that it refuses."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from polyhead import Causal, attend, explain
from polyhead._torch import native
from polyhead.attend import run_call
from polyhead.kernels import Call
from polyhead.kernels.grid import MAX_SEQUENCE_WINDOW, GridNative
from polyhead.neighbourhood import Grid
from polyhead.score import Dot

pytestmark = pytest.mark.skipif(native is None, reason="the C++ kernels are not built")

# sizes, windows and dilations
GRIDS = [
    Grid(5, 7, window=3),
    Grid(11, 19, window=(5, 3), dilation=(3, 2)),
    Grid(6, 40, window=(3, 7)),
    Grid(37, window=5),
    Grid(300, window=9, dilation=4),
    Grid(3, 4, 5, window=(3, 3, 5), dilation=(1, 2, 1)),
    Grid(2, 3, 2, 3, window=3),
    Grid(4, 3, window=31),
    Grid(9, 17, window=(3, 33)),
    Grid(1, 1, window=1),
]


def tensors(over: Grid, *, batch=(2,), heads=(4, 2, 2), dim=8, width=8, dtype=torch.float64) -> list[Tensor]:
    """q, k and v laid out with heads inside items, as projections leave them."""
    made = []
    for number, features in zip(heads, (dim, dim, width), strict=True):
        x = torch.randn(*batch, math.prod(over.sizes), number, features, dtype=dtype)
        made.append(x.transpose(-2, -3).requires_grad_())
    return made


def table_for(over: Grid, heads: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(heads, 2 * math.prod(over.sizes) - 1, dtype=dtype, requires_grad=True)


def computed(kernel: str, over: Grid, inputs: list[Tensor], **options: Any) -> list[Tensor]:
    """The output, the log-sum-exp and the gradients of both."""
    call = Call(*inputs[:3], over, Dot(), *inputs[3:], seed=torch.tensor(5), **options)
    out, lse = run_call(call, kernel)
    assert lse is not None
    torch.manual_seed(1)
    loss = (out * torch.randn(out.shape).to(out)).sum() + (lse * torch.randn(lse.shape).to(lse)).sum()
    return [out, lse, *torch.autograd.grad(loss, inputs)]


def assert_equal(found: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    for own, other in zip(found, expected, strict=True):
        torch.testing.assert_close(own, other, atol=tolerance, rtol=tolerance)


@pytest.fixture
def each_set():
    """The names of the instruction sets; the one in use is restored afterwards."""
    in_use = native.instruction_set()
    yield native.instruction_sets()
    native.use(in_use)


@pytest.mark.parametrize("over", GRIDS, ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_instruction_set_equals_the_reference(over: Grid, dtype: torch.dtype, each_set) -> None:
    inputs = [*tensors(over, dim=9, width=20, dtype=dtype), table_for(over, 4, dtype)]
    for options in ({}, {"dropout": 0.3}):
        expected = computed("reference", over, inputs, **options)
        for name in each_set:
            native.use(name)
            assert_equal(computed("grid", over, inputs, **options), expected, 2e-4 if dtype == torch.float32 else 1e-11)


@pytest.mark.parametrize("dim", [1, 3, 7, 8, 16, 32, 33, 65])
def test_heads_of_every_width(dim: int, each_set) -> None:
    over = Grid(4, 18, window=(3, 5))
    for width in (dim, 66 - dim):
        for dtype in (torch.float32, torch.float64):
            inputs = tensors(over, dim=dim, width=width, dtype=dtype)
            expected = computed("reference", over, inputs)
            for name in each_set:
                native.use(name)
                assert_equal(computed("grid", over, inputs), expected, 2e-4 if dtype == torch.float32 else 1e-11)


@pytest.mark.parametrize("width", [1, 2, 3, 4, 7, 8, 9, 15, 16, 17, 31, 33, 255, 257, 513])
def test_rows_of_every_length(width: int) -> None:
    for over in (Grid(3, width, window=3), Grid(width, window=5, dilation=3), Grid(width, 3, window=(5, 3))):
        inputs = tensors(over, batch=(), heads=(1, 1, 1), dim=5, width=4)
        assert_equal(computed("grid", over, inputs), computed("reference", over, inputs), 1e-11)


@pytest.mark.parametrize("window", [1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 31, 131])
def test_windows_of_every_size(window: int, each_set) -> None:
    # more neighbours along either axis than are processed at once
    for over in (Grid(20, 12, window=window), Grid(3, 150, window=(3, window))):
        inputs = [*tensors(over, batch=(), heads=(1, 1, 1), dim=4, width=3), table_for(over, 1, torch.float64)]
        expected = computed("reference", over, inputs)
        for name in each_set:
            native.use(name)
            assert_equal(computed("grid", over, inputs), expected, 1e-11)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_bf16_and_fp16_are_computed_in_fp32(dtype: torch.dtype) -> None:
    over = Grid(6, 9, window=3)
    inputs = [*tensors(over, dtype=dtype), table_for(over, 4, dtype)]
    found = computed("grid", over, inputs)
    exact = computed("reference", over, [x.detach().float().requires_grad_() for x in inputs])
    assert [x.dtype for x in found] == [dtype, torch.float32, *[dtype] * 4]
    for own, other in zip(found, exact, strict=True):
        torch.testing.assert_close(own.float(), other, atol=0.05, rtol=0.02)


@pytest.mark.parametrize("heads", [(4, 4, 4), (4, 1, 1), (6, 2, 3), (6, 6, 1)])
def test_heads_that_share_keys(heads: tuple[int, int, int]) -> None:
    over = Grid(5, 6, window=3)
    inputs = [*tensors(over, batch=(2, 1, 3), heads=heads), table_for(over, heads[0], torch.float64)]
    for dropout in (0.0, 0.4):
        expected = computed("reference", over, inputs, dropout=dropout)
        assert_equal(computed("grid", over, inputs, dropout=dropout), expected, 1e-11)


def test_any_strides() -> None:
    over = Grid(5, 9, window=3)
    points = math.prod(over.sizes)
    layouts = [
        torch.randn(2, 3, points, 8),
        torch.randn(2, 3, 8, points).transpose(-2, -1),
        torch.randn(points, 2, 3, 8).permute(1, 2, 0, 3),
        torch.randn(2, 3, 2 * points, 16)[:, :, ::2, 3:11],
        torch.randn(1, 3, 1, 8).expand(2, 3, points, 8),
    ]
    for shift in range(len(layouts)):
        inputs = [layouts[(shift + i) % len(layouts)].detach().double().requires_grad_() for i in range(3)]
        assert_equal(computed("grid", over, inputs), computed("reference", over, inputs), 1e-11)


def test_gradients_of_either_output_only() -> None:
    over = Grid(5, 9, window=3)
    inputs = tensors(over)
    for which in (0, 1):
        found = []
        for kernel in ("grid", "reference"):
            out = run_call(Call(*inputs, over, Dot()), kernel)[which]
            found.append(torch.autograd.grad(out.pow(2).sum(), inputs, allow_unused=True, materialize_grads=True))
        assert_equal(list(found[0]), list(found[1]), 1e-11)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_a_sink_takes_its_share(dropout: float) -> None:
    over = Grid(7, 11, window=5)
    q, k, v = tensors(over)
    sink = torch.randn(4, dtype=torch.float64, requires_grad=True)
    found = []
    for kernel in ("grid", "reference"):
        out = attend(q, k, v, over=over, sink=sink, dropout=dropout, seed=3, kernel=kernel)
        found.append([out, *torch.autograd.grad(out.pow(3).sum(), (q, k, v, sink))])
    assert_equal(found[0], found[1], 1e-11)


def test_the_operator_passes_opcheck() -> None:
    over = Grid(4, 5, window=3)
    q, k, v = tensors(over, dtype=torch.float32)
    for table, dropout in ((None, 0.0), (torch.randn(4, 9, requires_grad=True), 0.3)):
        arguments = (q, k, v, table, torch.tensor(3), [4, 5], [1, 1], [1, 1], 0.3, dropout)
        torch.library.opcheck(torch.ops.polyhead.grid.default, arguments)


def test_gradients_by_finite_differences() -> None:
    over = Grid(2, 3, window=3)
    inputs = [*tensors(over, batch=(1,), heads=(2, 1, 1), dim=2, width=2), torch.randn(2, 9).double().requires_grad_()]
    for which in (0, 1):
        call = lambda *x, which=which: torch.ops.polyhead.grid(*x, torch.tensor(3), [2, 3], [1, 1], [1, 1], 0.7, 0.4)[
            which
        ]
        assert torch.autograd.gradcheck(call, inputs)


def test_results_do_not_depend_on_threads() -> None:
    over = Grid(40, 21, window=(5, 7))
    inputs = [*tensors(over, dim=16, width=16, dtype=torch.float32), table_for(over, 4, torch.float32)]
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3, 2):
            torch.set_num_threads(threads)
            found.append(computed("grid", over, inputs, dropout=0.1))
    finally:
        torch.set_num_threads(before)
    assert_equal(found[0], computed("reference", over, inputs, dropout=0.1), 2e-4)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


# with and without weights kept between both sweeps
@pytest.mark.parametrize(("side", "batch"), [(7, 3150), (10, 1500)])
def test_a_table_gradient_of_more_parts_than_are_summed_at_once(side: int, batch: int) -> None:
    over = Grid(side, side, window=2 * side - 1)
    inputs, table = tensors(over, batch=(batch,), heads=(8, 4, 4), dim=3, width=2), table_for(over, 8, torch.float64)

    def gradients(*qkv: Tensor) -> tuple[Tensor, ...]:
        out, _ = run_call(Call(*qkv, over, Dot(), table), "grid")
        return torch.autograd.grad(out.square().sum(), [*qkv, table])

    *found, d_table = gradients(*inputs)
    one, other = (gradients(*(x.chunk(2)[half] for x in inputs)) for half in (0, 1))
    assert all(torch.equal(x, torch.cat(two)) for x, *two in zip(found, one[:3], other[:3], strict=True))
    assert_close(d_table, one[3] + other[3], rtol=1e-11, atol=1e-9)


def test_every_output_element_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    over = Grid(5, 18, window=3)
    inputs = [*tensors(over), table_for(over, 4, torch.float64)]
    expected = computed("reference", over, inputs)
    empty, like = Tensor.new_empty, torch.empty_like
    monkeypatch.setattr(Tensor, "new_empty", lambda *n, **options: empty(*n, **options).fill_(torch.nan))
    monkeypatch.setattr(torch, "empty_like", lambda *n, **options: like(*n, **options).fill_(torch.nan))
    assert_equal(computed("grid", over, inputs), expected, 1e-11)


@pytest.mark.filterwarnings("ignore")
def test_it_compiles_without_graph_breaks() -> None:
    over = Grid(5, 9, window=3)
    inputs = [*tensors(over, dtype=torch.float32), table_for(over, 4, torch.float32)]

    def loss(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
        out, lse = run_call(Call(q, k, v, over, Dot(), table), "grid")
        assert lse is not None
        return out.pow(2).sum() + lse.sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    own, other = (torch.autograd.grad(f(*inputs), inputs) for f in (compiled, loss))
    assert_equal(list(own), list(other), 1e-6)


def test_nan_stays_in_its_windows() -> None:
    over = Grid(7, 20, window=3)
    points = torch.arange(140).reshape(7, 20)
    near = torch.zeros(7, 20, dtype=torch.bool)
    near[2:5, 9:12] = True
    for which in range(3):
        inputs = [x.detach() for x in tensors(over, batch=(1,), heads=(1, 1, 1), dtype=torch.float32)]
        inputs[which][0, 0, points[3, 10]] = torch.nan
        out = attend(*inputs, over=over, kernel="grid")[0, 0].isnan()
        expected = points.flatten() == points[3, 10] if which == 0 else near.flatten()
        assert torch.equal(out.all(-1), expected) and torch.equal(out.any(-1), expected)


def test_scores_of_any_magnitude() -> None:
    over = Grid(5, 20, window=9)
    q, k, v = (x.detach() for x in tensors(over, dtype=torch.float32))
    for size in (1e4, 1e18):
        out = attend(q * size, k, v, over=over, kernel="grid")
        torch.testing.assert_close(out, attend(q * size, k, v, over=over, kernel="reference"))


def test_refusals() -> None:
    x = torch.zeros(1, 1, 64, 8)
    assert explain(x, x, x, over=Grid(8, 8, window=3)).kernel == "grid"
    why = lambda over, q=x, **options: GridNative().refuses(Call(q, x, x, over, Dot(), **options))
    assert why(Grid(8, 8, window=3)) is None
    assert why(Grid(8, 8)) == "there is no window"
    # an intersection is not a Grid, so the kernel is not even a candidate
    assert "grid" not in explain(x, x, x, over=Causal() & Grid(8, 8, window=3)).refused
    assert "without a stride" in why(Grid(8, 8, window=3, stride=2), x[:, :, :16])
    assert why(Grid(8, 8, window=3), bias=torch.zeros(64, 64)) == "the only bias it adds is a relative bias"
    assert (
        why(Grid(2 * MAX_SEQUENCE_WINDOW, window=MAX_SEQUENCE_WINDOW + 1))
        == "windows of more than 256 along a sequence are faster in whole tiles"
    )
    assert why(Grid(2 * MAX_SEQUENCE_WINDOW, window=MAX_SEQUENCE_WINDOW + 1), dropout=0.1) is None
    assert why(Grid(8, 8, window=3), x.to("meta")) == "it runs on the CPU, and q is on meta"
