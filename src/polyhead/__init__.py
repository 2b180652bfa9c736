"""One multi-head attention, whose heads you can see."""

from polyhead.attend import Explanation, attend, attention_weights, explain
from polyhead.heads import Heads
from polyhead.neighbourhood import Causal, Dense, Mask, Neighbourhood, Padding, Segments, Window
from polyhead.nn import KeyValueCache, MultiHeadAttention
from polyhead.position import ALiBi, Position, RelativeBias, Rotary
from polyhead.score import Dot, Score

__version__ = "0.1.0"

__all__ = [
    "ALiBi",
    "Causal",
    "Dense",
    "Dot",
    "Explanation",
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
    "Window",
    "attend",
    "attention_weights",
    "explain",
]
