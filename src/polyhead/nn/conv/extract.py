"""The convolution that a layer computes: taps, bias, and the offsets at which its heads look."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from polyhead.neighbourhood.lattice import format_sizes
from polyhead.nn.conv.geometry import CONVOLUTIONS, Geometry
from polyhead.nn.surgery import AppendOne, ZeroMap
from polyhead.position import QuadraticOffset
from polyhead.score import Dot

if TYPE_CHECKING:
    from polyhead.nn.attention import MultiHeadAttention

TapOffsets = tuple[tuple[int, ...], ...]
"""Offset from the query at which each head looks."""

# Weight beyond this distance from a head's point is negligible, even for the smallest alpha.
_LEAK_RADIUS = 8


def check_scores_ignore_content(layer: MultiHeadAttention) -> None:
    """Raise unless attention weights are independent of the content, and the output is that of the attention alone."""
    if type(layer.score) is not Dot:
        raise ValueError(
            f"layer must have dot-product scores, got {type(layer.score).__name__}, whose scores depend on the content; a convolution looks at "
            "fixed points"
        )
    if layer.position is not None and not isinstance(layer.position, QuadraticOffset):
        raise ValueError(
            f"layer must have a QuadraticOffset as position, with which heads look at fixed points, got {type(layer.position).__name__}"
        )
    if layer.residual:
        raise ValueError("layer must have residual=False, got True: a convolution does not add its input")
    q, k = layer.q_proj, layer.k_proj
    if layer.position is not None and not _is_zero_map(q) and not _is_zero_map(k):
        raise ValueError(
            f"layer must have W_Q or W_K equal to zero, biases included: its scores depend on the content (the largest entry of W_Qᵀ W_K of a head is "
            f"{_largest_qk_entry(layer):.2g}, before the scale), and a convolution looks at fixed points. To train only where heads look, freeze "
            "q_proj at zero: q_proj.requires_grad_(False)"
        )


def _is_zero_map(linear: Any) -> bool:
    """Whether a map is zero for every input."""
    return isinstance(linear, ZeroMap) or (
        isinstance(linear, nn.Linear)
        and not bool(linear.weight.any())
        and (linear.bias is None or not bool(linear.bias.any()))
    )


def _largest_qk_entry(layer: MultiHeadAttention) -> float:
    q, k = layer.q_proj, layer.k_proj
    if not isinstance(q, nn.Linear) or not isinstance(k, nn.Linear):
        return math.nan
    by_head = q.weight.detach().unflatten(0, (layer.num_heads, -1))
    keys = k.weight.detach().unflatten(0, (layer.kv_heads, -1)).repeat_interleave(layer.num_heads // layer.kv_heads, 0)
    return float((by_head.transpose(-2, -1) @ keys).abs().max())


def tap_matrices(layer: MultiHeadAttention) -> Float[Tensor, "heads out in"]:
    """The linear map of each head, W_O W_V: one tap of the kernel."""
    w_v, w_o = layer.v_proj, _output_maps_per_head(layer)
    if isinstance(w_v, nn.Identity):
        return w_o
    if isinstance(w_v, AppendOne):
        return w_o[..., :-1]
    if not isinstance(w_v, nn.Linear):
        raise ValueError(f"layer must have a plain nn.Linear as v_proj, got {type(w_v).__name__}")
    return w_o @ _split_value_heads(w_v.weight, layer)


def output_bias(layer: MultiHeadAttention, geometry: Geometry) -> Float[Tensor, " out"] | None:
    """The bias of every output point: that of W_O, and that of W_V through W_O."""
    own = layer.o_bias if layer.o_proj is None else layer.o_proj.bias
    through_w_o = _value_bias_in_output(layer)
    if through_w_o is None or not bool(through_w_o.any()):
        return None if own is None else own.detach()
    if geometry.mode == "zeros" and any(max(pair) for pair in geometry.padding):
        raise ValueError(
            "layer must have v_proj without a bias for zero padding: the bias is missing where a head looks beyond the border, and a "
            "convolution adds its bias everywhere"
        )
    return through_w_o if own is None else own.detach() + through_w_o


def _value_bias_in_output(layer: MultiHeadAttention) -> Float[Tensor, " out"] | None:
    """The bias of W_V in the output, where no head looks beyond the border."""
    if isinstance(layer.v_proj, AppendOne):
        return _output_maps_per_head(layer)[..., -1].sum(0)
    own = layer.v_proj.bias if isinstance(layer.v_proj, nn.Linear) else None
    return (
        None if own is None else (_output_maps_per_head(layer) @ _split_value_heads(own, layer)[..., None]).sum(0)[:, 0]
    )


def _output_maps_per_head(layer: MultiHeadAttention) -> Float[Tensor, "heads out value_dim"]:
    """W_O per head, times the gate."""
    heads = layer.num_heads
    if layer.combine == "concat":
        raise ValueError("layer must have combine='project' or 'mean', got 'concat': a convolution sums over its taps")
    if layer.o_proj is None:
        like = next(layer.parameters(), torch.empty(0))
        w_o = torch.eye(layer.value_dim, dtype=like.dtype, device=like.device).expand(heads, -1, -1) / heads
    else:
        # (out, heads · dim) -> (heads, out, dim)
        w_o = layer.o_proj.weight.detach().unflatten(1, (heads, -1)).movedim(1, 0)
    return w_o if layer.gate is None else w_o * layer.gate.detach()[:, None, None]


def _split_value_heads(
    x: Float[Tensor, "value_heads_dim *rest"], layer: MultiHeadAttention
) -> Float[Tensor, "heads dim *rest"]:
    """W_V, or its bias, per head."""
    return x.detach().unflatten(0, (layer.value_heads, -1)).repeat_interleave(layer.num_heads // layer.value_heads, 0)


def find_fixed_offsets(position: QuadraticOffset, sink: Tensor | None, leak: float) -> TapOffsets:
    """The offsets at which heads look; raises if a head puts more than `leak` of its weight elsewhere."""
    leaked = leaked_weight_per_head(position, sink)
    # negated, so that NaN counts as too much
    too_much = ~(leaked <= leak)
    nearest = position.centres.detach().round().long()
    if not bool(too_much.any()):
        return tuple(tuple(point) for point in nearest.tolist())
    worst = int(leaked.argmax())
    worst_leak = float(leaked[worst])
    hint = f"For the nearest convolution pass leak={_round_up_to_two_digits(worst_leak):g}"
    if position.padding == "zeros" and sink is None:
        hint = (
            "padding='zeros' needs a layer with sink=0.0, which takes the weight of heads that look beyond the border"
        )
    raise ValueError(
        f"layer must have heads that look at fixed points, with at most leak={leak:g} of their weight elsewhere; head {worst} puts "
        f"{worst_leak:.2g} elsewhere than on {tuple(nearest[worst].tolist())} (alpha {float(position.alpha[worst].detach()):.3g}, centre "
        f"{tuple(round(x, 3) for x in position.centres[worst].detach().tolist())}). {hint}"
    )


def _round_up_to_two_digits(share: float) -> float:
    """`share` rounded up to two digits."""
    if not 0 < share < 1:
        return 1.0
    unit = 10.0 ** (math.floor(math.log10(share)) - 1)
    return min(1.0, math.ceil(share / unit) * unit)


@torch.no_grad()
def leaked_weight_per_head(position: QuadraticOffset, sink: Float[Tensor, " heads"] | None) -> Float[Tensor, " heads"]:
    """The weight of each head that is not on the point nearest to its centre, or beyond a border not in the sink."""
    centres, alpha = position.centres.double(), position.alpha.double()
    side = torch.arange(-_LEAK_RADIUS, _LEAK_RADIUS + 1, device=centres.device)
    near = torch.cartesian_prod(*[side] * centres.shape[1]).reshape(-1, centres.shape[1])
    zeros = position.padding == "zeros"
    squares = (near + (centres.round() - centres)[:, None]).square().sum(-1)
    scores = alpha[:, None] * ((0.5 if zeros else 0.0) - squares)
    own = (near == 0).all(-1)
    # summed without the own point, beside which the others would be lost to rounding
    others = scores.masked_fill(own, -torch.inf).logsumexp(-1)
    sunk = torch.full_like(others, -torch.inf) if sink is None else sink.double()
    leaked = torch.sigmoid(torch.logaddexp(others, sunk) - scores[:, own][:, 0])
    # beyond the border the own point is missing, and the sink must take the weight
    return torch.maximum(leaked, torch.sigmoid(others - sunk)) if zeros else leaked


def smallest_conv_geometry(points: TapOffsets, mode: str) -> Geometry:
    """The smallest kernel with odd sides that has these taps and keeps the size of an image."""
    reach = [max(abs(point[axis]) for point in points) for axis in range(len(points[0]))]
    ones = (1,) * len(reach)
    return Geometry(tuple(2 * n + 1 for n in reach), ones, ones, tuple((n, n) for n in reach), mode)


def build_conv(
    kernel: Float[Tensor, "heads out in"],
    bias: Tensor | None,
    points: TapOffsets,
    geometry: Geometry,
    groups: int,
) -> Any:
    """torch's convolution with these taps; heads with the same offset are summed."""
    index = {point: number for number, point in enumerate(geometry.taps)}
    outside = [point for point in points if point not in index]
    if outside:
        raise ValueError(
            f"layer must have heads that look at taps of its {format_sizes(geometry.kernel)} kernel, got a head at {outside[0]}; "
            "to_conv(layer.attention) makes a kernel that contains it"
        )
    _, out, channels = kernel.shape
    dense = kernel.new_zeros(math.prod(geometry.kernel), out, channels)
    dense.index_add_(0, torch.tensor([index[point] for point in points], device=kernel.device), kernel)
    # (taps, groups, out, groups, in): blocks between different groups must be zero
    by_group = dense.unflatten(2, (groups, -1)).unflatten(1, (groups, -1))
    within = torch.eye(groups, dtype=torch.bool, device=kernel.device)[:, None, :, None]
    if bool(by_group.masked_fill(within, 0.0).any()):
        groups, by_group = 1, dense[:, None, :, None]
    group = torch.arange(groups, device=kernel.device)
    # advanced indices come first: (groups, taps, out, in)
    weight = by_group[:, group, :, group].movedim(1, -1).flatten(0, 1).unflatten(-1, geometry.kernel)
    padding: Any = "same" if geometry.same else tuple(low for low, _ in geometry.padding)
    conv = CONVOLUTIONS[geometry.axes - 1](
        channels,
        out,
        geometry.kernel,
        geometry.stride,
        padding,
        geometry.dilation,
        groups,
        bias is not None,
        geometry.mode,
    ).to(kernel.device, kernel.dtype)
    with torch.no_grad():
        conv.weight.copy_(weight)
        if bias is not None:
            conv.bias.copy_(bias)
    return conv
