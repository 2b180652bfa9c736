"""The convolution that is in a layer: its taps, its bias, and the points that its heads look at."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from polyhead.neighbourhood.grid import written
from polyhead.nn.conv.geometry import CONVOLUTIONS, Geometry
from polyhead.nn.surgery import AppendOne, ZeroMap
from polyhead.position import QuadraticOffset
from polyhead.score import Dot

if TYPE_CHECKING:
    from polyhead.nn.attention import MultiHeadAttention

Points = tuple[tuple[int, ...], ...]
"""Where heads look from a query, a point each."""

# Points so far from a head's own get nothing that counts, even of a head as blunt as may be.
_FAR = 8


def check_content(layer: MultiHeadAttention) -> None:
    """Raise where the weights of a layer depend on what stands at the points, or its output on more than on weights."""
    if type(layer.score) is not Dot:
        raise ValueError(
            f"layer: its scores are {type(layer.score).__name__}, which depend on the content; a convolution looks at fixed points"
        )
    if layer.position is not None and not isinstance(layer.position, QuadraticOffset):
        raise ValueError(
            f"layer: its position is {type(layer.position).__name__}; heads look at fixed points with a QuadraticOffset"
        )
    if layer.residual:
        raise ValueError("layer: it adds its query to the output (residual=True), which is no part of its attention")
    q, k = layer.q_proj, layer.k_proj
    if layer.position is not None and not _silent(q) and not _silent(k):
        raise ValueError(
            f"layer: its scores depend on the content: W_Q and W_K, or their biases, are not zero (the largest entry of W_Qᵀ W_K of a head is "
            f"{_largest_score(layer):.2g}, before the scale); a convolution looks at fixed points whatever stands there. To train where heads look "
            "and nothing else of the scores, freeze q_proj at zero: q_proj.requires_grad_(False)"
        )


def _silent(linear: Any) -> bool:
    """Whether a map gives zero for whatever it is given."""
    return isinstance(linear, ZeroMap) or (
        isinstance(linear, nn.Linear)
        and not bool(linear.weight.any())
        and (linear.bias is None or not bool(linear.bias.any()))
    )


def _largest_score(layer: MultiHeadAttention) -> float:
    q, k = layer.q_proj, layer.k_proj
    if not isinstance(q, nn.Linear) or not isinstance(k, nn.Linear):
        return math.nan
    by_head = q.weight.detach().unflatten(0, (layer.num_heads, -1))
    keys = k.weight.detach().unflatten(0, (layer.kv_heads, -1)).repeat_interleave(layer.num_heads // layer.kv_heads, 0)
    return float((by_head.transpose(-2, -1) @ keys).abs().max())


def taps(layer: MultiHeadAttention) -> Float[Tensor, "heads out in"]:
    """What each head makes of the point that it looks at: W_O W_V, of its own part."""
    w_v, join = layer.v_proj, _join(layer)
    if isinstance(w_v, nn.Identity):
        return join
    if isinstance(w_v, AppendOne):
        return join[..., :-1]
    if not isinstance(w_v, nn.Linear):
        raise ValueError(f"layer: its v_proj is {type(w_v).__name__}; it must be a plain nn.Linear")
    return join @ _each(w_v.weight, layer)


def bias(layer: MultiHeadAttention, where: Geometry) -> Float[Tensor, " out"] | None:
    """What a layer adds to every point of its output."""
    own = layer.o_bias if layer.o_proj is None else layer.o_proj.bias
    moved = _moved(layer)
    if moved is None or not bool(moved.any()):
        return None if own is None else own.detach()
    if where.mode == "zeros" and any(max(pair) for pair in where.padding):
        raise ValueError(
            "layer: v_proj has a bias, which is lost where a head looks beyond the border and finds nothing; a convolution has no such bias"
        )
    return moved if own is None else own.detach() + moved


def _moved(layer: MultiHeadAttention) -> Float[Tensor, " out"] | None:
    """What the bias of W_V becomes in the output, where every head finds something."""
    if isinstance(layer.v_proj, AppendOne):
        return _join(layer)[..., -1].sum(0)
    own = layer.v_proj.bias if isinstance(layer.v_proj, nn.Linear) else None
    return None if own is None else (_join(layer) @ _each(own, layer)[..., None]).sum(0)[:, 0]


def _join(layer: MultiHeadAttention) -> Float[Tensor, "heads out value_dim"]:
    """How each head's output enters the layer's."""
    heads = layer.num_heads
    if layer.combine == "concat":
        raise ValueError("layer: it joins its heads' outputs (combine='concat'), and a convolution sums over its taps")
    if layer.o_proj is None:
        like = next(layer.parameters(), torch.empty(0))
        join = torch.eye(layer.value_dim, dtype=like.dtype, device=like.device).expand(heads, -1, -1) / heads
    else:
        # (out, heads · dim) -> (heads, out, dim)
        join = layer.o_proj.weight.detach().unflatten(1, (heads, -1)).movedim(1, 0)
    return join if layer.gate is None else join * layer.gate.detach()[:, None, None]


def _each(x: Float[Tensor, "value_heads_dim *rest"], layer: MultiHeadAttention) -> Float[Tensor, "heads dim *rest"]:
    """Each head's own part of W_V or of its bias."""
    return x.detach().unflatten(0, (layer.value_heads, -1)).repeat_interleave(layer.num_heads // layer.value_heads, 0)


def offsets(position: QuadraticOffset, sink: Tensor | None, leak: float) -> Points:
    """The points at which heads look, where no more than `leak` of their weight lies elsewhere."""
    leaked = leaks(position, sink)
    # written so that NaN does not pass
    wrong = ~(leaked <= leak)
    nearest = position.centres.detach().round().long()
    if not bool(wrong.any()):
        return tuple(tuple(point) for point in nearest.tolist())
    worst = int(leaked.argmax())
    far = float(leaked[worst])
    hint = f"For the nearest convolution pass leak={_above(far):g}"
    if position.padding == "zeros" and sink is None:
        hint = "padding='zeros' is for a layer with sink=0.0, which takes what looks beyond the border"
    raise ValueError(
        f"layer: its heads do not look at fixed points: head {worst} puts {far:.2g} of its weight elsewhere than on "
        f"{tuple(nearest[worst].tolist())} (alpha {float(position.alpha[worst].detach()):.3g}, centre "
        f"{tuple(round(x, 3) for x in position.centres[worst].detach().tolist())}), and leak is {leak:g}. {hint}"
    )


def _above(share: float) -> float:
    """The share in two digits, rounded up."""
    if not 0 < share < 1:
        return 1.0
    unit = 10.0 ** (math.floor(math.log10(share)) - 1)
    return min(1.0, math.ceil(share / unit) * unit)


@torch.no_grad()
def leaks(position: QuadraticOffset, sink: Float[Tensor, " heads"] | None) -> Float[Tensor, " heads"]:
    """The weight that each head puts elsewhere than on the point nearest to its centre, or than in the sink beyond a border."""
    centres, alpha = position.centres.double(), position.alpha.double()
    side = torch.arange(-_FAR, _FAR + 1, device=centres.device)
    near = torch.cartesian_prod(*[side] * centres.shape[1]).reshape(-1, centres.shape[1])
    zeros = position.padding == "zeros"
    squares = (near + (centres.round() - centres)[:, None]).square().sum(-1)
    s = alpha[:, None] * ((0.5 if zeros else 0.0) - squares)
    own = (near == 0).all(-1)
    # the other points, and the sink: apart from the point itself, next to which they are too small to be told
    others = s.masked_fill(own, -torch.inf).logsumexp(-1)
    away = torch.full_like(others, -torch.inf) if sink is None else sink.double()
    leaked = torch.sigmoid(torch.logaddexp(others, away) - s[:, own][:, 0])
    # beyond the border the head's own point is missing, and the sink has to take what the others would
    return torch.maximum(leaked, torch.sigmoid(others - away)) if zeros else leaked


def around(points: Points, mode: str) -> Geometry:
    """The smallest kernel of odd sides that has all these points and keeps an image's size."""
    reach = [max(abs(point[axis]) for point in points) for axis in range(len(points[0]))]
    ones = (1,) * len(reach)
    return Geometry(tuple(2 * n + 1 for n in reach), ones, ones, tuple((n, n) for n in reach), mode)


def convolution(
    kernel: Float[Tensor, "heads out in"],
    bias: Tensor | None,
    points: Points,
    where: Geometry,
    groups: int,
) -> Any:
    """torch's module with these taps at these points; heads at one point add up."""
    known = {point: number for number, point in enumerate(where.taps)}
    lost = [point for point in points if point not in known]
    if lost:
        raise ValueError(
            f"layer: a head looks at {lost[0]}, which is no tap of the {written(where.kernel)} kernel that it was made of; "
            "to_conv(layer.attention) makes a kernel that has it"
        )
    _, out, channels = kernel.shape
    dense = kernel.new_zeros(math.prod(where.kernel), out, channels)
    dense.index_add_(0, torch.tensor([known[point] for point in points], device=kernel.device), kernel)
    # (taps, groups, out, groups, in): what lies between groups has to be zero
    by_group = dense.unflatten(2, (groups, -1)).unflatten(1, (groups, -1))
    within = torch.eye(groups, dtype=torch.bool, device=kernel.device)[:, None, :, None]
    if bool(by_group.masked_fill(within, 0.0).any()):
        groups, by_group = 1, dense[:, None, :, None]
    one = torch.arange(groups, device=kernel.device)
    # advanced indices come first: (groups, taps, out, in)
    weight = by_group[:, one, :, one].movedim(1, -1).flatten(0, 1).unflatten(-1, where.kernel)
    padding: Any = "same" if where.same else tuple(low for low, _ in where.padding)
    conv = CONVOLUTIONS[where.axes - 1](
        channels, out, where.kernel, where.stride, padding, where.dilation, groups, bias is not None, where.mode
    ).to(kernel.device, kernel.dtype)
    with torch.no_grad():
        conv.weight.copy_(weight)
        if bias is not None:
            conv.bias.copy_(bias)
    return conv
