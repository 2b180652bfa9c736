"""How flex_attention fits into the shared memory of a GPU: torch's own configurations overflow that of many."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import FlexKernelOptions


# Wider heads were not compiled for any GPU.
MAX_WIDTH = 256


class _Fit(NamedTuple):
    """The bytes of a query, key or value up to which kernels fit: with torch's own configurations, with two stages, with one."""

    available: int
    torchs: int
    two_stages: int
    one_stage: int


# Found by compiling the kernels with a mask per head and a learned relative bias, which take the most.
_FITS = (
    # sm_90, sm_100
    _Fit(200 << 10, 1024, 1024, 1024),
    # sm_80
    _Fit(160 << 10, 256, 256, 1024),
    # sm_86, sm_89, sm_120
    _Fit(96 << 10, 64, 128, 1024),
    # sm_75
    _Fit(0, 64, 64, 256),
)
# From this size on, torch's blocks in the backward pass of half precision are too large.
_LARGE_ROW = 512


def shared_memory_per_block(device: torch.device) -> int | None:
    """The bytes of shared memory that a block of threads may use; None where torch's configurations are not for CUDA."""
    if device.type != "cuda" or torch.version.hip:
        return None
    properties: Any = torch.cuda.get_device_properties(device)
    return int(getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block))


# For the compiler the result is a constant, as by torch.compiler.assume_constant_result, which would import the compiler.
shared_memory_per_block._dynamo_marked_constant = True  # type: ignore[attr-defined]


def width_refuses(width: int, dtype: torch.dtype, available: int | None) -> str | None:
    """The reason why heads of this many features do not fit, or None."""
    if width > MAX_WIDTH:
        return f"it is for heads of at most {MAX_WIDTH} features, and these have {width}"
    if available is None or _bytes_per_row(width, dtype) <= _fit(available).one_stage:
        return None
    return (
        f"heads of {width} features in {str(dtype)[6:]} do not fit into the GPU's {available >> 10} KB of shared memory"
    )


def kernel_options(width: int, dtype: torch.dtype, available: int | None) -> FlexKernelOptions | None:
    """The options with which a call fits, or None where torch's own do."""
    row = _bytes_per_row(width, dtype)
    if available is None or row <= _fit(available).torchs:
        return None
    # stages are blocks that are loaded ahead
    options: Any = {"num_stages": 2 if row <= _fit(available).two_stages else 1}
    if row > _fit(available).two_stages and dtype == torch.float32:
        # torch's own for 256 features; it has larger ones for 192
        options.update(fwd_BLOCK_M=32, fwd_BLOCK_N=32)
    if row >= _LARGE_ROW and dtype != torch.float32:
        options.update(bwd_BLOCK_M1=32, bwd_BLOCK_N1=32, bwd_BLOCK_M2=32, bwd_BLOCK_N2=32)
    return options


def _fit(available: int) -> _Fit:
    return next(fit for fit in _FITS if available >= fit.available)


def _bytes_per_row(width: int, dtype: torch.dtype) -> int:
    """The bytes of one query, key or value in the kernel, which rounds the number of features up to a power of two."""
    return (1 << (width - 1).bit_length()) * dtype.itemsize
