"""`make test DEVICE=…` on the simulated device: rows of the conformance tables, moved there and compared with the CPU."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "conformance"))

import on_device
import test_conformance
import test_graphs
import test_grids


@pytest.fixture(autouse=True)
def on_the_device(gpu, monkeypatch):
    monkeypatch.setattr(on_device, "DEVICE", gpu)


SEQUENCES = [
    row for row in test_conformance.ROWS
    if row.dtype == torch.float32 and (row.position, row.option, row.layout) in (("relative", "sink", "grouped"), ("alibi", "bias", "strided"))
]  # fmt: skip
GRIDS = [test_grids.Row(grid, "relative", option="dropout") for grid in ("plane", "strided", "offsets", "prefix")]
GRAPHS = [test_graphs.Row("random", score, "plain", "all", torch.float32) for score in ("dot", "gat", "gatv2")]


@pytest.mark.parametrize("row", SEQUENCES, ids=str)
def test_sequences(row, gpu, monkeypatch):
    there = on_device.on_device(test_conformance.Built(row))
    assert {x.device for x in there.learned} == {gpu}
    test_conformance.test_kernels_equal_the_reference(row, monkeypatch)


@pytest.mark.parametrize("row", GRIDS, ids=str)
def test_grids_(row):
    test_grids.test_kernels_equal_the_reference(row)


@pytest.mark.parametrize("row", GRAPHS, ids=str)
def test_graphs_(row):
    test_graphs.test_kernels_equal_the_definition(row)
