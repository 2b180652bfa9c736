"""Target `grid`: `attend` on grids and at offsets, every kernel, values and gradients; and convolutions as attention."""

from __future__ import annotations

import dataclasses
import operator
from random import Random

import numpy as np
import torch

from fuzz import convolution
from fuzz.calls import check_call
from fuzz.grids import Points, draw_grid_position, offsets_mask, on_grid, points, window_mask
from fuzz.hashing import dropout_mask
from fuzz.neighbourhoods import Drawn, Part, Sizes, build, draw_expression, draw_part
from fuzz.position_setup import along_sequence, draw_position
from fuzz.run import Report
from fuzz.setup import CallCase, NeighbourhoodSetup, draw_call
from polyhead import Grid, Offsets

ON_AXES = ("rotary axes", "window bias", "quadratic")


@dataclasses.dataclass(frozen=True, repr=False)
class Case(CallCase):
    """One call over a grid, or at offsets on it."""

    sizes: tuple[int, ...] = (1,)
    window: tuple[int | None, ...] | None = None
    dilation: tuple[int, ...] = (1,)
    stride: tuple[int, ...] = (1,)
    outputs: tuple[int, ...] | None = None
    prefix: int = 0
    # instead of a window: number of offsets per head, their largest size, and the padding
    offsets: tuple[int, int, str] | None = None
    also: tuple[Part, ...] = ()
    # how the grid and these are combined
    join: str = "and"


def draw(random: Random) -> Case | convolution.Case:
    """Draw a configuration; one in six is a convolution."""
    if random.random() < 0.16:
        return convolution.draw(random)
    axes = random.choices((1, 2, 3), (3, 5, 2))[0]
    most = {1: 24, 2: 8, 3: 4}[axes]
    sizes = tuple(random.randint(1, most) for _ in range(axes))
    each = lambda choices: tuple(random.choice(choices) for _ in range(axes))
    window = each((1, 3, 3, 5, 7, 9, None)) if random.random() < 0.85 else None
    offsets = random.random() < 0.2
    dilation = (1,) * axes if window is None else tuple(1 if n is None else random.choice((1, 1, 2, 3)) for n in window)
    stride = each((1, 2, 3)) if random.random() < 0.3 else (1,) * axes
    outputs = each((1, 2, 3, 5)) if random.random() < 0.15 else None
    sparse = max(stride) > 1 or outputs is not None
    batch = tuple(random.choice((1, 2)) for _ in range(random.randrange(3)))
    call = draw_call(random, batch, random.choice((1, 2, 3, 4)), square=not sparse, axes=3)
    call["dim"], call["value_dim"] = min(call["dim"], 24), min(call["value_dim"], 24)
    prefix = random.choice((0, 0, 0, 1, 2)) if not sparse and not offsets else 0
    along = draw_position(random, call["dim"]) if not sparse else ("none",)
    if axes > 1 and along[0] in ("rotary", "relative"):
        # refused: both have a form for the axes of a grid
        along = ("alibi",)
    position = call.pop("position") or random.choice((("none",), along, draw_grid_position(random, axes, call["dim"])))
    if position[0] in ("quadratic", "window bias") and call["dtype"] in ("bfloat16", "float16"):
        # it is added to a bias in the dtype of its own weights
        call["wide"] = True
    also = tuple(_fitting(random, sparse) for _ in range(random.choice((0, 0, 0, 1, 2))))
    fixed = (
        random.choice((1, 1, 2, 3)),
        random.choice((0, 1, 2, 9)),
        random.choice(("zeros", "replicate", "circular", "reflect")),
    )
    return Case(
        **call, sizes=sizes, window=None if offsets else window, dilation=(1,) * axes if offsets else dilation, stride=stride,
        outputs=outputs, prefix=prefix, offsets=fixed if offsets else None, also=also, position=position,
        join=random.choices(("and", "or", "not"), (6, 2, 1))[0],
    )  # fmt: skip


def _fitting(random: Random, sparse: bool) -> Part:
    """Draw a neighbourhood to combine with; if queries are not the keys, one that does not count them along the keys."""

    def draw(random: Random) -> Part:
        while True:
            part = draw_part(random)
            if not sparse or part[0] in ("dense", "mask", "mask_mod") or (part[0] == "padding" and not part[2]):
                return part

    return draw_expression(random, draw)


def check(case: Case | convolution.Case) -> Report:
    """Compare every kernel that takes this call with the oracle; raise `Mismatch` if they differ."""
    if isinstance(case, convolution.Case):
        return convolution.check(case)
    at, drawn = _neighbourhood(case)
    queries, keys = at.placed.shape
    if case.position[0] in ON_AXES:
        position_setup = on_grid(case.position, at, case.heads, case.dim)
    else:
        position_setup = along_sequence(case.position, case.heads, queries, keys, case.dim)
    places = NeighbourhoodSetup(
        over=lambda given: drawn.over,
        allowed=torch.as_tensor(drawn.allowed.copy()),
        position_setup=position_setup,
        queries=queries,
        keys=keys,
        dropout_mask=dropout_mask(
            case.seed, case.batch, case.heads, np.arange(queries)[:, None], np.arange(keys), case.dropout
        )
        if case.dropout
        else None,
        bias_axes=(case.heads, queries, keys),
        apart=torch.as_tensor(np.linalg.norm(at.offset, axis=-1)),
    )
    return check_call(case, places)


def _neighbourhood(case: Case) -> tuple[Points, Drawn]:
    """The coordinates of queries and keys, and the neighbourhood."""
    outputs = case.outputs
    if outputs is None:
        outputs = tuple(-(-n // step) for n, step in zip(case.sizes, case.stride, strict=True))
    at = points(case.sizes, outputs, case.stride, case.prefix)
    if case.offsets is None:
        grid = Grid(
            case.sizes, window=case.window, dilation=case.dilation, stride=case.stride, outputs=case.outputs, prefix=case.prefix
        )  # fmt: skip
        drawn = Drawn(grid, window_mask(at, case.window, case.dilation)[None])
    else:
        several, far, padding = case.offsets
        rng = np.random.default_rng([case.seed, 7])
        offsets = rng.integers(-far, far + 1, (case.heads, several, len(case.sizes)))
        given = offsets[:, 0] if several == 1 else offsets
        over = Offsets(torch.as_tensor(given), case.sizes, stride=case.stride, outputs=case.outputs, padding=padding)
        drawn = Drawn(over, offsets_mask(at, offsets, padding))
    if case.also:
        more = build(case.also, Sizes(case.batch, case.heads, *at.placed.shape), case.seed)
        joined = operator.or_ if case.join == "or" else operator.and_
        drawn = Drawn(joined(drawn.over, more.over), joined(drawn.allowed, more.allowed))
    if case.join == "not":
        drawn = Drawn(~drawn.over, ~drawn.allowed)
    return at, drawn
