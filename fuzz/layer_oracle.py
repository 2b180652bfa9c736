"""The layer by its definition, in fp64, from its `state_dict`: project, attend, combine."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fuzz import scores
from fuzz.oracle import Inputs, softmax
from fuzz.position_setup import PositionSetup
from fuzz.positions import rotate


class Shape(NamedTuple):
    """The options of a layer that its `state_dict` does not contain."""

    heads: int
    kv_heads: int
    combine: str
    score: scores.Choice
    residual: bool
    # the eps that torch adds to a mean square
    eps: float


class LayerResult(NamedTuple):
    """The output and intermediate results of a layer."""

    output: Tensor
    weights: Tensor
    outputs: Tensor
    # the largest score, the ratio of the largest to the smallest row before a norm, and whether the input of a LeakyReLU is
    # within rounding of its kink
    largest: float
    spread: float
    kinked: bool


class CallOptions(NamedTuple):
    """The arguments of a call: allowed pairs, position, bias, dropout and gate."""

    allowed: Tensor
    position_setup: PositionSetup
    bias: Tensor | None = None
    dropout_mask: Tensor | None = None
    dropout: float = 0.0
    gate: Tensor | None = None
    # along edges: the source, features and weight of each
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
    """x divided by its root mean square, times the gains."""
    if f"{name}.weight" not in numbers:
        return x
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * numbers[f"{name}.weight"]


def _spread(numbers: Inputs, name: str, x: Tensor, eps: float) -> float:
    """The factor by which a norm amplifies the rounding errors of small rows."""
    if f"{name}.weight" not in numbers or not x.numel():
        return 1.0
    size = (x.detach().square().mean(-1) + eps).sqrt()
    return float(size.max() / size.min())


def compute(
    shape: Shape, numbers: Inputs, query: Tensor, key: Tensor, value: Tensor, options: CallOptions
) -> LayerResult:
    """Output, weights and outputs per head of a layer with these weights."""
    heads, group = shape.heads, shape.heads // shape.kv_heads
    own = lambda name: name if f"{name}.weight" in numbers else "k_proj"
    q = split(linear(numbers, own("q_proj"), query), heads)
    k = split(linear(numbers, "k_proj", key), shape.kv_heads)
    v = k if own("v_proj") == "k_proj" else split(linear(numbers, "v_proj", value), shape.kv_heads)
    spread = max(_spread(numbers, "q_norm", q, shape.eps), _spread(numbers, "k_norm", k, shape.eps))
    q = rotate(normed(numbers, "q_norm", q, shape.eps), options.position_setup.queries, False)
    k = rotate(normed(numbers, "k_norm", k, shape.eps), options.position_setup.keys, False)
    given_out = [head // group for head in range(heads)]
    k, v = k[..., given_out, :, :], v[..., given_out, :, :]
    if options.take is not None:
        k, v = k[..., options.take, :], v[..., options.take, :]
    named = {name.removeprefix("score."): x for name, x in numbers.items() if name.startswith("score.")}
    if "bias" in named:
        named["inner_bias"] = named.pop("bias")
    s = scores.formula(shape.score, named, q, k, options.features, False)
    kinked = False
    if shape.score[0] in ("gat", "gatv2"):
        z = scores.pre_activation(shape.score, named, q, k, options.features).detach()
        kinked = bool((z.abs() < 1e-5 * (1 + z.abs().max())).any()) if z.numel() else False
    if options.position_setup.added is not None:
        table = {"table": numbers["position.weight"]} if "position.weight" in numbers else {}
        added = options.position_setup.added(table, False)
        s = s + (added if options.take is None else added[..., options.take])
    if options.bias is not None:
        s = s + (options.bias[..., None, :] if options.take is not None else options.bias)
    p, _ = softmax(s, options.allowed, numbers.get("sink"))
    p = p if options.edge_weights is None else p * options.edge_weights
    kept = p if options.dropout_mask is None else p * options.dropout_mask / (1 - options.dropout)
    out = kept @ v
    largest = float(torch.where(options.allowed, s.detach(), 0.0).abs().max()) if s.numel() else 0.0
    gated = out if options.gate is None else out * options.gate[:, None, None]
    return LayerResult(_combined(shape, numbers, gated, query), p.detach(), out.detach(), largest, spread, kinked)


def _combined(shape: Shape, numbers: Inputs, out: Tensor, query: Tensor) -> Tensor:
    """Combine the heads: concatenate, project or average; add the bias and the residual."""
    joined = out.mean(-3) if shape.combine == "mean" else torch.cat(out.unbind(-3), -1)
    y = linear(numbers, "o_proj", joined) if shape.combine == "project" else joined
    if "o_bias" in numbers:
        y = y + numbers["o_bias"]
    if shape.residual:
        y = y + (linear(numbers, "r_proj", query) if "r_proj.weight" in numbers else query)
    return y


def differentiated(
    run: Callable[[Inputs], LayerResult], leaves: Inputs, grad_output: Tensor
) -> tuple[LayerResult, Inputs]:
    """The results, and the gradients of Σ grad_output · output."""
    known = {name: x.detach().double().clone().requires_grad_() for name, x in leaves.items()}
    with torch.enable_grad():
        result = run(known)
        total = (result.output * grad_output.double()).sum()
    found = torch.autograd.grad(total, list(known.values()), allow_unused=True)
    gradients = {n: torch.zeros_like(x) if g is None else g for (n, x), g in zip(known.items(), found, strict=True)}
    return result._replace(output=result.output.detach()), gradients
