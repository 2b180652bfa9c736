"""What lies below: torch compiling or transforming a call, how it sees through plain objects, and the C++ kernels."""

from __future__ import annotations

import importlib
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Proxy
from torch.utils import _pytree as pytree


def _load() -> tuple[Any, str | None]:
    """The C++ kernels, or None and the reason."""
    try:
        # after torch, whose OpenMP threads it shares
        return importlib.import_module("polyhead._native"), None
    except ModuleNotFoundError:
        return None, "polyhead was installed without a compiler that could build them"
    except ImportError as error:
        return None, f"they cannot be loaded: {error}"


native, missing = _load()


def under_transform() -> bool:
    """Whether torch.func (vmap, grad, jvp, …) or forward-mode differentiation is active: fused operators have no rules for them."""
    # torch.compile knows this depth, and takes the interpreter itself for one that is there
    return torch._C._functorch.get_dynamic_layer_stack_depth() > 0 or torch.autograd.forward_ad._current_level >= 0


def values_unavailable(*tensors: Tensor) -> bool:
    """Whether values cannot be read, so that checks of them are left out: torch traces or transforms, or a tensor has none."""
    if torch.compiler.is_compiling() or under_transform():
        return True
    return any(lacks_values(x) for x in tensors)


def lacks_values(x: Tensor) -> bool:
    """Whether a tensor has a shape and nothing else: on the meta device, or a fake one."""
    return x.is_meta or isinstance(x, FakeTensor)


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """A context in which autocast narrows nothing; the meta device knows none."""
    return nullcontext() if device.type == "meta" else torch.autocast(device.type, enabled=False)


def intercepted() -> bool:
    """Whether a mode or a tracer sees torch's functions or operators go by: what is called past them, it would miss."""
    modes = torch._C._len_torch_function_stack() > 0 or torch._C._len_torch_dispatch_stack() > 0
    return modes or torch._C._is_tracing()


def is_symbolic(x: object) -> bool:
    """Whether this stands for a tensor under `torch.fx.symbolic_trace`."""
    return isinstance(x, Proxy)


def record_call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The call of a module under `torch.fx.symbolic_trace`, recorded as one node, as torch does with layers of its own."""
    tracer: Any = next(x.tracer for x in (*args, *kwargs.values()) if is_symbolic(x))
    if tracer.root is module:
        raise TypeError(
            f"torch.fx.symbolic_trace records {type(module).__name__} as one node; trace a model that holds it"
        )

    def record(value: Any) -> Any:
        if value is None or isinstance(value, (bool, Tensor, Proxy)):
            return value
        # an object such as a neighbourhood goes with the traced module, as a constant tensor does
        name = tracer.get_fresh_qualname("_constant")
        setattr(tracer.root, name, value)
        return tracer.create_proxy("get_attr", name, (), {})

    given = tuple(map(record, args)), {name: record(value) for name, value in kwargs.items()}
    return tracer.create_proxy("call_module", tracer.path_of_module(module), *given)


def refuse_scripting(module: nn.Module) -> nn.Module:
    """What `torch.jit.script` asks of a layer before it compiles it: the layers choose their kernels in Python."""
    raise TypeError(
        f"torch.jit.script cannot compile {type(module).__name__}; use torch.export.export, torch.compile or torch.jit.trace"
    )


def values_readable(x: torch.Tensor) -> bool:
    """Whether the numbers in a tensor can be looked at, and nobody traces the call who would take the answer for a constant."""
    # a compiler cannot look at the stack of modes: it is asked first
    if torch.compiler.is_compiling() or not (type(x) is Tensor or type(x) is nn.Parameter) or x.is_meta:
        return False
    return not (torch._C._len_torch_dispatch_stack() or torch._C._is_tracing() or under_transform())


def widened(x: torch.Tensor) -> torch.Tensor:
    """`x` in at least fp32: what is taken from it many times has a gradient that is a sum, which halves cannot hold."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def register(kind: type, tensors: tuple[str, ...]) -> None:
    """Make `kind` a pytree: the attributes named are its children, where they are not None; the rest is its structure."""

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
        from_dumpable_context=_as_tuples,
    )


def _as_tuples(dumped: Any) -> Any:
    """What was written as JSON with its lists as the tuples they were."""
    return tuple(_as_tuples(item) for item in dumped) if isinstance(dumped, list) else dumped
