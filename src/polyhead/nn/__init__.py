"""Layers."""

from polyhead.nn.attention import MultiHeadAttention
from polyhead.nn.cache import KeyValueCache, Memory
from polyhead.nn.transformer import FeedForward, Transformer, TransformerLayer

__all__ = ["FeedForward", "KeyValueCache", "Memory", "MultiHeadAttention", "Transformer", "TransformerLayer"]
