"""Attention of own queries to one block of keys, forward and backward.

The backward pass of a block uses the output and the log-sum-exp of the whole rows: exp(score - lse) are the final weights. So
no block needs the gradient of its own log-sum-exp, and nothing of a block is kept between the passes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from polyhead.distributed.head_pieces import HeadPiece, join_gradients, select_heads, select_piece
from polyhead.distributed.item_plan import Block
from polyhead.kernels import Call
from polyhead.kernels.call import GlobalIndices
from polyhead.kernels.reference import Reference
from polyhead.kernels.tiled import Tiled
from polyhead.neighbourhood import Neighbourhood
from polyhead.neighbourhood.shapes import KeyInterval, flatten_batch_unless_shared
from polyhead.score import Dot


class BlockNeighbourhood(Neighbourhood):
    """A neighbourhood of a whole attention, for the queries and keys of a block, in a batch with one axis."""

    tensors = ("first", "stop", "query_index", "key_index")

    def __init__(self, over: Neighbourhood, block: Block, batch: tuple[int, ...], query_offset: int) -> None:
        self.over, self.exact, self.by_head, self.batch = over, over.exact, over.by_head, batch
        self.query_offset = query_offset
        self.query_index, self.key_index = block.query_index, block.key_index
        self.first, self.stop = block.first, block.stop

    def allows(self, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        local = query.flatten() - (len(self.key_index) - len(self.query_index))
        queries, keys = self.query_index.to(key.device)[local], self.key_index.to(key.device)[key.flatten()]
        allowed = self.over.allows(head, queries[:, None] + self.query_offset, keys)
        return flatten_batch_unless_shared(allowed, self.batch, 3) if allowed.dim() > 3 else allowed

    def interval(self, queries: int, keys: int, device: torch.device) -> KeyInterval:
        first, stop = self.first.to(device), self.stop.to(device)
        return (first[0], stop[0]) if len(first) == 1 else (first, stop)


class Terms(NamedTuple):
    """What an attention reads besides q, k and v and may have gradients of: bias terms, and parameters of the score."""

    relative_bias: Float[Tensor, "heads distances"] | None
    bias: Float[Tensor, "#batch #heads #queries #all_keys"] | None
    learned: tuple[Tensor, ...] = ()

    def with_gradients(self, needed: tuple[bool, ...]) -> Terms:
        """The same terms as leaves, of which some need gradients; parameters stay as they are."""
        own = [
            None if x is None else x.detach().requires_grad_(need) for x, need in zip(self[:2], needed[:2], strict=True)
        ]
        return Terms(own[0], own[1], self.learned)

    def select_heads(self, piece: HeadPiece, number: int) -> Terms:
        """The terms of some of `number` heads, as leaves."""
        table = select_heads(self.relative_bias, 0, piece.q, number)
        bias = select_heads(self.bias, 1, piece.q, number)
        return Terms(table, bias).with_gradients(tuple(x is not None and x.requires_grad for x in self[:2]))

    def join_gradients(self, found: list[list[Tensor | None]]) -> list[Tensor | None]:
        """The gradients of `tensors`, from those of the terms of each piece."""
        pairs = [(axis, x) for axis, x in enumerate(self[:2]) if x is not None and x.requires_grad]
        return [join_gradients([own[i] for own in found], x, axis) for i, (axis, x) in enumerate(pairs)]

    def tensors(self) -> list[Tensor]:
        """Those that need gradients, in order."""
        return [x for x in (self.relative_bias, self.bias, *self.learned) if x is not None and x.requires_grad]


class ItemProblem(NamedTuple):
    """Attention of own queries over items on several ranks: the call of one rank, in a batch with one axis."""

    call: Call
    over: Neighbourhood
    """The neighbourhood of the whole attention."""
    queries: int
    """The number of queries in the whole attention."""
    query_offset: int
    """The position of the first of them along the keys."""
    batch: tuple[int, ...]
    """The batch axes that were flattened."""

    def block_call(self, block: Block, q: Tensor, k: Tensor, v: Tensor, terms: Terms) -> Call:
        """The attention of a block's queries to its keys; q, k and v are those of the block."""
        device, at = q.device, self.call.global_indices or GlobalIndices()
        query_index, key_index = block.query_index.to(device), block.key_index.to(device)
        table, bias = terms.relative_bias, terms.bias
        if bias is not None:
            bias = bias if bias.shape[-2] == 1 else bias[..., block.queries, :]
            bias = bias if bias.shape[-1] == 1 else bias.index_select(-1, key_index)
        if table is not None and not block.has_gaps:
            # the entry of (query, key) is key - query + queries - 1; a block's table begins with its last query and first key
            start = int(block.key_index[0]) - int(block.query_index[-1]) + self.queries - 1
            table = table[:, start : start + len(query_index) + len(key_index) - 1]
        elif table is not None:
            added = table[:, key_index - query_index[:, None] + (self.queries - 1)]
            bias, table = added if bias is None else bias + added, None
        over = BlockNeighbourhood(self.over, block, self.batch, self.query_offset)
        return self.call._replace(
            q=q, k=k, v=v, over=over, relative_bias=table, bias=bias, sink=None,
            global_indices=at._replace(queries=query_index, keys=key_index),
        )  # fmt: skip

    def select_heads(self, piece: HeadPiece) -> ItemProblem:
        """The problem for some heads."""
        return self._replace(call=select_piece(self.call, piece))

    def attend(self, block: Block, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """The output and the log-sum-exp of a block; k and v are the tensors that its keys are places in."""
        terms = Terms(self.call.relative_bias, self.call.bias)
        q = self.call.q[..., block.queries, :]
        call = self.block_call(block, q, k[..., block.keys, :], v[..., block.keys, :], terms)
        out, lse = (Tiled() if is_dot_product(call) else Reference())(call)
        assert lse is not None
        return out, lse


def is_dot_product(call: Call) -> bool:
    """Whether blocks are computed tile by tile, instead of by the definition."""
    return type(call.score) is Dot and call.q.numel() > 0 and call.k.numel() > 0 and call.v.numel() > 0


class Rows(NamedTuple):
    """The output and the log-sum-exp of whole rows, and their gradients."""

    out: Float[Tensor, "batch heads queries value_dim"]
    lse: Float[Tensor, "batch heads queries"]
    d_out: Float[Tensor, "batch heads queries value_dim"]
    d_lse: Float[Tensor, "batch heads queries"] | None

    def select(self, queries: slice) -> Rows:
        d_lse = None if self.d_lse is None else self.d_lse[..., queries]
        return Rows(self.out[..., queries, :], self.lse[..., queries], self.d_out[..., queries, :], d_lse)

    def select_heads(self, heads: slice) -> Rows:
        d_lse = None if self.d_lse is None else self.d_lse[:, heads]
        return Rows(self.out[:, heads], self.lse[:, heads], self.d_out[:, heads], d_lse)


def block_gradients(
    problem: ItemProblem, block: Block, k: Tensor, v: Tensor, terms: Terms, rows: Rows
) -> tuple[tuple[Tensor, Tensor, Tensor], list[Tensor | None]]:
    """The gradients of the q, k and v of a block, and of the terms that need gradients."""
    q = problem.call.q[..., block.queries, :].detach().requires_grad_()
    k, v = (x[..., block.keys, :].detach().requires_grad_() for x in (k, v))
    rows = rows.select(block.queries)
    with torch.enable_grad():
        call = problem.block_call(block, q, k, v, terms)
        outputs, towards = _tiled_gradients(call, rows) if is_dot_product(call) else _recomputed_gradients(call, rows)
        pairs = [(y, dy) for y, dy in zip(outputs, towards, strict=True) if y.requires_grad]
        inputs = [q, k, v, *terms.tensors()]
        found = torch.autograd.grad([y for y, _ in pairs], inputs, [dy for _, dy in pairs], allow_unused=True)
    own = [torch.zeros_like(x) if g is None else g for x, g in zip(inputs[:3], found[:3], strict=True)]
    # whoever sums gradients takes over their memory, and autograd may return one tensor for two inputs
    memory = [x.untyped_storage().data_ptr() for x in own]
    dq, dk, dv = (x.clone() if memory[i] in memory[:i] else x for i, x in enumerate(own))
    return (dq, dk, dv), list(found[3:])


def _tiled_gradients(call: Call, rows: Rows) -> tuple[list[Tensor], list[Tensor]]:
    """The inputs of the operator that may need gradients, and these gradients."""
    arguments = Tiled().operator_arguments(call)
    v = arguments[2]
    # the operator pads keys or values to one width, and so its output
    out, d_out = (_pad_features(x, v.shape[-1]).to(v.dtype) for x in (rows.out, rows.d_out))
    inputs = [*arguments[:3], arguments[6], arguments[7]]
    needed = [x is not None and x.requires_grad for x in inputs]
    with torch.no_grad():
        detached = [x.detach() if isinstance(x, Tensor) else x for x in arguments]
        d_lse = None if rows.d_lse is None else rows.d_lse.to(rows.lse.dtype)
        found = torch.ops.polyhead.tiled_backward(d_out, d_lse, out, rows.lse, *detached, needed)
    pairs = [(x, g) for x, g, need in zip(inputs, found, needed, strict=True) if need and x is not None]
    return [x for x, _ in pairs], [g for _, g in pairs]


def _pad_features(x: Tensor, width: int) -> Tensor:
    # F.pad copies even where nothing is added
    return x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))


def _recomputed_gradients(call: Call, rows: Rows) -> tuple[list[Tensor], list[Tensor]]:
    """The outputs of a block, recomputed, and their gradients: the block's part of each row is exp(its lse - lse of the row)."""
    out, lse = Reference()(call)
    assert lse is not None
    with torch.no_grad():
        share = (lse - rows.lse).exp().nan_to_num_(0.0)
        d_out = rows.d_out.to(share.dtype)
        d_lse = (d_out * (out.to(share.dtype) - rows.out.to(share.dtype))).sum(-1)
        d_lse = share * (d_lse if rows.d_lse is None else d_lse + rows.d_lse)
        d_out = (share[..., None] * d_out).to(out.dtype)
    return [out, lse], [d_out, d_lse.to(lse.dtype)]
