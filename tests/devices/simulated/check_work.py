"""Launches of head metrics, `capture` and steps of optimizers at most as many as these, without a wait of the host."""

import pytest

from benchmarks.device_work import WORK, count_work

# They change with torch.
LAUNCHES = {
    "head metrics, Causal": 160, "head metrics, Window & Padding": 170, "head metrics, Grid": 200, "head metrics, Graph": 180,
    "capture": 30, "capture, metrics": 340, "SGD, Stiefel": 100, "Adam, Stiefel": 110, "Adam, Stiefel, Cayley": 95,
    "Adam, free": 55,
}  # fmt: skip


@pytest.mark.parametrize("name", WORK)
def test_launches_and_waits(gpu, name):
    counts = count_work(name)
    assert counts.launches <= LAUNCHES[name], counts.launched
    assert (counts.waits, counts.uploads) == (0, 0), counts
