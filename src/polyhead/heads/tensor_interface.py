"""A view as a tensor: it has the shape of the weights, can be indexed like them, and is converted to them where needed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from polyhead.heads.indexing import unit_slice
from polyhead.metrics.attention_parts import Part, select_batch_rows

if TYPE_CHECKING:
    import numpy as np


class TensorInterface(ABC):
    """The tensor interface of `Heads`: the weights are computed when their values are needed."""

    _part: Part

    @property
    @abstractmethod
    def weights(self) -> Tensor: ...

    @abstractmethod
    def numpy(self) -> np.ndarray[Any, Any]: ...

    @abstractmethod
    def _part_if_unchanged(self, *also: str) -> Part: ...

    @property
    def shape(self) -> torch.Size:
        return self._part.shape

    def __getitem__(self, index: Any) -> Tensor:
        """Part of the weights; integers and slices compute only the part that they select."""
        indices = index if isinstance(index, tuple) else (index,)
        basic = all(i is Ellipsis or (isinstance(i, (int, slice)) and not isinstance(i, bool)) for i in indices)
        if not basic or len(indices) > len(self.shape) + 1 or indices.count(Ellipsis) > 1:
            return self.weights[index]
        before = indices.index(Ellipsis) if Ellipsis in indices else len(indices)
        after = len(indices) - before - 1 if Ellipsis in indices else 0
        omitted = [slice(None)] * (len(self.shape) - before - after)
        full = (*indices[:before], *omitted, *indices[len(indices) - after :])
        if len(full) != len(self.shape):
            raise IndexError(f"too many indices: {len(indices)} for a view of {len(self.shape)} axes")
        slices = [unit_slice(i, n) if isinstance(i, int) else i for i, n in zip(full, self.shape, strict=True)]
        own = len(self._part.axes)
        part = select_batch_rows(self._part_if_unchanged(), tuple(slices[:-own]))
        for axis, s in zip(part.axes, slices[-own:], strict=True):
            if s != slice(None):
                part = part.select(axis, part.indices(axis)[s])
        w = part.weights().to(self.dtype)
        return w[tuple(0 if isinstance(i, int) else slice(None) for i in full)]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_heads = lambda x: isinstance(x, TensorInterface)
        to_tensor = lambda x: x.weights if isinstance(x, TensorInterface) else x
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
                f"Heads is a read-only view: {name}() would change nothing; call it on a tensor, heads.weights"
            )
        return getattr(self.weights, name)

    def __bool__(self) -> bool:
        return bool(self.weights)

    @property
    def requires_grad(self) -> bool:
        call = self._part.call
        sources = (call.q, call.k, call.relative_bias, call.bias, call.sink, *call.score.learned(), *call.over.leaves())
        return any(x is not None and x.requires_grad for x in sources)

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


def _apply_to_weights(name: str) -> Callable[..., Any]:
    method = getattr(Tensor, name)

    def apply(self: TensorInterface, *others: Any) -> Any:
        return method(
            self.weights, *(other.weights if isinstance(other, TensorInterface) else other for other in others)
        )

    return apply


for _name in (
    ["add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "matmul", "rmatmul", "pow", "neg", "abs", "eq", "ne", "lt", "le", "gt", "ge"]
):  # fmt: skip
    setattr(TensorInterface, f"__{_name}__", _apply_to_weights(f"__{_name}__"))
