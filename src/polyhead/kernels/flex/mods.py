"""What is added to a score and which pairs dropout keeps, as functions of one pair that flex_attention compiles."""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from polyhead.kernels.call import Call
from polyhead.kernels.dropout import hash_pairs, keep_threshold
from polyhead.neighbourhood.mask_mods import MaskMod, device_numbers
from polyhead.neighbourhood.shapes import Sizes, flatten_batch_unless_shared

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def make_score_mod(call: Call) -> ScoreMod | None:
    """The score_mod that adds the relative bias and the bias of a call; None if it has neither."""
    compute_dtype = torch.promote_types(call.q.dtype, torch.float32)
    table, bias = (None if x is None else _as_captured(x, compute_dtype) for x in (call.relative_bias, call.bias))
    if table is None:
        return None if bias is None else _add_bias(bias, call.sizes)
    add_table = _add_relative_bias(table, call.sizes.queries)
    if bias is None:
        return add_table
    add_bias = _add_bias(bias, call.sizes)
    return lambda score, row, head, query, key: add_bias(add_table(score, row, head, query, key), row, head, query, key)


def _as_captured(x: Tensor, compute_dtype: torch.dtype) -> Tensor:
    """`x` as the kernel reads it: learned numbers in full precision, since their gradient is a sum over many pairs."""
    learned = x.requires_grad and torch.is_grad_enabled()
    return x.to(compute_dtype) if learned or x.dtype.itemsize > compute_dtype.itemsize else x


def _add_relative_bias(table: Float[Tensor, "heads distances"], queries: int) -> ScoreMod:
    # the last query is at the last key, so entry 0 is for the first key and the last query
    (last,) = device_numbers("relative bias", (queries - 1,), table.device)
    return lambda score, row, head, query, key: score + table[head, key - query + last]


def _add_bias(bias: Float[Tensor, "... #heads #queries #keys"], sizes: Sizes) -> ScoreMod:
    bias = flatten_batch_unless_shared(bias, sizes.batch, 3)
    varying = tuple(n != 1 for n in bias.shape)
    if not any(varying):
        # flex has no gradient for a number that is not indexed
        number = bias.reshape(1).expand(sizes.heads)
        return lambda score, row, head, query, key: score + number[head]
    bias = bias[tuple(slice(None) if vary else 0 for vary in varying)]

    def add(score: Tensor, row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        index = tuple(at for at, vary in zip((row, head, query, key), varying, strict=True) if vary)
        return score + bias[index]

    return add


def make_keep_mod(call: Call) -> MaskMod | None:
    """The mask_mod of the pairs that dropout keeps, the same as in every kernel; None without dropout."""
    if call.dropout == 0:
        return None
    assert call.seed is not None
    at, device = call.global_indices, call.q.device
    first_head, heads = (0, call.sizes.heads) if at is None or at.num_heads is None else (at.first_head, at.num_heads)
    threshold, first, total = device_numbers("dropout", (keep_threshold(call.dropout), first_head, heads), device)
    seed = call.seed.to(device).reshape(())
    query_index, key_index = call.item_indices

    def is_kept(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        number = row * total + first + head
        query = query if query_index is None else query_index[query]
        key = key if key_index is None else key_index[key]
        return hash_pairs(seed, number, query, key) >= threshold

    return is_kept
