"""Head metrics by their formulas, from the oracle's weights (..., heads, queries, columns).

A column is a key, or on a graph an edge: `key` has the number of its key. Every formula also returns its error bound, given the
bound of each weight.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fuzz.case import Mismatch
from fuzz.compare import error_ratio
from fuzz.neighbourhoods import Part
from polyhead.attend import run_call
from polyhead.heads import Heads, Origin
from polyhead.kernels import Call
from polyhead.prepare import AttentionOptions, check_and_make_call

Pair = tuple[Tensor, Tensor]


class Weights(NamedTuple):
    """Weights with their error bounds, and the positions of keys and queries."""

    p: Tensor
    bound: Tensor
    # the number of each column's key, and the number of keys
    key: Tensor
    keys: int
    # the position of each query, counted along the keys
    place: Tensor
    # the distance of each query from each column's key (queries, columns)
    apart: Tensor


def draw_metrics(random: Random) -> tuple[Part, ...]:
    """Draw some metrics as plain data."""
    mass = ("self", "previous", "next", "first", -2, 3, "marked", "at")
    known = (
        ("entropy",), ("distance",), ("received",), ("received", "counted"), ("diversity",), ("heatmap", random.randint(1, 9)),
        ("top", random.randint(1, 4)), ("mass", random.choice(mass)), ("mass", random.choice(mass)),
        ("contribution", "received"), ("contribution", "entropy"),
    )  # fmt: skip
    return tuple(random.sample(known, random.randint(1, 4)))


def prepared(arguments: dict[str, Any]) -> Call:
    """The call that `attend` makes of these arguments."""
    tensors = {name: arguments[name] for name in "qkv"}
    options = AttentionOptions(**{name: given for name, given in arguments.items() if name not in tensors})
    return check_and_make_call(**tensors, options=options)


def view(arguments: dict[str, Any]) -> Heads:
    """A view of the heads of a call, as a layer returns it."""
    call = prepared(arguments)
    out, lse = run_call(call)
    return Heads(call, Origin(out, None, None, lse))


def some(
    weights: Weights, values: Tensor, on_edges: bool, rng: np.random.Generator
) -> tuple[dict[str, list[int]], Weights, Tensor]:
    """Draw a selection: the arguments of `select`, and the remaining weights and values.

    On a graph, a view of some queries has only their edges, but its metrics still cover all nodes.
    """
    number, queries = weights.p.shape[-3:-1]
    heads = sorted(rng.choice(number, rng.integers(1, number + 1), replace=False).tolist())
    rows = sorted(rng.choice(queries, rng.integers(1, queries + 1), replace=False).tolist())
    p, bound = (x[..., heads, :, :] for x in (weights.p, weights.bound))
    if on_edges:
        requested = torch.zeros(queries, 1, dtype=p.dtype)
        requested[rows] = 1.0
        left = weights._replace(p=p * requested, bound=bound * requested)
    else:
        p, bound, apart = (x[..., rows, :] for x in (p, bound, weights.apart))
        left = weights._replace(p=p, bound=bound, place=weights.place[rows], apart=apart)
    return {"heads": heads, "queries": rows}, left, values[..., heads, :, :]


def check_metrics(
    heads: Heads, requested: tuple[Part, ...], weights: Weights, values: Tensor, rng: np.random.Generator
) -> float:
    """Compare the metrics of a view with the formulas; return the largest error as a fraction of its bound.

    Args:
        heads: the view.
        requested: the metrics, computed in one pass.
        weights: the oracle's weights.
        values: the values (..., heads, columns, dim), for contributions.
        rng: source of marked keys and counts.
    """
    requests = [_request(metric, weights, rng) for metric in requested]
    max_error = 0.0
    for (metric, given), got in zip(requests, heads.measure(*(given for _, given in requests)), strict=True):
        about = weights
        if metric[0] == "contribution":
            norm = values.norm(dim=-1)[..., None, :]
            about = weights._replace(p=weights.p * norm, bound=weights.bound * norm)
            metric, given = metric[1:], given[1:] if isinstance(given, tuple) else given
        name = " ".join(map(str, metric))
        if metric[0] == "top":
            max_error = max(max_error, _compare_top(name, got, about, metric[1]))
            continue
        expected, bound = _FORMULAS[metric[0]](about, *(given[1:] if isinstance(given, tuple) else ()))
        max_error = max(max_error, error_ratio("heads", name, got, expected, bound))
    return max_error


def _request(metric: Part, weights: Weights, rng: np.random.Generator) -> tuple[Part, Any]:
    """A metric as drawn, and as `measure` takes it."""
    queries = weights.p.shape[-2]
    if metric == ("mass", "marked"):
        return metric, ("mass", torch.as_tensor(rng.random(weights.keys) < 0.5))
    if metric == ("mass", "at"):
        return metric, ("mass", torch.as_tensor(rng.integers(-1, max(weights.keys, 1), queries)))
    if metric == ("received", "counted"):
        return metric, ("received", torch.as_tensor(rng.random(queries)))
    if metric[0] == "top":
        # without keys there is no largest weight
        metric = ("top", max(1, min(metric[1], weights.keys))) if weights.keys else ("entropy",)
    return metric, metric if len(metric) > 1 else metric[0]


def _entropy(w: Weights) -> Pair:
    size, bound = w.p.abs(), w.bound
    # the slope of −p log p, with p at least as large as its bound
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
    # the package may compute it as 1 minus the other weights
    return (w.p * seen).sum(-1), (w.bound * seen).sum(-1)


def _by_key(w: Weights, x: Tensor) -> Tensor:
    return x @ (w.key[:, None] == torch.arange(w.keys)).to(x.dtype)


def _received(w: Weights, counts: Tensor | None = None) -> Pair:
    counts = torch.ones(len(w.place), dtype=w.p.dtype) if counts is None else counts
    return tuple(_by_key(w, (counts[:, None] * x).sum(-2, keepdim=True))[..., 0, :] for x in (w.p, w.bound))  # type: ignore[return-value]


def _heatmap(w: Weights, size: int) -> Pair:
    """The mean over cells: of n items, item i is in cell i · cells // n."""
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
    """Compare the k largest weights and their keys; −1 if there are fewer."""
    values, keys = got
    padded = torch.nn.functional.pad(w.p, (0, max(0, k - w.p.shape[-1])))
    expected = padded.topk(k, -1).values
    bound = (w.bound.amax(-1, keepdim=True) if w.bound.shape[-1] else w.p.new_zeros(*w.p.shape[:-1], 1)).expand(
        expected.shape
    )
    max_error = error_ratio("heads", name, values, expected, bound)
    # for each returned key, the column whose weight is nearest to the returned weight
    error = (w.p[..., None, :] - values.double()[..., None]).abs().masked_fill(w.key != keys[..., None], torch.inf)
    best = error.amin(-1) if w.p.shape[-1] else torch.full_like(expected, torch.inf)
    wrong = torch.where(keys >= 0, best > bound, values.double() != 0)
    if wrong.any():
        raise Mismatch("heads", f"{name} keys", f"{int(wrong.sum())} keys do not have the returned weight")
    return max_error
