"""The kernel for few keys: torch's opcheck, every instruction set, and the calls that it refuses."""

from __future__ import annotations

import math

import pytest
import torch

from polyhead import Causal, Dense, Padding, Window, attend, explain
from polyhead._torch import native
from polyhead.kernels.short import MAX_KEY_NUMBERS

pytestmark = pytest.mark.skipif(native is None, reason="the C++ kernels are not built")


def tensors(batch: int, heads: int, key_heads: int, queries: int, keys: int, dim: int, width: int, dtype: torch.dtype):
    """q, k and v laid out with heads inside items, as projections leave them."""
    shapes = (heads, queries, dim), (key_heads, keys, dim), (key_heads, keys, width)
    return [torch.randn(batch, n, h, d, dtype=dtype).transpose(1, 2).requires_grad_() for h, n, d in shapes]


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_the_operator_passes_opcheck(dropout: float) -> None:
    q, k, v = tensors(2, 4, 2, 11, 13, 7, 5, torch.float32)
    first, stop = (x.int()[None] for x in (Causal() & Window(5)).interval(11, 13, torch.device("cpu")))
    torch.library.opcheck(
        torch.ops.polyhead.short.default, (q, k, v, first, stop, None, None, torch.tensor(3), 0.3, dropout)
    )


@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_gradients_by_finite_differences(dropout: float) -> None:
    q, k, v = tensors(2, 4, 2, 5, 6, 3, 2, torch.float64)
    first, stop = (x.int() for x in (torch.tensor([[0] * 5, [2] * 5]), torch.tensor([[6] * 5, [1, 3, 4, 5, 6]])))
    call = lambda *x: torch.ops.polyhead.short(*x, first, stop, None, None, torch.tensor(3), 0.7, dropout)
    assert torch.autograd.gradcheck(lambda *x: call(*x)[0], (q, k, v))
    # the log-sum-exp of a query without keys is -inf, and its gradient is zero
    has_keys = (first < stop)[:, None].expand(2, 4, 5)
    assert torch.autograd.gradcheck(lambda *x: call(*x)[1][has_keys], (q, k, v))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (3, 5), (8, 16), (9, 17), (37, 33), (16, 128)])
@pytest.mark.parametrize(("dim", "width"), [(1, 1), (8, 16), (15, 17), (64, 33)])
def test_every_instruction_set_equals_the_reference(dtype, queries, keys, dim, width) -> None:
    torch.manual_seed(queries * keys)
    q, k, v = tensors(3, 6, 2, queries, keys, dim, width, dtype)
    over = Padding(torch.tensor([keys, 0, math.ceil(keys / 3)]), queries=False) & Window(9)
    options = {"over": over, "dropout": 0.25, "seed": 11, "sink": 0.3}
    expected = attend(q, k, v, kernel="reference", **options)
    towards = torch.randn_like(expected)
    gradients = torch.autograd.grad(expected, (q, k, v), towards)
    in_use = native.instruction_set()
    try:
        for name in native.instruction_sets():
            native.use(name)
            out = attend(q, k, v, kernel="short", **options)
            for own, other in zip(
                (out, *torch.autograd.grad(out, (q, k, v), towards)), (expected, *gradients), strict=True
            ):
                torch.testing.assert_close(own, other, atol=1e-5 if dtype == torch.float32 else 1e-12, rtol=1e-5)
            assert (out[1] == 0).all()
    finally:
        native.use(in_use)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("width", [1, 3, 7, 8, 9, 15, 16, 17])
@pytest.mark.parametrize("keys", [1, 5, 15, 16, 17, 31, 33])
def test_heads_of_every_width(keys: int, width: int, dropout: float) -> None:
    torch.manual_seed(keys * width)
    in_use = native.instruction_set()
    for dtype in (torch.float32, torch.float64):
        # numbers of queries that do not fill a block, and values wider or narrower than keys
        q, k, v = tensors(2, 4, 2, 15, keys, width, max(1, 18 - width), dtype)
        for over in (Dense(), Window(2) & Padding(torch.tensor([keys, keys // 2]), queries=False)):
            options = {"over": over, "dropout": dropout, "seed": 3, "sink": 0.1}
            expected = attend(q, k, v, kernel="reference", **options)
            towards = torch.randn_like(expected)
            gradients = torch.autograd.grad(expected, (q, k, v), towards)
            try:
                for name in native.instruction_sets():
                    native.use(name)
                    out = attend(q, k, v, kernel="short", **options)
                    found = (out, *torch.autograd.grad(out, (q, k, v), towards))
                    for own, other in zip(found, (expected, *gradients), strict=True):
                        torch.testing.assert_close(
                            own, other, atol=1e-5 if dtype == torch.float32 else 1e-12, rtol=1e-5
                        )
            finally:
                native.use(in_use)


def test_many_narrow_heads_use_short() -> None:
    def chosen(batch: int, queries: int, keys: int, dim: int, **options: object) -> str:
        q, k = torch.zeros(batch, 7, queries, dim), torch.zeros(batch, 7, keys, dim)
        return explain(q, k, k, **options).kernel

    assert chosen(256, 16, 16, 7) == chosen(256, 16, 16, 16, over=Causal()) == "short"
    # wider heads, more keys than queries, or too few pairs: torch's kernel is as fast, or its call is cheaper
    assert chosen(256, 16, 16, 17) == chosen(512, 1, 128, 7) == chosen(2, 10, 10, 7) == "fused"
    half = torch.zeros(256, 7, 16, 7, dtype=torch.bfloat16)
    assert explain(half, half, half).kernel == "fused"
    q = torch.zeros(256, 7, 16, 7)
    assert explain(q, q, q).refused["fused"] == "many heads of 7 features and 16 keys are faster in `short`"


def test_results_do_not_depend_on_threads() -> None:
    q, k, v = tensors(7, 4, 2, 33, 35, 32, 32, torch.float32)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            out = attend(q, k, v, over=Causal(), dropout=0.1, seed=5, kernel="short")
            found.append([out, *torch.autograd.grad(out.pow(2).sum(), (q, k, v))])
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_nan_stays_nan() -> None:
    q, k, v = (x.detach() for x in tensors(1, 1, 1, 3, 4, 8, 8, torch.float32))
    q[0, 0, 1, 2] = torch.nan
    out = attend(q, k, v, over=Window(9), kernel="short")
    assert out[0, 0, 1].isnan().all() and out[0, 0, [0, 2]].isfinite().all()


def test_scores_of_any_magnitude() -> None:
    q, k, v = (x.detach() for x in tensors(1, 1, 1, 3, 20, 8, 8, torch.float32))
    for size in (1e4, 1e18):
        out = attend(q * size, k, v, over=Window(40), kernel="short")
        torch.testing.assert_close(out, attend(q * size, k, v, over=Window(40), kernel="reference"))


def test_refusals() -> None:
    long = torch.zeros(1, 1, MAX_KEY_NUMBERS // 8 + 1, 8)
    assert (
        explain(long, long, long, over=Window(3)).refused["short"]
        == f"it is for few keys, at most {MAX_KEY_NUMBERS} numbers per head"
    )
    q = torch.zeros(1, 1, 5, 8)
    assert "mask" in explain(q, q, q, over=torch.eye(5).bool()).refused["short"]
    assert explain(q, q, q, over=Dense(), dropout=0.1).kernel == "short"
