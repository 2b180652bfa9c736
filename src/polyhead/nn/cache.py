"""Projected keys and values: of a sequence that grows step by step, and of a fixed memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from polyhead._checks import check_dense_tensor, check_integer, check_integers, check_numel, is_integer

if TYPE_CHECKING:
    from polyhead.neighbourhood import Neighbourhood
    from polyhead.nn.attention import MultiHeadAttention


class KeyValues(NamedTuple):
    """Projected keys and values of a memory, made once by `MultiHeadAttention.project_kv`."""

    k: Float[Tensor, "... heads keys dim"]
    v: Float[Tensor, "... heads keys value_dim"]

    def __repr__(self) -> str:
        return f"KeyValues(keys {tuple(self.k.shape)}, values {tuple(self.v.shape)})"


class KeyValueCache:
    """Preallocated keys and values (..., heads, capacity, dim); the first `length` positions are filled.

    Made by `MultiHeadAttention.cache(batch, length)`. It is written in place and never reallocated.
    """

    def __init__(
        self, k: Float[Tensor, "... heads capacity dim"], v: Float[Tensor, "... heads capacity value_dim"]
    ) -> None:
        check_key_value_shapes(k, v, "capacity")
        self._k, self._v = k, v
        self.length = 0
        # incremented when filled positions are dropped: older views are then stale
        self.generation = 0

    def keys_after(self, new: int) -> int:
        """The number of keys that a call with `new` items attends to."""
        return self.length + new

    def positions_of(self, new: int) -> Int[Tensor, " new"] | None:
        """The positions of the next `new` items; None if they follow from `keys_after`."""
        return None

    def visible_keys(self, over: Neighbourhood, new: int) -> Neighbourhood:
        """The neighbourhood of the last `new` items, which are in the cache already."""
        return over

    def mark(self) -> int | Tensor:
        """The present length, to which `rewind` returns."""
        return self.length

    def rewind(self, mark: int | Tensor) -> None:
        """Drop what was appended since the mark. If a view has seen it, increment `generation` too."""
        assert not isinstance(mark, Tensor)
        self.length = mark

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
        """Append new keys and values."""
        check_key_value_shapes(k, v, "new")
        new = k.shape[-2]
        self._check_room(self.length, new)
        self._check_fits(k, v)
        self._k.narrow(-2, self.length, new).copy_(k)
        self._v.narrow(-2, self.length, new).copy_(v)
        self.length += new

    def _check_room(self, filled: int, new: int) -> None:
        if filled + new > self.capacity:
            raise ValueError(
                f"cache must have room for {new} more positions, got {filled} of {self.capacity} filled; "
                "make a longer one with mha.cache(batch, length), or drop some with cache.truncate(length)"
            )

    def _check_fits(self, k: Tensor, v: Tensor) -> None:
        """Raise where new keys and values cannot be written into the cache."""
        if k.dtype != self._k.dtype:
            raise ValueError(
                f"cache must have the dtype of the keys, {k.dtype}, got {self._k.dtype}; "
                f"make it under the same autocast, or with mha.cache(batch, length, dtype={k.dtype})"
            )
        if k.shape[-1] != self._k.shape[-1] or v.shape[-1] != self._v.shape[-1]:
            raise ValueError(
                f"cache must have {k.shape[-1]} features per key and {v.shape[-1]} per value, as the layer has, "
                f"got {self._k.shape[-1]} and {self._v.shape[-1]}"
            )
        if k.shape[:-2] != self._k.shape[:-2]:
            raise ValueError(
                f"cache must have (..., heads) = {tuple(k.shape[:-2])}, as the input has, got {tuple(self._k.shape[:-2])}"
            )
        if k.requires_grad or v.requires_grad:
            raise ValueError("cache is written in place, without gradients; call the layer under torch.no_grad()")

    @contextmanager
    def append_with_rollback(
        self, k: Float[Tensor, "... heads new dim"], v: Float[Tensor, "... heads new value_dim"]
    ) -> Iterator[None]:
        """Append new keys and values; remove them again if an error occurs in the context."""
        before = self.mark()
        self.append(k, v)
        try:
            yield
        except BaseException:
            self.rewind(before)
            raise

    def truncate(self, length: int) -> None:
        """Drop all but the first `length` keys and values."""
        length = check_integer("length", length, 0, self.length, hint=f"{self.length} positions are filled")
        self.generation += length < self.length
        self.length = length

    def __repr__(self) -> str:
        return f"KeyValueCache(length={self.length}, capacity={self.capacity})"


def allocate_cache(
    layer: MultiHeadAttention,
    batch: int | tuple[int, ...] | None,
    length: int,
    dtype: torch.dtype | None,
    static: bool = False,
) -> KeyValueCache:
    """A cache for a layer: see `MultiHeadAttention.cache`."""
    # a static cache is a cache: that file imports this one
    from polyhead.nn.static_cache import StaticKeyValueCache, check_static_position

    lead = [] if batch is None else check_integers("batch", [batch] if is_integer(batch) else batch)
    length = check_integer("length", length)
    check_numel("the cache", (*lead, layer.kv_heads, length, max(layer.head_dim, layer.value_dim)))
    # a projection that is not a plain nn.Linear, such as a quantised one, may have no parameter `weight`
    like = next((p for p in layer.k_proj.parameters() if p.is_floating_point()), None)
    device = torch.device("cpu") if like is None else like.device
    if dtype is None:
        narrow = device.type != "meta" and torch.is_autocast_enabled(device.type)
        dtype = torch.get_autocast_dtype(device.type) if narrow else torch.float32 if like is None else like.dtype
    shapes = (*lead, layer.kv_heads, length, layer.head_dim), (*lead, layer.value_heads, length, layer.value_dim)
    try:
        k, v = (torch.empty(shape, dtype=dtype, device=device) for shape in shapes)
    except RuntimeError as error:
        raise MemoryError(f"batch, length: not enough memory for keys and values of {shapes[0]}: {error}") from None
    if not static:
        return KeyValueCache(k, v)
    check_static_position(layer.position)
    return StaticKeyValueCache(k, v)


def check_key_value_shapes(k: Tensor, v: Tensor, items: str) -> None:
    """Raise unless keys and values have the same number of items."""
    for name, x in (("k", k), ("v", v)):
        if check_dense_tensor(name, x, f"(..., heads, {items}, dim)").dim() < 3:
            raise ValueError(f"{name} must be a tensor (..., heads, {items}, dim), got shape {tuple(x.shape)}")
    if k.shape[:-3] != v.shape[:-3] or k.shape[-2] != v.shape[-2] or k.dtype != v.dtype or k.device != v.device:
        raise ValueError(
            f"k, v must have the same batch and {items}, dtype and device, got {tuple(k.shape)} and {tuple(v.shape)} in {k.dtype} and "
            f"{v.dtype} on {k.device} and {v.device}"
        )


@contextmanager
def restore_caches_on_error(caches: Sequence[KeyValueCache] | None) -> Iterator[None]:
    """Restore the lengths of several caches if an error occurs: a step is appended to all of them or to none."""
    before = [cache.mark() for cache in caches or ()]
    try:
        yield
    except BaseException:
        for cache, mark in zip(caches or (), before, strict=True):
            # only the device knows whether a static cache has grown
            cache.generation += not isinstance(mark, int) or mark < cache.length
            cache.rewind(mark)
        raise
