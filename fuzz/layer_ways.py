"""The layer of a case, its inputs, and the kinds of call, each compared with the definition."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from fuzz import scores
from fuzz.compare import error_ratio
from fuzz.edges import Edges, defined, draw_pairs
from fuzz.hashing import dropout_mask
from fuzz.layer_oracle import CallOptions, LayerResult, Shape, compute, differentiated
from fuzz.neighbourhoods import Sizes, build
from fuzz.oracle import Inputs
from fuzz.position_setup import along_sequence
from fuzz.tensors import DTYPES, numbers
from polyhead import GAT, Causal, Dot, GATv2, Graph, MultiHeadAttention, Neighbourhood

if TYPE_CHECKING:
    from fuzz.layer import Case


def make(case: Case) -> MultiHeadAttention:
    """The layer, with all weights random."""
    torch.manual_seed(case.seed)
    kind, *options = case.score
    score: Any = scores.Near() if kind == "near" else Dot(options[0])
    if kind == "gat":
        score = GAT(
            case.heads, case.head_dim, negative_slope=options[0], bias=options[1], shares_queries=case.shares_queries
        )
    elif kind == "gatv2":
        score = GATv2(case.heads, case.head_dim, negative_slope=options[0], shares_queries=case.shares_queries)
    table = (
        nn.Parameter(torch.randn(case.position[1], case.heads)) if case.position[0] == "relative" else torch.zeros(0)
    )
    combine: Any = case.combine
    sink: Any = {"none": None, "number": 0.4, "learned": "learned"}[case.sink]
    layer = MultiHeadAttention(
        case.d_model, case.heads, kv_heads=case.heads // case.group, head_dim=case.head_dim, value_dim=case.value_dim, d_key=case.d_key,
        d_value=case.d_value, d_out=case.d_out if case.combine == "project" else None, score=score, combine=combine,
        position=along_sequence(case.position, case.heads, 1, 1, case.head_dim).position({"table": table}),
        sink=sink,
        qk_norm=case.qk_norm, residual=case.residual, bias=case.has_bias, dropout=case.dropout,
    )  # fmt: skip
    layer = layer.to(DTYPES[case.dtype])
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            # matrices keep their initial values; vectors would start at zero or one
            if parameter.dim() == 1:
                parameter.copy_(torch.randn_like(parameter) * 0.5 + ("norm" in name))
    return layer.train(case.dropout > 0)


@dataclasses.dataclass
class Call:
    """The inputs of a call, and its options for the oracle."""

    x: Tensor
    key: Tensor | None
    value: Tensor | None
    over: Neighbourhood | None
    bias: Tensor | None
    options: CallOptions


def inputs(case: Case, layer: MultiHeadAttention) -> Call:
    """Random inputs and a neighbourhood."""
    rng, dtype = np.random.default_rng(case.seed), DTYPES[case.dtype]
    keys = case.queries if case.keys is None else case.keys
    x = numbers("normal", (*case.batch, case.queries, case.d_model), rng, dtype)
    key = None if case.keys is None else numbers("normal", (*case.batch, keys, case.d_key), rng, dtype)
    value = None
    if key is not None and (case.d_value != case.d_key or case.seed % 2):
        value = numbers("normal", (*case.batch, keys, case.d_value), rng, dtype)
    sizes = Sizes(case.batch, case.heads, case.queries, keys, to_itself=key is None)
    position_setup = along_sequence(case.position, case.heads, case.queries, keys, case.head_dim)
    edges = None
    over: Neighbourhood | None
    columns: tuple[int, ...]
    if case.edges is None:
        drawn = build(case.over if case.way != "cache" else (("causal",),), sizes, case.seed)
        over, allowed, columns = drawn.over, torch.as_tensor(drawn.allowed.copy()), (case.queries, keys)
    else:
        edges = defined(draw_pairs("random", keys, case.queries, case.edges, rng), (keys, case.queries), "list")
        over = Graph(torch.as_tensor(np.stack((edges.source, edges.destination))), (keys, case.queries))
        allowed = (torch.as_tensor(edges.destination) == torch.arange(case.queries)[:, None])[None]
        columns = (edges.count,)
    bias = numbers("normal", (case.heads, *columns), rng, dtype) if case.bias else None
    options = CallOptions(
        allowed, position_setup, None if bias is None else bias.double(), None if not case.dropout else _dropout_mask(case, keys, edges),
        case.dropout, take=None if edges is None else torch.as_tensor(edges.source),
    )  # fmt: skip
    return Call(x, key, value, over, bias, options)


def _dropout_mask(case: Case, keys: int, edges: Edges | None) -> Tensor:
    # the first number that the layer draws from torch's generator is its seed
    torch.manual_seed(case.seed)
    seed = int(torch.randint(2**31, ()))
    query, key = np.arange(case.queries)[:, None], np.arange(keys)
    if edges is not None:
        query, key = np.broadcast_to(edges.destination, (case.queries, edges.count)), edges.source
    return dropout_mask(seed, case.batch, case.heads, query, key, case.dropout).double()


def shape_of(case: Case) -> Shape:
    """The options of the layer for the oracle."""
    eps = torch.finfo(DTYPES[case.dtype]).eps
    return Shape(case.heads, case.heads // case.group, case.combine, case.score, case.residual, eps)


def oracle(case: Case, layer: MultiHeadAttention, call: Call, grad_output: Tensor) -> tuple[LayerResult, Inputs]:
    """The result of a call by definition, with the gradients of its inputs and of the weights of the layer."""
    leaves = {name: x for name, x in layer.state_dict().items() if x.is_floating_point() and name != "gate"}
    leaves |= {
        n: x
        for n, x in (("x", call.x), ("key", call.key), ("value", call.value), ("added", call.bias))
        if x is not None
    }

    def run(known: Inputs) -> LayerResult:
        key = known.get("key", known["x"])
        options = call.options._replace(bias=known.get("added"))
        return compute(shape_of(case), known, known["x"], key, known.get("value", key), options)

    return differentiated(run, leaves, grad_output)


def error_bound(case: Case, expected: Tensor, result: LayerResult, scale: float = 0.0) -> Tensor:
    """The bound of a rounding error, which grows with the scores."""
    size = max(scale, float(expected.abs().max()) if expected.numel() else 0.0, 1e-30)
    eps = torch.finfo(DTYPES[case.dtype]).eps
    return torch.full_like(expected, 8 * eps * (1 + result.largest) ** 2 * result.spread * size)


def _call(case: Case, layer: MultiHeadAttention, call: Call) -> float:
    """Compare the output, all gradients, and the view of the heads."""
    rng = np.random.default_rng(case.seed + 1)
    own = {
        n: x.clone().requires_grad_()
        for n, x in (("x", call.x), ("key", call.key), ("value", call.value), ("added", call.bias))
        if x is not None
    }
    torch.manual_seed(case.seed)
    y, heads = layer(own["x"], own.get("key"), own.get("value"), over=call.over, bias=own.get("added"))
    grad_output = numbers("normal", y.shape, rng, y.dtype)
    y.backward(grad_output)
    result, gradients = oracle(case, layer, call, grad_output)
    max_error = error_ratio(case.way, "output", y, result.output, error_bound(case, result.output, result))
    weights = result.weights
    if case.edges is not None and call.options.take is not None:
        destination = call.options.allowed[0].int().argmax(0)
        weights = weights[..., destination, torch.arange(case.edges)] if case.edges else weights[..., 0, :]
    max_error = max(
        max_error, error_ratio(case.way, "weights", heads.weights, weights, error_bound(case, weights, result, 1.0))
    )
    max_error = max(
        max_error,
        error_ratio(
            case.way, "heads' outputs", heads.outputs, result.outputs, error_bound(case, result.outputs, result)
        ),
    )
    if result.kinked and case.dtype == "float32":
        return max_error
    scale = max((float(g.abs().max()) for g in gradients.values() if g.numel()), default=0.0)
    got = {n: x.grad for n, x in own.items()} | {n: x.grad for n, x in layer.named_parameters()}
    for name, gradient in got.items():
        if name == "gate":
            continue
        expected = gradients[name]
        max_error = max(
            max_error,
            error_ratio(
                case.way, f"gradient of {name}", gradient, expected, error_bound(case, expected, result, scale)
            ),
        )
    return max_error


def _same(case: Case, got: Tensor, layer: MultiHeadAttention, call: Call) -> float:
    """Compare an output with the definition's, without gradients."""
    result, _ = oracle(case, layer, call, torch.zeros((), dtype=got.dtype))
    return error_ratio(case.way, "output", got, result.output, error_bound(case, result.output, result))


def _cache(case: Case, layer: MultiHeadAttention, call: Call) -> float:
    """Compare a sequence processed in chunks with a cache, sometimes truncated, with the whole sequence."""
    rng = np.random.default_rng(case.seed + 2)
    with torch.no_grad():
        cache = layer.cache(case.batch or None, case.queries + 2)
        made: list[Tensor] = []
        while cache.length < case.queries:
            stop = int(rng.integers(cache.length + 1, case.queries + 1))
            piece = call.x[..., cache.length : stop, :]
            made.append(layer(piece, over=None if piece.shape[-2] == 1 else Causal(), cache=cache)[0])
            if rng.random() < 0.3:
                back = int(rng.integers(0, cache.length + 1))
                cache.truncate(back)
                made = [torch.cat(made, -2)[..., :back, :]]
        return _same(case, torch.cat(made, -2), layer, call)


def _project_kv(case: Case, layer: MultiHeadAttention, call: Call) -> float:
    """Check keys and values that are projected once."""
    with torch.no_grad():
        key = call.x if call.key is None else call.key
        # this call does not show that the queries are the keys, so padding does not apply to queries
        sizes = Sizes(case.batch, case.heads, case.queries, key.shape[-2])
        drawn = build(case.over, sizes, case.seed)
        call.options = call.options._replace(allowed=torch.as_tensor(drawn.allowed.copy()))
        y, _ = layer(call.x, layer.project_kv(key, call.value), over=call.over)
        return _same(case, y, layer, call)


def _prune(case: Case, layer: MultiHeadAttention, call: Call) -> float:
    """Compare a layer with pruned groups of heads with the definition of the remaining heads."""
    rng = np.random.default_rng(case.seed + 3)
    gone = [g for g in range(case.heads // case.group) if rng.random() < 0.4][: case.heads // case.group - 1]
    heads = [g * case.group + i for g in gone for i in range(case.group)]
    kept = [head for head in range(case.heads) if head not in heads]
    fresh = make(case)
    with torch.no_grad():
        pruned = make(case)
        pruned.prune(heads)
        bias = None if call.bias is None else call.bias[kept]
        over = _of_heads(case, call, kept)
        y, _ = pruned(call.x, call.key, call.value, over=over, bias=bias)
        fresh.load_state_dict(pruned.state_dict())
        again, _ = fresh(call.x, call.key, call.value, over=over, bias=bias)
    max_error = error_ratio(case.way, "output of loaded state", again, y.double(), torch.zeros_like(y.double()))
    # pruned heads have a gate of 0, and are not counted in a mean
    gate = torch.zeros(case.heads, dtype=torch.float64)
    gate[kept] = case.heads / len(kept) if case.combine == "mean" else 1.0
    call.options = call.options._replace(gate=gate)
    result, _ = oracle(case, layer, call, torch.zeros((), dtype=y.dtype))
    expected = result.output
    if case.combine == "concat":
        expected = torch.cat([expected.split(case.value_dim, -1)[head] for head in kept], -1)
    return max(max_error, error_ratio(case.way, "output", y, expected, error_bound(case, expected, result)))


def _of_heads(case: Case, call: Call, kept: list[int]) -> Neighbourhood | Tensor | None:
    """The neighbourhood of the remaining heads."""
    allowed = call.options.allowed
    return allowed[..., kept, :, :] if allowed.shape[-3] > 1 else call.over


def _fold(case: Case, layer: MultiHeadAttention, call: Call) -> float:
    """Compare a layer with W_V folded into W_O."""
    with torch.no_grad():
        y, _ = layer.fold_value_projection()(call.x, call.key, call.value, over=call.over, bias=call.bias)
    return _same(case, y, layer, call)


def _gate(case: Case, layer: MultiHeadAttention, call: Call) -> float:
    """Compare a layer with one gate per head."""
    gate = numbers("normal", (case.heads,), np.random.default_rng(case.seed + 4), DTYPES[case.dtype])
    layer.gate = gate
    call.options = call.options._replace(gate=gate.double())
    with torch.no_grad():
        y, _ = layer(call.x, call.key, call.value, over=call.over, bias=call.bias)
    return _same(case, y, layer, call)


def _sparse(case: Case, layer: MultiHeadAttention, call: Call) -> float:
    """Compare a layer on sparse inputs."""
    rng = np.random.default_rng(case.seed + 5)
    call.x = call.x * torch.as_tensor(rng.random(call.x.shape) < 0.3)
    with torch.no_grad():
        y, _ = layer(call.x.to_sparse(), over=call.over, bias=call.bias)
    return _same(case, y, layer, call)


def _state(case: Case, layer: MultiHeadAttention, call: Call) -> float:
    """Check that a new layer with the same `state_dict` gives the same output, bit for bit."""
    other = make(dataclasses.replace(case, seed=case.seed + 1))
    other.load_state_dict(layer.state_dict())
    with torch.no_grad():
        y, _ = layer(call.x, call.key, call.value, over=call.over, bias=call.bias)
        again, _ = other(call.x, call.key, call.value, over=call.over, bias=call.bias)
    max_error = error_ratio(case.way, "output of loaded state", again, y.double(), torch.zeros_like(y.double()))
    return max(max_error, _same(case, y, layer, call))


WAYS = {
    "call": _call, "cache": _cache, "project_kv": _project_kv, "prune": _prune, "fold": _fold, "gate": _gate, "state": _state,
    "sparse": _sparse,
}  # fmt: skip
