"""Attention along the edges of a graph by the C++ kernels, as a torch operator: schema, shapes, gradients.

The kernels stream over the edges: scores, softmax and sum in one pass. They save one log-sum-exp per head and node and
recompute everything else in backward. Tensors are node-major, `(batch, nodes, heads, dim)`, as projections leave them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from polyhead._torch import can_branch_on_values, native, native_missing_reason, under_transform
from polyhead.kernels.call import Call, OutputAndLse, flatten_batch, global_indices_of, repeat_grouped_heads
from polyhead.kernels.dropout import keep_threshold, unpack_seed
from polyhead.kernels.edges_torch import EdgesTorch
from polyhead.kernels.operand_checks import check_operand
from polyhead.kernels.operator_registration import OperatorPass, register_attention_operator
from polyhead.linalg.foreach import all_finite
from polyhead.neighbourhood import CSR, Graph
from polyhead.neighbourhood.csr import check_csr_dtypes_and_shapes, check_csr_values
from polyhead.score import GAT, Dot, GATv2, Score

_SCORE_KINDS = {GAT: 0, GATv2: 1, Dot: 2}
# By kind: which of `a`, `inside`, `features` and `edge` may be given together.
_ALLOWED_ARGUMENTS = (
    ((False,) * 4, (False, True, False, False)),
    ((True, False, False, False), (True, False, True, True)),
    ((False,) * 4,),
)
# The kernels read features in steps of this many.
_FEATURE_MULTIPLE = 8


class EdgesNative:
    """`Dot`, `GAT` and `GATv2` on a graph, on the CPU."""

    name = "edges_native"

    def refuses(self, call: Call) -> str | None:
        if native is None:
            return f"there are no C++ kernels: {native_missing_reason}"
        if type(call.score) not in _SCORE_KINDS:
            return f"it has no code for {type(call.score).__name__} scores"
        if not call.q.is_cpu:
            return f"it runs on the CPU, and q is on {call.q.device.type}"
        if call.relative_bias is not None or call.bias is not None:
            return "it adds no bias"
        if under_transform():
            return "it has no rules for torch.func transforms and forward-mode differentiation"
        return None

    def __call__(self, call: Call) -> OutputAndLse:
        # autocast would narrow the products below, and the kernels expect one dtype
        with torch.autocast("cpu", enabled=False):
            return self._compute(call)

    def _compute(self, call: Call) -> OutputAndLse:
        graph, score, heads = call.over, call.score, call.sizes.heads
        assert isinstance(graph, Graph)
        # bf16 and fp16 are computed in fp32
        dtype = torch.promote_types(call.q.dtype, torch.float32)
        q, k, v = (_to_node_major(x, heads, dtype) for x in (call.q, call.k, call.v))
        # one tensor for both: its rows are read once, and it gets one gradient
        v_or_k = None if call.v is call.k else v
        a = inside = features = edge = None
        if isinstance(score, GAT):
            q, k, v_or_k = *_gat_score_terms(score, q, k, call.q is call.k), v
            if score.edge is not None:
                assert graph.features is not None
                inside = graph.features.to(dtype) @ score.edge.to(dtype).T
        elif isinstance(score, GATv2):
            a = score.weight.to(dtype)
            if score.edge is not None:
                assert graph.features is not None
                # (heads, edge_dim, dim)
                features, edge = graph.features.to(dtype), score.edge.to(dtype).transpose(-2, -1)
        out, lse = torch.ops.polyhead.edges_native(
            q, k, v_or_k, a, inside, features, edge,
            None if graph.weights is None else graph.weights.to(dtype),
            *graph.csr, call.seed_and_heads if call.dropout > 0 else None, *_int32_indices(call),
            _SCORE_KINDS[type(score)], score.factor(call.q.shape[-1]) if isinstance(score, Dot) else score.negative_slope, call.dropout,
        )  # fmt: skip
        out, lse = out.transpose(-3, -2), lse.transpose(-2, -1)
        shape = call.q.shape[:-1]
        return out.reshape(*shape, out.shape[-1]).to(call.v.dtype), lse.reshape(shape)


def _int32_indices(call: Call) -> list[Tensor | None]:
    """The indices of queries and keys in the whole attention, as C++ reads them; None where dropout does not need them."""
    return [None if x is None or call.dropout == 0 else x.int() for x in call.item_indices]


def _to_node_major(x: Tensor, heads: int, dtype: torch.dtype) -> Tensor:
    """(..., own heads, items, dim) -> (batch, items, heads, dim)."""
    return flatten_batch(repeat_grouped_heads(x.to(dtype), heads)).transpose(1, 2)


def _gat_score_terms(score: GAT, q: Tensor, k: Tensor, q_is_k: bool) -> tuple[Tensor, Tensor]:
    """a_dst·q and a_src·k (batch, items, heads), by one product if q is k."""
    to_query, to_key = score.destination.to(q.dtype), score.source.to(q.dtype)
    if q_is_k:
        products = [q.flatten(-2) @ torch.cat((_block_diagonal(to_query), _block_diagonal(to_key)), 1)]
        of_query, of_key = products[0].unflatten(-1, (2, -1)).unbind(-2)
    else:
        products = [q.flatten(-2) @ _block_diagonal(to_query), k.flatten(-2) @ _block_diagonal(to_key)]
        of_query, of_key = products
    if can_branch_on_values(q) and not all_finite([x.detach() for x in products]):
        # zero times NaN is NaN: it would spread from head to head
        of_query, of_key = (q * to_query).sum(-1), (k * to_key).sum(-1)
    return of_query if score.bias is None else of_query + score.bias.to(q.dtype), of_key


def _block_diagonal(a: Tensor) -> Tensor:
    """(heads, dim) -> (heads · dim, heads), zero off the blocks: one matrix product then serves all heads."""
    heads = len(a)
    return (torch.eye(heads, dtype=a.dtype, device=a.device)[:, None] * a[:, :, None]).reshape(-1, heads)


class _OperatorInputs(NamedTuple):
    """The arguments of the operator, in the order of its schema."""

    q: Tensor
    k: Tensor
    v: Tensor | None
    a: Tensor | None
    inside: Tensor | None
    features: Tensor | None
    edge: Tensor | None
    weights: Tensor | None
    indptr: Tensor
    indices: Tensor
    edge_id: Tensor
    out_indptr: Tensor
    out_slot: Tensor
    out_indices: Tensor
    seed: Tensor | None
    query_index: Tensor | None
    key_index: Tensor | None
    kind: int
    factor: float
    dropout: float

    @property
    def learned(self) -> tuple[Tensor | None, ...]:
        """The inputs that may need a gradient."""
        return self[:8]

    @property
    def csr(self) -> CSR:
        return CSR(*self[8:14])

    @property
    def value_width(self) -> int:
        return (self.k if self.v is None else self.v).shape[-1]


class _KernelArguments:
    """The arguments of one call as the C++ kernels need them: contiguous tensors with padded features, and scalar options."""

    def __init__(self, inputs: _OperatorInputs) -> None:
        _check_inputs(inputs)
        q, k, v, a, inside, features, edge, weights = inputs.learned
        assert q is not None and k is not None
        kind, dropout, seed = inputs.kind, inputs.dropout, inputs.seed
        widths = [x.shape[-1] for x in (q, k, v) if x is not None and x.dim() == 4]
        self.dim = -(-max(widths) // _FEATURE_MULTIPLE) * _FEATURE_MULTIPLE
        self.csr = inputs.csr
        self.q, self.k = (x.contiguous() if kind == 0 else self.pad(x) for x in (q, k))
        self.v, self.a, self.map = self.pad(v), self.pad(a), self.pad(edge)
        self.inside, self.features, self.weights = (
            None if x is None else x.contiguous() for x in (inside, features, weights)
        )
        seed_bits, first_head, num_heads = unpack_seed(seed, q.shape[2])
        self.query_index, self.key_index = (
            None if x is None else x.contiguous() for x in (inputs.query_index, inputs.key_index)
        )
        self.options: dict[str, Any] = {
            "kind": kind, "double": q.dtype == torch.float64, "batch": q.shape[0], "sources": k.shape[1],
            "destinations": q.shape[1], "edges": len(self.csr.edge_id), "heads": q.shape[2], "dim": self.dim,
            "edge_features": 0 if features is None else features.shape[1], "factor": inputs.factor, "dropout": dropout,
            "threshold": keep_threshold(dropout), "seed": seed_bits, "first_head": first_head, "num_heads": num_heads,
            "threads": torch.get_num_threads(),
        }  # fmt: skip

    def pad(self, x: Any) -> Any:
        """Pad the features with zeros to the common width: zeros change no sum."""
        if x is None:
            return None
        # F.pad may preserve strides
        return (x if x.shape[-1] == self.dim else F.pad(x, (0, self.dim - x.shape[-1]))).contiguous()

    def pointers(self) -> dict[str, int]:
        tensors = {
            "q": self.q, "k": self.k, "v": self.v, "a": self.a, "inside": self.inside, "features": self.features,
            "map": self.map, "weights": self.weights, "indptr": self.csr.indptr, "indices": self.csr.indices,
            "edge_id": self.csr.edge_id, "query_index": self.query_index, "key_index": self.key_index,
        }  # fmt: skip
        return {name: _pointer_or_null(x) for name, x in tensors.items()}

    def raise_unless_ids_valid(self, in_range: bool) -> None:
        """Raise if a kernel found ids out of range."""
        if not in_range:
            check_csr_values(self.csr, self.options["sources"], self.options["destinations"])
            raise ValueError("Graph: csr was edited while it was read; make the graph anew, and do not edit graph.csr")


def _check_inputs(inputs: _OperatorInputs) -> None:
    """Raise unless the shapes keep the kernels inside the tensors. The kernels check the ids themselves."""
    q, k, v, features, kind, dropout = inputs.q, inputs.k, inputs.v, inputs.features, inputs.kind, inputs.dropout
    if (
        kind not in _SCORE_KINDS.values()
        or q.dim() != (3 if kind == 0 else 4)
        or k.dim() != q.dim()
        or not 0 <= dropout < 1
    ):
        raise ValueError(
            "q and k must be (batch, nodes, heads) for kind 0, (batch, nodes, heads, dim) for 1 and 2, and dropout in [0, 1), "
            f"got {tuple(q.shape)} and {tuple(k.shape)} for {kind}, and dropout {dropout}"
        )
    (batch, destinations, heads, *row), sources, csr = q.shape, k.shape[1], inputs.csr
    check_csr_dtypes_and_shapes(list(csr), sources, destinations)
    edges = len(csr.indices)
    width = () if v is None else v.shape[-1:]
    edge_dim = () if features is None else features.shape[1:]
    check_operand("k", k, (batch, sources, heads, *row), q)
    check_operand("v", v, (batch, sources, heads, *width), q)
    check_operand("a", inputs.a, (heads, *row), q)
    check_operand("inside", inputs.inside, (edges, heads), q)
    check_operand("features", features, (edges, *edge_dim), q)
    check_operand("edge", inputs.edge, (heads, *edge_dim, *row), q)
    check_operand("weights", inputs.weights, (edges,), q)
    for name, x, nodes in (("query_index", inputs.query_index, destinations), ("key_index", inputs.key_index, sources)):
        if x is not None and (tuple(x.shape) != (nodes,) or x.dtype != torch.int32 or not x.is_cpu):
            raise ValueError(f"{name} must be int32 of shape ({nodes},), got {x.dtype} of shape {tuple(x.shape)}")
    present = tuple(x is not None for x in (inputs.a, inputs.inside, features, inputs.edge))
    if (
        present not in _ALLOWED_ARGUMENTS[kind]
        or (kind == 0 and v is None)
        or (features is not None and len(edge_dim) != 1)
    ):
        raise ValueError(
            f"a, inside, features and edge must be given as kind {kind} requires, got {present}, and v {v is not None}"
        )
    if q.dtype not in (torch.float32, torch.float64) or not all(x.is_cpu for x in (q, *csr)):
        raise ValueError(f"q must be fp32 or fp64, and all on the CPU, got {q.dtype} on {q.device} and {csr[0].device}")


def _pointer_or_null(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def _edges_forward(*args: Any) -> tuple[Tensor, Tensor]:
    inputs = _OperatorInputs(*args)
    problem, q = _KernelArguments(inputs), inputs.q
    out, lse = q.new_empty(*q.shape[:3], problem.dim), q.new_empty(q.shape[:3])
    in_range = native.edges_forward(**problem.options, **problem.pointers(), out=out.data_ptr(), lse=lse.data_ptr())
    problem.raise_unless_ids_valid(in_range)
    width = inputs.value_width
    return (out if width == problem.dim else out[..., :width].contiguous()), lse


def _edges_forward_fake(*args: Any) -> tuple[Tensor, Tensor]:
    inputs = _OperatorInputs(*args)
    q = inputs.q
    return q.new_empty(*q.shape[:3], inputs.value_width), q.new_empty(q.shape[:3])


def _edges_backward(d_out: Tensor, d_lse: Tensor | None, out: Tensor, lse: Tensor, *args: Any) -> tuple[Tensor, ...]:
    *given, needed = args
    inputs = _OperatorInputs(*given)
    problem = _KernelArguments(inputs)
    _check_gradients(d_out, d_lse, out, lse, inputs)
    csr = problem.csr
    # the kernels write nothing if there is nothing to sum over
    empty = torch.empty_like if out.numel() and csr.edge_id.numel() else torch.zeros_like
    allocate = lambda x: None if x is None else empty(x)
    dq, dk = empty(problem.q), empty(problem.k)
    dv, da, d_map = (allocate(x) for x in (problem.v, problem.a, problem.map))
    d_inside, d_features, d_weights = (
        allocate(x) if need else None
        for x, need in ((problem.inside, needed[4]), (problem.features, needed[5]), (problem.weights, needed[7]))
    )
    out, lse, d_out = problem.pad(out), lse.contiguous(), problem.pad(d_out)
    d_lse = None if d_lse is None else d_lse.contiguous()
    in_range = native.edges_backward(
        **problem.options, **problem.pointers(), out_indptr=csr.out_indptr.data_ptr(), out_slot=csr.out_slot.data_ptr(),
        out_indices=csr.out_indices.data_ptr(), out=out.data_ptr(), lse=lse.data_ptr(), d_out=d_out.data_ptr(),
        d_lse=_pointer_or_null(d_lse), dq=dq.data_ptr(), dk=dk.data_ptr(), dv=_pointer_or_null(dv), da=_pointer_or_null(da),
        d_inside=_pointer_or_null(d_inside), d_weights=_pointer_or_null(d_weights), d_features=_pointer_or_null(d_features), d_map=_pointer_or_null(d_map),
    )  # fmt: skip
    problem.raise_unless_ids_valid(in_range)
    gradients = (dq, dk, dv, da, d_inside, d_features, d_map, d_weights)
    return tuple(
        dq.new_empty(0) if g is None or x is None else g if g.shape == x.shape else g[..., : x.shape[-1]].contiguous()
        for g, x in zip(gradients, inputs.learned, strict=True)
    )


def _check_gradients(d_out: Tensor, d_lse: Tensor | None, out: Tensor, lse: Tensor, inputs: _OperatorInputs) -> None:
    q = inputs.q
    rows = tuple(q.shape[:3])
    values = (*rows, inputs.value_width)
    for name, x, shape in (("d_out", d_out, values), ("out", out, values), ("lse", lse, rows), ("d_lse", d_lse, rows)):
        check_operand(name, x, shape, q)


def _edges_backward_fake(
    d_out: Tensor, d_lse: Tensor | None, out: Tensor, lse: Tensor, *args: Any
) -> tuple[Tensor, ...]:
    *given, needed = args
    inputs = _OperatorInputs(*given)
    # the gradients of inside, features and weights are computed only if needed
    computed = [need or place not in (4, 5, 7) for place, need in enumerate(needed)]
    return tuple(
        inputs.q.new_empty(0) if x is None or not compute else inputs.q.new_empty(x.shape)
        for x, compute in zip(inputs.learned, computed, strict=True)
    )


def _attend_by_edges_torch(*args: Any) -> OutputAndLse:
    """The same attention by `EdgesTorch`, for node-major tensors."""
    inputs = _OperatorInputs(*args)
    q, k, v, features, kind, factor = inputs.q, inputs.k, inputs.v, inputs.features, inputs.kind, inputs.factor
    if kind == _SCORE_KINDS[GAT]:
        # the terms of queries, keys and edges act as features, one per head
        q, k = q[..., None], k[..., None]
        one = q.new_ones(q.shape[2], 1)
        features = inputs.inside
        score: Score = GAT.from_tensors(
            one, one, None if features is None else torch.eye(len(one)).to(q), negative_slope=factor
        )
    elif kind == _SCORE_KINDS[GATv2]:
        assert inputs.a is not None
        edge = inputs.edge
        score = GATv2.from_tensors(inputs.a, None if edge is None else edge.transpose(-2, -1), negative_slope=factor)
    else:
        score = Dot(factor)
    graph = Graph(inputs.csr.edge_index, (k.shape[1], q.shape[1]), features, inputs.weights)
    q, k, v = (x.transpose(1, 2) for x in (q, k, k if v is None else v))
    seed = None if inputs.seed is None else inputs.seed.reshape(-1)[0]
    indices = global_indices_of(inputs.seed, inputs.query_index, inputs.key_index)
    out, lse = EdgesTorch()(Call(q, k, v, graph, score, dropout=inputs.dropout, seed=seed, global_indices=indices))
    assert lse is not None
    return out.transpose(1, 2), lse.transpose(1, 2)


register_attention_operator(
    "edges_native",
    "Tensor q, Tensor k, Tensor? v, Tensor? a, Tensor? inside, Tensor? features, Tensor? edge, Tensor? weights, Tensor indptr, "
    "Tensor indices, Tensor edge_id, Tensor out_indptr, Tensor out_slot, Tensor out_indices, Tensor? seed, "
    "Tensor? query_index, Tensor? key_index, int kind, float factor, float dropout",
    learned=("q", "k", "v", "a", "inside", "features", "edge", "weights"),
    forward=OperatorPass(_edges_forward, _edges_forward_fake),
    backward=OperatorPass(_edges_backward, _edges_backward_fake),
    definition=_attend_by_edges_torch,
)
