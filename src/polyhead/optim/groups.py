"""Parameter groups by manifold, as the layers of a model declare them."""

from __future__ import annotations

import gc
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from polyhead.manifold import Euclidean, Manifold
from polyhead.optim.sharded_tensors import any_process, find_part, own_part, whole, write_whole


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """The trainable parameters of a model with their names, one group per manifold.

    A module declares the manifolds of its parameters by an attribute `manifolds`, a dict from parameter names to manifolds. All
    other parameters are in the first group, which has no `"manifold"`: torch's optimizers save every option of a group, and
    `torch.load(weights_only=True)` reads no manifolds. Options can be set per group: `group["lr"] = 1e-4`.
    """
    declared = _collect_declared_manifolds(model)
    found: dict[Manifold, list[tuple[str, nn.Parameter]]] = {Euclidean(): []}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            found.setdefault(declared.get(parameter, Euclidean()), []).append((name, parameter))
    free = found.pop(Euclidean())
    constrained = [{"params": params, "manifold": manifold} for manifold, params in found.items()]
    return [{"params": free}, *constrained] if free else constrained


def split(model: nn.Module) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """`groups(model)` in two lists for two optimizers: those on manifolds, and the free one, which any optimizer may train."""
    found = groups(model)
    return [group for group in found if "manifold" in group], [group for group in found if "manifold" not in group]


def check(model: nn.Module) -> tuple[bool, str | None]:
    """Whether every parameter is on its manifold; if not, which parameters are off, and how far.

    Of DTensors, each process checks its own part; the answer is the same on all of them, the reasons are its own.
    """
    declared = _collect_declared_manifolds(model)
    reasons = []
    for name, parameter in model.named_parameters():
        part = find_part(parameter, declared.get(parameter, Euclidean()))
        ok, reason = part.manifold.check((whole if part.is_cut else own_part)(parameter.detach()))
        if not ok:
            reasons.append(f"{name}: {reason}")
    (any_off,) = any_process([bool(reasons)], model.parameters())
    return not any_off, "\n".join(reasons) or ("a parameter is off on another process" if any_off else None)


@torch.no_grad()
def project(model: nn.Module) -> None:
    """Project every parameter to its manifold, after loading other weights or changing to a wider dtype."""
    declared = _collect_declared_manifolds(model)
    for name, parameter in model.named_parameters():
        manifold, is_cut = find_part(parameter, declared.get(parameter, Euclidean()))
        x = whole(parameter.detach()) if is_cut else own_part(parameter.detach())
        (off,) = any_process([not bool(x.isfinite().all())], [parameter])
        if off:
            raise ValueError(f"{name} must be finite, got NaN or inf")
        if manifold != Euclidean() and x.numel():
            projected = manifold.project(x)
            write_whole(projected, parameter) if is_cut else x.copy_(projected)


def find_declared_manifolds(params: Collection[Tensor]) -> dict[Tensor, Manifold]:
    """The manifolds that modules declare for these parameters, without knowing the model.

    All modules in memory are searched: a parameter does not refer to its module, and a mark on it would be lost where a module
    gets new parameters, by deepcopy, pruning, `to_empty` or `load_state_dict(assign=True)`. (`gc.freeze` hides modules.)
    """
    objects = gc.get_objects()
    kinds = {kind for kind in set(map(type, objects)) if issubclass(kind, nn.Module)}
    given, found = set(params), dict[Tensor, Manifold]()
    for module in objects:
        if type(module) not in kinds or not (hasattr(type(module), "manifolds") or "manifolds" in vars(module)):
            continue
        # modules without these parameters are not read: they may be invalid, or not yet initialised
        if "_parameters" in vars(module) and not given.isdisjoint(module.parameters()):
            declared = _read_declared_manifolds(module, type(module).__name__)
            found.update((parameter, on) for _, parameter, on in declared if parameter in given)
    return found


def _collect_declared_manifolds(model: nn.Module) -> dict[nn.Parameter, Manifold]:
    """The manifolds that the modules of a model declare for their parameters."""
    if not isinstance(model, nn.Module):
        raise ValueError(f"model must be an nn.Module, got {type(model).__name__}")
    found: dict[nn.Parameter, Manifold] = {}
    for path, module in model.named_modules():
        owner = path or "the model"
        for name, parameter, manifold in _read_declared_manifolds(module, owner):
            if found.setdefault(parameter, manifold) != manifold:
                raise ValueError(
                    f"{owner}: {name}, shared with another module, must be on one manifold, got {manifold!r} here and "
                    f"{found[parameter]!r} there"
                )
    return found


def _read_declared_manifolds(module: nn.Module, owner: str) -> Iterator[tuple[str, nn.Parameter, Manifold]]:
    """The parameters of one module that have a manifold: their names, themselves and the manifolds."""
    manifolds: dict[str, Manifold] = getattr(module, "manifolds", {})
    if not isinstance(manifolds, dict) or not all(isinstance(on, Manifold) for on in manifolds.values()):
        raise ValueError(f"{owner}: manifolds must be a dict from parameter names to manifolds, got {manifolds!r}")
    for name, manifold in manifolds.items():
        path, _, last = name.rpartition(".")
        try:
            # a module may show other tensors under the names of its parameters: this process's parts of them
            parameter = module.get_submodule(path)._parameters[last]
        except (AttributeError, KeyError) as error:
            raise ValueError(f"{owner}: manifolds must name parameters of the module, got {name!r}") from error
        assert parameter is not None
        yield name, parameter, manifold
