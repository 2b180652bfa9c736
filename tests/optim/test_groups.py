"""Groups by manifold, and parameters and gradients that are refused."""

import copy

import pytest
import torch
from manifold_models import every, model
from torch import nn

from polyhead import Euclidean, MultiHeadAttention, Stiefel, optim


def names(group):
    return [name for name, _ in group["params"]]


def test_groups_are_named_and_the_euclidean_one_is_first():
    net = model()
    first, *others = optim.groups(net)
    assert first.keys() == {"params"}
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
    assert only == {"params": list(net.named_parameters())}
    assert optim.check(net) == (True, None)


def test_frozen_parameters_are_left_out():
    net = model()
    net[0].q_proj.weight.requires_grad_(False)
    net[1].requires_grad_(False)
    found = optim.groups(net)
    assert [group.get("manifold") for group in found] == [None, Stiefel(heads=6)]
    assert names(found[1]) == ["0.k_proj.weight", "0.v_proj.weight"]
    assert not any(name.startswith("1.") for name in names(found[0]))
    net.requires_grad_(False)
    assert optim.groups(net) == []


def test_shared_parameters_are_in_one_group():
    one, two = (MultiHeadAttention(30, 6, manifold="stiefel") for _ in range(2))
    two.q_proj.weight = one.q_proj.weight
    net = nn.ModuleList([one, two, one])
    found = optim.groups(net)
    assert names(found[1]) == [f"0.{x}_proj.weight" for x in "qkv"] + [f"1.{x}_proj.weight" for x in "kv"]
    optim.Adam(found)


def test_a_module_declares_the_manifolds_of_its_parameters():
    class Rotation(nn.Module):
        def __init__(self):
            super().__init__()
            self.manifolds = {"rotation": Stiefel()}
            self.rotation = nn.Parameter(Stiefel().random(5, 5))

    net = nn.Sequential(Rotation(), nn.Linear(5, 5))
    assert {group.get("manifold"): names(group) for group in optim.groups(net)} == {
        None: ["1.weight", "1.bias"],
        Stiefel(): ["0.rotation"],
    }


def test_conflicting_and_unknown_manifolds_are_refused():
    one, two = MultiHeadAttention(30, 6, manifold="stiefel"), MultiHeadAttention(30, 3, manifold="stiefel")
    two.q_proj.weight = one.q_proj.weight
    with pytest.raises(
        ValueError,
        match=r"^1: q_proj\.weight, shared .*must be on one manifold, got Stiefel\(heads=3\) here and Stiefel\(heads=6\) there",
    ):
        optim.groups(nn.ModuleList([one, two]))
    lost = nn.Linear(3, 3)
    lost.manifolds = {"rotation": Stiefel()}
    for ask in (optim.groups, optim.check, optim.project):
        with pytest.raises(ValueError, match=r"^0: manifolds must name parameters of the module, got 'rotation'"):
            ask(nn.Sequential(lost))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_project_moves_a_model_to_its_manifolds(dtype):
    net = model()
    # single precision, or less, is further off than the rounding of double
    drifted = net.to(dtype).to(torch.float64)
    assert not optim.check(drifted)[0]
    with pytest.raises(ValueError, match=r"polyhead\.optim\.project\(model\) projects all parameters of a model"):
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


def test_groups_have_their_own_options():
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
        ValueError, match=rf"^{name}: the gradient must be finite, got NaN or inf; no parameter was changed"
    ):
        optimizer.step()
    unchanged(optimizer, before)
    backward(net)
    optimizer.step()
    assert optim.check(net) == (True, None)


@every
@pytest.mark.parametrize("steps", [0, 2])
def test_a_parameter_changed_to_a_point_off_its_manifold_is_refused(make, steps):
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
    message = (
        r"^1\.v_proj\.weight must be on Stiefel\(heads=1\): .* off the identity by .*Stiefel\(heads=1\)\.project\(x\)"
    )
    with pytest.raises(ValueError, match=message):
        optimizer.step()
    unchanged(optimizer, before)
    with torch.no_grad():
        weight = net[1].v_proj.weight
        weight.copy_(Stiefel(heads=1).project(weight))
    optimizer.step()
    assert optim.check(net) == (True, None)


@every
def test_a_parameter_loaded_from_another_point_of_the_manifold_is_accepted(make):
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
    with pytest.raises(ValueError, match=r"^0\.k_proj\.weight must be on Stiefel\(heads=6\): .*\.project\(x\) is the"):
        make(optim.groups(net))
    bare = [nn.Parameter(Stiefel().random(5, 3)), nn.Parameter(torch.randn(5, 3))]
    with pytest.raises(ValueError, match=r"^params\[1\] of group 0 with shape \(5, 3\) must be on Stiefel\(\)"):
        make(bare, manifold=Stiefel())
    with pytest.raises(ValueError, match="as many orthonormal vectors as dimensions, got 3 in 2 dimensions"):
        make([nn.Parameter(torch.zeros(2, 3))], manifold=Stiefel())


@every
def test_a_group_that_is_refused_is_not_added(make):
    p = nn.Parameter(Stiefel().random(5, 3))
    optimizer, bad = make([p], manifold=Stiefel()), nn.Parameter(torch.randn(5, 3))
    with pytest.raises(ValueError, match=r"params\[0\] of group 1"):
        optimizer.add_param_group({"params": [bad]})
    assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": [bad], "manifold": Euclidean()})


def test_check_names_parameters_that_a_plain_optimizer_moved_off():
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
def test_a_model_is_accepted_in_place_of_its_groups(make):
    model = nn.Sequential(nn.Linear(8, 8), MultiHeadAttention(8, 2, manifold="stiefel"))
    given = [(group["manifold"], group["param_names"]) for group in make(model).param_groups]
    expected = [(group.get("manifold", Euclidean()), names(group)) for group in optim.groups(model)]
    assert given == expected


@pytest.mark.parametrize("retraction", ["polar", "cayley"])
def test_gradients_near_the_largest_float_are_refused_without_a_trace(retraction):
    on = Stiefel(retraction=retraction)
    params = [nn.Parameter(on.random(7, 3)) for _ in range(3)]
    optimizer = optim.SGD(params, lr=0.1, momentum=0.9, manifold=on)
    for p in params:
        p.grad = torch.randn(7, 3)
    params[1].grad = 3e38 * torch.randn(7, 3).sign()
    before = params[1].detach().clone()
    with pytest.raises(ValueError, match=r"must end in finite numbers, got NaN or inf .*, which are unchanged"):
        optimizer.step()
    assert torch.equal(params[1], before)
    params[1].grad = torch.randn(7, 3)
    optimizer.step()
    assert all(on.check(p) == (True, None) for p in params)


def test_a_parametrised_projection_is_named():
    layer = MultiHeadAttention(8, 2, manifold="stiefel")
    nn.utils.parametrizations.weight_norm(layer.q_proj)
    with pytest.raises(ValueError, match=r"^q_proj must be an nn\.Linear with its own weight .*got ParametrizedLinear"):
        optim.groups(layer)
    del layer.manifold["q"]
    assert [group.get("manifold") for group in optim.groups(layer)] == [None, Stiefel(heads=2)]


def test_nan_cannot_be_projected():
    layer = MultiHeadAttention(8, 2, manifold="stiefel")
    with torch.no_grad():
        layer.k_proj.weight[0, 0] = torch.nan
    with pytest.raises(ValueError, match=r"^k_proj\.weight must be finite, got NaN or inf"):
        optim.project(layer)
    with pytest.raises(ValueError, match=r"must be finite, got NaN or inf$"):
        optim.Adam(layer)
