"""Convolutions as multi-head attention, and back: each tap of a kernel is a head that looks at one point."""

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

from polyhead._checks import WrongType, check_number, check_tensor, kind_of
from polyhead._torch import intercepted, is_symbolic, record_call, refuse_scripting, values_unavailable, widened
from polyhead.attend import Explanation, attention_weights
from polyhead.heads import Heads
from polyhead.neighbourhood import Grid, Neighbourhood, Offsets
from polyhead.neighbourhood.grid import written
from polyhead.nn.attention import MultiHeadAttention
from polyhead.nn.checks import check_like, check_sizes
from polyhead.nn.conv.extract import Points, around, bias, check_content, convolution, offsets, taps
from polyhead.nn.conv.geometry import CONVOLUTIONS, Geometry, geometry
from polyhead.nn.surgery import KEPT, ZeroMap
from polyhead.position import QuadraticOffset


class Certificate(NamedTuple):
    """How far heads of finite sharpness are from the convolution that they stand for, on one image or batch."""

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
        if is_symbolic(image):
            return record_call(self, image)
        x, sizes = self._items(image)
        outputs = self.geometry.outputs(sizes)
        query = _asking(x, self.geometry, sizes, outputs)
        try:
            y, heads = self.attention(query, None if query is x else x, over=self.over(sizes, x.device))
        except RuntimeError:
            check_like(self, image=image)
            raise
        y = y.squeeze(-1) if self.channelwise else y.transpose(-2, -1)
        # as the convolution gives it: channels lie inside only where they came so
        y = y.contiguous() if image.is_contiguous() else y
        return y.unflatten(-1, outputs), heads

    __prepare_scriptable__ = refuse_scripting

    def explain(self, image: Float[Tensor, "*batch channels *sizes"]) -> Explanation:
        """Which kernel a call with this image takes, and why the faster ones refuse. No attention is computed."""
        x, sizes = self._items(image)
        query = _asking(x, self.geometry, sizes, self.geometry.outputs(sizes))
        return self.attention.explain(query, None if query is x else x, over=self.over(sizes, x.device))

    def _items(self, image: Tensor) -> tuple[Float[Tensor, "*batch points channels"], tuple[int, ...]]:
        if not check_tensor("image", image, "of floating-point numbers").is_floating_point():
            raise ValueError(f"image must be a tensor of floating-point numbers, got {image.dtype}")
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

    @property
    def points(self) -> Points:
        """Where the heads look from a query, one point each."""
        taps, kept = self.geometry.taps, getattr(self.attention, KEPT, None)
        return tuple(taps) if kept is None else tuple(taps[head] for head in kept.tolist())

    def over(self, sizes: tuple[int, ...], device: torch.device | str = "cpu") -> Neighbourhood:
        """Who may attend to whom in an image of these sizes."""
        # what is made while others watch, or by a transform, must not stay behind
        make = _over if values_unavailable() or intercepted() else _kept_over
        points = self.points if self.attention.position is None else None
        return make(self.geometry, points, tuple(sizes), torch.device(device))

    def certificate(self, image: Float[Tensor, "*batch channels *sizes"]) -> Certificate:
        """How much weight leaks from the heads' points, and how large an error in the output that can make at most.

        Raises:
            ValueError: where the scores depend on the content, of which nothing is known beforehand.
        """
        x, sizes = self._items(image)
        layer, heads = self.attention, self.attention.num_heads
        check_content(layer)
        if layer.position is None:
            return Certificate(torch.zeros(heads, dtype=torch.float64, device=x.device), 0.0)
        target = _over(self.geometry, self.points, sizes, x.device)
        assert isinstance(target, Offsets)
        point = target.index[..., 0]
        leaked = self._leaked(self.over(sizes, x.device), point)
        gain = torch.linalg.matrix_norm(taps(layer).double(), 2)
        # a head that leaks moves at most so much of one point to another, or of one point to nothing
        moved = torch.where(point < 0, 1.0, 2.0) * leaked * gain[:, None]
        longest = x.detach().double().norm(dim=-3 if self.channelwise else -1)
        error = float(moved.sum(0).max() * longest.max()) if longest.numel() else 0.0
        return Certificate(leaked.amax(1), error)

    def _leaked(self, over: Neighbourhood, point: Int[Tensor, "heads queries"]) -> Float[Tensor, "heads queries"]:
        """The weight that does not lie on a head's point, or in the sink where there is no such point."""
        assert over.grid is not None and self.attention.position is not None
        heads, queries = point.shape
        # no content: the position alone, in fp64
        position, sink = copy.deepcopy(self.attention.position).double(), self.attention.sink
        nothing = lambda items: torch.zeros(heads, items, 1, dtype=torch.float64, device=point.device)
        with torch.no_grad():
            w = attention_weights(
                nothing(queries), nothing(math.prod(over.grid.sizes)), over=over, position=position,
                sink=None if sink is None else sink.double(),
            )  # fmt: skip
        on_point = w.gather(-1, point.clamp(min=0)[..., None])[..., 0]
        # what is missing from a sum of 1 is the sink's
        return torch.where(point < 0, w.sum(-1), 1 - on_point).clamp(min=0)

    def extra_repr(self) -> str:
        g = self.geometry
        return f"kernel={written(g.kernel)}, stride={written(g.stride)}, padding={g.padding}, mode={g.mode!r}"


def from_conv(conv: nn.Module, *, head_dim: int | None = None, alpha: float | None = None) -> ConvolutionalAttention:
    """A convolution, or an average pooling, as multi-head attention with the same outputs: one head a tap.

    Exactly, each head sees one point (`Offsets`), and fetches it: there is nothing to score, and no W_Q and W_K. With `alpha` each
    head scores all points by −alpha·|distance to its own|² (`QuadraticOffset`, Cordonnier 2020) and may learn to look elsewhere:
    `certificate` tells how far that is from the convolution. W_Q starts at zero then, so that the content does not count
    until it is trained to. Groups become one dense W_O, with zeros between them.

    Args:
        conv: an `nn.Conv1d`, `Conv2d`, `Conv3d`, `AvgPool1d`, `AvgPool2d` or `AvgPool3d`. Its numbers are copied; what is frozen
            stays so.
        head_dim: features a head fetches through W_V; it must be at least the rank of every tap. By default a head fetches the
            points themselves, and the taps stand in W_O.
        alpha: how sharply heads look. The weight that leaks is about e^−alpha a neighbour; with zero padding, e^(−alpha/2).

    Raises:
        ValueError: for what no such attention computes, with the reason.
    """
    where = geometry(conv)
    (head_dim,) = check_sizes(head_dim=head_dim)
    if alpha is not None and where.together:
        raise ValueError(
            "alpha: this pooling averages as many points as there are, which one head does; heads of one point each cannot"
        )
    # where nothing is left to chance, nothing is drawn
    with nullcontext() if alpha is not None else torch.random.fork_rng(devices=[]):
        made = (
            _convolution(conv, where, head_dim, alpha)
            if isinstance(conv, CONVOLUTIONS)
            else _pooling(conv, where, alpha)
        )
    return made.train(conv.training)


def _convolution(conv: Any, where: Geometry, head_dim: int | None, alpha: float | None) -> ConvolutionalAttention:
    kernel, added = _tapped(conv)
    heads, out, channels = kernel.shape
    with torch.device(kernel.device):
        layer = MultiHeadAttention(
            channels, heads, head_dim=head_dim or (1 if alpha is None else max(1, channels // heads)),
            value_dim=head_dim or channels, d_out=out, bias=added is not None, **_looking(where, alpha),
        ).to(kernel.dtype)  # fmt: skip
        if head_dim is None:
            layer.v_proj, layer.value_heads = nn.Identity(), 1
        else:
            # a bias would be lost where a head finds nothing to fetch
            layer.v_proj = nn.Linear(channels, heads * head_dim, bias=False, dtype=kernel.dtype)
    _start(layer, kernel if head_dim is None else _factored(kernel, head_dim, where), added)
    for parameter in layer.parameters():
        parameter.requires_grad_(conv.weight.requires_grad)
    if conv.bias is not None and layer.o_proj is not None:
        layer.o_proj.bias.requires_grad_(conv.bias.requires_grad)
    return ConvolutionalAttention(layer, where, groups=conv.groups)


def _pooling(pool: Any, where: Geometry, alpha: float | None) -> ConvolutionalAttention:
    """The mean over heads that fetch one point each, or over the points that one head sees; channel by channel."""
    heads = 1 if where.together else math.prod(where.kernel)
    layer = MultiHeadAttention(1, heads, head_dim=1, combine="mean", bias=False, **_looking(where, alpha))
    _unscored(layer)
    layer.v_proj, layer.value_heads = nn.Identity(), 1
    divisor = getattr(pool, "divisor_override", None)
    if divisor is not None:
        layer.gate = torch.full((heads,), heads / divisor)
    return ConvolutionalAttention(layer, where, channelwise=True)


def _looking(where: Geometry, alpha: float | None) -> dict[str, Any]:
    """What a layer is told of where its heads look, if it has to score points for that."""
    if alpha is None:
        return {}
    position = QuadraticOffset(where.taps, alpha=alpha, padding=where.mode)
    return {"position": position, "sink": 0.0 if where.mode == "zeros" else None}


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
    wide = kernel.to(torch.promote_types(kernel.dtype, torch.float32))
    rank = torch.linalg.matrix_rank(wide)
    if not kernel.is_meta and bool((rank > width).any()):
        worst = int(rank.argmax())
        raise ValueError(
            f"head_dim: it is {width}, but the tap at {where.taps[worst]} has rank {int(rank[worst])}, and what a head moves passes through "
            f"head_dim features; it must be at least {int(rank.max())}, or None for heads that fetch the points themselves"
        )
    u, s, v = torch.linalg.svd(wide, full_matrices=False)
    kept = min(width, s.shape[-1])
    root = s[:, :kept].sqrt()
    left, right = u[..., :kept] * root[:, None], root[..., None] * v[:, :kept]
    more = width - kept
    return F.pad(left, (0, more)).to(kernel.dtype), F.pad(right, (0, 0, 0, more)).to(kernel.dtype)


@torch.no_grad()
def _start(layer: MultiHeadAttention, kernel: Tensor | tuple[Tensor, Tensor], added: Tensor | None) -> None:
    """Put the taps into W_O, or into W_O and W_V, and let the content be without weight."""
    assert layer.o_proj is not None and layer.q_proj is not None
    w_o, w_v = (kernel, None) if isinstance(kernel, Tensor) else kernel
    # (heads, out, dim) -> (out, heads · dim)
    layer.o_proj.weight.copy_(w_o.movedim(0, 1).flatten(1))
    if added is not None:
        layer.o_proj.bias.copy_(added)
    if w_v is not None:
        assert isinstance(layer.v_proj, nn.Linear)
        layer.v_proj.weight.copy_(w_v.flatten(0, 1))
    if layer.position is None:
        _unscored(layer)
    else:
        layer.q_proj.weight.zero_()


def _unscored(layer: Any) -> None:
    """Leave out W_Q and W_K, of a layer whose heads have nothing to score."""
    features = layer.num_heads * layer.head_dim
    layer.q_proj, layer.k_proj = ZeroMap(features), ZeroMap(features)


def _over(where: Geometry, points: Points | None, sizes: tuple[int, ...], device: torch.device) -> Neighbourhood:
    """Heads at these points, or heads that see all."""
    outputs = where.outputs(sizes)
    if points is None:
        return Grid(*sizes, stride=where.stride, outputs=outputs)
    # what is made in inference mode could not be used in training
    with torch.inference_mode(False):
        each = torch.tensor(points, device=device)
        each = each[None] if where.together else each
        return Offsets(each, sizes, stride=where.stride, outputs=outputs, padding=where.mode)


# of the last images' sizes: they come again at every step
_kept_over = lru_cache(maxsize=8)(_over)


def _asking(
    x: Float[Tensor, "*batch points channels"], where: Geometry, sizes: tuple[int, ...], outputs: tuple[int, ...]
) -> Float[Tensor, "*batch queries channels"]:
    """The points that ask: those under the middle of the kernel, at the border the nearest."""
    if outputs == sizes and max(where.stride) == 1 and not any(where.middle):
        return x
    middle = torch.tensor([where.middle], device=x.device)
    under = Offsets(middle, sizes, stride=where.stride, outputs=outputs, padding="replicate").index
    return widened(x).index_select(-2, under.flatten()).to(x.dtype)


def to_conv(layer: ConvolutionalAttention | MultiHeadAttention, *, leak: float = 1e-6) -> nn.Module:
    """The convolution that a layer computes whose heads look at fixed points.

    Args:
        layer: what `from_conv` made, trained further or not; or a `MultiHeadAttention` with a `QuadraticOffset`, which becomes a
            convolution of stride 1 that keeps an image's size.
        leak: how much of its weight a head may put elsewhere than on one point: at most, whatever the image's size.

    Raises:
        ValueError: where heads do not look at fixed points, with how far from it they are.
    """
    leak = check_number("leak", leak, 0, 1)
    attention, where, groups = layer, None, 1
    if isinstance(layer, ConvolutionalAttention):
        attention, where, groups = layer.attention, layer.geometry, layer.groups
        if layer.channelwise:
            raise ValueError(
                "layer: it averages each channel by itself, of however many there are; the pooling that it was made of does that"
            )
    if not isinstance(attention, MultiHeadAttention):
        raise WrongType(f"layer must be what from_conv made, or a MultiHeadAttention, got {kind_of(layer)}")
    check_content(attention)
    if isinstance(attention.position, QuadraticOffset):
        points = offsets(attention.position, attention.sink, leak)
        where = where or around(points, attention.position.padding)
    elif isinstance(layer, ConvolutionalAttention):
        points = layer.points
    else:
        raise ValueError(
            "layer: its heads look wherever its inputs and `over` say; a convolution needs heads at fixed points: a QuadraticOffset "
            "as position, or what from_conv makes"
        )
    assert where is not None
    return convolution(taps(attention), bias(attention, where), points, where, groups)
