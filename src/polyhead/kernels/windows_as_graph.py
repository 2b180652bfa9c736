"""Attention over the windows of a grid by the graph kernels, pair by pair: for other scores than `Dot`, and for queries with a stride."""

from __future__ import annotations

import math
from functools import lru_cache

import torch

from polyhead._torch import is_torch_intercepted, is_tracing_or_dataless, native
from polyhead.kernels.call import Call, OutputAndLse
from polyhead.kernels.edges_native import EdgesNative
from polyhead.kernels.edges_torch import EdgesTorch
from polyhead.neighbourhood import Graph, Grid
from polyhead.score import Dot


class WindowsAsGraph:
    """Any score over a `Grid` with a window, whose pairs become the edges of a graph."""

    name = "windows"

    def refuses(self, call: Call) -> str | None:
        assert isinstance(call.over, Grid)
        if call.over.window is None:
            return "there is no window, so every pair is allowed"
        if call.bias is not None:
            return "it adds no bias"
        if is_tracing_or_dataless(call.q) or is_torch_intercepted():
            return "the pairs cannot be listed while torch compiles, transforms or intercepts the call"
        if type(call.score) is Dot and (not call.q.is_cpu or native is None or call.relative_bias is not None):
            return "without a C++ kernel, dot products are faster as matrix products"
        return None

    def __call__(self, call: Call) -> OutputAndLse:
        assert isinstance(call.over, Grid)
        graph = _pairs_as_graph(call.over, call.q.device)
        along = call._replace(over=graph)
        kernel = EdgesNative() if EdgesNative().refuses(along) is None else EdgesTorch()
        return kernel(along)


@lru_cache(maxsize=8)
def _pairs_as_graph(grid: Grid, device: torch.device) -> Graph:
    """The pairs of a grid as a graph, sorted once for all layers and steps."""
    # listed on the host: on a device the number of pairs would be waited for
    pairs, prefix = grid.pairs(torch.device("cpu")), grid.prefix
    sizes = math.prod(grid.sizes) + prefix, math.prod(grid.outputs) + prefix
    # tensors created in inference mode cannot be used in training
    with torch.inference_mode(False):
        return Graph(pairs, sizes).to(device)
