"""What the package gives beside what the oracle says."""

from __future__ import annotations

import torch
from torch import Tensor

from fuzz.case import Mismatch


def closeness(way: str, what: str, got: Tensor | None, wanted: Tensor, bound: Tensor) -> float:
    """The largest error as a share of its bound; a `Mismatch` where it is more than 1.

    Args:
        way: how it was computed, such as the name of a kernel.
        what: what it is, such as "output".
        got: what the package gives; None is a gradient that is nowhere.
        wanted, bound: what the oracle says, and how far from it rounding may lead.
    """
    if got is None:
        got = torch.zeros_like(wanted)
    if got.shape != wanted.shape:
        raise Mismatch(way, f"shape of {what}", f"it is {tuple(got.shape)}, wanted {tuple(wanted.shape)}")
    if not got.numel():
        return 0.0
    got, kind = got.detach().double(), torch.finfo(got.dtype)
    # the result itself is rounded, too, in one or several steps: to nothing where it is small, to infinity where it is large
    least = 2.0**-20 if kind.dtype == "float16" else 2 * kind.smallest_normal
    bound = bound + least * ((bound > 0) | (wanted != 0)).double()
    error = (got - wanted).abs()
    error = torch.where((wanted.abs() > kind.max / 2) & (got.abs() > kind.max / 4), 0.0, error)
    # a bound of 0 wants the exact number
    ratio = torch.where(error == 0, 0.0, error / bound)
    worst = int(torch.where(ratio.isnan(), torch.inf, ratio).argmax())
    if not float(ratio.flatten()[worst]) <= 1:
        place = tuple(int(i) for i in torch.unravel_index(torch.tensor(worst), got.shape))
        off = int((~(ratio <= 1)).sum())
        raise Mismatch(
            way,
            what,
            f"at {place} it is {got.flatten()[worst]:.9g}, wanted {wanted.flatten()[worst]:.9g} "
            f"within {bound.expand(got.shape).flatten()[worst]:.2g} ({off} of {got.numel()} numbers are off)",
        )
    return float(ratio.max())
