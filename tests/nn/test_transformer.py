"""Blocks against torch's, the encoder-decoder step by step against all at once, and what is said of bad input."""

from __future__ import annotations

import copy
import warnings

import numpy as np
import pytest
import torch
from torch import nn

from polyhead import Causal, MultiHeadAttention, Padding, Rotary, capture
from polyhead.interop.torch_transformer_layers import layer_from_torch
from polyhead.nn import FeedForward, KeyValues, Transformer, TransformerLayer
from polyhead.nn.generate import Sampler

VOCAB, START, STOP = 23, 1, 2


def layer(*, cross: bool, norm_first: bool) -> TransformerLayer:
    attentions = [MultiHeadAttention(12, 3) for _ in range(1 + cross)]
    return TransformerLayer(
        attentions[0], FeedForward(12, 31), cross=attentions[1] if cross else None, norm_first=norm_first
    )  # fmt: skip


@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("norm_first", [True, False])
def test_an_encoders_layer_is_torchs(norm_first: bool, activation: str) -> None:
    torch.manual_seed(0)
    theirs = nn.TransformerEncoderLayer(
        12, 3, 31, dropout=0.0, activation=activation, batch_first=True, norm_first=norm_first
    )
    ours = layer_from_torch(theirs)
    x, lengths = torch.randn(5, 7, 12), torch.tensor([7, 1, 4, 6, 3])
    real = torch.arange(7) < lengths[:, None]
    torch.testing.assert_close(ours(x), theirs(x))
    wanted = theirs(x, src_key_padding_mask=~real)[real]
    found = ours(x, over=Padding(lengths))[real]
    torch.testing.assert_close(found, wanted)
    weights = torch.randn_like(found)
    (own,) = torch.autograd.grad((found * weights).sum(), ours.feedforward.up.weight)
    (other,) = torch.autograd.grad((wanted * weights).sum(), theirs.linear1.weight)
    torch.testing.assert_close(own, other)


@pytest.mark.parametrize("norm_first", [True, False])
def test_a_decoders_layer_is_torchs_in_value_and_gradient(norm_first: bool) -> None:
    torch.manual_seed(0)
    theirs = nn.TransformerDecoderLayer(12, 3, 31, dropout=0.0, batch_first=True, norm_first=norm_first)
    ours = layer_from_torch(theirs)
    x, memory = torch.randn(5, 7, 12, requires_grad=True), torch.randn(5, 11, 12, requires_grad=True)
    lengths = torch.tensor([11, 2, 5, 9, 1])
    ahead = torch.ones(7, 7, dtype=torch.bool).triu(1)
    padded = torch.arange(11) >= lengths[:, None]
    wanted = theirs(x, memory, tgt_mask=ahead, memory_key_padding_mask=padded)
    found = ours(x, memory, Causal(), memory_over=Padding(lengths))
    torch.testing.assert_close(found, wanted)
    weights = torch.randn_like(found)
    for own, other in zip(
        torch.autograd.grad((found * weights).sum(), (x, memory)),
        torch.autograd.grad((wanted * weights).sum(), (x, memory)),
        strict=True,
    ):
        torch.testing.assert_close(own, other)


def test_what_is_none_of_torchs_layers() -> None:
    for wrong, message in (
        (nn.Linear(2, 2), "layer: it is Linear; it must be a torch.nn.TransformerEncoderLayer"),
        (nn.TransformerEncoderLayer(12, 3, activation=torch.tanh, batch_first=True), "layer: its activation is .*tanh"),
        (nn.TransformerEncoderLayer(12, 3), "module: its batch_first is False"),
    ):
        with pytest.raises(ValueError, match=message):
            layer_from_torch(wrong)
    theirs = nn.TransformerEncoderLayer(12, 3, 31, 0.0, nn.GELU(), batch_first=True, bias=False, layer_norm_eps=0.1)
    x = torch.randn(2, 5, 12)
    torch.testing.assert_close(layer_from_torch(theirs)(x), theirs(x))


@pytest.mark.parametrize("norm_first", [True, False])
def test_leaving_padded_rows_out_changes_no_real_row(norm_first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    ours, lengths = layer(cross=False, norm_first=norm_first).double(), torch.tensor([13, 2, 0, 5])
    real = torch.arange(13) < lengths[:, None]
    x = torch.randn(4, 13, 12, dtype=torch.float64, requires_grad=True)

    def run() -> tuple[torch.Tensor, list[torch.Tensor]]:
        out = ours(x, over=Padding(lengths))[real]
        return out, list(torch.autograd.grad(out.pow(3).sum(), [x, *ours.parameters()]))

    wanted, gradients = run()
    mapped = []
    ours.feedforward.register_forward_pre_hook(lambda _, given: mapped.append(given[0].shape))
    monkeypatch.setattr("polyhead.nn.projection_inputs._SMALL", 0)
    monkeypatch.setattr("polyhead.nn.projection_inputs._COPIES", 0)
    found, own = run()
    assert mapped == [(13 + 2 + 0 + 5 + 1, 12)]
    torch.testing.assert_close(found, wanted)
    for one, other in zip(own, gradients, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(
    "options", [{}, {"position": Rotary()}, {"qk_norm": True}, {"score": "gatv2"}, {"score": "gat"}]
)
def test_a_memory_stands_for_what_it_was_made_of(options: dict) -> None:
    torch.manual_seed(0)
    mha = MultiHeadAttention(12, 3, **options)
    x, y = torch.randn(2, 5, 12), torch.randn(2, 7, 12)
    found, heads = mha(x, mha.project_kv(y), over=Padding([7, 3]))
    wanted, same = mha(x, y, over=Padding([7, 3]))
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(heads.weights, same.weights)


def test_a_memory_of_another_layer_or_batch_is_refused() -> None:
    mha = MultiHeadAttention(12, 3)
    memory = mha.project_kv(torch.randn(2, 7, 12))
    with pytest.raises(ValueError, match=r"key: this memory has keys \(2, 3, 7, 4\).* of the query's batch \(3,\)"):
        mha(torch.randn(3, 5, 12), memory)
    with pytest.raises(ValueError, match="key: this memory"):
        MultiHeadAttention(12, 4)(torch.randn(2, 5, 12), memory)
    k, v = memory
    for wrong in (
        KeyValues(k[:, :, :1], v),
        KeyValues(k, v[:, :, :5]),
        KeyValues(k.half(), v.half()),
        KeyValues(k, v.double()),
    ):
        with pytest.raises(ValueError, match="key: this memory"):
            mha(torch.randn(2, 5, 12), wrong, over=Padding([1, 1]))
    with pytest.raises(ValueError, match="value: the key is a memory"):
        mha(torch.randn(2, 5, 12), memory, torch.randn(2, 7, 12))
    with pytest.raises(ValueError, match=r"key, value: their shapes are \(2, 7, 11\)"):
        mha.project_kv(torch.randn(2, 7, 11))
    with pytest.raises(ValueError, match="cache: it is for a sequence that attends to itself"):
        mha(torch.randn(2, 5, 12), memory, cache=mha.cache(2, 9))


def transformer(**options: object) -> Transformer:
    torch.manual_seed(0)
    return Transformer(VOCAB, d_model=12, num_heads=3, layers=(2, 3), d_feedforward=31, **options).eval()


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
@pytest.mark.parametrize("norm_first", [True, False])
def test_the_encoder_decoder_is_torchs(norm_first: bool) -> None:
    torch.manual_seed(0)
    ours = transformer(norm_first=norm_first, activation="gelu")
    theirs = nn.Transformer(12, 3, 2, 3, 31, 0.0, "gelu", batch_first=True, norm_first=norm_first).eval()
    ours.encoder = nn.ModuleList(map(layer_from_torch, theirs.encoder.layers))
    ours.decoder = nn.ModuleList(map(layer_from_torch, theirs.decoder.layers))
    if not norm_first:
        # torch normalises once more at both ends, whatever norm_first says
        theirs.encoder.norm = theirs.decoder.norm = None
    source, target = torch.randint(VOCAB, (4, 7)), torch.randint(VOCAB, (4, 5))
    embedded = [ours._embedded(ours.embedding, ids, 0) for ids in (source, target)]
    mask = nn.Transformer.generate_square_subsequent_mask(5)
    with torch.no_grad():
        hidden = ours.decode(target, ours.encode(source))
        torch.testing.assert_close(hidden, theirs(*embedded, tgt_mask=mask, tgt_is_causal=True))
        torch.testing.assert_close(ours(source, target), hidden @ ours.embedding.weight.T)


def test_the_positions_are_those_of_the_paper() -> None:
    from polyhead.nn.transformer import sinusoids

    found = sinusoids(3, 9, 6, torch.empty(0, dtype=torch.float64))
    for row, position in enumerate(range(3, 9)):
        for i in range(3):
            angle = torch.tensor(position / 10_000 ** (2 * i / 6), dtype=torch.float64)
            torch.testing.assert_close(found[row, 2 * i], angle.sin())
            torch.testing.assert_close(found[row, 2 * i + 1], angle.cos())


@torch.no_grad()
def test_writing_step_by_step_is_reading_all_at_once() -> None:
    model = transformer()
    source, lengths = torch.randint(3, VOCAB, (5, 7)), torch.tensor([7, 1, 4, 6, 3])
    written = model.generate(source, start=START, max_new_tokens=11, source_over=Padding(lengths))
    assert written.shape == (5, 11)
    target = torch.cat((torch.full((5, 1), START), written[:, :-1]), 1)
    logits = model(source, target, source_over=Padding(lengths))
    assert torch.equal(logits.argmax(-1), written)
    # a source alone is written as it is in company
    alone = model.generate(source[2:3, :4], start=START, max_new_tokens=11)
    assert torch.equal(alone[0], written[2])


def test_what_is_remembered_is_projected_once() -> None:
    model, calls = transformer(), []
    for each in model.decoder:
        each.cross_attn.k_proj.register_forward_hook(lambda *_: calls.append(1))
    model.generate(torch.randint(VOCAB, (2, 7)), start=START, max_new_tokens=9)
    assert len(calls) == 3


def test_a_row_that_has_ended_stays_ended() -> None:
    model = transformer()
    source = torch.randint(3, VOCAB, (6, 7))
    free = model.generate(source, start=START, max_new_tokens=9)
    stop = int(free[0, 3])
    ended = model.generate(source, start=START, stop=stop, max_new_tokens=9)
    for row, plain in zip(ended, free, strict=True):
        first = (plain == stop).nonzero()
        if len(first):
            assert torch.equal(row[: int(first[0]) + 1], plain[: int(first[0]) + 1])
            assert (row[int(first[0]) :] == stop).all()
        else:
            assert torch.equal(row, plain)
    only = model.generate(source[:1], start=START, stop=[stop, VOCAB - 1], max_new_tokens=9)
    assert only[0, -1] in (stop, VOCAB - 1) and only.shape[1] <= 4


def test_drawing() -> None:
    model, source = transformer(), torch.randint(3, VOCAB, (1, 7)).expand(400, 7)
    likeliest = model.generate(source[:1], start=START, max_new_tokens=1)

    def drawn(**options: object) -> torch.Tensor:
        generator = torch.Generator().manual_seed(0)
        return model.generate(source, start=START, max_new_tokens=1, generator=generator, **options)[:, 0]

    assert torch.equal(drawn(temperature=1.0), drawn(temperature=1.0))
    assert (drawn(temperature=1.0, top_k=1) == likeliest).all()
    assert (drawn(temperature=1.0, top_p=1e-6) == likeliest).all()
    assert (drawn(temperature=1.0, top_p=1e-300) == likeliest).all()
    assert (drawn(temperature=1e-46) == likeliest).all()
    assert len(drawn(temperature=5.0, top_k=3).unique()) == 3
    logits = model(source[:1], torch.tensor([[START]]))[0, 0] / 2.0
    order = logits.softmax(-1).sort(descending=True)
    allowed = order.indices[: int((order.values.cumsum(0) < 0.6).sum()) + 1]
    assert set(drawn(temperature=2.0, top_p=0.6).tolist()) == set(allowed.tolist())
    share = (drawn(temperature=2.0) == likeliest[0, 0]).double().mean()
    torch.testing.assert_close(share, order.values[0].double(), atol=0.06, rtol=0)


def test_heads_are_named_by_layer_and_kind() -> None:
    model = transformer()
    with capture(model) as seen:
        model(torch.randint(VOCAB, (2, 7)), torch.randint(VOCAB, (2, 5)))
    assert list(seen) == [
        "encoder.0.self_attn", "encoder.1.self_attn",
        "decoder.0.self_attn", "decoder.0.cross_attn", "decoder.1.self_attn", "decoder.1.cross_attn", "decoder.2.self_attn", "decoder.2.cross_attn",
    ]  # fmt: skip
    assert seen["decoder.2.cross_attn"].shape == (2, 3, 5, 7)
    assert (seen["decoder.1.self_attn"].weights.triu(1) == 0).all()


def test_two_vocabularies() -> None:
    model = transformer(source_vocab=41)
    assert model.source_embedding.weight.shape == (41, 12)
    model(torch.full((1, 3), 40), torch.full((1, 2), VOCAB - 1))
    with pytest.raises(ValueError, match="source: they lie between 41 and 41; they must be the vocabulary's, 0 to 40"):
        model(torch.full((1, 3), 41), torch.full((1, 2), 1))
    with pytest.raises(ValueError, match="target: they lie between 23 and 23"):
        model(torch.full((1, 3), 40), torch.full((1, 2), VOCAB))


def test_weights_on_the_meta_device_cost_nothing() -> None:
    with torch.device("meta"):
        model = Transformer(37_000)
    # Vaswani 2017, base: 65 million
    assert sum(p.numel() for p in model.parameters()) == 63_084_544


def test_copies_are_independent_and_compile() -> None:
    model = transformer()
    source, target = torch.randint(VOCAB, (2, 7)), torch.randint(VOCAB, (2, 5))
    wanted = model(source, target)
    twin = copy.deepcopy(model)
    nn.init.zeros_(twin.embedding.weight)
    torch.testing.assert_close(model(source, target), wanted)
    found = torch.compile(model, fullgraph=True, backend="eager")(source, target)
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"source": torch.empty(2, 0, dtype=torch.long)}, r"source: its shape is \(2, 0\)"),
        ({"source": torch.empty(0, 3, dtype=torch.long)}, r"source: its shape is \(0, 3\)"),
        ({"source": torch.ones(3, dtype=torch.long)}, r"source: its shape is \(3,\)"),
        ({"source": torch.ones(2, 3)}, r"source: they are torch.float32; they must be torch.int64"),
        ({"start": VOCAB}, r"start must be an integer in \[0, 22\], got 23"),
        ({"start": 1.5}, r"start must be an integer in \[0, 22\], got 1\.5"),
        ({"stop": -1}, r"stop must be an integer in \[0, 22\], got -1"),
        ({"stop": [1, 2.5]}, r"stop\[1\] must be an integer in \[0, 22\], got 2\.5"),
        ({"stop": True}, r"stop must be a list of integers in \[0, 22\], got True"),
        ({"max_new_tokens": 0}, r"max_new_tokens must be an integer in \[1, 2147483647\], got 0"),
        ({"max_new_tokens": True}, r"max_new_tokens must be an integer in \[1, 2147483647\], got True"),
        ({"temperature": -1.0}, r"temperature must be a number in \[0, inf\), got -1\.0; 0 takes the likeliest"),
        ({"temperature": float("nan")}, r"temperature must be a number in \[0, inf\), got nan; 0 takes the likeliest"),
        ({"top_k": 3}, "top_k, top_p: they say what to draw from; pass a temperature"),
        ({"top_k": 0, "temperature": 1.0}, r"top_k must be an integer in \[1, 2147483647\], got 0"),
        ({"top_k": True, "temperature": 1.0}, r"top_k must be an integer in \[1, 2147483647\], got True"),
        ({"top_p": 1.5, "temperature": 1.0}, r"top_p must be a number in \(0, 1\], got 1\.5"),
    ],
)
def test_bad_requests(arguments: dict, message: str) -> None:
    request = {"source": torch.ones(2, 3, dtype=torch.long), "start": START, "max_new_tokens": 4} | arguments
    with pytest.raises(ValueError, match=message):
        transformer().generate(**request)


def test_bad_layers() -> None:
    with pytest.raises(ValueError, match="memory: this layer has cross-attention; pass what it attends to"):
        layer(cross=True, norm_first=True)(torch.randn(1, 3, 12))
    with pytest.raises(ValueError, match="memory: this layer has no cross-attention"):
        layer(cross=False, norm_first=True)(torch.randn(1, 3, 12), torch.randn(1, 3, 12))
    with pytest.raises(ValueError, match="activation: it is 'tanh'; it must be one of relu, gelu"):
        FeedForward(12, 31, activation="tanh")
    with pytest.raises(ValueError, match="cross: its d_model is 9; it must be that of the attention, 12"):
        TransformerLayer(MultiHeadAttention(12, 3), FeedForward(12, 31), cross=MultiHeadAttention(9, 3))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"layers": (2, 0)}, r"layers\[1\] must be an integer in \[1, 65536\], got 0"),
        (
            {"layers": (2,)},
            r"layers must be an integer in \[1, 65536\], got \(2,\); a pair is for the encoder and the decoder",
        ),
        (
            {"layers": True},
            r"layers must be an integer in \[1, 65536\], got True; a pair is for the encoder and the decoder",
        ),
        (
            {"layers": 2.0},
            r"layers must be an integer in \[1, 65536\], got 2\.0; a pair is for the encoder and the decoder",
        ),
        ({"vocab": 2.5}, r"vocab must be an integer in \[1, 2147483647\], got 2\.5"),
        ({"source_vocab": 0}, r"source_vocab must be an integer in \[1, 2147483647\], got 0"),
        ({"d_feedforward": 0}, r"d_feedforward must be an integer in \[1, 2147483647\], got 0"),
        ({"attention_dropout": 2}, r"attention_dropout must be a number in \[0, 1\), got 2"),
        ({"dropout": 1.0}, r"^dropout must be a number in \[0, 1\), got 1\.0"),
    ],
)
def test_bad_sizes(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Transformer(**{"vocab": VOCAB, "d_model": 12, "num_heads": 3, "layers": 2} | arguments)


def test_parts_that_do_not_fit() -> None:
    mha, up = MultiHeadAttention(12, 3), FeedForward(12, 31)
    for arguments, options, message in (
        (
            (nn.MultiheadAttention(12, 3), up),
            {},
            "attention: it is MultiheadAttention; it must be a MultiHeadAttention",
        ),
        ((MultiHeadAttention(12, 3, residual=True), up), {}, "attention: it adds its query by itself"),
        ((MultiHeadAttention(12, 3, combine="mean"), up), {}, "attention: its output has 4 features"),
        ((MultiHeadAttention(12, 3, d_out=5), up), {}, "attention: its output has 5 features"),
        ((mha, FeedForward(9, 31)), {}, "feedforward: its d_model is 9; it must be that of the attention, 12"),
        (
            (mha, up),
            {"norm": nn.LayerNorm(12)},
            r"norm must make a module for a number of features, such as nn\.LayerNorm, got LayerNorm",
        ),
        ((mha, up), {"cross": MultiHeadAttention(12, 3, position=Rotary())}, "cross: it has the position"),
    ):
        with pytest.raises(ValueError, match=message):
            TransformerLayer(*arguments, **options)
    TransformerLayer(MultiHeadAttention(12, 3, combine="concat"), up)
    with pytest.raises(ValueError, match=r"memory: it is Causal.*goes to over="):
        TransformerLayer(mha, up)(torch.randn(1, 3, 12), Causal())


def test_the_encoder_decoder_takes_padding_alone() -> None:
    model, ids = transformer(), torch.ones(2, 5, dtype=torch.long)
    with pytest.raises(ValueError, match=r"source_over: it is Causal.*it must be Padding"):
        model(ids, ids, source_over=Causal())
    with pytest.raises(ValueError, match="target_over: it is tensor"):
        model(ids, ids, target_over=torch.ones(5, 5).bool())
    with pytest.raises(ValueError, match="generate: the model is in training mode"):
        model.train().generate(ids, start=START, max_new_tokens=3)


def test_caches_on_the_meta_device() -> None:
    with torch.device("meta"):
        cache = MultiHeadAttention(12, 3).cache(2, 1000)
    assert cache.capacity == 1000 and cache._k.is_meta


def test_numbers_of_numpy_will_do() -> None:
    model = Transformer(np.int64(VOCAB), d_model=12, num_heads=3, layers=np.int64(1)).eval()
    source = torch.ones(1, 3, dtype=torch.int32)
    written = model.generate(source, start=np.int64(START), stop=np.int64(STOP), max_new_tokens=np.int64(4))
    assert written.shape[1] <= 4


def test_a_failed_step_leaves_the_caches_as_they_were() -> None:
    model = transformer()
    source, target = torch.randint(VOCAB, (2, 7)), torch.randint(VOCAB, (2, 5))
    with torch.no_grad():
        kept, caches = model.begin(model.encode(source), 6)
        with pytest.raises(ValueError, match="a length is 9"):
            model.decode(target, kept, memory_over=Padding([9, 9]), caches=caches)
        assert [cache.length for cache in caches] == [0, 0, 0]
        hidden = model.decode(target, kept, caches=caches)
        torch.testing.assert_close(hidden, model.decode(target, model.encode(source)))
        with pytest.raises(ValueError, match="caches: there are 2; there must be one for each of 3 layers"):
            model.decode(target, kept, caches=caches[:2])


def test_writing_under_autocast() -> None:
    model = transformer()
    with torch.autocast("cpu", torch.bfloat16):
        written = model.generate(torch.randint(VOCAB, (2, 7)), start=START, max_new_tokens=5)
    assert written.shape == (2, 5)


def test_a_tiny_temperature_takes_the_likeliest() -> None:
    model, source = transformer(), torch.randint(VOCAB, (4, 7))
    greedy = model.generate(source, start=START, max_new_tokens=5)
    for options in ({"temperature": 1e-38}, {"temperature": 1.0, "top_k": 1}):
        assert torch.equal(model.generate(source, start=START, max_new_tokens=5, **options), greedy)


def test_top_k_of_equals_is_k() -> None:
    drawn = Sampler(1.0, top_k=2).sample(torch.tensor([[1.0, 1.0, 1.0, 0.0]]).expand(300, 4))
    assert len(drawn.unique()) == 2


class Along(nn.Module):
    """A feed-forward part that needs all three axes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(256, 256, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x.transpose(1, 2)).transpose(1, 2)


def test_a_feedforward_of_ones_own_sees_whole_batches() -> None:
    one = TransformerLayer(MultiHeadAttention(256, 2), Along())
    x = torch.randn(8, 128, 256)
    assert one(x, over=Padding(torch.arange(1, 9))).shape == x.shape


def test_quantised_maps() -> None:
    model = transformer()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        small = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, torch.qint8)
    source, target = torch.randint(VOCAB, (2, 7)), torch.randint(VOCAB, (2, 5))
    assert (small(source, target) - model(source, target)).abs().max() < 0.5
    assert small.generate(source, start=START, max_new_tokens=4).shape == (2, 4)
