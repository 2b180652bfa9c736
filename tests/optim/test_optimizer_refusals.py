"""Arguments and options that optimizers refuse."""

import geoopt
import pytest
import torch
from manifold_models import every, model
from torch import nn

from polyhead import Stiefel, optim

NOTHING = {
    "list": list,
    "generator": lambda: (p for p in ()),
    "empty group": lambda: [{"params": []}],
    "frozen model": lambda: optim.groups(model().requires_grad_(False)),
}


@every
@pytest.mark.parametrize("nothing", NOTHING.values(), ids=NOTHING)
def test_an_optimizer_without_parameters_is_refused(make, nothing):
    with pytest.raises(
        ValueError, match=r"^params must have at least one parameter, got none; pass a model, optim\.groups\(model\) or"
    ):
        make(nothing())


@every
def test_a_tensor_instead_of_a_list_is_refused(make):
    with pytest.raises(ValueError, match=r"^params must be a model, or a list of tensors or of groups, got a tensor"):
        make(nn.Parameter(torch.ones(3)))


@every
def test_a_set_is_refused_as_in_torch(make):
    with pytest.raises(TypeError, match="set"):
        make([{"params": {nn.Parameter(torch.ones(3))}}])


BAD = [
    (optim.SGD, {"lr": -0.1}, r"^lr must be a number in \[0, inf\), got -0\.1"),
    (optim.Adam, {"lr": float("nan")}, r"^lr must be a number in \[0, inf\), got nan"),
    (optim.SGD, {"lr": "big"}, r"^lr must be a number in \[0, inf\), got 'big'"),
    (optim.Adam, {"weight_decay": -1}, r"^weight_decay must be a number in \[0, inf\), got -1"),
    (optim.SGD, {"momentum": -0.5}, r"^momentum must be a number in \[0, inf\), got -0\.5"),
    (
        optim.SGD,
        {"nesterov": True},
        "^nesterov must be used with a momentum above 0 and a dampening of 0, got momentum=0.0",
    ),
    (
        optim.SGD,
        {"nesterov": True, "momentum": 0.9, "dampening": 0.1},
        "^nesterov must be used with a momentum above 0",
    ),
    (
        optim.Adam,
        {"betas": (0.9, 1.0)},
        r"^betas\[1\] must be a number in \[0, 1\), got 1\.0",
    ),
    (optim.AdamW, {"betas": (-0.1, 0.9)}, r"^betas\[0\] must be a number in \[0, 1\), got -0\.1"),
    (optim.Adam, {"betas": 0.9}, r"^betas must be two numbers in \[0, 1\), got 0\.9"),
    (optim.Adam, {"eps": -1e-8}, r"^eps must be a number in \[0, inf\), got -1e-08"),
    (optim.Adam, {"second_moment": "matrix"}, "^second_moment must be 'elementwise' or 'scalar', got 'matrix'"),
    (optim.Adam, {"manifold": "stiefel"}, r"^manifold must be a Manifold such as Stiefel\(\), got 'stiefel'"),
    (optim.SGD, {"manifold": Stiefel}, "^manifold must be a Manifold .*, got <class"),
]


@pytest.mark.parametrize("own", [False, True], ids=["of all", "of a group"])
@pytest.mark.parametrize(("make", "options", "words"), BAD)
def test_invalid_options_are_refused(make, options, words, own):
    p = nn.Parameter(torch.ones(3))
    with pytest.raises(ValueError, match=words):
        make([{"params": [p], **options}]) if own else make([p], **options)


def test_sparse_gradients_and_complex_numbers_are_refused():
    table = nn.Embedding(5, 3, sparse=True)
    optimizer = optim.SGD(table.named_parameters())
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(
        ValueError, match=r"^weight: the gradient must be dense and the parameter real, got a torch.sparse_coo gradient"
    ):
        optimizer.step()
    p = nn.Parameter(torch.ones(3, dtype=torch.complex64))
    p.grad = torch.ones_like(p)
    with pytest.raises(ValueError, match=r"^params\[0\] of group 0 with shape \(3,\): .*complex"):
        optim.SGD([p]).step()


FOREIGN = [
    ({"manifolds": Stiefel()}, "^manifolds: unknown option; did you mean 'manifold'"),
    ({"amsgrad": True}, "^amsgrad must be left out, got True"),
    ({"stabilize": 10}, "^stabilize must be left out, got 10"),
]


@pytest.mark.parametrize(("words", "message"), FOREIGN)
def test_unsupported_and_misspelt_options_are_refused(words, message):
    p = nn.Parameter(torch.ones(3))
    with pytest.raises(ValueError, match=message):
        optim.Adam([{"params": [p], **words}])
    # other names belong to the caller
    optim.Adam([{"params": [p], "name": "decoder", "amsgrad": False, "max_momentum": 0.9}])


def test_manifolds_of_other_libraries_are_refused():
    theirs = geoopt.ManifoldParameter(Stiefel().random(5, 2), manifold=geoopt.EuclideanStiefel())
    with pytest.raises(
        ValueError, match=r"manifolds must be set by group, got a ManifoldParameter on Stiefel\(euclidean\)"
    ):
        optim.Adam([theirs])
    optim.Adam([{"params": [theirs], "manifold": Stiefel()}])


@pytest.mark.parametrize("said", [Stiefel(), [Stiefel()], {"weight": "stiefel"}, {"weight": Stiefel}])
def test_invalid_declarations_of_manifolds_are_refused(said):
    module = nn.Linear(3, 3)
    module.manifolds = said
    with pytest.raises(ValueError, match=r"^0: manifolds must be a dict from parameter names to manifolds, got "):
        optim.groups(nn.Sequential(module))


def test_groups_takes_models_only():
    for given in (nn.Linear(3, 3).parameters(), torch.ones(3, 2)):
        with pytest.raises(ValueError, match=r"^model must be an nn.Module, got "):
            optim.groups(given)
