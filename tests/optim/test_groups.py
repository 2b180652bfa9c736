"""Groups read off a model, and everything that an optimizer refuses."""

import copy

import geoopt
import pytest
import torch
from torch import nn

from polyhead import Euclidean, MultiHeadAttention, Stiefel, optim

OPTIMIZERS = {
    "sgd": lambda params, **options: optim.SGD(params, lr=0.1, momentum=0.9, **options),
    "adam": lambda params, **options: optim.Adam(params, lr=0.1, **options),
    "adam-scalar": lambda params, **options: optim.Adam(params, lr=0.1, second_moment="scalar", **options),
    "adamw": lambda params, **options: optim.AdamW(params, lr=0.1, **options),
}
every = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)


def model():
    """Two layers of different sizes and a map that is on no manifold."""
    layers = [
        MultiHeadAttention(30, 6, manifold="stiefel"),
        MultiHeadAttention(30, 2, kv_heads=1, manifold={"v": "stiefel"}),
    ]
    return nn.ModuleList([*layers, nn.Linear(30, 7)])


def names(group):
    return [name for name, _ in group["params"]]


def test_groups_are_named_and_the_euclidean_one_is_first():
    net = model()
    first, *others = optim.groups(net)
    assert first["manifold"] == Euclidean()
    assert {group["manifold"]: names(group) for group in others} == {
        Stiefel(heads=6): ["0.q_proj.weight", "0.k_proj.weight", "0.v_proj.weight"],
        Stiefel(heads=1): ["1.v_proj.weight"],
    }
    together = [pair for group in (first, *others) for pair in group["params"]]
    assert {name: id(p) for name, p in together} == {name: id(p) for name, p in net.named_parameters()}
    assert len(together) == len(dict(together))


def test_a_model_without_manifolds_is_one_group():
    net = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    (only,) = optim.groups(net)
    assert only == {"params": list(net.named_parameters()), "manifold": Euclidean()}
    assert optim.check(net) == (True, None)


def test_frozen_parameters_are_left_out():
    net = model()
    net[0].q_proj.weight.requires_grad_(False)
    net[1].requires_grad_(False)
    found = optim.groups(net)
    assert [group["manifold"] for group in found] == [Euclidean(), Stiefel(heads=6)]
    assert names(found[1]) == ["0.k_proj.weight", "0.v_proj.weight"]
    assert not any(name.startswith("1.") for name in names(found[0]))
    net.requires_grad_(False)
    assert optim.groups(net) == []


def test_shared_parameters_come_once():
    one, two = (MultiHeadAttention(30, 6, manifold="stiefel") for _ in range(2))
    two.q_proj.weight = one.q_proj.weight
    net = nn.ModuleList([one, two, one])
    found = optim.groups(net)
    assert names(found[1]) == [f"0.{x}_proj.weight" for x in "qkv"] + [f"1.{x}_proj.weight" for x in "kv"]
    optim.Adam(found)


def test_a_module_of_ones_own_says_where_its_parameters_lie():
    class Rotation(nn.Module):
        def __init__(self):
            super().__init__()
            self.manifolds = {"turn": Stiefel()}
            self.turn = nn.Parameter(Stiefel().random(5, 5))

    net = nn.Sequential(Rotation(), nn.Linear(5, 5))
    assert {group["manifold"]: names(group) for group in optim.groups(net)} == {
        Euclidean(): ["1.weight", "1.bias"],
        Stiefel(): ["0.turn"],
    }


def test_manifolds_that_contradict_or_name_nothing_are_refused():
    one, two = MultiHeadAttention(30, 6, manifold="stiefel"), MultiHeadAttention(30, 3, manifold="stiefel")
    two.q_proj.weight = one.q_proj.weight
    with pytest.raises(
        ValueError, match=r"^1: q_proj\.weight is shared .* on Stiefel\(heads=6\) there and on Stiefel\(heads=3\)"
    ):
        optim.groups(nn.ModuleList([one, two]))
    lost = nn.Linear(3, 3)
    lost.manifolds = {"turn": Stiefel()}
    for ask in (optim.groups, optim.check, optim.project):
        with pytest.raises(ValueError, match=r"^0: its manifolds name 'turn', which is no parameter"):
            ask(nn.Sequential(lost))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_project_takes_a_model_back_to_its_manifolds(dtype):
    net = model()
    # single precision, or less, is further off than the rounding of double
    drifted = net.to(dtype).to(torch.float64)
    assert not optim.check(drifted)[0]
    with pytest.raises(ValueError, match=r"polyhead\.optim\.project\(model\) takes all of a model there"):
        optim.Adam(optim.groups(drifted))
    before = {name: p.detach().clone() for name, p in drifted.named_parameters()}
    optim.project(drifted)
    assert optim.check(drifted) == (True, None)
    optim.Adam(optim.groups(drifted))
    for name, p in drifted.named_parameters():
        torch.testing.assert_close(p.detach(), before[name], atol=1e-2, rtol=0)
        assert torch.equal(p, before[name]) or name in (
            "0.q_proj.weight",
            "0.k_proj.weight",
            "0.v_proj.weight",
            "1.v_proj.weight",
        )


def test_groups_take_options_of_their_own():
    found = optim.groups(model())
    found[0]["lr"] = 1e-4
    optimizer = optim.Adam(found, lr=0.1)
    assert [group["lr"] for group in optimizer.param_groups] == [1e-4, 0.1, 0.1]


def snapshot(optimizer):
    """All that a step could change."""
    params = [p.detach().clone() for group in optimizer.param_groups for p in group["params"]]
    return params, copy.deepcopy(optimizer.state_dict()["state"])


def unchanged(optimizer, before):
    params, state = snapshot(optimizer)
    assert all(torch.equal(a, b) for a, b in zip(params, before[0], strict=True))
    assert state.keys() == before[1].keys()
    for key, kept in state.items():
        assert kept.keys() == before[1][key].keys()
        assert all(torch.equal(kept[name], before[1][key][name]) for name in kept)


def backward(net):
    for p in net.parameters():
        p.grad = torch.randn_like(p)


@every
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", ["2.bias", "0.k_proj.weight", "1.v_proj.weight"])
@pytest.mark.parametrize("steps", [0, 2])
def test_a_gradient_that_is_not_finite_moves_nothing(make, bad, name, steps):
    net = model()
    optimizer = make(optim.groups(net))
    for _ in range(steps):
        backward(net)
        optimizer.step()
    backward(net)
    net.get_parameter(name).grad.view(-1)[3] = bad
    before = snapshot(optimizer)
    with pytest.raises(
        ValueError, match=rf"^{name}: its gradient has numbers that are not finite; no parameter was moved"
    ):
        optimizer.step()
    unchanged(optimizer, before)
    backward(net)
    optimizer.step()
    assert optim.check(net) == (True, None)


@every
@pytest.mark.parametrize("steps", [0, 2])
def test_a_parameter_that_others_moved_off_its_manifold_is_refused(make, steps):
    net = model()
    optimizer = make(optim.groups(net))
    for _ in range(steps):
        backward(net)
        optimizer.step()
    state = net.state_dict()
    state["1.v_proj.weight"] = torch.randn_like(state["1.v_proj.weight"])
    net.load_state_dict(state)
    backward(net)
    before = snapshot(optimizer)
    words = r"^1\.v_proj\.weight: it is not on Stiefel\(heads=1\): .* off the identity by .*Stiefel\(heads=1\)\.project\(x\)"
    with pytest.raises(ValueError, match=words):
        optimizer.step()
    unchanged(optimizer, before)
    with torch.no_grad():
        weight = net[1].v_proj.weight
        weight.copy_(Stiefel(heads=1).project(weight))
    optimizer.step()
    assert optim.check(net) == (True, None)


@every
def test_a_parameter_loaded_from_another_point_of_the_manifold_is_welcome(make):
    net, other = model(), model()
    optimizer = make(optim.groups(net))
    net.load_state_dict(other.state_dict())
    backward(net)
    optimizer.step()
    assert optim.check(net) == (True, None)


@every
def test_a_parameter_off_its_manifold_is_refused_from_the_start(make):
    net = model()
    nn.init.xavier_uniform_(net[0].k_proj.weight)
    with pytest.raises(
        ValueError, match=r"^0\.k_proj\.weight: it is not on Stiefel\(heads=6\): .*\.project\(x\) is the"
    ):
        make(optim.groups(net))
    bare = [nn.Parameter(Stiefel().random(5, 3)), nn.Parameter(torch.randn(5, 3))]
    with pytest.raises(ValueError, match=r"^params\[1\] of group 0, of shape \(5, 3\): it is not on Stiefel\(\)"):
        make(bare, manifold=Stiefel())
    with pytest.raises(ValueError, match="3 directions cannot be orthonormal in 2 dimensions"):
        make([nn.Parameter(torch.zeros(2, 3))], manifold=Stiefel())


@every
def test_a_group_that_is_refused_is_not_added(make):
    p = nn.Parameter(Stiefel().random(5, 3))
    optimizer, bad = make([p], manifold=Stiefel()), nn.Parameter(torch.randn(5, 3))
    with pytest.raises(ValueError, match=r"params\[0\] of group 1"):
        optimizer.add_param_group({"params": [bad]})
    assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": [bad], "manifold": Euclidean()})


def test_check_says_which_parameters_a_plain_optimizer_let_drift():
    net = model()
    assert optim.check(net) == (True, None)
    plain = torch.optim.SGD(net[0].q_proj.parameters(), lr=0.1)
    backward(net)
    plain.step()
    ok, reason = optim.check(net)
    assert not ok
    (line,) = reason.splitlines()
    weight = net[0].q_proj.weight.detach().unflatten(0, (6, 5))
    drift = (weight @ weight.mT - torch.eye(5)).abs().max()
    assert line.startswith("0.q_proj.weight: the rows of head ")
    assert f"off the identity by {drift:.2g}" in line
    with torch.no_grad():
        net[2].bias[0] = torch.nan
        net[1].v_proj.weight.mul_(2)
    assert [line.split(":")[0] for line in optim.check(net)[1].splitlines()] == [
        "0.q_proj.weight",
        "1.v_proj.weight",
        "2.bias",
    ]


NOTHING = {
    "list": list,
    "generator": lambda: (p for p in ()),
    "empty group": lambda: [{"params": []}],
    "frozen model": lambda: optim.groups(model().requires_grad_(False)),
}


@every
@pytest.mark.parametrize("nothing", NOTHING.values(), ids=NOTHING)
def test_an_optimizer_of_nothing_is_refused(make, nothing):
    with pytest.raises(
        ValueError, match=r"^params: there is no parameter; it must be a model, optim\.groups\(model\) or"
    ):
        make(nothing())


@every
def test_a_tensor_that_is_no_list_of_them_is_refused(make):
    with pytest.raises(ValueError, match=r"^params: it is a tensor; it must be a list of tensors or of groups"):
        make(nn.Parameter(torch.ones(3)))


@every
def test_a_set_which_has_no_order_is_refused_as_in_torch(make):
    with pytest.raises(TypeError, match="set"):
        make([{"params": {nn.Parameter(torch.ones(3))}}])


BAD = [
    (optim.SGD, {"lr": -0.1}, r"^lr must be a number in \[0, inf\), got -0\.1"),
    (optim.Adam, {"lr": float("nan")}, r"^lr must be a number in \[0, inf\), got nan"),
    (optim.SGD, {"lr": "big"}, r"^lr must be a number in \[0, inf\), got 'big'"),
    (optim.Adam, {"weight_decay": -1}, r"^weight_decay must be a number in \[0, inf\), got -1"),
    (optim.SGD, {"momentum": -0.5}, r"^momentum must be a number in \[0, inf\), got -0\.5"),
    (optim.SGD, {"nesterov": True}, "^nesterov: it needs a momentum, and no dampening"),
    (optim.SGD, {"nesterov": True, "momentum": 0.9, "dampening": 0.1}, "^nesterov: it needs a momentum"),
    (
        optim.Adam,
        {"betas": (0.9, 1.0)},
        r"^betas\[1\] must be a number in \[0, 1\), got 1\.0",
    ),
    (optim.AdamW, {"betas": (-0.1, 0.9)}, r"^betas\[0\] must be a number in \[0, 1\), got -0\.1"),
    (optim.Adam, {"betas": 0.9}, r"^betas must be two numbers in \[0, 1\), got 0\.9"),
    (optim.Adam, {"eps": -1e-8}, r"^eps must be a number in \[0, inf\), got -1e-08"),
    (optim.Adam, {"second_moment": "matrix"}, "^second_moment: it is 'matrix'; it must be 'elementwise' or 'scalar'"),
    (optim.Adam, {"manifold": "stiefel"}, r"^manifold: it is 'stiefel'; it must be a Manifold such as Stiefel\(\)"),
    (optim.SGD, {"manifold": Stiefel}, "^manifold: it is <class .*it must be a Manifold"),
]


@pytest.mark.parametrize("own", [False, True], ids=["of all", "of a group"])
@pytest.mark.parametrize(("make", "options", "words"), BAD)
def test_options_that_are_none(make, options, words, own):
    p = nn.Parameter(torch.ones(3))
    with pytest.raises(ValueError, match=words):
        make([{"params": [p], **options}]) if own else make([p], **options)


def test_sparse_gradients_and_complex_numbers_are_refused():
    table = nn.Embedding(5, 3, sparse=True)
    optimizer = optim.SGD(table.named_parameters())
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match=r"^weight: it has a sparse gradient"):
        optimizer.step()
    p = nn.Parameter(torch.ones(3, dtype=torch.complex64))
    p.grad = torch.ones_like(p)
    with pytest.raises(ValueError, match=r"^params\[0\] of group 0, of shape \(3,\): .*complex"):
        optim.SGD([p]).step()


@pytest.mark.parametrize("size", [1e3, 1e10, 1e25])
@pytest.mark.parametrize("shape", [(11, 3), (13, 7), (5, 5)], ids=str)
@pytest.mark.parametrize("retraction", ["polar", "cayley"])
@every
def test_gradients_of_any_finite_size_keep_points_on_the_manifold(make, retraction, shape, size):
    on = Stiefel(retraction=retraction)
    p = nn.Parameter(on.random(*shape))
    optimizer = make([p], manifold=on)
    for _ in range(3):
        p.grad = size * torch.randn(shape)
        optimizer.step()
        assert on.check(p.detach()) == (True, None)


@every
def test_a_model_stands_for_its_groups(make):
    model = nn.Sequential(nn.Linear(8, 8), MultiHeadAttention(8, 2, manifold="stiefel"))
    given = [(group["manifold"], group["param_names"]) for group in make(model).param_groups]
    assert given == [(group["manifold"], [name for name, _ in group["params"]]) for group in optim.groups(model)]


@pytest.mark.parametrize("retraction", ["polar", "cayley"])
def test_gradients_near_the_largest_number_there_is_are_refused_and_forgotten(retraction):
    on = Stiefel(retraction=retraction)
    params = [nn.Parameter(on.random(7, 3)) for _ in range(3)]
    optimizer = optim.SGD(params, lr=0.1, momentum=0.9, manifold=on)
    for p in params:
        p.grad = torch.randn(7, 3)
    params[1].grad = 3e38 * torch.randn(7, 3).sign()
    before = params[1].detach().clone()
    with pytest.raises(ValueError, match=r"ends in numbers that are not finite; they stay where they were"):
        optimizer.step()
    assert torch.equal(params[1], before)
    params[1].grad = torch.randn(7, 3)
    optimizer.step()
    assert all(on.check(p) == (True, None) for p in params)


def test_a_parametrised_projection_is_named():
    layer = MultiHeadAttention(8, 2, manifold="stiefel")
    nn.utils.parametrizations.weight_norm(layer.q_proj)
    with pytest.raises(ValueError, match=r"^q_proj: it is ParametrizedLinear, without a weight of its own"):
        optim.groups(layer)
    del layer.manifold["q"]
    assert [group["manifold"] for group in optim.groups(layer)] == [Euclidean(), Stiefel(heads=2)]


def test_there_is_no_nearest_point_to_what_is_no_number():
    layer = MultiHeadAttention(8, 2, manifold="stiefel")
    with torch.no_grad():
        layer.k_proj.weight[0, 0] = torch.nan
    with pytest.raises(ValueError, match=r"^k_proj\.weight: it has numbers that are not finite"):
        optim.project(layer)
    with pytest.raises(ValueError, match=r"not finite$"):
        optim.Adam(layer)


FOREIGN = [
    ({"manifolds": Stiefel()}, "^manifolds: there is no such option; manifold is meant"),
    ({"amsgrad": True}, "^amsgrad: it is True; it must be left out"),
    ({"stabilize": 10}, "^stabilize: it is 10; it must be left out"),
]


@pytest.mark.parametrize(("words", "message"), FOREIGN)
def test_options_that_would_not_be_honoured(words, message):
    p = nn.Parameter(torch.ones(3))
    with pytest.raises(ValueError, match=message):
        optim.Adam([{"params": [p], **words}])
    # words of the caller's own may stand
    optim.Adam([{"params": [p], "name": "decoder", "amsgrad": False, "max_momentum": 0.9}])


def test_manifolds_of_other_libraries_are_not_lost_silently():
    theirs = geoopt.ManifoldParameter(Stiefel().random(5, 2), manifold=geoopt.EuclideanStiefel())
    with pytest.raises(ValueError, match=r"it is a ManifoldParameter on Stiefel\(euclidean\).*its group must say it"):
        optim.Adam([theirs])
    optim.Adam([{"params": [theirs], "manifold": Stiefel()}])


@pytest.mark.parametrize("said", [Stiefel(), [Stiefel()], {"weight": "stiefel"}, {"weight": Stiefel}])
def test_modules_that_say_it_wrongly(said):
    module = nn.Linear(3, 3)
    module.manifolds = said
    with pytest.raises(ValueError, match=r"^0: its manifolds are .*; they must be a dict from names of its parameters"):
        optim.groups(nn.Sequential(module))


def test_only_models_know_their_manifolds():
    for given in (nn.Linear(3, 3).parameters(), torch.ones(3, 2)):
        with pytest.raises(ValueError, match=r"^model: it is .*; it must be an nn.Module"):
            optim.groups(given)
