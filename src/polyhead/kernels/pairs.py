"""Attention over windows of a grid, pair by pair, by the kernels for graphs: other scores, and queries with a stride."""

from __future__ import annotations

from functools import lru_cache

import torch
from jaxtyping import Int
from torch import Tensor

from polyhead._torch import native, numbers_hidden, watched
from polyhead.kernels.call import Call, Result
from polyhead.kernels.graph import Edges
from polyhead.kernels.native import Native
from polyhead.neighbourhood import Graph, Grid
from polyhead.score import Dot


class Pairs:
    """Any score over a `Grid` with a window: its pairs are the edges of a graph."""

    name = "pairs"

    def refuses(self, call: Call) -> str | None:
        assert isinstance(call.over, Grid)
        if call.over.window is None:
            return "there is no window: the pairs are all that there are"
        if call.bias is not None:
            return "it adds no bias"
        if numbers_hidden() or watched():
            return "the pairs cannot be counted while torch compiles, transforms or watches the call"
        if type(call.score) is Dot and (not call.q.is_cpu or native is None or call.table is not None):
            return "dot products are quicker many at a time, where there is no C++ kernel for them"
        return None

    def __call__(self, call: Call) -> Result:
        assert isinstance(call.over, Grid)
        graph = _graph(
            call.over.sizes,
            call.over.outputs,
            call.over.stride,
            call.over.reach,
            call.over.dilation,
            call.over.prefix,
            call.q.device,
        )
        along = call._replace(over=graph)
        kernel = Native() if Native().refuses(along) is None else Edges()
        return kernel(along)


@lru_cache(maxsize=8)
def _graph(
    sizes: tuple[int, ...], outputs: tuple[int, ...], stride: tuple[int, ...], reach: tuple[int, ...],
    dilation: tuple[int, ...], prefix: int, device: torch.device,
) -> Graph:  # fmt: skip
    """The pairs of a grid, sorted once for every layer and step."""
    window = [2 * n + 1 for n in reach]
    grid = Grid(*sizes, window=window, dilation=dilation, stride=stride, outputs=outputs, prefix=prefix)
    # what is made in inference mode could not be used in training
    with torch.inference_mode(False):
        pairs: Int[Tensor, "2 pairs"] = grid.pairs(device)
        keys, queries = len(grid.grid.keys(device)), len(grid.grid.queries(device))
        return Graph(pairs, (keys, queries))
