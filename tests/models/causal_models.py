"""Small GPT, Llama and Mistral models: helpers for the tests of causal models."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from polyhead.models import Gpt, Llama, gpt, llama
from polyhead.position import RopeScaling

GPT = gpt.Config(d_model=15, heads=3, layers=2, d_feedforward=23, vocab=101, positions=137)
LLAMA = llama.Config(d_model=18, heads=6, layers=3, d_feedforward=29, vocab=101, positions=137, kv_heads=2, head_dim=10)
CONFIGS: dict[str, Any] = {
    "gpt": GPT,
    "llama": LLAMA,
    "tied": LLAMA._replace(head="tied", scaling=RopeScaling(8.0, 64)),
    "mistral": LLAMA._replace(window=7),
}


def drawn(module: Any) -> Any:
    """A module without parameters that are zero or one, whose next tokens never have nearly equal probabilities."""
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return module.eval()


def built(name: str) -> Any:
    return drawn((Gpt if name == "gpt" else Llama)(CONFIGS[name]))


def difference(a: Tensor, b: Tensor) -> float:
    assert a.shape == b.shape
    return float((a - b).detach().abs().max())
