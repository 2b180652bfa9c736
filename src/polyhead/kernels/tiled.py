"""Attention tile by tile: tiles that the neighbourhood excludes are never computed, forward or backward.

A tile is computed by torch's fused attention on the CPU, or in plain torch where that does not apply (dropout, a learned
bias, another device). One custom operator hides the data-dependent plan, so that `torch.compile` sees one call.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from polyhead._torch import to_at_least_fp32, without_autocast
from polyhead.kernels.call import (
    Call,
    OutputAndLse,
    empty_item_major,
    flatten_batch,
    key_intervals,
)
from polyhead.kernels.fused import (
    can_pad_widths,
    dot_product_refuses,
    match_widths_and_heads,
    with_positive_scale,
    with_unit_stride,
)
from polyhead.kernels.operand_checks import check_operand, check_qkv_shapes
from polyhead.kernels.operator_registration import OperatorPass, register_attention_operator
from polyhead.kernels.reference import attend_intervals
from polyhead.kernels.tile_attention import backward_flash, backward_plain, forward_flash, forward_plain, merge_rows_
from polyhead.kernels.tile_plan import Tile
from polyhead.kernels.tile_problem import OperatorOptions, TiledProblem, tiles_without_reading
from polyhead.linalg.foreach import all_finite
from polyhead.neighbourhood import Dense, broadcasts_to
from polyhead.neighbourhood.shapes import flatten_batch_unless_shared
from polyhead.score import Dot


class Tiled:
    """Any neighbourhood, bias and dropout, with dot products."""

    name = "tiled"

    def refuses(self, call: Call) -> str | None:
        return dot_product_refuses(call)

    def __call__(self, call: Call) -> OutputAndLse:
        out, lse = torch.ops.polyhead.tiled(*self.operator_arguments(call))
        if call.q.dim() != 4:
            out, lse = out.reshape(*call.q.shape[:-1], out.shape[-1]), lse.reshape(call.q.shape[:-1])
        width = call.v.shape[-1]
        return (out if out.shape[-1] == width else out[..., :width]), lse

    def operator_arguments(self, call: Call) -> tuple[Any, ...]:
        """A call as the arguments of `polyhead::tiled`."""
        batch, sizes = call.sizes.batch, call.sizes
        device, width, dim = call.q.device, call.v.shape[-1], call.q.shape[-1]
        assert isinstance(call.score, Dot)
        # a mask says all; on the CPU the intervals say which tiles to skip
        bounded = call.q.is_cpu or call.over.exact
        first, stop = key_intervals(call if bounded else call._replace(over=Dense()))
        mask = None if call.over.exact else flatten_batch_unless_shared(call.over.mask(sizes, device), batch, 3)
        table, bias = call.relative_bias, call.bias
        learned = any(x is not None and x.requires_grad for x in (table, bias)) and torch.is_grad_enabled()
        if learned:
            # their gradients are summed over queries, rows and tiles
            table, bias = (None if x is None else to_at_least_fp32(x) for x in (table, bias))
        bias = None if bias is None else flatten_batch_unless_shared(bias, batch, 3)
        plain = learned or call.dropout > 0 or device.type != "cpu" or not can_pad_widths(dim, width)
        q, k, v, scale = call.q, call.k, call.v, call.score.factor(dim)
        if not plain:
            q, scale = with_positive_scale(q, scale)
            q, k, v = match_widths_and_heads(q, k, v)
        q, k, v = flatten_batch(q), flatten_batch(k), flatten_batch(v)
        seed, indices = call.seed_and_heads, call.item_indices
        tiles = tiles_without_reading(call)
        return q, k, v, first, stop, mask, table, bias, seed, *indices, scale, call.dropout, plain, tiles


def _check_inputs(q: Tensor, k: Tensor, v: Tensor, options: OperatorOptions) -> None:
    """Raise unless all tiles lie within the tensors: torch's fused kernel does not check."""
    check_qkv_shapes(q, k, v)
    (batch, heads, queries, dim), keys = q.shape, k.shape[2]
    if not options.plain and v.shape[1:] != (k.shape[1], keys, dim):
        raise ValueError(f"v must have the shape of k, {tuple(k.shape)}, for the fused kernel, got {tuple(v.shape)}")
    for name, x in (("first", options.first), ("stop", options.stop)):
        if x.shape not in ((1, queries), (batch, queries)) or x.is_floating_point():
            raise ValueError(
                f"{name} must be integers (1 or {batch}, {queries}), got {x.dtype} of shape {tuple(x.shape)}"
            )
    for name, at, items in (("query_index", options.query_index, queries), ("key_index", options.key_index, keys)):
        if at is not None and (tuple(at.shape) != (items,) or at.is_floating_point()):
            raise ValueError(f"{name} must be integers ({items},), got {at.dtype} of shape {tuple(at.shape)}")
    pairs = (batch, heads, queries, keys)
    for added in (options.mask, options.bias):
        if added is not None and (added.dim() != 4 or not broadcasts_to(tuple(added.shape), pairs)):
            raise ValueError(f"mask and bias must broadcast to {pairs}, got {tuple(added.shape)}")


def _tile_queries(x: Tensor, tile: Tile) -> Tensor:
    return x[tile.b0 : tile.b1, :, tile.q0 : tile.q1]


def _tile_keys(x: Tensor, tile: Tile) -> Tensor:
    return x[tile.b0 : tile.b1, :, tile.k0 : tile.k1]


def _tiled_forward(q: Tensor, k: Tensor, v: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    options = OperatorOptions(*args)
    _check_inputs(q, k, v, options)
    work = TiledProblem(q, k.shape[-2], options)
    out, lse = _empty_outputs(q, v)
    _forward_tiles(work, q, k, v, out, lse)
    if q.is_cpu and work.has_forbidden_pairs and not all_finite([out.transpose(1, 2)]):
        # zero times NaN is NaN: forbidden pairs must be left out explicitly
        _forward_tiles(TiledProblem(q, k.shape[-2], options, leave_out_hidden=True), q, k, v, out, lse)
    return out, lse


def _forward_tiles(work: TiledProblem, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> None:
    out.zero_()
    lse.fill_(-torch.inf)
    with torch.no_grad(), without_autocast(q.device):
        for tiles in _tiles_by_rows(work.tiles):
            rows, rows_lse = _tile_queries(out, tiles[0]), _tile_queries(lse, tiles[0])
            first_out, first_lse = _forward_tile(work, tiles[0], q, k, v)
            # tiles that share queries are merged in at least fp32
            total = rows.copy_(first_out) if len(tiles) == 1 or out.dtype == work.dtype else first_out.to(work.dtype)
            rows_lse.copy_(first_lse)
            del first_out
            for tile in tiles[1:]:
                merge_rows_(total, rows_lse, *_forward_tile(work, tile, q, k, v))
            if total is not rows:
                rows.copy_(total)


def _tiles_by_rows(tiles: list[Tile]) -> Iterator[list[Tile]]:
    """Tiles that share queries, together."""
    return (list(group) for _, group in groupby(tiles, key=lambda tile: tile.rows))


def _forward_tile(work: TiledProblem, tile: Tile, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    parts = _tile_queries(q, tile), _tile_keys(k, tile), _tile_keys(v, tile)
    hidden = work.forbidden_pairs(tile)
    add = work.additive_mask(tile, hidden)
    if not work.plain:
        return forward_flash(*parts, add, shape=tile.shape, scale=work.scale)
    tq, tk, tv = (x.to(work.dtype) for x in parts)
    hidden = hidden if work.leave_out_hidden else None
    keep = work.dropout_keep_mask(tile)
    return forward_plain(tq, tk, tv, add, hidden, keep, scale=work.scale, dropout=work.dropout)


def _empty_outputs(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The output and the log-sum-exp, uninitialised."""
    batch, heads, queries, _ = q.shape
    out = v.new_empty(batch, queries, heads, v.shape[-1]).transpose(1, 2)
    return out, q.new_empty(batch, heads, queries, dtype=torch.promote_types(q.dtype, torch.float32))


def _tiled_forward_fake(q: Tensor, k: Tensor, v: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return _empty_outputs(q, v)


def _tiled_backward(
    d_out: Tensor, d_lse: Tensor | None, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, *args: Any
) -> tuple[Tensor, ...]:
    *given, _ = args
    options = OperatorOptions(*given)
    _check_inputs(q, k, v, options)
    batch, heads, queries, _ = q.shape
    check_operand("d_out", d_out, (batch, heads, queries, v.shape[3]), v)
    check_operand("out", out, (batch, heads, queries, v.shape[3]), v)
    check_operand("lse", lse, (batch, heads, queries), lse)
    check_operand("d_lse", d_lse, (batch, heads, queries), lse)
    compute_dtype = torch.promote_types(q.dtype, torch.float32)
    dq, dk, dv, d_table, d_bias = gradients = tuple(_empty_gradients(q, k, v, options, compute_dtype))
    # a row without keys has no gradient: with lse 0 its weights are exp(-inf) = 0, not exp(-inf + inf)
    inputs = with_unit_stride(d_out), d_lse, q, k, v, out, lse.masked_fill(lse == -torch.inf, 0.0)
    work = TiledProblem(q, k.shape[-2], options)
    _backward_tiles(work, inputs, gradients)
    # anything non-finite in a tile makes the gradients of some of its queries or keys non-finite
    if q.is_cpu and work.has_forbidden_pairs and not all(all_finite([x.transpose(1, 2)]) for x in (dq, dk)):
        _backward_tiles(TiledProblem(q, k.shape[-2], options, leave_out_hidden=True), inputs, gradients)
    return dq, dk.to(k.dtype), dv.to(v.dtype), d_table, d_bias


def _backward_tiles(work: TiledProblem, inputs: tuple[Any, ...], gradients: tuple[Tensor, ...]) -> None:
    dq, dk, dv, d_table, d_bias = (x.zero_() for x in gradients)
    with torch.no_grad(), without_autocast(dq.device):
        for tiles in _tiles_by_rows(work.tiles):
            rows = total = _tile_queries(dq, tiles[0])
            if len(tiles) > 1 and dq.dtype != work.dtype:
                total = torch.zeros_like(rows, dtype=work.dtype)
            for tile in tiles:
                tq, tk, tv, ds = _backward_tile(work, tile, inputs)
                total.add_(tq)
                _tile_keys(dk, tile).add_(tk)
                _tile_keys(dv, tile).add_(tv)
                if ds is not None:
                    work.add_bias_gradients(tile, ds, d_table, d_bias)
            if total is not rows:
                rows.copy_(total)


def _backward_tile(
    work: TiledProblem, tile: Tile, inputs: tuple[Any, ...]
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The gradients of q, k, v and, in plain torch, of the scores of a tile."""
    d_out, d_lse, q, k, v, out, lse = inputs
    t_d_out, t_d_lse = _tile_queries(d_out, tile), None if d_lse is None else _tile_queries(d_lse, tile)
    parts = _tile_queries(q, tile), _tile_keys(k, tile), _tile_keys(v, tile), _tile_queries(out, tile)
    hidden, t_lse = work.forbidden_pairs(tile), _tile_queries(lse, tile)
    add = work.additive_mask(tile, hidden)
    if not work.plain:
        return *backward_flash(t_d_out, t_d_lse, *parts, t_lse, add, shape=tile.shape, scale=work.scale), None
    hidden, keep = hidden if work.leave_out_hidden else None, work.dropout_keep_mask(tile)
    g, tq, tk, tv, o = (x.to(work.dtype) for x in (t_d_out, *parts))
    return backward_plain(g, t_d_lse, tq, tk, tv, o, t_lse, add, hidden, keep, scale=work.scale, dropout=work.dropout)


def _empty_gradients(
    q: Tensor, k: Tensor, v: Tensor, options: OperatorOptions, compute_dtype: torch.dtype | None
) -> Iterator[Tensor]:
    """The gradients, uninitialised. Those of keys and values are summed over tiles, in dtype `compute_dtype` if given."""
    yield empty_item_major(q)
    for x in (k, v):
        yield x.new_empty(x.shape[0], x.shape[2], x.shape[1], x.shape[3], dtype=compute_dtype or x.dtype).transpose(
            1, 2
        )
    for learned in (options.table, options.bias):
        yield q.new_empty(0) if learned is None or not options.plain else learned.new_empty(learned.shape)


def _tiled_backward_fake(
    d_out: Tensor, d_lse: Tensor | None, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, *args: Any
) -> Any:
    *given, _ = args
    return tuple(_empty_gradients(q, k, v, OperatorOptions(*given), None))


def _attend_by_reference(*inputs: Any) -> OutputAndLse:
    *rest, _, _ = inputs
    return attend_intervals(*rest)


register_attention_operator(
    "tiled",
    "Tensor q, Tensor k, Tensor v, Tensor first, Tensor stop, Tensor? mask, Tensor? table, Tensor? bias, Tensor? seed, "
    "Tensor? query_index, Tensor? key_index, float scale, float dropout, bool plain, int[] tiles",
    learned=("q", "k", "v", "table", "bias"),
    forward=OperatorPass(_tiled_forward, _tiled_forward_fake),
    backward=OperatorPass(_tiled_backward, _tiled_backward_fake),
    definition=_attend_by_reference,
    devices=("cpu", "cuda", "mps", "xpu"),
)
