"""Which pairs dropout keeps: the documented hash of (seed, head, query, key), reimplemented in NumPy."""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Words = NDArray[np.uint32]


def lowbias32(x: Words) -> Words:
    """Wellons' integer hash with two rounds."""
    x = x ^ (x >> np.uint32(16))
    x = x * np.uint32(0x7FEB352D)
    x = x ^ (x >> np.uint32(15))
    x = x * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))


def dropout_mask(
    seed: int, batch: tuple[int, ...], heads: int, query: NDArray[np.int64], key: NDArray[np.int64], dropout: float
) -> Tensor:
    """True for the pairs that are kept (*batch, heads, *pairs): `query` and `key` broadcast; heads are numbered through the batch."""
    word = lambda x: np.asarray(x).astype(np.uint32)
    axes = np.broadcast(query, key).ndim
    head = np.arange(math.prod((*batch, heads))).reshape(*batch, heads, *(1,) * axes)
    with np.errstate(over="ignore"):
        row = lowbias32(lowbias32(lowbias32(word([seed & 0xFFFFFFFF])) + word(head)) + word(query))
        mixed = lowbias32(row ^ (word(key) * np.uint32(0x9E3779B1)))
    # as a signed integer it is uniform over 2^32 values
    return torch.as_tensor(mixed.view(np.int32).astype(np.int64) >= round(dropout * 2**32) - 2**31)
