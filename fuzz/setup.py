"""A call of `attend` as plain data, and what the package and the oracle make of it; shared by sequences, graphs and grids."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
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
from fuzz.position_setup import Placing
from fuzz.positions import rotate
from fuzz.tensors import DTYPES, NUMBERS, Layout, draw_layout, layout, numbers
from polyhead import Neighbourhood


@dataclasses.dataclass(frozen=True, repr=False)
class CallCase(Case):
    """What all calls of `attend` have."""

    batch: tuple[int, ...] = ()
    heads: int = 1
    # how many heads of q share one of k, and one of v
    key_group: int = 1
    value_group: int = 1
    dim: int = 2
    value_dim: int = 1
    dtype: str = "float64"
    # whether what belongs to scores and positions is fp32 where q, k and v are halves
    wide: bool = False
    score: Part = ("dot", None)
    position: Part = ("none",)
    # which axes a bias has, counted from the last; and how much of it is −inf
    bias: tuple[int, ...] | None = None
    forbidden: float = 0.0
    sink: str = "none"
    dropout: float = 0.0
    numbers: str = "normal"
    # what stands in keys and values that nobody may see, and in queries that may see nothing
    unseen: str = "numbers"
    q_layout: str = "contiguous"
    k_layout: str = "contiguous"
    v_layout: str = "contiguous"
    tied: str = "none"
    learns: bool = False
    # the inputs that want no gradient
    frozen: frozenset[str] = frozenset()
    # the gradient that comes from behind
    pull: str = "ones"
    threads: int = 1
    # what is measured of the heads
    metrics: tuple[Part, ...] = ()
    # of all heads and queries, or of some
    looked: str = "all"


def draw_call(random: Random, batch: tuple[int, ...], heads: int, *, square: bool, axes: int) -> dict[str, Any]:
    """The fields of a call; a third of the calls are plain, so that the fastest kernels take them.

    Args:
        random: what decides.
        batch, heads: the axes in front.
        square: whether there are as many queries as keys, which may then be one tensor.
        axes: how many axes a bias may have behind the batch's.
    """
    plain = random.random() < 0.33
    shares = [n for n in range(1, heads + 1) if heads % n == 0]
    key_group, value_group = random.choice(((1, 1), (1, 1), (random.choice(shares), random.choice(shares))))
    tied = random.choices(("none", "k is v", "q is k is v" if square else "none"), (8, 1, 1))[0]
    if tied != "none":
        value_group = key_group = key_group if tied == "k is v" else 1
    dim = random.choice((1, 2, 3, 4, 5, 8, 8, 16, 16, 17, 24, 32, 64))
    learns, bias = random.random() < 0.7, not plain and random.random() < 0.3
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
        "learns": learns, "pull": random.choice(("ones", "normal", "normal")),
        "frozen": frozenset(name for name in ("q", "k", "v", "bias", "sink") if learns and random.random() < 0.15),
        "threads": 2 if random.random() < 0.03 else 1, "position": ("none",) if plain else None,
        "metrics": draw_metrics(random) if random.random() < 0.3 else (), "looked": random.choice(("all", "all", "some")),
    }  # fmt: skip


Arguments = dict[str, Any]


class Setup(NamedTuple):
    """A call: its inputs by name, what the package makes of them, and what the oracle does."""

    inputs: Inputs
    # the same as the package gets them: with NaN or inf where nobody may look
    given: Inputs
    # q, k, v, over and so on, from inputs that may want gradients
    arguments: Callable[[Inputs], Arguments]
    problem: Problem
    rounding: Rounding


class Places(NamedTuple):
    """Who may attend to whom, and where: what a kind of neighbourhood knows of a call.

    Along a list of pairs every pair is a key of its own: `take` has its key, and `features` and `weights` are the pairs'.
    """

    over: Callable[[Inputs], Neighbourhood]
    # (..., heads or 1, queries, keys)
    allowed: Tensor
    placing: Placing
    kernels: Iterable[str]
    queries: int
    keys: int
    stays: Tensor | None = None
    take: Tensor | None = None
    features: Callable[[Inputs], Tensor | None] = lambda given: None
    weights: Callable[[Inputs, bool], Tensor | None] = lambda given, absolute: None
    # the shapes of inputs that belong to the neighbourhood
    shapes: Mapping[str, tuple[int, ...]] = MappingProxyType({})
    # a bias is (..., heads, queries, keys), or (..., heads, pairs)
    bias_axes: tuple[int, ...] = ()
    # how far apart each query and key are (queries, keys); along the keys unless given
    apart: Tensor | None = None
    # the weights as the package lays them out, from the oracle's (..., heads, queries, keys)
    weights_of: Callable[[Tensor], Tensor] = lambda p: p


def set_up(case: CallCase, places: Places, rng: np.random.Generator) -> Setup:
    """The case's tensors, the package's call and the oracle's problem."""
    named = _layouts(case, places)
    placing = places.placing
    edge_dim = places.shapes["features"][1] if "features" in places.shapes else None
    owned = scores.shapes(case.score, case.heads, case.dim, edge_dim)
    inputs = _inputs(
        case, {name: kind.shape for name, kind in named.items()}, {**placing.shapes, **places.shapes, **owned}, rng
    )
    _add_bias_and_sink(inputs, case, places, rng)
    along_pairs = places.take is not None

    def tensors(given: Inputs) -> dict[str, Tensor]:
        made = {name: kind.view(given[name]) for name, kind in named.items()}
        made.setdefault("k", made["q"])
        made.setdefault("v", made["k"])
        return made

    def arguments(given: Inputs) -> Arguments:
        sink = 0.7 if case.sink == "number" else given.get("sink")
        return {
            **tensors(given), "over": places.over(given), "position": placing.position(given), "bias": given.get("bias"), "sink": sink,
            "score": scores.make(case.score, given, case.heads, case.dim, edge_dim), "dropout": case.dropout, "seed": case.seed,
        }  # fmt: skip

    def of_keys(x: Tensor, group: int) -> Tensor:
        x = x[..., [head // group for head in range(case.heads)], :, :]
        return x if places.take is None else x[..., places.take, :]

    def ends(given: Inputs, absolute: bool) -> tuple[Tensor, Tensor]:
        x = tensors(given)
        q, k = rotate(x["q"], placing.queries, absolute), rotate(x["k"], placing.keys, absolute)
        return q, of_keys(k, case.key_group)

    def formula(given: Inputs, absolute: bool) -> Tensor:
        s = scores.formula(case.score, given, *ends(given, absolute), places.features(given), absolute)
        if placing.added is not None:
            added = placing.added(given, absolute)
            s = s + (added if places.take is None else added[..., places.take])
        if "bias" in given:
            bias = given["bias"].masked_fill(given["bias"].isinf(), 0.0)
            s = s + (bias[..., None, :] if along_pairs else bias)
        return s

    allowed = places.allowed
    if "bias" in inputs:
        seen = inputs["bias"] > -torch.inf
        allowed = allowed & (seen[..., None, :] if along_pairs else seen)
    problem = Problem(
        formula,
        lambda given: of_keys(tensors(given)["v"], case.value_group),
        allowed,
        places.stays,
        case.dropout,
        "sink" if case.sink != "none" else None,
        places.weights,
        (lambda given, absolute: scores.bent(case.score, given, *ends(given, absolute), places.features(given)))
        if case.score[0] in ("gat", "gatv2")
        else None,
    )
    rounding = Rounding.of(DTYPES[case.dtype], turned=placing.queries is not None)
    return Setup(inputs, _spoilt(case, places, inputs, tensors), arguments, problem, rounding)


def _spoilt(case: CallCase, places: Places, inputs: Inputs, tensors: Callable[[Inputs], dict[str, Tensor]]) -> Inputs:
    """Inputs with NaN or inf in keys and values that nobody may see, and in queries that may see nothing; zeros in the others."""
    shared = any(kind.startswith("one ") for kind in (case.q_layout, case.k_layout, case.v_layout))
    # the gradient of any other score is autograd's, which multiplies NaN by zero
    learns = case.learns and case.score[0] != "dot"
    if case.unseen == "numbers" or shared or learns or case.tied != "none":
        return inputs
    pairs = places.allowed.expand(*case.batch, case.heads, places.queries, places.allowed.shape[-1])
    keys = pairs.any(-2)
    if places.take is not None:
        keys = torch.zeros(*keys.shape[:-1], places.keys, dtype=torch.bool).index_add(-1, places.take, keys)
    seen = {"q": pairs.any(-1), "k": _of_group(keys, case.key_group), "v": _of_group(keys, case.value_group)}
    spoilt = {name: x.clone() for name, x in inputs.items()}
    for given, value in ((inputs, 0.0), (spoilt, float(case.unseen))):
        for name, x in tensors(given).items():
            x.masked_fill_(~seen[name][..., None], value)
    return spoilt


def _of_group(seen: Tensor, group: int) -> Tensor:
    """Whether any head of a group sees a key."""
    return seen.unflatten(-2, (seen.shape[-2] // group, group)).any(-2)


def _layouts(case: CallCase, places: Places) -> dict[str, Layout]:
    """The layouts of q, k and v, without those that are another one."""
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
    """q, k and v, and what scores, positions and edges own, by name."""
    dtype = DTYPES[case.dtype]
    wide = torch.promote_types(dtype, torch.float32) if case.wide else dtype
    inputs = {name: numbers(case.numbers, shape, rng, dtype) for name, shape in tensors.items()}
    for name, shape in owned.items():
        kind = "positive" if name == "weights" else "normal"
        inputs[name] = numbers(kind, shape, rng, wide)
    return inputs


def _add_bias_and_sink(inputs: Inputs, case: CallCase, places: Places, rng: np.random.Generator) -> None:
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
