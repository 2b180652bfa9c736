"""Token embeddings, sinusoidal positions, and the check of ids."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from polyhead._checks import check_dense_tensor
from polyhead._torch import are_values_readable, widest_float


def sinusoidal_positions(first: int, stop: int, features: int, like: Tensor) -> Float[Tensor, "positions features"]:
    """Sinusoidal positions of Vaswani 2017: sines and cosines of position / 10000^(2i / features), interleaved."""
    wide, device = widest_float(like.device), like.device
    frequency = 10_000.0 ** (-torch.arange(0, features, 2, dtype=wide, device=device) / features)
    angle = torch.arange(first, stop, dtype=wide, device=device)[:, None] * frequency
    return torch.stack((angle.sin(), angle.cos()), -1).flatten(-2)[:, :features].to(like.dtype)


def uninitialised_embedding(count: int, features: int) -> nn.Embedding:
    """An embedding with uninitialised weights. On the meta device the constructor of nn.Embedding would load torch's compiler."""
    return nn.Embedding.from_pretrained(torch.empty(count, features), freeze=False)


def check_embedding_ids(name: str, ids: Tensor, count: int, of: str = "the vocabulary") -> None:
    """Raise unless `ids` are row numbers of an embedding with `count` rows; on a device the embedding itself checks the values."""
    if not check_dense_tensor(name, ids, "of ids (..., tokens)").dim():
        raise ValueError(f"{name} must be a tensor of ids (..., tokens), got shape ()")
    if ids.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"{name} must be torch.int64 or torch.int32, got {ids.dtype}")
    if not are_values_readable(ids) or not ids.numel():
        return
    low, high = (int(bound) for bound in ids.aminmax())
    if low < 0 or high >= count:
        raise ValueError(f"{name} must be in [0, {count - 1}] ({of}), got values from {low} to {high}")
