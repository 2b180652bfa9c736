"""Operations on many small tensors at once: one torch call per tensor would take longer than the work itself."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from polyhead._torch import is_torch_intercepted, is_tracing_or_dataless, native

# Fewer numbers are not worth a second thread.
_MIN_PARALLEL_NUMBERS = 1 << 16
# the dtypes that `native.small_tensors_finite` takes, by their code there
_DTYPE_CODES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}


def all_finite(tensors: Sequence[Tensor]) -> bool:
    """Whether all numbers are finite. For several tensors in torch, very large numbers may count as infinite."""
    if not tensors:
        return True
    dtypes = {x.dtype for x in tensors}
    if len(dtypes) == 1 and dtypes <= {torch.float32, torch.float64} and _are_readable_in_cpp(tensors):
        counts = [x.numel() for x in tensors]
        threads = torch.get_num_threads() if sum(counts) > _MIN_PARALLEL_NUMBERS else 1
        return native.all_finite(torch.float64 in dtypes, [x.data_ptr() for x in tensors], counts, threads)
    if len(tensors) == 1 and tensors[0].numel():
        # exact, in one pass: min and max propagate NaN
        return all(bool(end.isfinite()) for end in tensors[0].aminmax())
    # inf and NaN make the norm inf or NaN
    norms: dict[torch.device, list[Tensor]] = {}
    for norm in torch._foreach_norm(list(tensors)):
        norms.setdefault(norm.device, []).append(norm)
    return all(torch.stack(alike).isfinite().all() for alike in norms.values())


def small_tensors_finite(*tensors: Tensor) -> bool:
    """Whether a few small tensors of one dtype on the CPU are finite, whatever their strides, in a microsecond each.

    The caller must know that the values can be read (`can_branch_on_values`).
    """
    kind = _DTYPE_CODES.get(tensors[0].dtype)
    if native is None or kind is None:
        return all(all_finite([x.detach()]) for x in tensors)
    arguments: list[object] = []
    for x in tensors:
        arguments += (x.data_ptr(), x.shape, x.stride())
    return native.small_tensors_finite(kind, *arguments)


def increment_counters(tensors: Sequence[Tensor]) -> None:
    """Add 1 to each of these counters, in place."""
    if (
        {x.dtype for x in tensors} == {torch.float32}
        and {x.dim() for x in tensors} == {0}
        and _are_readable_in_cpp(tensors)
    ):
        native.increment_floats([x.data_ptr() for x in tensors])
        torch.autograd.graph.increment_version(tensors)
    else:
        torch._foreach_add_(list(tensors), 1)


def _are_readable_in_cpp(tensors: Sequence[Tensor]) -> bool:
    """Whether C++ may read them: plain contiguous tensors on the CPU, outside of compilation, transforms and dispatch modes."""
    return (
        native is not None
        and {type(x) for x in tensors} == {Tensor}
        and {x.is_cpu and x.is_contiguous() for x in tensors} == {True}
        and not is_tracing_or_dataless()
        and not is_torch_intercepted()
    )
