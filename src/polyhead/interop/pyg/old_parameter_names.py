"""Rename the parameters of checkpoints of older PyG versions and of DGL to PyG's current names."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping

import torch
from torch import Tensor

NewNameByOld = Mapping[str, str]

# the first part of an old name -> the current one
GATV2_NAMES = {"fc_src": "lin_l", "fc_dst": "lin_r", "attn": "att", "res_fc": "res"}
DGL_NAMES = ("fc", "fc_src", "fc_dst", "attn", "attn_l", "attn_r", "res_fc")


def old_gat_parameter_names(shared: bool) -> NewNameByOld:
    """The names of a GATConv, whose linear map for sources and destinations may be shared."""
    source, destination = ("lin", "lin") if shared else ("lin_src", "lin_dst")
    return {
        # PyG 2.0 to 2.4
        "lin_src": source, "lin_dst": destination,
        # PyG 1.6 and 1.7
        "lin_l": source, "lin_r": destination, "att_l": "att_src", "att_r": "att_dst",
        # DGL
        "fc": "lin", "fc_src": source, "fc_dst": destination, "attn_l": "att_src", "attn_r": "att_dst", "res_fc": "res",
    }  # fmt: skip


def rename_state_dict_keys(state: MutableMapping[str, Tensor], prefix: str, names: NewNameByOld) -> list[str]:
    """Replace old names by current ones; returns the errors."""
    errors = []
    for key in [key for key in state if key.startswith(prefix)]:
        first, dot, rest = key[len(prefix) :].partition(".")
        new = f"{prefix}{names.get(first, first)}{dot}{rest}"
        if new == key:
            continue
        value = state.pop(key)
        if new in state and not torch.equal(state[new], value):
            errors.append(
                f"{key} must be equal to the other old key that maps to {new}, got different values; build the layer with "
                "in_channels=(n, n) for separate weights of sources and destinations"
            )
        state[new] = value
    return errors


def convert_dgl_bias_and_residual(
    state: MutableMapping[str, Tensor], prefix: str, heads: int, concat: bool, bias: Tensor | None
) -> None:
    """Move the bias from the residual, where DGL may store it, and average over heads if the layer does."""
    if f"{prefix}res.bias" in state:
        state[f"{prefix}bias"] = state.pop(f"{prefix}res.bias")
    for name in (f"{prefix}bias", f"{prefix}res.weight"):
        if name in state and not concat:
            state[name] = state[name].unflatten(0, (heads, -1)).mean(0)
    if bias is not None:
        state.setdefault(f"{prefix}bias", torch.zeros_like(bias))
