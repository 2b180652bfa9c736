"""The drop-in refuses wrong arguments with their names and the rule."""

from __future__ import annotations

import pytest
import torch
from torch_pairs import (
    BATCH,
    HEADS,
    KDIM,
    KEYS,
    MODEL,
    QUERIES,
    VDIM,
)

from polyhead.interop.torch import MultiheadAttention

X = {"query": (BATCH, QUERIES, MODEL), "key": (BATCH, KEYS, KDIM), "value": (BATCH, KEYS, VDIM)}
WRONG = {
    "query must have shape (batch, items, 21), or (items, 21) without a batch, got (5, 11, 2)": {"query": (5, 11, 2)},
    "query must have shape (batch, items, 21), or (items, 21) without a batch, got (21,)": {"query": (21,)},
    "key must have shape (batch, items, 17), or (items, 17) without a batch, got (5, 13, 21)": {"key": (5, 13, 21)},
    "value must have shape (batch, items, 19), or (items, 19) without a batch, got (1, 5, 13, 19)": {
        "value": (1, 5, 13, 19)
    },
    "key must have a batch axis if and only if the query has one, got shapes (13, 17) and (5, 11, 21)": {
        "key": (13, 17)
    },
    "key must have the query's batch size, 5, got 13 (batch_first is True: the axes are batch, items, features)": {
        "key": (13, 5, 17)
    },
    "value must have the query's batch size, 5, got 1": {"value": (1, 13, 19)},
    "value must have as many items as key, 13, got 11": {"value": (5, 11, 19)},
    "key_padding_mask must have shape (batch, keys) = (5, 13), got (13, 5)": {"key_padding_mask": (13, 5)},
    "key_padding_mask must have shape (batch, keys) = (5, 13), got (13,)": {"key_padding_mask": (13,)},
    "attn_mask must have shape (queries, keys) = (11, 13) or (batch * heads, queries, keys) = (15, 11, 13), got (13, 11)": {
        "attn_mask": (13, 11)
    },
    "(batch * heads, queries, keys) = (15, 11, 13), got (5, 11, 13)": {"attn_mask": (5, 11, 13)},
    "(batch * heads, queries, keys) = (15, 11, 13), got (5, 3, 11, 13)": {"attn_mask": (5, 3, 11, 13)},
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_shapes_are_named(message: str) -> None:
    ours = MultiheadAttention(MODEL, HEADS, kdim=KDIM, vdim=VDIM, batch_first=True)
    with pytest.raises(ValueError) as error:
        ours(**{name: torch.zeros(shape) for name, shape in {**X, **WRONG[message]}.items()})
    assert message in str(error.value)


def test_wrong_shapes_are_named_without_a_batch_and_with_the_batch_second() -> None:
    ours = MultiheadAttention(MODEL, HEADS)
    x = torch.zeros(QUERIES, BATCH, MODEL)
    with pytest.raises(
        ValueError, match=r"key must have the query's batch size, 5, got 11 \(batch_first is False: .*items, batch"
    ):
        ours(x, x.transpose(0, 1), x)
    with pytest.raises(ValueError, match=r"value must have as many items as key, 11, got 7"):
        ours(x, x, x[:7])
    with pytest.raises(ValueError, match=r"value must have as many items as key, 11, got 7"):
        ours(x[:, 0], x[:, 0], x[:7, 0])
    with pytest.raises(ValueError, match=r"key_padding_mask must have shape \(keys,\) = \(11,\), got \(5, 11\)"):
        ours(x[:, 0], x[:, 0], x[:, 0], key_padding_mask=torch.zeros(BATCH, QUERIES, dtype=torch.bool))


@pytest.mark.parametrize("name, shape", [("key_padding_mask", (BATCH, QUERIES)), ("attn_mask", (QUERIES, QUERIES))])
def test_integer_masks_and_nested_tensors_are_refused(name: str, shape: tuple[int, ...]) -> None:
    ours = MultiheadAttention(MODEL, HEADS, batch_first=True)
    x = torch.zeros(BATCH, QUERIES, MODEL)
    with pytest.raises(
        ValueError, match=f"{name} must be bool, True = no attention, or floating-point values to add, got torch.uint8"
    ):
        ours(x, x, x, **{name: torch.zeros(shape, dtype=torch.uint8)})
    nested = torch.nested.nested_tensor([torch.zeros(3, MODEL), torch.zeros(7, MODEL)], layout=torch.jagged)
    with pytest.raises(ValueError, match="query must be a padded tensor, got a nested one; pass a key_padding_mask"):
        ours(nested, nested, nested)
