"""Layers."""

from polyhead.nn.attention import MultiHeadAttention
from polyhead.nn.cache import KeyValueCache, KeyValues
from polyhead.nn.conv.conv_as_attention import Certificate, ConvolutionalAttention, from_conv, to_conv
from polyhead.nn.transformer import Transformer
from polyhead.nn.transformer_layer import FeedForward, TransformerLayer

__all__ = [
    "Certificate",
    "ConvolutionalAttention",
    "FeedForward",
    "KeyValueCache",
    "KeyValues",
    "MultiHeadAttention",
    "Transformer",
    "TransformerLayer",
    "from_conv",
    "to_conv",
]
