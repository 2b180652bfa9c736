"""Attention over items that lie on several ranks, as one differentiable function: what the kernels `exchange` and `ring` share."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor

from polyhead.distributed.block_attention import ItemProblem, Rows, Terms, block_gradients
from polyhead.distributed.item_plan import Block, Layouts
from polyhead.distributed.key_value_rows import KeyValueSum
from polyhead.distributed.row_sums import RowSum
from polyhead.kernels import Call, OutputAndLse
from polyhead.kernels.call import flatten_batch
from polyhead.neighbourhood.shapes import flatten_batch_unless_shared


class Gradients(NamedTuple):
    """The gradients of q, k and v (None where the values are the keys), and of the terms that need them."""

    q: Tensor
    k: Tensor
    v: Tensor | None
    terms: list[Tensor | None]


class GradientSum:
    """The gradients of own queries and of the terms, summed over blocks in at least fp32."""

    def __init__(self, problem: ItemProblem, terms: Terms, rows: Rows, target: Tensor | None = None) -> None:
        """`target` is where the gradient of q is to be."""
        self.problem, self.terms, self.rows = problem, terms, rows
        self._dq = RowSum(problem.call.q, target)
        self._d_terms: list[Tensor | None] = [None] * len(terms.tensors())

    def add(self, block: Block, k: Tensor, v: Tensor, into: KeyValueSum) -> None:
        """Add the gradients of a block: those of its keys and values to `into`, whose rows are those of k and v."""
        (dq, dk, dv), d_terms = block_gradients(self.problem, block, k, v, self.terms, self.rows)
        self._dq.add(block.queries, dq)
        into.add(block.keys, dk, dv)
        for i, found in enumerate(d_terms):
            if found is not None:
                before = self._d_terms[i]
                self._d_terms[i] = found if before is None else before + found

    def total(self, dk: Tensor, dv: Tensor | None) -> Gradients:
        """The gradients of all blocks, with those of the own keys and values."""
        return Gradients(self._dq.total(), dk, dv, self._d_terms)


class Transport(Protocol):
    """How keys and values reach the ranks that need them."""

    def forward(self, problem: ItemProblem, saves: bool) -> tuple[tuple[Tensor, Tensor], list[Tensor]]:
        """The output and the log-sum-exp of whole rows; and, if `saves`, what the backward pass needs besides q, k and v."""

    def backward(self, problem: ItemProblem, terms: Terms, rows: Rows, saved: tuple[Tensor, ...]) -> Gradients:
        """The gradients of all blocks."""


def attend_items(call: Call, transport: Transport, layouts: Layouts, group: dist.ProcessGroup) -> OutputAndLse:
    """The attention of own queries, by a transport. Every rank of the group must call it."""
    batch, seed = call.sizes.batch, call.seed
    if call.dropout > 0 and seed is not None:
        # every rank has drawn one; the first rank's counts
        seed = seed.clone()
        dist.broadcast(seed, group_src=0, group=group)
    bias = None if call.bias is None else flatten_batch_unless_shared(call.bias, batch, 3)
    shift = None if bias is None else _common_bias(bias)
    if bias is not None and shift is not None:
        bias = bias - shift
    k = flatten_batch(call.k)
    v = k if call.v is call.k else flatten_batch(call.v)
    flat = call._replace(q=flatten_batch(call.q), k=k, v=v, bias=bias, seed=seed)
    problem = ItemProblem(flat, call.over.whole, layouts.queries.length, layouts.query_offset, batch)
    learned = tuple(x for x in call.score.learned() if x.requires_grad)
    tensors = flat.q, k, v, flat.relative_bias, bias, *learned
    saves = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
    out, lse = _ItemAttention.apply(transport, problem, saves, *tensors)
    lse = lse if shift is None else lse + shift[..., 0]
    return out.reshape(*call.q.shape[:-1], out.shape[-1]), lse.reshape(call.q.shape[:-1])


def _common_bias(
    bias: Float[Tensor, "#batch #heads #queries #keys"],
) -> Float[Tensor, "#batch #heads #queries 1"] | None:
    """What the biases of a row have in common, without gradients; None if that is not much.

    A constant changes no weight, but in a row of -1e9 a log-sum-exp in fp32 does not hold the number of keys, by which blocks are
    merged.
    """
    if not bias.numel():
        return None
    low, high = bias.detach().aminmax(dim=-1, keepdim=True)
    common = torch.where(high < 0, high, torch.where(low > 0, low, 0))
    common = torch.where(common.isfinite(), common, 0)
    return common if bool(common.any()) else None


class _ItemAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, transport: Transport, problem: ItemProblem, saves: bool, *tensors: Any
    ) -> tuple[Tensor, Tensor]:
        q, k, v, table, bias, *learned = tensors
        # tensors are saved by autograd, not by the problem: a reference to an input would keep the graph alive
        problem = problem._replace(call=_with_tensors(problem.call, q, k, v, table, bias))
        (out, lse), saved = transport.forward(problem, saves)
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
        needed = ctx.needs_input_grad[6:8]
        terms = Terms(table, bias, learned).with_gradients(needed)
        rows = Rows(
            out, lse.masked_fill(lse == -torch.inf, 0.0), torch.zeros_like(out) if d_out is None else d_out, d_lse
        )
        dq, dk, dv, d_terms = ctx.transport.backward(problem, terms, rows, saved)
        found = iter(d_terms)
        d_table, d_bias = (next(found) if x is not None and x.requires_grad else None for x in terms[:2])
        d_values = None if dv is None else dv.to(v.dtype)
        return None, None, None, dq.to(q.dtype), dk.to(k.dtype), d_values, d_table, d_bias, *found


def _with_tensors(call: Call, q: Any, k: Any, v: Any, table: Any, bias: Any) -> Call:
    return call._replace(q=q, k=k, v=v, relative_bias=table, bias=bias)
