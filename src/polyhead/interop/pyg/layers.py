"""PyG's `GATConv`, `GATv2Conv` and `TransformerConv`, computed by polyhead."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from polyhead._checks import is_integer
from polyhead.interop.pyg import old_parameter_names
from polyhead.interop.pyg.attention_conv import AttentionConv, NodeFeatures, OutputAndWeights
from polyhead.interop.pyg.edge_index import SCATTER_REDUCTIONS, FillValue, read_edge_index, self_loop_features
from polyhead.interop.pyg.linear import Linear, init_glorot
from polyhead.neighbourhood import Graph
from polyhead.score import GAT, Dot, GATv2, Score


class _AdditiveAttentionConv(AttentionConv):
    """The base class of GATConv and GATv2Conv: self-loops, edge features in the score, a residual and a bias."""

    lin_edge: Linear | None
    res: Linear | None
    bias: Tensor | None

    def _store_settings(
        self, negative_slope: float, add_self_loops: bool, fill_value: FillValue, residual: bool
    ) -> None:
        if isinstance(fill_value, str) and fill_value not in SCATTER_REDUCTIONS:
            raise ValueError(
                f"fill_value must be a number, a tensor or one of {', '.join(SCATTER_REDUCTIONS)}, got {fill_value!r}"
            )
        self.negative_slope, self.add_self_loops = negative_slope, add_self_loops
        self.fill_value, self.residual = fill_value, residual

    def _make_residual_and_bias(self, bias: bool, residual: bool) -> None:
        joined = self.out_channels * (self.heads if self.concat else 1)
        self.res = Linear(self._widths[1], joined) if residual else None
        self.register_parameter("bias", nn.Parameter(torch.empty(joined)) if bias else None)

    def _reset_all_parameters(self, maps: tuple[Linear | None, ...], vectors: tuple[Tensor | None, ...]) -> None:
        super().reset_parameters()
        for linear in (*maps, self.lin_edge, self.res):
            if linear is not None:
                linear.reset_parameters()
        init_glorot(*vectors)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    @abstractmethod
    def _old_parameter_names(self) -> old_parameter_names.NewNameByOld:
        """The names of parameters in other versions and in DGL -> the current names."""

    def _load_from_state_dict(self, state: Any, prefix: str, local: Any, strict: bool, *reports: Any) -> None:
        # checked before the names are replaced
        dgl = any(
            key.removeprefix(prefix).split(".")[0] in old_parameter_names.DGL_NAMES
            for key in state
            if key.startswith(prefix)
        )
        reports[-1].extend(old_parameter_names.rename_state_dict_keys(state, prefix, self._old_parameter_names()))
        if dgl:
            old_parameter_names.convert_dgl_bias_and_residual(state, prefix, self.heads, self.concat, self.bias)
        super()._load_from_state_dict(state, prefix, local, strict, *reports)

    def _project_residual(self, x_dst: Tensor | None) -> Tensor | None:
        return None if self.res is None or x_dst is None else self.res(x_dst)

    def _attend_along_edges(
        self,
        q: Float[Tensor, "heads destinations channels"],
        k: Float[Tensor, "heads sources channels"],
        score: Score,
        edge_index: Tensor,
        edge_attr: Tensor | None,
        residual: Float[Tensor, "destinations features"] | None,
        need_weights: bool,
    ) -> OutputAndWeights:
        """The output of the layer, from projected destinations and sources."""
        pairs, entries = read_edge_index(edge_index)
        features = self._check_edge_features(edge_attr, entries, pairs.shape[1])
        edges = self._prepare_edges(edge_index, pairs, k.shape[1], q.shape[1], self.add_self_loops, need_weights)
        if features is not None and edges.loops:
            # nodes of the second row, for either flow
            nodes = (k if self.target_to_source else q).shape[1]
            features = edges.append_self_loop_rows(
                features, self_loop_features(self.fill_value, features, pairs, nodes, edges.loops)
            )
        out, alpha = self._attend(q, k, k, score, edges, features, need_weights)
        output = self._merge_heads(out)
        for term in (residual, self.bias):
            output = output if term is None else output + term
        if not need_weights:
            return output
        assert alpha is not None
        return output, self._edges_and_weights(edge_index, edges, alpha)


class GATConv(_AdditiveAttentionConv):
    """`torch_geometric.nn.GATConv`: the score is LeakyReLU(att_dst·W x_i + att_src·W x_j + att_edge·W_edge f_ij).

    Constructor, parameters, calls and return values are the same, including the weights after dropout in training.
    Differences from the original:

    - No tensor of edges x heads x channels is allocated, unless a hook or `aggr` other than "add" needs messages.
    - `size` is used for every kind of `edge_index`, and a size that `edge_index` declares must match `x`.
    - Edges are sorted once, as long as `edge_index` is the same tensor and its version counter does not change. Writing to
      it through NumPy or `.data` does not change the counter.
    - Dropout draws other random numbers, and duplicate edges are dropped together.
    - `edge_attr` without `edge_dim` and the reverse raise a `ValueError`, as do wrong shapes.
    - An explainer's mask applies to the right edges even if every node already has a self-loop, and on bipartite graphs.
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
        fill_value: FillValue = "mean",
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
        self._store_settings(negative_slope, add_self_loops, fill_value, residual)
        features = heads * out_channels
        shared = is_integer(in_channels)
        self.lin = Linear(self._widths[0], features) if shared else None
        self.lin_src = None if shared else Linear(self._widths[0], features)
        self.lin_dst = None if shared else Linear(self._widths[1], features)
        self.att_src = nn.Parameter(torch.empty(1, heads, out_channels))
        self.att_dst = nn.Parameter(torch.empty(1, heads, out_channels))
        self.lin_edge = None if edge_dim is None else Linear(edge_dim, features)
        att_edge = None if edge_dim is None else nn.Parameter(torch.empty(1, heads, out_channels))
        self.register_parameter("att_edge", att_edge)
        self._make_residual_and_bias(bias, residual)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise the weights."""
        self._reset_all_parameters((self.lin, self.lin_src, self.lin_dst), (self.att_src, self.att_dst, self.att_edge))

    def forward(
        self,
        x: NodeFeatures,
        edge_index: Tensor,
        edge_attr: Tensor | None = None,
        size: tuple[int, int] | None = None,
        return_attention_weights: bool | None = None,
    ) -> OutputAndWeights:
        """The output (nodes, heads · channels), or (nodes, channels) without `concat`.

        Args:
            x: (nodes, in_channels), or a pair for sources and destinations, of which the second may be None.
            edge_index: (2, edges), sources in row 0 and destinations in row 1 (PyG's convention); or a sparse
                matrix with destinations in its rows.
            edge_attr: (edges, edge_dim).
            size: the numbers of sources and destinations. Without it, the number of destinations without features is taken
                from `edge_index`, if it is a sparse matrix or an EdgeIndex with a size; otherwise it is the number of sources.
            return_attention_weights: whether to return `(edge_index, alpha)` too: the edges with self-loops, and their
                weights (edges, heads), in training after the dropout of the output.

        Raises:
            ValueError: for wrong shapes, and for edges to nodes that do not exist.
        """
        x_src, x_dst = self._check_node_features(x, needs_destinations=False)
        residual = self._project_residual(x_dst)
        k = self._split_heads(self._own_or_shared_linear(self.lin_src)(x_src))
        if x_dst is None:
            destinations = self._count_destinations(edge_index, len(x_src), size, self.add_self_loops)
            q = k.new_zeros(self.heads, destinations, self.out_channels)
        elif x_dst is x_src and self.lin is not None:
            q = k
        else:
            q = self._split_heads(self._own_or_shared_linear(self.lin_dst)(x_dst))
        if size is not None and tuple(size) != (k.shape[1], q.shape[1]):
            raise ValueError(
                f"size must be ({k.shape[1]}, {q.shape[1]}), the sources and destinations of x, got {tuple(size)}"
            )
        edge = None
        if self.lin_edge is not None and self.att_edge is not None:
            edge = (self.att_edge[0][:, None] @ self.lin_edge.weight_by_head(self.heads))[:, 0]
        score = GAT.from_tensors(self.att_dst[0], self.att_src[0], edge, negative_slope=self.negative_slope)
        return self._attend_along_edges(q, k, score, edge_index, edge_attr, residual, bool(return_attention_weights))

    def _own_or_shared_linear(self, own: Linear | None) -> Linear:
        linear = self.lin if own is None else own
        assert linear is not None
        return linear

    def _old_parameter_names(self) -> old_parameter_names.NewNameByOld:
        return old_parameter_names.old_gat_parameter_names(shared=self.lin is not None)


class GATv2Conv(_AdditiveAttentionConv):
    """`torch_geometric.nn.GATv2Conv`: the score is att·LeakyReLU(W_r x_i + W_l x_j + W_edge f_ij).

    The differences from the original are those of `GATConv`.
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
        fill_value: FillValue = "mean",
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
        self._store_settings(negative_slope, add_self_loops, fill_value, residual)
        self.share_weights = share_weights
        features = heads * out_channels
        self.lin_l = Linear(self._widths[0], features, bias=bias)
        self.lin_r = self.lin_l if share_weights else Linear(self._widths[1], features, bias=bias)
        self.att = nn.Parameter(torch.empty(1, heads, out_channels))
        self.lin_edge = None if edge_dim is None else Linear(edge_dim, features)
        self._make_residual_and_bias(bias, residual)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise the weights."""
        self._reset_all_parameters((self.lin_l, self.lin_r), (self.att,))

    def forward(
        self,
        x: NodeFeatures,
        edge_index: Tensor,
        edge_attr: Tensor | None = None,
        return_attention_weights: bool | None = None,
    ) -> OutputAndWeights:
        """The output (nodes, heads · channels), or (nodes, channels) without `concat`; arguments as in `GATConv`."""
        x_src, x_dst = self._check_node_features(x)
        residual = self._project_residual(x_dst)
        k = self._split_heads(self.lin_l(x_src))
        q = k if x_dst is x_src and self.share_weights else self._split_heads(self.lin_r(x_dst))
        edge = None if self.lin_edge is None else self.lin_edge.weight_by_head(self.heads)
        score = GATv2.from_tensors(self.att[0], edge, negative_slope=self.negative_slope)
        return self._attend_along_edges(q, k, score, edge_index, edge_attr, residual, bool(return_attention_weights))

    def _old_parameter_names(self) -> old_parameter_names.NewNameByOld:
        return old_parameter_names.GATV2_NAMES


class TransformerConv(AttentionConv):
    """`torch_geometric.nn.TransformerConv`: the score is q_i·(k_j + W_edge f_ij)/√channels, the values v_j + W_edge f_ij.

    The differences from the original are those of `GATConv`, except that no self-loops are added and that the returned
    weights are those before dropout, as in the original. With `edge_dim` it is computed in torch in blocks of edges: with
    less memory than the original, but more time.
    """

    returns_dropped_weights = False

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
        features, merged = heads * out_channels, out_channels * (heads if concat else 1)
        source_width, destination_width = self._widths
        self.lin_key = Linear(source_width, features, bias, glorot=False)
        self.lin_query = Linear(destination_width, features, bias, glorot=False)
        self.lin_value = Linear(source_width, features, bias, glorot=False)
        self.lin_edge = None if edge_dim is None else Linear(edge_dim, features, glorot=False)
        self.lin_skip = Linear(destination_width, merged, bias, glorot=False)
        self.lin_beta = Linear(3 * merged, 1, glorot=False) if self.beta else None
        self.needs_weights = edge_dim is not None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise the weights."""
        super().reset_parameters()
        maps = (self.lin_key, self.lin_query, self.lin_value, self.lin_edge, self.lin_skip, self.lin_beta)
        for linear in maps:
            if linear is not None:
                linear.reset_parameters()

    def forward(
        self,
        x: NodeFeatures,
        edge_index: Tensor,
        edge_attr: Tensor | None = None,
        return_attention_weights: bool | None = None,
    ) -> OutputAndWeights:
        """The output (nodes, heads · channels), or (nodes, channels) without `concat`; arguments as in `GATConv`."""
        x_src, x_dst = self._check_node_features(x)
        assert x_dst is not None
        q, k, v = (
            self._split_heads(linear(x_side))
            for linear, x_side in ((self.lin_query, x_dst), (self.lin_key, x_src), (self.lin_value, x_src))
        )
        pairs, entries = read_edge_index(edge_index)
        features = self._check_edge_features(edge_attr, entries, pairs.shape[1])
        need_weights = isinstance(return_attention_weights, bool)
        edges = self._prepare_edges(edge_index, pairs, k.shape[1], q.shape[1], False, need_weights)
        score: Score = Dot()
        if self.lin_edge is not None:
            # (W f)·q = f·(Wᵀq), which needs one vector per node only
            edge_q = q @ self.lin_edge.weight_by_head(self.heads)
            q = torch.cat((q, edge_q), -1) * self.out_channels**-0.5
            k, score = F.pad(k, (0, edge_q.shape[-1])), _DotWithEdgeFeatures(edge_q.shape[-1])
        out, alpha = self._attend(q, k, v, score, edges, features, need_weights)
        output = self._add_root(self._merge_heads(out), x_dst)
        if not need_weights:
            return output
        assert alpha is not None
        return output, (edge_index, alpha)

    def _add_root(self, out: Float[Tensor, "nodes features"], x_dst: Float[Tensor, "nodes in"]) -> Tensor:
        """Add the projected features of the destinations."""
        if not self.root_weight:
            return out
        skip = self.lin_skip(x_dst)
        if self.lin_beta is None:
            return out + skip
        beta = self.lin_beta(torch.cat((out, skip, out - skip), -1)).sigmoid()
        return beta * skip + (1 - beta) * out

    def _sum_values(
        self, p: Float[Tensor, "heads edges"], v: Float[Tensor, "heads sources channels"], pairs: Tensor, graph: Graph
    ) -> Float[Tensor, "heads destinations channels"]:
        out = super()._sum_values(p, v, pairs, graph)
        if self.lin_edge is None or graph.features is None:
            return out
        # Σ p (W f) = W Σ p f; one head at a time, so that only edges x edge_dim is allocated
        f = graph.features.to(p.dtype)
        sums = [f.new_zeros(out.shape[1], f.shape[1]).index_add(0, pairs[1], p_head[:, None] * f) for p_head in p]
        return out + torch.stack(sums) @ self.lin_edge.weight_by_head(self.heads).to(p.dtype).transpose(1, 2)

    def message(self, x_j: Tensor, alpha: Tensor, edge_attr: Tensor | None = None) -> Tensor:
        """The message of each edge; only called if `_needs_messages`."""
        if self.lin_edge is not None and edge_attr is not None:
            x_j = x_j + self.lin_edge(edge_attr).unflatten(-1, (self.heads, self.out_channels))
        return alpha.unsqueeze(-1) * x_j


class _DotWithEdgeFeatures(Score):
    """score = q·k + t·f, for queries (q, t) and keys (k, 0)."""

    def __init__(self, edge_dim: int) -> None:
        super().__init__()
        self.edge_dim = edge_dim

    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.transpose(-2, -1)

    def pairs(self, q: Tensor, k: Tensor, features: Tensor | None = None) -> Tensor:
        assert self.edge_dim is not None and features is not None
        return (q * k).sum(-1) + (q[..., -self.edge_dim :] * features.to(q.dtype)).sum(-1)
