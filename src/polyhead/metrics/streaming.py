"""Numbers about heads in one pass: blocks of scores by torch's matrix product, each read once by C++ while it is in the cache.

With the log-sum-exp of each query, a weight is exp(score − lse): a block of scores tells all that there is to know of its
weights, and is forgotten. `metrics` has the definitions, and serves where this refuses.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from polyhead._torch import missing, native, values_unavailable
from polyhead.kernels.call import Call
from polyhead.kernels.reference import chosen
from polyhead.metrics.blockwise import cells, positive
from polyhead.score import Dot

# A block of scores: 8 MB of fp32. In smaller ones threads wait for each other, larger ones leave the cache.
_ROWS, _COLUMNS = 1024, 2048
# Queries whose columns are summed together: few leave much to add up, many keep threads waiting.
_CHUNK = 64
# The C++ has code for so many sums over keys.
MOST_SUMS = 4
# Fewer scores are not worth a second thread.
_PARALLEL = 1 << 15
_POINTERS = (
    "first", "stop", "key_bias", "most", "sum", "high", "low", "position", "row_weights", "key_weights", "row_sums",
    "column_sums", "top_score", "top_key",
)  # fmt: skip
# Stands for -inf in the C++.
_FAR = -1000.0


class PassRequest(NamedTuple):
    """What a pass is to find out besides entropy, distance and what keys receive."""

    # the largest so many of each query
    top: int = 0
    # heat-maps of at most so many cells each way
    cells: int = 0
    # sums over keys, weighted with these
    key_weights: Float[Tensor, "... heads sums keys"] | None = None
    # multiplies all weights: what a weight of 1 on a key moves
    moved: Float[Tensor, "... heads keys"] | None = None
    # a second heat-map, of weights times these
    key_scale: Float[Tensor, "... heads keys"] | None = None
    # what a query counts in what keys receive
    row_weights: Float[Tensor, "... heads queries"] | None = None


class PassResult(NamedTuple):
    """What a pass has found out."""

    entropy: Float[Tensor, "... heads queries"]
    distance: Float[Tensor, "... heads queries"]
    # of the keys' weights, for each of `key_weights`
    sums: Float[Tensor, "... heads queries sums"]
    received: Float[Tensor, "... heads keys"]
    heatmap: Float[Tensor, "... heads height width"]
    scaled_heatmap: Float[Tensor, "... heads height width"]
    # -1: there is no such key
    top: Float[Tensor, "... heads queries k"]
    top_keys: Int[Tensor, "... heads queries k"]
    # the log-sum-exp of each query is the sum of these two, which are more exact than it
    high: Float[Tensor, "... heads queries"]
    low: Float[Tensor, "... heads queries"]


def refuses(call: Call) -> str | None:
    """Why numbers about this attention cannot be had here; None where they can."""
    if native is None:
        return f"there are no C++ kernels: {missing}"
    if type(call.score) is not Dot:
        return f"it has no code for {type(call.score).__name__} scores"
    if not call.q.is_cpu or call.q.dtype == torch.float64:
        return f"it is for fp32 and halves on the CPU, and q is {call.q.dtype} on {call.q.device.type}"
    return "torch compiles or transforms the call" if values_unavailable() else None


def observe(
    call: Call,
    wanted: PassRequest,
    *,
    heads: Int[Tensor, " some"] | None = None,
    queries: Int[Tensor, " some"] | None = None,
    lse: Float[Tensor, "... heads queries"] | None = None,
) -> PassResult:
    """One pass over the scores of all heads and queries, or of some; two where their log-sum-exp is not given."""
    batch, number, rows, keys = call.sizes
    lead = (math.prod(batch), number if heads is None else len(heads), rows if queries is None else len(queries))
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        found = _room(lead, keys, wanted)
        if lse is not None:
            found.high.copy_(lse.reshape(found.high.shape))
        for row in range(lead[0]):
            scores, mine = _Scores(call, row, heads, queries), PassResult(*(x[row] for x in found))
            if lse is None:
                _scan(scores, mine)
            if call.sink is not None:
                sink = chosen(call.sink, -1, heads).float()
                torch.logaddexp(mine.low, sink[:, None] - mine.high, out=mine.low)
            _observe(scores, PassRequest(*(_of_row(x, row, batch) for x in wanted)), mine)
        found.top.exp_()
        found.top_keys.masked_fill_(found.top == 0, -1)
    return PassResult(*(x.unflatten(0, batch) if batch else x[0] for x in found))


def _of_row(x: Any, row: int, batch: tuple[int, ...]) -> Any:
    return x.reshape(-1, *x.shape[len(batch) :])[row].float().contiguous() if isinstance(x, Tensor) else x


def _room(lead: tuple[int, int, int], keys: int, wanted: PassRequest) -> PassResult:
    """Where the answers go: sums from zero."""
    batch, heads, queries = lead
    sums = 0 if wanted.key_weights is None else wanted.key_weights.shape[-2]
    cells = (min(wanted.cells, queries), min(wanted.cells, keys))
    by_row = torch.zeros(batch, heads, queries, 2 + sums)
    return PassResult(
        entropy=by_row[..., 0],
        distance=by_row[..., 1],
        sums=by_row[..., 2:],
        received=torch.zeros(batch, heads, keys),
        heatmap=torch.zeros(batch, heads, *cells),
        scaled_heatmap=torch.zeros(batch, heads, *(cells if wanted.key_scale is not None else (0, 0))),
        top=torch.full((batch, heads, queries, wanted.top), _FAR),
        top_keys=torch.full((batch, heads, queries, wanted.top), -1),
        high=torch.full(lead, -torch.inf),
        low=torch.zeros(lead),
    )


class _Block(NamedTuple):
    """Scores of some heads, queries and keys, which are numbered among those that are looked at."""

    heads: slice
    rows: slice
    columns: slice
    scores: Float[Tensor, "heads rows columns"]


class _Scores:
    """The scores of one row of the batch, block by block."""

    def __init__(
        self, call: Call, row: int, heads: Int[Tensor, " heads"] | None, queries: Int[Tensor, " queries"] | None
    ) -> None:
        batch, number, rows, self.keys = call.sizes
        at = tuple(slice(int(i), int(i) + 1) for i in np.unravel_index(row, batch)) if batch else ()
        q, self.k = (x[at].reshape(x.shape[-3:]) for x in (call.q, call.k))
        self.q = chosen(chosen(q, -3, heads), -2, queries)
        self.heads = torch.arange(number) if heads is None else heads
        self.queries = queries = torch.arange(rows) if queries is None else queries
        self.own = (self.heads // (number // len(self.k))).tolist()
        assert isinstance(call.score, Dot)
        self.call, self.factor = call, call.score.factor(q.shape[-1])
        self.position = queries + (self.keys - rows)
        self.over = call.over.rows(batch, at)
        first, stop = (x.reshape(-1, rows)[0, queries] for x in self.over.interval(rows, self.keys, call.q.device))
        self.first, self.stop = first.clamp(0, self.keys).int(), torch.maximum(first, stop).clamp(0, self.keys).int()
        bias = call.bias
        self.bias = None if bias is None else bias.expand(*batch, *bias.shape[-3:])[at].reshape(bias.shape[-3:])
        self.room = torch.empty(0)
        self._last: tuple[Any, Tensor] | None = None

    def blocks(self) -> Iterator[_Block]:
        """All scores that are not known to be -inf; a block is lost with the next."""
        rows, columns = min(_ROWS, len(self.queries)), min(_COLUMNS, self.keys)
        heads = max(1, _ROWS * _COLUMNS // max(1, rows * columns))
        for r in range(0, len(self.queries), rows):
            row = slice(r, min(r + rows, len(self.queries)))
            live = self.first[row] < self.stop[row]
            if not live.any():
                continue
            begin, end = int(self.first[row][live].min()), int(self.stop[row][live].max())
            for c in range(begin, end, columns):
                column = slice(c, min(c + columns, end))
                for h in range(0, len(self.heads), heads):
                    head = slice(h, min(h + heads, len(self.heads)))
                    yield _Block(head, row, column, self._scores(head, row, column))

    def _scores(self, heads: slice, rows: slice, columns: slice) -> Float[Tensor, "heads rows columns"]:
        q = self.q[heads, rows].float() * self.factor
        own = self.own[heads]
        k = self.k[own[0], columns][None] if len(own) == 1 else self.k[own, columns]
        size = (len(own), q.shape[1], k.shape[1])
        if self.room.numel() < math.prod(size):
            self.room = torch.empty(math.prod(size))
        s = torch.bmm(q, k.float().transpose(1, 2), out=self.room[: math.prod(size)].view(size))
        call, head, position = self.call, self.heads[heads], self.position[rows, None]
        key = torch.arange(columns.start, columns.stop)
        if call.table is not None:
            s += call.table[head].float()[:, key - position + (self.keys - 1)]
        if self.bias is not None:
            bias = self.bias if self.bias.shape[-1] == 1 else self.bias[..., columns]
            s += chosen(chosen(bias, -3, head), -2, self.queries[rows])
        if not self.over.exact:
            s.masked_fill_(self._hidden(head, rows, columns), -torch.inf)
        return s

    def _hidden(self, head: Int[Tensor, " heads"], rows: slice, columns: slice) -> Bool[Tensor, "#heads rows columns"]:
        """Which pairs of a block are not allowed; heads that see the same keys, one after the other, share it."""
        known = (rows, columns, tuple(head.tolist()) if self.over.by_head else None)
        if self._last is None or self._last[0] != known:
            key = torch.arange(columns.start, columns.stop)
            allowed = self.over.allows(head[:, None, None], self.position[rows, None], key)
            self._last = known, ~allowed.reshape(allowed.shape[-3:])
        return self._last[1]


def _scan(scores: _Scores, found: PassResult) -> None:
    """The log-sum-exp of each query."""
    total = torch.zeros_like(found.high)
    for block in scores.blocks():
        starts = torch.arange(0, block.scores.shape[1] + _CHUNK, _CHUNK, dtype=torch.int32).clamp(
            max=block.scores.shape[1]
        )
        _native(scores, block, starts, most=found.high, sum=total)
    torch.log(total, out=found.low).masked_fill_(total == 0, 0.0)


def _observe(scores: _Scores, wanted: PassRequest, found: PassResult) -> None:
    rows, keys = len(scores.queries), scores.keys
    height, width = found.heatmap.shape[-2:]
    across = cells(keys, width, found.heatmap)
    # the cell of each query, and where a new one begins
    cell = torch.arange(rows) * max(height, 1) // rows
    begins = torch.cat((torch.ones(1, dtype=torch.bool), cell[1:] != cell[:-1]))
    key_bias = None if wanted.moved is None else positive(wanted.moved).log()
    scale = wanted.key_scale
    for block in scores.blocks():
        head, row, column = block[:3]
        number = torch.arange(row.stop - row.start)
        start = number[begins[row] | (number % _CHUNK == 0)]
        starts = torch.cat((start, number[-1:] + 1)).int()
        columns = torch.zeros(len(block.scores), len(start), block.scores.shape[2])
        _native(
            scores, block, starts, high=found.high, low=found.low, key_bias=key_bias, position=scores.position.float(),
            row_weights=wanted.row_weights, key_weights=wanted.key_weights, row_sums=found.entropy,
            column_sums=columns, top_score=found.top, top_key=found.top_keys,
        )  # fmt: skip
        found.received[head, column] += columns.sum(1)
        if height:
            down = cell[row][start]
            found.heatmap[head].index_add_(1, down, columns @ across[column])
            if scale is not None:
                columns *= scale[head, None, column]
                found.scaled_heatmap[head].index_add_(1, down, columns @ across[column])
    if height:
        inside = torch.bincount(cell, minlength=height)[:, None]
        found.heatmap.div_(inside)
        found.scaled_heatmap.div_(inside if scale is not None else 1)


def _native(scores: _Scores, block: _Block, starts: Int[Tensor, " chunks_and_one"], **tensors: Tensor | None) -> None:
    """Let the C++ read a block, with what there is for its queries and keys."""
    head, row, column, s = block
    by_query = ("most", "sum", "high", "low", "row_weights", "row_sums", "top_score", "top_key")
    given = {"first": scores.first, "stop": scores.stop, **tensors}
    pointers = {}
    for name in _POINTERS:
        x = given.get(name)
        if x is None:
            pointers[name] = 0
        elif name in ("first", "stop", "position"):
            pointers[name] = x[row].data_ptr()
        elif name in by_query:
            pointers[name] = x[head, row].data_ptr()
        else:
            pointers[name] = x[head, ..., column].data_ptr() if name != "column_sums" else x.data_ptr()
    weights, top = given.get("key_weights"), given.get("top_score")
    native.observe(
        heads=s.shape[0], rows=s.shape[1], columns=s.shape[2], queries=len(scores.queries), keys=scores.keys,
        scores=s.data_ptr(), column=column.start, sums=0 if weights is None else weights.shape[-2],
        chunk_first=starts.data_ptr(), chunks=len(starts) - 1, top=0 if top is None else top.shape[-1],
        threads=torch.get_num_threads() if s.numel() >= _PARALLEL else 1, **pointers,
    )  # fmt: skip
