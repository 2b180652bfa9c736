"""PyG's edges as a `Graph`: read, given self-loops, sorted, and kept for the next call."""

from __future__ import annotations

import copy
import importlib
import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Any, NamedTuple, TypeGuard

import torch
from jaxtyping import Float, Int, Integer
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from polyhead._torch import lacks_values, widened
from polyhead.neighbourhood import Graph
from polyhead.neighbourhood.csr import starts
from polyhead.neighbourhood.graph import check_sparse, checked

Fill = float | Tensor | str

REDUCTIONS = {"add": "sum", "sum": "sum", "mean": "mean", "min": "amin", "max": "amax", "mul": "prod"}


class Edges(NamedTuple):
    """The edges that a call goes along: those that were given, then the self-loops that were added."""

    graph: Graph
    # the numbers of the given edges that are still there; None for all
    stay: Int[Tensor, " stay"] | None
    loops: int
    # -inf for self-loops that should have gone and could not, 0 for the rest
    bias: Float[Tensor, " edges"] | None

    def given(self, x: Tensor, of_loops: Tensor) -> Tensor:
        """Rows for all edges, from those of the given ones and those of the added loops."""
        return torch.cat((x if self.stay is None else x[self.stay], of_loops)) if self.loops else x

    def dressed(self, features: Tensor | None = None, weights: Tensor | None = None) -> Graph:
        """The graph with features and weights of its edges."""
        if features is None and weights is None:
            return self.graph
        if torch.compiler.is_compiling():
            # it was made for this call alone
            self.graph.features, self.graph.weights = features, weights
            return self.graph
        graph = copy.copy(self.graph)
        graph.features, graph.weights = features, weights
        return graph


def read(edge_index: object) -> tuple[Integer[Tensor, "2 edges"], Float[Tensor, "edges dim"] | None]:
    """Sources above destinations, and the features that a sparse matrix holds, if its entries are vectors.

    Numbers in a sparse matrix are not read: for PyG's layers they say nothing but that an edge is there.
    """
    edge_index = edge_index.as_tensor() if is_pyg_edge_index(edge_index) else edge_index
    if not isinstance(edge_index, Tensor):
        raise ValueError(
            f"edge_index: it is {type(edge_index).__module__}.{type(edge_index).__qualname__}; it must be a tensor "
            "(2, edges) or a torch sparse matrix. torch_sparse's has to_torch_sparse_csr_tensor()"
        )
    if edge_index.layout != torch.strided:
        return _entries(edge_index)
    return checked(edge_index), None


def is_pyg_edge_index(edge_index: Any) -> TypeGuard[Any]:
    """Whether it is a torch_geometric.EdgeIndex."""
    return hasattr(edge_index, "as_tensor")


def stated_size(edge_index: Any) -> tuple[int | None, int | None]:
    """How many nodes the numbers of its first row name, and those of its second, where `edge_index` itself says so."""
    if is_pyg_edge_index(edge_index):
        rows, columns = edge_index.sparse_size()
        return rows, columns
    if isinstance(edge_index, Tensor) and edge_index.layout != torch.strided:
        return edge_index.shape[1], edge_index.shape[0]
    return None, None


def check_stated_size(edge_index: Tensor, nodes: tuple[int, int], loops: bool) -> None:
    """Raise where `edge_index` itself says of how many nodes it is, and x has not as many."""
    stated = stated_size(edge_index)
    pygs = is_pyg_edge_index(edge_index)
    # an EdgeIndex grows with the self-loops that are added to it
    least = min(nodes) if pygs and loops else 0
    if all(said is None or max(said, least) == count for said, count in zip(stated, nodes, strict=True)):
        return
    if pygs:
        rule, got = f"an EdgeIndex with sparse_size {nodes}", stated
    else:
        rule, got = f"a matrix of (destinations, sources) = {nodes[::-1]}", stated[::-1]
    raise ValueError(f"edge_index must be {rule}, as many nodes as there are in x, got {got}")


def with_loops(edge_index: Tensor, loops: int) -> Tensor:
    """PyG's EdgeIndex with self-loops in the place of its own, as PyG gives it."""
    utils = importlib.import_module("torch_geometric.utils")
    apart, _ = utils.remove_self_loops(edge_index)
    looped: Tensor = utils.add_self_loops(apart, num_nodes=loops)[0]
    return looped


def _entries(matrix: Tensor) -> tuple[Int[Tensor, "2 edges"], Float[Tensor, "edges dim"] | None]:
    """The entries of a sparse matrix with destinations in its rows, in the order in which it holds them."""
    check_sparse("edge_index", matrix)
    if matrix.layout == torch.sparse_coo:
        matrix = matrix.coalesce()
        pairs, values = matrix.indices().flip(0), matrix.values()
    elif matrix.layout == torch.sparse_csr:
        rows, values = _expanded(matrix.crow_indices(), matrix.col_indices()), matrix.values()
        pairs = torch.stack((matrix.col_indices(), rows))
    elif matrix.layout == torch.sparse_csc:
        columns, values = _expanded(matrix.ccol_indices(), matrix.row_indices()), matrix.values()
        pairs = torch.stack((columns, matrix.row_indices()))
    else:
        raise ValueError(f"edge_index: its layout is {matrix.layout}; it must be sparse_coo, sparse_csr or sparse_csc")
    if pairs.dim() != 2 or pairs.shape[0] != 2:
        raise ValueError(f"edge_index: a sparse matrix must have two sparse axes; its shape is {tuple(matrix.shape)}")
    return pairs.long(), values if values.dim() > 1 else None


def _expanded(first: Tensor, like: Tensor) -> Tensor:
    number = torch.arange(len(first) - 1, device=like.device, dtype=like.dtype)
    return number.repeat_interleave(first.diff(), output_size=len(like))


def as_matrix(
    like: Tensor, pairs: Int[Tensor, "2 edges"], alpha: Float[Tensor, "edges heads"]
) -> tuple[Tensor, Tensor]:
    """A sparse matrix that holds `alpha`, in the layout of another, and `alpha` in the order of its entries."""
    source, destination = pairs
    columns, rows = like.shape[1], like.shape[0]
    by_column = like.layout == torch.sparse_csc
    order = (source * rows + destination if by_column else destination * columns + source).argsort(stable=True)
    source, destination, alpha = source[order], destination[order], alpha[order]
    size = (rows, columns, *alpha.shape[1:])
    if like.layout == torch.sparse_coo:
        where = torch.stack((destination, source))
        return torch.sparse_coo_tensor(where, alpha, size, check_invariants=False, is_coalesced=True), alpha
    major, minor, length = (source, destination, columns) if by_column else (destination, source, rows)
    first = starts(major, length)
    make = torch.sparse_csc_tensor if by_column else torch.sparse_csr_tensor
    return make(first, minor, alpha, size, check_invariants=False), alpha


def edges(
    edge_index: Tensor,
    pairs: Integer[Tensor, "2 edges"],
    nodes: tuple[int, int],
    *,
    loops: bool,
    backwards: bool,
    exactly: bool,
) -> Edges:
    """The sorted edges, from the last time where `edge_index` is what it was then.

    Args:
        edge_index: what the caller gave; `pairs`: what was read from it.
        nodes: how many nodes the numbers in the first row of `pairs` name, and those in the second.
        loops: whether existing self-loops go, and every node that is in both rows gets one.
        backwards: whether messages go from the second row to the first.
        exactly: whether they must really be gone. Inside `torch.compile`, and for tensors without values, how many there are is
            not known; there they stay, with a bias of -inf, unless this is asked for.
    """
    key = _key(edge_index, nodes, loops, backwards)
    if key is None:
        unknown = torch.compiler.is_compiling() or lacks_values(pairs)
        return _made(pairs, nodes, loops, backwards, exactly or not unknown)
    with _lock:
        if key in _kept:
            _kept.move_to_end(key)
            return _kept[key]
    # what is made in inference mode could not be used in training
    with torch.inference_mode(False):
        made = _made(pairs, nodes, loops, backwards, True)
    if _plain(made.graph.csr.edge_id):
        _keep(key, made)
    return made


def _made(pairs: Tensor, nodes: tuple[int, int], loops: bool, backwards: bool, exactly: bool) -> Edges:
    stay = bias = None
    count = min(nodes) if loops else 0
    if loops:
        apart = pairs[0] != pairs[1]
        if exactly:
            stay = apart.nonzero()[:, 0]
            stay = None if len(stay) == pairs.shape[1] else stay
            pairs = pairs if stay is None else pairs[:, stay]
        else:
            bias = torch.where(torch.cat((apart, apart.new_ones(count))), 0.0, -torch.inf)
        pairs = torch.cat((pairs, torch.arange(count, device=pairs.device).expand(2, -1)), 1)
    if backwards:
        pairs, nodes = pairs.flip(0), (nodes[1], nodes[0])
    return Edges(Graph(pairs, nodes), stay, count, bias)


def of_loops(
    fill: Fill, features: Float[Tensor, "edges ..."], pairs: Integer[Tensor, "2 edges"], nodes: int, loops: int
) -> Float[Tensor, "loops ..."]:
    """The features of added self-loops: `fill` itself, or what it names of the features of each node's other in-edges."""
    if not isinstance(fill, str):
        filled = torch.as_tensor(fill, dtype=features.dtype, device=features.device)
        return filled.expand(loops, *features.shape[1:])
    source, destination = pairs.long()
    # existing self-loops go to one node too many
    at = torch.where(source == destination, nodes, destination)
    at = at.reshape(-1, *(1,) * (features.dim() - 1)).expand_as(features)
    wide = widened(features)
    room = wide.new_full((nodes + 1, *wide.shape[1:]), 1.0 if fill == "mul" else 0.0)
    return room.scatter_reduce(0, at, wide, REDUCTIONS[fill], include_self=False)[:loops].to(features.dtype)


# What was sorted, for all layers: the storages that an edge_index lives in, by weak references, say whether it is the
# same. A reference that is held keeps the address from being used again, but not the numbers in memory.
Part = tuple[StorageWeakRef, Hashable]
Key = tuple[tuple[Part, ...], Hashable]
_kept: OrderedDict[Key, Edges] = OrderedDict()
_lock = threading.Lock()
KEPT = 32


def _keep(key: Key, made: Edges) -> None:
    with _lock:
        _kept[key] = made
        for old in [old for old in _kept if any(storage.expired() for storage, _ in old[0])]:
            del _kept[old]
        while len(_kept) > KEPT:
            _kept.popitem(last=False)


def _key(edge_index: Tensor, *more: Hashable) -> Key | None:
    """What tells whether `edge_index` is what it was; None where that cannot be told."""
    if torch.compiler.is_compiling():
        return None
    parts = _parts(edge_index)
    if not all(_plain(x) for x in parts):
        return None
    merged = edge_index.layout != torch.sparse_coo or edge_index.is_coalesced()
    return tuple(_part(x) for x in parts), (edge_index.layout, merged, *more)


def _plain(x: Tensor) -> bool:
    """Whether torch counts the changes of a tensor, and it is none that a mode or a transform will take back."""
    return (
        type(x) is Tensor
        and not x.is_meta
        and not x.is_inference()
        and not torch._C._functorch.is_functorch_wrapped_tensor(x)
    )


def _parts(edge_index: Tensor) -> tuple[Tensor, ...]:
    """The tensors that hold the numbers of nodes."""
    if is_pyg_edge_index(edge_index):
        return (edge_index.as_tensor(),)
    if edge_index.layout == torch.sparse_coo:
        return (edge_index._indices(),)
    if edge_index.layout == torch.sparse_csr:
        return edge_index.crow_indices(), edge_index.col_indices()
    if edge_index.layout == torch.sparse_csc:
        return edge_index.ccol_indices(), edge_index.row_indices()
    return (edge_index,)


def _part(x: Tensor) -> Part:
    return StorageWeakRef(x.untyped_storage()), (x._version, x.storage_offset(), x.shape, x.stride(), x.dtype)
