"""Which tokens can only look at themselves: the true statement, its limits, and the heads that free them."""

import math
import sys

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

import polyhead
from polyhead import (
    ALiBi,
    Dot,
    Grid,
    MultiHeadAttention,
    RelativeBias,
    Rotary,
    Window,
    attention_weights,
    self_dominance,
)
from polyhead.inspection import SelfDominance
from polyhead.metrics import blocks, blockwise

# the package has a function of that name
MODULE = sys.modules["polyhead.inspection.analysis.self_dominance"]
SIZES = st.integers(2, 13), st.integers(1, 7), st.integers(0, 2**31 - 1)
LAYERS = {
    "plain": lambda: MultiHeadAttention(15, 3, bias=False),
    "biases": lambda: MultiHeadAttention(15, 3, head_dim=7),
    "grouped": lambda: MultiHeadAttention(15, 6, kv_heads=2, head_dim=5),
    "normalised": lambda: MultiHeadAttention(15, 3, qk_norm=True),
    "rotary": lambda: MultiHeadAttention(15, 3, head_dim=4, position=Rotary()),
    "alibi": lambda: MultiHeadAttention(15, 3, position=ALiBi(3)),
    "relative": lambda: MultiHeadAttention(15, 3, position=RelativeBias(3)),
    "sink": lambda: MultiHeadAttention(15, 3, sink=0.5),
    "scaled": lambda: MultiHeadAttention(15, 3, score=Dot(2.0)),
    "dropout": lambda: MultiHeadAttention(15, 3, dropout=0.5, input_dropout=0.5, value_dropout=0.5),
    "gat": lambda: MultiHeadAttention(15, 3, score="gat"),
    "gatv2": lambda: MultiHeadAttention(15, 3, score="gatv2"),
}


def drawn(items, features, seed, *lead):
    return torch.randn(*lead, items, features, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def whole(weights):
    """Margins and own weights from a whole matrix of weights, without sinks: log p differs from the scores by one constant per row."""
    own = torch.eye(weights.shape[-1], dtype=torch.bool)
    weight = weights.diagonal(dim1=-2, dim2=-1)
    return weight.log() - weights.masked_fill(own, 0).amax(-1).log(), weight


@given(*SIZES)
@settings(max_examples=100, deadline=None)
def test_a_token_peaks_on_itself_iff_no_projection_on_it_is_longer(items, features, seed):
    x = drawn(items, features, seed) * drawn(items, 1, seed + 1).exp()
    norm = x.norm(dim=-1)
    cosine = F.cosine_similarity(x[:, None], x[None], dim=-1)
    expected = (norm * cosine <= norm[:, None] * (1 + 1e-12)).all(-1)
    found = self_dominance(x)
    assert torch.equal(found.peaks_on_self, expected)
    assert found.share_peaking_on_self == expected.double().mean()
    # the longest token is one of them, whatever the others are
    assert found.peaks_on_self[norm.argmax()]
    # S_ij − S_ii = ½(|x_j|² − |x_i|² − |x_i − x_j|²)
    apart = torch.cdist(x, x, compute_mode="donot_use_mm_for_euclid_dist").square()
    above = (norm.square() - norm.square()[:, None] - apart) / 2
    above = above.masked_fill(torch.eye(items).bool(), -math.inf).amax(-1)
    assert_close(found.margin, -above / math.sqrt(features), atol=1e-10, rtol=1e-9)


@given(*SIZES)
@settings(max_examples=100, deadline=None)
def test_with_equal_norms_all_do_and_the_weight_is_known(items, features, seed):
    x = F.normalize(drawn(items, features, seed), dim=-1)
    found = self_dominance(x)
    assert found.peaks_on_self.all()
    apart = torch.cdist(x, x, compute_mode="donot_use_mm_for_euclid_dist").square()
    others = (-apart / (2 * math.sqrt(features))).exp().sum(-1) - 1
    assert_close(found.weight, 1 / (1 + others), atol=1e-12, rtol=0)


def test_unequal_norms_break_it():
    found = self_dominance(torch.tensor([[1.0, 0.0], [2.0, 0.0]]), scale=1.0)
    assert found.peaks_on_self.tolist() == [False, True]
    assert found.margin.tolist() == [-1.0, 2.0]
    assert_close(found.weight, torch.tensor([1 / (1 + math.e), 1 / (1 + math.exp(-2))], dtype=torch.float64))
    assert found.share_peaking_on_self == 0.5


def test_the_scale_multiplies_margins():
    x = drawn(11, 9, 0)
    assert_close(self_dominance(x, scale=1.0).margin, 3 * self_dominance(x).margin)
    p = attention_weights(x[None], x[None], score=Dot(1.0))[0]
    assert_close(self_dominance(x, scale=1.0).weight, p.diagonal())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [None, *(name for name in LAYERS if name not in ("rotary", "alibi", "relative"))])
def test_tokens_that_are_there_twice_tie(name, dtype):
    layer = None if name is None else LAYERS[name]().to(dtype)
    few = F.normalize(torch.randn(37, 15, dtype=torch.float64), dim=-1).to(dtype)
    # 37 and 74 are no multiples of what a product is computed in
    found = self_dominance(torch.cat((few, few)), layer)
    assert torch.equal(found.peaks_on_self[..., :37], found.peaks_on_self[..., 37:])
    assert found.margin.le(0).all()
    assert found.margin.eq(0).sum() >= (74 if layer is None and dtype == torch.float64 else 2)
    same = self_dominance(few[:1].expand(23, 15), layer)
    assert same.margin.eq(0).all()
    assert same.share_peaking_on_self.eq(1).all()


def test_linear_maps_free_tokens():
    layer = MultiHeadAttention(8, 2, head_dim=8, bias=False)
    tokens = torch.eye(8)
    with torch.no_grad():
        # the first head sends each to the next, the second to itself
        layer.q_proj.weight.copy_(20 * torch.cat((torch.eye(8).roll(-1, 1), torch.eye(8))))
        layer.k_proj.weight.copy_(torch.eye(8).repeat(2, 1))
    found, (_, heads) = self_dominance(tokens, layer), layer(tokens)
    assert self_dominance(tokens).share_peaking_on_self == 1
    assert found.share_peaking_on_self.tolist() == [0, 1]
    assert sorted((heads.weights[0].argmax(-1) - torch.arange(8)).unique().tolist()) in ([-7, 1], [-1, 7])
    assert_close(found.margin[0], torch.full((8,), -20 / math.sqrt(8), dtype=torch.float64))


def test_one_map_for_both_frees_nobody_of_equal_length():
    """W_Q = W_K gives products of mapped tokens with each other: they need different lengths, or different maps."""
    layer = MultiHeadAttention(8, 1, bias=False, qk_norm=True)
    with torch.no_grad():
        layer.k_proj.weight.copy_(layer.q_proj.weight)
    assert self_dominance(torch.randn(31, 8), layer).share_peaking_on_self.tolist() == [1]


@pytest.mark.parametrize("name", LAYERS)
def test_heads_are_those_of_the_layer(name):
    layer = LAYERS[name]().double()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    x = drawn(13, 15, 3, 2)
    found = self_dominance(x, layer)
    assert layer.training
    with torch.no_grad():
        _, heads = layer.eval()(x)
    margin, weight = whole(heads.weights)
    assert found.margin.shape == found.weight.shape == (2, layer.num_heads, 13)
    assert found.share_peaking_on_self.shape == (2, layer.num_heads)
    assert_close(found.margin, margin, atol=1e-10, rtol=1e-9)
    assert_close(found.weight, weight, atol=1e-12, rtol=1e-9)
    assert 0 < found.peaks_on_self.double().mean() < 1


@pytest.mark.parametrize("block", [1, 100, 1000])
@pytest.mark.parametrize("name", [None, "grouped", "alibi", "sink"])
def test_blocks_agree_with_the_whole(name, block, monkeypatch):
    layer = None if name is None else LAYERS[name]()
    x = torch.randn(2, 3, 17, 15)
    expected = self_dominance(x, layer)
    monkeypatch.setattr(blocks, "BLOCK_WEIGHTS", block)
    found = self_dominance(x, layer)
    assert_close(found.margin, expected.margin, atol=1e-14, rtol=0)
    assert_close(found.weight, expected.weight, atol=1e-14, rtol=0)


def test_nothing_of_items_by_items_is_built(monkeypatch):
    """A block of scores has at most as many numbers as it may."""
    seen = []
    scores = blockwise.masked_scores
    monkeypatch.setattr(
        MODULE,
        "masked_scores",
        lambda call, queries: seen.append(len(queries) * call.sizes.keys * call.sizes.heads) or scores(call, queries),
    )
    found = self_dominance(torch.randn(5000, 4))
    assert found.margin.shape == (5000,)
    assert max(seen) <= blocks.BLOCK_WEIGHTS
    assert sum(seen) == 5000**2


@pytest.mark.parametrize("layer", [None, "biases"])
def test_a_token_alone(layer):
    found = self_dominance(torch.randn(2, 1, 15), None if layer is None else LAYERS[layer]())
    assert found.margin.eq(math.inf).all()
    assert_close(found.weight, torch.ones_like(found.weight))
    assert found.peaks_on_self.all()


def test_no_gradients_and_no_change():
    layer, x = LAYERS["biases"](), torch.randn(5, 15, requires_grad=True)
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    found = self_dominance(x, layer)
    assert not found.margin.requires_grad
    assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())
    assert next(layer.parameters()).dtype == torch.float32


def test_it_is_written_in_one_line():
    found = self_dominance(torch.tensor([[1.0, 0.0], [2.0, 0.0]]), scale=1.0)
    assert str(found) == ("SelfDominance(shape=(2,), 1 of 2 peak on themselves, margin -1 to 2, mean weight 0.575)")
    assert repr(self_dominance(torch.zeros(0, 3, 2))) == "SelfDominance(shape=(0, 3))"
    assert isinstance(found, SelfDominance)
    assert polyhead.inspection.self_dominance is self_dominance


@pytest.mark.parametrize(
    ("x", "more", "message"),
    [
        ([[1.0]], {}, r"x must be a tensor \(\.\.\., items, features\), got list"),
        (torch.ones(3), {}, r"x must have shape \(\.\.\., items, features\), got \(3,\)"),
        (torch.ones(0, 3), {}, r"x must have at least one item, got shape \(0, 3\)"),
        (torch.ones(3, 4).long(), {}, "x must be a real floating-point tensor, got torch.int64"),
        (torch.ones(3, 4) * 1j, {}, "x must be a real floating-point tensor, got torch.complex64"),
        (torch.full((3, 4), math.nan), {}, "x must be finite, got NaN or inf"),
        (torch.full((3, 4), math.inf), {}, "x must be finite, got NaN or inf"),
        (torch.full((3, 4), 1e200, dtype=torch.float64), {}, "x must give finite scores, got NaN or inf"),
        (torch.ones(3, 4), {"scale": 0.0}, r"scale must be a number in \(0, inf\), got 0\.0"),
        (torch.ones(3, 4), {"scale": math.inf}, r"scale must be a number in \(0, inf\), got inf"),
        (torch.ones(3, 4), {"layer": torch.nn.Linear(4, 4)}, "layer must be a MultiHeadAttention, got Linear"),
        (torch.ones(3, 4), {"layer": MultiHeadAttention(6, 2)}, r"x must have shape \(\.\.\., items, 6\), got \(3, 4\)"),
        (torch.ones(3, 6), {"layer": MultiHeadAttention(6, 2), "scale": 1.0}, "scale must be None with a layer, whose score has its own, got 1.0"),
        (torch.ones(4, 8), {"layer": MultiHeadAttention(8, 2, position=Rotary(axes=2))}, r"over must be a Grid of 2 axes for Rotary"),
        (torch.ones(3, 6), {"layer": MultiHeadAttention(6, 2, d_key=5)}, "layer must have as many features for queries, keys and values, .* got 6, 5 and 5"),
    ],
)  # fmt: skip
def test_invalid_arguments(x, more, message):
    with pytest.raises(ValueError, match=message):
        self_dominance(x, **more)


def test_weights_that_are_no_numbers_are_named():
    layer = MultiHeadAttention(6, 2)
    with torch.no_grad():
        layer.q_proj.weight[0, 0] = math.nan
    with pytest.raises(ValueError, match="x must give finite scores, got NaN or inf"):
        self_dominance(torch.ones(3, 6), layer)


def test_on_a_grid_and_among_some():
    torch.manual_seed(0)
    x = torch.randn(2, 12, 16)
    layer = MultiHeadAttention(16, 2, position=Rotary(axes=2))
    assert self_dominance(x, layer, over=Grid(3, 4)).margin.shape == (2, 2, 12)
    # only those that may be chosen count
    near = self_dominance(x, over=Grid(3, 4, window=3))
    everyone = self_dominance(x)
    assert (near.margin >= everyone.margin).all() and (near.weight >= everyone.weight).all()
    assert (self_dominance(x, over=Window(0)).margin == torch.inf).all()
    ahead = self_dominance(x, over=Window(0, 1) & torch.ones(12, 12).triu(1).bool())
    assert not ahead.peaks_on_self.any()
