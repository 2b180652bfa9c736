"""Parameter groups by manifold, as the layers of a model declare them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from polyhead.manifold import Euclidean, Manifold


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """The trainable parameters of a model with their names, one group per manifold.

    A module declares the manifolds of its parameters by an attribute `manifolds`, a dict from parameter names to manifolds. All
    other parameters are in the group of `Euclidean()`. Options can be set per group: `group["lr"] = 1e-4`.
    """
    declared = _collect_declared_manifolds(model)
    found: dict[Manifold, list[tuple[str, nn.Parameter]]] = {Euclidean(): []}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            found.setdefault(declared.get(parameter, Euclidean()), []).append((name, parameter))
    return [{"params": params, "manifold": manifold} for manifold, params in found.items() if params]


def check(model: nn.Module) -> tuple[bool, str | None]:
    """Whether every parameter is on its manifold; if not, which parameters are off, and how far."""
    declared = _collect_declared_manifolds(model)
    reasons = []
    for name, parameter in model.named_parameters():
        ok, reason = declared.get(parameter, Euclidean()).check(parameter.detach())
        if not ok:
            reasons.append(f"{name}: {reason}")
    return not reasons, "\n".join(reasons) or None


@torch.no_grad()
def project(model: nn.Module) -> None:
    """Project every parameter to its manifold, after loading other weights or changing to a wider dtype."""
    declared = _collect_declared_manifolds(model)
    for name, parameter in model.named_parameters():
        manifold = declared.get(parameter, Euclidean())
        if not parameter.isfinite().all():
            raise ValueError(f"{name} must be finite, got NaN or inf")
        if manifold != Euclidean():
            parameter.copy_(manifold.project(parameter))


def _collect_declared_manifolds(model: nn.Module) -> dict[nn.Parameter, Manifold]:
    """The manifolds that the modules of a model declare for their parameters."""
    if not isinstance(model, nn.Module):
        raise ValueError(f"model must be an nn.Module, got {type(model).__name__}")
    found: dict[nn.Parameter, Manifold] = {}
    for path, module in model.named_modules():
        owner = path or "the model"
        manifolds: dict[str, Manifold] = getattr(module, "manifolds", {})
        if not isinstance(manifolds, dict) or not all(isinstance(on, Manifold) for on in manifolds.values()):
            raise ValueError(f"{owner}: manifolds must be a dict from parameter names to manifolds, got {manifolds!r}")
        for name, manifold in manifolds.items():
            try:
                parameter = module.get_parameter(name)
            except AttributeError as error:
                raise ValueError(f"{owner}: manifolds must name parameters of the module, got {name!r}") from error
            if found.setdefault(parameter, manifold) != manifold:
                raise ValueError(
                    f"{owner}: {name}, shared with another module, must be on one manifold, got {manifold!r} here and "
                    f"{found[parameter]!r} there"
                )
    return found
