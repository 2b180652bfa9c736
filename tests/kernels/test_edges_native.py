"""The C++ kernels: torch's rules for operators, gradients by finite differences, every instruction set, any number of threads."""

import copy
import threading
import time

import pytest
import torch
from torch.utils import _pytree as pytree

import polyhead
from polyhead import GAT, Dot, GATv2, Graph, MultiHeadAttention, attend
from polyhead._torch import native

pytestmark = pytest.mark.skipif(native is None, reason="the C++ kernels are not built")

SCORES = {
    "dot": lambda heads, dim, edge_dim: Dot(),
    "gat": lambda heads, dim, edge_dim: GAT(heads, dim, edge_dim=edge_dim, bias=True),
    "gatv2": lambda heads, dim, edge_dim: GATv2(heads, dim, edge_dim=edge_dim),
}


def pairs(sources, destinations, edges):
    return torch.stack((torch.randint(0, sources, (edges,)), torch.randint(0, destinations, (edges,))))


@pytest.mark.parametrize("option", ["plain", "weights", "features", "dropout", "sink"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kernel", ["edges_native", "edges_torch"])
@pytest.mark.parametrize("score", SCORES)
def test_gradients_by_finite_differences(score, kernel, tied, option):
    if option == "features" and score == "dot":
        pytest.skip("Dot takes no features")
    features = torch.randn(13, 2, dtype=torch.float64, requires_grad=True) if option == "features" else None
    weights = torch.rand(13, dtype=torch.float64, requires_grad=True) if option == "weights" else None
    sink = torch.randn(2, dtype=torch.float64, requires_grad=True) if option == "sink" else None
    how = SCORES[score](2, 3, None if features is None else 2).double()
    q = torch.randn(2, 4, 3, dtype=torch.float64, requires_grad=True)
    k = torch.randn(2, 5, 3, dtype=torch.float64, requires_grad=True)
    v = None if tied else torch.randn(2, 5, 3, dtype=torch.float64, requires_grad=True)
    edges = pairs(5, 4, 13)

    def out(q, k, *learned):
        rest = iter(learned)
        values = k if v is None else next(rest)
        graph = Graph(
            edges, (5, 4), next(rest) if features is not None else None, next(rest) if weights is not None else None
        )
        dropout = 0.4 if option == "dropout" else 0.0
        return attend(
            q, k, values, over=graph, score=how, sink=next(rest) if sink is not None else None, dropout=dropout, seed=3, kernel=kernel
        )  # fmt: skip

    given = [x for x in (v, features, weights, sink) if x is not None]
    # the closure sees the weights of the score, which gradcheck perturbs in place
    assert torch.autograd.gradcheck(lambda *all: out(*all[: 2 + len(given)]), (q, k, *given, *how.parameters()))


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("rich", [False, True])
def test_the_operators_pass_opcheck(score, rich, monkeypatch):
    """With the arguments of an actual call."""
    seen = []
    operator = torch.ops.polyhead.edges_native
    features = torch.randn(30, 2, requires_grad=True) if rich and score != "dot" else None
    weights = torch.rand(30, requires_grad=True) if rich else None
    graph = Graph(pairs(7, 7, 30), 7, features, weights)
    q, k, v = (torch.randn(2, 3, 7, 6, requires_grad=True) for _ in range(3))
    how = SCORES[score](3, 6, None if features is None else 2)
    with monkeypatch.context() as patch:
        patch.setattr(torch.ops.polyhead, "edges_native", lambda *given: seen.append(given) or operator(*given))
        attend(q, k, v if rich else k, over=graph, score=how, dropout=0.2 if rich else 0.0, seed=1)
    torch.library.opcheck(operator.default, _fresh(seen[0]))
    torch.library.opcheck(torch.ops.polyhead.sort_edges.default, (graph.edge_index, 7, 7))


def _fresh(given):
    return tuple(x.detach().requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x for x in given)


@pytest.fixture
def sets():
    before = native.instruction_set()
    yield native.instruction_sets()
    native.use(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("dim", [7, 8, 16, 24, 32, 64, 72])
@pytest.mark.parametrize("score", SCORES)
def test_every_instruction_set_gives_the_same(score, dim, dtype, sets):
    graph = Graph(pairs(50, 50, 700), 50)
    q, k = (torch.randn(3, 50, dim, dtype=dtype, requires_grad=True) for _ in range(2))
    how = SCORES[score](3, dim, None).to(dtype)
    towards, found = torch.randn(3, 50, dim, dtype=dtype), []
    for name in sets:
        native.use(name)
        assert native.instruction_set() == name
        out = attend(q, k, k, over=graph, score=how, kernel="edges_native")
        found.append([out, *torch.autograd.grad(out, [q, k, *how.parameters()], towards)])
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            torch.testing.assert_close(a, b, atol=1e-4 if dtype == torch.float32 else 1e-12, rtol=1e-4)


def test_an_unknown_instruction_set():
    with pytest.raises(ValueError, match="mmx"):
        native.use("mmx")


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def _hub(nodes):
    others = torch.arange(1, nodes)
    spoke = torch.stack((others, torch.zeros_like(others)))
    return Graph(torch.cat((spoke, spoke.flip(0), pairs(nodes, nodes, nodes)), 1), nodes)


@pytest.mark.parametrize("score", SCORES)
def test_results_do_not_depend_on_threads_and_repeat_bit_for_bit(score, threads):
    graph = _hub(20_000)
    x = torch.randn(20_000, 12)
    layer = MultiHeadAttention(12, num_heads=2, head_dim=8, score=score, combine="concat", dropout=0.3)
    found = []
    for number in (1, 2, 3, 2):
        threads(number)
        torch.manual_seed(5)
        layer.zero_grad()
        out, _ = layer(x, over=graph)
        out.square().mean().backward()
        found.append(
            [out.detach(), *(parameter.grad.clone() for parameter in layer.parameters() if parameter.grad is not None)]
        )
    for a, b in zip(found[1], found[3], strict=True):
        assert torch.equal(a, b)
    for other in (found[1], found[2]):
        for a, b in zip(found[0], other, strict=True):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


def test_the_kernels_release_the_gil():
    """Other threads run while a kernel computes."""
    graph = Graph(pairs(20_000, 20_000, 2_000_000), 20_000)
    q = torch.randn(8, 20_000, 16)
    ticks, done = [0], threading.Event()

    def tick():
        while not done.is_set():
            ticks[0] += 1
            time.sleep(0.001)

    beside = threading.Thread(target=tick)
    beside.start()
    before = ticks[0]
    start = time.perf_counter()
    for _ in range(3):
        attend(q, q, q, over=graph, score=Dot(), kernel="edges_native")
    took = time.perf_counter() - start
    during = ticks[0] - before
    done.set()
    beside.join()
    # a kernel that held the lock would allow only a tick or two between calls
    assert during > min(10, took / 0.01)


@pytest.mark.parametrize("score", ["gat", "gatv2", "dot"])
def test_compiles_without_graph_breaks(score):
    graph = Graph(pairs(30, 30, 200), 30)
    layer = MultiHeadAttention(6, num_heads=2, head_dim=4, score=score, combine="concat")
    x = torch.randn(30, 6, requires_grad=True)

    def step(x, graph):
        return layer(x, over=graph)[0]

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    out, expected = compiled(x, graph), step(x, graph)
    torch.testing.assert_close(out, expected)
    towards = torch.randn_like(out)
    learned = [x, *(p for p in layer.parameters() if p.requires_grad)]
    for a, b in zip(
        torch.autograd.grad(out, learned, towards, allow_unused=True, materialize_grads=True),
        torch.autograd.grad(expected, learned, towards, allow_unused=True, materialize_grads=True),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


def test_a_graph_created_inside_a_compiled_function():
    layer = MultiHeadAttention(6, num_heads=2, head_dim=4, score="gatv2", combine="concat")

    def step(x, edge_index):
        return layer(x, over=Graph(edge_index, x.shape[0]))[0]

    x, edge_index = torch.randn(30, 6), pairs(30, 30, 200)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, edge_index), step(x, edge_index))
    with pytest.raises(ValueError, match="got 99 -> "):
        compiled(x, edge_index.index_fill(1, torch.tensor([0]), 99))


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 3e38])
@pytest.mark.parametrize("score", SCORES)
def test_nan_and_inf_stay_in_their_neighbourhood(score, value):
    graph = Graph(torch.tensor([[0, 1, 2, 3], [1, 1, 3, 3]]), 4)
    x = torch.randn(2, 4, 8)
    how = SCORES[score](2, 8, None)
    clean = attend(x, x, x, over=graph, score=how)
    x[:, 0] = value
    out = attend(x, x, x, over=graph, score=how)
    torch.testing.assert_close(out[:, 3], clean[:, 3])
    assert out[:, [0, 2]].eq(0).all()


def test_bf16_and_fp16_are_computed_in_fp32():
    graph = Graph(pairs(50, 50, 700), 50)
    q = torch.randn(3, 50, 8).bfloat16()
    how = GATv2(3, 8).bfloat16()
    said = polyhead.explain(q, q, q, over=graph, score=how)
    assert said.kernel == "edges_native"
    expected = attend(q.float(), q.float(), q.float(), over=graph, score=how.float())
    torch.testing.assert_close(attend(q, q, q, over=graph, score=how.bfloat16()), expected.bfloat16())


def test_vmap_and_grad_use_edges_torch():
    graph = Graph(pairs(9, 9, 40), 9)
    layer = MultiHeadAttention(6, num_heads=2, score="gatv2")
    x = torch.randn(5, 9, 6)
    many = torch.vmap(lambda one: layer(one, over=graph)[0])(x)
    torch.testing.assert_close(many, layer(x, over=graph)[0])
    slope = torch.func.grad(lambda one: layer(one, over=graph)[0].square().sum())(x[0])
    y = x[0].clone().requires_grad_()
    layer(y, over=graph)[0].square().sum().backward()
    torch.testing.assert_close(slope, y.grad, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("rich", [False, True])
@pytest.mark.parametrize("score", SCORES)
def test_under_autocast(score, rich):
    """Large enough that a wrong dtype width would not pass by chance."""
    features = torch.randn(20_000, 3) if rich and score != "dot" else None
    graph = Graph(pairs(2_000, 2_000, 20_000), 2_000, features)
    layer = MultiHeadAttention(16, num_heads=4, score=SCORES[score](4, 4, None if features is None else 3))
    x = torch.randn(2_000, 16)
    expected = layer(x, over=graph)[0]
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(x, over=graph)[0]
        out.float().square().sum().backward()
    torch.testing.assert_close(out.float(), expected, atol=0.05, rtol=0.05)


@pytest.mark.parametrize(
    "change",
    [
        lambda g: pytree.tree_map(lambda x: x.double(), g),
        lambda g: pytree.tree_map(lambda x: x.long(), g),
        lambda g: _with(g, csr=g.csr._replace(indices=g.csr.indices[:1])),
        lambda g: _with(g, csr=g.csr._replace(indptr=g.csr.indptr[:-1])),
        lambda g: _with(g, weights=torch.rand(1)),
        lambda g: _with(g, weights=torch.rand(2_000, device="meta")),
        lambda g: g.to("meta"),
    ],
)
def test_an_edited_graph_is_refused(change):
    graph = change(Graph(pairs(100, 100, 2_000), 100))
    q = torch.randn(2, 100, 8)
    with pytest.raises((ValueError, RuntimeError)):
        attend(q, q, q, over=graph, score=GATv2(2, 8), kernel="edges_native")


def _with(graph, **attributes):
    graph = copy.copy(graph)
    graph.__dict__.update(attributes)
    return graph


def test_saved_and_loaded_programs_take_a_graph(tmp_path):
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = MultiHeadAttention(6, num_heads=2, score="gatv2")

        def forward(self, x, graph):
            return self.layer(x, over=graph)[0]

    model, x, graph = Model(), torch.randn(9, 6), Graph(pairs(9, 9, 40), 9)
    program = torch.export.export(model, (x, graph))
    torch.export.save(program, tmp_path / "model.pt2")
    torch.testing.assert_close(torch.export.load(tmp_path / "model.pt2").module()(x, graph), model(x, graph))


def test_a_graph_created_in_inference_mode_can_be_used_in_training():
    with torch.inference_mode():
        graph = Graph(pairs(9, 9, 40), 9)
    layer = MultiHeadAttention(6, num_heads=2, score="gatv2")
    layer(torch.randn(9, 6), over=graph)[0].sum().backward()
    assert layer.k_proj.weight.grad is not None
