"""Rollout: the vector recursion is the product of matrices."""

import pytest
import torch
from torch.testing import assert_close

from polyhead import Causal, MultiHeadAttention
from polyhead.inspection.analysis.rollout import rollout


@pytest.mark.parametrize("sink", [None, 0.5])
@pytest.mark.parametrize("token", [0, 4, -1])
def test_a_row_of_the_product(sink, token):
    torch.manual_seed(0)
    seen, x = {}, torch.randn(2, 7, 12)
    for layer in range(3):
        x, seen[str(layer)] = MultiHeadAttention(12, 3, sink=sink)(x, over=Causal())
    product = torch.eye(7)
    for heads in seen.values():
        mixed = heads.weights.mean(-3) + torch.eye(7)
        product = mixed / mixed.sum(-1, keepdim=True) @ product
    assert_close(rollout(seen, token), product[:, token], atol=1e-5, rtol=1e-5)


def test_error_messages():
    _, square = MultiHeadAttention(12, 3)(torch.randn(5, 12))
    _, cross = MultiHeadAttention(12, 3)(torch.randn(5, 12), torch.randn(4, 12))
    with pytest.raises(ValueError, match="seen must have at least one layer"):
        rollout({}, 0)
    with pytest.raises(
        ValueError,
        match=r"seen must be self-attention of one length in all layers, got \(queries, keys\) \[\(5, 4\), \(5, 5\)\]",
    ):
        rollout({"a": square, "b": cross}, 0)
    with pytest.raises(ValueError, match=r"token must be an integer in \[-5, 4\], got 5"):
        rollout({"a": square}, 5)
