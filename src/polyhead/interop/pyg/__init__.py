"""PyG's attention layers, drop-ins for them: the same constructors, calls and parameters, computed by polyhead.

Where torch_geometric can be imported they are its `MessagePassing`; where it cannot they are plain modules.
"""

from polyhead.interop.pyg.layers import GATConv, GATv2Conv, TransformerConv

__all__ = ["GATConv", "GATv2Conv", "TransformerConv"]
