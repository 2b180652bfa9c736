"""Argument checks of the layers: sizes, dropout rates, inputs, and argument names of other libraries."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from polyhead._checks import LARGEST_INT32, MAX_HEADS, check_dense_tensor, check_integer, check_number

FOREIGN_CONSTRUCTOR_ARGUMENTS = {
    "embed_dim": "d_model",
    "batch_first": "nothing: tensors are (..., items, features), the batch first",
    "kdim": "d_key",
    "vdim": "d_value",
    "add_zero_attn": "sink=0.0",
    "add_bias_kv": "nothing here: only the drop-in appends a learned key and value",
    "device": "with torch.device(device): around the constructor, or .to(device)",
    "dtype": ".to(dtype)",
}
FOREIGN_CALL_ARGUMENTS = {
    "key_padding_mask": "over=Padding(~key_padding_mask), True = a real key (padded queries get zero; queries=False lets them attend)",
    "attn_mask": "over=~attn_mask for a bool mask (here True = may attend), bias=attn_mask for numbers to add",
    "is_causal": "over=Causal()",
    "need_weights": "nothing: heads is always returned, and costs nothing until heads.weights is read",
    "average_attn_weights": "heads.weights.mean(-3)",
    "attention_mask": "over=Padding(attention_mask.bool()), for a mask of shape (batch, keys)",
}


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
    """Raise unless inputs have the dtype and device of the layer's weights. Under autocast dtypes may differ."""
    weight = next((p for p in layer.parameters() if p.is_floating_point()), None)
    if weight is None or torch.is_autocast_enabled(weight.device.type):
        return
    for name, x in inputs.items():
        if x.dtype != weight.dtype or x.device != weight.device:
            raise ValueError(
                f"{name} must be {weight.dtype} on {weight.device}, as the layer's weights are, got {x.dtype} on {x.device}; "
                f"pass {name}.to(…), or move the layer with .to(…)"
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


def foreign_argument_error(foreign: dict[str, Any], known: dict[str, str]) -> Exception:
    """The error for arguments of other layers; `known` gives the replacement of each."""
    unknown = [name for name in foreign if name not in known]
    if unknown:
        return TypeError(f"MultiHeadAttention takes no argument {unknown[0]!r}; see help(MultiHeadAttention)")
    lines = [f"  {name}= becomes {known[name]}" for name in foreign]
    if sum("over=" in known[name] for name in foreign) > 1:
        lines.append("  several neighbourhoods are joined with &: over=Causal() & Padding(lengths)")
    return ValueError(
        "unsupported arguments of torch.nn.MultiheadAttention or transformers:\n"
        + "\n".join(lines)
        + "\nA drop-in with torch's arguments is polyhead.interop.torch.MultiheadAttention"
    )
