"""Stale views: in-place changes of their tensors raise an error, and copies are permanent."""

import copy
import pickle

import pytest
import torch
from torch import nn
from view_examples import make_heads

from polyhead import (
    Causal,
    MultiHeadAttention,
    Padding,
    Score,
    Segments,
)


def test_a_stale_view_raises_and_a_copy_does_not():
    mha, x, _ = make_heads(sink="learned")
    output, heads = mha(x)
    permanent, expected = heads.detach(), heads.contribution().weights
    output.sum().backward()
    torch.optim.SGD(mha.parameters(), lr=0.1).step()
    with pytest.raises(ValueError, match=r"this view is stale: sink changed in place since"):
        _ = heads.weights
    with pytest.raises(ValueError, match=r"this view is stale: sink, W_O changed"):
        heads.contribution()
    torch.testing.assert_close(permanent.contribution().weights, expected)
    assert not permanent.weights.requires_grad
    torch.testing.assert_close(permanent.cpu().contribution().weights, expected)
    _, heads = mha(x)
    heads.outputs.data.add_(0)
    assert heads.weights.shape == (3, 6, 11, 11)


def test_pickles_and_copies_are_permanent(over):
    _, _, heads = make_heads(over)
    for same in (pickle.loads(pickle.dumps(heads)), copy.deepcopy(heads.detach())):
        torch.testing.assert_close(same.weights, heads.weights.detach())
        torch.testing.assert_close(same.contribution().weights, heads.contribution().weights.detach())


def test_results_raise_only_if_a_tensor_they_need_has_changed():
    mha, x, _ = make_heads()
    output, heads = mha(x)
    output.sum().backward()
    torch.optim.SGD(mha.parameters(), lr=0.1).step()
    # the weights depend on q and k, which an optimizer does not change
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
        permanent = heads.detach()
        expected = heads.weights
        change()
        with pytest.raises(ValueError, match="this view is stale: over changed"):
            _ = heads.weights
        torch.testing.assert_close(permanent.weights, expected)


def test_changes_of_a_custom_score_are_detected_and_copies_keep_it():
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
    permanent, expected = heads.detach(), heads.weights
    (gradient,) = torch.autograd.grad(heads.entropy().sum(), mha.score.sharpness, retain_graph=True)
    assert gradient.abs() > 0
    torch.optim.SGD(mha.score.parameters(), lr=1.0).zero_grad()
    with torch.no_grad():
        mha.score.sharpness.mul_(5)
    with pytest.raises(ValueError, match="this view is stale: score changed"):
        _ = heads.weights
    torch.testing.assert_close(permanent.weights, expected)


def test_cache_changes_are_detected_in_inference_mode():
    mha = MultiHeadAttention(30, 6).eval()
    with torch.inference_mode():
        cache = mha.cache(3, 11)
        _, heads = mha(torch.randn(3, 5, 30), cache=cache)
        cache.truncate(2)
        with pytest.raises(ValueError, match="stale: cache"):
            _ = heads.weights
