"""The state of torch around a call (compiling, tracing, transforming), pytrees, and the C++ kernels."""

from __future__ import annotations

import importlib
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Proxy
from torch.utils import _pytree as pytree


def _import_native() -> tuple[Any, str | None]:
    """The C++ kernels, or None and the reason."""
    try:
        # imported after torch, whose OpenMP threads it shares
        return importlib.import_module("polyhead._native"), None
    except ModuleNotFoundError:
        return None, "polyhead was installed without a compiler that could build them"
    except ImportError as error:
        return None, f"they cannot be loaded: {error}"


native, native_missing_reason = _import_native()


def can_keep_tensors(device: torch.device) -> bool:
    """Whether a tensor made now is an ordinary one, which later calls may use: not traced, and not part of a CUDA graph."""
    if is_tracing_or_dataless() or torch._C._len_torch_dispatch_stack():
        return False
    return device.type != "cuda" or not torch.cuda.is_current_stream_capturing()


def current_stream_id(device: torch.device) -> int:
    """The stream that work on a device is queued on now; a tensor that is kept may be read on another before it is written."""
    if device.type not in ("cuda", "xpu"):
        return 0
    stream: int = torch.accelerator.current_stream(device).stream_id
    return stream


def under_transform() -> bool:
    """Whether torch.func (vmap, grad, jvp, …) or forward-mode differentiation is active, for which fused operators have no rules."""
    # by depth: under torch.compile, peeking at the interpreter stack always finds an interpreter
    return torch._C._functorch.get_dynamic_layer_stack_depth() > 0 or torch.autograd.forward_ad._current_level >= 0


def are_values_readable(*tensors: Tensor) -> bool:
    """Whether value checks may read these tensors.

    Not under tracing or a transform, nor without data, nor on a device: the host would wait for all work that is queued there.
    """
    return all(x.is_cpu for x in tensors) and not is_tracing_or_dataless(*tensors)


def assert_on_device(holds: Tensor, rule: str) -> None:
    """Check a condition on a device without waiting for it: where it does not hold, a later call raises an error.

    On a device for which torch has no such assertion, nothing is checked.
    """
    with suppress(NotImplementedError):
        torch._assert_async(holds, rule)


def is_tracing_or_dataless(*tensors: Tensor) -> bool:
    """Whether values cannot be read at all: under tracing or a transform, or for tensors without data."""
    if torch.compiler.is_compiling() or under_transform():
        return True
    return any(is_fake_or_meta(x) for x in tensors)


def is_fake_or_meta(x: Tensor) -> bool:
    """Whether a tensor has no data: on the meta device, or fake."""
    return x.is_meta or isinstance(x, FakeTensor)


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """A context without autocast, which the meta device does not support."""
    return nullcontext() if device.type == "meta" else torch.autocast(device.type, enabled=False)


def is_torch_intercepted() -> bool:
    """Whether a mode or tracer intercepts torch's functions or operators; it would miss calls that bypass them."""
    modes = torch._C._len_torch_function_stack() > 0 or torch._C._len_torch_dispatch_stack() > 0
    return modes or torch._C._is_tracing()


def is_torch_dispatch_intercepted() -> bool:
    """Whether a mode intercepts torch's operators, such as fake tensors and counters of operations."""
    return torch._C._len_torch_dispatch_stack() > 0


def is_fx_proxy(x: object) -> bool:
    """Whether `x` is a proxy of `torch.fx.symbolic_trace`."""
    return isinstance(x, Proxy)


def record_fx_call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Record the call of a module under `torch.fx.symbolic_trace` as one node, as torch does with its own layers."""
    tracer: Any = next(x.tracer for x in (*args, *kwargs.values()) if is_fx_proxy(x))
    if tracer.root is module:
        raise TypeError(
            f"torch.fx.symbolic_trace records {type(module).__name__} as one node; trace a model that holds it"
        )

    def record(value: Any) -> Any:
        if value is None or isinstance(value, (bool, Tensor, Proxy)):
            return value
        # objects such as neighbourhoods become attributes of the traced module, as constant tensors do
        name = tracer.get_fresh_qualname("_constant")
        setattr(tracer.root, name, value)
        return tracer.create_proxy("get_attr", name, (), {})

    recorded = tuple(map(record, args)), {name: record(value) for name, value in kwargs.items()}
    return tracer.create_proxy("call_module", tracer.path_of_module(module), *recorded)


def refuse_scripting(
    module: nn.Module, instead: str = "torch.export.export, torch.compile or torch.jit.trace"
) -> nn.Module:
    """The hook that `torch.jit.script` calls first. It raises: layers choose their kernels in Python."""
    raise TypeError(f"torch.jit.script cannot compile {type(module).__name__}; use {instead}")


def can_branch_on_values(x: torch.Tensor) -> bool:
    """Whether values can be read without a wait of the host, and no tracer would record the result as a constant."""
    # first, since the compiler cannot trace the stack of modes
    if torch.compiler.is_compiling() or not (type(x) is Tensor or type(x) is nn.Parameter) or not x.is_cpu:
        return False
    return not (torch._C._len_torch_dispatch_stack() or torch._C._is_tracing() or under_transform())


def to_at_least_fp32(x: torch.Tensor) -> torch.Tensor:
    """`x` in at least fp32. If it is used many times, its gradient is a sum, too imprecise in half precision."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def move_to(x: Tensor, device: torch.device) -> Tensor:
    """A tensor on a device. The host does not wait for copies to a device; it has to for those to its own memory."""
    return x.to(device, non_blocking=device.type != "cpu")


def widest_float(device: torch.device) -> torch.dtype:
    """fp64, or fp32 on a device without fp64: Apple's, and some of Intel's."""
    if device.type == "xpu":
        return torch.float64 if torch.xpu.get_device_properties(device).has_fp64 else torch.float32
    return torch.float32 if device.type == "mps" else torch.float64


def register_pytree_class(kind: type, tensors: tuple[str, ...]) -> None:
    """Make `kind` a pytree: the named attributes are its children unless they are None; the rest is its context."""

    def split(value: Any) -> tuple[dict[str, Any], Any]:
        fields = vars(value)
        children = {name: fields[name] for name in tensors if fields[name] is not None}
        return children, (tuple(children), tuple((name, item) for name, item in fields.items() if name not in children))

    def flatten(value: Any) -> tuple[list[Any], Any]:
        children, context = split(value)
        return list(children.values()), context

    def flatten_with_keys(value: Any) -> tuple[list[Any], Any]:
        children, context = split(value)
        return [(pytree.GetAttrKey(name), item) for name, item in children.items()], context

    def unflatten(children: Any, context: Any) -> Any:
        names, static = context
        value: Any = object.__new__(kind)
        value.__dict__.update(zip(names, children, strict=True))
        value.__dict__.update(static)
        return value

    pytree.register_pytree_node(
        kind,
        flatten,
        unflatten,
        serialized_type_name=f"{kind.__module__}.{kind.__qualname__}",
        flatten_with_keys_fn=flatten_with_keys,
        to_dumpable_context=lambda context: context,
        from_dumpable_context=_lists_to_tuples,
    )


def _lists_to_tuples(dumped: Any) -> Any:
    """JSON lists as the tuples they were."""
    return tuple(_lists_to_tuples(item) for item in dumped) if isinstance(dumped, list) else dumped
