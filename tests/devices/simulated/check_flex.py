"""`flex` makes no wait of the host and copies nothing from it, forward and backward, from the first call on."""

import pytest
import torch
from torch.nn.attention import flex_attention

from benchmarks.simulated_device import count, host_of
from polyhead import ALiBi, Causal, Dense, Grid, Mask, Padding, RelativeBias, Segments, Window, attend
from polyhead.kernels.flex import compiled, support

HEADS, ITEMS = 3, 300

OVER = {
    "dense": lambda gpu: Dense(),
    "window": lambda gpu: Window(40),
    "padding": lambda gpu: Padding(torch.tensor([ITEMS, 7], device=gpu), queries=True),
    "segments": lambda gpu: Segments((torch.arange(ITEMS, device=gpu) // 90).expand(2, -1)),
    "mask": lambda gpu: Mask(torch.ones(ITEMS, ITEMS, dtype=torch.bool, device=gpu)) & Causal(),
    "grid": lambda gpu: Grid(15, 20, window=5),
}
OPTIONS = {
    "plain": {},
    "sink": {"sink": 0.5},
    "dropout": {"dropout": 0.2},
    "alibi": {"position": ALiBi(HEADS)},
    "relative": {"position": RelativeBias(HEADS, buckets=8, max_distance=20)},
}


@pytest.fixture(autouse=True)
def flex_on_the_simulated_device(monkeypatch):
    monkeypatch.setattr(support, "DEVICE_TYPES", ("gpu",))
    monkeypatch.setattr(compiled, "BACKEND", "eager")
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *tensors: None)


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
@pytest.mark.parametrize(
    ("over", "option"),
    [
        ("padding", "plain"),
        ("segments", "sink"),
        ("mask", "alibi"),
        ("grid", "plain"),
        ("window", "dropout"),
        ("dense", "relative"),
    ],
)
def test_no_call_waits(gpu, over, option):
    options = {name: value.to(gpu) if name == "position" else value for name, value in OPTIONS[option].items()}
    if "dropout" in options:
        options["seed"] = torch.tensor(3, device=gpu)
    q, k, v = (torch.randn(2, HEADS, ITEMS, 16, device=gpu).requires_grad_() for _ in range(3))
    where = OVER[over](gpu)
    with count() as forward:
        out = attend(q, k, v, over=where, kernel="flex", **options)
    with count() as backward:
        gradients = torch.autograd.grad(out.sum(), (q, k, v))
    assert not forward.waited and not backward.waited
    # torch's dense definition, which stands in for its kernel, copies -inf to the device each time it runs
    runs = 2 if "dropout" in options else 1
    assert dict(forward.uploaded) == dict(backward.uploaded) == {"copy": runs}
    if "dropout" not in options:
        expected = attend(q, k, v, over=where, kernel="tiled", **options)
        wanted = torch.autograd.grad(expected.sum(), (q, k, v))
        for a, b in zip((out, *gradients), (expected, *wanted), strict=True):
            torch.testing.assert_close(host_of(a.detach()), host_of(b.detach()), atol=1e-4, rtol=1e-4)
