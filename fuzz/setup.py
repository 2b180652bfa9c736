"""A call of `attend` as plain data, for the package and for the oracle; shared by sequences, graphs and grids."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from random import Random
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fuzz import scores
from fuzz.case import Case
from fuzz.metrics import draw_metrics
from fuzz.neighbourhoods import Part
from fuzz.oracle import Inputs, Problem, Rounding
from fuzz.position_setup import PositionSetup
from fuzz.positions import rotate
from fuzz.tensors import DTYPES, NUMBERS, Layout, draw_layout, layout, numbers
from polyhead import Neighbourhood


@dataclasses.dataclass(frozen=True, repr=False)
class CallCase(Case):
    """The options of every call of `attend`."""

    batch: tuple[int, ...] = ()
    heads: int = 1
    # number of heads of q that share one head of k, and one of v
    key_group: int = 1
    value_group: int = 1
    dim: int = 2
    value_dim: int = 1
    dtype: str = "float64"
    # whether weights of scores and positions are fp32 if q, k and v are in half precision
    wide: bool = False
    score: Part = ("dot", None)
    position: Part = ("none",)
    # the axes of a bias, counted from the last; and the fraction that is −inf
    bias: tuple[int, ...] | None = None
    forbidden: float = 0.0
    sink: str = "none"
    dropout: float = 0.0
    numbers: str = "normal"
    # the contents of keys and values that no query may attend to, and of queries without a key
    unseen: str = "numbers"
    q_layout: str = "contiguous"
    k_layout: str = "contiguous"
    v_layout: str = "contiguous"
    tied: str = "none"
    requires_grad: bool = False
    # inputs that require no gradient
    frozen: frozenset[str] = frozenset()
    # the kind of gradient passed to backward
    grad_output: str = "ones"
    threads: int = 1
    # head metrics to check
    metrics: tuple[Part, ...] = ()
    # for all heads and queries, or for some
    selected: str = "all"


def draw_call(random: Random, batch: tuple[int, ...], heads: int, *, square: bool, axes: int) -> dict[str, Any]:
    """Draw the fields of a call; a third are plain, so that the fastest kernels take them.

    Args:
        random: source of the draws.
        batch, heads: the leading axes.
        square: whether there are as many queries as keys; they may then be one tensor.
        axes: how many axes a bias may have after the batch's.
    """
    plain = random.random() < 0.33
    shares = [n for n in range(1, heads + 1) if heads % n == 0]
    key_group, value_group = random.choice(((1, 1), (1, 1), (random.choice(shares), random.choice(shares))))
    tied = random.choices(("none", "k is v", "q is k is v" if square else "none"), (8, 1, 1))[0]
    if tied != "none":
        value_group = key_group = key_group if tied == "k is v" else 1
    dim = random.choice((1, 2, 3, 4, 5, 8, 8, 16, 16, 17, 24, 32, 64))
    requires_grad, bias = random.random() < 0.7, not plain and random.random() < 0.3
    return {
        "seed": random.randrange(100_000), "batch": batch, "heads": heads, "key_group": key_group, "value_group": value_group,
        "dim": dim, "value_dim": dim if tied != "none" or random.random() < 0.5 else random.choice((1, 2, 3, 7, 8, 16, 33, 64)),
        "dtype": random.choices(tuple(DTYPES), (3, 3, 1, 1))[0], "wide": random.random() < 0.5,
        "score": ("dot", random.choice((None, None, 1.0, 3.0))) if plain else scores.draw_score(random),
        "bias": tuple(n for n in range(axes + len(batch)) if random.random() < 0.6) if bias else None,
        "forbidden": 0.3 if bias and random.random() < 0.2 else 0.0,
        "sink": random.choices(("none", "number", "learned"), (6, 1, 2))[0],
        "dropout": random.choice((0.1, 0.5, 0.9)) if not plain and random.random() < 0.35 else 0.0,
        "numbers": random.choices(NUMBERS, (10, 2, 2, 2, 2, 1))[0],
        "unseen": random.choices(("numbers", "nan", "inf"), (8, 1, 1))[0],
        "q_layout": draw_layout(random), "k_layout": draw_layout(random), "v_layout": draw_layout(random), "tied": tied,
        "requires_grad": requires_grad, "grad_output": random.choice(("ones", "normal", "normal")),
        "frozen": frozenset(name for name in ("q", "k", "v", "bias", "sink") if requires_grad and random.random() < 0.15),
        "threads": 2 if random.random() < 0.03 else 1, "position": ("none",) if plain else None,
        "metrics": draw_metrics(random) if random.random() < 0.3 else (), "selected": random.choice(("all", "all", "some")),
    }  # fmt: skip


Arguments = dict[str, Any]
Tensors = Callable[[Inputs], dict[str, Tensor]]


class Setup(NamedTuple):
    """A call: its inputs by name, the arguments for the package, and the problem for the oracle."""

    inputs: Inputs
    # the inputs for the package: with NaN or inf in places that must not be read
    given: Inputs
    # q, k, v, over and so on, from inputs that may require gradients
    arguments: Callable[[Inputs], Arguments]
    problem: Problem
    rounding: Rounding


class NeighbourhoodSetup(NamedTuple):
    """The neighbourhood of a call with its definition: the allowed pairs, and the positions of queries and keys.

    Along a list of pairs, every pair counts as a separate key: `take` has the number of its key, and `features` and `weights`
    are those of the pairs.
    """

    over: Callable[[Inputs], Neighbourhood]
    # (..., heads or 1, queries, keys)
    allowed: Tensor
    position_setup: PositionSetup
    queries: int
    keys: int
    dropout_mask: Tensor | None = None
    take: Tensor | None = None
    features: Callable[[Inputs], Tensor | None] = lambda given: None
    weights: Callable[[Inputs, bool], Tensor | None] = lambda given, absolute: None
    # shapes of the inputs that belong to the neighbourhood
    shapes: Mapping[str, tuple[int, ...]] = MappingProxyType({})
    # a bias is (..., heads, queries, keys), or (..., heads, pairs)
    bias_axes: tuple[int, ...] = ()
    # distance of each query and key (queries, keys); by default along the keys
    apart: Tensor | None = None
    # converts the oracle's weights (..., heads, queries, keys) to the layout of the package
    weights_of: Callable[[Tensor], Tensor] = lambda p: p


def set_up(case: CallCase, places: NeighbourhoodSetup, rng: np.random.Generator) -> Setup:
    """Build the tensors of a case, the call of the package and the problem of the oracle."""
    layouts = _layouts(case, places)
    position_setup = places.position_setup
    edge_dim = places.shapes["features"][1] if "features" in places.shapes else None
    owned = scores.shapes(case.score, case.heads, case.dim, edge_dim)
    inputs = _inputs(
        case,
        {name: kind.shape for name, kind in layouts.items()},
        {**position_setup.shapes, **places.shapes, **owned},
        rng,
    )
    _add_bias_and_sink(inputs, case, places, rng)

    def tensors(given: Inputs) -> dict[str, Tensor]:
        views = {name: kind.view(given[name]) for name, kind in layouts.items()}
        views.setdefault("k", views["q"])
        views.setdefault("v", views["k"])
        return views

    def arguments(given: Inputs) -> Arguments:
        sink = 0.7 if case.sink == "number" else given.get("sink")
        return {
            **tensors(given), "over": places.over(given), "position": position_setup.position(given), "bias": given.get("bias"), "sink": sink,
            "score": scores.make(case.score, given, case.heads, case.dim, edge_dim), "dropout": case.dropout, "seed": case.seed,
        }  # fmt: skip

    rounding = Rounding.of(DTYPES[case.dtype], rotated_before=position_setup.queries is not None)
    problem = _problem(case, places, inputs, tensors)
    return Setup(inputs, _poison_unseen(case, places, inputs, tensors), arguments, problem, rounding)


def _problem(case: CallCase, places: NeighbourhoodSetup, inputs: Inputs, tensors: Tensors) -> Problem:
    """The attention of a case for the oracle."""
    position_setup, along_pairs = places.position_setup, places.take is not None

    def of_keys(x: Tensor, group: int) -> Tensor:
        x = x[..., [head // group for head in range(case.heads)], :, :]
        return x if places.take is None else x[..., places.take, :]

    def rotated(given: Inputs, absolute: bool) -> tuple[Tensor, Tensor]:
        x = tensors(given)
        q, k = rotate(x["q"], position_setup.queries, absolute), rotate(x["k"], position_setup.keys, absolute)
        return q, of_keys(k, case.key_group)

    def formula(given: Inputs, absolute: bool) -> Tensor:
        s = scores.formula(case.score, given, *rotated(given, absolute), places.features(given), absolute)
        if position_setup.added is not None:
            added = position_setup.added(given, absolute)
            s = s + (added if places.take is None else added[..., places.take])
        if "bias" in given:
            bias = given["bias"].masked_fill(given["bias"].isinf(), 0.0)
            s = s + (bias[..., None, :] if along_pairs else bias)
        return s

    def pre_activation(given: Inputs, absolute: bool) -> Tensor:
        return scores.pre_activation(case.score, given, *rotated(given, absolute), places.features(given))

    allowed = places.allowed
    if "bias" in inputs:
        finite = inputs["bias"] > -torch.inf
        allowed = allowed & (finite[..., None, :] if along_pairs else finite)
    return Problem(
        formula,
        lambda given: of_keys(tensors(given)["v"], case.value_group),
        allowed,
        places.dropout_mask,
        case.dropout,
        "sink" if case.sink != "none" else None,
        places.weights,
        pre_activation if case.score[0] in ("gat", "gatv2") else None,
    )


def _poison_unseen(case: CallCase, places: NeighbourhoodSetup, inputs: Inputs, tensors: Tensors) -> Inputs:
    """Put NaN or inf into a copy of the inputs where nothing may be read: in keys and values that no query may attend to, and in
    queries without a key. The oracle's inputs get zeros there."""
    shared = any(kind.startswith("one ") for kind in (case.q_layout, case.k_layout, case.v_layout))
    # other scores have autograd's gradient, which multiplies NaN by zero
    requires_grad = case.requires_grad and case.score[0] != "dot"
    if case.unseen == "numbers" or shared or requires_grad or case.tied != "none":
        return inputs
    pairs = places.allowed.expand(*case.batch, case.heads, places.queries, places.allowed.shape[-1])
    keys = pairs.any(-2)
    if places.take is not None:
        keys = torch.zeros(*keys.shape[:-1], places.keys, dtype=torch.bool).index_add(-1, places.take, keys)
    seen = {"q": pairs.any(-1), "k": _of_group(keys, case.key_group), "v": _of_group(keys, case.value_group)}
    poisoned = {name: x.clone() for name, x in inputs.items()}
    for given, value in ((inputs, 0.0), (poisoned, float(case.unseen))):
        for name, x in tensors(given).items():
            x.masked_fill_(~seen[name][..., None], value)
    return poisoned


def _of_group(seen: Tensor, group: int) -> Tensor:
    """Whether any head of a group may attend to a key."""
    return seen.unflatten(-2, (seen.shape[-2] // group, group)).any(-2)


def _layouts(case: CallCase, places: NeighbourhoodSetup) -> dict[str, Layout]:
    """The layouts of q, k and v, without those that are the same tensor as another."""
    shapes = {
        "q": (*case.batch, case.heads, places.queries, case.dim),
        "k": (*case.batch, case.heads // case.key_group, places.keys, case.dim),
        "v": (*case.batch, case.heads // case.value_group, places.keys, case.value_dim),
    }
    own = {"none": "qkv", "k is v": "qk", "q is k is v": "q"}[case.tied]
    kinds = {"q": case.q_layout, "k": case.k_layout, "v": case.v_layout}
    return {name: layout(kinds[name], shapes[name]) for name in own}


def _inputs(
    case: CallCase, tensors: dict[str, tuple[int, ...]], owned: dict[str, tuple[int, ...]], rng: np.random.Generator
) -> Inputs:
    """q, k and v, and the weights of scores, positions and edges, by name."""
    dtype = DTYPES[case.dtype]
    wide = torch.promote_types(dtype, torch.float32) if case.wide else dtype
    inputs = {name: numbers(case.numbers, shape, rng, dtype) for name, shape in tensors.items()}
    for name, shape in owned.items():
        kind = "positive" if name == "weights" else "normal"
        inputs[name] = numbers(kind, shape, rng, wide)
    return inputs


def _add_bias_and_sink(inputs: Inputs, case: CallCase, places: NeighbourhoodSetup, rng: np.random.Generator) -> None:
    dtype = DTYPES[case.dtype]
    if case.bias is not None:
        full = (*case.batch, *places.bias_axes)
        axes = [size if len(full) - 1 - place in case.bias else 1 for place, size in enumerate(full)]
        forbidden = torch.as_tensor(rng.random(axes) < case.forbidden)
        inputs["bias"] = numbers("normal", axes, rng, dtype).masked_fill(forbidden, -torch.inf)
    if case.sink != "none":
        wide = torch.promote_types(dtype, torch.float32) if case.wide else dtype
        inputs["sink"] = numbers("normal", (case.heads,), rng, wide)
    if case.sink == "number":
        inputs["sink"] = torch.full((case.heads,), 0.7, dtype=torch.float64)
