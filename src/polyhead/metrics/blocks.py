"""Blocks of queries with the keys they may attend to: head metrics see one block at a time, never all queries x keys.

On the CPU blocks are small, and the intervals of the neighbourhood say which keys each visits. On another device blocks are few
and large, and they are chosen by what the host knows: sizes, and the intervals of neighbourhoods without tensors. So the host
never waits for the device between blocks.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from functools import reduce
from typing import NamedTuple, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from polyhead._torch import is_tracing_or_dataless, to_at_least_fp32, under_transform
from polyhead.kernels.call import Call
from polyhead.kernels.tile_plan import Bounds
from polyhead.metrics.attention_parts import DensePart
from polyhead.neighbourhood import Dense, intersection_parts

# Weights in one block on the CPU: 4 MB of fp32. Smaller blocks take more time; larger ones take more memory and save no time.
BLOCK_WEIGHTS = 1 << 20
# The same on other devices, 128 MB: each block takes some tens of launches, and as many times its size in memory as it has
# tensors at once, about five.
DEVICE_BLOCK_WEIGHTS = 1 << 25

BlockValue = TypeVar("BlockValue")


class Block(NamedTuple):
    """Some queries of a part, and the keys that they may attend to."""

    rows: slice
    columns: slice
    """The queries and keys, as slices of those of the part."""
    query: Int[Tensor, "rows 1"]
    key: Int[Tensor, " keys"]
    """Their positions, counted along the keys of the call."""


# Measures a block by its weights.
BlockFunction = Callable[[Float[Tensor, "... heads rows keys"], Block], BlockValue]


def block_weights(device: torch.device) -> int:
    """How many weights one block may have."""
    return BLOCK_WEIGHTS if device.type == "cpu" else DEVICE_BLOCK_WEIGHTS


def measure_blocks(part: DensePart, measure: BlockFunction[BlockValue]) -> Iterator[tuple[Block, BlockValue]]:
    """What `measure` returns for each block of a part: for its attention weights, even if the part is of contributions.

    Where gradients are needed, backward computes each block again instead of storing it.
    """
    queries, keys = part.indices("queries"), part.indices("keys")
    needs_grad = torch.is_grad_enabled() and not under_transform() and weights_require_grad(part)
    if needs_grad:
        # widened here, not per block: the gradients of all blocks are summed in fp32 or fp64
        part = part._replace(call=_call_to_at_least_fp32(part.call))
    sizes = part.call.sizes
    for rows, span in _block_spans(part):
        columns = slice(0, len(keys)) if span is None else slice(*span)
        block = Block(rows, columns, queries[rows, None] + (sizes.keys - sizes.queries), keys[columns])

        def measure_block(
            chosen: Tensor, block: Block = block, span: tuple[int, int] | None = span, part: DensePart = part
        ) -> BlockValue:
            return measure(part.attention_weights(chosen, span), block)

        if needs_grad:
            # nothing is random, so there is no state of generators to restore
            yield block, checkpoint(measure_block, queries[rows], use_reentrant=False, preserve_rng_state=False)
        else:
            yield block, measure_block(queries[rows])


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


def _block_spans(part: DensePart) -> Iterator[tuple[slice, tuple[int, int] | None]]:
    """Blocks of the part's queries, and the span of keys that each may attend to (None: all)."""
    number, keys = part.shape[-2], part.call.sizes.keys
    budget = block_weights(part.call.q.device) // max(1, part.shape[:-2].numel())
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
    over, device = call.over, call.q.device
    if device.type != "cpu":
        # reading what lies on the device would make the host wait; selected queries lie there too
        known = [own for own in intersection_parts(over) if not own.leaves() and not own.full]
        if not known or part.queries is not None:
            return None
        over, device = reduce(operator.and_, known), torch.device("cpu")
    _, _, queries, keys = call.sizes
    first, stop = (bound.reshape(-1, queries).clamp(0, keys) for bound in over.interval(queries, keys, device))
    empty = stop <= first
    first, stop = first.masked_fill(empty, keys).amin(0), stop.masked_fill(empty, 0).amax(0)
    if part.queries is not None:
        first, stop = first[part.queries], stop[part.queries]
    return first.numpy(), stop.numpy()


def _fit_block(first: Bounds, stop: Bounds, budget: int, keys: int) -> tuple[int, tuple[int, int]]:
    """How many of the first queries fit into one block, and the span of their keys."""
    rows = max(1, min(len(first), budget))
    while True:
        low, high = int(first[:rows].min()), int(stop[:rows].max())
        low, high = (low, high) if low < high else (0, min(1, keys))
        if rows == 1 or rows * (high - low) <= budget:
            return rows, (low, high)
        rows = max(1, min(rows // 2, budget // (high - low)))
