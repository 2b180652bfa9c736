"""PyG's layers and the drop-ins with the same weights: helpers for the tests of the drop-ins."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
import torch_pairs
from torch import Tensor, nn
from torch_geometric import nn as pyg
from torch_pairs import ramp

from polyhead.interop import pyg as interop

NODES, OTHERS, EDGES = 13, 7, 41
IN, IN_OTHER, CHANNELS, HEADS, EDGE_DIM = 5, 11, 4, 3, 2
CLOSE = {torch.float32: {"atol": 1e-5, "rtol": 1e-5}, torch.float64: {"atol": 1e-9, "rtol": 1e-9}}
KINDS = ("GATConv", "GATv2Conv", "TransformerConv")
LOOPING = KINDS[:2]


def pair(kind: str, channels: Any = IN, dtype: torch.dtype = torch.float64, **options: Any) -> tuple[Any, Any]:
    """PyG's layer and the drop-in with the same non-zero weights."""
    options = {"heads": HEADS, **options}
    peer, ours = (getattr(of, kind)(channels, CHANNELS, **options).to(dtype) for of in (pyg, interop))
    with torch.no_grad():
        for parameter in peer.parameters():
            parameter.uniform_(-1, 1)
    ours.load_state_dict(peer.state_dict(), strict=True)
    return peer, ours


def some_edges(sources: int = NODES, destinations: int = NODES) -> Tensor:
    """Edges with duplicates and self-loops; destination 0 has no in-edge, and the last nodes have no edge at all."""
    edge_index = torch.stack((torch.randint(sources - 1, (EDGES,)), torch.randint(1, destinations - 1, (EDGES,))))
    edge_index[:, 3] = 2
    edge_index[:, 8] = 4
    edge_index[:, 11] = edge_index[:, 10]
    return edge_index


def randn(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, dtype=dtype, requires_grad=True)


def everything(layer: nn.Module, x: Any, edge_index: Tensor, edge_attr: Tensor | None = None, **call: Any) -> dict:
    """The output, weights and edges, and the gradients of inputs, edge features and parameters."""
    result = layer(x, edge_index, edge_attr, **call)
    output, (where, alpha) = result if isinstance(result, tuple) else (result, (None, None))
    leaves = {f"x{n}": t for n, t in enumerate(x if isinstance(x, tuple) else (x,)) if t is not None}
    leaves |= {"edge_attr": edge_attr} if edge_attr is not None else {}
    leaves |= {name.removeprefix("_orig_mod."): p for name, p in layer.named_parameters()}
    loss = (output * ramp(output)).sum()
    if alpha is not None:
        loss = loss + (alpha * ramp(alpha)).sum()
    gradients = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, materialize_grads=True)
    return {"output": output, "alpha": alpha, "edges": where, **dict(zip(leaves, gradients, strict=True))}


assert_same = functools.partial(torch_pairs.assert_same, tolerances=CLOSE)


def inputs(shape: str, dtype: torch.dtype = torch.float64) -> tuple[Any, Any, Tensor]:
    """in_channels, x and edge_index: one set of nodes, two with the same features, or two with different features."""
    if shape == "one":
        return IN, randn(NODES, IN, dtype=dtype), some_edges()
    if shape == "same features":
        return IN, (randn(NODES, IN, dtype=dtype), randn(OTHERS, IN, dtype=dtype)), some_edges(NODES, OTHERS)
    if shape == "two":
        x = (randn(NODES, IN, dtype=dtype), randn(OTHERS, IN_OTHER, dtype=dtype))
        return (IN, IN_OTHER), x, some_edges(NODES, OTHERS)
    if shape == "more destinations":
        x = (randn(OTHERS, IN, dtype=dtype), randn(NODES, IN_OTHER, dtype=dtype))
        return (IN, IN_OTHER), x, some_edges(OTHERS, NODES)
    assert shape == "one as two"
    return (IN, IN), randn(NODES, IN, dtype=dtype), some_edges()


def features(exist: bool, edges: int = EDGES, dtype: torch.dtype = torch.float64) -> Tensor | None:
    return randn(edges, EDGE_DIM, dtype=dtype) if exist else None


FLAGS = {
    "GATConv": ("concat", "bias", "residual", "add_self_loops"),
    "GATv2Conv": ("concat", "bias", "residual", "add_self_loops", "share_weights"),
    "TransformerConv": ("concat", "bias", "beta", "root_weight"),
}


def cases(*others: Any) -> list[Any]:
    """Every combination of options with one set of nodes, and all or no options with the others; with and without edge features."""
    made = []
    for kind, flags in FLAGS.items():
        for values in itertools.product((False, True), repeat=len(flags)):
            options = dict(zip(flags, values, strict=True))
            # a shared linear map cannot take features of two widths
            shapes = others if len(set(values)) == 1 and not options.get("share_weights") else ()
            for shape, edge_dim in itertools.product(("one", *shapes), (None, EDGE_DIM)):
                names = [kind, *itertools.compress(flags, values), shape, *(["features"] if edge_dim else [])]
                made.append(pytest.param(kind, shape, {"edge_dim": edge_dim, **options}, id="-".join(names)))
    return made
