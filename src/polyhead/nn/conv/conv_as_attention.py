"""Convolutions as multi-head attention, and back: each tap of a kernel is one head that looks at one point."""

from __future__ import annotations

import copy
import math
from contextlib import nullcontext
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from polyhead._checks import WrongType, check_dense_tensor, check_number, describe_type
from polyhead._torch import (
    is_fx_proxy,
    is_torch_intercepted,
    is_tracing_or_dataless,
    record_fx_call,
    refuse_scripting,
    to_at_least_fp32,
)
from polyhead.attend import Explanation, attention_weights
from polyhead.heads import Heads
from polyhead.neighbourhood import Grid, Neighbourhood, Offsets
from polyhead.neighbourhood.lattice import format_sizes
from polyhead.nn.attention import MultiHeadAttention
from polyhead.nn.checks import check_optional_sizes, explain_input_mismatch
from polyhead.nn.conv.extract import (
    TapOffsets,
    build_conv,
    check_scores_ignore_content,
    find_fixed_offsets,
    output_bias,
    smallest_conv_geometry,
    tap_matrices,
)
from polyhead.nn.conv.geometry import CONVOLUTIONS, Geometry, read_geometry
from polyhead.nn.surgery import KEPT_HEADS_BUFFER, ZeroMap
from polyhead.position import QuadraticOffset


class Certificate(NamedTuple):
    """How far heads with a finite alpha are from the convolution they approximate, on one image or batch."""

    leaked: Float[Tensor, " heads"]
    """The weight of each head that is not on its point, at the worst query."""
    error: float
    """Upper bound on the distance of an output point, as a vector of channels, from the convolution's, up to rounding."""


class ConvolutionalAttention(nn.Module):
    """A `MultiHeadAttention` with the inputs and outputs of a convolution, which also returns its heads.

    `attention` is the layer, with one head per tap; `geometry` gives the offsets of the heads. Made by `from_conv`.
    """

    def __init__(
        self, attention: MultiHeadAttention, geometry: Geometry, *, groups: int = 1, channelwise: bool = False
    ) -> None:
        super().__init__()
        self.attention, self.geometry, self.groups, self.channelwise = attention, geometry, groups, channelwise

    def forward(
        self, image: Float[Tensor, "*batch channels *sizes"]
    ) -> tuple[Float[Tensor, "*batch out *sizes"], Heads]:
        """The convolution of an image (channels, *sizes) or of a batch of images, and a view on the heads.

        Raises:
            ValueError: if the shape of the image does not fit.
        """
        if is_fx_proxy(image):
            return record_fx_call(self, image)
        x, sizes = self._image_to_items(image)
        outputs = self.geometry.output_sizes(sizes)
        query = _select_centre_queries(x, self.geometry, sizes, outputs)
        with explain_input_mismatch(self, image=image):
            y, heads = self.attention(query, None if query is x else x, over=self.neighbourhood(sizes, x.device))
        y = y.squeeze(-1) if self.channelwise else y.transpose(-2, -1)
        # same memory format as a convolution's output: channels last only for channels-last input
        y = y.contiguous() if image.is_contiguous() else y
        return y.unflatten(-1, outputs), heads

    __prepare_scriptable__ = refuse_scripting

    def explain(self, image: Float[Tensor, "*batch channels *sizes"]) -> Explanation:
        """Which kernel a call with this image uses, and why faster ones refuse. No attention is computed."""
        x, sizes = self._image_to_items(image)
        query = _select_centre_queries(x, self.geometry, sizes, self.geometry.output_sizes(sizes))
        return self.attention.explain(query, None if query is x else x, over=self.neighbourhood(sizes, x.device))

    def _image_to_items(self, image: Tensor) -> tuple[Float[Tensor, "*batch points channels"], tuple[int, ...]]:
        if not check_dense_tensor("image", image, "of floating-point numbers").is_floating_point():
            raise ValueError(f"image must be a tensor of floating-point numbers, got {image.dtype}")
        axes, channels = self.geometry.axes, self.attention.d_model
        if image.dim() not in (axes + 1, axes + 2) or (not self.channelwise and image.shape[-axes - 1] != channels):
            names = ("length", "height, width", "depth, height, width")[axes - 1]
            expected = "channels" if self.channelwise else str(channels)
            raise ValueError(
                f"image must have shape (batch, {expected}, {names}) or ({expected}, {names}), got {tuple(image.shape)}"
            )
        x = image.flatten(-axes)
        x = x.unsqueeze(-1) if self.channelwise else x.transpose(-2, -1).contiguous()
        return x, tuple(image.shape[-axes:])

    @property
    def tap_offsets(self) -> TapOffsets:
        """Offset from the query at which each head looks."""
        taps, kept = self.geometry.taps, getattr(self.attention, KEPT_HEADS_BUFFER, None)
        return tuple(taps) if kept is None else tuple(taps[head] for head in kept.tolist())

    def neighbourhood(self, sizes: tuple[int, ...], device: torch.device | str = "cpu") -> Neighbourhood:
        """The neighbourhood of an image of these sizes."""
        # tensors made under a transform or a mode must not be cached
        make = _tap_neighbourhood if is_tracing_or_dataless() or is_torch_intercepted() else _cached_tap_neighbourhood
        points = self.tap_offsets if self.attention.position is None else None
        return make(self.geometry, points, tuple(sizes), torch.device(device))

    def certificate(self, image: Float[Tensor, "*batch channels *sizes"]) -> Certificate:
        """How much weight leaks from the heads' points, and a bound on the resulting error of the output.

        Raises:
            ValueError: if the scores depend on the content.
        """
        x, sizes = self._image_to_items(image)
        layer, heads = self.attention, self.attention.num_heads
        check_scores_ignore_content(layer)
        if layer.position is None:
            return Certificate(torch.zeros(heads, dtype=torch.float64, device=x.device), 0.0)
        target = _tap_neighbourhood(self.geometry, self.tap_offsets, sizes, x.device)
        assert isinstance(target, Offsets)
        point = target.index[..., 0]
        leaked = self._leaked_weight(self.neighbourhood(sizes, x.device), point)
        gain = torch.linalg.matrix_norm(tap_matrices(layer).double(), 2)
        # leaked weight is taken from one point and given to another, or comes from none (beyond the border)
        moved = torch.where(point < 0, 1.0, 2.0) * leaked * gain[:, None]
        longest = x.detach().double().norm(dim=-3 if self.channelwise else -1)
        error = float(moved.sum(0).max() * longest.max()) if longest.numel() else 0.0
        return Certificate(leaked.amax(1), error)

    def _leaked_weight(
        self, over: Neighbourhood, point: Int[Tensor, "heads queries"]
    ) -> Float[Tensor, "heads queries"]:
        """The weight that is not on a head's point, or not in the sink if the point lies beyond the border."""
        assert over.lattice is not None and self.attention.position is not None
        heads, queries = point.shape
        # zero queries and keys, so that only the position counts, in fp64
        position, sink = copy.deepcopy(self.attention.position).double(), self.attention.sink
        zeros = lambda items: torch.zeros(heads, items, 1, dtype=torch.float64, device=point.device)
        with torch.no_grad():
            w = attention_weights(
                zeros(queries), zeros(math.prod(over.lattice.sizes)), over=over, position=position,
                sink=None if sink is None else sink.double(),
            )  # fmt: skip
        on_point = w.gather(-1, point.clamp(min=0)[..., None])[..., 0]
        # the rest of the sum of 1 is in the sink
        return torch.where(point < 0, w.sum(-1), 1 - on_point).clamp(min=0)

    def extra_repr(self) -> str:
        g = self.geometry
        return f"kernel={format_sizes(g.kernel)}, stride={format_sizes(g.stride)}, padding={g.padding}, mode={g.mode!r}"


def from_conv(conv: nn.Module, *, head_dim: int | None = None, alpha: float | None = None) -> ConvolutionalAttention:
    """A convolution or average pooling as multi-head attention with the same outputs: one head per tap.

    By default the result is exact: each head sees one point (`Offsets`), without scores, W_Q or W_K. With `alpha` each head scores
    all points by −alpha·|distance to its own|² (`QuadraticOffset`, Cordonnier 2020) and can learn to look elsewhere; `certificate`
    bounds the distance to the convolution. W_Q then starts at zero, so the content has no influence before training. Groups
    become one dense W_O, with zeros between groups.

    Args:
        conv: an `nn.Conv1d`, `Conv2d`, `Conv3d`, `AvgPool1d`, `AvgPool2d` or `AvgPool3d`. Its weights are copied; frozen ones stay
            frozen.
        head_dim: features per head after W_V; at least the rank of every tap. By default there is no W_V: heads take the points
            themselves, and the taps are in W_O.
        alpha: sharpness of the heads. About e^−alpha of the weight leaks per neighbour; with zero padding, e^(−alpha/2).

    Raises:
        ValueError: for modules that no such attention can compute, with the reason.
    """
    geometry = read_geometry(conv)
    (head_dim,) = check_optional_sizes(head_dim=head_dim)
    if alpha is not None and geometry.pooled:
        raise ValueError(
            "alpha must be None for this pooling: its windows average different numbers of points, which needs one head for all points"
        )
    # the exact layer has no random weights: do not advance the generator
    with nullcontext() if alpha is not None else torch.random.fork_rng(devices=[]):
        layer = (
            _from_convolution(conv, geometry, head_dim, alpha)
            if isinstance(conv, CONVOLUTIONS)
            else _from_pooling(conv, geometry, alpha)
        )
    return layer.train(conv.training)


def _from_convolution(
    conv: Any, geometry: Geometry, head_dim: int | None, alpha: float | None
) -> ConvolutionalAttention:
    kernel, conv_bias = _dense_tap_matrices(conv)
    heads, out, channels = kernel.shape
    with torch.device(kernel.device):
        layer = MultiHeadAttention(
            channels, heads, head_dim=head_dim or (1 if alpha is None else max(1, channels // heads)),
            value_dim=head_dim or channels, d_out=out, bias=conv_bias is not None, **_position_and_sink(geometry, alpha),
        ).to(kernel.dtype)  # fmt: skip
        if head_dim is None:
            layer.v_proj, layer.value_heads = nn.Identity(), 1
        else:
            # without a bias, which would be missing beyond the border
            layer.v_proj = nn.Linear(channels, heads * head_dim, bias=False, dtype=kernel.dtype)
    _copy_taps_into_layer(layer, kernel if head_dim is None else _factorise_taps(kernel, head_dim, geometry), conv_bias)
    for parameter in layer.parameters():
        parameter.requires_grad_(conv.weight.requires_grad)
    if conv.bias is not None and layer.o_proj is not None:
        layer.o_proj.bias.requires_grad_(conv.bias.requires_grad)
    return ConvolutionalAttention(layer, geometry, groups=conv.groups)


def _from_pooling(pool: Any, geometry: Geometry, alpha: float | None) -> ConvolutionalAttention:
    """The mean over heads of one point each, or over the points of one head; per channel."""
    heads = 1 if geometry.pooled else math.prod(geometry.kernel)
    layer = MultiHeadAttention(1, heads, head_dim=1, combine="mean", bias=False, **_position_and_sink(geometry, alpha))
    _replace_qk_by_zero_maps(layer)
    layer.v_proj, layer.value_heads = nn.Identity(), 1
    divisor = getattr(pool, "divisor_override", None)
    if divisor is not None:
        layer.gate = torch.full((heads,), heads / divisor)
    return ConvolutionalAttention(layer, geometry, channelwise=True)


def _position_and_sink(geometry: Geometry, alpha: float | None) -> dict[str, Any]:
    """Position and sink of a layer that scores all points; empty for exact heads."""
    if alpha is None:
        return {}
    position = QuadraticOffset(geometry.taps, alpha=alpha, padding=geometry.mode)
    return {"position": position, "sink": 0.0 if geometry.mode == "zeros" else None}


def _dense_tap_matrices(conv: Any) -> tuple[Float[Tensor, "taps out in"], Float[Tensor, " out"] | None]:
    """One matrix per tap, with zeros between groups, and the bias."""
    weight: Tensor = conv.weight.detach()
    if not weight.is_floating_point():
        raise ValueError(f"conv must have floating-point weights, got {weight.dtype}")
    # (groups, out, in, taps): the diagonal blocks of groups x groups
    by_group = weight.flatten(2).unflatten(0, (conv.groups, -1))
    dense = weight.new_zeros(conv.groups, by_group.shape[1], conv.groups, *by_group.shape[2:])
    group = torch.arange(conv.groups, device=weight.device)
    dense[group, :, group] = by_group
    return dense.flatten(2, 3).flatten(0, 1).movedim(-1, 0), None if conv.bias is None else conv.bias.detach()


def _factorise_taps(
    kernel: Float[Tensor, "taps out in"], width: int, geometry: Geometry
) -> tuple[Float[Tensor, "taps out width"], Float[Tensor, "taps width in"]]:
    """Each tap as a product of two matrices of rank `width`."""
    promoted = kernel.to(torch.promote_types(kernel.dtype, torch.float32))
    rank = torch.linalg.matrix_rank(promoted)
    if not kernel.is_meta and bool((rank > width).any()):
        worst = int(rank.argmax())
        raise ValueError(
            f"head_dim must be at least {int(rank.max())}, the rank of the tap at {geometry.taps[worst]}, got {width}; None makes heads take "
            "the points themselves"
        )
    u, s, v = torch.linalg.svd(promoted, full_matrices=False)
    used = min(width, s.shape[-1])
    root = s[:, :used].sqrt()
    left, right = u[..., :used] * root[:, None], root[..., None] * v[:, :used]
    unused = width - used
    return F.pad(left, (0, unused)).to(kernel.dtype), F.pad(right, (0, 0, 0, unused)).to(kernel.dtype)


@torch.no_grad()
def _copy_taps_into_layer(
    layer: MultiHeadAttention, kernel: Tensor | tuple[Tensor, Tensor], conv_bias: Tensor | None
) -> None:
    """Copy the taps into W_O, or into W_O and W_V, and set the content scores to zero."""
    assert layer.o_proj is not None and layer.q_proj is not None
    w_o, w_v = (kernel, None) if isinstance(kernel, Tensor) else kernel
    # (heads, out, dim) -> (out, heads · dim)
    layer.o_proj.weight.copy_(w_o.movedim(0, 1).flatten(1))
    if conv_bias is not None:
        layer.o_proj.bias.copy_(conv_bias)
    if w_v is not None:
        assert isinstance(layer.v_proj, nn.Linear)
        layer.v_proj.weight.copy_(w_v.flatten(0, 1))
    if layer.position is None:
        _replace_qk_by_zero_maps(layer)
    else:
        layer.q_proj.weight.zero_()


def _replace_qk_by_zero_maps(layer: Any) -> None:
    """Replace W_Q and W_K by maps to zero."""
    features = layer.num_heads * layer.head_dim
    layer.q_proj, layer.k_proj = ZeroMap(features), ZeroMap(features)


def _tap_neighbourhood(
    geometry: Geometry, points: TapOffsets | None, sizes: tuple[int, ...], device: torch.device
) -> Neighbourhood:
    """One point per head, or the whole grid if `points` is None."""
    outputs = geometry.output_sizes(sizes)
    if points is None:
        return Grid(*sizes, stride=geometry.stride, outputs=outputs)
    # tensors made in inference mode cannot be used in training
    with torch.inference_mode(False):
        offsets = torch.tensor(points, device=device)
        offsets = offsets[None] if geometry.pooled else offsets
        return Offsets(offsets, sizes, stride=geometry.stride, outputs=outputs, padding=geometry.mode)


# training repeats a few image sizes
_cached_tap_neighbourhood = lru_cache(maxsize=8)(_tap_neighbourhood)


def _select_centre_queries(
    x: Float[Tensor, "*batch points channels"], geometry: Geometry, sizes: tuple[int, ...], outputs: tuple[int, ...]
) -> Float[Tensor, "*batch queries channels"]:
    """The queries: the points at the centre of the kernel; beyond the border, the nearest ones."""
    if outputs == sizes and max(geometry.stride) == 1 and not any(geometry.centre):
        return x
    centre = torch.tensor([geometry.centre], device=x.device)
    index = Offsets(centre, sizes, stride=geometry.stride, outputs=outputs, padding="replicate").index
    return to_at_least_fp32(x).index_select(-2, index.flatten()).to(x.dtype)


def to_conv(layer: ConvolutionalAttention | MultiHeadAttention, *, leak: float = 1e-6) -> nn.Module:
    """The convolution that a layer computes, if its heads look at fixed points.

    Args:
        layer: a result of `from_conv`, also after training; or a `MultiHeadAttention` with a `QuadraticOffset`, which becomes a
            convolution with stride 1 that keeps the size of an image.
        leak: the most weight that a head may put elsewhere than on one point, for any image size.

    Raises:
        ValueError: if heads do not look at fixed points, with how much of their weight leaks.
    """
    leak = check_number("leak", leak, 0, 1)
    attention, geometry, groups = layer, None, 1
    if isinstance(layer, ConvolutionalAttention):
        attention, geometry, groups = layer.attention, layer.geometry, layer.groups
        if layer.channelwise:
            raise ValueError(
                "layer must not be a pooling, which averages each channel separately and has no kernel; use the pooling itself"
            )
    if not isinstance(attention, MultiHeadAttention):
        raise WrongType(f"layer must be a result of from_conv or a MultiHeadAttention, got {describe_type(layer)}")
    check_scores_ignore_content(attention)
    if isinstance(attention.position, QuadraticOffset):
        points = find_fixed_offsets(attention.position, attention.sink, leak)
        geometry = geometry or smallest_conv_geometry(points, attention.position.padding)
    elif isinstance(layer, ConvolutionalAttention):
        points = layer.tap_offsets
    else:
        raise ValueError(
            "layer must have heads that look at fixed points, as with position=QuadraticOffset(…) or a result of from_conv; here `over` and "
            "the inputs decide"
        )
    assert geometry is not None
    return build_conv(tap_matrices(attention), output_bias(attention, geometry), points, geometry, groups)
