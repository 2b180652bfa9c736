"""Decoding with a static cache: what an ordinary cache computes, with fixed shapes and without waits of the host."""

import pytest
import torch

from benchmarks.simulated_device import count, host_of, uncounted
from polyhead import ALiBi, Causal, MultiHeadAttention, Padding, RelativeBias, Rotary, Window
from polyhead.models import gpt, llama

POSITIONS = {
    "none": lambda: None,
    "Rotary": lambda: Rotary(),
    "ALiBi": lambda: ALiBi(4),
    "RelativeBias": lambda: RelativeBias(4, buckets=8, max_distance=20),
}
OVER = {
    "None": lambda keys: None,
    "Causal": lambda keys: Causal(),
    "Window": lambda keys: Window(2, 0),
    "Causal & Padding": lambda keys: Causal() & Padding(torch.arange(keys) >= torch.tensor([[0], [2]])),
    "a prefix": lambda keys: Causal() | Padding([4, 2], queries=False),
    "complements": lambda keys: Causal() & ~Window(1, 0) & ~(Padding([2, 1]) & ~Causal() | Padding([3, 1])),
}
STEPS = (4, 1, 1, 2, 1)


def decode(layer, x, over, static):
    """The outputs of several steps, and the counts of each."""
    cache, outputs, counted, at = layer.cache(len(x), 9, static=static), [], [], 0
    for new in STEPS:
        at += new
        neighbourhood = over(9 if static else at)
        neighbourhood = None if neighbourhood is None else neighbourhood.to(x.device)
        with count() as counts:
            outputs.append(layer(x[:, at - new : at], over=neighbourhood, cache=cache)[0])
        counted.append(counts)
    return torch.cat(outputs, 1), counted, cache


@pytest.mark.parametrize("over", OVER)
@pytest.mark.parametrize("position", POSITIONS)
@torch.no_grad()
def test_a_static_cache_equals_an_ordinary_one(gpu, position, over):
    torch.manual_seed(0)
    layer = MultiHeadAttention(32, 4, kv_heads=2, position=POSITIONS[position](), sink=0.3).eval()
    x = torch.randn(2, 9, 32)
    expected, _, _ = decode(layer, x, OVER[over], static=False)
    here, _, cache = decode(layer, x, OVER[over], static=True)
    torch.testing.assert_close(here, expected, atol=1e-5, rtol=1e-5)
    assert cache.length == 9
    there, counted, _ = decode(layer.to(gpu), x.to(gpu), OVER[over], static=True)
    torch.testing.assert_close(host_of(there), expected, atol=1e-5, rtol=1e-5)
    for counts in counted:
        assert not counts.waited and not counts.uploaded
    # from step to step nothing changes, as a captured graph needs it
    assert counted[1].launched == counted[2].launched == counted[4].launched


@torch.no_grad()
def test_what_does_not_fit_is_refused(gpu):
    layer = MultiHeadAttention(32, 4, position=Rotary()).to(gpu)
    cache = layer.cache(1, 3, static=True)
    layer(torch.randn(1, 2, 32, device=gpu), cache=cache)
    # the device finds out
    with pytest.raises(IndexError, match=r"out of (range|bounds)"):
        layer(torch.randn(1, 2, 32, device=gpu), cache=cache)
    with pytest.raises(ValueError, match="cache must have room for 4 more positions"):
        layer(torch.randn(1, 4, 32, device=gpu), cache=cache)
    on_host = MultiHeadAttention(32, 4).cache(1, 3, static=True)
    with pytest.raises(ValueError, match="cache must have room for 2 more positions, got 2 of 3 filled"):
        for _ in range(2):
            MultiHeadAttention(32, 4)(torch.randn(1, 2, 32), cache=on_host)
    with pytest.raises(ValueError, match="over must be made of Causal, Window, Padding"):
        layer(torch.randn(1, 1, 32, device=gpu), over=torch.ones(1, 3, dtype=torch.bool, device=gpu), cache=cache)
    with pytest.raises(ValueError, match="static must be False with this position"):
        MultiHeadAttention(32, 4, position=RelativeBias(4, window=(3, 3))).cache(1, 3, static=True)


@pytest.mark.parametrize("file", [gpt, llama], ids=["gpt", "llama"])
@torch.inference_mode()
def test_a_model_decodes_without_waits(gpu, file):
    torch.manual_seed(0)
    model = small(file).eval()
    ids = torch.randint(50, (2, 7))
    expected = model(ids)
    model = model.to(gpu)
    for static in (False, True):
        caches, found = model.caches(2, 7, static=static), []
        for begin, end in ((0, 3), (3, 4), (4, 5), (5, 7)):
            part = ids[:, begin:end].to(gpu)
            with count() as counts:
                found.append(model(part, caches=caches))
            assert not counts.waited and not counts.uploaded
        with uncounted():
            torch.testing.assert_close(host_of(torch.cat(found, 1)), expected, atol=1e-4, rtol=1e-4)


def small(file):
    config = file.Config(vocab=50, positions=16, d_model=32, heads=4, layers=2, d_feedforward=64)
    return (file.Gpt if file.__name__.endswith("gpt") else file.Llama)(config)


@torch.inference_mode()
def test_generation_stops_where_it_stops_on_the_host(gpu):
    torch.manual_seed(0)
    model = small(gpt).eval()
    ids = torch.randint(50, (2, 3))
    plain = model.generate(ids, 12, stop=())
    on_device = model.to(gpu)
    for stop in ((), plain[0, 5].item(), plain[:, 6].tolist(), 49):
        expected = small_generate(ids, stop)
        with count() as counts:
            found = on_device.generate(ids.to(gpu), 12, stop=stop)
        assert host_of(found).tolist() == expected.tolist()
        # not one per token
        assert counts.waits <= 2


def small_generate(ids, stop):
    torch.manual_seed(0)
    return small(gpt).eval().generate(ids, 12, stop=stop)
