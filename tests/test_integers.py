"""Public integers: values beyond every size behave as no limit, and every integer type is accepted."""

import sys

import numpy as np
import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter

from polyhead import (
    GAT,
    ALiBi,
    Causal,
    Dense,
    Dot,
    GATv2,
    Graph,
    Grid,
    MultiHeadAttention,
    Offsets,
    Padding,
    RelativeBias,
    RopeScaling,
    Rotary,
    Segments,
    Stiefel,
    Window,
    attend,
    attention_weights,
    from_conv,
)
from polyhead.inspection import capture, rollout
from polyhead.kernels import GRID_KERNELS, SEQUENCE_KERNELS
from polyhead.nn import FeedForward, Transformer

UNLIMITED = [sys.maxsize, 2**62, 10**9, 2**31]


def every_kernel(q, k, v, **options):
    """The outputs of all kernels that accept a call."""
    found = {}
    for name in {kernel.name for kernel in (*SEQUENCE_KERNELS, *GRID_KERNELS)}:
        try:
            found[name] = attend(q, k, v, kernel=name, **options)
        except ValueError as error:
            # it refuses the call, or does not support the neighbourhood
            assert str(error).startswith("kernel ")
    return found


@pytest.mark.parametrize("reach", UNLIMITED)
@pytest.mark.parametrize("queries, keys", [(5, 5), (3, 11), (70, 70)])
def test_window_larger_than_the_sequence_sees_everything(reach, queries, keys):
    q, k, v = (torch.randn(2, 3, n, 4) for n in (queries, keys, keys))
    for over, same in ((Window(reach), Dense()), (Window(reach, 0), Causal()), (Window(2, reach), Window(2, keys))):
        want = attend(q, k, v, over=same, kernel="reference")
        found = every_kernel(q, k, v, over=over)
        assert {"tiled", "reference"} <= found.keys()
        for name, out in found.items():
            torch.testing.assert_close(out, want, msg=lambda words, name=name: f"{name}: {words}")
        torch.testing.assert_close(attention_weights(q, k, over=over), attention_weights(q, k, over=same))


@pytest.mark.parametrize("reach", UNLIMITED)
def test_window_larger_than_the_sequence_joins_others_and_has_metrics(reach):
    lengths = Padding(torch.tensor([4, 7]))
    mha, x = MultiHeadAttention(12, 3, position=ALiBi(3)), torch.randn(2, 7, 12)
    out, heads = mha(x, over=Window(reach, 0) & lengths)
    want, same = mha(x, over=Causal() & lengths)
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(heads.entropy(), same.entropy())
    edges = Graph(torch.tensor([[0, 1, 2], [2, 2, 0]])) & Window(reach)
    assert edges.num_edges == 3


@pytest.mark.parametrize("dilation", [4, 2**20, 2**31 - 1])
def test_dilation_beyond_the_grid_leaves_only_the_query(dilation):
    q, k, v = (torch.randn(2, 3, 16, 4) for _ in range(3))
    over = Grid(4, 4, window=3, dilation=dilation)
    found = every_kernel(q, k, v, over=over)
    assert {"grid", "reference"} <= found.keys()
    for name, out in found.items():
        torch.testing.assert_close(out, v, msg=lambda words, name=name: f"{name}: {words}")
    # along one axis of two: the other axis is unchanged
    mixed = every_kernel(q, k, v, over=Grid(4, 4, window=3, dilation=(1, dilation)))
    for name, out in mixed.items():
        torch.testing.assert_close(out, mixed["reference"], msg=lambda words, name=name: f"{name}: {words}")


def test_largest_windows_strides_and_offsets():
    q, k = torch.randn(1, 16, 4), torch.randn(1, 16, 4)
    largest = 2**31 - 1
    torch.testing.assert_close(attend(q, k, k, over=Grid(4, 4, window=largest)), attend(q, k, k))
    first = attend(q[:, :1], k, k, over=Grid(4, 4, window=1, stride=largest))
    torch.testing.assert_close(first, k[:, :1])
    far = Offsets([[largest], [-largest], [0]], (16,), padding="zeros").index
    assert far[:2].eq(-1).all() and far[2, :, 0].tolist() == list(range(16))


def test_segment_ids_are_any_integers():
    ids = torch.tensor([-(2**63), -(2**63), 2**63 - 1, 0, 0])
    q = torch.randn(1, 5, 4)
    torch.testing.assert_close(
        attend(q, q, q, over=Segments(ids)), attend(q, q, q, over=Segments(torch.tensor([0, 0, 1, 2, 2])))
    )


def test_seeds_of_any_integer_type():
    q = torch.randn(2, 6, 4)
    same = [attend(q, q, q, dropout=0.5, seed=s) for s in (7, np.int64(7), torch.tensor(7), torch.tensor([7]))]
    for out in same[1:]:
        assert torch.equal(out, same[0])
    for seed in (-(2**63), 2**63 - 1, 0, -1):
        attend(q, q, q, dropout=0.5, seed=seed)


NUMPY = {
    "Window": lambda n: attend(*[torch.randn(1, 9, 4)] * 3, over=Window(n, n)),
    "Grid": lambda n: attend(*[torch.randn(1, 9, 4)] * 3, over=Grid(n, n, window=n, dilation=n)),
    "Grid prefix": lambda n: Grid(n, prefix=n).check,
    "Offsets": lambda n: Offsets([[0]], [n], stride=n),
    "Graph": lambda n: Graph(torch.tensor([[0], [1]]), (n, n)),
    "Rotary": lambda n: Rotary(dim=2 * n, axes=n),
    "ALiBi": lambda n: ALiBi(n),
    "RelativeBias": lambda n: RelativeBias(n, buckets=4 * n, max_distance=20 * n, window=(n, n)),
    "RopeScaling": lambda n: RopeScaling(2.0, n),
    "GAT": lambda n: GAT(n, n, edge_dim=n),
    "GATv2": lambda n: GATv2(n, n, edge_dim=n),
    "Stiefel": lambda n: Stiefel(heads=n).random(6, n),
    "layer": lambda n: MultiHeadAttention(4 * n, n, kv_heads=n, head_dim=n, d_key=n, d_value=n, d_out=n),
    "cache": lambda n: MultiHeadAttention(12, 3).cache(n, n).truncate(n - n),
    "FeedForward": lambda n: FeedForward(n, n),
    "Transformer": lambda n: Transformer(n, d_model=4 * n, num_heads=n, layers=n, d_feedforward=n),
    "prune": lambda n: MultiHeadAttention(20, 5).prune([n]),
    "from_conv": lambda n: from_conv(nn.Conv2d(2, 2, 3), head_dim=n),
}


@pytest.mark.parametrize("name", NUMPY)
def test_numpy_and_torch_integers_are_accepted(name):
    for three in (3, np.int64(3), np.uint8(3), torch.tensor(3)):
        NUMPY[name](three)


def test_views_accept_numpy_integers():
    three = np.int64(3)
    mha = MultiHeadAttention(12, 3)
    with capture(mha, layers=[np.int64(0)], heads=[np.int64(1)]) as seen:
        mha(torch.randn(4, 9, 12))
    heads = seen["MultiHeadAttention"]
    assert heads.select_batch_entry(three).shape == (1, 1, 9, 9)
    assert heads.top(three)[0].shape == (4, 1, 9, 3)
    assert heads.heatmap(three).shape == (4, 1, 3, 3)
    assert heads.select(queries=three).shape == (4, 1, 1, 9)
    assert heads.agreement(three).shape == (4, 1)
    assert heads.average_by_offset(np.int64(1), grid=(three, three)).shape == (4, 1, 3, 3)
    torch.testing.assert_close(heads.mass(np.int64(-1)), heads.mass("previous"))
    torch.testing.assert_close(rollout(seen, three), rollout(seen, 3))


def test_symbolic_sizes_are_not_specialised():
    def windowed(x):
        return attend(x, x, x, over=Window(x.shape[-2], 0), score=Dot(0.5))

    torch._dynamo.reset()
    counted = CompileCounter()
    compiled = torch.compile(windowed, backend=counted, fullgraph=True, dynamic=True)
    for n in (8, 9, 13):
        x = torch.randn(1, n, 4)
        torch.testing.assert_close(compiled(x), windowed(x))
    assert counted.frame_count == 1
