"""mask_mods of flex_attention as neighbourhoods: equal to torch's own mask, on every path that asks a neighbourhood."""

import copy
import functools
import pickle

import pytest
import torch
from torch import nn
from torch.nn.attention.flex_attention import and_masks, create_block_mask, create_mask, noop_mask, or_masks

from polyhead import (
    Causal,
    Graph,
    Mask,
    MultiHeadAttention,
    Padding,
    Segments,
    Window,
    attend,
    attention_weights,
    explain,
    from_mask_mod,
    self_dominance,
)
from polyhead.distributed.agreement import fingerprint
from polyhead.neighbourhood import Sizes
from polyhead.neighbourhood.captured_values import captured_values

CPU = torch.device("cpu")
DOCUMENTS = torch.tensor([[0, 0, 1, 1, 1, 2, 2], [0, 1, 1, 1, 1, 1, 2], [3, 3, 3, 3, 2, 1, 0]])
LENGTHS = torch.tensor([7, 3, 5])


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def window(size):
    def sliding_window(b, h, q_idx, kv_idx):
        return (q_idx - kv_idx <= size) & (q_idx >= kv_idx)

    return sliding_window


def document(b, h, q_idx, kv_idx):
    return DOCUMENTS[0][q_idx] == DOCUMENTS[0][kv_idx]


def document_by_row(b, h, q_idx, kv_idx):
    return DOCUMENTS[b, q_idx] == DOCUMENTS[b, kv_idx]


def padding(b, h, q_idx, kv_idx):
    return kv_idx < LENGTHS[b]


def by_head(b, h, q_idx, kv_idx):
    return (q_idx - kv_idx) % (h + 1) == 0


def prefix(length, b, h, q_idx, kv_idx):
    return (kv_idx < length) | (kv_idx <= q_idx)


class Documents:
    """A mask_mod that is an object."""

    def __init__(self, ids):
        self.ids = ids

    def __call__(self, b, h, q, k):
        return self.ids[q] == self.ids[k]

    def mask_mod(self, b, h, q, k):
        return self.ids[k] > 0


class LearnedDocuments(nn.Module):
    """A mask_mod that is a module with a buffer."""

    def __init__(self, ids):
        super().__init__()
        self.register_buffer("ids", ids)

    def forward(self, b, h, q, k):
        return self.ids[q] == self.ids[k]


# each with the axes that it reads: batch, heads
MODS = {
    "causal": (causal, (False, False)),
    "window": (window(2), (False, False)),
    "document": (document, (False, False)),
    "document by row": (document_by_row, (True, False)),
    "a number beside an index": (lambda b, h, q, k: DOCUMENTS[-1, q] == DOCUMENTS[0, k], (False, False)),
    "padding": (padding, (True, False)),
    "by head": (by_head, (False, True)),
    "batch and head": (lambda b, h, q, k: (q + b) % 3 >= (k * h) % 2, (True, True)),
    "prefix": (functools.partial(prefix, torch.tensor(3)), (False, False)),
    "all": (noop_mask, (False, False)),
    "torch's and": (and_masks(causal, document), (False, False)),
    "torch's or": (or_masks(window(1), and_masks(document, padding)), (True, False)),
    "object": (Documents(DOCUMENTS[2]), (False, False)),
    "method": (Documents(DOCUMENTS[0]).mask_mod, (False, False)),
    "module": (LearnedDocuments(DOCUMENTS[1]), (False, False)),
    "an index read as a number": (lambda b, h, q, k: (LENGTHS[b.to(torch.int32)] > k) & (q >= 0), (True, False)),
    "where": (lambda b, h, q, k: torch.where(h == 0, q >= k, q <= k), (False, True)),
    "of a block mask": (create_block_mask(causal, None, None, 7, 7, device="cpu").mask_mod, (False, False)),
}


@pytest.mark.parametrize("name", MODS)
def test_equals_the_mask_that_torch_creates(name):
    mod, read = MODS[name]
    over = from_mask_mod(mod)
    assert (over.by_batch, over.by_head) == read
    # torch counts the arguments of methods and modules wrongly
    expected = create_mask(lambda b, h, q, k: mod(b, h, q, k), 3, 2, 7, 7, device="cpu")
    assert torch.equal(over.mask(Sizes((3,), 2, 7, 7), CPU).expand(3, 2, 7, 7), expected)
    pairs = torch.cartesian_prod(torch.arange(7), torch.arange(7))
    listed = over.bind_sizes(Sizes((3,), 2, 7, 7)).allows_pairs(*pairs.T, heads=2)
    assert torch.equal(listed.expand(3, 2, 49), expected.flatten(-2))
    q, k, v = torch.randn(3, 3, 2, 7, 8)
    for kernel in ("tiled", "reference"):
        torch.testing.assert_close(attend(q, k, v, over=over, kernel=kernel), attend(q, k, v, over=Mask(expected)))


class Optional:
    """A mask_mod that reads the batch entry, the head or neither, as its attributes say."""

    ids, by_head = None, False

    def __call__(self, b, h, q, k):
        allowed = (q - k) % (h + 1) == 0 if self.by_head else q >= k
        return allowed if self.ids is None else allowed & (self.ids[b, q] == self.ids[b, k])


def test_indices_that_a_mask_mod_begins_to_read_are_noticed():
    """What it reads depends on captured values, which may change after the neighbourhood was made."""
    mod = Optional()
    overs = from_mask_mod(mod), Window(6) & ~from_mask_mod(mod), from_mask_mod(mod).bind_sizes(Sizes((3,), 2, 7, 7))
    q = torch.randn(3, 2, 7, 8)
    for mod.ids, mod.by_head in ((None, False), (DOCUMENTS, False), (None, True), (DOCUMENTS, True), (None, False)):
        keep = create_mask(lambda b, h, q, k: mod(b, h, q, k), 3, 2, 7, 7, device="cpu")
        for over, allowed in zip(overs, (keep, ~keep, keep), strict=True):
            assert torch.equal(over.mask(Sizes((3,), 2, 7, 7), CPU).expand(3, 2, 7, 7), allowed)
            torch.testing.assert_close(attend(q, q, q, over=over), attend(q, q, q, over=Mask(allowed)))


@pytest.mark.parametrize(
    "mod",
    [
        lambda b, h, q, k: q >= k and q >= 0,
        lambda b, h, q, k: q >= k if q < 3 else q > k,
        lambda b, h, q, k: torch.tensor(q.item() >= k.item()),
        lambda b, h, q, k: torch.rand(()) > 0.5,
    ],
)
def test_a_mask_mod_that_needs_the_values_of_a_pair_is_refused(mod):
    q = torch.randn(1, 1, 5, 4)
    with pytest.raises(
        ValueError, match=r"mod must compute with its indices as tensors .* got <lambda>.*; write a & b"
    ):
        attend(q, q, q, over=from_mask_mod(mod))


def test_queries_count_from_zero():
    """As in flex_attention; ours count along the keys, so that the last query is at the last key."""
    q, k = torch.zeros(1, 1, 2, 4), torch.zeros(1, 1, 5, 4)
    assert (attention_weights(q, k, over=from_mask_mod(causal)) > 0)[0, 0].int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
    ]
    assert (attention_weights(q, k, over=Causal()) > 0)[0, 0].int().tolist() == [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    both = from_mask_mod(lambda b, h, q_idx, kv_idx: causal(b, h, q_idx + 3, kv_idx))
    assert torch.equal(attention_weights(q, k, over=both), attention_weights(q, k, over=Causal()))


def test_several_batch_axes_count_as_one():
    expected = create_mask(lambda b, h, q, k: (q + k + b) % 3 == 0, 6, 1, 4, 5, device="cpu")
    over = from_mask_mod(lambda b, h, q, k: (q + k + b) % 3 == 0)
    assert torch.equal(over.mask(Sizes((2, 3), 1, 4, 5), CPU), expected.unflatten(0, (2, 3)))


@pytest.mark.parametrize("mod", [causal, by_head, padding])
def test_no_batch_axis(mod):
    q = torch.randn(2, 7, 4)
    for kernel in ("tiled", "reference"):
        out = attend(q, q, q, over=from_mask_mod(mod), kernel=kernel)
        torch.testing.assert_close(out, attend(q, q, q, over=Mask(create_mask(mod, 1, 2, 7, 7, device="cpu")[0])))


@pytest.mark.parametrize("size", [(0, 2, 5, 5), (2, 2, 0, 5), (2, 2, 5, 0)])
def test_empty_axes(size):
    batch, heads, queries, keys = size
    q, k = torch.randn(batch, heads, queries, 4), torch.randn(batch, heads, keys, 4)
    over = from_mask_mod(lambda b, h, q, k: (q >= k) & (b + h >= 0))
    assert torch.equal(attend(q, k, k, over=over), torch.zeros(batch, heads, queries, 4))


def test_combines_with_other_neighbourhoods():
    over = (Causal() & from_mask_mod(document_by_row)) | ~from_mask_mod(by_head) & Window(2)
    mask = lambda over: over.mask(Sizes((3,), 2, 7, 7), CPU)
    expected = (mask(Causal()) & mask(Segments(DOCUMENTS))) | ~mask(from_mask_mod(by_head)) & mask(Window(2))
    assert torch.equal(mask(over), expected)
    first, stop = (Window(1) & from_mask_mod(document)).interval(7, 7, CPU)
    assert (first.tolist(), stop.tolist()) == ([0, 0, 1, 2, 3, 4, 5], [2, 3, 4, 5, 6, 7, 7])
    q = torch.randn(3, 2, 7, 4)
    assert explain(q, q, q, over=over).kernel == "tiled"
    assert (
        repr(over)
        == "(Causal() & from_mask_mod(document_by_row)) | (~from_mask_mod(by_head) & Window(left=2, right=2))"
    )


def test_a_layer_its_view_and_its_metrics():
    torch.manual_seed(0)
    layer = MultiHeadAttention(16, num_heads=2)
    x = torch.randn(3, 7, 16)
    mod = lambda b, h, q, k: (DOCUMENTS[b, q] == DOCUMENTS[b, k]) & ((h > 0) | (q >= k))
    mask = Mask(create_mask(mod, 3, 2, 7, 7, device="cpu"))
    (out, heads), (expected, others) = layer(x, over=from_mask_mod(mod)), layer(x, over=mask)
    torch.testing.assert_close(out, expected)
    for metric in (lambda heads: heads.entropy(), lambda heads: heads.mass(-1), lambda heads: heads.received()):
        torch.testing.assert_close(metric(heads), metric(others))
    for part in (lambda heads: heads[1:], lambda heads: heads[1:][1], lambda heads: heads[..., 3:, :]):
        torch.testing.assert_close(part(heads), part(others))
    torch.testing.assert_close(attend(*torch.ones(3, 3, 2, 7, 4), over=heads.over), torch.ones(3, 2, 7, 4))
    for a, b in zip(
        self_dominance(x, layer, over=from_mask_mod(mod)), self_dominance(x, layer, over=mask), strict=True
    ):
        torch.testing.assert_close(a, b)
    ours, theirs = (self_dominance(x, over=over) for over in (from_mask_mod(causal), Causal()))
    assert torch.equal(ours.margin, theirs.margin)


def test_a_view_notices_changes_of_captured_tensors():
    ids = torch.tensor([0, 0, 1, 1, 1, 2, 2])
    for mod in (
        lambda b, h, q, k: ids[q] == ids[k],
        and_masks(causal, lambda b, h, q, k: ids[q] == ids[k]),
        Documents(ids),
    ):
        _, heads = MultiHeadAttention(16, num_heads=2)(torch.randn(2, 7, 16), over=from_mask_mod(mod) | Window(0))
        assert heads.weights[0, 0, 0, 3] == (0 if ids[3] else heads.weights[0, 0, 0, 3])
        ids[3] += 1
        with pytest.raises(ValueError, match="this view is stale: over changed in place"):
            _ = heads.weights


def test_edges_are_filtered():
    pairs = torch.randint(0, 7, (2, 40))
    graph = Graph(pairs, 7) & (from_mask_mod(document) & Causal())
    assert graph.edge_ids.tolist() == (Graph(pairs, 7) & (Segments(DOCUMENTS[0]) & Causal())).edge_ids.tolist()
    with pytest.raises(ValueError, match="differs by head"):
        graph & from_mask_mod(by_head)


def test_gradients_equal_those_of_the_mask():
    q, k, v = torch.randn(3, 3, 2, 7, 8, dtype=torch.float64).requires_grad_().unbind()
    towards = torch.randn(3, 2, 7, 8, dtype=torch.float64)
    over, mask = from_mask_mod(document_by_row), Mask(create_mask(document_by_row, 3, 1, 7, 7, device="cpu"))
    got, expected = (torch.autograd.grad((attend(q, k, v, over=x) * towards).sum(), (q, k, v)) for x in (over, mask))
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_copies_and_pickles():
    sizes = Sizes((3,), 2, 7, 7)
    for over in (from_mask_mod(document_by_row), ~from_mask_mod(by_head).bind_sizes(sizes)):
        for again in (copy.copy(over), copy.deepcopy(over), pickle.loads(pickle.dumps(over))):
            assert repr(again) == repr(over)
            assert torch.equal(again.mask(sizes, CPU), over.mask(sizes, CPU))
    selected = from_mask_mod(document_by_row).bind_sizes(sizes).select_batch_rows((3,), (slice(1, 3),))
    again = pickle.loads(pickle.dumps(selected))
    assert torch.equal(again.mask(sizes._replace(batch=(2,)), CPU), Segments(DOCUMENTS[1:]).mask(sizes, CPU))
    assert torch.equal(
        create_mask(again.mask_mod(sizes, CPU), 2, 1, 7, 7, device="cpu"), Segments(DOCUMENTS[1:]).mask(sizes, CPU)
    )
    twice = selected.select_batch_rows((2,), (slice(1, 2),))
    assert torch.equal(twice.mask(sizes._replace(batch=(1,)), CPU), Segments(DOCUMENTS[2:]).mask(sizes, CPU))


def test_the_mod_is_handed_through_to_flex_attention():
    over = from_mask_mod(document_by_row)
    assert over.mod is document_by_row and over.mask_mod(Sizes((3,), 2, 7, 7), CPU) is document_by_row


def step(x, over):
    return attend(x, x, x, over=over), attend(x, x, x, over=from_mask_mod(document_by_row) | Window(0))


def test_compiles():
    x = torch.randn(3, 2, 7, 4)
    over = from_mask_mod(by_head) & Causal()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for out, expected in zip(compiled(x, over), step(x, over), strict=True):
        torch.testing.assert_close(out, expected)


class Model(nn.Module):
    def __init__(self, over):
        super().__init__()
        self.attention, self.over = MultiHeadAttention(16, num_heads=2), over

    def forward(self, x):
        return self.attention(x, over=self.over)[0]


def test_export_is_refused():
    with pytest.raises(ValueError, match=r"over must not be made by from_mask_mod in torch.export, .*; pass its mask"):
        torch.export.export(Model(from_mask_mod(causal)), (torch.randn(2, 7, 16),), strict=False)


def test_under_vmap():
    x, ids = torch.randn(3, 2, 7, 4), DOCUMENTS
    one = lambda x, ids: attend(x, x, x, over=from_mask_mod(lambda b, h, q, k: ids[q] == ids[k]), kernel="reference")
    torch.testing.assert_close(torch.func.vmap(one)(x, ids), attend(x, x, x, over=Segments(ids)))


def test_captured_values_tell_functions_apart():
    assert captured_values(window(2)) == captured_values(window(2)) != captured_values(window(3))
    ids = torch.arange(3)
    for mod in (
        lambda b, h, q, k: ids[q] == k, and_masks(lambda b, h, q, k: ids[q] == k, causal), functools.partial(prefix, ids), Documents(ids),
        Documents(ids).mask_mod, LearnedDocuments(ids), lambda b, h, q, k, ids=ids: ids[q] == k, [{"a": (ids,)}],
    ):  # fmt: skip
        assert any(x is ids for x in captured_values(mod))
    assert any(x is DOCUMENTS for x in captured_values(lambda b, h, q, k: document(b, h, q, k)))
    assert [x for x in captured_values(causal) if isinstance(x, torch.Tensor)] == []
    texts = [
        fingerprint(from_mask_mod(mod))
        for mod in (window(2), window(3), functools.partial(prefix, 2), functools.partial(prefix, 3))
    ]
    assert len({*texts}) == 4 and texts[0] == fingerprint(from_mask_mod(window(2)))
    assert fingerprint(from_mask_mod(Documents(DOCUMENTS[0]))) != fingerprint(from_mask_mod(Documents(DOCUMENTS[1])))


class Held:
    """Holds a mask in every way in which Python lets an object hold one."""

    __slots__ = ("__dict__", "in_slot")
    of_class = torch.arange(7) < 3

    def __init__(self):
        self.own = self.in_slot = torch.arange(7) < 3

    @property
    def by_property(self):
        return self.own

    def by_method(self, q):
        return self.own[q]


def read_own(held, q):
    return held.own[q]


@pytest.mark.parametrize(
    "read",
    [
        lambda held, q: held.own[q],
        lambda held, q: held.in_slot[q],
        lambda held, q: held.of_class[q],
        lambda held, q: held.by_property[q],
        lambda held, q: held.by_method(q),
        read_own,
    ],
    ids=["attribute", "slot", "class", "property", "method", "helper"],
)
def test_tensors_that_an_object_holds_are_found(read):
    held = Held()
    over = from_mask_mod(lambda b, h, q, k: read(held, q))
    assert any(x is held.own or x is Held.of_class for x in over.leaves())


def test_captured_values_tell_functions_of_torch_apart():
    smaller = lambda b, h, q, k: torch.minimum(q, k) > 2
    larger = lambda b, h, q, k: torch.maximum(q, k) > 2
    assert captured_values(smaller) != captured_values(larger)
    assert fingerprint(from_mask_mod(smaller)) != fingerprint(from_mask_mod(larger))


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (lambda: from_mask_mod(3), TypeError, r"mod must be a function of \(b, h, q_idx, kv_idx\), got int"),
        (lambda: from_mask_mod(Causal()), TypeError, r"mod must be a function .*; it is a neighbourhood already"),
        (lambda: from_mask_mod(create_block_mask(causal, None, None, 7, 7, device="cpu")), TypeError, r"got BlockMask; pass block_mask.mask_mod"),
        (lambda: from_mask_mod(lambda q, k: q >= k), TypeError, r"mod must be a function of \(b, h, q_idx, kv_idx\), got \(q, k\)"),
        (lambda: from_mask_mod(lambda score, b, h, q, k: score), TypeError, r"got \(score, b, h, q, k\); the terms of a score_mod are bias= and position="),
        (lambda: from_mask_mod(lambda b, h, q, k: q - k), ValueError, r"mod must return a bool tensor without axes for a pair, got Tensor of torch.int64 and shape \(\)"),
        (lambda: from_mask_mod(lambda b, h, q, k: True), ValueError, r"mod must return a bool tensor .*, got bool; compare"),
        (lambda: from_mask_mod(lambda b, h, q, k: torch.ones(3).bool()), ValueError, r"without axes for a pair, got Tensor of torch.bool and shape \(3,\)"),
        (lambda: attend(*torch.ones(3, 1, 1, 7, 4), over=causal), ValueError, r"got function; for a mask_mod of flex_attention pass from_mask_mod\(mod\)"),
        (lambda: attend(*torch.ones(3, 1, 1, 7, 4), over=create_block_mask(causal, None, None, 7, 7, device="cpu")), ValueError, r"pass from_mask_mod\(block_mask.mask_mod\)"),
        (lambda: from_mask_mod(causal).allows(*torch.zeros(3, 1, 1).long()), ValueError, r"from_mask_mod\(causal\) must know the sizes of the attention, got none; call over.bind_sizes"),
    ],
)  # fmt: skip
def test_invalid_arguments_are_refused(make, kind, message):
    with pytest.raises(kind, match=message):
        make()


def test_padding_by_a_mask_mod_equals_padding():
    q = torch.randn(3, 2, 7, 4)
    torch.testing.assert_close(attend(q, q, q, over=from_mask_mod(padding)), attend(q, q, q, over=Padding(LENGTHS)))
