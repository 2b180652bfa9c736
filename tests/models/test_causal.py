"""GPT, Llama and Mistral: caches, padding, generation, training and invalid calls."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from typing import Any

import pytest
import torch
from causal_models import CONFIGS, GPT, LLAMA, built, difference
from torch import Tensor, nn

import polyhead
from polyhead import Causal, Padding, Segments
from polyhead.models import Gpt, Llama, gpt, llama
from polyhead.position import RopeScaling, Rotary


@torch.no_grad()
def test_padding_on_the_right_is_refused_by_generate() -> None:
    model, ids = built("gpt"), torch.randint(0, 101, (2, 5))
    for over in (Padding([5, 3]), Causal(), Padding(torch.ones(2, 4).bool())):
        with pytest.raises(ValueError, match=r"over must be Padding\(real\).*of the shape of ids, \(2, 5\), got "):
            model.generate(ids, 3, over=over)
    for gap in (4, 2):
        real = torch.ones(2, 5).bool()
        real[0, gap] = False
        with pytest.raises(ValueError, match="over must be padding on the left only"):
            model.generate(ids, 3, over=Padding(real))


def test_invalid_rope_scaling_is_refused() -> None:
    for bad in (
        {"factor": 0.0},
        {"factor": 2.0, "original_length": 0},
        {"factor": 2.0, "original_length": 8, "low": 4.0},
    ):
        with pytest.raises(ValueError, match="RopeScaling: "):
            RopeScaling(**bad)
    with pytest.raises(ValueError, match=r"Rotary: base must be a number in \(0, inf\), got 0"):
        Rotary(base=0)
    with pytest.raises(ValueError, match=r"Rotary: scaling must be a RopeScaling or None, got 2\.0"):
        Rotary(scaling=2.0)  # type: ignore[arg-type]


def test_gpt3_is_built_quickly_on_the_meta_device() -> None:
    """In a separate process: torch's compiler is not imported."""
    code = (
        "import sys, time, torch\nfrom polyhead.models import gpt\nstart = time.perf_counter()\n"
        "with torch.device('meta'): gpt.Gpt(gpt.SIZES['gpt3'])\n"
        "print(time.perf_counter() - start)\nassert 'torch._dynamo' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    # 0.1 s on an idle machine
    assert float(done.stdout) < 1


def test_weights_are_initialised_as_published() -> None:
    model = Gpt(gpt.Config(64, 4, 8, vocab=999))
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            deviation = 0.02 / 4 if "o_proj" in name or "down" in name else 0.02
            assert 0.95 * deviation < parameter.std() < 1.05 * deviation, name
        else:
            assert torch.equal(parameter, torch.full_like(parameter, float("norm.weight" in name))), name
    new = Llama(llama.Config(64, 4, 2, 128, vocab=999))
    assert all(0.019 < p.std() < 0.021 for p in new.parameters() if p.dim() == 2)


@pytest.mark.parametrize("name", CONFIGS)
def test_names_of_attention_modules(name: str) -> None:
    model = built(name)
    names = [name for name, module in model.named_modules() if type(module).__name__ == "MultiHeadAttention"]
    assert names == [f"layers.{n}.self_attn" for n in range(model.config.layers)]


@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_a_text_in_parts_with_caches(name: str) -> None:
    model = built(name)
    ids = torch.randint(0, 101, (2, 23))
    whole = model(ids)
    caches = model.caches(2, 23)
    parts = [model(part, caches=caches) for part in ids.split([5, 1, 1, 9, 7], 1)]
    assert difference(torch.cat(parts, 1), whole) < 2e-5
    assert difference(model(ids[0]), whole[0]) < 2e-5
    alone = model.caches(None, 23)
    assert difference(torch.cat([model(part, caches=alone) for part in ids[0].split(6)]), whole[0]) < 2e-5


@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_later_tokens_have_no_influence(name: str) -> None:
    model = built(name)
    ids = torch.randint(0, 101, (2, 23))
    other = torch.cat((ids[:, :11], torch.randint(0, 101, (2, 12))), 1)
    assert torch.allclose(model(ids)[:, :11], model(other)[:, :11], atol=1e-5)
    assert torch.allclose(model(ids, Causal()), model(ids), atol=1e-5)
    if name == "mistral":
        # 3 layers reach 3 · 6 back
        far = ids.clone()
        far[:, 0] = (ids[:, 0] + 1) % 101
        assert torch.allclose(model(far)[:, 19:], model(ids)[:, 19:], atol=1e-5)
        assert not torch.allclose(model(far)[:, 18], model(ids)[:, 18], atol=1e-5)


@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_padding_and_documents(name: str) -> None:
    model = built(name)
    texts = [torch.randint(0, 101, (n,)) for n in (5, 31, 1)]
    ids = nn.utils.rnn.pad_sequence(texts, batch_first=True)
    hidden = model(ids, over=Padding([len(text) for text in texts]))
    for row, text in enumerate(texts):
        assert difference(hidden[row, : len(text)], model(text)) < 2e-5
    mask = torch.ones(31, 31, dtype=torch.bool)
    assert difference(model(ids, mask), model(ids)) < 2e-5
    if name != "gpt":
        # rotary positions are relative: packed documents give the same output as separate ones
        packed = torch.cat(texts[:2])
        parts = model(packed, over=Segments(torch.tensor([0] * 5 + [1] * 31)))
        assert difference(parts[5:], model(texts[1])) < 1e-4


@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_generate_is_greedy_decoding(name: str) -> None:
    """The same tokens as one pass per token without a cache; caches hold all tokens up to the last position."""
    model = built(name)
    ids = torch.randint(0, 101, (2, 4))
    slow = ids
    for _ in range(20):
        slow = torch.cat((slow, model.logits(model(slow)[:, -1]).argmax(-1, keepdim=True)), 1)
    assert torch.equal(model.generate(ids, 20), slow)
    assert torch.equal(model.generate(ids.int(), 20), slow)
    assert torch.equal(model.generate(ids, 1), slow[:, :5])
    assert model.generate(ids[:, :1], 136).shape == (2, 137)
    assert not model.generate(ids, 3).is_inference()


def test_stop_tokens_and_sampling() -> None:
    model = built("gpt")
    ids = torch.randint(0, 101, (2, 4))
    greedy = model.generate(ids, 12)
    stop = int(greedy[0, 6])
    stopped = model.generate(ids[:1], 12, stop=stop)[0, 4:]
    end = stopped.tolist().index(stop)
    assert torch.equal(stopped, greedy[0, 4 : 4 + end + 1])
    assert torch.equal(model.generate(ids, 12, temperature=1.0, top_k=1), greedy)
    samples = [model.generate(ids, 12, temperature=1.5, generator=torch.Generator().manual_seed(5)) for _ in "ab"]
    assert torch.equal(*samples)


@pytest.mark.parametrize("name", CONFIGS)
def test_training_updates_every_parameter(name: str) -> None:
    """Dropout is applied in training; generated tokens can be used for training."""
    config = CONFIGS[name]._replace(attention_dropout=0.1)
    model: Any = (Gpt if name == "gpt" else Llama)(config)
    ids = model.eval().generate(torch.randint(0, 101, (4, 7)), 9)
    model.train()
    hidden = model(ids)
    assert not torch.equal(hidden, model(ids))
    model.logits(hidden).logsumexp(-1).sum().backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    assert all(grad is not None and grad.isfinite().all() for grad in grads.values())


@pytest.mark.parametrize("name", CONFIGS)
def test_models_can_be_copied_pickled_and_compiled(name: str) -> None:
    model = built(name)
    ids = torch.randint(0, 101, (2, 13))
    expected = model(ids)
    assert torch.equal(copy.deepcopy(model)(ids), expected)
    assert torch.equal(pickle.loads(pickle.dumps(model))(ids), expected)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert difference(compiled(ids), expected) < 1e-5


@pytest.mark.parametrize("rows", [1, 23])
@torch.no_grad()
def test_logits_call_the_head_module(rows: int) -> None:
    """It can be hooked, given a bias or replaced."""
    model = built("llama")
    hidden = torch.randn(rows, 18)
    plain = model.logits(hidden)
    seen: list[Tensor] = []
    hook = model.head.register_forward_hook(lambda module, args, out: seen.append(out))
    model.logits(hidden)
    hook.remove()
    assert torch.allclose(seen[0], plain, atol=1e-5)
    model.head.bias = nn.Parameter(torch.randn(101))
    assert torch.allclose(model.logits(hidden), plain + model.head.bias, atol=1e-5)
    model.head = nn.Sequential(model.head, nn.Tanh())
    assert torch.allclose(model.logits(hidden), torch.tanh(plain + model.head[0].bias), atol=1e-5)


def test_capture_records_generation() -> None:
    model = built("llama")
    with polyhead.capture(model) as seen:
        model.generate(torch.randint(0, 101, (1, 4)), 2)
    first, last = seen["layers.0.self_attn"], seen["layers.2.self_attn#1"]
    assert (first.shape, last.shape) == ((1, 6, 4, 4), (1, 6, 1, 5))
    assert torch.allclose(last.weights.sum(-1), torch.ones(1, 6, 1))


@pytest.mark.parametrize("name", ["gpt", "mistral"])
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: m(torch.zeros(2, 5)), "ids must be torch.int64 or torch.int32, got torch.float32"),
        (lambda m: m(torch.tensor([3, 101])), r"ids must be in \[0, 100\] \(the vocabulary\), got values from 3 to 101"),
        (lambda m: m(torch.tensor(3)), r"ids must be a tensor of ids \(\.\.\., tokens\), got shape \(\)"),
        (lambda m: m(torch.zeros(2, 138).long()), r"ids must have shape .* with at most 137 tokens, .*, got \(2, 138\)"),
        (lambda m: m(torch.zeros(2, 5).long(), caches=m.caches(2, 9)[1:]), "caches must have one cache per layer, [23], got [12]; "),
        (lambda m: m(torch.zeros(2, 5).long(), caches=m.caches(2, 4)), "cache must have room for 5 more"),
        (lambda m: m.generate(torch.zeros(2, 0).long(), 5), "ids must have at least 1 token per row"),
        (lambda m: m.generate(torch.zeros(5).long(), 5), r"ids must have shape \(batch, tokens\), got \(5,\)"),
        (lambda m: m.generate(torch.zeros(1, 138).long(), 5), "ids must have at most 137 tokens, the positions of the model, got 138"),
        (lambda m: m.generate(torch.zeros(1, 100).long(), 38), "max_new_tokens must be at most 37, got 38"),
        (lambda m: m.generate(torch.zeros(1, 5).long(), 0), r"max_new_tokens must be an integer in \[1, 2147483647\], got 0"),
        (lambda m: m.generate(torch.full((1, 5), 101), 5), r"ids must be in \[0, 100\] \(the vocabulary\), got values from 101 to 101"),
        (lambda m: m.generate(torch.zeros(1, 5).long(), 5, top_k=3), "top_k, top_p need .* pass a temperature"),
    ],
)  # fmt: skip
def test_invalid_calls_are_refused(name: str, call: Any, message: str) -> None:
    with torch.no_grad(), pytest.raises(ValueError, match=message):
        call(built(name))


def test_positions_include_cached_tokens() -> None:
    model = built("gpt")
    caches = model.caches(1, 200)
    with torch.no_grad():
        model(torch.zeros(1, 130).long(), caches=caches)
        with pytest.raises(ValueError, match=r"at most 7 tokens after the 130 in the caches, .*, got \(1, 8\)"):
            model(torch.zeros(1, 8).long(), caches=caches)


def test_invalid_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="heads must divide d_model 15, got 4"):
        Gpt(GPT._replace(heads=4))
    with pytest.raises(ValueError, match="heads must divide d_model 18, got 5"):
        Llama(LLAMA._replace(heads=5, head_dim=None))
    with pytest.raises(ValueError, match="kv_heads must divide num_heads = 6, got 4"):
        Llama(LLAMA._replace(kv_heads=4))
    with pytest.raises(ValueError, match="head_dim must be even, got 3"):
        Llama(LLAMA._replace(head_dim=3))
    with pytest.raises(ValueError, match=r"activation must be one of relu, gelu, .*got 'tanh'"):
        Gpt(GPT._replace(activation="tanh"))
