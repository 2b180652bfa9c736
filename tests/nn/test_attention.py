"""The layer: inputs, outputs, options, and error messages."""

import pytest
import torch
from attention_cases import NEIGHBOURHOODS, POSITIONS, layer
from torch import nn

import polyhead
from polyhead import ALiBi, Causal, Dot, MultiHeadAttention, Padding, RelativeBias, Rotary, Window


def test_self_attention_shapes_and_weights():
    mha = MultiHeadAttention(d_model=512, num_heads=8)
    x = torch.randn(2, 10, 512)
    output, weights = mha(x, x, x)
    assert output.shape == (2, 10, 512)
    assert weights.shape == (2, 8, 10, 10)
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 8, 10))


@pytest.mark.parametrize("combine", ["project", "concat", "mean"])
@pytest.mark.parametrize("kv_heads", [6, 3, 1])
@pytest.mark.parametrize("over", NEIGHBOURHOODS)
def test_output_equals_weights_times_values(combine, kv_heads, over):
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


def test_self_attention_cross_attention_and_separate_sizes():
    mha = MultiHeadAttention(30, 6, d_key=17, d_value=19, d_out=23, head_dim=5, value_dim=7)
    output, heads = mha(torch.randn(2, 11, 30), torch.randn(2, 13, 17), torch.randn(2, 13, 19))
    assert output.shape == (2, 11, 23)
    assert heads.shape == (2, 6, 11, 13)
    plain = layer()
    x, memory = torch.randn(2, 11, 30), torch.randn(2, 13, 30)
    assert torch.equal(plain(x)[0], plain(x, x, x)[0])
    assert torch.equal(plain(x, memory)[0], plain(x, memory, memory)[0])


@pytest.mark.parametrize("lead", [(), (2,), (2, 3), (2, 1, 3)])
def test_leading_batch_axes(lead):
    mha, x = layer(position=Rotary(4)), torch.randn(*lead, 11, 30)
    output, heads = mha(x, over=Causal() & Window(4))
    assert output.shape == x.shape
    assert heads.shape == (*lead, 6, 11, 11)
    flat, _ = mha(x.reshape(-1, 11, 30), over=Causal() & Window(4))
    torch.testing.assert_close(output.reshape(-1, 11, 30), flat)


def test_padded_queries_get_zero_in_self_attention_only():
    mha, x = layer(), torch.randn(3, 11, 30)
    lengths = torch.tensor([3, 11, 0])
    output, heads = mha(x, over=Padding(lengths))
    padded = torch.arange(11) >= lengths[:, None]
    assert heads.outputs.transpose(1, 2)[padded].abs().max() == 0
    torch.testing.assert_close(output[padded], mha.o_proj.bias.expand(int(padded.sum()), 30))
    _, across = mha(torch.randn(3, 5, 30), x, over=Padding(lengths))
    assert across.outputs[:2].abs().min() > 0


@pytest.mark.parametrize("training", [True, False])
def test_unpadding_keeps_outputs_and_gradients(training, monkeypatch):
    monkeypatch.setattr("polyhead.nn.skip_padded_rows._MIN_UNPADDING_NUMEL", 0)
    monkeypatch.setattr("polyhead.nn.skip_padded_rows._MIN_UNPADDING_SAVING", 0)
    mha = layer(kv_heads=3, dropout=0.0).train(training)
    x = torch.randn(3, 11, 30, requires_grad=True)
    keep = torch.arange(11) < torch.tensor([3, 9, 0])[:, None]
    learned = [x, *mha.parameters()]
    towards = torch.randn(3, 11, 30)
    short, _ = mha(x, over=Padding(keep))
    # a mask does not mark padding, so every row is projected
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


def test_dropout_is_seeded_and_unbiased():
    mha, x = layer(dropout=0.4), torch.randn(2, 11, 30)
    torch.manual_seed(3)
    first, heads = mha(x)
    torch.manual_seed(3)
    assert torch.equal(mha(x)[0], first)
    assert not torch.equal(mha(x)[0], first)
    # weights are reported without dropout
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


def test_learned_sink_gets_gradients():
    mha = layer(sink="learned")
    x = torch.randn(2, 11, 30)
    _, heads = mha(x)
    torch.testing.assert_close(heads.weights.sum(-1), heads.weights.sum(-1).clamp(max=0.999))
    mha(x)[0].square().sum().backward()
    assert mha.sink.grad.abs().min() > 0


def test_gate_multiplies_the_output_of_its_head():
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


def test_explain_names_the_kernel_and_the_reasons():
    mha, x = layer(), torch.randn(3, 11, 30)
    assert mha.explain(x).kernel == "fused"
    said = mha.explain(x, over=Window(3))
    assert said.kernel == "short"
    assert said.refused["fused"] == "it supports only full or causal attention"
    assert str(said).startswith("short\n  not fused: ")


def called_with(**foreign):
    x = torch.randn(2, 11, 30)
    return lambda: layer()(x, x, x, **foreign)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MultiHeadAttention(30, 7), r"num_heads must divide d_model = 30 where head_dim is not given, got 7; pass head_dim=4"),
        (lambda: MultiHeadAttention(30, 0), r"num_heads must be an integer in \[1, 1048576\], got 0"),
        (lambda: MultiHeadAttention(30, 6, head_dim=2.5), r"head_dim must be an integer in \[1, 2147483647\], got 2\.5"),
        (lambda: MultiHeadAttention(30, 6, kv_heads=4), r"kv_heads must divide num_heads = 6, got 4"),
        (lambda: MultiHeadAttention(30, 6, combine="sum"), r"combine must be 'project', 'concat' or 'mean', got 'sum'"),
        (lambda: MultiHeadAttention(30, 6, combine="mean", d_out=4), r"d_out must be left out with combine='mean'.*, got 4"),
        (lambda: MultiHeadAttention(30, 6, dropout=1.0), r"dropout must be a number in \[0, 1\), got 1\.0"),
        (lambda: MultiHeadAttention(30, 6, score="gaat"), r"score must be 'dot', 'gat', 'gatv2' or a Score, got 'gaat'"),
        (lambda: MultiHeadAttention(30, 6, sink="fixed"), r"sink must be a number in \[-inf, inf\], got 'fixed'; 'learned' makes it a parameter"),
        (lambda: MultiHeadAttention(30, 6, position=Rotary()), r"Rotary: head_dim must be even, got 5"),
        (lambda: MultiHeadAttention(30, 6, position=Rotary(8)), r"Rotary: dim must be at most head_dim, 5, got 8"),
        (lambda: MultiHeadAttention(30, 6, position=ALiBi(4)), r"ALiBi: num_heads must equal the layer's 6 heads, got 4"),
        (lambda: Rotary(3), "Rotary: dim must be even, got 3"),
        (lambda: RelativeBias(6, buckets=6), "RelativeBias: buckets must be a multiple of 4, got 6"),
        (lambda: RelativeBias(6, max_distance=9), r"RelativeBias: max_distance must be an integer in \[33, 2147483647\], got 9; more than buckets"),
        (lambda: layer()(torch.randn(2, 11, 29)), r"query must have shape \(..., items, 30\), got \(2, 11, 29\)"),
        (lambda: layer()(torch.randn(30)), r"query must have shape \(..., items, 30\), got \(30,\)"),
        (lambda: layer()(torch.randn(2, 11, 30), torch.randn(3, 11, 30)), r"key must have the query's batch \(2,\), got \(3,\)"),
        (lambda: layer()(torch.randn(2, 11, 30), torch.randn(2, 7, 30), torch.randn(2, 5, 30)), r"value must have as many items as key, 7, got 5"),
        (lambda: layer()(torch.randn(2, 11, 30), bias=torch.ones(11, 11).bool()), r"bias must be floating-point .*, got torch.bool; a bool mask goes to over="),
        (lambda: layer()(torch.randn(2, 11, 30), bias=torch.ones(11, 7)), r"bias must broadcast to .*, got shape \(1, 11, 7\)"),
        (called_with(key_padding_mask=1), r"key_padding_mask= becomes over=Padding\(~key_padding_mask\)"),
        (called_with(attn_mask=1, need_weights=False), r"(?s)attn_mask= becomes over=~attn_mask.*need_weights= becomes nothing"),
        (called_with(attention_mask=1), r"attention_mask= becomes over=Padding\(attention_mask.bool\(\)\)"),
        (called_with(attn_mask=1, is_causal=True), r"(?s)several neighbourhoods are joined with &"),
        (lambda: layer(batch_first=True), r"batch_first= becomes nothing"),
        (lambda: layer(kdim=3, add_zero_attn=True), r"(?s)kdim= becomes d_key.*add_zero_attn= becomes sink=0.0"),
        (called_with(is_causal=True), r"is_causal= becomes over=Causal\(\).*"),
        (called_with(average_attn_weights=True), r"becomes heads.weights.mean\(-3\)"),
    ],
)  # fmt: skip
def test_error_messages(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_unknown_argument_raises_type_error():
    with pytest.raises(TypeError, match="takes no argument 'masq'"):
        layer()(torch.randn(2, 11, 30), masq=None)
    with pytest.raises(TypeError, match="takes no argument 'headz'"):
        layer(headz=3)


def test_attend_error_messages():
    q = torch.randn(2, 6, 11, 5)
    for k, v, options, message in [
        (q[:1], q[:1], {}, "q, k, v must have the same batch axes"),
        (q[..., :4], q, {}, "k must have as many features as q, 5, got 4"),
        (q, q[:, :, :3], {}, "v must have as many items as k, 11, got 3"),
        (q[:, :4], q[:, :4], {}, "number of heads that divides the 6 heads of q, got 4 and 4"),
        (q.double(), q, {}, "q, k and v must be of one dtype"),
        (q, q, {"dropout": 1.5}, r"dropout must be a number in \[0, 1\), got 1\.5"),
        (
            q,
            q,
            {"sink": torch.zeros(4)},
            r"sink must be floating-point numbers, one per head, of shape \(6,\), got Tensor of torch\.float32 and shape \(4,\)",
        ),
        (q, q, {"kernel": "fast"}, r"kernel must be one of \[.*\], got 'fast'"),
        (
            q,
            q,
            {"kernel": "fused", "over": Window(2)},
            "kernel 'fused' refuses this call: it supports only full or causal",
        ),
    ]:
        with pytest.raises(ValueError, match=message):
            polyhead.attend(q, k, v, **options)


def test_gate_of_wrong_shape_is_refused():
    mha = layer()
    for gate in (torch.ones(6, 1), torch.ones(()), torch.ones(5)):
        mha.gate = gate
        with pytest.raises(ValueError, match=r"gate must have one number per head, shape \(6,\), got "):
            mha(torch.randn(2, 11, 30))


def test_padding_of_another_batch_is_refused():
    x = torch.randn(2, 11, 30)
    with pytest.raises(ValueError, match=r"Padding: its leading axes must broadcast to the batch \(2,\), got \(3,\)"):
        layer()(x, over=Padding([1, 2, 3]))
    with pytest.raises(
        ValueError, match=r"Padding: lengths .* got shape \(2, 11\), which looks like \(batch, keys\).*keep.bool\(\)"
    ):
        layer()(x, over=Padding(torch.ones(2, 11).long()))
    with pytest.raises(ValueError, match=r"position must be a Position such as Rotary\(\), got 'rotary'"):
        layer(position="rotary")
    with pytest.raises(ValueError, match=r"dropout must be a number in \[0, 1\), got None"):
        layer(dropout=None)


@pytest.mark.parametrize("large", [False, True])
def test_padding_with_a_key_of_its_own(large: bool) -> None:
    # in large calls padded rows are left out of the projections, if query, key and value are the same
    torch.manual_seed(0)
    batch, items = (8, 512) if large else (2, 12)
    mha = MultiHeadAttention(64, 4).eval()
    x, y = torch.randn(2, batch, items, 64)
    over = Padding([items // 4] * batch, queries=True)
    with torch.no_grad():
        torch.testing.assert_close(mha(x, y, x, over=over)[0], mha(x, y, x.clone(), over=over)[0])
        torch.testing.assert_close(mha(x, x, y, over=over)[0], mha(x, x.clone(), y, over=over)[0])


def test_inputs_that_dropout_cannot_take_are_named() -> None:
    with pytest.raises(ValueError, match=r"query must be torch.float32 on cpu, .*, got torch.int64"):
        MultiHeadAttention(8, 2, input_dropout=0.5)(torch.ones(3, 8).long())
    with pytest.raises(ValueError, match=r"key must have shape \(..., items, 8\), got \(3, 7\)"):
        x = torch.randn(3, 8)
        MultiHeadAttention(8, 2)(x, torch.randn(3, 7), x)
