"""Positions, neighbourhoods and a small layer, shared by the tests of the layer."""

import torch

from polyhead import ALiBi, Causal, MultiHeadAttention, Padding, RelativeBias, Rotary, Segments, Window

POSITIONS = {
    "none": lambda: None,
    "rotary": Rotary,
    "alibi": lambda: ALiBi(6),
    "relative": lambda: RelativeBias(6, buckets=8, max_distance=20),
}
NEIGHBOURHOODS = {
    "dense": lambda: None,
    "causal": Causal,
    "window": lambda: Window(3),
    "padding": lambda: Padding(torch.tensor([3, 11, 0])),
    "causal-padding": lambda: Causal() & Padding(torch.tensor([3, 11, 0])),
    "segments": lambda: Segments(torch.arange(11) // 4),
    "mask": lambda: torch.rand(11, 11) > 0.4,
}


def layer(**options):
    return MultiHeadAttention(30, 6, **options)
