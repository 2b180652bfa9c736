"""Modules whose parameters are DTensors for optimizers and checkpoints, and local tensors for their own `forward`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any, NamedTuple, TypeVar

import torch
from jaxtyping import Int
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, distribute_tensor

from polyhead.distributed.reductions import sum_gradient_over_ranks

Module = TypeVar("Module", bound=nn.Module)

# the attributes of a module that hold its views, and what it holds for all heads besides tensors
_VIEWS, _WHOLE_FIELDS = "_local_views", "_whole_fields"

_MODULE_STORES = ("_parameters", "_buffers", "_modules")


class LocalView(NamedTuple):
    """How this rank's part of a DTensor is read."""

    mesh: DeviceMesh
    sums_gradient: bool = False
    """Whether ranks use the same numbers for different heads: the gradient is then the sum of theirs."""
    rows: Int[Tensor, " rows"] | None = None
    """The rows that this rank uses, where every rank holds all of them."""

    def __deepcopy__(self, memo: dict[int, Any]) -> LocalView:
        # meshes cannot be copied
        return self


class Tensors:
    """Makes DTensors of the parameters and buffers of modules. A tensor that several modules share stays shared."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self._made: dict[int, tuple[Tensor, DTensor]] = {}

    def distribute(self, module: nn.Module, name: str, placement: Placement, view: LocalView) -> None:
        """Replace a parameter or buffer by a DTensor, which `module` reads as a local tensor by `read_as_local`."""
        vars(module).setdefault(_VIEWS, {})[name] = view
        store: dict[str, Any] = module._parameters if name in module._parameters else module._buffers
        old: Tensor | None = store.get(name)
        if old is not None:
            store[name] = self._distributed_once(old, placement)

    def _distributed_once(self, old: Tensor, placement: Placement) -> DTensor:
        if id(old) not in self._made:
            new = distribute_tensor(old.detach(), self.mesh, [placement])
            if isinstance(old, nn.Parameter):
                new = nn.Parameter(new, requires_grad=old.requires_grad)  # type: ignore[assignment]
            # the old tensor is kept, so that no other gets its id
            self._made[id(old)] = old, new
        made = self._made[id(old)][1]
        if made.placements != (placement,):
            raise ValueError(
                f"parameters that modules share must be sharded in one way, got {made.placements[0]} and {placement} for one of "
                f"shape {tuple(old.shape)}; untie them before shard_heads"
            )
        return made


def is_distributed(module: nn.Module) -> bool:
    """Whether `Tensors` has made DTensors of the module's tensors."""
    return _VIEWS in vars(module)


def own_tensor_names(module: nn.Module) -> Iterator[str]:
    """The names of the parameters and floating-point buffers that a module itself has."""
    yield from (name for name, x in module._parameters.items() if x is not None)
    yield from (name for name, x in module._buffers.items() if x is not None and x.is_floating_point())


def read_as_local(module: nn.Module, *bases: type) -> None:
    """Let a module read its DTensors as local tensors: its class becomes a subclass of `bases` and of its own class.

    `parameters()` and `state_dict()` still return DTensors. A module that would gain nothing keeps its class, by which kernels know
    it.
    """
    kind: Any = type(module)
    if not bases and not is_distributed(module):
        return
    module.__class__ = _local_class(kind, bases, tuple(vars(module).get(_VIEWS, {})))


def local_twin(module: nn.Module) -> nn.Module:
    """A module of the same class that has this rank's parts of the tensors, for kernels that know the class."""
    if not is_distributed(module):
        return module
    twin = object.__new__(type(module))
    twin.__dict__.update(vars(module))
    for store in ("_parameters", "_buffers"):
        own: dict[str, Any] = vars(module)[store]
        vars(twin)[store] = {name: _read_local(module, name) for name in own}
    return twin


def keep_whole_fields(module: nn.Module, whole: nn.Module) -> None:
    """Let a module with some heads remember what the module with all heads holds besides tensors, such as their number."""
    vars(module)[_WHOLE_FIELDS] = {name: x for name, x in vars(whole).items() if name not in _MODULE_STORES}


def whole_twin(module: Module) -> Module:
    """A module of the same class that has whole tensors, without gradients. Every rank must call it."""
    if not any(is_distributed(part) for part in module.modules()):
        return module
    twin = object.__new__(type(module))
    twin.__dict__.update(vars(module) | vars(module).get(_WHOLE_FIELDS, {}))
    vars(twin)["_modules"] = {name: None if x is None else whole_twin(x) for name, x in module._modules.items()}
    for store in ("_parameters", "_buffers"):
        own: dict[str, Any] = vars(module)[store]
        vars(twin)[store] = {name: x.full_tensor().detach() if isinstance(x, DTensor) else x for name, x in own.items()}
    return twin


@cache
def _local_class(kind: type, bases: tuple[type, ...], names: Iterable[str]) -> type:
    def local_property(name: str) -> property:
        return property(lambda module: _read_local(module, name))

    fields: dict[str, Any] = {name: local_property(name) for name in names}
    fields |= {"__module__": kind.__module__, "__doc__": kind.__doc__, "get_parameter": _get_parameter}
    return type(kind.__name__, (*bases, kind), fields)


def _get_parameter(module: nn.Module, target: str) -> nn.Parameter:
    """`nn.Module.get_parameter`, which would return a local tensor."""
    path, _, name = target.rpartition(".")
    parameter = module.get_submodule(path)._parameters.get(name)
    if parameter is None:
        raise AttributeError(f"{type(module).__name__} has no parameter {target!r}")
    return parameter


def _read_local(module: nn.Module, name: str) -> Tensor | None:
    x: Any = module._parameters.get(name)
    x = module._buffers.get(name) if x is None else x
    view: LocalView | None = vars(module)[_VIEWS].get(name)
    # outside of forward, FSDP has cut the parameter along a second axis of its mesh
    if view is None or not isinstance(x, DTensor) or x.device_mesh != view.mesh:
        outside: Tensor | None = x
        return outside
    local = x.to_local(grad_placements=x.placements) if torch.is_grad_enabled() else x.to_local()
    if view.sums_gradient:
        local = sum_gradient_over_ranks(local, view.mesh.get_group())
    return local if view.rows is None else local.index_select(0, view.rows)
