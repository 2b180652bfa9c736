"""Turn the arguments of one attention into a checked `Call`."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from polyhead._checks import (
    LARGEST_INT64,
    WrongType,
    check_dense_tensor,
    check_integer,
    check_number,
    describe_type,
    short_repr,
)
from polyhead._foreign_arguments import hint_for_position
from polyhead._torch import to_at_least_fp32
from polyhead.kernels import Call
from polyhead.kernels.call import GlobalIndices
from polyhead.neighbourhood import (
    Dense,
    Grid,
    Lattice,
    Neighbourhood,
    Sizes,
    as_neighbourhood,
    broadcasts_to,
    intersection_parts,
)
from polyhead.position import Position, RelativeBias, Rotary
from polyhead.score import Dot, Score

DEFAULT_SCORE = Dot()
_SUPPORTED_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class AttentionOptions(NamedTuple):
    """Everything that defines one attention besides q, k and v; `polyhead.attend` describes each field."""

    over: Neighbourhood | Tensor | None = None
    score: Score = DEFAULT_SCORE
    position: Position | None = None
    bias: Float[Tensor, "... #heads #queries #keys"] | None = None
    sink: Float[Tensor, " heads"] | float | None = None
    dropout: float = 0.0
    seed: Int[Tensor, ""] | int | None = None
    global_indices: GlobalIndices | None = None


def check_and_make_call(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Call:
    """Check tensors and options as a user passed them, rotate q and k by the position, and make the call."""
    _check_tensors(q, k, v)
    over, score, position, _, sink, _, seed, _ = options
    over = as_neighbourhood(over)
    if not isinstance(score, Score):
        raise WrongType(f"score must be a Score such as Dot(), got {short_repr(score)}")
    lattice = None
    if over.has_remote_keys:
        over.check(Sizes(tuple(q.shape[:-3]), q.shape[-3], q.shape[-2], k.shape[-2]))
        k, v = over.start_fetch(k, v)()
    if position is not None:
        if not isinstance(position, Position):
            raise WrongType(
                f"position must be a Position such as Rotary(), got {short_repr(position)}{hint_for_position(position)}"
            )
        position.check(q.shape[-3], q.shape[-1])
        lattice = find_lattice(position, over, *over.whole_sizes(q.shape[-2], k.shape[-2]))
        query_points, key_points = item_coordinates(over, lattice, q.device)
        q = position.rotate(q, k.shape[-2] - q.shape[-2], query_points)
        k = position.rotate(k, 0, key_points)
    if sink is not None and not isinstance(sink, Tensor):
        number = check_number("sink", sink, -math.inf, hint="a tensor has one per head")
        sink = torch.full((q.shape[-3],), number, dtype=torch.promote_types(q.dtype, torch.float32), device=q.device)
    if seed is not None:
        seed = _check_seed(seed, q.device)
    _check_devices(q.device, position, score, sink, seed)
    if type(over) is not Dense:
        over.check(Sizes(tuple(q.shape[:-3]), q.shape[-3], q.shape[-2], k.shape[-2]))
        over.check_device(q.device)
    return make_call(q, k, v, options._replace(over=over, sink=sink, seed=seed), lattice)


def make_call(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, lattice: Lattice | None = None) -> Call:
    """Make the call for tensors and a neighbourhood that were checked; the position has rotated q and k already.

    `lattice` has the coordinates for a position on a grid, as found by `find_lattice`.
    """
    over, score, position, bias, sink, dropout, seed, indices = options
    assert isinstance(over, Neighbourhood) and not isinstance(sink, float) and not isinstance(seed, int)
    relative_bias = None
    if type(dropout) is not float or dropout != 0:
        dropout = check_number("dropout", dropout, 0, 1, "[)")
    if dropout and seed is None:
        seed = torch.randint(2**31, (), device=q.device)
    if type(score) is not Dot or over.edge_dim is not None:
        score.check(q.shape[-3], q.shape[-1], over.edge_dim)
    if bias is not None:
        bias = _check_bias(bias, over, q, k)
    if position is not None:
        relative_bias, bias = _position_bias(position, lattice, over, bias, q, k)
    if sink is not None and sink.layout != torch.strided:
        check_dense_tensor("sink", sink, "of one number per head")
    if sink is not None and (sink.shape != q.shape[-3:-2] or not sink.is_floating_point()):
        raise ValueError(
            f"sink must be floating-point numbers, one per head, of shape ({q.shape[-3]},), got {describe_type(sink)}"
        )
    if type(over) is not Dense:
        over = over.bind_sizes(Sizes(tuple(q.shape[:-3]), q.shape[-3], q.shape[-2], k.shape[-2]))
    if over.item_indices is not None:
        indices = (indices or GlobalIndices())._replace(queries=over.item_indices[0], keys=over.item_indices[1])
    return Call(q, k, v, over, score, relative_bias, bias, sink, dropout, seed, indices)


def find_lattice(position: Position, over: Neighbourhood, queries: int, keys: int) -> Lattice | None:
    """The lattice whose coordinates a position uses; None for a position along the sequence."""
    lattice = over.lattice
    if position.axes is None:
        if lattice is not None:
            _check_sequence_position_on_grid(position, over, lattice)
        return None
    if lattice is None or len(lattice.sizes) != position.axes:
        sizes = ", ".join(("height", "width", "depth")[: position.axes]) if position.axes < 4 else "…"
        raise ValueError(
            f"over must be a Grid of {position.axes} axes for {type(position).__name__}, got {over!r}; "
            f"pass over=Grid({sizes})"
        )
    lattice.check("Grid", Sizes((), 1, queries, keys))
    return lattice


def _check_sequence_position_on_grid(position: Position, over: Neighbourhood, lattice: Lattice) -> None:
    """Raise where a position along the sequence would count points row by row, and there is one for the axes of the grid."""
    axes, name = len(lattice.sizes), type(position).__name__
    on_grid = {
        Rotary: f"Rotary(axes={axes})",
        RelativeBias: f"RelativeBias(num_heads, window=({', '.join('7' * axes)}))",
    }
    right = next((call for kind, call in on_grid.items() if isinstance(position, kind)), None)
    if lattice.queries_differ_from_keys:
        raise ValueError(
            f"position must have axes for {over!r}, whose queries are not at the keys' positions, got {name} along the "
            f"sequence; pass one such as {right or on_grid[Rotary]}"
        )
    if axes > 1 and right is not None:
        raise ValueError(
            f"position must have {axes} axes for {over!r}, got {name} along the sequence, which counts points row by row; "
            f"pass {right}, or a bool mask as over to count row by row"
        )


def item_coordinates(
    over: Neighbourhood, lattice: Lattice | None, device: torch.device
) -> tuple[Int[Tensor, "queries axes"] | None, Int[Tensor, "keys axes"] | None]:
    """The coordinates of queries and keys on a grid, or in a whole sequence of which `over` has a part; else `(None, None)`."""
    own = over.item_indices
    if lattice is None:
        if own is None:
            return None, None
        queries, keys = over.whole_sizes(len(own[0]), len(own[1]))
        query, key = (index.to(device) for index in own)
        return (query + (keys - queries))[:, None], key[:, None]
    query, key = lattice.query_coordinates(device), lattice.key_coordinates(device)
    return (query, key) if own is None else (query[own[0].to(device)], key[own[1].to(device)])


def _position_bias(
    position: Position, lattice: Lattice | None, over: Neighbourhood, bias: Tensor | None, q: Tensor, k: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """The terms that a position adds to the scores: (relative bias, bias).

    A relative bias where only the distance between key and query matters; else one number per pair, added to the bias.
    """
    (queries, keys), device = over.whole_sizes(q.shape[-2], k.shape[-2]), q.device
    distance = torch.arange(1 - keys, max(queries, 1 - keys), device=device)
    if over.query_shift is not None:
        distance = distance + over.query_shift
    if lattice is None:
        return position.by_distance(distance), bias
    local = next(
        (part for part in intersection_parts(over.whole) if isinstance(part, Grid) and part.offset_is_unique), None
    )
    relative_bias = None if local is None else position.by_offset(local.offset_of(distance))
    if relative_bias is not None:
        return relative_bias, bias
    pairs = position.on_grid(lattice._replace(prefix=0), device)
    if pairs is not None and lattice.prefix:
        # prefix tokens have no coordinates: nothing is added for them
        pairs = F.pad(pairs, (lattice.prefix, 0, lattice.prefix, 0))
    if pairs is not None and over.item_indices is not None:
        pairs = pairs.index_select(-2, over.item_indices[0].to(device))
    if pairs is None or bias is None:
        return None, bias if pairs is None else pairs
    return None, to_at_least_fp32(bias) + to_at_least_fp32(pairs)


def _check_devices(
    device: torch.device,
    position: Position | None,
    score: Score,
    sink: Tensor | float | None,
    seed: Tensor | int | None,
) -> None:
    """Raise where a tensor that goes with q is on another device."""
    # a score without learned tensors is the common case
    modules = {"position": position, "score": None if type(score) is Dot else score}
    named: list[tuple[str, Tensor]] = [
        (name, x) for name, module in modules.items() if module is not None for x in _tensors_of(module)
    ]
    named += [(name, x) for name, x in (("sink", sink), ("seed", seed)) if isinstance(x, Tensor)]
    for name, x in named:
        if x.device != device and device.type != "meta":
            raise ValueError(f"{name} must be on {device}, as q is, got {x.device}; pass {name}.to({str(device)!r})")


def _tensors_of(module: Position | Score) -> list[Tensor]:
    learned = module.learned() if isinstance(module, Score) else ()
    return [*module.parameters(), *module.buffers(), *learned]


def _check_seed(seed: Tensor | int, device: torch.device) -> Int[Tensor, ""]:
    if not isinstance(seed, Tensor):
        # filled on the device: a copy from the host would wait
        number = check_integer("seed", seed, -LARGEST_INT64 - 1, LARGEST_INT64)
        return torch.full((), number, dtype=torch.long, device=device)
    check_dense_tensor("seed", seed, "of one integer")
    if seed.numel() != 1 or seed.dtype == torch.bool or seed.is_floating_point() or seed.is_complex():
        raise ValueError(f"seed must be an integer, or a tensor of one integer, got {describe_type(seed)}")
    return seed


def _check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    plain = type(q) is type(k) is type(v) is Tensor and q.layout is k.layout is v.layout is torch.strided
    if not plain or q.is_nested or k.is_nested or v.is_nested:
        for name, x in (("q", q), ("k", k), ("v", v)):
            check_dense_tensor(name, x, "(..., heads, items, dim)")
    qs, ks, vs = q.shape, k.shape, v.shape
    if len(qs) < 3:
        raise ValueError(f"q must have shape (..., heads, queries, dim), got {tuple(qs)}")
    if ks[:-3] != qs[:-3] or vs[:-3] != qs[:-3] or len(ks) < 3 or len(vs) < 3:
        raise ValueError(
            "q, k, v must have the same batch axes before (heads, items, dim), got shapes "
            f"{tuple(qs)}, {tuple(ks)} and {tuple(vs)}"
        )
    if ks[-1] != qs[-1]:
        raise ValueError(f"k must have as many features as q, {qs[-1]}, got {ks[-1]}")
    if vs[-2] != ks[-2]:
        raise ValueError(f"v must have as many items as k, {ks[-2]}, got {vs[-2]}")
    if ks[-3] == 0 or vs[-3] == 0 or qs[-3] % ks[-3] or qs[-3] % vs[-3]:
        raise ValueError(
            f"k, v must have a number of heads that divides the {qs[-3]} heads of q, got {ks[-3]} and {vs[-3]}"
        )
    if not (q.dtype == k.dtype == v.dtype) or q.dtype not in _SUPPORTED_DTYPES:
        raise ValueError(
            f"q, k and v must be of one dtype, float64, float32, bfloat16 or float16, got {q.dtype}, {k.dtype} and {v.dtype}"
        )
    if not (q.is_cpu and k.is_cpu and v.is_cpu) and not (q.device == k.device == v.device):
        raise ValueError(f"q, k, v must be on one device, got {q.device}, {k.device} and {v.device}")


def _check_bias(bias: Tensor, over: Neighbourhood, q: Tensor, k: Tensor) -> Tensor:
    """The bias with an axis each for heads, queries and keys, or on a graph for heads and edges."""
    axes, own = over.attention_axes(q.shape[-3], q.shape[-2], k.shape[-2])
    check_dense_tensor("bias", bias, axes)
    bias = bias.reshape(*(1,) * (len(own) - bias.dim()), *bias.shape)
    if bias.device != q.device:
        raise ValueError(f"bias must be on {q.device}, as q is, got {bias.device}")
    if not bias.is_floating_point():
        raise ValueError(
            f"bias must be floating-point numbers that are added to the scores, got {bias.dtype}; "
            "a bool mask goes to over="
        )
    shape = (*q.shape[:-3], *own)
    if not broadcasts_to(tuple(bias.shape), shape):
        raise ValueError(f"bias must broadcast to {axes} = {shape}, got shape {tuple(bias.shape)}")
    return bias
