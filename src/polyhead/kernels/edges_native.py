"""Attention over the edges of a graph by the C++ kernels, as torch operators: schema, shapes, gradients.

They stream over the edges: scores, softmax and sum in one pass, one log-sum-exp saved a head and node, and everything
else computed anew in backward. Tensors are node by node, `(batch, nodes, heads, dim)`, as projections leave them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from polyhead._torch import missing, native, under_transform, values_readable
from polyhead.kernels.call import Call, Result, flat, to_heads
from polyhead.kernels.dropout import threshold
from polyhead.kernels.edges_torch import Edges
from polyhead.kernels.operand_checks import check_operand
from polyhead.kernels.operator_registration import define_attention
from polyhead.linalg.foreach import finite
from polyhead.neighbourhood import CSR, Graph
from polyhead.neighbourhood.csr import check_form, check_ids
from polyhead.score import GAT, Dot, GATv2, Score

_KINDS = {GAT: 0, GATv2: 1, Dot: 2}
# Which of `a`, `inside`, `features` and `edge` there are.
_ARGUMENTS = (
    ((False,) * 4, (False, True, False, False)),
    ((True, False, False, False), (True, False, True, True)),
    ((False,) * 4,),
)
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
            *graph.csr, call.seed if call.dropout > 0 else None,
            _KINDS[type(score)], score.factor(call.q.shape[-1]) if isinstance(score, Dot) else score.negative_slope, call.dropout,
        )  # fmt: skip
        out, lse = out.transpose(-3, -2), lse.transpose(-2, -1)
        shape = call.q.shape[:-1]
        return out.reshape(*shape, out.shape[-1]).to(call.v.dtype), lse.reshape(shape)


def _by_node(x: Tensor, heads: int, dtype: torch.dtype) -> Tensor:
    """(..., own heads, items, dim) -> (batch, items, heads, dim)."""
    return flat(to_heads(x.to(dtype), heads)).transpose(1, 2)


def _terms(score: GAT, q: Tensor, k: Tensor, one: bool) -> tuple[Tensor, Tensor]:
    """a_dst·q and a_src·k (batch, items, heads); by one product where q is k."""
    to_query, to_key = score.destination.to(q.dtype), score.source.to(q.dtype)
    if one:
        made = [q.flatten(-2) @ torch.cat((_block_diagonal(to_query), _block_diagonal(to_key)), 1)]
        of_query, of_key = made[0].unflatten(-1, (2, -1)).unbind(-2)
    else:
        made = [q.flatten(-2) @ _block_diagonal(to_query), k.flatten(-2) @ _block_diagonal(to_key)]
        of_query, of_key = made
    if values_readable(q) and not finite([x.detach() for x in made]):
        # zero times NaN is NaN: heads would hand it to each other
        of_query, of_key = (q * to_query).sum(-1), (k * to_key).sum(-1)
    return of_query if score.bias is None else of_query + score.bias.to(q.dtype), of_key


def _block_diagonal(a: Tensor) -> Tensor:
    """(heads, dim) -> (heads · dim, heads), zero where a feature is another head's: one product for all heads."""
    heads = len(a)
    return (torch.eye(heads, dtype=a.dtype, device=a.device)[:, None] * a[:, :, None]).reshape(-1, heads)


class _Problem:
    """The tensors of one call as the kernels want them: contiguous, of one width that is a multiple of the step."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor | None, a: Tensor | None, inside: Tensor | None, features: Tensor | None,
        edge: Tensor | None, weights: Tensor | None, indptr: Tensor, indices: Tensor, edge_id: Tensor, out_indptr: Tensor,
        out_slot: Tensor, out_indices: Tensor, seed: Tensor | None, kind: int, factor: float, dropout: float,
    ) -> None:  # fmt: skip
        csr = [indptr, indices, edge_id, out_indptr, out_slot, out_indices]
        _check(q, k, v, a, inside, features, edge, weights, csr, kind, dropout)
        widths = [x.shape[-1] for x in (q, k, v) if x is not None and x.dim() == 4]
        self.dim = -(-max(widths) // _STEP) * _STEP
        self.first, self.source, self.edge, self.out_first, self.out_place, self.out_destination = csr
        self.q, self.k = (x.contiguous() if kind == 0 else self.wide(x) for x in (q, k))
        self.v, self.a, self.map = self.wide(v), self.wide(a), self.wide(edge)
        self.inside, self.features, self.weights = (
            None if x is None else x.contiguous() for x in (inside, features, weights)
        )
        self.options: dict[str, Any] = {
            "kind": kind, "double": q.dtype == torch.float64, "batch": q.shape[0], "sources": k.shape[1],
            "destinations": q.shape[1], "edges": len(self.edge), "heads": q.shape[2], "dim": self.dim,
            "edge_features": 0 if features is None else features.shape[1], "factor": factor, "dropout": dropout,
            "threshold": threshold(dropout), "seed": 0 if seed is None else int(seed.to(torch.int32)), "threads": torch.get_num_threads(),
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

    def check_followed(self, followed: bool) -> None:
        """Raise where a kernel found ids that it could not follow."""
        if not followed:
            csr = CSR(self.first, self.source, self.edge, self.out_first, self.out_place, self.out_destination)
            check_ids(csr, self.options["sources"], self.options["destinations"])
            raise ValueError("Graph: csr was edited while it was read; make the graph anew, and do not edit graph.csr")


def _check(
    q: Tensor, k: Tensor, v: Tensor | None, a: Tensor | None, inside: Tensor | None, features: Tensor | None,
    edge: Tensor | None, weights: Tensor | None, csr: list[Tensor], kind: int, dropout: float,
) -> None:  # fmt: skip
    """Raise unless the kernels stay within the tensors; whether the ids do, they find out for themselves."""
    if kind not in _KINDS.values() or q.dim() != (3 if kind == 0 else 4) or k.dim() != q.dim() or not 0 <= dropout < 1:
        raise ValueError(
            "q and k must be (batch, nodes, heads) for kind 0, (batch, nodes, heads, dim) for 1 and 2, and dropout in [0, 1), "
            f"got {tuple(q.shape)} and {tuple(k.shape)} for {kind}, and dropout {dropout}"
        )
    (batch, destinations, heads, *row), sources = q.shape, k.shape[1]
    check_form(csr, sources, destinations)
    edges, width, number = (
        len(csr[1]),
        () if v is None else v.shape[-1:],
        () if features is None else features.shape[1:],
    )
    check_operand("k", k, (batch, sources, heads, *row), q)
    check_operand("v", v, (batch, sources, heads, *width), q)
    check_operand("a", a, (heads, *row), q)
    check_operand("inside", inside, (edges, heads), q)
    check_operand("features", features, (edges, *number), q)
    check_operand("edge", edge, (heads, *number, *row), q)
    check_operand("weights", weights, (edges,), q)
    there = tuple(x is not None for x in (a, inside, features, edge))
    if there not in _ARGUMENTS[kind] or (kind == 0 and v is None) or (features is not None and len(number) != 1):
        raise ValueError(
            f"a, inside, features and edge must be given as kind {kind} asks, got {there}, and v {v is not None}"
        )
    if q.dtype not in (torch.float32, torch.float64) or not all(x.is_cpu for x in (q, *csr)):
        raise ValueError(f"q must be fp32 or fp64, and all on the CPU, got {q.dtype} on {q.device} and {csr[0].device}")


def _pointer(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def _value_width(k: Tensor, v: Tensor | None) -> int:
    return (k if v is None else v).shape[-1]


def _edges(q: Tensor, k: Tensor, v: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor]:
    problem = _Problem(q, k, v, *rest)
    out, lse = q.new_empty(*q.shape[:3], problem.dim), q.new_empty(q.shape[:3])
    followed = native.forward(**problem.options, **problem.pointers(), out=out.data_ptr(), lse=lse.data_ptr())
    problem.check_followed(followed)
    width = _value_width(k, v)
    return (out if width == problem.dim else out[..., :width].contiguous()), lse


def _edges_fake(q: Tensor, k: Tensor, v: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(*q.shape[:3], _value_width(k, v)), q.new_empty(q.shape[:3])


def _edges_backward(d_out: Tensor, d_lse: Tensor | None, out: Tensor, lse: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    *inputs, needed = rest
    problem = _Problem(*inputs)
    _check_gradients(d_out, d_lse, out, lse, inputs)
    # where there is nothing to sum over, nothing is written
    room = torch.empty_like if out.numel() and problem.edge.numel() else torch.zeros_like
    new = lambda x: None if x is None else room(x)
    dq, dk = room(problem.q), room(problem.k)
    dv, da, d_map = (new(x) for x in (problem.v, problem.a, problem.map))
    d_inside, d_features, d_weights = (
        new(x) if want else None
        for x, want in ((problem.inside, needed[4]), (problem.features, needed[5]), (problem.weights, needed[7]))
    )
    out, lse, d_out = problem.wide(out), lse.contiguous(), problem.wide(d_out)
    d_lse = None if d_lse is None else d_lse.contiguous()
    followed = native.backward(
        **problem.options, **problem.pointers(), out_first=problem.out_first.data_ptr(),
        out_place=problem.out_place.data_ptr(), out_destination=problem.out_destination.data_ptr(), out=out.data_ptr(),
        lse=lse.data_ptr(), d_out=d_out.data_ptr(), d_lse=_pointer(d_lse), dq=dq.data_ptr(), dk=dk.data_ptr(), dv=_pointer(dv),
        da=_pointer(da), d_inside=_pointer(d_inside), d_weights=_pointer(d_weights), d_features=_pointer(d_features),
        d_map=_pointer(d_map),
    )  # fmt: skip
    problem.check_followed(followed)
    made = (dq, dk, dv, da, d_inside, d_features, d_map, d_weights)
    return tuple(
        dq.new_empty(0) if x is None else x if x.shape == like.shape else x[..., : like.shape[-1]].contiguous()
        for x, like in zip(made, inputs[:8], strict=True)
    )


def _check_gradients(d_out: Tensor, d_lse: Tensor | None, out: Tensor, lse: Tensor, inputs: list[Any]) -> None:
    q, k, v = inputs[:3]
    rows = (*q.shape[:3], _value_width(k, v))
    for name, x, shape in (
        ("d_out", d_out, rows),
        ("out", out, rows),
        ("lse", lse, rows[:3]),
        ("d_lse", d_lse, rows[:3]),
    ):
        check_operand(name, x, shape, q)


def _edges_backward_fake(
    d_out: Tensor, d_lse: Tensor | None, out: Tensor, lse: Tensor, *rest: Any
) -> tuple[Tensor, ...]:
    *inputs, needed = rest
    q, always = inputs[0], [place not in (4, 5, 7) for place in range(8)]
    return tuple(
        q.new_empty(0) if x is None or not (need or known) else q.new_empty(x.shape)
        for x, need, known in zip(inputs[:8], needed, always, strict=True)
    )


def _definition(
    q: Tensor, k: Tensor, v: Tensor | None, a: Tensor | None, inside: Tensor | None, features: Tensor | None,
    edge: Tensor | None, weights: Tensor | None, *rest: Any,
) -> Result:  # fmt: skip
    """The same by `Edges`, for tensors node by node."""
    *csr, seed, kind, factor, dropout = rest
    if kind == _KINDS[GAT]:
        # the terms of queries and keys are features of their own, one number each, as are those of edges
        q, k = q[..., None], k[..., None]
        one = q.new_ones(q.shape[2], 1)
        features = inside
        score: Score = GAT.of(one, one, None if inside is None else torch.eye(len(one)).to(q), negative_slope=factor)
    elif kind == _KINDS[GATv2]:
        assert a is not None
        score = GATv2.of(a, None if edge is None else edge.transpose(-2, -1), negative_slope=factor)
    else:
        score = Dot(factor)
    graph = Graph(CSR(*csr).edge_index, (k.shape[1], q.shape[1]), features, weights)
    q, k, v = (x.transpose(1, 2) for x in (q, k, k if v is None else v))
    out, lse = Edges()(Call(q, k, v, graph, score, dropout=dropout, seed=seed))
    assert lse is not None
    return out.transpose(1, 2), lse.transpose(1, 2)


define_attention(
    "edges",
    "Tensor q, Tensor k, Tensor? v, Tensor? a, Tensor? inside, Tensor? features, Tensor? edge, Tensor? weights, Tensor indptr, "
    "Tensor indices, Tensor edge_id, Tensor out_indptr, Tensor out_slot, Tensor out_indices, Tensor? seed, int kind, "
    "float factor, float dropout",
    learned=("q", "k", "v", "a", "inside", "features", "edge", "weights"),
    forward=_edges,
    forward_fake=_edges_fake,
    backward=_edges_backward,
    backward_fake=_edges_backward_fake,
    definition=_definition,
)
