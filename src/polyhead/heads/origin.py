"""The tensors that a view refers to, and whether they have changed since the call."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import Parameter

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


def check_unchanged(
    call: Call, origin: Origin, cache: Any, versions: tuple[object, ...] | None, also: tuple[str, ...]
) -> None:
    """Raise where a tensor that weights are computed from, or `also` these, is gone or has changed since `versions`."""
    named = {"sink": [call.sink], "score": call.score.learned(), "W_O": [origin.w_o], "gate": [origin.gate]}
    released = [name for name, tensors in named.items() if any(map(is_released, tensors))]
    if any(name in NEEDED_FOR_WEIGHTS or name in also for name in released):
        raise ValueError(
            f"{', '.join(released)} must be in memory, got one that FSDP has released after the call; shard with "
            "reshard_after_forward=False"
        )
    if versions is None:
        return
    pairs = zip(WATCHED_TENSORS, versions, view_fingerprint(call, origin, cache), strict=True)
    stale = [n for n, before, after in pairs if before != after and (n in NEEDED_FOR_WEIGHTS or n in also)]
    if stale:
        raise ValueError(
            f"this view is stale: {', '.join(stale)} changed in place since the attention was computed; "
            "read it before the change, or keep a copy with heads.detach()"
        )


def is_released(x: Tensor | None) -> bool:
    """Whether the memory of a parameter has been given back, as by FSDP when its module has been called."""
    # a tensor that is traced or transformed has no memory to look at
    if x is None or torch.compiler.is_compiling() or type(x) not in (Tensor, Parameter):
        return False
    return x.numel() > 0 and x.untyped_storage().nbytes() == 0


def _identity_and_version(x: Tensor | None) -> tuple[int, int] | None:
    # tensors created under torch.inference_mode() have no version
    return None if x is None or x.is_inference() else (id(x), x._version)
