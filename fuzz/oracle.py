"""Attention by its definition, in fp64, with bounds of the rounding errors.

    p_ij = exp(s_ij) / (Σ_k exp(s_ik) + exp(sink)) over the allowed keys k,    out_i = Σ_j w_ij p_ij m_ij v_j / (1 − dropout)

with w the edge weights and m the dropout mask. All tensors of queries x keys are built, and gradients are autograd's.
On a graph every edge counts as a separate key. Nothing of the package is used here.

The bounds come from a running error analysis: the same formulas are evaluated again with the absolute value of every number,
so that no two terms cancel. The relative error of a weight p_ij is at most u + exp(u_s·(1 + the largest such score of its row))
− 1, where u is the rounding of results and u_s twice that of scores. The bounds of outputs and gradients are then sums of
absolute terms. If no allowed pair contributes, the bound is 0: the result must be exactly zero.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

Inputs = dict[str, Tensor]
# Bounds of sums of many terms and of several successive roundings, in units of a dtype's eps.
ROUNDINGS = {torch.float64: 64.0, torch.float32: 64.0, torch.bfloat16: 4.0, torch.float16: 4.0}


class Rounding(NamedTuple):
    """Rounding errors of a dtype: of results and weights, of scores, and the smallest number that is not flushed to zero."""

    results: float
    scores: float
    least: float

    @classmethod
    def of(cls, dtype: torch.dtype, *, rotated_before: bool = False) -> Rounding:
        """The rounding of a dtype. Half precision is scored in fp32, unless queries and keys were rotated before, in their own dtype."""
        results = ROUNDINGS[dtype] * torch.finfo(dtype).eps
        wide = dtype if rotated_before else torch.promote_types(dtype, torch.float32)
        # some CPU instructions flush subnormal numbers of fp32 and bf16 to zero
        least = torch.finfo(dtype).smallest_normal if dtype != torch.float16 else 2.0**-24
        return cls(results, ROUNDINGS[wide] * torch.finfo(wide).eps, least)


class Problem(NamedTuple):
    """One attention: its scores and values as functions of its inputs, and the allowed pairs."""

    # the scores (..., heads, queries, keys) from the inputs, or from absolute values without subtractions
    scores: Callable[[Inputs, bool], Tensor]
    # the values (..., heads, keys, dim)
    values: Callable[[Inputs], Tensor]
    # the allowed pairs, and those that dropout keeps; both broadcast to the scores
    allowed: Tensor
    dropout_mask: Tensor | None = None
    dropout: float = 0.0
    # the name of the input with one logit per head
    sink: str | None = None
    # one weight per key, or None
    weights: Callable[[Inputs, bool], Tensor | None] = lambda given, absolute: None
    # the input of a LeakyReLU (..., heads, queries, keys, features)
    pre_activation: Callable[[Inputs, bool], Tensor] | None = None


class Answer(NamedTuple):
    """The results by definition, and their error bounds.

    At the kink of a LeakyReLU rounding decides the sign, and gradients jump: `gradients` is then empty.
    """

    out: Tensor
    weights: Tensor
    gradients: Inputs
    out_bound: Tensor
    weights_bound: Tensor
    gradient_bounds: Inputs


def leaves(inputs: Inputs) -> Inputs:
    """Copies in fp64 that require gradients."""
    return {name: x.detach().double().clone().requires_grad_() for name, x in inputs.items()}


def softmax(s: Tensor, allowed: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The weights of the allowed keys, and that of the sink (heads,); zeros if no key is allowed."""
    allowed = allowed.expand(s.shape)
    top = s.detach().masked_fill(~allowed, -torch.inf)
    top = top.amax(-1, keepdim=True) if s.shape[-1] else s.new_full((*s.shape[:-1], 1), -torch.inf)
    if sink is not None:
        top = torch.maximum(top, sink.detach()[:, None, None])
    top = top.masked_fill(top == -torch.inf, 0.0)
    e = torch.where(allowed, torch.where(allowed, s - top, 0.0).exp(), 0.0)
    total = e.sum(-1, keepdim=True)
    if sink is None:
        return e / total.masked_fill(total == 0, 1.0), None
    sunk = (sink[:, None, None] - top).exp()
    return e / (total + sunk), sunk / (total + sunk)


def answer(problem: Problem, inputs: Inputs, grad_output: Tensor | None, rounding: Rounding) -> Answer:
    """Output, weights and gradients of Σ grad_output · output, with their error bounds."""
    known = leaves(inputs)
    s = problem.scores(known, False)
    sink = None if problem.sink is None else known[problem.sink]
    p, _ = softmax(s, problem.allowed, sink)
    edge = problem.weights(known, False)
    seen = p if edge is None else p * edge
    dropout_mask = (
        s.new_ones(()) if problem.dropout_mask is None else problem.dropout_mask.to(s.dtype) / (1 - problem.dropout)
    )
    out = (seen * dropout_mask) @ problem.values(known)
    gradients: Inputs = {}
    if grad_output is not None and _at_a_kink(problem, known, rounding):
        grad_output = None
    if grad_output is not None:
        found = torch.autograd.grad((out * grad_output.double()).sum(), list(known.values()), allow_unused=True)
        gradients = {
            name: torch.zeros_like(x) if g is None else g for (name, x), g in zip(known.items(), found, strict=True)
        }
    bounds = _bounds(problem, inputs, p.detach(), dropout_mask, grad_output, rounding)
    return Answer(out.detach(), seen.detach(), gradients, *bounds)


def _at_a_kink(problem: Problem, known: Inputs, rounding: Rounding) -> bool:
    """Whether the input of a LeakyReLU is within rounding of 0 for any allowed pair."""
    if problem.pre_activation is None:
        return False
    with torch.no_grad():
        z = problem.pre_activation(known, False)
        size = problem.pre_activation({name: x.abs() for name, x in known.items()}, True)
    near = (z.abs() <= rounding.scores / 4 * size).any(-1)
    return bool((near & problem.allowed).any())


def _bounds(
    problem: Problem, inputs: Inputs, p: Tensor, dropout_mask: Tensor, grad_output: Tensor | None, rounding: Rounding
) -> tuple[Tensor, Tensor, Inputs]:
    """The error bounds of output, weights and gradients."""
    size = {name: x.detach().double().abs().requires_grad_() for name, x in inputs.items()}
    scores, values = problem.scores(size, True), problem.values(size)
    allowed = problem.allowed.expand(p.shape).double()
    largest = allowed * scores.detach()
    largest = largest.amax(-1, keepdim=True) if p.shape[-1] else largest.sum(-1, keepdim=True)
    if problem.sink is not None:
        largest = largest + size[problem.sink].detach()[:, None, None]
    # an error δ in a score, and in the sum of all, changes a weight by a factor e^2δ
    share = rounding.results + (rounding.scores * (1 + largest)).clamp(max=300).expm1()
    # the error bound of each weight, at most 1
    off = allowed * ((p * share).clamp(max=1.0) + rounding.least)
    edge = problem.weights(size, True)
    scaled = off if edge is None else off * edge.detach()
    out_bound = (scaled * dropout_mask) @ values.detach()
    if grad_output is None:
        return out_bound, scaled, {}
    pulled = grad_output.double().abs()
    # dp, ds: gradients of weights and scores, as if no terms cancelled
    dp = (pulled @ values.detach().transpose(-2, -1)) * dropout_mask
    weighed = dp if edge is None else dp * edge.detach()
    # a sink may be applied to the output afterwards; the keys' part cancels only then
    alone = p / p.sum(-1, keepdim=True).clamp(min=torch.finfo(p.dtype).tiny)
    mean = (alone * weighed).sum(-1, keepdim=True)
    ds = off * (weighed + mean) + p * (off * weighed).sum(-1, keepdim=True) + allowed * rounding.least
    total = (scores * ds).sum() + (values * ((scaled * dropout_mask).transpose(-2, -1) @ pulled)).sum()
    if problem.sink is not None:
        total = total + (size[problem.sink][:, None, None] * (share * mean + rounding.least)).sum()
    if edge is not None:
        total = total + (edge * (off * dp)).sum()
    found = torch.autograd.grad(total, list(size.values()), allow_unused=True)
    bounds = {
        name: torch.zeros_like(x) if g is None else g.abs() for (name, x), g in zip(size.items(), found, strict=True)
    }
    return out_bound, scaled, bounds
