"""Drop-ins for PyG's attention layers: the same constructors, calls and parameters, computed by polyhead.

If torch_geometric is installed, they are subclasses of its `MessagePassing`; otherwise they are plain modules.
"""

from polyhead.interop.pyg.layers import GATConv, GATv2Conv, TransformerConv

__all__ = ["GATConv", "GATv2Conv", "TransformerConv"]
