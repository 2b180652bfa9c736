"""Operands: everything that one attention is computed from, on any device and in any dtype."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from polyhead.attend import run_call
from polyhead.kernels import Call
from polyhead.kernels.call import GlobalIndices
from polyhead.neighbourhood import Graph, Mask, Neighbourhood
from polyhead.position import Position
from polyhead.prepare import AttentionOptions, check_and_make_call, make_call
from polyhead.score import GAT, GATv2, Score

SEED = 7


class Operands(NamedTuple):
    """The arguments of one attention; those that are floating-point tensors are leaves with gradients after `cast`."""

    q: Tensor
    k: Tensor
    v: Tensor
    over: Neighbourhood
    score: Score
    position: Position | None = None
    bias: Tensor | None = None
    sink: Tensor | None = None
    dropout: float = 0.0

    def cast(self, device: torch.device, dtype: torch.dtype) -> Operands:
        """A copy on a device, with the same strides; numbers are rounded to `dtype`, and are leaves."""
        copied: dict[int, Tensor] = {}

        def cast_tensor(x: Tensor) -> Tensor:
            # a tensor that is passed twice, as keys and values, stays one tensor
            if id(x) not in copied:
                copied[id(x)] = _cast_tensor(x, device, dtype)
            return copied[id(x)]

        score, position = copy.deepcopy((self.score, self.position))
        score.to(device, dtype)
        if position is not None:
            position.to(device, dtype)
        q, k, v, over, bias, sink = pytree.tree_map_only(
            Tensor, cast_tensor, (self.q, self.k, self.v, self.over, self.bias, self.sink)
        )
        return Operands(q, k, v, over, score, position, bias, sink, self.dropout)

    def leaves(self) -> dict[str, Tensor]:
        """The tensors that have gradients, by name."""
        named: dict[str, Any] = {name: getattr(self, name) for name in ("q", "k", "v", "bias", "sink")}
        named |= {f"edge {name}": getattr(self.over, name, None) for name in ("features", "weights")}
        for owner in ("score", "position"):
            module = getattr(self, owner)
            named |= {} if module is None else {f"{owner}.{name}": p for name, p in module.named_parameters()}
        found = {name: x for name, x in named.items() if isinstance(x, Tensor)}
        # the same tensor as keys and values has one gradient
        return {name: x for i, (name, x) in enumerate(found.items()) if not any(x is y for y in [*found.values()][:i])}

    def call(self) -> Call:
        """The call that kernels receive."""
        seed = SEED if self.dropout else None
        options = AttentionOptions(self.over, self.score, self.position, self.bias, self.sink, self.dropout, seed)
        return check_and_make_call(self.q, self.k, self.v, options)

    def run(self, kernel: str) -> Tensor:
        """The output of a kernel."""
        return run_call(self.call(), kernel)[0]

    def run_reference(self) -> Tensor:
        """The output by the definition."""
        if isinstance(self.over, Graph):
            return run_call(_edges_as_keys(self, self.over), "reference")[0]
        return self.run("reference")


def output_and_gradients(run: Callable[[], Tensor], leaves: dict[str, Tensor], towards: Tensor) -> dict[str, Tensor]:
    """What a computation gives, by name: its output, and the gradient of each leaf for the gradient `towards` of the output."""
    out = run()
    gradients = torch.autograd.grad(
        out, [*leaves.values()], towards.to(out.device, out.dtype), allow_unused=True, materialize_grads=True
    )
    named = {f"gradient of {name}": x for name, x in zip(leaves, gradients, strict=True)}
    return {"output": out.detach(), **named}


def _cast_tensor(x: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    if not x.is_floating_point():
        return x.to(device)
    new = torch.empty_strided(x.shape, x.stride(), dtype=dtype, device=device)
    return new.copy_(x.detach()).requires_grad_()


def _edges_as_keys(operands: Operands, graph: Graph) -> Call:
    """Attention along edges as dense attention in which each edge is a key of its own, so that the definition applies."""
    q, k, v, _, score, _, bias, sink, dropout = operands
    source, destination = graph.edge_index
    heads = q.shape[-3]
    k, v = (x.repeat_interleave(heads // x.shape[-3], -3)[..., source, :] for x in (k, v))
    if graph.weights is not None:
        v = v * graph.weights[:, None]
    if isinstance(score, GATv2):
        if graph.features is not None:
            # (heads, dim, features) x (edges, features)
            k = k + torch.einsum("hdc,ec->hed", score.edge, graph.features)
        score = GATv2.from_tensors(score.weight, negative_slope=score.negative_slope)
    elif isinstance(score, GAT):
        q, k, score = _gat_with_one_more_feature(q, k, score, graph.features)
    mine = destination == torch.arange(graph.destinations, device=q.device)[:, None]
    seed = torch.tensor(SEED, device=q.device) if dropout else None
    # dropout depends on the node that a key is, not on its edge
    indices = GlobalIndices(keys=source)
    bias = None if bias is None else bias[..., None, :]
    options = AttentionOptions(Mask(mine), score, None, bias, sink, dropout, seed, indices)
    return make_call(q, k, v, options)


def _gat_with_one_more_feature(
    q: Tensor, k: Tensor, score: GAT, features: Tensor | None
) -> tuple[Tensor, Tensor, Score]:
    """The term of a key's edge as one more feature of the key, of weight 1."""
    zero = torch.zeros_like(score.destination[:, :1])
    term = (
        k.new_zeros(k.shape[:-1])
        if features is None
        else torch.einsum("hc,ec->he", score.edge, features).expand(k.shape[:-1])
    )
    gat = GAT.from_tensors(
        torch.cat((score.destination, zero), 1),
        torch.cat((score.source, zero + 1), 1),
        negative_slope=score.negative_slope,
    )
    return torch.cat((q, torch.zeros_like(q[..., :1])), -1), torch.cat((k, term[..., None]), -1), gat
