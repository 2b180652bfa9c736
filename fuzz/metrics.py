"""Metrics of heads by their formulas, on weights (..., heads, queries, columns) that the oracle gives.

A column is a key, or on a graph an edge: `key` has the number of its key. Every formula comes with how far it may be off where
each weight is off by as much as its bound.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fuzz.case import Mismatch
from fuzz.compare import closeness
from fuzz.neighbourhoods import Part
from polyhead.attend import prepare, run
from polyhead.heads import Heads, Origin

Pair = tuple[Tensor, Tensor]


class Weights(NamedTuple):
    """Weights and how far they may be off; where the keys and queries stand."""

    p: Tensor
    bound: Tensor
    # the number of each column's key, and how many keys there are
    key: Tensor
    keys: int
    # the number of each query as counted along the keys
    place: Tensor
    # how far apart each query and column's key are (queries, columns)
    apart: Tensor


def draw_metrics(random: Random) -> tuple[Part, ...]:
    """Some metrics as plain data."""
    mass = ("self", "previous", "next", "first", -2, 3, "marked", "at")
    known = (
        ("entropy",), ("distance",), ("received",), ("received", "counted"), ("diversity",), ("heatmap", random.randint(1, 9)),
        ("top", random.randint(1, 4)), ("mass", random.choice(mass)), ("mass", random.choice(mass)),
        ("contribution", "received"), ("contribution", "entropy"),
    )  # fmt: skip
    return tuple(random.sample(known, random.randint(1, 4)))


def view(arguments: dict[str, Any]) -> Heads:
    """A view on the heads of a call, as a layer hands it out."""
    call = prepare(**arguments)
    out, lse = run(call)
    return Heads(call, Origin(out, None, None, lse))


def some(
    weights: Weights, values: Tensor, on_edges: bool, rng: np.random.Generator
) -> tuple[dict[str, list[int]], Weights, Tensor]:
    """A part of what may be looked at: what `select` is given, and the weights that are left.

    On a graph a view on some queries has their edges alone, and its numbers still stand at all nodes.
    """
    number, queries = weights.p.shape[-3:-1]
    heads = sorted(rng.choice(number, rng.integers(1, number + 1), replace=False).tolist())
    rows = sorted(rng.choice(queries, rng.integers(1, queries + 1), replace=False).tolist())
    p, bound = (x[..., heads, :, :] for x in (weights.p, weights.bound))
    if on_edges:
        asked = torch.zeros(queries, 1, dtype=p.dtype)
        asked[rows] = 1.0
        left = weights._replace(p=p * asked, bound=bound * asked)
    else:
        p, bound, apart = (x[..., rows, :] for x in (p, bound, weights.apart))
        left = weights._replace(p=p, bound=bound, place=weights.place[rows], apart=apart)
    return {"heads": heads, "queries": rows}, left, values[..., heads, :, :]


def check_metrics(
    heads: Heads, asked: tuple[Part, ...], weights: Weights, values: Tensor, rng: np.random.Generator
) -> float:
    """Compare what a view measures with the formulas; the largest error as a share of what is allowed.

    Args:
        heads: the view.
        asked: what to measure, in one pass.
        weights: what the oracle says of the weights.
        values: the values (..., heads, columns, dim), for contributions.
        rng: where marked keys and counts come from.
    """
    questions = [_question(metric, weights, rng) for metric in asked]
    nearest = 0.0
    for (metric, given), got in zip(questions, heads.measure(*(given for _, given in questions)), strict=True):
        about = weights
        if metric[0] == "contribution":
            norm = values.norm(dim=-1)[..., None, :]
            about = weights._replace(p=weights.p * norm, bound=weights.bound * norm)
            metric, given = metric[1:], given[1:] if isinstance(given, tuple) else given
        name = " ".join(map(str, metric))
        if metric[0] == "top":
            nearest = max(nearest, _compare_top(name, got, about, metric[1]))
            continue
        wanted, bound = _FORMULAS[metric[0]](about, *(given[1:] if isinstance(given, tuple) else ()))
        nearest = max(nearest, closeness("heads", name, got, wanted, bound))
    return nearest


def _question(metric: Part, weights: Weights, rng: np.random.Generator) -> tuple[Part, Any]:
    """A metric as it is drawn, and as `measure` takes it."""
    queries = weights.p.shape[-2]
    if metric == ("mass", "marked"):
        return metric, ("mass", torch.as_tensor(rng.random(weights.keys) < 0.5))
    if metric == ("mass", "at"):
        return metric, ("mass", torch.as_tensor(rng.integers(-1, max(weights.keys, 1), queries)))
    if metric == ("received", "counted"):
        return metric, ("received", torch.as_tensor(rng.random(queries)))
    if metric[0] == "top":
        # of no keys none is the largest
        metric = ("top", max(1, min(metric[1], weights.keys))) if weights.keys else ("entropy",)
    return metric, metric if len(metric) > 1 else metric[0]


def _entropy(w: Weights) -> Pair:
    size, bound = w.p.abs(), w.bound
    # the slope of −p log p, no nearer to zero than the weight may be
    slope = torch.maximum(size, bound).clamp(min=1e-300).log().abs() + 1
    return -torch.special.xlogy(size, size).sum(-1), 2 * (bound * slope).sum(-1)


def _distance(w: Weights) -> Pair:
    return (w.p * w.apart).sum(-1), (w.bound * w.apart).sum(-1) + 1e-6 * w.bound.sum(-1)


def _mass(w: Weights, on: str | int | Tensor) -> Pair:
    offset: Any = {"self": 0, "previous": -1, "next": 1}.get(on) if isinstance(on, str) else on
    if isinstance(on, Tensor):
        seen = on[w.key].expand(len(w.place), -1) if on.dtype == torch.bool else w.key == on[:, None]
    elif on == "first":
        seen = (w.key == 0).expand(len(w.place), -1)
    else:
        seen = torch.eq(w.key - w.place[:, None], offset)
    # a sum of other weights may be taken from 1
    return (w.p * seen).sum(-1), (w.bound * seen).sum(-1)


def _by_key(w: Weights, x: Tensor) -> Tensor:
    return x @ (w.key[:, None] == torch.arange(w.keys)).to(x.dtype)


def _received(w: Weights, counts: Tensor | None = None) -> Pair:
    counts = torch.ones(len(w.place), dtype=w.p.dtype) if counts is None else counts
    return tuple(_by_key(w, (counts[:, None] * x).sum(-2, keepdim=True))[..., 0, :] for x in (w.p, w.bound))  # type: ignore[return-value]


def _heatmap(w: Weights, size: int) -> Pair:
    """The mean over cells: of n items item i is in cell i · cells // n."""
    groups = []
    for number in (len(w.place), w.keys):
        cells = min(size, max(number, 1))
        cell = torch.arange(number) * cells // max(number, 1)
        one = (cell[:, None] == torch.arange(cells)).double()
        groups.append(one / one.sum(0).clamp(min=1))
    down, across = groups
    return down.T @ _by_key(w, w.p) @ across, down.T @ _by_key(w, w.bound) @ across


def _diversity(w: Weights) -> Pair:
    """1 − Σ_j √(p_j p′_j), averaged over the queries that have keys in both heads."""
    total = w.p.sum(-1, keepdim=True)
    safe = total.masked_fill(total == 0, 1.0)
    p, bound = w.p / safe, w.bound / safe
    root = p.clamp(min=0).sqrt()
    off = (p + 2 * bound).clamp(min=0).sqrt() - (p - 2 * bound).clamp(min=0).sqrt()
    live = (total[..., 0] > 0).double()
    number = torch.einsum("...gq,...hq->...gh", live, live).clamp(min=1)
    shared = lambda a, b: torch.einsum("...gqk,...hqk->...gh", a, b) / number
    return 1 - shared(root, root), shared(root + off, root + off) - shared(root, root) + 1e-6


_FORMULAS: dict[str, Callable[..., Pair]] = {
    "entropy": _entropy, "distance": _distance, "mass": _mass, "received": _received, "heatmap": _heatmap, "diversity": _diversity,
}  # fmt: skip


def _compare_top(name: str, got: tuple[Tensor, Tensor], w: Weights, k: int) -> float:
    """The k largest weights, and keys that have them; −1 where there are fewer."""
    values, keys = got
    padded = torch.nn.functional.pad(w.p, (0, max(0, k - w.p.shape[-1])))
    wanted = padded.topk(k, -1).values
    bound = (w.bound.amax(-1, keepdim=True) if w.bound.shape[-1] else w.p.new_zeros(*w.p.shape[:-1], 1)).expand(
        wanted.shape
    )
    nearest = closeness("heads", name, values, wanted, bound)
    # of each key that is named, the column whose weight is nearest to what is said of it
    error = (w.p[..., None, :] - values.double()[..., None]).abs().masked_fill(w.key != keys[..., None], torch.inf)
    best = error.amin(-1) if w.p.shape[-1] else torch.full_like(wanted, torch.inf)
    wrong = torch.where(keys >= 0, best > bound, values.double() != 0)
    if wrong.any():
        raise Mismatch("heads", f"{name} keys", f"{int(wrong.sum())} keys do not have the weight that is said of them")
    return nearest
