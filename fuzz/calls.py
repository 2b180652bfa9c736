"""One attention as the package is asked and as the oracle is: every kernel that takes the call is compared."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from fuzz.case import Mismatch
from fuzz.compare import closeness
from fuzz.metrics import Weights, check_metrics, some, view
from fuzz.oracle import Answer, Inputs, Rounding, answer
from fuzz.run import Report
from fuzz.setup import Arguments, CallCase, Places, Setup, set_up
from fuzz.tensors import DTYPES, numbers
from polyhead import attend, attention_weights, explain


def check_call(case: CallCase, places: Places) -> Report:
    """Compare every kernel that takes a call with the oracle: outputs, gradients where it learns, and weights.

    Raises:
        Mismatch: where they differ by more than rounding.
    """
    rng = np.random.default_rng(case.seed)
    setup = set_up(case, places, rng)
    # a number has no gradient
    frozen = case.frozen | {"sink"} if case.sink == "number" else case.frozen
    with torch.no_grad():
        shape = attend(**setup.arguments(setup.given)).shape
    behind = _pull(case, shape, rng) if case.learns else None
    torch.set_num_threads(case.threads)
    known = answer(setup.problem, setup.inputs, behind, setup.rounding)
    ways, nearest = set(), 0.0
    for kernel in places.kernels:
        try:
            nearest = max(nearest, _compare(setup, kernel, known, behind, frozen))
            ways.add(kernel)
        except ValueError as error:
            # it does not take this call, or none over such a neighbourhood
            if "refuses" not in str(error) and "is none of" not in str(error):
                raise
    with torch.no_grad():
        arguments = setup.arguments(setup.given)
        out = attend(**arguments)
        nearest = max(nearest, closeness("default", "output", out, known.out, known.out_bound))
        nearest = max(nearest, _compare_weights(places, arguments, known))
        if not case.learns:
            _check_explained(arguments, ways)
    if case.metrics:
        nearest = max(nearest, _compare_metrics(case, places, setup, rng))
        ways.add("metrics")
    return Report(frozenset(ways), nearest)


def _compare_metrics(case: CallCase, places: Places, setup: Setup, rng: np.random.Generator) -> float:
    """What a view on the heads measures, with gradients in sight or without."""
    with torch.set_grad_enabled(case.learns):
        own: Inputs = {name: nn.Parameter(x.clone(), requires_grad=case.learns) for name, x in setup.inputs.items()}
        heads = view(setup.arguments(own))
        # they are computed in fp32 at least, from a log-sum-exp that torch's kernel for halves knows to about 1e-4
        dtype = DTYPES[case.dtype]
        wide = Rounding.of(dtype).results if dtype.itemsize > 2 else torch.finfo(torch.float16).eps
        rounding = setup.rounding._replace(results=wide)
        known = answer(setup.problem, setup.inputs, None, rounding)
        key = torch.arange(places.keys) if places.take is None else places.take
        place = torch.arange(places.queries) + places.keys - places.queries
        apart = (key - place[:, None]).abs() if places.apart is None else places.apart
        weights = Weights(known.weights, known.weights_bound, key, places.keys, place, apart.double())
        values = setup.problem.values({name: x.double() for name, x in setup.inputs.items()})
        if case.looked == "some" and places.queries:
            chosen, weights, values = some(weights, values, places.take is not None, rng)
            heads = heads.select(**chosen)
        return check_metrics(heads, case.metrics, weights, values, rng)


def _pull(case: CallCase, shape: torch.Size, rng: np.random.Generator) -> Tensor:
    """The gradient that comes from behind: ones as `sum` gives them, which all lie in one place, or random numbers."""
    dtype = DTYPES[case.dtype]
    return torch.ones((), dtype=dtype).expand(shape) if case.pull == "ones" else numbers(case.pull, shape, rng, dtype)


def _compare(setup: Setup, kernel: str, known: Answer, behind: Tensor | None, frozen: frozenset[str]) -> float:
    """One kernel's output and gradients beside the oracle's."""
    if behind is None:
        with torch.no_grad():
            out = attend(**setup.arguments(setup.given), kernel=kernel)
        return closeness(kernel, "output", out, known.out, known.out_bound)
    own: Inputs = {name: nn.Parameter(x.clone(), requires_grad=name not in frozen) for name, x in setup.given.items()}
    out = attend(**setup.arguments(own), kernel=kernel)
    nearest = closeness(kernel, "output", out, known.out, known.out_bound)
    if not out.requires_grad:
        return nearest
    out.backward(behind)
    for name in known.gradients if known.gradients else ():
        if name not in frozen:
            wanted, bound = known.gradients[name], known.gradient_bounds[name]
            nearest = max(nearest, closeness(kernel, f"gradient of {name}", own[name].grad, wanted, bound))
    return nearest


def _compare_weights(places: Places, arguments: Arguments, known: Answer) -> float:
    asked = {name: x for name, x in arguments.items() if name not in ("v", "dropout", "seed")}
    wanted, bound = places.weights_of(known.weights), places.weights_of(known.weights_bound)
    return closeness("attention_weights", "weights", attention_weights(**asked), wanted, bound)


def _check_explained(arguments: Arguments, ways: set[str]) -> None:
    """`explain` names a kernel that takes the call."""
    named = explain(**{name: x for name, x in arguments.items() if name != "seed"}).kernel
    if named not in ways:
        raise Mismatch("explain", "kernel", f"it names {named!r}, but what takes the call is {sorted(ways)}")
