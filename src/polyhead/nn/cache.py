"""Keys and values that are kept: of a sequence that grows step by step, and of a memory that stays as it is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor

from polyhead._checks import check_integer, check_tensor


class KeyValues(NamedTuple):
    """Projected keys and values of what a sequence attends to, made once by `MultiHeadAttention.project_kv`."""

    k: Float[Tensor, "... heads keys dim"]
    v: Float[Tensor, "... heads keys value_dim"]

    def __repr__(self) -> str:
        return f"KeyValues(keys {tuple(self.k.shape)}, values {tuple(self.v.shape)})"


class KeyValueCache:
    """Preallocated keys and values (..., heads, capacity, dim), of which the first `length` are filled.

    Made by `MultiHeadAttention.cache(batch, length)`; written in place, never copied or moved.
    """

    def __init__(
        self, k: Float[Tensor, "... heads capacity dim"], v: Float[Tensor, "... heads capacity value_dim"]
    ) -> None:
        _check_pair(k, v, "capacity")
        self._k, self._v = k, v
        self.length = 0
        # counts the times that filled places were given up, after which an older view is stale
        self.generation = 0

    @property
    def capacity(self) -> int:
        return self._k.shape[-2]

    @property
    def k(self) -> Float[Tensor, "... heads filled dim"]:
        return self._k.narrow(-2, 0, self.length)

    @property
    def v(self) -> Float[Tensor, "... heads filled value_dim"]:
        return self._v.narrow(-2, 0, self.length)

    def append(self, k: Float[Tensor, "... heads new dim"], v: Float[Tensor, "... heads new value_dim"]) -> None:
        """Write new keys and values behind the filled ones."""
        _check_pair(k, v, "new")
        new = k.shape[-2]
        if self.length + new > self.capacity:
            raise ValueError(
                f"cache: {new} more do not fit: {self.length} of {self.capacity} places are filled; "
                "make it longer with mha.cache(batch, length), or go back with cache.truncate(length)"
            )
        if k.dtype != self._k.dtype:
            raise ValueError(
                f"cache: it holds {self._k.dtype}, but the keys are {k.dtype}; "
                f"make it with mha.cache(batch, length, dtype={k.dtype}), as under autocast"
            )
        if k.shape[-1] != self._k.shape[-1] or v.shape[-1] != self._v.shape[-1]:
            raise ValueError(
                f"cache: it was made for heads of {self._k.shape[-1]} and {self._v.shape[-1]} features, "
                f"but the layer has {k.shape[-1]} and {v.shape[-1]}"
            )
        if k.shape[:-2] != self._k.shape[:-2]:
            raise ValueError(
                f"cache: it was made for (..., heads) = {tuple(self._k.shape[:-2])}, but the input gives {tuple(k.shape[:-2])}"
            )
        if k.requires_grad or v.requires_grad:
            raise ValueError(
                "cache: it is written in place and keeps no gradients; call the layer under torch.no_grad()"
            )
        self._k.narrow(-2, self.length, new).copy_(k)
        self._v.narrow(-2, self.length, new).copy_(v)
        self.length += new

    def truncate(self, length: int) -> None:
        """Forget all but the first `length` keys and values."""
        length = check_integer("length", length, 0, self.length, hint=f"{self.length} places are filled")
        self.generation += length < self.length
        self.length = length

    def __repr__(self) -> str:
        return f"KeyValueCache(length={self.length}, capacity={self.capacity})"


def _check_pair(k: Tensor, v: Tensor, items: str) -> None:
    """Raise where these are not keys and values of as many items."""
    for name, x in (("k", k), ("v", v)):
        if check_tensor(name, x, f"(..., heads, {items}, dim)").dim() < 3:
            raise ValueError(f"{name} must be a tensor (..., heads, {items}, dim), got shape {tuple(x.shape)}")
    if k.shape[:-3] != v.shape[:-3] or k.shape[-2] != v.shape[-2] or k.dtype != v.dtype or k.device != v.device:
        raise ValueError(
            f"k, v must have the same batch and {items}, dtype and device, got {tuple(k.shape)} and {tuple(v.shape)} in {k.dtype} and "
            f"{v.dtype} on {k.device} and {v.device}"
        )


@contextmanager
def all_or_none(caches: Sequence[KeyValueCache] | None) -> Iterator[None]:
    """Where what is done with several caches fails, they are as long as they were: none has what others have not."""
    before = [cache.length for cache in caches or ()]
    try:
        yield
    except BaseException:
        for cache, length in zip(caches or (), before, strict=True):
            cache.truncate(length)
        raise
