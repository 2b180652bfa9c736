"""The edges of a graph in two orders, by destination and by source: checked and sorted once, by counting."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Int, Integer
from torch import Tensor
from torch.utils import _pytree as pytree

from polyhead._torch import native


class CSR(NamedTuple):
    """Compressed rows. In-edges of node i are the places first[i] to first[i + 1] of the destination order."""

    indptr: Int[Tensor, " destinations+1"]
    indices: Int[Tensor, " edges"]
    # the caller's number of each edge
    edge_id: Int[Tensor, " edges"]
    # the same from the sources' side; an out-edge is named by its place in the destination order
    out_indptr: Int[Tensor, " sources+1"]
    out_slot: Int[Tensor, " edges"]
    out_indices: Int[Tensor, " edges"]

    @property
    def edge_index(self) -> Int[Tensor, "2 edges"]:
        """Sources above destinations, in the order in which the edges were given."""
        # by operations that bound what they follow: `repeat_interleave` reads beyond the starts if they were edited
        destination = torch.zeros_like(self.indices).index_copy_(0, self.out_slot.long(), self.out_indices)
        pairs = torch.stack((self.indices, destination)).long()
        return torch.zeros_like(pairs).index_copy_(1, self.edge_id.long(), pairs)


def build_csr(edge_index: Integer[Tensor, "2 edges"], sources: int, destinations: int) -> CSR:
    """Both orders. Edges of one node keep the order in which they were given.

    Raises:
        ValueError: where an edge names a node that is not there.
    """
    # what is made in inference mode could not be used in training
    with torch.inference_mode(False):
        return CSR(*torch.ops.polyhead.sort_edges(edge_index, sources, destinations))


def check_form(csr: Sequence[Tensor], sources: int, destinations: int) -> None:
    """Raise where arrays are not the six that `build_csr` makes of so many nodes, whatever numbers are in them."""
    if len(csr) != len(CSR._fields):
        raise ValueError(f"Graph: csr must have the arrays {', '.join(CSR._fields)}, got {len(csr)}; {_REMEDY}")
    edges = csr[1].numel()
    lengths = (destinations + 1, edges, edges, sources + 1, edges, edges)
    for name, x, length in zip(CSR._fields, csr, lengths, strict=True):
        if x.dtype != torch.int32 or x.shape != (length,) or not x.is_contiguous():
            raise ValueError(
                f"Graph: csr.{name} must be int32 of shape ({length},) without gaps, got {x.dtype} of shape {tuple(x.shape)}; {_REMEDY}"
            )


def check_ids(csr: CSR, sources: int, destinations: int) -> None:
    """Raise where arrays of the right form hold ids of nodes or edges that are not there, or of an edge twice."""
    edges = len(csr.edge_id)
    limits = (edges + 1, sources, edges, edges + 1, edges, destinations)
    for name, x, limit in zip(CSR._fields, csr, limits, strict=True):
        low, high = (int(end) for end in x.aminmax()) if x.numel() else (0, limit - 1)
        if low < 0 or high >= limit:
            raise ValueError(f"Graph: csr.{name} must hold numbers in [0, {limit}), got {low} to {high}; {_REMEDY}")
    for name, x in (("indptr", csr.indptr), ("out_indptr", csr.out_indptr)):
        if int(x[0]) != 0 or int(x[-1]) != edges or bool((x.diff() < 0).any()):
            raise ValueError(f"Graph: csr.{name} must rise from 0 to {edges}, got {_some(x)}; {_REMEDY}")
    for name, x in (("edge_id", csr.edge_id), ("out_slot", csr.out_slot)):
        if bool((x.bincount(minlength=edges) != 1).any()):
            raise ValueError(f"Graph: csr.{name} must hold each number in [0, {edges}) once, got {_some(x)}; {_REMEDY}")


_REMEDY = "make the graph anew by Graph(edge_index), and do not edit graph.csr"


def _some(x: Tensor) -> str:
    shown = ", ".join(map(str, x[:8].tolist()))
    return f"[{shown}{', …' if len(x) > 8 else ''}]"


pytree._register_namedtuple(CSR, serialized_type_name="polyhead.neighbourhood.csr.CSR")

# torch.library.custom_op would import the whole compiler at the first call
_library = torch.library.Library("polyhead", "FRAGMENT")
_library.define(
    "sort_edges(Tensor edge_index, SymInt sources, SymInt destinations) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)


def _room(edge_index: Tensor, sources: int, destinations: int) -> CSR:
    new = lambda length: edge_index.new_empty(length, dtype=torch.int32)
    edges = edge_index.shape[1]
    return CSR(new(destinations + 1), new(edges), new(edges), new(sources + 1), new(edges), new(edges))


@torch.library.register_fake("polyhead::sort_edges", lib=_library)
def _(edge_index: Tensor, sources: int, destinations: int) -> tuple[Tensor, ...]:
    return tuple(_room(edge_index, sources, destinations))


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
            f"edge_index: {edge_index.shape[1]} edges and {sources} nodes; there may be fewer than {limit}"
        )
    if native is None or not edge_index.is_cpu or edge_index.dtype not in (torch.int32, torch.int64):
        # a copy of our own: what is checked is what is sorted
        return tuple(_argsorted(edge_index.to(torch.long, copy=True), sources, destinations))
    made = _room(edge_index, sources, destinations)
    source, destination = edge_index.unbind(0)
    wrong = native.sort_edges(
        source.data_ptr(), source.stride(0), destination.data_ptr(), destination.stride(0),
        edge_index.dtype == torch.int64, edge_index.shape[1], sources, destinations, *(x.data_ptr() for x in made),
    )  # fmt: skip
    if wrong >= 0:
        raise _lost(edge_index, wrong, sources, destinations)
    return tuple(made)


def _argsorted(edge_index: Tensor, sources: int, destinations: int) -> CSR:
    source, destination = edge_index
    lost = (source < 0) | (source >= sources) | (destination < 0) | (destination >= destinations)
    if bool(lost.any()):
        raise _lost(edge_index, int(lost.nonzero()[0]), sources, destinations)
    edge = destination.argsort(stable=True)
    source = source[edge]
    place = source.argsort(stable=True)
    arrays = (
        starts(destination, destinations), source, edge, starts(source, sources), place, destination[edge][place]
    )  # fmt: skip
    return CSR(*(x.to(torch.int32) for x in arrays))


def starts(node: Tensor, nodes: int) -> Tensor:
    """Where each node's edges begin, once sorted, and where the last ones end."""
    return torch.cat((node.new_zeros(1), node.bincount(minlength=nodes).cumsum(0)))


def _lost(edge_index: Tensor, edge: int, sources: int, destinations: int) -> ValueError:
    a, b = edge_index[:, edge].tolist()
    if sources == destinations:
        there = f"nodes are 0 to {sources - 1}" if sources else "there are no nodes"
    else:
        there = f"there are {sources} sources and {destinations} destinations, numbered from 0"
    hint = "" if min(a, b) < 0 else "; pass num_nodes if there are more"
    return ValueError(f"edge_index: edge {edge} goes from {a} to {b}, but {there}{hint}")
