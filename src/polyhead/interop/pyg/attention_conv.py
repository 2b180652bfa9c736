"""The base class of Polyhead's GATConv, GATv2Conv and TransformerConv: checks, the attention call, explainers and hooks."""

from __future__ import annotations

import importlib
from functools import partialmethod
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from polyhead._checks import (
    MAX_HEADS,
    WrongType,
    check_integer,
    check_integers,
    check_number,
    describe_type,
    is_integer,
    short_repr,
)
from polyhead._torch import refuse_scripting
from polyhead.attend import run_call
from polyhead.interop.pyg.edge_index import (
    PreparedEdges,
    check_declared_node_counts,
    declared_node_counts,
    is_pyg_edge_index,
    prepare_edges,
    replace_self_loops,
    weights_to_sparse_matrix,
)
from polyhead.kernels.edges_torch import edge_keep_mask, edge_weights, sum_over_edges
from polyhead.neighbourhood import Graph
from polyhead.prepare import AttentionOptions, check_and_make_call
from polyhead.score import Score

NodeFeatures = Tensor | tuple[Tensor, Tensor | None]
OutputAndWeights = Tensor | tuple[Tensor, tuple[Tensor, Tensor]]

_SUM_AGGREGATIONS = ("add", "sum")
_FLOW_DIRECTIONS = ("source_to_target", "target_to_source")
_TRACING_ALTERNATIVES = "torch.export.export or torch.compile"


class _MessagePassingWithoutPyG(nn.Module):
    """The part of PyG's `MessagePassing` that the layers need without PyG: no hooks, no explainers."""

    explain: bool | None = None
    _edge_mask: Tensor | None = None
    _apply_sigmoid: bool = True

    def __init__(self, aggr: Any, *, aggr_kwargs: Any, flow: str, node_dim: int, decomposed_layers: int) -> None:
        super().__init__()
        if aggr not in _SUM_AGGREGATIONS:
            raise ValueError(
                f"aggr must be 'add' without torch_geometric, got {aggr!r}; install torch_geometric for others"
            )
        if flow not in _FLOW_DIRECTIONS:
            raise ValueError(f"flow must be one of {_FLOW_DIRECTIONS}, got {flow!r}")
        self.aggr, self.flow, self.node_dim, self.decomposed_layers = aggr, flow, node_dim, decomposed_layers

    def reset_parameters(self) -> None:
        """The base class has no parameters."""

    def propagate(self, *args: Any, **kwargs: Any) -> Tensor:
        raise NotImplementedError


if TYPE_CHECKING:
    _MessagePassing = _MessagePassingWithoutPyG
else:
    try:
        _MessagePassing = importlib.import_module("torch_geometric.nn.conv").MessagePassing
    except ImportError:
        _MessagePassing = _MessagePassingWithoutPyG


class AttentionConv(_MessagePassing):
    """The base class of the drop-in replacements for PyG's layers that attend along the edges of a graph."""

    returns_dropped_weights: ClassVar[bool] = True
    """Whether the returned weights are those after dropout."""
    needs_weights: bool = False
    """Whether the output is always computed from the weights of the edges."""
    _alpha: Tensor | None = None
    """The returned weights, for hooks during message passing, as in PyG's TransformerConv."""

    def __init__(
        self,
        in_channels: int | tuple[int, int],
        out_channels: int,
        heads: int,
        concat: bool,
        dropout: float,
        edge_dim: int | None,
        aggr: Any,
        aggr_kwargs: dict[str, Any] | None,
        flow: str,
        decomposed_layers: int,
    ) -> None:
        decomposed_layers = check_integer("decomposed_layers", decomposed_layers)
        super().__init__(aggr, aggr_kwargs=aggr_kwargs, flow=flow, node_dim=0, decomposed_layers=decomposed_layers)
        out_channels, heads = check_integer("out_channels", out_channels), check_integer("heads", heads, 1, MAX_HEADS)
        edge_dim = None if edge_dim is None else check_integer("edge_dim", edge_dim)
        widths = check_integers("in_channels", [in_channels] * 2 if is_integer(in_channels) else in_channels, -1)
        if len(widths) != 2 or 0 in widths:
            raise ValueError(
                f"in_channels must be a positive integer or a pair (sources, destinations), got {short_repr(in_channels)}; "
                "-1 infers the size from the first input"
            )
        dropout = check_number("dropout", dropout, 0, 1, "[)")
        self.in_channels, self.out_channels, self.heads, self.concat = in_channels, out_channels, heads, concat
        self.dropout, self.edge_dim = dropout, edge_dim
        self._widths: tuple[int, int] = (widths[0], widths[1])

    @property
    def target_to_source(self) -> bool:
        """Whether messages go from the second row of `edge_index` to the first."""
        return self.flow == "target_to_source"

    def _split_heads(self, x: Float[Tensor, "nodes features"]) -> Float[Tensor, "heads nodes channels"]:
        return x.unflatten(-1, (self.heads, self.out_channels)).transpose(0, 1)

    def _merge_heads(self, out: Float[Tensor, "heads nodes channels"]) -> Float[Tensor, "nodes features"]:
        return out.transpose(0, 1).flatten(1) if self.concat else out.mean(0)

    # inputs

    def _check_node_features(self, x: NodeFeatures, needs_destinations: bool = True) -> tuple[Tensor, Tensor | None]:
        """The features of sources and destinations, checked."""
        if not isinstance(x, Tensor) and not (isinstance(x, (tuple, list)) and len(x) == 2):
            raise WrongType(f"x must be a tensor (nodes, features), or a pair of them, got {describe_type(x)}")
        # torch.compile cannot read the state of the tracer
        if not torch.compiler.is_compiling() and torch._C._is_tracing():
            # a trace would fix the edges and their number
            raise TypeError(f"torch.jit.trace cannot trace {type(self).__name__}; use {_TRACING_ALTERNATIVES}")
        source, destination = (x, x) if isinstance(x, Tensor) else x
        named = (
            (("x", source), ("x", destination)) if isinstance(x, Tensor) else (("x[0]", source), ("x[1]", destination))
        )
        for (name, part), width in zip(named, self._widths, strict=True):
            if part is None:
                if name == "x[0]" or needs_destinations:
                    raise ValueError(
                        f"{name} must be a tensor, since {type(self).__name__} needs features of all nodes, got None"
                    )
                continue
            if not isinstance(part, Tensor):
                raise WrongType(f"{name} must be a tensor (nodes, features), got {describe_type(part)}")
            if part.dim() != 2 or (width >= 0 and part.shape[1] != width):
                features = "features" if width < 0 else width
                raise ValueError(f"{name} must have shape (nodes, {features}), got {tuple(part.shape)}")
        return source, destination

    def _count_destinations(self, edge_index: Tensor, sources: int, size: tuple[int, int] | None, loops: bool) -> int:
        """The number of destinations without features: from `size`, else from `edge_index`, else the number of sources."""
        if size is not None:
            if len(size) != 2 or None in size:
                raise ValueError(f"size must be (sources, destinations), got {size!r}")
            if self.target_to_source and size[0] != size[1]:
                raise ValueError(
                    "size must be (N, N) if flow is 'target_to_source' and x[1] is None, "
                    f"got {tuple(size)}; pass the features of the destinations"
                )
            return size[1]
        declared = declared_node_counts(edge_index)[0 if self.target_to_source else 1]
        if declared is None:
            return sources
        # PyG adds a self-loop for every source here, and its EdgeIndex grows with them
        return max(declared, sources) if loops and is_pyg_edge_index(edge_index) else declared

    def _check_edge_features(self, edge_attr: Tensor | None, entries: Tensor | None, edges: int) -> Tensor | None:
        """The checked features of the input edges, from `edge_attr` or the entries of a sparse matrix."""
        edge_attr = entries if edge_attr is None else edge_attr
        if self.edge_dim is None and edge_attr is not None and edge_attr is not entries:
            raise ValueError(
                f"edge_attr must be None without edge_dim, got {describe_type(edge_attr)}; pass edge_dim to {type(self).__name__}"
            )
        if self.edge_dim is None:
            return None
        if edge_attr is None:
            raise ValueError(f"edge_attr must be (edges, {self.edge_dim}), since edge_dim is {self.edge_dim}, got None")
        if not isinstance(edge_attr, Tensor):
            raise WrongType(f"edge_attr must be a tensor (edges, {self.edge_dim}), got {describe_type(edge_attr)}")
        shape = tuple(edge_attr.shape)
        fits = shape == (edges, self.edge_dim) or (self.edge_dim == 1 and shape == (edges,))
        if not fits or not edge_attr.is_floating_point():
            raise ValueError(
                f"edge_attr must be floating-point of shape (edges, edge_dim) = ({edges}, {self.edge_dim}), got {edge_attr.dtype} of "
                f"shape {shape}"
            )
        return edge_attr if edge_attr.dim() == 2 else edge_attr[:, None]

    def _prepare_edges(
        self, edge_index: Tensor, pairs: Tensor, sources: int, destinations: int, loops: bool, exact: bool
    ) -> PreparedEdges:
        if self.target_to_source and edge_index.layout != torch.strided:
            raise ValueError(
                "flow must be 'source_to_target' for a sparse edge_index, got 'target_to_source'; pass the transpose of the matrix"
            )
        nodes = (destinations, sources) if self.target_to_source else (sources, destinations)
        check_declared_node_counts(edge_index, nodes, loops)
        # a mean or maximum would count self-loops that are only masked by -inf, so these are really removed
        exact = exact or self.aggr not in _SUM_AGGREGATIONS
        return prepare_edges(edge_index, pairs, nodes, loops=loops, target_to_source=self.target_to_source, exact=exact)

    # attention

    def _attend(
        self,
        q: Float[Tensor, "heads destinations dim"],
        k: Float[Tensor, "heads sources dim"],
        v: Float[Tensor, "heads sources channels"],
        score: Score,
        edges: PreparedEdges,
        features: Float[Tensor, "edges edge_dim"] | None,
        need_weights: bool,
    ) -> tuple[Float[Tensor, "heads destinations channels"], Float[Tensor, "edges heads"] | None]:
        """The outputs of the heads, and the weights if `need_weights`."""
        dropout = self.dropout if self.training else 0.0
        by_messages = self._needs_messages()
        mask = self._explainer_mask(edges) if self.explain and not by_messages else None
        # the returned weights must not include the mask
        by_weights = by_messages or self.needs_weights or (need_weights and mask is not None)
        graph = edges.with_attributes(features, None if by_weights else mask)
        call = check_and_make_call(q, k, v, AttentionOptions(graph, score, bias=edges.bias, dropout=dropout))
        out = None if by_weights else run_call(call)[0]
        if out is not None and not need_weights:
            return out, None
        pairs = graph.edge_index
        p = dropped = edge_weights(call)
        if dropout > 0:
            dropped = p * edge_keep_mask(call, pairs) / (1 - dropout)
        alpha = (dropped if self.returns_dropped_weights else p).T.to(v.dtype)
        if by_messages:
            out = self._pass_messages(q, v, pairs, dropped, alpha, graph)
        elif out is None:
            masked = dropped if mask is None else dropped * mask.to(p.dtype)
            out = self._sum_values(masked, v, pairs, graph).to(v.dtype)
        return out, alpha

    def _sum_values(
        self, p: Float[Tensor, "heads edges"], v: Float[Tensor, "heads sources channels"], pairs: Tensor, graph: Graph
    ) -> Float[Tensor, "heads destinations channels"]:
        return sum_over_edges(p, v, pairs[0], pairs[1], graph.destinations)

    def _edges_and_weights(self, edge_index: Tensor, edges: PreparedEdges, alpha: Tensor) -> tuple[Tensor, Tensor]:
        """The edges and their weights, as PyG returns them."""
        if edge_index.layout != torch.strided:
            return weights_to_sparse_matrix(edge_index, edges.graph.edge_index, alpha)
        if not edges.loops:
            return edge_index, alpha
        if is_pyg_edge_index(edge_index):
            return replace_self_loops(edge_index, edges.loops), alpha
        pairs = edges.graph.edge_index
        return pairs.flip(0) if self.target_to_source else pairs, alpha

    # PyG's explainers and hooks

    def _explainer_mask(self, edges: PreparedEdges) -> Float[Tensor, " edges"]:
        """The factor of each message that an explainer sets; 1 for added self-loops."""
        mask = self._edge_mask
        if mask is None:
            raise ValueError("explain=True needs an edge mask, got None; call the layer through an explainer")
        mask = mask.sigmoid() if self._apply_sigmoid else mask
        return edges.append_self_loop_rows(mask, mask.new_ones(edges.loops))

    def _needs_messages(self) -> bool:
        """Whether a hook, an overridden method or `aggr` needs the messages themselves, edges x heads x channels."""
        if self.aggr not in _SUM_AGGREGATIONS:
            return True
        if _MessagePassing is _MessagePassingWithoutPyG or torch.compiler.is_compiling():
            return False
        for name in ("_edge_update_forward_pre_hooks", "_edge_update_forward_hooks"):
            if getattr(self, name):
                raise ValueError("hooks of edge_update are not supported; use hooks of message, which receive alpha")
        return any(getattr(self, f"_{name}_hooks") for name in _HOOK_KINDS) or any(
            name in vars(self) or getattr(type(self), name).__module__.split(".")[0] not in _KNOWN_PACKAGES
            for name in _OVERRIDABLE_METHODS
        )

    def _pass_messages(self, q: Tensor, v: Tensor, pairs: Tensor, p: Tensor, alpha: Tensor, graph: Graph) -> Tensor:
        """The output by PyG's `propagate`, which calls `message`, `aggregate` and hooks."""
        if self.decomposed_layers != 1:
            raise ValueError(
                "decomposed_layers must be 1 with a hook, an overridden message or an aggr other than 'add', "
                f"got {self.decomposed_layers}"
            )
        x, sizes = (v.transpose(0, 1), q.transpose(0, 1)), (graph.sources, graph.destinations)
        if self.target_to_source:
            pairs, x, sizes = pairs.flip(0), (x[1], x[0]), (sizes[1], sizes[0])
        self._alpha = alpha
        try:
            out = self.propagate(pairs, size=sizes, x=x, alpha=p.T.to(v.dtype), edge_attr=graph.features)
        finally:
            self._alpha = None
        if out.shape[-1] != self.out_channels:
            raise ValueError(
                f"aggr must return {self.out_channels} channels, got {out.shape[-1]}; pass one aggregation, or "
                "aggr_kwargs={'mode': 'sum'} with several"
            )
        return out.transpose(0, 1)

    def message(self, x_j: Tensor, alpha: Tensor) -> Tensor:
        """The message of each edge; only called if `_needs_messages`."""
        return alpha.unsqueeze(-1) * x_j

    def _set_jittable_templates(self, raise_on_error: bool = False) -> None:
        """Do nothing: PyG generates a module for TorchScript here, which these layers refuse."""

    __prepare_scriptable__ = partialmethod(refuse_scripting, instead=_TRACING_ALTERNATIVES)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.in_channels}, {self.out_channels}, heads={self.heads})"


_OVERRIDABLE_METHODS = ("message", "aggregate", "update", "explain_message")
_HOOK_KINDS = [f"{step}_forward{pre}" for step in ("propagate", "message", "aggregate") for pre in ("", "_pre")]
_KNOWN_PACKAGES = ("polyhead", "torch_geometric")
