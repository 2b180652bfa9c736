"""Views on the heads of a small layer, over several neighbourhoods."""

import torch

from polyhead import Causal, MultiHeadAttention, Padding, Segments, Window

NEIGHBOURHOODS = {
    "dense": lambda: None,
    "causal": Causal,
    "window-padding": lambda: Window(5) & Padding(torch.tensor([3, 11, 0])),
    "segments": lambda: Segments(torch.arange(11) // 4),
    "mask-by-row": lambda: torch.rand(3, 1, 11, 11) > 0.4,
    "mask-by-head": lambda: torch.rand(6, 11, 11) > 0.4,
}


def make_heads(over="dense", **options):
    """A layer, its input and the view on its heads, over a neighbourhood of `NEIGHBOURHOODS`."""
    mha = MultiHeadAttention(30, 6, **options)
    x = torch.randn(3, 11, 30)
    return mha, x, mha(x, over=NEIGHBOURHOODS[over]())[1]
