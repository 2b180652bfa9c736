"""The layer by its definition, in fp64, from the numbers of its `state_dict`: project, attend, combine."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fuzz import scores
from fuzz.oracle import Inputs, softmax
from fuzz.position_setup import Placing
from fuzz.positions import rotate


class Shape(NamedTuple):
    """What of a layer its numbers do not tell."""

    heads: int
    kv_heads: int
    combine: str
    score: scores.Choice
    residual: bool
    # what torch adds to a mean square
    eps: float


class Seen(NamedTuple):
    """What a layer computes on its way."""

    output: Tensor
    weights: Tensor
    outputs: Tensor
    # the largest score, how much larger than the smallest the largest row is before a norm, and whether a LeakyReLU is within
    # rounding of its kink
    largest: float
    spread: float
    kinked: bool


class Around(NamedTuple):
    """What a call brings: who may attend to whom, positions, and what is added, dropped and gated."""

    allowed: Tensor
    placing: Placing
    bias: Tensor | None = None
    stays: Tensor | None = None
    dropout: float = 0.0
    gate: Tensor | None = None
    # along edges: the source of each, and their features and weights
    take: Tensor | None = None
    features: Tensor | None = None
    edge_weights: Tensor | None = None


def linear(numbers: Inputs, name: str, x: Tensor) -> Tensor:
    """x Wᵀ + b."""
    y = torch.einsum("...i,oi->...o", x, numbers[f"{name}.weight"])
    return y + numbers[f"{name}.bias"] if f"{name}.bias" in numbers else y


def split(x: Tensor, heads: int) -> Tensor:
    """(..., items, heads · dim) as (..., heads, items, dim)."""
    return torch.stack(x.split(x.shape[-1] // heads, -1), -3)


def normed(numbers: Inputs, name: str, x: Tensor, eps: float) -> Tensor:
    """Divided by the root of the mean square, times gains."""
    if f"{name}.weight" not in numbers:
        return x
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * numbers[f"{name}.weight"]


def _spread(numbers: Inputs, name: str, x: Tensor, eps: float) -> float:
    """By how much a norm makes the rounding of small rows larger."""
    if f"{name}.weight" not in numbers or not x.numel():
        return 1.0
    size = (x.detach().square().mean(-1) + eps).sqrt()
    return float(size.max() / size.min())


def compute(shape: Shape, numbers: Inputs, query: Tensor, key: Tensor, value: Tensor, around: Around) -> Seen:
    """Output, weights and heads' outputs of a layer with these numbers."""
    heads, group = shape.heads, shape.heads // shape.kv_heads
    own = lambda name: name if f"{name}.weight" in numbers else "k_proj"
    q = split(linear(numbers, own("q_proj"), query), heads)
    k = split(linear(numbers, "k_proj", key), shape.kv_heads)
    v = k if own("v_proj") == "k_proj" else split(linear(numbers, "v_proj", value), shape.kv_heads)
    spread = max(_spread(numbers, "q_norm", q, shape.eps), _spread(numbers, "k_norm", k, shape.eps))
    q = rotate(normed(numbers, "q_norm", q, shape.eps), around.placing.queries, False)
    k = rotate(normed(numbers, "k_norm", k, shape.eps), around.placing.keys, False)
    given_out = [head // group for head in range(heads)]
    k, v = k[..., given_out, :, :], v[..., given_out, :, :]
    if around.take is not None:
        k, v = k[..., around.take, :], v[..., around.take, :]
    named = {name.removeprefix("score."): x for name, x in numbers.items() if name.startswith("score.")}
    if "bias" in named:
        named["inner_bias"] = named.pop("bias")
    s = scores.formula(shape.score, named, q, k, around.features, False)
    kinked = False
    if shape.score[0] in ("gat", "gatv2"):
        z = scores.bent(shape.score, named, q, k, around.features).detach()
        kinked = bool((z.abs() < 1e-5 * (1 + z.abs().max())).any()) if z.numel() else False
    if around.placing.added is not None:
        table = {"table": numbers["position.weight"]} if "position.weight" in numbers else {}
        added = around.placing.added(table, False)
        s = s + (added if around.take is None else added[..., around.take])
    if around.bias is not None:
        s = s + (around.bias[..., None, :] if around.take is not None else around.bias)
    p, _ = softmax(s, around.allowed, numbers.get("sink"))
    p = p if around.edge_weights is None else p * around.edge_weights
    kept = p if around.stays is None else p * around.stays / (1 - around.dropout)
    out = kept @ v
    largest = float(torch.where(around.allowed, s.detach(), 0.0).abs().max()) if s.numel() else 0.0
    gated = out if around.gate is None else out * around.gate[:, None, None]
    return Seen(_combined(shape, numbers, gated, query), p.detach(), out.detach(), largest, spread, kinked)


def _combined(shape: Shape, numbers: Inputs, out: Tensor, query: Tensor) -> Tensor:
    """Heads as features: joined, mapped or averaged, with a bias and the query added."""
    joined = out.mean(-3) if shape.combine == "mean" else torch.cat(out.unbind(-3), -1)
    y = linear(numbers, "o_proj", joined) if shape.combine == "project" else joined
    if "o_bias" in numbers:
        y = y + numbers["o_bias"]
    if shape.residual:
        y = y + (linear(numbers, "r_proj", query) if "r_proj.weight" in numbers else query)
    return y


def differentiated(run: Callable[[Inputs], Seen], leaves: Inputs, pull: Tensor) -> tuple[Seen, Inputs]:
    """What is computed, and the gradients of Σ pull · output."""
    known = {name: x.detach().double().clone().requires_grad_() for name, x in leaves.items()}
    with torch.enable_grad():
        seen = run(known)
        total = (seen.output * pull.double()).sum()
    found = torch.autograd.grad(total, list(known.values()), allow_unused=True)
    gradients = {n: torch.zeros_like(x) if g is None else g for (n, x), g in zip(known.items(), found, strict=True)}
    return seen._replace(output=seen.output.detach()), gradients
