"""The arguments of one attention call, as every kernel receives them."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor

from polyhead.neighbourhood import Neighbourhood, Sizes
from polyhead.neighbourhood.shapes import flatten_batch_unless_shared
from polyhead.score import Score


class GlobalIndices(NamedTuple):
    """Where the heads, queries and keys of a call lie in the whole attention, if its other parts are computed elsewhere.

    Dropout depends on these indices: a part drops the same pairs as the whole.
    """

    first_head: int = 0
    num_heads: int | None = None
    """The heads of the whole attention; None if the call has all of them."""
    queries: Int[Tensor, " queries"] | None = None
    keys: Int[Tensor, " keys"] | None = None
    head_gatherer: Any = None
    """What finds the heads that are computed elsewhere, for `polyhead.distributed.gather`."""


class Call(NamedTuple):
    """One attention call. Positions have already rotated `q` and `k`, or are in `relative_bias`.

    `k` and `v` may have fewer heads than `q`: consecutive query heads then share one key or value head.
    """

    q: Float[Tensor, "... heads queries dim"]
    k: Float[Tensor, "... key_heads keys dim"]
    v: Float[Tensor, "... value_heads keys value_dim"]
    over: Neighbourhood
    score: Score
    # one number per head and relative position key − query: entry d is for the relative position d + 1 - keys
    relative_bias: Float[Tensor, "heads distances"] | None = None
    bias: Float[Tensor, "... #heads #queries #keys"] | None = None
    # the logit per head of an extra key that every query may attend to; its value is zero
    sink: Float[Tensor, " heads"] | None = None
    dropout: float = 0.0
    seed: Int[Tensor, ""] | None = None
    global_indices: GlobalIndices | None = None

    @property
    def seed_and_heads(self) -> Int[Tensor, ""] | Int[Tensor, " 3"] | None:
        """The seed as operators take it: (seed, first head, heads of the whole attention), or the seed alone for all heads."""
        at, seed = self.global_indices, self.seed
        if at is None or at.num_heads is None or seed is None:
            return seed
        return torch.cat((seed.reshape(1).long(), torch.tensor((at.first_head, at.num_heads), device=seed.device)))

    @property
    def item_indices(self) -> tuple[Int[Tensor, " queries"] | None, Int[Tensor, " keys"] | None]:
        """The indices of queries and keys in the whole attention; None where they count from 0."""
        return (None, None) if self.global_indices is None else self.global_indices[2:4]

    @property
    def sizes(self) -> Sizes:
        q = self.q.shape
        return Sizes(tuple(q[:-3]), q[-3], q[-2], self.k.shape[-2])


OutputAndLse = tuple[Float[Tensor, "... heads queries value_dim"], Float[Tensor, "... heads queries"] | None]


class Kernel(Protocol):
    """Computes a call, or gives the reason why it cannot.

    Calling it returns the output and the log-sum-exp of each row of scores, without the sink (-inf where a query has no key).
    A fused kernel that does not expose the log-sum-exp returns None for it, but only if the call has no sink.
    """

    name: str

    def refuses(self, call: Call) -> str | None: ...

    def __call__(self, call: Call) -> OutputAndLse: ...


def global_indices_of(
    seed_and_heads: Tensor | None, queries: Tensor | None = None, keys: Tensor | None = None
) -> GlobalIndices | None:
    """The global indices of a call, from the arguments of an operator."""
    if seed_and_heads is None or seed_and_heads.numel() == 1:
        return None if queries is None and keys is None else GlobalIndices(0, None, queries, keys)
    return GlobalIndices(int(seed_and_heads[1]), int(seed_and_heads[2]), queries, keys)


def repeat_grouped_heads(x: Float[Tensor, "... own items dim"], heads: int) -> Float[Tensor, "... heads items dim"]:
    """Repeat grouped keys or values, so that every query head has its own."""
    own = x.shape[-3]
    return x if own == heads else x.repeat_interleave(heads // own, -3)


def flatten_batch(x: Float[Tensor, "... heads items dim"]) -> Float[Tensor, "batch heads items dim"]:
    """Merge all batch axes into one."""
    return x if x.dim() == 4 else x.flatten(0, -4) if x.dim() > 4 else x[None]


def key_intervals(call: Call) -> tuple[Int[Tensor, "rows queries"], Int[Tensor, "rows queries"]]:
    """The interval of keys `[first, stop)` of each query; one row if it is the same for the whole batch."""
    batch, _, queries, keys = call.sizes
    # a user's neighbourhood may return the two in different shapes
    ends = torch.broadcast_tensors(*call.over.interval(queries, keys, call.q.device))
    first, stop = (flatten_batch_unless_shared(end.expand(*end.shape[:-1], queries), batch, 1) for end in ends)
    return first, stop


def pointer_and_strides(x: Float[Tensor, "batch heads items dim"]) -> list[int]:
    """A tensor with contiguous features as the C++ kernels take it: its address, and the strides of batch, heads and items."""
    return [x.data_ptr(), *x.stride()[:3]]


def empty_item_major(
    x: Float[Tensor, "batch heads items dim"], width: int | None = None
) -> Float[Tensor, "batch heads items width"]:
    """An uninitialised tensor shaped like `x`, laid out as (batch, items, heads, width): merging the heads copies nothing."""
    batch, heads, items, features = x.shape
    return x.new_empty(batch, items, heads, features if width is None else width).transpose(1, 2)
