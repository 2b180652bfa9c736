"""Argument checks of the layers: sizes, dropout rates and inputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from polyhead._checks import LARGEST_INT32, MAX_HEADS, check_dense_tensor, check_integer, check_number
from polyhead._foreign_arguments import hint_for_input


def check_optional_sizes(**sizes: object) -> list[Any]:
    """Optional sizes as integers of at least 1; None stays None."""
    maximum = {"kv_heads": MAX_HEADS}
    return [
        None if size is None else check_integer(name, size, 1, maximum.get(name, LARGEST_INT32))
        for name, size in sizes.items()
    ]


def check_dropout_rates(**shares: object) -> list[float]:
    """Dropout rates, in [0, 1)."""
    return [check_number(name, share, 0, 1, "[)") for name, share in shares.items()]


def check_input_features(name: str, x: Tensor, features: int, layer: nn.Module) -> None:
    """Raise unless `x` is a tensor (..., features) with the dtype and device of the layer's weights."""
    if check_dense_tensor(name, x, f"(..., {features})").dim() < 1 or x.shape[-1] != features:
        raise ValueError(f"{name} must be a tensor (..., {features}), got shape {tuple(x.shape)}")
    check_dtype_and_device(layer, **{name: x})


def check_dtype_and_device(layer: nn.Module, **inputs: Tensor) -> None:
    """Raise unless inputs have the dtype and device of the layer's weights. Under autocast, floating-point dtypes other than float64 may differ."""
    weight = next((p for p in layer.parameters() if p.is_floating_point()), None)
    if weight is None:
        return
    # autocast converts all floating-point dtypes but float64
    autocast = torch.is_autocast_enabled(weight.device.type) and weight.dtype != torch.float64
    for name, x in inputs.items():
        same_dtype = x.dtype == weight.dtype or (autocast and x.is_floating_point() and x.dtype != torch.float64)
        if not same_dtype or x.device != weight.device:
            raise ValueError(
                f"{name} must be {weight.dtype} on {weight.device}, as the layer's weights are, got {x.dtype} on {x.device}; "
                + _conversion_hint(name, x, weight, same_dtype)
            )


def _conversion_hint(name: str, x: Tensor, weight: Tensor, same_dtype: bool) -> str:
    """How an input, or the layer, gets the dtype and device of the other."""
    if same_dtype:
        return f"pass {name}.to({str(weight.device)!r}), or move the layer with layer.to({str(x.device)!r})"
    hint = hint_for_input(name, x)
    if hint:
        return hint[2:]
    convert = f"pass {name}.to({weight.dtype})"
    if x.is_floating_point():
        return (
            f"{convert}, or convert the layer with layer.{'double()' if x.dtype == torch.float64 else f'to({x.dtype})'}"
        )
    return (
        convert if x.is_complex() or x.dtype == torch.bool else f"{convert}; token ids go through an nn.Embedding first"
    )


class explain_input_mismatch:
    """Context in which torch's error about an input becomes a `ValueError` that names the argument.

    Inputs are checked only after torch has failed, so a call that works pays nothing for the checks. If they pass, torch's error stays.

    Args:
        layer: the layer whose weights have the right dtype and device.
        features: if given, inputs must be tensors (..., features).
        inputs: the tensors to check, by argument name.
    """

    __slots__ = ("features", "inputs", "layer")

    def __init__(self, layer: nn.Module, features: int | None = None, /, **inputs: Tensor) -> None:
        self.layer, self.features, self.inputs = layer, features, inputs

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: object, traceback: object) -> None:
        if kind is None:
            return
        if self.features is None:
            if issubclass(kind, RuntimeError):
                check_dtype_and_device(self.layer, **self.inputs)
        elif issubclass(kind, (RuntimeError, TypeError, AttributeError)):
            for name, x in self.inputs.items():
                check_input_features(name, x, self.features, self.layer)
