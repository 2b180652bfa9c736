"""Who may attend to whom.

A neighbourhood is a predicate, `allows(head, query, key)`. The mask and the interval of keys outside which a kernel
computes nothing derive from it. Positions are counted along the keys: the last query is at the last key
("lower-right"), so that one predicate serves self-attention and step-by-step decoding.
"""

import torch

from polyhead._old_checkpoints import accept_old_pickled_classes
from polyhead.neighbourhood.algebra import Both, Combination, Complement, Either, intersection_parts, operands
from polyhead.neighbourhood.base import BatchRows, Dense, Mask, Neighbourhood, as_neighbourhood
from polyhead.neighbourhood.csr import CSR
from polyhead.neighbourhood.from_mask_mod import MaskModNeighbourhood, from_mask_mod
from polyhead.neighbourhood.graph import Graph
from polyhead.neighbourhood.grid import Grid, Offsets
from polyhead.neighbourhood.lattice import Lattice
from polyhead.neighbourhood.sequence import Causal, Padding, Segments, Window
from polyhead.neighbourhood.shapes import Sizes, broadcasts_to

# an exported program stores an example of each neighbourhood argument, and torch.export.load reads it with weights_only
torch.serialization.add_safe_globals([Dense, Causal, Window, Padding, Segments, Mask, Graph, CSR, Grid, Offsets])
torch.serialization.add_safe_globals([Both, Either, Complement])
accept_old_pickled_classes(CSR, BatchRows, Both)

__all__ = [
    "CSR",
    "BatchRows",
    "Both",
    "Causal",
    "Combination",
    "Complement",
    "Dense",
    "Either",
    "Graph",
    "Grid",
    "Lattice",
    "Mask",
    "MaskModNeighbourhood",
    "Neighbourhood",
    "Offsets",
    "Padding",
    "Segments",
    "Sizes",
    "Window",
    "as_neighbourhood",
    "broadcasts_to",
    "from_mask_mod",
    "intersection_parts",
    "operands",
]
