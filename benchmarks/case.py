"""One case of a table: what is set up, what is timed, and what must be equal before a number is shown."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

Forward = Callable[[], Tensor]


class CaseError(Exception):
    """A case has no number: its results differ, or a part of it failed."""


class Results(NamedTuple):
    """What is compared: the output, and the gradients by name (those that are zero but for rounding join a larger one)."""

    output: Tensor
    gradients: dict[str, Tensor]


@dataclass(frozen=True)
class Side:
    """One implementation, ready to run on weights and inputs that are made."""

    run: Forward
    """The work that is timed; it returns the output."""
    reveal: Callable[[Tensor], Results]
    """What to compare of a run that has just ended; not timed."""


@dataclass(frozen=True)
class Sides:
    """The implementations of one case. Of several floors and bounds the fastest counts."""

    ours: Side
    peer: Side
    floors: tuple[Side, ...] = ()
    bounds: tuple[Forward, ...] = ()
    """Floors that do a part of the work only: they are timed, and there is nothing to compare."""

    def all(self) -> tuple[Side, ...]:
        return self.ours, self.peer, *self.floors

    def timed(self) -> tuple[Forward, ...]:
        return *(side.run for side in self.all()), *self.bounds


def nothing() -> None:
    """Nothing is lacking: the case runs anywhere."""


@dataclass(frozen=True)
class Case:
    """A line of a table."""

    name: str
    peer: str
    """What the peer is, for the reader."""
    setup: Callable[[], Sides] = field(repr=False)
    """Makes weights and inputs, the same each time."""
    tolerance: float = 1e-4
    lacks: Callable[[], str | None] = field(default=nothing, repr=False)
    """What it needs and does not find here: it is then left out."""


def whole(out: Tensor) -> Tensor:
    """All of an output is compared."""
    return out


def inference(forward: Forward, seen: Callable[[Tensor], Tensor] = whole) -> Side:
    """The forward pass alone; `seen` is the part of the output that is compared."""

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
    """Forward and backward. The gradients of `leaves` are cleared each time; `gradients` tells those that are compared."""
    cleared = tuple(leaves)

    def run() -> Tensor:
        for leaf in cleared:
            leaf.grad = None
        out = forward()
        loss(out).backward()
        return out

    return Side(run, lambda out: Results(seen(out.detach()), gradients()))


def grad(leaf: Tensor) -> Tensor:
    """The gradient that a backward pass has left."""
    if leaf.grad is None:
        raise CaseError(f"a leaf of shape {tuple(leaf.shape)} has no gradient")
    return leaf.grad
