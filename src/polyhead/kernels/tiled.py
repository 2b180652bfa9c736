"""Attention tile by tile: what the neighbourhood leaves out is never computed, forward or backward.

A tile is computed by torch's fused attention on the CPU, or in plain torch where that cannot help (dropout, a learned bias,
another device). One custom operator hides the data-dependent plan, so that `torch.compile` sees one call.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from polyhead._torch import widened
from polyhead.kernels.call import Call, Result, flat, intervals, rows
from polyhead.kernels.dropout import keeps
from polyhead.kernels.fused import comparable, even, flash, refuses, strided, with_positive_scale
from polyhead.kernels.operators import define_attention
from polyhead.kernels.reference import attend_intervals
from polyhead.kernels.tiles import Tile, plan
from polyhead.score import Dot

_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


# Products in one row of a batch below which a call of the fused kernel costs more than the work.
SMALL = 1 << 20


class Tiled:
    """Any neighbourhood, bias and dropout, with dot products."""

    name = "tiled"

    def refuses(self, call: Call) -> str | None:
        return refuses(call)

    def __call__(self, call: Call) -> Result:
        batch, sizes = call.sizes.batch, call.sizes
        device, width, dim = call.q.device, call.v.shape[-1], call.q.shape[-1]
        assert isinstance(call.score, Dot)
        first, stop = intervals(call)
        mask = None if call.over.exact else rows(call.over.mask(sizes, device), batch, 3)
        table, bias = call.table, call.bias
        learned = any(x is not None and x.requires_grad for x in (table, bias)) and torch.is_grad_enabled()
        if learned:
            # their gradients are sums over queries, rows and tiles
            table, bias = (None if x is None else widened(x) for x in (table, bias))
        bias = None if bias is None else rows(bias, batch, 3)
        plain = learned or call.dropout > 0 or device.type != "cpu" or not comparable(dim, width)
        q, k, v, scale = call.q, call.k, call.v, call.score.factor(dim)
        if not plain:
            q, scale = with_positive_scale(q, scale)
            q, k, v = even(q, k, v)
        out, lse = torch.ops.polyhead.tiled(
            flat(q),
            flat(k),
            flat(v),
            first,
            stop,
            mask,
            table,
            bias,
            call.seed,
            scale,
            call.dropout,
            plain,
        )
        if q.dim() != 4:
            out, lse = out.reshape(*call.q.shape[:-1], out.shape[-1]), lse.reshape(call.q.shape[:-1])
        return (out if out.shape[-1] == width else out[..., :width]), lse


class _Work:
    """The tensors of one operator call, cut to a tile on demand."""

    def __init__(
        self, q: Tensor, first: Tensor, stop: Tensor, mask: Tensor | None, table: Tensor | None, bias: Tensor | None,
        seed: Tensor | None, scale: float, dropout: float, plain: bool, keys: int,
    ) -> None:  # fmt: skip
        self.first, self.stop, self.mask, self.table, self.bias = first, stop, mask, table, bias
        self.seed, self.scale, self.dropout, self.plain = seed, scale, dropout, plain
        self.queries, self.keys, self.heads = q.shape[-2], keys, q.shape[-3]
        # what is added may be beyond a half's range
        self.dtype = torch.promote_types(q.dtype, torch.float32)
        self.device = q.device
        self._last_band: tuple[tuple[int, bytes, bytes], Tensor] | None = None
        low, high = (bound.cpu().numpy().clip(0, keys) for bound in (first, stop))
        small = q.shape[1] * q.shape[2] * keys * q.shape[3] < SMALL
        self.tiles = plan(low, high, q.shape[0], whole=not plain, together=small)
        self._low, self._high = low, high

    def additive(self, tile: Tile) -> Tensor | None:
        """What is added to the scores of a tile, -inf where attention may not go; None for nothing."""
        add = self._band(tile) if tile.shape == "ragged" or (self.plain and tile.shape == "causal") else None
        if self.mask is not None:
            keep = _cut(self.mask, tile)
            if not keep.all():
                hidden = torch.zeros(keep.shape, dtype=self.dtype, device=self.device).masked_fill_(~keep, -torch.inf)
                add = hidden if add is None else add + hidden
        for part in (self._by_distance(tile), None if self.bias is None else _cut(self.bias, tile)):
            if part is not None:
                add = part.to(self.dtype) if add is None else add + part.to(self.dtype)
        return add

    def _band(self, tile: Tile) -> Tensor:
        """(rows or 1, 1, queries, keys) of 0 and -inf; tiles of one outline that follow each other share it."""
        rows = slice(0, 1) if len(self._low) == 1 else slice(tile.b0, tile.b1)
        low = self._low[rows, tile.q0 : tile.q1] - tile.k0
        high = self._high[rows, tile.q0 : tile.q1] - tile.k0
        known = (tile.k1 - tile.k0, low.tobytes(), high.tobytes())
        if self._last_band is None or self._last_band[0] != known:
            key = torch.arange(tile.k1 - tile.k0, device=self.device)
            begin, end = (torch.from_numpy(x.copy()).to(self.device)[:, None, :, None] for x in (low, high))
            hidden = (key < begin) | (key >= end)
            band = torch.zeros(hidden.shape, dtype=self.dtype, device=self.device).masked_fill_(hidden, -torch.inf)
            self._last_band = known, band
        return self._last_band[1]

    def _diagonals(self, tile: Tile) -> Tensor:
        """For each pair of a tile, the entry of the table that its distance has."""
        query = torch.arange(tile.q0, tile.q1, device=self.device)[:, None] + (self.keys - self.queries)
        return torch.arange(tile.k0, tile.k1, device=self.device) - query + (self.keys - 1)

    def _by_distance(self, tile: Tile) -> Tensor | None:
        if self.table is None:
            return None
        # row i of the tile is a stretch of the table that begins one entry further left than row i - 1's
        left = tile.k0 - (tile.q1 - 1) + self.queries - 1
        stretch = self.table[:, left : left + (tile.q1 - tile.q0) + (tile.k1 - tile.k0) - 1]
        return stretch.unfold(-1, tile.k1 - tile.k0, 1).flip(-2)[None]

    def kept(self, tile: Tile) -> Tensor | None:
        """Which pairs of a tile dropout leaves."""
        if self.dropout == 0:
            return None
        assert self.seed is not None
        number = torch.arange(tile.b0 * self.heads, tile.b1 * self.heads, device=self.device)
        query = torch.arange(tile.q0, tile.q1, device=self.device)[:, None]
        key = torch.arange(tile.k0, tile.k1, device=self.device)
        return keeps(self.seed, number.reshape(-1, self.heads, 1, 1), query, key, self.dropout)

    def give_back(self, tile: Tile, ds: Tensor, d_table: Tensor, d_bias: Tensor) -> None:
        """Add the gradient of a tile's scores to those of the table and of the bias."""
        if d_table.numel():
            at = self._diagonals(tile).flatten().expand(self.heads, -1)
            d_table.scatter_add_(1, at, ds.sum(0).flatten(1).to(d_table.dtype))
        if d_bias.numel():
            into = _cut(d_bias, tile)
            into += ds.sum_to_size(into.shape).to(into.dtype)


def _cut(x: Tensor, tile: Tile) -> Tensor:
    """The part of (rows or 1, heads or 1, queries or 1, keys or 1) that a tile covers."""
    b, q, k = (tile.b0, tile.b1), (tile.q0, tile.q1), (tile.k0, tile.k1)
    for axis, (begin, end) in ((0, b), (2, q), (3, k)):
        if x.shape[axis] > 1:
            x = x.narrow(axis, begin, end - begin)
    return x


def _queries(x: Tensor, tile: Tile) -> Tensor:
    return x[tile.b0 : tile.b1, :, tile.q0 : tile.q1]


def _keys(x: Tensor, tile: Tile) -> Tensor:
    return x[tile.b0 : tile.b1, :, tile.k0 : tile.k1]


def _empty(add: Tensor | None) -> Tensor | None:
    """(rows, heads, queries): which queries of a tile have no key, where any might."""
    return None if add is None else add.amax(-1) == -torch.inf


def _grouped(x: Tensor, own: int) -> Tensor:
    """(batch, heads, queries, n) as (batch, own, group·queries, n): a group's queries side by side."""
    return x.reshape(x.shape[0], own, -1, x.shape[-1])


def _plain(q: Tensor, k: Tensor, add: Tensor | None, scale: float) -> Tensor:
    s = (_grouped(q * scale, k.shape[1]) @ k.transpose(-2, -1)).view(*q.shape[:-1], k.shape[-2])
    return s if add is None else s.add_(add)


def _exp_(s: Tensor) -> Tensor:
    """exp in place, zero where it would be less than the smallest normal number: torch takes ten times as long for such."""
    return F.threshold(s, math.log(torch.finfo(s.dtype).tiny), -torch.inf, inplace=True).exp_()


def _forward_plain(
    q: Tensor, k: Tensor, v: Tensor, add: Tensor | None, kept: Tensor | None, work: _Work
) -> tuple[Tensor, Tensor]:
    s = _plain(q, k, add, work.scale)
    top = s.amax(-1, keepdim=True)
    top.masked_fill_(top == -torch.inf, 0.0)
    p = _exp_(s.sub_(top))
    total = p.sum(-1, keepdim=True)
    lse = (total.log() + top)[..., 0]
    p.div_(total.masked_fill_(total == 0, 1.0))
    if kept is not None:
        p = p * kept / (1 - work.dropout)
    return (_grouped(p, v.shape[1]) @ v).view(*q.shape[:-1], v.shape[-1]), lse


def _backward_plain(
    d_out: Tensor, d_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, add: Tensor | None,
    kept: Tensor | None, work: _Work,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of q, k, v and of the scores."""
    p = _exp_(_plain(q, k, add, work.scale).sub_(lse[..., None]))
    dp = (_grouped(d_out, v.shape[1]) @ v.transpose(-2, -1)).view_as(p)
    dropped = p
    if kept is not None:
        thinned = kept.to(p.dtype) / (1 - work.dropout)
        dropped, dp = p * thinned, dp * thinned
    dv = _grouped(dropped, v.shape[1]).transpose(-2, -1) @ _grouped(d_out, v.shape[1])
    delta = (d_out * out).sum(-1, keepdim=True)
    ds = p * dp.sub_(delta if d_lse is None else delta - d_lse[..., None])
    grouped = _grouped(ds, k.shape[1])
    dq = (grouped @ k).view_as(q) * work.scale
    dk = grouped.transpose(-2, -1) @ _grouped(q, k.shape[1]) * work.scale
    return dq, dk, dv, ds


def _backward_flash(
    d_out: Tensor, d_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, add: Tensor | None,
    tile: Tile, work: _Work,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    causal = tile.shape == "causal"
    if d_lse is None:
        dq, dk, dv = _flash_backward(d_out, q, k, v, out, lse, 0.0, causal, attn_mask=add, scale=work.scale)
        return dq, dk, dv
    # The kernel subtracts Σ d_out·out from each row of dp. One more feature, zero in q, k and v, one in out and
    # -d_lse in d_out, leaves dp as it is and adds the gradient of the log-sum-exp.
    dim = q.shape[-1]
    q, k, v = (F.pad(x, (0, 1)) for x in (q, k, v))
    out, d_out = F.pad(out, (0, 1), value=1.0), torch.cat((d_out, -d_lse[..., None].to(d_out.dtype)), -1)
    dq, dk, dv = _flash_backward(d_out, q, k, v, out, lse, 0.0, causal, attn_mask=add, scale=work.scale)
    return dq[..., :dim], dk[..., :dim], dv[..., :dim]


def _tiled(
    q: Tensor, k: Tensor, v: Tensor, first: Tensor, stop: Tensor, mask: Tensor | None, table: Tensor | None,
    bias: Tensor | None, seed: Tensor | None, scale: float, dropout: float, plain: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    work = _Work(q, first, stop, mask, table, bias, seed, scale, dropout, plain, k.shape[-2])
    out, lse = _outputs(q, v)
    out.zero_()
    lse.fill_(-torch.inf)
    with torch.autocast(q.device.type, enabled=False):
        for tile in work.tiles:
            parts = _queries(q, tile), _keys(k, tile), _keys(v, tile)
            add = work.additive(tile)
            if plain:
                tq, tk, tv = (x.to(work.dtype) for x in parts)
                o, n = _forward_plain(tq, tk, tv, add, work.kept(tile), work)
            else:
                o, n = flash(*parts, 0.0, tile.shape == "causal", attn_mask=add, scale=scale)
                empty = _empty(add)
                n = n if empty is None else n.masked_fill(empty, -torch.inf)
            _queries(out, tile).copy_(o)
            _queries(lse, tile).copy_(n)
    return out, lse


def _outputs(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Room for the output, heads inside items so that joining the heads is free, and for the log-sum-exp."""
    batch, heads, queries, _ = q.shape
    out = v.new_empty(batch, queries, heads, v.shape[-1]).transpose(1, 2)
    return out, q.new_empty(batch, heads, queries, dtype=torch.promote_types(q.dtype, torch.float32))


def _tiled_fake(q: Tensor, k: Tensor, v: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return _outputs(q, v)


def _tiled_backward(
    d_out: Tensor, d_lse: Tensor | None, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, first: Tensor,
    stop: Tensor, mask: Tensor | None, table: Tensor | None, bias: Tensor | None, seed: Tensor | None, scale: float,
    dropout: float, plain: bool, needed: list[bool],
) -> tuple[Tensor, ...]:  # fmt: skip
    work = _Work(q, first, stop, mask, table, bias, seed, scale, dropout, plain, k.shape[-2])
    wide = torch.promote_types(q.dtype, torch.float32)
    dq, dk, dv, d_table, d_bias = (x.zero_() for x in _gradients(q, k, v, table, bias, wide, plain))
    # a row without keys has no gradient: with lse 0 its weights are exp(-inf) = 0, not exp(-inf + inf)
    lse = lse.masked_fill(lse == -torch.inf, 0.0)
    d_out = strided(d_out)
    with torch.autocast(q.device.type, enabled=False):
        for tile in work.tiles:
            given = _queries(d_out, tile), None if d_lse is None else _queries(d_lse, tile)
            parts = _queries(q, tile), _keys(k, tile), _keys(v, tile), _queries(out, tile)
            add, n = work.additive(tile), _queries(lse, tile)
            if plain:
                g, tq, tk, tv, o = (x.to(work.dtype) for x in (given[0], *parts))
                tq, tk, tv, ds = _backward_plain(g, given[1], tq, tk, tv, o, n, add, work.kept(tile), work)
                work.give_back(tile, ds, d_table, d_bias)
            else:
                tq, tk, tv = _backward_flash(*given, *parts, n, add, tile, work)
            _queries(dq, tile).copy_(tq)
            _keys(dk, tile).add_(tk)
            _keys(dv, tile).add_(tv)
    return dq, dk.to(k.dtype), dv.to(v.dtype), d_table, d_bias


def _gradients(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor | None, bias: Tensor | None, wide: torch.dtype | None, plain: bool
) -> Iterator[Tensor]:
    """Room for the gradients; those of keys and values are summed over tiles, in at least fp32 where `wide` says so."""
    yield q.new_empty(q.shape[0], q.shape[2], q.shape[1], q.shape[3]).transpose(1, 2)
    for x in (k, v):
        yield x.new_empty(x.shape[0], x.shape[2], x.shape[1], x.shape[3], dtype=wide or x.dtype).transpose(1, 2)
    for given in (table, bias):
        yield q.new_empty(0) if given is None or not plain else given.new_empty(given.shape)


def _tiled_backward_fake(
    d_out: Tensor, d_lse: Tensor | None, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any
) -> Any:
    _, _, _, table, bias, _, _, _, plain, _ = rest
    return tuple(_gradients(q, k, v, table, bias, None, plain))


def _definition(*inputs: Any) -> Result:
    *rest, _ = inputs
    return attend_intervals(*rest)


define_attention(
    "tiled",
    "Tensor q, Tensor k, Tensor v, Tensor first, Tensor stop, Tensor? mask, Tensor? table, Tensor? bias, Tensor? seed, "
    "float scale, float dropout, bool plain",
    learned=("q", "k", "v", "table", "bias"),
    forward=_tiled,
    forward_fake=_tiled_fake,
    backward=_tiled_backward,
    backward_fake=_tiled_backward_fake,
    definition=_definition,
    devices=("cpu", "cuda", "mps", "xpu"),
)
