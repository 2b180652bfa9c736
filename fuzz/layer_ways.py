"""The layer of a case, its inputs, and the ways to call it, each beside the definition."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from fuzz import scores
from fuzz.compare import closeness
from fuzz.edges import Edges, defined, draw_pairs
from fuzz.hashing import stays
from fuzz.layer_oracle import Around, Seen, Shape, compute, differentiated
from fuzz.neighbourhoods import Sizes, build
from fuzz.oracle import Inputs
from fuzz.position_setup import along_sequence
from fuzz.tensors import DTYPES, numbers
from polyhead import GAT, Causal, Dot, GATv2, Graph, MultiHeadAttention, Neighbourhood

if TYPE_CHECKING:
    from fuzz.layer import Case


def make(case: Case) -> MultiHeadAttention:
    """The layer, with random numbers everywhere."""
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
            # weights as they start, and everything else that would start at zero or one
            if parameter.dim() == 1:
                parameter.copy_(torch.randn_like(parameter) * 0.5 + ("norm" in name))
    return layer.train(case.dropout > 0)


@dataclasses.dataclass
class Call:
    """The inputs of a call, and what the oracle needs to know."""

    x: Tensor
    key: Tensor | None
    value: Tensor | None
    over: Neighbourhood | None
    bias: Tensor | None
    around: Around


def inputs(case: Case, layer: MultiHeadAttention) -> Call:
    """Random inputs, and who may attend to whom."""
    rng, dtype = np.random.default_rng(case.seed), DTYPES[case.dtype]
    keys = case.queries if case.keys is None else case.keys
    x = numbers("normal", (*case.batch, case.queries, case.d_model), rng, dtype)
    key = None if case.keys is None else numbers("normal", (*case.batch, keys, case.d_key), rng, dtype)
    value = None
    if key is not None and (case.d_value != case.d_key or case.seed % 2):
        value = numbers("normal", (*case.batch, keys, case.d_value), rng, dtype)
    sizes = Sizes(case.batch, case.heads, case.queries, keys, to_itself=key is None)
    placing = along_sequence(case.position, case.heads, case.queries, keys, case.head_dim)
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
    around = Around(
        allowed, placing, None if bias is None else bias.double(), None if not case.dropout else _stays(case, keys, edges),
        case.dropout, take=None if edges is None else torch.as_tensor(edges.source),
    )  # fmt: skip
    return Call(x, key, value, over, bias, around)


def _stays(case: Case, keys: int, edges: Edges | None) -> Tensor:
    # the layer draws one number from torch's generator, and nothing before it
    torch.manual_seed(case.seed)
    seed = int(torch.randint(2**31, ()))
    query, key = np.arange(case.queries)[:, None], np.arange(keys)
    if edges is not None:
        query, key = np.broadcast_to(edges.destination, (case.queries, edges.count)), edges.source
    return stays(seed, case.batch, case.heads, query, key, case.dropout).double()


def shape_of(case: Case) -> Shape:
    """The layer's shape as the oracle takes it."""
    eps = torch.finfo(DTYPES[case.dtype]).eps
    return Shape(case.heads, case.heads // case.group, case.combine, case.score, case.residual, eps)


def oracle(case: Case, layer: MultiHeadAttention, call: Call, pull: Tensor) -> tuple[Seen, Inputs]:
    """What the definition says of a call, with the gradients of its inputs and of the layer's numbers."""
    leaves = {name: x for name, x in layer.state_dict().items() if x.is_floating_point() and name != "gate"}
    leaves |= {
        n: x
        for n, x in (("x", call.x), ("key", call.key), ("value", call.value), ("added", call.bias))
        if x is not None
    }

    def run(known: Inputs) -> Seen:
        key = known.get("key", known["x"])
        around = call.around._replace(bias=known.get("added"))
        return compute(shape_of(case), known, known["x"], key, known.get("value", key), around)

    return differentiated(run, leaves, pull)


def off(case: Case, wanted: Tensor, seen: Seen, scale: float = 0.0) -> Tensor:
    """How far a result may be off: by rounding, as much more as scores are large."""
    size = max(scale, float(wanted.abs().max()) if wanted.numel() else 0.0, 1e-30)
    eps = torch.finfo(DTYPES[case.dtype]).eps
    return torch.full_like(wanted, 8 * eps * (1 + seen.largest) ** 2 * seen.spread * size)


def _call(case: Case, layer: MultiHeadAttention, call: Call) -> float:
    """The output, the gradients of everything, and the view on the heads."""
    rng = np.random.default_rng(case.seed + 1)
    own = {
        n: x.clone().requires_grad_()
        for n, x in (("x", call.x), ("key", call.key), ("value", call.value), ("added", call.bias))
        if x is not None
    }
    torch.manual_seed(case.seed)
    y, heads = layer(own["x"], own.get("key"), own.get("value"), over=call.over, bias=own.get("added"))
    pull = numbers("normal", y.shape, rng, y.dtype)
    y.backward(pull)
    seen, gradients = oracle(case, layer, call, pull)
    nearest = closeness(case.way, "output", y, seen.output, off(case, seen.output, seen))
    weights = seen.weights
    if case.edges is not None and call.around.take is not None:
        destination = call.around.allowed[0].int().argmax(0)
        weights = weights[..., destination, torch.arange(case.edges)] if case.edges else weights[..., 0, :]
    nearest = max(nearest, closeness(case.way, "weights", heads.weights, weights, off(case, weights, seen, 1.0)))
    nearest = max(
        nearest, closeness(case.way, "heads' outputs", heads.outputs, seen.outputs, off(case, seen.outputs, seen))
    )
    if seen.kinked and case.dtype == "float32":
        return nearest
    scale = max((float(g.abs().max()) for g in gradients.values() if g.numel()), default=0.0)
    got = {n: x.grad for n, x in own.items()} | {n: x.grad for n, x in layer.named_parameters()}
    for name, gradient in got.items():
        if name == "gate":
            continue
        wanted = gradients[name]
        nearest = max(
            nearest, closeness(case.way, f"gradient of {name}", gradient, wanted, off(case, wanted, seen, scale))
        )
    return nearest


def _same(case: Case, got: Tensor, layer: MultiHeadAttention, call: Call) -> float:
    """An output beside the definition's, without gradients."""
    seen, _ = oracle(case, layer, call, torch.zeros((), dtype=got.dtype))
    return closeness(case.way, "output", got, seen.output, off(case, seen.output, seen))


def _cache(case: Case, layer: MultiHeadAttention, call: Call) -> float:
    """Chunk by chunk, sometimes going back, it is the whole."""
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


def _remember(case: Case, layer: MultiHeadAttention, call: Call) -> float:
    """Keys and values that are projected once."""
    with torch.no_grad():
        key = call.x if call.key is None else call.key
        # padding of queries follows from the call, and this one does not say that they are the keys
        sizes = Sizes(case.batch, case.heads, case.queries, key.shape[-2])
        drawn = build(case.over, sizes, case.seed)
        call.around = call.around._replace(allowed=torch.as_tensor(drawn.allowed.copy()))
        y, _ = layer(call.x, layer.project_kv(key, call.value), over=call.over)
        return _same(case, y, layer, call)


def _prune(case: Case, layer: MultiHeadAttention, call: Call) -> float:
    """Without some heads, whole groups of them: as the definition has it of those that stay."""
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
    nearest = closeness(case.way, "output of loaded state", again, y.double(), torch.zeros_like(y.double()))
    # the other heads count for nothing, and in a mean they do not count at all
    gate = torch.zeros(case.heads, dtype=torch.float64)
    gate[kept] = case.heads / len(kept) if case.combine == "mean" else 1.0
    call.around = call.around._replace(gate=gate)
    seen, _ = oracle(case, layer, call, torch.zeros((), dtype=y.dtype))
    wanted = seen.output
    if case.combine == "concat":
        wanted = torch.cat([wanted.split(case.value_dim, -1)[head] for head in kept], -1)
    return max(nearest, closeness(case.way, "output", y, wanted, off(case, wanted, seen)))


def _of_heads(case: Case, call: Call, kept: list[int]) -> Neighbourhood | Tensor | None:
    """Who may attend to whom, in the heads that stay."""
    allowed = call.around.allowed
    return allowed[..., kept, :, :] if allowed.shape[-3] > 1 else call.over


def _merged(case: Case, layer: MultiHeadAttention, call: Call) -> float:
    """W_V folded into W_O."""
    with torch.no_grad():
        y, _ = layer.fold_value_projection()(call.x, call.key, call.value, over=call.over, bias=call.bias)
    return _same(case, y, layer, call)


def _gate(case: Case, layer: MultiHeadAttention, call: Call) -> float:
    """One number a head that multiplies its output."""
    gate = numbers("normal", (case.heads,), np.random.default_rng(case.seed + 4), DTYPES[case.dtype])
    layer.gate = gate
    call.around = call.around._replace(gate=gate.double())
    with torch.no_grad():
        y, _ = layer(call.x, call.key, call.value, over=call.over, bias=call.bias)
    return _same(case, y, layer, call)


def _sparse(case: Case, layer: MultiHeadAttention, call: Call) -> float:
    """Bags of words, most of whose numbers are zero."""
    rng = np.random.default_rng(case.seed + 5)
    call.x = call.x * torch.as_tensor(rng.random(call.x.shape) < 0.3)
    with torch.no_grad():
        y, _ = layer(call.x.to_sparse(), over=call.over, bias=call.bias)
    return _same(case, y, layer, call)


def _state(case: Case, layer: MultiHeadAttention, call: Call) -> float:
    """A fresh layer with the same numbers gives the same, bit for bit."""
    other = make(dataclasses.replace(case, seed=case.seed + 1))
    other.load_state_dict(layer.state_dict())
    with torch.no_grad():
        y, _ = layer(call.x, call.key, call.value, over=call.over, bias=call.bias)
        again, _ = other(call.x, call.key, call.value, over=call.over, bias=call.bias)
    nearest = closeness(case.way, "output of loaded state", again, y.double(), torch.zeros_like(y.double()))
    return max(nearest, _same(case, y, layer, call))


WAYS = {
    "call": _call, "cache": _cache, "project_kv": _remember, "prune": _prune, "merged": _merged, "gate": _gate, "state": _state,
    "sparse": _sparse,
}  # fmt: skip
