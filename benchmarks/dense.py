"""The table `dense`: the layer, windows, padding and the cache, compared with torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.case import Case, CaseError, Side, Sides, grad, inference, mean_square, training, whole
from polyhead import Causal, KeyValueCache, MultiHeadAttention, Padding, Window, attend

Shape = tuple[int, int, int, int]
"""(batch, tokens, d_model, heads)"""

SHAPES: tuple[Shape, ...] = (
    (2, 10, 512, 8),
    (8, 128, 768, 12),
    (4, 512, 768, 12),
    (1, 2048, 768, 12),
    (1, 8192, 768, 12),
)
DEFAULT_CALL: Shape = (1, 2048, 768, 12)
PADDED: Shape = (8, 512, 768, 12)
REACH = 256
LONGEST = 16384
STEPS = 4096


@dataclass(frozen=True)
class Projections:
    """The projections of one implementation: W_Q, W_K, W_V, W_O, the first three separate or stacked."""

    weights: tuple[Tensor, ...]
    biases: tuple[Tensor, ...]

    def leaves(self) -> tuple[Tensor, ...]:
        return *self.weights, *self.biases

    def gradients(self) -> dict[str, Tensor]:
        """By projection. The biases are joined: that of the keys has no effect, so its gradient is rounding error."""
        by_map = torch.cat([grad(weight) for weight in self.weights]).chunk(4)
        biases = torch.cat([grad(bias) for bias in self.biases])
        return {**dict(zip(("W_Q", "W_K", "W_V", "W_O"), by_map, strict=True)), "the biases": biases}

    def copied(self) -> Projections:
        """Copies in separate tensors."""
        return Projections(
            tuple(_own(weight) for weight in self.weights),
            tuple(_own(bias) for bias in self.biases),
        )

    def stacked(self) -> Projections:
        """Copies, with W_Q, W_K and W_V in one tensor."""
        *weights, w_o = self.weights
        *biases, b_o = self.biases
        return Projections((torch.cat(weights), w_o), (torch.cat(biases), b_o)).copied()


def _own(x: Tensor) -> Tensor:
    return x.detach().clone().requires_grad_()


def _layer(shape: Shape) -> tuple[MultiHeadAttention, Projections, Tensor]:
    """Our layer with nonzero biases, its projections, and an input."""
    torch.manual_seed(0)
    batch, tokens, d_model, heads = shape
    layer = MultiHeadAttention(d_model, heads)
    linears = [cast(nn.Linear, linear) for linear in (layer.q_proj, layer.k_proj, layer.v_proj, layer.o_proj)]
    for linear in linears:
        nn.init.normal_(linear.bias, std=0.1)
    maps = Projections(tuple(linear.weight for linear in linears), tuple(linear.bias for linear in linears))
    return layer, maps, torch.randn(batch, tokens, d_model)


def _torch_layer(maps: Projections, heads: int) -> tuple[nn.MultiheadAttention, Projections]:
    """torch's layer with the same weights."""
    layer = nn.MultiheadAttention(maps.weights[0].shape[0], heads, batch_first=True)
    stacked = maps.stacked()
    names = ("in_proj_weight", "out_proj.weight", "in_proj_bias", "out_proj.bias")
    layer.load_state_dict(dict(zip(names, stacked.leaves(), strict=True)))
    own = Projections((layer.in_proj_weight, layer.out_proj.weight), (layer.in_proj_bias, layer.out_proj.bias))
    return layer, own


def _bare(x: Tensor, maps: Projections, heads: int, mask: Tensor | None = None) -> Tensor:
    """F.linear, F.scaled_dot_product_attention, F.linear, and nothing else."""
    inner = [F.linear(x, w, b) for w, b in zip(maps.weights[:-1], maps.biases[:-1], strict=True)]
    q, k, v = (_split(y, heads) for y in (inner if len(inner) == 3 else inner[0].chunk(3, -1)))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return F.linear(out.transpose(1, 2).flatten(-2), maps.weights[-1], maps.biases[-1])


def _split(y: Tensor, heads: int) -> Tensor:
    return y.unflatten(-1, (heads, -1)).transpose(1, 2)


def _side(
    forward: Callable[[], Tensor],
    maps: Projections,
    x: Tensor,
    train: bool,
    loss: Callable[[Tensor], Tensor] = mean_square,
    seen: Callable[[Tensor], Tensor] = whole,
) -> Side:
    """A whole layer: the forward pass, or also the gradients of the input and of all projections."""
    if not train:
        return inference(forward, seen)
    leaves = (x, *maps.leaves())
    return training(forward, leaves, lambda: {"x": grad(x), **maps.gradients()}, loss=loss, seen=seen)


def _against_torch(shape: Shape, train: bool, need_weights: bool) -> Sides:
    layer, maps, x = _layer(shape)
    heads = shape[-1]
    theirs, their_maps = _torch_layer(maps, heads)
    apart, stacked = maps.copied(), maps.stacked()
    layer.train(train)
    theirs.train(train)
    x.requires_grad_(train)
    ours = _side(lambda: layer(x)[0], maps, x, train)
    peer = _side(lambda: theirs(x, x, x, need_weights=need_weights)[0], their_maps, x, train)
    floors = [_side(partial(_bare, x, floor, heads), floor, x, train) for floor in (apart, stacked)]
    return Sides(ours, peer, () if need_weights else tuple(floors))


def _padded(train: bool) -> Sides:
    """Lengths are uniform, in pairs that sum to the full length, so half of the tokens are real. The loss excludes padding."""
    layer, maps, x = _layer(PADDED)
    batch, tokens, _, heads = PADDED
    drawn = torch.randint(1, tokens, (batch // 2,))
    lengths = torch.cat((drawn, tokens - drawn))
    keep = torch.arange(tokens) < lengths[:, None]
    real = keep[..., None].float()
    over, mask = Padding(lengths), keep[:, None, None, :]
    theirs = maps.copied()
    layer.train(train)
    x.requires_grad_(train)

    def side(forward: Callable[[], Tensor], own: Projections) -> Side:
        return _side(forward, own, x, train, loss=lambda out: out.mul(real).square().mean(), seen=lambda out: out[keep])

    return Sides(side(lambda: layer(x, over=over)[0], maps), side(lambda: _bare(x, theirs, heads, mask), theirs))


def _operands(tokens: int, train: bool) -> list[Tensor]:
    """q, k and v of 12 heads x 64; shorter ones are prefixes of longer ones."""
    torch.manual_seed(0)
    # (tokens, 1, heads, dim) -> (1, heads, tokens, dim)
    drawn = (torch.randn(LONGEST, 1, 12, 64)[:tokens].permute(1, 2, 0, 3) for _ in range(3))
    return [x.clone(memory_format=torch.contiguous_format).requires_grad_(train) for x in drawn]


def _of_operands(operands: tuple[Tensor, Tensor, Tensor], train: bool, forward: Callable[[], Tensor]) -> Side:
    if not train:
        return inference(forward)
    return training(forward, operands, lambda: dict(zip("qkv", map(grad, operands), strict=True)))


def _band(tokens: int, causal: bool, train: bool) -> Sides:
    q, k, v = _operands(tokens, train)
    over = Causal() & Window(REACH) if causal else Window(REACH)
    mask = torch.ones(tokens, tokens, dtype=torch.bool).triu_(-REACH).tril_(0 if causal else REACH)

    side = partial(_of_operands, (q, k, v), train)
    return Sides(
        side(lambda: attend(q, k, v, over=over)), side(lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=mask))
    )


def _narrow(train: bool) -> Sides:
    """Many narrow heads: 2,048 sequences of 16 items, 7 heads x 7."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2048, 16, 7, 7).transpose(1, 2).requires_grad_(train) for _ in range(3))

    side = partial(_of_operands, (q, k, v), train)
    return Sides(side(lambda: attend(q, k, v)), side(lambda: F.scaled_dot_product_attention(q, k, v)))


def _band_and_its_half(tokens: int, train: bool) -> Sides:
    """Ours compared with ours at half the length, up to the window's reach before the end of the half."""
    half = tokens // 2
    common = slice(0, half - 2 * REACH)

    def side(length: int) -> Side:
        q, k, v = _operands(length, train)
        forward = lambda: attend(q, k, v, over=Window(REACH))
        seen = lambda x: x[..., common, :]
        if not train:
            return inference(forward, seen)
        gradients = lambda: {"q": seen(grad(q)), "k": seen(grad(k)), "v": seen(grad(v))}
        # a sum, because a mean would shrink with the length
        return training(forward, (q, k, v), gradients, loss=lambda out: out.square().sum(), seen=seen)

    return Sides(side(tokens), side(half))


def _step(length: int) -> Sides:
    """The step that extends the cache to `length`, after all earlier steps of one token each."""
    layer, maps, sequence = _layer((1, STEPS, 768, 12))
    layer.eval()
    cache = layer.cache(1, STEPS)
    places = set()
    with torch.no_grad():
        for i in range(length - 1):
            layer(sequence[:, i : i + 1], cache=cache)
            places.add(_place(cache))
    x = sequence[:, length - 1 : length].clone()

    def ours() -> Tensor:
        out: Tensor = layer(x, cache=cache)[0]
        cache.truncate(length - 1)
        return out

    def in_place(out: Tensor) -> Tensor:
        if places != {_place(cache)}:
            raise CaseError(f"the cache has been copied: it was at {places} and is now at {_place(cache)}")
        return out

    past_k, past_v = _past(maps, sequence[:, : length - 1], 12)
    room_k, room_v = (F.pad(past, (0, 0, 0, STEPS - length + 1)) for past in (past_k, past_v))

    def joined() -> Tensor:
        q, k, v = _projected(maps, x, 12)
        return _decoded(maps, q, torch.cat((past_k, k), 2), torch.cat((past_v, v), 2))

    def written() -> Tensor:
        q, k, v = _projected(maps, x, 12)
        room_k[:, :, length - 1 : length] = k
        room_v[:, :, length - 1 : length] = v
        return _decoded(maps, q, room_k[:, :, :length], room_v[:, :, :length])

    return Sides(inference(ours, in_place), inference(joined), (inference(written),))


def _place(cache: KeyValueCache) -> tuple[int, int]:
    """The memory address of a cache that is not empty."""
    return cache.k.data_ptr(), cache.v.data_ptr()


def _projected(maps: Projections, x: Tensor, heads: int) -> tuple[Tensor, ...]:
    return tuple(_split(F.linear(x, w, b), heads) for w, b in zip(maps.weights[:3], maps.biases[:3], strict=True))


@torch.no_grad()
def _past(maps: Projections, x: Tensor, heads: int) -> list[Tensor]:
    """The keys and values of all tokens so far, at once."""
    return [y.contiguous() for y in _projected(maps, x, heads)[1:]]


def _decoded(maps: Projections, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out = F.scaled_dot_product_attention(q, k, v)
    return F.linear(out.transpose(1, 2).flatten(-2), maps.weights[3], maps.biases[3])


def _cases() -> list[Case]:
    cases = []
    for kind, train in (("inference", False), ("training", True)):
        for shape in SHAPES:
            name = f"layer-{kind}-{'x'.join(map(str, shape))}"
            cases.append(
                Case(name, "nn.MultiheadAttention(need_weights=False)", partial(_against_torch, shape, train, False))
            )
        name = f"default-call-{kind}-{'x'.join(map(str, DEFAULT_CALL))}"
        cases.append(Case(name, "nn.MultiheadAttention()", partial(_against_torch, DEFAULT_CALL, train, True)))
        name = f"padding-{kind}-{'x'.join(map(str, PADDED))}"
        cases.append(Case(name, "F.linear + SDPA(mask)", partial(_padded, train)))
        for band, causal in (("window", False), ("causal-window", True)):
            cases.append(Case(f"{band}-{REACH}-{kind}-8192", "SDPA(mask)", partial(_band, 8192, causal, train)))
        cases.append(Case(f"narrow-{kind}-2048x16x7x7", "SDPA", partial(_narrow, train)))
        for tokens in (LONGEST // 2, LONGEST):
            name = f"window-{REACH}-memory-{kind}-{tokens}"
            cases.append(Case(name, f"ours at {tokens // 2} tokens", partial(_band_and_its_half, tokens, train)))
    for length in (512, 1024, 2048, STEPS):
        cases.append(Case(f"cache-step-{length}", "F.linear + cat + SDPA", partial(_step, length)))
    return cases


CASES = tuple(_cases())
