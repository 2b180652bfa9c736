"""Keys and values as rows that can be sent: one row per item, with the features of the whole batch and of all heads."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from polyhead.distributed.row_sums import RowSum


class KeyValueRows:
    """Packs keys and values of some shapes into rows, and rows into keys and values. Values that are the keys travel once."""

    def __init__(
        self, k: Float[Tensor, "batch key_heads items dim"], v: Float[Tensor, "batch value_heads items value_dim"]
    ) -> None:
        self._k, self._v = (x.shape[:2] + x.shape[3:] for x in (k, v))
        self.values_are_keys = v is k
        self.features = self._k.numel() + (0 if self.values_are_keys else self._v.numel())

    def pack(self, k: Tensor, v: Tensor, index: Int[Tensor, " some"] | None = None) -> Float[Tensor, "some features"]:
        """The rows of all items, or of some."""
        parts = [x.permute(2, 0, 1, 3) for x in ((k,) if self.values_are_keys else (k, v))]
        if index is not None:
            parts = [x.index_select(0, index.to(x.device)) for x in parts]
        flat = [x.flatten(1) for x in parts]
        return flat[0].contiguous() if len(flat) == 1 else torch.cat(flat, 1)

    def unpack(self, rows: Float[Tensor, "items features"]) -> tuple[Tensor, Tensor]:
        """Keys and values that share the memory of the rows."""
        split = self._k.numel()
        k = rows[:, :split].unflatten(1, self._k).permute(1, 2, 0, 3)
        return k, k if self.values_are_keys else rows[:, split:].unflatten(1, self._v).permute(1, 2, 0, 3)

    def empty_sum(self, items: int, like: Tensor) -> KeyValueSum:
        """A sum of the gradients of `items` keys and values, in at least fp32, to which nothing has been added."""
        dtype = torch.promote_types(like.dtype, torch.float32)
        return KeyValueSum(self, torch.empty(items, self.features, dtype=dtype, device=like.device))


class KeyValueSum:
    """The gradients of keys and values, summed over blocks into rows that can be sent."""

    def __init__(self, layout: KeyValueRows, rows: Float[Tensor, "items features"]) -> None:
        """`rows` is uninitialised."""
        self._rows, k, v = rows, *layout.unpack(rows)
        self._k = RowSum(k)
        self._v = self._k if layout.values_are_keys else RowSum(v)

    def add(self, items: slice, dk: Tensor, dv: Tensor) -> None:
        self._k.add(items, dk)
        self._v.add(items, dv)

    def total(self) -> Float[Tensor, "items features"]:
        self._k.total()
        self._v.total()
        return self._rows
