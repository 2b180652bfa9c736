"""The table `stiefel`: one step of Adam for many matrices with orthonormal columns, compared with geoopt.

geoopt has one second moment per matrix, the sum of squares where ours is their mean: its rate is ours times √(n k). The two
retract differently, so steps agree to first order; they are compared at a small rate, as displacements divided by it. With one
second moment per element, and on geoopt's canonical manifold, whose retraction is not of first order, the first moments are
compared instead. The floor is torch's plain Adam on as many free matrices, which does a part of the work.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.case import Case, Forward, Results, Side, Sides
from benchmarks.placement import CPU, moved
from polyhead import MultiHeadAttention, Stiefel, optim

RATE = 1e-3
# the rate of the compared steps
SMALL = 1e-5
Moment = Literal["elementwise", "scalar"]


def _matrices(number: int, n: int, k: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    with CPU:
        drawn = [Stiefel().random(n, k, generator=generator) for _ in range(number)]
    return cast(list[Tensor], moved(drawn))


def _with_gradients(points: list[Tensor]) -> list[Any]:
    generator = torch.Generator().manual_seed(1)
    for point in points:
        point.grad = moved(torch.randn(point.shape, generator=generator, device="cpu"))
    return points


def _side(make: Callable[[float], torch.optim.Optimizer], compared: Callable[[torch.optim.Optimizer], Tensor]) -> Side:
    """Steps with a fixed gradient; the comparison uses a first step with a small rate."""
    optimizer = make(RATE)

    def run() -> Tensor:
        optimizer.step()
        return optimizer.param_groups[0]["params"][0]

    def reveal(_: Tensor) -> Results:
        small = make(SMALL)
        small.step()
        return Results(compared(small), {})

    return Side(run, reveal)


def _all(optimizer: torch.optim.Optimizer, of: Callable[[Tensor], Tensor]) -> Tensor:
    """One tensor per parameter, as a batch of matrices."""
    found = [of(p) for p in optimizer.param_groups[0]["params"]]
    return torch.cat([x.detach().reshape(-1, *x.shape[-2:]) for x in found])


def _one_by_one(
    number: int, n: int, k: int, moment: Moment, metric: Literal["euclidean", "canonical"], together: bool = False
) -> Sides:
    import geoopt

    starts = _matrices(number, n, k)
    on = geoopt.EuclideanStiefel() if metric == "euclidean" else geoopt.CanonicalStiefel()

    def ours(rate: float) -> torch.optim.Optimizer:
        points = _with_gradients([nn.Parameter(x.clone()) for x in starts])
        return optim.Adam([{"params": points, "manifold": Stiefel(metric)}], rate, second_moment=moment)

    def theirs(rate: float) -> Any:
        points = _with_gradients([geoopt.ManifoldParameter(x.clone(), manifold=on) for x in starts])
        if together:
            gradients = torch.stack([p.grad for p in points])
            points = [geoopt.ManifoldParameter(torch.stack(starts), manifold=on)]
            points[0].grad = gradients
        return geoopt.optim.RiemannianAdam(points, rate * math.sqrt(n * k))

    def compared(optimizer: torch.optim.Optimizer) -> Tensor:
        if moment == "scalar" and metric == "euclidean":
            return (_all(optimizer, lambda p: p) - torch.stack(starts)) / SMALL
        return _all(optimizer, lambda p: optimizer.state[p]["exp_avg"])

    plain = torch.optim.Adam(_with_gradients([nn.Parameter(x.clone()) for x in starts]), foreach=True)
    return Sides(_side(ours, compared), _side(theirs, compared), bounds=(_stepping(plain),))


def _stepping(optimizer: torch.optim.Optimizer) -> Forward:
    def run() -> Tensor:
        optimizer.step()
        return torch.empty(0)

    return run


class _Digits(nn.Module):
    """The network of `experiments/stiefel_mnist.py`."""

    def __init__(self) -> None:
        super().__init__()
        self.attentions = nn.ModuleList(
            MultiHeadAttention(49, 7, combine="concat", bias=False, manifold="stiefel") for _ in range(16)
        )
        self.maps = nn.ModuleList(nn.Linear(49, 49) for _ in range(16))
        self.classify = nn.Linear(49, 10, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for attention, linear in zip(self.attentions, self.maps, strict=True):
            x = attention(x)[0]
            x = x + torch.tanh(linear(x))
        return self.classify(x[:, 0])


def _training() -> Sides:
    """A whole training step: on the manifold compared with plain Adam, from the same start."""
    images, labels = torch.rand(2048, 16, 49), torch.randint(10, (2048,))

    def side(make: Callable[[nn.Module], torch.optim.Optimizer]) -> Side:
        torch.manual_seed(0)
        network = _Digits()
        optimizer = make(network)
        first: list[Tensor] = []

        def run() -> Tensor:
            optimizer.zero_grad()
            logits = network(images)
            F.cross_entropy(logits, labels).backward()
            optimizer.step()
            first.append(logits.detach()) if not first else None
            return logits

        return Side(run, lambda _: Results(first[0], {}))

    return Sides(
        side(lambda network: optim.Adam(optim.groups(network), RATE)),
        side(lambda network: torch.optim.Adam(network.parameters(), RATE, foreach=True)),
    )


def _no_geoopt() -> str | None:
    return None if importlib.util.find_spec("geoopt") else "geoopt is not installed"


def _case(name: str, sizes: tuple[int, int, int], moment: Moment, metric: Any, together: bool = False) -> Case:
    peer = f"geoopt, {metric}{', one batch' if together else ''}"
    tolerance = 5e-2 if moment == "scalar" and metric == "euclidean" else 1e-3
    return Case(name, peer, partial(_one_by_one, *sizes, moment, metric, together), tolerance, lacks=_no_geoopt)


LARGE, SMALL_ONES = (72, 768, 64), (105, 49, 7)
CASES: tuple[Case, ...] = (
    _case("stiefel-adam-72x768x64", LARGE, "elementwise", "euclidean"),
    _case("stiefel-scalar-72x768x64", LARGE, "scalar", "euclidean"),
    _case("stiefel-scalar-72x768x64-batch", LARGE, "scalar", "euclidean", together=True),
    _case("stiefel-canonical-72x768x64", LARGE, "scalar", "canonical"),
    _case("stiefel-adam-105x49x7", SMALL_ONES, "elementwise", "euclidean"),
    _case("stiefel-scalar-105x49x7", SMALL_ONES, "scalar", "euclidean"),
    _case("stiefel-scalar-105x49x7-batch", SMALL_ONES, "scalar", "euclidean", together=True),
    Case("stiefel-mnist-step", "torch Adam, free", _training, tolerance=1e-5),
)
