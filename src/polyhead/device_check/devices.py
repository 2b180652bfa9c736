"""Devices by name: whether torch finds one here, what it is called, and what it computes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from polyhead._checks import short_repr

# the first is checked on every case
_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def find_device(name: str, argument: str = "--device") -> torch.device:
    """The device of a name such as "cpu", "cuda", "cuda:1", "mps" or "xpu".

    Raises:
        ValueError: if torch does not find it here; the message says why.
    """
    rule = f"{argument} must be a device that torch finds here, such as cpu, cuda or cuda:1, got"
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError):
        raise ValueError(f"{rule} {short_repr(name)}, which torch does not know") from None
    reason = _missing_reason(device)
    if reason is not None:
        raise ValueError(f"{rule} {name}: {reason}")
    return device


def _missing_reason(device: torch.device) -> str | None:
    """Why tensors cannot be made on a device; None if they can."""
    kind, version = device.type, torch.__version__
    if kind == "meta":
        return "its tensors have no values"
    if kind == "cpu":
        return None
    if kind == "cuda" and not torch.backends.cuda.is_built():
        return (
            f"torch was built without CUDA, and without ROCm (torch {version}); install a build of torch for your GPU"
        )
    if kind == "mps" and not torch.backends.mps.is_built():
        return f"torch was built without MPS (torch {version})"
    module = getattr(torch, kind, None)
    if module is None or not module.is_available():
        return f"torch {version} finds no such device on this machine; check its driver"
    count: int = module.device_count()
    if device.index is not None and device.index >= count:
        return f"there {'is' if count == 1 else 'are'} {count}, and the first is {kind}:0"
    return None


def describe_device(device: torch.device) -> dict[str, str]:
    """The facts about a device that a report needs, by name."""
    facts = {"device": str(device)}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        platform = f"ROCm {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}"
        facts |= {
            "device name": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "memory": f"{properties.total_memory / 2**30:.1f} GiB",
            "multiprocessors": f"{properties.multi_processor_count}",
            "platform": platform,
        }
    elif device.type == "xpu":
        facts["device name"] = torch.xpu.get_device_name(device)
    return {**facts, "dtypes": ", ".join(str(dtype)[6:] for dtype in supported_dtypes(device))}


def supported_dtypes(device: torch.device) -> list[torch.dtype]:
    """The dtypes of q, k and v that a device computes products in."""
    return [dtype for dtype in _DTYPES if _multiplies(device, dtype)]


def _multiplies(device: torch.device, dtype: torch.dtype) -> bool:
    # MPS raises TypeError for fp64, other backends RuntimeError
    try:
        x = torch.ones(2, 2, dtype=dtype, device=device)
        return bool(((x @ x) == 2).all())
    except (RuntimeError, TypeError, NotImplementedError):
        return False


@contextmanager
def full_fp32_precision() -> Iterator[str]:
    """A context in which products in fp32 are computed in fp32, not in TF32; yields the setting that it replaces."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield before
    finally:
        torch.set_float32_matmul_precision(before)


@contextmanager
def refuse_waits(device: torch.device) -> Iterator[None]:
    """A context in which torch raises where the host would wait for a GPU of CUDA; elsewhere torch cannot tell."""
    if device.type != "cuda":
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def synchronise(device: torch.device) -> None:
    """Wait until a device has finished its work."""
    if device.type == "mps":
        torch.mps.synchronize()
    elif device.type != "cpu":
        getattr(torch, device.type).synchronize(device)
