"""The data of a page over an image: the image itself, the positions of tokens on it, and the weights between them."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from polyhead.heads import Heads
from polyhead.heads.grid_view import GridArgument, TokenGrid, fits_keys, read_grid_argument
from polyhead.inspection.analysis.image_stats import ImageStats, ImageStatsAccumulator, iterate_query_blocks
from polyhead.inspection.measured_heads import MeasuredHeads, MeasuredLayer, to_json_numbers
from polyhead.inspection.view_properties import find_token_grid_of_view, is_on_graph
from polyhead.models import Tokens
from polyhead.neighbourhood import Lattice
from polyhead.pixels import encode_png, shrink_image, to_rgb_pixels

# Bytes that the weights of all heads may take together, before compression: 144 heads over 14 x 14 patches fit.
_MAX_WEIGHTS_BYTES = 6_000_000


class ImageLayout(NamedTuple):
    """The grid positions of a layer's tokens. Blocks of `block` x `block` patches are displayed as one."""

    points: TokenGrid
    block: int = 1
    # the text of the queries, if they are words that attend to patches
    words: Tokens | None = None

    def with_words(self, words: Tokens) -> ImageLayout:
        """The layout in which all queries are words."""
        lattice = self.points.lattice
        no_outputs = lattice._replace(outputs=(0,) * len(lattice.outputs))
        return self._replace(points=self.points._replace(lattice=no_outputs, queries=len(words)), words=words)

    @property
    def block_lattice(self) -> Lattice:
        """The lattice of blocks."""
        sizes, outputs, stride, _ = self.points.lattice
        fewer = lambda each: tuple(-(-n // self.block) for n in each)
        return Lattice(fewer(sizes), fewer(outputs), stride)

    @property
    def queries(self) -> int:
        return self.points.queries + math.prod(self.block_lattice.outputs)

    @property
    def keys(self) -> int:
        return self.points.keys + math.prod(self.block_lattice.sizes)

    def token_names(self) -> tuple[Tokens, Tokens]:
        """The names of queries and keys; one object if they are the same tokens."""
        if self.words is not None:
            return self.words, _name_special_tokens_and_patches(self.points.keys, self.block_lattice.sizes)
        rows = _name_special_tokens_and_patches(self.points.queries, self.block_lattice.outputs)
        same = self.queries == self.keys and self.points.queries == self.points.keys
        return rows, rows if same else _name_special_tokens_and_patches(self.points.keys, self.block_lattice.sizes)

    def to_json(self) -> dict[str, Any]:
        """The layout as the page reads it."""
        sizes, outputs, stride, _ = self.block_lattice
        special = [self.points.queries, self.points.keys]
        return {"sizes": sizes, "outputs": outputs, "stride": stride, "special": special, "block": self.block}

    def find_initial_query(self, at: int | Sequence[int] | None) -> int:
        """The number of the query to select first, among those that are displayed."""
        has_patches = self.queries > self.points.queries
        number = self.points.query_index(at) if at is not None or has_patches else 0
        return int(_block_of_each_token(self.points.queries, self.points.lattice.outputs, self.block)[number])


def find_image_layout(view: Heads, grid: GridArgument | None) -> ImageLayout | None:
    """The layout of a layer on an image; None for a layer that is not over patches."""
    call = view.part.call
    if is_on_graph(view) or (call.over.lattice is None and grid is None):
        return None
    if call.over.lattice is not None:
        over_patches = len(call.over.lattice.sizes) == 2
    else:
        assert grid is not None
        sizes, _ = read_grid_argument(grid)
        over_patches = len(sizes) == 2 and fits_keys(grid, call.sizes.keys)
    if not over_patches:
        return None
    if not shows_all_queries_and_keys(view):
        raise ValueError(
            f"heads must show all {call.sizes.queries} queries and {call.sizes.keys} keys to be drawn on an image, got a selection of "
            f"{' x '.join(map(str, view.shape[-2:]))}; pass the view that it was selected from"
        )
    return ImageLayout(find_token_grid_of_view(view, None if call.over.lattice is not None else grid))


def shows_all_queries_and_keys(view: Heads) -> bool:
    """Whether a view shows all queries and keys of an attention that is not on a graph."""
    sizes = view.part.call.sizes
    return not is_on_graph(view) and (sizes.queries, sizes.keys) == tuple(view.shape[-2:])


def find_layouts_of_layers(heads: MeasuredHeads, grid: GridArgument | None) -> dict[str, ImageLayout]:
    """The layouts of the layers that are over patches, with blocks of one size."""
    found = {name: find_image_layout(view, grid) for name, view in heads.items()}
    layouts = {name: layout for name, layout in found.items() if layout is not None}
    return coarsen_to_fit_page(layouts, {name: heads[name].shape[-3] for name in layouts})


def coarsen_to_fit_page(layouts: Mapping[str, ImageLayout], heads: Mapping[str, int]) -> dict[str, ImageLayout]:
    """The layouts with the smallest blocks for which the weights of all heads fit on a page."""
    block = 1
    while True:
        coarser = {name: layout._replace(block=block) for name, layout in layouts.items()}
        size = sum(heads[name] * layout.queries * layout.keys for name, layout in coarser.items())
        if size <= _MAX_WEIGHTS_BYTES or block >= 64:
            return coarser
        block += 1


def encode_image_as_data_uri(image: Any) -> dict[str, Any]:
    """An image as a PNG in a data URI, and its size."""
    small = shrink_image(to_rgb_pixels(image))
    height, width, _ = small.shape
    return {
        "src": f"data:image/png;base64,{base64.b64encode(encode_png(small)).decode()}",
        "width": width,
        "height": height,
    }


def make_blank_image(layer: ImageLayout) -> dict[str, Any]:
    """A white image with the proportions of the grid, for layers without an image."""
    height, width = layer.points.lattice.sizes
    size = max(1, 640 // max(height, width))
    return {**encode_image_as_data_uri(np.full((size * height, size * width), 255, np.uint8)), "blank": True}


class ImageMeasurement(NamedTuple):
    """What one pass over the weights of a layer finds: its statistics, and the weights between displayed tokens."""

    stats: ImageStats
    weights: Float[Tensor, "heads queries keys"]


def measure_layer_on_image(layer: MeasuredLayer, layout: ImageLayout) -> ImageMeasurement:
    """The statistics and weights of a layer on an image, computed once."""
    return layer.compute_once(("image", layout), lambda: _measure_view_on_image(layer.view, layout))


@torch.no_grad()
def _measure_view_on_image(view: Heads, layout: ImageLayout) -> ImageMeasurement:
    """The weight of a block is the sum over its keys, averaged over its queries."""
    heads = view.shape[-3]
    sums = ImageStatsAccumulator(heads, layout.points, view.device)
    total = torch.zeros(heads, layout.queries, layout.keys)
    lattice = layout.points.lattice
    row = _block_of_each_token(layout.points.queries, lattice.outputs, layout.block)
    column = _block_of_each_token(layout.points.keys, lattice.sizes, layout.block)
    for queries, weights in iterate_query_blocks(view):
        sums.add(queries, weights)
        if layout.block > 1:
            weights = weights.new_zeros(*weights.shape[:-1], layout.keys).index_add_(-1, column, weights)
        total.index_add_(1, row[queries], weights)
    total /= row.bincount(minlength=layout.queries).clamp(min=1)[:, None]
    return ImageMeasurement(sums.compute_stats(), total)


def quantize_weights(weights: Float[Tensor, "heads queries keys"], all_heads: int) -> tuple[Any, str]:
    """Weights in two bytes each, or in one if all heads together would take too many.

    One byte holds 255 times the square root: the error is at most 0.004.
    """
    _, queries, keys = weights.shape
    if 4 * all_heads * queries * keys <= _MAX_WEIGHTS_BYTES:
        return weights, "f2"
    return (255 * weights.clamp(0, 1).sqrt()).round(), "u1"


def mean_norm_per_block(norms: Float[Tensor, "heads keys"], layer: ImageLayout) -> Float[Tensor, "heads blocks"]:
    """The mean contribution norm over the keys of each block."""
    column = _block_of_each_token(layer.points.keys, layer.points.lattice.sizes, layer.block)
    total = norms.new_zeros(len(norms), layer.keys).index_add_(1, column, norms)
    return total / column.bincount(minlength=layer.keys).clamp(min=1)


def image_stats_to_json(found: ImageStats) -> dict[str, Any]:
    """The statistics of each head as the page reads them."""
    entropy, distance, special, itself, offset_share = (to_json_numbers(x) for x in found[:5])
    return {
        "entropy": entropy, "distance": distance, "offset_share": offset_share, "offset": found.offset.tolist(),
        "weight": {"self": itself, "special": special}, "share": {},
    }  # fmt: skip


def _block_of_each_token(special: int, sizes: tuple[int, ...], block: int) -> Int[Tensor, " items"]:
    """Index of the displayed block that contains each token; special tokens are displayed one by one."""
    height, width = sizes
    across = -(-width // block)
    row, column = torch.arange(height)[:, None] // block, torch.arange(width) // block
    return torch.cat((torch.arange(special), special + (row * across + column).flatten()))


def _name_special_tokens_and_patches(special: int, sizes: tuple[int, ...]) -> Tokens:
    """Special tokens by their numbers, patches by row and column."""
    patches = [f"{row}, {column}" for row in range(sizes[0]) for column in range(sizes[1])]
    tokens = ["[CLS]"] if special == 1 else [f"token {number}" for number in range(special)]
    return Tokens.from_pieces((*tokens, *patches), (*(None for _ in tokens), *range(len(patches))), tuple(patches))
