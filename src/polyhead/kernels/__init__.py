"""The kernels, in the order in which they are asked: the first that does not refuse a call computes it."""

from polyhead.kernels.call import Call, Kernel, Result
from polyhead.kernels.fused import Fused
from polyhead.kernels.reference import Reference
from polyhead.kernels.tiled import Tiled

KERNELS: tuple[Kernel, ...] = (Fused(), Tiled(), Reference())

__all__ = ["KERNELS", "Call", "Kernel", "Result"]
