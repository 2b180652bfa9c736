"""What an optimizer keeps: saved, resumed, copied."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from polyhead import Euclidean, MultiHeadAttention, Stiefel, optim

OPTIMIZERS = {
    "sgd": lambda params: optim.SGD(params, lr=0.1),
    "momentum": lambda params: optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda params: optim.Adam(params, lr=0.1),
    "adam-scalar": lambda params: optim.Adam(params, lr=0.1, second_moment="scalar"),
    "adamw": lambda params: optim.AdamW(params, lr=0.1, weight_decay=0.1),
}
every = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
MANIFOLDS = (Stiefel(), Stiefel("canonical", "cayley"), Stiefel(heads=2), Euclidean())


def start(dtype=torch.float32):
    """Two tensors on each manifold, and their groups."""
    shapes = ((11, 3), (2, 7, 7), (6, 5), (5,))
    params = [
        [nn.Parameter(on.random(*shape, dtype=dtype)) for _ in range(2)]
        for on, shape in zip(MANIFOLDS, shapes, strict=True)
    ]
    return [{"params": p, "manifold": on} for p, on in zip(params, MANIFOLDS, strict=True)]


def flat(groups):
    return [p for group in groups for p in group["params"]]


def walk(optimizer, seed, steps=5):
    """Steps by gradients that depend on the seed and on where the parameters are; one parameter stays unchanged in some."""
    generator = torch.Generator().manual_seed(seed)
    for number in range(steps):
        for place, p in enumerate(flat(optimizer.param_groups)):
            noise = torch.randn(p.shape, generator=generator).to(p.dtype)
            p.grad = None if place == 1 and number % 2 else noise + p.detach()
        optimizer.step()


@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=["fp32", "fp64", "bf16"])
def test_resumed_equals_uninterrupted_bit_for_bit(make, dtype, tmp_path):
    groups = start(dtype)
    optimizer = make(groups)
    walk(optimizer, 1)
    torch.save(
        {"optimizer": optimizer.state_dict(), "points": [p.detach() for p in flat(groups)]}, tmp_path / "saved.pt"
    )
    walk(optimizer, 2)

    fresh = start(dtype)
    resumed = make(fresh)
    saved = torch.load(tmp_path / "saved.pt", weights_only=True)
    with torch.no_grad():
        for p, kept in zip(flat(fresh), saved["points"], strict=True):
            p.copy_(kept)
    resumed.load_state_dict(saved["optimizer"])
    walk(resumed, 2)
    assert all(torch.equal(a, b) for a, b in zip(flat(groups), flat(fresh), strict=True))
    for a, b in zip(flat(groups), flat(fresh), strict=True):
        assert optimizer.state[a].keys() == resumed.state[b].keys()
        assert all(torch.equal(optimizer.state[a][name], resumed.state[b][name]) for name in optimizer.state[a])


def test_saving_and_loading_change_neither_optimizer():
    optimizer = OPTIMIZERS["adam"](start())
    walk(optimizer, 1)
    saved = optimizer.state_dict()
    assert [group["manifold"] for group in optimizer.param_groups] == list(MANIFOLDS)
    assert [group["manifold"] for group in saved["param_groups"]] == [repr(on) for on in MANIFOLDS]
    kept = copy.deepcopy(saved)
    other = OPTIMIZERS["adam"](start())
    other.load_state_dict(saved)
    assert repr(saved) == repr(kept)
    assert [group["manifold"] for group in other.param_groups] == list(MANIFOLDS)


@pytest.mark.parametrize(
    ("saved", "here"),
    [(Stiefel(), Euclidean()), (Euclidean(), Stiefel()), (Stiefel(), Stiefel("canonical"))],
    ids=str,
)
def test_a_state_saved_on_another_manifold_is_refused(saved, here):
    x = Stiefel().random(5, 3)
    one, other = (optim.Adam([nn.Parameter(x.clone())], manifold=on) for on in (saved, here))
    walk(one, 1)
    before = other.state_dict()
    with pytest.raises(ValueError) as refused:
        other.load_state_dict(one.state_dict())
    assert str(refused.value) == f"state_dict: group 0 must be on {here!r}, got one saved on {saved!r}"
    assert repr(other.state_dict()) == repr(before)


def test_another_number_of_groups_is_refused_as_in_torch():
    one, other = OPTIMIZERS["adam"](start()), OPTIMIZERS["adam"](start()[:2])
    with pytest.raises(ValueError, match="different number of parameter groups"):
        other.load_state_dict(one.state_dict())


@pytest.mark.parametrize(
    ("name", "options"), [("SGD", {"lr": 0.1, "momentum": 0.9}), ("Adam", {"lr": 0.1}), ("AdamW", {"lr": 0.1})]
)
def test_a_state_saved_by_torch_continues_as_in_torch(name, options):
    """Euclidean parameters whose training began with torch's own optimizer."""
    params = [nn.Parameter(torch.randn(5, 3)), nn.Parameter(torch.randn(()))]
    theirs = getattr(torch.optim, name)(params, **options)
    walk(theirs, 1)
    copies = [nn.Parameter(p.detach().clone()) for p in params]
    ours = getattr(optim, name)(copies, **options)
    # torch would share the tensors
    ours.load_state_dict(copy.deepcopy(theirs.state_dict()))
    walk(theirs, 2)
    walk(ours, 2)
    torch.testing.assert_close(copies, params, atol=1e-6, rtol=1e-6)


def through_pickle(thing):
    file = io.BytesIO()
    pickle.dump(thing, file)
    file.seek(0)
    return pickle.load(file)


@every
@pytest.mark.parametrize("duplicate", [copy.deepcopy, through_pickle], ids=["deepcopy", "pickle"])
def test_a_copy_takes_the_same_steps(make, duplicate):
    optimizer = make(start())
    walk(optimizer, 1)
    other = duplicate(optimizer)
    assert [group["manifold"] for group in other.param_groups] == list(MANIFOLDS)
    walk(optimizer, 2)
    walk(other, 2)
    ours, theirs = flat(optimizer.param_groups), flat(other.param_groups)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert not any(a is b for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("duplicate", [copy.deepcopy, through_pickle], ids=["deepcopy", "pickle"])
def test_a_copied_optimizer_still_refuses_points_off_the_manifold(duplicate):
    optimizer = duplicate(OPTIMIZERS["adam"](start()))
    with torch.no_grad():
        flat(optimizer.param_groups)[0].mul_(2)
    with pytest.raises(ValueError, match=r"params\[0\] of group 0.*must be on Stiefel\(\)"):
        walk(optimizer, 1)


def test_a_model_and_its_optimizer_are_copied_together():
    model = MultiHeadAttention(30, 6, manifold="stiefel")
    optimizer = OPTIMIZERS["adam"](optim.groups(model))
    copies = copy.deepcopy((model, optimizer))
    for one, steps in ((model, optimizer), copies):
        x = torch.randn(2, 7, 30, generator=torch.Generator().manual_seed(1))
        one(x)[0].square().sum().backward()
        steps.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), copies[0].parameters(), strict=True))
    assert optim.check(copies[0]) == (True, None)


def test_names_of_parameters_are_saved():
    model = MultiHeadAttention(30, 6, manifold="stiefel")
    saved = OPTIMIZERS["adam"](optim.groups(model)).state_dict()
    names = [name for group in saved["param_groups"] for name in group["param_names"]]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())


def test_the_state_of_another_optimizer_is_refused():
    p = nn.Parameter(Stiefel().random(7, 3))
    p.grad = torch.randn(7, 3)
    sgd = optim.SGD([p], momentum=0.9, manifold=Stiefel())
    sgd.step()
    with pytest.raises(
        ValueError, match=r"^state_dict: the state of params\[0\].* must be exp_avg, exp_avg_sq, got momentum_buffer"
    ):
        optim.Adam([p], manifold=Stiefel()).load_state_dict(sgd.state_dict())
    scalar = optim.Adam([p], manifold=Stiefel(), second_moment="scalar")
    scalar.step()
    saved = scalar.state_dict()
    saved["param_groups"][0]["second_moment"] = "elementwise"
    with pytest.raises(ValueError, match=r"exp_avg_sq of .* must have shape \(7, 3\), got \(1, 1\)"):
        optim.Adam([p], manifold=Stiefel()).load_state_dict(saved)


def test_switching_momentum_on_and_off_equals_torch():
    start, ends = torch.randn(5, 3), []
    for kind in (torch.optim.SGD, optim.SGD):
        torch.manual_seed(1)
        p = nn.Parameter(start.clone())
        optimizer = kind([p], lr=0.1)
        for momentum in (0.0, 0.0, 0.9, 0.9, 0.5, 0.0, 0.0):
            optimizer.param_groups[0]["momentum"] = momentum
            p.grad = torch.randn(5, 3)
            optimizer.step()
        ends.append(p.detach())
    torch.testing.assert_close(*ends)
