"""A part of an attention, some of its heads, queries, keys or nodes, drops the same pairs as the whole."""

import copy

import pytest
import torch

from polyhead import GAT, Causal, Dot, GATv2, Graph, Grid, Window
from polyhead.attend import run_call
from polyhead.kernels.call import GlobalIndices
from polyhead.prepare import AttentionOptions, check_and_make_call


def call_over(q, k, v, over, score=None, indices=None):
    score = Dot() if score is None else score
    return check_and_make_call(q, k, v, AttentionOptions(over, score, dropout=0.4, seed=7, global_indices=indices))


SEQUENCES = [(None, 13), (Causal(), 31), (Window(5), 67)]
CASES = [(kernel, *sequence) for kernel in ("reference", "short", "tiled") for sequence in SEQUENCES]
CASES += [(kernel, Grid(6, 7, window=3), 42) for kernel in ("reference", "tiled", "grid")]


@pytest.mark.parametrize(("kernel", "over", "items"), CASES, ids=str)
def test_some_heads(kernel, over, items):
    inputs = torch.randn(3, 2, 5, items, 8, dtype=torch.float64)
    part = [x[:, 1:3].clone().requires_grad_() for x in inputs]
    whole = [x.clone().requires_grad_() for x in inputs]
    expected = run_call(call_over(*whole, over), "reference")[0][:, 1:3]
    got = run_call(call_over(*part, over, indices=GlobalIndices(1, 5)), kernel)[0]
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)
    expected.square().sum().backward()
    got.square().sum().backward()
    for x, y in zip(part, whole, strict=True):
        torch.testing.assert_close(x.grad, y.grad[:, 1:3], rtol=0, atol=1e-12)
    other = run_call(call_over(*part, over), kernel)[0]
    assert not torch.allclose(other, expected), "dropout must depend on the heads' numbers"


@pytest.mark.parametrize("kernel", ["reference", "tiled"])
def test_some_queries_and_keys(kernel):
    q, k, v = torch.randn(3, 2, 3, 67, 8, dtype=torch.float64)
    queries, keys = torch.arange(20, 41), torch.arange(5, 60)
    mask = torch.zeros(67, 67, dtype=torch.bool)
    mask[:, 5:60] = True
    expected = run_call(call_over(q, k, v, mask), "reference")[0][:, :, queries]
    indices = GlobalIndices(0, None, queries, keys)
    got = run_call(call_over(q[:, :, queries], k[:, :, keys], v[:, :, keys], None, indices=indices), kernel)[0]
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)


def test_short_refuses_dropout_for_other_items():
    x = torch.randn(1, 2, 9, 8)
    with pytest.raises(ValueError, match="its dropout counts queries and keys from 0"):
        run_call(call_over(x, x, x, None, indices=GlobalIndices(0, None, torch.arange(9), None)), "short")


@pytest.mark.parametrize("kernel", ["edges_native", "edges_torch"])
@pytest.mark.parametrize("score", [Dot(), GATv2(4, 8), GAT(4, 8)], ids=lambda score: type(score).__name__)
def test_some_heads_of_renumbered_nodes(kernel, score):
    score = score.double()
    q, k, v = torch.randn(3, 2, 4, 59, 8, dtype=torch.float64)
    graph = Graph(torch.randint(59, (2, 401)), 59)
    order = torch.randperm(59)
    place = order.argsort()
    some = copy.deepcopy(score)
    some.keep_heads(torch.tensor([1, 2]))
    expected = [x.clone().requires_grad_() for x in (q, k, v)]
    got = [x[:, 1:3][:, :, order].clone().requires_grad_() for x in (q, k, v)]
    one = run_call(call_over(*expected, graph, score), kernel)[0][:, 1:3]
    renumbered = Graph(place[graph.edge_index], 59)
    other = run_call(call_over(*got, renumbered, some, GlobalIndices(1, 4, order, order)), kernel)[0][:, :, place]
    torch.testing.assert_close(other, one, rtol=0, atol=1e-12)
    one.square().sum().backward()
    other.square().sum().backward()
    for x, y in zip(got, expected, strict=True):
        if y.grad is not None:
            torch.testing.assert_close(x.grad[:, :, place], y.grad[:, 1:3], rtol=0, atol=1e-12)
