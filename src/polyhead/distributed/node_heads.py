"""The heads of an attention over a graph on several ranks: gathered, or summed up over ranks without being gathered."""

from __future__ import annotations

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float
from torch import Tensor

from polyhead.distributed.graph_part import GraphPart
from polyhead.heads import Heads
from polyhead.neighbourhood import Graph


def gather_node_heads(heads: Heads) -> Heads:
    """A view of all nodes and edges, on every rank, from those of each part; without gradients."""
    call, origin, part = heads.part.call, heads.origin, _part(heads)
    source, destination = part.edge_index
    edge_index = part.gather_edges(torch.stack((part.sources_in_whole[source], part.nodes[destination])))
    features, weights = (None if x is None else part.gather_edges(x, 0) for x in (part.features, part.weights))
    graph = Graph(edge_index, part.place.num_nodes, features, weights)
    own_k, own_v = (x[..., : len(part.nodes), :] for x in (call.k, call.v))
    k = part.gather(own_k, -2)
    v = k if call.v is call.k else part.gather(own_v, -2)
    bias = call.bias if call.bias is None or call.bias.shape[-1] == 1 else part.gather_edges(call.bias)
    indices = None if call.global_indices is None else call.global_indices._replace(queries=None, keys=None)
    whole = call._replace(q=part.gather(call.q, -2), k=k, v=v, over=graph, bias=bias, global_indices=indices)
    lse = None if origin.lse is None else part.gather(origin.lse, -1)
    return Heads(whole, origin._replace(outputs=part.gather(origin.outputs, -2), lse=lse))


def node_received(heads: Heads) -> Float[Tensor, "... heads nodes"]:
    """The weight that each node gives to the nodes of all ranks, on every rank: `heads.received()` of the whole."""
    part, own = _part(heads), heads.received().detach()
    total = own.new_zeros(*own.shape[:-1], part.place.num_nodes)
    total.index_add_(-1, part.sources_in_whole.to(own.device), own)
    return _sum_over_ranks(total, part)


def node_mean_mass(heads: Heads, on: str | int | Bool[Tensor, " nodes"]) -> Float[Tensor, "... heads"]:
    """The mean, over the nodes of all ranks, of their weight on certain nodes: `heads.mass(on).mean(-1)` of the whole."""
    part = _part(heads)
    if isinstance(on, Tensor):
        if on.dtype != torch.bool or on.shape[-1:] != (part.place.num_nodes,):
            raise ValueError(
                f"on must be a bool tensor of {part.place.num_nodes} nodes, got {on.dtype} of shape {tuple(on.shape)}"
            )
        on = on[..., part.sources_in_whole.to(on.device)]
    return _sum_over_ranks(heads.mass(on).detach().sum(-1), part) / max(1, part.place.num_nodes)


def _part(heads: Heads) -> GraphPart:
    assert isinstance(heads.part.call.over, GraphPart)
    return heads.part.call.over


def _sum_over_ranks(x: Tensor, part: GraphPart) -> Tensor:
    if part.group is not None:
        dist.all_reduce(x, group=part.group)
    return x
