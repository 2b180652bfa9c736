"""The drop-ins for PyG refuse wrong arguments with their names and the rule."""

from __future__ import annotations

import pyg_pairs as pairs
import pytest
import torch

from polyhead.interop import pyg as interop

X, INDEX, ATTR = (
    torch.zeros(pairs.NODES, pairs.IN),
    torch.zeros(2, pairs.EDGES, dtype=torch.long),
    torch.zeros(pairs.EDGES, pairs.EDGE_DIM),
)
WRONG_CALLS: dict[str, tuple[dict, tuple]] = {
    "edge_index must be integers, the indices of nodes, got torch.float32; pass edge_index.long()": ({}, (X, INDEX.float())),
    "edge_index must have shape (2, edges), got (41, 2); pass edge_index.T": ({}, (X, INDEX.T)),
    "edge_index must have shape (2, edges), got (41,); sources in the first row": ({}, (X, INDEX[0])),
    "edge_index must be a tensor (2, edges) or a torch sparse matrix, got builtins.list": ({}, (X, [[0], [1]])),
    "edge_index must have nodes in [0, 13), got 13 -> 14 at edge 0": ({}, (X, torch.tensor([[13], [14]]))),
    "edge_index must have nodes in [0, 13), got -1 -> 1 at edge 0": ({}, (X, torch.tensor([[-1], [1]]))),
    "x must have shape (nodes, 5), got (13, 4)": ({}, (X[:, 1:], INDEX)),
    "x must have shape (nodes, 5), got (1, 13, 5)": ({}, (X[None], INDEX)),
    "x[1] must have shape (nodes, 5), got (13, 4)": ({}, ((X, X[:, 1:]), INDEX)),
    "x[0] must be a tensor, since ": ({}, ((None, X), INDEX)),
    "edge_attr must be None without edge_dim, got Tensor of torch.float32 and shape (41, 2); pass edge_dim to ": ({}, (X, INDEX, ATTR)),
    "edge_attr must be (edges, 2), since edge_dim is 2, got None": ({"edge_dim": 2}, (X, INDEX)),
    "edge_attr must be floating-point of shape (edges, edge_dim) = (41, 2), got torch.float32 of shape (40, 2)": (
        {"edge_dim": 2}, (X, INDEX, ATTR[1:]),
    ),
    "edge_attr must be floating-point of shape (edges, edge_dim) = (41, 3), got torch.float32 of shape (41, 2)": (
        {"edge_dim": 3}, (X, INDEX, ATTR),
    ),
    "edge_attr must be floating-point of shape (edges, edge_dim) = (41, 2), got torch.int64 of shape (41, 2)": ({"edge_dim": 2}, (X, INDEX, ATTR.long())),
    "flow must be 'source_to_target' for a sparse edge_index, got 'target_to_source'; pass the transpose of the matrix": (
        {"flow": "target_to_source"}, (X, torch.eye(pairs.NODES).to_sparse()),
    ),
}  # fmt: skip


@pytest.mark.parametrize("message", WRONG_CALLS)
@pytest.mark.parametrize("kind", pairs.KINDS)
def test_wrong_arguments_are_refused(kind: str, message: str) -> None:
    options, call = WRONG_CALLS[message]
    ours = getattr(interop, kind)(pairs.IN, pairs.CHANNELS, **options)
    with pytest.raises(ValueError) as error:
        ours(*call)
    assert message in str(error.value)


@pytest.mark.filterwarnings("ignore:Sparse BSR tensor support is in beta:UserWarning")
def test_other_sparse_layouts_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"edge_index must have the layout sparse_coo, sparse_csr .*, got torch.sparse_bsr"
    ):
        interop.GATConv(pairs.IN, pairs.CHANNELS)(X, torch.eye(4).to_sparse_bsr((2, 2)))


@pytest.mark.parametrize("kind", ["GATv2Conv", "TransformerConv"])
def test_destinations_must_have_features(kind: str) -> None:
    with pytest.raises(
        ValueError, match=rf"x\[1\] must be a tensor, since {kind} needs features of all nodes, got None"
    ):
        getattr(interop, kind)(pairs.IN, pairs.CHANNELS)((X, None), INDEX)
    with pytest.raises(ValueError, match=r"size must be \(13, 13\), the sources and destinations of x, got \(13, 7\)"):
        interop.GATConv(pairs.IN, pairs.CHANNELS)(X, INDEX, size=(13, 7))


WRONG_OPTIONS: dict[str, dict] = {
    "heads must be an integer in [1, 1048576], got 0": {"heads": 0},
    "out_channels must be an integer in [1, 2147483647], got 0": {"out_channels": 0},
    "edge_dim must be an integer in [1, 2147483647], got 1.5": {"edge_dim": 1.5},
    "dropout must be a number in [0, 1), got 1.0": {"dropout": 1.0},
    "in_channels must be a positive integer or a pair (sources, destinations), got (5, 4, 3)": {
        "in_channels": (5, 4, 3)
    },
    "in_channels must be a positive integer or a pair (sources, destinations), got 0; -1 infers the size": {
        "in_channels": 0
    },
}


@pytest.mark.parametrize("message", WRONG_OPTIONS)
@pytest.mark.parametrize("kind", pairs.KINDS)
def test_wrong_options_are_refused(kind: str, message: str) -> None:
    with pytest.raises(ValueError) as error:
        getattr(interop, kind)(**{"in_channels": pairs.IN, "out_channels": pairs.CHANNELS, **WRONG_OPTIONS[message]})
    assert message in str(error.value)


@pytest.mark.parametrize("kind", pairs.LOOPING)
def test_an_unknown_fill_value_is_refused(kind: str) -> None:
    message = "fill_value must be a number, a tensor or one of add, sum, mean, min, max, mul, got 'median'"
    with pytest.raises(ValueError, match=message):
        getattr(interop, kind)(pairs.IN, pairs.CHANNELS, fill_value="median")
