"""One multi-head attention, whose heads you can see."""

from polyhead import optim
from polyhead.attend import Explanation, attend, attention_weights, explain
from polyhead.heads import Heads
from polyhead.inspection import capture, report
from polyhead.manifold import Euclidean, Manifold, Stiefel
from polyhead.neighbourhood import Causal, Dense, Graph, Mask, Neighbourhood, Padding, Segments, Window
from polyhead.nn import KeyValueCache, MultiHeadAttention
from polyhead.position import ALiBi, Position, RelativeBias, Rotary, Stretch
from polyhead.score import GAT, Dot, GATv2, Score

__version__ = "0.5.0"

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
    "Heads",
    "KeyValueCache",
    "Manifold",
    "Mask",
    "MultiHeadAttention",
    "Neighbourhood",
    "Padding",
    "Position",
    "RelativeBias",
    "Rotary",
    "Score",
    "Segments",
    "Stiefel",
    "Stretch",
    "Window",
    "attend",
    "attention_weights",
    "capture",
    "explain",
    "optim",
    "report",
]
