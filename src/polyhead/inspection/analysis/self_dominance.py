"""Which tokens can only look at themselves: how far a token's score of itself stands above those of all others."""

from __future__ import annotations

import copy
import math
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from polyhead._checks import WrongType, check_number, check_tensor, kind_of
from polyhead.kernels.call import Call, to_heads
from polyhead.kernels.reference import scores, softmax, through_sink
from polyhead.metrics.blockwise import BLOCK
from polyhead.neighbourhood import Neighbourhood, neighbourhood
from polyhead.nn.attention import MultiHeadAttention
from polyhead.score import Dot

# Scores that differ by less than this share of their size are equal. They are sums of up to thousands of products in fp64, and
# where a token stands decides in which order: of 53 bits that may cost 12, and two tokens that are the same must not differ.
_ROUNDING = 2.0**-40


class SelfDominance(NamedTuple):
    """How much each token prefers itself, in fp64; a head at a time where a layer was asked."""

    margin: Float[Tensor, "... items"]
    """S_ii − max_{j≠i} S_ij: 0 or more where a token peaks on itself, 0 for a tie, inf where there is no other token."""
    weight: Float[Tensor, "... items"]
    """p_ii, the share of its attention that a token keeps for itself."""

    @property
    def peaks(self) -> Bool[Tensor, "... items"]:
        """Whether no other token has a higher score than the token itself."""
        return self.margin >= 0

    @property
    def share(self) -> Float[Tensor, "..."]:
        """The share of tokens that peak on themselves, over the last axis: in each row of the batch, and each head."""
        return self.peaks.double().mean(-1)

    def __repr__(self) -> str:
        shape = tuple(self.margin.shape)
        if not self.margin.numel():
            return f"SelfDominance(shape={shape})"
        return (
            f"SelfDominance(shape={shape}, {int(self.peaks.sum())} of {self.margin.numel()} peak on themselves, "
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
    layer the scores are those of its heads, W_Q x_i · W_K x_j with biases, norms and positions, and anything may happen.

    It is computed in fp64, without dropout, in blocks of queries, and never builds items x items.

    Args:
        x: tokens, which are queries and keys.
        layer: whose heads; None for plain self-attention. The answer then has an axis of heads before the last.
        over: who may attend to whom, and where items stand for a position on a grid; everyone to everyone unless given. Only
            tokens that may be chosen count.
        scale: of plain self-attention: what multiplies the products, 1/√features unless given, as in `Dot`. Margins are in the
            unit of the scores, so it multiplies them; a layer has its own.

    Raises:
        ValueError: where x is no real, finite tensor (..., items, features), or does not fit the layer.
    """
    _check(x, layer, scale)
    if layer is None:
        tokens = x.double().unsqueeze(-3)
        call = Call(tokens, tokens, tokens, neighbourhood(over).within(True), Dot(scale))
        call.over.check(call.sizes)
        margin, weight = _measured(call)
        return SelfDominance(margin.squeeze(-2), weight.squeeze(-2))
    wide = copy.deepcopy(layer).double().eval()
    call, _ = wide._call(x.double(), None, None, over, None, None)
    return SelfDominance(*_measured(call))


def _measured(call: Call) -> tuple[Float[Tensor, "... heads items"], Float[Tensor, "... heads items"]]:
    """Margins and weights, blocks of queries at a time."""
    batch, heads, items, _ = call.sizes
    rows = max(1, BLOCK // max(1, math.prod(batch) * heads * items))
    parts = [_block(call, queries) for queries in torch.arange(items, device=call.q.device).split(rows)]
    margin, weight = (torch.cat(column, -1) for column in zip(*parts, strict=True))
    return margin, weight


def _block(call: Call, queries: Tensor) -> tuple[Float[Tensor, "... heads rows"], Float[Tensor, "... heads rows"]]:
    s = scores(call, queries)
    if bool((s.isnan() | (s == torch.inf)).any()):
        raise ValueError("x: its scores have numbers that are not finite; x, or the layer's weights, must be smaller")
    own = queries[:, None] == torch.arange(s.shape[-1], device=s.device)
    at = queries[:, None].expand(*s.shape[:-1], 1)
    margin = s.gather(-1, at)[..., 0] - s.masked_fill(own, -torch.inf).amax(-1)
    small = _ROUNDING * torch.maximum(s.masked_fill(s == -torch.inf, 0.0).abs().amax(-1), _sizes(call, queries))
    # a token that may look at nobody, itself included, peaks nowhere
    margin = margin.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    p, lse = softmax(s)
    if call.sink is not None:
        p = p * through_sink(lse, call.sink)
    return margin.masked_fill(margin.abs() <= small, 0.0), p.gather(-1, at)[..., 0]


def _sizes(call: Call, queries: Tensor) -> Float[Tensor, "... heads rows"]:
    """How large a query's scores may be: products that cancel are rounded by their size, not by that of their sum."""
    q = call.q.index_select(-2, queries).norm(dim=-1)
    if not isinstance(call.score, Dot):
        return torch.zeros_like(q)
    longest = to_heads(call.k, call.sizes.heads).norm(dim=-1).amax(-1, keepdim=True)
    return q * longest * abs(call.score.factor(call.q.shape[-1]))


def _check(x: Tensor, layer: MultiHeadAttention | None, scale: float | None) -> None:
    check_tensor("x", x, "(..., items, features)")
    if layer is not None and not isinstance(layer, MultiHeadAttention):
        raise WrongType(f"layer must be a MultiHeadAttention, got {kind_of(layer)}")
    features = "features" if layer is None else layer.d_model
    if x.dim() < 2 or (layer is not None and x.shape[-1] != layer.d_model):
        raise ValueError(f"x: its shape is {tuple(x.shape)}; it must be (..., items, {features})")
    if not x.shape[-2]:
        raise ValueError(f"x: its shape is {tuple(x.shape)}; there must be an item at the least")
    if not x.is_floating_point():
        raise ValueError(f"x: it is {x.dtype}; it must be real and floating-point")
    if not x.isfinite().all():
        raise ValueError("x: it has numbers that are not finite")
    if layer is not None and not layer.d_model == layer.d_key == layer.d_value:
        raise ValueError(
            f"layer: its queries, keys and values have {layer.d_model}, {layer.d_key} and {layer.d_value} features; they must "
            "have as many, so that tokens can attend to themselves"
        )
    if scale is not None and layer is not None:
        raise ValueError(f"scale: it is {scale}, but the layer's score has its own; it must be left out")
    if scale is not None:
        check_number("scale", scale, 0, math.inf, "()")
