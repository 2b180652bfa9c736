"""Numbers about heads, streamed: blocks of queries at a time and the keys in their reach, never queries x keys.

They are in at least fp32. Where gradients are asked for, a block is computed anew in backward instead of being kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from polyhead._torch import under_transform, values_unavailable, widened, without_autocast
from polyhead.kernels.call import Call
from polyhead.kernels.reference import scores, weights
from polyhead.kernels.tiles import Bounds
from polyhead.neighbourhood import Dense, Graph
from polyhead.neighbourhood.grid import numbers

# Numbers in one block of weights: a million of fp32 are 4 MB. Fewer cost more time, more only memory.
BLOCK = 1 << 20

Answer = TypeVar("Answer", Tensor, tuple[Tensor, ...])


class Part(NamedTuple):
    """What is looked at: an attention, or some of its heads, queries and keys (None: all)."""

    call: Call
    heads: Int[Tensor, " some"] | None = None
    queries: Int[Tensor, " some"] | None = None
    keys: Int[Tensor, " some"] | None = None
    # what a weight of 1 on a key moves: the weights are multiplied by it
    moved: Float[Tensor, "... all_heads all_keys"] | None = None

    @property
    def axes(self) -> tuple[str, ...]:
        return "heads", "queries", "keys"

    @property
    def keys_seen(self) -> int:
        return self.shape[-1]

    def numbers(self, axis: str) -> Int[Tensor, " some"]:
        """The numbers of the heads, queries or keys that are looked at."""
        chosen: Tensor | None = getattr(self, axis)
        return torch.arange(getattr(self.call.sizes, axis), device=self.call.q.device) if chosen is None else chosen

    @property
    def shape(self) -> torch.Size:
        sizes = self.call.sizes
        chosen = ((self.heads, sizes.heads), (self.queries, sizes.queries), (self.keys, sizes.keys))
        return torch.Size((*sizes.batch, *(size if index is None else len(index) for index, size in chosen)))

    def weights(
        self, queries: Int[Tensor, " rows"] | None = None, span: tuple[int, int] | None = None
    ) -> Float[Tensor, "... heads queries keys"]:
        """The weights, of all queries that are looked at or of these, in at least fp32; of a span of all keys, if given."""
        p = weights(self.call, self.queries if queries is None else queries, self.heads, span)
        if self.moved is not None:
            moved = self.moved if self.heads is None else self.moved.index_select(-2, self.heads)
            moved = moved if span is None else moved[..., span[0] : span[1]]
            p = p * moved[..., None, :]
        return p if self.keys is None else p.index_select(-1, self.keys)


# What a metric does with a block: the weights, the positions of its queries (queries, 1) and those of the keys (keys), and
# which of the keys that are looked at these are.
Block = Callable[[Float[Tensor, "... heads rows keys"], Int[Tensor, "rows 1"], Int[Tensor, " keys"], slice], Answer]


class _Place(NamedTuple):
    """Where a block lies among the queries and keys that are looked at."""

    rows: slice
    columns: slice


def _blocks(part: Part, measure: Block[Answer]) -> Iterator[tuple[_Place, Answer]]:
    queries, keys = part.numbers("queries"), part.shape[-1]
    learns = torch.is_grad_enabled() and not under_transform() and learned(part)
    if learns:
        # widened once: the gradients of blocks are added up
        part = part._replace(call=_widened(part.call))
    for rows, span in _spans(part):
        columns = slice(0, keys) if span is None else slice(*span)
        block = partial(_block, part, measure, span, columns)
        answer: Answer = checkpoint(block, queries[rows], use_reentrant=False) if learns else block(queries[rows])
        yield _Place(rows, columns), answer


def _block(
    part: Part, measure: Block[Answer], span: tuple[int, int] | None, columns: slice, chosen: Int[Tensor, " rows"]
) -> Answer:
    sizes = part.call.sizes
    position = chosen[:, None] + (sizes.keys - sizes.queries)
    return measure(part.weights(chosen, span), position, part.numbers("keys")[columns], columns)


def _spans(part: Part) -> Iterator[tuple[slice, tuple[int, int] | None]]:
    """Blocks of the queries that are looked at, and the stretch of keys that each may attend to (None: all)."""
    number, keys = part.shape[-2], part.call.sizes.keys
    budget = BLOCK // max(1, part.shape[:-2].numel())
    reach = _reach(part)
    begin = 0
    while begin < number or begin == 0:
        rows, span = max(1, budget // max(keys, 1)), None
        if reach is not None:
            rows, span = _fitting(reach[0][begin:], reach[1][begin:], budget, keys)
        yield slice(begin, min(begin + rows, number)), span
        begin += rows


def _reach(part: Part) -> tuple[Bounds, Bounds] | None:
    """The interval of keys of each query that is looked at, over all rows of the batch; None where all are visited."""
    call = part.call
    if (
        type(call.over) is Dense
        or part.keys is not None
        or values_unavailable(call.q, *call.over.leaves())
        or 0 in part.shape
    ):
        return None
    _, _, queries, keys = call.sizes
    interval = call.over.interval(queries, keys, call.q.device)
    first, stop = (bound.reshape(-1, queries).clamp(0, keys) for bound in interval)
    dead = stop <= first
    first, stop = first.masked_fill(dead, keys).amin(0), stop.masked_fill(dead, 0).amax(0)
    chosen = part.numbers("queries")
    return first[chosen].cpu().numpy(), stop[chosen].cpu().numpy()


def _fitting(first: Bounds, stop: Bounds, budget: int, keys: int) -> tuple[int, tuple[int, int]]:
    """How many of these queries fit into a block together, and their keys."""
    rows = max(1, min(len(first), budget))
    while True:
        low, high = int(first[:rows].min()), int(stop[:rows].max())
        low, high = (low, high) if low < high else (0, min(1, keys))
        if rows == 1 or rows * (high - low) <= budget:
            return rows, (low, high)
        rows = max(1, min(rows // 2, budget // (high - low)))


def learned(part: Part) -> bool:
    """Whether the weights may have gradients."""
    call = part.call
    sources = (call.q, call.k, call.table, call.bias, call.sink, part.moved, *call.score.learned())
    return any(x is not None and x.requires_grad for x in sources)


def _widened(call: Call) -> Call:
    table, bias, sink = (None if x is None else widened(x) for x in (call.table, call.bias, call.sink))
    return call._replace(q=widened(call.q), k=widened(call.k), table=table, bias=bias, sink=sink)


def _each_query(part: Part, measure: Block[Tensor]) -> Tensor:
    """A number for each query, the last axis of what `measure` returns."""
    return torch.cat([answer for _, answer in _blocks(part, measure)], -1)


def entropy(part: Part) -> Float[Tensor, "... heads queries"]:
    """−Σ p log p of each query's weights, in nats."""
    return _each_query(part, lambda p, query, key, columns: -(p * positive(p).log()).sum(-1))


def positive(x: Tensor) -> Tensor:
    """`x`, no smaller than the smallest normal number: zero has no finite gradient under a root or a logarithm."""
    return x.clamp(min=torch.finfo(x.dtype).tiny)


def distance(part: Part) -> Float[Tensor, "... heads queries"]:
    """How far each query looks on average: Σ p |key − query|, on a grid from point to point."""
    grid = part.call.over.grid
    if grid is None:
        return _each_query(part, lambda p, query, key, columns: (p * (key - query).abs()).sum(-1))
    offset, prefix = part.call.sizes.keys - part.call.sizes.queries, grid.prefix
    at, there = grid.queries(part.call.q.device), grid.keys(part.call.q.device)

    def far(p: Tensor, query: Tensor, key: Tensor, columns: slice) -> Tensor:
        number = query[:, 0] - offset
        apart = (there[key] - at[number][:, None]).to(p.dtype).norm(dim=-1)
        # tokens that stand nowhere are at no distance
        return (p * apart * ((number >= prefix)[:, None] & (key >= prefix))).sum(-1)

    return _each_query(part, far)


def mass(part: Part, offset: int) -> Float[Tensor, "... heads queries"]:
    """How much of each query's weight lies on the key that stands `offset` after it."""
    return _each_query(part, lambda p, query, key, columns: (p * (key - query == offset)).sum(-1))


def mass_on(part: Part, marked: Float[Tensor, "... keys"]) -> Float[Tensor, "... heads queries"]:
    """How much of each query's weight lies on the marked keys (1: marked)."""
    return _each_query(part, lambda p, query, key, columns: (p * marked[..., None, None, columns].to(p.dtype)).sum(-1))


def mass_at(part: Part, at: Int[Tensor, "... #heads queries"]) -> Float[Tensor, "... heads queries"]:
    """How much of each query's weight lies on one key, by its number; 0 for -1."""
    answers = []
    for place, answer in _blocks(part, lambda p, query, key, columns: p):
        keys = part.numbers("keys")[place.columns]
        answers.append((answer * (at[..., place.rows, None] == keys)).sum(-1))
    return torch.cat(answers, -1)


def received(part: Part, counts: Float[Tensor, "... #heads queries"] | None = None) -> Float[Tensor, "... heads keys"]:
    """How much weight each key receives from all queries together, each of which counts 1 or as much as given."""
    total = _room(part, (*part.shape[:-2], part.shape[-1]))
    ones = total.new_ones(part.shape[-2])
    counts = ones if counts is None else counts.to(total.dtype)
    for place, answer in _blocks(part, lambda p, query, key, columns: p):
        answer = (counts[..., place.rows, None] * answer).sum(-2)
        total = total + _placed(answer, place.columns, part.shape[-1])
    return total


def _room(part: Part, shape: tuple[int, ...]) -> Tensor:
    wide = torch.promote_types(part.call.q.dtype, torch.float32)
    return torch.zeros(shape, dtype=wide, device=part.call.q.device)


def _placed(x: Float[Tensor, "... some"], columns: slice, size: int) -> Float[Tensor, "... size"]:
    """What is known of some keys among zeros for the others."""
    return x if x.shape[-1] == size else torch.nn.functional.pad(x, (columns.start, size - columns.stop))


def top(part: Part, k: int) -> tuple[Float[Tensor, "... heads queries k"], Int[Tensor, "... heads queries k"]]:
    """The k largest weights of each query and their keys' numbers, -1 where it has fewer keys."""

    def largest(p: Tensor, query: Tensor, key: Tensor, columns: slice) -> tuple[Tensor, ...]:
        # a span may hold fewer than k keys
        values, places = torch.nn.functional.pad(p, (0, max(0, k - p.shape[-1]))).topk(k, -1)
        return values, torch.nn.functional.pad(key, (0, max(0, k - len(key))))[places]

    best = [answer for _, answer in _blocks(part, largest)]
    values, keys = (torch.cat(column, -2) for column in zip(*best, strict=True))
    return values, keys.masked_fill(values == 0, -1)


def heatmap(part: Part, size: int) -> Float[Tensor, "... heads height width"]:
    """The weights averaged to at most size x size cells."""
    height, width = (min(size, max(n, 1)) for n in part.shape[-2:])
    total = _room(part, (*part.shape[:-2], height, width))
    down, across = (cells(n, number, total) for n, number in zip(part.shape[-2:], (height, width), strict=True))
    for place, answer in _blocks(part, lambda p, query, key, columns: p @ across[columns]):
        total = total + down[place.rows].T @ answer
    return total


def cells(items: int, number: int, like: Tensor) -> Float[Tensor, "items cells"]:
    """A matrix that averages items in `number` equal groups."""
    item = torch.arange(items, device=like.device)
    average = like.new_zeros(items, number)
    if not number:
        return average
    group = item * number // max(items, 1)
    average[item, group] = 1 / group.bincount(minlength=number).clamp(min=1).to(like.dtype)[group]
    return average


def around(
    part: Part,
    at: Int[Tensor, "all_queries axes"],
    sizes: tuple[int, ...],
    special: int,
    reach: tuple[int, ...],
) -> Float[Tensor, "... heads *window"]:
    """The weights by where the key stands from the query, on a grid, averaged over the queries.

    Args:
        part: what is looked at; its queries have a point each.
        at: where the attention's queries stand among the keys.
        sizes: the keys' grid.
        special: so many keys in front stand nowhere.
        reach: how far to either side, along each axis.
    """
    device = part.call.q.device
    steps = torch.cartesian_prod(*(torch.arange(-n, n + 1, device=device) for n in reach)).view(-1, len(reach))
    last = torch.tensor(sizes, device=device)
    offset = part.call.sizes.keys - part.call.sizes.queries

    def by_step(p: Tensor, query: Tensor, key: Tensor, columns: slice) -> Tensor:
        # (rows, window, axes)
        point = at[query[:, 0] - offset][:, None] + steps
        there = ((point >= 0) & (point < last)).all(-1)
        number = torch.where(there, numbers(point, sizes) + special, part.call.sizes.keys)
        # a column of zeros stands for all keys that are not looked at
        column = torch.full((part.call.sizes.keys + 1,), p.shape[-1], device=device)
        column[key] = torch.arange(len(key), device=device)
        wide = torch.nn.functional.pad(p, (0, 1))
        return wide.gather(-1, column[number].expand(*p.shape[:-1], -1)).sum(-2)

    total = _room(part, (*part.shape[:-2], len(steps)))
    for _, answer in _blocks(part, by_step):
        total = total + answer
    return (total / max(1, part.shape[-2])).unflatten(-1, [2 * n + 1 for n in reach])


def diversity(part: Part) -> Float[Tensor, "... heads heads"]:
    """How differently two heads attend: the squared Hellinger distance 1 − Σ √(p p′), averaged over queries.

    Each query's weights are brought to the sum 1 first: a sink's share, or keys that are not looked at, do not count,
    and neither do queries without any key. 0: the same weights everywhere; 1: no key in common.
    """

    def overlap(p: Tensor, query: Tensor, key: Tensor, columns: slice) -> tuple[Tensor, Tensor]:
        total = p.sum(-1, keepdim=True)
        root = (positive(p) / positive(total)).sqrt() * (p > 0)
        live = (total[..., 0] > 0).to(p.dtype)
        return root.flatten(-2) @ root.flatten(-2).transpose(-2, -1), live @ live.transpose(-2, -1)

    parts = [answer for _, answer in _blocks(part, overlap)]
    shared, queries = (torch.stack(column).sum(0) for column in zip(*parts, strict=True))
    return 1 - shared / queries.clamp(min=1)


def agreement(call: Call, queries: Int[Tensor, " some"]) -> Float[Tensor, "... heads"]:
    """How alike these queries rank all keys, neighbours or not: Spearman's correlation, averaged over pairs of queries.

    1 is one ranking for all: *static* attention. Keys of one score share the mean of their ranks.
    """
    wide = call._replace(q=call.q.double(), k=call.k.double(), over=Dense())
    if call.bias is not None and isinstance(call.over, Graph):
        wide = wide._replace(bias=None)
    # of all pairs i ≠ j only the sum of unit_i·unit_j is wanted: it is known from the sum of all, one query at a time
    total = squares = call.q.new_zeros((), dtype=torch.float64)
    for query in queries:
        rank = _ranks(scores(wide, query[None]))[..., 0, :]
        centred = rank - rank.mean(-1, keepdim=True)
        unit = centred / positive(centred.norm(dim=-1, keepdim=True))
        total, squares = total + unit, squares + unit.square().sum(-1)
    number = len(queries)
    answer = (total.square().sum(-1) - squares) / (number * (number - 1))
    return answer.to(torch.promote_types(call.q.dtype, torch.float32))


def _ranks(s: Float[Tensor, "... keys"]) -> Float[Tensor, "... keys"]:
    ranked = s.sort(-1).values
    s = s.contiguous()
    return (torch.searchsorted(ranked, s) + torch.searchsorted(ranked, s, right=True)).to(s.dtype)


def moved_by(
    v: Float[Tensor, "... value_heads keys dim"], join: Float[Tensor, "... heads out dim"] | None, heads: int
) -> Float[Tensor, "... heads keys"]:
    """The norm of what each head moves when it puts a weight of 1 on a key: |W_O v| (Kobayashi 2020)."""
    with without_autocast(v.device):
        v = v.to(torch.promote_types(v.dtype, torch.float32))
        group = heads // v.shape[-3]
        if join is None:
            norm: Tensor = v.norm(dim=-1)
            return norm.repeat_interleave(group, -2)
        # |W v|² = vᵀ (WᵀW) v: the small product spares the wide one
        join = join.to(v.dtype)
        gram = (join.transpose(-2, -1) @ join).unflatten(-3, (-1, group))
        values = v.unsqueeze(-3)
        squares: Tensor = ((values @ gram) * values).sum(-1)
        return positive(squares).sqrt().flatten(-3, -2)
