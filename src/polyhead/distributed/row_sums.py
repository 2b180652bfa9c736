"""Sums and merges of blocks of rows into whole tensors, in at least fp32, without first filling these with zeros."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor


class WrittenRows:
    """Which rows of a tensor hold numbers; the others are uninitialised."""

    def __init__(self, rows: int) -> None:
        self._is_written = torch.zeros(rows, dtype=torch.bool)

    def any_in(self, rows: slice) -> bool:
        return bool(self._is_written[rows].any())

    def mark(self, rows: slice) -> None:
        self._is_written[rows] = True

    def indices(self) -> Int[Tensor, " written"]:
        return self._is_written.nonzero()[:, 0]

    def missing(self, rows: slice) -> Tensor | None:
        """The indices of rows that are not written; None if there are none."""
        found = (~self._is_written[rows]).nonzero()[:, 0]
        return found + (rows.start or 0) if len(found) else None


class RowSum:
    """A sum of blocks of rows (batch, heads, rows, dim), in at least fp32. Rows that no block adds to are zero.

    The first block that has all rows becomes the sum, without a copy, unless there is a `target`.
    """

    def __init__(
        self, like: Float[Tensor, "batch heads rows dim"], target: Float[Tensor, "batch heads rows dim"] | None = None
    ) -> None:
        """`like` has the shape of the sum, `target` is where it is to be: uninitialised memory."""
        self._like, self._total, self._written = like, target, WrittenRows(like.shape[-2])
        self._can_move = target is None

    def add(self, rows: slice, x: Float[Tensor, "batch heads some dim"]) -> None:
        """Add a block, and take over its memory: nobody else may hold it."""
        if self._can_move and _is_whole(rows, x, self._like):
            before, self._total, self._can_move = self._total, x, False
            written = self._written.indices()
            if before is not None and len(written):
                written = written.to(x.device)
                x.index_add_(-2, written, before.index_select(-2, written))
            self._written.mark(rows)
            return
        if self._total is None:
            self._total = empty_rows(self._like)
        part = self._total[..., rows, :]
        if not self._written.any_in(rows):
            part.copy_(x)
        else:
            self._fill(rows)
            part += x
        self._written.mark(rows)

    def add_at(self, rows: Int[Tensor, " some"], x: Float[Tensor, "batch heads some dim"]) -> None:
        """Add to single rows, of which one may occur several times."""
        self.total().index_add_(-2, rows, x)

    def total(self) -> Float[Tensor, "batch heads rows dim"]:
        if self._total is None:
            self._total = empty_rows(self._like)
        self._fill(slice(0, self._total.shape[-2]))
        return self._total

    def _fill(self, rows: slice) -> None:
        missing = self._written.missing(rows)
        if missing is not None:
            assert self._total is not None
            self._total.index_fill_(-2, missing.to(self._total.device), 0.0)
            self._written.mark(rows)


class RowMerge:
    """Merges the outputs of blocks of keys: each block's share of a row is exp(its lse - lse of the row).

    A first block that has all rows becomes the output, without a copy, unless there is a `target`.
    """

    def __init__(
        self,
        q: Float[Tensor, "batch heads queries dim"],
        v: Float[Tensor, "batch heads keys value_dim"],
        target: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        """`target` is where output and log-sum-exp are to be: uninitialised memory."""
        self._q, self._width, self._written = q, v.shape[-1], WrittenRows(q.shape[-2])
        self._target = target

    def add(self, queries: slice, out: Tensor, lse: Tensor) -> None:
        """Add the output of a block for some of the queries, and take over the memory of both: nobody else may hold it."""
        if self._target is None:
            if _is_whole(queries, out, self._q):
                self._target = out, lse
                self._written.mark(queries)
                return
            self._target = empty_merge(self._q, self._width)
        all_out, all_lse = self._target
        own_out, own_lse = all_out[..., queries, :], all_lse[..., queries]
        if not self._written.any_in(queries):
            own_out.copy_(out)
            own_lse.copy_(lse)
        else:
            self._fill(queries)
            merged = torch.logaddexp(own_lse, lse)
            # NaN where both are -inf: a row without a key has no share
            before, new = ((x - merged).exp().nan_to_num_(0.0)[..., None] for x in (own_lse, lse))
            own_out.mul_(before).addcmul_(out.to(own_out.dtype), new)
            own_lse.copy_(merged)
        self._written.mark(queries)

    def result(self) -> tuple[Float[Tensor, "batch heads queries value_dim"], Float[Tensor, "batch heads queries"]]:
        """The output and the log-sum-exp of whole rows: zeros and -inf without a key."""
        if self._target is None:
            self._target = empty_merge(self._q, self._width)
        self._fill(slice(0, self._q.shape[-2]))
        return self._target

    def _fill(self, queries: slice) -> None:
        missing = self._written.missing(queries)
        if missing is not None:
            assert self._target is not None
            out, lse = self._target
            missing = missing.to(out.device)
            out.index_fill_(-2, missing, 0.0)
            lse.index_fill_(-1, missing, -torch.inf)
            self._written.mark(queries)


def empty_merge(q: Float[Tensor, "batch heads queries dim"], width: int) -> tuple[Tensor, Tensor]:
    """Uninitialised memory for an output and its log-sum-exp."""
    out = empty_rows(q, width)
    return out, q.new_empty(q.shape[:-1], dtype=out.dtype)


def _is_whole(rows: slice, x: Tensor, like: Tensor) -> bool:
    """Whether a block has all rows, in the dtype of sums, and memory of its own for each number."""
    is_all = rows.start == 0 and rows.stop == like.shape[-2] == x.shape[-2]
    return is_all and x.dtype == torch.promote_types(like.dtype, torch.float32) and 0 not in x.stride()


def empty_rows(
    x: Float[Tensor, "batch heads rows dim"], width: int | None = None
) -> Float[Tensor, "batch heads rows width"]:
    """An uninitialised tensor shaped like `x`, in at least fp32 and with heads inside rows, as kernels lay out their outputs."""
    batch, heads, rows, dim = x.shape
    dtype = torch.promote_types(x.dtype, torch.float32)
    return x.new_empty(batch, rows, heads, dim if width is None else width, dtype=dtype).transpose(1, 2)
