"""Attention that capture cannot record is noticed; other softmaxes are not."""

import warnings

import pytest
import torch
import torch.nn.functional as F
import transformers
from capture_examples import TRANSFORMERS, Own
from torch import nn
from torch_geometric.nn import GATConv, GATv2Conv, TransformerConv

from polyhead.inspection.capture.capture import capture


class WrittenOut(nn.Module):
    """Attention as tutorials write it."""

    def __init__(self, way="matmul"):
        super().__init__()
        self.qkv, self.out, self.way = nn.Linear(20, 60), nn.Linear(20, 20), way

    def forward(self, x, y=None):
        q, k, v = self.qkv(x).chunk(3, -1)
        k, v = (k, v) if y is None else self.qkv(y).chunk(3, -1)[1:]
        if self.way == "einsum":
            p = torch.einsum("bqd,bkd->bqk", q, k).div(20**0.5).softmax(-1)
            return self.out(torch.einsum("bqk,bkd->bqd", F.dropout(p, 0.0), v))
        if self.way == "exp":
            p = (q @ k.transpose(1, 2)).exp()
            return self.out((p / p.sum(-1, keepdim=True)) @ v)
        if self.way == "additive":
            p = torch.tanh(q[:, :, None] + k[:, None]).sum(-1).softmax(-1)
            return self.out(p @ v)
        scores = torch.matmul(q, k.mT) / 20**0.5
        return self.out(torch.matmul(F.softmax(scores, dim=-1, dtype=torch.float32).to(v.dtype), v))


class Mixed(nn.Module):
    """Self-attention by SDPA, cross-attention written out."""

    def __init__(self):
        super().__init__()
        self.own, self.cross = Own(), WrittenOut("einsum")

    def forward(self, x):
        return self.cross(self.own(x), x)


@pytest.mark.parametrize("way", ["matmul", "einsum", "exp", "additive"])
def test_written_out_attention_is_noticed(way):
    model = WrittenOut(way)
    with (
        pytest.warns(UserWarning, match="capture: 1 attention call not recorded, in WrittenOut"),
        capture(model) as seen,
    ):
        model(torch.randn(2, 6, 20))
    assert not seen
    assert seen.unrecorded == {"WrittenOut": 1}
    assert "1 attention call not recorded, in WrittenOut" in repr(seen)


def test_partial_coverage_is_named_by_module():
    model = Mixed()
    with (
        pytest.warns(UserWarning, match="not recorded, in cross;.*F.scaled_dot_product_attention"),
        capture(model) as seen,
    ):
        model(torch.randn(2, 6, 20))
    assert list(seen) == ["own", "own#1"]
    assert repr(seen).endswith("; 1 attention call not recorded, in cross)")


@pytest.mark.parametrize("kind", TRANSFORMERS)
def test_eager_models_of_transformers(kind):
    model = TRANSFORMERS[kind]().eval()
    model.set_attn_implementation("eager")
    with (
        pytest.warns(UserWarning, match="capture: 2 attention calls not recorded.*attn_implementation='sdpa'"),
        capture(model) as seen,
    ):
        model(torch.randint(0, 89, (2, 7)))
    assert not seen


@pytest.mark.parametrize("layer", [GATConv, GATv2Conv, TransformerConv])
def test_layers_of_pyg(layer):
    model = layer(8, 4, heads=2)
    with pytest.warns(UserWarning, match=r"not recorded.*polyhead\.interop\.pyg"), capture(model) as seen:
        model(torch.randn(9, 8), torch.randint(0, 9, (2, 30)))
    assert sum(seen.unrecorded.values()) == 1


class Router(nn.Module):
    """A mixture of experts, a classifier and a sampler: softmaxes that are not attention."""

    def __init__(self):
        super().__init__()
        self.gate, self.head = nn.Linear(20, 4), nn.Linear(20, 11)
        self.experts = nn.ModuleList(nn.Linear(20, 20) for _ in range(4))
        self.codes = nn.Parameter(torch.randn(11, 20))

    def forward(self, x):
        weights = F.softmax(self.gate(x), dim=-1)
        outputs = torch.stack([expert(x) for expert in self.experts], -1)
        mixed = torch.einsum("bte,btde->btd", weights, outputs) + torch.matmul(outputs, weights[..., None])[..., 0]
        probability = (self.head(mixed) / 0.7).softmax(-1)
        expected = probability @ torch.arange(11.0)
        torch.multinomial(probability[:, -1], 1)
        return probability @ self.codes, expected


@pytest.mark.filterwarnings("error")
def test_routers_classifiers_and_samplers_do_not_warn():
    model = Router()
    with capture(model) as seen:
        model(torch.randn(2, 6, 20))
    assert seen.unrecorded == {}
    config = transformers.MixtralConfig(
        vocab_size=89, hidden_size=24, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=40,
        num_local_experts=4,
    )  # fmt: skip
    mixtral = transformers.MixtralForCausalLM(config).eval()
    with torch.no_grad(), capture(mixtral) as seen:
        torch.multinomial(mixtral(torch.randint(0, 89, (1, 7))).logits[:, -1].softmax(-1), 1)
    assert len(seen) == 2
    assert seen.unrecorded == {}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("need_weights", [False, True])
def test_recorded_attention_does_not_warn(need_weights):
    module = nn.MultiheadAttention(20, 4, batch_first=True)
    x = torch.randn(2, 6, 20)
    with capture(module) as seen:
        module(x, x, x, need_weights=need_weights)
    assert len(seen) == 1
    assert seen.unrecorded == {}


def test_modules_that_were_not_chosen_do_not_warn():
    model = Mixed()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with capture(model, layers=["own"]) as seen:
            model(torch.randn(2, 6, 20))
    assert list(seen) == ["own", "own#1"]


def test_an_error_of_the_model_is_not_hidden_by_the_warning():
    model = WrittenOut()
    with pytest.raises(ZeroDivisionError), warnings.catch_warnings():
        warnings.simplefilter("error")
        with capture(model):
            model(torch.randn(2, 6, 20))
            raise ZeroDivisionError
