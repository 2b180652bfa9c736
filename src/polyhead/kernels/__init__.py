"""The kernels, in order of preference: the first one that does not refuse a call computes it."""

from jaxtyping import Float
from torch import Tensor

from polyhead.kernels.call import Call, Kernel, OutputAndLse
from polyhead.kernels.edges_native import EdgesNative
from polyhead.kernels.edges_torch import EdgesTorch, edge_weights
from polyhead.kernels.flex import Flex
from polyhead.kernels.fused import Fused
from polyhead.kernels.grid import GridNative
from polyhead.kernels.offsets import AtOffsets
from polyhead.kernels.reference import Reference, pair_weights
from polyhead.kernels.short import Short
from polyhead.kernels.tiled import Tiled
from polyhead.kernels.windows_as_graph import WindowsAsGraph
from polyhead.neighbourhood import Graph, Grid, Neighbourhood, Offsets

SEQUENCE_KERNELS: tuple[Kernel, ...] = (Fused(), Short(), Flex(), Tiled(), Reference())
GRID_KERNELS: tuple[Kernel, ...] = (Fused(), GridNative(), WindowsAsGraph(), Short(), Flex(), Tiled(), Reference())
OFFSET_KERNELS: tuple[Kernel, ...] = (AtOffsets(), Flex(), Tiled(), Reference())
GRAPH_KERNELS: tuple[Kernel, ...] = (EdgesNative(), EdgesTorch(), Reference())
_KERNELS_BY_NEIGHBOURHOOD: dict[type[Neighbourhood], tuple[Kernel, ...]] = {
    Graph: GRAPH_KERNELS,
    Grid: GRID_KERNELS,
    Offsets: OFFSET_KERNELS,
}


def register_kernels(neighbourhood: type[Neighbourhood], kernels: tuple[Kernel, ...]) -> None:
    """Let these kernels, in order of preference, compute the calls over a type of neighbourhood that is defined elsewhere."""
    _KERNELS_BY_NEIGHBOURHOOD[neighbourhood] = kernels


def candidate_kernels(call: Call) -> tuple[Kernel, ...]:
    """The kernels from which `attend.choose_kernel` chooses, in order: along edges on a `Graph`, on the points of a `Grid`, along keys elsewhere."""
    return _KERNELS_BY_NEIGHBOURHOOD.get(type(call.over), SEQUENCE_KERNELS)


def compute_attention_weights(call: Call) -> Float[Tensor, "... heads queries keys"] | Float[Tensor, "... heads edges"]:
    """The weights of a call before dropout, in at least fp32: one per pair, or on a graph one per edge."""
    return edge_weights(call) if isinstance(call.over, Graph) else pair_weights(call)


__all__ = [
    "GRAPH_KERNELS",
    "GRID_KERNELS",
    "OFFSET_KERNELS",
    "SEQUENCE_KERNELS",
    "Call",
    "Kernel",
    "OutputAndLse",
    "candidate_kernels",
    "compute_attention_weights",
    "register_kernels",
]
