"""Unions and complements of neighbourhoods: in pictures, and where they are refused."""

import copy

import pytest
import torch

from polyhead import (
    Causal,
    Dense,
    Graph,
    Grid,
    Mask,
    MultiHeadAttention,
    Neighbourhood,
    Offsets,
    Padding,
    RelativeBias,
    Rotary,
    Segments,
    Window,
    attend,
    explain,
)
from polyhead.neighbourhood import Complement, Either, Sizes

CPU = torch.device("cpu")


def picture(over, queries, keys, batch=(), heads=1):
    sizes = Sizes(batch, heads, queries, keys)
    over.check(sizes)
    mask = over.mask(sizes, CPU).expand(*batch, heads, queries, keys)
    return ["".join(".x"[int(x)] for x in row) for row in mask.reshape(-1, keys)]


def interval(over, queries, keys):
    return [end.tolist() for end in over.interval(queries, keys, CPU)]


def test_a_union_allows_what_some_part_allows():
    assert picture(Causal() | Padding([3], queries=False), 4, 4, (1,)) == ["xxx.", "xxx.", "xxx.", "xxxx"]
    assert picture(Window(0) | Segments(torch.tensor([0, 1, 0, 1])), 4, 4) == ["x.x.", ".x.x", "x.x.", ".x.x"]
    assert picture(Window(0) | torch.eye(3).flip(0).bool(), 3, 3) == ["x.x", ".x.", "x.x"]
    assert picture(torch.eye(3).flip(0).bool() | Window(0), 3, 3) == ["x.x", ".x.", "x.x"]


def test_a_complement_allows_the_other_pairs():
    assert picture(~Causal(), 3, 4) == ["..xx", "...x", "...."]
    assert picture(~Window(1), 4, 4) == ["..xx", "...x", "x...", "xx.."]
    assert picture(~Dense(), 2, 3) == ["...", "..."]


def test_operators_have_the_precedence_of_python_and_nest():
    over = ~Window(0) & Causal() | Window(0, 1)
    assert repr(over) == "(~Window(left=0, right=0) & Causal()) | Window(left=0, right=1)"
    assert picture(over, 3, 3) == ["xx.", "xxx", "xxx"]
    assert repr(~(Causal() | Window(2)) & Dense()) == "~(Causal() | Window(left=2, right=2))"
    assert len((Causal() | Window(2) | Padding([3])).parts) == 3
    assert len((Causal() & Window(2) & (Padding([3]) | Causal())).parts) == 3


def test_trivial_operands_are_dropped():
    causal, nothing = Causal(), ~Dense()
    assert ~~causal is causal and isinstance(~nothing, Dense)
    assert isinstance(Dense() | causal, Dense) and isinstance(causal | Dense(), Dense)
    assert causal | nothing is causal and nothing | causal is causal
    assert repr(nothing | nothing) == "~Dense()"
    # a grid is kept for its coordinates
    assert (Dense() | Grid(2, 3)).lattice == Grid(2, 3).lattice


@pytest.mark.parametrize("operate", [lambda over: over | 3, lambda over: "causal" | over, lambda over: over & None])
@pytest.mark.parametrize("over", [Causal(), Causal() | Window(1), ~Window(1), Graph(torch.tensor([[0], [1]]))])
def test_other_operands_are_refused(over, operate):
    with pytest.raises(TypeError, match="unsupported operand"):
        operate(over)


def test_a_mask_on_the_left():
    lower = torch.ones(3, 3).tril().bool()
    assert picture(lower & Window(0, 3), 3, 3) == ["x..", ".x.", "..x"]
    graph = Graph(torch.tensor([[0, 1], [1, 0]]))
    assert (torch.ones(2, 2).tril().bool() & graph).edge_ids.tolist() == [0]


EXACT = {
    "prefix": (Causal() | Padding([3]), [[[0, 0, 0, 0]], [[3, 3, 3, 4]]]),
    "prefix and lengths": ((Causal() | Padding([2])) & Padding([3]), [[[0, 0, 0, 0]], [[2, 2, 3, 3]]]),
    "windows": (Window(2, 0) | Window(0, 1), [[0, 0, 0, 1], [2, 3, 4, 4]]),
    "window and documents": (Window(1, 0) | Segments(torch.tensor([0, 0, 1, 1])), [[0, 0, 1, 2], [2, 2, 4, 4]]),
    "later keys": (~Causal(), [[1, 2, 3, 4], [4, 4, 4, 4]]),
    "padded keys": (~Padding([3], queries=False), [[[3, 3, 3, 3]], [[4, 4, 4, 4]]]),
    "no key": (~Dense(), [[0, 0, 0, 0], [0, 0, 0, 0]]),
    "no key of a union": (~(Grid(4) | Causal()), [[0, 0, 0, 0], [0, 0, 0, 0]]),
    "earlier and later keys": (~Causal() | ~Causal(), [[1, 2, 3, 4], [4, 4, 4, 4]]),
}


@pytest.mark.parametrize("name", EXACT)
def test_intervals_are_exact_where_no_gap_is_possible(name):
    over, ends = EXACT[name]
    assert over.exact and interval(over, 4, 4) == ends
    q = torch.randn(1, 2, 4, 8)
    assert explain(q, q, q, over=over).kernel == ("fused" if over.full else "short")


HULLS = {
    "a gap": (Window(0) | Padding([1], queries=False), [[[0, 0, 0, 0]], [[1, 2, 3, 4]]]),
    "an empty part": (Segments(torch.tensor([5, 6, 7, 7]), torch.tensor([9, 6, 7, 9])) | ~Dense() | (~Causal() & Window(1)), [[1, 1, 2, 4], [2, 3, 4, 4]]),
    "around a window": (~Window(1), [[2, 3, 0, 0], [4, 4, 1, 2]]),
    "a mask": (~Mask(torch.ones(4, 4).bool()), [[0, 0, 0, 0], [4, 4, 4, 4]]),
}  # fmt: skip


@pytest.mark.parametrize("name", HULLS)
def test_other_intervals_are_hulls(name):
    over, ends = HULLS[name]
    assert not over.exact and interval(over, 4, 4) == ends
    q = torch.randn(1, 2, 4, 8)
    assert explain(q, q, q, over=over).kernel == "tiled"


@pytest.mark.parametrize("over", [~Dense(), ~Grid(2, 3), ~(Causal() | Dense()), Causal() & ~Causal()], ids=repr)
def test_queries_without_any_key_get_zero_on_every_kernel(over):
    q, k, v = (torch.randn(2, 2, 6, 8, requires_grad=True) for _ in range(3))
    for kernel in ("short", "tiled", "reference") if over.exact else ("tiled", "reference"):
        out = attend(q, k, v, over=over, kernel=kernel)
        gradients = torch.autograd.grad(out, (q, k, v), torch.randn_like(out))
        assert all(bool((x == 0).all()) for x in (out, *gradients))


def test_padding_means_the_same_inside_as_alone():
    """In self-attention padded queries are padding in a union and in a complement too."""
    padding = Padding([2, 4])
    sizes = Sizes((2,), 1, 4, 4)
    alone = padding.bind_self_attention(True).mask(sizes, CPU)
    assert torch.equal((~padding).bind_self_attention(True).mask(sizes, CPU), ~alone)
    union = (padding | Window(0)).bind_self_attention(True)
    assert torch.equal(union.mask(sizes, CPU), alone | Window(0).mask(sizes, CPU))
    # nothing to bind: the same object
    assert union.bind_self_attention(True) is union


def test_a_query_is_padding_where_every_part_of_a_union_says_so():
    first, second = Padding([2, 4], queries=True), Padding([3, 1], queries=True)
    real = (first | second).unpadded_queries((2, 4))
    assert real.tolist() == [[True, True, True, False], [True] * 4]
    assert (first | Causal()).unpadded_queries((2, 4)) is None
    assert (~first).unpadded_queries((2, 4)) is None
    assert ((first | Causal()) & second).unpadded_queries((2, 4)).tolist() == [
        [True] * 3 + [False],
        [True] + [False] * 3,
    ]


def test_a_layer_leaves_padded_rows_of_a_union_out():
    """Rows that every part calls padding are not projected, and the results are the same."""
    torch.manual_seed(0)
    layer = MultiHeadAttention(256, num_heads=4)
    x = torch.randn(2, 300, 256)
    lengths, prefix = torch.tensor([300, 20]), torch.tensor([5, 7])
    over = Padding(lengths) & Causal() | Padding(prefix)
    mask = over.bind_self_attention(True).mask(Sizes((2,), 4, 300, 300), CPU)
    (output, heads), (expected, _) = layer(x, over=over), layer(x, over=Mask(mask))
    torch.testing.assert_close(output, expected)
    assert torch.equal(output[1, 20:], layer.o_proj.bias.expand(280, 256))
    assert heads.outputs[1, :, 20:].abs().max() == 0


def test_edges_are_filtered_by_unions_and_complements():
    pairs = torch.randint(0, 9, (2, 60))
    graph = Graph(pairs, 9)
    for other in (
        Causal() | Window(0, 2),
        ~Causal(),
        ~Padding([5]) | Window(0),
        ~((torch.rand(9, 9) > 0.5) | Window(1)),
    ):
        allowed = other.bind_self_attention(True).mask(Sizes((), 1, 9, 9), CPU).reshape(9, 9)
        kept = [e for e in range(60) if allowed[pairs[1, e], pairs[0, e]]]
        assert (graph & other).edge_ids.tolist() == (other & graph).edge_ids.tolist() == kept


@pytest.mark.parametrize("operate", [lambda graph: graph | Causal(), lambda graph: Causal() | graph, lambda graph: graph | graph, lambda graph: torch.ones(2, 2).bool() | graph])  # fmt: skip
def test_a_union_with_a_graph_is_refused(operate):
    with pytest.raises(
        ValueError,
        match=r"\|: a graph is a list of edges and cannot be a part of a union, got Graph\(2 nodes, 2 edges\); append edges",
    ):
        operate(Graph(torch.tensor([[0, 1], [1, 0]])))


def test_the_complement_of_a_graph_is_refused():
    with pytest.raises(ValueError, match=r"~: a graph is a list of edges and has no complement, got Graph\(2 nodes"):
        ~Graph(torch.tensor([[0, 1], [1, 0]]))


def test_errors_of_parts_are_raised():
    q = torch.randn(2, 3, 5, 4)
    for over in (Causal() | Padding([7, 2]), ~Padding([7, 2]), Causal() & (Window(1) | ~Padding([7, 2]))):
        with pytest.raises(ValueError, match="Padding: lengths must be at most the number of keys, 5, got 7"):
            attend(q, q, q, over=over)


def test_parts_are_on_one_grid():
    with pytest.raises(ValueError, match=r"\|: all parts must be on one grid, got Grid\(2, 3\) and Grid\(3, 2\)"):
        Grid(2, 3) | Grid(3, 2)
    with pytest.raises(ValueError, match=r"\|: ~Causal\(\) counts queries along the keys, but the queries of Grid"):
        Grid(4, stride=2) | ~Causal()
    with pytest.raises(ValueError, match=r"&: all parts must be on one grid"):
        (Grid(2, 3) | Causal()) & ~Grid(3, 2)


@pytest.mark.parametrize(
    "position", [Rotary(axes=2), RelativeBias(4, window=(3, 3)), RelativeBias(4, window=(7, 9))], ids=repr
)
@pytest.mark.parametrize(
    "over",
    [
        Grid(4, 5, window=3) | Window(0),
        Grid(4, 5, window=3) | Grid(4, 5, window=(1, None)),
        Grid(4, 5, window=3) & (Causal() | ~Grid(4, 5, window=1)),
        ~Grid(4, 5, window=3),
        Grid(4, 5) | Causal(),
        Offsets([[0, 1], [1, 0], [0, 0], [2, 2]], (4, 5)) | Causal(),
    ],
    ids=repr,
)  # fmt: skip
def test_positions_of_a_grid_reach_unions_and_complements(over, position):
    """Offsets on a grid are those of the pairs themselves, also beyond the window of one part."""
    layer = MultiHeadAttention(16, num_heads=4, position=position)
    if isinstance(position, RelativeBias):
        torch.nn.init.normal_(position.weight)
    x = torch.randn(2, 20, 16, requires_grad=True)
    output, _ = layer(x, over=over)
    # the whole grid has no window from which a table could be read wrongly
    mask = over.mask(Sizes((2,), 4, 20, 20), CPU)
    call = layer.prepare(x, over=Grid(4, 5))
    expected = layer.o_proj(attend(call.q, call.k, call.v, over=Mask(mask), bias=call.bias).transpose(1, 2).flatten(2))
    torch.testing.assert_close(output, expected)


def test_a_view_notices_changes_of_a_part():
    keep = torch.rand(2, 1, 5, 5) > 0.5
    for over in (Mask(keep) | Causal(), ~Mask(keep), Window(1) & ~(Causal() | Mask(keep))):
        assert [x is keep for x in over.leaves()] == [True]
        _, heads = MultiHeadAttention(16, num_heads=2)(torch.randn(2, 5, 16), over=over)
        keep[0, 0, 0, 0] ^= True
        with pytest.raises(ValueError, match="this view is stale: over changed in place"):
            _ = heads.weights


class Every(Neighbourhood):
    """Every n-th key, by a class of another package."""

    def __init__(self, step):
        self.step = step

    def allows(self, head, query, key):
        return (key - query) % self.step == 0


def test_classes_of_others_are_parts():
    q, k, v = torch.randn(3, 2, 2, 9, 4).unbind()
    for over in (Causal() & ~Every(2), Every(3) | Window(1), ~(Every(2) | Every(3))):
        torch.testing.assert_close(attend(q, k, v, over=over), attend(q, k, v, over=over, kernel="reference"))
    assert picture(Every(2) | Every(3), 1, 7) == ["x.xxx.x"]


def attend_over_combinations(x, lengths, given):
    # torch's compiler has no `~` for objects
    rest = Complement(Causal() | Padding(lengths, queries=False))
    over = rest & given | Mask(x[:, None, :, :1] > x[:, None, None, :, 0])
    return attend(x[:, None], x[:, None], x[:, None], over=over), attend(x[:, None], x[:, None], x[:, None], over=rest)


def test_unions_and_complements_compile():
    x, arguments = torch.randn(2, 9, 4), (torch.tensor([3, 5]), ~Window(0) | Window(1, 0))
    compiled = torch.compile(attend_over_combinations, fullgraph=True, backend="aot_eager")(x, *arguments)
    for out, expected in zip(compiled, attend_over_combinations(x, *arguments), strict=True):
        torch.testing.assert_close(out, expected)


def test_unions_and_complements_under_vmap_and_in_copies():
    x, keep = torch.randn(3, 5, 4), torch.rand(3, 5, 5) > 0.3
    one = lambda x, over: attend(x[None], x[None], x[None], over=over, kernel="reference")
    overs = ~(Mask(keep[:, None]) | Window(0))
    together = torch.func.vmap(lambda x, keep: one(x, ~(Mask(keep) | Window(0))))(x, keep)
    expected = torch.stack([one(a, ~(Mask(b) | Window(0))) for a, b in zip(x, keep, strict=True)])
    torch.testing.assert_close(together, expected)
    again = copy.deepcopy(overs)
    assert isinstance(again, Complement) and isinstance(again.over, Either) and repr(again) == repr(overs)
