"""One call of the operator `tiled`: its tiles, and what is added, forbidden and dropped in each of them.

On the CPU the tiles follow from the intervals of keys. On a device nothing is read, since the host would wait: the tiles are those
that `tiles_without_reading` gave the operator, or rows of all keys. NaN in forbidden pairs is then left out from the start.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from polyhead._torch import is_tracing_or_dataless
from polyhead.kernels.call import Call
from polyhead.kernels.dropout import head_numbers, keep_mask
from polyhead.kernels.tile_plan import Tile, flatten_tiles, plan_tiles, tiles_of_all_keys, unflatten_tiles

# Below this many products per batch row, a call of the fused kernel costs more than the work.
MIN_WORK_PER_ROW = 1 << 20
# Numbers of one tile on a device: fp32 of 128 MB, of which some are alive at a time.
MAX_DEVICE_TILE_NUMEL = 1 << 25
# Queries of one tile on a device where intervals slide: fewer waste less work outside of them, more need fewer launches.
DEVICE_BLOCK_QUERIES = 1024


class OperatorOptions(NamedTuple):
    """The arguments of the operator after q, k and v, in the order of its schema."""

    first: Tensor
    stop: Tensor
    mask: Tensor | None
    table: Tensor | None
    bias: Tensor | None
    seed: Tensor | None
    query_index: Tensor | None
    key_index: Tensor | None
    scale: float
    dropout: float
    plain: bool
    # on a device, tiles as `flatten_tiles` lists them, if the host knows them
    tiles: list[int]


class TiledProblem:
    """The tiles of one operator call, and the tensors of each tile."""

    def __init__(self, q: Tensor, keys: int, options: OperatorOptions, *, leave_out_hidden: bool = False) -> None:
        """With `leave_out_hidden`, tiles are computed in plain torch, and NaN in a forbidden pair goes nowhere."""
        self.mask, self.table, self.bias = options.mask, options.table, options.bias
        self.seed, self.scale, self.dropout = options.seed, options.scale, options.dropout
        self.query_index, self.key_index = options.query_index, options.key_index
        self.plain, self.leave_out_hidden = options.plain or leave_out_hidden, leave_out_hidden
        self.queries, self.keys, self.heads = q.shape[-2], keys, q.shape[-3]
        # bias and mask may exceed the range of bf16 or fp16
        self.dtype = torch.promote_types(q.dtype, torch.float32)
        self.device = q.device
        self._first, self._stop = options.first, options.stop
        self._last_band: tuple[tuple[int, bytes, bytes], Tensor] | None = None
        self._last_added: tuple[Tensor, Tensor] | None = None
        if q.is_cpu:
            self._plan_by_intervals(q)
        else:
            self.tiles = unflatten_tiles(options.tiles) or tiles_of_all_keys(
                q.shape[0], self.queries, keys, _device_block(q, keys, self.queries)
            )
            # whether NaN is anywhere is not read
            self.leave_out_hidden = self.has_forbidden_pairs

    def _plan_by_intervals(self, q: Tensor) -> None:
        low, high = (bound.numpy().clip(0, self.keys) for bound in (self._first, self._stop))
        small = q.shape[1] * q.shape[2] * self.keys * q.shape[3] < MIN_WORK_PER_ROW
        # a tile with something added is kept small: what is added is as large as its pairs
        nothing_added = self.mask is None and self.table is None and self.bias is None
        self.tiles = plan_tiles(
            low, high, q.shape[0], whole=not self.plain, together=small, split_keys=nothing_added and not self.plain
        )
        self._low, self._high = low, high

    @property
    def has_forbidden_pairs(self) -> bool:
        """Whether a tile contains forbidden pairs."""
        return self.mask is not None or any(tile.shape != "full" for tile in self.tiles)

    def additive_mask(self, tile: Tile, hidden: Tensor | None) -> Tensor | None:
        """The bias of a tile, -inf at hidden pairs; None if nothing is added."""
        add = None
        for part in (self._relative_bias_in_tile(tile), None if self.bias is None else slice_to_tile(self.bias, tile)):
            if part is not None:
                add = part.to(self.dtype) if add is None else add + part.to(self.dtype)
        if self.leave_out_hidden:
            # scores of hidden pairs are replaced, not added to
            return add
        if add is not None:
            # a sum would be NaN where the bias of a hidden pair is
            return add if hidden is None else torch.where(hidden, -torch.inf, add)
        return None if hidden is None else self._mask_as_scores(hidden)

    def _mask_as_scores(self, hidden: Tensor) -> Tensor:
        if self._last_added is None or self._last_added[0] is not hidden:
            added = torch.zeros(hidden.shape, dtype=self.dtype, device=self.device).masked_fill_(hidden, -torch.inf)
            self._last_added = hidden, added
        return self._last_added[1]

    def forbidden_pairs(self, tile: Tile) -> Tensor | None:
        """The forbidden pairs of a tile, (rows or 1, heads or 1, queries, keys); None if all are allowed.

        torch's kernel masks a causal tile itself.
        """
        by_interval = tile.shape == "ragged" or (self.plain and tile.shape == "causal")
        # on a device a mask says all
        by_interval = by_interval and (self.mask is None or self.mask.is_cpu)
        band = self._pairs_outside_intervals(tile) if by_interval else None
        keep = None if self.mask is None else slice_to_tile(self.mask, tile)
        if keep is None or (keep.is_cpu and keep.all()):
            return band
        return ~keep if band is None else band | ~keep

    def _pairs_outside_intervals(self, tile: Tile) -> Tensor:
        """The pairs outside the intervals, (rows or 1, 1, queries, keys); consecutive tiles of the same outline share it."""
        rows = slice(0, 1) if len(self._first) == 1 else slice(tile.b0, tile.b1)
        if not self._first.is_cpu:
            key = torch.arange(tile.k0, tile.k1, device=self.device)
            begin, end = (x[rows, None, tile.q0 : tile.q1, None] for x in (self._first, self._stop))
            return (key < begin) | (key >= end)
        low = self._low[rows, tile.q0 : tile.q1] - tile.k0
        high = self._high[rows, tile.q0 : tile.q1] - tile.k0
        outline = (tile.k1 - tile.k0, low.tobytes(), high.tobytes())
        if self._last_band is None or self._last_band[0] != outline:
            key = torch.arange(tile.k1 - tile.k0, device=self.device)
            begin, end = (torch.from_numpy(x.copy())[:, None, :, None] for x in (low, high))
            self._last_band = outline, (key < begin) | (key >= end)
        return self._last_band[1]

    def _relative_bias_indices(self, tile: Tile) -> Tensor:
        """For each pair of a tile, the index of its distance in the table."""
        query = torch.arange(tile.q0, tile.q1, device=self.device)[:, None] + (self.keys - self.queries)
        return torch.arange(tile.k0, tile.k1, device=self.device) - query + (self.keys - 1)

    def _relative_bias_in_tile(self, tile: Tile) -> Tensor | None:
        if self.table is None:
            return None
        # row i of the tile is a slice of the table that begins one entry before the slice of row i - 1
        left = tile.k0 - (tile.q1 - 1) + self.queries - 1
        entries = self.table[:, left : left + (tile.q1 - tile.q0) + (tile.k1 - tile.k0) - 1]
        return entries.unfold(-1, tile.k1 - tile.k0, 1).flip(-2)[None]

    def dropout_keep_mask(self, tile: Tile) -> Tensor | None:
        """The pairs of a tile that dropout keeps; None without dropout."""
        if self.dropout == 0:
            return None
        assert self.seed is not None
        head = head_numbers(self.seed, (tile.b1, self.heads), self.device)[tile.b0 :, :, None, None]
        query = self._item_numbers(self.query_index, tile.q0, tile.q1)
        return keep_mask(
            self.seed, head, query[:, None], self._item_numbers(self.key_index, tile.k0, tile.k1), self.dropout
        )

    def _item_numbers(self, index: Tensor | None, begin: int, end: int) -> Tensor:
        """The indices of some queries or keys in the whole attention."""
        return torch.arange(begin, end, device=self.device) if index is None else index[begin:end]

    def add_bias_gradients(self, tile: Tile, ds: Tensor, d_table: Tensor, d_bias: Tensor) -> None:
        """Add the gradient of a tile's scores to the gradients of the table and of the bias."""
        if d_table.numel():
            at = self._relative_bias_indices(tile).flatten().expand(self.heads, -1)
            d_table.scatter_add_(1, at, ds.sum(0).flatten(1).to(d_table.dtype))
        if d_bias.numel():
            into = slice_to_tile(d_bias, tile)
            into += ds.sum_to_size(into.shape).to(into.dtype)


def slice_to_tile(x: Tensor, tile: Tile) -> Tensor:
    """The part of (rows or 1, heads or 1, queries or 1, keys or 1) that a tile covers."""
    b, q, k = (tile.b0, tile.b1), (tile.q0, tile.q1), (tile.k0, tile.k1)
    for axis, (begin, end) in ((0, b), (2, q), (3, k)):
        if x.shape[axis] > 1:
            x = x.narrow(axis, begin, end - begin)
    return x


def tiles_without_reading(call: Call) -> list[int]:
    """The tiles of a call on a device by the intervals of a neighbourhood without tensors, which the host knows; else none.

    A compiled program works for any size: it gets none either.
    """
    batch, _, queries, keys = call.sizes
    if call.q.is_cpu or call.over.leaves() or is_tracing_or_dataless(call.q):
        return []
    first, stop = (x.numpy()[None] for x in call.over.interval(queries, keys, torch.device("cpu")))
    block = _device_block(call.q, keys, DEVICE_BLOCK_QUERIES)
    tiles = plan_tiles(first.clip(0, keys), stop.clip(0, keys), torch.Size(batch).numel(), block=block, whole=False)
    return flatten_tiles(tiles)


def _device_block(q: Tensor, keys: int, most: int) -> int:
    """The queries of one tile of all keys."""
    return max(1, min(most, MAX_DEVICE_TILE_NUMEL // max(1, q.shape[:-2].numel() * keys)))
