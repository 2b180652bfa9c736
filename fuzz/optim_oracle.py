"""Steps of SGD, Adam and AdamW, free and on the Stiefel manifold, by the documented formulas in NumPy and fp64."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float64]


@dataclasses.dataclass
class Point:
    """One parameter with the state of its optimizer."""

    x: Matrix
    steps: int = 0
    first: Matrix | None = None
    second: Matrix | None = None


class Free:
    """The manifold of all tensors."""

    def gradient(self, x: Matrix, g: Matrix) -> Matrix:
        return g

    def tangent(self, x: Matrix, u: Matrix) -> Matrix:
        return u

    def retract(self, x: Matrix, u: Matrix) -> Matrix:
        return x + u

    def mean_square(self, x: Matrix, g: Matrix) -> Matrix:
        return g * g


class OrthonormalColumns:
    """Matrices (n, k) with XᵀX = I, one at a time; with `heads`, each block of rows of a weight is the transpose of one."""

    def __init__(self, metric: str, retraction: str, heads: int | None) -> None:
        self.metric, self.retraction, self.heads = metric, retraction, heads

    def _each(self, function: Any, *tensors: Matrix) -> Matrix:
        """Apply a function of matrices to each matrix of a batch."""
        if self.heads is not None:
            rows = [np.split(x, self.heads, axis=-2) for x in tensors]
            done = [self._plain(lambda *m: function(*(a.T for a in m)).T, *block) for block in zip(*rows, strict=True)]
            return np.concatenate(done, axis=-2)
        return self._plain(function, *tensors)

    def _plain(self, function: Any, *tensors: Matrix) -> Matrix:
        shape = tensors[0].shape
        flat = [x.reshape(-1, *shape[-2:]) for x in tensors]
        return np.stack([function(*m) for m in zip(*flat, strict=True)]).reshape(shape)

    def gradient(self, x: Matrix, g: Matrix) -> Matrix:
        canonical = lambda x, g: g - x @ g.T @ x
        return self._each(_tangent if self.metric == "euclidean" else canonical, x, g)

    def tangent(self, x: Matrix, u: Matrix) -> Matrix:
        return self._each(_tangent, x, u)

    def retract(self, x: Matrix, u: Matrix) -> Matrix:
        return self._each(_polar if self.retraction == "polar" else _cayley, x, u)

    def mean_square(self, x: Matrix, g: Matrix) -> Matrix:
        """The squared norm of a gradient in the metric, divided by its number of elements, in every element of its matrix."""

        def inner(x: Matrix, g: Matrix) -> Matrix:
            total = np.sum(g * g)
            if self.metric == "canonical":
                total = total - 0.5 * np.sum((x.T @ g) ** 2)
            return np.full_like(g, total / g.size)

        return self._each(inner, x, g)


def _tangent(x: Matrix, u: Matrix) -> Matrix:
    inside = x.T @ u
    return u - x @ (inside + inside.T) / 2


def _polar(x: Matrix, u: Matrix) -> Matrix:
    left, _, right = np.linalg.svd(x + u, full_matrices=False)
    return left @ right


def _cayley(x: Matrix, u: Matrix) -> Matrix:
    n = len(x)
    project = np.eye(n) - x @ x.T / 2
    skew = project @ u @ x.T - x @ u.T @ project
    return np.linalg.solve(np.eye(n) - skew / 2, (np.eye(n) + skew / 2) @ x).astype(np.float64)


def sgd(at: Point, g: Matrix, on: Free | OrthonormalColumns, options: dict[str, Any]) -> None:
    """One step of gradient descent; the momentum is a tangent vector that is transported."""
    at.steps += 1
    g = -g if options["maximize"] else g
    if isinstance(on, Free):
        g = g + options["weight_decay"] * at.x
    step, momentum = on.gradient(at.x, g), options["momentum"]
    if momentum:
        before = np.zeros_like(step) if at.first is None else at.first
        at.first = momentum * before + (1 if at.steps == 1 else 1 - options["dampening"]) * step
        step = step + momentum * at.first if options["nesterov"] else at.first
    at.x = on.retract(at.x, -options["lr"] * step)
    if at.first is not None:
        at.first = on.tangent(at.x, at.first)


def adam(at: Point, g: Matrix, on: Free | OrthonormalColumns, options: dict[str, Any]) -> None:
    """One step of Adam, or with `decoupled` of AdamW: moments of the Riemannian gradient."""
    at.steps += 1
    g = -g if options["maximize"] else g
    lr, decay, (beta1, beta2) = options["lr"], options["weight_decay"], options["betas"]
    if isinstance(on, Free):
        if options["decoupled"]:
            at.x = at.x * (1 - lr * decay)
        else:
            g = g + decay * at.x
    g = on.gradient(at.x, g)
    square = g * g if options["second_moment"] == "elementwise" else on.mean_square(at.x, g)
    at.first = (1 - beta1) * g + (0 if at.first is None else beta1 * at.first)
    at.second = (1 - beta2) * square + (0 if at.second is None else beta2 * at.second)
    size = np.sqrt(at.second / (1 - beta2**at.steps)) + options["eps"]
    step = -lr * (at.first / (1 - beta1**at.steps)) / size
    at.x = on.retract(at.x, on.tangent(at.x, step))
