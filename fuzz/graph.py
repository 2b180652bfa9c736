"""Target `graph`: `attend` along edges, every kernel, values and gradients; and graphs derived from others."""

from __future__ import annotations

import dataclasses
from random import Random

import numpy as np
import torch

from fuzz.calls import check_call
from fuzz.edges import KINDS, Made, build_graph, check_graph, draw_filter, draw_pairs
from fuzz.hashing import dropout_mask
from fuzz.neighbourhoods import Part
from fuzz.position_setup import along_sequence, draw_position
from fuzz.run import Report
from fuzz.setup import CallCase, NeighbourhoodSetup, draw_call


@dataclasses.dataclass(frozen=True, repr=False)
class Case(CallCase):
    """One call along edges."""

    sources: int = 1
    destinations: int = 1
    edges: str = "random"
    count: int = 1
    # how the graph is built, how it is changed, and what it is intersected with
    made: str = "list"
    changes: tuple[tuple[str], ...] = ()
    filters: tuple[Part, ...] = ()
    edge_dim: int | None = None
    weighted: bool = False


def draw(random: Random) -> Case:
    """Draw a configuration; most are small, some have a node with hundreds of edges."""
    nodes = random.choices((random.randint(1, 12), random.randint(1, 60), random.randint(0, 2)), (12, 4, 1))[0]
    others = nodes if random.random() < 0.6 else random.randint(0, 20)
    edges = random.choice(KINDS)
    many = edges in ("into one", "from one") and random.random() < 0.15
    count = random.randint(300, 1200) if many else random.randint(0, 4 * nodes)
    batch = tuple(
        random.choice((1, 2, 2, 3, 0) if random.random() < 0.1 else (1, 2)) for _ in range(random.randrange(3))
    )
    batch, heads = ((), 1) if many else (batch, random.choice((1, 2, 3, 4, 8)))
    changes = random.choice(
        ((), (), (), ("reverse",), ("loops",), ("normalised",), ("loops", "normalised"), ("reverse", "loops"))
    )
    if nodes != others and changes != ("reverse",):
        changes = ()
    square = nodes == others
    call = draw_call(random, batch, heads, square=square, axes=2)
    if call["score"][0] in ("dot", "near") and random.random() < 0.4:
        call["score"] = random.choice((("gat", 0.2, False), ("gatv2", 0.2)))
    if many:
        call |= {
            "dim": min(call["dim"], 8),
            "value_dim": min(call["dim"], 8),
            "numbers": random.choice(("positive", "normal")),
        }
    if changes and call["dtype"] in ("bfloat16", "float16"):
        # new weights, and features of new loops, have the dtype of the existing ones
        call["wide"] = True
    featured = call["score"][0] in ("gat", "gatv2") and random.random() < 0.4
    position = call.pop("position") or (draw_position(random, call["dim"]) if random.random() < 0.5 else ("none",))
    return Case(
        **call, sources=nodes, destinations=others, edges=edges, count=count, position=position,
        made=random.choices(("list", "int32", "strided", "batch"), (5, 1, 1, 1))[0], changes=tuple((name,) for name in changes),
        filters=tuple(draw_filter(random) for _ in range(random.choice((0, 0, 0, 1, 1, 2)))),
        edge_dim=random.choice((1, 3, 8)) if featured else None,
        # edges without weights are normalised in fp32
        weighted=random.random() < 0.3 or ("normalised" in changes and call["dtype"] == "float64"),
    )  # fmt: skip


def check(case: Case) -> Report:
    """Compare every kernel that takes this call with the oracle; raise `Mismatch` if they differ."""
    made, shapes = graph_of(case)
    edges = made.edges
    source, destination = torch.as_tensor(edges.source), torch.as_tensor(edges.destination)
    position_setup = along_sequence(case.position, case.heads, edges.destinations, edges.sources, case.dim)
    check_graph(made.graph({name: torch.ones(shape) for name, shape in shapes.items()}), edges)
    places = NeighbourhoodSetup(
        over=made.graph,
        allowed=(destination == torch.arange(edges.destinations)[:, None])[None],
        position_setup=position_setup,
        queries=edges.destinations,
        keys=edges.sources,
        dropout_mask=_dropout_mask(case, made) if case.dropout else None,
        take=source,
        features=edges.features,
        weights=edges.weights,
        shapes=shapes,
        bias_axes=(case.heads, edges.count),
        weights_of=lambda p: p[..., destination, torch.arange(edges.count)],
    )
    return check_call(case, places)


def graph_of(case: Case) -> tuple[Made, dict[str, tuple[int, ...]]]:
    """The graph of a case, and the shapes of its inputs."""
    rng = np.random.default_rng([case.seed, 1])
    pairs = draw_pairs(case.edges, case.sources, case.destinations, case.count, rng)
    shapes: dict[str, tuple[int, ...]] = {}
    if case.edge_dim is not None:
        shapes["features"] = (len(pairs[0]), case.edge_dim)
    if case.weighted:
        shapes["weights"] = (len(pairs[0]),)
    changes = tuple(name for (name,) in case.changes)
    size = (case.sources, case.destinations)
    return build_graph(pairs, size, case.made, changes, case.filters, case.seed), shapes


def _dropout_mask(case: Case, made: Made) -> torch.Tensor:
    """Which edges dropout keeps, by source and destination; only the in-edges of a query matter."""
    query = np.broadcast_to(made.edges.destination, (made.edges.destinations, made.edges.count))
    return dropout_mask(case.seed, case.batch, case.heads, query, made.edges.source, case.dropout)
