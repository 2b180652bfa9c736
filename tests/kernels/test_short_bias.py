"""The kernel for few keys with a bias: every way to broadcast one, tables over distances, and their gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from polyhead import ALiBi, Causal, Dense, Grid, Padding, RelativeBias, Window, attend, explain
from polyhead._torch import native

pytestmark = pytest.mark.skipif(native is None, reason="the C++ kernels are not built")

BATCH, HEADS, KEY_HEADS = 3, 4, 2
SHAPES = {
    "pairs": (BATCH, HEADS, 0, 0),
    "heads": (HEADS, 0, 0),
    "rows": (BATCH, 1, 0, 0),
    "all": (0, 0),
    "keys": (BATCH, HEADS, 1, 0),
    "keys-of-heads": (HEADS, 1, 0),
    "keys-of-rows": (BATCH, 1, 1, 0),
    "keys-of-all": (1, 0),
    "queries": (BATCH, HEADS, 0, 1),
    "queries-of-all": (0, 1),
    "numbers-of-heads": (HEADS, 1, 1),
    "number": (1, 1),
}
TOLERANCE = {torch.float32: 2e-5, torch.float64: 1e-11}


def shape_of(name: str, queries: int, keys: int) -> tuple[int, ...]:
    *rest, rows, columns = SHAPES[name]
    return *rest, rows or queries, columns or keys


def tensors(queries: int, keys: int, dtype: torch.dtype, dim: int = 7, width: int = 9, batch: int = BATCH):
    shapes = (HEADS, queries, dim), (KEY_HEADS, keys, dim), (KEY_HEADS, keys, width)
    return [torch.randn(batch, n, h, d, dtype=dtype).transpose(1, 2).requires_grad_() for h, n, d in shapes]


def results(kernel: str, q: Tensor, k: Tensor, v: Tensor, learned: list[Tensor], **options) -> list[Tensor]:
    out = attend(q, k, v, kernel=kernel, **options)
    towards = torch.randn(out.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64).to(out.dtype)
    return [out, *torch.autograd.grad(out, [q, k, v, *learned], towards)]


def check(q: Tensor, k: Tensor, v: Tensor, learned: list[Tensor], **options) -> None:
    """Output and gradients of every instruction set against the reference."""
    expected = results("reference", q, k, v, learned, **options)
    in_use, tolerance = native.instruction_set(), TOLERANCE[q.dtype]
    try:
        for name in native.instruction_sets():
            native.use(name)
            for own, other in zip(results("short", q, k, v, learned, **options), expected, strict=True):
                size = max(1.0, other.abs().max().item())
                torch.testing.assert_close(own, other, atol=tolerance * size, rtol=tolerance)
    finally:
        native.use(in_use)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (5, 3), (9, 17), (16, 16), (13, 31), (19, 49)])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_broadcast_equals_the_reference(shape: str, queries: int, keys: int, dtype: torch.dtype) -> None:
    torch.manual_seed(queries * keys)
    q, k, v = tensors(queries, keys, dtype)
    bias = torch.randn(shape_of(shape, queries, keys), dtype=dtype, requires_grad=True)
    check(q, k, v, [bias], bias=bias)
    # the second row of the batch has no keys
    over = Padding(torch.tensor([keys, 0, (keys + 2) // 3]), queries=False) & Window(6)
    check(q, k, v, [bias], bias=bias, over=over, dropout=0.3, seed=5, sink=0.2)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (1, 9), (9, 1), (8, 16), (11, 17), (18, 35)])
@pytest.mark.parametrize("batch", [1, 3])
def test_tables_over_distances(batch: int, queries: int, keys: int, dtype: torch.dtype) -> None:
    torch.manual_seed(queries * keys)
    q, k, v = tensors(queries, keys, dtype, batch=batch)
    position = RelativeBias(HEADS, buckets=8, max_distance=20).to(dtype)
    bias = torch.randn(HEADS, queries, 1, dtype=dtype, requires_grad=True)
    for over in (Dense(), Causal() & Window(5)):
        check(q, k, v, [position.weight], position=position, over=over)
        # both terms at once
        check(q, k, v, [position.weight, bias], position=position, over=over, bias=bias, dropout=0.2, seed=1)


def test_biases_with_any_strides() -> None:
    q, k, v = tensors(9, 17, torch.float32)
    across = torch.randn(17, HEADS, 9, requires_grad=True)
    check(q, k, v, [across], bias=across.permute(1, 2, 0))
    column = torch.randn(HEADS, 9, 1, requires_grad=True)
    check(q, k, v, [column], bias=column.expand(BATCH, HEADS, 9, 17))
    # the last row ends where the memory does
    part = torch.randn(HEADS, 9, 40, requires_grad=True)
    check(q, k, v, [part], bias=part[..., 23:])


def test_a_batch_of_several_axes() -> None:
    q, k, v = (x.detach().expand(2, *x.shape).contiguous().requires_grad_() for x in tensors(5, 6, torch.float64))
    for shape in ((2, 1, 1, 5, 6), (3, HEADS, 5, 6), (1, 1, HEADS, 5, 6), (2, 3, 1, 1, 6)):
        bias = torch.randn(shape, dtype=torch.float64, requires_grad=True)
        check(q, k, v, [bias], bias=bias)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_biases_are_summed_in_fp32(dtype: torch.dtype) -> None:
    q = torch.zeros(600, 1, 2, 1, dtype=dtype)
    v = torch.ones(600, 1, 2, 1, dtype=dtype)
    v[:, :, 1] = -1
    bias = torch.zeros(1, 2, dtype=dtype, requires_grad=True)
    (gradient,) = torch.autograd.grad(attend(q, q, v, bias=bias, kernel="short").sum(), bias)
    # each of 1,200 queries adds ±1/2; sums in bf16 would stop at 128
    assert gradient.tolist() == [[600.0, -600.0]]


def test_sums_over_many_entries_of_the_batch() -> None:
    """More than 64 parts of at most 256 entries: longer sums in fp32 would lose digits."""
    q, v = torch.zeros(70_000, 1, 1, 1), torch.full((70_000, 1, 2, 1), 1.1)
    v[:, :, 1] = -1.1
    bias = torch.zeros(1, 2, requires_grad=True)
    (gradient,) = torch.autograd.grad(attend(q, torch.zeros_like(v), v, bias=bias, kernel="short").sum(), bias)
    torch.testing.assert_close(gradient, torch.tensor([[38_500.0, -38_500.0]]), atol=0, rtol=5e-6)


@pytest.mark.parametrize("shape", ["pairs", "heads", "rows", "all", "keys-of-all", "queries-of-all"])
def test_a_bias_of_minus_infinity_gives_a_weight_of_zero(shape: str) -> None:
    q, k, v = tensors(9, 17, torch.float32)
    bias = torch.randn(shape_of(shape, 9, 17))
    if shape != "queries-of-all":
        bias = bias.masked_fill(torch.rand(bias.shape) > 0.5, -torch.inf)
    if shape not in ("keys-of-all",):
        bias[..., 4, :] = -torch.inf
    bias.requires_grad_()
    for over in (Dense(), Causal()):
        check(q, k, v, [bias], bias=bias, over=over)
        out, *gradients = results("short", q, k, v, [bias], bias=bias, over=over)
        assert all(x.isfinite().all() for x in (out, *gradients))
        if shape not in ("keys-of-all",):
            assert (out[:, :, 4] == 0).all() and (gradients[0][:, :, 4] == 0).all()


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("shape", ["pairs", "heads", "rows", "all"])
def test_the_bias_of_a_forbidden_pair_has_no_effect(shape: str, value: float) -> None:
    q, k, v = tensors(13, 13, torch.float32)
    bias = torch.randn(shape_of(shape, 13, 13))
    over = Causal() & Window(4)
    forbidden = ~over.allows(torch.zeros(1), torch.arange(13)[:, None], torch.arange(13))
    clean, dirty = (x.requires_grad_() for x in (bias.clone(), bias.masked_fill(forbidden, value)))
    expected = results("short", q, k, v, [clean], bias=clean, over=over)
    for own, other in zip(results("short", q, k, v, [dirty], bias=dirty, over=over), expected, strict=True):
        assert torch.equal(own, other)
    assert (expected[-1].masked_select(forbidden) == 0).all()


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_nan_and_inf_in_the_bias_stay_in_their_row(value: float) -> None:
    q, k, v = tensors(13, 13, torch.float32)
    bias = torch.zeros(13, 13)
    bias[6, 5] = value
    bias.requires_grad_()
    over = Causal() & Window(2)
    out, dq, dk, dv, d_bias = results("short", q, k, v, [bias], bias=bias, over=over)
    rows, keys = torch.arange(13) == 6, (torch.arange(13) >= 4) & (torch.arange(13) <= 6)
    assert torch.equal(out.isnan().all(-1), rows.expand(BATCH, HEADS, 13)) and out[:, :, ~rows].isfinite().all()
    assert dq[:, :, ~rows].isfinite().all() and d_bias[~rows].isfinite().all()
    assert dk[:, :, ~keys].isfinite().all() and dv[:, :, ~keys].isfinite().all()
    assert (d_bias[6, ~keys] == 0).all()


@pytest.mark.parametrize("shape", ["pairs", "heads", "rows", "all", "keys-of-all", "queries", "table"])
@pytest.mark.parametrize("batch", [1, 3, 70])
def test_results_do_not_depend_on_threads(shape: str, batch: int) -> None:
    torch.manual_seed(0)
    q, k, v = tensors(21, 35, torch.float32, batch=batch)
    options: dict[str, object] = {"over": Causal(), "dropout": 0.1, "seed": 5}
    if shape == "table":
        position = RelativeBias(HEADS, buckets=8, max_distance=20)
        options["position"], learned = position, position.weight
    else:
        size = (batch if n == BATCH else n for n in shape_of(shape, 21, 35))
        options["bias"] = learned = torch.randn(tuple(size), requires_grad=True)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3, 7):
            torch.set_num_threads(threads)
            found.append(results("short", q, k, v, [learned], **options))
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_sums_of_many_parts_are_computed_in_rounds() -> None:
    """The sums of 64 parts would take 50 MB: fewer are in memory at once."""
    q, k, v = tensors(300, 160, torch.float32, dim=1, width=1, batch=40)
    bias = torch.randn(HEADS, 300, 160, requires_grad=True)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            found.append(results("short", q, k, v, [bias], bias=bias)[-1])
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*found)
    expected = results("reference", q, k, v, [bias], bias=bias)[-1]
    torch.testing.assert_close(found[0], expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("given", ["table", "bias", "both"])
def test_the_operator_passes_opcheck(given: str, dropout: float) -> None:
    q, k, v = tensors(11, 13, torch.float32)
    first, stop = (x.int()[None] for x in (Causal() & Window(5)).interval(11, 13, torch.device("cpu")))
    table = None if given == "bias" else torch.randn(HEADS, 23, requires_grad=True)
    bias = None if given == "table" else torch.randn(1, HEADS, 11, 13, requires_grad=True)
    arguments = (q, k, v, first, stop, table, bias, torch.tensor(3), 0.3, dropout)
    torch.library.opcheck(torch.ops.polyhead.short.default, arguments)


@pytest.mark.parametrize("shape", [(1, HEADS, 5, 6), (2, 1, 5, 6), (1, 1, 1, 6), (2, HEADS, 5, 1)])
def test_gradients_by_finite_differences(shape: tuple[int, ...]) -> None:
    q, k, v = tensors(5, 6, torch.float64, dim=3, width=2, batch=2)
    first, stop = (x.int() for x in (torch.tensor([[0] * 5, [2] * 5]), torch.tensor([[6] * 5, [1, 3, 4, 5, 6]])))
    table, bias = (torch.randn(n, dtype=torch.float64, requires_grad=True) for n in ((HEADS, 10), shape))
    call = lambda *x: torch.ops.polyhead.short(*x[:3], first, stop, *x[3:], torch.tensor(3), 0.7, 0.4)
    inputs = (q, k, v, table, bias)
    assert torch.autograd.gradcheck(lambda *x: call(*x)[0], inputs, fast_mode=True)
    assert torch.autograd.gradgradcheck(lambda *x: call(*x)[0], inputs, fast_mode=True)
    has_keys = (first < stop)[:, None].expand(2, HEADS, 5)
    assert torch.autograd.gradcheck(lambda *x: call(*x)[1][has_keys], inputs, fast_mode=True)


def test_gradients_have_the_shape_of_the_bias_and_only_if_needed() -> None:
    q, k, v = (x.detach() for x in tensors(5, 6, torch.float32))
    first = torch.zeros(1, 5, dtype=torch.int32)
    table, bias = torch.randn(HEADS, 10), torch.randn(1, 1, 5, 6)
    inputs = (q, k, v, first, first + 6, table, bias, None, 0.7, 0.0)
    out, lse = torch.ops.polyhead.short(*inputs)
    for needed in ([True, True], [False, True], [False, False]):
        *_, d_table, d_bias = torch.ops.polyhead.short_backward(out, None, out, lse, *inputs, [True] * 3 + needed)
        assert d_table.shape == (table.shape if needed[0] else (0,))
        assert d_bias.shape == (bias.shape if needed[1] else (0,))


def test_partitioned_windows_use_short() -> None:
    q = torch.randn(8, 4, 49, 8)
    position = RelativeBias(4, window=(13, 13))
    assert explain(q, q, q, over=Grid(7, 7), position=position).kernel == "short"
    assert explain(q, q, q, bias=torch.zeros(4, 49, 49)).kernel == "short"
    assert explain(q, q, q, position=ALiBi(4)).kernel == "short"
    compiled = torch.compile(
        lambda x: attend(x, x, x, over=Grid(7, 7), position=position), backend="aot_eager", fullgraph=True
    )
    found, expected = [], []
    for call, into in (
        (compiled, found),
        (lambda x: attend(x, x, x, over=Grid(7, 7), position=position, kernel="reference"), expected),
    ):
        x = q.clone().requires_grad_()
        out = call(x)
        into += [out, *torch.autograd.grad(out.square().sum(), (x, position.weight))]
    for own, other in zip(found, expected, strict=True):
        torch.testing.assert_close(own, other, atol=1e-4, rtol=1e-4)
