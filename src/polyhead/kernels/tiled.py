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
from polyhead.kernels.fused import comparable, even, flash, nan_kept, refuses, strided, with_positive_scale
from polyhead.kernels.nan_safe_products import weighted_sum
from polyhead.kernels.operand_checks import check_operand, check_operands
from polyhead.kernels.operator_registration import define_attention
from polyhead.kernels.reference import attend_intervals
from polyhead.kernels.tiles import Tile, plan
from polyhead.linalg.foreach import finite
from polyhead.neighbourhood import broadcasts
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
        seed: Tensor | None, scale: float, dropout: float, plain: bool, keys: int, careful: bool = False,
    ) -> None:  # fmt: skip
        self.first, self.stop, self.mask, self.table, self.bias = first, stop, mask, table, bias
        self.seed, self.scale, self.dropout, self.plain, self.careful = seed, scale, dropout, plain, careful
        self.queries, self.keys, self.heads = q.shape[-2], keys, q.shape[-3]
        # what is added may be beyond a half's range
        self.dtype = torch.promote_types(q.dtype, torch.float32)
        self.device = q.device
        self._last_band: tuple[tuple[int, bytes, bytes], Tensor] | None = None
        self._last_added: tuple[Tensor, Tensor] | None = None
        low, high = (bound.cpu().numpy().clip(0, keys) for bound in (first, stop))
        small = q.shape[1] * q.shape[2] * keys * q.shape[3] < SMALL
        self.tiles = plan(low, high, q.shape[0], whole=not plain, together=small)
        self._low, self._high = low, high

    @property
    def forbids(self) -> bool:
        """Whether a tile holds pairs that are not allowed."""
        return self.mask is not None or any(tile.shape != "full" for tile in self.tiles)

    def additive(self, tile: Tile, hidden: Tensor | None) -> Tensor | None:
        """What is added to the scores of a tile, -inf where something is hidden; None for nothing."""
        add = None
        for part in (self._by_distance(tile), None if self.bias is None else _cut(self.bias, tile)):
            if part is not None:
                add = part.to(self.dtype) if add is None else add + part.to(self.dtype)
        if add is not None:
            # not the sum of both: what is hidden may be NaN
            return add if hidden is None else torch.where(hidden, -torch.inf, add)
        return None if hidden is None else self._added(hidden)

    def _added(self, hidden: Tensor) -> Tensor:
        if self._last_added is None or self._last_added[0] is not hidden:
            added = torch.zeros(hidden.shape, dtype=self.dtype, device=self.device).masked_fill_(hidden, -torch.inf)
            self._last_added = hidden, added
        return self._last_added[1]

    def hidden(self, tile: Tile) -> Tensor | None:
        """Which pairs of a tile are forbidden, (rows or 1, heads or 1, queries, keys); None where none are.

        Of a lower triangle torch's kernel knows this by itself.
        """
        band = self._band(tile) if tile.shape == "ragged" or (self.plain and tile.shape == "causal") else None
        keep = None if self.mask is None else _cut(self.mask, tile)
        if keep is None or keep.all():
            return band
        return ~keep if band is None else band | ~keep

    def _band(self, tile: Tile) -> Tensor:
        """(rows or 1, 1, queries, keys): what the intervals leave out; tiles of one outline that follow each other share it."""
        rows = slice(0, 1) if len(self._low) == 1 else slice(tile.b0, tile.b1)
        low = self._low[rows, tile.q0 : tile.q1] - tile.k0
        high = self._high[rows, tile.q0 : tile.q1] - tile.k0
        known = (tile.k1 - tile.k0, low.tobytes(), high.tobytes())
        if self._last_band is None or self._last_band[0] != known:
            key = torch.arange(tile.k1 - tile.k0, device=self.device)
            begin, end = (torch.from_numpy(x.copy()).to(self.device)[:, None, :, None] for x in (low, high))
            self._last_band = known, (key < begin) | (key >= end)
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


def _check(
    q: Tensor, k: Tensor, v: Tensor, first: Tensor, stop: Tensor, added: tuple[Tensor | None, ...], plain: bool
) -> None:  # fmt: skip
    """Raise unless tiles lie within the tensors: torch's fused kernel believes what it is told."""
    check_operands(q, k, v)
    (batch, heads, queries, dim), keys = q.shape, k.shape[2]
    if not plain and v.shape[1:] != (k.shape[1], keys, dim):
        raise ValueError(f"v must have the shape of k, {tuple(k.shape)}, for the fused kernel, got {tuple(v.shape)}")
    for name, x in (("first", first), ("stop", stop)):
        if x.shape not in ((1, queries), (batch, queries)) or x.is_floating_point():
            raise ValueError(
                f"{name} must be integers (1 or {batch}, {queries}), got {x.dtype} of shape {tuple(x.shape)}"
            )
    pairs = (batch, heads, queries, keys)
    for more in added:
        if more is not None and (more.dim() != 4 or not broadcasts(tuple(more.shape), pairs)):
            raise ValueError(f"mask and bias must broadcast to {pairs}, got {tuple(more.shape)}")


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


def _plain(q: Tensor, k: Tensor, add: Tensor | None, hidden: Tensor | None, scale: float) -> Tensor:
    s = (_grouped(q * scale, k.shape[1]) @ k.transpose(-2, -1)).view(*q.shape[:-1], k.shape[-2])
    s = s if add is None else s.add_(add)
    return s if hidden is None else s.masked_fill_(hidden, -torch.inf)


def _over_keys(p: Tensor, x: Tensor, hidden: Tensor | None) -> Tensor:
    """(batch, heads, queries, keys) times (batch, own, keys, n); `hidden`, where given, is left out whatever stands there."""
    own = x.shape[1]
    each = _grouped(p, own)
    y = each @ x if hidden is None else weighted_sum(each, x, _grouped(hidden.expand_as(p), own))
    return y.view(*p.shape[:-1], x.shape[-1])


def _over_queries(p: Tensor, x: Tensor, hidden: Tensor | None, own: int) -> Tensor:
    """(batch, heads, queries, keys) turned times (batch, heads, queries, n), summed over each group of heads."""
    each, x = _grouped(p, own).mT, _grouped(x, own)
    return each @ x if hidden is None else weighted_sum(each, x, _grouped(hidden.expand_as(p), own).mT)


def _exp_(s: Tensor) -> Tensor:
    """exp in place, zero where it would be less than the smallest normal number: torch takes ten times as long for such."""
    return F.threshold(s, math.log(torch.finfo(s.dtype).tiny), -torch.inf, inplace=True).exp_()


def _forward_plain(
    q: Tensor, k: Tensor, v: Tensor, add: Tensor | None, hidden: Tensor | None, kept: Tensor | None, work: _Work
) -> tuple[Tensor, Tensor]:
    s = _plain(q, k, add, hidden, work.scale)
    top = s.amax(-1, keepdim=True)
    top.masked_fill_(top == -torch.inf, 0.0)
    p = _exp_(s.sub_(top))
    total = p.sum(-1, keepdim=True)
    lse = (total.log() + top)[..., 0]
    p.div_(total.masked_fill_(total == 0, 1.0))
    if hidden is not None:
        p.masked_fill_(hidden, 0.0)
    if kept is not None:
        p = p * kept / (1 - work.dropout)
    return _over_keys(p, v, hidden), lse


def _backward_plain(
    d_out: Tensor, d_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, add: Tensor | None,
    hidden: Tensor | None, kept: Tensor | None, work: _Work,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of q, k, v and of the scores."""
    p = _exp_(_plain(q, k, add, hidden, work.scale).sub_(lse[..., None]))
    dp = (_grouped(d_out, v.shape[1]) @ v.transpose(-2, -1)).view_as(p)
    if hidden is not None:
        p.masked_fill_(hidden, 0.0)
    dropped = p
    if kept is not None:
        thinned = kept.to(p.dtype) / (1 - work.dropout)
        dropped, dp = p * thinned, dp * thinned
    dv = _over_queries(dropped, d_out, hidden, v.shape[1])
    delta = (d_out * out).sum(-1, keepdim=True)
    ds = p * dp.sub_(delta if d_lse is None else delta - d_lse[..., None])
    if hidden is not None:
        ds.masked_fill_(hidden, 0.0)
    dq = _over_keys(ds, k, hidden) * work.scale
    return dq, _over_queries(ds, q, hidden, k.shape[1]) * work.scale, dv, ds


def _forward_flash(
    q: Tensor, k: Tensor, v: Tensor, add: Tensor | None, tile: Tile, work: _Work
) -> tuple[Tensor, Tensor]:
    mask = nan_kept(q, k) if add is None else add
    out, lse = flash(q, k, v, 0.0, tile.shape == "causal", attn_mask=mask, scale=work.scale)
    empty = _empty(add)
    return out, lse if empty is None else lse.masked_fill(empty, -torch.inf)


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
    _check(q, k, v, first, stop, (mask, bias), plain)
    options = first, stop, mask, table, bias, seed, scale, dropout
    work = _Work(q, *options, plain, k.shape[-2])
    out, lse = _outputs(q, v)
    _forward(work, q, k, v, out, lse)
    if work.forbids and not finite([out.transpose(1, 2)]):
        # zero times NaN is NaN: of what is forbidden too, unless it is left out by hand
        _forward(_Work(q, *options, True, k.shape[-2], careful=True), q, k, v, out, lse)
    return out, lse


def _forward(work: _Work, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> None:
    out.zero_()
    lse.fill_(-torch.inf)
    with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
        for tile in work.tiles:
            parts = _queries(q, tile), _keys(k, tile), _keys(v, tile)
            hidden = work.hidden(tile)
            add = work.additive(tile, hidden)
            if work.plain:
                tq, tk, tv = (x.to(work.dtype) for x in parts)
                o, n = _forward_plain(tq, tk, tv, add, hidden if work.careful else None, work.kept(tile), work)
            else:
                o, n = _forward_flash(*parts, add, tile, work)
            _queries(out, tile).copy_(o)
            _queries(lse, tile).copy_(n)


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
    _check(q, k, v, first, stop, (mask, bias), plain)
    batch, heads, queries, _ = q.shape
    check_operand("d_out", d_out, (batch, heads, queries, v.shape[3]), v)
    check_operand("out", out, (batch, heads, queries, v.shape[3]), v)
    check_operand("lse", lse, (batch, heads, queries), lse)
    check_operand("d_lse", d_lse, (batch, heads, queries), lse)
    options = first, stop, mask, table, bias, seed, scale, dropout
    work = _Work(q, *options, plain, k.shape[-2])
    wide = torch.promote_types(q.dtype, torch.float32)
    dq, dk, dv, d_table, d_bias = gradients = tuple(_gradients(q, k, v, table, bias, wide, plain))
    # a row without keys has no gradient: with lse 0 its weights are exp(-inf) = 0, not exp(-inf + inf)
    inputs = strided(d_out), d_lse, q, k, v, out, lse.masked_fill(lse == -torch.inf, 0.0)
    _backward_tiles(work, inputs, gradients)
    # whatever is not finite in a tile makes the gradients of some of its queries or keys so
    if work.forbids and not all(finite([x.transpose(1, 2)]) for x in (dq, dk)):
        _backward_tiles(_Work(q, *options, True, k.shape[-2], careful=True), inputs, gradients)
    return dq, dk.to(k.dtype), dv.to(v.dtype), d_table, d_bias


def _backward_tiles(work: _Work, inputs: tuple[Any, ...], gradients: tuple[Tensor, ...]) -> None:
    d_out, d_lse, q, k, v, out, lse = inputs
    dq, dk, dv, d_table, d_bias = (x.zero_() for x in gradients)
    with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
        for tile in work.tiles:
            given = _queries(d_out, tile), None if d_lse is None else _queries(d_lse, tile)
            parts = _queries(q, tile), _keys(k, tile), _keys(v, tile), _queries(out, tile)
            hidden, n = work.hidden(tile), _queries(lse, tile)
            add = work.additive(tile, hidden)
            if work.plain:
                g, tq, tk, tv, o = (x.to(work.dtype) for x in (given[0], *parts))
                hidden = hidden if work.careful else None
                tq, tk, tv, ds = _backward_plain(g, given[1], tq, tk, tv, o, n, add, hidden, work.kept(tile), work)
                work.give_back(tile, ds, d_table, d_bias)
            else:
                tq, tk, tv = _backward_flash(*given, *parts, n, add, tile, work)
            _queries(dq, tile).copy_(tq)
            _keys(dk, tile).add_(tk)
            _keys(dv, tile).add_(tv)


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
