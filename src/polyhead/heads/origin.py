"""The tensors that a view refers to, and whether they have changed since the call."""

from __future__ import annotations

from typing import Any, NamedTuple

from jaxtyping import Float
from torch import Tensor

from polyhead.kernels import Call
from polyhead.neighbourhood import Dense
from polyhead.score import Dot


class Origin(NamedTuple):
    """The results of the layer that a view refers to besides the call itself."""

    outputs: Float[Tensor, "... heads queries value_dim"]
    w_o: Float[Tensor, "out heads_dim"] | None = None
    gate: Float[Tensor, " heads"] | None = None
    # the log-sum-exp of the scores, without the sink, if the kernel returned it
    lse: Float[Tensor, "... heads queries"] | None = None
    # whether queries and keys are the same items; None if that is not known
    is_self_attention: bool | None = None


# The weights are computed from these; some results need others too.
NEEDED_FOR_WEIGHTS = ("q", "k", "over", "score", "position", "bias", "sink", "cache")
WATCHED_TENSORS = (*NEEDED_FOR_WEIGHTS, "v", "outputs", "W_O", "gate")


def view_fingerprint(call: Call, origin: Origin, cache: Any) -> tuple[object, ...]:
    """The identity and version of every tensor that a view refers to, in the order of `WATCHED_TENSORS`."""
    q, k, v, over, score, relative_bias, bias, sink, *_ = call
    # a cache appends in place, and counts its other changes itself
    cached = cache is not None
    return (
        _identity_and_version(q),
        None if cached else _identity_and_version(k),
        () if type(over) is Dense else tuple(_identity_and_version(x) for x in over.leaves()),
        () if type(score) is Dot else tuple(_identity_and_version(x) for x in score.learned()),
        _identity_and_version(relative_bias),
        _identity_and_version(bias),
        _identity_and_version(sink),
        None if cache is None else cache.generation,
        None if cached else _identity_and_version(v),
        _identity_and_version(origin.outputs),
        _identity_and_version(origin.w_o),
        _identity_and_version(origin.gate),
    )


def _identity_and_version(x: Tensor | None) -> tuple[int, int] | None:
    # tensors created under torch.inference_mode() have no version
    return None if x is None or x.is_inference() else (id(x), x._version)
