"""PyG's edges as a `Graph`: read them, add self-loops, sort them, and cache the result for the next call."""

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

from polyhead._torch import is_fake_or_meta, to_at_least_fp32
from polyhead.neighbourhood import Graph
from polyhead.neighbourhood.csr import build_indptr
from polyhead.neighbourhood.graph_inputs import check_edge_index, check_sparse_indices

FillValue = float | Tensor | str

SCATTER_REDUCTIONS = {"add": "sum", "sum": "sum", "mean": "mean", "min": "amin", "max": "amax", "mul": "prod"}


class PreparedEdges(NamedTuple):
    """The edges of one call: the input edges, then the added self-loops."""

    graph: Graph
    # indices of the input edges that remain; None for all
    remaining: Int[Tensor, " remaining"] | None
    loops: int
    # -inf for self-loops that could not be removed, 0 for all other edges
    bias: Float[Tensor, " edges"] | None

    def append_self_loop_rows(self, x: Tensor, loop_rows: Tensor) -> Tensor:
        """Rows for all edges, from those of the input edges and those of the added self-loops."""
        return torch.cat((x if self.remaining is None else x[self.remaining], loop_rows)) if self.loops else x

    def with_attributes(self, features: Tensor | None = None, weights: Tensor | None = None) -> Graph:
        """The graph with features and weights of its edges."""
        if features is None and weights is None:
            return self.graph
        if torch.compiler.is_compiling():
            # it is not cached, so it can be changed in place
            self.graph.features, self.graph.weights = features, weights
            return self.graph
        graph = copy.copy(self.graph)
        graph.features, graph.weights = features, weights
        return graph


def read_edge_index(edge_index: object) -> tuple[Integer[Tensor, "2 edges"], Float[Tensor, "edges dim"] | None]:
    """`edge_index` with sources in row 0 and destinations in row 1 (PyG's convention), and the entries of a sparse matrix
    as features, if they are vectors.

    Scalar entries are ignored: for PyG's layers they only mark that an edge exists.
    """
    edge_index = edge_index.as_tensor() if is_pyg_edge_index(edge_index) else edge_index
    if not isinstance(edge_index, Tensor):
        raise ValueError(
            f"edge_index must be a tensor (2, edges) or a torch sparse matrix, got {type(edge_index).__module__}."
            f"{type(edge_index).__qualname__}; torch_sparse's SparseTensor has to_torch_sparse_csr_tensor()"
        )
    if edge_index.layout != torch.strided:
        return _read_sparse_matrix(edge_index)
    return check_edge_index(edge_index), None


def is_pyg_edge_index(edge_index: Any) -> TypeGuard[Any]:
    """Whether it is a torch_geometric.EdgeIndex."""
    return hasattr(edge_index, "as_tensor")


def declared_node_counts(edge_index: Any) -> tuple[int | None, int | None]:
    """The numbers of nodes of the first and the second row that `edge_index` itself declares; None for undeclared ones."""
    if is_pyg_edge_index(edge_index):
        rows, columns = edge_index.sparse_size()
        return rows, columns
    if isinstance(edge_index, Tensor) and edge_index.layout != torch.strided:
        return edge_index.shape[1], edge_index.shape[0]
    return None, None


def check_declared_node_counts(edge_index: Tensor, nodes: tuple[int, int], loops: bool) -> None:
    """Raise if `edge_index` declares other numbers of nodes than x has."""
    declared = declared_node_counts(edge_index)
    is_pyg = is_pyg_edge_index(edge_index)
    # an EdgeIndex grows with the self-loops that are added to it
    minimum = min(nodes) if is_pyg and loops else 0
    if all(size is None or max(size, minimum) == count for size, count in zip(declared, nodes, strict=True)):
        return
    if is_pyg:
        rule, got = f"an EdgeIndex with sparse_size {nodes}", declared
    else:
        rule, got = f"a matrix of (destinations, sources) = {nodes[::-1]}", declared[::-1]
    raise ValueError(f"edge_index must be {rule}, the numbers of nodes in x, got {got}")


def replace_self_loops(edge_index: Tensor, loops: int) -> Tensor:
    """PyG's EdgeIndex with its self-loops replaced by added ones, as PyG returns it."""
    utils = importlib.import_module("torch_geometric.utils")
    without, _ = utils.remove_self_loops(edge_index)
    looped: Tensor = utils.add_self_loops(without, num_nodes=loops)[0]
    return looped


def _read_sparse_matrix(matrix: Tensor) -> tuple[Int[Tensor, "2 edges"], Float[Tensor, "edges dim"] | None]:
    """The pairs and the entries of a sparse matrix whose rows are destinations, in storage order."""
    check_sparse_indices("edge_index", matrix)
    if matrix.layout == torch.sparse_coo:
        matrix = matrix.coalesce()
        pairs, values = matrix.indices().flip(0), matrix.values()
    elif matrix.layout == torch.sparse_csr:
        rows, values = _indptr_to_indices(matrix.crow_indices(), matrix.col_indices()), matrix.values()
        pairs = torch.stack((matrix.col_indices(), rows))
    elif matrix.layout == torch.sparse_csc:
        columns, values = _indptr_to_indices(matrix.ccol_indices(), matrix.row_indices()), matrix.values()
        pairs = torch.stack((columns, matrix.row_indices()))
    else:
        raise ValueError(f"edge_index must have the layout sparse_coo, sparse_csr or sparse_csc, got {matrix.layout}")
    if pairs.dim() != 2 or pairs.shape[0] != 2:
        raise ValueError(f"edge_index must have two sparse axes, got a sparse matrix of shape {tuple(matrix.shape)}")
    return pairs.long(), values if values.dim() > 1 else None


def _indptr_to_indices(indptr: Tensor, indices: Tensor) -> Tensor:
    rows = torch.arange(len(indptr) - 1, device=indices.device, dtype=indices.dtype)
    return rows.repeat_interleave(indptr.diff(), output_size=len(indices))


def weights_to_sparse_matrix(
    like: Tensor, pairs: Int[Tensor, "2 edges"], alpha: Float[Tensor, "edges heads"]
) -> tuple[Tensor, Tensor]:
    """A sparse matrix of `alpha` in the layout of `like`, and `alpha` in the order of its entries."""
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
    indptr = build_indptr(major, length)
    make = torch.sparse_csc_tensor if by_column else torch.sparse_csr_tensor
    return make(indptr, minor, alpha, size, check_invariants=False), alpha


def prepare_edges(
    edge_index: Tensor,
    pairs: Integer[Tensor, "2 edges"],
    nodes: tuple[int, int],
    *,
    loops: bool,
    target_to_source: bool,
    exact: bool,
) -> PreparedEdges:
    """The sorted edges, from the cache if `edge_index` has not changed.

    Args:
        edge_index: the argument of the caller; `pairs`: the edges that were read from it.
        nodes: the numbers of nodes of the first and the second row of `pairs`.
        loops: whether self-loops are removed, and every node of both rows gets a new one.
        target_to_source: whether messages go from the second row to the first.
        exact: whether self-loops must be removed from the tensor. Inside `torch.compile`, and for tensors without values,
            their number is unknown: unless `exact`, they stay with a bias of -inf.
    """
    key = _edges_cache_key(edge_index, nodes, loops, target_to_source)
    if key is None:
        unknown = torch.compiler.is_compiling() or is_fake_or_meta(pairs)
        return _build_edges(pairs, nodes, loops, target_to_source, exact or not unknown)
    with _edges_cache_lock:
        if key in _edges_cache:
            _edges_cache.move_to_end(key)
            return _edges_cache[key]
    # tensors that are created in inference mode cannot be used in training
    with torch.inference_mode(False):
        made = _build_edges(pairs, nodes, loops, target_to_source, True)
    if _is_cacheable(made.graph.csr.edge_id):
        _store_in_cache(key, made)
    return made


def _build_edges(
    pairs: Tensor, nodes: tuple[int, int], loops: bool, target_to_source: bool, exact: bool
) -> PreparedEdges:
    remaining = bias = None
    count = min(nodes) if loops else 0
    if loops:
        not_loops = pairs[0] != pairs[1]
        if exact:
            remaining = not_loops.nonzero()[:, 0]
            remaining = None if len(remaining) == pairs.shape[1] else remaining
            pairs = pairs if remaining is None else pairs[:, remaining]
        else:
            bias = torch.where(torch.cat((not_loops, not_loops.new_ones(count))), 0.0, -torch.inf)
        pairs = torch.cat((pairs, torch.arange(count, device=pairs.device).expand(2, -1)), 1)
    if target_to_source:
        pairs, nodes = pairs.flip(0), (nodes[1], nodes[0])
    return PreparedEdges(Graph(pairs, nodes), remaining, count, bias)


def self_loop_features(
    fill: FillValue, features: Float[Tensor, "edges ..."], pairs: Integer[Tensor, "2 edges"], nodes: int, loops: int
) -> Float[Tensor, "loops ..."]:
    """The features of added self-loops: the value `fill`, or the reduction `fill` of the features of each node's other in-edges."""
    if not isinstance(fill, str):
        filled = torch.as_tensor(fill, dtype=features.dtype, device=features.device)
        return filled.expand(loops, *features.shape[1:])
    source, destination = pairs.long()
    # existing self-loops go to an extra node, which is dropped
    at = torch.where(source == destination, nodes, destination)
    at = at.reshape(-1, *(1,) * (features.dim() - 1)).expand_as(features)
    promoted = to_at_least_fp32(features)
    initial = promoted.new_full((nodes + 1, *promoted.shape[1:]), 1.0 if fill == "mul" else 0.0)
    return initial.scatter_reduce(0, at, promoted, SCATTER_REDUCTIONS[fill], include_self=False)[:loops].to(
        features.dtype
    )


# Sorted edges, for all layers. An edge_index is identified by weak references to its storages: a weak reference prevents the
# reuse of the address, but does not keep the data alive.
TensorIdentity = tuple[StorageWeakRef, Hashable]
EdgesCacheKey = tuple[tuple[TensorIdentity, ...], Hashable]
_edges_cache: OrderedDict[EdgesCacheKey, PreparedEdges] = OrderedDict()
_edges_cache_lock = threading.Lock()
EDGES_CACHE_SIZE = 32


def _store_in_cache(key: EdgesCacheKey, made: PreparedEdges) -> None:
    with _edges_cache_lock:
        _edges_cache[key] = made
        for old in [old for old in _edges_cache if any(storage.expired() for storage, _ in old[0])]:
            del _edges_cache[old]
        while len(_edges_cache) > EDGES_CACHE_SIZE:
            _edges_cache.popitem(last=False)


def _edges_cache_key(edge_index: Tensor, *options: Hashable) -> EdgesCacheKey | None:
    """The identity and version of `edge_index`; None if changes cannot be detected."""
    if torch.compiler.is_compiling():
        return None
    parts = _index_tensors(edge_index)
    if not all(_is_cacheable(x) for x in parts):
        return None
    coalesced = edge_index.layout != torch.sparse_coo or edge_index.is_coalesced()
    return tuple(_tensor_identity(x) for x in parts), (edge_index.layout, coalesced, *options)


def _is_cacheable(x: Tensor) -> bool:
    """Whether a tensor has a version counter, and does not belong to a mode or a transform."""
    return (
        type(x) is Tensor
        and not x.is_meta
        and not x.is_inference()
        and not torch._C._functorch.is_functorch_wrapped_tensor(x)
    )


def _index_tensors(edge_index: Tensor) -> tuple[Tensor, ...]:
    """The tensors that hold the indices of nodes."""
    if is_pyg_edge_index(edge_index):
        return (edge_index.as_tensor(),)
    if edge_index.layout == torch.sparse_coo:
        return (edge_index._indices(),)
    if edge_index.layout == torch.sparse_csr:
        return edge_index.crow_indices(), edge_index.col_indices()
    if edge_index.layout == torch.sparse_csc:
        return edge_index.ccol_indices(), edge_index.row_indices()
    return (edge_index,)


def _tensor_identity(x: Tensor) -> TensorIdentity:
    return StorageWeakRef(x.untyped_storage()), (x._version, x.storage_offset(), x.shape, x.stride(), x.dtype)
