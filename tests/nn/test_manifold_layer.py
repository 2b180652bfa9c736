"""Layers with projections on the Stiefel manifold: the rows of each head are orthonormal."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from polyhead import Euclidean, MultiHeadAttention, Stiefel, optim
from polyhead.nn import FeedForward, TransformerLayer


def layer(**options):
    return MultiHeadAttention(30, 6, **{"manifold": "stiefel", **options})


def drift(mha, letters="qkv"):
    """The largest deviation of a head's rows from orthonormal, over the existing projections."""
    heads, worst = {"q": mha.num_heads, "k": mha.kv_heads, "v": mha.value_heads}, 0.0
    for letter in letters:
        projection = getattr(mha, f"{letter}_proj")
        if projection is not None:
            for rows in projection.weight.detach().double().chunk(heads[letter]):
                worst = max(worst, (rows @ rows.T - torch.eye(len(rows), dtype=rows.dtype)).abs().max().item())
    return worst


def train(model, steps=3, lr=0.03, make=optim.AdamW, call=lambda model, x: model(x)[0]):
    """Train for some steps; return the loss before each."""
    optimizer = make(optim.groups(model), lr=lr)
    x, losses = torch.randn(4, 7, 30), []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (call(model, x) - 1).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


# the projections of a layer with this score
SCORES = {"dot": "qkv", "gat": "k", "gatv2": "qk"}
SIZES = {
    "even": {},
    "own-head-dim": {"head_dim": 7},
    "square": {"head_dim": 30},
    "one-direction": {"head_dim": 1},
    "grouped": {"kv_heads": 3},
    "one-kv-head": {"kv_heads": 1, "head_dim": 11},
    "value-dim": {"value_dim": 3},
}
IMPOSSIBLE = {("gat", "grouped"), ("gat", "one-kv-head"), ("gat", "value-dim"), ("gatv2", "value-dim")}
CASES = [(score, size) for score in SCORES for size in SIZES if (score, size) not in IMPOSSIBLE]


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "bare"])
@pytest.mark.parametrize("combine", ["project", "concat", "mean"])
@pytest.mark.parametrize(("score", "size"), CASES)
def test_heads_are_orthonormal_before_and_after_training(score, size, combine, bias):
    mha = layer(score=score, combine=combine, bias=bias, **SIZES[size])
    heads = {"q": 6, "k": mha.kv_heads, "v": mha.kv_heads}
    assert mha.manifolds == {f"{letter}_proj.weight": Stiefel(heads=heads[letter]) for letter in SCORES[score]}
    assert drift(mha) < 1e-6
    before = {name: p.detach().clone() for name, p in mha.named_parameters()}
    losses = train(mha)
    assert torch.tensor(losses).isfinite().all()
    assert mha(torch.randn(2, 5, 30))[0].isfinite().all()
    assert drift(mha) < 1e-6
    assert optim.check(mha) == (True, None)
    assert not any(torch.equal(before[name], mha.get_parameter(name)) for name in mha.manifolds)


@pytest.mark.parametrize("make", [optim.SGD, optim.Adam, optim.AdamW])
@pytest.mark.parametrize("metric", ["euclidean", "canonical"])
@pytest.mark.parametrize("retraction", ["polar", "cayley"])
def test_training_lowers_the_loss_with_every_metric_and_retraction(make, metric, retraction):
    mha = layer(manifold=Stiefel(metric, retraction))
    assert mha.manifolds["k_proj.weight"] == Stiefel(metric, retraction, 6)
    losses = train(mha, 30, 0.3 if make is optim.SGD else 0.03, make)
    assert losses[-1] < 0.8 * losses[0]
    assert drift(mha) < 1e-6


def test_manifold_of_some_projections():
    mha = layer(manifold={"v": "stiefel", "q": "euclidean", "k": Euclidean()})
    assert mha.manifolds == {"v_proj.weight": Stiefel(heads=6)}
    assert drift(mha, "v") < 1e-6 < drift(mha, "q")
    train(mha)
    assert drift(mha, "v") < 1e-6
    assert layer(manifold={}).manifolds == layer(manifold="euclidean").manifolds == {}


def test_default_layer_has_no_manifold():
    plain = MultiHeadAttention(30, 6)
    assert plain.manifolds == {}
    assert "manifold" not in repr(plain)
    assert optim.groups(plain) == [{"params": list(plain.named_parameters())}]


def test_repr_names_the_manifolds():
    assert "manifold=Stiefel()" in repr(layer())
    assert "manifold=Stiefel(metric='canonical')" in repr(layer(manifold=Stiefel("canonical")))
    assert "manifold={'v': Stiefel()}" in repr(layer(manifold={"v": "stiefel"}))


def test_reset_parameters_stays_on_the_manifold():
    mha = layer()
    before = mha.v_proj.weight.detach().clone()
    mha.reset_parameters()
    assert drift(mha) < 1e-6
    assert not torch.equal(before, mha.v_proj.weight)


def test_layer_on_the_meta_device_is_filled_later():
    with torch.device("meta"):
        mha = layer(kv_heads=3)
    assert all(p.is_meta for p in mha.parameters())
    assert [group.get("manifold") for group in optim.groups(mha)] == [None, Stiefel(heads=6), Stiefel(heads=3)]
    mha.to_empty(device="cpu").reset_parameters()
    assert drift(mha) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_precisions(dtype):
    mha = layer().to(dtype)
    mha.reset_parameters()
    assert optim.check(mha) == (True, None)
    assert drift(mha) < (1e-14 if dtype == torch.float64 else 1e-2)


@pytest.mark.parametrize("options", [{}, {"kv_heads": 3}, {"score": "gat"}, {"score": "gatv2"}], ids=str)
def test_pruned_layers_can_be_trained(options):
    mha = layer(**options)
    mha.prune([2, 3])
    assert {on.heads for on in mha.manifolds.values()} == ({4, 2} if "kv_heads" in options else {4})
    assert drift(mha) < 1e-6
    train(mha)
    assert drift(mha) < 1e-6
    fresh = layer(**options)
    fresh.load_state_dict(mha.state_dict())
    assert fresh.manifolds == mha.manifolds
    train(fresh)
    assert drift(fresh) < 1e-6


@pytest.mark.parametrize("bias", [True, False])
def test_folded_layers_keep_the_manifolds_of_q_and_k(bias):
    mha = layer(bias=bias)
    folded = mha.fold_value_projection()
    assert folded.manifolds == {f"{letter}_proj.weight": Stiefel(heads=6) for letter in "qk"}
    x = torch.randn(2, 5, 30)
    torch.testing.assert_close(folded(x)[0], mha(x)[0])
    train(folded)
    assert drift(folded, "qk") < 1e-6
    assert optim.check(folded) == (True, None)


def test_state_dict_round_trip():
    one, other = layer(kv_heads=3), layer(kv_heads=3)
    train(one)
    file = io.BytesIO()
    torch.save(one.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    x = torch.randn(2, 5, 30)
    assert torch.equal(one(x)[0], other(x)[0])
    assert optim.check(other) == (True, None)
    plain = layer(kv_heads=3, manifold="euclidean")
    plain.load_state_dict(one.state_dict())
    assert torch.equal(one(x)[0], plain(x)[0])


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
def test_copies_keep_the_manifolds(duplicate):
    mha = layer(manifold=Stiefel("canonical"), kv_heads=2)
    other = duplicate(mha)
    assert other.manifolds == mha.manifolds
    train(other)
    assert drift(other) < 1e-6


def test_optimizer_groups_of_blocks():
    blocks = nn.Sequential(*(TransformerLayer(layer(), FeedForward(30, 60)) for _ in range(2)))
    found = optim.groups(blocks)
    assert [group.get("manifold") for group in found] == [None, Stiefel(heads=6)]
    names = [name for name, _ in found[1]["params"]]
    assert names == [f"{block}.self_attn.{letter}_proj.weight" for block in (0, 1) for letter in "qkv"]
    losses = train(blocks, 10, call=lambda model, x: model(x))
    assert losses[-1] < losses[0]
    assert optim.check(blocks) == (True, None)
    assert all(drift(block.self_attn) < 1e-6 for block in blocks)


def test_decoder_layer_keeps_the_manifolds_of_both_attentions():
    block = TransformerLayer(layer(), FeedForward(30, 60), cross=layer(manifold={"v": "stiefel"}))
    train(block, call=lambda model, x: model(x, memory=x.flip(1)))
    assert drift(block.self_attn) < 1e-6
    assert drift(block.cross_attn, "v") < 1e-6 < drift(block.cross_attn, "qk")


BAD = [
    ({"head_dim": 31}, "^head_dim must be at most d_model, 30, got 31; on the Stiefel manifold"),
    ({"d_key": 4}, "^head_dim must be at most d_key, 4, got 5; on the Stiefel"),
    ({"value_dim": 31}, "^value_dim must be at most d_value, 30, got 31; on the Stiefel"),
    ({"d_value": 3}, "^value_dim must be at most d_value, 3, got 5; on the Stiefel"),
    ({"manifold": "sphere"}, "^manifold must be 'euclidean', 'stiefel', a Stiefel, or a dict of these .*got 'sphere'"),
    ({"manifold": None}, "^manifold must be .*got None"),
    ({"manifold": {"v": "sphere"}}, "^manifold must be .*got 'sphere'"),
    ({"manifold": Stiefel(heads=2)}, r"^manifold must be a Stiefel without heads, got Stiefel\(heads=2\)"),
    ({"manifold": {"o": "stiefel"}}, "^manifold must have keys among the layer's projections, q, k, v, got 'o'$"),
    ({"manifold": {"v": "stiefel"}, "score": "gat"}, "^manifold must have keys among .*, k, since GAT shares projections, got 'v'"),
    ({"manifold": {"q": "stiefel"}, "score": "gat"}, "^manifold must have keys among .*, k, since GAT shares projections, got 'q'"),
    ({"manifold": {"v": "stiefel"}, "score": "gatv2"}, "^manifold must have keys among .*, q, k, since GATv2 shares projections, got 'v'"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "words"), BAD)
def test_invalid_manifolds_and_sizes_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        layer(**options)


def test_only_constrained_projections_must_fit():
    mha = layer(manifold={"q": "stiefel", "k": "stiefel"}, value_dim=31)
    assert list(mha.manifolds) == ["q_proj.weight", "k_proj.weight"]


def test_manifold_can_be_set_later():
    mha = MultiHeadAttention(12, 3)
    mha.manifold = {"v": "stiefel"}
    assert mha.manifolds == {"v_proj.weight": Stiefel(heads=3)}
    assert not optim.check(mha)[0]
    optim.project(mha)
    assert optim.check(mha) == (True, None)
    with pytest.raises(ValueError, match=r"^manifold must be .*got 'Stiefel'"):
        mha.manifold = "Stiefel"
