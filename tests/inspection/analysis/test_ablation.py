"""Taking heads out: the same as a layer that never had them, whatever the model."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

from polyhead import Graph, MultiHeadAttention
from polyhead.inspection.analysis import ablation


class Model(nn.Module):
    """Two layers of ours, or of torch's."""

    def __init__(self, torchs=False):
        super().__init__()
        make = lambda: nn.MultiheadAttention(12, 3, batch_first=True) if torchs else MultiHeadAttention(12, 3)
        self.layers = nn.ModuleList(make() for _ in range(2))
        self.out = nn.Linear(12, 7)

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x, x, x)[0]
        return self.out(x)


@pytest.fixture
def data():
    torch.manual_seed(0)
    return torch.randn(4, 5, 12), torch.randint(0, 7, (4, 5))


def loss_of(model, data):
    x, y = data
    return lambda: F.cross_entropy(model(x).flatten(0, 1), y.flatten())


def without(model, layer, heads, loss):
    """The loss where W_O does not read these heads."""
    attention = model.layers[layer]
    weight = (attention.o_proj if isinstance(attention, MultiHeadAttention) else attention.out_proj).weight
    before = weight.detach().clone()
    with torch.no_grad():
        for head in heads:
            weight[:, 4 * head : 4 * head + 4] = 0
        value = float(loss())
        weight.copy_(before)
    return value


@pytest.mark.parametrize("torchs", [False, True])
def test_a_head_without_output_is_a_head_that_is_not_read(torchs, data):
    model = Model(torchs).eval()
    loss = loss_of(model, data)
    found = ablation.ablate(model, loss)
    assert_close(found.base, float(loss().detach()))
    assert list(found.without) == ["layers.0", "layers.1"]
    for layer, values in enumerate(found.without.values()):
        wanted = torch.tensor([without(model, layer, [head], loss) - found.base for head in range(3)])
        assert_close(values, wanted, atol=1e-5, rtol=1e-4)
    assert found.rank_heads()[0] == min(
        (ablation.Head(name, h) for name in found.without for h in range(3)),
        key=lambda head: found.without[head.name][head.head],
    )


@pytest.mark.parametrize("by", ["zero", "mean"])
@pytest.mark.parametrize("tokens", [4096, 8])
def test_many_heads_in_one_batch(tokens, by, monkeypatch):
    """The same numbers as one head at a time, however many fit together."""
    monkeypatch.setattr(ablation, "_BATCH_TOKENS", tokens)
    model, table = Model().eval(), torch.randn(9, 12)
    ids = torch.tensor([3, 1, 4, 1, 5])
    embed = lambda ids: model(table[ids]).mean(-2)
    wanted = ablation.ablate(model, ablation.embedding_change_loss(lambda: embed(ids[None])), by)
    found = ablation.ablate_embedding(model, embed, ids, by)
    for name, values in wanted.without.items():
        assert_close(found.without[name], values, atol=1e-6, rtol=1e-4)


def test_the_mean_takes_out_what_varies(data):
    """A head that gives every query the same loses nothing by its mean, and something by zeros."""
    model = Model().eval()
    with torch.no_grad():
        for layer in model.layers:
            # values of the first head do not depend on the token
            layer.v_proj.weight[:4] = 0
            layer.v_proj.bias[:4] = 1.0
    loss = loss_of(model, data)
    zero, mean = ablation.ablate(model, loss), ablation.ablate(model, loss, "mean")
    for name in zero.without:
        assert abs(mean.without[name][0]) < 1e-5 < abs(zero.without[name][0])
        assert (mean.without[name][1:].abs() > 1e-5).all()


@pytest.mark.parametrize("torchs", [False, True])
def test_importance_is_the_gradient_of_a_gate(torchs, data):
    model = Model(torchs).eval()
    x, y = data
    loss = loss_of(model, data)
    found = ablation.importance(model, loss)
    # one example at a time, by small steps of a gate on the head's columns of W_O
    for layer, scores in enumerate(found.values()):
        assert_close(scores.norm(), torch.tensor(1.0))
        by_head = []
        for head in range(3):
            steps = []
            for row in range(len(x)):
                one = loss_of(model, (x[row : row + 1], y[row : row + 1]))
                steps.append(abs(slope(model, layer, head, one)))
            by_head.append(sum(steps) / len(steps))
        wanted = torch.tensor(by_head)
        assert_close(scores, wanted / wanted.norm(), atol=1e-2, rtol=1e-2)


def slope(model, layer, head, loss, step=1e-2):
    attention = model.layers[layer]
    weight = (attention.o_proj if isinstance(attention, MultiHeadAttention) else attention.out_proj).weight
    before, values = weight.detach().clone(), []
    with torch.no_grad():
        for factor in (1 + step, 1 - step):
            weight[:, 4 * head : 4 * head + 4] = before[:, 4 * head : 4 * head + 4] * factor
            values.append(float(loss()))
            weight.copy_(before)
    return (values[0] - values[1]) / (2 * step)


def test_a_curve_of_heads_that_go_one_after_the_other(data):
    model = Model().eval()
    loss = loss_of(model, data)
    order = [ablation.Head("layers.1", 2), ablation.Head("layers.0", 0), ablation.Head("layers.1", 0)]
    curve = ablation.ablate_cumulatively(model, loss, order)
    assert len(curve) == 4
    assert_close(curve[0], float(loss().detach()))
    assert_close(curve[1], without(model, 1, [2], loss), atol=1e-5, rtol=1e-5)
    # the last: all three together
    with torch.no_grad():
        model.layers[0].o_proj.weight[:, :4] = 0
        model.layers[1].o_proj.weight[:, [0, 1, 2, 3, 8, 9, 10, 11]] = 0
    assert_close(curve[3], float(loss().detach()), atol=1e-5, rtol=1e-5)
    assert_close(ablation.ablate_cumulatively(model, loss, []), [float(loss().detach())])


def test_progress_sees_every_head(data):
    model, seen = Model().eval(), []

    def watched(heads):
        for head in heads:
            seen.append(head)
            yield head

    ablation.ablate(model, loss_of(model, data), progress=watched)
    assert len(seen) == 6


def test_heads_on_a_graph():
    layer = MultiHeadAttention(8, 2, score="gat", combine="concat")
    graph, x = Graph(torch.tensor([[0, 1, 2], [1, 2, 0]]), 3), torch.randn(3, 8)
    found = ablation.ablate(layer, lambda: layer(x, over=graph)[0].square().sum())
    (values,) = found.without.values()
    with torch.no_grad():
        out = layer(x, over=graph)[0].square().sum(0).unflatten(0, (2, 4)).sum(-1)
    assert_close(values, -out, atol=1e-5, rtol=1e-5)


def test_ready_losses():
    torch.manual_seed(0)
    table, ids = torch.randn(11, 11), torch.randint(0, 10, (3, 6))
    logits = lambda ids: table[ids]
    wanted = -torch.stack([table[a].log_softmax(-1)[b] for row in ids for a, b in itertools.pairwise(row)]).mean()
    assert_close(ablation.causal_lm_loss(logits, ids)(), wanted)

    keep = torch.zeros(3, 6, dtype=torch.bool)
    keep[:, 0] = True
    loss = ablation.masked_lm_loss(logits, ids, 10, share=0.5, keep=keep)
    assert_close(loss(), loss())
    hidden = []
    ablation.masked_lm_loss(lambda masked: hidden.append(masked) or logits(masked), ids, 10, share=0.5, keep=keep)()
    assert (hidden[0] == 10).any() and not (hidden[0][:, 0] == 10).any()
    assert_close(loss(), -table[10].log_softmax(-1)[ids[hidden[0] == 10]].mean())

    vector = torch.tensor([[1.0, 0.0]])
    change = ablation.embedding_change_loss(lambda: vector)
    assert float(change()) == 0
    vector = torch.tensor([[1.0, 1.0]])
    assert math.isclose(float(change()), 1 - math.sqrt(0.5), rel_tol=1e-6)


@pytest.mark.parametrize(
    "act, message",
    [
        (lambda: ablation.ablate(nn.Linear(2, 2), lambda: torch.tensor(1.0)), "model: no attention call seen"),
        (lambda: ablated(by="median"), "by must be 'zero' or 'mean', got 'median'"),
        (
            lambda: ablated(loss=lambda: torch.zeros(3)),
            r"loss must return one number, .*, got shape \(3,\)",
        ),
        (
            lambda: ablation.masked_lm_loss(lambda x: x, torch.zeros(1, 3).long(), 1, share=0.0),
            "share must mask at least one of 3 tokens, got 0.0",
        ),
    ],
)
def test_error_messages(act, message):
    with pytest.raises(ValueError, match=message):
        act()


def ablated(loss=None, **options):
    model, x = Model(), torch.randn(1, 5, 12)
    return ablation.ablate(model, loss or (lambda: model(x).sum()), **options)


def test_a_loss_may_call_any_part_of_the_model():
    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = Model()

    model, x = Wrapped().eval(), torch.randn(2, 5, 12)
    loss = lambda: model.body(x).square().mean()
    inside, whole = ablation.ablate(model, loss), ablation.ablate(model.body, loss)
    for found, wanted in zip(inside.without.values(), whole.without.values(), strict=True):
        assert_close(found, wanted)
    assert len(set(ablation.ablate_cumulatively(model, loss, inside.rank_heads()))) == 7
    with pytest.raises(ValueError, match=r"order: body.layers.7 made no attention call in this loss"):
        ablation.ablate_cumulatively(model, loss, [ablation.Head("body.layers.7", 0)])


@pytest.mark.parametrize(
    "convert", [float, lambda x: x, lambda x: x[None], lambda x: x.numpy(), lambda x: x.numpy()[()]]
)
def test_a_loss_is_one_number_of_any_kind(convert, data):
    model = Model().eval()
    loss = loss_of(model, data)
    found = ablation.ablate(model, lambda: convert(loss().detach()))
    assert_close(found.base, float(loss().detach()))
    assert_close(dict(found.without), dict(ablation.ablate(model, loss).without))


def test_effects_are_ranked_as_importance_is(data):
    model = Model().eval()
    loss = loss_of(model, data)
    found = ablation.ablate(model, loss)
    assert ablation.rank_heads(found) == found.rank_heads() == ablation.rank_heads(found.without)
    assert len(ablation.rank_heads(ablation.importance(model, loss))) == 6
    with pytest.raises(
        ValueError, match="loss must return a tensor with a gradient, got float; ablate takes any number"
    ):
        ablation.importance(model, lambda: float(loss().detach()))
