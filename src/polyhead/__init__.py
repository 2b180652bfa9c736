"""One multi-head attention, whose heads you can see."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from polyhead import optim
from polyhead.attend import Explanation, attend, attention_weights, explain
from polyhead.heads import Heads
from polyhead.manifold import Euclidean, Manifold, Stiefel
from polyhead.neighbourhood import (
    Causal,
    Dense,
    Graph,
    Grid,
    Mask,
    Neighbourhood,
    Offsets,
    Padding,
    Segments,
    Window,
    from_mask_mod,
)
from polyhead.nn import KeyValueCache, MultiHeadAttention, from_conv, to_conv
from polyhead.position import ALiBi, Position, QuadraticOffset, RelativeBias, RopeScaling, Rotary
from polyhead.score import GAT, Dot, GATv2, Score

if TYPE_CHECKING:
    from polyhead.inspection.analysis.self_dominance import self_dominance
    from polyhead.inspection.capture.capture import capture
    from polyhead.inspection.report.report import report

__version__ = "0.9.0"

__all__ = [
    "GAT",
    "ALiBi",
    "Causal",
    "Dense",
    "Dot",
    "Euclidean",
    "Explanation",
    "GATv2",
    "Graph",
    "Grid",
    "Heads",
    "KeyValueCache",
    "Manifold",
    "Mask",
    "MultiHeadAttention",
    "Neighbourhood",
    "Offsets",
    "Padding",
    "Position",
    "QuadraticOffset",
    "RelativeBias",
    "RopeScaling",
    "Rotary",
    "Score",
    "Segments",
    "Stiefel",
    "Window",
    "attend",
    "attention_weights",
    "capture",
    "explain",
    "from_conv",
    "from_mask_mod",
    "optim",
    "report",
    "self_dominance",
    "to_conv",
]


# what inspects models is imported when it is first used: it takes as long as all the rest
_FROM_INSPECTION = ("capture", "report", "self_dominance")
_MODULES = ("inspection", "models")


def __getattr__(name: str) -> Any:
    """The inspector and its functions, and the models, on first use."""
    if name in _MODULES:
        return importlib.import_module(f"polyhead.{name}")
    if name not in _FROM_INSPECTION:
        raise AttributeError(f"module 'polyhead' has no attribute {name!r}")
    return getattr(importlib.import_module("polyhead.inspection"), name)


def __dir__() -> list[str]:
    """All names, also those that nobody has used yet."""
    return sorted({*globals(), *_FROM_INSPECTION, *_MODULES})
