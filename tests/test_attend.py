"""attend with large values, narrow dtypes, empty inputs, dual and fake tensors, under compile, export and vmap."""

import pytest
import torch
import torch.autograd.forward_ad as forward
from torch._subclasses.fake_tensor import FakeTensorMode

from polyhead import (
    ALiBi,
    Causal,
    Mask,
    MultiHeadAttention,
    Neighbourhood,
    Padding,
    RelativeBias,
    Rotary,
    Segments,
    Window,
    attend,
    attention_weights,
    explain,
)
from polyhead._torch import native

KERNEL_NAMES = ["fused", "short", "tiled", "reference"]


@pytest.mark.parametrize("offset", [-1e9, torch.finfo(torch.float32).min, 1e9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rows_with_a_large_constant_bias_are_means(offset, dtype):
    q, v = torch.randn(1, 1, 5, 4, dtype=dtype), torch.randn(1, 1, 5, 4, dtype=dtype)
    bias = torch.zeros(5, 5)
    bias[2] = offset
    mean = v.float().mean(2)[0, 0].to(dtype)
    torch.testing.assert_close(attention_weights(q, q, bias=bias)[0, 0, 2], torch.full((5,), 0.2, dtype=dtype))
    for kernel in ("tiled", "reference"):
        torch.testing.assert_close(attend(q, q, v, bias=bias, kernel=kernel)[0, 0, 2], mean, atol=1e-2, rtol=1e-2)


def test_a_bias_beyond_the_range_of_fp16():
    q = torch.randn(1, 1, 3, 4).half()
    bias = torch.zeros(3, 3)
    bias[0, 1] = 1e5
    torch.testing.assert_close(attend(q, q, q, bias=bias)[0, 0, 0], q[0, 0, 1])


@pytest.mark.parametrize("kernel", ["tiled", "reference"])
def test_scores_stay_fp32_under_autocast(kernel):
    q, k, v = (torch.randn(2, 3, 17, 8) for _ in range(3))
    bias = torch.randn(17, 17, requires_grad=True)
    expected = attend(q, k, v, bias=bias, kernel=kernel)
    with torch.autocast("cpu", torch.bfloat16):
        output = attend(q, k, v, bias=bias, kernel=kernel)
        weights = attention_weights(q, k)
    assert torch.equal(output, expected)
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 3, 17))


def test_keys_and_values_with_different_numbers_of_heads():
    q, k, v = torch.randn(1, 6, 5, 4), torch.randn(1, 2, 5, 4), torch.randn(1, 3, 5, 4)
    expected = attend(q, k.repeat_interleave(3, 1), v.repeat_interleave(2, 1))
    for kernel in KERNEL_NAMES:
        torch.testing.assert_close(attend(q, k, v, kernel=kernel), expected)


def test_an_interval_beyond_the_keys_gives_zero():
    class Beyond(Neighbourhood):
        exact = True

        def allows(self, head, query, key):
            return (key >= 10**6) & (query >= 0)

        def interval(self, queries, keys, device):
            first = torch.full((queries,), keys, device=device)
            return first, first + 1

    q = torch.randn(1, 2, 5, 4)
    assert attend(q, q, q, over=Beyond()).abs().max() == 0
    mha = MultiHeadAttention(8, 2)
    assert mha(torch.randn(1, 5, 8), over=Beyond())[1].entropy().abs().max() == 0


class FromThird(Neighbourhood):
    """Rows of the batch share their first key and differ in their last: bounds of different shapes."""

    exact = True

    def allows(self, head, query, key):
        stop = torch.tensor([9, 5, 7])[:, None, None, None]
        return (key >= 2) & (key < stop) & (query >= 0)

    def interval(self, queries, keys, device):
        return torch.full((1,), 2), torch.tensor([[9], [5], [7]]).expand(3, queries)


@pytest.mark.parametrize("kernel", ["short", "tiled"])
def test_intervals_of_different_shapes(kernel):
    q, k, v = torch.randn(3, 2, 4, 8), torch.randn(3, 2, 9, 8), torch.randn(3, 2, 9, 8)
    expected = attend(q, k, v, over=FromThird(), kernel="reference")
    torch.testing.assert_close(attend(q, k, v, over=FromThird(), kernel=kernel), expected)


@pytest.mark.parametrize("sink", [-torch.inf, torch.inf, 0.0])
def test_infinite_sinks_over_rows_without_keys(sink):
    q = torch.randn(1, 2, 5, 4, requires_grad=True)
    keep = torch.ones(5, 5).bool()
    keep[1] = False
    for kernel in ("tiled", "reference"):
        output = attend(q, q, q, over=keep, sink=sink, kernel=kernel)
        assert output[:, :, 1].abs().max() == 0
        (gradient,) = torch.autograd.grad(output.sum(), q)
        assert gradient.isfinite().all()
    assert attention_weights(q, q, over=keep, sink=sink).isfinite().all()


def test_forward_mode_differentiation_equals_jvp():
    q, tangent = torch.randn(1, 2, 5, 4), torch.randn(1, 2, 5, 4)
    with forward.dual_level():
        dual = forward.make_dual(q, tangent)
        got = forward.unpack_dual(attend(dual, q, q, over=Window(1))).tangent
    _, expected = torch.func.jvp(lambda x: attend(x, q, q, over=Window(1)), (q,), (tangent,))
    torch.testing.assert_close(got, expected)
    assert got.abs().max() > 0


def test_explain_draws_no_random_numbers():
    mha, x = MultiHeadAttention(8, 2, dropout=0.5), torch.randn(1, 5, 8)
    before = torch.get_rng_state()
    assert mha.explain(x).kernel == "short"
    assert explain(*(torch.zeros(1, 1, 2, 2),) * 3, dropout=0.5).kernel == "short"
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("position", [None, Rotary(), ALiBi(2), RelativeBias(2)], ids=lambda p: type(p).__name__)
def test_empty_queries_or_keys_give_zeros(position):
    for queries, keys in [(0, 0), (0, 3), (3, 0)]:
        q, k = torch.randn(2, 2, queries, 4), torch.randn(2, 2, keys, 4)
        output = attend(q, k, k, position=position)
        assert output.shape == (2, 2, queries, 4)
        assert not output.any()


def test_head_dim_zero_gives_the_mean_of_values():
    q, v = torch.randn(1, 2, 5, 0), torch.randn(1, 2, 5, 3)
    torch.testing.assert_close(attend(q, q, v), v.mean(2, keepdim=True).expand_as(v))


def test_fake_tensors_and_transforms_leave_no_state():
    mha = MultiHeadAttention(16, 2, position=Rotary())
    with FakeTensorMode(allow_non_fake_inputs=True):
        mha(torch.randn(2, 5, 16))
    assert type(mha(torch.randn(2, 5, 16))[0]) is torch.Tensor
    expected = mha(torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(1)))[0]
    torch.func.grad(lambda x: mha(x)[0].sum())(torch.randn(2, 9, 16))
    assert torch.equal(mha(torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(1)))[0], expected)


LENGTHS = {
    "mask": lambda n: torch.ones(n, n).tril(2).bool(),
    "keep": lambda n: Padding(torch.arange(n) >= torch.tensor([[1], [4]])),
    "lengths": lambda n: Padding(torch.tensor([3, n])),
    "segments": lambda n: Segments(torch.arange(n) // 3),
    "causal-window": lambda n: Causal() & Window(2),
}


@pytest.mark.skipif(native is None, reason="there are no C++ kernels")
def test_compiled_calls_use_the_native_kernels():
    operators = []

    def backend(graph, inputs):
        operators.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    q = torch.randn(2, 3, 11, 5)
    compiled = torch.compile(lambda q: attend(q, q, q, over=Window(2)), backend=backend, fullgraph=True)
    torch.testing.assert_close(compiled(q), attend(q, q, q, over=Window(2)))
    assert any("polyhead.short" in name for name in operators), operators


@pytest.mark.parametrize("over", LENGTHS)
def test_compiles_for_sequences_of_any_length(over):
    torch._dynamo.reset()
    mha = MultiHeadAttention(16, 2)
    compiled = torch.compile(mha, backend="aot_eager", fullgraph=True)
    for length in (7, 12, 19):
        x, neighbourhood = torch.randn(2, length, 16), LENGTHS[over](length)
        torch.testing.assert_close(compiled(x, over=neighbourhood)[0], mha(x, over=neighbourhood)[0])


@pytest.mark.parametrize("over", LENGTHS)
def test_exports_with_a_neighbourhood_as_input(over, tmp_path):
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.mha = MultiHeadAttention(16, 2)

        def forward(self, x, over):
            return self.mha(x, over=over)[0]

    model, x = Model(), torch.randn(2, 9, 16)
    neighbourhood = LENGTHS[over](9)
    program = torch.export.export(model, (x, neighbourhood))
    torch.export.save(program, tmp_path / "model.pt2")
    again = torch.export.load(tmp_path / "model.pt2").module()
    torch.testing.assert_close(again(x, neighbourhood), model(x, neighbourhood))


def test_exports_with_a_dynamic_batch():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.mha = MultiHeadAttention(16, 2)

        def forward(self, x, lengths, ids, keep):
            return self.mha(x, over=Padding(lengths) & Segments(ids) & Mask(keep))[0]

    def inputs(batch):
        lengths, ids = torch.randint(0, 10, (batch,)), torch.arange(9).expand(batch, 9) // 4
        return torch.randn(batch, 9, 16), lengths, ids.contiguous(), torch.rand(batch, 1, 9, 9) > 0.3

    model, batch = Model(), torch.export.Dim("batch", min=2)
    program = torch.export.export(model, inputs(2), dynamic_shapes=({0: batch},) * 4)
    many = inputs(5)
    torch.testing.assert_close(program.module()(*many), model(*many))


def test_vmap_over_lengths_masks_and_segments():
    mha, x = MultiHeadAttention(16, 2), torch.randn(3, 7, 16)
    lengths, ids = torch.tensor([2, 7, 0]), torch.arange(21).reshape(3, 7) // 4
    keep = torch.arange(7) < lengths[:, None]
    for argument, make, batched in [
        (lengths, Padding, Padding(lengths)),
        (keep, Padding, Padding(keep)),
        (ids, Segments, Segments(ids)),
        (keep[:, None] & keep[:, :, None], Mask, Mask((keep[:, None] & keep[:, :, None])[:, None])),
        (keep[:, None].expand(3, 7, 7), Mask, Mask(keep[:, None, None])),
    ]:
        expected = mha(x, over=batched)[0]
        mapped = torch.func.vmap(lambda one, own, make=make: mha(one, over=make(own))[0])(x, argument)
        torch.testing.assert_close(mapped, expected)
    mapped = torch.func.vmap(lambda one, over: mha(one, over=over)[0])(x, Padding(lengths))
    torch.testing.assert_close(mapped, mha(x, over=Padding(lengths))[0])


def test_heads_of_a_custom_neighbourhood_through_vmap():
    class Even(Neighbourhood):
        def allows(self, head, query, key):
            return (key % 2 == 0) & (query >= 0)

    mha, x = MultiHeadAttention(16, 2), torch.randn(3, 7, 16)
    _, heads = torch.func.vmap(lambda one: mha(one, over=Even()))(x)
    torch.testing.assert_close(heads.weights, mha(x, over=Even())[1].weights)
    assert heads.weights[..., 1::2].abs().max() == 0


@pytest.mark.parametrize("kernel", ["fused", "tiled", "short", "reference"])
@pytest.mark.parametrize("axis", ["heads", "batch"])
def test_heads_that_overlap_in_memory(kernel, axis):
    """torch's fused kernel mistakes an axis of stride 1 for the features."""
    rows = torch.randn(2, 10, 20).unfold(2, 8, 1)[:, :, :4]
    q = rows.permute(0, 2, 1, 3) if axis == "heads" else rows.permute(2, 0, 1, 3)
    k, v = torch.randn(2, *q.shape)
    expected = attend(*(x.contiguous().double() for x in (q, k, v)), kernel="reference")
    torch.testing.assert_close(attend(q, k, v, kernel=kernel).double(), expected, atol=1e-5, rtol=1e-5)


def test_unbounded_intervals_see_all_keys():
    class Everyone(Neighbourhood):
        exact = True

        def allows(self, head, query, key):
            return (key >= 0) & (query == query)

        def interval(self, queries, keys, device):
            first = torch.zeros(queries, dtype=torch.long)
            return first - 2**40, torch.full_like(first, 2**63 - 1)

    q = torch.randn(1, 2, 6, 4)
    for kernel in ("short", "tiled", "reference", None):
        torch.testing.assert_close(attend(q, q, q, over=Everyone(), kernel=kernel), attend(q, q, q))


def test_float8_is_refused():
    q = torch.randn(1, 2, 6, 4).to(torch.float8_e4m3fn)
    with pytest.raises(
        ValueError, match=r"q, k and v must be of one dtype, float64, float32, bfloat16 or float16, got torch\.float8"
    ):
        attend(q, q, q)


def test_rotary_follows_changes_of_its_base():
    q, rotary = torch.randn(2, 4, 10, 8), Rotary()
    before = attend(q, q, q, position=rotary)
    rotary.base = 500.0
    after = attend(q, q, q, position=rotary)
    assert not torch.allclose(before, after)
    torch.testing.assert_close(after, attend(q, q, q, position=Rotary(base=500.0)))
