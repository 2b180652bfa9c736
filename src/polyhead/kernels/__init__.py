"""The kernels, in the order in which they are asked: the first that does not refuse a call computes it."""

from polyhead.kernels.call import Call, Kernel, Result
from polyhead.kernels.fused import Fused
from polyhead.kernels.graph import Edges
from polyhead.kernels.native import Native
from polyhead.kernels.pairs import Pairs
from polyhead.kernels.reference import Reference
from polyhead.kernels.short import Short
from polyhead.kernels.single import Single
from polyhead.kernels.tiled import Tiled
from polyhead.neighbourhood import Graph

ALONG_KEYS: tuple[Kernel, ...] = (Fused(), Single(), Pairs(), Short(), Tiled(), Reference())
ALONG_EDGES: tuple[Kernel, ...] = (Native(), Edges(), Reference())


def kernels(call: Call) -> tuple[Kernel, ...]:
    """Those that might take a call: by edges on a graph, by stretches of keys elsewhere."""
    return ALONG_EDGES if isinstance(call.over, Graph) else ALONG_KEYS


__all__ = ["ALONG_EDGES", "ALONG_KEYS", "Call", "Kernel", "Result", "kernels"]
