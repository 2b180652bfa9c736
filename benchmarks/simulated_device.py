"""A simulated accelerator, `gpu:0`: tensors that say they are on it, with their numbers in the CPU's memory.

It shows two things without a GPU: that code is device-agnostic, and how often it would launch a kernel, copy from the host and
wait for the device. It is not a GPU: it shows neither times nor the results of CUDA's kernels, and its counts are of torch's
operators. An operator that CUDA runs as several kernels (a sort, say) counts as one launch.

`install` registers it as torch's out-of-tree device (`PrivateUse1`), once and for the whole process. The tensors are ordinary
`torch.Tensor`s, which torch dispatches as it does CUDA's: autograd records them, composite operators are decomposed, views share
their memory. What is left arrives in `_run_on_host`, which counts it, refuses mixed
devices as CUDA does, and computes it on the CPU. Polyhead's own operators run the function that is registered for CUDA.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet
from torch.utils import _pytree as pytree
from torch.utils import backend_registration

NAME = "gpu"
Operator = Any

# The numbers of device types in DLPack.
_DLPACK_CPU, _DLPACK_EXTENSION = 1, 12
_CPU_KEYS = DispatchKeySet(DispatchKey.CPU)
_CUDA_KEYS = DispatchKeySet(DispatchKey.CUDA)

# Operators whose result the host needs, or whose size depends on values: CUDA waits in them.
_WAITING = (
    "_local_scalar_dense", "equal", "nonzero", "_unique", "_unique2", "unique_dim", "unique_consecutive", "unique_dim_consecutive",
    "masked_select", "bincount", "histc", "multinomial",
)  # fmt: skip
# Views, and what changes only the description of a tensor: torch's CPU kernels do not touch the memory.
_METADATA_ONLY = (
    "view", "as_strided", "_reshape_alias", "unfold", "set_.source_Storage", "set_.source_Storage_storage_offset",
    "set_.source_Tensor", "set_", "resize_",
)  # fmt: skip
# Operators with a kernel of their own on CUDA, which torch would otherwise decompose.
_FUSED_ON_CUDA = ("native_layer_norm", "_foreach_copy_", "_foreach_norm.Scalar")
# Operators in which a single number of the CPU is refused too.
_NOT_POINTWISE = ("index", "gather", "scatter", "embedding", "take", "mm", "bmm", "addmm", "baddbmm", "cat")


class Counts:
    """What the device was asked to do, by operator: kernels launched, waits of the host, copies from the host.

    CUDA waits in a copy from the host too, unless it is pinned and not blocking. A copy to the host that does not block is counted
    as `downloaded`, and not as a wait: on CUDA the host's memory must be pinned for that.
    """

    def __init__(self) -> None:
        self.launched: Counter[str] = Counter()
        self.waited: Counter[str] = Counter()
        self.uploaded: Counter[str] = Counter()
        self.downloaded: Counter[str] = Counter()

    @property
    def launches(self) -> int:
        return self.launched.total()

    @property
    def waits(self) -> int:
        return self.waited.total()

    @property
    def uploads(self) -> int:
        return self.uploaded.total()

    def __repr__(self) -> str:
        return f"Counts({self.launches} launches, waits {dict(self.waited)}, uploads {dict(self.uploaded)})"


_active: list[Counts] = []


@contextmanager
def count() -> Iterator[Counts]:
    """Count what the device is asked to do in the context; contexts may be nested."""
    counts = Counts()
    _active.append(counts)
    try:
        yield counts
    finally:
        _active.remove(counts)


_suspended: list[Counts] = []


def suspend() -> None:
    """Count nothing until `resume`: for the parts of a pass that stand for one kernel."""
    _suspended[:], _active[:] = _active[:], []


def resume() -> None:
    """Count again."""
    _active[:], _suspended[:] = _suspended[:], []


@contextmanager
def uncounted() -> Iterator[None]:
    """A context whose work is not counted."""
    outer = _active[:]
    _active.clear()
    try:
        yield
    finally:
        _active[:] = outer


def count_as_one_launch(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A function whose launches count as one: what a compiler makes one kernel of. Its waits still count."""

    def counted(*args: Any, **kwargs: Any) -> Any:
        record("launched", name)
        outer, inner = _active[:], Counts()
        _active[:] = [inner]
        try:
            return function(*args, **kwargs)
        finally:
            _active[:] = outer
            for counts in outer:
                counts.waited.update(inner.waited)
                counts.uploaded.update(inner.uploaded)

    return counted


def record(what: str, name: str) -> None:
    """Count a launch (`"launched"`), a wait (`"waited"`) or a copy from the host (`"uploaded"`)."""
    for counts in _active:
        getattr(counts, what)[name] += 1


class _BackendModule(backend_registration._DummyBackendModule):
    """What `torch.gpu` is."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def synchronize(self, device: object = None) -> None:
        record("waited", "synchronize")


@lru_cache(maxsize=1)
def install() -> torch.device:
    """Register the device in this process, and return it. It cannot be removed again."""
    backend_registration._setup_privateuseone_for_python_backend(NAME, backend_module=_BackendModule())
    everything = torch.library.Library("_", "IMPL")
    everything.fallback(_run_on_host, "PrivateUse1")
    aten = torch.library.Library("aten", "IMPL")
    for name in _METADATA_ONLY:
        aten.impl(name, _redispatch_to_cpu(_operator(name)), "PrivateUse1")
    for name in _FUSED_ON_CUDA:
        operator = _operator(name)
        aten.impl(
            name, lambda *args, _operator=operator, **kwargs: _run_on_host(_operator, *args, **kwargs), "PrivateUse1"
        )
    for name, kernel in (
        ("empty.memory_format", _empty),
        ("empty_strided", _empty_strided),
        ("_copy_from", _copy_from),
        ("scaled_dot_product_attention", _attention),
        ("_scaled_dot_product_fused_attention_overrideable", _fused_attention),
        ("_scaled_dot_product_fused_attention_overrideable_backward", _fused_attention_backward),
    ):
        aten.impl(name, kernel, "PrivateUse1")
    aten.impl("scaled_dot_product_attention", _attention, "AutogradPrivateUse1")
    # a library that is collected takes its kernels with it
    _kept.extend((everything, aten))
    # a thread of the device that runs Python when the process ends would abort it
    torch.autograd.set_multithreading_enabled(False)
    return torch.device(NAME, 0)


_kept: list[object] = []


def _operator(name: str) -> Operator:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _redispatch_to_cpu(operator: Operator) -> Callable[..., Any]:
    return lambda *args, **kwargs: operator.redispatch(_CPU_KEYS, *args, **kwargs)


def _relabel(x: Tensor, device_type: int) -> Tensor:
    """A tensor that shares the memory of `x` and says it is on another device."""
    with torch._C._AutoDispatchBelowAutograd():
        capsule = torch._C._to_dlpack(x)
        header = ctypes.pythonapi.PyCapsule_GetPointer
        header.restype, header.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        # struct DLTensor { void *data; struct { int32_t device_type, device_id; } device; … }
        ctypes.c_int32.from_address(header(capsule, b"dltensor") + ctypes.sizeof(ctypes.c_void_p)).value = device_type
        return torch._C._from_dlpack(capsule)


def host_of(x: Tensor) -> Tensor:
    """A CPU tensor that shares the memory of a tensor of the device. For tests: reading it is not counted."""
    return _relabel(x.detach(), _DLPACK_CPU) if x.device.type == NAME else x.detach()


def _is_simulated(x: object) -> bool:
    return isinstance(x, Tensor) and x.device.type == NAME


def _on_device(x: Tensor) -> Tensor:
    return _relabel(x, _DLPACK_EXTENSION)


def _run_on_host(operator: Operator, *args: Any, **kwargs: Any) -> Any:
    """Any operator without a kernel of its own above."""
    if operator.namespace == "polyhead":
        return _run_for_cuda(operator, args, kwargs)
    args = _wrap_numbers(operator, args)
    flat, spec = pytree.tree_flatten((args, kwargs))
    _refuse_mixed_devices(operator, flat, args)
    record("launched", operator._schema.name)
    if _waits(operator, args, kwargs):
        record("waited", operator._schema.name)
    written = _written_tensors(operator, args, kwargs)
    hosts = [_host_argument(x, id(x) in written) for x in flat]
    host_args, host_kwargs = pytree.tree_unflatten(hosts, spec)
    with torch._C._AutoDispatchBelowAutograd():
        result = operator(*host_args, **host_kwargs)
        outputs = [(x, host) for x, host in zip(flat, hosts, strict=True) if id(x) in written]
        for x, host in outputs:
            if host.shape != x.shape:
                x.set_(_on_device(host))
        by_host = {id(host): x for x, host in outputs}
        return pytree.tree_map_only(Tensor, lambda x: by_host[id(x)] if id(x) in by_host else _on_device(x), result)


def _wrap_numbers(operator: Operator, args: Sequence[Any]) -> tuple[Any, ...]:
    """Numbers as tensors where the operator takes tensors: torch hands its wrapped numbers over as numbers."""
    arguments = zip(args, operator._schema.arguments, strict=False)
    is_number = lambda x: isinstance(x, (bool, int, float))
    # without axes a number of 64 bits widens no tensor
    as_tensor = lambda x: torch.tensor(x, dtype=torch.float64 if isinstance(x, float) else None)
    return tuple(as_tensor(x) if is_number(x) and str(argument.type) == "Tensor" else x for x, argument in arguments)


def _host_argument(x: Any, written: bool) -> Any:
    """An argument as the CPU's operator takes it."""
    if isinstance(x, torch.device):
        return torch.device("cpu")
    if not _is_simulated(x):
        return x
    # shared memory cannot grow, which an output without numbers may have to
    return torch.empty(0, dtype=x.dtype) if written and not x.numel() else _relabel(x, _DLPACK_CPU)


def _run_for_cuda(operator: Operator, args: Any, kwargs: Any) -> Any:
    if not torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), "CUDA"):
        raise NotImplementedError(f"Could not run '{operator.name()}' with arguments from the '{NAME}' backend")
    return operator.redispatch(_CUDA_KEYS, *args, **kwargs)


def _written_tensors(operator: Operator, args: Sequence[Any], kwargs: dict[str, Any]) -> set[int]:
    """The ids of the tensors that the operator writes."""
    written = set()
    for place, argument in enumerate(operator._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = kwargs.get(argument.name, args[place] if place < len(args) else None)
            written |= {id(x) for x in pytree.tree_leaves(value) if _is_simulated(x)}
    return written


def _refuse_mixed_devices(operator: Operator, flat: list[Any], args: Sequence[Any]) -> None:
    """Raise for tensors of the CPU among those of the device; a single number passes where CUDA takes one."""
    strangers = [x for x in flat if isinstance(x, Tensor) and not _is_simulated(x)]
    name = operator._schema.name.partition("::")[2]
    pointwise = not name.startswith(_NOT_POINTWISE) and not any(x is args[0] for x in strangers if name.endswith("_"))
    if not all(x.dim() == 0 and pointwise for x in strangers):
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices, {NAME}:0 and cpu! "
            f"(when checking arguments of {operator._schema.name})"
        )


def _waits(operator: Operator, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether the host would wait in an operator on CUDA."""
    name = operator._schema.name.partition("::")[2]
    if name == "repeat_interleave":
        return kwargs.get("output_size") is None
    if name in ("index", "index_put", "_index_put_impl_", "_unsafe_index"):
        return any(isinstance(x, Tensor) and x.dtype in (torch.bool, torch.uint8) for x in args[1])
    if name == "isin":
        # beyond this number CUDA sorts both, and needs the number of distinct elements
        elements, tests = (x.numel() if isinstance(x, Tensor) else 1 for x in args[:2])
        return tests >= 10 * elements**0.145
    return name in _WAITING


def _empty(
    size: Sequence[int],
    dtype: Any = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
    memory_format: Any = None,
) -> Tensor:
    return _on_device(torch.empty(size, dtype=dtype, device="cpu"))


def _empty_strided(
    size: Sequence[int],
    stride: Sequence[int],
    dtype: Any = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
) -> Tensor:
    return _on_device(torch.empty_strided(size, stride, dtype=dtype, device="cpu"))


def _copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    """Copies, between devices and on one: a copy to the host is a wait if it blocks."""
    here, there = _is_simulated(source), _is_simulated(target)
    to_host = "downloaded" if non_blocking else "waited"
    record("launched" if here and there else to_host if here else "uploaded", "copy")
    host_of(target).copy_(host_of(source))
    return target


def _attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False,
    *, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """`scaled_dot_product_attention`: CUDA has a fused kernel for every dtype but fp64."""
    aten = torch.ops.aten
    if query.dtype == torch.float64 or query.dim() != 4:
        options = {"scale": scale, "enable_gqa": enable_gqa}
        return aten._scaled_dot_product_attention_math(
            query, key, value, attn_mask, dropout_p, is_causal, None, **options
        )[0]
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = query.new_zeros(()).where(attn_mask, -torch.inf)
    fused = aten._scaled_dot_product_fused_attention_overrideable
    return fused(query, key, value, attn_mask, dropout_p, is_causal, scale=scale)[0]


def _fused_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_bias: Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False,
    return_debug_mask: bool = False, *, scale: float | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    """One launch: the output and the log-sum-exp by torch's kernel for the CPU, and what torch wants besides."""
    _refuse_mixed_devices(
        _operator("_scaled_dot_product_fused_attention_overrideable"), [query, key, value, attn_bias], [query]
    )
    record("launched", "fused_attention")
    q, k, v = map(host_of, (query, key, value))
    heads = q.shape[1]
    k, v = (x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1) for x in (k, v))
    mask = None if attn_bias is None else host_of(attn_bias)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, dropout_p, is_causal, attn_mask=mask, scale=scale
    )
    number = lambda: _on_device(torch.zeros((), dtype=torch.long))
    return _on_device(out), _on_device(lse), number(), number(), q.shape[2], k.shape[2], number(), number(), number()


def _fused_attention_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, attn_bias: Tensor | None, grad_input_mask: Sequence[bool],
    out: Tensor, logsumexp: Tensor, cum_seq_q: Tensor | None, cum_seq_k: Tensor | None, max_q: int, max_k: int, dropout_p: float,
    is_causal: bool, philox_seed: Tensor, philox_offset: Tensor, *, scale: float | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    record("launched", "fused_attention_backward")
    d_out, q, k, v, o, lse = map(host_of, (grad_out, query, key, value, out, logsumexp))
    heads, own = q.shape[1], (k.shape[1], v.shape[1])
    k, v = (x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1) for x in (k, v))
    mask = None if attn_bias is None else host_of(attn_bias)
    dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        d_out, q, k, v, o, lse, dropout_p, is_causal, attn_mask=mask, scale=scale
    )
    dk, dv = (x.unflatten(1, (n, heads // n)).sum(2) for x, n in zip((dk, dv), own, strict=True))
    return _on_device(dq), _on_device(dk), _on_device(dv), None
