"""Checks of option names and of saved states."""

from __future__ import annotations

import difflib
from typing import Any

from torch import Tensor

# Options of torch's and geoopt's optimizers that are not supported.
_UNSUPPORTED_OPTIONS = ("amsgrad", "capturable", "differentiable", "foreach", "fused", "stabilize")


def check_option_names(group: dict[str, Any], known: dict[str, Any]) -> None:
    """Raise for unsupported options of other optimizers that are set, and for misspelt ones. Other names are the caller's."""
    for name, value in group.items():
        if name in _UNSUPPORTED_OPTIONS and value:
            raise ValueError(f"{name} must be left out, got {value!r}; this optimizer does not support it")
        close = difflib.get_close_matches(name, known, 1, 0.85) if name not in known else []
        if close:
            raise ValueError(f"{name}: unknown option; did you mean {close[0]!r}?")


def check_saved_state(parameter: str, saved: dict[str, Any], own: dict[str, Tensor]) -> None:
    """Raise where the saved state of a parameter has other tensors or shapes than this optimizer needs."""
    tensors = {name: value for name, value in saved.items() if name != "step"}
    if tensors and set(tensors) != set(own):
        raise ValueError(
            f"state_dict: the state of {parameter} must be {', '.join(own)}, got {', '.join(tensors)}; load the state of the same "
            "kind of optimizer"
        )
    for name, value in tensors.items():
        if value.shape != own[name].shape:
            raise ValueError(
                f"state_dict: {name} of {parameter} must have shape {tuple(own[name].shape)}, got {tuple(value.shape)}; use the "
                "options of the saved optimizer"
            )


def drop_none_values(saved: dict[str, Any]) -> dict[str, Any]:
    """A saved state without None, which torch's SGD writes where it has no momentum."""
    return {name: value for name, value in saved.items() if value is not None}
