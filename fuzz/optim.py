"""Target `optim`: SGD, Adam and AdamW on free and Stiefel parameters, step by step; and resumed training."""

from __future__ import annotations

import dataclasses
import io
from random import Random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fuzz.case import Case as BaseCase
from fuzz.case import Mismatch
from fuzz.compare import error_ratio
from fuzz.neighbourhoods import Part
from fuzz.optim_oracle import Free, OrthonormalColumns, Point, adam, sgd
from fuzz.run import Report
from fuzz.tensors import DTYPES
from polyhead import Euclidean, Stiefel, optim


@dataclasses.dataclass(frozen=True, repr=False)
class Case(BaseCase):
    """An optimizer, its parameters, and the number of steps."""

    optimizer: str = "SGD"
    # each ("free", shape), ("stiefel", (n, k), batch) or ("heads", (n, k), heads)
    parameters: tuple[Part, ...] = (("free", (1,)),)
    metric: str = "euclidean"
    retraction: str = "polar"
    lr: float = 0.5
    momentum: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.5, 0.75)
    eps: float = 0.01
    second_moment: str = "elementwise"
    maximize: bool = False
    steps: int = 1
    # the step after which training is saved and loaded
    resume: int = 0
    # the fraction of missing gradients
    missing: float = 0.0
    large: bool = False
    transposed: bool = False
    dtype: str = "float64"


def draw(random: Random) -> Case:
    """Draw a configuration; shapes repeat, because parameters of one shape are updated together."""
    shapes = [_draw_parameter(random) for _ in range(random.choice((1, 1, 2)))]
    parameters = tuple(random.choice(shapes) for _ in range(random.randint(1, 4)))
    momentum = random.choice((0.0, 0.5, 0.9))
    nesterov = momentum > 0 and random.random() < 0.3
    dtype = random.choice(("float64", "float64", "float32"))
    # in fp32, rounding errors grow too large to compare after more steps
    steps = random.choice((1, 2, 3, 5, 10, 30) if dtype == "float64" else (1, 2, 3, 5))
    return Case(
        seed=random.randrange(100_000), optimizer=random.choice(("SGD", "Adam", "AdamW")), parameters=parameters,
        metric=random.choice(("euclidean", "canonical")), retraction=random.choice(("polar", "cayley")),
        lr=random.choice((0.001, 0.01, 0.1, 0.5)), momentum=momentum, nesterov=nesterov,
        dampening=0.0 if nesterov else random.choice((0.0, 0.0, 0.2)), weight_decay=random.choice((0.0, 0.0, 0.1)),
        betas=random.choice(((0.9, 0.999), (0.5, 0.75), (0.0, 0.9))), eps=random.choice((1e-8, 1e-3, 0.01)),
        second_moment=random.choice(("elementwise", "scalar")), maximize=random.random() < 0.2, steps=steps,
        resume=random.randint(0, steps), missing=random.choice((0.0, 0.0, 0.3)), large=random.random() < 0.1,
        transposed=random.random() < 0.15, dtype=dtype,
    )  # fmt: skip


def _draw_parameter(random: Random) -> Part:
    kind = random.choice(("free", "stiefel", "heads", "heads"))
    if kind == "free":
        return (kind, random.choice(((), (1,), (7,), (3, 4), (2, 3, 5), (0,), (5, 0))))
    n = random.choice((1, 2, 3, 5, 8, 16, 24, 40))
    k = random.choice([k for k in (1, 2, 3, 4, 8, 16, 24) if k <= n])
    return (kind, (n, k), random.choice((1, 2, 3)))


def check(case: Case) -> Report:
    """Compare every step with the formulas, and resumed with uninterrupted training."""
    torch.set_num_threads(1)
    rng = np.random.default_rng(case.seed)
    parameters = [_parameter(case, kind, rng) for kind in case.parameters]
    points = [_twins(case, p) for p in parameters]
    optimizer = _optimizer(case, parameters)
    resumed: tuple[list[nn.Parameter], optim.SGD | optim.Adam] | None = None
    max_error = 0.0
    for step in range(case.steps):
        if step == case.resume:
            resumed = _resumed(case, parameters, optimizer)
        gradients = [_gradient(case, p, rng) for p in parameters]
        for group in (parameters, *((resumed[0],) if resumed else ())):
            for p, g in zip(group, gradients, strict=True):
                p.grad = None if g is None else g.clone()
        optimizer.step()
        if resumed:
            resumed[1].step()
        for kind, p, twins, g in zip(case.parameters, parameters, points, gradients, strict=True):
            max_error = max(max_error, _compare(case, kind, p, twins, g))
    if resumed:
        _check_resumed(parameters, optimizer, *resumed)
    return Report(frozenset({case.optimizer}), max_error)


def _twins(case: Case, p: nn.Parameter) -> tuple[Point, Point]:
    """The initial point of a parameter, and a copy with one rounding error: their later distance measures the conditioning."""
    x = p.detach().double().numpy()
    sign = np.random.default_rng(case.seed).choice((-1.0, 1.0), x.shape)
    return Point(x.copy()), Point(x * (1 + torch.finfo(DTYPES[case.dtype]).eps * sign))


def _compare(case: Case, kind: Part, p: nn.Parameter, twins: tuple[Point, Point], g: Tensor | None) -> float:
    """Compare one parameter after a step with the formula."""
    if g is None or not p.numel():
        return 0.0
    on, at = _manifold(case, kind), twins[0]
    for twin in twins:
        (sgd if case.optimizer == "SGD" else adam)(
            twin, g.double().numpy(), on, _options(case) | {"decoupled": case.optimizer == "AdamW"}
        )
    expected = torch.as_tensor(np.asarray(at.x))
    # every step adds a rounding error, and may amplify earlier ones
    share = 200 * torch.finfo(DTYPES[case.dtype]).eps * at.steps * (1 + float(expected.abs().max()))
    share += 20 * float(np.abs(at.x - twins[1].x).max())
    return error_ratio(case.optimizer, f"{kind[0]} parameter", p, expected, torch.full_like(expected, share))


def _parameter(case: Case, kind: Part, rng: np.random.Generator) -> nn.Parameter:
    """A random point, orthonormal up to the rounding of its dtype."""
    name, shape, *more = kind
    numbers: Any
    if name == "free":
        numbers = rng.standard_normal(shape)
    else:
        n, k = shape
        bases = np.stack([np.linalg.qr(rng.standard_normal((n, k)))[0] for _ in range(more[0])])
        # blocks of rows of a weight, or a batch of matrices
        numbers = bases.transpose(0, 2, 1).reshape(-1, n) if name == "heads" else bases if more[0] > 1 else bases[0]
    x = torch.as_tensor(numbers).to(DTYPES[case.dtype])
    if case.transposed and x.dim() > 1:
        x = x.transpose(-2, -1).contiguous().transpose(-2, -1)
    return nn.Parameter(x)


def _gradient(case: Case, p: Tensor, rng: np.random.Generator) -> Tensor | None:
    drawn = rng.standard_normal(p.shape) * (30 if case.large else 1)
    return None if rng.random() < case.missing else torch.as_tensor(drawn).to(p.dtype)


def _manifold(case: Case, kind: Part) -> Free | OrthonormalColumns:
    if kind[0] == "free":
        return Free()
    return OrthonormalColumns(case.metric, case.retraction, kind[2] if kind[0] == "heads" else None)


def _options(case: Case) -> dict[str, Any]:
    both = {"lr": case.lr, "weight_decay": case.weight_decay, "maximize": case.maximize}
    if case.optimizer == "SGD":
        return both | {"momentum": case.momentum, "dampening": case.dampening, "nesterov": case.nesterov}
    return both | {"betas": case.betas, "eps": case.eps, "second_moment": case.second_moment}


def _optimizer(case: Case, parameters: list[nn.Parameter]) -> optim.SGD | optim.Adam:
    """One group for each kind of parameter."""
    groups: dict[Part, list[nn.Parameter]] = {}
    for kind, p in zip(case.parameters, parameters, strict=True):
        groups.setdefault((kind[0], kind[2] if kind[0] == "heads" else None), []).append(p)
    manifolds = [
        Euclidean() if name == "free" else Stiefel(case.metric, case.retraction, heads=heads)  # type: ignore[arg-type]
        for name, heads in groups
    ]
    given = [{"params": members, "manifold": on} for members, on in zip(groups.values(), manifolds, strict=True)]
    made: optim.SGD | optim.Adam = {"SGD": optim.SGD, "Adam": optim.Adam, "AdamW": optim.AdamW}[case.optimizer](
        given, **_options(case)
    )
    return made


def _resumed(
    case: Case, parameters: list[nn.Parameter], optimizer: optim.SGD | optim.Adam
) -> tuple[list[nn.Parameter], optim.SGD | optim.Adam]:
    """Copies of the parameters, and an optimizer with the saved state of another."""
    file = io.BytesIO()
    torch.save([[p.detach() for p in parameters], optimizer.state_dict()], file)
    file.seek(0)
    saved, state = torch.load(file, weights_only=True)
    again = [nn.Parameter(x) for x in saved]
    other = _optimizer(case, again)
    other.load_state_dict(state)
    return again, other


def _check_resumed(
    parameters: list[nn.Parameter], optimizer: optim.SGD | optim.Adam, again: list[nn.Parameter], other: optim.SGD | optim.Adam
) -> None:  # fmt: skip
    """Check that parameters and states are equal, bit for bit."""
    for a, b in zip(parameters, again, strict=True):
        kept = (
            [(optimizer.state[a][name], other.state[b][name]) for name in optimizer.state[a]]
            if a in optimizer.state
            else []
        )
        if not all(torch.equal(x, y) for x, y in ((a, b), *kept)):
            raise Mismatch(
                type(optimizer).__name__, "resumed training", f"a parameter of shape {tuple(a.shape)} differs"
            )
