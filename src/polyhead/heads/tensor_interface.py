"""A view as the tensor that it stands for: it has the weights' shape, indexes like them, and becomes them where needed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from polyhead.heads.indexing import chosen, narrowed, one
from polyhead.metrics.compute import AnyPart

if TYPE_CHECKING:
    import numpy as np


class AsTensor(ABC):
    """What makes `Heads` pass for its weights; they are computed when a number is asked for."""

    _part: AnyPart

    @property
    @abstractmethod
    def weights(self) -> Tensor: ...

    @abstractmethod
    def numpy(self) -> np.ndarray[Any, Any]: ...

    @abstractmethod
    def _fresh(self, *also: str) -> AnyPart: ...

    @property
    def shape(self) -> torch.Size:
        return self._part.shape

    def __getitem__(self, index: Any) -> Tensor:
        """Part of the weights; numbers and slices compute no more than they name."""
        given = index if isinstance(index, tuple) else (index,)
        plain = all(i is Ellipsis or (isinstance(i, (int, slice)) and not isinstance(i, bool)) for i in given)
        if not plain or len(given) > len(self.shape) + 1 or given.count(Ellipsis) > 1:
            return self.weights[index]
        place = given.index(Ellipsis) if Ellipsis in given else len(given)
        behind = len(given) - place - 1 if Ellipsis in given else 0
        filled = (*given[:place], *[slice(None)] * (len(self.shape) - place - behind), *given[len(given) - behind :])
        if len(filled) != len(self.shape):
            raise IndexError(f"too many indices: {len(given)} for a view of {len(self.shape)} axes")
        slices = [one(i, n) if isinstance(i, int) else i for i, n in zip(filled, self.shape, strict=True)]
        own = len(self._part.axes)
        part = narrowed(self._fresh(), slices[:-own])
        for axis, s in zip(part.axes, slices[-own:], strict=True):
            if s != slice(None):
                part = chosen(part, axis, part.numbers(axis)[s])
        w = part.weights().to(self.dtype)
        return w[tuple(0 if isinstance(i, int) else slice(None) for i in filled)]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_heads = lambda x: isinstance(x, AsTensor)
        to_tensor = lambda x: x.weights if isinstance(x, AsTensor) else x
        args, kwargs = pytree.tree_map(to_tensor, (tuple(args), kwargs or {}), is_leaf=is_heads)
        return func(*args, **kwargs)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        array = self.numpy()
        return array if dtype is None else array.astype(dtype)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not hasattr(Tensor, name):
            raise AttributeError(f"Heads has no attribute {name!r}")
        if name.endswith("_"):
            raise AttributeError(
                f"Heads is a view that is computed anew: {name}() would change nothing; use heads.weights"
            )
        return getattr(self.weights, name)

    def __bool__(self) -> bool:
        return bool(self.weights)

    @property
    def requires_grad(self) -> bool:
        call = self._part.call
        learned = (call.q, call.k, call.table, call.bias, call.sink, *call.score.learned(), *call.over.leaves())
        return any(x is not None and x.requires_grad for x in learned)

    def numel(self) -> int:
        return self.shape.numel()

    @property
    def dtype(self) -> torch.dtype:
        return self._part.call.q.dtype

    @property
    def device(self) -> torch.device:
        return self._part.call.q.device

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def dim(self) -> int:
        return len(self.shape)

    def size(self, dim: int | None = None) -> torch.Size | int:
        return self.shape if dim is None else self.shape[dim]

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Iterator[Tensor]:
        return (self[i] for i in range(len(self)))


def _as_tensor(name: str) -> Callable[..., Any]:
    method = getattr(Tensor, name)

    def apply(self: AsTensor, *others: Any) -> Any:
        return method(self.weights, *(other.weights if isinstance(other, AsTensor) else other for other in others))

    return apply


for _name in (
    ["add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "matmul", "rmatmul", "pow", "neg", "abs", "eq", "ne", "lt", "le", "gt", "ge"]
):  # fmt: skip
    setattr(AsTensor, f"__{_name}__", _as_tensor(f"__{_name}__"))
