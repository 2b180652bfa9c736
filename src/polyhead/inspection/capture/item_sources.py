"""Whether the queries and keys of an attention call are the same items: trace both back to the tensor they were projected from."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

# Products: a product with a weight is a projection, a product of two activations mixes items.
_PRODUCTS = {
    F.linear, F.bilinear, F.conv1d, F.conv2d, F.conv3d, torch.conv1d, torch.conv2d, torch.conv3d, torch.einsum,
    *(getattr(torch, name) for name in ("matmul", "mm", "bmm", "addmm", "baddbmm", "addbmm", "tensordot")),
    *(getattr(Tensor, name) for name in ("matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "addmm", "baddbmm")),
}  # fmt: skip
# Functions that take a part of the items, or change their order.
_PART_FUNCTIONS = {
    *(getattr(owner, name) for owner in (torch, Tensor) for name in (
        "roll", "flip", "gather", "index_select", "take_along_dim", "masked_select", "chunk", "split", "unbind", "narrow",
        "select", "tensor_split",
    )),
    Tensor.__getitem__, torch.sort, Tensor.sort, torch.topk, Tensor.topk,
}  # fmt: skip
_EMBEDDINGS = {F.embedding, F.embedding_bag}


class ItemSource(NamedTuple):
    """The items of a tensor: those of one earlier tensor, item by item.

    Attributes:
        number: identifies the earlier tensor.
        parents: the sources that were mixed to make it.
        projected: whether a weight was applied since, as in q, k and v before they are split.
    """

    number: int
    parents: frozenset[int] = frozenset()
    projected: bool = False


class ItemTracker:
    """Follows the items of tensors through torch functions. Tensors are not kept alive."""

    def __init__(self) -> None:
        self._sources = WeakIdKeyDictionary()
        self._weights = WeakIdKeyDictionary()
        self._count = 0

    def are_same_items(self, q: Tensor, k: Tensor) -> bool | None:
        """Whether two tensors hold the same items; None if that is not known."""
        if q is k:
            return True
        a, b = self.source(q), self.source(k)
        if a is None or b is None:
            return None
        if a.number == b.number:
            return True
        related = {a.number, *a.parents} & {b.number, *b.parents}
        return None if related else False

    def source(self, x: Tensor) -> ItemSource | None:
        """The source of a tensor's items; None if no projection or function with weights led to it."""
        found: ItemSource | None = self._sources.get(x)
        return found

    def is_weight(self, x: Tensor) -> bool:
        """Whether a tensor is a parameter, or was computed from parameters alone."""
        return isinstance(x, nn.Parameter) or x in self._weights

    def process_call(self, function: Any, tensors: list[Tensor], results: list[Tensor]) -> None:
        """Process one call of a torch function: its results have the items of its arguments."""
        weights, activations = [], []
        for x in tensors:
            if self.is_weight(x):
                weights.append(x)
            elif x.is_floating_point():
                activations.append(x)
        if not activations:
            self._process_weights(function, weights, results)
            return
        source = self._source_of_result(function, activations, bool(weights))
        if source is None:
            return
        for x in results:
            # each part of the items is a source of its own; q, k and v are parts of features
            is_part = function in _PART_FUNCTIONS and not source.projected
            self._sources[x] = self._new_source({source.number}) if is_part else source

    def _process_weights(self, function: Any, weights: list[Tensor], results: list[Tensor]) -> None:
        for x in results:
            if function in _EMBEDDINGS:
                self._sources[x] = self._new_source()
            elif weights and not isinstance(x, nn.Parameter):
                self._weights[x] = True

    def _source_of_result(self, function: Any, activations: list[Tensor], weighted: bool) -> ItemSource | None:
        known = [source for source in map(self.source, activations) if source is not None]
        if function in _PRODUCTS and not weighted and len(activations) > 1:
            return self._new_source({source.number for source in known}) if known else None
        if not known:
            if not weighted:
                return None
            # the first function with weights: its input is a source
            known = [self._new_source()]
            for x in activations:
                self._sources[x] = known[0]
        numbers = {source.number for source in known}
        if len(numbers) > 1:
            return self._new_source(numbers)
        projected = (weighted and function in _PRODUCTS) or all(source.projected for source in known)
        return known[0]._replace(projected=projected)

    def _new_source(self, parents: Iterable[int] = ()) -> ItemSource:
        self._count += 1
        return ItemSource(self._count, frozenset(parents))


def collect_tensors(values: Iterable[Any]) -> list[Tensor]:
    """The tensors among these values, and in lists and tuples of them."""
    found = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += [x for x in value if isinstance(x, Tensor)]
    return found
