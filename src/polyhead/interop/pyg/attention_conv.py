"""What PyG's three layers share: their base class, the checks, one call of attention, explainers and hooks."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from polyhead._checks import (
    HEADS,
    WrongType,
    check_integer,
    check_integers,
    check_number,
    is_integer,
    kind_of,
    shown,
)
from polyhead.attend import prepare, run
from polyhead.interop.pyg.edge_index import (
    Edges,
    as_matrix,
    check_stated_size,
    edges,
    is_pyg_edge_index,
    stated_size,
    with_loops,
)
from polyhead.kernels.edges_torch import kept, summed, weights
from polyhead.neighbourhood import Graph
from polyhead.score import Score

Inputs = Tensor | tuple[Tensor, Tensor | None]
Returned = Tensor | tuple[Tensor, tuple[Tensor, Tensor]]

_SUMS = ("add", "sum")
_FLOWS = ("source_to_target", "target_to_source")


class _Alone(nn.Module):
    """What the layers need of PyG's `MessagePassing`, where there is no PyG: nobody hooks or explains them."""

    explain: bool | None = None
    _edge_mask: Tensor | None = None
    _apply_sigmoid: bool = True

    def __init__(self, aggr: Any, *, aggr_kwargs: Any, flow: str, node_dim: int, decomposed_layers: int) -> None:
        super().__init__()
        if aggr not in _SUMS:
            raise ValueError(f"aggr: it is {aggr!r}; without torch_geometric it must be 'add'")
        if flow not in _FLOWS:
            raise ValueError(f"flow: it is {flow!r}; it must be one of {_FLOWS}")
        self.aggr, self.flow, self.node_dim, self.decomposed_layers = aggr, flow, node_dim, decomposed_layers

    def reset_parameters(self) -> None:
        """There are none here."""

    def propagate(self, *args: Any, **kwargs: Any) -> Tensor:
        raise NotImplementedError


if TYPE_CHECKING:
    _Base = _Alone
else:
    try:
        _Base = importlib.import_module("torch_geometric.nn.conv").MessagePassing
    except ImportError:
        _Base = _Alone


class Conv(_Base):
    """A layer of PyG's that attends along the edges of a graph."""

    returns_thinned: ClassVar[bool] = True
    """Whether the weights it returns are those after dropout."""
    goes_by_weights: bool = False
    """Whether its output is always made from the weights of the edges."""
    _alpha: Tensor | None = None
    """The weights that it returns, for hooks while messages are made; PyG's TransformerConv has them there."""

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
        out_channels, heads = check_integer("out_channels", out_channels), check_integer("heads", heads, 1, HEADS)
        edge_dim = None if edge_dim is None else check_integer("edge_dim", edge_dim)
        widths = check_integers("in_channels", [in_channels] * 2 if is_integer(in_channels) else in_channels, -1)
        if len(widths) != 2 or 0 in widths:
            raise ValueError(
                f"in_channels must be an integer, or (sources', destinations'), and -1 for as many as the first input has, "
                f"got {shown(in_channels)}"
            )
        dropout = check_number("dropout", dropout, 0, 1, "[)")
        self.in_channels, self.out_channels, self.heads, self.concat = in_channels, out_channels, heads, concat
        self.dropout, self.edge_dim = dropout, edge_dim
        self._widths: tuple[int, int] = (widths[0], widths[1])

    @property
    def backwards(self) -> bool:
        """Whether messages go from the second row of `edge_index` to the first."""
        return self.flow == "target_to_source"

    def _by_head(self, x: Float[Tensor, "nodes features"]) -> Float[Tensor, "heads nodes channels"]:
        return x.unflatten(-1, (self.heads, self.out_channels)).transpose(0, 1)

    def _joined(self, out: Float[Tensor, "heads nodes channels"]) -> Float[Tensor, "nodes features"]:
        return out.transpose(0, 1).flatten(1) if self.concat else out.mean(0)

    # what is given

    def _inputs(self, x: Inputs, needs_destinations: bool = True) -> tuple[Tensor, Tensor | None]:
        """The features of sources and destinations, checked."""
        if not isinstance(x, Tensor) and not (isinstance(x, (tuple, list)) and len(x) == 2):
            raise WrongType(f"x must be a tensor (nodes, features), or a pair of them, got {kind_of(x)}")
        # torch.compile cannot look at the tracer
        if not torch.compiler.is_compiling() and torch._C._is_tracing():
            # it would keep the edges that it sees, and their number
            raise TypeError(
                f"torch.jit.trace cannot trace {type(self).__name__}; use torch.export.export or torch.compile"
            )
        source, destination = (x, x) if isinstance(x, Tensor) else x
        named = (
            (("x", source), ("x", destination)) if isinstance(x, Tensor) else (("x[0]", source), ("x[1]", destination))
        )
        for (name, part), width in zip(named, self._widths, strict=True):
            if part is None:
                if name == "x[0]" or needs_destinations:
                    raise ValueError(f"{name}: it is None; {type(self).__name__} needs features of all nodes")
                continue
            if not isinstance(part, Tensor):
                raise WrongType(f"{name} must be a tensor (nodes, features), got {kind_of(part)}")
            if part.dim() != 2 or (width >= 0 and part.shape[1] != width):
                wide = "features" if width < 0 else width
                raise ValueError(f"{name}: its shape is {tuple(part.shape)}; it must be (nodes, {wide})")
        return source, destination

    def _count_destinations(self, edge_index: Tensor, sources: int, size: tuple[int, int] | None, loops: bool) -> int:
        """How many there are where they have no features: as many as `size` says, `edge_index`, or as sources."""
        if size is not None:
            if len(size) != 2 or None in size:
                raise ValueError(f"size must be (sources, destinations), got {size!r}")
            if self.backwards and size[0] != size[1]:
                raise ValueError(
                    "size must be the same number twice where flow is 'target_to_source' and x[1] is None, "
                    f"got {tuple(size)}; pass the features of the destinations"
                )
            return size[1]
        stated = stated_size(edge_index)[0 if self.backwards else 1]
        if stated is None:
            return sources
        # PyG adds a self-loop for every source here, and its EdgeIndex grows with them
        return max(stated, sources) if loops and is_pyg_edge_index(edge_index) else stated

    def _features(self, edge_attr: Tensor | None, held: Tensor | None, edges: int) -> Tensor | None:
        """The features of the given edges, from `edge_attr` or a sparse matrix, checked."""
        edge_attr = held if edge_attr is None else edge_attr
        if self.edge_dim is None and edge_attr is not None and edge_attr is not held:
            raise ValueError(f"edge_attr: it is given, but edge_dim is None; pass edge_dim to {type(self).__name__}")
        if self.edge_dim is None:
            return None
        if edge_attr is None:
            raise ValueError(
                f"edge_attr: it is None; it must be (edges, {self.edge_dim}), for edge_dim is {self.edge_dim}"
            )
        if not isinstance(edge_attr, Tensor):
            raise WrongType(f"edge_attr must be a tensor (edges, {self.edge_dim}), got {kind_of(edge_attr)}")
        shape = tuple(edge_attr.shape)
        fits = shape == (edges, self.edge_dim) or (self.edge_dim == 1 and shape == (edges,))
        if not fits or not edge_attr.is_floating_point():
            raise ValueError(
                f"edge_attr: {edge_attr.dtype} of shape {shape}; it must be floating-point numbers (edges, edge_dim) = "
                f"({edges}, {self.edge_dim})"
            )
        return edge_attr if edge_attr.dim() == 2 else edge_attr[:, None]

    def _edges(
        self, edge_index: Tensor, pairs: Tensor, sources: int, destinations: int, loops: bool, exactly: bool
    ) -> Edges:
        if self.backwards and edge_index.layout != torch.strided:
            raise ValueError("flow: it is 'target_to_source', but edge_index is a sparse matrix; pass its transpose")
        nodes = (destinations, sources) if self.backwards else (sources, destinations)
        check_stated_size(edge_index, nodes, loops)
        # messages are counted where they are not summed
        exactly = exactly or self.aggr not in _SUMS
        return edges(edge_index, pairs, nodes, loops=loops, backwards=self.backwards, exactly=exactly)

    # attention

    def _attend(
        self,
        q: Float[Tensor, "heads destinations dim"],
        k: Float[Tensor, "heads sources dim"],
        v: Float[Tensor, "heads sources channels"],
        score: Score,
        edges: Edges,
        features: Float[Tensor, "edges edge_dim"] | None,
        wants_weights: bool,
    ) -> tuple[Float[Tensor, "heads destinations channels"], Float[Tensor, "edges heads"] | None]:
        """The heads' outputs, and the weights if they are wanted."""
        dropout = self.dropout if self.training else 0.0
        watched = self._watched()
        mask = self._mask(edges) if self.explain and not watched else None
        # the weights that are returned have no mask in them
        by_weights = watched or self.goes_by_weights or (wants_weights and mask is not None)
        graph = edges.dressed(features, None if by_weights else mask)
        call = prepare(
            q, k, v, over=graph, score=score, position=None, bias=edges.bias, sink=None, dropout=dropout
        )  # fmt: skip
        out = None if by_weights else run(call)[0]
        if out is not None and not wants_weights:
            return out, None
        pairs = graph.edge_index
        p = thinned = weights(call)
        if dropout > 0:
            thinned = p * kept(call, pairs) / (1 - dropout)
        alpha = (thinned if self.returns_thinned else p).T.to(v.dtype)
        if watched:
            out = self._by_messages(q, v, pairs, thinned, alpha, graph)
        elif out is None:
            masked = thinned if mask is None else thinned * mask.to(p.dtype)
            out = self._summed(masked, v, pairs, graph).to(v.dtype)
        return out, alpha

    def _summed(
        self, p: Float[Tensor, "heads edges"], v: Float[Tensor, "heads sources channels"], pairs: Tensor, graph: Graph
    ) -> Float[Tensor, "heads destinations channels"]:
        return summed(p, v, pairs[0], pairs[1], graph.destinations)

    def _returned(self, edge_index: Tensor, edges: Edges, alpha: Tensor) -> tuple[Tensor, Tensor]:
        """The edges of the weights and the weights, as PyG gives them."""
        if edge_index.layout != torch.strided:
            return as_matrix(edge_index, edges.graph.edge_index, alpha)
        if not edges.loops:
            return edge_index, alpha
        if is_pyg_edge_index(edge_index):
            return with_loops(edge_index, edges.loops), alpha
        pairs = edges.graph.edge_index
        return pairs.flip(0) if self.backwards else pairs, alpha

    # PyG's explainers and hooks

    def _mask(self, edges: Edges) -> Float[Tensor, " edges"]:
        """What an explainer multiplies the messages with; added self-loops stay as they are."""
        mask = self._edge_mask
        if mask is None:
            raise ValueError("explain: it is True, but no edge mask was set")
        mask = mask.sigmoid() if self._apply_sigmoid else mask
        return edges.given(mask, mask.new_ones(edges.loops))

    def _watched(self) -> bool:
        """Whether somebody wants the messages of edges x heads x channels themselves. They are made for nobody else."""
        if self.aggr not in _SUMS:
            return True
        if _Base is _Alone or torch.compiler.is_compiling():
            return False
        for name in ("_edge_update_forward_pre_hooks", "_edge_update_forward_hooks"):
            if getattr(self, name):
                raise ValueError("edge_update: its hooks are never called here; use those of message, which get alpha")
        return any(getattr(self, f"_{name}_hooks") for name in _HOOKED) or any(
            name in vars(self) or getattr(type(self), name).__module__.split(".")[0] not in _OURS for name in _STEPS
        )

    def _by_messages(self, q: Tensor, v: Tensor, pairs: Tensor, p: Tensor, alpha: Tensor, graph: Graph) -> Tensor:
        """The same by PyG's own way through `message` and `aggregate`, with its hooks."""
        if self.decomposed_layers != 1:
            raise ValueError(
                "decomposed_layers must be 1 where messages are made (for a hook, a message of your own or an aggr other "
                f"than 'add'), got {self.decomposed_layers}"
            )
        x, sizes = (v.transpose(0, 1), q.transpose(0, 1)), (graph.sources, graph.destinations)
        if self.backwards:
            pairs, x, sizes = pairs.flip(0), (x[1], x[0]), (sizes[1], sizes[0])
        self._alpha = alpha
        try:
            out = self.propagate(pairs, size=sizes, x=x, alpha=p.T.to(v.dtype), edge_attr=graph.features)
        finally:
            self._alpha = None
        if out.shape[-1] != self.out_channels:
            raise ValueError(
                f"aggr must give {self.out_channels} channels, got {out.shape[-1]}; pass one aggregation, or "
                "aggr_kwargs={'mode': 'sum'} with several"
            )
        return out.transpose(0, 1)

    def message(self, x_j: Tensor, alpha: Tensor) -> Tensor:
        """What goes along each edge, where somebody asks for it."""
        return alpha.unsqueeze(-1) * x_j

    def _set_jittable_templates(self, raise_on_error: bool = False) -> None:
        """PyG would write and import a file here, for a way that is hardly ever taken."""

    def __prepare_scriptable__(self) -> None:
        """torch.jit.script asks for a stand-in here, before it reads any code."""
        raise TypeError(
            f"torch.jit.script cannot compile {type(self).__name__}; use torch.export.export or torch.compile"
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.in_channels}, {self.out_channels}, heads={self.heads})"


_STEPS = ("message", "aggregate", "update", "explain_message")
_HOOKED = [f"{step}_forward{pre}" for step in ("propagate", "message", "aggregate") for pre in ("", "_pre")]
_OURS = ("polyhead", "torch_geometric")
