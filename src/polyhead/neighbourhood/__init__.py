"""Who may attend to whom.

A neighbourhood is a predicate, `allows(head, query, key)`, and everything else derives from it: the mask, and
the interval of keys outside which a kernel computes nothing. Positions are counted along the keys: the last query
stands at the last key ("lower-right"), so that one predicate serves self-attention and step-by-step decoding.
"""

import torch

from polyhead._renamed import read_old_classes
from polyhead.neighbourhood.base import Both, Dense, Mask, Neighbourhood, Rows, Sizes, broadcasts, neighbourhood, parts
from polyhead.neighbourhood.csr import CSR
from polyhead.neighbourhood.graph import Graph
from polyhead.neighbourhood.grid import Grid, Lattice, Offsets
from polyhead.neighbourhood.sequence import Causal, Padding, Segments, Window

# an exported program that takes a neighbourhood keeps an example of it, which torch.export.load reads as weights only
torch.serialization.add_safe_globals([Dense, Causal, Window, Padding, Segments, Mask, Both, Graph, CSR, Grid, Offsets])
read_old_classes()

__all__ = [
    "CSR",
    "Both",
    "Causal",
    "Dense",
    "Graph",
    "Grid",
    "Lattice",
    "Mask",
    "Neighbourhood",
    "Offsets",
    "Padding",
    "Rows",
    "Segments",
    "Sizes",
    "Window",
    "broadcasts",
    "neighbourhood",
    "parts",
]
