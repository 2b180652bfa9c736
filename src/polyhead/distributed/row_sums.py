"""Sums and merges of blocks of rows into whole tensors, in at least fp32, without first filling these with zeros."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor


class WrittenRows:
    """Which rows of a tensor hold numbers; the others are uninitialised."""

    def __init__(self, rows: int) -> None:
        self._is_written = torch.zeros(rows, dtype=torch.bool)

    def any_in(self, rows: slice) -> bool:
        return bool(self._is_written[rows].any())

    def mark(self, rows: slice) -> None:
        self._is_written[rows] = True

    def missing(self, rows: slice) -> Tensor | None:
        """The indices of rows that are not written; None if there are none."""
        found = (~self._is_written[rows]).nonzero()[:, 0]
        return found + (rows.start or 0) if len(found) else None


class RowSum:
    """A sum of blocks of rows (batch, heads, rows, dim). Rows that no block adds to are zero."""

    def __init__(self, total: Float[Tensor, "batch heads rows dim"]) -> None:
        """`total` is uninitialised."""
        self._total, self._written = total, WrittenRows(total.shape[-2])

    def add(self, rows: slice, x: Float[Tensor, "batch heads some dim"]) -> None:
        part = self._total[..., rows, :]
        if not self._written.any_in(rows):
            part.copy_(x)
        else:
            self._fill(rows)
            part += x
        self._written.mark(rows)

    def total(self) -> Float[Tensor, "batch heads rows dim"]:
        self._fill(slice(0, self._total.shape[-2]))
        return self._total

    def _fill(self, rows: slice) -> None:
        missing = self._written.missing(rows)
        if missing is not None:
            self._total.index_fill_(-2, missing.to(self._total.device), 0.0)
            self._written.mark(rows)


class RowMerge:
    """Merges the outputs of blocks of keys: each block's share of a row is exp(its lse - lse of the row)."""

    def __init__(
        self, q: Float[Tensor, "batch heads queries dim"], v: Float[Tensor, "batch heads keys value_dim"]
    ) -> None:
        self._out = empty_rows(q, v.shape[-1])
        self._lse = q.new_full(q.shape[:-1], -torch.inf, dtype=self._out.dtype)
        self._written = WrittenRows(q.shape[-2])

    def add(self, queries: slice, out: Tensor, lse: Tensor) -> None:
        """Add the output of a block for some of the queries."""
        if not self._written.any_in(queries):
            self._out[..., queries, :].copy_(out)
            self._lse[..., queries].copy_(lse)
        else:
            self._fill(queries)
            own_out, own_lse = self._out[..., queries, :], self._lse[..., queries]
            merged = torch.logaddexp(own_lse, lse)
            # NaN where both are -inf: a row without a key has no share
            before, new = ((x - merged).exp().nan_to_num_(0.0)[..., None] for x in (own_lse, lse))
            own_out.mul_(before).addcmul_(out.to(own_out.dtype), new)
            own_lse.copy_(merged)
        self._written.mark(queries)

    def result(self) -> tuple[Float[Tensor, "batch heads queries value_dim"], Float[Tensor, "batch heads queries"]]:
        """The output and the log-sum-exp of whole rows: zeros and -inf without a key."""
        self._fill(slice(0, self._out.shape[-2]))
        return self._out, self._lse

    def _fill(self, queries: slice) -> None:
        missing = self._written.missing(queries)
        if missing is not None:
            self._out.index_fill_(-2, missing.to(self._out.device), 0.0)


def empty_rows(
    x: Float[Tensor, "batch heads rows dim"], width: int | None = None
) -> Float[Tensor, "batch heads rows width"]:
    """An uninitialised tensor shaped like `x`, in at least fp32 and with heads inside rows, as kernels lay out their outputs."""
    batch, heads, rows, dim = x.shape
    dtype = torch.promote_types(x.dtype, torch.float32)
    return x.new_empty(batch, rows, heads, dim if width is None else width, dtype=dtype).transpose(1, 2)
