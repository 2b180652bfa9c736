"""Attention over items that lie on several ranks, as one differentiable function: what the kernels `exchange` and `ring` share."""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from polyhead.distributed.block_attention import ItemProblem, Rows, Terms, block_gradients
from polyhead.distributed.item_plan import Block, Layouts
from polyhead.distributed.key_value_rows import KeyValueSum
from polyhead.distributed.row_sums import RowMerge, RowSum, empty_rows
from polyhead.kernels import Call, OutputAndLse
from polyhead.kernels.call import flatten_batch, flatten_batch_unless_shared


class GradientSum:
    """The gradients of own queries and of the terms, summed over blocks in at least fp32."""

    def __init__(self, problem: ItemProblem, terms: Terms, rows: Rows) -> None:
        self.problem, self.terms, self.rows = problem, terms, rows
        self.dq = RowSum(empty_rows(problem.call.q))
        self._learned = terms.tensors()
        self.d_terms: list[Tensor | None] = [None] * len(self._learned)

    def add(self, block: Block, k: Tensor, v: Tensor, into: KeyValueSum) -> None:
        """Add the gradients of a block: those of its keys and values to `into`, whose rows are those of k and v."""
        (dq, dk, dv), d_terms = block_gradients(self.problem, block, k, v, self.terms, self.rows)
        self.dq.add(block.queries, dq)
        into.add(block.keys, dk, dv)
        for i, found in enumerate(d_terms):
            if found is not None:
                before = self.d_terms[i]
                self.d_terms[i] = found if before is None else before + found


class Transport(Protocol):
    """How keys and values reach the ranks that need them."""

    def forward(self, problem: ItemProblem, merge: RowMerge) -> tuple[Tensor, ...]:
        """Compute all blocks into `merge`; returns what the backward pass needs besides q, k and v."""

    def backward(
        self, problem: ItemProblem, gradients: GradientSum, saved: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor | None]:
        """Compute the gradients of all blocks; returns those of the own k and v, as one where the values are the keys."""


def attend_items(call: Call, transport: Transport, layouts: Layouts, group: dist.ProcessGroup) -> OutputAndLse:
    """The attention of own queries, by a transport. Every rank of the group must call it."""
    batch, seed = call.sizes.batch, call.seed
    if call.dropout > 0 and seed is not None:
        # every rank has drawn one; the first rank's counts
        seed = seed.clone()
        dist.broadcast(seed, group_src=0, group=group)
    bias = None if call.bias is None else flatten_batch_unless_shared(call.bias, batch, 3)
    k = flatten_batch(call.k)
    v = k if call.v is call.k else flatten_batch(call.v)
    flat = call._replace(q=flatten_batch(call.q), k=k, v=v, bias=bias, seed=seed)
    problem = ItemProblem(flat, call.over.whole, layouts.queries.length, layouts.query_offset, batch)
    learned = tuple(x for x in call.score.learned() if x.requires_grad)
    out, lse = _ItemAttention.apply(transport, problem, flat.q, k, v, flat.relative_bias, bias, *learned)
    return out.reshape(*call.q.shape[:-1], out.shape[-1]), lse.reshape(call.q.shape[:-1])


class _ItemAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, transport: Transport, problem: ItemProblem, *tensors: Any) -> tuple[Tensor, Tensor]:
        q, k, v, table, bias, *learned = tensors
        # tensors are saved by autograd, not by the problem: a reference to an input would keep the graph alive
        problem = problem._replace(call=_with_tensors(problem.call, q, k, v, table, bias))
        merge = RowMerge(q, v)
        saved = transport.forward(problem, merge)
        out, lse = merge.result()
        out = out.to(v.dtype)
        ctx.transport, ctx.learned, ctx.num_saved = transport, len(learned), len(saved)
        ctx.problem = problem._replace(call=_with_tensors(problem.call, None, None, None, None, None))
        ctx.v_is_k = v is k
        ctx.save_for_backward(q, k, v, table, bias, out, lse, *learned, *saved)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None) -> Any:
        q, k, v, table, bias, out, lse, *rest = ctx.saved_tensors
        learned, saved = tuple(rest[: ctx.learned]), tuple(rest[ctx.learned :])
        # what autograd hands back are new objects: one tensor for keys and values must stay one
        v = k if ctx.v_is_k else v
        problem = ctx.problem._replace(call=_with_tensors(ctx.problem.call, q, k, v, table, bias))
        needed = ctx.needs_input_grad[5:7]
        terms = Terms(table, bias, learned).with_gradients(needed)
        rows = Rows(
            out, lse.masked_fill(lse == -torch.inf, 0.0), torch.zeros_like(out) if d_out is None else d_out, d_lse
        )
        gradients = GradientSum(problem, terms, rows)
        dk, dv = ctx.transport.backward(problem, gradients, saved)
        found = iter(gradients.d_terms)
        d_table, d_bias = (next(found) if x is not None and x.requires_grad else None for x in terms[:2])
        d_values = None if dv is None else dv.to(v.dtype)
        return None, None, gradients.dq.total().to(q.dtype), dk.to(k.dtype), d_values, d_table, d_bias, *found


def _with_tensors(call: Call, q: Any, k: Any, v: Any, table: Any, bias: Any) -> Call:
    return call._replace(q=q, k=k, v=v, relative_bias=table, bias=bias)
