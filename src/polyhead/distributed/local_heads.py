"""Neighbourhoods and biases that differ by head, cut to the heads of one rank."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from polyhead.neighbourhood import Mask, Neighbourhood, Offsets, Sizes
from polyhead.neighbourhood.algebra import Combination, Complement
from polyhead.neighbourhood.lattice import Lattice
from polyhead.neighbourhood.shapes import KeyInterval


class HeadRange(NamedTuple):
    """Consecutive heads of an attention with `total` heads."""

    first: int
    size: int
    total: int


def select_heads(over: Neighbourhood, heads: HeadRange, *, batched: bool) -> Neighbourhood:
    """Some heads of a neighbourhood for all of them; `batched` says whether the call has a batch axis."""
    first, size, total = heads
    if isinstance(over, Combination):
        return over.map_parts(lambda part: select_heads(part, heads, batched=batched))
    if isinstance(over, Complement):
        return over.map_over(lambda part: select_heads(part, heads, batched=batched))
    if type(over).__module__.startswith("polyhead.") and not over.by_head:
        return over
    if type(over) is Mask:
        _check_heads("Mask: keep", over.keep.shape[-3], total)
        keep = over.keep[..., first : first + size, :, :]
        # a batch axis, so that few heads are not taken for a batch
        return Mask(keep[None] if keep.dim() == 3 and batched else keep)
    if type(over) is Offsets:
        _check_heads("Offsets: offsets", over.heads, total)
        twin = copy.copy(over)
        twin.heads, twin.index = size, over.index[first : first + size]
        twin.by_head = size > 1
        return twin
    if type(over).__module__.startswith("polyhead.distributed."):
        raise ValueError(f"over must be the same for all heads where items and heads are both sharded, got {over!r}")
    return SomeHeads(over, heads)


def head_axis(over: Neighbourhood) -> int:
    """The axis of heads in a bias on the scores: before queries and keys, or before edges."""
    return -len(over.attention_axes(1, 1, 1)[1])


def select_bias_heads(
    bias: Float[Tensor, "... #heads #queries #keys"] | Float[Tensor, "... #heads edges"],
    over: Neighbourhood,
    heads: HeadRange,
) -> Float[Tensor, "... #own_heads #queries #keys"] | Float[Tensor, "... #own_heads edges"]:
    """The part of a bias on the scores that is for these heads."""
    axis = head_axis(over)
    if bias.dim() < -axis or bias.shape[axis] == 1:
        return bias
    _check_heads("bias", bias.shape[axis], heads.total)
    return bias.narrow(axis, heads.first, heads.size)


class SomeHeads(Neighbourhood):
    """Some consecutive heads of a neighbourhood whose pairs may differ by head."""

    tensors = ("over",)

    def __init__(self, over: Neighbourhood, heads: HeadRange) -> None:
        self.over, self.heads = over, heads
        self.exact, self.by_head, self.along_keys = over.exact, over.by_head, over.along_keys

    def _restore(self, state: dict[str, Any]) -> None:
        SomeHeads.__init__(self, state["over"], HeadRange(*state["heads"]))

    @property
    def anchors(self) -> frozenset[str]:
        return self.over.anchors

    @property
    def lattice(self) -> Lattice | None:
        return self.over.lattice

    def check(self, sizes: Sizes) -> None:
        self.over.check(sizes._replace(heads=self.heads.total))

    def check_device(self, device: torch.device) -> None:
        self.over.check_device(device)

    def allows(self, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return self.over.allows(head + self.heads.first, query, key)

    def allows_pairs(self, query: Tensor, key: Tensor, heads: int = 1) -> Tensor:
        allowed = self.over.allows_pairs(query, key, self.heads.first + heads)
        shared = allowed.dim() < 2 or allowed.shape[-2] == 1
        return allowed if shared else allowed[..., self.heads.first :, :]

    def interval(self, queries: int, keys: int, device: torch.device) -> KeyInterval:
        return self.over.interval(queries, keys, device)

    def unpadded_queries(self, shape: tuple[int, ...]) -> Tensor | None:
        return self.over.unpadded_queries(shape)

    def bind_self_attention(self, self_attention: bool) -> Neighbourhood:
        return SomeHeads(self.over.bind_self_attention(self_attention), self.heads)

    def bind_sizes(self, sizes: Sizes) -> Neighbourhood:
        over = self.over.bind_sizes(sizes._replace(heads=self.heads.total))
        return self if over is self.over else SomeHeads(over, self.heads)

    def leaves(self) -> tuple[Tensor, ...]:
        return self.over.leaves()

    def __repr__(self) -> str:
        first, size, total = self.heads
        return f"{self.over!r} in heads {first} to {first + size - 1} of {total}"


def _check_heads(name: str, heads: int, total: int) -> None:
    if heads != total:
        raise ValueError(f"{name} must be for all {total} heads, or the same for all of them, got {heads} heads")
