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

    def sum_of_rows(self, items: int, like: Tensor) -> KeyValueSum:
        """A sum of the gradients of `items` keys and values, as rows that can be sent, in at least fp32."""
        dtype = torch.promote_types(like.dtype, torch.float32)
        rows = torch.empty(items, self.features, dtype=dtype, device=like.device)
        k, v = self.unpack(rows)
        return KeyValueSum(self, RowSum(k, k), None if self.values_are_keys else RowSum(v, v), rows)

    def own_sum(self, k: Tensor, v: Tensor, target: tuple[Tensor, ...] | None = None) -> KeyValueSum:
        """A sum of the gradients of these keys and values, in the memory of `target` if given."""
        into = (None, None) if target is None else target
        return KeyValueSum(self, RowSum(k, into[0]), None if self.values_are_keys else RowSum(v, into[1]))


class KeyValueSum:
    """The gradients of keys and values, summed over blocks."""

    def __init__(self, layout: KeyValueRows, k: RowSum, v: RowSum | None, rows: Tensor | None = None) -> None:
        """`v` is None where the values are the keys; `rows` is the memory of both, if they share it."""
        self._layout, self._k, self._v, self._rows = layout, k, v, rows

    def add(self, items: slice, dk: Tensor, dv: Tensor) -> None:
        self._k.add(items, dk)
        (self._v or self._k).add(items, dv)

    def add_rows(self, items: Int[Tensor, " some"], rows: Float[Tensor, "some features"]) -> None:
        """Add gradients that arrived as rows."""
        if len(rows):
            dk, dv = self._layout.unpack(rows)
            self._k.add_at(items.to(rows.device), dk)
            if self._v is not None:
                self._v.add_at(items.to(rows.device), dv)

    def total(self) -> tuple[Tensor, Tensor | None]:
        """The gradients of k and v; None for v where the values are the keys."""
        return self._k.total(), None if self._v is None else self._v.total()

    def total_rows(self) -> Float[Tensor, "items features"]:
        assert self._rows is not None
        self.total()
        return self._rows
