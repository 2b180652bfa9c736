"""What layers say of arguments that are not theirs: sizes, shares, dtypes, and the words of other libraries."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from polyhead._checks import HEADS, LARGEST, check_integer, check_number, check_tensor

CONSTRUCTOR_WORDS = {
    "embed_dim": "d_model",
    "batch_first": "nothing: tensors are (..., items, features), the batch first",
    "kdim": "d_key",
    "vdim": "d_value",
    "add_zero_attn": "sink=0.0",
    "add_bias_kv": "nothing here: only the drop-in appends a learned key and value",
    "device": "with torch.device(device): around the constructor, or .to(device)",
    "dtype": ".to(dtype)",
}
CALL_ARGUMENTS = {
    "key_padding_mask": "over=Padding(~key_padding_mask), True = a real key (padded queries get zero; queries=False lets them attend)",
    "attn_mask": "over=~attn_mask for a bool mask (here True = may attend), bias=attn_mask for numbers to add",
    "is_causal": "over=Causal()",
    "need_weights": "nothing: heads is always handed back, and costs nothing until heads.weights is asked for",
    "average_attn_weights": "heads.weights.mean(-3)",
    "attention_mask": "over=Padding(attention_mask.bool()), for one of (batch, keys)",
}


def check_sizes(**sizes: object) -> list[Any]:
    """Sizes that may be left out, as integers, 1 or more; None stays."""
    most = {"kv_heads": HEADS}
    return [
        None if size is None else check_integer(name, size, 1, most.get(name, LARGEST)) for name, size in sizes.items()
    ]


def check_shares(**shares: object) -> list[float]:
    """Shares that dropout may have."""
    return [check_number(name, share, 0, 1, "[)") for name, share in shares.items()]


def check_features(name: str, x: Tensor, features: int, layer: nn.Module) -> None:
    """Raise where this is not a tensor (..., features) of a layer's dtype, on its device."""
    if check_tensor(name, x, f"(..., {features})").dim() < 1 or x.shape[-1] != features:
        raise ValueError(f"{name} must be a tensor (..., {features}), got shape {tuple(x.shape)}")
    check_like(layer, **{name: x})


def check_like(layer: nn.Module, **inputs: Tensor) -> None:
    """Raise where inputs are not of a layer's dtype or device: asked once torch has refused them, in its own words."""
    own = next((p for p in layer.parameters() if p.is_floating_point()), None)
    for name, x in inputs.items():
        # under autocast dtypes differ, and are no reason
        if (
            own is not None
            and not torch.is_autocast_enabled(own.device.type)
            and (x.dtype != own.dtype or x.device != own.device)
        ):
            raise ValueError(
                f"{name} must be {own.dtype} on {own.device}, as the layer's weights are, got {x.dtype} on {x.device}; "
                f"pass {name}.to(…), or move the layer with .to(…)"
            )


def foreign_argument_error(words: dict[str, Any], known: dict[str, str]) -> Exception:
    """The error for words of other layers, with what each becomes here."""
    unknown = [word for word in words if word not in known]
    if unknown:
        return TypeError(f"MultiHeadAttention takes no argument {unknown[0]!r}; see help(MultiHeadAttention)")
    lines = [f"  {word}= becomes {known[word]}" for word in words]
    if sum("over=" in known[word] for word in words) > 1:
        lines.append("  several neighbourhoods are joined with &: over=Causal() & Padding(lengths)")
    return ValueError(
        "these are words of other layers:\n"
        + "\n".join(lines)
        + "\nFor a drop-in that takes torch's words, use polyhead.interop.torch.MultiheadAttention"
    )
