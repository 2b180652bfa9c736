"""The encoder-decoder against torch's, its parts, and its error messages."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn
from transformer_cases import START, VOCAB, transformer

from polyhead import Causal, capture
from polyhead.interop.torch_transformer_layers import layer_from_torch
from polyhead.nn import Transformer


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
@pytest.mark.parametrize("norm_first", [True, False])
def test_encoder_decoder_equals_torch(norm_first: bool) -> None:
    torch.manual_seed(0)
    ours = transformer(norm_first=norm_first, activation="gelu")
    theirs = nn.Transformer(12, 3, 2, 3, 31, 0.0, "gelu", batch_first=True, norm_first=norm_first).eval()
    ours.encoder = nn.ModuleList(map(layer_from_torch, theirs.encoder.layers))
    ours.decoder = nn.ModuleList(map(layer_from_torch, theirs.decoder.layers))
    if not norm_first:
        # torch adds final norms even without norm_first
        theirs.encoder.norm = theirs.decoder.norm = None
    source, target = torch.randint(VOCAB, (4, 7)), torch.randint(VOCAB, (4, 5))
    embedded = [ours._embed(ours.embedding, ids, 0) for ids in (source, target)]
    mask = nn.Transformer.generate_square_subsequent_mask(5)
    with torch.no_grad():
        hidden = ours.decode(target, ours.encode(source))
        torch.testing.assert_close(hidden, theirs(*embedded, tgt_mask=mask, tgt_is_causal=True))
        torch.testing.assert_close(ours(source, target), hidden @ ours.embedding.weight.T)


def test_sinusoids_follow_the_paper() -> None:
    from polyhead.nn.embedding_helpers import sinusoidal_positions

    found = sinusoidal_positions(3, 9, 6, torch.empty(0, dtype=torch.float64))
    for row, position in enumerate(range(3, 9)):
        for i in range(3):
            angle = torch.tensor(position / 10_000 ** (2 * i / 6), dtype=torch.float64)
            torch.testing.assert_close(found[row, 2 * i], angle.sin())
            torch.testing.assert_close(found[row, 2 * i + 1], angle.cos())


def test_captured_heads_are_named_by_layer_and_kind() -> None:
    model = transformer()
    with capture(model) as seen:
        model(torch.randint(VOCAB, (2, 7)), torch.randint(VOCAB, (2, 5)))
    assert list(seen) == [
        "encoder.0.self_attn", "encoder.1.self_attn",
        "decoder.0.self_attn", "decoder.0.cross_attn", "decoder.1.self_attn", "decoder.1.cross_attn", "decoder.2.self_attn", "decoder.2.cross_attn",
    ]  # fmt: skip
    assert seen["decoder.2.cross_attn"].shape == (2, 3, 5, 7)
    assert (seen["decoder.1.self_attn"].weights.triu(1) == 0).all()


def test_separate_source_vocabulary() -> None:
    model = transformer(source_vocab=41)
    assert model.source_embedding.weight.shape == (41, 12)
    model(torch.full((1, 3), 40), torch.full((1, 2), VOCAB - 1))
    with pytest.raises(ValueError, match=r"source must be in \[0, 40\] \(the vocabulary\), got values from 41 to 41"):
        model(torch.full((1, 3), 41), torch.full((1, 2), 1))
    with pytest.raises(ValueError, match=r"target must be in \[0, 22\] .* from 23 to 23"):
        model(torch.full((1, 3), 40), torch.full((1, 2), VOCAB))


def test_parameter_count_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = Transformer(37_000)
    # Vaswani 2017, base: 65 million
    assert sum(p.numel() for p in model.parameters()) == 63_084_544


def test_copies_are_independent_and_the_model_compiles() -> None:
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
def test_invalid_sizes_are_refused(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Transformer(**{"vocab": VOCAB, "d_model": 12, "num_heads": 3, "layers": 2} | arguments)


def test_only_padding_is_accepted_as_neighbourhood() -> None:
    model, ids = transformer(), torch.ones(2, 5, dtype=torch.long)
    with pytest.raises(ValueError, match=r"source_over must be Padding\(lengths\).*got Causal"):
        model(ids, ids, source_over=Causal())
    with pytest.raises(ValueError, match=r"target_over must be Padding\(lengths\).*got tensor"):
        model(ids, ids, target_over=torch.ones(5, 5).bool())
    with pytest.raises(ValueError, match="generate: the model is in training mode"):
        model.train().generate(ids, start=START, max_new_tokens=3)


def test_quantised_linear_maps() -> None:
    model = transformer()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        small = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, torch.qint8)
    source, target = torch.randint(VOCAB, (2, 7)), torch.randint(VOCAB, (2, 5))
    assert (small(source, target) - model(source, target)).abs().max() < 0.5
    assert small.generate(source, start=START, max_new_tokens=4).shape == (2, 4)
