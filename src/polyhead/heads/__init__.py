"""`Heads`: a lazy view on the attention weights of one call."""

from polyhead.heads import pytree
from polyhead.heads.origin import Origin
from polyhead.heads.view import Heads, Metric

pytree.register_heads()

__all__ = ["Heads", "Metric", "Origin"]
