"""Where `flex` refuses to run, and what it says."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from polyhead import ALiBi, Causal, Dot, Padding, RelativeBias, Window, attend, explain
from polyhead.cli.doctor import collect_facts
from polyhead.kernels.flex import support
from polyhead.kernels.flex.shared_memory import width_refuses
from polyhead.score import Score

CUDA = torch.device("cuda", 0)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch):
    """A CUDA device of compute capability 8.6, as far as it is asked about itself; nothing runs on it."""
    monkeypatch.setattr(support, "_reasons", {})
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 6))


def refuses(dtype: torch.dtype = torch.float16) -> str | None:
    return support.device_refuses(CUDA, dtype)


def test_a_gpu_with_triton_is_accepted(gpu: None):
    assert refuses() is None and refuses(torch.bfloat16) is None


def test_triton_is_missing(gpu: None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    assert refuses() == "Triton is not installed; install the one that your torch was built for"


def test_triton_is_too_old(gpu: None, monkeypatch: pytest.MonkeyPatch):
    old = ModuleType("triton")
    old.__version__ = "3.3.1"
    monkeypatch.setitem(sys.modules, "triton", old)
    assert refuses() == "it needs Triton 3.5 or newer, and this is 3.3.1"


def test_torch_is_too_old(gpu: None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delattr(importlib.import_module("torch.nn.attention.flex_attention"), "AuxRequest")
    assert refuses() == f"it needs torch 2.9 or newer, and this is {torch.__version__}"


@pytest.mark.parametrize(
    ("capability", "dtype", "reason"),
    [
        ((7, 0), torch.float16, "float16 needs compute capability 7.5, and this GPU has 7.0"),
        ((7, 5), torch.bfloat16, "bfloat16 needs compute capability 8.0, and this GPU has 7.5"),
        ((7, 5), torch.float32, None),
    ],
)
def test_gpus_that_are_too_old(
    gpu: None, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], dtype: torch.dtype, reason: str | None
):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    assert refuses(dtype) == reason


def test_doctor_says_whether_it_runs_here(gpu: None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.xpu, "is_available", lambda: False)
    assert collect_facts()["flex"] == "no (it is for cuda and xpu, and torch finds neither)"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert collect_facts()["flex"] == "yes, on cuda"
    monkeypatch.setattr(support, "_reasons", {})
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
    assert collect_facts()["flex"] == "yes, on cuda; bfloat16 needs compute capability 8.0, and this GPU has 7.5"
    monkeypatch.setattr(support, "_reasons", {})
    monkeypatch.setitem(sys.modules, "triton", None)
    assert collect_facts()["flex"] == "no (Triton is not installed; install the one that your torch was built for)"


def test_other_devices_and_dtypes(gpu: None):
    assert support.device_refuses(torch.device("mps"), torch.float32) == "it is for cuda and xpu, and q is on mps"
    assert refuses(torch.float64) == "Triton has no matrix products in float64"
    q = torch.randn(1, 2, 300, 64)
    assert (
        explain(q, q, q, over=torch.rand(300, 300) > 0.5).refused["flex"] == "it is for cuda and xpu, and q is on cpu"
    )


def test_learned_biases_under_deterministic_algorithms(flex_on_cpu: None, monkeypatch: pytest.MonkeyPatch):
    q = torch.randn(1, 2, 300, 64)
    over = Padding(torch.rand(1, 300) > 0.5)
    learned, fixed = RelativeBias(2, buckets=8, max_distance=20), ALiBi(2)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    said = explain(q, q, q, over=over, position=learned)
    assert said.kernel == "tiled"
    assert said.refused["flex"] == (
        "it sums the gradient of a learned bias in any order, and deterministic algorithms are on"
    )
    assert explain(q, q, q, over=over, position=fixed).kernel == "flex"
    with torch.no_grad():
        assert explain(q, q, q, over=over, position=learned).kernel == "flex"


def test_heads_that_are_too_wide(flex_on_cpu: None):
    q = torch.randn(1, 1, 40, 300)
    with pytest.raises(ValueError, match="it is for heads of at most 256 features, and these have 300"):
        attend(q, q, q, over=Window(3), kernel="flex")
    assert width_refuses(256, torch.float32, 64 << 10) == (
        "heads of 256 features in float32 do not fit into the GPU's 64 KB of shared memory"
    )
    assert width_refuses(256, torch.float32, 163 << 10) is None


class Near(Score):
    """A score of a user's."""

    def forward(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return -torch.cdist(q, k)


def test_calls_that_others_compute(flex_on_cpu: None):
    q = torch.randn(1, 2, 30, 16)
    for options, reason in (
        ({"score": Near()}, "it computes dot products, and score is Near"),
        ({"over": Causal()}, "it has no rules for torch.func transforms"),
    ):

        def call(q: torch.Tensor, options: dict[str, object] = options) -> torch.Tensor:
            return attend(q, q, q, kernel="flex", **options)

        with pytest.raises(ValueError, match=f"kernel 'flex' refuses this call: {reason}"):
            call(q) if "score" in options else torch.func.vmap(call)(q)
    with FlopCounterMode(display=False):
        assert "another mode intercepts" in explain(q, q, q, over=torch.rand(30, 30) > 0.5).refused["flex"]
    attend(q, q, q, over=Window(3), score=Dot(2.0), kernel="flex")


def test_exported_programs_keep_an_operator_of_every_device(flex_on_cpu: None):
    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return attend(x, x, x, over=Window(3), kernel=None)

    x = torch.randn(1, 2, 300, 64)
    program = torch.export.export(Model(), (x,))
    assert "polyhead.tiled" in str(program.graph) and "flex" not in str(program.graph)
    torch.testing.assert_close(program.module()(x), Model()(x), atol=1e-5, rtol=1e-5)
