"""Keys and values as rows that can be sent: one row per item, with the features of the whole batch and of all heads."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor


class KeyValueRows:
    """Packs keys and values of some shapes into rows, and rows into keys and values. Values that are the keys travel once."""

    def __init__(
        self, k: Float[Tensor, "batch key_heads items dim"], v: Float[Tensor, "batch value_heads items value_dim"]
    ) -> None:
        self._k, self._v = (x.shape[:2] + x.shape[3:] for x in (k, v))
        self.values_are_keys = v is k
        self.features = self._k.numel() + (0 if self.values_are_keys else self._v.numel())

    def pack(self, k: Tensor, v: Tensor) -> Float[Tensor, "items features"]:
        parts = [x.permute(2, 0, 1, 3).flatten(1) for x in ((k,) if self.values_are_keys else (k, v))]
        return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts, 1)

    def unpack(self, rows: Float[Tensor, "items features"]) -> tuple[Tensor, Tensor]:
        """Keys and values that share the memory of the rows."""
        split = self._k.numel()
        k = rows[:, :split].unflatten(1, self._k).permute(1, 2, 0, 3)
        return k, k if self.values_are_keys else rows[:, split:].unflatten(1, self._v).permute(1, 2, 0, 3)

    def zeros(self, items: int, like: Tensor) -> Float[Tensor, "items features"]:
        """Rows of zeros in at least fp32, for gradients."""
        dtype = torch.promote_types(like.dtype, torch.float32)
        return torch.zeros(items, self.features, dtype=dtype, device=like.device)
