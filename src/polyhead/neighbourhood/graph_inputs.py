"""What a `Graph` is built from, checked: edges, numbers of nodes, features and weights of edges, sparse matrices."""

from __future__ import annotations

import torch
from jaxtyping import Float, Integer
from torch import Tensor

from polyhead._checks import LARGEST_INT32, LARGEST_INT64, as_tensor, check_integer, short_repr
from polyhead._torch import are_values_readable, assert_on_device, is_tracing_or_dataless


def check_edge_index(edge_index: object) -> Integer[Tensor, "2 edges"]:
    """Edges as a tensor: integers in two rows."""
    edges = as_tensor("edge_index", edge_index, "of integers (2, edges)")
    if edges.dim() != 2 or edges.shape[0] != 2:
        transposed = edges.dim() == 2 and edges.shape[1] == 2
        hint = "pass edge_index.T" if transposed else "sources in the first row, destinations in the second"
        if edges.dim() == 2 and edges.shape[0] == edges.shape[1]:
            hint = "for an adjacency matrix with a row per source pass matrix.nonzero().T"
        raise ValueError(f"edge_index must have shape (2, edges), got {tuple(edges.shape)}; {hint}")
    # torch makes an empty list a tensor of floats
    if edges.numel() == 0:
        return edges.long()
    if edges.is_floating_point() or edges.is_complex() or edges.dtype == torch.bool:
        raise ValueError(
            f"edge_index must be integers, the indices of nodes, got {edges.dtype}; pass edge_index.long()"
        )
    # torch has no maximum of these dtypes; an index beyond 63 bits becomes negative, which is refused
    return edges.long() if edges.dtype in (torch.uint16, torch.uint32, torch.uint64) else edges


def check_num_nodes(num_nodes: object, edge_index: Tensor) -> tuple[int, int]:
    """The numbers of sources and destinations; the largest index + 1 where none is given."""
    if num_nodes is None:
        if is_tracing_or_dataless(edge_index):
            raise ValueError(
                "num_nodes must be passed inside torch.compile and torch.func, and for tensors without values, got None"
            )
        # the operator takes 64 bits, and refuses as many nodes
        nodes = min(int(edge_index.max()), LARGEST_INT64 - 1) + 1 if edge_index.numel() else 0
        return max(nodes, 0), max(nodes, 0)
    pair = num_nodes if isinstance(num_nodes, (tuple, list)) else (num_nodes, num_nodes)
    if len(pair) != 2:
        raise ValueError(
            f"Graph: num_nodes must be an integer, or (sources, destinations), got {short_repr(num_nodes)}"
        )
    # indptr has an entry more than there are nodes, and CSR is int32
    sources, destinations = (check_integer("Graph: num_nodes", n, 0, LARGEST_INT32 - 1) for n in pair)
    return sources, destinations


def check_edge_features(features: Tensor, edges: int) -> Float[Tensor, "edges dim"]:
    """Features of edges as a matrix, one row per edge."""
    features = as_tensor("features", features, "(edges, dim)")
    features = features[:, None] if features.dim() == 1 else features
    if features.dim() != 2 or features.shape[0] != edges or not features.is_floating_point():
        raise ValueError(
            f"features must be floating-point numbers (edges, dim) = ({edges}, dim), got {features.dtype} of shape "
            f"{tuple(features.shape)}"
        )
    return features


def check_edge_weights(weights: Tensor, edges: int) -> Float[Tensor, " edges"]:
    """Weights of edges: one number per edge, and no NaN."""
    weights = as_tensor("weights", weights, "(edges,)")
    if tuple(weights.shape) != (edges,) or not weights.is_floating_point():
        raise ValueError(
            f"weights must be floating-point numbers (edges,) = ({edges},), got {weights.dtype} of shape {tuple(weights.shape)}"
        )
    rule = "weights must not contain NaN"
    if are_values_readable(weights) and bool(weights.isnan().any()):
        raise ValueError(f"{rule}, got {int(weights.isnan().sum())} of {edges}")
    if not is_tracing_or_dataless(weights) and not weights.is_cpu:
        assert_on_device(~weights.isnan().any(), rule)
    return weights


def check_sparse_indices(name: str, matrix: Tensor) -> None:
    """Raise where the indices of a sparse matrix are out of bounds: torch does not check them by default."""
    layout, size = matrix.layout, matrix.shape
    try:
        if layout == torch.sparse_coo:
            torch.sparse_coo_tensor(matrix._indices(), matrix._values(), size, check_invariants=True)
            return
        by_row = layout in (torch.sparse_csr, torch.sparse_bsr)
        starts = matrix.crow_indices() if by_row else matrix.ccol_indices()
        ends = matrix.col_indices() if by_row else matrix.row_indices()
        torch.sparse_compressed_tensor(starts, ends, matrix.values(), size, layout=layout, check_invariants=True)
    except RuntimeError as error:
        raise ValueError(
            f"{name} must be a sparse matrix with indices in bounds, got one that torch rejects: {error}"
        ) from error


def edges_of_sparse_matrix(
    matrix: Tensor, num_nodes: object, weights: Tensor | None
) -> tuple[Tensor, tuple[int, int], Tensor | None]:
    """The edges of a sparse matrix, row by row. Its entries become weights unless all of them are 1."""
    if matrix.dim() != 2:
        raise ValueError(f"edge_index must have two axes as a sparse matrix, got shape {tuple(matrix.shape)}")
    size = (matrix.shape[1], matrix.shape[0])
    if num_nodes is not None and check_num_nodes(num_nodes, matrix) != size:
        raise ValueError(
            f"num_nodes must be {size}, the columns and rows of the sparse matrix, got {num_nodes!r}; leave it out"
        )
    check_sparse_indices("edge_index", matrix)
    entries = matrix.to_sparse_coo().coalesce()
    values = entries.values()
    if weights is None and not bool((values == 1).all()):
        weights = values if values.is_floating_point() else values.to(torch.get_default_dtype())
    return entries.indices().flip(0), size, weights
