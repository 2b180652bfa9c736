"""A cache of keys and values whose length lies on the device: a step of decoding has fixed shapes, and waits for nothing."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from polyhead._torch import are_values_readable
from polyhead.neighbourhood import Causal, Dense, Neighbourhood, Padding, Segments, Sizes, Window, operands
from polyhead.nn.cache import KeyValueCache, check_key_value_shapes
from polyhead.position import ALiBi, Position, RelativeBias, Rotary


class StaticKeyValueCache(KeyValueCache):
    """Keys and values (..., heads, capacity, dim), of which a call attends to the filled positions.

    How many are filled is a number on the device, `filled`. The host does not know it: `length` waits for the device. So a step
    can be captured in a CUDA graph and replayed, and each replay goes on where the last one ended.
    """

    def __init__(
        self, k: Float[Tensor, "... heads capacity dim"], v: Float[Tensor, "... heads capacity value_dim"]
    ) -> None:
        self.filled: Int[Tensor, ""] = torch.zeros((), dtype=torch.long, device=k.device)
        super().__init__(k, v)
        # what is not filled is read, with a weight of zero
        k.zero_()
        v.zero_()

    @property
    def length(self) -> int:
        """The number of filled positions. Reading it waits for the device."""
        return int(self.filled)

    @length.setter
    def length(self, length: int) -> None:
        self.filled.fill_(length)

    @property
    def k(self) -> Float[Tensor, "... heads capacity dim"]:
        return self._k

    @property
    def v(self) -> Float[Tensor, "... heads capacity value_dim"]:
        return self._v

    def keys_after(self, new: int) -> int:
        return self.capacity

    def positions_of(self, new: int) -> Int[Tensor, " new"]:
        return self.filled.reshape(1) if new == 1 else self.filled + torch.arange(new, device=self.filled.device)

    def visible_keys(self, over: Neighbourhood, new: int) -> Neighbourhood:
        return FilledKeys(over, self.filled.clone(), self.capacity)

    def append(self, k: Float[Tensor, "... heads new dim"], v: Float[Tensor, "... heads new value_dim"]) -> None:
        """Append new keys and values. Beyond the capacity this is an error, on a device that of an index out of range."""
        check_key_value_shapes(k, v, "new")
        new = k.shape[-2]
        self._check_room(self.length if are_values_readable(self.filled) else 0, new)
        self._check_fits(k, v)
        at = self.positions_of(new)
        self._k.index_copy_(-2, at, k)
        self._v.index_copy_(-2, at, v)
        self.filled.add_(new)

    def mark(self) -> Tensor:
        return self.filled.clone()

    def rewind(self, mark: int | Tensor) -> None:
        assert isinstance(mark, Tensor)
        self.filled.copy_(mark)

    def __repr__(self) -> str:
        return f"StaticKeyValueCache(capacity={self.capacity})"


class FilledKeys(Neighbourhood):
    """The filled keys of a static cache that another neighbourhood allows, for queries that are the last filled ones."""

    tensors = ("over", "length")

    def __init__(self, over: Neighbourhood, length: Int[Tensor, ""], capacity: int) -> None:
        for part in operands(over):
            known = isinstance(part, (Dense, Causal, Window, Padding)) or (
                isinstance(part, Segments) and part.query_ids is None
            )
            if not known:
                raise ValueError(
                    "over must be made of Causal, Window, Padding and Segments of keys by &, | and ~ with a static cache, "
                    f"got {part!r}; make an ordinary one with mha.cache(batch, length)"
                )
        self.over, self.length, self.capacity = over, length, capacity
        self.by_head = over.by_head

    @property
    def query_shift(self) -> Int[Tensor, ""]:
        return self.capacity - self.length

    def check(self, sizes: Sizes) -> None:
        self.over.check(sizes)

    def allows(self, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return self.over.allows(head, query - self.query_shift, key) & (key < self.length)

    def leaves(self) -> tuple[Tensor, ...]:
        return *self.over.leaves(), self.length

    def __repr__(self) -> str:
        return f"FilledKeys({self.over!r}, capacity={self.capacity})"


def check_static_position(position: Position | None) -> None:
    """Raise for a position that cannot take the positions of queries from the device."""
    known = isinstance(position, (Rotary, ALiBi, RelativeBias)) and position.axes is None
    if position is not None and not known:
        raise ValueError(
            f"static must be False with this position, got {position!r}; Rotary, ALiBi and RelativeBias along a sequence work"
        )
