"""Checkpoints of older PyG versions and of DGL, under the names that PyG has now."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping

import torch
from torch import Tensor

Names = Mapping[str, str]

# what a parameter was called, by the first part of its name
GATV2 = {"fc_src": "lin_l", "fc_dst": "lin_r", "attn": "att", "res_fc": "res"}
DGL = ("fc", "fc_src", "fc_dst", "attn", "attn_l", "attn_r", "res_fc")


def gat(one: bool) -> Names:
    """The names of a GATConv, with `one` map for sources and destinations or two."""
    source, destination = ("lin", "lin") if one else ("lin_src", "lin_dst")
    return {
        # PyG 2.0 to 2.4
        "lin_src": source, "lin_dst": destination,
        # PyG 1.6 and 1.7
        "lin_l": source, "lin_r": destination, "att_l": "att_src", "att_r": "att_dst",
        # DGL
        "fc": "lin", "fc_src": source, "fc_dst": destination, "attn_l": "att_src", "attn_r": "att_dst", "res_fc": "res",
    }  # fmt: skip


def renamed(state: MutableMapping[str, Tensor], prefix: str, names: Names) -> list[str]:
    """Put today's names in the place of old ones; what is wrong with it is returned in words."""
    wrong = []
    for key in [key for key in state if key.startswith(prefix)]:
        first, dot, rest = key[len(prefix) :].partition(".")
        new = f"{prefix}{names.get(first, first)}{dot}{rest}"
        if new == key:
            continue
        value = state.pop(key)
        if new in state and not torch.equal(state[new], value):
            wrong.append(
                f"{key}: it must hold the same numbers as its twin to become {new}; pass a pair as in_channels"
            )
        state[new] = value
    return wrong


def from_dgl(state: MutableMapping[str, Tensor], prefix: str, heads: int, concat: bool, bias: Tensor | None) -> None:
    """Move the bias from the residual, where DGL may have it, and average over heads where the layer does."""
    if f"{prefix}res.bias" in state:
        state[f"{prefix}bias"] = state.pop(f"{prefix}res.bias")
    for name in (f"{prefix}bias", f"{prefix}res.weight"):
        if name in state and not concat:
            state[name] = state[name].unflatten(0, (heads, -1)).mean(0)
    if bias is not None:
        state.setdefault(f"{prefix}bias", torch.zeros_like(bias))
