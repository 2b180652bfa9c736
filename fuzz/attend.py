"""Target `attend`: `attend` and `attention_weights` on sequences, every kernel, values and gradients."""

from __future__ import annotations

import dataclasses
from random import Random

import numpy as np
import torch

from fuzz.calls import check_call
from fuzz.hashing import dropout_mask
from fuzz.neighbourhoods import Part, Sizes, build, draw_parts
from fuzz.position_setup import along_sequence, draw_position
from fuzz.run import Report
from fuzz.setup import CallCase, NeighbourhoodSetup, draw_call


@dataclasses.dataclass(frozen=True, repr=False)
class Case(CallCase):
    """One call along keys."""

    queries: int = 1
    keys: int = 1
    over: tuple[Part, ...] = ()


def draw(random: Random) -> Case:
    """Draw a configuration; most are small."""
    queries, keys, heads, batch = _lengths(random)
    call = draw_call(random, batch, heads, square=queries == keys, axes=3)
    if queries * keys > 1000 and call["score"][0] in ("gatv2", "near"):
        # the definition builds queries x keys x dim
        queries, keys, call["dim"] = queries % 80, keys % 80, min(call["dim"], 8)
        queries, call["value_dim"] = (keys if call["tied"] == "q is k is v" else queries), call["dim"]
    plain = call["position"] is not None
    over = random.choice(((), (("causal",),), draw_parts(random))) if plain else draw_parts(random)
    position = call.pop("position") or draw_position(random, call["dim"])
    return Case(**call, queries=queries, keys=keys, over=over, position=position)


def _lengths(random: Random) -> tuple[int, int, int, tuple[int, ...]]:
    """Numbers of queries, keys, heads and batch: all small, or one large, so that kernels split it into blocks."""
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
        return queries, keys, random.choice((1, 2)), ()
    if kind == "middle":
        return queries, keys, random.choice((1, 2, 3)), (2,) * random.randrange(2)
    axes = random.choices((0, 1, 2, 3), (2, 6, 2, 1))[0]
    batch = tuple(random.choice((1, 2, 3) if kind == "short" else (0, 1, 2)) for _ in range(axes))
    return queries, keys, random.choice((1, 1, 2, 3, 4, 6, 8)), batch


def check(case: Case) -> Report:
    """Compare every kernel that takes this call with the oracle; raise `Mismatch` if they differ."""
    drawn = build(case.over, Sizes(case.batch, case.heads, case.queries, case.keys), case.seed)
    query, key = np.arange(case.queries)[:, None], np.arange(case.keys)
    places = NeighbourhoodSetup(
        over=lambda given: drawn.over,
        allowed=torch.as_tensor(drawn.allowed.copy()),
        position_setup=along_sequence(case.position, case.heads, case.queries, case.keys, case.dim),
        queries=case.queries,
        keys=case.keys,
        dropout_mask=dropout_mask(case.seed, case.batch, case.heads, query, key, case.dropout)
        if case.dropout
        else None,
        bias_axes=(case.heads, case.queries, case.keys),
    )
    return check_call(case, places)
