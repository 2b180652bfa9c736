"""Attention on GPUs by torch's flex_attention."""

from polyhead.kernels.flex.kernel import Flex

__all__ = ["Flex"]
