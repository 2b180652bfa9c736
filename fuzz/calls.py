"""One attention as the package is asked and as the oracle is: every kernel that takes the call is compared."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from fuzz.case import Mismatch
from fuzz.compare import closeness
from fuzz.oracle import Answer, Inputs, Problem, Rounding, answer
from fuzz.run import Report
from fuzz.tensors import numbers
from polyhead import attend, attention_weights, explain

Arguments = dict[str, Any]


class Setup(NamedTuple):
    """A call: its inputs by name, what the package makes of them, and what the oracle does."""

    inputs: Inputs
    # q, k, v, over and so on, from inputs that may want gradients
    arguments: Callable[[Inputs], Arguments]
    problem: Problem
    rounding: Rounding
    kernels: Iterable[str]
    # the weights as the package lays them out, from the oracle's (..., heads, queries, keys)
    weights: Callable[[Tensor], Tensor] = lambda p: p


def check_call(setup: Setup, *, learns: bool, frozen: frozenset[str], pull: str, rng: np.random.Generator) -> Report:
    """Compare every kernel with the oracle: outputs, and gradients where the call learns.

    Args:
        setup: the call.
        learns: whether gradients are wanted; else everything runs under `no_grad`.
        frozen: the inputs that want none.
        pull: the kind of the gradient that comes from behind: "ones" as `sum` gives it, else random numbers.
        rng: where these come from.
    """
    with torch.no_grad():
        shape = attend(**setup.arguments(setup.inputs)).shape
    dtype = setup.inputs["q"].dtype
    behind = torch.ones((), dtype=dtype).expand(shape) if pull == "ones" else numbers(pull, shape, rng, dtype)
    known = answer(setup.problem, setup.inputs, behind if learns else None, setup.rounding)
    ways, nearest = set(), 0.0
    for kernel in setup.kernels:
        try:
            nearest = max(nearest, _compare(setup, kernel, known, behind if learns else None, frozen))
            ways.add(kernel)
        except ValueError as error:
            if "refuses" not in str(error):
                raise
    with torch.no_grad():
        arguments = setup.arguments(setup.inputs)
        out = attend(**arguments)
        nearest = max(nearest, closeness("default", "output", out, known.out, known.out_bound))
        nearest = max(nearest, _compare_weights(setup, arguments, known))
        _check_explained(arguments, ways, learns)
    return Report(frozenset(ways), nearest)


def _compare(setup: Setup, kernel: str, known: Answer, behind: Tensor | None, frozen: frozenset[str]) -> float:
    """One kernel's output and gradients beside the oracle's."""
    if behind is None:
        with torch.no_grad():
            out = attend(**setup.arguments(setup.inputs), kernel=kernel)
        return closeness(kernel, "output", out, known.out, known.out_bound)
    own = {name: nn.Parameter(x.clone(), requires_grad=name not in frozen) for name, x in setup.inputs.items()}
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


def _compare_weights(setup: Setup, arguments: Arguments, known: Answer) -> float:
    asked = {name: x for name, x in arguments.items() if name not in ("v", "dropout", "seed")}
    wanted, bound = setup.weights(known.weights), setup.weights(known.weights_bound)
    # weights are rounded to the dtype of q
    return closeness("attention_weights", "weights", attention_weights(**asked), wanted, bound)


def _check_explained(arguments: Arguments, ways: set[str], learns: bool) -> None:
    """`explain` names a kernel that takes the call."""
    named = explain(**{name: x for name, x in arguments.items() if name != "seed"}).kernel
    if not learns and named not in ways:
        raise Mismatch("explain", "kernel", f"it names {named!r}, but what takes the call is {sorted(ways)}")
