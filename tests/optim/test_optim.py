"""Optimizers: torch's own in Euclidean space, the same ideas on the Stiefel manifold."""

import itertools

import pytest
import torch
from torch import nn

from polyhead import Stiefel, optim

METRICS, RETRACTIONS = ("euclidean", "canonical"), ("polar", "cayley")
stiefels = pytest.mark.parametrize(
    "on", [Stiefel(*choice) for choice in itertools.product(METRICS, RETRACTIONS)], ids=str
)
OPTIMIZERS = {
    "sgd": lambda params, **options: optim.SGD(params, **{"lr": 0.1, **options}),
    "momentum": lambda params, **options: optim.SGD(params, **{"lr": 0.1, "momentum": 0.9, **options}),
    "adam": lambda params, **options: optim.Adam(params, **{"lr": 0.1, **options}),
    "adam-scalar": lambda params, **options: optim.Adam(params, **{"lr": 0.1, "second_moment": "scalar", **options}),
    "adamw": lambda params, **options: optim.AdamW(params, **{"lr": 0.1, **options}),
}
every = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
SHAPES = [(), (1,), (7,), (5, 3), (5, 3), (5, 3), (2, 3, 5), (0,), (3, 0, 2)]


def parameters(shapes=SHAPES, dtype=torch.float64):
    return [nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in shapes]


def point(on, *shape, dtype=torch.float64):
    return nn.Parameter(on.random(*shape, dtype=dtype))


def off(x):
    gram = x.detach().double().mT @ x.detach().double()
    return (gram - torch.eye(gram.shape[-1], dtype=gram.dtype)).abs().max().item()


SAME = {
    "sgd": ("SGD", {"lr": 0.1}),
    "sgd-momentum": ("SGD", {"lr": 0.1, "momentum": 0.9}),
    "sgd-dampening": ("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1}),
    "sgd-nesterov": ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "sgd-maximize": ("SGD", {"lr": 0.1, "momentum": 0.5, "maximize": True, "weight_decay": 0.2}),
    "adam": ("Adam", {}),
    "adam-decay": ("Adam", {"lr": 0.1, "betas": (0.8, 0.9), "eps": 1e-3, "weight_decay": 0.1}),
    "adam-no-betas": ("Adam", {"lr": 0.1, "betas": (0.0, 0.0)}),
    "adam-maximize": ("Adam", {"lr": 0.1, "maximize": True, "weight_decay": 0.1}),
    "adamw": ("AdamW", {}),
    "adamw-decay": ("AdamW", {"lr": 0.1, "weight_decay": 0.3, "maximize": True}),
}


def run(makers, dtype, schedule=None, steps=20):
    """The same 20 steps with each optimizer; some parameters have no gradient in some of them."""
    start = parameters(dtype=dtype)
    gradients = [[torch.randn_like(p) for p in start] for _ in range(steps)]
    ends = []
    for make in makers:
        params = [nn.Parameter(p.detach().clone()) for p in start]
        optimizer = make(params)
        scheduler = schedule and schedule(optimizer)
        for number, given in enumerate(gradients):
            for place, (p, g) in enumerate(zip(params, given, strict=True)):
                rests = number % 3 == 0 if place == 3 else number < 5 if place == 4 else False
                p.grad = None if rests else g.clone()
            optimizer.step()
            if scheduler:
                scheduler.step()
        ends.append(params)
    return ends


@pytest.mark.parametrize(("dtype", "within"), [(torch.float64, 1e-12), (torch.float32, 1e-6)], ids=["fp64", "fp32"])
@pytest.mark.parametrize(("name", "options"), SAME.values(), ids=SAME)
def test_in_euclidean_space_it_equals_torch(name, options, dtype, within):
    makers = [lambda params, room=room: getattr(room, name)(params, **options) for room in (optim, torch.optim)]
    for ours, theirs in zip(*run(makers, dtype), strict=True):
        torch.testing.assert_close(ours, theirs, atol=within, rtol=within)


SCHEDULES = {
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 20),
    "one-cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.3, total_steps=25),
    "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "one-after-another": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o, [torch.optim.lr_scheduler.ConstantLR(o, 0.5), torch.optim.lr_scheduler.ExponentialLR(o, 0.8)], [5]
    ),
}


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
@pytest.mark.parametrize("case", ["sgd-momentum", "adam-decay", "adamw-decay"])
def test_schedulers_work_as_with_torch(schedule, case):
    name, options = SAME[case]
    makers = [lambda params, room=room: getattr(room, name)(params, **options) for room in (optim, torch.optim)]
    for ours, theirs in zip(*run(makers, torch.float64, schedule), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=1e-12)


def test_in_euclidean_space_scalar_moments_are_elementwise():
    makers = [
        lambda params, moment=moment: optim.Adam(params, second_moment=moment) for moment in ("elementwise", "scalar")
    ]
    for a, b in zip(*run(makers, torch.float64), strict=True):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-12)


def test_the_learning_rate_may_be_a_tensor():
    makers = [lambda params, lr=lr: optim.Adam(params, lr=lr) for lr in (0.25, torch.tensor(0.25))]
    for a, b in zip(*run(makers, torch.float64), strict=True):
        assert torch.equal(a, b)


@every
def test_a_closure_runs_with_gradients_and_its_loss_is_returned(make):
    on = Stiefel()
    w, b = point(on, 5, 3), nn.Parameter(torch.ones(3, dtype=torch.float64))
    optimizer = make([{"params": [w], "manifold": on}, {"params": [b]}])
    calls = []

    def closure():
        assert torch.is_grad_enabled()
        optimizer.zero_grad()
        loss = (w.sum(0) + b).square().sum()
        loss.backward()
        calls.append(loss.item())
        return loss

    losses = [optimizer.step(closure).item() for _ in range(30)]
    assert losses == calls
    assert losses[-1] < 0.1 * losses[0]
    assert optimizer.step() is None
    optimizer.zero_grad()
    assert w.grad is b.grad is None
    before = w.detach().clone()
    assert optimizer.step() is None
    assert torch.equal(w, before)


@every
def test_groups_have_their_own_learning_rates_and_can_be_added_later(make):
    on = Stiefel()
    a, b, c = point(on, 5, 3), point(on, 5, 3), nn.Parameter(torch.ones(3, dtype=torch.float64))
    still, start = b.detach().clone(), a.detach().clone()
    optimizer = make([{"params": a}, {"params": [b], "lr": 0.0}], manifold=on)
    optimizer.add_param_group({"params": [c], "manifold": type(optimizer)([c]).param_groups[0]["manifold"]})
    for p in (a, b, c):
        p.grad = torch.ones_like(p)
    optimizer.step()
    torch.testing.assert_close(b, still, atol=1e-14, rtol=0)
    assert (a - start).abs().max() > 1e-3
    assert (c < 1).all()
    assert off(a) < 1e-14


@stiefels
@every
def test_parameters_of_one_shape_move_as_each_would_alone(make, on):
    many = [point(on, 11, 3) for _ in range(4)] + [point(on, 2, 11, 3)]
    single = [nn.Parameter(p.detach().clone()) for p in many]
    together, alone = make(many, manifold=on), [make([p], manifold=on) for p in single]
    for number in range(5):
        for place, (a, b) in enumerate(zip(many, single, strict=True)):
            a.grad = None if place == number else torch.randn_like(a)
            b.grad = None if a.grad is None else a.grad.clone()
        for optimizer in (together, *alone):
            optimizer.step()
    for a, b in zip(many, single, strict=True):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=0)
        assert off(a) < 1e-13


def test_parameters_beyond_one_stack_move_alike():
    on = Stiefel()
    many = [point(on, 601, 211, dtype=torch.float32) for _ in range(5)]
    single = [nn.Parameter(p.detach().clone()) for p in many]
    optimizers = [optim.Adam(many, lr=0.1, manifold=on), *(optim.Adam([p], lr=0.1, manifold=on) for p in single)]
    for a, b in zip(many, single, strict=True):
        a.grad = torch.randn_like(a)
        b.grad = a.grad.clone()
    for optimizer in optimizers:
        optimizer.step()
    torch.testing.assert_close(many, single, atol=1e-6, rtol=0)


@every
def test_strided_parameters_and_gradients_give_the_same_steps(make):
    on = Stiefel()
    a = point(on, 5, 11, 3)
    b = nn.Parameter(a.detach().mT.contiguous().mT)
    assert not b.is_contiguous()
    one, other = make([a], manifold=on), make([b], manifold=on)
    for _ in range(5):
        a.grad = torch.randn(5, 11, 1, dtype=a.dtype).expand(5, 11, 3)
        b.grad = a.grad.mT.contiguous().mT
        one.step(), other.step()
    torch.testing.assert_close(a, b, atol=1e-12, rtol=0)


@stiefels
@pytest.mark.parametrize("nesterov", [False, True])
def test_the_momentum_is_transported(nesterov, on):
    """It is tangent where the parameter has arrived."""
    p = point(on, 5, 11, 3)
    optimizer = optim.SGD([p], lr=0.1, momentum=0.9, nesterov=nesterov, manifold=on)
    for _ in range(5):
        p.grad = torch.randn_like(p)
        optimizer.step()
        kept = optimizer.state[p]["momentum_buffer"]
        torch.testing.assert_close(on.tangent(p.detach(), kept), kept, atol=1e-13, rtol=0)
        assert kept.abs().max() > 1e-3


@stiefels
@every
def test_autograd_sees_that_a_parameter_has_moved(make, on):
    p = point(on, 11, 3, dtype=torch.float32)
    optimizer = make([p], manifold=on)
    loss = p.square().sum()
    p.grad = torch.randn_like(p)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@stiefels
@every
def test_heads_in_rows_move_as_the_same_matrices_in_a_batch(make, on):
    rows = Stiefel(on.metric, on.retraction, heads=5)
    a = point(rows, 15, 11)
    b = nn.Parameter(a.detach().unflatten(0, (5, 3)).mT.contiguous())
    one, other = make([a], manifold=rows), make([b], manifold=on)
    for _ in range(5):
        a.grad = torch.randn_like(a)
        b.grad = a.grad.unflatten(0, (5, 3)).mT.contiguous()
        one.step(), other.step()
    torch.testing.assert_close(a.unflatten(0, (5, 3)).mT, b, atol=1e-12, rtol=0)


def trajectory(make, on, x, gradients):
    p = nn.Parameter(x.clone())
    optimizer = make([p], manifold=on)
    for g in gradients:
        p.grad = g.clone()
        optimizer.step()
    return p.detach()


def rotated(name, on):
    """The trajectory in rotated coordinates, X → QX and G → QG, and the rotated trajectory."""
    x, q = on.random(11, 3, dtype=torch.float64), Stiefel().random(11, 11, dtype=torch.float64)
    gradients = torch.randn(10, 11, 3, dtype=torch.float64)
    make = OPTIMIZERS[name]
    return trajectory(make, on, q @ x, q @ gradients), q @ trajectory(make, on, x, gradients)


@stiefels
@pytest.mark.parametrize("name", ["sgd", "momentum", "adam-scalar"])
def test_rotated_coordinates_rotate_the_trajectory(name, on):
    torch.testing.assert_close(*rotated(name, on), atol=1e-11, rtol=0)


@pytest.mark.parametrize("name", ["adam", "adamw"])
def test_elementwise_moments_depend_on_the_coordinates(name):
    there, here = rotated(name, Stiefel())
    assert (there - here).norm() > 1e-2


@stiefels
@every
def test_weight_decay_moves_nothing_on_the_manifold(make, on):
    x, gradients = on.random(11, 3), torch.randn(10, 11, 3)
    ends = [
        trajectory(lambda p, decay=decay, **options: make(p, weight_decay=decay, **options), on, x, gradients)
        for decay in (0.0, 0.3)
    ]
    assert torch.equal(*ends)


@stiefels
@every
def test_maximize_is_descent_with_negated_gradients(make, on):
    x, gradients = on.random(11, 3, dtype=torch.float64), torch.randn(10, 11, 3, dtype=torch.float64)
    up = trajectory(lambda p, **options: make(p, maximize=True, **options), on, x, gradients)
    assert torch.equal(up, trajectory(make, on, x, -gradients))


def solve(make, on, x, loss, lr, steps=400):
    p = nn.Parameter(x)
    optimizer = make([p], manifold=on, lr=lr)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        optimizer.zero_grad()
        loss(p).backward()
        optimizer.step()
        scheduler.step()
    assert off(p) < 1e-13
    return p.detach()


@stiefels
@every
def test_it_finds_the_subspace_of_the_largest_variance(make, on):
    data = torch.randn(200, 20, dtype=torch.float64) * torch.linspace(3, 0.3, 20, dtype=torch.float64)
    covariance = data.T @ data / 200
    found = solve(make, on, on.random(20, 3, dtype=torch.float64), lambda p: -(p.T @ covariance @ p).trace(), 0.1)
    captured = (found.T @ covariance @ found).trace()
    torch.testing.assert_close(captured, torch.linalg.eigvalsh(covariance)[-3:].sum(), atol=1e-6, rtol=0)


@stiefels
@every
def test_it_finds_the_rotation_of_procrustes(make, on):
    """The nearest BX to A has the closed solution UVᵀ of BᵀA, where B has orthonormal columns itself."""
    b = Stiefel().random(17, 5, dtype=torch.float64)
    a = torch.randn(17, 3, dtype=torch.float64)
    left, _, right = torch.linalg.svd(b.T @ a, full_matrices=False)
    found = solve(make, on, on.random(5, 3, dtype=torch.float64), lambda p: (b @ p - a).square().sum(), 0.1, 600)
    torch.testing.assert_close(found, left @ right, atol=1e-5, rtol=0)


@pytest.mark.parametrize("retraction", RETRACTIONS)
def test_a_hundred_thousand_steps_do_not_drift(retraction):
    on = Stiefel(retraction=retraction)
    x, noise = on.random(8, 11, 3), torch.randn(1000, 8, 11, 3) * 1e-3
    for number in range(100_000):
        x = on.retract(x, on.tangent(x, noise[number % 1000]))
    assert off(x) <= 1e-6


@pytest.mark.parametrize("retraction", RETRACTIONS)
def test_ten_thousand_steps_of_adam_do_not_drift(retraction):
    on = Stiefel(retraction=retraction)
    p, noise = point(on, 8, 11, 3, dtype=torch.float32), torch.randn(1000, 8, 11, 3)
    optimizer = optim.Adam([p], lr=1e-3, manifold=on)
    for number in range(10_000):
        p.grad = noise[number % 1000]
        optimizer.step()
    assert off(p) <= 1e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@every
def test_16_bit_parameters_are_trained(make, dtype):
    on = Stiefel()
    p = point(on, 5, 11, 3, dtype=dtype)
    target = on.random(5, 11, 3)
    optimizer, losses = make([p], manifold=on, lr=0.03), []
    for _ in range(100):
        optimizer.zero_grad()
        loss = (p.float() - target).square().sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert p.dtype == dtype
    assert losses[-1] < 0.2 * losses[0]
    assert on.check(p.detach()) == (True, None)
