"""Head metrics in blocks: some queries at a time with the keys they may attend to, never all queries x keys.

Metrics are computed in at least fp32. Where gradients are needed, backward recomputes each block instead of storing it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from polyhead._torch import is_tracing_or_dataless, to_at_least_fp32, under_transform, without_autocast
from polyhead.kernels.call import Call
from polyhead.kernels.reference import masked_scores
from polyhead.kernels.tile_plan import Bounds
from polyhead.metrics.attention_parts import DensePart, make_whole_part
from polyhead.neighbourhood import Dense
from polyhead.neighbourhood.lattice import ravel_index

# Weights in one block: 4 MB of fp32. Smaller blocks take more time; larger ones take more memory and save no time.
BLOCK_WEIGHTS = 1 << 20

MetricValue = TypeVar("MetricValue", Tensor, tuple[Tensor, ...])


# A metric of one block, from the weights, the positions of its queries, the positions of its keys, and the slice that its keys
# are of the part's keys.
BlockMetric = Callable[
    [Float[Tensor, "... heads rows keys"], Int[Tensor, "rows 1"], Int[Tensor, " keys"], slice], MetricValue
]


class _BlockSlices(NamedTuple):
    """A block as slices of the part's queries and keys."""

    rows: slice
    columns: slice


def _measure_blocks(part: DensePart, measure: BlockMetric[MetricValue]) -> Iterator[tuple[_BlockSlices, MetricValue]]:
    queries, keys = part.indices("queries"), part.shape[-1]
    needs_grad = torch.is_grad_enabled() and not under_transform() and weights_require_grad(part)
    if needs_grad:
        # widened here, not per block: the gradients of all blocks are summed in fp32 or fp64
        part = part._replace(call=_call_to_at_least_fp32(part.call))
    for rows, span in _block_spans(part):
        columns = slice(0, keys) if span is None else slice(*span)
        block = partial(_measure_block, part, measure, span, columns)
        value: MetricValue = (
            checkpoint(block, queries[rows], use_reentrant=False) if needs_grad else block(queries[rows])
        )
        yield _BlockSlices(rows, columns), value


def _measure_block(
    part: DensePart,
    measure: BlockMetric[MetricValue],
    span: tuple[int, int] | None,
    columns: slice,
    chosen: Int[Tensor, " rows"],
) -> MetricValue:
    sizes = part.call.sizes
    position = chosen[:, None] + (sizes.keys - sizes.queries)
    return measure(part.weights(chosen, span), position, part.indices("keys")[columns], columns)


def _block_spans(part: DensePart) -> Iterator[tuple[slice, tuple[int, int] | None]]:
    """Blocks of the part's queries, and the span of keys that each may attend to (None: all)."""
    number, keys = part.shape[-2], part.call.sizes.keys
    budget = BLOCK_WEIGHTS // max(1, part.shape[:-2].numel())
    intervals = _key_intervals(part)
    begin = 0
    while begin < number or begin == 0:
        rows, span = max(1, budget // max(keys, 1)), None
        if intervals is not None:
            rows, span = _fit_block(intervals[0][begin:], intervals[1][begin:], budget, keys)
        yield slice(begin, min(begin + rows, number)), span
        begin += rows


def _key_intervals(part: DensePart) -> tuple[Bounds, Bounds] | None:
    """The interval of keys of each query of the part, over all rows of the batch; None where all keys are visited."""
    call = part.call
    if (
        type(call.over) is Dense
        or part.keys is not None
        or is_tracing_or_dataless(call.q, *call.over.leaves())
        or 0 in part.shape
    ):
        return None
    _, _, queries, keys = call.sizes
    interval = call.over.interval(queries, keys, call.q.device)
    first, stop = (bound.reshape(-1, queries).clamp(0, keys) for bound in interval)
    empty = stop <= first
    first, stop = first.masked_fill(empty, keys).amin(0), stop.masked_fill(empty, 0).amax(0)
    chosen = part.indices("queries")
    return first[chosen].cpu().numpy(), stop[chosen].cpu().numpy()


def _fit_block(first: Bounds, stop: Bounds, budget: int, keys: int) -> tuple[int, tuple[int, int]]:
    """How many of the first queries fit into one block, and the span of their keys."""
    rows = max(1, min(len(first), budget))
    while True:
        low, high = int(first[:rows].min()), int(stop[:rows].max())
        low, high = (low, high) if low < high else (0, min(1, keys))
        if rows == 1 or rows * (high - low) <= budget:
            return rows, (low, high)
        rows = max(1, min(rows // 2, budget // (high - low)))


def weights_require_grad(part: DensePart) -> bool:
    """Whether the weights depend on a tensor that requires gradients."""
    call = part.call
    sources = (call.q, call.k, call.relative_bias, call.bias, call.sink, part.contribution_norm, *call.score.learned())
    return any(x is not None and x.requires_grad for x in sources)


def _call_to_at_least_fp32(call: Call) -> Call:
    table, bias, sink = (None if x is None else to_at_least_fp32(x) for x in (call.relative_bias, call.bias, call.sink))
    return call._replace(
        q=to_at_least_fp32(call.q), k=to_at_least_fp32(call.k), relative_bias=table, bias=bias, sink=sink
    )


def _measure_per_query(part: DensePart, measure: BlockMetric[Tensor]) -> Tensor:
    """A metric per query, the last axis of the values of `measure`."""
    return torch.cat([value for _, value in _measure_blocks(part, measure)], -1)


def entropy(part: DensePart) -> Float[Tensor, "... heads queries"]:
    """−Σ p log p of each query's weights, in nats."""
    return _measure_per_query(part, lambda p, query, key, columns: -(p * clamp_to_tiny(p).log()).sum(-1))


def clamp_to_tiny(x: Tensor) -> Tensor:
    """`x`, at least the smallest normal number: at zero, roots and logarithms have no finite gradient."""
    return x.clamp(min=torch.finfo(x.dtype).tiny)


def distance(part: DensePart) -> Float[Tensor, "... heads queries"]:
    """Σ p |key − query| of each query: the mean distance to its keys; on a grid, the distance between points."""
    lattice = part.call.over.lattice
    if lattice is None:
        return _measure_per_query(part, lambda p, query, key, columns: (p * (key - query).abs()).sum(-1))
    offset, prefix = part.call.sizes.keys - part.call.sizes.queries, lattice.prefix
    query_points, key_points = (
        lattice.query_coordinates(part.call.q.device),
        lattice.key_coordinates(part.call.q.device),
    )

    def point_distance(p: Tensor, query: Tensor, key: Tensor, columns: slice) -> Tensor:
        index = query[:, 0] - offset
        norm = (key_points[key] - query_points[index][:, None]).to(p.dtype).norm(dim=-1)
        # prefix tokens have no coordinates: their distance is 0
        return (p * norm * ((index >= prefix)[:, None] & (key >= prefix))).sum(-1)

    return _measure_per_query(part, point_distance)


def mass(part: DensePart, offset: int) -> Float[Tensor, "... heads queries"]:
    """The weight of each query on the key at `offset` from it."""
    return _measure_per_query(part, lambda p, query, key, columns: (p * (key - query == offset)).sum(-1))


def mass_on_keys(part: DensePart, marked: Float[Tensor, "... keys"]) -> Float[Tensor, "... heads queries"]:
    """The weight of each query on the marked keys (1: marked)."""
    return _measure_per_query(
        part, lambda p, query, key, columns: (p * marked[..., None, None, columns].to(p.dtype)).sum(-1)
    )


def mass_at_key(part: DensePart, at: Int[Tensor, "... #heads queries"]) -> Float[Tensor, "... heads queries"]:
    """The weight of each query on one key, given by its index; 0 for -1."""
    values = []
    for (rows, columns), p in _measure_blocks(part, lambda p, query, key, columns: p):
        keys = part.indices("keys")[columns]
        values.append((p * (at[..., rows, None] == keys)).sum(-1))
    return torch.cat(values, -1)


def received(
    part: DensePart, counts: Float[Tensor, "... #heads queries"] | None = None
) -> Float[Tensor, "... heads keys"]:
    """The weight that each key receives from all queries; `counts` multiplies the weights of each query."""
    total = _zeros_of_at_least_fp32(part, (*part.shape[:-2], part.shape[-1]))
    ones = total.new_ones(part.shape[-2])
    counts = ones if counts is None else counts.to(total.dtype)
    for (rows, columns), p in _measure_blocks(part, lambda p, query, key, columns: p):
        block_sum = (counts[..., rows, None] * p).sum(-2)
        total = total + _pad_columns(block_sum, columns, part.shape[-1])
    return total


def _zeros_of_at_least_fp32(part: DensePart, shape: tuple[int, ...]) -> Tensor:
    compute_dtype = torch.promote_types(part.call.q.dtype, torch.float32)
    return torch.zeros(shape, dtype=compute_dtype, device=part.call.q.device)


def _pad_columns(x: Float[Tensor, "... some"], columns: slice, size: int) -> Float[Tensor, "... size"]:
    """Values of some keys, with zeros for all others."""
    return x if x.shape[-1] == size else torch.nn.functional.pad(x, (columns.start, size - columns.stop))


def top(part: DensePart, k: int) -> tuple[Float[Tensor, "... heads queries k"], Int[Tensor, "... heads queries k"]]:
    """The k largest weights of each query and the indices of their keys, -1 where a query has fewer keys."""

    def largest(p: Tensor, query: Tensor, key: Tensor, columns: slice) -> tuple[Tensor, ...]:
        # a span may hold fewer than k keys
        values, indices = torch.nn.functional.pad(p, (0, max(0, k - p.shape[-1]))).topk(k, -1)
        return values, torch.nn.functional.pad(key, (0, max(0, k - len(key))))[indices]

    blocks = [value for _, value in _measure_blocks(part, largest)]
    values, keys = (torch.cat(column, -2) for column in zip(*blocks, strict=True))
    return values, keys.masked_fill(values == 0, -1)


def heatmap(part: DensePart, size: int) -> Float[Tensor, "... heads height width"]:
    """The weights averaged to at most size x size cells."""
    height, width = (min(size, max(n, 1)) for n in part.shape[-2:])
    total = _zeros_of_at_least_fp32(part, (*part.shape[:-2], height, width))
    down, across = (
        averaging_matrix(n, number, total) for n, number in zip(part.shape[-2:], (height, width), strict=True)
    )
    for (rows, _), p in _measure_blocks(part, lambda p, query, key, columns: p @ across[columns]):
        total = total + down[rows].T @ p
    return total


def averaging_matrix(items: int, number: int, like: Tensor) -> Float[Tensor, "items cells"]:
    """A matrix that averages items in `number` equal groups."""
    item = torch.arange(items, device=like.device)
    average = like.new_zeros(items, number)
    if not number:
        return average
    group = item * number // max(items, 1)
    average[item, group] = 1 / group.bincount(minlength=number).clamp(min=1).to(like.dtype)[group]
    return average


def mean_weights_by_offset(
    part: DensePart,
    query_points: Int[Tensor, "all_queries axes"],
    sizes: tuple[int, ...],
    prefix: int,
    reach: tuple[int, ...],
) -> Float[Tensor, "... heads *window"]:
    """The weights by offset of the key from the query on a grid, averaged over the queries.

    Args:
        part: the weights; each of its queries has a point.
        query_points: the coordinates of all queries of the call, on the grid of the keys.
        sizes: the sizes of the grid of the keys.
        prefix: the number of keys before the grid, which have no coordinates.
        reach: the largest offset to either side, along each axis.
    """
    device = part.call.q.device
    steps = torch.cartesian_prod(*(torch.arange(-n, n + 1, device=device) for n in reach)).view(-1, len(reach))
    bounds = torch.tensor(sizes, device=device)
    offset = part.call.sizes.keys - part.call.sizes.queries

    def by_step(p: Tensor, query: Tensor, key: Tensor, columns: slice) -> Tensor:
        # (rows, window, axes)
        point = query_points[query[:, 0] - offset][:, None] + steps
        inside = ((point >= 0) & (point < bounds)).all(-1)
        index = torch.where(inside, ravel_index(point, sizes) + prefix, part.call.sizes.keys)
        # all keys outside of the block share one appended column of zeros
        column = torch.full((part.call.sizes.keys + 1,), p.shape[-1], device=device)
        column[key] = torch.arange(len(key), device=device)
        padded = torch.nn.functional.pad(p, (0, 1))
        return padded.gather(-1, column[index].expand(*p.shape[:-1], -1)).sum(-2)

    total = _zeros_of_at_least_fp32(part, (*part.shape[:-2], len(steps)))
    for _, block_sum in _measure_blocks(part, by_step):
        total = total + block_sum
    return (total / max(1, part.shape[-2])).unflatten(-1, [2 * n + 1 for n in reach])


def diversity(part: DensePart) -> Float[Tensor, "... heads heads"]:
    """How differently two heads attend: the squared Hellinger distance 1 − Σ √(p p′), averaged over queries.

    Each query's weights are first normalised to sum to 1: the share of a sink and keys outside of the part do not count.
    Queries without any key do not count either. 0: the same weights everywhere; 1: no key in common.
    """

    def overlap(p: Tensor, query: Tensor, key: Tensor, columns: slice) -> tuple[Tensor, Tensor]:
        total = p.sum(-1, keepdim=True)
        root = (clamp_to_tiny(p) / clamp_to_tiny(total)).sqrt() * (p > 0)
        live = (total[..., 0] > 0).to(p.dtype)
        return root.flatten(-2) @ root.flatten(-2).transpose(-2, -1), live @ live.transpose(-2, -1)

    blocks = [value for _, value in _measure_blocks(part, overlap)]
    shared, queries = (torch.stack(column).sum(0) for column in zip(*blocks, strict=True))
    return 1 - shared / queries.clamp(min=1)


def agreement(call: Call, queries: Int[Tensor, " some"]) -> Float[Tensor, "... heads"]:
    """Spearman's correlation of two queries' scores of all keys, allowed or not, averaged over pairs of these queries.

    1 is one ranking for all queries: *static* attention. Keys with equal scores share the mean of their ranks.
    """
    call_fp64 = call._replace(q=call.q.double(), k=call.k.double(), over=Dense())
    if "edges" in make_whole_part(call).axes:
        call_fp64 = call_fp64._replace(bias=None)
    # Σ unit_i·unit_j over all pairs i ≠ j is |Σ unit_i|² − Σ |unit_i|²: one query at a time suffices
    total = squares = call.q.new_zeros((), dtype=torch.float64)
    for query in queries:
        rank = _doubled_mean_ranks(masked_scores(call_fp64, query[None]))[..., 0, :]
        centred = rank - rank.mean(-1, keepdim=True)
        unit = centred / clamp_to_tiny(centred.norm(dim=-1, keepdim=True))
        total, squares = total + unit, squares + unit.square().sum(-1)
    number = len(queries)
    mean = (total.square().sum(-1) - squares) / (number * (number - 1))
    return mean.to(torch.promote_types(call.q.dtype, torch.float32))


def _doubled_mean_ranks(s: Float[Tensor, "... keys"]) -> Float[Tensor, "... keys"]:
    ranked = s.sort(-1).values
    s = s.contiguous()
    return (torch.searchsorted(ranked, s) + torch.searchsorted(ranked, s, right=True)).to(s.dtype)


def contribution_norms(
    v: Float[Tensor, "... value_heads keys dim"], w_o: Float[Tensor, "... heads out dim"] | None, heads: int
) -> Float[Tensor, "... heads keys"]:
    """The norm of the output change by a weight of 1 on each key, per head: |W_O v| (Kobayashi 2020)."""
    with without_autocast(v.device):
        v = v.to(torch.promote_types(v.dtype, torch.float32))
        group = heads // v.shape[-3]
        if w_o is None:
            norm: Tensor = v.norm(dim=-1)
            return norm.repeat_interleave(group, -2)
        # |W v|² = vᵀ (WᵀW) v, which avoids the wide product W v
        w_o = w_o.to(v.dtype)
        gram = (w_o.transpose(-2, -1) @ w_o).unflatten(-3, (-1, group))
        values = v.unsqueeze(-3)
        squares: Tensor = ((values @ gram) * values).sum(-1)
        return clamp_to_tiny(squares).sqrt().flatten(-3, -2)
