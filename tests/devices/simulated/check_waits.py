"""The table of launches and waits: no call of the layer waits for a device, and none launches more than it may.

Each case is also compared with the CPU in value and gradient (`benchmarks/devices.py: counted`).
"""

import pytest
import torch

from benchmarks.devices import HEADS, ITEMS, DeviceCase, cases, counted, counted_torch
from benchmarks.simulated_device import count, host_of
from polyhead import Causal, Graph, Padding, Window, attend

# upper bounds, forward and backward, of a call without options, by kernel; they may change with torch
BOUNDS = {
    "fused": (5, 17),
    # four projections, and at most three launches besides
    "flex": (7, 20),
    "tiled": (86, 115),
    "reference": (120, 65),
    "offsets": (50, 40),
    "windows": (44, 45),
    "edges_torch": (45, 46),
}
# what an option adds
ADDED = {"plain": (0, 0), "sink": (8, 16), "bias": (4, 5), "dropout": (62, 64)}
ADDED_BY_POSITION = (45, 40)
# its block lists are made anew in every call: what a function of a user's reads may change
ADDED_BY_FUNCTION = (90, 5)


@pytest.mark.parametrize("case", list(cases()), ids=str)
def test_no_call_waits(gpu, case):
    check(case, counted(case))


@pytest.mark.parametrize("case", [c for c in cases() if c.score == "dot" and c.option in ("plain", "dropout")], ids=str)
def test_no_call_waits_without_flex(gpu, case):
    line = counted(case, flex=False)
    assert line.kernel != "flex"
    check(case, line)


def check(case, line):
    for counts in (line.make, line.forward, line.backward):
        assert not counts.waited and not counts.uploaded
    added = ADDED.get(case.option, ADDED_BY_POSITION)
    more = ADDED_BY_FUNCTION if case.neighbourhood == "from_mask_mod" else (0, 0)
    for counts, *bounds in zip((line.forward, line.backward), BOUNDS[line.kernel], added, more, strict=True):
        assert counts.launches <= sum(bounds), dict(counts.launched)


def test_a_dense_layer_launches_no_more_than_torch_does(gpu):
    ours, torchs = counted(DeviceCase("Dense")), counted_torch()
    assert ours.forward.launches <= torchs.forward.launches
    assert ours.backward.launches <= torchs.backward.launches


def test_attend_waits_for_nothing(gpu):
    q, k, v = torch.randn(3, 2, HEADS, ITEMS, 16, device=gpu)
    lengths = torch.tensor([ITEMS, 7], device=gpu)
    for over in (None, Causal(), Window(5), Padding(lengths, queries=True), Causal() & Padding(lengths)):
        with count() as counts:
            out = attend(q, k, v, over=over, sink=0.5, dropout=0.1, seed=3)
        assert not counts.waited and not counts.uploaded, over
        there = None if over is None else over.to("cpu")
        expected = attend(*map(host_of, (q, k, v)), over=there, sink=0.5, dropout=0.1, seed=3)
        torch.testing.assert_close(host_of(out), expected, atol=1e-5, rtol=1e-5)


def test_long_calls_are_cut_by_sizes_and_intervals(gpu, monkeypatch):
    from polyhead.kernels import tile_problem

    monkeypatch.setattr(tile_problem, "MAX_DEVICE_TILE_NUMEL", 1 << 14)
    q, k, v = torch.randn(3, 2, 2, 200, 8)
    for over in (Window(9), Causal(), Padding(torch.tensor([150, 0]))):
        there = [x.to(gpu).requires_grad_() for x in (q, k, v)]
        here = [x.clone().requires_grad_() for x in (q, k, v)]
        moved = over.to(gpu)
        with count() as counts:
            out = attend(*there, over=moved, kernel="tiled")
            out.backward(torch.ones_like(out))
        assert not counts.waited and not counts.uploaded
        expected = attend(*here, over=over)
        expected.backward(torch.ones_like(expected))
        torch.testing.assert_close(host_of(out), expected.detach(), atol=1e-5, rtol=1e-5)
        for x, y in zip(there, here, strict=True):
            torch.testing.assert_close(host_of(x.grad), y.grad, atol=1e-5, rtol=1e-4)


def test_nan_in_forbidden_pairs_goes_nowhere(gpu):
    q, k, v = torch.randn(3, 1, 2, 20, 8)
    k[..., 15, :] = torch.nan
    v[..., 17, :] = torch.inf
    over = Padding(torch.tensor([12]))
    out = attend(*(x.to(gpu) for x in (q, k, v)), over=over.to(gpu), kernel="tiled")
    assert host_of(out).isfinite().all()
    torch.testing.assert_close(host_of(out), attend(q, k, v, over=over), atol=1e-5, rtol=1e-5)


def test_edges_out_of_range_are_refused_on_the_device(gpu):
    edges = torch.tensor([[0, 1, 7], [1, 2, 0]], device=gpu)
    with count() as counts:
        Graph(edges[:, :2], 3)
    assert not counts.waited
    with pytest.raises(RuntimeError, match=r"edge_index must have nodes in \[0, 3\)"):
        Graph(edges, 3)
    with pytest.raises(RuntimeError, match="weights must not contain NaN"):
        Graph(edges[:, :2], 3, weights=torch.tensor([1.0, torch.nan], device=gpu))
    # without num_nodes the host has to know the largest id
    with count() as counts:
        assert Graph(edges).sources == 8
    assert counts.waits == 1


def test_graphs_in_blocks_of_edges_wait_for_nothing(gpu, monkeypatch):
    from polyhead.kernels import edges_torch

    monkeypatch.setattr(edges_torch, "BLOCK_NUMEL", 1 << 10)
    edges = torch.randint(20, (2, 90))
    x = torch.randn(3, 2, 20, 8)
    results = []
    for device in (torch.device("cpu"), gpu):
        q, k, v = (y.to(device).requires_grad_() for y in x)
        graph = Graph(edges, 20).to(device)
        with count() as counts:
            out = attend(q, k, v, over=graph, kernel="edges_torch")
            out.square().sum().backward()
        assert not counts.waited and not counts.uploaded
        results.append([host_of(y) for y in (out, q.grad, k.grad, v.grad)])
    for host, there in zip(*results, strict=True):
        torch.testing.assert_close(there, host, atol=1e-5, rtol=1e-5)
