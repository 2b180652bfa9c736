"""One pass over blocks of scores: every number equals its definition, whatever the neighbourhood, sizes and instruction set."""

import pytest
import torch
from torch.testing import assert_close

from polyhead import ALiBi, Causal, Dot, GATv2, Padding, Segments, Window
from polyhead._torch import native
from polyhead.attend import prepare
from polyhead.metrics import blockwise, streaming
from polyhead.metrics import compute as plan
from polyhead.metrics.blockwise import Part
from polyhead.metrics.compute import MetricRequest, compute

pytestmark = pytest.mark.skipif(native is None, reason="there are no C++ kernels: the streamed pass is NOT tested")

# (batch, heads, queries, keys, dim): none a multiple of a vector, one of them of one query
SIZES = [(2, 3, 7, 7, 5), (1, 2, 67, 67, 16), (3, 2, 1, 19, 8), (1, 2, 261, 261, 3), (2, 2, 13, 37, 4)]
OPTIONS = {
    "dense": lambda b, h, q, k: {},
    "causal": lambda b, h, q, k: {"over": Causal()},
    "window": lambda b, h, q, k: {"over": Window(3) & Causal()},
    "padding": lambda b, h, q, k: {"over": Padding(torch.arange(b) * 5 % (k + 1))},
    "segments": lambda b, h, q, k: {"over": Segments(torch.arange(k) * 4 // k)},
    "mask": lambda b, h, q, k: {"over": torch.rand(b, h, q, k) < 0.3},
    "one mask": lambda b, h, q, k: {"over": torch.rand(q, k) < 0.1},
    "both": lambda b, h, q, k: {"over": Causal() & (torch.rand(b, 1, q, k) < 0.7)},
    "bias": lambda b, h, q, k: {"bias": torch.randn(b, 1, q, k)},
    "alibi": lambda b, h, q, k: {"position": ALiBi(h)},
    "sink": lambda b, h, q, k: {"sink": torch.randn(h), "over": Causal()},
    "scale": lambda b, h, q, k: {"score": Dot(3.0)},
}


def made(size, option, dtype=torch.float32, groups=1):
    torch.manual_seed(sum(size))
    b, h, q, k, d = size
    given = {"over": None, "score": Dot(), "position": None, "bias": None, "sink": None}
    tensors = torch.randn(b, h * groups, q, d), torch.randn(b, h, k, d), torch.randn(b, h, k, d)
    call = prepare(*(x.to(dtype) for x in tensors), **given | OPTIONS[option](b, h * groups, q, k))
    assert streaming.refuses(call) is None
    return Part(call)


def questions(part):
    *batch, heads, queries, keys = part.shape
    marked = torch.rand(*batch, keys) < 0.4
    at = torch.randint(-1, keys, (queries,))
    names = [
        ("entropy",), ("distance",), ("received",), ("mass", -1), ("mass", 0), ("mass", 2), ("mass_on", marked),
        ("mass_on", marked[..., :] ^ True), ("mass_at", at), ("top", min(3, keys)), ("top", 1), ("heatmap", 5),
        ("received", torch.rand(*batch, heads, queries)), ("heatmap", 9), ("diversity",), ("mass_on", marked | True),
        ("mass_on", marked), ("mass_on", marked), ("mass_at", torch.randint(-1, keys, (*batch, 1, queries))),
    ]  # fmt: skip
    return [MetricRequest(name, tuple(about), moved) for moved in (False, True) for name, *about in names]


def check(part, lse=None, tolerance=1e-5):
    moved = torch.rand(*part.call.sizes.batch, part.call.sizes.heads, part.call.sizes.keys)
    asked = questions(part)
    for question, found in zip(asked, compute(part, asked, moved=moved, lse=lse), strict=True):
        own = part._replace(moved=moved) if question.moved else part
        wanted = getattr(blockwise, question.name)(own, *question.about)
        if question.name == "top":
            assert_close(found[0], wanted[0], atol=tolerance, rtol=tolerance)
            # of equal weights any may come first
            w = own.weights()
            again = w.gather(-1, found[1].clamp(min=0)).masked_fill(found[1] < 0, 0.0)
            assert_close(again, wanted[0], atol=tolerance, rtol=tolerance)
            continue
        assert_close(found, wanted, atol=tolerance, rtol=tolerance, msg=lambda m, q=question: f"{q.name}: {m}")


@pytest.fixture(params=native.instruction_sets() if native else ["none"])
def instruction_set(request):
    before = native.instruction_set()
    native.use(request.param)
    yield
    native.use(before)


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_every_number_is_its_definition(size, option, instruction_set):
    check(made(size, option))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_halves_are_computed_in_fp32(dtype):
    check(made(SIZES[1], "causal", dtype))


@pytest.mark.parametrize("option", ["dense", "causal", "mask"])
def test_grouped_keys(option):
    check(made(SIZES[4], option, groups=3))


def test_some_heads_and_queries():
    part = made(SIZES[3], "mask")
    check(part._replace(heads=torch.tensor([1]), queries=torch.tensor([250, 3, 77])))


@pytest.mark.parametrize("option", ["dense", "causal", "sink"])
def test_with_the_log_sum_exp_given(option):
    part = made(SIZES[1], option)
    lse = torch.logsumexp(blockwise.scores(part.call), -1)
    check(part, lse)


def test_scores_far_from_zero_keep_their_weights():
    part = made(SIZES[1], "dense")
    shifted = part.call._replace(bias=torch.full((1, 1, 1), 3e4))
    (near,), (far,) = (compute(Part(call), [MetricRequest("entropy")]) for call in (part.call, shifted))
    assert_close(near, far, atol=2e-2, rtol=1e-2)


def test_inputs_in_any_layout():
    part = made(SIZES[1], "causal")
    call = part.call
    strided = call._replace(q=call.q.transpose(1, 2).contiguous().transpose(1, 2), k=call.k.flip(-1).flip(-1))
    for x, y in zip(*(compute(Part(c), questions(part)[:6]) for c in (call, strided)), strict=True):
        assert_close(x, y)


def test_long_inputs_are_cut_into_blocks(monkeypatch):
    monkeypatch.setattr(streaming, "_ROWS", 16)
    monkeypatch.setattr(streaming, "_COLUMNS", 24)
    monkeypatch.setattr(streaming, "_CHUNK", 5)
    for option in OPTIONS:
        check(made(SIZES[1], option))


def test_many_questions_are_one_pass(monkeypatch):
    part, passes = made(SIZES[1], "dense"), []
    observe = streaming.observe
    monkeypatch.setattr(plan.streaming, "observe", lambda *a, **k: passes.append(1) or observe(*a, **k))
    moved = torch.rand(1, 2, 67)
    asked = [
        MetricRequest(*q) for q in (
            ("entropy",), ("received", (None,)), ("mass", (-1,)), ("top", (4,)), ("heatmap", (8,)),
            ("received", (None,), True), ("heatmap", (8,), True), ("mass_on", (torch.ones(67),), True),
        )
    ]  # fmt: skip
    compute(part, asked, moved=moved)
    assert len(passes) == 1


@pytest.mark.parametrize(
    "change, reason",
    [
        (lambda call: call._replace(q=call.q.double()), "fp32 and halves on the CPU"),
        (lambda call: call._replace(q=call.q.to("meta")), "on meta"),
        (lambda call: call._replace(score=GATv2(3, 5)), "no code for GATv2"),
    ],
)
def test_what_it_refuses(change, reason):
    assert reason in streaming.refuses(change(made(SIZES[0], "dense").call))


def test_gradients_go_the_other_way():
    part = made(SIZES[0], "causal")
    q = part.call.q.clone().requires_grad_()
    own = Part(part.call._replace(q=q))
    compute(own, [MetricRequest("entropy")])[0].sum().backward()
    assert q.grad is not None
    with torch.no_grad():
        assert_close(compute(own, [MetricRequest("entropy")])[0], blockwise.entropy(part), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("where", ["q", "k"])
def test_what_is_no_number_is_not_hidden(where):
    part = made(SIZES[0], "dense")
    getattr(part.call, where)[0, 0, 3, 0] = torch.nan
    (found,) = compute(part, [MetricRequest("entropy")])
    assert torch.equal(found.isnan(), blockwise.entropy(part).isnan())
    assert found.isnan().any()


def test_contributions_keep_their_gradients():
    part = made(SIZES[0], "dense")
    moved = torch.rand(2, 3, 7, requires_grad=True)
    (found,) = compute(part, [MetricRequest("entropy", (), True)], moved=moved)
    found.sum().backward()
    assert moved.grad.abs().sum() > 0


def test_a_large_log_sum_exp_is_found_anew():
    part = made(SIZES[1], "dense")
    call = part.call._replace(q=part.call.q * 1e3, k=part.call.k * 1e2)
    lse = torch.logsumexp(blockwise.scores(call), -1)
    ((largest, _),) = compute(Part(call), [MetricRequest("top", (1,))], lse=lse)
    assert_close(largest, blockwise.top(Part(call), 1)[0], atol=1e-3, rtol=1e-3)
