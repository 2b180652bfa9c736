"""Optimizers and a model with parameters on manifolds, for several test files."""

import pytest
from torch import nn

from polyhead import MultiHeadAttention, optim

OPTIMIZERS = {
    "sgd": lambda params, **options: optim.SGD(params, lr=0.1, momentum=0.9, **options),
    "adam": lambda params, **options: optim.Adam(params, lr=0.1, **options),
    "adam-scalar": lambda params, **options: optim.Adam(params, lr=0.1, second_moment="scalar", **options),
    "adamw": lambda params, **options: optim.AdamW(params, lr=0.1, **options),
}
every = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)


def model():
    """Two layers of different sizes and a linear map without a manifold."""
    layers = [
        MultiHeadAttention(30, 6, manifold="stiefel"),
        MultiHeadAttention(30, 2, kv_heads=1, manifold={"v": "stiefel"}),
    ]
    return nn.ModuleList([*layers, nn.Linear(30, 7)])
