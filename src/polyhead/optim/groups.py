"""Manifolds read off a model's layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from polyhead.manifold import Euclidean, Manifold


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """The parameters of a model that are trained, with their names, in one group for each manifold.

    A module says where its parameters lie by an attribute `manifolds`, a dict from a parameter's name in it to a manifold.
    All that nobody speaks of is in the group of `Euclidean()`. Groups may get options of their own, such as `group["lr"] = 1e-4`.
    """
    placed = _placed(model)
    found: dict[Manifold, list[tuple[str, nn.Parameter]]] = {Euclidean(): []}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            found.setdefault(placed.get(parameter, Euclidean()), []).append((name, parameter))
    return [{"params": params, "manifold": manifold} for manifold, params in found.items() if params]


def check(model: nn.Module) -> tuple[bool, str | None]:
    """Whether every parameter lies on its manifold; if not, which have drifted, and how far."""
    placed = _placed(model)
    reasons = []
    for name, parameter in model.named_parameters():
        ok, reason = placed.get(parameter, Euclidean()).check(parameter.detach())
        if not ok:
            reasons.append(f"{name}: {reason}")
    return not reasons, "\n".join(reasons) or None


@torch.no_grad()
def project(model: nn.Module) -> None:
    """Take every parameter to the nearest point of its manifold: after loading weights from elsewhere, or a wider dtype."""
    placed = _placed(model)
    for name, parameter in model.named_parameters():
        manifold = placed.get(parameter, Euclidean())
        if not parameter.isfinite().all():
            raise ValueError(f"{name}: it has numbers that are not finite; there is no nearest point")
        if manifold != Euclidean():
            parameter.copy_(manifold.project(parameter))


def _placed(model: nn.Module) -> dict[nn.Parameter, Manifold]:
    """Where the parameters lie that modules speak of."""
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"model: it is {type(model).__name__}; it must be an nn.Module, whose layers know their manifolds"
        )
    found: dict[nn.Parameter, Manifold] = {}
    for path, module in model.named_modules():
        manifolds: dict[str, Manifold] = getattr(module, "manifolds", {})
        if not isinstance(manifolds, dict) or not all(isinstance(on, Manifold) for on in manifolds.values()):
            raise ValueError(
                f"{path or 'the model'}: its manifolds are {manifolds!r}; they must be a dict from names of its parameters to manifolds"
            )
        for name, manifold in manifolds.items():
            try:
                parameter = module.get_parameter(name)
            except AttributeError as error:
                raise ValueError(
                    f"{path or 'the model'}: its manifolds name {name!r}, which is no parameter"
                ) from error
            if found.setdefault(parameter, manifold) != manifold:
                raise ValueError(
                    f"{path or 'the model'}: {name} is shared with another module, and lies on {found[parameter]!r} there and on "
                    f"{manifold!r} here; it must be one manifold"
                )
    return found
