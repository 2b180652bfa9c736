"""The table `grid`: windows of an image compared with torch's SDPA under the same mask, and convolutions as attention."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.case import Case, Side, Sides, grad, inference, training
from polyhead import Grid, RelativeBias, attend, from_conv
from polyhead.neighbourhood import Sizes

SIDE, HEADS, DIM = 64, 8, 32


def _tensors(train: bool, side: int = SIDE) -> list[Tensor]:
    torch.manual_seed(0)
    # as in a layer: points before heads
    return [torch.randn(1, side * side, HEADS, DIM, requires_grad=train).transpose(1, 2) for _ in range(3)]


def _side(forward: Callable[[], Tensor], leaves: dict[str, Tensor], train: bool) -> Side:
    if not train:
        return inference(forward)
    return training(forward, leaves.values(), lambda: {name: grad(leaf) for name, leaf in leaves.items()})


def _leaves(tensors: list[Tensor]) -> dict[str, Tensor]:
    for x in tensors:
        x.requires_grad_().retain_grad()
    return dict(zip("qkv", tensors, strict=True))


def _under_mask(window: int, dilation: int, train: bool) -> Sides:
    """The mask is built before timing starts."""
    q, k, v = made = _tensors(train)
    over = Grid(SIDE, SIDE, window=window, dilation=dilation)
    mask = over.mask(Sizes((1,), HEADS, SIDE**2, SIDE**2), q.device)
    leaves = _leaves(made) if train else {}
    ours = _side(lambda: attend(q, k, v, over=over), leaves, train)
    return Sides(ours, _side(lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=mask), leaves, train))


def _unfolded(train: bool, window: int = 7) -> Sides:
    """Local attention in plain torch: F.unfold gathers the keys and values of every query."""
    q, k, v = made = _tensors(train)
    over = Grid(SIDE, SIDE, window=window)
    leaves = _leaves(made) if train else {}
    inside = F.unfold(torch.ones(1, 1, SIDE, SIDE), window, padding=window // 2).bool()[0].T

    def around(x: Tensor) -> Tensor:
        image = x.transpose(-2, -1).reshape(HEADS, DIM, SIDE, SIDE)
        # (heads, points, window², dim)
        return F.unfold(image, window, padding=window // 2).unflatten(1, (DIM, -1)).permute(0, 3, 2, 1)

    def theirs() -> Tensor:
        s = torch.einsum("hpd,hpwd->hpw", q[0] * DIM**-0.5, around(k)).masked_fill(~inside, -torch.inf)
        return torch.einsum("hpw,hpwd->hpd", s.softmax(-1), around(v))[None]

    return Sides(_side(lambda: attend(q, k, v, over=over), leaves, train), _side(theirs, leaves, train))


def _relative(train: bool, window: int = 7) -> Sides:
    """One learned number per head and point of the window; the peer looks them up in a table, as Swin does."""
    q, k, v = made = _tensors(train)
    over, position = Grid(SIDE, SIDE, window=window), RelativeBias(HEADS, window=(window, window))
    mask = over.mask(Sizes((1,), HEADS, SIDE**2, SIDE**2), q.device)
    apart = over.lattice.key_coordinates(q.device) - over.lattice.query_coordinates(q.device)[:, None]
    place = ((apart.clamp(-(window // 2), window // 2) + window // 2) * torch.tensor([window, 1])).sum(-1)
    leaves = _leaves(made) if train else {}

    def theirs() -> Tensor:
        bias = position.weight[place].permute(2, 0, 1).masked_fill(~mask, -torch.inf)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias[None])

    return Sides(
        _side(lambda: attend(q, k, v, over=over, position=position), leaves, train), _side(theirs, leaves, train)
    )


def _partitioned(windows: int, side: int, heads: int, dim: int, train: bool) -> Sides:
    """Windows that partition images, as in Swin: entries of a batch, with one learned number per head and offset within a window."""
    torch.manual_seed(0)
    made = [torch.randn(windows, side * side, heads, dim, requires_grad=train).transpose(1, 2) for _ in range(3)]
    q, k, v = made
    reach = side - 1
    over, position = Grid(side, side), RelativeBias(heads, window=(2 * reach + 1,) * 2)
    apart = over.lattice.key_coordinates(q.device) - over.lattice.query_coordinates(q.device)[:, None]
    place = ((apart + reach) * torch.tensor([2 * reach + 1, 1])).sum(-1)
    leaves = {**_leaves(made), "the table": position.weight} if train else {}

    def theirs() -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=position.weight[place].permute(2, 0, 1)[None])

    return Sides(
        _side(lambda: attend(q, k, v, over=over, position=position), leaves, train), _side(theirs, leaves, train)
    )


def _convolution(side: int, batch: int, train: bool) -> Sides:
    torch.manual_seed(0)
    conv = nn.Conv2d(64, 64, 3, padding=1)
    attention = from_conv(conv)
    x = torch.randn(batch, 64, side, side, requires_grad=train)
    w_o = attention.attention.o_proj
    assert w_o is not None

    def of_attention() -> dict[str, Tensor]:
        weight = grad(w_o.weight).unflatten(1, (3, 3, 64)).permute(0, 3, 1, 2)
        return {"x": grad(x), "the kernel": weight, "the bias": grad(w_o.bias)}

    def of_conv() -> dict[str, Tensor]:
        assert conv.bias is not None
        return {"x": grad(x), "the kernel": grad(conv.weight), "the bias": grad(conv.bias)}

    if not train:
        return Sides(inference(lambda: attention(x)[0]), inference(lambda: conv(x)))
    ours = training(lambda: attention(x)[0], [x, *attention.parameters()], of_attention)
    return Sides(ours, training(lambda: conv(x), [x, *conv.parameters()], of_conv))


def _pair(name: str, peer: str, setup: Callable[..., Sides], tolerance: float = 1e-4) -> list[Case]:
    """One case for inference and one for training."""
    return [
        Case(f"{name}-{'training' if train else 'inference'}", peer, partial(setup, train=train), tolerance)
        for train in (False, True)
    ]


CASES: tuple[Case, ...] = (
    *_pair("grid-64x64-window7", "SDPA, mask", partial(_under_mask, 7, 1)),
    *_pair("grid-64x64-window7-dilated", "SDPA, mask", partial(_under_mask, 7, 2)),
    *_pair("grid-64x64-window15", "SDPA, mask", partial(_under_mask, 15, 1)),
    *_pair("grid-64x64-window31", "SDPA, mask", partial(_under_mask, 31, 1)),
    *_pair("grid-64x64-window7-unfold", "F.unfold", _unfolded),
    *_pair("grid-64x64-window7-relative", "SDPA, bias", _relative),
    *_pair("partitioned-windows-256x7x7-4x8", "SDPA, bias", partial(_partitioned, 256, 7, 4, 8)),
    *_pair("partitioned-windows-256x7x7-4x32", "SDPA, bias", partial(_partitioned, 256, 7, 4, 32)),
    *_pair("conv-64-3x3-8x32x32", "nn.Conv2d", partial(_convolution, 32, 8)),
    *_pair("conv-64-3x3-8x64x64", "nn.Conv2d", partial(_convolution, 64, 8)),
)
