"""`attend` and `attention_weights` along keys: every kernel that takes a call, in value and gradient."""

from __future__ import annotations

import dataclasses
from random import Random
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fuzz import scores
from fuzz.calls import Arguments, Setup, check_call
from fuzz.case import Case as BaseCase
from fuzz.hashing import stays
from fuzz.neighbourhoods import Part, Sizes, build, draw_parts
from fuzz.oracle import Inputs, Problem, Rounding
from fuzz.placings import along_sequence
from fuzz.positions import rotate
from fuzz.run import Report
from fuzz.tensors import DTYPES, NUMBERS, draw_layout, layout, numbers
from polyhead.kernels import ALONG_KEYS


@dataclasses.dataclass(frozen=True, repr=False)
class Case(BaseCase):
    """One call of `attend`."""

    batch: tuple[int, ...] = ()
    heads: int = 1
    # how many heads of q share one of k, and one of v
    key_group: int = 1
    value_group: int = 1
    queries: int = 1
    keys: int = 1
    dim: int = 2
    value_dim: int = 1
    dtype: str = "float64"
    # whether what belongs to scores and positions is fp32 where q, k and v are halves
    wide: bool = False
    over: tuple[Part, ...] = ()
    score: Part = ("dot", None)
    position: Part = ("none",)
    # which axes a bias has, of (batch…, heads, queries, keys) counted from the last; and how much of it is −inf
    bias: tuple[int, ...] | None = None
    forbidden: float = 0.0
    sink: str = "none"
    dropout: float = 0.0
    numbers: str = "normal"
    q_layout: str = "contiguous"
    k_layout: str = "contiguous"
    v_layout: str = "contiguous"
    tied: str = "none"
    learns: bool = False
    frozen: frozenset[str] = frozenset()
    pull: str = "ones"


def draw(random: Random) -> Case:
    """A configuration; most are small."""
    heads = random.choice((1, 1, 2, 3, 4, 6, 8))
    shares = [n for n in range(1, heads + 1) if heads % n == 0]
    groups = random.choice(((1, 1), (1, 1), (random.choice(shares), random.choice(shares))))
    tied = random.choices(("none", "k is v", "q is k is v"), (8, 1, 1))[0]
    queries, keys, heads, batch = _lengths(random, heads)
    if tied == "q is k is v":
        queries, groups = keys, (1, 1)
    elif tied == "k is v":
        groups = (groups[0], groups[0])
    groups = (1, 1) if heads % groups[0] or heads % groups[1] else groups
    dim = random.choice((1, 2, 3, 4, 5, 8, 8, 16, 16, 17, 24, 32, 64))
    # scores that build queries x keys x dim
    dim = min(dim, 8) if queries * keys > 1000 else dim
    value_dim = dim if tied != "none" or random.random() < 0.5 else random.choice((1, 2, 3, 7, 8, 16, 33, 64))
    sizes = Sizes(batch, heads, queries, keys)
    learns = random.random() < 0.7
    dropped = random.random() < 0.25
    bias = random.random() < 0.25
    return Case(
        seed=random.randrange(100_000), batch=batch, heads=heads, key_group=groups[0], value_group=groups[1], queries=queries,
        keys=keys, dim=dim, value_dim=value_dim, dtype=random.choices(tuple(DTYPES), (3, 3, 1, 1))[0], wide=random.random() < 0.5,
        over=draw_parts(random, sizes), score=scores.draw_score(random), position=_draw_position(random, dim),
        bias=tuple(n for n in range(3 + len(batch)) if random.random() < 0.6) if bias else None,
        forbidden=0.3 if bias and random.random() < 0.2 else 0.0, sink=random.choices(("none", "number", "learned"), (6, 1, 2))[0],
        dropout=random.choice((0.1, 0.5, 0.9)) if dropped else 0.0, numbers=random.choices(NUMBERS, (10, 2, 2, 2, 2, 1))[0],
        q_layout=draw_layout(random), k_layout=draw_layout(random), v_layout=draw_layout(random), tied=tied, learns=learns,
        frozen=frozenset(name for name in ("q", "k", "v", "bias", "sink") if learns and random.random() < 0.15),
        pull=random.choice(("ones", "normal", "normal")),
    )  # fmt: skip


def _lengths(random: Random, heads: int) -> tuple[int, int, int, tuple[int, ...]]:
    """Queries, keys, heads and batch: few of each, or many of one, so that kernels cut them into blocks."""
    kind = random.choices(("short", "middle", "long", "empty"), (60, 15, 1, 4))[0]
    most = {"short": 12, "middle": 70, "long": 600, "empty": 5}[kind]
    least = 0 if kind == "empty" else 1
    queries, keys = random.randint(least, most), random.randint(least, most)
    shape = random.random()
    if shape < 0.5:
        queries = keys
    elif shape < 0.6:
        queries = 1
    if kind == "long":
        return queries, keys, 1 + random.randrange(2), ()
    if kind == "middle":
        return queries, keys, min(heads, 3), (2,) * random.randrange(2)
    axes = random.choices((0, 1, 2, 3), (2, 6, 2, 1))[0]
    return queries, keys, heads, tuple(random.choice((1, 2, 3) if kind == "short" else (0, 1, 2)) for _ in range(axes))


def _draw_position(random: Random, dim: int) -> Part:
    kind = random.choices(("none", "rotary", "alibi", "relative"), (6, 3, 1, 2))[0]
    if kind == "rotary" and dim >= 2:
        turned = None if dim % 2 == 0 and random.random() < 0.6 else random.randrange(2, dim + 1, 2)
        factor, trained = random.choice(((None, None), (None, None), (4.0, None), (8.0, 32)))
        return (kind, turned, random.choice((10_000.0, 100.0)), random.random() < 0.4, factor, trained)
    if kind == "relative":
        buckets = random.choice((4, 8, 16, 32))
        return (kind, buckets, random.choice((buckets + 1, 64, 128)), random.random() < 0.6)
    return (kind,) if kind in ("none", "alibi") else ("none",)


def check(case: Case) -> Report:
    """Compare every kernel that takes this call with the oracle; `Mismatch` where they differ."""
    rng = np.random.default_rng(case.seed)
    frozen = case.frozen | {"sink"} if case.sink == "number" else case.frozen
    return check_call(set_up(case, rng), learns=case.learns, frozen=frozen, pull=case.pull, rng=rng)


def set_up(case: Case, rng: np.random.Generator) -> Setup:
    """The case's tensors, the package's call and the oracle's problem."""
    sizes = Sizes(case.batch, case.heads, case.queries, case.keys)
    drawn = build(case.over, sizes, case.seed)
    placing = along_sequence(case.position, case.heads, case.queries, case.keys, case.dim)
    named = _layouts(case)
    inputs = _inputs(case, {name: kind.shape for name, kind in named.items()} | placing.shapes, rng)
    allowed = torch.as_tensor(drawn.allowed.copy())
    if "bias" in inputs:
        allowed = allowed & (inputs["bias"] > -torch.inf)

    def tensors(given: Inputs) -> dict[str, Tensor]:
        made = {name: kind.view(given[name]) for name, kind in named.items()}
        made.setdefault("k", made["q"])
        made.setdefault("v", made["k"])
        return made

    def arguments(given: Inputs) -> Arguments:
        sink = 0.7 if case.sink == "number" else given.get("sink") if case.sink == "learned" else None
        return {
            **tensors(given), "over": drawn.over, "score": scores.make(case.score, given, case.heads, case.dim),
            "position": placing.position(given), "bias": given.get("bias"), "sink": sink, "dropout": case.dropout, "seed": case.seed,
        }  # fmt: skip

    def heads_of(given: Inputs, absolute: bool) -> tuple[Tensor, Tensor]:
        x = tensors(given)
        q, k = rotate(x["q"], placing.queries, absolute), rotate(x["k"], placing.keys, absolute)
        return q, _given_out(k, case.key_group)

    def score(given: Inputs, absolute: bool) -> Tensor:
        s = scores.formula(case.score, given, *heads_of(given, absolute), None, absolute)
        if placing.added is not None:
            s = s + placing.added(given, absolute)
        return s + given["bias"].masked_fill(given["bias"].isinf(), 0.0) if "bias" in given else s

    def bent(given: Inputs, absolute: bool) -> Tensor:
        return scores.bent(case.score, given, *heads_of(given, absolute), None)

    keys, places = np.arange(case.keys), np.arange(case.queries)[:, None]
    return Setup(
        inputs,
        arguments,
        Problem(
            score,
            lambda given: _given_out(tensors(given)["v"], case.value_group),
            allowed,
            stays(case.seed, case.batch, case.heads, places, keys, case.dropout) if case.dropout else None,
            case.dropout,
            "sink" if case.sink != "none" else None,
            bent=bent if case.score[0] in ("gat", "gatv2") else None,
        ),
        Rounding.of(DTYPES[case.dtype], turned=case.position[0] == "rotary"),
        [kernel.name for kernel in ALONG_KEYS],
    )


def _given_out(x: Tensor, group: int) -> Tensor:
    """Shared keys or values, one for each head: head h has that of its group, h // group."""
    return x[..., [head // group for head in range(x.shape[-3] * group)], :, :]


def _layouts(case: Case) -> dict[str, Any]:
    """The layouts of q, k and v, without those that are another one."""
    shapes = {
        "q": (*case.batch, case.heads, case.queries, case.dim),
        "k": (*case.batch, case.heads // case.key_group, case.keys, case.dim),
        "v": (*case.batch, case.heads // case.value_group, case.keys, case.value_dim),
    }
    own = {"none": "qkv", "k is v": "qk", "q is k is v": "q"}[case.tied]
    kinds = {"q": case.q_layout, "k": case.k_layout, "v": case.v_layout}
    return {name: layout(kinds[name], shapes[name]) for name in own}


def _inputs(case: Case, shapes: dict[str, tuple[int, ...]], rng: np.random.Generator) -> Inputs:
    """All leaves by name: q, k and v, what scores and positions own, bias and sink."""
    dtype = DTYPES[case.dtype]
    owned = torch.promote_types(dtype, torch.float32) if case.wide else dtype
    inputs = {
        name: numbers(case.numbers if name in "qkv" else "normal", shape, rng, dtype if name in "qkv" else owned)
        for name, shape in (shapes | scores.shapes(case.score, case.heads, case.dim)).items()
    }
    if case.bias is not None:
        full = (*case.batch, case.heads, case.queries, case.keys)
        axes = [size if len(full) - 1 - place in case.bias else 1 for place, size in enumerate(full)]
        bias = numbers("normal", axes, rng, dtype)
        inputs["bias"] = bias.masked_fill(torch.as_tensor(rng.random(axes) < case.forbidden), -torch.inf)
    if case.sink == "learned":
        inputs["sink"] = numbers("normal", (case.heads,), rng, owned)
    elif case.sink == "number":
        inputs["sink"] = torch.full((case.heads,), 0.7, dtype=torch.float64)
    return inputs
