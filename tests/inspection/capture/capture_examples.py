"""Small models whose attention is captured."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import torch.nn.functional as F
from torch import nn
from transformers import BertConfig, BertModel, GPT2Config, GPT2Model, LlamaConfig, LlamaModel

from polyhead.inspection.capture.capture import capture

SMALL = {"vocab_size": 89, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 40}
TRANSFORMERS = {
    "bert": lambda: BertModel(BertConfig(**SMALL)),
    "gpt2": lambda: GPT2Model(
        GPT2Config(vocab_size=89, n_embd=24, n_layer=2, n_head=4, bos_token_id=None, eos_token_id=None)
    ),
    "llama": lambda: LlamaModel(LlamaConfig(**SMALL, num_key_value_heads=2)),
}
NAMES = {"bert": "encoder.layer.{}.attention.self", "gpt2": "h.{}.attn", "llama": "layers.{}.self_attn"}


class Own(nn.Module):
    """Two layers as users write them: packed projections, SDPA and an output projection."""

    def __init__(self, d=20, heads=5, causal=False):
        super().__init__()
        self.packed = nn.ModuleList(nn.Linear(d, 3 * d) for _ in range(2))
        self.out = nn.ModuleList(nn.Linear(d, d) for _ in range(2))
        self.heads, self.causal = heads, causal

    def forward(self, x):
        for packed, out in zip(self.packed, self.out, strict=True):
            q, k, v = packed(x).unflatten(-1, (3, self.heads, -1)).movedim(-3, 0).transpose(-3, -2)
            x = x + out(F.scaled_dot_product_attention(q, k, v, is_causal=self.causal).transpose(-3, -2).flatten(-2))
        return x


class Nested(nn.Module):
    """A module that calls attention itself and in a submodule."""

    def __init__(self):
        super().__init__()
        self.inner = Own()

    def forward(self, x):
        x = self.inner(x)
        q = x.unflatten(-1, (5, 4)).transpose(-3, -2)
        return x + F.scaled_dot_product_attention(q, q, q).transpose(-3, -2).flatten(-2)


def record(model, x=None, **options):
    """Run the model once and return its capture."""
    with capture(model, **options) as seen:
        model(torch.randn(2, 6, 20) if x is None else x)
    return seen
