"""Intersection, union and complement of neighbourhoods: `a & b`, `a | b`, `~a`."""

from __future__ import annotations

import functools
import operator
from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from jaxtyping import Bool
from torch import Tensor

from polyhead.neighbourhood.base import Dense, Neighbourhood, as_neighbourhood
from polyhead.neighbourhood.lattice import Lattice
from polyhead.neighbourhood.mask_mods import MaskMod
from polyhead.neighbourhood.shapes import Band, KeyInterval, Sizes, check_one_lattice, intersect_bands, unite_bands


def intersect(a: Neighbourhood | Tensor, b: Neighbourhood | Tensor) -> Any:
    """`a & b`. The edges that remain if one of them is a graph, the other one if one of them is `Dense()`."""
    if not _are_operands(a, b):
        return NotImplemented
    left, right = as_neighbourhood(a), as_neighbourhood(b)
    filtered = right.filter_edges(left)
    if filtered is not None:
        return filtered
    parts = [x for x in (*intersection_parts(left), *intersection_parts(right)) if not isinstance(x, Dense)]
    return Both(*parts) if len(parts) > 1 else parts[0] if parts else Dense()


def unite(a: Neighbourhood | Tensor, b: Neighbourhood | Tensor) -> Any:
    """`a | b`. `Dense()` if one of them is that, the other one if one of them is `~Dense()`."""
    if not _are_operands(a, b):
        return NotImplemented
    left, right = as_neighbourhood(a), as_neighbourhood(b)
    for one, other in ((left, right), (right, left)):
        union = one.absorb_union(other)
        if union is not None:
            return union
    parts = [x for x in (*union_parts(left), *union_parts(right)) if not _allows_nothing(x)]
    dense = next((x for x in parts if isinstance(x, Dense)), None)
    if dense is not None and all(x.lattice is None for x in parts):
        return dense
    return Either(*parts) if len(parts) > 1 else parts[0] if parts else Complement(Dense())


def _are_operands(*values: object) -> bool:
    return all(isinstance(x, (Neighbourhood, Tensor)) for x in values)


def _allows_nothing(over: Neighbourhood) -> bool:
    return isinstance(over, Complement) and isinstance(over.over, Dense)


def intersection_parts(over: Neighbourhood) -> tuple[Neighbourhood, ...]:
    """The parts of an intersection; any other neighbourhood is its own only part."""
    return over.parts if isinstance(over, Both) else (over,)


def union_parts(over: Neighbourhood) -> tuple[Neighbourhood, ...]:
    """The parts of a union; any other neighbourhood is its own only part."""
    return over.parts if isinstance(over, Either) else (over,)


def operands(over: Neighbourhood) -> tuple[Neighbourhood, ...]:
    """The neighbourhoods that an expression of `&`, `|` and `~` is made of, in order."""
    if isinstance(over, Combination):
        return tuple(operand for part in over.parts for operand in operands(part))
    return operands(over.over) if isinstance(over, Complement) else (over,)


class Combination(Neighbourhood):
    """The base of `a & b` and `a | b`: some neighbourhoods, and how their answers about a pair are joined."""

    tensors = ("parts",)
    symbol: ClassVar[str]

    def __init__(self, *parts: Neighbourhood) -> None:
        check_one_lattice(self.symbol, parts)
        self.parts = parts
        self.by_head = any(part.by_head for part in parts)
        self.along_keys = any(part.along_keys for part in parts)

    def _restore(self, state: dict[str, Any]) -> None:
        if not state["parts"] or not all(isinstance(part, Neighbourhood) for part in state["parts"]):
            raise ValueError(f"{type(self).__name__}: its parts must be neighbourhoods, got {state['parts']!r:.80}")
        type(self).__init__(self, *state["parts"])

    @staticmethod
    @abstractmethod
    def join(a: Bool[Tensor, "..."], b: Bool[Tensor, "..."]) -> Bool[Tensor, "..."]:
        """Whether pairs are allowed, from the answers of two parts."""

    def map_parts(self, function: Callable[[Neighbourhood], Neighbourhood]) -> Neighbourhood:
        """The same combination of other parts; itself if the function changes none."""
        parts = [function(part) for part in self.parts]
        return self if all(map(operator.is_, parts, self.parts)) else type(self)(*parts)

    @property
    def lattice(self) -> Lattice | None:
        return next((part.lattice for part in self.parts if part.lattice is not None), None)

    def allows(self, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return functools.reduce(self.join, [part.allows(head, query, key) for part in self.parts])

    def allows_pairs(self, query: Tensor, key: Tensor, heads: int = 1) -> Tensor:
        return functools.reduce(self.join, [part.allows_pairs(query, key, heads) for part in self.parts])

    def mask_mod(self, sizes: Sizes, device: torch.device) -> MaskMod:
        join, mods = self.join, [part.mask_mod(sizes, device) for part in self.parts]
        return lambda row, head, query, key: functools.reduce(join, [mod(row, head, query, key) for mod in mods])

    def check(self, sizes: Sizes) -> None:
        for part in self.parts:
            part.check(sizes)

    def check_device(self, device: torch.device) -> None:
        for part in self.parts:
            part.check_device(device)

    def leaves(self) -> tuple[Tensor, ...]:
        return tuple(tensor for part in self.parts for tensor in part.leaves())

    def select_batch_rows(self, batch: tuple[int, ...], at: tuple[slice, ...]) -> Neighbourhood:
        return self.map_parts(lambda part: part.select_batch_rows(batch, at))

    def bind_self_attention(self, self_attention: bool) -> Neighbourhood:
        return self.map_parts(lambda part: part.bind_self_attention(self_attention))

    def bind_sizes(self, sizes: Sizes) -> Neighbourhood:
        return self.map_parts(lambda part: part.bind_sizes(sizes))

    def __repr__(self) -> str:
        return f" {self.symbol} ".join(map(_repr_of_part, self.parts))


class Both(Combination):
    """The intersection of neighbourhoods, `a & b`: pairs that every part allows."""

    symbol = "&"

    def __init__(self, *parts: Neighbourhood) -> None:
        super().__init__(*parts)
        self.exact = all(part.exact for part in parts)

    @staticmethod
    def join(a: Tensor, b: Tensor) -> Tensor:
        return a & b

    @property
    def anchors(self) -> frozenset[str]:
        return frozenset.intersection(*(part.anchors for part in self.parts))

    def interval(self, queries: int, keys: int, device: torch.device) -> KeyInterval:
        first, stop = self.parts[0].interval(queries, keys, device)
        for part in self.parts[1:]:
            a, b = part.interval(queries, keys, device)
            first, stop = torch.maximum(first, a), torch.minimum(stop, b)
        return first, torch.maximum(first, stop)

    @property
    def band(self) -> Band:
        return intersect_bands([part.band for part in self.parts])

    def unpadded_queries(self, shape: tuple[int, ...]) -> Bool[Tensor, "... queries"] | None:
        known = [real for part in self.parts if (real := part.unpadded_queries(shape)) is not None]
        return torch.stack(known).all(0) if known else None


class Either(Combination):
    """The union of neighbourhoods, `a | b`: pairs that some part allows."""

    symbol = "|"

    def __init__(self, *parts: Neighbourhood) -> None:
        super().__init__(*parts)
        self.full = any(part.full for part in parts)
        # intervals with a common key leave no gap between them
        self.exact = self.full or (all(part.exact for part in parts) and bool(self.anchors))

    @staticmethod
    def join(a: Tensor, b: Tensor) -> Tensor:
        return a | b

    @property
    def anchors(self) -> frozenset[str]:
        return frozenset.intersection(*(part.anchors for part in self.parts))

    def interval(self, queries: int, keys: int, device: torch.device) -> KeyInterval:
        first, stop = _ends_of_keys(self.parts[0].interval(queries, keys, device), keys)
        for part in self.parts[1:]:
            a, b = _ends_of_keys(part.interval(queries, keys, device), keys)
            first, stop = torch.minimum(first, a), torch.maximum(stop, b)
        return first, torch.maximum(first, stop)

    @property
    def band(self) -> Band:
        return unite_bands([part.band for part in self.parts])

    def unpadded_queries(self, shape: tuple[int, ...]) -> Bool[Tensor, "... queries"] | None:
        # a query is padding where every part says so
        known = [part.unpadded_queries(shape) for part in self.parts]
        real = [x for x in known if x is not None]
        return torch.stack(real).any(0) if len(real) == len(known) else None


class Complement(Neighbourhood):
    """The complement of a neighbourhood, `~a`: the pairs that it does not allow."""

    tensors = ("over",)

    def __init__(self, over: Neighbourhood) -> None:
        self.over, self.by_head, self.along_keys = over, over.by_head, over.along_keys
        # what an interval that touches either end of the keys leaves is an interval
        self.exact = over.full or (over.exact and not over.anchors.isdisjoint(("first", "last")))

    def _restore(self, state: dict[str, Any]) -> None:
        if not isinstance(state["over"], Neighbourhood):
            raise ValueError(f"Complement: over must be a neighbourhood, got {state['over']!r:.80}")
        Complement.__init__(self, state["over"])

    def __invert__(self) -> Neighbourhood:
        return self.over

    @property
    def anchors(self) -> frozenset[str]:
        opposite = {"first": "last", "last": "first"}
        return frozenset(opposite[end] for end in self.over.anchors if end in opposite)

    @property
    def lattice(self) -> Lattice | None:
        return self.over.lattice

    def allows(self, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return ~self.over.allows(head, query, key)

    def allows_pairs(self, query: Tensor, key: Tensor, heads: int = 1) -> Tensor:
        return ~self.over.allows_pairs(query, key, heads)

    def mask_mod(self, sizes: Sizes, device: torch.device) -> MaskMod:
        mod = self.over.mask_mod(sizes, device)
        return lambda row, head, query, key: ~mod(row, head, query, key)

    def check(self, sizes: Sizes) -> None:
        self.over.check(sizes)

    def check_device(self, device: torch.device) -> None:
        self.over.check_device(device)

    def interval(self, queries: int, keys: int, device: torch.device) -> KeyInterval:
        first, stop = super().interval(queries, keys, device)
        if self.over.full:
            return first, first
        if not self.over.exact:
            return first, stop
        low, high = _ends_of_keys(self.over.interval(queries, keys, device), keys)
        empty = high <= low
        # the keys after an interval that begins at the first key, those before one that ends at the last
        first = torch.where(~empty & (low <= 0), high, 0)
        stop = torch.where(~empty & (high >= keys), low, keys)
        return first, torch.maximum(first, stop)

    def leaves(self) -> tuple[Tensor, ...]:
        return self.over.leaves()

    def map_over(self, function: Callable[[Neighbourhood], Neighbourhood]) -> Neighbourhood:
        """The complement of another neighbourhood; itself if the function does not change it."""
        over = function(self.over)
        return self if over is self.over else Complement(over)

    def select_batch_rows(self, batch: tuple[int, ...], at: tuple[slice, ...]) -> Neighbourhood:
        return self.map_over(lambda over: over.select_batch_rows(batch, at))

    def bind_self_attention(self, self_attention: bool) -> Neighbourhood:
        return self.map_over(lambda over: over.bind_self_attention(self_attention))

    def bind_sizes(self, sizes: Sizes) -> Neighbourhood:
        return self.map_over(lambda over: over.bind_sizes(sizes))

    def __repr__(self) -> str:
        return f"~{_repr_of_part(self.over)}"


def _repr_of_part(part: Neighbourhood) -> str:
    return f"({part!r})" if isinstance(part, Combination) else repr(part)


def _ends_of_keys(interval: KeyInterval, keys: int) -> KeyInterval:
    """An interval within the keys; an empty one as `[keys, 0)`, which widens no hull."""
    first, stop = (end.clamp(0, keys) for end in torch.broadcast_tensors(*interval))
    empty = stop <= first
    return first.masked_fill(empty, keys), stop.masked_fill(empty, 0)
