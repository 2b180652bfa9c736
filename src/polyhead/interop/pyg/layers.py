"""PyG's `GATConv`, `GATv2Conv` and `TransformerConv`, computed by polyhead."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from polyhead._checks import is_integer
from polyhead.interop.pyg import old_parameter_names as checkpoints
from polyhead.interop.pyg.attention_conv import Conv, Inputs, Returned
from polyhead.interop.pyg.edge_index import REDUCTIONS, Fill, of_loops, read
from polyhead.interop.pyg.linear import Linear, glorot
from polyhead.neighbourhood import Graph
from polyhead.score import GAT, Dot, GATv2, Score


class _Additive(Conv):
    """What GATConv and GATv2Conv share: self-loops, edge features in the score, a residual and a bias."""

    lin_edge: Linear | None
    res: Linear | None
    bias: Tensor | None

    def _settings(self, negative_slope: float, add_self_loops: bool, fill_value: Fill, residual: bool) -> None:
        if isinstance(fill_value, str) and fill_value not in REDUCTIONS:
            raise ValueError(
                f"fill_value: it is {fill_value!r}; it must be a number, a tensor or one of {', '.join(REDUCTIONS)}"
            )
        self.negative_slope, self.add_self_loops = negative_slope, add_self_loops
        self.fill_value, self.residual = fill_value, residual

    def _tail(self, bias: bool, residual: bool) -> None:
        """The residual map and the bias."""
        joined = self.out_channels * (self.heads if self.concat else 1)
        self.res = Linear(self._widths[1], joined) if residual else None
        self.register_parameter("bias", nn.Parameter(torch.empty(joined)) if bias else None)

    def _reset(self, maps: tuple[Linear | None, ...], vectors: tuple[Tensor | None, ...]) -> None:
        super().reset_parameters()
        for linear in (*maps, self.lin_edge, self.res):
            if linear is not None:
                linear.reset_parameters()
        glorot(*vectors)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    @abstractmethod
    def _names(self) -> checkpoints.Names:
        """What other versions and DGL call the parameters."""

    def _load_from_state_dict(self, state: Any, prefix: str, local: Any, strict: bool, *reports: Any) -> None:
        # DGL's names are no longer there after this
        dgl = any(key.removeprefix(prefix).split(".")[0] in checkpoints.DGL for key in state if key.startswith(prefix))
        reports[-1].extend(checkpoints.renamed(state, prefix, self._names()))
        if dgl:
            checkpoints.from_dgl(state, prefix, self.heads, self.concat, self.bias)
        super()._load_from_state_dict(state, prefix, local, strict, *reports)

    def _residual(self, x_dst: Tensor | None) -> Tensor | None:
        return None if self.res is None or x_dst is None else self.res(x_dst)

    def _along(
        self,
        q: Float[Tensor, "heads destinations channels"],
        k: Float[Tensor, "heads sources channels"],
        score: Score,
        edge_index: Tensor,
        edge_attr: Tensor | None,
        residual: Float[Tensor, "destinations features"] | None,
        wants_weights: bool,
    ) -> Returned:
        """The layer's output, from projected destinations and sources."""
        pairs, held = read(edge_index)
        features = self._features(edge_attr, held, pairs.shape[1])
        edges = self._edges(edge_index, pairs, k.shape[1], q.shape[1], self.add_self_loops, wants_weights)
        if features is not None and edges.loops:
            # by the second row, whichever way messages go
            last = (k if self.backwards else q).shape[1]
            features = edges.given(features, of_loops(self.fill_value, features, pairs, last, edges.loops))
        out, alpha = self._attend(q, k, k, score, edges, features, wants_weights)
        output = self._joined(out)
        for more in (residual, self.bias):
            output = output if more is None else output + more
        if not wants_weights:
            return output
        assert alpha is not None
        return output, self._returned(edge_index, edges, alpha)


class GATConv(_Additive):
    """`torch_geometric.nn.GATConv`: the score is LeakyReLU(att_dst·W x_i + att_src·W x_j + att_edge·W_edge f_ij).

    Its constructor, parameters, calls and return values, and in training the weights after dropout, as there. It differs
    from the original in this:

    - Nothing of edges x heads x channels is made, unless a hook or `aggr` other than "add" asks for messages.
    - `size` counts whatever `edge_index` is, and what an `edge_index` says of its own size must be true of `x`.
    - Edges are sorted once, as long as `edge_index` is the same tensor and torch counts no change of it. Writing to it
      through NumPy or `.data` is not counted.
    - Dropout draws other random numbers, and an edge that is given twice is dropped twice or not at all.
    - `edge_attr` without `edge_dim` and the reverse raise a `ValueError`, as do wrong shapes.
    - An explainer's mask follows its edges where every node has a self-loop already, and on bipartite graphs.
    - `torch.jit.script` and torch_sparse's `SparseTensor` are not supported.
    """

    att_edge: Tensor | None

    def __init__(
        self,
        in_channels: int | tuple[int, int],
        out_channels: int,
        heads: int = 1,
        concat: bool = True,
        negative_slope: float = 0.2,
        dropout: float = 0.0,
        add_self_loops: bool = True,
        edge_dim: int | None = None,
        fill_value: Fill = "mean",
        bias: bool = True,
        residual: bool = False,
        *,
        aggr: Any = "add",
        aggr_kwargs: dict[str, Any] | None = None,
        flow: str = "source_to_target",
        decomposed_layers: int = 1,
    ) -> None:
        super().__init__(
            in_channels, out_channels, heads, concat, dropout, edge_dim, aggr, aggr_kwargs, flow, decomposed_layers
        )
        self._settings(negative_slope, add_self_loops, fill_value, residual)
        features = heads * out_channels
        one = is_integer(in_channels)
        self.lin = Linear(self._widths[0], features) if one else None
        self.lin_src = None if one else Linear(self._widths[0], features)
        self.lin_dst = None if one else Linear(self._widths[1], features)
        self.att_src = nn.Parameter(torch.empty(1, heads, out_channels))
        self.att_dst = nn.Parameter(torch.empty(1, heads, out_channels))
        self.lin_edge = None if edge_dim is None else Linear(edge_dim, features)
        att_edge = None if edge_dim is None else nn.Parameter(torch.empty(1, heads, out_channels))
        self.register_parameter("att_edge", att_edge)
        self._tail(bias, residual)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights anew."""
        self._reset((self.lin, self.lin_src, self.lin_dst), (self.att_src, self.att_dst, self.att_edge))

    def forward(
        self,
        x: Inputs,
        edge_index: Tensor,
        edge_attr: Tensor | None = None,
        size: tuple[int, int] | None = None,
        return_attention_weights: bool | None = None,
    ) -> Returned:
        """The output (nodes, heads · channels), or (nodes, channels) without `concat`.

        Args:
            x: (nodes, in_channels), or a pair for sources and destinations, of which the second may be None.
            edge_index: (2, edges), sources above destinations; or a sparse matrix with destinations in its rows.
            edge_attr: (edges, edge_dim).
            size: how many sources and destinations there are. Without it `edge_index`, where it is a sparse matrix or an
                EdgeIndex with a size, says how many destinations there are without features; else, as many as sources.
            return_attention_weights: whether `(edge_index, alpha)` is returned too: the edges with self-loops, and their
                weights (edges, heads), in training after the dropout that the output was made with.

        Raises:
            ValueError: where shapes do not fit or an edge names a node that is not there.
        """
        x_src, x_dst = self._inputs(x, needs_destinations=False)
        residual = self._residual(x_dst)
        k = self._by_head(self._map(self.lin_src)(x_src))
        if x_dst is None:
            destinations = self._count_destinations(edge_index, len(x_src), size, self.add_self_loops)
            q = k.new_zeros(self.heads, destinations, self.out_channels)
        elif x_dst is x_src and self.lin is not None:
            q = k
        else:
            q = self._by_head(self._map(self.lin_dst)(x_dst))
        if size is not None and tuple(size) != (k.shape[1], q.shape[1]):
            raise ValueError(f"size: it is {tuple(size)}, but x has {k.shape[1]} sources and {q.shape[1]} destinations")
        edge = None
        if self.lin_edge is not None and self.att_edge is not None:
            edge = (self.att_edge[0][:, None] @ self.lin_edge.by_head(self.heads))[:, 0]
        score = GAT.of(self.att_dst[0], self.att_src[0], edge, negative_slope=self.negative_slope)
        return self._along(q, k, score, edge_index, edge_attr, residual, bool(return_attention_weights))

    def _map(self, of_side: Linear | None) -> Linear:
        linear = self.lin if of_side is None else of_side
        assert linear is not None
        return linear

    def _names(self) -> checkpoints.Names:
        return checkpoints.gat(one=self.lin is not None)


class GATv2Conv(_Additive):
    """`torch_geometric.nn.GATv2Conv`: the score is att·LeakyReLU(W_r x_i + W_l x_j + W_edge f_ij).

    What `GATConv` says of itself and the original is true here too.
    """

    def __init__(
        self,
        in_channels: int | tuple[int, int],
        out_channels: int,
        heads: int = 1,
        concat: bool = True,
        negative_slope: float = 0.2,
        dropout: float = 0.0,
        add_self_loops: bool = True,
        edge_dim: int | None = None,
        fill_value: Fill = "mean",
        bias: bool = True,
        share_weights: bool = False,
        residual: bool = False,
        *,
        aggr: Any = "add",
        aggr_kwargs: dict[str, Any] | None = None,
        flow: str = "source_to_target",
        decomposed_layers: int = 1,
    ) -> None:
        super().__init__(
            in_channels, out_channels, heads, concat, dropout, edge_dim, aggr, aggr_kwargs, flow, decomposed_layers
        )
        self._settings(negative_slope, add_self_loops, fill_value, residual)
        self.share_weights = share_weights
        features = heads * out_channels
        self.lin_l = Linear(self._widths[0], features, bias=bias)
        self.lin_r = self.lin_l if share_weights else Linear(self._widths[1], features, bias=bias)
        self.att = nn.Parameter(torch.empty(1, heads, out_channels))
        self.lin_edge = None if edge_dim is None else Linear(edge_dim, features)
        self._tail(bias, residual)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights anew."""
        self._reset((self.lin_l, self.lin_r), (self.att,))

    def forward(
        self,
        x: Inputs,
        edge_index: Tensor,
        edge_attr: Tensor | None = None,
        return_attention_weights: bool | None = None,
    ) -> Returned:
        """The output (nodes, heads · channels), or (nodes, channels) without `concat`; arguments as in `GATConv`."""
        x_src, x_dst = self._inputs(x)
        residual = self._residual(x_dst)
        k = self._by_head(self.lin_l(x_src))
        q = k if x_dst is x_src and self.share_weights else self._by_head(self.lin_r(x_dst))
        edge = None if self.lin_edge is None else self.lin_edge.by_head(self.heads)
        score = GATv2.of(self.att[0], edge, negative_slope=self.negative_slope)
        return self._along(q, k, score, edge_index, edge_attr, residual, bool(return_attention_weights))

    def _names(self) -> checkpoints.Names:
        return checkpoints.GATV2


class TransformerConv(Conv):
    """`torch_geometric.nn.TransformerConv`: the score is q_i·(k_j + W_edge f_ij)/√channels, the values v_j + W_edge f_ij.

    What `GATConv` says of itself and the original is true here too, but for self-loops, which are not added, and for the
    weights returned: they are those before dropout, as in the original. With `edge_dim` it is computed in torch, block by
    block of edges: in less memory than the original, but in more time.
    """

    returns_thinned = False

    def __init__(
        self,
        in_channels: int | tuple[int, int],
        out_channels: int,
        heads: int = 1,
        concat: bool = True,
        beta: bool = False,
        dropout: float = 0.0,
        edge_dim: int | None = None,
        bias: bool = True,
        root_weight: bool = True,
        *,
        aggr: Any = "add",
        aggr_kwargs: dict[str, Any] | None = None,
        flow: str = "source_to_target",
        decomposed_layers: int = 1,
    ) -> None:
        super().__init__(
            in_channels, out_channels, heads, concat, dropout, edge_dim, aggr, aggr_kwargs, flow, decomposed_layers
        )
        self.beta, self.root_weight = beta and root_weight, root_weight
        features, joined = heads * out_channels, out_channels * (heads if concat else 1)
        of_source, of_destination = self._widths
        self.lin_key = Linear(of_source, features, bias, glorot=False)
        self.lin_query = Linear(of_destination, features, bias, glorot=False)
        self.lin_value = Linear(of_source, features, bias, glorot=False)
        self.lin_edge = None if edge_dim is None else Linear(edge_dim, features, glorot=False)
        self.lin_skip = Linear(of_destination, joined, bias, glorot=False)
        self.lin_beta = Linear(3 * joined, 1, glorot=False) if self.beta else None
        self.goes_by_weights = edge_dim is not None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights anew."""
        super().reset_parameters()
        maps = (self.lin_key, self.lin_query, self.lin_value, self.lin_edge, self.lin_skip, self.lin_beta)
        for linear in maps:
            if linear is not None:
                linear.reset_parameters()

    def forward(
        self,
        x: Inputs,
        edge_index: Tensor,
        edge_attr: Tensor | None = None,
        return_attention_weights: bool | None = None,
    ) -> Returned:
        """The output (nodes, heads · channels), or (nodes, channels) without `concat`; arguments as in `GATConv`."""
        x_src, x_dst = self._inputs(x)
        assert x_dst is not None
        q, k, v = (
            self._by_head(linear(side))
            for linear, side in ((self.lin_query, x_dst), (self.lin_key, x_src), (self.lin_value, x_src))
        )
        pairs, held = read(edge_index)
        features = self._features(edge_attr, held, pairs.shape[1])
        wants = isinstance(return_attention_weights, bool)
        edges = self._edges(edge_index, pairs, k.shape[1], q.shape[1], False, wants)
        score: Score = Dot()
        if self.lin_edge is not None:
            # (W f)·q is f·(Wᵀq), which needs no more than one vector a node
            turned = q @ self.lin_edge.by_head(self.heads)
            q = torch.cat((q, turned), -1) * self.out_channels**-0.5
            k, score = F.pad(k, (0, turned.shape[-1])), _Beside(turned.shape[-1])
        out, alpha = self._attend(q, k, v, score, edges, features, wants)
        output = self._rooted(self._joined(out), x_dst)
        if not wants:
            return output
        assert alpha is not None
        return output, (edge_index, alpha)

    def _rooted(self, out: Float[Tensor, "nodes features"], x_dst: Float[Tensor, "nodes in"]) -> Tensor:
        """With the destination's own features."""
        if not self.root_weight:
            return out
        skip = self.lin_skip(x_dst)
        if self.lin_beta is None:
            return out + skip
        beta = self.lin_beta(torch.cat((out, skip, out - skip), -1)).sigmoid()
        return beta * skip + (1 - beta) * out

    def _summed(
        self, p: Float[Tensor, "heads edges"], v: Float[Tensor, "heads sources channels"], pairs: Tensor, graph: Graph
    ) -> Float[Tensor, "heads destinations channels"]:
        out = super()._summed(p, v, pairs, graph)
        if self.lin_edge is None or graph.features is None:
            return out
        # Σ p (W f) is W Σ p f; one head at a time, so that no more than edges x edge_dim is made
        f = graph.features.to(p.dtype)
        sums = [f.new_zeros(out.shape[1], f.shape[1]).index_add(0, pairs[1], of_head[:, None] * f) for of_head in p]
        return out + torch.stack(sums) @ self.lin_edge.by_head(self.heads).to(p.dtype).transpose(1, 2)

    def message(self, x_j: Tensor, alpha: Tensor, edge_attr: Tensor | None = None) -> Tensor:
        """What goes along each edge, where somebody asks for it."""
        if self.lin_edge is not None and edge_attr is not None:
            x_j = x_j + self.lin_edge(edge_attr).unflatten(-1, (self.heads, self.out_channels))
        return alpha.unsqueeze(-1) * x_j


class _Beside(Score):
    """score = q·k + t·f, for queries that hold t behind q, and keys with zeros there."""

    def __init__(self, edge_dim: int) -> None:
        super().__init__()
        self.edge_dim = edge_dim

    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.transpose(-2, -1)

    def pairs(self, q: Tensor, k: Tensor, features: Tensor | None = None) -> Tensor:
        assert self.edge_dim is not None and features is not None
        return (q * k).sum(-1) + (q[..., -self.edge_dim :] * features.to(q.dtype)).sum(-1)
