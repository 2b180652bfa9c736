"""Convolutions as multi-head attention, and back: each tap of a kernel is a head that looks at one point."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from polyhead.attend import attention_weights
from polyhead.heads import Heads
from polyhead.neighbourhood import Grid, Neighbourhood, Offsets
from polyhead.nn.attention import MultiHeadAttention
from polyhead.nn.checks import check_sizes
from polyhead.nn.geometry import CONVOLUTIONS, Geometry, geometry, written
from polyhead.nn.taps import around, bias, check_content, convolution, offsets, taps
from polyhead.position import QuadraticOffset


class Certificate(NamedTuple):
    """How far heads of finite sharpness are from the convolution that they stand for, on one image."""

    leaked: Float[Tensor, " heads"]
    """The weight that each head puts elsewhere than on its point, at the query where that is most."""
    error: float
    """No point of the output is further from the convolution's, as a vector of channels, but for rounding."""


class ConvolutionalAttention(nn.Module):
    """A `MultiHeadAttention` that takes and gives what a convolution does, and hands back its heads.

    `attention` is the layer, with one head a tap, and `geometry` says where the heads look. Made by `from_conv`.
    """

    def __init__(
        self, attention: MultiHeadAttention, geometry: Geometry, *, groups: int = 1, channelwise: bool = False
    ) -> None:
        super().__init__()
        self.attention, self.geometry, self.groups, self.channelwise = attention, geometry, groups, channelwise

    def forward(
        self, image: Float[Tensor, "*batch channels *sizes"]
    ) -> tuple[Float[Tensor, "*batch out *sizes"], Heads]:
        """The convolution of an image (channels, *sizes) or of a batch of them, and a view on the heads.

        Raises:
            ValueError: where the image does not fit, with what it should be.
        """
        x, sizes = self._items(image)
        outputs = self.geometry.outputs(sizes)
        query = _at(x, self.geometry, sizes)
        y, heads = self.attention(query, None if query is x else x, over=self.over(sizes, x.device))
        # a view: the channels lie inside, as in torch's channels_last
        y = y.squeeze(-1) if self.channelwise else y.transpose(-2, -1)
        return y.unflatten(-1, outputs), heads

    def _items(self, image: Tensor) -> tuple[Float[Tensor, "*batch points channels"], tuple[int, ...]]:
        axes, channels = self.geometry.axes, self.attention.d_model
        if image.dim() not in (axes + 1, axes + 2) or (not self.channelwise and image.shape[-axes - 1] != channels):
            names = ("length", "height, width", "depth, height, width")[axes - 1]
            wanted = "channels" if self.channelwise else str(channels)
            raise ValueError(
                f"image: its shape is {tuple(image.shape)}; it must be (batch, {wanted}, {names}) or ({wanted}, {names})"
            )
        x = image.flatten(-axes)
        x = x.unsqueeze(-1) if self.channelwise else x.transpose(-2, -1).contiguous()
        return x, tuple(image.shape[-axes:])

    def over(self, sizes: tuple[int, ...], device: torch.device | str = "cpu") -> Neighbourhood:
        """Who may attend to whom in an image of these sizes."""
        make = _over if torch.compiler.is_compiling() else _kept_over
        return make(self.geometry, tuple(sizes), torch.device(device), self.attention.position is None)

    def certificate(self, image: Float[Tensor, "*batch channels *sizes"]) -> Certificate:
        """How much weight leaks from the heads' points, and how large an error in the output that can make at most.

        Raises:
            ValueError: where the scores depend on the content, of which nothing is known beforehand.
        """
        x, sizes = self._items(image)
        check_content(self.attention)
        target = _over(self.geometry, sizes, x.device, True)
        assert isinstance(target, Offsets)
        if self.attention.position is None:
            return Certificate(x.new_zeros(self.attention.num_heads), 0.0)
        leaked = self._leaked(self.over(sizes, x.device), target.index[..., 0])
        gain = torch.linalg.matrix_norm(taps(self.attention), 2)
        # a head that leaks moves at most so much of one point to another, or of one point to nothing
        moved = torch.where(target.index[..., 0] < 0, 1.0, 2.0) * leaked * gain[:, None]
        return Certificate(leaked.amax(1), float(moved.sum(0).max() * x.detach().norm(dim=-1).max()))

    def _leaked(self, over: Neighbourhood, point: Int[Tensor, "heads queries"]) -> Float[Tensor, "heads queries"]:
        """The weight that does not lie on a head's point, or in the sink where there is no such point."""
        layer, (heads, queries) = self.attention, point.shape
        grid = over.grid
        assert grid is not None
        nothing = layer.k_proj.weight.new_zeros
        with torch.no_grad():
            q, k = nothing(heads, queries, 1), nothing(heads, math.prod(grid.sizes), 1)
            w = attention_weights(q, k, over=over, position=layer.position, sink=layer.sink).double()
        on_point = w.gather(-1, point.clamp(min=0)[..., None])[..., 0]
        # what is missing from a sum of 1 is the sink's
        return torch.where(point < 0, w.sum(-1), 1 - on_point).to(layer.k_proj.weight.dtype)

    def extra_repr(self) -> str:
        g = self.geometry
        return f"kernel={written(g.kernel)}, stride={written(g.stride)}, padding={g.padding}, mode={g.mode!r}"


def from_conv(conv: nn.Module, *, head_dim: int | None = None, alpha: float | None = None) -> ConvolutionalAttention:
    """A convolution, or an average pooling, as multi-head attention with the same outputs: one head a tap.

    Exactly, each head sees one point (`Offsets`), and fetches it. With `alpha` each head scores all points by
    −alpha·|distance to its own|² (`QuadraticOffset`, Cordonnier 2020) and may learn to look elsewhere: `certificate` tells how
    far that is from the convolution. W_Q starts at zero then, so that the content does not count until it is trained to.

    Args:
        conv: an `nn.Conv1d`, `Conv2d`, `Conv3d`, `AvgPool1d`, `AvgPool2d` or `AvgPool3d`. Its numbers are copied.
        head_dim: features a head fetches through W_V; it must be at least the rank of every tap. By default a head fetches the
            points themselves, and the taps stand in W_O.
        alpha: how sharply heads look. The weight that leaks is about e^−alpha; with zero padding, e^(−alpha/2).

    Raises:
        ValueError: for what no such attention computes, with the reason.
    """
    where = geometry(conv)
    check_sizes(head_dim=head_dim)
    if alpha is not None and where.together:
        raise ValueError(
            "alpha: this pooling averages as many points as there are, which one head does; heads of one point each cannot"
        )
    position = None if alpha is None else QuadraticOffset(where.taps, alpha=alpha, padding=where.mode)
    sink = 0.0 if alpha is not None and where.mode == "zeros" else None
    if not isinstance(conv, CONVOLUTIONS):
        return _pooling(conv, where, position, sink).train(conv.training)
    kernel, bias = _tapped(conv)
    heads, out, channels = kernel.shape
    scored = head_dim or (1 if alpha is None else max(1, channels // heads))
    layer = MultiHeadAttention(
        channels, heads, head_dim=scored, value_dim=head_dim or channels, d_out=out, position=position, sink=sink,
        bias=bias is not None,
    ).to(kernel.device, kernel.dtype)  # fmt: skip
    _start(layer, kernel if head_dim is None else _factored(kernel, head_dim, where), bias)
    return ConvolutionalAttention(layer, where, groups=conv.groups).train(conv.training)


def _tapped(conv: Any) -> tuple[Float[Tensor, "taps out in"], Float[Tensor, " out"] | None]:
    """One matrix a tap; what lies between groups is zero."""
    weight: Tensor = conv.weight.detach()
    if not weight.is_floating_point():
        raise ValueError(f"conv: its numbers are {weight.dtype}; they must be floating-point")
    # (groups, out, in, taps), which go to the diagonal of groups x groups
    by_group = weight.flatten(2).unflatten(0, (conv.groups, -1))
    dense = weight.new_zeros(conv.groups, by_group.shape[1], conv.groups, *by_group.shape[2:])
    one = torch.arange(conv.groups, device=weight.device)
    dense[one, :, one] = by_group
    return dense.flatten(2, 3).flatten(0, 1).movedim(-1, 0), None if conv.bias is None else conv.bias.detach()


def _factored(
    kernel: Float[Tensor, "taps out in"], width: int, where: Geometry
) -> tuple[Float[Tensor, "taps out width"], Float[Tensor, "taps width in"]]:
    """Each tap as a product through so many features."""
    rank = torch.linalg.matrix_rank(kernel)
    if bool((rank > width).any()):
        worst = int(rank.argmax())
        raise ValueError(
            f"head_dim: it is {width}, but the tap at {where.taps[worst]} has rank {int(rank[worst])}, and what a head moves passes through "
            f"head_dim features; it must be at least {int(rank.max())}, or None for heads that fetch the points themselves"
        )
    u, s, v = torch.linalg.svd(kernel, full_matrices=False)
    kept = min(width, s.shape[-1])
    root = s[:, :kept].sqrt()
    left, right = u[..., :kept] * root[:, None], root[..., None] * v[:, :kept]
    more = width - kept
    return nn.functional.pad(left, (0, more)), nn.functional.pad(right, (0, 0, 0, more))


def _start(layer: MultiHeadAttention, kernel: Tensor | tuple[Tensor, Tensor], bias: Tensor | None) -> None:
    """Put the taps into W_O, or into W_O and W_V, and let the content be without weight."""
    assert layer.o_proj is not None and layer.q_proj is not None and isinstance(layer.v_proj, nn.Linear)
    w_o, w_v = (kernel, None) if isinstance(kernel, Tensor) else kernel
    with torch.no_grad():
        # (heads, out, dim) -> (out, heads · dim)
        layer.o_proj.weight.copy_(w_o.movedim(0, 1).flatten(1))
        if bias is not None:
            layer.o_proj.bias.copy_(bias)
        layer.q_proj.weight.zero_()
        if w_v is not None:
            layer.v_proj.weight.copy_(w_v.flatten(0, 1))
    if w_v is None:
        layer.v_proj, layer.value_heads = nn.Identity(), 1
    if layer.position is None:
        # one key a query: there is nothing to score
        nn.init.zeros_(layer.k_proj.weight)


def _pooling(
    pool: Any, where: Geometry, position: QuadraticOffset | None, sink: float | None
) -> ConvolutionalAttention:
    """The mean over heads that fetch one point each, or over the points that one head sees; channel by channel."""
    heads = 1 if where.together else math.prod(where.kernel)
    layer = MultiHeadAttention(1, heads, head_dim=1, position=position, sink=sink, combine="mean", bias=False)
    assert layer.q_proj is not None
    nn.init.zeros_(layer.q_proj.weight)
    layer.v_proj, layer.value_heads = nn.Identity(), 1
    divisor = getattr(pool, "divisor_override", None)
    if divisor is not None:
        layer.gate = torch.full((heads,), heads / divisor)
    return ConvolutionalAttention(layer, where, channelwise=True)


def _over(where: Geometry, sizes: tuple[int, ...], device: torch.device, exact: bool) -> Neighbourhood:
    outputs = where.outputs(sizes)
    if not exact:
        return Grid(*sizes, stride=where.stride, outputs=outputs)
    taps = torch.tensor(where.taps, device=device)
    offsets = taps[None] if where.together else taps
    return Offsets(offsets, sizes, stride=where.stride, outputs=outputs, padding=where.mode)


# of the last images' sizes: they come again at every step
_kept_over = lru_cache(maxsize=32)(_over)


def _at(x: Float[Tensor, "*batch points channels"], where: Geometry, sizes: tuple[int, ...]) -> Tensor:
    """The points that ask: those under the middle of the kernel, at the border the nearest."""
    middle = [where.middle]
    asking = Offsets(middle, sizes, stride=where.stride, outputs=where.outputs(sizes), padding="replicate").index
    index = asking.flatten().to(x.device)
    same = asking.shape[1] == x.shape[-2] and not any(where.middle) and max(where.stride) == 1
    return x if same else x.index_select(-2, index)


def to_conv(layer: ConvolutionalAttention | MultiHeadAttention, *, leak: float = 1e-6) -> nn.Module:
    """The convolution that a layer computes whose heads look at fixed points.

    Args:
        layer: what `from_conv` made, trained further or not; or a `MultiHeadAttention` with a `QuadraticOffset`, which becomes a
            convolution of stride 1 that keeps an image's size.
        leak: how much of its weight a head may put elsewhere than on one point.

    Raises:
        ValueError: where heads do not look at fixed points, with how far from it they are.
    """
    attention, where, groups = layer, None, 1
    if isinstance(layer, ConvolutionalAttention):
        attention, where, groups = layer.attention, layer.geometry, layer.groups
        if layer.channelwise:
            raise ValueError(
                "layer: it averages each channel by itself, of however many there are; the pooling that it was made of does that"
            )
    if not isinstance(attention, MultiHeadAttention):
        raise ValueError(
            f"layer: it is {type(layer).__name__}; it must be what from_conv made, or a MultiHeadAttention"
        )
    check_content(attention)
    if isinstance(attention.position, QuadraticOffset):
        points = offsets(attention.position, leak)
        where = where or around(points, attention.position.padding)
    elif where is None:
        raise ValueError(
            "layer: its heads look wherever its inputs and `over` say; a convolution needs heads at fixed points: a QuadraticOffset "
            "as position, or what from_conv makes"
        )
    else:
        points = where.taps
    return convolution(taps(attention), bias(attention), points, where, groups)
