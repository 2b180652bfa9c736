"""Attention over the edges of a graph by the C++ kernels, as torch operators: schema, shapes, gradients.

They stream over the edges: scores, softmax and sum in one pass, one log-sum-exp saved a head and node, and everything
else computed anew in backward. Tensors are node by node, `(batch, nodes, heads, dim)`, as projections leave them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from polyhead._torch import missing, native, under_transform
from polyhead.kernels.call import Call, Result, flat, to_heads
from polyhead.neighbourhood import Graph
from polyhead.score import GAT, Dot, GATv2

_KINDS = {GAT: 0, GATv2: 1, Dot: 2}
# The kernels read features in steps of so many.
_STEP = 8


class Native:
    """Dot, GAT and GATv2 on a graph, on the CPU."""

    name = "native"

    def refuses(self, call: Call) -> str | None:
        if native is None:
            return f"there is none: {missing}"
        if type(call.score) not in _KINDS:
            return f"it has no code for {type(call.score).__name__} scores"
        if not call.q.is_cpu:
            return f"it runs on the CPU, and q is on {call.q.device.type}"
        if call.table is not None or call.bias is not None:
            return "it adds no bias"
        if under_transform():
            return "it has no rules for torch.func transforms and forward-mode differentiation"
        return None

    def __call__(self, call: Call) -> Result:
        # autocast would narrow the products below, of which the kernels expect one dtype
        with torch.autocast("cpu", enabled=False):
            return self._along(call)

    def _along(self, call: Call) -> Result:
        graph, score, heads = call.over, call.score, call.sizes.heads
        assert isinstance(graph, Graph)
        # halves are computed in fp32
        dtype = torch.promote_types(call.q.dtype, torch.float32)
        q, k, v = (_by_node(x, heads, dtype) for x in (call.q, call.k, call.v))
        # one tensor for both: its rows are read once, and its gradient is one
        v_or_k = None if call.v is call.k else v
        a = inside = features = edge = None
        if isinstance(score, GAT):
            q, k, v_or_k = *_terms(score, q, k, call.q is call.k), v
            if score.edge is not None:
                assert graph.features is not None
                inside = graph.features.to(dtype) @ score.edge.to(dtype).T
        elif isinstance(score, GATv2):
            a = score.weight.to(dtype)
            if score.edge is not None:
                assert graph.features is not None
                # (heads, edge_dim, dim)
                features, edge = graph.features.to(dtype), score.edge.to(dtype).transpose(-2, -1)
        out, lse = torch.ops.polyhead.edges(
            q, k, v_or_k, a, inside, features, edge,
            None if graph.weights is None else graph.weights.to(dtype),
            list(graph.order), call.seed if call.dropout > 0 else None,
            _KINDS[type(score)], score.factor(call.q.shape[-1]) if isinstance(score, Dot) else score.negative_slope, call.dropout,
        )  # fmt: skip
        out, lse = out.transpose(-3, -2), lse.transpose(-2, -1)
        shape = call.q.shape[:-1]
        return out.reshape(*shape, out.shape[-1]).to(call.v.dtype), lse.reshape(shape)


def _by_node(x: Tensor, heads: int, dtype: torch.dtype) -> Tensor:
    """(..., own heads, items, dim) -> (batch, items, heads, dim)."""
    return flat(to_heads(x, heads)).transpose(1, 2).to(dtype)


def _terms(score: GAT, q: Tensor, k: Tensor, one: bool) -> tuple[Tensor, Tensor]:
    """a_dst·q and a_src·k (batch, items, heads); by one product where q is k."""
    to_query, to_key = _block_diagonal(score.destination.to(q.dtype)), _block_diagonal(score.source.to(q.dtype))
    if one:
        both = q.flatten(-2) @ torch.cat((to_query, to_key), 1)
        of_query, of_key = both.unflatten(-1, (2, -1)).unbind(-2)
    else:
        of_query, of_key = q.flatten(-2) @ to_query, k.flatten(-2) @ to_key
    return of_query if score.bias is None else of_query + score.bias.to(q.dtype), of_key


def _block_diagonal(a: Tensor) -> Tensor:
    """(heads, dim) -> (heads · dim, heads), zero where a feature is another head's: one product for all heads."""
    heads = len(a)
    return (torch.eye(heads, dtype=a.dtype, device=a.device)[:, None] * a[:, :, None]).reshape(-1, heads)


_INPUTS = (
    "Tensor q, Tensor k, Tensor? v, Tensor? a, Tensor? inside, Tensor? features, Tensor? edge, Tensor? weights, "
    "Tensor[] order, Tensor? seed, int kind, float factor, float dropout"
)
# torch.library.custom_op would import the whole compiler at the first call
_library = torch.library.Library("polyhead", "FRAGMENT")
_library.define(f"edges({_INPUTS}) -> (Tensor, Tensor)")
_library.define(
    f"edges_backward(Tensor d_out, Tensor? d_lse, Tensor out, Tensor lse, {_INPUTS}, bool[] wanted) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)


class _Problem:
    """The tensors of one call as the kernels want them: contiguous, of one width that is a multiple of the step."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor | None, a: Tensor | None, inside: Tensor | None, features: Tensor | None,
        edge: Tensor | None, weights: Tensor | None, order: list[Tensor], seed: Tensor | None, kind: int, factor: float,
        dropout: float,
    ) -> None:  # fmt: skip
        _check(q, k, order, (a, features if inside is None else inside, edge, weights, v))
        widths = [x.shape[-1] for x in (q, k, v) if x is not None and x.dim() == 4]
        self.dim = -(-max(widths) // _STEP) * _STEP
        self.first, self.source, self.edge, self.out_first, self.out_place, self.out_destination = order
        self.q, self.k = (x.contiguous() if kind == 0 else self.wide(x) for x in (q, k))
        self.v, self.a, self.map = self.wide(v), self.wide(a), self.wide(edge)
        self.inside, self.features, self.weights = (
            None if x is None else x.contiguous() for x in (inside, features, weights)
        )
        threshold = round(dropout * 2**32) - 2**31
        self.options: dict[str, Any] = {
            "kind": kind, "double": q.dtype == torch.float64, "batch": q.shape[0], "sources": k.shape[1],
            "destinations": q.shape[1], "heads": q.shape[2], "dim": self.dim,
            "edge_features": 0 if features is None else features.shape[1], "factor": factor, "dropout": dropout,
            "threshold": threshold, "seed": 0 if seed is None else int(seed.to(torch.int32)), "threads": torch.get_num_threads(),
        }  # fmt: skip

    def wide(self, x: Any) -> Any:
        """With zeros up to the common width: they change no sum."""
        if x is None:
            return None
        # pad may keep the strides that it was given
        return (x if x.shape[-1] == self.dim else F.pad(x, (0, self.dim - x.shape[-1]))).contiguous()

    def pointers(self) -> dict[str, int]:
        given = {
            "q": self.q, "k": self.k, "v": self.v, "a": self.a, "inside": self.inside, "features": self.features,
            "map": self.map, "weights": self.weights, "first": self.first, "source": self.source, "edge": self.edge,
        }  # fmt: skip
        return {name: _pointer(x) for name, x in given.items()}


def _check(q: Tensor, k: Tensor, order: list[Tensor], others: tuple[Tensor | None, ...]) -> None:
    """That the kernels will read within the tensors, whatever was done to a graph since it was made."""
    edges, (_, features, _, weights, _) = order[1].shape[0], others
    lengths = [q.shape[1] + 1, edges, edges, k.shape[1] + 1, edges, edges]
    whole = all(x.dtype == torch.int32 and x.is_contiguous() and x.is_cpu for x in order)
    if not whole or [x.shape[0] for x in order] != lengths:
        raise ValueError("Graph: its order was changed; it must stay as Graph(edge_index) makes it")
    for name, x in (("features", features), ("weights", weights)):
        if x is not None and x.shape[0] != edges:
            raise ValueError(f"Graph: it has {x.shape[0]} rows of {name}, but {edges} edges")
    if any(x is not None and (x.dtype != q.dtype or not x.is_cpu) for x in (k, *others)):
        raise ValueError(f"Graph: all tensors must be {q.dtype} and on the CPU")


def _pointer(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def _value_width(k: Tensor, v: Tensor | None) -> int:
    return (k if v is None else v).shape[-1]


@torch.library.impl("polyhead::edges", "cpu", lib=_library)
def _edges(q: Tensor, k: Tensor, v: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor]:
    problem = _Problem(q, k, v, *rest)
    out, lse = q.new_empty(*q.shape[:3], problem.dim), q.new_empty(q.shape[:3])
    native.forward(**problem.options, **problem.pointers(), out=out.data_ptr(), lse=lse.data_ptr())
    width = _value_width(k, v)
    return (out if width == problem.dim else out[..., :width].contiguous()), lse


@torch.library.register_fake("polyhead::edges", lib=_library)
def _(q: Tensor, k: Tensor, v: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(*q.shape[:3], _value_width(k, v)), q.new_empty(q.shape[:3])


@torch.library.impl("polyhead::edges_backward", "cpu", lib=_library)
def _edges_backward(d_out: Tensor, d_lse: Tensor | None, out: Tensor, lse: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    *inputs, wanted = rest
    problem = _Problem(*inputs)
    # where there is nothing to sum over, nothing is written
    room = torch.empty_like if out.numel() and problem.edge.numel() else torch.zeros_like
    new = lambda x: None if x is None else room(x)
    dq, dk = room(problem.q), room(problem.k)
    dv, da, d_map = (new(x) for x in (problem.v, problem.a, problem.map))
    d_inside, d_features, d_weights = (
        new(x) if want else None
        for x, want in zip((problem.inside, problem.features, problem.weights), wanted, strict=True)
    )
    out, lse, d_out = problem.wide(out), lse.contiguous(), problem.wide(d_out)
    d_lse = None if d_lse is None else d_lse.contiguous()
    native.backward(
        **problem.options, **problem.pointers(), out_first=problem.out_first.data_ptr(),
        out_place=problem.out_place.data_ptr(), out_destination=problem.out_destination.data_ptr(), out=out.data_ptr(),
        lse=lse.data_ptr(), d_out=d_out.data_ptr(), d_lse=_pointer(d_lse), dq=dq.data_ptr(), dk=dk.data_ptr(), dv=_pointer(dv),
        da=_pointer(da), d_inside=_pointer(d_inside), d_weights=_pointer(d_weights), d_features=_pointer(d_features),
        d_map=_pointer(d_map),
    )  # fmt: skip
    made = (dq, dk, dv, da, d_inside, d_features, d_map, d_weights)
    return tuple(
        dq.new_empty(0) if x is None else x if x.shape == like.shape else x[..., : like.shape[-1]].contiguous()
        for x, like in zip(made, inputs[:8], strict=True)
    )


@torch.library.register_fake("polyhead::edges_backward", lib=_library)
def _(d_out: Tensor, d_lse: Tensor | None, out: Tensor, lse: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    *inputs, wanted = rest
    q = inputs[0]
    unwanted = {4: not wanted[0], 5: not wanted[1], 7: not wanted[2]}
    return tuple(
        q.new_empty(0) if x is None or unwanted.get(place) else q.new_empty(x.shape)
        for place, x in enumerate(inputs[:8])
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)
    tensors, order, (seed, *options) = inputs[:8], inputs[8], inputs[9:]
    ctx.save_for_backward(*tensors, *order, seed, *output)
    ctx.options = options


def _backward(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None) -> tuple[Any, ...]:
    *saved, seed, out, lse = ctx.saved_tensors
    tensors, order = saved[:8], saved[8:]
    d_out = torch.zeros_like(out) if d_out is None else d_out
    wanted = [ctx.needs_input_grad[place] for place in (4, 5, 7)]
    gradients = torch.ops.polyhead.edges_backward(d_out, d_lse, out, lse, *tensors, order, seed, *ctx.options, wanted)
    given = [
        g if need and x is not None else None
        for g, x, need in zip(gradients, tensors, ctx.needs_input_grad, strict=False)
    ]
    return (*given, [None] * len(order), None, None, None, None)


def _no_second_derivatives(ctx: Any, *gradients: Any) -> Any:
    raise RuntimeError(
        "the native kernel has first derivatives only; for second ones call attend(…, kernel='edges'), or torch.func"
    )


# without a rule of its own it would count as constant, and second derivatives as zero
torch.library.register_autograd("polyhead::edges_backward", _no_second_derivatives, lib=_library)
torch.library.register_autograd("polyhead::edges", _backward, setup_context=_save, lib=_library)
