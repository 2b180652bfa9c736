"""The view as a tensor: indexing, selection, torch functions, gradients of the weights."""

import numpy as np
import pytest
import torch
from torch import nn
from view_examples import make_heads

from polyhead import GAT, ALiBi, GATv2, Heads, MultiHeadAttention
from polyhead.metrics import attention_parts


@pytest.mark.parametrize(
    "index",
    [0, -1, (0, 3), (slice(None), 2), (..., 4), (..., slice(2, 9, 3), slice(None)), (1, ..., 5), (0, 1, 2, 3), (slice(1, 3), slice(0, 6, 2), -2),
     (None, 0), [0, 2], (torch.tensor([0, 1]), 3), ()],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("options", [{}, {"kv_heads": 2, "position": ALiBi(6), "sink": 0.4}], ids=["plain", "grouped"])
def test_indexing_equals_indexing_the_weights(over, index, options):
    _, _, heads = make_heads(over, **options)
    torch.testing.assert_close(heads[index], heads.weights[index])
    moved = heads.contribution()
    torch.testing.assert_close(moved[index], moved.weights[index])


def test_indexing_computes_only_the_selected_part(monkeypatch):
    computed = []
    original = attention_parts.pair_weights
    monkeypatch.setattr(attention_parts, "pair_weights", lambda *part: computed.append(original(*part)) or computed[-1])
    _, _, heads = make_heads()
    assert heads.shape == (3, 6, 11, 11)
    assert repr(heads) == "Heads(shape=(3, 6, 11, 11), over=Dense())"
    assert not computed
    _ = heads[1, 3, 4:6]
    assert [tuple(part.shape) for part in computed] == [(1, 1, 2, 11)]


def test_indices_out_of_bounds_raise():
    _, _, heads = make_heads()
    with pytest.raises(IndexError, match="index 6 is out of bounds for an axis of 6"):
        heads[0, 6]
    with pytest.raises(IndexError):
        heads[0, 0, 0, 0, 0]


@pytest.mark.parametrize("score", [GAT(6, 5, bias=True), GATv2(6, 5)], ids=["gat", "gatv2"])
def test_selected_heads_of_scores_with_parameters_per_head(over, score):
    _, _, heads = make_heads(over, score=score)
    view = heads.select(heads=[3, 0])
    torch.testing.assert_close(view.weights, heads.weights[:, [3, 0]])
    torch.testing.assert_close(view.entropy(), heads.entropy()[:, [3, 0]])
    torch.testing.assert_close(heads.select(heads=[4]).received(), heads.received()[:, 4:5])
    torch.testing.assert_close(heads[0, 1], heads.weights[0, 1])


def test_select_is_a_view(over):
    _, _, heads = make_heads(over)
    view = heads.select(heads=[3, 0], queries=slice(2, 9), keys=range(1, 11, 2))
    assert isinstance(view, Heads)
    expected = heads.weights[:, [3, 0], 2:9, 1::2]
    assert view.shape == expected.shape
    torch.testing.assert_close(view.weights, expected)
    torch.testing.assert_close(view.select(heads=1, queries=[-1]).weights, expected[:, 1:2, -1:])
    torch.testing.assert_close(view.outputs, heads.outputs[:, [3, 0], 2:9])
    torch.testing.assert_close(view.received(), expected.sum(-2))
    torch.testing.assert_close(heads.select(heads=torch.arange(6) < 2).weights, heads.weights[:, :2])
    with pytest.raises(ValueError, match=r"heads must be integers in \[-6, 5\], for there are 6, got 6"):
        heads.select(heads=6)
    with pytest.raises(ValueError, match=r"queries must be integers in \[-11, 10\], for there are 11, got 0\.5"):
        heads.select(queries=0.5)


def test_torch_functions_and_operators_use_the_weights():
    _, _, heads = make_heads()
    w = heads.weights
    for got, expected in [
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
        torch.testing.assert_close(got, expected)
    assert (len(heads), heads.ndim, heads.dim(), heads.size(-1), heads.size()) == (3, 4, 4, 11, w.shape)
    assert (heads.dtype, heads.device) == (w.dtype, w.device)
    assert len({heads, heads}) == 1
    np.testing.assert_array_equal(np.asarray(heads), w.detach().numpy())
    np.testing.assert_array_equal(heads.numpy(), w.detach().numpy())
    assert np.asarray(heads, dtype=np.float64).dtype == np.float64
    with pytest.raises(AttributeError, match="Heads has no attribute 'wieghts'"):
        _ = heads.wieghts


def test_weights_are_differentiable():
    mha, x, _ = make_heads()
    x.requires_grad_()
    _, heads = mha(x)
    (part,) = torch.autograd.grad(heads[0, 3].square().sum(), x, retain_graph=True)
    (whole,) = torch.autograd.grad(heads.weights[0, 3].square().sum(), x)
    torch.testing.assert_close(part, whole)
    assert part[0].abs().max() > 0
    assert part[1].abs().max() == 0


def test_heads_is_a_pytree():
    _, _, heads = make_heads("window-padding")
    leaves, structure = torch.utils._pytree.tree_flatten(heads)
    assert all(isinstance(leaf, torch.Tensor) for leaf in leaves)
    again = torch.utils._pytree.tree_unflatten(leaves, structure)
    torch.testing.assert_close(again.weights, heads.weights)


def test_in_place_methods_raise_and_metadata_is_free(monkeypatch):
    _, _, heads = make_heads()
    with pytest.raises(AttributeError, match=r"zero_\(\) would change nothing"):
        heads.zero_()
    with pytest.raises(RuntimeError, match="ambiguous"):
        bool(heads)
    monkeypatch.setattr(attention_parts, "pair_weights", None)
    assert heads.requires_grad
    assert heads.numel() == 3 * 6 * 11 * 11


def test_more_than_40_tokens_are_named_in_part():
    pytest.importorskip("matplotlib")
    _, heads = MultiHeadAttention(8, 2)(torch.randn(122, 8))
    figure = heads.plot(tokens=[f"w{i}" for i in range(122)])
    axis = figure.axes[0]
    for ticks, labels in ((axis.get_xticks(), axis.get_xticklabels()), (axis.get_yticks(), axis.get_yticklabels())):
        assert len(labels) == 31
        assert [label.get_text() for label in labels] == [f"w{int(tick)}" for tick in ticks]
    assert axis.get_xlabel() == "key (one in 4 named)"
    few = heads.select(queries=slice(0, 30), keys=slice(0, 40)).plot(tokens=[f"w{i}" for i in range(40)]).axes[0]
    assert len(few.get_xticklabels()) == 40 and few.get_xlabel() == "key"


def test_tokens_that_are_not_valid_unicode_are_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    _, heads = MultiHeadAttention(8, 2)(torch.randn(3, 8))
    figure = heads.plot(tokens=["a", "\ud800", "b"])
    figure.savefig(tmp_path / "heads.png")
    assert [label.get_text() for label in figure.axes[0].get_xticklabels()] == ["a", r"\ud800", "b"]
