"""Comparison of a result of the package with that of the oracle."""

from __future__ import annotations

import torch
from torch import Tensor

from fuzz.case import Mismatch


def error_ratio(way: str, what: str, got: Tensor | None, expected: Tensor, bound: Tensor) -> float:
    """The largest error as a fraction of its bound; raises `Mismatch` if it is more than 1.

    Args:
        way: the implementation, such as the name of a kernel.
        what: the name of the result, such as "output".
        got: the result of the package; None is a missing gradient, which counts as zero.
        expected, bound: the result of the oracle, and the largest error that rounding may cause.
    """
    if got is None:
        got = torch.zeros_like(expected)
    if got.shape != expected.shape:
        raise Mismatch(way, f"shape of {what}", f"it is {tuple(got.shape)}, expected {tuple(expected.shape)}")
    if not got.numel():
        return 0.0
    got, kind = got.detach().double(), torch.finfo(got.dtype)
    # the result is rounded too, in one or several steps: small numbers to zero, large ones to infinity
    least = 2.0**-20 if kind.dtype == "float16" else 2 * kind.smallest_normal
    bound = bound + least * ((bound > 0) | (expected != 0)).double()
    error = (got - expected).abs()
    error = torch.where((expected.abs() > kind.max / 2) & (got.abs() > kind.max / 4), 0.0, error)
    # a bound of 0 requires the exact number
    ratio = torch.where(error == 0, 0.0, error / bound)
    worst = int(torch.where(ratio.isnan(), torch.inf, ratio).argmax())
    if not float(ratio.flatten()[worst]) <= 1:
        place = tuple(int(i) for i in torch.unravel_index(torch.tensor(worst), got.shape))
        off = int((~(ratio <= 1)).sum())
        raise Mismatch(
            way,
            what,
            f"at {place} it is {got.flatten()[worst]:.9g}, expected {expected.flatten()[worst]:.9g} "
            f"within {bound.expand(got.shape).flatten()[worst]:.2g} ({off} of {got.numel()} numbers are off)",
        )
    return float(ratio.max())
