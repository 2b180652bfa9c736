"""transformers' models with polyhead's attention against the same models with eager attention."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")

from huggingface_pairs import CONFIGS, TEXT, batch, padding, pair, real
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedModel

import polyhead
from polyhead.interop.huggingface.attention import polyhead_attention_forward

CLOSE = {"atol": 1e-4, "rtol": 1e-4}
CASES = [pytest.param(name, padded, id=f"{name}{'-padded' * padded}") for name in CONFIGS for padded in (False, True)]
CASES.remove(next(case for case in CASES if case.id == "vit-padded"))


def states(model: PreTrainedModel, given: dict[str, Tensor]) -> tuple[Tensor, ...]:
    """All hidden states, of the decoder if there is one."""
    outputs = model(**given, output_hidden_states=True)
    return getattr(outputs, "decoder_hidden_states", None) or outputs.hidden_states


@pytest.mark.parametrize(("name", "padded"), CASES)
def test_hidden_states_are_equal(name: str, padded: bool) -> None:
    theirs, ours = pair(name)
    given = batch(name, padded)
    with torch.no_grad():
        for a, b in zip(states(theirs, given), states(ours, given), strict=True):
            torch.testing.assert_close(real(given, b), real(given, a), **CLOSE)


@pytest.mark.parametrize("name", TEXT)
def test_padding_has_no_influence(name: str) -> None:
    _, ours = pair(name)
    given = batch(name, padded=True)
    row = {key: value[1:2] for key, value in given.items()}
    other = {**row, "input_ids": torch.where(row["attention_mask"] == 1, row["input_ids"], 50)}
    without_mask = {key: value for key, value in other.items() if key != "attention_mask"}
    with torch.no_grad():
        a, b, c = (real(row, states(ours, x)[-1]) for x in (row, other, without_mask))
    torch.testing.assert_close(a, b, **CLOSE)
    assert not torch.allclose(a, c, atol=1e-2)


@pytest.mark.parametrize(("name", "padded"), CASES)
def test_gradients_are_equal(name: str, padded: bool) -> None:
    theirs, ours = pair(name)
    given = batch(name, padded)
    for model in (theirs, ours):
        model.train()
        last = real(given, states(model, given)[-1])
        (last * torch.linspace(-1, 1, last.numel()).view_as(last)).mean().backward()
    expected = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    assert any(grad is not None and grad.abs().max() > 1e-3 for grad in expected.values())
    for parameter_name, parameter in ours.named_parameters():
        grad = expected[parameter_name]
        if grad is None:
            assert parameter.grad is None
        else:
            scale = float(grad.abs().max().clamp(min=1))
            torch.testing.assert_close(parameter.grad, grad, atol=1e-4 * scale, rtol=1e-4, msg=parameter_name)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("name", ["mistral", "t5"])
def test_gradient_checkpointing(name: str, reentrant: bool) -> None:
    _, ours = pair(name)
    given = batch(name, padded=True)
    ours.train()
    found = []
    for checkpointed in (False, True):
        if checkpointed:
            ours.gradient_checkpointing_enable({"use_reentrant": reentrant})
        ours.zero_grad()
        real(given, ours(**given, use_cache=False).last_hidden_state).square().mean().backward()
        found.append([parameter.grad.clone() for parameter in ours.parameters() if parameter.grad is not None])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(b, a, **CLOSE)


# no_repeat_ngram_size: models with random weights soon repeat one token
GENERATE = {
    "do_sample": False,
    "max_new_tokens": 64,
    "pad_token_id": 0,
    "eos_token_id": None,
    "no_repeat_ngram_size": 2,
}
GENERATORS = {"gpt2": AutoModelForCausalLM, "llama": AutoModelForCausalLM, "mistral": AutoModelForCausalLM,
           "gpt_oss": AutoModelForCausalLM, "t5": AutoModelForSeq2SeqLM}  # fmt: skip


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", GENERATORS)
def test_generated_tokens_are_equal(name: str, padded: bool) -> None:
    theirs, ours = pair(name, GENERATORS[name])
    given = batch(name, padded, left=True)
    given.pop("decoder_input_ids", None)
    expected = theirs.generate(**given, **GENERATE)
    assert len(expected[0].unique()) > 9
    assert torch.equal(ours.generate(**given, **GENERATE), expected)


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt_oss", "t5"])
def test_static_caches(name: str) -> None:
    theirs, ours = pair(name, GENERATORS[name])
    given = batch(name, padded=True, left=True)
    given.pop("decoder_input_ids", None)
    options = {**GENERATE, "max_new_tokens": 24, "cache_implementation": "static"}
    assert torch.equal(ours.generate(**given, **options), theirs.generate(**given, **options))


def test_beams_share_a_prompt() -> None:
    theirs, ours = pair("llama", AutoModelForCausalLM)
    given, options = batch("llama", padded=True, left=True), {**GENERATE, "max_new_tokens": 8, "num_beams": 3}
    assert torch.equal(ours.generate(**given, **options), theirs.generate(**given, **options))


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_a_cache_filled_in_chunks(name: str) -> None:
    _, ours = pair(name)
    ids = batch(name, padded=False)["input_ids"]
    with torch.no_grad():
        whole = ours(ids).last_hidden_state
        begun = ours(ids[:, :11], use_cache=True)
        rest = ours(ids[:, 11:], past_key_values=begun.past_key_values).last_hidden_state
    torch.testing.assert_close(rest, whole[:, 11:], **CLOSE)


def test_packed_texts_do_not_see_each_other() -> None:
    theirs, ours = pair("llama")
    ids = batch("llama", padded=False)["input_ids"]
    positions = torch.cat((torch.arange(8), torch.arange(11)))[None].expand(len(ids), -1)
    with torch.no_grad():
        a, b = (model(ids, position_ids=positions, use_cache=False).last_hidden_state for model in (theirs, ours))
        alone = ours(ids[:, 8:], use_cache=False).last_hidden_state
    torch.testing.assert_close(b, a, **CLOSE)
    torch.testing.assert_close(b[:, 8:], alone, **CLOSE)


@pytest.mark.parametrize("name", ["bert", "mistral", "t5"])
def test_half_precision(name: str) -> None:
    theirs, ours = (model.to(torch.bfloat16) for model in pair(name))
    given = batch(name, padded=True)
    with torch.no_grad():
        a, b = (real(given, states(model, given)[-1]) for model in (theirs, ours))
    assert b.dtype == torch.bfloat16
    assert (a - b).float().abs().mean() < 0.03 * a.float().abs().mean()


def test_autocast() -> None:
    theirs, ours = pair("llama")
    given = batch("llama", padded=True)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        a, b = (real(given, states(model, given)[-1]) for model in (theirs, ours))
    assert (a - b).float().abs().mean() < 0.03 * a.float().abs().mean()


def test_autocast_casts_float32_queries_and_keys() -> None:
    q, k, v = torch.randn(3, 1, 2, 5, 8)
    narrow = [x.bfloat16() for x in (q, k, v)]
    with torch.autocast("cpu", torch.bfloat16):
        found, _ = polyhead_attention_forward(nn.Module(), q, k, narrow[2], None)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, polyhead_attention_forward(nn.Module(), *narrow, None)[0])


def test_dropout_is_applied_in_training_only() -> None:
    _, ours = pair("llama", attention_dropout=0.4)
    given = batch("llama", padded=True)
    with torch.no_grad():
        evaluated = [ours(**given).last_hidden_state for _ in range(2)]
        ours.train()
        drawn = [ours(**given).last_hidden_state for _ in range(2)]
    assert torch.equal(*evaluated)
    assert not torch.allclose(*drawn, atol=1e-2)
    assert not torch.allclose(evaluated[0], drawn[0], atol=1e-2)


def test_dropout_keeps_the_mean() -> None:
    q, k, v = torch.randn(3, 1, 2, 5, 8)
    module = nn.Module()
    expected, _ = polyhead_attention_forward(module, q, k, v, None)
    many = [polyhead_attention_forward(module, q, k, v, None, dropout=0.3)[0] for _ in range(800)]
    assert torch.stack(many).std(0).min() > 0
    torch.testing.assert_close(torch.stack(many).mean(0), expected, atol=0.15, rtol=0)


@pytest.mark.parametrize("name", ["bert", "mistral", "gpt_oss", "gemma2"])
def test_output_attentions(name: str) -> None:
    theirs, ours = pair(name)
    given = batch(name, padded=True)
    seen = padding().bool()[:, None, :, None]
    with torch.no_grad():
        expected, found = (model(**given, output_attentions=True).attentions for model in (theirs, ours))
    for a, b in zip(expected, found, strict=True):
        torch.testing.assert_close(b * seen, a * seen, atol=1e-5, rtol=1e-4)


OUTPUTS = ("attention.output.dense.weight", "attn.c_proj.weight", "o_proj.weight")


@pytest.mark.parametrize("name", ["bert", "gpt2", "mistral", "gpt_oss", "gemma2"])
def test_capture_sees_the_heads(name: str) -> None:
    theirs, ours = pair(name)
    given = batch(name, padded=True)
    row = padding().bool()[:, None, :, None]
    outputs = [x for name, x in ours.named_parameters() if name.endswith(OUTPUTS)]
    with torch.no_grad():
        expected = theirs(**given, output_attentions=True).attentions
        with polyhead.capture(ours) as seen:
            ours(**given)
        assert len(seen) == len(expected)
        for weights, heads in zip(expected, seen.values(), strict=True):
            torch.testing.assert_close(heads.weights * row, weights * row, atol=1e-5, rtol=1e-4)
            joins = (heads._origin.w_o, heads._origin.w_o.T)
            assert any(torch.equal(*both) for both in itertools.product(joins, outputs))


def test_from_pretrained(tmp_path: Path) -> None:
    theirs, _ = pair("bert")
    theirs.save_pretrained(tmp_path)
    ours = AutoModel.from_pretrained(tmp_path, attn_implementation="polyhead")
    given = batch("bert", padded=True)
    with polyhead.capture(ours) as seen, torch.no_grad():
        found = ours(**given).last_hidden_state
        torch.testing.assert_close(real(given, found), real(given, theirs(**given).last_hidden_state), **CLOSE)
    assert len(seen) == 2
    assert all("over=Padding(keep" in repr(heads) for heads in seen.values())


def test_a_model_can_change_its_attention() -> None:
    theirs, ours = pair("mistral")
    given = batch("mistral", padded=True)
    with torch.no_grad():
        expected = theirs(**given).last_hidden_state
        theirs.set_attn_implementation("polyhead")
        found = theirs(**given).last_hidden_state
        assert torch.equal(found, ours(**given).last_hidden_state)
    torch.testing.assert_close(real(given, found), real(given, expected), **CLOSE)
