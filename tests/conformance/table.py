"""The table of all combinations: one row per neighbourhood, position, option, layout and dtype.

The neighbourhoods, positions and options are those that the check of a device runs too; here they meet every layout. The sizes
of most axes differ, so that two swapped axes cannot pass.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field

import pytest
import torch

from polyhead.device_check.devices import find_device, supported_dtypes
from polyhead.device_check.sequences import NEIGHBOURHOODS, OPTIONS, POSITIONS, Layout

try:
    # where kernels run: `make test DEVICE=cuda`. The reference runs on the CPU
    DEVICE = find_device(os.environ.get("POLYHEAD_DEVICE", "cpu"), "DEVICE")
except ValueError as error:
    pytest.exit(str(error), returncode=2)

LAYOUTS = {
    "plain": Layout(),
    "grouped": Layout(key_heads=2),
    "groups-apart": Layout(key_heads=2, value_heads=3),
    "multi-query": Layout(key_heads=1, batch=(3,)),
    "wide-values": Layout(value_dim=13),
    "narrow-values": Layout(value_dim=7),
    "far-wider-values": Layout(value_dim=31),
    "strided": Layout(strided=True),
    "more-keys": Layout(queries=11, keys=41),
    "more-queries": Layout(queries=41, keys=11),
    "one-query": Layout(queries=1, keys=23),
    "one-of-each": Layout(queries=1, keys=1),
    "no-batch": Layout(batch=()),
    "two-batches": Layout(batch=(2, 3), queries=17, keys=17),
    "no-queries": Layout(queries=0),
    "no-keys": Layout(queries=5, keys=0),
    "empty-batch": Layout(batch=(0,)),
    "long": Layout(batch=(1,), heads=3, key_heads=3, queries=331, keys=331, dim=14, value_dim=14),
}


# the tolerance of fast kernels against the reference, relative to the largest number
TOLERANCES = {torch.float64: 1e-11, torch.float32: 2e-5, torch.bfloat16: 4e-2, torch.float16: 6e-3}
DTYPES = {dtype: tolerance for dtype, tolerance in TOLERANCES.items() if dtype in supported_dtypes(DEVICE)}


@dataclass(frozen=True)
class Row:
    """One combination."""

    neighbourhood: str
    position: str
    option: str
    layout: str
    dtype: torch.dtype = field(default=torch.float32)

    def __str__(self) -> str:
        return f"{self.neighbourhood}-{self.position}-{self.option}-{self.layout}-{str(self.dtype)[6:]}"


def rows() -> list[Row]:
    """Every neighbourhood with every position, option and layout in fp32, and with every dtype on some layouts."""
    some = ("plain", "grouped", "strided")
    return [
        Row(n, p, o, layout, dtype)
        for n in NEIGHBOURHOODS
        for p in POSITIONS
        for o in OPTIONS
        for layout in LAYOUTS
        for dtype in DTYPES
        # a scale has the same effect with and without a position
        if (dtype == torch.float32 or layout in some) and (o != "scale" or p == "none")
    ]
