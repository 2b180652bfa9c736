"""The drop-in equals torch's module, for all constructor and call options."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn
from torch_pairs import (
    BATCH,
    CLOSE,
    CONSTRUCTORS,
    DIM,
    HEADS,
    KDIM,
    KEYS,
    MASKS,
    MODEL,
    QUERIES,
    VDIM,
    assert_same,
    everything,
    inputs,
    masks,
    one_mask,
    pair,
)


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("options", CONSTRUCTORS)
def test_equals_torch_in_values_and_gradients(options: dict[str, Any], kind: str) -> None:
    peer, ours = pair(**options)
    x, call = inputs(peer), masks(kind)
    for returns in ({"need_weights": False}, {"average_attn_weights": False}):
        assert_same(everything(ours, x, {**call, **returns}), everything(peer, x, {**call, **returns}))


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("append", [False, True])
def test_equals_torch_without_a_batch(append: bool, first: bool, kind: str) -> None:
    peer, ours = pair(add_bias_kv=append, add_zero_attn=append, batch_first=first, kdim=KDIM)
    x, call = inputs(peer, batched=False), masks(kind, batched=False)
    for returns in ({"need_weights": False}, {}, {"average_attn_weights": False}):
        assert_same(everything(ours, x, {**call, **returns}), everything(peer, x, {**call, **returns}))


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("returns", [{}, {"average_attn_weights": False}, {"need_weights": False}], ids=str)
def test_equals_torch_in_single_precision(returns: dict[str, bool], kind: str) -> None:
    peer, ours = pair(torch.float32, add_zero_attn=True, vdim=VDIM)
    x = inputs(peer, dtype=torch.float32)
    call = {
        name: mask.detach() if mask.dtype == torch.bool else mask.detach().float() for name, mask in masks(kind).items()
    }
    assert_same(everything(ours, x, {**call, **returns}), everything(peer, x, {**call, **returns}))


@pytest.mark.parametrize("queries, keys", [(11, 11), (11, 13), (13, 11)])
@pytest.mark.parametrize(
    "append",
    [{}, {"add_bias_kv": True}, {"add_zero_attn": True}, {"add_bias_kv": True, "add_zero_attn": True}],
    ids=str,
)
@pytest.mark.parametrize("kind", [bool, float])
@pytest.mark.parametrize("padded", [False, True])
def test_the_causal_hint_equals_torch(
    padded: bool, kind: type, append: dict[str, bool], queries: int, keys: int
) -> None:
    peer, ours = pair(**append)
    x = inputs(peer, queries=queries, keys=keys)
    ahead = torch.ones(queries, keys, dtype=torch.bool).triu(1)
    mask = ahead if kind is bool else torch.zeros(queries, keys, dtype=torch.float64).masked_fill(ahead, -torch.inf)
    call: dict[str, Any] = {"attn_mask": mask, "is_causal": True}
    if padded:
        call["key_padding_mask"] = one_mask((BATCH, keys), kind).detach()
    for returns in ({"need_weights": False}, {"average_attn_weights": False}):
        assert_same(everything(ours, x, {**call, **returns}), everything(peer, x, {**call, **returns}))


@pytest.mark.parametrize("queries, keys", [(11, 13), (13, 11)])
def test_the_causal_hint_replaces_the_mask_as_in_torch(queries: int, keys: int) -> None:
    peer, ours = pair()
    x, all_allowed = inputs(peer, queries=queries, keys=keys), torch.zeros(queries, keys, dtype=torch.bool)
    call = {"attn_mask": all_allowed, "is_causal": True, "need_weights": False}
    hinted = everything(ours, x, call)
    assert_same(hinted, everything(peer, x, call))
    assert not torch.allclose(hinted["output"], ours(*x, attn_mask=all_allowed)[0])


@pytest.mark.parametrize("kinds", [(bool, float), (float, bool)], ids=["bool attn_mask", "float attn_mask"])
def test_bool_and_float_masks_can_be_combined(kinds: tuple[type, type]) -> None:
    peer, ours = pair(batch_first=True, add_bias_kv=True)
    x = inputs(peer)
    call = {"attn_mask": one_mask((QUERIES, KEYS), kinds[0]), "key_padding_mask": one_mask((BATCH, KEYS), kinds[1])}
    with pytest.warns(UserWarning, match="mismatched key_padding_mask and attn_mask"):
        expected = everything(peer, x, call)
    assert_same(everything(ours, x, call), expected)


@pytest.mark.parametrize("kind", ["none", "padding", "pairs", "pairs+padding"])
@pytest.mark.parametrize("need_weights", [False, True])
def test_all_modes_agree_with_torchs_fast_path(need_weights: bool, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    peer, ours = pair(heads=2, batch_first=True)
    x, call = torch.randn(BATCH, KEYS, 2 * DIM, dtype=torch.float64), masks(kind, queries=KEYS)
    fast, taken = torch._native_multi_head_attention, []
    monkeypatch.setattr(torch, "_native_multi_head_attention", lambda *args: taken.append(1) or fast(*args))
    with torch.no_grad():
        expected = peer.eval()(x, x, x, need_weights=need_weights, **call)
    assert taken
    for training, mode in itertools.product((True, False), (torch.enable_grad, torch.no_grad, torch.inference_mode)):
        ours.train(training)
        with mode():
            output, weights = ours(x, x, x, need_weights=need_weights, **call)
        torch.testing.assert_close(output, expected[0], **CLOSE[torch.float64])
        assert (weights is None) == (not need_weights)
        if need_weights:
            torch.testing.assert_close(weights, expected[1], **CLOSE[torch.float64])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_and_autocast(dtype: torch.dtype) -> None:
    peer, ours = pair(torch.float32, add_bias_kv=True, add_zero_attn=True)
    x = inputs(peer, dtype=torch.float32)
    call = masks("pairs+padding")
    exact = peer(*x, **call)
    with torch.autocast("cpu", dtype):
        cast = ours(*x, **call)
    assert cast[0].dtype == dtype
    half = ours.to(dtype)(*(t.to(dtype) for t in x), **call)
    for output, weights in (cast, half):
        torch.testing.assert_close(output.float(), exact[0], atol=5e-2, rtol=5e-2)
        torch.testing.assert_close(weights.float(), exact[1], atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("options", [{}, {"kdim": KDIM, "vdim": VDIM}, {"batch_first": True}], ids=str)
def test_biases_of_another_dtype(options: dict) -> None:
    """Whether torch's module accepts them depends on the memory layout of its inputs."""
    peer, ours = pair(**options)
    half = torch.rand(3 * MODEL, dtype=torch.float16)
    peer.in_proj_bias, ours.in_proj_bias = nn.Parameter(half.double()), nn.Parameter(half)
    x = inputs(peer)
    seen, expected = everything(ours, x, {}), everything(peer, x, {})
    gradient = seen.pop("in_proj_bias")
    assert gradient.dtype == torch.float16
    torch.testing.assert_close(gradient.double(), expected.pop("in_proj_bias"), atol=1e-2, rtol=1e-2)
    assert_same(seen, expected)


@pytest.mark.parametrize("batch, queries, keys", [(0, 7, 5), (3, 0, 5), (3, 7, 0)])
@pytest.mark.parametrize("kind", ["none", "pairs+padding", "heads+padding"])
def test_empty_axes(kind: str, batch: int, queries: int, keys: int) -> None:
    peer, ours = pair(batch_first=True)
    x = [torch.randn(batch, items, MODEL, dtype=torch.float64) for items in (queries, keys, keys)]
    call = {}
    if kind != "none":
        shape = (queries, keys) if kind.startswith("pairs") else (batch * HEADS, queries, keys)
        call["attn_mask"] = torch.zeros(shape, dtype=torch.bool)
        call["key_padding_mask"] = torch.zeros(batch, keys, dtype=torch.bool)
    output, weights = ours(*x, **call, average_attn_weights=False)
    expected = peer(*x, average_attn_weights=False)
    torch.testing.assert_close(output, expected[0])
    torch.testing.assert_close(weights, expected[1])
