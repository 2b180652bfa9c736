"""Questions about heads: many answered by one pass over the scores where that can be, else one by one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from polyhead._checks import LARGEST, WrongType, check_integer, is_integer, shown
from polyhead.kernels.reference import chosen
from polyhead.metrics import blockwise, edges, streaming
from polyhead.metrics.blockwise import Part
from polyhead.metrics.edges import EdgePart
from polyhead.metrics.streaming import MOST_SUMS, PassRequest, PassResult

AnyPart = Part | EdgePart


class MetricRequest(NamedTuple):
    """A metric by its name in `metrics`, its arguments, and whether it is about contributions in place of weights."""

    name: str
    about: tuple[Any, ...] = ()
    moved: bool = False


_OFFSETS = {"self": 0, "previous": -1, "next": 1}
Place = str | int | Tensor
"""Where mass may lie: see `Heads.mass`."""


def mass_question(on: Place, queries: int, keys: int, device: torch.device) -> MetricRequest:
    """How much of each query's weight lies where `on` says."""
    if isinstance(on, Tensor):
        if on.dtype == torch.bool and on.dim() and on.shape[-1] == keys:
            return MetricRequest("mass_on", (on.to(device),))
        if on.dtype in (torch.int64, torch.int32) and on.dim() and on.shape[-1] == queries:
            return MetricRequest("mass_at", (on.to(device).long(),))
        raise ValueError(
            f"on: it is {on.dtype} of shape {tuple(on.shape)}; it must be a bool tensor (..., keys) with {keys} keys, or one key's "
            f"number for each of {queries} queries"
        )
    if on == "first":
        return MetricRequest("mass_at", (torch.zeros(queries, dtype=torch.long, device=device),))
    offset: Any = _OFFSETS.get(on) if isinstance(on, str) else on
    if not is_integer(offset):
        raise WrongType(f"on must be one of {[*_OFFSETS, 'first']}, an integer or a tensor, got {shown(on)}")
    return MetricRequest("mass", (check_integer("on", offset, -LARGEST),))


# The rounding of a larger log-sum-exp, one number, shows in the weights: it is found anew, in two.
_ROUNDED = 64.0
# Rows of keys that are gathered at a time.
_ROWS = 1 << 14
# What a pass over weights tells of contributions too: they are the weights, times a number for each key.
_LINEAR = ("received", "mass", "mass_at", "mass_on", "heatmap")


def compute(
    part: AnyPart,
    questions: Sequence[MetricRequest],
    *,
    moved: Float[Tensor, "... all_heads all_keys"] | None = None,
    lse: Float[Tensor, "... all_heads all_queries"] | None = None,
) -> list[Any]:
    """An answer to each question, in their order.

    Args:
        part: what is looked at, as weights.
        questions: see `metrics`.
        moved: what a weight of 1 on a key moves: makes contributions of weights.
        lse: the log-sum-exp of all queries, without the sink, where it is known already.
    """
    known: dict[int, Any] = {}
    if isinstance(part, Part) and _streams(part, moved if any(q.moved for q in questions) else None):
        # the pass knows numbers of items, not points
        flat = part.call.over.grid is None
        waiting = [number for number, q in enumerate(questions) if _streamed(q) and (flat or q.name != "distance")]
        while waiting:
            together = _together(questions, waiting)
            known.update(zip(together, _pass(part, [questions[n] for n in together], moved, lse), strict=True))
            waiting = [number for number in waiting if number not in known]
    return [known[n] if n in known else _one(part, q, moved) for n, q in enumerate(questions)]


def _one(part: AnyPart, question: MetricRequest, moved: Tensor | None) -> Any:
    part = part._replace(moved=moved) if question.moved else part
    return getattr(edges if isinstance(part, EdgePart) else blockwise, question.name)(part, *question.about)


def _streams(part: Part, moved: Tensor | None) -> bool:
    """Whether one pass in C++ can answer: it has no gradients, and takes what is no number for no weight."""
    call = part.call
    if part.keys is not None or 0 in part.shape or streaming.refuses(call) is not None:
        return False
    if torch.is_grad_enabled() and (blockwise.learned(part) or (moved is not None and moved.requires_grad)):
        return False
    added = [x for x in (call.table, call.bias, call.sink) if x is not None]
    # by their extremes, which no number that is none escapes: nothing of the tensors' own size is made
    numbers = all(bool(end.isfinite()) for x in (call.q, call.k) for end in x.aminmax())
    return numbers and all(bool(x.amax() < torch.inf) for x in added)


def _streamed(question: MetricRequest) -> bool:
    by_row = question.name == "mass_at" and question.about[0].dim() > 1
    return question.name in (*_LINEAR, "entropy", "distance", "top") and not by_row


def _together(questions: Sequence[MetricRequest], waiting: list[int]) -> list[int]:
    """Which of the questions one pass can answer, the first among them."""
    first = questions[waiting[0]]
    alone = lambda q: q.name == "received" and q.about and q.about[0] is not None
    if alone(first):
        return waiting[:1]
    own_pass = lambda q: q.moved and q.name not in _LINEAR
    if own_pass(first):
        return [n for n in waiting if own_pass(questions[n])]
    together, sums, cells = [], 0, 0
    for n in waiting:
        q = questions[n]
        if alone(q) or own_pass(q) or (q.name == "heatmap" and cells not in (0, q.about[0])):
            continue
        sums += q.name == "mass_on"
        if q.name == "mass_on" and sums > MOST_SUMS:
            continue
        cells = q.about[0] if q.name == "heatmap" else cells
        together.append(n)
    return together


def _pass(part: Part, questions: list[MetricRequest], moved: Tensor | None, lse: Tensor | None) -> list[Any]:
    batch = part.call.sizes.batch
    moved = None if moved is None else chosen(moved, -2, part.heads)
    lead = part.shape[:-2]
    marked = [q.about[0].expand(*batch, part.shape[-1])[..., None, :].float() for q in questions if q.name == "mass_on"]
    scales = [moved if q.moved else None for q in questions if q.name == "mass_on"]
    sums = [(m if s is None else m * s).expand(*lead, -1) for m, s in zip(marked, scales, strict=True)]
    counts = questions[0].about[0] if questions[0].name == "received" and questions[0].about else None
    rescaled = any(q.moved and q.name == "heatmap" for q in questions)
    wanted = PassRequest(
        top=max((q.about[0] for q in questions if q.name == "top"), default=0),
        cells=max((q.about[0] for q in questions if q.name == "heatmap"), default=0),
        key_weights=torch.stack(sums, -2) if sums else None,
        moved=moved if questions[0].moved and questions[0].name not in _LINEAR else None,
        key_scale=moved if rescaled else None,
        row_weights=None if counts is None else counts.expand(part.shape[:-1]),
    )
    given = None if lse is None else chosen(chosen(lse, -2, part.heads), -1, part.queries)
    if given is not None and bool((given.masked_fill(given == -torch.inf, 0.0).abs() > _ROUNDED).any()):
        given = None
    seen = streaming.observe(part.call, wanted, heads=part.heads, queries=part.queries, lse=given)
    column = iter(range(len(sums)))
    return [_read(part, q, seen, moved, next(column) if q.name == "mass_on" else 0) for q in questions]


def _read(part: Part, question: MetricRequest, seen: PassResult, moved: Tensor | None, column: int) -> Any:
    """One answer out of what a pass has found out."""
    scale = moved if question.moved else None
    match question.name:
        case "entropy":
            return seen.entropy
        case "distance":
            return seen.distance
        case "received":
            return seen.received if scale is None else seen.received * scale
        case "heatmap":
            return seen.heatmap if scale is None else seen.scaled_heatmap
        case "mass_on":
            return seen.sums[..., column]
        case "top":
            k = question.about[0]
            return seen.top[..., :k], seen.top_keys[..., :k]
        case "mass":
            at = part.numbers("queries") + (part.call.sizes.keys - part.call.sizes.queries) + question.about[0]
            return _at(part, at, seen, scale)
        case _:
            return _at(part, question.about[0], seen, scale)


def _at(
    part: Part, at: Int[Tensor, " queries"], seen: PassResult, moved: Float[Tensor, "... heads keys"] | None
) -> Float[Tensor, "... heads queries"]:
    """The weight of each query on one key: no more than a product of two rows each, since the log-sum-exp is known."""
    call, heads, keys = part.call, part.heads, part.shape[-1]
    number, position = part.numbers("queries"), part.numbers("queries") + (keys - call.sizes.queries)
    there, at = (at >= 0) & (at < keys), at.clamp(0, keys - 1)
    q, k = chosen(chosen(call.q, -3, heads), -2, part.queries), call.k
    own = part.numbers("heads") // (call.sizes.heads // k.shape[-3])
    # some queries at a time: the rows of all of them are as large as the keys themselves
    few = max(1, _ROWS // max(1, q.shape[:-2].numel()))
    blocks = (slice(start, start + few) for start in range(0, len(at), few))
    score = call.score.pairs
    s = torch.cat([score(q[..., b, :].float(), k[..., own[:, None], at[b], :].float()) for b in blocks], -1)
    if call.table is not None:
        s = s + chosen(call.table, -2, heads).float().gather(-1, (at - position + (keys - 1)).expand(s.shape[-2:]))
    if call.bias is not None:
        bias = call.bias.expand(*call.bias.shape[:-3], *call.sizes[1:])
        s = s + chosen(bias, -3, heads)[..., number, at]
    allowed = call.over.on_pairs(position, at, call.sizes.heads)
    allowed = allowed if heads is None or allowed.dim() < 2 else chosen(allowed, -2, heads)
    p = (s - seen.high - seen.low).exp().masked_fill(~(there & allowed) | (seen.high == -torch.inf), 0.0)
    return p if moved is None else p * moved.gather(-1, at.expand(p.shape))
