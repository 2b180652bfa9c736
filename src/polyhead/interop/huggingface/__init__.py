"""Polyhead as an attention backend of transformers: `attn_implementation="polyhead"`."""

from polyhead.interop.huggingface.attention import register

__all__ = ["register"]
