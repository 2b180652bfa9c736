"""Which devices, versions and dtypes flex_attention runs with."""

from __future__ import annotations

import importlib
from typing import Any

import torch

DEVICE_TYPES = ("cuda", "xpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Triton multiplies matrices of at least this many columns.
MIN_WIDTH = 16
# The first torch whose flex_attention returns a log-sum-exp with a gradient under its present name, and the Triton it comes with.
MIN_TORCH, MIN_TRITON = "2.9", (3, 5)
MIN_CAPABILITY, MIN_BFLOAT16_CAPABILITY = (7, 5), (8, 0)

_reasons: dict[tuple[torch.device, torch.dtype], str | None] = {}


def device_refuses(device: torch.device, dtype: torch.dtype) -> str | None:
    """The reason why flex_attention cannot run on a device in a dtype, or None."""
    if device.type not in DEVICE_TYPES:
        return f"it is for {' and '.join(DEVICE_TYPES)}, and q is on {device.type}"
    if dtype not in DTYPES:
        return f"Triton has no matrix products in {str(dtype)[6:]}"
    if (device, dtype) not in _reasons:
        _reasons[device, dtype] = _software_refuses() or _hardware_refuses(device, dtype)
    return _reasons[device, dtype]


# For the compiler the result is a constant, as by torch.compiler.assume_constant_result, which would import the compiler.
device_refuses._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _software_refuses() -> str | None:
    # torch does not load it by itself
    if not hasattr(importlib.import_module("torch.nn.attention.flex_attention"), "AuxRequest"):
        return f"it needs torch {MIN_TORCH} or newer, and this is {torch.__version__}"
    try:
        triton: Any = importlib.import_module("triton")
    except ImportError:
        return "Triton is not installed; install the one that your torch was built for"
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    if version < MIN_TRITON:
        return f"it needs Triton {'.'.join(map(str, MIN_TRITON))} or newer, and this is {triton.__version__}"
    return None


def _hardware_refuses(device: torch.device, dtype: torch.dtype) -> str | None:
    if device.type != "cuda" or torch.version.hip:
        return None
    capability = torch.cuda.get_device_capability(device)
    least = MIN_BFLOAT16_CAPABILITY if dtype == torch.bfloat16 else MIN_CAPABILITY
    if capability < least:
        has, needs = (".".join(map(str, numbers)) for numbers in (capability, least))
        return f"{str(dtype)[6:]} needs compute capability {needs}, and this GPU has {has}"
    return None
