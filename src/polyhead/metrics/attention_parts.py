"""The part of an attention that a view shows or a metric reads: some of its heads, queries, keys or edges.

`DensePart` and `EdgePart` have the same properties and methods: callers need not know which one they have.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from polyhead.kernels.call import Call
from polyhead.kernels.edges_torch import edge_weights
from polyhead.kernels.reference import pair_weights
from polyhead.neighbourhood import Graph


class DensePart(NamedTuple):
    """The weights of some heads, queries and keys; None for all."""

    call: Call
    heads: Int[Tensor, " some"] | None = None
    queries: Int[Tensor, " some"] | None = None
    keys: Int[Tensor, " some"] | None = None
    # the norm of the output change by a weight of 1 on a key: if given, the weights are multiplied by it
    contribution_norm: Float[Tensor, "... all_heads all_keys"] | None = None

    @property
    def axes(self) -> tuple[str, ...]:
        """The names of the axes of the weights after the batch axes."""
        return "heads", "queries", "keys"

    @property
    def num_queries(self) -> int:
        """The number of queries in metrics per query."""
        return self.shape[-2]

    @property
    def num_keys(self) -> int:
        """The number of keys in metrics per key."""
        return self.shape[-1]

    @property
    def first_key(self) -> int | None:
        """The index of the first key of the whole attention; None if it is not here."""
        return 0

    @property
    def is_selection(self) -> bool:
        """Whether queries or keys are selected."""
        return self.queries is not None or self.keys is not None

    @property
    def edge_index(self) -> Int[Tensor, "2 some"]:
        """On a graph: the source and the destination of each edge."""
        raise ValueError("edge_index needs an attention over a Graph, got queries x keys; read heads.weights")

    def indices(self, axis: str) -> Int[Tensor, " some"]:
        """The indices of heads, queries, keys or edges in the call."""
        if axis == "edges":
            raise ValueError("edges must be left out where the attention is not over a Graph; select queries and keys")
        selected: Tensor | None = getattr(self, axis)
        return torch.arange(getattr(self.call.sizes, axis), device=self.call.q.device) if selected is None else selected

    @property
    def head_numbers(self) -> list[int]:
        """The indices of the heads as integers; only selected ones are read from a device."""
        return list(range(self.call.sizes.heads)) if self.heads is None else self.heads.tolist()

    @property
    def shape(self) -> torch.Size:
        """The shape of the weights."""
        sizes = self.call.sizes
        selected = ((self.heads, sizes.heads), (self.queries, sizes.queries), (self.keys, sizes.keys))
        return torch.Size((*sizes.batch, *(size if index is None else len(index) for index, size in selected)))

    def select(self, axis: str, indices: Int[Tensor, " some"]) -> DensePart:
        """Only these heads, queries, keys or edges of the call."""
        fields: dict[str, Any] = {axis: indices}
        return self._replace(**fields)

    def select_outputs(self, outputs: Tensor) -> Float[Tensor, "... heads queries value_dim"]:
        """The outputs of the selected heads and queries, out of all."""
        outputs = outputs if self.heads is None else outputs.index_select(-3, self.heads)
        return outputs if self.queries is None else outputs.index_select(-2, self.queries)

    def weights(self) -> Float[Tensor, "... heads queries keys"]:
        """The weights, or contributions, in at least fp32."""
        p, norm = self.attention_weights(), self.norm_per_key()
        return p if norm is None else p * norm[..., None, :]

    def attention_weights(
        self, queries: Int[Tensor, " rows"] | None = None, span: tuple[int, int] | None = None
    ) -> Float[Tensor, "... heads queries keys"]:
        """The weights, even of a part of contributions: of these queries, by default of the selected ones; of a span of all keys, if given."""
        p = pair_weights(self.call, self.queries if queries is None else queries, self.heads, span)
        return p if self.keys is None else p.index_select(-1, self.keys)

    def norm_per_key(self) -> Float[Tensor, "... heads keys"] | None:
        """What multiplies the weights of each selected head and key."""
        norm = _head_norm(self)
        return norm if norm is None or self.keys is None else norm.index_select(-1, self.keys)


class EdgePart(NamedTuple):
    """The weights of some heads and edges of a graph; None for all."""

    call: Call
    heads: Int[Tensor, " some"] | None = None
    edges: Int[Tensor, " some"] | None = None
    contribution_norm: Float[Tensor, "... all_heads all_keys"] | None = None

    @property
    def axes(self) -> tuple[str, ...]:
        return "heads", "edges"

    @property
    def num_queries(self) -> int:
        return self.call.sizes.queries

    @property
    def num_keys(self) -> int:
        return self.call.sizes.keys

    @property
    def first_key(self) -> int | None:
        if self.graph.item_indices is None:
            return 0
        place = (self.graph.item_indices[1] == 0).nonzero()
        return int(place[0]) if len(place) else None

    @property
    def is_selection(self) -> bool:
        # metrics keep all queries and keys
        return False

    @property
    def graph(self) -> Graph:
        assert isinstance(self.call.over, Graph)
        return self.call.over

    @property
    def edge_index(self) -> Int[Tensor, "2 some"]:
        pairs = self.graph.edge_index
        return pairs if self.edges is None else pairs[:, self.edges]

    def indices(self, axis: str) -> Int[Tensor, " some"]:
        device, sizes = self.call.q.device, self.call.sizes
        if axis == "edges":
            return torch.arange(self.graph.num_edges, device=device) if self.edges is None else self.edges
        if axis == "heads" and self.heads is not None:
            return self.heads
        return torch.arange(getattr(sizes, axis), device=device)

    @property
    def head_numbers(self) -> list[int]:
        return list(range(self.call.sizes.heads)) if self.heads is None else self.heads.tolist()

    @property
    def shape(self) -> torch.Size:
        sizes = self.call.sizes
        heads = sizes.heads if self.heads is None else len(self.heads)
        return torch.Size((*sizes.batch, heads, self.graph.num_edges if self.edges is None else len(self.edges)))

    def select(self, axis: str, indices: Int[Tensor, " some"]) -> EdgePart:
        """Queries select the edges that go to them, keys the edges that come from them."""
        if axis in ("queries", "keys"):
            end = self.edge_index[1 if axis == "queries" else 0]
            axis, indices = "edges", self.indices("edges")[torch.isin(end, indices)]
        fields: dict[str, Any] = {axis: indices}
        return self._replace(**fields)

    def select_outputs(self, outputs: Tensor) -> Float[Tensor, "... heads queries value_dim"]:
        return outputs if self.heads is None else outputs.index_select(-3, self.heads)

    def weights(self) -> Float[Tensor, "... heads edges"]:
        p, norm = self.attention_weights(), self.norm_per_edge()
        return p if norm is None else p * norm

    def attention_weights(self) -> Float[Tensor, "... heads edges"]:
        """The weights, even of a part of contributions."""
        p = edge_weights(self.call, self.heads)
        return p if self.edges is None else p.index_select(-1, self.edges)

    def norm_per_edge(self) -> Float[Tensor, "... heads edges"] | None:
        """What multiplies the weights of each selected head and edge."""
        norm = _head_norm(self)
        return None if norm is None else norm.index_select(-1, self.edge_index[0])


Part = DensePart | EdgePart


def make_whole_part(call: Call) -> Part:
    """All weights of a call."""
    return EdgePart(call) if isinstance(call.over, Graph) else DensePart(call)


def select_batch_rows(part: Part, rows: tuple[slice, ...]) -> Part:
    """The part in some rows of the batch; one slice per batch axis."""
    if all(row == slice(None) for row in rows):
        return part
    call, norm, own = part.call, part.contribution_norm, len(part.axes)
    batch, bias = call.sizes.batch, call.bias
    if bias is not None and bias.dim() > own:
        bias = bias.expand(*batch, *bias.shape[-own:])[rows]
    call = call._replace(
        q=call.q[rows], k=call.k[rows], v=call.v[rows], over=call.over.select_batch_rows(batch, rows), bias=bias
    )
    return part._replace(call=call, contribution_norm=None if norm is None else norm[rows])


def _head_norm(part: Part) -> Float[Tensor, "... heads all_keys"] | None:
    norm = part.contribution_norm
    return norm if norm is None or part.heads is None else norm.index_select(-2, part.heads)
