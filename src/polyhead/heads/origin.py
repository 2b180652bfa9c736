"""What a view came from, and whether it has changed since."""

from __future__ import annotations

from typing import Any, NamedTuple

from jaxtyping import Float
from torch import Tensor

from polyhead.kernels import Call
from polyhead.neighbourhood import Dense
from polyhead.score import Dot


class Origin(NamedTuple):
    """What a view came from besides the attention itself: what the layer made of the heads' outputs."""

    outputs: Float[Tensor, "... heads queries value_dim"]
    join: Float[Tensor, "out heads_dim"] | None = None
    gate: Float[Tensor, " heads"] | None = None
    # the log-sum-exp of the scores, without the sink, where the kernel told
    lse: Float[Tensor, "... heads queries"] | None = None


# What the weights are computed from; the others are needed by some answers.
WEIGHTS_NEED = ("q", "k", "over", "score", "position", "bias", "sink", "cache")
WATCHED = (*WEIGHTS_NEED, "v", "outputs", "W_O", "gate")


def versions(call: Call, origin: Origin, cache: Any) -> tuple[object, ...]:
    """A count of in-place changes of all that a view points to, in the order of `WATCHED`."""
    q, k, v, over, score, table, bias, sink, _, _ = call
    # a cache only appends, and counts by itself
    cached = cache is not None
    return (
        _version(q),
        None if cached else _version(k),
        () if type(over) is Dense else tuple(_version(x) for x in over.leaves()),
        () if type(score) is Dot else tuple(_version(x) for x in score.learned()),
        _version(table),
        _version(bias),
        _version(sink),
        None if cache is None else cache.generation,
        None if cached else _version(v),
        _version(origin.outputs),
        _version(origin.join),
        _version(origin.gate),
    )


def _version(x: Tensor | None) -> tuple[int, int] | None:
    # tensors made under torch.inference_mode() are not counted
    return None if x is None or x.is_inference() else (id(x), x._version)
