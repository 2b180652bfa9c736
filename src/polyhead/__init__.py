"""One multi-head attention, whose heads you can see."""

from polyhead.attend import Explanation, attend, attention_weights, explain
from polyhead.heads import Heads
from polyhead.inspection import capture, report
from polyhead.neighbourhood import Causal, Dense, Graph, Mask, Neighbourhood, Padding, Segments, Window
from polyhead.nn import KeyValueCache, MultiHeadAttention
from polyhead.position import ALiBi, Position, RelativeBias, Rotary, Stretch
from polyhead.score import GAT, Dot, GATv2, Score

__version__ = "0.4.0"

__all__ = [
    "GAT",
    "ALiBi",
    "Causal",
    "Dense",
    "Dot",
    "Explanation",
    "GATv2",
    "Graph",
    "Heads",
    "KeyValueCache",
    "Mask",
    "MultiHeadAttention",
    "Neighbourhood",
    "Padding",
    "Position",
    "RelativeBias",
    "Rotary",
    "Score",
    "Segments",
    "Stretch",
    "Window",
    "attend",
    "attention_weights",
    "capture",
    "explain",
    "report",
]
