"""Scores of the package, each with the formula of its paper on queries x keys."""

from __future__ import annotations

from random import Random
from typing import Any

import torch
from torch import Tensor, nn

from fuzz.oracle import Inputs
from polyhead import GAT, Dot, GATv2, Score

Choice = tuple[Any, ...]


class Near(Score):
    """−|q − k|², a score without a fast kernel."""

    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        return -(q[..., :, None, :] - k[..., None, :, :]).square().sum(-1)


def draw_score(random: Random) -> Choice:
    """Draw a score as plain data."""
    kind = random.choices(("dot", "gat", "gatv2", "near"), (8, 2, 2, 1))[0]
    if kind == "dot":
        scale = random.choices((None, 1.0, 0.3, 3.0, 0.0, -0.5, -2.0), (8, 3, 3, 2, 1, 1, 1))[0]
        return (kind, scale)
    slope = random.choice((0.2, 0.2, 0.0, 0.1, 1.0))
    if kind == "gat":
        return (kind, slope, random.random() < 0.3)
    return (kind, slope) if kind == "gatv2" else (kind,)


def shapes(choice: Choice, heads: int, dim: int, edge_dim: int | None = None) -> dict[str, tuple[int, ...]]:
    """Shapes of the inputs that a score owns, by name."""
    kind, *options = choice
    edge = {} if edge_dim is None else {"edge": (heads, edge_dim) if kind == "gat" else (heads, dim, edge_dim)}
    if kind == "gat":
        bias: dict[str, tuple[int, ...]] = {"inner_bias": (heads,)} if options[1] else {}
        return {"destination": (heads, dim), "source": (heads, dim), **bias, **edge}
    return {"weight": (heads, dim), **edge} if kind == "gatv2" else {}


def make(choice: Choice, inputs: Inputs, heads: int, dim: int, edge_dim: int | None = None) -> Score:
    """The package's score with these weights."""
    kind, *options = choice
    if kind == "dot":
        return Dot(options[0])
    if kind == "near":
        return Near()
    names = {"inner_bias": "bias"}
    score: Score
    if kind == "gat":
        score = GAT(heads, dim, negative_slope=options[0], bias=options[1], edge_dim=edge_dim)
    else:
        score = GATv2(heads, dim, negative_slope=options[0], edge_dim=edge_dim)
    for name in shapes(choice, heads, dim, edge_dim):
        setattr(score, names.get(name, name), parameter(inputs[name]))
    return score


def parameter(x: Tensor) -> nn.Parameter:
    """A tensor as a parameter; a parameter is returned unchanged."""
    return x if isinstance(x, nn.Parameter) else nn.Parameter(x, requires_grad=False)


def pre_activation(choice: Choice, inputs: Inputs, q: Tensor, k: Tensor, features: Tensor | None) -> Tensor:
    """The input of the LeakyReLU of GAT or GATv2 (..., heads, queries, keys, features); `features` are those of the keys."""
    if choice[0] == "gat":
        to = (q * inputs["destination"][:, None]).sum(-1)
        of = (k * inputs["source"][:, None]).sum(-1)
        if features is not None:
            of = of + torch.einsum("hf,kf->hk", inputs["edge"], features)
        if "inner_bias" in inputs:
            of = of + inputs["inner_bias"][:, None]
        return (to[..., :, None] + of[..., None, :])[..., None]
    z = q[..., :, None, :] + k[..., None, :, :]
    return z if features is None else z + torch.einsum("hdf,kf->hkd", inputs["edge"], features)[:, None]


def formula(choice: Choice, inputs: Inputs, q: Tensor, k: Tensor, features: Tensor | None, absolute: bool) -> Tensor:
    """The score of every query and key (..., heads, queries, keys); shared heads are already repeated."""
    kind, *options = choice
    if kind == "dot":
        scale = q.shape[-1] ** -0.5 if options[0] is None else options[0]
        return torch.einsum("...qd,...kd->...qk", q, k) * (abs(scale) if absolute else scale)
    if kind == "near":
        apart = q[..., :, None, :] + k[..., None, :, :] if absolute else q[..., :, None, :] - k[..., None, :, :]
        return apart.square().sum(-1) * (1 if absolute else -1)
    z = pre_activation(choice, inputs, q, k, features)
    # the identity for positive numbers, if the slope is at most 1
    z = torch.where(z > 0, z, options[0] * z)
    return z[..., 0] if kind == "gat" else (z * inputs["weight"][:, None, None]).sum(-1)
