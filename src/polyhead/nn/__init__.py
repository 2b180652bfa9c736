"""Layers."""

from polyhead.nn.attention import MultiHeadAttention
from polyhead.nn.cache import KeyValueCache

__all__ = ["KeyValueCache", "MultiHeadAttention"]
