"""Attention: choose a kernel for a call and run it; explain which kernel and why."""

from __future__ import annotations

from typing import NamedTuple, NoReturn

from jaxtyping import Float, Int
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from polyhead._foreign_arguments import ATTEND, foreign_argument_error
from polyhead.kernels import Call, Kernel, OutputAndLse, candidate_kernels, compute_attention_weights
from polyhead.kernels.reference import non_sink_share
from polyhead.neighbourhood import Neighbourhood
from polyhead.position import Position
from polyhead.prepare import DEFAULT_SCORE, AttentionOptions, check_and_make_call
from polyhead.score import Score


def attend(
    q: Float[Tensor, "... heads queries dim"],
    k: Float[Tensor, "... key_heads keys dim"],
    v: Float[Tensor, "... value_heads keys value_dim"],
    *,
    over: Neighbourhood | Tensor | None = None,
    score: Score = DEFAULT_SCORE,
    position: Position | None = None,
    bias: Float[Tensor, "... #heads #queries #keys"] | None = None,
    sink: Float[Tensor, " heads"] | float | None = None,
    dropout: float = 0.0,
    seed: Int[Tensor, ""] | int | None = None,
    kernel: str | None = None,
    **foreign: NoReturn,
) -> Float[Tensor, "... heads queries value_dim"]:
    """Multi-head attention: for each query, the mean of the values, weighted by softmax(score(q, k)).

    Args:
        q, k, v: projected queries, keys and values. `k` and `v` may have fewer heads than `q`, a number that divides its heads.
        over: the pairs that may attend; a bool tensor is a mask, True = may attend. By default every pair.
        score: the score function of a query and a key.
        position: the position encoding. Queries have the last positions of the keys.
        bias: added to the scores.
        sink: the logit, per head, of an additional key whose value is zero.
        dropout: the probability that a pair is dropped; pass 0 in evaluation.
        seed: decides which pairs are dropped; drawn from torch's generator by default.
        kernel: the name of the kernel to use, for tests and benchmarks; raises where it refuses the call.

    Returns:
        The heads' outputs; zeros for a query that may attend to no key.

    Raises:
        ValueError: if an argument does not fit the others; the message names it and the rule.
    """
    if foreign:
        raise foreign_argument_error("attend", foreign, ATTEND)
    options = AttentionOptions(over, score, position, bias, sink, dropout, seed)
    return run_call(check_and_make_call(q, k, v, options), kernel)[0]


def attention_weights(
    q: Float[Tensor, "... heads queries dim"],
    k: Float[Tensor, "... key_heads keys dim"],
    *,
    over: Neighbourhood | Tensor | None = None,
    score: Score = DEFAULT_SCORE,
    position: Position | None = None,
    bias: Float[Tensor, "... #heads #queries #keys"] | None = None,
    sink: Float[Tensor, " heads"] | float | None = None,
) -> Float[Tensor, "... heads queries keys"]:
    """The weights by which `attend` averages the values, before dropout, as a tensor of queries x keys.

    Each row sums to 1, to less than 1 with a sink, and to 0 where a query may attend to no key.
    """
    return compute_attention_weights(
        check_and_make_call(q, k, k, AttentionOptions(over, score, position, bias, sink))
    ).to(q.dtype)


class Explanation(NamedTuple):
    """The kernel that computes a call, why each faster kernel refuses it, and what the kernel sends to other ranks, if any."""

    kernel: str
    refused: dict[str, str]
    sends: str | None = None

    def __str__(self) -> str:
        chosen = self.kernel if self.sends is None else f"{self.kernel}: {self.sends}"
        return "\n".join([chosen, *(f"  not {name}: {reason}" for name, reason in self.refused.items())])


def explain(
    q: Float[Tensor, "... heads queries dim"],
    k: Float[Tensor, "... key_heads keys dim"],
    v: Float[Tensor, "... value_heads keys value_dim"],
    *,
    over: Neighbourhood | Tensor | None = None,
    score: Score = DEFAULT_SCORE,
    position: Position | None = None,
    bias: Float[Tensor, "... #heads #queries #keys"] | None = None,
    sink: Float[Tensor, " heads"] | float | None = None,
    dropout: float = 0.0,
) -> Explanation:
    """Which kernel `attend` uses for these arguments, and why each faster one refuses. Computes no attention."""
    return explain_call(
        check_and_make_call(q, k, v, AttentionOptions(over, score, position, bias, sink, dropout, seed=0))
    )


def run_call(call: Call, kernel: str | None = None) -> OutputAndLse:
    """Compute a call with the kernel that `choose_kernel` returns, and apply the sink.

    It is a torch function: a `TorchFunctionMode` sees every attention of Polyhead, and can change it.
    """
    if has_torch_function((call.q, call.k, call.v)):
        result: OutputAndLse = handle_torch_function(run_call, (call.q, call.k, call.v), call, kernel)
        return result
    out, lse = choose_kernel(call, kernel)(call)
    if call.sink is None:
        return out, lse
    assert lse is not None
    return (out * non_sink_share(lse, call.sink)).to(out.dtype), lse


def choose_kernel(call: Call, kernel: str | None = None) -> Kernel:
    """The first kernel that does not refuse a call, or the one named `kernel`.

    Raises:
        ValueError: if no kernel has this name, or it refuses the call.
    """
    candidates = candidate_kernels(call)
    for candidate in candidates:
        if kernel is not None and candidate.name != kernel:
            continue
        reason = candidate.refuses(call)
        if reason is None:
            return candidate
        if kernel is not None:
            raise ValueError(f"kernel {kernel!r} refuses this call: {reason}")
    raise ValueError(f"kernel must be one of {[candidate.name for candidate in candidates]}, got {kernel!r}")


def explain_call(call: Call) -> Explanation:
    """Which kernel computes a call, and why each kernel before it refuses."""
    refused: dict[str, str] = {}
    for candidate in candidate_kernels(call):
        reason = candidate.refuses(call)
        if reason is None:
            break
        refused[candidate.name] = reason
    describe = getattr(candidate, "describe_messages", None) or getattr(call.over, "describe_messages", None)
    return Explanation(candidate.name, refused, None if describe is None else describe(call))
