"""What heads do in an image: how far patches look, how much they leave to special tokens, and whether always to one side."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from polyhead.heads import Heads
from polyhead.heads.grid_view import Points

# Numbers in one block of weights.
_BLOCK = 1 << 22


class ImageStats(NamedTuple):
    """Means over the patches of an image, a number for each head; NaN where there is none to count.

    Patches that have no key, as a convolution's have beyond its border, do not count; for `distance` and `fixed`, neither do those
    that look at special tokens alone.

    Attributes:
        entropy: how spread a patch's attention is, in nats.
        distance: how far it looks, in patches: the mean over what it gives to patches.
        special: how much of it lies on special tokens.
        itself: how much of it lies on the patch itself.
        fixed: the share of patches whose strongest patch stands at one and the same offset, `offset`: near 1, the head is like
            a tap of a convolution.
        offset: rows down and columns to the right.
    """

    entropy: Float[Tensor, " heads"]
    distance: Float[Tensor, " heads"]
    special: Float[Tensor, " heads"]
    itself: Float[Tensor, " heads"]
    fixed: Float[Tensor, " heads"]
    offset: Int[Tensor, "heads 2"]


def blocks(view: Heads, first: int = 0) -> Iterator[tuple[Tensor, Float[Tensor, "heads rows keys"]]]:
    """The weights of one row of a batch, some queries at a time, from a query on: their numbers, and the weights."""
    heads, queries, keys = view.shape[-3:]
    step = max(1, _BLOCK // max(1, heads * keys))
    for begin in range(first, queries, step):
        chosen = torch.arange(begin, min(queries, begin + step))
        weights = view.select(queries=chosen).weights.float()
        yield chosen, weights.reshape(weights.shape[-3:])


@torch.no_grad()
def looking(view: Heads, points: Points) -> ImageStats:
    """What the heads of one row of a batch do, on a grid of rows and columns."""
    heads = view.shape[-3]
    asks, keys = points.lattice.queries(torch.device("cpu")), points.lattice.keys(torch.device("cpu"))
    height, width = points.lattice.sizes
    sums = torch.zeros(4, heads)
    # how many have any weight, and any on a patch
    live, aimed = torch.zeros(heads), torch.zeros(heads)
    # offsets from the one that leads from the last query to the first key
    low = -(asks.amax(0) if len(asks) else torch.zeros(2, dtype=torch.long))
    across = width - int(low[1])
    steps = torch.zeros(heads, (height - int(low[0])) * across)
    for chosen, weights in blocks(view, points.queries):
        at = asks[chosen - points.queries]
        apart = keys - at[:, None]
        on_points = weights[..., points.keys :]
        total = on_points.sum(-1)
        live += (weights.sum(-1) > 0).sum(-1)
        aimed += (total > 0).sum(-1)
        sums[0] -= torch.special.xlogy(weights, weights).sum((-2, -1))
        sums[1] += ((on_points * apart.float().norm(dim=-1)).sum(-1) / total.clamp(min=1e-30)).sum(-1)
        sums[2] += weights[..., : points.keys].sum((-2, -1))
        sums[3] += (on_points * (apart == 0).all(-1)).sum((-2, -1))
        best = on_points.argmax(-1)
        step = keys[best] - at - low
        # a patch that looks at none has no strongest one
        steps.scatter_add_(1, step[..., 0] * across + step[..., 1], (total > 0).float())
    # 0 / 0 is NaN
    share, place = steps.max(-1)
    offset = torch.stack((place // across, place % across), -1) + low
    entropy, distance, special, itself = sums / torch.stack((live, aimed, live, live))
    return ImageStats(entropy, distance, special, itself, share / aimed, offset)
