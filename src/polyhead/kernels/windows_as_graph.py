"""Attention over windows of a grid, pair by pair, by the kernels for graphs: other scores, and queries with a stride."""

from __future__ import annotations

from functools import lru_cache

import torch

from polyhead._torch import intercepted, native, values_unavailable
from polyhead.kernels.call import Call, Result
from polyhead.kernels.edges_native import Native
from polyhead.kernels.edges_torch import Edges
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
        if values_unavailable(call.q) or intercepted():
            return "the pairs cannot be counted while torch compiles, transforms or watches the call"
        if type(call.score) is Dot and (not call.q.is_cpu or native is None or call.table is not None):
            return "dot products are quicker many at a time, where there is no C++ kernel for them"
        return None

    def __call__(self, call: Call) -> Result:
        assert isinstance(call.over, Grid)
        graph = _graph(call.over, call.q.device)
        along = call._replace(over=graph)
        kernel = Native() if Native().refuses(along) is None else Edges()
        return kernel(along)


@lru_cache(maxsize=8)
def _graph(grid: Grid, device: torch.device) -> Graph:
    """The pairs of a grid, sorted once for every layer and step."""
    # what is made in inference mode could not be used in training
    with torch.inference_mode(False):
        return Graph(grid.pairs(device), (len(grid.grid.keys(device)), len(grid.grid.queries(device))))
