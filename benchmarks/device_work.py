"""Launches and waits of what is not a call of the layer: head metrics, `capture`, and steps of optimizers, on the simulated device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import simulated_device
from benchmarks.simulated_device import Counts, count
from polyhead import Causal, Graph, Grid, MultiHeadAttention, Padding, Stiefel, Window, capture, optim
from polyhead.inspection import METRICS

BATCH, ITEMS, HEADS, DIM = 3, 64, 6, 16
# As in the table `stiefel`: 72 projections of a head.
MATRICES, ROWS, COLUMNS = 72, 64, 8

Work = Callable[[torch.device], Callable[[], object]]


def _heads(over: Callable[[torch.device], Any]) -> Work:
    """The metrics of `METRICS` of one layer."""

    def prepare(device: torch.device) -> Callable[[], object]:
        layer, neighbourhood = MultiHeadAttention(HEADS * DIM, HEADS).to(device), over(device)
        batch = () if isinstance(neighbourhood, Graph) else (BATCH,)
        with torch.no_grad():
            heads = layer(torch.randn(*batch, ITEMS, HEADS * DIM).to(device), over=neighbourhood)[1]
        return torch.no_grad()(lambda: heads.measure(*METRICS))

    return prepare


def _capture(metrics: Any) -> Work:
    """A forward of two layers of torch's transformer that is recorded."""

    def prepare(device: torch.device) -> Callable[[], object]:
        layer = nn.TransformerEncoderLayer(HEADS * DIM, HEADS, batch_first=True, norm_first=True)
        model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval().to(device)
        x = torch.randn(BATCH, ITEMS, HEADS * DIM).to(device)

        def record() -> None:
            with torch.no_grad(), capture(model, metrics=metrics):
                model(x)

        return record

    return prepare


def _step(make: Callable[[Any], torch.optim.Optimizer], on: Stiefel | None) -> Work:
    """One step of 72 matrices, after the first."""

    def prepare(device: torch.device) -> Callable[[], object]:
        points = (on or Stiefel()).random(MATRICES, ROWS, COLUMNS)
        params = [nn.Parameter(x.clone().to(device)) for x in points]
        optimizer = make([{"params": params, "manifold": on}] if on is not None else params)
        gradients: list[Tensor] = [torch.randn(ROWS, COLUMNS).to(device) for _ in params]
        for p, g in zip(params, gradients, strict=True):
            p.grad = g
        optimizer.step()
        return optimizer.step

    return prepare


WORK: dict[str, Work] = {
    "head metrics, Causal": _heads(lambda device: Causal()),
    "head metrics, Window & Padding": _heads(
        lambda device: Window(5) & Padding(torch.tensor([ITEMS, 20, 0]).to(device))
    ),
    "head metrics, Grid": _heads(lambda device: Grid(8, 8, window=3)),
    "head metrics, Graph": _heads(lambda device: Graph(torch.randint(ITEMS, (2, 300)).to(device), ITEMS)),
    "capture": _capture(None),
    "capture, metrics": _capture(METRICS),
    "SGD, Stiefel": _step(lambda groups: optim.SGD(groups, lr=0.1, momentum=0.9), Stiefel()),
    "Adam, Stiefel": _step(lambda groups: optim.Adam(groups, lr=0.1), Stiefel()),
    "Adam, Stiefel, Cayley": _step(lambda groups: optim.Adam(groups, lr=0.1), Stiefel("canonical", "cayley")),
    "Adam, free": _step(lambda groups: optim.Adam(groups, lr=0.1), None),
}


def count_work(name: str) -> Counts:
    """The counts of one work of `WORK`."""
    device = simulated_device.install()
    torch.manual_seed(0)
    work = WORK[name](device)
    with count() as counts:
        work()
    return counts
