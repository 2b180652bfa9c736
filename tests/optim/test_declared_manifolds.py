"""Parameters without their model: optimizers find the manifolds that live modules declare for them."""

import copy
import gc
import io
import pickle
import weakref

import pytest
import torch
from manifold_models import every, model
from torch import nn
from torch.nn.utils import parametrizations

from polyhead import Euclidean, MultiHeadAttention, Stiefel, optim
from polyhead.nn import FeedForward, TransformerLayer

REFUSED = r"must be in a group with a manifold, since its module declares Stiefel\(heads="


class Encoder(nn.Module):
    """A module that declares a manifold by a plain attribute."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(Stiefel().random(5, 3))
        self.manifolds = {"weight": Stiefel()}


def layer(**options):
    return MultiHeadAttention(30, 6, **{"manifold": "stiefel", **options})


@every
def test_the_parameters_of_a_model_are_refused_without_their_manifolds(make):
    net = model()
    with pytest.raises(ValueError) as refused:
        make(net.parameters())
    name = type(make(net)).__name__
    assert str(refused.value) == (
        "params[0] of group 0 with shape (30, 30) must be in a group with a manifold, since its module declares Stiefel(heads=6), "
        f"got a group without one; pass the model, optim.{name}(model), or optim.{name}(optim.groups(model)). To train it without "
        'constraint, pass {"params": [...], "manifold": Euclidean()}'
    )
    with pytest.raises(ValueError, match=rf"^0\.q_proj\.weight {REFUSED}6"):
        make(net.named_parameters())
    with pytest.raises(ValueError, match=rf"^params\[0\] of group 1 .*{REFUSED}1"):
        make([{"params": net[2].parameters(), "weight_decay": 0.1}, {"params": net[1].v_proj.parameters()}])


@every
def test_parameters_without_a_manifold_are_accepted(make):
    net = model()
    make(net[2].parameters())
    make(MultiHeadAttention(30, 6).parameters())
    make([net[0].o_proj.weight, net[0].q_proj.bias, net[1].q_proj.weight])


@every
def test_an_explicit_manifold_is_the_callers_choice(make):
    net = model()
    free = make([{"params": net.parameters(), "manifold": Euclidean()}])
    assert [group["manifold"] for group in free.param_groups] == [Euclidean()]
    make(net.parameters(), manifold=Euclidean()).add_param_group({"params": layer().parameters()})
    make([net[0].v_proj.weight], manifold=Stiefel("canonical", heads=3 * 2))


@every
def test_a_group_added_later_is_refused_too(make):
    optimizer, net = make([nn.Parameter(torch.ones(3))]), layer()
    for again in (optimizer, copy.deepcopy(optimizer)):
        with pytest.raises(ValueError, match=REFUSED):
            again.add_param_group({"params": net.parameters()})
        assert len(again.param_groups) == 1


def test_modules_of_other_kinds_and_layers_in_blocks_are_found():
    encoder = nn.Sequential(nn.Linear(5, 5), Encoder())
    with pytest.raises(ValueError, match=r"since its module declares Stiefel\(\), got"):
        optim.SGD(encoder.parameters())
    block = TransformerLayer(layer(), FeedForward(30, 60))
    with pytest.raises(ValueError, match=REFUSED):
        optim.AdamW(block.parameters())


def through_pickle(net):
    return pickle.loads(pickle.dumps(net))


def through_torch(net):
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def assigned(net):
    net.load_state_dict(copy.deepcopy(net.state_dict()), assign=True)
    return net


def loaded(net):
    net.load_state_dict(layer().state_dict())
    return net


def pruned(net):
    net.prune([1])
    return net


def emptied(net):
    net = net.to("meta").to_empty(device="cpu")
    net.reset_parameters()
    return net


def called(net):
    torch.func.functional_call(net, {name: p.detach() for name, p in net.named_parameters()}, (torch.randn(5, 30),))
    return net


def declared_later(net):
    net.manifold = "euclidean"
    optim.SGD(net.parameters())
    net.manifold = {"q": "stiefel"}
    return net


CHANGES = {
    "deepcopy": copy.deepcopy, "pickle": through_pickle, "torch.save": through_torch, "to": lambda net: net.double(),
    "assign": assigned, "load": loaded, "prune": pruned, "to_empty": emptied, "functional_call": called, "later": declared_later,
    "compile": lambda net: torch.compile(net, backend="eager"), "fold": lambda net: net.fold_value_projection(),
    "data-parallel": lambda net: nn.DataParallel(net),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("collected", [False, True])
def test_manifolds_are_found_after_changes_of_the_layer(change, collected):
    net = change(layer())
    if collected:
        gc.collect()
    with pytest.raises(ValueError, match=REFUSED):
        optim.Adam(net.parameters())


def test_tied_weights_are_refused_through_every_module():
    declaring, free = layer(), nn.Linear(30, 30)
    free.weight = declaring.v_proj.weight
    with pytest.raises(ValueError, match=REFUSED):
        optim.SGD(free.parameters())
    declaring.manifold = "euclidean"
    optim.SGD(free.parameters())


def test_parametrised_projections_are_named_only_where_they_are_passed():
    net, other = layer(), layer()
    parametrizations.weight_norm(net.q_proj)
    with pytest.raises(ValueError, match=r"^q_proj must be an nn\.Linear with its own weight"):
        optim.Adam(net.parameters())
    # an invalid or unfinished module elsewhere is not the caller's concern
    lost, unfinished = nn.Linear(3, 3), Encoder.__new__(Encoder)
    lost.manifolds, unfinished.__dict__["manifolds"] = "sphere", {}
    optim.Adam(other.o_proj.parameters())
    del net.manifold["q"]
    with pytest.raises(ValueError, match=REFUSED):
        optim.Adam(net.parameters())


def test_a_discarded_layer_leaves_its_parameters_free_and_is_collected():
    net = layer()
    weight, alive = net.q_proj.weight, weakref.ref(net)
    gc.collect()
    gc.disable()
    try:
        with pytest.raises(ValueError, match=REFUSED):
            optim.Adam([weight])
        del net
        # no reference cycle, and none kept by the search
        assert alive() is None
    finally:
        gc.enable()
    optim.Adam([weight])
