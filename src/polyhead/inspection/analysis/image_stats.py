"""Statistics of heads on an image: attention distance, weight on special tokens, and the most frequent offset."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from polyhead.heads import Heads
from polyhead.heads.grid_view import TokenGrid

# Numbers in one block of weights.
_MAX_BLOCK_WEIGHTS = 1 << 22


class ImageStats(NamedTuple):
    """Means over the patches of an image, one number per head; NaN if no patch counts.

    Patches without a key, such as those of a convolution beyond the border, do not count; for `distance` and `offset_share`, neither do
    patches that attend to special tokens only.

    Attributes:
        entropy: the entropy of a patch's attention, in nats.
        distance: the mean distance of the patches that it attends to, in patches.
        special_weight: the weight on special tokens.
        self_weight: the weight on the patch itself.
        offset_share: the fraction of patches whose strongest patch is at `offset`: near 1, the head is like a tap of a convolution.
        offset: the most frequent offset of the strongest patch, rows down and columns to the right.
    """

    entropy: Float[Tensor, " heads"]
    distance: Float[Tensor, " heads"]
    special_weight: Float[Tensor, " heads"]
    self_weight: Float[Tensor, " heads"]
    offset_share: Float[Tensor, " heads"]
    offset: Int[Tensor, "heads 2"]


def iterate_query_blocks(view: Heads) -> Iterator[tuple[slice, Float[Tensor, "heads rows keys"]]]:
    """The weights of the only row of a batch, some queries at a time: which queries, and their weights."""
    heads, queries, keys = view.shape[-3:]
    step = max(1, _MAX_BLOCK_WEIGHTS // max(1, heads * keys))
    for begin in range(0, queries, step):
        rows = slice(begin, min(queries, begin + step))
        weights = view.select(queries=rows).weights.float()
        yield rows, weights.reshape(weights.shape[-3:])


class ImageStatsAccumulator:
    """Sums over the patches of an image, from which `ImageStats` are computed; on a device, which nothing reads from."""

    def __init__(self, heads: int, points: TokenGrid, device: torch.device) -> None:
        self._points, lattice = points, points.lattice
        self._queries, self._keys = lattice.query_coordinates(device), lattice.key_coordinates(device)
        height, width = lattice.sizes
        # entropy, distance, weight on special tokens, weight on the patch itself
        self._sums = torch.zeros(4, heads, device=device)
        # patches with any weight, and with any weight on a patch
        self._live, self._aimed = torch.zeros(2, heads, device=device)
        # offsets are counted from the one that leads from the last query to the first key
        down, right = ((max(n, 1) - 1) * step for n, step in zip(lattice.outputs, lattice.stride, strict=True))
        self._first_offset, self._width = (down, right), width + right
        self._offsets = torch.zeros(heads, (height + down) * self._width, device=device)

    def add(self, queries: slice, weights: Float[Tensor, "heads rows keys"]) -> None:
        """Add the weights of some queries; special tokens among the queries are left out."""
        special = self._points.queries
        first = max(queries.start, special)
        weights, at = (
            weights[:, first - queries.start :],
            self._queries[first - special : max(queries.stop, first) - special],
        )
        apart = self._keys - at[:, None]
        on_points = weights[..., self._points.keys :]
        total = on_points.sum(-1)
        self._live += (weights.sum(-1) > 0).sum(-1)
        self._aimed += (total > 0).sum(-1)
        self._sums[0] -= torch.special.xlogy(weights, weights).sum((-2, -1))
        self._sums[1] += ((on_points * apart.float().norm(dim=-1)).sum(-1) / total.clamp(min=1e-30)).sum(-1)
        self._sums[2] += weights[..., : self._points.keys].sum((-2, -1))
        self._sums[3] += (on_points * (apart == 0).all(-1)).sum((-2, -1))
        (down, right), offset = self._first_offset, self._keys[on_points.argmax(-1)] - at
        place = (offset[..., 0] + down) * self._width + offset[..., 1] + right
        # a patch without weight on patches has no strongest one
        self._offsets.scatter_add_(1, place, (total > 0).float())

    def compute_stats(self) -> ImageStats:
        # 0 / 0 is NaN
        share, place = self._offsets.max(-1)
        down, right = self._first_offset
        offset = torch.stack((place // self._width - down, place % self._width - right), -1)
        counts = torch.stack((self._live, self._aimed, self._live, self._live))
        entropy, distance, special, itself = self._sums / counts
        return ImageStats(entropy, distance, special, itself, share / self._aimed, offset)


@torch.no_grad()
def measure_image_stats(view: Heads, points: TokenGrid) -> ImageStats:
    """The statistics of the only row of a batch, on a grid of rows and columns."""
    sums = ImageStatsAccumulator(view.shape[-3], points, view.device)
    for queries, weights in iterate_query_blocks(view):
        sums.add(queries, weights)
    return sums.compute_stats()
