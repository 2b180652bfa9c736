"""No kernel reads or writes beyond its tensors, however a graph was edited and whatever is passed to an operator.

Code that could crash the process runs in a subprocess.
"""

import subprocess
import sys
import textwrap

import pytest

from polyhead._torch import native

pytestmark = pytest.mark.skipif(native is None, reason="the C++ kernels are not built")

PREAMBLE = """
import threading, time
import torch
from torch.utils import _pytree as pytree
from polyhead import GAT, Dot, GATv2, Graph, Grid, attend
from polyhead.kernels.edges_native import native
from polyhead.neighbourhood.csr import CSR

IDS = ("indptr", "indices", "edge_id", "out_indptr", "out_slot", "out_indices")

def refused(name, call, kinds=ValueError, words=""):
    print(name, flush=True)
    try:
        call()
    except kinds as error:
        if words not in str(error):
            raise SystemExit(f"{name}: other words: {error}")
    else:
        raise SystemExit(f"{name} was not refused")

def graph(nodes=50, edges=9000, **options):
    torch.manual_seed(0)
    return Graph(torch.randint(0, nodes, (2, edges)), nodes, **options)

def learn(graph, score, **options):
    q, k, v = (torch.randn(2, graph.sources, 8, requires_grad=True) for _ in range(3))
    attend(q, k, v, over=graph, score=score, **options).sum().backward()
"""


def run(code, *options):
    """Run code in a subprocess, which must exit normally."""
    process = subprocess.run(
        [sys.executable, *options, "-c", PREAMBLE + textwrap.dedent(code)], capture_output=True, text=True, timeout=300
    )
    last = process.stdout.splitlines()[-1:]
    assert process.returncode == 0, f"it ended with {process.returncode} after {last}: {process.stderr[-2000:]}"


@pytest.mark.parametrize("score", ["GAT(2, 8)", "GATv2(2, 8)", "Dot()"])
def test_edited_ids_are_refused(score):
    """The edits go through memory shared with NumPy, which torch's version counters do not see."""
    run(f"""
        for name, array in zip(CSR._fields, graph().csr):
            for id in (-1, 2**31 - 1, -2**31, len(array) + 9000):
                for place in (0, len(array) // 2, len(array) - 1):
                    edited = graph(weights=torch.rand(9000))
                    getattr(edited.csr, name).numpy()[place] = id
                    words = f"csr.{{name}} must"
                    refused(f"{{name}} {{id}} at {{place}}", lambda: learn(edited, {score}, kernel="edges_native"), words=words)
        edited = graph()
        edited.csr.indptr.data[20:30] = edited.csr.indptr.data[20:30].flip(0)
        refused("decreasing indptr", lambda: learn(edited, {score}), words="csr.indptr must increase from 0 to 9000")
    """)


def test_ids_edited_between_forward_and_backward_are_refused():
    run("""
        for name in ("out_slot", "out_indices", "indices", "edge_id"):
            edited = graph(weights=torch.rand(9000))
            q = torch.randn(2, 50, 8, requires_grad=True)
            out = attend(q, q, q, over=edited, score=Dot())
            getattr(edited.csr, name).numpy()[4000] = 2**30
            refused(name, lambda: out.sum().backward(), words=f"csr.{name} must hold numbers in")
    """)


def test_ids_changed_by_a_pytree_map_are_refused():
    run("""
        shifted = pytree.tree_map(lambda x: x + 1, graph())
        refused("shifted", lambda: learn(shifted, GATv2(2, 8)), words="csr.indptr must")
        huge = pytree.tree_map(lambda x: torch.full_like(x, 2**30), graph())
        refused("huge", lambda: learn(huge, GATv2(2, 8)), words="csr.indptr must")
        swapped = graph()
        swapped.csr = CSR(*reversed(swapped.csr))
        refused("swapped", lambda: learn(swapped, GATv2(2, 8)), words="csr.indptr must be contiguous int32 of shape (51,)")
    """)


def test_edges_torch_refuses_edited_ids():
    run("""
        for name in ("indices", "edge_id", "out_slot", "out_indices"):
            edited = graph()
            getattr(edited.csr, name).numpy()[7] = 2**30
            refused(name, lambda: learn(edited, GATv2(2, 8), kernel="edges_torch"), (ValueError, RuntimeError, IndexError))
        # it does not read indptr
        edited = graph()
        edited.csr.indptr.numpy()[7] = 2**30
        learn(edited, GATv2(2, 8), kernel="edges_torch")
    """)


def test_edges_changed_while_they_are_sorted():
    """The ids that are sorted are those that were checked, even if another thread writes meanwhile."""
    run("""
        edge_index = torch.randint(0, 1000, (2, 1_000_000))
        other = torch.randint(0, 1000, (2, 1_000_000))
        done = threading.Event()
        def write():
            while not done.is_set():
                edge_index.copy_(other)
                edge_index[1].fill_(999)
                edge_index[0, ::7] = 2**40
        writer = threading.Thread(target=write)
        writer.start()
        end, made = time.monotonic() + 4, 0
        while time.monotonic() < end:
            try:
                csr = Graph(edge_index, 1000).csr
            except ValueError:
                continue
            made += 1
            assert csr.indices.min() >= 0 and csr.indices.max() < 1000
            assert csr.edge_id.bincount(minlength=1_000_000).eq(1).all()
            assert csr.indptr[0] == 0 and csr.indptr[-1] == 1_000_000 and csr.indptr.diff().min() >= 0
        done.set()
        writer.join()
    """)


def test_an_edited_grid_is_refused():
    run("""
        for name, value in (("dilation", (-1, -1)), ("dilation", (2**40, -3)), ("sizes", (0, 64)), ("sizes", (-8, -8))):
            grid = Grid(8, 8, window=3)
            setattr(grid, name, value)
            q = torch.randn(2, 64, 8)
            refused(f"{name} {value}", lambda: attend(q, q, q, over=grid, kernel="grid"))
    """)


# calls of the operators with arguments that do not fit, one per line
EDGES = """
    g = graph(edges=500)
    x, row, order = torch.randn(1, 50, 2, 8), torch.randn(1, 50, 2), dict(zip(IDS, g.csr))
    good = dict(q=x, k=x, v=None, a=torch.randn(2, 8), inside=None, features=None, edge=None, weights=None, **order,
                seed=None, query_index=None, key_index=None, kind=1, factor=0.2, dropout=0.0)
    def forward(**changed):
        return torch.ops.polyhead.edges_native(*{**good, **changed}.values())
    out, lse = forward()
    def backward(d_out=out, d_lse=lse, saved_out=out, saved_lse=lse, needed=(True,) * 8, **changed):
        given = {**good, **changed}.values()
        return torch.ops.polyhead.edges_native_backward(d_out, d_lse, saved_out, saved_lse, *given, list(needed))
    backward()
    double, many, half = x.double(), torch.randn(100, 50, 2, 8), x.bfloat16()
    wrong = [
        dict(k=many), dict(q=many), dict(k=x[:, :, :1]), dict(k=x[..., :4]), dict(k=row), dict(q=row), dict(k=double),
        dict(v=x[:, :40]), dict(v=torch.randn(1, 50, 1, 8)), dict(v=row), dict(v=double), dict(a=None), dict(a=torch.randn(1, 8)),
        dict(a=torch.randn(2, 4)), dict(inside=torch.randn(500, 2)), dict(features=torch.randn(500, 3)),
        dict(edge=torch.randn(2, 3, 8)), dict(features=torch.randn(400, 3), edge=torch.randn(2, 3, 8)),
        dict(features=torch.randn(500, 3), edge=torch.randn(2, 4, 8)), dict(features=torch.randn(500), edge=torch.randn(2, 8)),
        dict(weights=torch.rand(499)), dict(weights=torch.rand(500, 1)),
        *(dict([(name, torch.arange(nodes, dtype=dtype))]) for name in ("query_index", "key_index")
          for nodes, dtype in ((40, torch.int32), (50, torch.int64))),
        *(dict([(name, array.long())]) for name, array in order.items()),
        *(dict([(name, array[:-1])]) for name, array in order.items()),
        *(dict([(name, array.repeat_interleave(2)[::2])]) for name, array in order.items()),
        *(dict([(name, array[None])]) for name, array in order.items()),
        dict(zip(IDS, reversed(list(order.values())))), dict.fromkeys(IDS, torch.tensor(3, dtype=torch.int32)),
        dict(kind=0), dict(kind=2), dict(kind=3), dict(kind=-1), dict(dropout=1.0), dict(dropout=-0.5), dict(dropout=float("nan")),
        dict(q=half, k=half, a=good["a"].bfloat16()), dict(q=row, k=row, a=None, kind=0),
    ]
    for number, changed in enumerate(wrong):
        refused(f"edges {number} {list(changed)}", lambda: forward(**changed))
        refused(f"edges_backward {number} {list(changed)}", lambda: backward(**changed))
    for name in ("d_out", "d_lse", "saved_out", "saved_lse"):
        for like in (out[:, :20], lse[:, :20], out.double(), lse.double(), many):
            refused(f"edges_backward {name} {tuple(like.shape)}", lambda: backward(**{name: like}))
    refused("needed", lambda: backward(needed=(True,)))
    pairs = torch.zeros(2, 0, dtype=torch.long)
    sort = torch.ops.polyhead.sort_edges
    for given in ((pairs, -1, -1), (pairs, -5, 3), (pairs[:1], 3, 3), (pairs[0], 3, 3), (pairs[None], 3, 3), (pairs, 2**31, 3)):
        refused(f"sort_edges {tuple(given[0].shape)} {given[1:]}", lambda: sort(*given))
"""

SHORT = """
    x, first = torch.randn(2, 4, 10, 8), torch.zeros(1, 10, dtype=torch.int32)
    good = dict(q=x, k=x, v=x, first=first, stop=first + 10, table=None, bias=None, seed=None, scale=1.0, dropout=0.0)
    def forward(**changed):
        return torch.ops.polyhead.short(*{**good, **changed}.values())
    out, lse = forward()
    def backward(d_out=out, d_lse=lse, saved=out, saved_lse=lse, **changed):
        return torch.ops.polyhead.short_backward(d_out, d_lse, saved, saved_lse, *{**good, **changed}.values(), [True] * 5)
    backward()
    many = torch.randn(300, 4, 10, 8)
    wrong = [
        dict(q=many), dict(k=x[:1]), dict(v=x[:1]), dict(k=x[:, :, :3]), dict(v=x[:, :, :3]), dict(k=x[..., :4]), dict(k=x[:, :3], v=x[:, :3]),
        dict(k=x[:, :2]), dict(k=x[:, :0], v=x[:, :0]), dict(q=x[0]), dict(k=x.double()), dict(q=x.half(), k=x.half(), v=x.half()),
        dict(first=first.long()), dict(first=first[:, :5]), dict(first=first[0]), dict(stop=torch.zeros(7, 10, dtype=torch.int32)),
        dict(first=first.expand(3, 10), stop=first.expand(3, 10)), dict(dropout=1.0), dict(dropout=float("nan")),
        dict(table=torch.zeros(4, 18)), dict(table=torch.zeros(3, 19)), dict(table=torch.zeros(4, 1)), dict(table=torch.zeros(19)),
        dict(table=torch.zeros(1, 4, 19)), dict(table=torch.zeros(4, 19).double()),
        dict(bias=torch.zeros(3, 4, 10, 10)), dict(bias=torch.zeros(2, 2, 10, 10)), dict(bias=torch.zeros(2, 4, 9, 10)),
        dict(bias=torch.zeros(2, 4, 10, 9)), dict(bias=torch.zeros(4, 10, 10)), dict(bias=torch.zeros(1, 2, 4, 10, 10)), dict(bias=torch.zeros(())),
        dict(bias=torch.zeros(2, 4, 10, 10).double()), dict(bias=torch.zeros(2, 0, 10, 10)),
    ]
    for number, changed in enumerate(wrong):
        refused(f"short {number} {list(changed)}", lambda: forward(**changed))
        refused(f"short_backward {number} {list(changed)}", lambda: backward(**changed))
    for name in ("d_out", "d_lse", "saved_lse"):
        for like in (out[:1], lse[:1], out.double(), lse.double(), many):
            refused(f"short_backward {name} {tuple(like.shape)}", lambda: backward(**{name: like}))
    # intervals are clamped to the keys
    for ends in ((-2**31, 2**31 - 1), (5, 2**31 - 1), (2**31 - 1, -2**31), (9, 3), (40, 50)):
        forward(first=torch.full_like(first, ends[0]), stop=torch.full_like(first, ends[1]))
        backward(first=torch.full_like(first, ends[0]), stop=torch.full_like(first, ends[1]))
"""

GRID = """
    x = torch.randn(2, 4, 24, 8)
    good = dict(q=x, k=x, v=x, table=None, seed=None, sizes=[4, 6], reach=[1, 2], steps=[1, 2], scale=1.0, dropout=0.0)
    def forward(**changed):
        return torch.ops.polyhead.grid(*{**good, **changed}.values())
    out, lse = forward()
    def backward(d_out=out, d_lse=lse, saved=out, saved_lse=lse, **changed):
        return torch.ops.polyhead.grid_backward(d_out, d_lse, saved, saved_lse, *{**good, **changed}.values(), [True] * 4)
    backward()
    # the dilation does not matter where a window has a single point
    torch.testing.assert_close(forward(reach=[0, 1], steps=[2**62, 1])[0], forward(reach=[0, 1], steps=[1, 1])[0])
    many, wide = torch.randn(300, 4, 24, 8), torch.randn(1, 1, 2**22, 1)
    wrong = [
        dict(q=many), dict(k=x[:1]), dict(v=x[:1]), dict(k=x[:, :, :20]), dict(v=x[:, :, :20]), dict(k=x[..., :4]), dict(k=x[:, :2]),
        dict(q=x[0]), dict(k=x.double()), dict(q=x.half(), k=x.half(), v=x.half()), dict(sizes=[4, 7]), dict(sizes=[24]), dict(sizes=[-4, -6]),
        dict(sizes=[4, 6, 1]), dict(sizes=[], reach=[], steps=[]), dict(sizes=[24], reach=[1], steps=[1]), dict(reach=[4, 1]), dict(reach=[-1, 1]),
        dict(reach=[2**62, 1]), dict(steps=[0, 1]), dict(steps=[-1, -1]), dict(steps=[2**62, 1]), dict(steps=[4, 1]), dict(dropout=1.0),
        dict(table=torch.zeros(4, 14)), dict(table=torch.zeros(3, 15)), dict(table=torch.zeros(4, 15).double()), dict(table=torch.zeros(15)),
        dict(q=wide, k=wide, v=wide, sizes=[2] * 22, reach=[1] * 22, steps=[1] * 22),
    ]
    for number, changed in enumerate(wrong):
        refused(f"grid {number} {list(changed)}", lambda: forward(**changed))
        refused(f"grid_backward {number} {list(changed)}", lambda: backward(**changed))
    for name in ("d_out", "d_lse", "saved", "saved_lse"):
        for like in (out[:1], lse[:1], out.double(), lse.double(), many):
            refused(f"grid_backward {name} {tuple(like.shape)}", lambda: backward(**{name: like}))
"""

TILED = """
    x, first = torch.randn(2, 4, 300, 8), torch.zeros(1, 300, dtype=torch.long)
    good = dict(q=x, k=x, v=x, first=first, stop=first + 300, mask=None, table=None, bias=None, seed=None, query_index=None, key_index=None, scale=1.0, dropout=0.0, plain=False, tiles=[])
    def forward(**changed):
        return torch.ops.polyhead.tiled(*{**good, **changed}.values())
    out, lse = forward()
    def backward(d_out=out, d_lse=None, saved=out, saved_lse=lse, **changed):
        return torch.ops.polyhead.tiled_backward(d_out, d_lse, saved, saved_lse, *{**good, **changed}.values(), [True] * 5)
    backward()
    wrong = [
        dict(k=x[:1]), dict(v=x[:1]), dict(k=x[:, :, :20]), dict(v=x[:, :, :20]), dict(k=x[..., :4]), dict(v=x[:, :2]), dict(v=x[..., :4]),
        dict(k=x[:, :3], v=x[:, :3]), dict(q=x[0]), dict(first=first[0]), dict(first=first[:, :50]), dict(stop=first.expand(3, 300)),
        dict(stop=first.float()), dict(mask=torch.ones(2, 4, 300, 20).bool()), dict(mask=torch.ones(300, 300).bool()),
        dict(bias=torch.zeros(3, 4, 300, 300)), dict(query_index=torch.arange(299)), dict(key_index=torch.arange(300.0)),
    ]
    for plain in (False, True):
        for number, changed in enumerate(wrong):
            if plain and changed.keys() == {"v"} and changed["v"].shape[:3:2] == x.shape[:3:2]:
                continue
            refused(f"tiled {number} {list(changed)} {plain}", lambda: forward(**changed, plain=plain))
            refused(f"tiled_backward {number} {list(changed)} {plain}", lambda: backward(**changed, plain=plain))
    for name in ("d_out", "d_lse", "saved", "saved_lse"):
        for like in (out[:1], lse[:1], out[:, :, :10], lse[..., :10]):
            refused(f"tiled_backward {name} {tuple(like.shape)}", lambda: backward(**{name: like}))
"""


@pytest.mark.parametrize("calls", [EDGES, SHORT, GRID, TILED], ids=["edges_native", "short", "grid", "tiled"])
@pytest.mark.parametrize("option", ["-I", "-O"])
def test_operators_refuse_arguments_that_do_not_fit(calls, option):
    """With and without Python's assertions."""
    run(calls, option)


def test_sparse_matrices_with_indices_out_of_range_are_refused():
    """torch constructs them with a warning, and then reads out of bounds."""
    run("""
        import warnings
        from polyhead.interop.pyg import GATConv
        warnings.simplefilter("ignore")
        here, ones = torch.tensor([0, 1, 1, 0]), torch.ones(4)
        for starts in ([0, 2**30, 4], [0, -5, 4], [0, 2, 2**40], [3, 2, 4]):
            for layout in (torch.sparse_csr, torch.sparse_csc):
                made = torch.sparse_compressed_tensor(torch.tensor(starts), here, ones, (2, 2), layout=layout)
                for name, use in (("graph", Graph), ("pyg", lambda matrix: GATConv(4, 2)(torch.randn(2, 4), matrix))):
                    refused(f"{name} {starts} {layout}", lambda: use(made), words="must be a sparse matrix with indices in bounds")
        made = torch.sparse_coo_tensor(torch.tensor([[0, 9, -1], [2**40, 0, 0]]), torch.ones(3), (2, 2), check_invariants=False)
        refused("coo", lambda: Graph(made), words="must be a sparse matrix with indices in bounds")
    """)


def test_sparse_features_with_indices_out_of_range_are_refused():
    run("""
        import warnings
        from polyhead import MultiHeadAttention
        from polyhead.interop.pyg import GATConv
        warnings.simplefilter("ignore")
        ones, far = torch.ones(2), 99_999_999
        made = {
            "column": torch.sparse_csr_tensor(torch.tensor([0, 1, 2]), torch.tensor([1, far]), ones, (2, 16), check_invariants=False),
            "starts": torch.sparse_csr_tensor(torch.tensor([0, far, 2]), torch.tensor([1, 2]), ones, (2, 16), check_invariants=False),
            "far": torch.sparse_coo_tensor(torch.tensor([[0, 1], [1, far]]), ones, (2, 16), check_invariants=False),
            "near": torch.sparse_coo_tensor(torch.tensor([[0, 1], [1, 40]]), ones, (2, 16), check_invariants=False),
            "row": torch.sparse_coo_tensor(torch.tensor([[0, 7], [1, 3]]), ones, (2, 16), check_invariants=False),
        }
        edges = torch.tensor([[0, 1], [1, 0]])
        for name, x in made.items():
            refused(f"layer {name}", lambda: MultiHeadAttention(16, 4)(x), words="must be a sparse matrix with indices in bounds")
            refused(f"pyg {name}", lambda: GATConv(16, 4)(x, edges), words="must be a sparse matrix with indices in bounds")
    """)


def test_tensors_without_memory_are_not_read():
    """The check for finite numbers would read from a null pointer."""
    run("""
        from polyhead import Causal
        class Wrapped(torch.Tensor):
            @staticmethod
            def __new__(cls, x):
                made = torch.Tensor._make_wrapper_subclass(cls, x.shape, dtype=x.dtype, device=x.device, strides=x.stride())
                made.x = x
                return made
            __torch_function__ = torch._C._disabled_torch_function_impl
            @classmethod
            def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
                bare = lambda y: y.x if isinstance(y, Wrapped) else y
                return function(*pytree.tree_map(bare, args), **pytree.tree_map(bare, kwargs or {}))
        q, k, v = torch.randn(3, 1, 2, 8, 4)
        for over in (None, Causal()):
            expected = attend(q, k, v, over=over)
            for given in ((q, Wrapped(k), v), (q, k, Wrapped(v)), (Wrapped(q), k, v)):
                torch.testing.assert_close(attend(*given, over=over), expected)
    """)
