"""Steps on the Stiefel manifold in C++: equal to `move` in every layout and instruction set; and the steps that it refuses."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from polyhead import Stiefel, optim
from polyhead._torch import native
from polyhead.linalg import stiefel
from polyhead.linalg.foreach import all_finite, increment_counters

pytestmark = pytest.mark.skipif(native is None, reason="the C++ kernels are not built")

SIZES = [(1, 1), (5, 5), (7, 3), (49, 7), (64, 16), (65, 17), (131, 33), (768, 64)]
# from matrices (n, k): the number of heads, and a parameter that contains them
LAYOUTS = {
    "columns": (None, lambda draw: draw()),
    "rows": (None, lambda draw: draw().mT.contiguous().mT),
    "gaps": (None, lambda draw: torch.stack((draw(), draw()), -1)[..., 0]),
    "batch": (None, lambda draw: torch.stack([draw() for _ in range(6)]).unflatten(0, (2, 3))),
    "heads": (3, lambda draw: torch.cat([draw().mT for _ in range(3)])),
    "heads-of-columns": (2, lambda draw: torch.cat([draw().mT for _ in range(2)]).mT.contiguous().mT),
    "batch-of-heads": (2, lambda draw: torch.stack([torch.cat([draw().mT for _ in range(2)]) for _ in range(3)])),
}
OPTIMIZERS = {
    "sgd": lambda params, **options: optim.SGD(params, lr=0.05, **options),
    "dampened": lambda params, **options: optim.SGD(params, lr=0.05, momentum=0.9, dampening=0.3, **options),
    "nesterov": lambda params, **options: optim.SGD(params, lr=0.05, momentum=0.9, nesterov=True, **options),
    "adam": lambda params, **options: optim.Adam(params, lr=0.02, eps=1e-3, **options),
    "scalar": lambda params, **options: optim.Adam(params, lr=0.02, second_moment="scalar", **options),
    "adamw": lambda params, **options: optim.AdamW(params, lr=0.02, eps=1e-3, maximize=True, **options),
}
METRICS = ("euclidean", "canonical")
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
every = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
WITHIN = {torch.float32: 2e-5, torch.float64: 1e-11}


@pytest.fixture(params=native.instruction_sets() if native else [])
def instruction_set(request):
    before = native.instruction_set()
    native.use(request.param)
    yield request.param
    native.use(before)


@pytest.fixture
def calls(monkeypatch):
    """The matrices that the kernel skipped, one list per call."""
    seen, step = [], stiefel.step_in_place
    monkeypatch.setattr(
        stiefel, "step_in_place", lambda *args, **options: seen.append(step(*args, **options)) or seen[-1]
    )
    return seen


def points(layout, n, k, dtype, number=3):
    """Parameters on the manifold, and its number of heads."""
    heads, lay = LAYOUTS[layout]
    return heads, [nn.Parameter(lay(lambda: Stiefel().random(n, k, dtype=dtype))) for _ in range(number)]


def off(on, params):
    """The distance of the columns from orthonormality."""
    gram = lambda x: x.mT @ x - torch.eye(x.shape[-1], dtype=x.dtype)
    return max(gram(on.matrices(p.detach().double())).abs().max().item() for p in params)


def copied(params):
    """The same points in the same layout."""
    copies = []
    for p in params:
        storage = torch.empty(p.untyped_storage().nbytes() // p.element_size(), dtype=p.dtype)
        copies.append(nn.Parameter(storage.as_strided(p.shape, p.stride()).copy_(p.detach())))
        assert copies[-1].stride() == p.stride()
    return copies


def both(make, on, params, gradients, monkeypatch, after_step=lambda optimizer: None):
    """Parameters and states after some steps: by the kernel, and by `move`."""
    ends = []
    for kernel in (True, False):
        own = copied(params)
        optimizer = make([{"params": own, "manifold": on}])
        with monkeypatch.context() as patch:
            if not kernel:
                patch.setattr(stiefel, "refuses_step", lambda *_: "this is the other way")
            for given in gradients:
                for p, g in zip(own, given, strict=True):
                    p.grad = g
                optimizer.step()
                after_step(optimizer)
        ends.append((own, [optimizer.state[p] for p in own]))
    return ends


def assert_same(ends, within):
    (ours, states), (theirs, others) = ends
    for own, other, state, expected in zip(ours, theirs, states, others, strict=True):
        assert state.keys() == expected.keys()
        torch.testing.assert_close(own, other, atol=within, rtol=within)
        for name in expected:
            torch.testing.assert_close(state[name], expected[name], atol=within, rtol=within)


def drawn(params, steps=3):
    return [[torch.randn_like(p) for p in params] for _ in range(steps)]


@every
@dtypes
@pytest.mark.parametrize(("n", "k"), SIZES)
def test_steps_equal_torchs(instruction_set, n, k, dtype, make, calls, monkeypatch):
    for metric, layout in zip(METRICS, ("columns", "heads"), strict=True):
        heads, params = points(layout, n, k, dtype)
        on = Stiefel(metric, heads=heads)
        assert_same(both(make, on, params, drawn(params), monkeypatch), WITHIN[dtype])
    assert calls == [[]] * 6


@every
@pytest.mark.parametrize("layout", LAYOUTS)
def test_steps_equal_torchs_in_every_layout(layout, make, calls, monkeypatch):
    for metric, (n, k) in itertools.product(METRICS, [(7, 3), (37, 19)]):
        heads, params = points(layout, n, k, torch.float64)
        on = Stiefel(metric, heads=heads)
        assert_same(both(make, on, params, drawn(params), monkeypatch), 1e-11)
    assert calls == [[]] * 12


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_mean_square_is_per_matrix_in_every_layout(layout):
    heads, (p,) = points(layout, 7, 3, torch.float64, 1)
    on = Stiefel(heads=heads)
    optimizer = optim.Adam([{"params": [p], "manifold": on}], betas=(0.9, 0.0), second_moment="scalar")
    p.grad = torch.randn_like(p)
    gradient = on.matrices(on.gradient(p.detach(), p.grad))
    optimizer.step()
    second = optimizer.state[p]["exp_avg_sq"]
    expected = gradient.square().mean((-2, -1))
    torch.testing.assert_close(second.flatten(), expected.repeat_interleave(second.numel() // len(expected)))


@every
def test_zero_gradients_change_nothing(make, calls):
    _, params = points("columns", 49, 7, torch.float64)
    optimizer = make([{"params": params, "manifold": Stiefel()}])
    before = [p.detach().clone() for p in params]
    for p in params:
        p.grad = torch.zeros_like(p)
    optimizer.step()
    for p, expected in zip(params, before, strict=True):
        torch.testing.assert_close(p.detach(), expected, atol=1e-15, rtol=0)
    assert calls == [[]]


@every
@pytest.mark.parametrize("layout", ["columns", "gaps", "batch", "heads", "batch-of-heads"])
def test_a_step_that_is_too_long_is_left_to_torch(layout, make, calls, monkeypatch):
    """One matrix of one parameter; the others are moved by the kernel."""
    heads, params = points(layout, 13, 3, torch.float64)
    on = Stiefel(heads=heads)
    gradients = drawn(params)
    for given in gradients:
        # the last elements belong to the last matrix
        given[1][..., -1, :] = 1e5 * torch.randn(given[1].shape[-1])
    ends = both(lambda groups: make([{**groups[0], "lr": 60.0}]), on, params, gradients, monkeypatch)
    assert_same(ends, 1e-7)
    assert any(calls)
    assert off(on, ends[0][0]) < 1e-13


@every
@dtypes
def test_steps_of_middle_length_are_polished(make, dtype, calls, monkeypatch):
    _, params = points("columns", 31, 5, dtype)
    make_fast = lambda groups: make([{**groups[0], "lr": 0.5}])
    assert (
        off(Stiefel(), both(make_fast, Stiefel(), params, drawn(params), monkeypatch)[0][0]) < 4 * WITHIN[dtype] / 1e2
    )
    assert calls == [[]] * 3


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
@pytest.mark.parametrize("where", ["momentum_buffer", "exp_avg", "exp_avg_sq"])
def test_nan_and_inf_are_not_written(where, number, calls):
    _, params = points("columns", 13, 3, torch.float32)
    make = OPTIMIZERS["nesterov" if where == "momentum_buffer" else "adam"]
    optimizer = make([{"params": params, "manifold": Stiefel()}])
    for p in params:
        p.grad = torch.randn_like(p)
    optimizer.step()
    optimizer.state[params[1]][where][2, 1] = number
    before = params[1].detach().clone()
    if (where, number) == ("exp_avg_sq", float("inf")):
        # dividing by it gives a step of length zero
        optimizer.step()
    else:
        with pytest.raises(
            ValueError,
            match=r"must end in finite numbers, got NaN or inf for parameters of shape \(13, 3\), which are unchanged",
        ):
            optimizer.step()
        assert calls[-1] == [(1, 0)]
        assert torch.equal(params[1], before)
    assert all(p.isfinite().all() for p in params)


def test_columns_without_a_gradient_and_without_an_eps(calls):
    """torch must refuse 0 / 0 inside the matrix; in the padding around it, it must not matter."""
    _, params = points("columns", 13, 3, torch.float32)
    optimizer = optim.Adam([{"params": params, "manifold": Stiefel()}], eps=0.0, betas=(0.9, 0.0))
    for p in params:
        p.grad = torch.randn_like(p)
    optimizer.step()
    assert calls == [[]]
    assert all(p.isfinite().all() for p in params)


def test_it_stays_on_the_manifold(instruction_set, calls):
    on = Stiefel(heads=2)
    p = nn.Parameter(on.random(10, 17))
    optimizer = optim.Adam([{"params": [p], "manifold": on}], lr=1e-3)
    p.grad = torch.randn_like(p)
    for step in range(20_000):
        if step % 100 == 0:
            p.grad.normal_()
        optimizer.step()
    assert off(on, [p]) < 1e-6
    assert len(calls) == 20_000 and not any(calls)


def test_version_counters_advance():
    _, params = points("columns", 7, 3, torch.float64)
    optimizer = OPTIMIZERS["adam"]([{"params": params, "manifold": Stiefel()}])
    loss = sum(p.square().sum() * p.sum() for p in params)
    loss.backward(retain_graph=True)
    before = [p._version for p in params]
    optimizer.step()
    assert all(p._version > version for p, version in zip(params, before, strict=True))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def refusal(on=Stiefel(), dtype=torch.float64, rule=stiefel.StepRule(-0.1), change=lambda columns: columns):  # noqa: B008
    _, params = points("columns", 7, 3, dtype)
    columns = change([params, [torch.randn_like(p) for p in params]])
    return stiefel.refuses_step(on, rule, columns)


class Other(torch.Tensor):
    pass


def test_refusals():
    assert refusal() is None
    assert "only Stiefel with retraction='polar' is supported" in refusal(Stiefel(retraction="cayley"))
    assert "only float32 and float64 are supported" in refusal(dtype=torch.bfloat16)
    assert "differ in their strides" in refusal(change=lambda c: [c[0], [c[1][0].mT.contiguous().mT, *c[1][1:]]])
    assert "plain" in refusal(change=lambda c: [c[0], [x.as_subclass(Other) for x in c[1]]])
    assert "shape or dtype" in refusal(change=lambda c: [c[0], [x.float() for x in c[1]]])
    assert "share" in refusal(change=lambda c: [[torch.zeros(1, 1, dtype=torch.float64).expand(7, 3)], c[1]])
    assert "state" in refusal(change=lambda c: [*c, c[0], c[0]])
    assert "columns" in refusal(change=lambda c: [[torch.zeros(300, 130).double()]] * 2)
    assert refusal(change=lambda c: [c[0], [torch.zeros(1, 1, dtype=torch.float64).expand(7, 3)]]) is None
    with FlopCounterMode(display=False):
        assert "intercepts" in refusal()


def test_without_the_kernels(monkeypatch):
    monkeypatch.setattr(stiefel, "native", None)
    assert "no C++ kernels" in refusal()
    monkeypatch.setattr("polyhead.linalg.foreach.native", None)
    assert all_finite([torch.ones(3)]) and not all_finite([torch.tensor([1.0, float("nan")])])
    increment_counters([number := torch.tensor(2.0)])
    assert number == 3


def test_count_adds_one_in_place():
    for dtype in (torch.float32, torch.float64, torch.int64):
        numbers = [torch.tensor(3, dtype=dtype), torch.zeros((), dtype=dtype)]
        before = [x._version for x in numbers]
        increment_counters(numbers)
        assert [x.item() for x in numbers] == [4, 1]
        assert all(x._version > version for x, version in zip(numbers, before, strict=True))


def test_expanded_gradients(calls):
    """As left by `loss = p.sum()`."""
    _, params = points("columns", 13, 3, torch.float64)
    twins = copied(params)
    for some, spread in ((params, True), (twins, False)):
        optimizer = OPTIMIZERS["adam"]([{"params": some, "manifold": Stiefel()}])
        for p in some:
            ones = torch.ones(1, 1, dtype=p.dtype).expand_as(p)
            p.grad = ones if spread else ones.contiguous()
        optimizer.step()
    for p, twin in zip(params, twins, strict=True):
        assert torch.equal(p, twin)
    assert calls == [[], []]


def test_momentum_added_later(monkeypatch):
    """The state changes with the options of the group, as in `move`."""
    for before, after in ((0.0, 0.9), (0.9, 0.0)):
        _, params = points("columns", 13, 3, torch.float64)
        make = functools.partial(optim.SGD, lr=0.1, momentum=before)
        change = lambda optimizer, momentum=after: optimizer.param_groups[0].update(momentum=momentum)
        ends = both(make, Stiefel(), params, drawn(params), monkeypatch, after_step=change)
        assert_same(ends, 1e-12)


@dtypes
def test_finite_checks_every_element(instruction_set, dtype):
    for size in (1, 3, 16, 67, 70_001):
        x = [torch.randn(5, dtype=dtype), torch.randn(size, dtype=dtype), torch.zeros(0, dtype=dtype)]
        assert all_finite(x)
        x[1][size // 2] = torch.finfo(dtype).max
        assert all_finite(x)
        for place, number in itertools.product({0, size // 2, size - 1}, [float("nan"), float("inf"), -float("inf")]):
            y = x[1].clone()
            y[place] = number
            assert not all_finite([x[0], y])
            assert not all_finite([y[::1][None].mT.expand(size, 2), x[0]])
