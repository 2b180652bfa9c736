"""Checks of the constructor of `MultiHeadAttention`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from polyhead._checks import WrongType, check_number, short_repr
from polyhead._foreign_arguments import hint_for_position
from polyhead.position import Position
from polyhead.score import GAT, Dot, GATv2, Score

if TYPE_CHECKING:
    from polyhead.nn.attention import MultiHeadAttention

SCORES_BY_NAME: dict[str, Callable[[int, int], Score]] = {"dot": lambda heads, dim: Dot(), "gat": GAT, "gatv2": GATv2}


def check_constructor_options(
    score: object, position: object, sink: object, combine: object, d_out: int | None
) -> None:
    """Raise where an argument is not among its choices."""
    if not isinstance(score, Score) and not (isinstance(score, str) and score in SCORES_BY_NAME):
        raise ValueError(f"score must be 'dot', 'gat', 'gatv2' or a Score, got {score!r}")
    if position is not None and not isinstance(position, Position):
        raise WrongType(
            f"position must be a Position such as Rotary(), got {short_repr(position)}{hint_for_position(position)}"
        )
    if sink is not None and sink != "learned":
        check_number("sink", sink, -math.inf, hint="'learned' makes it a parameter")
    if combine not in ("project", "concat", "mean"):
        raise ValueError(f"combine must be 'project', 'concat' or 'mean', got {combine!r}")
    if d_out is not None and combine != "project":
        raise ValueError(
            f"d_out must be left out with combine={combine!r}, whose width follows from the heads, got {d_out}"
        )


def check_shared_projections(layer: MultiHeadAttention) -> None:
    """Raise where inputs that share a projection differ in width, or heads that must be equal in number do not."""
    one = f"{type(layer.score).__name__} has one projection for both"
    heads = ("kv_heads", layer.kv_heads, "num_heads", layer.num_heads)
    shared: list[tuple[str, int, str, int, str]] = []
    if layer.score.shares_values:
        shared.append(("value_dim", layer.value_dim, "head_dim", layer.head_dim, one))
        shared.append(("d_value", layer.d_value, "d_key", layer.d_key, one))
    if layer.score.shares_queries:
        shared.append((*heads, one))
        shared.append(("d_key", layer.d_key, "d_model", layer.d_model, one))
    if layer.input_dropout:
        shared.append((*heads, "input_dropout is drawn per head"))
    for name, size, other, wanted, reason in shared:
        if size != wanted:
            raise ValueError(f"{name} must equal {other} = {wanted}, got {size}: {reason}")
    if isinstance(layer.score, (GAT, GATv2)):
        layer.score.check(layer.num_heads, layer.head_dim, layer.score.edge_dim)
