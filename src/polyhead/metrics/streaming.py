"""Several metrics in one pass: torch's matrix product computes blocks of scores, and C++ reads each once while it is in the cache.

With the log-sum-exp of each query, a weight is exp(score − lse): a block of scores gives all metrics of its weights, and is
then discarded. `blockwise` has the definitions, and computes what this pass refuses.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from polyhead._torch import is_tracing_or_dataless, native, native_missing_reason
from polyhead.kernels.call import Call
from polyhead.kernels.reference import select_unless_broadcast
from polyhead.metrics.blockwise import averaging_matrix, clamp_to_tiny
from polyhead.score import Dot

# A block of scores: 8 MB of fp32. Smaller blocks make threads wait for each other, larger ones do not fit in the cache.
_BLOCK_ROWS, _BLOCK_COLUMNS = 1024, 2048
# Queries whose columns are summed together. Small chunks leave many sums to add up, large ones make threads wait.
_CHUNK_QUERIES = 64
# The largest number of weighted sums over keys in one pass of the C++ code.
MAX_KEY_SUMS = 4
# A second thread does not pay for fewer scores.
_MIN_PARALLEL_SCORES = 1 << 15
_POINTER_NAMES = (
    "first", "stop", "key_bias", "row_max", "row_sum", "high", "low", "position", "row_weights", "key_weights", "row_sums",
    "column_sums", "top_score", "top_key",
)  # fmt: skip
# -inf in the C++ code.
_NO_SCORE = -1000.0


class PassRequest(NamedTuple):
    """Options of a pass, which always computes entropy, distance and the received weight."""

    # the number of largest weights per query
    top: int = 0
    # the largest height and width of heat-maps
    cells: int = 0
    # factors of keys in weighted sums per query
    key_weights: Float[Tensor, "... heads sums keys"] | None = None
    # multiplies all weights: the norm of the output change by a weight of 1 on a key
    contribution_norm: Float[Tensor, "... heads keys"] | None = None
    # multiplies the weights of a second heat-map
    key_scale: Float[Tensor, "... heads keys"] | None = None
    # factors of queries in the received weight
    row_weights: Float[Tensor, "... heads queries"] | None = None


class PassResult(NamedTuple):
    """The metrics that one pass computes."""

    entropy: Float[Tensor, "... heads queries"]
    distance: Float[Tensor, "... heads queries"]
    # one per row of `key_weights`
    sums: Float[Tensor, "... heads queries sums"]
    received: Float[Tensor, "... heads keys"]
    heatmap: Float[Tensor, "... heads height width"]
    scaled_heatmap: Float[Tensor, "... heads height width"]
    top: Float[Tensor, "... heads queries k"]
    # -1 where a query has fewer keys
    top_keys: Int[Tensor, "... heads queries k"]
    # the log-sum-exp of each query, as a sum of two numbers to be more exact
    high: Float[Tensor, "... heads queries"]
    low: Float[Tensor, "... heads queries"]


def refuses_call(call: Call) -> str | None:
    """The reason why this pass cannot measure the attention, or None."""
    if native is None:
        return f"there are no C++ kernels: {native_missing_reason}"
    if type(call.score) is not Dot:
        return f"it has no code for {type(call.score).__name__} scores"
    if not call.q.is_cpu or call.q.dtype == torch.float64:
        return f"it needs fp32, bf16 or fp16 on the CPU, and q is {call.q.dtype} on {call.q.device.type}"
    return "torch compiles or transforms the call" if is_tracing_or_dataless() else None


def run_pass(
    call: Call,
    request: PassRequest,
    *,
    heads: Int[Tensor, " some"] | None = None,
    queries: Int[Tensor, " some"] | None = None,
    lse: Float[Tensor, "... heads queries"] | None = None,
) -> PassResult:
    """One pass over the scores of all heads and queries, or of some; two passes if their log-sum-exp is not given."""
    batch, all_heads, all_queries, keys = call.sizes
    lead = (
        math.prod(batch),
        all_heads if heads is None else len(heads),
        all_queries if queries is None else len(queries),
    )
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        result = _allocate_result(lead, keys, request)
        if lse is not None:
            result.high.copy_(lse.reshape(result.high.shape))
        for row in range(lead[0]):
            scores, row_result = _ScoreBlocks(call, row, heads, queries), PassResult(*(x[row] for x in result))
            if lse is None:
                _compute_lse(scores, row_result)
            if call.sink is not None:
                sink = select_unless_broadcast(call.sink, -1, heads).float()
                torch.logaddexp(row_result.low, sink[:, None] - row_result.high, out=row_result.low)
            _compute_metrics(scores, PassRequest(*(_select_row(x, row, batch) for x in request)), row_result)
        result.top.exp_()
        result.top_keys.masked_fill_(result.top == 0, -1)
    return PassResult(*(x.unflatten(0, batch) if batch else x[0] for x in result))


def _select_row(x: Any, row: int, batch: tuple[int, ...]) -> Any:
    return x.reshape(-1, *x.shape[len(batch) :])[row].float().contiguous() if isinstance(x, Tensor) else x


def _allocate_result(lead: tuple[int, int, int], keys: int, request: PassRequest) -> PassResult:
    """The tensors that the pass writes to."""
    batch, heads, queries = lead
    sums = 0 if request.key_weights is None else request.key_weights.shape[-2]
    cells = (min(request.cells, queries), min(request.cells, keys))
    by_row = torch.zeros(batch, heads, queries, 2 + sums)
    return PassResult(
        entropy=by_row[..., 0],
        distance=by_row[..., 1],
        sums=by_row[..., 2:],
        received=torch.zeros(batch, heads, keys),
        heatmap=torch.zeros(batch, heads, *cells),
        scaled_heatmap=torch.zeros(batch, heads, *(cells if request.key_scale is not None else (0, 0))),
        top=torch.full((batch, heads, queries, request.top), _NO_SCORE),
        top_keys=torch.full((batch, heads, queries, request.top), -1),
        high=torch.full(lead, -torch.inf),
        low=torch.zeros(lead),
    )


class _ScoreBlock(NamedTuple):
    """Scores of some heads, queries and keys, as slices of those that the pass measures."""

    heads: slice
    rows: slice
    columns: slice
    scores: Float[Tensor, "heads rows columns"]


class _ScoreBlocks:
    """The scores of one row of the batch, block by block."""

    def __init__(
        self, call: Call, row: int, heads: Int[Tensor, " heads"] | None, queries: Int[Tensor, " queries"] | None
    ) -> None:
        batch, number, rows, self.keys = call.sizes
        at = tuple(slice(int(i), int(i) + 1) for i in np.unravel_index(row, batch)) if batch else ()
        q, self.k = (x[at].reshape(x.shape[-3:]) for x in (call.q, call.k))
        self.q = select_unless_broadcast(select_unless_broadcast(q, -3, heads), -2, queries)
        self.heads = torch.arange(number) if heads is None else heads
        self.queries = queries = torch.arange(rows) if queries is None else queries
        self.key_heads = (self.heads // (number // len(self.k))).tolist()
        assert isinstance(call.score, Dot)
        self.call, self.factor = call, call.score.factor(q.shape[-1])
        self.position = queries + (self.keys - rows)
        self.over = call.over.select_batch_rows(batch, at)
        first, stop = (x.reshape(-1, rows)[0, queries] for x in self.over.interval(rows, self.keys, call.q.device))
        self.first, self.stop = first.clamp(0, self.keys).int(), torch.maximum(first, stop).clamp(0, self.keys).int()
        bias = call.bias
        self.bias = None if bias is None else bias.expand(*batch, *bias.shape[-3:])[at].reshape(bias.shape[-3:])
        self.workspace = torch.empty(0)
        self._last_mask: tuple[Any, Tensor] | None = None

    def blocks(self) -> Iterator[_ScoreBlock]:
        """All scores that the intervals of the neighbourhood allow. The next block overwrites the previous one."""
        rows, columns = min(_BLOCK_ROWS, len(self.queries)), min(_BLOCK_COLUMNS, self.keys)
        heads = max(1, _BLOCK_ROWS * _BLOCK_COLUMNS // max(1, rows * columns))
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
                    yield _ScoreBlock(head, row, column, self._scores(head, row, column))

    def _scores(self, heads: slice, rows: slice, columns: slice) -> Float[Tensor, "heads rows columns"]:
        q = self.q[heads, rows].float() * self.factor
        key_heads = self.key_heads[heads]
        k = self.k[key_heads[0], columns][None] if len(key_heads) == 1 else self.k[key_heads, columns]
        size = (len(key_heads), q.shape[1], k.shape[1])
        if self.workspace.numel() < math.prod(size):
            self.workspace = torch.empty(math.prod(size))
        s = torch.bmm(q, k.float().transpose(1, 2), out=self.workspace[: math.prod(size)].view(size))
        call, head, position = self.call, self.heads[heads], self.position[rows, None]
        key = torch.arange(columns.start, columns.stop)
        if call.relative_bias is not None:
            s += call.relative_bias[head].float()[:, key - position + (self.keys - 1)]
        if self.bias is not None:
            bias = self.bias if self.bias.shape[-1] == 1 else self.bias[..., columns]
            s += select_unless_broadcast(select_unless_broadcast(bias, -3, head), -2, self.queries[rows])
        if not self.over.exact:
            s.masked_fill_(self._forbidden(head, rows, columns), -torch.inf)
        return s

    def _forbidden(
        self, head: Int[Tensor, " heads"], rows: slice, columns: slice
    ) -> Bool[Tensor, "#heads rows columns"]:
        """Which pairs of a block are not allowed; consecutive heads with the same keys share the mask."""
        block = (rows, columns, tuple(head.tolist()) if self.over.by_head else None)
        if self._last_mask is None or self._last_mask[0] != block:
            key = torch.arange(columns.start, columns.stop)
            allowed = self.over.allows(head[:, None, None], self.position[rows, None], key)
            self._last_mask = block, ~allowed.reshape(allowed.shape[-3:])
        return self._last_mask[1]


def _compute_lse(scores: _ScoreBlocks, result: PassResult) -> None:
    """Write the log-sum-exp of each query to `high` and `low`."""
    total = torch.zeros_like(result.high)
    for block in scores.blocks():
        starts = torch.arange(0, block.scores.shape[1] + _CHUNK_QUERIES, _CHUNK_QUERIES, dtype=torch.int32).clamp(
            max=block.scores.shape[1]
        )
        _add_block_stats(scores, block, starts, row_max=result.high, row_sum=total)
    torch.log(total, out=result.low).masked_fill_(total == 0, 0.0)


def _compute_metrics(scores: _ScoreBlocks, request: PassRequest, result: PassResult) -> None:
    """Write all metrics of one row of the batch."""
    rows, keys = len(scores.queries), scores.keys
    height, width = result.heatmap.shape[-2:]
    across = averaging_matrix(keys, width, result.heatmap)
    # the heat-map row of each query, and whether the query is its first
    cell = torch.arange(rows) * max(height, 1) // rows
    begins = torch.cat((torch.ones(1, dtype=torch.bool), cell[1:] != cell[:-1]))
    key_bias = None if request.contribution_norm is None else clamp_to_tiny(request.contribution_norm).log()
    scale = request.key_scale
    for block in scores.blocks():
        head, row, column = block[:3]
        number = torch.arange(row.stop - row.start)
        start = number[begins[row] | (number % _CHUNK_QUERIES == 0)]
        starts = torch.cat((start, number[-1:] + 1)).int()
        columns = torch.zeros(len(block.scores), len(start), block.scores.shape[2])
        _add_block_stats(
            scores, block, starts, high=result.high, low=result.low, key_bias=key_bias, position=scores.position.float(),
            row_weights=request.row_weights, key_weights=request.key_weights, row_sums=result.entropy,
            column_sums=columns, top_score=result.top, top_key=result.top_keys,
        )  # fmt: skip
        result.received[head, column] += columns.sum(1)
        if height:
            down = cell[row][start]
            result.heatmap[head].index_add_(1, down, columns @ across[column])
            if scale is not None:
                columns *= scale[head, None, column]
                result.scaled_heatmap[head].index_add_(1, down, columns @ across[column])
    if height:
        queries_per_cell = torch.bincount(cell, minlength=height)[:, None]
        result.heatmap.div_(queries_per_cell)
        result.scaled_heatmap.div_(queries_per_cell if scale is not None else 1)


def _add_block_stats(
    scores: _ScoreBlocks, block: _ScoreBlock, starts: Int[Tensor, " chunks_and_one"], **tensors: Tensor | None
) -> None:
    """Pass a block to the C++ code, with pointers to the tensors of its queries and keys."""
    head, row, column, s = block
    by_query = ("row_max", "row_sum", "high", "low", "row_weights", "row_sums", "top_score", "top_key")
    arrays = {"first": scores.first, "stop": scores.stop, **tensors}
    pointers = {}
    for name in _POINTER_NAMES:
        x = arrays.get(name)
        if x is None:
            pointers[name] = 0
        elif name in ("first", "stop", "position"):
            pointers[name] = x[row].data_ptr()
        elif name in by_query:
            pointers[name] = x[head, row].data_ptr()
        else:
            pointers[name] = x[head, ..., column].data_ptr() if name != "column_sums" else x.data_ptr()
    weights, top = arrays.get("key_weights"), arrays.get("top_score")
    native.score_stats(
        heads=s.shape[0], rows=s.shape[1], columns=s.shape[2], queries=len(scores.queries), keys=scores.keys,
        scores=s.data_ptr(), column=column.start, sums=0 if weights is None else weights.shape[-2],
        chunk_first=starts.data_ptr(), chunks=len(starts) - 1, top=0 if top is None else top.shape[-1],
        threads=torch.get_num_threads() if s.numel() >= _MIN_PARALLEL_SCORES else 1, **pointers,
    )  # fmt: skip
