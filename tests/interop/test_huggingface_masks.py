"""The masks of transformers' models are read as neighbourhoods, materialised only on demand, and still behave as tensors."""

from __future__ import annotations

import copy
import itertools
import pickle
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")

from huggingface_pairs import BATCH, ITEMS, TEXT, batch, pair, real
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM, masking_utils

import polyhead
from polyhead.interop import huggingface
from polyhead.interop.huggingface import mask_function
from polyhead.interop.huggingface.attention import polyhead_attention_forward
from polyhead.interop.huggingface.lazy_mask import ConditionMask, LazyMask, LazyMaskState
from polyhead.interop.huggingface.mask_function import polyhead_mask

CLOSE = {"atol": 1e-4, "rtol": 1e-4}


def packed(ids: Tensor) -> Any:
    return masking_utils.and_masks(masking_utils.causal_mask_function, masking_utils.packed_sequence_mask_function(ids))


FUNCTIONS: dict[str, Callable[[int], Any]] = {
    "bidirectional": lambda keys: masking_utils.bidirectional_mask_function,
    "causal": lambda keys: masking_utils.causal_mask_function,
    "window": lambda keys: masking_utils.sliding_window_causal_mask_function(4),
    "wide window": lambda keys: masking_utils.sliding_window_causal_mask_function(keys),
    "bidirectional window": lambda keys: masking_utils.sliding_window_bidirectional_mask_function(3),
    "chunks": lambda keys: masking_utils.chunked_causal_mask_function(4, torch.tensor([0, 3, 1])),
    "one chunk": lambda keys: masking_utils.chunked_causal_mask_function(100, torch.tensor([0, 3, 1])),
    "packed": lambda keys: packed((torch.arange(keys) // 5).expand(BATCH, -1)),
    "packed, with more ids": lambda keys: packed((torch.arange(keys + 9) // 5).expand(BATCH, -1)),
}
# queries, keys, position of the first query, position of the first key
EXTENTS = {
    "square": (11, 11, 0, 0),
    "chunk": (4, 11, 7, 0),
    "step": (1, 11, 10, 0),
    "sliding cache": (2, 8, 13, 7),
    "static cache": (5, 17, 3, 0),
    "empty static cache": (6, 17, 0, 0),
}
# masks whose last query and last key differ in position are left to transformers
UNREAD = {
    *((name, extent) for name in ("bidirectional window",) for extent in ("static cache", "empty static cache")),
    *(("packed", extent) for extent in ("static cache", "empty static cache")),
    *(("packed, with more ids", extent) for extent in EXTENTS),
}
# the ids do not cover all keys: no model needs it
IMPOSSIBLE = ("packed", "sliding cache")
CASES = [case for case in itertools.product(FUNCTIONS, EXTENTS) if case != IMPOSSIBLE]


def padded(kind: str, length: int) -> Tensor | None:
    if kind == "none":
        return None
    keep = torch.ones(BATCH, length, dtype=torch.bool)
    if kind == "left and right":
        keep[1, :3], keep[2, -1:] = False, False
    if kind == "holes":
        keep[0, 2], keep[2, 4:6] = False, False
    return keep


@pytest.mark.parametrize("padding", ["none", "full", "left and right", "holes"])
@pytest.mark.parametrize(("name", "extent"), CASES)
def test_masks_equal_transformers(name: str, extent: str, padding: str) -> None:
    queries, keys, q_offset, kv_offset = EXTENTS[extent]
    # the tokens so far: a static cache is longer
    keep = padded(padding, min(kv_offset + keys, q_offset + queries))
    arguments = (BATCH, queries, keys, q_offset, kv_offset, FUNCTIONS[name](keys), keep)
    unread = (name, extent) in UNREAD
    # without the skip a single query counts as a compiled step
    ours = polyhead_mask(*arguments, allow_is_causal_skip=queries == 1 and not unread)
    expected = masking_utils.sdpa_mask(*arguments, allow_is_causal_skip=False)
    assert ours is not None
    assert isinstance(ours, LazyMask) != unread
    assert ours.shape == expected.shape
    assert torch.equal(ours.clone(), expected)


@pytest.mark.parametrize(("name", "extent"), CASES)
def test_attention_uses_the_masks(name: str, extent: str) -> None:
    queries, keys, q_offset, kv_offset = EXTENTS[extent]
    keep = padded("left and right", min(kv_offset + keys, q_offset + queries))
    arguments = (BATCH, queries, keys, q_offset, kv_offset, FUNCTIONS[name](keys), keep)
    expected = masking_utils.sdpa_mask(*arguments, allow_is_causal_skip=False)
    q, k, v = torch.randn(BATCH, 6, queries, 8), *torch.randn(2, BATCH, 2, keys, 8)
    bias = torch.randn(1, 6, queries, keys)
    options = {"scaling": 0.7, "position_bias": bias, "s_aux": torch.randn(6), "output_attentions": True}
    out, weights = polyhead_attention_forward(
        nn.Module(), q, k, v, polyhead_mask(*arguments, allow_is_causal_skip=False), **options
    )
    s = (0.7 * q @ k.repeat_interleave(3, 1).transpose(-2, -1) + bias).masked_fill(~expected, -torch.inf)
    p = torch.cat((s, options["s_aux"].view(6, 1, 1).expand(BATCH, -1, queries, 1)), -1).softmax(-1)[..., :-1]
    torch.testing.assert_close(weights, p, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(out, (p @ v.repeat_interleave(3, 1)).transpose(1, 2), atol=1e-5, rtol=1e-4)


def test_unknown_functions_are_left_to_transformers() -> None:
    odd = lambda batch, head, query, key: (query + key) % 2 == 0
    for function in (odd, masking_utils.or_masks(masking_utils.causal_mask_function, odd)):
        found = polyhead_mask(BATCH, 7, 7, mask_function=function, allow_is_causal_skip=False)
        assert type(found) is ConditionMask
        assert torch.equal(found, masking_utils.sdpa_mask(BATCH, 7, 7, 0, 0, function, allow_is_causal_skip=False))


def test_a_changed_mask_function_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def sliding_window_overlay(sliding_window: int) -> Any:
        return lambda batch, head, query, key: key >= query - sliding_window

    monkeypatch.setattr(masking_utils, "sliding_window_overlay", sliding_window_overlay)
    huggingface.register()
    try:
        found = polyhead_mask(BATCH, 7, 7, mask_function=sliding_window_overlay(3), allow_is_causal_skip=False)
        assert type(found) is ConditionMask
        assert isinstance(polyhead_mask(BATCH, 7, 7), LazyMask)
    finally:
        monkeypatch.undo()
        huggingface.register()
    assert isinstance(polyhead_mask(BATCH, 7, 7, mask_function=FUNCTIONS["window"](7)), LazyMask)


@pytest.mark.parametrize("name", TEXT)
def test_no_mask_is_materialised(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, ours = pair(name)
    given = batch(name, padded=True)
    built: list[str] = []
    original = LazyMaskState.tensor
    monkeypatch.setattr(LazyMaskState, "tensor", lambda self: [built.append("lazy"), original(self)][1])
    theirs = masking_utils.sdpa_mask
    monkeypatch.setattr(masking_utils, "sdpa_mask", lambda *a, **k: [built.append("theirs"), theirs(*a, **k)][1])
    with torch.no_grad(), polyhead.capture(ours) as seen:
        ours(**given)
    assert not built
    assert not any("Mask" in repr(heads) for heads in seen.values())
    assert any("Padding(keep" in repr(heads) for heads in seen.values())


def some_mask() -> LazyMask:
    keep = padded("left and right", 9)
    made = polyhead_mask(BATCH, 9, 9, mask_function=FUNCTIONS["window"](9), attention_mask=keep)
    assert isinstance(made, LazyMask)
    return made


# operations that return a mask, and operations that return an ordinary tensor
MASKS = [
    lambda m: m[:, :, :, :5],
    lambda m: m[:, :, -1:],
    lambda m: m[0],
    lambda m: torch.cat((m, m.new_ones(BATCH, 1, 9, 2)), -1),
    lambda m: nn.functional.pad(m, (0, 3), value=True),
    lambda m: m.clone().fill_(False),
    lambda m: torch.logical_and(m, m, out=m.clone()),
    lambda m: m.expand(-1, 4, -1, -1),
    lambda m: m.repeat_interleave(2, 0),
    lambda m: m & m.transpose(-2, -1),
    lambda m: m | torch.eye(9, dtype=torch.bool),
    lambda m: m.masked_fill(torch.eye(9, dtype=torch.bool), False),
    lambda m: copy.deepcopy(m),
]
TENSORS = [
    lambda m: ~m,
    lambda m: m.logical_not(),
    lambda m: m == 0,
    lambda m: m.all() | m.any(),
    lambda m: m.sum(-1),
    lambda m: m.long(),
    lambda m: torch.where(m, 0.0, -1e9),
    lambda m: torch.zeros(9, 9).masked_fill(~m, -1e9),
    lambda m: torch.ones(BATCH, 1, 9, 9)[m],
    lambda m: torch.zeros_like(m, dtype=torch.float32),
    lambda m: m.new_full((2, 2), 0.5, dtype=torch.float32),
    lambda m: nn.functional.scaled_dot_product_attention(*torch.ones(3, BATCH, 1, 9, 8), attn_mask=m),
    lambda m: torch.tensor(m.tolist()),
    lambda m: torch.from_numpy(m.numpy()),
    lambda m: torch.from_numpy(np.asarray(m)),
    lambda m: torch.from_dlpack(m),
    lambda m: torch.from_numpy(np.from_dlpack(m)).clone(),
    lambda m: m.share_memory_(),
    lambda m: pickle.loads(pickle.dumps(m)),
]


@pytest.mark.parametrize("use", MASKS + TENSORS)
def test_a_lazy_mask_is_a_tensor(use: Callable[[Tensor], Tensor]) -> None:
    expected = use(some_mask().tensor().clone())
    kind = ConditionMask if use in MASKS else Tensor
    for mask_made in (some_mask(), ConditionMask(some_mask().tensor())):
        found = use(mask_made)
        assert type(found) is kind
        torch.testing.assert_close(found.tensor() if kind is ConditionMask else found, expected, equal_nan=True)


@pytest.mark.parametrize(
    "use",
    [
        lambda m: torch.zeros(9, 9) + m,
        lambda m: torch.zeros(9, 9).sub_(m[0, 0]),
        lambda m: torch.zeros(BATCH, 1, 9, 9).add_(m),
        lambda m: torch.zeros(BATCH, 9, 9) + m[:, 0, :, :9],
        lambda m: 1.0 - m,
        lambda m: m * -1e9,
        lambda m: torch.einsum("bhqk,k->bhq", m, torch.ones(9)),
        lambda m: m / 2,
        lambda m: m.to(torch.float32),
        lambda m: m.type_as(torch.zeros(1)),
        lambda m: m.clone().bfloat16(),
        lambda m: torch.baddbmm(m[:, 0], *torch.ones(2, BATCH, 9, 9)),
        lambda m: torch.cat((m, torch.zeros(BATCH, 1, 9, 2)), -1),
        lambda m: torch.where(torch.eye(9, dtype=torch.bool), m, 0.5),
        lambda m: torch.zeros(BATCH, 1, 9, 9).copy_(m),
    ],
)
def test_arithmetic_with_a_mask_raises(use: Callable[[Tensor], Tensor]) -> None:
    message = r"^attention_mask must be used as a condition on attn_implementation='polyhead', got aten::"
    for mask_made in (some_mask(), ConditionMask(some_mask().tensor())):
        with pytest.raises(ValueError, match=f"{message}.* use attn_implementation='eager'"):
            use(mask_made)


def test_copies_and_moves_of_a_lazy_mask_are_lazy() -> None:
    lazy = some_mask()
    moved = lazy.to("meta")
    for same in (lazy.detach(), lazy.to("cpu"), lazy.bool(), lazy.contiguous(), moved):
        assert isinstance(same, LazyMask)
    assert moved.device.type == "meta"
    assert all(leaf.device.type == "meta" for leaf in moved.state.over.leaves())
    assert repr(lazy).startswith("LazyMask(Window(left=3, right=9) & Causal() & Padding(keep <(3, 9)>")


@pytest.mark.parametrize(("made_in", "inference"), list(itertools.product([False, True], repeat=2)))
def test_writes_to_a_mask_are_used(made_in: bool, inference: bool) -> None:
    q, k, v = torch.randn(3, BATCH, 2, 9, 8)
    with torch.inference_mode(made_in):
        lazy = some_mask()
    before, _ = polyhead_attention_forward(nn.Module(), q, k, v, lazy)
    with torch.inference_mode(inference):
        lazy[:, :, 5, 0] = True
        lazy[:, :, :, 1].fill_(False)
        after, _ = polyhead_attention_forward(nn.Module(), q, k, v, lazy)
        expected, _ = polyhead_attention_forward(nn.Module(), q, k, v, lazy.clone())
    assert torch.equal(after, expected)
    assert not torch.allclose(after, before)


@pytest.mark.parametrize(
    "memory", [lambda m: m.share_memory_(), torch.from_dlpack, lambda m: torch.from_numpy(m.numpy())]
)
def test_writes_to_the_memory_of_a_mask_are_used(memory: Callable[[Tensor], Tensor]) -> None:
    q, k, v = torch.randn(3, BATCH, 2, 9, 8)
    lazy = some_mask()
    shared = memory(lazy)
    assert shared.data_ptr() == lazy.data_ptr() != 0
    shared[:, :, 5] = True
    found, _ = polyhead_attention_forward(nn.Module(), q, k, v, lazy)
    assert torch.equal(found, polyhead_attention_forward(nn.Module(), q, k, v, shared)[0])
    assert not torch.allclose(found, polyhead_attention_forward(nn.Module(), q, k, v, some_mask())[0])


def test_masks_of_the_user() -> None:
    theirs, ours = pair("llama")
    ids = batch("llama", padded=False)["input_ids"]
    keep = torch.rand(BATCH, 1, ITEMS, ITEMS) > 0.4
    keep = keep | torch.eye(ITEMS, dtype=torch.bool)
    added = torch.randn(BATCH, 1, ITEMS, ITEMS)
    hidden = torch.where(keep, 0.0, torch.finfo(torch.float32).min)
    with torch.no_grad():
        expected = theirs(ids, attention_mask=hidden).last_hidden_state
        torch.testing.assert_close(ours(ids, attention_mask=keep).last_hidden_state, expected, **CLOSE)
        torch.testing.assert_close(ours(ids, attention_mask=hidden).last_hidden_state, expected, **CLOSE)
        expected = theirs(ids, attention_mask=added).last_hidden_state
        torch.testing.assert_close(ours(ids, attention_mask=added).last_hidden_state, expected, **CLOSE)


def test_without_a_mask_the_module_says_whether_it_is_causal() -> None:
    q, k, v = torch.randn(BATCH, 2, 5, 8), *torch.randn(2, BATCH, 2, 9, 8)
    decoder, encoder = nn.Module(), nn.Module()
    decoder.is_causal, encoder.is_causal = True, False
    sdpa = torch.nn.functional.scaled_dot_product_attention
    for queries, module, causal in ((5, decoder, True), (5, encoder, False), (1, decoder, False)):
        expected = sdpa(q[:, :, :queries], k, v, is_causal=causal).transpose(1, 2)
        torch.testing.assert_close(polyhead_attention_forward(module, q[:, :, :queries], k, v, None)[0], expected)
    more = polyhead_attention_forward(decoder, k, q, q, None)[0]
    torch.testing.assert_close(more, sdpa(k, q, q, is_causal=True).transpose(1, 2))
    assert torch.equal(
        polyhead_attention_forward(decoder, q, k, v, None, is_causal=False)[0],
        polyhead_attention_forward(encoder, q, k, v, None)[0],
    )


def test_a_row_without_keys_gets_zero() -> None:
    q, k, v = torch.randn(3, BATCH, 2, 9, 8)
    lazy = some_mask()
    nobody = ~lazy.any(-1)[:, 0]
    assert nobody.sum() == 3
    out, weights = polyhead_attention_forward(nn.Module(), q, k, v, lazy, output_attentions=True)
    assert (out[nobody] == 0).all()
    assert (weights.transpose(1, 2)[nobody] == 0).all()
    assert (out[~nobody] != 0).all()


def test_steps_of_a_static_cache_have_masks_of_one_type() -> None:
    _, ours = pair("llama", AutoModelForCausalLM)
    passed: list[Any] = []
    note = lambda module, args, kwargs: passed.append(kwargs["attention_mask"])
    ours.model.layers[0].register_forward_pre_hook(note, with_kwargs=True)
    given = batch("llama", padded=True, left=True)
    for cache, kinds in (("static", [LazyMask, Tensor, Tensor, Tensor]), ("dynamic", [LazyMask] * 4)):
        passed.clear()
        ours.generate(**given, max_new_tokens=4, pad_token_id=0, eos_token_id=None, cache_implementation=cache)
        assert [type(x) for x in passed] == kinds
        if cache == "static":
            assert len({x.shape for x in passed[1:]}) == 1


def test_a_compiled_model() -> None:
    torch.compiler.reset()
    theirs, ours = pair("mistral")
    given = batch("mistral", padded=True)
    compiled = torch.compile(ours, backend="eager", fullgraph=True)
    with torch.no_grad():
        expected = real(given, theirs(**given, use_cache=False).last_hidden_state)
        torch.testing.assert_close(real(given, compiled(**given, use_cache=False).last_hidden_state), expected, **CLOSE)


def test_a_compiled_step_with_a_static_cache() -> None:
    torch.compiler.reset()
    theirs, ours = pair("llama", AutoModelForCausalLM)
    given = batch("llama", padded=True, left=True)
    options = {"do_sample": False, "max_new_tokens": 5, "pad_token_id": 0, "eos_token_id": None}
    expected = theirs.generate(**given, **options)
    ours.forward = torch.compile(ours.forward, backend="eager")
    assert torch.equal(ours.generate(**given, **options, cache_implementation="static"), expected)


def test_registering_twice_has_no_effect() -> None:
    tables = (AttentionInterface._global_mapping, AttentionMaskInterface._global_mapping)
    before = [dict(table) for table in tables]
    assert huggingface.register() is None
    assert [dict(table) for table in tables] == before
    assert [table["polyhead"] for table in tables] == [polyhead_attention_forward, polyhead_mask]
    assert len(mask_function._reader_by_code) == 6


def test_masks_are_read_under_any_default_device():
    with torch.device("meta"):
        mask_function.collect_mask_readers(masking_utils)
    assert len(mask_function._reader_by_code) == 6


def test_a_missing_transformers_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(
        ImportError,
        match=r"^transformers must be 5\.4 or newer, got an error on import .*pip install 'transformers>=5\.4'$",
    ):
        huggingface.register()


def test_an_old_transformers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masking_utils, "sdpa_mask", lambda batch_size, cache_position, kv_length: None)
    with pytest.raises(
        ImportError, match=r"^transformers must be 5\.4 or newer, got 5\.\S+: .*pip install 'transformers>=5\.4'$"
    ):
        huggingface.register()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cache": object()}, "cache must be None on attn_implementation='polyhead', got a object: "),
        ({"indices": torch.ones(1, 3, 2)}, "indices must be None on attn_implementation='polyhead', got a Tensor: "),
        (
            {"block_indices": torch.ones(1)},
            "block_indices must be None on attn_implementation='polyhead', got a Tensor",
        ),
        ({"softcap": 0.0}, "softcap must be more than 0, or None, got 0.0"),
        (
            {"attention_mask": torch.ones(1, 1, 3, 3).long()},
            "attention_mask must be bool, True = may attend, or floating-point values to add, got torch.int64",
        ),
        (
            {"attention_mask": torch.ones(1, 1, 3, 4).bool()},
            "Mask: keep must broadcast to (..., heads, queries, keys) = (1, 2, 3, 3), got shape (1, 1, 3, 4)",
        ),
        (
            {"s_aux": torch.ones(3)},
            "sink must be floating-point numbers, one per head, of shape (2,), got Tensor of torch.float32 and shape (3,)",
        ),
        ({"dropout": 1.5}, "dropout must be a number in [0, 1), got 1.5"),
    ],
)
def test_errors_name_the_argument(options: dict[str, Any], message: str) -> None:
    q, k, v = torch.randn(3, 1, 2, 3, 8)
    with pytest.raises(ValueError) as error:
        polyhead_attention_forward(nn.Module(), q, k, v, **{"attention_mask": None, **options})
    assert str(error.value).startswith(message)
