"""The view on what heads did."""

from polyhead.heads import pytree as tree
from polyhead.heads.origin import Origin
from polyhead.heads.view import Heads, Metric

tree.register()

__all__ = ["Heads", "Metric", "Origin"]
