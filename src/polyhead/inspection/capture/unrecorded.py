"""Notice attention that is not recorded: a softmax over keys, or over the edges of a node, whose result weights other activations."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from polyhead.inspection.capture.item_sources import ItemTracker


def _functions(*names: str) -> set[Any]:
    """The functions of these names in `torch`, `Tensor` and `torch.nn.functional`."""
    owners = (torch, Tensor, F)
    return {getattr(owner, name) for name in names for owner in owners if hasattr(owner, name)}


_SOFTMAX = _functions("softmax")
_MATRIX_PRODUCTS = _functions("matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "einsum", "baddbmm")
_LINEAR_MAPS = _functions("linear", "addmm", "matmul", "__matmul__", "mm", "einsum")
_MULTIPLICATION = _functions("mul", "multiply", "__mul__", "__rmul__", "__imul__", "mul_")
_DIVISION = _functions("div", "divide", "true_divide", "__truediv__", "div_", "__itruediv__")
_EXPONENTIAL = _functions("exp", "exp_", "exp2")
_SUMS = _functions(
    "sum", "scatter_add", "scatter_add_", "index_add", "index_add_", "scatter_reduce", "scatter_reduce_", "segment_reduce"
)  # fmt: skip
# They leave a weight what it is: layouts, casts, dropout, masks of weights, copies along edges.
_PASSING = _functions(
    "transpose", "permute", "movedim", "swapaxes", "reshape", "view", "flatten", "unflatten", "contiguous", "clone", "squeeze",
    "unsqueeze", "to", "type_as", "type", "float", "half", "bfloat16", "double", "dropout", "dropout_", "nan_to_num", "masked_fill",
    "masked_fill_", "expand", "expand_as", "index_select", "gather", "__getitem__", "detach", "view_as", "add", "__add__", "clamp",
    "repeat_interleave", "unsqueeze_",
)  # fmt: skip
# They leave class scores what they are: one number per class along the last axis.
_SCORE_PASSING = (
    _functions("to", "float", "add", "__add__", "__iadd__", "sub", "__sub__", "masked_fill", "clone", "type_as")
    | _DIVISION
    | _MULTIPLICATION
)


class UnrecordedAttention:
    """Recognises attention that is computed without a recorded function."""

    def __init__(self, items: ItemTracker) -> None:
        self._items = items
        # tensors by what they are; none is kept alive
        self._class_scores = WeakIdKeyDictionary()
        self._exponentials = WeakIdKeyDictionary()
        self._sums = WeakIdKeyDictionary()
        self._weights = WeakIdKeyDictionary()
        self._number = 0

    def process_call(self, function: Any, tensors: list[Tensor], dim: object, result: Tensor) -> bool:
        """Process one call of a torch function; return whether it multiplies attention weights with values.

        Args:
            function: the function that was called.
            tensors: its tensor arguments.
            dim: its argument `dim`, or its second argument.
            result: its result.
        """
        if function in _SOFTMAX:
            # over the outputs of a linear map: a router, a classifier or a sampler
            over_classes = tensors[0] in self._class_scores and dim in (-1, tensors[0].dim() - 1)
            if not over_classes:
                self._weights[result] = False
            return False
        self._follow_class_scores(function, tensors, result)
        self._follow_segment_softmax(function, tensors, result)
        weight = next((x for x in tensors if x in self._weights), None)
        if weight is None:
            return False
        is_segmented = self._weights[weight]
        others = [
            x for x in tensors if x is not weight and x not in self._weights and self._items.source(x) is not None
        ]
        if others and (function in _MATRIX_PRODUCTS or (is_segmented and function in _MULTIPLICATION)):
            del self._weights[weight]
            return True
        if function in _PASSING or (function in _MULTIPLICATION and not others):
            self._weights[result] = is_segmented
        return False

    def _follow_class_scores(self, function: Any, tensors: list[Tensor], result: Tensor) -> None:
        projects = function in _LINEAR_MAPS and any(self._items.is_weight(x) for x in tensors)
        passes = function in _SCORE_PASSING and any(x in self._class_scores for x in tensors)
        if (projects and result.dim() and result.shape[-1] > 1) or passes:
            self._class_scores[result] = True

    def _follow_segment_softmax(self, function: Any, tensors: list[Tensor], result: Tensor) -> None:
        """exp(s) / sum of exp(s), with the sum over an axis or over the edges of each node."""
        if function in _EXPONENTIAL:
            self._number += 1
            self._exponentials[result] = self._number
            return
        summed = next((self._sums[x] for x in tensors if x in self._sums), None)
        exponential = next((self._exponentials[x] for x in tensors if x in self._exponentials), None)
        if function in _DIVISION and exponential is not None and summed is not None and exponential == summed[0]:
            self._weights[result] = summed[1]
        elif function in _SUMS and exponential is not None:
            self._sums[result] = (exponential, len(tensors) > 1)
        elif summed is not None and function in _PASSING:
            self._sums[result] = summed
