"""Names in files that earlier releases wrote, and what they are called now: the only place that knows old names."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import torch

# modules of a TransformerLayer, in state dicts of 0.6 and earlier
TRANSFORMER_LAYER = {
    "self": "self_attn",
    "self_norm": "self_attn_norm",
    "cross": "cross_attn",
    "cross_norm": "cross_attn_norm",
}
# fields of a pickled Graph
GRAPH = {"order": "csr"}
# classes in pickles
CLASSES = {"polyhead.neighbourhood.order.Order": "polyhead.neighbourhood.csr.CSR"}


def rename_keys(state: dict[str, Any], prefix: str, names: Mapping[str, str]) -> None:
    """Rename the keys of a state dict, in place, where the part after `prefix` starts with an old name."""
    for key in [key for key in state if key.startswith(prefix)]:
        first, dot, rest = key[len(prefix) :].partition(".")
        if dot and first in names:
            state[f"{prefix}{names[first]}.{rest}"] = state.pop(key)


def read_old_classes() -> None:
    """Let `pickle` and `torch.load(weights_only=True)` find classes under the paths that older files name."""
    for old, new in CLASSES.items():
        (old_module, _, old_name), (module, _, name) = old.rpartition("."), new.rpartition(".")
        kind = getattr(importlib.import_module(module), name)
        alias = sys.modules.setdefault(old_module, ModuleType(old_module))
        setattr(alias, old_name, kind)
        torch.serialization.add_safe_globals([(kind, old)])
