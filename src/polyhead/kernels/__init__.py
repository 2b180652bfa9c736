"""The kernels, in the order in which they are asked: the first that does not refuse a call computes it."""

from polyhead.kernels.call import Call, Kernel, Result
from polyhead.kernels.edges_native import Native
from polyhead.kernels.edges_torch import Edges
from polyhead.kernels.fused import Fused
from polyhead.kernels.grid import OnGrid
from polyhead.kernels.offsets import AtOffsets
from polyhead.kernels.reference import Reference
from polyhead.kernels.short import Short
from polyhead.kernels.tiled import Tiled
from polyhead.kernels.windows_as_graph import Pairs
from polyhead.neighbourhood import Graph, Grid, Offsets

ALONG_KEYS: tuple[Kernel, ...] = (Fused(), Short(), Tiled(), Reference())
ON_GRIDS: tuple[Kernel, ...] = (Fused(), OnGrid(), Pairs(), Short(), Tiled(), Reference())
AT_OFFSETS: tuple[Kernel, ...] = (AtOffsets(), Tiled(), Reference())
ALONG_EDGES: tuple[Kernel, ...] = (Native(), Edges(), Reference())
_BY_KIND = {Graph: ALONG_EDGES, Grid: ON_GRIDS, Offsets: AT_OFFSETS}


def kernels(call: Call) -> tuple[Kernel, ...]:
    """Those that might take a call: by edges on a graph, by points of a grid, by stretches of keys elsewhere."""
    return _BY_KIND.get(type(call.over), ALONG_KEYS)


__all__ = ["ALONG_EDGES", "ALONG_KEYS", "AT_OFFSETS", "ON_GRIDS", "Call", "Kernel", "Result", "kernels"]
