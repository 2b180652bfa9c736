"""Whether queries and keys are the same items is known from where they come from, never from their number."""

import pytest
import torch
import torch.nn.functional as F
import transformers
from capture_examples import TRANSFORMERS, Own, record
from torch import nn

from polyhead import MultiHeadAttention, attend
from polyhead.inspection.capture.capture import capture
from polyhead.models import Tokens

TOKENS = 7
SIZES = {"d_model": 24, "vocab_size": 89}
LAYERS = {
    f"{side}_{name}": n
    for side in ("encoder", "decoder")
    for name, n in (("layers", 1), ("attention_heads", 4), ("ffn_dim", 40))
}
IDS = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2}


def bart():
    return transformers.BartModel(transformers.BartConfig(**SIZES, **LAYERS, **IDS)), torch.randint(3, 89, (2, TOKENS))


def t5():
    config = transformers.T5Config(**SIZES, d_kv=6, d_ff=40, num_layers=1, num_heads=4)
    return transformers.T5Model(config), torch.randint(3, 89, (2, TOKENS))


def whisper():
    sizes = {"num_mel_bins": 8, "max_source_positions": TOKENS, "max_target_positions": 20}
    return transformers.WhisperModel(transformers.WhisperConfig(**SIZES, **LAYERS, **IDS, **sizes)), torch.randn(
        2, 8, 2 * TOKENS
    )


@pytest.mark.parametrize("make", [bart, t5, whisper])
def test_encoder_decoders_of_transformers(make):
    model, source = make()
    target = torch.randint(3, 89, (2, TOKENS))
    with torch.no_grad(), capture(model.eval()) as seen:
        model(source, decoder_input_ids=target)
    assert {heads.shape[-2:] for heads in seen.values()} == {(TOKENS, TOKENS)}
    assert [heads.is_self_attention for heads in seen.values()] == [True, True, False]


@pytest.mark.parametrize("kind", TRANSFORMERS)
def test_encoders_and_decoders_of_transformers(kind):
    model = TRANSFORMERS[kind]().eval()
    with torch.no_grad(), capture(model) as seen:
        model(torch.randint(0, 89, (2, TOKENS)))
    assert [heads.is_self_attention for heads in seen.values()] == [True, True]


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("same_input", [False, True])
def test_torch_transformer_with_texts_of_one_length(batch_first, same_input):
    model = nn.Transformer(24, 4, 1, 1, 40, batch_first=batch_first).eval()
    source, target = torch.randn(2, 6, 6, 24)
    with torch.no_grad(), capture(model) as seen:
        model(source, source if same_input else target)
    encoder, decoder, cross = (heads.is_self_attention for heads in seen.values())
    assert (encoder, decoder) == (True, True)
    # one tensor for both texts: the decoder's queries and the memory come from it, by different ways
    assert cross in (False, None) if same_input else cross is False


def test_own_layer_knows_it_from_its_call():
    mha, x, y = MultiHeadAttention(24, 4), *torch.randn(2, 2, 6, 24)
    assert mha(x)[1].is_self_attention is True
    assert mha(x, x)[1].is_self_attention is True
    assert mha(x, y)[1].is_self_attention is False
    assert mha(x, mha.project_kv(y))[1].is_self_attention is False
    assert mha(x)[1].select(heads=[1]).select_batch_entry(0).detach().is_self_attention is True
    cache = mha.cache(batch=2, length=6)
    mha(x[:, :5], cache=cache)
    assert mha(x[:, 5:], cache=cache)[1].is_self_attention is True


class Custom(nn.Module):
    """Attention with one projection for queries and one for keys and values."""

    def __init__(self, norm=None):
        super().__init__()
        self.q, self.kv = nn.Linear(24, 24), nn.Linear(24, 48)
        self.q_norm, self.k_norm = (norm(24) if norm else nn.Identity() for _ in range(2))

    def forward(self, x, y):
        q = self.q(self.q_norm(x)).unflatten(-1, (4, 6)).transpose(1, 2)
        k, v = self.kv(self.k_norm(y)).unflatten(-1, (2, 4, 6)).permute(2, 0, 3, 1, 4)
        cos = torch.linspace(0, 1, q.shape[-2])[:, None].cos()
        return attend(q * cos + q.roll(1, -1) * cos.square(), k * cos, v)


@pytest.mark.parametrize("norm", [None, nn.LayerNorm, nn.RMSNorm])
def test_custom_modules_by_the_inputs_of_their_projections(norm):
    x, y = torch.randn(2, 2, 6, 24)
    model = Custom(norm)
    for other, expected in ((x, True), (y, False), (torch.cat((x, y)).chunk(2)[0], False)):
        with capture(model) as seen:
            model(x, other)
        assert seen[0].is_self_attention is expected
    assert [heads.is_self_attention for heads in record(Own()).values()] == [True, True]


def test_halves_of_one_tensor_are_not_called_the_same_items():
    model = nn.ModuleDict({"mix": nn.Linear(24, 24), "attention": Custom()})
    with capture(model) as seen:
        x = torch.randn(4, 6, 24)
        first, second = (x + model["mix"](x)).chunk(2)
        model["attention"](first, second)
    assert seen[0].is_self_attention is not True


def test_tensors_from_nowhere_are_unknown():
    q, k = torch.randn(2, 1, 4, 6, 8)

    class Bare(nn.Module):
        def forward(self, q, k):
            return F.scaled_dot_product_attention(q, k, k)

    model = Bare()
    with capture(model) as seen:
        model(q, k)
    assert seen[0].is_self_attention is None
    with capture(model) as seen:
        model(q, q)
    assert seen[0].is_self_attention is True


def test_pooled_keys_and_cached_keys_are_not_called_the_same_items():
    x = torch.randn(2, 6, 24)
    model = Custom()
    with capture(model) as seen:
        pooled = F.avg_pool1d(x.transpose(1, 2), 2).transpose(1, 2)
        k, v = model.kv(pooled).unflatten(-1, (2, 4, 6)).permute(2, 0, 3, 1, 4)
        attend(model.q(x).unflatten(-1, (4, 6)).transpose(1, 2), k, v)
    assert seen[0].is_self_attention is not True


def test_roles_rollout_and_page_leave_cross_attention_out(tmp_path):
    from polyhead.inspection import find_roles_in_text, report
    from polyhead.inspection.analysis.rollout import rollout

    model = nn.Transformer(24, 4, 2, 2, 40, batch_first=True).eval()
    source, target = torch.randn(2, 1, 6, 24)
    with torch.no_grad(), capture(model) as seen:
        model(source, target)
    cross = [number for number, name in enumerate(seen) if name.endswith("multihead_attn")]
    assert len(cross) == 2
    found = find_roles_in_text(seen, Tokens.from_pieces(["the", "cat", "saw", "a", "dog", "run"]))
    assert {card.layer for card in found.measured} == set(range(6)) - set(cross)
    with pytest.raises(ValueError, match="seen must be self-attention, got layers that attend to other tokens"):
        rollout(seen, 0)
    rollout({name: heads for name, heads in seen.items() if heads.is_self_attention and name.startswith("encoder")}, 0)
    page = report(seen, tmp_path / "page.html").html
    assert page.count('"attention": "cross-attention"') == 2 or page.count('"attention":"cross-attention"') == 2
