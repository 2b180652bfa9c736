"""The heads of a call, a few at a time, so that what is under way and in work is small."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from polyhead.kernels import Call
from polyhead.score import Dot

# Bytes of others' keys and values that a rank may hold for all heads; else those of a piece, and its output, are to be no more.
MAX_PIECE_BYTES = 4 << 20


class HeadPiece(NamedTuple):
    """Consecutive heads of queries, keys and values that belong together."""

    q: slice
    k: slice
    v: slice


def cut_heads(call: Call, pieces: int) -> list[HeadPiece]:
    """The heads of a call in pieces of equal size."""
    heads = [x.shape[-3] // pieces for x in (call.q, call.k, call.v)]
    return [HeadPiece(*(slice(i * n, (i + 1) * n) for n in heads)) for i in range(pieces)]


def count_pieces(call: Call, held_bytes: int, output_bytes: int, threads: int) -> int:
    """The number of pieces, of which each has work for all threads. Every rank must pass the same numbers.

    Args:
        held_bytes: others' keys and values for all heads, on the rank that receives most.
        output_bytes: of all heads.
    """
    if held_bytes <= MAX_PIECE_BYTES or type(call.score) is not Dot or call.over.by_head:
        return 1
    heads, batch = math.gcd(call.k.shape[-3], call.v.shape[-3]), math.prod(call.sizes.batch)
    fewest = 1
    for pieces in range(1, heads + 1):
        if heads % pieces == 0 and batch * call.q.shape[-3] >= threads * pieces:
            fewest = pieces
            if held_bytes + output_bytes <= MAX_PIECE_BYTES * pieces:
                break
    return fewest


def select_piece(call: Call, piece: HeadPiece) -> Call:
    """The call of some heads, in a batch with one axis."""
    heads, at = call.q.shape[-3], call.global_indices
    assert at is not None
    k = call.k[:, piece.k]
    indices = at._replace(first_head=at.first_head + piece.q.start, num_heads=at.num_heads or heads)
    return call._replace(
        q=call.q[:, piece.q], k=k, v=k if call.v is call.k else call.v[:, piece.v],
        relative_bias=select_heads(call.relative_bias, 0, piece.q, heads),
        bias=select_heads(call.bias, 1, piece.q, heads), global_indices=indices,
    )  # fmt: skip


def select_heads(x: Tensor | None, axis: int, heads: slice, number: int) -> Tensor | None:
    """Some heads of a tensor for `number` heads; the same tensor if it is shared by all of them."""
    if x is None or x.shape[axis] != number:
        return x
    return x.narrow(axis, heads.start, heads.stop - heads.start)


def join_gradients(parts: list[Tensor | None], whole: Tensor, axis: int) -> Tensor | None:
    """The gradient of a whole tensor from those of what `select_heads` returned for each piece."""
    present = [x for x in parts if x is not None]
    if not present:
        return None
    if sum(x.shape[axis] for x in parts if x is not None) == whole.shape[axis] and len(present) == len(parts):
        return torch.cat(present, axis)
    return torch.stack(present).sum(0)
