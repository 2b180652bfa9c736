"""A small encoder-decoder, shared by the tests of the model and of generation."""

from __future__ import annotations

import torch

from polyhead.nn import Transformer

VOCAB, START, STOP = 23, 1, 2


def transformer(**options: object) -> Transformer:
    torch.manual_seed(0)
    return Transformer(VOCAB, d_model=12, num_heads=3, layers=(2, 3), d_feedforward=31, **options).eval()
