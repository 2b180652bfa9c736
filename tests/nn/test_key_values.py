"""`project_kv`: attention to keys and values that were projected before."""

from __future__ import annotations

import pytest
import torch

from polyhead import MultiHeadAttention, Padding, Rotary
from polyhead.nn import KeyValues


@pytest.mark.parametrize(
    "options", [{}, {"position": Rotary()}, {"qk_norm": True}, {"score": "gatv2"}, {"score": "gat"}]
)
def test_projected_memory_equals_the_memory(options: dict) -> None:
    torch.manual_seed(0)
    mha = MultiHeadAttention(12, 3, **options)
    x, y = torch.randn(2, 5, 12), torch.randn(2, 7, 12)
    found, heads = mha(x, mha.project_kv(y), over=Padding([7, 3]))
    wanted, same = mha(x, y, over=Padding([7, 3]))
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(heads.weights, same.weights)


def test_memory_of_another_layer_or_batch_is_refused() -> None:
    mha = MultiHeadAttention(12, 3)
    memory = mha.project_kv(torch.randn(2, 7, 12))
    with pytest.raises(
        ValueError,
        match=r"key must be the result of this layer's project_kv for the query's batch \(3,\), got keys of shape \(2, 3, 7, 4\)",
    ):
        mha(torch.randn(3, 5, 12), memory)
    with pytest.raises(ValueError, match="key must be the result of this layer's project_kv"):
        MultiHeadAttention(12, 4)(torch.randn(2, 5, 12), memory)
    k, v = memory
    for wrong, message in (
        (KeyValues(k[:, :, :1], v), "key must be the result of this layer's project_kv"),
        (KeyValues(k, v[:, :, :5]), "key must be the result of this layer's project_kv"),
        (KeyValues(k.half(), v.half()), "key must be of the queries' dtype and device"),
        (KeyValues(k, v.double()), "key must be of the queries' dtype and device"),
    ):
        with pytest.raises(ValueError, match=message):
            mha(torch.randn(2, 5, 12), wrong, over=Padding([1, 1]))
    with pytest.raises(ValueError, match="value must be left out where key is the result of project_kv"):
        mha(torch.randn(2, 5, 12), memory, torch.randn(2, 7, 12))
    with pytest.raises(ValueError, match=r"key, value must have shapes .*, got \(2, 7, 11\)"):
        mha.project_kv(torch.randn(2, 7, 11))
    with pytest.raises(ValueError, match="key must be left out, or be the query, with a cache"):
        mha(torch.randn(2, 5, 12), memory, cache=mha.cache(2, 9))
