"""How often `flex` is compiled, what it shares between calls, and its place inside a model that a user compiles."""

from __future__ import annotations

import contextvars
import gc
import threading

import pytest
import torch
from torch._dynamo.utils import counters
from torch.nn.attention import flex_attention as torch_flex

import polyhead
from polyhead import (
    Causal,
    Dense,
    Grid,
    Mask,
    MultiHeadAttention,
    Padding,
    RelativeBias,
    Segments,
    Window,
    attend,
    capture,
)
from polyhead.kernels.flex import compiled, list_cache
from polyhead.kernels.flex.block_lists import BLOCK, BlockLists, make_block_lists
from polyhead.neighbourhood import Neighbourhood, Sizes

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
CPU = torch.device("cpu")


def compilations() -> int:
    return int(counters["stats"]["unique_graphs"])


def run(over: Neighbourhood, items: int, batch: int = 2, **options: object) -> torch.Tensor:
    q, k, v = (torch.randn(batch, 3, items, 16, requires_grad=True) for _ in range(3))
    out = attend(q, k, v, over=over, kernel="flex", **options)
    expected = attend(q, k, v, over=over, kernel="reference", **options)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    out.sum().backward()
    return out


def test_lengths_windows_and_grids_are_not_compiled_again(flex_on_cpu: None):
    """What differs in numbers alone is one compiled function: a length, a reach, a rate of dropout, a table, a batch."""
    families = {
        "window": lambda n, i: {"over": Window(i + 2, 3 * i), "items": n},
        "padding": lambda n, i: {"over": Causal() & Padding([n, i + 1], queries=True), "items": n},
        "expression": lambda n, i: {"over": (Causal() | Padding([n, i + 1])) & ~Window(i + 2), "items": n},
        "mask": lambda n, i: {"over": Mask(torch.rand(n, n) > 0.4), "items": n},
        "grid": lambda n, i: {"over": Grid(n // 10, 10, window=2 * i + 3, prefix=i + 1), "items": n // 10 * 10 + i + 1},
        "dropout": lambda n, i: {"over": Causal(), "items": n, "dropout": 0.1 * (i + 1), "seed": i},
        "bias": lambda n, i: {
            "over": Dense(),
            "items": n,
            "position": RelativeBias(3, buckets=8, max_distance=2 * i + 20),
        },
    }
    for name, arguments in families.items():
        run(**arguments(310, 0))
        before = compilations()
        for i, items in enumerate((530, 290)):
            run(**arguments(items, i + 1))
        assert compilations() == before, name


def test_structures_have_limits_of_their_own(flex_on_cpu: None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(compiled, "RECOMPILE_LIMIT", 1)
    monkeypatch.setattr(compiled, "_settings", threading.local())
    monkeypatch.setattr(compiled, "_compiled", {})
    run(Causal(), 300)
    run(Window(5), 300)
    run(Segments(torch.arange(300) // 9), 300)
    # a batch of one row is compiled on its own
    with pytest.raises(RuntimeError, match=r"flex: torch has compiled this attention 1 times.*pass kernel='tiled'"):
        run(Causal(), 300, batch=1)


def test_user_models_compile_in_one_piece(flex_on_cpu: None):
    torch.manual_seed(0)
    mha = MultiHeadAttention(24, num_heads=3, position=RelativeBias(3, buckets=8, max_distance=20))
    x = torch.randn(2, 140, 24)
    over = Causal() & Padding(torch.rand(2, 140) > 0.3)
    expected, _ = mha(x, over=over)
    assert mha.explain(x, over=over).kernel == "flex"
    program = torch.compile(lambda x: mha(x, over=over)[0], fullgraph=True, backend="eager")
    out = program(x)
    torch.testing.assert_close(out, expected)
    got = torch.autograd.grad(out.square().sum(), list(mha.parameters()))
    wanted = torch.autograd.grad(expected.square().sum(), list(mha.parameters()))
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


def test_second_derivatives_are_an_error(flex_on_cpu: None):
    q = torch.randn(1, 2, 9, 8, requires_grad=True)
    out = attend(q, q, q, over=Causal(), kernel="flex", sink=0.0)
    with pytest.raises(RuntimeError, match="flex has no second derivatives; pass kernel='tiled'"):
        torch.autograd.grad(out.sum(), q, create_graph=True)


def test_calls_leave_nothing_behind(flex_on_cpu: None):
    q = torch.randn(1, 2, 200, 16)
    run = lambda: attend(q, q, q, over=Window(9), kernel="flex")
    run()
    before = len(contextvars.copy_context())
    for _ in range(5):
        run()
    assert len(contextvars.copy_context()) == before


def test_capture_sees_it(flex_on_cpu: None):
    mha = MultiHeadAttention(24, num_heads=3)
    x, over = torch.randn(2, 140, 24), Padding(torch.rand(2, 140) > 0.3)
    expected, heads = mha(x, over=over)
    with capture(mha) as seen:
        out, _ = mha(x, over=over)
    assert mha.explain(x, over=over).kernel == "flex"
    assert torch.equal(out, expected) and torch.equal(seen[0].weights, heads.weights)


def test_autocast_does_not_narrow_it(flex_on_cpu: None):
    """Attention is computed in the dtype of q, k and v, as in every kernel; different dtypes are refused."""
    q = torch.randn(1, 2, 150, 16)
    plain = attend(q, q, q, over=Window(9), kernel="flex")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(attend(q, q, q, over=Window(9), kernel="flex"), plain)
        with pytest.raises(ValueError, match="q, k and v must be of one dtype"):
            attend(q, q.bfloat16(), q, over=Window(9), kernel="flex")


def lists_of(over: Neighbourhood, items: int, batch: tuple[int, ...] = (2,)) -> BlockLists:
    q = torch.empty(*batch, 3, items, 8)
    call = polyhead.prepare.check_and_make_call(q, q, q, polyhead.prepare.AttentionOptions(over))
    return list_cache.block_lists_of(call)


def test_lists_are_made_once_for_equal_neighbourhoods():
    ids = torch.arange(300) // 90
    over = Causal() & Segments(ids)
    first = lists_of(over, 300)
    assert lists_of(over, 300) is first
    # `Padding` in self-attention is made anew for each layer
    padding = Padding([300, 20])
    assert lists_of(padding.bind_self_attention(True), 300) is lists_of(padding.bind_self_attention(True), 300)
    assert lists_of(padding.bind_self_attention(False), 300) is not lists_of(padding.bind_self_attention(True), 300)
    assert lists_of(Window(7), 300) is lists_of(Window(7), 300)
    assert lists_of(Window(7), 300) is not lists_of(Window(8), 300)
    assert lists_of(Window(7), 300) is not lists_of(Window(7), 301)


def test_lists_of_some_rows_of_a_batch():
    over = Padding(torch.tensor([300, 4])).select_batch_rows((2,), (slice(1, 2),))
    assert lists_of(over, 300, (1,)) is lists_of(over, 300, (1,))
    assert lists_of(over, 300, (1,)).keys.number.tolist() == [[[1, 1, 1]]]


def test_each_stream_has_lists_of_its_own(monkeypatch: pytest.MonkeyPatch):
    """There is no GPU here: this shows that the stream is asked for, not what a GPU would do."""
    first = lists_of(Window(7), 300)
    monkeypatch.setattr(list_cache, "current_stream_id", lambda device: 1)
    assert lists_of(Window(7), 300) is not first
    assert lists_of(Window(7), 300) is lists_of(Window(7), 300)


def test_lists_follow_tensors_that_are_edited():
    stop = torch.tensor([300, 300])
    over = Padding(stop)
    before = lists_of(over, 300)
    over.stop[1] = 5
    after = lists_of(over, 300)
    assert after is not before and after.keys.number[1].tolist() == [[1, 1, 1]]
    assert after.full_keys is not None and not after.full_keys.number[1].any()


def test_lists_die_with_their_tensors():
    gc.collect()
    over = Padding(torch.tensor([300, 4]))
    lists_of(over, 300)
    kept = len(list_cache._kept)
    del over
    gc.collect()
    assert len(list_cache._kept) == kept - 1
    for reach in range(2 * list_cache.MAX_KEPT):
        lists_of(Window(reach), 300)
    assert len(list_cache._kept) <= list_cache.MAX_KEPT


def test_lists_of_classes_that_users_write_are_made_anew():
    class Near(Neighbourhood):
        limits = (0, 9)

        def allows(self, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
            return (key >= self.limits[0]) & (key < self.limits[1]) & (query >= 0)

        def interval(self, queries: int, keys: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
            return torch.full((queries,), self.limits[0]), torch.full((queries,), self.limits[1])

    over = Near()
    assert lists_of(over, 300).keys.number.tolist() == [[[1, 1, 1]]]
    Near.limits = (0, 200)
    assert lists_of(over, 300).keys.number.tolist() == [[[2, 2, 2]]]


def test_lists_made_in_inference_mode_serve_training(flex_on_cpu: None):
    list_cache._kept.clear()
    with torch.inference_mode():
        q = torch.randn(1, 2, 200, 16)
        attend(q, q, q, over=Window(3), kernel="flex")
    q = torch.randn(1, 2, 200, 16, requires_grad=True)
    attend(q, q, q, over=Window(3), kernel="flex").sum().backward()


def compiled_for_the_cpu(q: torch.Tensor, lists: BlockLists, mod: torch_flex._mask_mod_signature) -> torch.Tensor:
    """torch's own C++ code for flex_attention, which reads the lists; it has neither log-sum-exp nor gradients."""
    block_mask = torch_flex.BlockMask(
        (q.shape[2], q.shape[2]), *lists.keys, *(lists.full_keys or (None, None)), *lists.queries,
        *(lists.full_queries or (None, None)), BLOCK_SIZE=(BLOCK, BLOCK), mask_mod=mod,
    )  # fmt: skip
    with torch.no_grad():
        return torch.compile(torch_flex.flex_attention, fullgraph=True, dynamic=False)(q, q, q, block_mask=block_mask)


@pytest.mark.parametrize(
    "over",
    [
        Causal() & Padding([300, 140], queries=True),
        pytest.param(
            Padding([300, 140]) & Grid(15, 20, window=5), marks=pytest.mark.slow("a build by the C++ compiler")
        ),
    ],
    ids=["exact", "partial"],
)
def test_compiled_code_reads_the_lists(over: Neighbourhood):
    """The dense definition does not read them: an empty list would still give the right result there."""
    q = torch.randn(2, 3, 300, 16)
    interval_of = lambda part: tuple(x.expand(2, 300) for x in part.interval(300, 300, CPU))
    lists = make_block_lists(over, interval_of, 300)
    mod = over.mask_mod(Sizes((2,), 3, 300, 300), CPU)
    expected = attend(q, q, q, over=over, kernel="reference")
    torch.testing.assert_close(compiled_for_the_cpu(q, lists, mod), expected, atol=1e-5, rtol=1e-5)
    without = lists._replace(keys=lists.keys._replace(number=torch.zeros_like(lists.keys.number)))
    assert not torch.allclose(compiled_for_the_cpu(q, without, mod), expected, atol=1e-3)
