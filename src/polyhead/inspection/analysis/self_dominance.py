"""Self-dominance: by how much a token's score for itself exceeds its scores for all others."""

from __future__ import annotations

import copy
import math
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from polyhead._checks import WrongType, check_dense_tensor, check_number, describe_type
from polyhead._torch import widest_float
from polyhead.kernels.call import Call, repeat_grouped_heads
from polyhead.kernels.reference import masked_scores, non_sink_share, softmax_and_lse
from polyhead.metrics.blocks import block_weights
from polyhead.neighbourhood import Neighbourhood, as_neighbourhood
from polyhead.nn.attention import MultiHeadAttention
from polyhead.score import Dot

# Scores within this relative difference are equal. They are sums of up to thousands of products in fp64 whose order depends on the
# token's position: that may cost 12 of 53 bits, and identical tokens must not differ.
_TIE_TOLERANCE = 2.0**-40


class SelfDominance(NamedTuple):
    """How much each token prefers itself, in fp64 (fp32 on MPS); with an axis of heads for a layer."""

    margin: Float[Tensor, "... items"]
    """S_ii − max_{j≠i} S_ij: 0 or more if a token peaks on itself, 0 for a tie, inf without other tokens."""
    weight: Float[Tensor, "... items"]
    """p_ii, a token's weight on itself."""

    @property
    def peaks_on_self(self) -> Bool[Tensor, "... items"]:
        """Whether no other token has a higher score than the token itself."""
        return self.margin >= 0

    @property
    def share_peaking_on_self(self) -> Float[Tensor, "..."]:
        """The fraction of tokens that peak on themselves, over the last axis."""
        return self.peaks_on_self.to(self.margin.dtype).mean(-1)

    def __repr__(self) -> str:
        shape = tuple(self.margin.shape)
        if not self.margin.numel():
            return f"SelfDominance(shape={shape})"
        return (
            f"SelfDominance(shape={shape}, {int(self.peaks_on_self.sum())} of {self.margin.numel()} peak on themselves, "
            f"margin {self.margin.min():.3g} to {self.margin.max():.3g}, mean weight {self.weight.mean():.3g})"
        )


@torch.no_grad()
def self_dominance(
    x: Float[Tensor, "... items features"],
    layer: MultiHeadAttention | None = None,
    *,
    over: Neighbourhood | None = None,
    scale: float | None = None,
) -> SelfDominance:
    """Which tokens peak on themselves, in plain self-attention or in the heads of a layer.

    Plain self-attention, softmax(scale · X Xᵀ), has S_ij − S_ii = scale · ½(|x_j|² − |x_i|² − |x_i − x_j|²): token i peaks on
    itself if and only if |x_j| cos θ_ij ≤ |x_i| for all j. The longest token always does, and with equal norms all do. With a
    layer the scores are those of its heads, W_Q x_i · W_K x_j with biases, norms and positions, and no such rule holds.

    Computed in fp64 (fp32 on MPS), without dropout, in blocks of queries: items x items is never built.

    Args:
        x: the tokens, as queries and keys.
        layer: use the heads of this layer; None for plain self-attention. With a layer the result has an axis of heads before the last.
        over: the neighbourhood, with the grid for positions that need one; dense by default. Only allowed pairs count.
        scale: of plain self-attention: what multiplies the products, 1/√features unless given, as in `Dot`. Margins are in the
            unit of the scores, so it multiplies them; a layer has its own.

    Raises:
        ValueError: if x is not a real, finite tensor (..., items, features), or does not fit the layer.
    """
    _check_arguments(x, layer, scale)
    if layer is None:
        tokens = x.to(widest_float(x.device)).unsqueeze(-3)
        call = Call(tokens, tokens, tokens, as_neighbourhood(over).bind_self_attention(True), Dot(scale))
        call.over.check(call.sizes)
        call = call._replace(over=call.over.bind_sizes(call.sizes))
        margin, weight = _measure_in_blocks(call)
        return SelfDominance(margin.squeeze(-2), weight.squeeze(-2))
    dtype = widest_float(x.device)
    wide = copy.deepcopy(layer).to(dtype).eval()
    return SelfDominance(*_measure_in_blocks(wide.prepare(x.to(dtype), over=over)))


def _measure_in_blocks(call: Call) -> tuple[Float[Tensor, "... heads items"], Float[Tensor, "... heads items"]]:
    """Margins and weights, in blocks of queries."""
    batch, heads, items, _ = call.sizes
    rows = max(1, block_weights(call.q.device) // max(1, math.prod(batch) * heads * items))
    parts = [_measure_query_block(call, queries) for queries in torch.arange(items, device=call.q.device).split(rows)]
    margin, weight, bad = (torch.cat(column, -1) for column in zip(*parts, strict=True))
    # read once: on a device, reading it per block would make the host wait for each
    if bool(bad.any()):
        raise ValueError("x must give finite scores, got NaN or inf; scale x or the layer's weights down")
    return margin, weight


def _measure_query_block(
    call: Call, queries: Tensor
) -> tuple[Float[Tensor, "... heads rows"], Float[Tensor, "... heads rows"], Bool[Tensor, "... heads rows"]]:
    """The margins and weights of some queries, and which of them have a score that is NaN or inf."""
    s = masked_scores(call, queries)
    bad = (s.isnan() | (s == torch.inf)).any(-1)
    own = queries[:, None] == torch.arange(s.shape[-1], device=s.device)
    at = queries[:, None].expand(*s.shape[:-1], 1)
    margin = s.gather(-1, at)[..., 0] - s.masked_fill(own, -torch.inf).amax(-1)
    small = _TIE_TOLERANCE * torch.maximum(
        s.masked_fill(s == -torch.inf, 0.0).abs().amax(-1), _bound_scores(call, queries)
    )
    # a token without any allowed key does not peak
    margin = margin.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    p, lse = softmax_and_lse(s)
    if call.sink is not None:
        p = p * non_sink_share(lse, call.sink)
    return margin.masked_fill(margin.abs() <= small, 0.0), p.gather(-1, at)[..., 0], bad


def _bound_scores(call: Call, queries: Tensor) -> Float[Tensor, "... heads rows"]:
    """A bound on a query's scores: sums that cancel are rounded relative to their terms."""
    q = call.q.index_select(-2, queries).norm(dim=-1)
    if not isinstance(call.score, Dot):
        return torch.zeros_like(q)
    longest = repeat_grouped_heads(call.k, call.sizes.heads).norm(dim=-1).amax(-1, keepdim=True)
    return q * longest * abs(call.score.factor(call.q.shape[-1]))


def _check_arguments(x: Tensor, layer: MultiHeadAttention | None, scale: float | None) -> None:
    check_dense_tensor("x", x, "(..., items, features)")
    if layer is not None and not isinstance(layer, MultiHeadAttention):
        raise WrongType(f"layer must be a MultiHeadAttention, got {describe_type(layer)}")
    features = "features" if layer is None else layer.d_model
    if x.dim() < 2 or (layer is not None and x.shape[-1] != layer.d_model):
        raise ValueError(f"x must have shape (..., items, {features}), got {tuple(x.shape)}")
    if not x.shape[-2]:
        raise ValueError(f"x must have at least one item, got shape {tuple(x.shape)}")
    if not x.is_floating_point():
        raise ValueError(f"x must be a real floating-point tensor, got {x.dtype}")
    if not x.isfinite().all():
        raise ValueError("x must be finite, got NaN or inf")
    if layer is not None and not layer.d_model == layer.d_key == layer.d_value:
        raise ValueError(
            f"layer must have as many features for queries, keys and values, so that tokens can attend to themselves, got "
            f"{layer.d_model}, {layer.d_key} and {layer.d_value}"
        )
    if scale is not None and layer is not None:
        raise ValueError(f"scale must be None with a layer, whose score has its own, got {scale}")
    if scale is not None:
        check_number("scale", scale, 0, math.inf, "()")
