"""One pass over blocks of scores: every metric equals its definition, for all neighbourhoods, sizes and instruction sets."""

import pytest
import torch
from torch.testing import assert_close

from polyhead import ALiBi, Causal, Dot, GATv2, Padding, Segments, Window
from polyhead._torch import native
from polyhead.metrics import blockwise, streaming
from polyhead.metrics import compute as metrics_compute
from polyhead.metrics.attention_parts import DensePart
from polyhead.metrics.compute import MetricRequest, compute_metrics
from polyhead.prepare import AttentionOptions, check_and_make_call

pytestmark = pytest.mark.skipif(native is None, reason="there are no C++ kernels: the streamed pass is NOT tested")

# (batch, heads, queries, keys, dim): not multiples of a vector, one with a single query
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


def make_whole_part(size, option, dtype=torch.float32, groups=1):
    torch.manual_seed(sum(size))
    b, h, q, k, d = size
    tensors = torch.randn(b, h * groups, q, d), torch.randn(b, h, k, d), torch.randn(b, h, k, d)
    call = check_and_make_call(
        *(x.to(dtype) for x in tensors), AttentionOptions(**OPTIONS[option](b, h * groups, q, k))
    )
    assert streaming.refuses_call(call) is None
    return DensePart(call)


def make_requests(part):
    *batch, heads, queries, keys = part.shape
    marked = torch.rand(*batch, keys) < 0.4
    at = torch.randint(-1, keys, (queries,))
    names = [
        ("entropy",), ("distance",), ("received",), ("mass", -1), ("mass", 0), ("mass", 2), ("mass_on_keys", marked),
        ("mass_on_keys", marked[..., :] ^ True), ("mass_at_key", at), ("top", min(3, keys)), ("top", 1), ("heatmap", 5),
        ("received", torch.rand(*batch, heads, queries)), ("heatmap", 9), ("diversity",), ("mass_on_keys", marked | True),
        ("mass_on_keys", marked), ("mass_on_keys", marked), ("mass_at_key", torch.randint(-1, keys, (*batch, 1, queries))),
    ]  # fmt: skip
    return [
        MetricRequest(name, tuple(arguments), contribution)
        for contribution in (False, True)
        for name, *arguments in names
    ]


def check(part, lse=None, tolerance=1e-5):
    contribution_norm = torch.rand(*part.call.sizes.batch, part.call.sizes.heads, part.call.sizes.keys)
    requests = make_requests(part)
    for request, found in zip(
        requests, compute_metrics(part, requests, contribution_norm=contribution_norm, lse=lse), strict=True
    ):
        own = part._replace(contribution_norm=contribution_norm) if request.contribution else part
        expected = blockwise.compute_one(own, request.name, *request.arguments)
        if request.name == "top":
            assert_close(found[0], expected[0], atol=tolerance, rtol=tolerance)
            # equal weights may come in any order
            w = own.weights()
            again = w.gather(-1, found[1].clamp(min=0)).masked_fill(found[1] < 0, 0.0)
            assert_close(again, expected[0], atol=tolerance, rtol=tolerance)
            continue
        assert_close(found, expected, atol=tolerance, rtol=tolerance, msg=lambda m, q=request: f"{q.name}: {m}")


@pytest.fixture(params=native.instruction_sets() if native else ["none"])
def instruction_set(request):
    before = native.instruction_set()
    native.use(request.param)
    yield
    native.use(before)


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_every_metric_equals_its_definition(size, option, instruction_set):
    check(make_whole_part(size, option))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_halves_are_computed_in_fp32(dtype):
    check(make_whole_part(SIZES[1], "causal", dtype))


@pytest.mark.parametrize("option", ["dense", "causal", "mask"])
def test_shared_key_heads(option):
    check(make_whole_part(SIZES[4], option, groups=3))


def test_some_heads_and_queries():
    part = make_whole_part(SIZES[3], "mask")
    check(part._replace(heads=torch.tensor([1]), queries=torch.tensor([250, 3, 77])))


@pytest.mark.parametrize("option", ["dense", "causal", "sink"])
def test_metrics_with_a_known_log_sum_exp(option):
    part = make_whole_part(SIZES[1], option)
    lse = torch.logsumexp(blockwise.masked_scores(part.call), -1)
    check(part, lse)


def test_large_scores_have_the_entropy_of_small_ones():
    part = make_whole_part(SIZES[1], "dense")
    shifted = part.call._replace(bias=torch.full((1, 1, 1), 3e4))
    (near,), (far,) = (compute_metrics(DensePart(call), [MetricRequest("entropy")]) for call in (part.call, shifted))
    assert_close(near, far, atol=2e-2, rtol=1e-2)


def test_inputs_in_any_layout():
    part = make_whole_part(SIZES[1], "causal")
    call = part.call
    strided = call._replace(q=call.q.transpose(1, 2).contiguous().transpose(1, 2), k=call.k.flip(-1).flip(-1))
    for x, y in zip(*(compute_metrics(DensePart(c), make_requests(part)[:6]) for c in (call, strided)), strict=True):
        assert_close(x, y)


def test_long_inputs_are_cut_into_blocks(monkeypatch):
    monkeypatch.setattr(streaming, "_BLOCK_ROWS", 16)
    monkeypatch.setattr(streaming, "_BLOCK_COLUMNS", 24)
    monkeypatch.setattr(streaming, "_CHUNK_QUERIES", 5)
    for option in OPTIONS:
        check(make_whole_part(SIZES[1], option))


def test_many_requests_share_one_pass(monkeypatch):
    part, passes = make_whole_part(SIZES[1], "dense"), []
    run_pass = streaming.run_pass
    monkeypatch.setattr(metrics_compute.streaming, "run_pass", lambda *a, **k: passes.append(1) or run_pass(*a, **k))
    contribution_norm = torch.rand(1, 2, 67)
    requests = [
        MetricRequest(*q) for q in (
            ("entropy",), ("received", (None,)), ("mass", (-1,)), ("top", (4,)), ("heatmap", (8,)),
            ("received", (None,), True), ("heatmap", (8,), True), ("mass_on_keys", (torch.ones(67),), True),
        )
    ]  # fmt: skip
    compute_metrics(part, requests, contribution_norm=contribution_norm)
    assert len(passes) == 1


@pytest.mark.parametrize(
    "change, reason",
    [
        (lambda call: call._replace(q=call.q.double()), "fp32, bf16 or fp16 on the CPU"),
        (lambda call: call._replace(q=call.q.to("meta")), "on meta"),
        (lambda call: call._replace(score=GATv2(3, 5)), "no code for GATv2"),
    ],
)
def test_refusals_name_the_reason(change, reason):
    assert reason in streaming.refuses_call(change(make_whole_part(SIZES[0], "dense").call))


def test_gradients_are_computed_blockwise():
    part = make_whole_part(SIZES[0], "causal")
    q = part.call.q.clone().requires_grad_()
    own = DensePart(part.call._replace(q=q))
    compute_metrics(own, [MetricRequest("entropy")])[0].sum().backward()
    assert q.grad is not None
    with torch.no_grad():
        assert_close(
            compute_metrics(own, [MetricRequest("entropy")])[0],
            blockwise.compute_one(part, "entropy"),
            atol=1e-5,
            rtol=1e-5,
        )


@pytest.mark.parametrize("where", ["q", "k"])
def test_nan_inputs_give_nan_metrics(where):
    part = make_whole_part(SIZES[0], "dense")
    getattr(part.call, where)[0, 0, 3, 0] = torch.nan
    (found,) = compute_metrics(part, [MetricRequest("entropy")])
    assert torch.equal(found.isnan(), blockwise.compute_one(part, "entropy").isnan())
    assert found.isnan().any()


def test_contributions_have_gradients():
    part = make_whole_part(SIZES[0], "dense")
    contribution_norm = torch.rand(2, 3, 7, requires_grad=True)
    (found,) = compute_metrics(part, [MetricRequest("entropy", (), True)], contribution_norm=contribution_norm)
    found.sum().backward()
    assert contribution_norm.grad.abs().sum() > 0


def test_a_large_log_sum_exp_is_recomputed():
    part = make_whole_part(SIZES[1], "dense")
    call = part.call._replace(q=part.call.q * 1e3, k=part.call.k * 1e2)
    lse = torch.logsumexp(blockwise.masked_scores(call), -1)
    ((largest, _),) = compute_metrics(DensePart(call), [MetricRequest("top", (1,))], lse=lse)
    assert_close(largest, blockwise.compute_one(DensePart(call), "top", 1)[0], atol=1e-3, rtol=1e-3)
