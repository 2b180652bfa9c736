"""Compares every kernel that takes a call with the oracle."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from fuzz.case import Mismatch
from fuzz.compare import error_ratio
from fuzz.metrics import Weights, check_metrics, prepared, some, view
from fuzz.oracle import Answer, Inputs, Rounding, answer
from fuzz.run import Report
from fuzz.setup import Arguments, CallCase, NeighbourhoodSetup, Setup, set_up
from fuzz.tensors import DTYPES, numbers
from polyhead import attend, attention_weights, explain
from polyhead.kernels import candidate_kernels


def check_call(case: CallCase, places: NeighbourhoodSetup) -> Report:
    """Compare every kernel that takes a call with the oracle: outputs, gradients if required, and weights.

    Raises:
        Mismatch: if they differ by more than rounding.
    """
    rng = np.random.default_rng(case.seed)
    setup = set_up(case, places, rng)
    # a sink that is a number has no gradient
    frozen = case.frozen | {"sink"} if case.sink == "number" else case.frozen
    with torch.no_grad():
        shape = attend(**setup.arguments(setup.given)).shape
    grad_output = _grad_output(case, shape, rng) if case.requires_grad else None
    torch.set_num_threads(case.threads)
    oracle = answer(setup.problem, setup.inputs, grad_output, setup.rounding)
    compared, max_error = set(), 0.0
    for kernel in _candidates(setup):
        try:
            max_error = max(max_error, _compare(setup, kernel, oracle, grad_output, frozen))
            compared.add(kernel)
        except ValueError as error:
            # any other ValueError of a kernel is a fault
            if not str(error).startswith(f"kernel {kernel!r} refuses this call: "):
                raise
    with torch.no_grad():
        arguments = setup.arguments(setup.given)
        out = attend(**arguments)
        max_error = max(max_error, error_ratio("default", "output", out, oracle.out, oracle.out_bound))
        max_error = max(max_error, _compare_weights(places, arguments, oracle))
        if not case.requires_grad:
            _check_explained(arguments, compared)
    if case.metrics:
        max_error = max(max_error, _compare_metrics(case, places, setup, rng))
        compared.add("metrics")
    return Report(frozenset(compared), max_error)


def _candidates(setup: Setup) -> list[str]:
    """The names of the kernels for the neighbourhood of a call; each may still refuse the call."""
    with torch.no_grad():
        return [kernel.name for kernel in candidate_kernels(prepared(setup.arguments(setup.given)))]


def _compare_metrics(case: CallCase, places: NeighbourhoodSetup, setup: Setup, rng: np.random.Generator) -> float:
    """Compare the head metrics of a view, with or without gradients."""
    with torch.set_grad_enabled(case.requires_grad):
        own: Inputs = {
            name: nn.Parameter(x.clone(), requires_grad=case.requires_grad) for name, x in setup.inputs.items()
        }
        heads = view(setup.arguments(own))
        # metrics are computed in at least fp32, from a log-sum-exp that torch's half-precision kernel gives to about 1e-4
        dtype = DTYPES[case.dtype]
        wide = Rounding.of(dtype).results if dtype.itemsize > 2 else torch.finfo(torch.float16).eps
        rounding = setup.rounding._replace(results=wide)
        oracle = answer(setup.problem, setup.inputs, None, rounding)
        key = torch.arange(places.keys) if places.take is None else places.take
        place = torch.arange(places.queries) + places.keys - places.queries
        apart = (key - place[:, None]).abs() if places.apart is None else places.apart
        weights = Weights(oracle.weights, oracle.weights_bound, key, places.keys, place, apart.double())
        values = setup.problem.values({name: x.double() for name, x in setup.inputs.items()})
        if case.selected == "some" and places.queries:
            chosen, weights, values = some(weights, values, places.take is not None, rng)
            heads = heads.select(**chosen)
        return check_metrics(heads, case.metrics, weights, values, rng)


def _grad_output(case: CallCase, shape: torch.Size, rng: np.random.Generator) -> Tensor:
    """The gradient passed to backward: ones as from `sum`, which are one number in memory, or random numbers."""
    dtype = DTYPES[case.dtype]
    return (
        torch.ones((), dtype=dtype).expand(shape)
        if case.grad_output == "ones"
        else numbers(case.grad_output, shape, rng, dtype)
    )


def _compare(setup: Setup, kernel: str, oracle: Answer, grad_output: Tensor | None, frozen: frozenset[str]) -> float:
    """Compare the output and gradients of one kernel with the oracle's."""
    if grad_output is None:
        with torch.no_grad():
            out = attend(**setup.arguments(setup.given), kernel=kernel)
        return error_ratio(kernel, "output", out, oracle.out, oracle.out_bound)
    own: Inputs = {name: nn.Parameter(x.clone(), requires_grad=name not in frozen) for name, x in setup.given.items()}
    out = attend(**setup.arguments(own), kernel=kernel)
    max_error = error_ratio(kernel, "output", out, oracle.out, oracle.out_bound)
    if not out.requires_grad:
        return max_error
    out.backward(grad_output)
    for name in oracle.gradients if oracle.gradients else ():
        if name not in frozen:
            expected, bound = oracle.gradients[name], oracle.gradient_bounds[name]
            max_error = max(max_error, error_ratio(kernel, f"gradient of {name}", own[name].grad, expected, bound))
    return max_error


def _compare_weights(places: NeighbourhoodSetup, arguments: Arguments, oracle: Answer) -> float:
    asked = {name: x for name, x in arguments.items() if name not in ("v", "dropout", "seed")}
    expected, bound = places.weights_of(oracle.weights), places.weights_of(oracle.weights_bound)
    return error_ratio("attention_weights", "weights", attention_weights(**asked), expected, bound)


def _check_explained(arguments: Arguments, compared: set[str]) -> None:
    """Check that `explain` names a kernel that takes the call."""
    named = explain(**{name: x for name, x in arguments.items() if name != "seed"}).kernel
    if named not in compared:
        raise Mismatch("explain", "kernel", f"it names {named!r}, but the call was taken by {sorted(compared)}")
