"""Reads state dicts and pickles of earlier releases (0.6.1 and older): old names, mapped to the present ones.

No other module knows old names of Polyhead.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import nn

# children of a TransformerLayer in state dicts of 0.6.1 and earlier
TRANSFORMER_LAYER_KEYS = {
    "self": "self_attn",
    "self_norm": "self_attn_norm",
    "cross": "cross_attn",
    "cross_norm": "cross_attn_norm",
}
# children of Bert's embeddings, Gpt and Llama
MODEL_KEYS = {"words": "token_embedding"}
# fields of a pickled Graph
GRAPH_FIELDS = {"order": "csr"}
# present classes, and where old pickles look for them
PICKLED_CLASSES = {
    "polyhead.neighbourhood.csr.CSR": "polyhead.neighbourhood.order.Order",
    "polyhead.neighbourhood.base.BatchRows": "polyhead.neighbourhood.base.Rows",
    "polyhead.neighbourhood.algebra.Both": "polyhead.neighbourhood.base.Both",
}


def accept_old_state_dict_keys(module: nn.Module, names: Mapping[str, str]) -> None:
    """Make `load_state_dict` of a module accept the old names of its children, which `names` maps to the new ones."""
    module.register_load_state_dict_pre_hook(partial(_rename_keys, names))


def _rename_keys(names: Mapping[str, str], _: nn.Module, state: dict[str, Any], prefix: str, *__: object) -> None:
    for key in [key for key in state if key.startswith(prefix)]:
        first, dot, rest = key[len(prefix) :].partition(".")
        if dot and first in names:
            state[f"{prefix}{names[first]}.{rest}"] = state.pop(key)


def accept_old_pickled_classes(*kinds: type) -> None:
    """Make `pickle` and `torch.load(weights_only=True)` find classes under the paths that old files contain."""
    for kind in kinds:
        old = PICKLED_CLASSES[f"{kind.__module__}.{kind.__qualname__}"]
        old_module, _, old_name = old.rpartition(".")
        alias = sys.modules.setdefault(old_module, ModuleType(old_module))
        setattr(alias, old_name, kind)
        torch.serialization.add_safe_globals([(kind, old)])
