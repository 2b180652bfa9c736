"""Scores of any scale: negative, zero, or too small for fp32."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

import polyhead.numpy as definition
from polyhead import (
    ALiBi,
    Causal,
    Dense,
    Dot,
    Graph,
    Grid,
    Mask,
    MultiHeadAttention,
    Neighbourhood,
    Padding,
    Segments,
    Window,
    attend,
)
from polyhead.kernels import SEQUENCE_KERNELS, Call, candidate_kernels
from polyhead.neighbourhood import Sizes

BATCH, HEADS, ITEMS, DIM = 2, 3, 37, 10
SCALES = (-1.0, -0.3, 0.0, -0.0, 1e-30, -1e-30, 1e-50)
# the tolerance of each dtype, relative to the largest number
DTYPES = {torch.float64: 1e-11, torch.float32: 2e-5, torch.bfloat16: 4e-2}

LENGTHS, IDS = torch.tensor([23, 0]), torch.arange(ITEMS) // 13
NEIGHBOURHOODS: dict[str, Callable[[], Neighbourhood]] = {
    "dense": Dense,
    "causal": Causal,
    "window": lambda: Window(5),
    "padding": lambda: Padding(LENGTHS, queries=True),
    "padding-holes": lambda: Padding(torch.rand(BATCH, ITEMS) > 0.4),
    "mask": lambda: Mask(torch.rand(BATCH, 1, ITEMS, ITEMS) > 0.6),
    "segments": lambda: Segments(IDS),
    "causal-window": lambda: Causal() & Window(5),
    "causal-padding": lambda: Causal() & Padding(LENGTHS),
    "causal-segments": lambda: Causal() & Segments(IDS),
    "mask-window-segments": lambda: Mask(torch.rand(ITEMS, ITEMS) > 0.3) & Window(9) & Segments(IDS),
}


def results(kernel: str, tensors, over, scale, **more):
    out = attend(*tensors, over=over, score=Dot(scale), kernel=kernel, **more)
    learned = [*tensors, *(x for x in more.values() if isinstance(x, torch.Tensor) and x.requires_grad)]
    towards = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).reshape(out.shape)
    return [out.detach(), *torch.autograd.grad(out, learned, towards, materialize_grads=True)]


def takes(tensors, over, **more) -> list[str]:
    call = Call(*tensors, over, Dot(), **more)
    return [
        kernel.name for kernel in candidate_kernels(call) if kernel.refuses(call) is None and kernel.name != "reference"
    ]


def same(got, expected, dtype) -> bool:
    return all(
        bool(a.isfinite().all()) and (a.double() - b).abs().max() <= DTYPES[dtype] * max(1.0, b.abs().max())
        for a, b in zip(got, expected, strict=True)
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("option", ["plain", "sink", "bias", "learned-bias"])
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", NEIGHBOURHOODS)
def test_kernels_take_any_scale(name: str, scale: float, option: str, dtype: torch.dtype):
    over = NEIGHBOURHOODS[name]()
    tensors = [torch.randn(BATCH, HEADS, ITEMS, DIM).to(dtype).requires_grad_() for _ in range(3)]
    more = {}
    if option == "sink":
        more["sink"] = torch.randn(HEADS).to(dtype).requires_grad_()
    if "bias" in option:
        more["bias"] = torch.randn(HEADS, 1, ITEMS).to(dtype).requires_grad_(option == "learned-bias")
    exact = [x.detach().double().requires_grad_() for x in tensors]
    wide = {key: x.detach().double().requires_grad_(x.requires_grad) for key, x in more.items()}
    expected = results("reference", exact, over, scale, **wide)
    known = takes(tensors, over, **more)
    assert known or name == "dense"
    for kernel in [*known, "reference"]:
        assert same(results(kernel, tensors, over, scale, **more), expected, dtype), kernel


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", ["causal", "mask", "causal-segments"])
def test_the_reference_equals_numpy(name: str, scale: float):
    over = NEIGHBOURHOODS[name]()
    q, k, v = torch.randn(3, BATCH, HEADS, ITEMS, DIM, dtype=torch.float64)
    out = attend(q, k, v, over=over, score=Dot(scale), kernel="reference")
    mask = over.mask(Sizes((BATCH,), HEADS, ITEMS, ITEMS), q.device).expand(BATCH, HEADS, ITEMS, ITEMS)
    for b, h in np.ndindex(BATCH, HEADS):
        expected = definition.attention(
            *(x[b, h].numpy() for x in (q, k, v)), allowed=mask[b, h].numpy(), scale=scale
        )  # fmt: skip
        np.testing.assert_allclose(out[b, h].numpy(), expected, atol=1e-12)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("over", [Causal(), Causal() & Window(90), Window(3)], ids=str)
def test_long_rows_take_any_scale(over: Neighbourhood, scale: float):
    """Enough keys for several blocks of torch's kernel, with fewer key heads than query heads."""
    tensors = [torch.randn(1, heads, 600, 16, requires_grad=True) for heads in (4, 2, 2)]
    expected = results("reference", [x.detach().double().requires_grad_() for x in tensors], over, scale)
    for kernel in takes(tensors, over):
        assert same(results(kernel, tensors, over, scale), expected, torch.float32), kernel


@pytest.mark.parametrize("scale", SCALES)
def test_a_position_and_a_sink_without_gradients(scale: float):
    q, k, v = torch.randn(3, BATCH, HEADS, ITEMS, DIM)
    given = {"over": Causal(), "score": Dot(scale), "sink": torch.randn(HEADS)}
    for more in ({}, {"position": ALiBi(HEADS)}):
        with torch.no_grad():
            expected = attend(q, k, v, kernel="reference", **given, **more)
            torch.testing.assert_close(attend(q, k, v, **given, **more), expected)


@pytest.mark.parametrize("scale", SCALES)
def test_graphs_and_grids_take_any_scale(scale: float):
    pairs = torch.cat((torch.arange(ITEMS).expand(2, -1), torch.randint(0, ITEMS, (2, 90))), 1).unique(dim=1)
    for over in (Graph(pairs, ITEMS), Grid(ITEMS, window=5), Grid(1, ITEMS, window=3, dilation=2)):
        tensors = [torch.randn(HEADS, ITEMS, DIM, requires_grad=True) for _ in range(3)]
        expected = results("reference", [x.detach().double().requires_grad_() for x in tensors], over, scale)
        for kernel in takes(tensors, over):
            assert same(results(kernel, tensors, over, scale), expected, torch.float32), (over, kernel)


@pytest.mark.parametrize("scale", [-1.0, 0.0])
def test_a_layer_and_its_heads_take_any_scale(scale: float):
    layer = MultiHeadAttention(24, 3, score=Dot(scale))
    x = torch.randn(2, 50, 24)
    output, heads = layer(x, over=Causal())
    assert output.isfinite().all()
    p = heads.weights
    entropy = -(p * p.clamp(min=1e-30).log()).sum(-1)
    torch.testing.assert_close(heads.entropy(), entropy, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("scale", [math.nan, math.inf, -math.inf])
def test_a_scale_must_be_finite(scale: float):
    with pytest.raises(ValueError, match=r"scale must be a number in \(-inf, inf\), got -?(nan|inf)"):
        Dot(scale)


@pytest.mark.parametrize("scale", ["1", True, 1j, torch.tensor(1.0, requires_grad=True), [1.0]], ids=repr)
def test_a_scale_must_be_a_number(scale: object):
    with pytest.raises(TypeError, match=r"scale must be a number in \(-inf, inf\), got"):
        Dot(scale)


def test_a_scale_may_be_any_real_number():
    for scale in (2, np.float32(2), np.int64(2)):
        score = Dot(scale)
        assert type(score.scale) is float and score.scale == 2.0
    assert Dot().scale is None


def test_the_check_can_be_compiled():
    q, k, v = torch.randn(3, 1, 2, 20, 8)
    compiled = torch.compile(
        lambda scale: attend(q, k, v, over=Causal(), score=Dot(scale)), fullgraph=True, backend="aot_eager"
    )
    for scale in (0.5, -0.5, 0.0):
        expected = attend(q, k, v, over=Causal(), score=Dot(scale), kernel="reference")
        torch.testing.assert_close(compiled(scale), expected)


def test_every_kernel_along_keys_is_tested():
    q = torch.randn(1, 1, 4, 4)
    # flex is for GPUs: tests/conformance/test_flex.py
    tested = {*takes([q] * 3, Dense()), *takes([q] * 3, Causal()), "reference", "flex"}
    assert tested == {k.name for k in SEQUENCE_KERNELS}
