"""One case of a table: its set-up, the timed work, and the results that must be equal first."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

Forward = Callable[[], Tensor]


class CaseError(Exception):
    """A case has no result: the implementations differ, or one failed."""


class Results(NamedTuple):
    """The compared results: the output, and the gradients by name (one that is only rounding error is joined with a larger one)."""

    output: Tensor
    gradients: dict[str, Tensor]


@dataclass(frozen=True)
class Side:
    """One implementation, with its weights and inputs."""

    run: Forward
    """The timed work; returns the output."""
    reveal: Callable[[Tensor], Results]
    """Returns the results of the last run for comparison; not timed."""


@dataclass(frozen=True)
class Sides:
    """The implementations of one case. The fastest of several floors and bounds counts."""

    ours: Side
    peer: Side
    floors: tuple[Side, ...] = ()
    bounds: tuple[Forward, ...] = ()
    """Floors that do only a part of the work: timed, but not compared."""

    def all(self) -> tuple[Side, ...]:
        return self.ours, self.peer, *self.floors

    def timed(self) -> tuple[Forward, ...]:
        return *(side.run for side in self.all()), *self.bounds


def nothing() -> None:
    """No requirement: the case runs anywhere."""


@dataclass(frozen=True)
class Case:
    """One line of a table."""

    name: str
    peer: str
    """The name of the peer."""
    setup: Callable[[], Sides] = field(repr=False)
    """Creates weights and inputs, deterministically."""
    tolerance: float = 1e-4
    lacks: Callable[[], str | None] = field(default=nothing, repr=False)
    """The missing requirement, if any: the case is then skipped."""


def whole(out: Tensor) -> Tensor:
    """Compare the whole output."""
    return out


def inference(forward: Forward, seen: Callable[[Tensor], Tensor] = whole) -> Side:
    """The forward pass only; `seen` selects the part of the output to compare."""

    def run() -> Tensor:
        with torch.no_grad():
            return forward()

    return Side(run, lambda out: Results(seen(out), {}))


def mean_square(out: Tensor) -> Tensor:
    """The loss of training cases."""
    return out.square().mean()


def training(
    forward: Forward,
    leaves: Iterable[Tensor],
    gradients: Callable[[], dict[str, Tensor]],
    *,
    loss: Callable[[Tensor], Tensor] = mean_square,
    seen: Callable[[Tensor], Tensor] = whole,
) -> Side:
    """Forward and backward. The gradients of `leaves` are cleared each time; `gradients` returns those to compare."""
    cleared = tuple(leaves)

    def run() -> Tensor:
        for leaf in cleared:
            leaf.grad = None
        out = forward()
        loss(out).backward()
        return out

    return Side(run, lambda out: Results(seen(out.detach()), gradients()))


def grad(leaf: Tensor) -> Tensor:
    """The gradient of a leaf after the backward pass."""
    if leaf.grad is None:
        raise CaseError(f"a leaf of shape {tuple(leaf.shape)} has no gradient")
    return leaf.grad
