"""Whether small tensors are finite, whatever their layout and dtype."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from polyhead.linalg.foreach import small_tensors_finite

LAYOUTS = {
    "contiguous": lambda: torch.randn(2, 3, 5, 7),
    "heads inside": lambda: torch.randn(2, 5, 3, 7).transpose(1, 2),
    "features apart": lambda: torch.randn(2, 3, 7, 5).mT,
    "reversed axes": lambda: torch.randn(7, 5, 3, 2).permute(3, 2, 1, 0),
    "part": lambda: torch.randn(4, 6, 10, 14)[1:3, ::2, 2:7, 3:10],
    "every second feature": lambda: torch.randn(2, 3, 5, 14)[..., ::2],
    "one row for all": lambda: torch.randn(1, 3, 1, 7).expand(2, 3, 5, 7),
    "overlapping": lambda: torch.randn(2, 5, 9).unfold(2, 7, 1).transpose(1, 2),
    "a number": lambda: torch.randn(()),
    "of size one": lambda: torch.randn(1, 1, 5, 1),
}


def places(x: Tensor) -> list[tuple[int, ...]]:
    return [tuple(0 for _ in x.shape), tuple(n - 1 for n in x.shape), tuple(n // 2 for n in x.shape)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout(layout: str, dtype: torch.dtype) -> None:
    base = LAYOUTS[layout]().to(dtype)
    assert small_tensors_finite(base)
    for place in places(base):
        for wrong in (torch.nan, torch.inf, -torch.inf):
            x = LAYOUTS[layout]().to(dtype)
            x[place] = wrong
            assert not small_tensors_finite(x)
            assert not small_tensors_finite(base, base, x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_numbers_outside_a_strided_view_are_ignored(dtype: torch.dtype) -> None:
    whole = torch.full((4, 9), torch.nan, dtype=dtype)
    whole[:, 2:5] = torch.finfo(dtype).max
    assert small_tensors_finite(whole[:, 2:5])
    assert not small_tensors_finite(whole[:, 2:6])
    assert small_tensors_finite(whole[:, :0])
    assert small_tensors_finite(whole[:0])
