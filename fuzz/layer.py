"""Target `layer`: `MultiHeadAttention` with all options and kinds of call, against a definition from its `state_dict`."""

from __future__ import annotations

import dataclasses
from random import Random

import torch

from fuzz import scores
from fuzz.case import Case as BaseCase
from fuzz.layer_ways import WAYS, inputs, make
from fuzz.neighbourhoods import Part, draw_parts
from fuzz.position_setup import draw_position
from fuzz.run import Report


@dataclasses.dataclass(frozen=True, repr=False)
class Case(BaseCase):
    """One layer, and one kind of call."""

    way: str = "call"
    batch: tuple[int, ...] = ()
    queries: int = 1
    # None: self-attention
    keys: int | None = None
    heads: int = 1
    group: int = 1
    d_model: int = 2
    head_dim: int = 2
    value_dim: int = 2
    d_key: int = 2
    d_value: int = 2
    d_out: int = 2
    score: Part = ("dot", None)
    shares_queries: bool = False
    position: Part = ("none",)
    sink: str = "none"
    combine: str = "project"
    qk_norm: bool = False
    residual: bool = False
    has_bias: bool = False
    over: tuple[Part, ...] = ()
    # number of random edges, instead of `over`
    edges: int | None = None
    bias: bool = False
    dropout: float = 0.0
    dtype: str = "float64"


DRAWN = ("call", "call", "call", "cache", "project_kv", "prune", "fold", "gate", "state", "sparse")


def draw(random: Random) -> Case:
    """Draw a configuration that the documentation of the layer allows."""
    way = random.choice(DRAWN)
    heads = random.choice((1, 2, 2, 3, 4, 6))
    group = random.choice([n for n in range(1, heads + 1) if heads % n == 0] if random.random() < 0.4 else (1,))
    # the norm of a single feature is its sign, and its gradient is rounding error
    qk_norm = random.random() < 0.25
    head_dim, value_dim = random.choice((2 if qk_norm else 1, 2, 3, 4, 8, 16)), random.choice((1, 2, 4, 8))
    d_model = random.choice((2, 3, 5, 8, 16))
    score = scores.draw_score(random) if random.random() < 0.5 else ("dot", None)
    cross = random.random() < 0.3 and way not in ("cache", "sparse")
    d_key = random.choice((1, 4, 7)) if cross and random.random() < 0.5 else d_model
    d_value = random.choice((1, 4, 7)) if cross and random.random() < 0.3 else d_key
    shares_queries = score[0] in ("gat", "gatv2") and random.random() < 0.5
    if score[0] in ("gat", "gatv2"):
        value_dim, d_value = head_dim, d_key
        way = "call" if way == "fold" else way
    if shares_queries:
        group, d_key, d_value = 1, d_model, d_model
    combine = "project" if way == "fold" else random.choice(("project", "project", "concat", "mean"))
    edges = random.randint(0, 30) if random.random() < 0.15 and way in ("call", "gate", "prune") else None
    large = random.random() < 0.02
    queries = 64 if large else random.randint(1, 12)
    batch = (8,) if large else tuple(random.choice((1, 2, 3)) for _ in range(random.choice((0, 1, 1, 1, 2))))
    return Case(
        seed=random.randrange(100_000), way=way, batch=() if way == "sparse" else batch, queries=queries, keys=random.randint(1, 12) if cross else None,
        heads=heads, group=group, d_model=256 if large and d_key == d_model else d_model, head_dim=head_dim, value_dim=value_dim,
        d_key=256 if large and d_key == d_model else d_key, d_value=256 if large and d_value == d_model else d_value,
        d_out=random.choice((d_model, 3, 6)), score=score, shares_queries=shares_queries, position=draw_position(random, head_dim),
        sink=random.choice(("none", "none", "number", "learned")), combine=combine, qk_norm=qk_norm,
        residual=random.random() < 0.3 and way != "prune", has_bias=random.random() < 0.7,
        over=(("causal",),) if way == "cache" else (("padding", "lengths", None),) if large else draw_parts(random),
        edges=edges, bias=random.random() < 0.2 and way not in ("cache", "project_kv"),
        dropout=random.choice((0.2, 0.7)) if way == "call" and random.random() < 0.3 else 0.0,
        dtype=random.choice(("float64", "float64", "float32")),
    )  # fmt: skip


def check(case: Case) -> Report:
    """Compare the layer with its definition; raise `Mismatch` if they differ."""
    torch.set_num_threads(1)
    layer = make(case)
    call = inputs(case, layer)
    max_error = WAYS[case.way](case, layer, call)
    return Report(frozenset({case.way if case.edges is None else f"{case.way} on a graph"}), max_error)
