"""Calls of torch's flex_attention, compiled once per structure of a call and not per length, window or mask.

The structure is what the code of the kernel depends on: which mods, the number of heads and features, the dtypes. Lengths are
dynamic, and numbers are read from tensors. torch recompiles a function a few times at most and then falls back to a form
that builds queries x keys. Here each structure has a function of its own, and falling back is an error.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from types import FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from polyhead.kernels.flex.block_lists import BLOCK, BlockLists
from polyhead.kernels.flex.mods import ScoreMod
from polyhead.kernels.flex.support import MIN_WIDTH
from polyhead.neighbourhood.mask_mods import MaskMod

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import FlexKernelOptions

BACKEND = "inductor"
# A structure is compiled again where a size is 1, for other strides, without gradients, and for tensors that are one object.
RECOMPILE_LIMIT = 64

_compiled: dict[Hashable, Callable[..., tuple[Tensor, Tensor]]] = {}
_settings = threading.local()


class FlexProblem(NamedTuple):
    """The arguments of flex_attention for one call, besides q, k and v."""

    allowed: MaskMod
    added: ScoreMod | None
    kept: MaskMod | None
    """The pairs that dropout keeps; None without dropout."""
    lists: BlockLists
    """With dropout no block is listed as full: dropout differs in every pair."""
    keep_share: Tensor | None
    """The probability that dropout keeps a pair."""


class StaticOptions(NamedTuple):
    """What is compiled into the kernel as constants."""

    scale: float
    differentiable_lse: bool
    kernel_options: FlexKernelOptions | None = None


def run_flex(q: Tensor, k: Tensor, v: Tensor, problem: FlexProblem, options: StaticOptions) -> tuple[Tensor, Tensor]:
    """(out, lse) of a call. Inside `torch.compile` it becomes part of the program that is compiled."""
    if torch.compiler.is_compiling():
        return _attend(q, k, v, problem, options)
    # heads and features are constants in the kernel
    structure = (q.shape[1::2], k.shape[1::2], v.shape[3], _describe((q, k, v, *problem)), str(options), BACKEND)
    if structure not in _compiled:
        _compiled[structure] = torch.compile(_make_function(options), fullgraph=True, dynamic=True, backend=BACKEND)
    limits, sizes = _compiler_settings()
    # importing the compiler takes a second, so it comes with the first call
    errors: Any = importlib.import_module("torch._dynamo.exc")
    with limits, sizes:
        try:
            return _compiled[structure](q, k, v, problem)
        except errors.FailOnRecompileLimitHit as error:
            raise RuntimeError(
                f"flex: torch has compiled this attention {RECOMPILE_LIMIT} times for different arguments; "
                "pass kernel='tiled', or report which arguments differ"
            ) from error


def _compiler_settings() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Contexts with the settings of torch's compiler for a call; made once per thread, since torch frees nothing of a context."""
    if not hasattr(_settings, "contexts"):
        dynamo: Any = importlib.import_module("torch._dynamo")
        symbolic_shapes: Any = importlib.import_module("torch.fx.experimental._config")
        _settings.contexts = (
            # the scale is a constant of torch's kernel, not a number that it reads
            dynamo.config.patch(recompile_limit=RECOMPILE_LIMIT, specialize_float=True),
            # sizes that happen to be equal may differ in the next call
            symbolic_shapes.patch(use_duck_shape=False),
        )
    contexts: tuple[AbstractContextManager[None], AbstractContextManager[None]] = _settings.contexts
    return contexts


def _make_function(options: StaticOptions) -> Callable[..., tuple[Tensor, Tensor]]:
    """A function whose code object is its own: torch counts recompilations by code object."""

    def flex_attention(q: Tensor, k: Tensor, v: Tensor, problem: FlexProblem) -> tuple[Tensor, Tensor]:
        return _attend(q, k, v, problem, options)

    own = flex_attention.__code__.replace(co_name=f"flex_attention_{len(_compiled)}")
    return FunctionType(own, flex_attention.__globals__, own.co_name, None, flex_attention.__closure__)


def _describe(x: Any) -> Any:
    """The structure of arguments: of functions their code and what they capture, of tensors the kind and number of axes."""
    if isinstance(x, Tensor):
        return x.dtype, x.device, x.dim(), x.requires_grad
    if isinstance(x, FunctionType):
        return x.__code__, *(_describe(cell.cell_contents) for cell in x.__closure__ or ())
    if isinstance(x, (tuple, list)):
        return tuple(_describe(item) for item in x)
    return x if isinstance(x, (int, float, str, torch.dtype, torch.device)) else type(x)


def _attend(q: Tensor, k: Tensor, v: Tensor, problem: FlexProblem, options: StaticOptions) -> tuple[Tensor, Tensor]:
    allowed, added, kept, lists, keep_share = problem
    if kept is None:
        out, lse = _flex(q, k, v, allowed, added, lists, options)
        return out, lse if options.differentiable_lse else lse.detach()
    assert keep_share is not None

    def allowed_and_kept(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return allowed(row, head, query, key) & kept(row, head, query, key)

    # Dropped pairs still count in the softmax, so the sum over the others is scaled to that of all pairs. Here only the
    # log-sum-exp matters; torch has no gradient for an output that is not used.
    zero, lse = _flex(q, k, torch.zeros_like(v[..., :MIN_WIDTH]), allowed, added, lists, options)
    lse = lse + zero[..., 0]
    out, kept_lse = _flex(q, k, v, allowed_and_kept, added, lists, options)
    none_kept = kept_lse == -torch.inf
    share = (kept_lse.masked_fill(none_kept, 0) - lse.masked_fill(lse == -torch.inf, 0)).exp()
    out = (out * (share.masked_fill(none_kept, 0) / keep_share)[..., None]).to(out.dtype)
    return out, lse if options.differentiable_lse else lse.detach()


def _flex(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    allowed: MaskMod,
    added: ScoreMod | None,
    lists: BlockLists,
    options: StaticOptions,
) -> tuple[Tensor, Tensor]:
    # torch does not load it by itself
    from torch.nn.attention import flex_attention as flex

    full_keys, full_queries = (listed or (None, None) for listed in (lists.full_keys, lists.full_queries))
    block_mask = flex.BlockMask(
        (q.shape[2], k.shape[2]),
        kv_num_blocks=lists.keys.number,
        kv_indices=lists.keys.listed,
        full_kv_num_blocks=full_keys[0],
        full_kv_indices=full_keys[1],
        q_num_blocks=lists.queries.number,
        q_indices=lists.queries.listed,
        full_q_num_blocks=full_queries[0],
        full_q_indices=full_queries[1],
        BLOCK_SIZE=(BLOCK, BLOCK),
        mask_mod=allowed,
    )
    out, aux = flex.flex_attention(
        q,
        k,
        v,
        score_mod=added,
        block_mask=block_mask,
        scale=options.scale,
        enable_gqa=q.shape[1] != k.shape[1],
        kernel_options=options.kernel_options,
        return_aux=flex.AuxRequest(lse=True),
    )
    assert aux.lse is not None
    return out, aux.lse
