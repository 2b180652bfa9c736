"""Attention over the edges of a graph in torch alone: any device, dtype, score, bias and position.

Scores and weights are one number a head and edge. What is heads x edges x dim is made for some edges at a time, forward
and backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from polyhead._torch import values_unavailable, without_autocast
from polyhead.kernels.call import Call, Result, to_heads
from polyhead.kernels.dropout import keeps
from polyhead.kernels.reference import through_sink
from polyhead.neighbourhood import Graph

# Numbers in one block of edges x heads x dim: four million of fp32 are 16 MB.
BLOCK = 1 << 22


class Edges:
    """out_i = Σ_j w_ij · softmax_j(score(q_i, k_j)) v_j over the in-edges of i."""

    name = "edges"

    def refuses(self, call: Call) -> str | None:
        return None

    def __call__(self, call: Call) -> Result:
        assert isinstance(call.over, Graph)
        source, destination = pairs = call.over.edge_index
        with without_autocast(call.q.device):
            p, lse = softmax(_scores(call, pairs), destination, call.sizes.queries)
            if call.dropout > 0:
                p = p * kept(call, pairs) / (1 - call.dropout)
            if call.over.weights is not None:
                p = p * call.over.weights.to(p.dtype)
            return summed(p, call.v, source, destination, call.sizes.queries).to(call.v.dtype), lse


def weights(call: Call, heads: Int[Tensor, " some"] | None = None) -> Float[Tensor, "... heads edges"]:
    """The weights that the values are summed with, before dropout, in at least fp32; of all heads or some."""
    graph = call.over
    assert isinstance(graph, Graph)
    pairs = graph.edge_index
    with without_autocast(call.q.device):
        s = _scores(call, pairs)
        s = s if heads is None else s.index_select(-2, heads)
        p, lse = softmax(s, pairs[1], call.sizes.queries)
        if call.sink is not None:
            share = through_sink(lse, call.sink if heads is None else call.sink.index_select(-1, heads))
            p = p * share[..., 0].index_select(-1, pairs[1])
        return p if graph.weights is None else p * graph.weights.to(p.dtype)


def _scores(call: Call, pairs: Int[Tensor, "2 edges"]) -> Float[Tensor, "... heads edges"]:
    """The scores in at least fp32."""
    graph, heads = call.over, call.sizes.heads
    assert isinstance(graph, Graph)
    wide = torch.promote_types(call.q.dtype, torch.float32)
    # widened before rows are taken: the gradient of a row is a sum over its edges
    q, k = call.q.to(wide), to_heads(call.k.to(wide), heads)

    def block(source: Tensor, destination: Tensor, features: Tensor | None) -> Tensor:
        return call.score.pairs(q.index_select(-2, destination), k.index_select(-2, source), features)

    parts = []
    for cut, compute in _blocks(call, block):
        features = None if graph.features is None else graph.features[cut]
        parts.append(compute(*pairs[:, cut], features))
    s = torch.cat(parts, -1) if len(parts) > 1 else parts[0]
    if call.table is not None:
        # a position counts nodes by their numbers
        step = pairs[0] - pairs[1] - (graph.sources - graph.destinations)
        s = s + call.table.to(wide)[..., step + (graph.sources - 1)]
    return s if call.bias is None else s + call.bias.to(wide)


def summed(
    p: Float[Tensor, "... heads edges"],
    v: Float[Tensor, "... value_heads sources dim"],
    source: Int[Tensor, " edges"],
    destination: Int[Tensor, " edges"],
    destinations: int,
) -> Float[Tensor, "... heads destinations dim"]:
    """Σ p v over the in-edges of every destination."""
    # widened before rows are taken: the gradient of a row is a sum over its edges
    v = to_heads(v.to(p.dtype), p.shape[-2])
    out = p.new_zeros(*p.shape[:-1], destinations, v.shape[-1])

    def block(part: Tensor, at: Tensor) -> Tensor:
        return part[..., None] * v.index_select(-2, at)

    size = p.shape[:-1].numel() * v.shape[-1]
    for cut, compute in _cuts(source.shape[0], size, p.requires_grad or v.requires_grad, block):
        part = compute(p[..., cut], source[cut])
        # in place where it can be: no copy of the whole for every block
        add = out.index_add if values_unavailable() else out.index_add_
        out = add(-2, destination[cut], part)
    return out


Block = Callable[..., Tensor]


def _blocks(call: Call, block: Block) -> Iterator[tuple[slice, Block]]:
    assert isinstance(call.over, Graph)
    learned = (call.q, call.k, *call.over.leaves(), *call.score.learned())
    size = call.q.shape[:-2].numel() * call.q.shape[-1]
    return _cuts(call.over.num_edges, size, any(x.requires_grad for x in learned), block)


def _cuts(edges: int, size: int, learns: bool, block: Block) -> Iterator[tuple[slice, Block]]:
    """Stretches of edges, of which one has `size` numbers; a block that learns is computed anew in backward."""
    if torch.compiler.is_compiling():
        # a program serves any number of edges
        yield slice(None), block
        return
    step = max(1, BLOCK // max(size, 1))
    again = learns and edges > step and torch.is_grad_enabled() and not values_unavailable()
    compute = (lambda *given: checkpoint(block, *given, use_reentrant=False)) if again else block
    for begin in range(0, max(edges, 1), step):
        yield slice(begin, begin + step), compute


def softmax(
    s: Float[Tensor, "... heads edges"], destination: Int[Tensor, " edges"], destinations: int
) -> tuple[Float[Tensor, "... heads edges"], Float[Tensor, "... heads destinations"]]:
    """The weights over the in-edges of each destination, and the log-sum-exp: -inf where there are none."""
    room = (*s.shape[:-1], destinations)
    at = destination.expand(s.shape)
    top = s.new_full(room, -torch.inf).scatter_reduce(-1, at, s.detach(), "amax")
    empty = top == -torch.inf
    top = top.masked_fill(empty, 0.0)
    e = (s - top.index_select(-1, destination)).exp()
    total = s.new_zeros(room).index_add(-1, destination, e)
    # where all edges of a node are forbidden by a bias of -inf, as where it has none
    safe = total.masked_fill(empty, 1.0)
    return e / safe.index_select(-1, destination), (safe.log() + top).masked_fill(empty, -torch.inf)


def kept(call: Call, pairs: Int[Tensor, "2 edges"]) -> Tensor:
    """Which edges dropout leaves, for every head of every row of the batch."""
    assert call.seed is not None
    batch, heads, _, _ = call.sizes
    number = torch.arange(torch.Size((*batch, heads)).numel(), device=pairs.device).reshape(*batch, heads, 1)
    return keeps(call.seed, number, pairs[1], pairs[0], call.dropout)
