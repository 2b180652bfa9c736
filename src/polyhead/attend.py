"""The verb: check, choose a kernel, call it; and say which it was and why."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from polyhead._checks import LARGEST_INT64, WrongType, check_integer, check_number, check_tensor, kind_of, shown
from polyhead._torch import widened
from polyhead.kernels import Call, Result, kernels
from polyhead.kernels.edges_torch import weights as edge_weights
from polyhead.kernels.reference import through_sink, weights
from polyhead.neighbourhood import Dense, Graph, Grid, Lattice, Neighbourhood, Sizes, broadcasts, neighbourhood, parts
from polyhead.position import Position
from polyhead.score import Dot, Score

_DOT = Dot()
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def attend(
    q: Float[Tensor, "... heads queries dim"],
    k: Float[Tensor, "... key_heads keys dim"],
    v: Float[Tensor, "... value_heads keys value_dim"],
    *,
    over: Neighbourhood | Tensor | None = None,
    score: Score = _DOT,
    position: Position | None = None,
    bias: Float[Tensor, "... #heads #queries #keys"] | None = None,
    sink: Float[Tensor, " heads"] | float | None = None,
    dropout: float = 0.0,
    seed: Int[Tensor, ""] | int | None = None,
    kernel: str | None = None,
) -> Float[Tensor, "... heads queries value_dim"]:
    """Multi-head attention: for each query, the mean of the values, weighted by softmax(score(q, k)).

    Args:
        q, k, v: projected queries, keys and values. `k` and `v` may have fewer heads than `q`, if their number divides it.
        over: who may attend to whom; a bool tensor is a mask, True = may attend. By default everyone to everyone.
        score: how strongly.
        position: where keys stand; queries are the last of the keys' positions.
        bias: numbers added to the scores.
        sink: the logit, for each head, of one more key of value zero.
        dropout: the share of pairs that is dropped; call it with 0 in evaluation.
        seed: which pairs; drawn from torch's generator unless given.
        kernel: insist on a kernel by name, for tests and measurements; an error where it refuses.

    Returns:
        The heads' outputs. A query with no key gets zero.

    Raises:
        ValueError: where shapes do not fit, with the argument's name and the rule.
    """
    call = prepare(q, k, v, over=over, score=score, position=position, bias=bias, sink=sink, dropout=dropout, seed=seed)
    return run(call, kernel)[0]


def attention_weights(
    q: Float[Tensor, "... heads queries dim"],
    k: Float[Tensor, "... key_heads keys dim"],
    *,
    over: Neighbourhood | Tensor | None = None,
    score: Score = _DOT,
    position: Position | None = None,
    bias: Float[Tensor, "... #heads #queries #keys"] | None = None,
    sink: Float[Tensor, " heads"] | float | None = None,
) -> Float[Tensor, "... heads queries keys"]:
    """The weights that `attend` sums the values with, before dropout: a tensor of queries x keys.

    Each row sums to 1, to less where a sink takes its share, and to 0 where a query has no key.
    """
    call = prepare(q, k, k, over=over, score=score, position=position, bias=bias, sink=sink)
    return (edge_weights if isinstance(call.over, Graph) else weights)(call).to(q.dtype)


class Explanation(NamedTuple):
    """Which kernel a call takes, and why not those before it."""

    kernel: str
    refused: dict[str, str]

    def __str__(self) -> str:
        return "\n".join([self.kernel, *(f"  not {name}: {reason}" for name, reason in self.refused.items())])


def explain(
    q: Float[Tensor, "... heads queries dim"],
    k: Float[Tensor, "... key_heads keys dim"],
    v: Float[Tensor, "... value_heads keys value_dim"],
    *,
    over: Neighbourhood | Tensor | None = None,
    score: Score = _DOT,
    position: Position | None = None,
    bias: Float[Tensor, "... #heads #queries #keys"] | None = None,
    sink: Float[Tensor, " heads"] | float | None = None,
    dropout: float = 0.0,
) -> Explanation:
    """Which kernel `attend` takes for these arguments, and why the faster ones refuse. No attention is computed."""
    call = prepare(q, k, v, over=over, score=score, position=position, bias=bias, sink=sink, dropout=dropout, seed=0)
    return explained(call)


def prepare(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    over: Neighbourhood | Tensor | None,
    score: Score,
    position: Position | None,
    bias: Tensor | None,
    sink: Tensor | float | None,
    dropout: float = 0.0,
    seed: Tensor | int | None = None,
) -> Call:
    """The checked call for tensors as they were given: with a position, it turns q and k."""
    _check_tensors(q, k, v)
    if position is not None:
        if not isinstance(position, Position):
            raise WrongType(f"position must be a Position such as Rotary(), got {shown(position)}")
        position.check(q.shape[-3], q.shape[-1])
        over = neighbourhood(over)
        queries, keys = points(position, over, q.shape[-2], k.shape[-2], q.device)
        q, k = position.rotate(q, k.shape[-2] - q.shape[-2], queries), position.rotate(k, 0, keys)
    if not isinstance(score, Score):
        raise WrongType(f"score must be a Score such as Dot(), got {shown(score)}")
    if sink is not None and not isinstance(sink, Tensor):
        number = check_number("sink", sink, -math.inf, hint="a tensor has one per head")
        sink = torch.full((q.shape[-3],), number, dtype=torch.float64, device=q.device)
    if seed is not None:
        seed = _seed(seed, q.device)
    return assemble(q, k, v, neighbourhood(over), score, position, bias, sink, dropout, seed)


def assemble(
    q: Tensor, k: Tensor, v: Tensor, over: Neighbourhood, score: Score, position: Position | None, bias: Tensor | None,
    sink: Tensor | None, dropout: float, seed: Tensor | None,
) -> Call:  # fmt: skip
    """The checked call for tensors that fit each other; the position, if any, has turned q and k already."""
    table = None
    if type(dropout) is not float or dropout != 0:
        dropout = check_number("dropout", dropout, 0, 1, "[)")
    if dropout:
        seed = torch.randint(2**31, (), device=q.device) if seed is None else seed
    if type(score) is not Dot or isinstance(over, Graph):
        features = over.features if isinstance(over, Graph) else None
        score.check(q.shape[-3], q.shape[-1], None if features is None else features.shape[-1])
    if bias is not None:
        bias = _placed_bias(bias, over, q, k)
    if position is not None:
        table, bias = _added(position, over, bias, q.shape[-2], k.shape[-2], q.device)
    if sink is not None and (sink.shape != q.shape[-3:-2] or not sink.is_floating_point()):
        raise ValueError(
            f"sink must be floating-point numbers, one per head, of shape ({q.shape[-3]},), got {kind_of(sink)}"
        )
    call = Call(q, k, v, over, score, table, bias, sink, dropout, seed)
    if type(over) is not Dense:
        over.check(call.sizes)
        if isinstance(over, Graph) and any(x.device != q.device for x in (over.csr.edge_id, *over.leaves())):
            raise ValueError(
                f"Graph: it is on {over.csr.edge_id.device}, but q is on {q.device}; pass graph.to(q.device)"
            )
    return call


def points(
    position: Position, over: Neighbourhood, queries: int, keys: int, device: torch.device
) -> tuple[Int[Tensor, "queries axes"] | None, Int[Tensor, "keys axes"] | None]:
    """Where queries and keys stand, for a position on a grid; two times None for one along a sequence."""
    grid = _grid_of(position, over, queries, keys)
    return (None, None) if grid is None else (grid.queries(device), grid.keys(device))


def _grid_of(position: Position, over: Neighbourhood, queries: int, keys: int) -> Lattice | None:
    """The grid along whose axes a position counts, None along a sequence; checked."""
    grid = over.grid
    if position.axes is None:
        if grid is not None and grid.sparse:
            raise ValueError(
                f"position: {type(position).__name__} counts queries along the keys, but those of {over!r} stand elsewhere; pass a "
                "position with axes, such as Rotary(axes=2)"
            )
        return None
    if grid is None or len(grid.sizes) != position.axes:
        sizes = ", ".join(("height", "width", "depth")[: position.axes]) if position.axes < 4 else "…"
        raise ValueError(
            f"position: {type(position).__name__} is for a grid of {position.axes} axes, and over is {over!r}; "
            f"pass over=Grid({sizes})"
        )
    grid.check("Grid", Sizes((), 1, queries, keys))
    return grid


def _added(
    position: Position, over: Neighbourhood, bias: Tensor | None, queries: int, keys: int, device: torch.device
) -> tuple[Tensor | None, Tensor | None]:
    """What a position adds: one number a distance where distances tell, else one a pair, joined to the bias."""
    grid = _grid_of(position, over, queries, keys)
    distance = torch.arange(1 - keys, max(queries, 1 - keys), device=device)
    if grid is None:
        return position.by_distance(distance), bias
    local = next((part for part in parts(over) if isinstance(part, Grid) and part.offset_is_unique), None)
    table = None if local is None else position.by_offset(local.offset_of(distance))
    if table is not None:
        return table, bias
    pairs = position.on_grid(grid._replace(prefix=0), device)
    if pairs is not None and grid.prefix:
        # nothing is added for tokens that stand nowhere
        pairs = torch.nn.functional.pad(pairs, (grid.prefix, 0, grid.prefix, 0))
    if pairs is None or bias is None:
        return None, bias if pairs is None else pairs
    return None, widened(bias) + widened(pairs)


def run(call: Call, kernel: str | None = None) -> Result:
    """Compute a checked call with the first kernel that takes it.

    It is a torch function: a `TorchFunctionMode` sees every attention of Polyhead, and may change it.
    """
    if has_torch_function((call.q, call.k, call.v)):
        seen: Result = handle_torch_function(run, (call.q, call.k, call.v), call, kernel)
        return seen
    candidates = kernels(call)
    for candidate in candidates:
        if kernel is not None and candidate.name != kernel:
            continue
        reason = candidate.refuses(call)
        if reason is None:
            out, lse = candidate(call)
            if call.sink is None:
                return out, lse
            assert lse is not None
            return (out * through_sink(lse, call.sink)).to(out.dtype), lse
        if kernel is not None:
            raise ValueError(f"kernel: {kernel!r} refuses this call: {reason}")
    raise ValueError(f"kernel: {kernel!r} is none of {[known.name for known in candidates]}")


def explained(call: Call) -> Explanation:
    """Which kernel takes a checked call, and why the others before it do not."""
    refused: dict[str, str] = {}
    for candidate in kernels(call):
        reason = candidate.refuses(call)
        if reason is None:
            break
        refused[candidate.name] = reason
    return Explanation(candidate.name, refused)


def _seed(seed: Tensor | int, device: torch.device) -> Int[Tensor, ""]:
    """A seed as it was given, as a tensor of one integer."""
    if not isinstance(seed, Tensor):
        return torch.tensor(check_integer("seed", seed, -LARGEST_INT64 - 1, LARGEST_INT64), device=device)
    if seed.numel() != 1 or seed.dtype == torch.bool or seed.is_floating_point() or seed.is_complex():
        raise ValueError(f"seed must be an integer, or a tensor of one integer, got {kind_of(seed)}")
    return seed


def _check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    plain = type(q) is type(k) is type(v) is Tensor and q.layout is k.layout is v.layout is torch.strided
    if not plain or q.is_nested or k.is_nested or v.is_nested:
        for name, x in (("q", q), ("k", k), ("v", v)):
            check_tensor(name, x, "(..., heads, items, dim)")
    qs, ks, vs = q.shape, k.shape, v.shape
    if len(qs) < 3:
        raise ValueError(f"q: its shape is {tuple(qs)}; it must be (..., heads, queries, dim)")
    if ks[:-3] != qs[:-3] or vs[:-3] != qs[:-3] or len(ks) < 3 or len(vs) < 3:
        raise ValueError(
            f"q, k, v: their shapes are {tuple(qs)}, {tuple(ks)}, {tuple(vs)}; "
            "the batch axes before (heads, items, dim) must be the same"
        )
    if ks[-1] != qs[-1]:
        raise ValueError(f"k: it has {ks[-1]} features, but q has {qs[-1]}")
    if vs[-2] != ks[-2]:
        raise ValueError(f"v: it has {vs[-2]} items, but k has {ks[-2]}")
    if ks[-3] == 0 or vs[-3] == 0 or qs[-3] % ks[-3] or qs[-3] % vs[-3]:
        raise ValueError(
            f"k, v: {ks[-3]} and {vs[-3]} heads cannot be shared by the {qs[-3]} heads of q; their number must divide it"
        )
    if not (q.dtype == k.dtype == v.dtype) or q.dtype not in _DTYPES:
        raise ValueError(
            f"q, k and v must be of one dtype, float64, float32, bfloat16 or float16, got {q.dtype}, {k.dtype} and {v.dtype}"
        )
    if not (q.is_cpu and k.is_cpu and v.is_cpu) and not (q.device == k.device == v.device):
        raise ValueError(f"q, k, v must be on one device, got {q.device}, {k.device} and {v.device}")


def _placed_bias(bias: Tensor, over: Neighbourhood, q: Tensor, k: Tensor) -> Tensor:
    """The bias with an axis for each of (heads, queries, keys), on a graph of (heads, edges); checked."""
    check_tensor("bias", bias, "(..., heads, edges)" if isinstance(over, Graph) else "(..., heads, queries, keys)")
    if isinstance(over, Graph):
        bias = bias.reshape(*(1,) * (2 - bias.dim()), *bias.shape)
        _check_bias(bias, (*q.shape[:-2], over.num_edges), "(..., heads, edges)", q.device)
        return bias
    bias = bias.reshape(*(1,) * (3 - bias.dim()), *bias.shape)
    _check_bias(bias, (*q.shape[:-1], k.shape[-2]), "(..., heads, queries, keys)", q.device)
    return bias


def _check_bias(bias: Tensor, wanted: tuple[int, ...], axes: str, device: torch.device) -> None:
    if bias.device != device:
        raise ValueError(f"bias must be on {device}, as q is, got {bias.device}")
    if not bias.is_floating_point():
        raise ValueError(
            f"bias: it is {bias.dtype}; it must be floating-point numbers to add. A bool mask goes to over="
        )
    if not broadcasts(tuple(bias.shape), wanted):
        raise ValueError(f"bias: its shape is {tuple(bias.shape)}; it must broadcast to {axes} = {wanted}")
