"""Second derivatives: every kernel computes them by the definition, when the backward pass is itself recorded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from polyhead import (
    ALiBi,
    Causal,
    Graph,
    Grid,
    Mask,
    MultiHeadAttention,
    Offsets,
    Padding,
    RelativeBias,
    Rotary,
    Window,
    attend,
)
from polyhead.interop.torch import MultiheadAttention
from polyhead.score import GAT, Dot, GATv2

BATCH, HEADS, ITEMS, DIM = 2, 2, 6, 3


def tensors(key_heads: int = HEADS, value_dim: int = DIM, queries: int = ITEMS) -> tuple[Tensor, ...]:
    shapes = ((HEADS, queries, DIM), (key_heads, ITEMS, DIM), (key_heads, ITEMS, value_dim))
    return tuple(torch.randn(BATCH, *shape, dtype=torch.float64).requires_grad_() for shape in shapes)


def check(call: Callable[..., Tensor], *inputs: Tensor) -> None:
    assert torch.autograd.gradcheck(call, inputs, fast_mode=True)
    assert torch.autograd.gradgradcheck(call, inputs, fast_mode=True)


ALONG_KEYS: dict[str, tuple[str, dict[str, Any]]] = {
    "fused": ("fused", {}),
    "fused-causal": ("fused", {"over": Causal()}),
    "fused-scale": ("fused", {"score": Dot(0.7)}),
    "short": ("short", {"over": Window(1)}),
    "short-padding": ("short", {"over": Padding(torch.tensor([4, 0]))}),
    "short-dropout": ("short", {"over": Causal(), "dropout": 0.4, "seed": 3}),
    "short-sink": ("short", {"over": Causal(), "sink": 0.3}),
    "short-alibi": ("short", {"position": ALiBi(HEADS)}),
    "short-bias": ("short", {"over": Causal(), "bias": torch.linspace(-1, 1, ITEMS, dtype=torch.float64)[None]}),
    "tiled": ("tiled", {"over": Causal() & Window(2)}),
    "tiled-mask": ("tiled", {"over": Mask(torch.rand(BATCH, HEADS, ITEMS, ITEMS) > 0.4)}),
    "tiled-dropout": ("tiled", {"over": Padding(torch.tensor([4, 0])), "dropout": 0.4, "seed": 3}),
    "tiled-sink": ("tiled", {"over": Window(1, 0), "sink": -0.5}),
    "tiled-alibi": ("tiled", {"position": ALiBi(HEADS)}),
    "reference-rotary": ("reference", {"position": Rotary(2)}),
}


@pytest.mark.parametrize("key_heads", [HEADS, 1])
@pytest.mark.parametrize("case", ALONG_KEYS)
def test_along_keys(case: str, key_heads: int):
    torch.manual_seed(0)
    kernel, options = ALONG_KEYS[case]
    check(lambda q, k, v: attend(q, k, v, kernel=kernel, **options), *tensors(key_heads))


@pytest.mark.parametrize("kernel", ["fused", "short", "tiled"])
@pytest.mark.parametrize("value_dim", [2, 5])
def test_keys_and_values_of_different_widths(kernel: str, value_dim: int):
    torch.manual_seed(0)
    check(lambda q, k, v: attend(q, k, v, kernel=kernel), *tensors(value_dim=value_dim, queries=4))


@pytest.mark.parametrize("kernel", ["short", "tiled"])
def test_learned_bias_and_table(kernel: str):
    torch.manual_seed(0)
    q, k, v = tensors()
    bias = torch.randn(HEADS, 1, ITEMS, dtype=torch.float64).requires_grad_()
    position = RelativeBias(HEADS, buckets=4, max_distance=5).double()

    def call(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, _: Tensor) -> Tensor:
        return attend(q, k, v, over=Causal(), bias=bias, position=position, kernel=kernel)

    check(call, q, k, v, bias, position.weight)


@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("kernel", ["edges_native", "edges_torch"])
@pytest.mark.parametrize("kind", ["dot", "gat", "gatv2"])
def test_along_edges(kind: str, kernel: str, dropout: float):
    torch.manual_seed(0)
    q, k, v = tensors()
    # a hub, a node without edges, a duplicate edge
    pairs = torch.tensor([[0, 1, 2, 3, 4, 1, 1], [0, 0, 0, 2, 3, 4, 4]])
    features = torch.randn(7, 2, dtype=torch.float64).requires_grad_()
    weights = torch.rand(7, dtype=torch.float64).requires_grad_()
    score = {"dot": Dot(), "gat": GAT(HEADS, DIM, edge_dim=2, bias=True), "gatv2": GATv2(HEADS, DIM, edge_dim=2)}[kind]
    score = score.double()

    def call(q: Tensor, k: Tensor, v: Tensor, weights: Tensor, features: Tensor, *_: Tensor) -> Tensor:
        over = Graph(pairs, ITEMS, features=None if kind == "dot" else features, weights=weights)
        return attend(q, k, v, over=over, score=score, dropout=dropout, seed=5, kernel=kernel)

    learned = (q, k, v, weights, features.detach() if kind == "dot" else features)
    check(call, *learned, *score.parameters())


def test_keys_that_are_the_values():
    """One tensor for two inputs: each gets its own gradient."""
    torch.manual_seed(0)
    x = tensors()[0]
    over = Graph(torch.randint(0, ITEMS, (2, 11)), ITEMS)
    score = GATv2(HEADS, DIM).double()
    check(lambda x: attend(x, x, x, over=over, score=score, kernel="edges_native"), x)
    for kernel in ("fused", "short", "tiled"):
        check(lambda x: attend(x, x, x, kernel=kernel), x)  # noqa: B023 - called at once


@pytest.mark.parametrize("kernel", ["grid", "windows", "tiled"])
@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_on_grids(kernel: str, dropout: float):
    torch.manual_seed(0)
    over = Grid(2, 3, window=(3, 3))
    check(lambda q, k, v: attend(q, k, v, over=over, dropout=dropout, seed=5, kernel=kernel), *tensors())


def test_on_grids_with_a_learned_table():
    torch.manual_seed(0)
    position = RelativeBias(HEADS, window=(3, 3)).double()
    # wide enough that the distance of two points determines their offset
    q, k, v = (torch.randn(1, HEADS, 8, 2, dtype=torch.float64).requires_grad_() for _ in range(3))

    def call(q: Tensor, k: Tensor, v: Tensor, _: Tensor) -> Tensor:
        return attend(q, k, v, over=Grid(2, 4, window=3), position=position, kernel="grid")

    check(call, q, k, v, position.weight)


def test_at_offsets():
    torch.manual_seed(0)
    over = Offsets([[[0, 1], [1, 0]], [[0, 0], [-1, 0]]], (2, 3))
    check(lambda q, k, v: attend(q, k, v, over=over, kernel="offsets"), *tensors())


def penalty(module: nn.Module, x: Tensor, *more: Any, **options: Any) -> tuple[Tensor, ...]:
    """The gradients of a gradient penalty, as in a Wasserstein GAN."""
    (slope,) = torch.autograd.grad(module(x, *more, **options)[0].pow(2).sum(), x, create_graph=True)
    return torch.autograd.grad((slope.norm() - 1) ** 2, [x, *module.parameters()])


@pytest.mark.parametrize("need_weights", [True, False])
def test_gradient_penalty_of_the_drop_in(need_weights: bool):
    torch.manual_seed(0)
    theirs = nn.MultiheadAttention(12, 3, batch_first=True).double()
    ours = MultiheadAttention(12, 3, batch_first=True).double()
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 5, 12, dtype=torch.float64).requires_grad_()
    y = x.detach().flip(1)
    padded = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    expected = penalty(theirs, x, y, y, key_padding_mask=padded)
    got = penalty(ours, x, y, y, key_padding_mask=padded, need_weights=need_weights)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("over", [None, Causal(), Padding(torch.tensor([5, 2])), Window(1)], ids=repr)
def test_gradient_penalty_of_the_layer(over: Any):
    torch.manual_seed(0)
    layer = MultiHeadAttention(12, 4, kv_heads=2, head_dim=2, position=Rotary(), sink="learned", qk_norm=True).double()
    x = torch.randn(2, 5, 12, dtype=torch.float64).requires_grad_()

    def call(x: Tensor) -> Tensor:
        return layer(x, over=over)[0]

    check(call, x)
    assert all(g.isfinite().all() for g in penalty(layer, x, over=over))


def test_bf16_fp16_and_a_third_derivative():
    torch.manual_seed(0)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        q, k, v = (x.detach().to(dtype).requires_grad_() for x in tensors())
        for kernel in ("fused", "short", "tiled"):
            value = attend(q, k, v, over=Causal(), kernel=kernel).float().pow(2).sum()
            for _ in range(3):
                (slope,) = torch.autograd.grad(value, q, create_graph=True)
                assert slope.dtype == dtype and slope.isfinite().all() and slope.abs().max() > 0
                value = slope.float().pow(2).sum()


def test_first_derivatives_use_the_fast_kernels(monkeypatch: pytest.MonkeyPatch):
    """The definition is not used unless a second derivative is computed."""
    from polyhead.kernels import fused, operator_registration

    def refuse(*_: Any) -> None:
        raise AssertionError("the definition was called")

    monkeypatch.setattr(operator_registration, "differentiate_definition", refuse)
    monkeypatch.setattr(fused, "differentiate_definition", refuse)
    q, k, v = tensors()
    for kernel in ("fused", "short", "tiled"):
        attend(q, k, v, kernel=kernel).sum().backward(retain_graph=True)
    with pytest.raises(AssertionError):
        attend(q, k, v, kernel="short").sum().backward(create_graph=True)


@pytest.mark.parametrize(
    ("kernel", "over"),
    [
        ("short", Window(2)),
        ("tiled", Window(2)),
        ("reference", None),
        ("edges_native", Graph(torch.randint(0, 6, (2, 12)), 6)),
        ("edges_torch", Graph(torch.randint(0, 6, (2, 12)), 6)),
        ("grid", Grid(2, 3, window=3)),
    ],
)
def test_only_values_need_gradients_beside_a_sink(kernel: str, over: Any):
    """The log-sum-exp, which the sink needs, does not depend on the values."""
    q, k, v = torch.randn(3, 2, 6, 4, dtype=torch.float64)
    call = lambda v: attend(q, k, v, over=over, sink=0.0, kernel=kernel).square()
    assert torch.autograd.gradgradcheck(call, (v.requires_grad_(),))
