"""Attention by its definition, in fp64, with the error that rounding may make of it.

    p_ij = exp(s_ij) / (Σ_k exp(s_ik) + exp(sink)) over the allowed keys k,    out_i = Σ_j w_ij p_ij m_ij v_j / (1 − dropout)

with w the weights of edges and m what dropout leaves. Everything of queries x keys is built, and gradients are autograd's.
On a graph every edge is a key of its own. Nothing of the package is used here.

The error is bounded as in a running error analysis: the same formulas once more with absolute values in place of every
number, so that no two terms cancel. A weight p_ij is off by a share of at most u + exp(u_s·(1 + the largest such score of its
row)) − 1, where u is the rounding of results and u_s twice that of scores. From there the bounds of outputs and gradients are
sums of absolute terms. Where no allowed pair contributes the bound is 0: zeros must be exact there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

Inputs = dict[str, Tensor]
# Sums of many terms and several roundings in a row, in units of a dtype's eps.
ROUNDINGS = {torch.float64: 64.0, torch.float32: 64.0, torch.bfloat16: 4.0, torch.float16: 4.0}


class Rounding(NamedTuple):
    """How exactly a dtype computes: results and weights, scores, and the smallest number that is not lost."""

    results: float
    scores: float
    least: float

    @classmethod
    def of(cls, dtype: torch.dtype, *, turned: bool = False) -> Rounding:
        """That of a dtype. Halves are scored in fp32, unless queries and keys were turned before, in their own dtype."""
        results = ROUNDINGS[dtype] * torch.finfo(dtype).eps
        wide = dtype if turned else torch.promote_types(dtype, torch.float32)
        # what fp32 and bf16 call subnormal is flushed to zero by some CPUs' instructions
        least = torch.finfo(dtype).smallest_normal if dtype != torch.float16 else 2.0**-24
        return cls(results, ROUNDINGS[wide] * torch.finfo(wide).eps, least)


class Problem(NamedTuple):
    """One attention: its scores and values as functions of its inputs, and what may be seen."""

    # the scores (..., heads, queries, keys) of inputs, or of absolute values with no term taken away
    scores: Callable[[Inputs, bool], Tensor]
    # the values (..., heads, keys, dim)
    values: Callable[[Inputs], Tensor]
    # which pairs are allowed, and which dropout leaves; they broadcast to the scores
    allowed: Tensor
    stays: Tensor | None = None
    dropout: float = 0.0
    # the name of the input that has one logit a head
    sink: str | None = None
    # one weight a key, or None
    weights: Callable[[Inputs, bool], Tensor | None] = lambda given, absolute: None
    # what goes through a LeakyReLU (..., heads, queries, keys, features)
    bent: Callable[[Inputs, bool], Tensor] | None = None


class Answer(NamedTuple):
    """What the definition says, and how far rounding may lead from it.

    At the kink of a LeakyReLU rounding decides on which side a number lies, and gradients jump: there are none then.
    """

    out: Tensor
    weights: Tensor
    gradients: Inputs
    out_bound: Tensor
    weights_bound: Tensor
    gradient_bounds: Inputs


def leaves(inputs: Inputs) -> Inputs:
    """Copies in fp64 that gradients reach."""
    return {name: x.detach().double().clone().requires_grad_() for name, x in inputs.items()}


def softmax(s: Tensor, allowed: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The weights over the allowed keys and that of the sink (heads,); zeros where no key is allowed."""
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


def answer(problem: Problem, inputs: Inputs, pull: Tensor | None, rounding: Rounding) -> Answer:
    """Output, weights and gradients of Σ pull · output, with the bounds of their errors."""
    known = leaves(inputs)
    s = problem.scores(known, False)
    sink = None if problem.sink is None else known[problem.sink]
    p, _ = softmax(s, problem.allowed, sink)
    edge = problem.weights(known, False)
    seen = p if edge is None else p * edge
    stays = s.new_ones(()) if problem.stays is None else problem.stays.to(s.dtype) / (1 - problem.dropout)
    out = (seen * stays) @ problem.values(known)
    gradients: Inputs = {}
    if pull is not None and _at_a_kink(problem, known, rounding):
        pull = None
    if pull is not None:
        found = torch.autograd.grad((out * pull.double()).sum(), list(known.values()), allow_unused=True)
        gradients = {
            name: torch.zeros_like(x) if g is None else g for (name, x), g in zip(known.items(), found, strict=True)
        }
    bounds = _bounds(problem, inputs, p.detach(), stays, pull, rounding)
    return Answer(out.detach(), seen.detach(), gradients, *bounds)


def _at_a_kink(problem: Problem, known: Inputs, rounding: Rounding) -> bool:
    """Whether what goes through a LeakyReLU is nearer to 0 than rounding, for any allowed pair."""
    if problem.bent is None:
        return False
    with torch.no_grad():
        z = problem.bent(known, False)
        size = problem.bent({name: x.abs() for name, x in known.items()}, True)
    near = (z.abs() <= rounding.scores / 4 * size).any(-1)
    return bool((near & problem.allowed).any())


def _bounds(
    problem: Problem, inputs: Inputs, p: Tensor, stays: Tensor, pull: Tensor | None, rounding: Rounding
) -> tuple[Tensor, Tensor, Inputs]:
    """How far output, weights and gradients may be off."""
    size = {name: x.detach().double().abs().requires_grad_() for name, x in inputs.items()}
    scores, values = problem.scores(size, True), problem.values(size)
    allowed = problem.allowed.expand(p.shape).double()
    largest = allowed * scores.detach()
    largest = largest.amax(-1, keepdim=True) if p.shape[-1] else largest.sum(-1, keepdim=True)
    if problem.sink is not None:
        largest = largest + size[problem.sink].detach()[:, None, None]
    # a score that is off by δ, and the sum of all, change a weight by e^2δ
    share = rounding.results + (rounding.scores * (1 + largest)).clamp(max=300).expm1()
    # how far each weight may be off; it is at most 1
    off = allowed * ((p * share).clamp(max=1.0) + rounding.least)
    edge = problem.weights(size, True)
    scaled = off if edge is None else off * edge.detach()
    out_bound = (scaled * stays) @ values.detach()
    if pull is None:
        return out_bound, scaled, {}
    pulled = pull.double().abs()
    # dp: what a weight moves; ds: what a score does, as if nothing cancelled
    dp = (pulled @ values.detach().transpose(-2, -1)) * stays
    weighed = dp if edge is None else dp * edge.detach()
    # a sink may be applied to outputs afterwards: what is left of the keys' part cancels only then
    alone = p / p.sum(-1, keepdim=True).clamp(min=torch.finfo(p.dtype).tiny)
    mean = (alone * weighed).sum(-1, keepdim=True)
    ds = off * (weighed + mean) + p * (off * weighed).sum(-1, keepdim=True) + allowed * rounding.least
    total = (scores * ds).sum() + (values * ((scaled * stays).transpose(-2, -1) @ pulled)).sum()
    if problem.sink is not None:
        total = total + (size[problem.sink][:, None, None] * (share * mean + rounding.least)).sum()
    if edge is not None:
        total = total + (edge * (off * dp)).sum()
    found = torch.autograd.grad(total, list(size.values()), allow_unused=True)
    bounds = {
        name: torch.zeros_like(x) if g is None else g.abs() for (name, x), g in zip(size.items(), found, strict=True)
    }
    return out_bound, scaled, bounds
