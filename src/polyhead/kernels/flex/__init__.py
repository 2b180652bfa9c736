"""Attention on GPUs by torch's flex_attention."""
