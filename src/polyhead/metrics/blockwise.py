"""Head metrics by blocks of queries: several in one pass over the weights, which never builds queries x keys.

Metrics are computed in at least fp32. The functions in `METRICS` say what each metric takes from a block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from polyhead._torch import widest_float, without_autocast
from polyhead.kernels.call import Call
from polyhead.kernels.reference import masked_scores
from polyhead.metrics.attention_parts import DensePart, make_whole_part
from polyhead.metrics.blocks import Block, block_weights, measure_blocks
from polyhead.neighbourhood import Dense
from polyhead.neighbourhood.lattice import ravel_index


class BlockwiseMetric(NamedTuple):
    """A metric as a fold over blocks: `finish(add(… add(start, measure(p, block), block) …))`."""

    measure: Callable[[Float[Tensor, "... heads rows keys"], Block], Any]
    start: Any
    add: Callable[[Any, Any, Block], Any]
    finish: Callable[[Any], Any]


def compute(part: DensePart, requests: Sequence[tuple[str, tuple[Any, ...], bool]]) -> list[Any]:
    """Metrics in one pass over the weights: each by its name in `METRICS`, its arguments, and whether it is of contributions."""
    metrics = [METRICS[name](part, *arguments) for name, arguments, _ in requests]
    of_contributions = [contribution for _, _, contribution in requests]
    norm = part.norm_per_key() if any(of_contributions) else None

    def measure(p: Tensor, block: Block) -> tuple[Any, ...]:
        moved = p if norm is None else p * norm[..., None, block.columns]
        pairs = zip(metrics, of_contributions, strict=True)
        return tuple(metric.measure(moved if contribution else p, block) for metric, contribution in pairs)

    totals = [metric.start for metric in metrics]
    for block, values in measure_blocks(part, measure):
        totals = [metric.add(total, value, block) for metric, total, value in zip(metrics, totals, values, strict=True)]
    return [metric.finish(total) for metric, total in zip(metrics, totals, strict=True)]


def compute_one(part: DensePart, name: str, *arguments: Any) -> Any:
    """One metric of a part: of contributions if the part is."""
    return compute(part, [(name, arguments, part.contribution_norm is not None)])[0]


def _per_query(measure: Callable[[Tensor, Block], Tensor]) -> BlockwiseMetric:
    """A metric per query, the last axis of the values of `measure`."""
    return BlockwiseMetric(
        measure, (), lambda values, value, block: (*values, value), lambda values: torch.cat(values, -1)
    )


def _summed(
    part: DensePart, measure: Callable[[Tensor, Block], Tensor], shape: tuple[int, ...], *, by_key: bool = False
) -> BlockwiseMetric:
    """A sum of the values of `measure` over all blocks, of a shape after the batch and the heads; `by_key`: of the keys of a block."""
    add = lambda total, value, block: total + (_pad_columns(value, block.columns, shape[-1]) if by_key else value)
    return BlockwiseMetric(measure, _zeros_of_at_least_fp32(part, (*part.shape[:-2], *shape)), add, lambda total: total)


def _zeros_of_at_least_fp32(part: DensePart, shape: tuple[int, ...]) -> Tensor:
    compute_dtype = torch.promote_types(part.call.q.dtype, torch.float32)
    return torch.zeros(shape, dtype=compute_dtype, device=part.call.q.device)


def _pad_columns(x: Float[Tensor, "... some"], columns: slice, size: int) -> Float[Tensor, "... size"]:
    """Values of some keys, with zeros for all others."""
    return x if x.shape[-1] == size else torch.nn.functional.pad(x, (columns.start, size - columns.stop))


def _entropy(part: DensePart) -> BlockwiseMetric:
    """−Σ p log p of each query's weights, in nats."""
    return _per_query(lambda p, block: -(p * clamp_to_tiny(p).log()).sum(-1))


def clamp_to_tiny(x: Tensor) -> Tensor:
    """`x`, at least the smallest normal number: at zero, roots and logarithms have no finite gradient."""
    return x.clamp(min=torch.finfo(x.dtype).tiny)


def _distance(part: DensePart) -> BlockwiseMetric:
    """Σ p |key − query| of each query: the mean distance to its keys; on a grid, the distance between points."""
    lattice = part.call.over.lattice
    if lattice is None:
        return _per_query(lambda p, block: (p * (block.key - block.query).abs()).sum(-1))
    offset, prefix = part.call.sizes.keys - part.call.sizes.queries, lattice.prefix
    query_points, key_points = (
        lattice.query_coordinates(part.call.q.device),
        lattice.key_coordinates(part.call.q.device),
    )

    def point_distance(p: Tensor, block: Block) -> Tensor:
        index, key = block.query[:, 0] - offset, block.key
        norm = (key_points[key] - query_points[index][:, None]).to(p.dtype).norm(dim=-1)
        # prefix tokens have no coordinates: their distance is 0
        return (p * norm * ((index >= prefix)[:, None] & (key >= prefix))).sum(-1)

    return _per_query(point_distance)


def _mass(part: DensePart, offset: int) -> BlockwiseMetric:
    """The weight of each query on the key at `offset` from it."""
    return _per_query(lambda p, block: (p * (block.key - block.query == offset)).sum(-1))


def _mass_on_keys(part: DensePart, marked: Float[Tensor, "... keys"]) -> BlockwiseMetric:
    """The weight of each query on the marked keys (1: marked)."""
    return _per_query(lambda p, block: (p * marked[..., None, None, block.columns].to(p.dtype)).sum(-1))


def _mass_at_key(part: DensePart, at: Int[Tensor, "... #heads queries"]) -> BlockwiseMetric:
    """The weight of each query on one key, given by its index; 0 for -1."""
    return _per_query(lambda p, block: (p * (at[..., block.rows, None] == block.key)).sum(-1))


def _received(part: DensePart, counts: Float[Tensor, "... #heads queries"] | None = None) -> BlockwiseMetric:
    """The weight that each key receives from all queries; `counts` multiplies the weights of each query."""

    def sum_over_queries(p: Tensor, block: Block) -> Tensor:
        return (p if counts is None else counts[..., block.rows, None].to(p.dtype) * p).sum(-2)

    return _summed(part, sum_over_queries, (part.shape[-1],), by_key=True)


def _top(part: DensePart, k: int) -> BlockwiseMetric:
    """The k largest weights of each query and the indices of their keys, -1 where a query has fewer keys."""

    def largest(p: Tensor, block: Block) -> tuple[Tensor, ...]:
        # a block may have fewer than k keys
        values, indices = torch.nn.functional.pad(p, (0, max(0, k - p.shape[-1]))).topk(k, -1)
        return values, torch.nn.functional.pad(block.key, (0, max(0, k - len(block.key))))[indices]

    def join(pairs: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        values, keys = (torch.cat(column, -2) for column in zip(*pairs, strict=True))
        return values, keys.masked_fill(values == 0, -1)

    return BlockwiseMetric(largest, (), lambda pairs, pair, block: (*pairs, pair), join)


def _heatmap(part: DensePart, size: int) -> BlockwiseMetric:
    """The weights averaged to at most size x size cells."""
    like = _zeros_of_at_least_fp32(part, ())
    down, across = (averaging_matrix(n, min(size, max(n, 1)), like) for n in part.shape[-2:])
    average = lambda p, block: down[block.rows].T @ (p @ across[block.columns])
    return _summed(part, average, (down.shape[1], across.shape[1]))


def averaging_matrix(items: int, number: int, like: Tensor) -> Float[Tensor, "items cells"]:
    """A matrix that averages items in `number` equal groups."""
    group = torch.arange(items, device=like.device)[:, None] * number // max(items, 1)
    member = group == torch.arange(number, device=like.device)
    return member / group_sizes(items, number, like)


def group_sizes(items: int, number: int, like: Tensor) -> Float[Tensor, " cells"]:
    """How many items each of `number` equal groups has, at least 1, where item i is in group i · number // items."""
    # not bincount, for which the host would wait
    start = -(torch.arange(number + 1, device=like.device) * -items // max(number, 1))
    return start.diff().clamp(min=1).to(like.dtype)


def _mean_weights_by_offset(
    part: DensePart,
    query_points: Int[Tensor, "all_queries axes"],
    sizes: tuple[int, ...],
    first_point: tuple[int, int],
    reach: tuple[int, ...],
) -> BlockwiseMetric:
    """The weights by offset of the key from the query on a grid, averaged over the queries that have a point.

    Args:
        part: the weights.
        query_points: the coordinates of all queries of the call, on the grid of the keys.
        sizes: the sizes of the grid of the keys.
        first_point: the numbers of queries and of keys before the grid, which have no coordinates.
        reach: the largest offset to either side, along each axis.
    """
    device, (_, _, queries, keys) = part.call.q.device, part.call.sizes
    steps = torch.cartesian_prod(*(torch.arange(-n, n + 1, device=device) for n in reach)).view(-1, len(reach))
    has_point = part.indices("queries") >= first_point[0]

    def by_step(p: Tensor, block: Block) -> Tensor:
        # (rows, window, axes)
        point = query_points[block.query[:, 0] - (keys - queries)][:, None] + steps
        inside = has_point[block.rows, None]
        for axis, size in enumerate(sizes):
            inside = inside & (point[..., axis] >= 0) & (point[..., axis] < size)
        index = torch.where(inside, ravel_index(point, sizes) + first_point[1], keys)
        # all keys outside of the block share one appended column of zeros
        column = torch.full((keys + 1,), p.shape[-1], device=device)
        column[block.key] = torch.arange(len(block.key), device=device)
        padded = torch.nn.functional.pad(p, (0, 1))
        return padded.gather(-1, column[index].expand(*p.shape[:-1], -1)).sum(-2)

    metric = _summed(part, by_step, (len(steps),))
    return metric._replace(
        finish=lambda total: (total / has_point.sum().clamp(min=1)).unflatten(-1, [2 * n + 1 for n in reach])
    )


def _diversity(part: DensePart) -> BlockwiseMetric:
    """How differently two heads attend: the squared Hellinger distance 1 − Σ √(p p′), averaged over queries.

    Each query's weights are first normalised to sum to 1: the share of a sink and keys outside of the part do not count.
    Queries without any key do not count either. 0: the same weights everywhere; 1: no key in common.
    """
    heads = part.shape[-3]

    def overlap(p: Tensor, block: Block) -> Tensor:
        total = p.sum(-1, keepdim=True)
        root = (clamp_to_tiny(p) / clamp_to_tiny(total)).sqrt() * (p > 0)
        live = (total[..., 0] > 0).to(p.dtype)
        return torch.stack((root.flatten(-2) @ root.flatten(-2).transpose(-2, -1), live @ live.transpose(-2, -1)), -2)

    # the sum of overlaps, and the number of queries
    metric = _summed(part, overlap, (2, heads))
    return metric._replace(finish=lambda total: 1 - total[..., 0, :] / total[..., 1, :].clamp(min=1))


METRICS: dict[str, Callable[..., BlockwiseMetric]] = {
    "entropy": _entropy, "distance": _distance, "mass": _mass, "mass_on_keys": _mass_on_keys, "mass_at_key": _mass_at_key,
    "received": _received, "top": _top, "heatmap": _heatmap, "mean_weights_by_offset": _mean_weights_by_offset,
    "diversity": _diversity,
}  # fmt: skip
"""Metrics by name, each as a function of a part and the metric's arguments."""


def agreement(call: Call, queries: Int[Tensor, " some"]) -> Float[Tensor, "... heads"]:
    """Spearman's correlation of two queries' scores of all keys, allowed or not, averaged over pairs of these queries.

    1 is one ranking for all queries: *static* attention. Keys with equal scores share the mean of their ranks.
    """
    dtype, sizes = widest_float(call.q.device), call.sizes
    wide = call._replace(q=call.q.to(dtype), k=call.k.to(dtype), over=Dense())
    if "edges" in make_whole_part(call).axes:
        wide = wide._replace(bias=None)
    # Σ unit_i·unit_j over all pairs i ≠ j is |Σ unit_i|² − Σ |unit_i|²: blocks of queries suffice
    total = squares = call.q.new_zeros((), dtype=dtype)
    rows = max(1, block_weights(call.q.device) // max(1, call.q.shape[:-2].numel() * sizes.keys))
    for some in queries.split(rows):
        rank = _doubled_mean_ranks(masked_scores(wide, some))
        centred = rank - rank.mean(-1, keepdim=True)
        unit = centred / clamp_to_tiny(centred.norm(dim=-1, keepdim=True))
        total, squares = total + unit.sum(-2), squares + unit.square().sum((-2, -1))
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
