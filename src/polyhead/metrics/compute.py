"""Metric requests: which metrics share one pass over the scores, and which are computed alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from polyhead._checks import LARGEST_INT32, WrongType, check_integer, is_integer, short_repr
from polyhead._torch import move_to
from polyhead.kernels.reference import select_unless_broadcast
from polyhead.metrics import blockwise, edges, streaming
from polyhead.metrics.attention_parts import DensePart, EdgePart, Part
from polyhead.metrics.blocks import weights_require_grad
from polyhead.metrics.streaming import MAX_KEY_SUMS, PassRequest, PassResult

_METRIC_MODULES: dict[type, Any] = {DensePart: blockwise, EdgePart: edges}


class MetricRequest(NamedTuple):
    """A metric by its function in `blockwise` and `edges`, its arguments, and whether it is of contributions, not weights."""

    name: str
    arguments: tuple[Any, ...] = ()
    contribution: bool = False


_NAMED_OFFSETS = {"self": 0, "previous": -1, "next": 1}
KeysToSum = str | int | Tensor
"""The keys whose mass is summed: see `Heads.mass`."""


def mass_request(on: KeysToSum, part: Part) -> MetricRequest:
    """The request for the weight of each query of a part on the keys `on`."""
    queries, keys, device = part.num_queries, part.num_keys, part.call.q.device
    if isinstance(on, Tensor):
        if on.dtype == torch.bool and on.dim() and on.shape[-1] == keys:
            return MetricRequest("mass_on_keys", (move_to(on, device),))
        if on.dtype in (torch.int64, torch.int32) and on.dim() and on.shape[-1] == queries:
            return MetricRequest("mass_at_key", (move_to(on, device).long(),))
        raise ValueError(
            f"on must be a bool tensor (..., {keys}), one value per key, or an integer tensor (..., {queries}), one key per "
            f"query, got {on.dtype} of shape {tuple(on.shape)}"
        )
    if on == "first":
        place = -1 if part.first_key is None else part.first_key
        return MetricRequest("mass_at_key", (torch.full((queries,), place, dtype=torch.long, device=device),))
    return MetricRequest("mass", (check_offset(on),))


def check_offset(on: str | int) -> int:
    """The offset of a key from its query, given as a number or by name."""
    offset: Any = _NAMED_OFFSETS.get(on) if isinstance(on, str) else on
    if not is_integer(offset):
        raise WrongType(f"on must be one of {[*_NAMED_OFFSETS, 'first']}, an integer or a tensor, got {short_repr(on)}")
    return check_integer("on", offset, -LARGEST_INT32)


# Above this, the rounding of a log-sum-exp in one fp32 number shows in the weights: it is computed again, as a sum of two.
_MAX_EXACT_LSE = 64.0
# Rows of keys that are gathered at once.
_GATHERED_ROWS = 1 << 14
# Metrics linear in the weights: a pass over weights also gives them of contributions, which are weights times a factor per key.
_LINEAR_METRICS = ("received", "mass", "mass_at_key", "mass_on_keys", "heatmap")


def compute_metrics(
    part: Part,
    requests: Sequence[MetricRequest],
    *,
    contribution_norm: Float[Tensor, "... all_heads all_keys"] | None = None,
    lse: Float[Tensor, "... all_heads all_queries"] | None = None,
) -> list[Any]:
    """The requested metrics, in the order of the requests.

    Args:
        part: the heads, queries, keys or edges to measure, without a contribution norm.
        requests: the metrics.
        contribution_norm: the norm of the output change by a weight of 1 on a key; needed for metrics of contributions.
        lse: the log-sum-exp of all queries, without the sink, if it is known.
    """
    results: dict[int, Any] = {}
    norm = contribution_norm if any(request.contribution for request in requests) else None
    if isinstance(part, DensePart) and _can_stream(part, norm):
        # the pass measures distances between indices, not between points of a grid
        on_grid = part.call.over.lattice is not None
        pending = [n for n, r in enumerate(requests) if _is_streamable(r) and not (on_grid and r.name == "distance")]
        while pending:
            group = _next_requests_of_one_pass(requests, pending)
            results.update(
                zip(
                    group, _compute_in_one_pass(part, [requests[n] for n in group], contribution_norm, lse), strict=True
                )
            )
            pending = [n for n in pending if n not in results]
    rest = [n for n in range(len(requests)) if n not in results]
    if rest:
        answers = _METRIC_MODULES[type(part)].compute(
            part._replace(contribution_norm=norm), [requests[n] for n in rest]
        )
        results.update(zip(rest, answers, strict=True))
    return [results[n] for n in range(len(requests))]


def _can_stream(part: DensePart, contribution_norm: Tensor | None) -> bool:
    """Whether the pass in C++ can measure this part: it has no gradients, and treats NaN scores as zero weight."""
    call = part.call
    if part.keys is not None or 0 in part.shape or streaming.refuses_call(call) is not None:
        return False
    if torch.is_grad_enabled() and (
        weights_require_grad(part) or (contribution_norm is not None and contribution_norm.requires_grad)
    ):
        return False
    added = [x for x in (call.relative_bias, call.bias, call.sink) if x is not None]
    # min and max propagate NaN, so checking them suffices, and allocates nothing of the size of q and k
    finite = all(bool(end.isfinite()) for x in (call.q, call.k) for end in x.aminmax())
    return finite and all(bool(x.amax() < torch.inf) for x in added)


def _is_streamable(request: MetricRequest) -> bool:
    by_row = request.name == "mass_at_key" and request.arguments[0].dim() > 1
    return request.name in (*_LINEAR_METRICS, "entropy", "distance", "top") and not by_row


def _has_counts(request: MetricRequest) -> bool:
    return request.name == "received" and bool(request.arguments) and request.arguments[0] is not None


def _scales_weights(request: MetricRequest) -> bool:
    """Whether the pass itself must multiply the weights by the contribution norm."""
    return request.contribution and request.name not in _LINEAR_METRICS


def _next_requests_of_one_pass(requests: Sequence[MetricRequest], pending: list[int]) -> list[int]:
    """The pending requests that one pass computes together with the first of them."""
    first = requests[pending[0]]
    if _has_counts(first):
        return pending[:1]
    if _scales_weights(first):
        return [n for n in pending if _scales_weights(requests[n])]
    group, sums, cells = [], 0, 0
    for n in pending:
        request = requests[n]
        if _has_counts(request) or _scales_weights(request):
            continue
        if request.name == "heatmap" and cells not in (0, request.arguments[0]):
            continue
        sums += request.name == "mass_on_keys"
        if request.name == "mass_on_keys" and sums > MAX_KEY_SUMS:
            continue
        cells = request.arguments[0] if request.name == "heatmap" else cells
        group.append(n)
    return group


def _compute_in_one_pass(
    part: DensePart, requests: list[MetricRequest], contribution_norm: Tensor | None, lse: Tensor | None
) -> list[Any]:
    """The metrics of requests that share one pass over the scores."""
    norm = None if contribution_norm is None else select_unless_broadcast(contribution_norm, -2, part.heads)
    result = streaming.run_pass(
        part.call,
        _make_pass_request(part, requests, norm),
        heads=part.heads,
        queries=part.queries,
        lse=_exact_lse(part, lse),
    )
    sums = iter(result.sums.unbind(-1))
    return [next(sums) if r.name == "mass_on_keys" else _read_result(part, r, result, norm) for r in requests]


def _make_pass_request(
    part: DensePart, requests: list[MetricRequest], norm: Float[Tensor, "... heads keys"] | None
) -> PassRequest:
    """One pass for a group of requests, as `_next_requests_of_one_pass` forms them."""
    first = requests[0]
    arguments = lambda name: [r.arguments[0] for r in requests if r.name == name]
    sums = [_key_weights(part, r, norm) for r in requests if r.name == "mass_on_keys"]
    return PassRequest(
        top=max(arguments("top"), default=0),
        cells=max(arguments("heatmap"), default=0),
        key_weights=torch.stack(sums, -2) if sums else None,
        contribution_norm=norm if _scales_weights(first) else None,
        key_scale=norm if any(r.contribution and r.name == "heatmap" for r in requests) else None,
        row_weights=first.arguments[0].expand(part.shape[:-1]) if _has_counts(first) else None,
    )


def _key_weights(
    part: DensePart, request: MetricRequest, norm: Float[Tensor, "... heads keys"] | None
) -> Float[Tensor, "... heads keys"]:
    """The factor of each key in the sum that a request for `mass_on_keys` is."""
    marked = request.arguments[0].expand(*part.call.sizes.batch, part.shape[-1])[..., None, :].float()
    return (marked * norm if request.contribution and norm is not None else marked).expand(*part.shape[:-2], -1)


def _exact_lse(part: DensePart, lse: Tensor | None) -> Float[Tensor, "... heads queries"] | None:
    """The log-sum-exp of the part's queries; None where it is unknown, or too large to be exact in fp32."""
    if lse is None:
        return None
    lse = select_unless_broadcast(select_unless_broadcast(lse, -2, part.heads), -1, part.queries)
    too_large = lse.masked_fill(lse == -torch.inf, 0.0).abs() > _MAX_EXACT_LSE
    return None if bool(too_large.any()) else lse


def _read_result(part: DensePart, request: MetricRequest, result: PassResult, norm: Tensor | None) -> Any:
    """One metric out of the result of a pass."""
    scale = norm if request.contribution else None
    match request.name:
        case "entropy":
            return result.entropy
        case "distance":
            return result.distance
        case "received":
            return result.received if scale is None else result.received * scale
        case "heatmap":
            return result.heatmap if scale is None else result.scaled_heatmap
        case "top":
            k = request.arguments[0]
            return result.top[..., :k], result.top_keys[..., :k]
        case "mass":
            return _weights_at(part, _query_positions(part) + request.arguments[0], result, scale)
        case _:
            return _weights_at(part, request.arguments[0], result, scale)


def _weights_at(
    part: DensePart,
    at: Int[Tensor, " queries"],
    result: PassResult,
    contribution_norm: Float[Tensor, "... heads keys"] | None,
) -> Float[Tensor, "... heads queries"]:
    """The weight of each query on one key: one product of two rows each, since the log-sum-exp is known."""
    keys = part.shape[-1]
    exists, at = (at >= 0) & (at < keys), at.clamp(0, keys - 1)
    allowed = _are_allowed_at(part, at)
    p = (_scores_at(part, at) - result.high - result.low).exp()
    p = p.masked_fill(~(exists & allowed) | (result.high == -torch.inf), 0.0)
    return p if contribution_norm is None else p * contribution_norm.gather(-1, at.expand(p.shape))


def _scores_at(part: DensePart, at: Int[Tensor, " queries"]) -> Float[Tensor, "... heads queries"]:
    """The score of each query with one key."""
    call, heads, queries = part.call, part.heads, part.indices("queries")
    q, k = select_unless_broadcast(select_unless_broadcast(call.q, -3, heads), -2, part.queries), call.k
    key_head = part.indices("heads") // (call.sizes.heads // k.shape[-3])
    # in blocks: the gathered rows of all queries would be as large as the keys
    rows = max(1, _GATHERED_ROWS // max(1, q.shape[:-2].numel()))
    blocks = (slice(start, start + rows) for start in range(0, len(at), rows))
    score = call.score.pairs
    s = torch.cat([score(q[..., b, :].float(), k[..., key_head[:, None], at[b], :].float()) for b in blocks], -1)
    if call.relative_bias is not None:
        distance = at - _query_positions(part) + (part.shape[-1] - 1)
        s = s + select_unless_broadcast(call.relative_bias, -2, heads).float().gather(-1, distance.expand(s.shape[-2:]))
    if call.bias is not None:
        bias = call.bias.expand(*call.bias.shape[:-3], *call.sizes[1:])
        s = s + select_unless_broadcast(bias, -3, heads)[..., queries, at]
    return s


def _are_allowed_at(part: DensePart, at: Int[Tensor, " queries"]) -> Tensor:
    allowed = part.call.over.allows_pairs(_query_positions(part), at, part.call.sizes.heads)
    return allowed if part.heads is None or allowed.dim() < 2 else select_unless_broadcast(allowed, -2, part.heads)


def _query_positions(part: DensePart) -> Int[Tensor, " queries"]:
    """The position of each query among the keys."""
    return part.indices("queries") + (part.call.sizes.keys - part.call.sizes.queries)
