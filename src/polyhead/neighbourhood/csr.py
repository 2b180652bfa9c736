"""CSR: the edges of a graph sorted by destination and by source, once, by counting sort."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Int, Integer
from torch import Tensor
from torch.utils import _pytree as pytree

from polyhead._torch import assert_on_device, native


class CSR(NamedTuple):
    """Compressed sparse rows: the in-edges of node i are entries indptr[i] to indptr[i + 1] in the order by destination."""

    indptr: Int[Tensor, " destinations+1"]
    indices: Int[Tensor, " edges"]
    # the index of each edge in the caller's order
    edge_id: Int[Tensor, " edges"]
    # the same by source; out_slot is the entry of an edge in the order by destination
    out_indptr: Int[Tensor, " sources+1"]
    out_slot: Int[Tensor, " edges"]
    out_indices: Int[Tensor, " edges"]

    @property
    def edge_index(self) -> Int[Tensor, "2 edges"]:
        """Sources in the first row, destinations in the second, in the caller's order."""
        # operations that check their indices: `repeat_interleave` reads out of bounds if indptr was edited
        destination = torch.zeros_like(self.indices).index_copy_(0, self.out_slot.long(), self.out_indices)
        pairs = torch.stack((self.indices, destination)).long()
        return torch.zeros_like(pairs).index_copy_(1, self.edge_id.long(), pairs)


def build_csr(edge_index: Integer[Tensor, "2 edges"], sources: int, destinations: int) -> CSR:
    """Sort edges in both orders. Edges of one node keep the caller's order.

    Raises:
        ValueError: where an edge names a node that does not exist.
    """
    # tensors that are created in inference mode cannot be used in training
    with torch.inference_mode(False):
        return CSR(*torch.ops.polyhead.sort_edges(edge_index, sources, destinations))


def check_csr_dtypes_and_shapes(csr: Sequence[Tensor], sources: int, destinations: int) -> None:
    """Raise where arrays differ in number, dtype or shape from those that `build_csr` returns; values are not checked."""
    if len(csr) != len(CSR._fields):
        raise ValueError(f"Graph: csr must have the arrays {', '.join(CSR._fields)}, got {len(csr)}; {_REBUILD_HINT}")
    edges = csr[1].numel()
    lengths = (destinations + 1, edges, edges, sources + 1, edges, edges)
    for name, x, length in zip(CSR._fields, csr, lengths, strict=True):
        if x.dtype != torch.int32 or x.shape != (length,) or not x.is_contiguous():
            raise ValueError(
                f"Graph: csr.{name} must be contiguous int32 of shape ({length},), got {x.dtype} of shape {tuple(x.shape)}; {_REBUILD_HINT}"
            )


def check_csr_values(csr: CSR, sources: int, destinations: int) -> None:
    """Raise where arrays of the right form hold ids of nodes or edges that do not exist, or an edge twice."""
    edges = len(csr.edge_id)
    limits = (edges + 1, sources, edges, edges + 1, edges, destinations)
    for name, x, limit in zip(CSR._fields, csr, limits, strict=True):
        low, high = (int(end) for end in x.aminmax()) if x.numel() else (0, limit - 1)
        if low < 0 or high >= limit:
            raise ValueError(
                f"Graph: csr.{name} must hold numbers in [0, {limit}), got {low} to {high}; {_REBUILD_HINT}"
            )
    for name, x in (("indptr", csr.indptr), ("out_indptr", csr.out_indptr)):
        if int(x[0]) != 0 or int(x[-1]) != edges or bool((x.diff() < 0).any()):
            raise ValueError(
                f"Graph: csr.{name} must increase from 0 to {edges}, got {_format_first_values(x)}; {_REBUILD_HINT}"
            )
    for name, x in (("edge_id", csr.edge_id), ("out_slot", csr.out_slot)):
        if bool((x.bincount(minlength=edges) != 1).any()):
            raise ValueError(
                f"Graph: csr.{name} must hold each number in [0, {edges}) once, got {_format_first_values(x)}; {_REBUILD_HINT}"
            )


_REBUILD_HINT = "build the graph again by Graph(edge_index), and do not edit graph.csr"


def _format_first_values(x: Tensor) -> str:
    first = ", ".join(map(str, x[:8].tolist()))
    return f"[{first}{', …' if len(x) > 8 else ''}]"


pytree._register_namedtuple(CSR, serialized_type_name="polyhead.neighbourhood.csr.CSR")

# torch.library.custom_op imports the whole compiler at the first call
_library = torch.library.Library("polyhead", "FRAGMENT")
_library.define(
    "sort_edges(Tensor edge_index, SymInt sources, SymInt destinations) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)


def _empty_csr(edge_index: Tensor, sources: int, destinations: int) -> CSR:
    new = lambda length: edge_index.new_empty(length, dtype=torch.int32)
    edges = edge_index.shape[1]
    return CSR(new(destinations + 1), new(edges), new(edges), new(sources + 1), new(edges), new(edges))


@torch.library.register_fake("polyhead::sort_edges", lib=_library)
def _sort_edges_fake(edge_index: Tensor, sources: int, destinations: int) -> tuple[Tensor, ...]:
    return tuple(_empty_csr(edge_index, sources, destinations))


@torch.library.impl("polyhead::sort_edges", ("cpu", "cuda", "mps", "xpu"), lib=_library)
def _sort_edges(edge_index: Tensor, sources: int, destinations: int) -> tuple[Tensor, ...]:
    if edge_index.dim() != 2 or edge_index.shape[0] != 2 or min(sources, destinations) < 0:
        raise ValueError(
            f"edge_index must be (2, edges) among 0 or more nodes, got shape {tuple(edge_index.shape)}, {sources} sources and "
            f"{destinations} destinations"
        )
    limit = 2**31 - 1
    if max(edge_index.shape[1], sources, destinations) >= limit:
        raise ValueError(
            f"edge_index must have fewer than {limit} edges and nodes, got {edge_index.shape[1]} edges, {sources} sources and "
            f"{destinations} destinations"
        )
    if native is None or not edge_index.is_cpu or edge_index.dtype not in (torch.int32, torch.int64):
        # a private copy: no other thread changes edges between the check and the sort
        return tuple(_sort_edges_by_argsort(edge_index.to(torch.long, copy=True), sources, destinations))
    csr = _empty_csr(edge_index, sources, destinations)
    source, destination = edge_index.unbind(0)
    invalid = native.sort_edges(
        source.data_ptr(), source.stride(0), destination.data_ptr(), destination.stride(0),
        edge_index.dtype == torch.int64, edge_index.shape[1], sources, destinations, *(x.data_ptr() for x in csr),
    )  # fmt: skip
    if invalid >= 0:
        raise _unknown_node_error(edge_index, invalid, sources, destinations)
    return tuple(csr)


def _sort_edges_by_argsort(edge_index: Tensor, sources: int, destinations: int) -> CSR:
    source, destination = edge_index
    invalid = (source < 0) | (source >= sources) | (destination < 0) | (destination >= destinations)
    if not edge_index.is_cpu:
        assert_on_device(~invalid.any(), _rule_for_nodes(sources, destinations))
    elif bool(invalid.any()):
        raise _unknown_node_error(edge_index, int(invalid.nonzero()[0]), sources, destinations)
    sorted_destination, edge = destination.sort(stable=True)
    source = source[edge]
    sorted_source, slot = source.sort(stable=True)
    arrays = (
        build_indptr(sorted_destination, destinations), source, edge, build_indptr(sorted_source, sources), slot,
        sorted_destination[slot],
    )  # fmt: skip
    return CSR(*(x.to(torch.int32) for x in arrays))


def build_indptr(node: Tensor, nodes: int) -> Tensor:
    """The start of each node's edges, and the end of the last, for the sorted nodes of edges."""
    return torch.searchsorted(node.contiguous(), torch.arange(nodes + 1, device=node.device, dtype=node.dtype))


def _rule_for_nodes(sources: int, destinations: int) -> str:
    if sources == destinations:
        return f"edge_index must have nodes in [0, {sources})"
    return f"edge_index must have sources in [0, {sources}) and destinations in [0, {destinations})"


def _unknown_node_error(edge_index: Tensor, edge: int, sources: int, destinations: int) -> ValueError:
    a, b = edge_index[:, edge].tolist()
    hint = "" if min(a, b) < 0 else "; pass num_nodes if there are more"
    return ValueError(f"{_rule_for_nodes(sources, destinations)}, got {a} -> {b} at edge {edge}{hint}")
