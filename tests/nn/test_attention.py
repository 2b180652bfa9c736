"""The layer: what it takes, what it gives, and what users of other layers trip over."""

import copy
import pickle

import pytest
import torch
from torch import nn

import polyhead
from polyhead import ALiBi, Causal, Dot, MultiHeadAttention, Padding, RelativeBias, Rotary, Segments, Window

POSITIONS = {
    "none": lambda: None,
    "rotary": Rotary,
    "alibi": lambda: ALiBi(6),
    "relative": lambda: RelativeBias(6, buckets=8, max_distance=20),
}
NEIGHBOURHOODS = {
    "dense": lambda: None,
    "causal": Causal,
    "window": lambda: Window(3),
    "padding": lambda: Padding(torch.tensor([3, 11, 0])),
    "causal-padding": lambda: Causal() & Padding(torch.tensor([3, 11, 0])),
    "segments": lambda: Segments(torch.arange(11) // 4),
    "mask": lambda: torch.rand(11, 11) > 0.4,
}


def layer(**options):
    return MultiHeadAttention(30, 6, **options)


def test_the_example_of_every_tutorial():
    mha = MultiHeadAttention(d_model=512, num_heads=8)
    x = torch.randn(2, 10, 512)
    output, weights = mha(x, x, x)
    assert output.shape == (2, 10, 512)
    assert weights.shape == (2, 8, 10, 10)
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 8, 10))


@pytest.mark.parametrize("combine", ["project", "concat", "mean"])
@pytest.mark.parametrize("kv_heads", [6, 3, 1])
@pytest.mark.parametrize("over", NEIGHBOURHOODS)
def test_the_output_is_made_of_weights_and_values(combine, kv_heads, over):
    mha = layer(combine=combine, kv_heads=kv_heads, value_dim=7)
    x = torch.randn(3, 11, 30)
    output, heads = mha(x, over=NEIGHBOURHOODS[over]())
    values = mha.v_proj(x).unflatten(-1, (kv_heads, 7)).transpose(1, 2).repeat_interleave(6 // kv_heads, 1)
    by_head = heads.weights @ values
    torch.testing.assert_close(heads.outputs, by_head)
    joined = by_head.transpose(1, 2).flatten(2)
    wanted = {"project": lambda: mha.o_proj(joined), "concat": lambda: joined, "mean": lambda: by_head.mean(1)}[
        combine
    ]()
    torch.testing.assert_close(output, wanted)


def test_self_cross_and_sizes_of_their_own():
    mha = MultiHeadAttention(30, 6, d_key=17, d_value=19, d_out=23, head_dim=5, value_dim=7)
    output, heads = mha(torch.randn(2, 11, 30), torch.randn(2, 13, 17), torch.randn(2, 13, 19))
    assert output.shape == (2, 11, 23)
    assert heads.shape == (2, 6, 11, 13)
    plain = layer()
    x, memory = torch.randn(2, 11, 30), torch.randn(2, 13, 30)
    assert torch.equal(plain(x)[0], plain(x, x, x)[0])
    assert torch.equal(plain(x, memory)[0], plain(x, memory, memory)[0])


@pytest.mark.parametrize("lead", [(), (2,), (2, 3), (2, 1, 3)])
def test_any_number_of_leading_axes(lead):
    mha, x = layer(position=Rotary(4)), torch.randn(*lead, 11, 30)
    output, heads = mha(x, over=Causal() & Window(4))
    assert output.shape == x.shape
    assert heads.shape == (*lead, 6, 11, 11)
    flat, _ = mha(x.reshape(-1, 11, 30), over=Causal() & Window(4))
    torch.testing.assert_close(output.reshape(-1, 11, 30), flat)


def test_padded_queries_get_zero_where_they_are_keys():
    mha, x = layer(), torch.randn(3, 11, 30)
    lengths = torch.tensor([3, 11, 0])
    output, heads = mha(x, over=Padding(lengths))
    padded = torch.arange(11) >= lengths[:, None]
    assert heads.outputs.transpose(1, 2)[padded].abs().max() == 0
    torch.testing.assert_close(output[padded], mha.o_proj.bias.expand(int(padded.sum()), 30))
    _, across = mha(torch.randn(3, 5, 30), x, over=Padding(lengths))
    assert across.outputs[:2].abs().min() > 0


@pytest.mark.parametrize("training", [True, False])
def test_projecting_only_real_rows_changes_nothing(training, monkeypatch):
    monkeypatch.setattr("polyhead.nn.projection_inputs._SMALL", 0)
    monkeypatch.setattr("polyhead.nn.projection_inputs._COPIES", 0)
    mha = layer(kv_heads=3, dropout=0.0).train(training)
    x = torch.randn(3, 11, 30, requires_grad=True)
    keep = torch.arange(11) < torch.tensor([3, 9, 0])[:, None]
    learned = [x, *mha.parameters()]
    towards = torch.randn(3, 11, 30)
    short, _ = mha(x, over=Padding(keep))
    # as a mask, nothing is known to be padding, and every row is projected
    whole, _ = mha(x, over=keep[:, None, None, :] & keep[:, None, :, None])
    torch.testing.assert_close(short, whole)
    got, wanted = (torch.autograd.grad(out, learned, towards) for out in (short, whole))
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("over", NEIGHBOURHOODS)
@pytest.mark.parametrize("position", POSITIONS)
def test_train_eval_and_no_grad_agree(over, position):
    mha, x, over = (
        layer(position=POSITIONS[position](), sink=0.3)
        if position != "rotary"
        else layer(position=Rotary(4), sink=0.3),
        torch.randn(3, 11, 30),
        NEIGHBOURHOODS[over](),
    )
    train, heads = mha.train()(x, over=over)
    evaluated, _ = mha.eval()(x, over=over)
    with torch.no_grad():
        bare, _ = mha(x, over=over)
    with torch.inference_mode():
        inference, seen = mha(x, over=over)
        assert seen.weights.shape == heads.shape
    for other in (evaluated, bare, inference):
        torch.testing.assert_close(train, other)


def test_fully_masked_rows_are_zero_with_zero_gradients():
    mha = layer(bias=False)
    x = torch.randn(2, 11, 30, requires_grad=True)
    keep = torch.rand(2, 1, 11, 11) > 0.5
    keep[0, :, 4] = False
    keep[1] = False
    for mode in (mha.train(), mha.eval()):
        output, heads = mode(x, over=keep)
        assert output[0, 4].abs().max() == 0
        assert output[1].abs().max() == 0
        assert heads.weights[1].abs().max() == 0
        (gradient,) = torch.autograd.grad(output.sum() + heads.weights.sum() + heads.entropy().sum(), x)
        assert gradient.isfinite().all()
        assert gradient[1].abs().max() == 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("over", ["dense", "window", "padding"])
def test_dtypes(dtype, over):
    mha, x = layer(), torch.randn(3, 11, 30)
    wanted, _ = mha(x, over=NEIGHBOURHOODS[over]())
    output, heads = mha.to(dtype)(x.to(dtype), over=NEIGHBOURHOODS[over]())
    assert output.dtype == heads.weights.dtype == heads.dtype == dtype
    torch.testing.assert_close(output.float(), wanted, atol=3e-2, rtol=3e-2)


@pytest.mark.parametrize("over", NEIGHBOURHOODS)
def test_autocast(over):
    mha, x = layer(position=Rotary(4)), torch.randn(3, 11, 30, requires_grad=True)
    neighbourhood = NEIGHBOURHOODS[over]()
    wanted, _ = mha(x, over=neighbourhood)
    with torch.autocast("cpu", torch.bfloat16):
        output, heads = mha(x, over=neighbourhood)
        assert heads.weights.shape == (3, 6, 11, 11)
    assert output.dtype == torch.bfloat16
    output.float().square().mean().backward()
    torch.testing.assert_close(output.float(), wanted, atol=3e-2, rtol=3e-2)


@pytest.mark.parametrize("over", NEIGHBOURHOODS)
@pytest.mark.parametrize("position", POSITIONS)
def test_compiles_into_one_graph(over, position):
    torch._dynamo.reset()
    mha = layer(position=Rotary(4) if position == "rotary" else POSITIONS[position](), kv_heads=2)
    x, neighbourhood = torch.randn(3, 11, 30, requires_grad=True), NEIGHBOURHOODS[over]()

    def function(x):
        output, heads = mha(x, over=neighbourhood)
        return output, heads.weights, heads

    wanted, weights, _ = function(x)
    output, seen, heads = torch.compile(function, fullgraph=True, backend="aot_eager")(x)
    torch.testing.assert_close(output, wanted)
    torch.testing.assert_close(seen, weights)
    torch.testing.assert_close(heads.weights, weights)
    (got,) = torch.autograd.grad(output.square().sum(), x)
    (gradient,) = torch.autograd.grad(wanted.square().sum(), x)
    torch.testing.assert_close(got, gradient, atol=1e-5, rtol=1e-4)


def test_compiles_neighbourhoods_made_inside_and_dropout():
    torch._dynamo.reset()
    mha = layer(dropout=0.5)

    def function(x, lengths, ids):
        return mha(x, over=Causal() & Padding(lengths) & Segments(ids))[0]

    x, lengths, ids = torch.randn(3, 11, 30), torch.tensor([3, 11, 0]), torch.arange(11).expand(3, 11) // 4
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    torch.manual_seed(5)
    first = compiled(x, lengths, ids)
    assert not torch.equal(first, compiled(x, lengths, ids))
    mha.eval()
    torch.testing.assert_close(compiled(x, lengths, ids), function(x, lengths, ids))


def test_compiles_with_the_default_backend():
    torch._dynamo.reset()
    mha, x = layer(), torch.randn(3, 11, 30)
    compiled = torch.compile(lambda x: mha(x, over=Window(3))[0], fullgraph=True)
    torch.testing.assert_close(compiled(x), mha(x, over=Window(3))[0])


@pytest.mark.parametrize("over", NEIGHBOURHOODS)
def test_exports(over, tmp_path):
    mha, x, neighbourhood = layer().eval(), torch.randn(3, 11, 30), NEIGHBOURHOODS[over]()

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.mha = mha

        def forward(self, x):
            return self.mha(x, over=neighbourhood)

    wanted, heads = mha(x, over=neighbourhood)
    program = torch.export.export(Model(), (x,))
    torch.export.save(program, tmp_path / "layer.pt2")
    output, seen = torch.export.load(tmp_path / "layer.pt2").module()(x)
    torch.testing.assert_close(output, wanted)
    torch.testing.assert_close(seen.weights, heads.weights)


@pytest.mark.parametrize("over", ["dense", "causal", "window", "segments", "mask"])
def test_vmap_and_gradients_of_each_sample(over):
    mha, x, neighbourhood = layer(sink=0.2, position=ALiBi(6)), torch.randn(3, 11, 30), NEIGHBOURHOODS[over]()
    output, heads = mha(x, over=neighbourhood)
    mapped, seen = torch.func.vmap(lambda one: mha(one, over=neighbourhood))(x)
    torch.testing.assert_close(mapped, output)
    torch.testing.assert_close(seen.weights, heads.weights)
    torch.testing.assert_close(seen.contribution().weights, heads.contribution().weights)

    weights = dict(mha.named_parameters())

    def loss(weights, one):
        return torch.func.functional_call(mha, weights, (one,), {"over": neighbourhood})[0].square().sum()

    by_sample = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(weights, x)
    for row in range(3):
        one = torch.autograd.grad(loss(weights, x[row]), list(weights.values()))
        for name, gradient in zip(weights, one, strict=True):
            torch.testing.assert_close(by_sample[name][row], gradient, atol=1e-4, rtol=1e-4)


def test_copies_pickles_and_state_dicts():
    mha = MultiHeadAttention(30, 6, position=RelativeBias(6), sink="learned", qk_norm=True, kv_heads=2)
    x = torch.randn(2, 11, 30)
    wanted = mha(x)[0]
    other = MultiHeadAttention(30, 6, position=RelativeBias(6), sink="learned", qk_norm=True, kv_heads=2)
    other.load_state_dict(mha.state_dict())
    for same in (copy.deepcopy(mha), pickle.loads(pickle.dumps(mha)), other):
        assert torch.equal(same(x)[0], wanted)


def test_dropout_is_deterministic_for_a_seed_and_right_on_average():
    mha, x = layer(dropout=0.4), torch.randn(2, 11, 30)
    torch.manual_seed(3)
    first, heads = mha(x)
    torch.manual_seed(3)
    assert torch.equal(mha(x)[0], first)
    assert not torch.equal(mha(x)[0], first)
    # the weights are those before dropout
    torch.testing.assert_close(heads.weights, mha.eval()(x)[1].weights)
    mha.train()
    mean = torch.stack([mha(x)[0] for _ in range(800)]).mean(0)
    assert (mean - mha.eval()(x)[0]).abs().max() < 0.2
    assert (mean - mha.eval()(x)[0]).abs().mean() < 0.03


def test_query_key_normalisation_and_scale():
    mha = layer(qk_norm=True, score=Dot(2.0))
    x = torch.randn(2, 11, 30)
    _, heads = mha(x)
    q, k = (
        norm(proj(x).unflatten(-1, (6, 5)).transpose(1, 2))
        for norm, proj in ((mha.q_norm, mha.q_proj), (mha.k_norm, mha.k_proj))
    )
    torch.testing.assert_close(heads.weights, (2.0 * q @ k.transpose(-2, -1)).softmax(-1))
    torch.testing.assert_close(q.square().mean(-1), torch.ones(2, 6, 11), atol=1e-3, rtol=1e-3)


def test_a_learned_sink_learns():
    mha = layer(sink="learned")
    x = torch.randn(2, 11, 30)
    _, heads = mha(x)
    torch.testing.assert_close(heads.weights.sum(-1), heads.weights.sum(-1).clamp(max=0.999))
    mha(x)[0].square().sum().backward()
    assert mha.sink.grad.abs().min() > 0


def test_a_gate_multiplies_its_head():
    mha, x = layer(), torch.randn(2, 11, 30)
    wanted, heads = mha(x)
    mha.gate = torch.tensor([1.0, 0, 1, 1, 1, 1])
    gated, seen = mha(x)
    assert seen.outputs[:, 1].abs().max() == 0
    assert seen.contribution().weights[:, 1].abs().max() == 0
    torch.testing.assert_close(seen.weights, heads.weights)
    part = heads.outputs[:, 1] @ mha.o_proj.weight[:, 5:10].T
    torch.testing.assert_close(gated, wanted - part)
    mha.gate = nn.Parameter(torch.ones(6))
    mha(x)[0].sum().backward()
    assert mha.gate.grad is not None
    other = layer()
    other.load_state_dict(mha.state_dict())
    torch.testing.assert_close(other(x)[0], wanted)


def test_explain_says_which_kernel_and_why():
    mha, x = layer(), torch.randn(3, 11, 30)
    assert mha.explain(x).kernel == "fused"
    said = mha.explain(x, over=Window(3))
    assert said.kernel == "short"
    assert "Window(left=3, right=3)" in said.refused["fused"]
    assert str(said).startswith("short\n  not fused: ")


def translated(**words):
    x = torch.randn(2, 11, 30)
    return lambda: layer()(x, x, x, **words)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MultiHeadAttention(30, 7), r"num_heads: 7 does not divide d_model 30; pass head_dim=4 \(any head_dim will do\)"),
        (lambda: MultiHeadAttention(30, 0), r"num_heads must be an integer in \[1, 1048576\], got 0"),
        (lambda: MultiHeadAttention(30, 6, head_dim=2.5), r"head_dim must be an integer in \[1, 2147483647\], got 2\.5"),
        (lambda: MultiHeadAttention(30, 6, kv_heads=4), r"kv_heads: 4 does not divide num_heads 6"),
        (lambda: MultiHeadAttention(30, 6, combine="sum"), r"combine: it is 'sum'; it must be 'project', 'concat' or 'mean'"),
        (lambda: MultiHeadAttention(30, 6, combine="mean", d_out=4), r"d_out: it is 4, but combine='mean' maps nothing"),
        (lambda: MultiHeadAttention(30, 6, dropout=1.0), r"dropout must be a number in \[0, 1\), got 1\.0"),
        (lambda: MultiHeadAttention(30, 6, score="gaat"), r"score: it is 'gaat'"),
        (lambda: MultiHeadAttention(30, 6, sink="fixed"), r"sink must be a number in \[-inf, inf\], got 'fixed'; 'learned' makes it a parameter"),
        (lambda: MultiHeadAttention(30, 6, position=Rotary()), r"Rotary: head_dim is 5; it must be even"),
        (lambda: MultiHeadAttention(30, 6, position=Rotary(8)), r"Rotary: dim is 8, more than head_dim 5"),
        (lambda: MultiHeadAttention(30, 6, position=ALiBi(4)), r"ALiBi: num_heads is 4, but there are 6 heads"),
        (lambda: Rotary(3), "Rotary: dim must be even, got 3"),
        (lambda: RelativeBias(6, buckets=6), "RelativeBias: buckets must be a multiple of 4, got 6"),
        (lambda: RelativeBias(6, max_distance=9), r"RelativeBias: max_distance must be an integer in \[33, 2147483647\], got 9; it must be more than buckets"),
        (lambda: layer()(torch.randn(2, 11, 29)), r"query: its shape is \(2, 11, 29\); it must be \(..., items, 30\)"),
        (lambda: layer()(torch.randn(30)), r"query: its shape is \(30,\)"),
        (lambda: layer()(torch.randn(2, 11, 30), torch.randn(3, 11, 30)), r"key: its batch is \(3,\), but the query's is \(2,\)"),
        (lambda: layer()(torch.randn(2, 11, 30), torch.randn(2, 7, 30), torch.randn(2, 5, 30)), r"value: it has 5 items, but key has 7"),
        (lambda: layer()(torch.randn(2, 11, 30), bias=torch.ones(11, 11).bool()), r"bias: it is torch.bool.*A bool mask goes to over="),
        (lambda: layer()(torch.randn(2, 11, 30), bias=torch.ones(11, 7)), r"bias: its shape is \(1, 11, 7\)"),
        (translated(key_padding_mask=1), r"key_padding_mask= becomes over=Padding\(~key_padding_mask\)"),
        (translated(attn_mask=1, need_weights=False), r"(?s)attn_mask= becomes over=~attn_mask.*need_weights= becomes nothing"),
        (translated(attention_mask=1), r"attention_mask= becomes over=Padding\(attention_mask.bool\(\)\)"),
        (translated(attn_mask=1, is_causal=True), r"(?s)several neighbourhoods are joined with &"),
        (lambda: layer(batch_first=True), r"batch_first= becomes nothing"),
        (lambda: layer(kdim=3, add_zero_attn=True), r"(?s)kdim= becomes d_key.*add_zero_attn= becomes sink=0.0"),
        (translated(is_causal=True), r"is_causal= becomes over=Causal\(\).*"),
        (translated(average_attn_weights=True), r"becomes heads.weights.mean\(-3\)"),
    ],
)  # fmt: skip
def test_messages(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_an_unknown_argument_is_a_type_error():
    with pytest.raises(TypeError, match="takes no argument 'mask'"):
        layer()(torch.randn(2, 11, 30), mask=None)
    with pytest.raises(TypeError, match="takes no argument 'heads'"):
        layer(heads=3)


def test_attend_messages():
    q = torch.randn(2, 6, 11, 5)
    for k, v, options, message in [
        (q[:1], q[:1], {}, "the batch axes before .* must be the same"),
        (q[..., :4], q, {}, "k: it has 4 features, but q has 5"),
        (q, q[:, :, :3], {}, "v: it has 3 items, but k has 11"),
        (q[:, :4], q[:, :4], {}, "4 and 4 heads cannot be shared by the 6 heads of q"),
        (q.double(), q, {}, "q, k and v must be of one dtype"),
        (q, q, {"dropout": 1.5}, r"dropout must be a number in \[0, 1\), got 1\.5"),
        (
            q,
            q,
            {"sink": torch.zeros(4)},
            r"sink must be floating-point numbers, one per head, of shape \(6,\), got Tensor of torch\.float32 and shape \(4,\)",
        ),
        (q, q, {"kernel": "fast"}, "kernel: 'fast' is none of"),
        (q, q, {"kernel": "fused", "over": Window(2)}, "kernel: 'fused' refuses this call: it skips no blocks"),
    ]:
        with pytest.raises(ValueError, match=message):
            polyhead.attend(q, k, v, **options)


def test_a_gate_of_the_wrong_shape():
    mha = layer()
    for gate in (torch.ones(6, 1), torch.ones(()), torch.ones(5)):
        mha.gate = gate
        with pytest.raises(ValueError, match=r"gate: its shape is .*; it must be one number a head, \(6,\)"):
            mha(torch.randn(2, 11, 30))


def test_padding_of_another_batch():
    x = torch.randn(2, 11, 30)
    with pytest.raises(ValueError, match=r"Padding: its rows have shape \(3,\), but the batch has \(2,\)"):
        layer()(x, over=Padding([1, 2, 3]))
    with pytest.raises(
        ValueError, match=r"Padding: its shape is \(2, 11\), which reads as \(batch, keys\).*keep.bool\(\)"
    ):
        layer()(x, over=Padding(torch.ones(2, 11).long()))
    with pytest.raises(ValueError, match=r"position must be a Position such as Rotary\(\), got 'rotary'"):
        layer(position="rotary")
    with pytest.raises(ValueError, match=r"dropout must be a number in \[0, 1\), got None"):
        layer(dropout=None)
