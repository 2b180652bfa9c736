"""Attention along the edges of a graph in torch only: any device, dtype, score, bias and position.

Scores and weights are one number per head and edge. Intermediates of heads x edges x dim are computed in blocks of edges,
forward and backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from polyhead._torch import is_tracing_or_dataless, without_autocast
from polyhead.kernels.call import Call, OutputAndLse, repeat_grouped_heads
from polyhead.kernels.dropout import keep_mask, pair_numbers
from polyhead.kernels.reference import non_sink_share
from polyhead.neighbourhood import Graph

# Numbers in one block of edges x heads x dim: four million in fp32 are 16 MB.
BLOCK_NUMEL = 1 << 22


class EdgesTorch:
    """out_i = Σ_j w_ij · softmax_j(score(q_i, k_j)) v_j over the in-edges of i."""

    name = "edges_torch"

    def refuses(self, call: Call) -> str | None:
        return None

    def __call__(self, call: Call) -> OutputAndLse:
        assert isinstance(call.over, Graph)
        source, destination = pairs = call.over.edge_index
        with without_autocast(call.q.device):
            p, lse = softmax_per_destination(_edge_scores(call, pairs), destination, call.sizes.queries)
            if call.dropout > 0:
                p = p * edge_keep_mask(call, pairs) / (1 - call.dropout)
            if call.over.weights is not None:
                p = p * call.over.weights.to(p.dtype)
            return sum_over_edges(p, call.v, source, destination, call.sizes.queries).to(call.v.dtype), lse


def edge_weights(call: Call, heads: Int[Tensor, " some"] | None = None) -> Float[Tensor, "... heads edges"]:
    """The attention weights before dropout, in at least fp32; of all heads or some."""
    graph = call.over
    assert isinstance(graph, Graph)
    pairs = graph.edge_index
    with without_autocast(call.q.device):
        s = _edge_scores(call, pairs)
        s = s if heads is None else s.index_select(-2, heads)
        p, lse = softmax_per_destination(s, pairs[1], call.sizes.queries)
        if call.sink is not None:
            share = non_sink_share(lse, call.sink if heads is None else call.sink.index_select(-1, heads))
            p = p * share[..., 0].index_select(-1, pairs[1])
        return p if graph.weights is None else p * graph.weights.to(p.dtype)


def _edge_scores(call: Call, pairs: Int[Tensor, "2 edges"]) -> Float[Tensor, "... heads edges"]:
    """The scores in at least fp32."""
    graph, heads = call.over, call.sizes.heads
    assert isinstance(graph, Graph)
    compute_dtype = torch.promote_types(call.q.dtype, torch.float32)
    # widened before rows are gathered: the gradient of a row is a sum over its edges
    q, k = call.q.to(compute_dtype), repeat_grouped_heads(call.k.to(compute_dtype), heads)

    def block(source: Tensor, destination: Tensor, features: Tensor | None) -> Tensor:
        return call.score.pairs(q.index_select(-2, destination), k.index_select(-2, source), features)

    parts = []
    for cut, compute in _score_blocks(call, block):
        features = None if graph.features is None else graph.features[cut]
        parts.append(compute(*pairs[:, cut], features))
    s = torch.cat(parts, -1) if len(parts) > 1 else parts[0]
    if call.relative_bias is not None:
        # positions are the indices of the nodes, in the whole graph if this one is a part
        (query, key), (queries, keys) = call.item_indices, graph.whole_sizes(graph.destinations, graph.sources)
        source, destination = pairs[0] if key is None else key[pairs[0]], pairs[1] if query is None else query[pairs[1]]
        step = source - destination - (keys - queries)
        s = s + call.relative_bias.to(compute_dtype)[..., step + (keys - 1)]
    return s if call.bias is None else s + call.bias.to(compute_dtype)


def sum_over_edges(
    p: Float[Tensor, "... heads edges"],
    v: Float[Tensor, "... value_heads sources dim"],
    source: Int[Tensor, " edges"],
    destination: Int[Tensor, " edges"],
    destinations: int,
) -> Float[Tensor, "... heads destinations dim"]:
    """Σ p v over the in-edges of every destination."""
    # widened before rows are gathered: the gradient of a row is a sum over its edges
    v = repeat_grouped_heads(v.to(p.dtype), p.shape[-2])
    out = p.new_zeros(*p.shape[:-1], destinations, v.shape[-1])

    def block(part: Tensor, at: Tensor) -> Tensor:
        return part[..., None] * v.index_select(-2, at)

    size = p.shape[:-1].numel() * v.shape[-1]
    for cut, compute in _edge_blocks(source.shape[0], size, p.requires_grad or v.requires_grad, block):
        part = compute(p[..., cut], source[cut])
        # in place if possible: otherwise every block copies the whole output
        add = out.index_add if is_tracing_or_dataless() else out.index_add_
        out = add(-2, destination[cut], part)
    return out


BlockFunction = Callable[..., Tensor]


def _score_blocks(call: Call, block: BlockFunction) -> Iterator[tuple[slice, BlockFunction]]:
    assert isinstance(call.over, Graph)
    learned = (call.q, call.k, *call.over.leaves(), *call.score.learned())
    size = call.q.shape[:-2].numel() * call.q.shape[-1]
    return _edge_blocks(call.over.num_edges, size, any(x.requires_grad for x in learned), block)


def _edge_blocks(
    edges: int, size: int, needs_grad: bool, block: BlockFunction
) -> Iterator[tuple[slice, BlockFunction]]:
    """Blocks of edges, where one edge has `size` numbers; a block that needs gradients is recomputed in backward."""
    if torch.compiler.is_compiling():
        # a compiled program works for any number of edges
        yield slice(None), block
        return
    step = max(1, BLOCK_NUMEL // max(size, 1))
    recompute = needs_grad and edges > step and torch.is_grad_enabled() and not is_tracing_or_dataless()
    compute = (lambda *inputs: checkpoint(block, *inputs, use_reentrant=False)) if recompute else block
    for begin in range(0, max(edges, 1), step):
        yield slice(begin, begin + step), compute


def softmax_per_destination(
    s: Float[Tensor, "... heads edges"], destination: Int[Tensor, " edges"], destinations: int
) -> tuple[Float[Tensor, "... heads edges"], Float[Tensor, "... heads destinations"]]:
    """The weights over the in-edges of each destination, and the log-sum-exp: -inf for a destination without in-edges."""
    shape = (*s.shape[:-1], destinations)
    at = destination.expand(s.shape)
    row_max = s.new_full(shape, -torch.inf).scatter_reduce(-1, at, s.detach(), "amax")
    empty = row_max == -torch.inf
    row_max = row_max.masked_fill(empty, 0.0)
    e = (s - row_max.index_select(-1, destination)).exp()
    total = s.new_zeros(shape).index_add(-1, destination, e)
    # a node whose edges all have a bias of -inf counts as a node without edges
    safe = total.masked_fill(empty, 1.0)
    return e / safe.index_select(-1, destination), (safe.log() + row_max).masked_fill(empty, -torch.inf)


def edge_keep_mask(call: Call, pairs: Int[Tensor, "2 edges"]) -> Tensor:
    """Which edges dropout keeps, for every head of every row of the batch."""
    assert call.seed is not None
    head, query, key = pair_numbers(call)
    return keep_mask(call.seed, head[..., None], query[pairs[1]], key[pairs[0]], call.dropout)
