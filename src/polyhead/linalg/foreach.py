"""What is asked of many tensors at once, or done to them: a torch call for each would take longer than the work itself."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from polyhead._torch import intercepted, native, values_unavailable

# Fewer numbers are not worth a second thread.
_PARALLEL = 1 << 16
# the dtypes that C++ looks at, by their number there
_KINDS = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}


def finite(tensors: Sequence[Tensor]) -> bool:
    """Whether all numbers are; where torch has to say so, very large ones may count as infinite."""
    if not tensors:
        return True
    dtypes = {x.dtype for x in tensors}
    if len(dtypes) == 1 and dtypes <= {torch.float32, torch.float64} and _plain(tensors):
        counts = [x.numel() for x in tensors]
        threads = torch.get_num_threads() if sum(counts) > _PARALLEL else 1
        return native.all_finite(torch.float64 in dtypes, [x.data_ptr() for x in tensors], counts, threads)
    if len(tensors) == 1 and tensors[0].numel():
        # exact, and in one pass: NaN is both extremes
        return all(bool(end.isfinite()) for end in tensors[0].aminmax())
    # what is not finite makes the norm so
    norms: dict[torch.device, list[Tensor]] = {}
    for norm in torch._foreach_norm(list(tensors)):
        norms.setdefault(norm.device, []).append(norm)
    return all(torch.stack(alike).isfinite().all() for alike in norms.values())


def small_finite(*tensors: Tensor) -> bool:
    """The same of a few small tensors of one dtype on the CPU, whatever their strides, in a microsecond each.

    For callers who know that values can be read (`values_readable`).
    """
    kind = _KINDS.get(tensors[0].dtype)
    if native is None or kind is None:
        return all(finite([x.detach()]) for x in tensors)
    given: list[object] = []
    for x in tensors:
        given += (x.data_ptr(), x.shape, x.stride())
    return native.small_finite(kind, *given)


def count(tensors: Sequence[Tensor]) -> None:
    """Add 1 to each of some numbers."""
    if {x.dtype for x in tensors} == {torch.float32} and {x.dim() for x in tensors} == {0} and _plain(tensors):
        native.count([x.data_ptr() for x in tensors])
        torch.autograd.graph.increment_version(tensors)
    else:
        torch._foreach_add_(list(tensors), 1)


def _plain(tensors: Sequence[Tensor]) -> bool:
    """Whether C++ may read them: in one piece on the CPU, and nobody that watches."""
    return (
        native is not None
        and {type(x) for x in tensors} == {Tensor}
        and {x.is_cpu and x.is_contiguous() for x in tensors} == {True}
        and not values_unavailable()
        and not intercepted()
    )
