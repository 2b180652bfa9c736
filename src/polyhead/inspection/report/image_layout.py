"""The data of a page over an image: the picture itself, where items stand on it, and the weights between them."""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from polyhead.heads import Heads
from polyhead.heads.grid_view import Points, points_of
from polyhead.inspection.analysis.image_stats import blocks, looking
from polyhead.inspection.roles.word_attention import Text
from polyhead.neighbourhood import Lattice
from polyhead.plots import pixels, png, shrunk

# What the weights of all heads may take together, in bytes before compression: 144 heads over 14 x 14 patches fit.
_WEIGHTS = 6_000_000


class ImageLayout(NamedTuple):
    """Where the items of a layer stand, and how many points along each axis are shown as one."""

    points: Points
    block: int = 1

    @property
    def shown(self) -> Lattice:
        """The lattice of what is shown."""
        sizes, outputs, stride, _ = self.points.lattice
        fewer = lambda each: tuple(-(-n // self.block) for n in each)
        return Lattice(fewer(sizes), fewer(outputs), stride)

    @property
    def queries(self) -> int:
        return self.points.queries + math.prod(self.shown.outputs)

    @property
    def keys(self) -> int:
        return self.points.keys + math.prod(self.shown.sizes)

    def texts(self) -> tuple[Text, Text]:
        """The items' names; one text where queries and keys are the same."""
        rows = _names(self.points.queries, self.shown.outputs)
        same = self.queries == self.keys and self.points.queries == self.points.keys
        return rows, rows if same else _names(self.points.keys, self.shown.sizes)

    def record(self) -> dict[str, Any]:
        """As the page knows it."""
        sizes, outputs, stride, _ = self.shown
        special = [self.points.queries, self.points.keys]
        return {"sizes": sizes, "outputs": outputs, "stride": stride, "special": special, "block": self.block}

    def first(self, at: int | Sequence[int] | None) -> int:
        """The number of the query that is shown first, among those that are shown."""
        stands = self.queries > self.points.queries
        number = self.points.number(at) if at is not None or stands else 0
        return int(_shown_as(self.points.queries, self.points.lattice.outputs, self.block)[number])


def imaged(view: Heads, grid: Sequence[int] | None) -> ImageLayout | None:
    """Where a layer's items stand on an image; None for a layer that is not about it."""
    part = view._part
    if len(part.axes) < 3 or (part.call.over.grid is None and grid is None):
        return None
    sizes = part.call.over.grid.sizes if part.call.over.grid is not None else tuple(grid or ())
    if len(sizes) != 2 or math.prod(sizes) > part.call.sizes.keys:
        return None
    if not entire(view):
        raise ValueError("heads: a view on some queries or keys cannot be laid over an image; pass the whole view")
    return ImageLayout(points_of(part, None if part.call.over.grid is not None else grid))


def entire(view: Heads) -> bool:
    """Whether a view looks at all queries and keys of its attention, which is on no graph."""
    part = view._part
    return len(part.axes) == 3 and (part.call.sizes.queries, part.call.sizes.keys) == tuple(view.shape[-2:])


def coarse(layers: Sequence[tuple[int, ImageLayout]]) -> int:
    """How many points along each axis are to be one, so that the weights of all heads fit on a page."""
    block = 1
    while True:
        shown = [(heads, one._replace(block=block)) for heads, one in layers]
        if sum(heads * one.queries * one.keys for heads, one in shown) <= _WEIGHTS or block >= 64:
            return block
        block += 1


def embedded(image: Any) -> dict[str, Any]:
    """An image as a page holds it: a PNG, as a data URI."""
    shown = shrunk(pixels(image))
    height, width, _ = shown.shape
    return {"src": f"data:image/png;base64,{base64.b64encode(png(shown)).decode()}", "width": width, "height": height}


def blank(layer: ImageLayout) -> dict[str, Any]:
    """In place of an image that was not given: an empty sheet of the grid's form."""
    height, width = layer.points.lattice.sizes
    size = max(1, 640 // max(height, width))
    return {**embedded(np.full((size * height, size * width), 255, np.uint8)), "blank": True}


def weights(view: Heads, layer: ImageLayout, all_heads: int) -> tuple[Any, str]:
    """The weights between what is shown, in two bytes each or in one.

    Of points that are shown as one, they are means over queries of sums over keys. A byte is 255 times the square root: the error is
    at most 0.004.
    """
    heads = view.shape[-3]
    result = torch.zeros(heads, layer.queries, layer.keys)
    lattice = layer.points.lattice
    row = _shown_as(layer.points.queries, lattice.outputs, layer.block)
    column = _shown_as(layer.points.keys, lattice.sizes, layer.block)
    for chosen, part in blocks(view):
        among_keys = (
            part if layer.block == 1 else part.new_zeros(*part.shape[:-1], layer.keys).index_add_(-1, column, part)
        )
        result.index_add_(1, row[chosen], among_keys)
    result /= row.bincount(minlength=layer.queries).clamp(min=1)[:, None]
    if 4 * all_heads * layer.queries * layer.keys <= _WEIGHTS:
        return result, "f2"
    return (255 * result.clamp(0, 1).sqrt()).round(), "u1"


def moved(numbers: Float[Tensor, "heads keys"], layer: ImageLayout) -> Float[Tensor, "heads shown"]:
    """What a weight of 1 on a key moves; of keys that are shown as one, the mean."""
    column = _shown_as(layer.points.keys, layer.points.lattice.sizes, layer.block)
    total = numbers.new_zeros(len(numbers), layer.keys).index_add_(1, column, numbers)
    return total / column.bincount(minlength=layer.keys).clamp(min=1)


def stats(view: Heads, layer: ImageLayout) -> dict[str, Any]:
    """The numbers of each head."""
    entropy, distance, special, itself, fixed, offset = looking(view, layer.points)
    plain = lambda x: [round(number, 5) if math.isfinite(number) else None for number in x.tolist()]
    return {
        "entropy": plain(entropy), "distance": plain(distance), "fixed": plain(fixed), "offset": offset.tolist(),
        "weight": {"self": plain(itself), "special": plain(special)}, "share": {},
    }  # fmt: skip


def _shown_as(special: int, sizes: tuple[int, ...], block: int) -> Int[Tensor, " items"]:
    """As which of what is shown an item is shown."""
    height, width = sizes
    across = -(-width // block)
    row, column = torch.arange(height)[:, None] // block, torch.arange(width) // block
    return torch.cat((torch.arange(special), special + (row * across + column).flatten()))


def _names(special: int, sizes: tuple[int, ...]) -> Text:
    """Special tokens by their numbers, patches by row and column."""
    patches = [f"{row}, {column}" for row in range(sizes[0]) for column in range(sizes[1])]
    tokens = ["[CLS]"] if special == 1 else [f"token {number}" for number in range(special)]
    return Text((*tokens, *patches), (*(None for _ in tokens), *range(len(patches))), tuple(patches))
