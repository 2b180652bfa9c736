"""One attention, as every kernel receives it."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor

from polyhead.neighbourhood import Neighbourhood, Sizes
from polyhead.score import Score


class Call(NamedTuple):
    """What a kernel is asked to do. Positions have already rotated `q` and `k`, or stand in `table`.

    `k` and `v` may have fewer heads than `q`: consecutive heads of `q` share one of theirs.
    """

    q: Float[Tensor, "... heads queries dim"]
    k: Float[Tensor, "... key_heads keys dim"]
    v: Float[Tensor, "... value_heads keys value_dim"]
    over: Neighbourhood
    score: Score
    # one number a head and distance: entry d belongs to the key d + 1 - keys after the query
    table: Float[Tensor, "heads distances"] | None = None
    bias: Float[Tensor, "... #heads #queries #keys"] | None = None
    # the logit of one more key, of value zero, that every query may choose
    sink: Float[Tensor, " heads"] | None = None
    dropout: float = 0.0
    seed: Int[Tensor, ""] | None = None

    @property
    def sizes(self) -> Sizes:
        q = self.q.shape
        return Sizes(tuple(q[:-3]), q[-3], q[-2], self.k.shape[-2])


Result = tuple[Float[Tensor, "... heads queries value_dim"], Float[Tensor, "... heads queries"] | None]


class Kernel(Protocol):
    """Computes a call, or says in words why it does not.

    It returns the output and the log-sum-exp of each row of scores, without the sink (-inf where a query has no key);
    None in its place where the call has no sink and a fused kernel keeps it to itself.
    """

    name: str

    def refuses(self, call: Call) -> str | None: ...

    def __call__(self, call: Call) -> Result: ...


def to_heads(x: Float[Tensor, "... own items dim"], heads: int) -> Float[Tensor, "... heads items dim"]:
    """Grouped keys or values given out to every head."""
    own = x.shape[-3]
    return x if own == heads else x.repeat_interleave(heads // own, -3)


def flat(x: Float[Tensor, "... heads items dim"]) -> Float[Tensor, "batch heads items dim"]:
    """All batch axes as one."""
    return x if x.dim() == 4 else x.flatten(0, -4) if x.dim() > 4 else x[None]


def rows(x: Tensor, batch: tuple[int, ...], own: int) -> Tensor:
    """(rows, *own axes): one row for the whole batch where `x` is the same for all of it."""
    shape = tuple(x.shape)
    shape = (1,) * (own - len(shape)) + shape
    rest = shape[len(shape) - own :]
    if all(n == 1 for n in shape[: len(shape) - own]):
        return x.reshape(1, *rest)
    return x.expand(*batch, *rest).reshape(-1, *rest)


def intervals(call: Call) -> tuple[Int[Tensor, "rows queries"], Int[Tensor, "rows queries"]]:
    """The stretch of keys of each query; one row for the whole batch where it is the same for all of it."""
    batch, _, queries, keys = call.sizes
    # a neighbourhood of somebody's own may give the two in different shapes
    ends = torch.broadcast_tensors(*call.over.interval(queries, keys, call.q.device))
    first, stop = (rows(end.expand(*end.shape[:-1], queries), batch, 1) for end in ends)
    return first, stop


def axes(x: Float[Tensor, "batch heads items dim"]) -> list[int]:
    """A tensor as the C++ takes it, whose features lie side by side: where it begins, and its strides."""
    return [x.data_ptr(), *x.stride()[:3]]


def room(
    x: Float[Tensor, "batch heads items dim"], width: int | None = None
) -> Float[Tensor, "batch heads items width"]:
    """Room for a tensor of these axes with the heads inside of the items, so that joining them is free."""
    batch, heads, items, features = x.shape
    return x.new_empty(batch, items, heads, features if width is None else width).transpose(1, 2)
