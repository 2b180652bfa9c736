"""The view on the heads: like the weights in all but cost."""

import copy
import math
import pickle

import numpy as np
import pytest
import torch
from torch import nn

from polyhead import (
    GAT,
    ALiBi,
    Causal,
    GATv2,
    Heads,
    MultiHeadAttention,
    Padding,
    RelativeBias,
    Score,
    Segments,
    Window,
)
from polyhead.metrics import blockwise, streaming

NEIGHBOURHOODS = {
    "dense": lambda: None,
    "causal": Causal,
    "window-padding": lambda: Window(5) & Padding(torch.tensor([3, 11, 0])),
    "segments": lambda: Segments(torch.arange(11) // 4),
    "mask-by-row": lambda: torch.rand(3, 1, 11, 11) > 0.4,
    "mask-by-head": lambda: torch.rand(6, 11, 11) > 0.4,
}


def looked(over="dense", **options):
    mha = MultiHeadAttention(30, 6, **options)
    x = torch.randn(3, 11, 30)
    return (mha, x, mha(x, over=NEIGHBOURHOODS[over]())[1])


@pytest.fixture(params=NEIGHBOURHOODS)
def over(request):
    return request.param


@pytest.mark.parametrize(
    "index",
    [0, -1, (0, 3), (slice(None), 2), (..., 4), (..., slice(2, 9, 3), slice(None)), (1, ..., 5), (0, 1, 2, 3), (slice(1, 3), slice(0, 6, 2), -2),
     (None, 0), [0, 2], (torch.tensor([0, 1]), 3), ()],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("options", [{}, {"kv_heads": 2, "position": ALiBi(6), "sink": 0.4}], ids=["plain", "grouped"])
def test_indexing_equals_indexing_the_weights(over, index, options):
    _, _, heads = looked(over, **options)
    torch.testing.assert_close(heads[index], heads.weights[index])
    moved = heads.contribution()
    torch.testing.assert_close(moved[index], moved.weights[index])


def test_only_the_part_that_is_asked_for_is_computed(monkeypatch):
    asked = []
    original = blockwise.weights
    monkeypatch.setattr(blockwise, "weights", lambda *part: asked.append(original(*part)) or asked[-1])
    _, _, heads = looked()
    assert heads.shape == (3, 6, 11, 11)
    assert repr(heads) == "Heads(shape=(3, 6, 11, 11), over=Dense())"
    assert not asked
    _ = heads[1, 3, 4:6]
    assert [tuple(part.shape) for part in asked] == [(1, 1, 2, 11)]


def test_bad_indices():
    _, _, heads = looked()
    with pytest.raises(IndexError, match="index 6 is out of bounds for an axis of 6"):
        heads[0, 6]
    with pytest.raises(IndexError):
        heads[0, 0, 0, 0, 0]


@pytest.mark.parametrize("score", [GAT(6, 5, bias=True), GATv2(6, 5)], ids=["gat", "gatv2"])
def test_some_heads_of_a_score_with_weights_by_head(over, score):
    _, _, heads = looked(over, score=score)
    view = heads.select(heads=[3, 0])
    torch.testing.assert_close(view.weights, heads.weights[:, [3, 0]])
    torch.testing.assert_close(view.entropy(), heads.entropy()[:, [3, 0]])
    torch.testing.assert_close(heads.select(heads=[4]).received(), heads.received()[:, 4:5])
    torch.testing.assert_close(heads[0, 1], heads.weights[0, 1])


def test_select_is_a_view(over):
    _, _, heads = looked(over)
    view = heads.select(heads=[3, 0], queries=slice(2, 9), keys=range(1, 11, 2))
    assert isinstance(view, Heads)
    wanted = heads.weights[:, [3, 0], 2:9, 1::2]
    assert view.shape == wanted.shape
    torch.testing.assert_close(view.weights, wanted)
    torch.testing.assert_close(view.select(heads=1, queries=[-1]).weights, wanted[:, 1:2, -1:])
    torch.testing.assert_close(view.outputs, heads.outputs[:, [3, 0], 2:9])
    torch.testing.assert_close(view.received(), wanted.sum(-2))
    torch.testing.assert_close(heads.select(heads=torch.arange(6) < 2).weights, heads.weights[:, :2])
    with pytest.raises(ValueError, match=r"heads must be integers in \[-6, 5\], for there are 6, got 6"):
        heads.select(heads=6)
    with pytest.raises(ValueError, match=r"queries must be integers in \[-11, 10\], for there are 11, got 0\.5"):
        heads.select(queries=0.5)


def test_it_is_a_tensor_wherever_one_is_asked_for():
    _, _, heads = looked()
    w = heads.weights
    for got, wanted in [
        (heads + 1, w + 1),
        (2 - heads, 2 - w),
        (heads * heads, w * w),
        (heads / w, w / w),
        (heads @ w, w @ w),
        (-heads, -w),
        (heads**2, w**2),
        (heads > 0.1, w > 0.1),
        (heads == w, w == w),
        (heads.mean(1), w.mean(1)),
        (heads.transpose(-2, -1), w.transpose(-2, -1)),
        (torch.stack([heads, heads]), torch.stack([w, w])),
        (torch.cat([heads, w], 1), torch.cat([w, w], 1)),
        (torch.einsum("bhqk->bk", heads), torch.einsum("bhqk->bk", w)),
        (torch.softmax(heads, -1), torch.softmax(w, -1)),
        (nn.functional.dropout(heads, 0.0), w),
        (torch.allclose(heads, w), True),
        (list(heads)[1], w[1]),
    ]:
        torch.testing.assert_close(got, wanted)
    assert (len(heads), heads.ndim, heads.dim(), heads.size(-1), heads.size()) == (3, 4, 4, 11, w.shape)
    assert (heads.dtype, heads.device) == (w.dtype, w.device)
    assert len({heads, heads}) == 1
    np.testing.assert_array_equal(np.asarray(heads), w.detach().numpy())
    np.testing.assert_array_equal(heads.numpy(), w.detach().numpy())
    assert np.asarray(heads, dtype=np.float64).dtype == np.float64
    with pytest.raises(AttributeError, match="Heads has no attribute 'wieghts'"):
        _ = heads.wieghts


def test_weights_are_differentiable():
    mha, x, _ = looked()
    x.requires_grad_()
    _, heads = mha(x)
    (part,) = torch.autograd.grad(heads[0, 3].square().sum(), x, retain_graph=True)
    (whole,) = torch.autograd.grad(heads.weights[0, 3].square().sum(), x)
    torch.testing.assert_close(part, whole)
    assert part[0].abs().max() > 0
    assert part[1].abs().max() == 0


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
def test_numbers_equal_their_dense_definitions(over, options, block, monkeypatch):
    monkeypatch.setattr(blockwise, "BLOCK", block)
    mha, _, heads = looked(over, **options)
    mha.double()
    x = torch.randn(3, 11, 30, dtype=torch.float64)
    neighbourhood = NEIGHBOURHOODS[over]()
    _, heads = mha(x, over=neighbourhood)
    for name, (measure, wanted) in definitions(heads.weights).items():
        with torch.no_grad():
            got = measure(heads)
        torch.testing.assert_close(got, wanted, msg=name, atol=1e-10, rtol=1e-10)


def test_numbers_are_differentiable(over):
    mha = MultiHeadAttention(30, 6).double()
    x = torch.randn(3, 11, 30, dtype=torch.float64, requires_grad=True)
    _, heads = mha(x, over=NEIGHBOURHOODS[over]())
    for name, (measure, wanted) in definitions(heads.weights).items():
        towards = torch.rand_like(wanted)
        (got,) = torch.autograd.grad((measure(heads) * towards).sum(), x, retain_graph=True)
        assert got.isfinite().all(), name
        if name not in ("entropy", "diversity"):
            # these two have no finite gradient where a weight is zero, in their dense form
            (gradient,) = torch.autograd.grad((wanted * towards).sum(), x, retain_graph=True)
            torch.testing.assert_close(got, gradient, msg=name, atol=1e-9, rtol=1e-9)


def test_nothing_of_queries_x_keys_is_ever_held(monkeypatch):
    monkeypatch.setattr(blockwise, "BLOCK", 1 << 20)
    mha = MultiHeadAttention(32, 4).eval()
    tokens = 1501
    with torch.no_grad():
        _, heads = mha(torch.randn(1, tokens, 32))
    biggest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal biggest
            out = func(*args, **(kwargs or {}))
            biggest = max(
                [biggest, *(x.numel() for x in torch.utils._pytree.tree_leaves(out) if isinstance(x, torch.Tensor))]
            )
            return out

    with torch.no_grad(), Watch():
        for measure in (
            heads.entropy, heads.distance, heads.received, heads.diversity, heads.heatmap, lambda: heads.top(3),
            lambda: heads.mass("first"), lambda: heads.contribution().received(), heads._repr_html_,
        ):  # fmt: skip
            measure()
    assert biggest <= streaming._ROWS * streaming._COLUMNS < 4 * tokens * tokens


def test_heatmap_averages_cells_of_any_size():
    _, _, heads = looked()
    cells = heads.heatmap(4)
    assert cells.shape == (3, 6, 4, 4)
    group = torch.arange(11) * 4 // 11
    for i in range(4):
        for j in range(4):
            wanted = heads.weights[..., group == i, :][..., group == j].mean((-2, -1))
            torch.testing.assert_close(cells[..., i, j], wanted)


def test_entropy_of_even_and_of_single_attention():
    mha = MultiHeadAttention(30, 6)
    nn.init.zeros_(mha.q_proj.weight)
    _, heads = mha(torch.randn(2, 11, 30))
    torch.testing.assert_close(heads.entropy(), torch.full((2, 6, 11), math.log(11)))
    assert heads.diversity().abs().max() < 1e-5
    _, heads = mha(torch.randn(2, 11, 30), over=Window(0))
    assert heads.entropy().abs().max() == 0


@pytest.mark.parametrize("options", [{}, {"kv_heads": 2}, {"combine": "concat"}, {"combine": "mean"}, {"value_dim": 7}])
def test_contribution_is_the_norm_of_what_a_pair_moves(options):
    mha, x, heads = looked(**options)
    dim, own = mha.value_dim, mha.value_heads
    values = mha.v_proj(x).unflatten(-1, (own, dim)).transpose(1, 2).repeat_interleave(6 // own, 1)
    if mha.o_proj is not None:
        values = torch.einsum("bhkd,ohd->bhko", values, mha.o_proj.weight.unflatten(1, (6, dim)))
    moved = heads.weights[..., None] * values[:, :, None]
    torch.testing.assert_close(heads.contribution().weights, moved.norm(dim=-1), atol=1e-5, rtol=1e-4)


def test_a_stale_view_raises_and_a_lasting_one_does_not():
    mha, x, _ = looked(sink="learned")
    output, heads = mha(x)
    lasting, wanted = heads.detach(), heads.contribution().weights
    output.sum().backward()
    torch.optim.SGD(mha.parameters(), lr=0.1).step()
    with pytest.raises(ValueError, match=r"this view is stale: sink changed in place since"):
        _ = heads.weights
    with pytest.raises(ValueError, match=r"this view is stale: sink, W_O changed"):
        heads.contribution()
    torch.testing.assert_close(lasting.contribution().weights, wanted)
    assert not lasting.weights.requires_grad
    torch.testing.assert_close(lasting.cpu().contribution().weights, wanted)
    _, heads = mha(x)
    heads.outputs.data.add_(0)
    assert heads.weights.shape == (3, 6, 11, 11)


def test_pickles_and_copies_are_lasting(over):
    _, _, heads = looked(over)
    for same in (pickle.loads(pickle.dumps(heads)), copy.deepcopy(heads.detach())):
        torch.testing.assert_close(same.weights, heads.weights.detach())
        torch.testing.assert_close(same.contribution().weights, heads.contribution().weights.detach())


def test_it_is_a_pytree():
    _, _, heads = looked("window-padding")
    leaves, structure = torch.utils._pytree.tree_flatten(heads)
    assert all(isinstance(leaf, torch.Tensor) for leaf in leaves)
    again = torch.utils._pytree.tree_unflatten(leaves, structure)
    torch.testing.assert_close(again.weights, heads.weights)


def test_messages():
    _, _, heads = looked()
    for make, message in [
        (
            lambda: heads.mass("last"),
            r"on must be one of \['self', 'previous', 'next', 'first'\], an integer or a tensor, got 'last'",
        ),
        (lambda: heads.mass(torch.rand(11)), r"on: it is torch.float32 of shape \(11,\); it must be a bool tensor"),
        (lambda: heads.mass(torch.ones(10).bool()), r"on: it is torch.bool of shape \(10,\)"),
        (lambda: heads.top(12), r"k must be an integer in \[1, 11\], got 12; there are 11 keys"),
        (lambda: heads.heatmap(0), r"size must be an integer in \[1, 2147483647\], got 0"),
        (lambda: heads.plot(batch=3), r"batch must be an integer in \[0, 2\], got 3"),
        (lambda: heads.plot(tokens=["a"]), "tokens: there are 1 names for 11 keys"),
    ]:
        with pytest.raises(ValueError, match=message):
            make()


def test_empty_views_have_empty_answers():
    mha = MultiHeadAttention(30, 6)
    for batch, queries, keys in [(2, 0, 5), (2, 5, 0), (0, 5, 5)]:
        output, heads = mha(torch.randn(batch, queries, 30), torch.randn(batch, keys, 30))
        assert output.shape == (batch, queries, 30)
        assert heads.weights.shape == (batch, 6, queries, keys)
        assert heads.entropy().shape == (batch, 6, queries)
        assert heads.received().shape == (batch, 6, keys)
        assert heads.diversity().shape == (batch, 6, 6)
        assert "Heads" in heads._repr_html_()


def test_pictures():
    _, _, heads = looked("causal")
    figure = heads.select(heads=[1, 4, 5]).plot(batch=2, tokens=[f"t{i}" for i in range(11)])
    titles = [axis.get_title() for axis in figure.axes]
    assert titles[:3] == ["head 1", "head 4", "head 5"]
    drawn = figure.axes[1].images[0].get_array()
    np.testing.assert_allclose(drawn, heads[2, 4].detach().numpy(), atol=1e-6)
    page = heads._repr_html_()
    assert page.count("data:image/png;base64,") == 6
    assert "over=Causal()" in page


def test_answers_raise_only_when_what_they_need_has_changed():
    mha, x, _ = looked()
    output, heads = mha(x)
    output.sum().backward()
    torch.optim.SGD(mha.parameters(), lr=0.1).step()
    # the weights were computed from q and k, which no optimizer moves
    assert heads.entropy().shape == (3, 6, 11)
    assert heads.outputs.shape == (3, 6, 11, 5)
    with pytest.raises(ValueError, match="this view is stale: W_O changed"):
        heads.contribution()

    keep = torch.rand(11, 11) > 0.4
    for over, change in [
        (keep, lambda: keep.fill_(True)),
        (Segments(ids := torch.arange(11) // 4), lambda: ids.zero_()),
        (Padding(lengths := torch.tensor([3, 11, 0])), lambda: lengths.fill_(5)),
        (Causal() & Padding(more := torch.tensor([3, 11, 0])), lambda: more.fill_(5)),
    ]:
        _, heads = mha(x, over=over)
        lasting = heads.detach()
        wanted = heads.weights
        change()
        with pytest.raises(ValueError, match="this view is stale: over changed"):
            _ = heads.weights
        torch.testing.assert_close(lasting.weights, wanted)


def test_a_score_of_ones_own_is_watched_and_copied():
    class Sharp(Score):
        def __init__(self):
            super().__init__()
            self.sharpness = nn.Parameter(torch.ones(()))

        def forward(self, q, k):
            return self.sharpness * (q @ k.transpose(-2, -1))

    mha = MultiHeadAttention(30, 6, score=Sharp())
    x = torch.randn(3, 11, 30)
    _, heads = mha(x, over=Padding([3, 11, 0]))
    assert mha.explain(x).kernel == "reference"
    lasting, wanted = heads.detach(), heads.weights
    (gradient,) = torch.autograd.grad(heads.entropy().sum(), mha.score.sharpness, retain_graph=True)
    assert gradient.abs() > 0
    torch.optim.SGD(mha.score.parameters(), lr=1.0).zero_grad()
    with torch.no_grad():
        mha.score.sharpness.mul_(5)
    with pytest.raises(ValueError, match="this view is stale: score changed"):
        _ = heads.weights
    torch.testing.assert_close(lasting.weights, wanted)


def test_inference_mode_watches_the_cache():
    mha = MultiHeadAttention(30, 6).eval()
    with torch.inference_mode():
        cache = mha.cache(3, 11)
        _, heads = mha(torch.randn(3, 5, 30), cache=cache)
        cache.truncate(2)
        with pytest.raises(ValueError, match="stale: cache"):
            _ = heads.weights


def test_what_would_change_nothing_is_refused_and_what_is_known_is_free(monkeypatch):
    _, _, heads = looked()
    with pytest.raises(AttributeError, match=r"zero_\(\) would change nothing"):
        heads.zero_()
    with pytest.raises(RuntimeError, match="ambiguous"):
        bool(heads)
    monkeypatch.setattr(blockwise, "weights", None)
    assert heads.requires_grad
    assert heads.numel() == 3 * 6 * 11 * 11


def test_numbers_stay_wide_in_half_precision():
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


def test_func_grad_through_streamed_numbers():
    mha, x = MultiHeadAttention(30, 6), torch.randn(3, 11, 30)
    got = torch.func.grad(lambda x: mha(x)[1].entropy().sum())(x)
    x.requires_grad_()
    (wanted,) = torch.autograd.grad(mha(x)[1].entropy().sum(), x)
    torch.testing.assert_close(got, wanted)


def test_top_marks_what_is_no_key():
    _, _, heads = looked("causal")
    values, keys = heads.top(3)
    assert keys[0, 0, 0].tolist() == [0, -1, -1]
    assert ((keys >= 0) == (values > 0)).all()
    assert repr(heads.contribution()).endswith("over=Causal(), of contributions)")
    assert heads.contribution().plot().axes[-1].get_ylabel() == "contribution"
