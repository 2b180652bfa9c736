"""Steps on the simulated device: the trajectory of the CPU, no wait of the host, launches that do not grow with the parameters."""

import copy
import itertools

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from benchmarks.simulated_device import count, host_of
from polyhead import Euclidean, MultiHeadAttention, Stiefel, optim
from polyhead.optim import device_steps

OPTIMIZERS = {
    "sgd": lambda groups: optim.SGD(groups, lr=0.1),
    "momentum": lambda groups: optim.SGD(groups, lr=0.1, momentum=0.9, dampening=0.3, weight_decay=0.1),
    "nesterov": lambda groups: optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True, maximize=True),
    "adam": lambda groups: optim.Adam(groups, lr=0.1, weight_decay=0.1),
    "adam-scalar": lambda groups: optim.Adam(groups, lr=0.1, betas=(0.0, 0.99), second_moment="scalar"),
    "adamw": lambda groups: optim.AdamW(groups, lr=0.1, maximize=True),
}
every = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
MANIFOLDS = {
    "polar": (Stiefel(), (11, 3)),
    "cayley": (Stiefel("canonical", "cayley"), (2, 7, 7)),
    "canonical": (Stiefel("canonical"), (9, 1)),
    "heads": (Stiefel(heads=2), (6, 5)),
    "free": (Euclidean(), (5, 4)),
    "number": (Euclidean(), ()),
}
CPU = torch.device("cpu")


def start(device, dtype=torch.float64, number=3, seed=0):
    """Some tensors on each manifold, and their groups."""
    generator = torch.Generator().manual_seed(seed)
    points = [
        (on, [on.random(*shape, dtype=dtype, generator=generator) for _ in range(number)])
        for on, shape in MANIFOLDS.values()
    ]
    return [{"params": [nn.Parameter(x.to(device)) for x in xs], "manifold": on} for on, xs in points]


def flat(groups):
    return [p for group in groups for p in group["params"]]


def set_gradients(groups, number):
    """Gradients of one step; one parameter of each group has none in every third step."""
    generator = torch.Generator().manual_seed(number)
    for place, p in enumerate(flat(groups)):
        given = torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype)
        p.grad = None if place % 3 == 1 and number % 3 == 0 else given.to(p.device)


def walk(optimizer, groups, steps):
    for number in steps:
        set_gradients(groups, number)
        optimizer.step()


def assert_alike(host, device, within=1e-11):
    for a, b in zip(flat(host), flat(device), strict=True):
        assert b.device.type == "gpu"
        assert_close(host_of(b), a.detach(), atol=within, rtol=within)


@pytest.mark.parametrize(
    ("make", "stack"),
    [*((make, 1 << 24) for make in OPTIMIZERS.values()), (OPTIMIZERS["adam"], 70)],
    ids=[*OPTIMIZERS, "stacks"],
)
def test_the_trajectory_is_that_of_the_cpu(gpu, make, stack, monkeypatch):
    monkeypatch.setattr(device_steps, "MAX_STACK_NUMEL", stack)
    groups = [start(device) for device in (CPU, gpu)]
    optimizers = [make(own) for own in groups]
    for optimizer, own in zip(optimizers, groups, strict=True):
        walk(optimizer, own, range(7))
    assert_alike(*groups)
    states = [[optimizer.state[p] for p in flat(own)] for optimizer, own in zip(optimizers, groups, strict=True)]
    for host, device in zip(*states, strict=True):
        assert host.keys() == device.keys()
        for name, x in host.items():
            assert device[name].device.type == "gpu"
            assert_close(host_of(device[name]), x, atol=1e-11, rtol=1e-11, msg=name)


@pytest.mark.parametrize("name", ["momentum", "adam-scalar"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_parameters_stay_on_their_manifolds_in_other_dtypes(gpu, name, dtype):
    groups = start(gpu, dtype)
    walk(OPTIMIZERS[name](groups), groups, range(6))
    for group in groups:
        for p in group["params"]:
            assert group["manifold"].check(p)[0]


@every
def test_a_step_neither_waits_nor_launches_more_for_more_parameters(gpu, make):
    launches = []
    for number in (3, 24):
        groups = start(gpu, torch.float32, number)
        optimizer = make(groups)
        walk(optimizer, groups, range(1, 3))
        set_gradients(groups, 4)
        with count() as counts:
            optimizer.step()
        assert (counts.waits, counts.uploads) == (0, 0), counts
        # the finiteness of all gradients and results, in one copy that does not block
        assert counts.downloaded.total() == 1
        launches.append(counts.launches)
    assert launches[0] == launches[1]
    # six kinds of parameters
    assert launches[0] <= 6 * 83


def test_the_first_step_does_not_wait_either(gpu):
    groups = start(gpu)
    optimizer = OPTIMIZERS["adam"](groups)
    set_gradients(groups, 1)
    with count() as counts:
        optimizer.step()
    assert (counts.waits, counts.uploads) == (0, 0), counts


@every
@pytest.mark.parametrize("bad", [torch.nan, -torch.inf])
def test_a_bad_gradient_moves_nothing_and_is_reported_by_the_next_step(gpu, make, bad):
    groups = [start(device) for device in (CPU, gpu)]
    optimizers = [make(own) for own in groups]
    for optimizer, own in zip(optimizers, groups, strict=True):
        walk(optimizer, own, range(1, 3))
    set_gradients(groups[1], 3)
    flat(groups[1])[5].grad.view(-1)[1] = bad
    with count() as counts:
        optimizers[1].step()
    assert counts.waits == 0
    words = r"params\[2\] of group 1 .*the gradient must be finite, got NaN or inf; no parameter was changed"
    with count() as counts, pytest.raises(ValueError, match=words):
        optimizers[1].step()
    assert counts.waits == 0
    # it goes on as if that step had not been
    for optimizer, own in zip(optimizers, groups, strict=True):
        walk(optimizer, own, range(4, 7))
    assert_alike(*groups)


def test_a_step_that_is_not_finite_leaves_its_parameters(gpu):
    groups = start(gpu)
    optimizer = optim.SGD(groups, lr=1e308)
    before = [host_of(p).clone() for p in flat(groups)]
    set_gradients(groups, 1)
    for p in groups[0]["params"]:
        p.grad.mul_(1e3)
    optimizer.step()
    assert all(torch.equal(host_of(p), x) for p, x in zip(groups[0]["params"], before, strict=False))
    with pytest.raises(ValueError, match=r"a step on Stiefel\(\) must end in finite numbers, .* of shape \(11, 3\)"):
        optimizer.step()


def test_saving_reports_what_no_step_has_reported(gpu):
    groups = start(gpu)
    optimizer = OPTIMIZERS["adam"](groups)
    set_gradients(groups, 1)
    flat(groups)[0].grad[0, 0] = torch.nan
    optimizer.step()
    with pytest.raises(ValueError, match="the gradient must be finite"):
        optimizer.state_dict()
    assert optimizer.state_dict()["state"]


@every
@pytest.mark.parametrize("direction", ["to the device", "to the cpu"])
def test_a_saved_state_continues_on_another_device(gpu, make, direction):
    devices = (CPU, gpu) if direction == "to the device" else (gpu, CPU)
    first, second, whole = start(devices[0]), start(devices[1], seed=1), start(CPU)
    saved = make(first)
    walk(saved, first, range(1, 4))
    with torch.no_grad():
        for p, q in zip(flat(first), flat(second), strict=True):
            q.copy_(p)
    resumed = make(second)
    resumed.load_state_dict(saved.state_dict())
    walk(resumed, second, range(4, 7))
    walk(make(whole), whole, range(1, 7))
    for a, b in zip(flat(whole), flat(second), strict=True):
        assert_close(host_of(b), host_of(a), atol=1e-11, rtol=1e-11)


def test_a_state_on_another_device_is_refused(gpu):
    groups = start(gpu)
    optimizer = OPTIMIZERS["adam"](groups)
    walk(optimizer, groups, range(1, 2))
    # as model.to(device) leaves it
    state = optimizer.state[flat(groups)[0]]
    state["exp_avg"] = state["exp_avg"].cpu()
    set_gradients(groups, 2)
    with pytest.raises(
        ValueError,
        match=r"^params\[0\] of group 0 .*: exp_avg must be on gpu:0, as the parameter is, got cpu; make the",
    ):
        optimizer.step()


def test_the_state_of_torchs_adam_continues(gpu):
    torch.manual_seed(0)
    x = torch.randn(4, 3, dtype=torch.float64)
    params = [nn.Parameter(x.clone()), nn.Parameter(x.to(gpu))]
    theirs = torch.optim.Adam(params[:1], lr=0.1)
    params[0].grad = torch.ones_like(x)
    theirs.step()
    ours = optim.Adam(params[1:], lr=0.1)
    ours.load_state_dict(copy.deepcopy(theirs.state_dict()))
    with torch.no_grad():
        params[1].copy_(params[0])
    for p, optimizer in zip(params, (theirs, ours), strict=True):
        p.grad = torch.full_like(p, 0.3)
        optimizer.step()
    assert_close(host_of(params[1]), params[0].detach(), atol=1e-12, rtol=1e-12)


def test_the_learning_rate_may_lie_on_the_device(gpu):
    groups = [start(device) for device in (CPU, gpu)]
    for own, lr in zip(groups, (0.1, torch.tensor(0.1, dtype=torch.float64, device=gpu)), strict=True):
        optimizer = optim.Adam(own, lr=lr)
        walk(optimizer, own, range(2))
    with count() as counts:
        optimizer.step()
    assert counts.waits == 0


def test_a_model_of_layers_is_trained(gpu):
    models = []
    for device in (CPU, gpu):
        torch.manual_seed(0)
        layers = [
            MultiHeadAttention(30, 6, manifold="stiefel"),
            MultiHeadAttention(30, 2, kv_heads=1, manifold={"v": "stiefel"}),
        ]
        model = nn.ModuleList([*layers, nn.Linear(30, 7)]).double().to("cpu")
        optim.project(model)
        model.to(device)
        optimizer = optim.SGD(model, lr=0.01, momentum=0.9)
        x = torch.randn(2, 5, 30, dtype=torch.float64).to(device)
        for _ in range(3):
            optimizer.zero_grad()
            model[2](model[1](model[0](x)[0])[0]).square().sum().backward()
            optimizer.step()
        assert optim.check(model)[0]
        models.append(model)
    for a, b in zip(*(model.parameters() for model in models), strict=True):
        assert_close(host_of(b), a.detach(), atol=1e-9, rtol=1e-9)


RETRACTIONS = [
    Stiefel(metric, retraction)
    for metric, retraction in itertools.product(("euclidean", "canonical"), ("polar", "cayley"))
]


@pytest.mark.parametrize("on", RETRACTIONS, ids=str)
@pytest.mark.parametrize("length", [0.0, 1e-6, 1.0, 25.0], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_retractions_are_those_of_the_cpu(gpu, on, length, dtype):
    torch.manual_seed(0)
    x = on.random(5, 9, 4, dtype=dtype)
    u = on.tangent(x, torch.randn_like(x))
    u = u * (length / u.norm(dim=(-2, -1), keepdim=True))
    with count() as counts:
        y = on.retract(x.to(gpu), u.to(gpu))
    assert counts.waits == 0 and counts.launches <= 50
    expected = on.retract(x, u)
    within = 3e-5 if dtype == torch.float32 else 1e-12
    assert_close(host_of(y), expected, atol=within, rtol=within)
    assert on.check(host_of(y))[0]


@pytest.mark.parametrize("on", RETRACTIONS, ids=str)
@pytest.mark.parametrize("length", [40.0, 1e3, 1e10, 1e30], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_long_steps_end_on_the_manifold(gpu, on, length, dtype):
    torch.manual_seed(0)
    x = on.random(3, 9, 4, dtype=dtype)
    u = on.tangent(x, torch.randn_like(x))
    u = u / u.norm(dim=(-2, -1), keepdim=True)
    y = host_of(on.retract(x.to(gpu), (length * u).to(gpu)))
    assert on.check(y)[0]
    if on.retraction == "polar":
        # shortened, so that the host need not look at its length
        assert_close(y, on.retract(x, 32 * u), atol=1e-4, rtol=1e-4)
