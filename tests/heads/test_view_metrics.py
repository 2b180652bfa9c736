"""Metrics of the view: equal to their dense definitions, differentiable, and computed in blocks."""

import math

import numpy as np
import pytest
import torch
from torch import nn
from view_examples import NEIGHBOURHOODS, make_heads

from polyhead import MultiHeadAttention, Padding, RelativeBias, Window
from polyhead.metrics import blocks, streaming


def definitions(w):
    query, key = torch.arange(11)[:, None], torch.arange(11)
    far = (key - query).abs()
    marked = torch.arange(11) % 3 == 0
    rows = torch.stack([marked, ~marked, marked])
    live = (w.sum(-1) > 0).to(w.dtype)
    root = (w / w.sum(-1, keepdim=True).clamp(min=1e-300)).sqrt()
    shared = torch.einsum("bhqk,bgqk->bhg", root, root)
    both = torch.einsum("bhq,bgq->bhg", live, live)
    return {
        "entropy": (lambda h: h.entropy(), -(torch.xlogy(w, w)).sum(-1)),
        "distance": (lambda h: h.distance(), (w * far).sum(-1)),
        "self": (lambda h: h.mass("self"), w.diagonal(dim1=-2, dim2=-1)),
        "previous": (lambda h: h.mass("previous"), (w * (key - query == -1)).sum(-1)),
        "next": (lambda h: h.mass("next"), (w * (key - query == 1)).sum(-1)),
        "offset": (lambda h: h.mass(-3), (w * (key - query == -3)).sum(-1)),
        "first": (lambda h: h.mass("first"), w[..., 0]),
        "marked": (lambda h: h.mass(marked), w[..., marked].sum(-1)),
        "marked-by-row": (lambda h: h.mass(rows), (w * rows[:, None, None]).sum(-1)),
        "received": (lambda h: h.received(), w.sum(-2)),
        "heatmap": (lambda h: h.heatmap(11), w),
        "top": (lambda h: h.top(2)[0], w.topk(2).values),
        "diversity": (lambda h: h.diversity(), 1 - shared / both.clamp(min=1)),
    }  # fmt: skip


@pytest.mark.parametrize("options", [{}, {"kv_heads": 3, "position": RelativeBias(6)}], ids=["plain", "grouped"])
@pytest.mark.parametrize("block", [1, 3 * 6 * 11 * 4, 1 << 22], ids=["by-query", "uneven", "at-once"])
def test_metrics_equal_their_dense_definitions(over, options, block, monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK_WEIGHTS", block)
    mha, _, heads = make_heads(over, **options)
    mha.double()
    x = torch.randn(3, 11, 30, dtype=torch.float64)
    neighbourhood = NEIGHBOURHOODS[over]()
    _, heads = mha(x, over=neighbourhood)
    for name, (measure, expected) in definitions(heads.weights).items():
        with torch.no_grad():
            got = measure(heads)
        torch.testing.assert_close(got, expected, msg=name, atol=1e-10, rtol=1e-10)


def test_metrics_are_differentiable(over):
    mha = MultiHeadAttention(30, 6).double()
    x = torch.randn(3, 11, 30, dtype=torch.float64, requires_grad=True)
    _, heads = mha(x, over=NEIGHBOURHOODS[over]())
    for name, (measure, expected) in definitions(heads.weights).items():
        towards = torch.rand_like(expected)
        (got,) = torch.autograd.grad((measure(heads) * towards).sum(), x, retain_graph=True)
        assert got.isfinite().all(), name
        if name not in ("entropy", "diversity"):
            # the dense forms of these two have no finite gradient where a weight is zero
            (gradient,) = torch.autograd.grad((expected * towards).sum(), x, retain_graph=True)
            torch.testing.assert_close(got, gradient, msg=name, atol=1e-9, rtol=1e-9)


def test_metrics_never_allocate_queries_x_keys(monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK_WEIGHTS", 1 << 20)
    mha = MultiHeadAttention(32, 4).eval()
    tokens = 1501
    with torch.no_grad():
        _, heads = mha(torch.randn(1, tokens, 32))
    largest = 0

    class LargestTensor(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            largest = max(
                [largest, *(x.numel() for x in torch.utils._pytree.tree_leaves(out) if isinstance(x, torch.Tensor))]
            )
            return out

    with torch.no_grad(), LargestTensor():
        for measure in (
            heads.entropy, heads.distance, heads.received, heads.diversity, heads.heatmap, lambda: heads.top(3),
            lambda: heads.mass("first"), lambda: heads.contribution().received(), heads._repr_html_,
        ):  # fmt: skip
            measure()
    assert largest <= streaming._BLOCK_ROWS * streaming._BLOCK_COLUMNS < 4 * tokens * tokens


def test_heatmap_averages_cells_of_any_size():
    _, _, heads = make_heads()
    cells = heads.heatmap(4)
    assert cells.shape == (3, 6, 4, 4)
    group = torch.arange(11) * 4 // 11
    for i in range(4):
        for j in range(4):
            expected = heads.weights[..., group == i, :][..., group == j].mean((-2, -1))
            torch.testing.assert_close(cells[..., i, j], expected)


def test_entropy_of_uniform_and_one_key_attention():
    mha = MultiHeadAttention(30, 6)
    nn.init.zeros_(mha.q_proj.weight)
    _, heads = mha(torch.randn(2, 11, 30))
    torch.testing.assert_close(heads.entropy(), torch.full((2, 6, 11), math.log(11)))
    assert heads.diversity().abs().max() < 1e-5
    _, heads = mha(torch.randn(2, 11, 30), over=Window(0))
    assert heads.entropy().abs().max() == 0


@pytest.mark.parametrize("options", [{}, {"kv_heads": 2}, {"combine": "concat"}, {"combine": "mean"}, {"value_dim": 7}])
def test_contribution_is_the_norm_of_the_projected_weighted_value(options):
    mha, x, heads = make_heads(**options)
    dim, own = mha.value_dim, mha.value_heads
    values = mha.v_proj(x).unflatten(-1, (own, dim)).transpose(1, 2).repeat_interleave(6 // own, 1)
    if mha.o_proj is not None:
        values = torch.einsum("bhkd,ohd->bhko", values, mha.o_proj.weight.unflatten(1, (6, dim)))
    moved = heads.weights[..., None] * values[:, :, None]
    torch.testing.assert_close(heads.contribution().weights, moved.norm(dim=-1), atol=1e-5, rtol=1e-4)


def test_error_messages_of_metrics():
    _, _, heads = make_heads()
    for make, message in [
        (
            lambda: heads.mass("last"),
            r"on must be one of \['self', 'previous', 'next', 'first'\], an integer or a tensor, got 'last'",
        ),
        (
            lambda: heads.mass(torch.rand(11)),
            r"on must be a bool tensor \(..., 11\), .*, got torch.float32 of shape \(11,\)",
        ),
        (
            lambda: heads.mass(torch.ones(10).bool()),
            r"on must be a bool tensor \(..., 11\), .*, got torch.bool of shape \(10,\)",
        ),
        (lambda: heads.top(12), r"k must be an integer in \[1, 11\], got 12; there are 11 keys"),
        (lambda: heads.heatmap(0), r"size must be an integer in \[1, 2147483647\], got 0"),
        (lambda: heads.plot(batch=3), r"batch must be an integer in \[0, 2\], got 3"),
        (lambda: heads.plot(tokens=["a"]), "tokens must have a name per key, 11, got 1"),
    ]:
        with pytest.raises(ValueError, match=message):
            make()


def test_metrics_of_empty_views_are_empty():
    mha = MultiHeadAttention(30, 6)
    for batch, queries, keys in [(2, 0, 5), (2, 5, 0), (0, 5, 5)]:
        output, heads = mha(torch.randn(batch, queries, 30), torch.randn(batch, keys, 30))
        assert output.shape == (batch, queries, 30)
        assert heads.weights.shape == (batch, 6, queries, keys)
        assert heads.entropy().shape == (batch, 6, queries)
        assert heads.received().shape == (batch, 6, keys)
        assert heads.diversity().shape == (batch, 6, 6)
        assert "Heads" in heads._repr_html_()


def test_plot_and_html_show_the_weights():
    _, _, heads = make_heads("causal")
    figure = heads.select(heads=[1, 4, 5]).plot(batch=2, tokens=[f"t{i}" for i in range(11)])
    titles = [axis.get_title() for axis in figure.axes]
    assert titles[:3] == ["head 1", "head 4", "head 5"]
    drawn = figure.axes[1].images[0].get_array()
    np.testing.assert_allclose(drawn, heads[2, 4].detach().numpy(), atol=1e-6)
    page = heads._repr_html_()
    assert page.count("data:image/png;base64,") == 6
    assert "over=Causal()" in page


def test_metrics_of_half_precision_are_fp32():
    mha = MultiHeadAttention(16, 2).eval()
    x = torch.randn(1, 2000, 16)
    with torch.no_grad():
        _, exact = mha(x)
        _, half = mha.half()(x.half())
        assert half.weights.dtype == torch.float16
        for measure in (lambda h: h.entropy(), lambda h: h.distance(), lambda h: h.received(), lambda h: h.diversity()):
            torch.testing.assert_close(measure(half), measure(exact), atol=2e-2, rtol=2e-2)
            assert measure(half).dtype == torch.float32


def test_diversity_does_not_count_sinks_and_empty_rows():
    mha = MultiHeadAttention(30, 6, sink=0.5)
    nn.init.zeros_(mha.q_proj.weight)
    _, heads = mha(torch.randn(1, 9, 30), over=Padding([3]))
    assert heads.diversity().abs().max() < 1e-5
    assert heads.select(keys=[0, 1]).diversity().abs().max() < 1e-5
    assert heads.select(heads=[]).weights.shape == (1, 0, 9, 9)


def test_func_grad_through_metrics():
    mha, x = MultiHeadAttention(30, 6), torch.randn(3, 11, 30)
    got = torch.func.grad(lambda x: mha(x)[1].entropy().sum())(x)
    x.requires_grad_()
    (expected,) = torch.autograd.grad(mha(x)[1].entropy().sum(), x)
    torch.testing.assert_close(got, expected)


def test_top_marks_missing_keys_with_minus_one():
    _, _, heads = make_heads("causal")
    values, keys = heads.top(3)
    assert keys[0, 0, 0].tolist() == [0, -1, -1]
    assert ((keys >= 0) == (values > 0)).all()
    assert repr(heads.contribution()).endswith("over=Causal(), of contributions)")
    assert heads.contribution().plot().axes[-1].get_ylabel() == "contribution"
