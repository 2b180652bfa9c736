"""The cases of the benchmarks on the simulated device: what they make lies there, and both sides are equal. No times."""

from __future__ import annotations

import pytest
import torch

from benchmarks import graph, graph_parts, graphs, measure, placement
from benchmarks.__main__ import main
from benchmarks.case import Case
from benchmarks.tables import chosen

# the smaller cases of each table
NAMES = (
    "layer-inference-2x10x512x8", "layer-training-2x10x512x8", "narrow-training-2048x16x7x7",
    "partitioned-windows-256x7x7-4x8-inference",
)  # fmt: skip
TINY = graphs.random_graph(29, 211, 3, 8)


@pytest.fixture(autouse=True)
def on_the_device(gpu):
    with placement.on(gpu):
        yield


def check(case: Case, gpu: torch.device) -> None:
    assert case.lacks() is None
    with placement.making():
        sides = case.setup()
    results = sides.ours.reveal(sides.ours.run())
    assert {x.device for x in (results.output, *results.gradients.values())} == {gpu}
    assert measure.largest_difference(sides, case.tolerance) < case.tolerance


@pytest.mark.parametrize("name", NAMES)
def test_a_case_runs_on_the_device(name, gpu):
    (case,) = (case for case in chosen([name]) if case.name == name)
    check(case, gpu)


@pytest.mark.parametrize("train", [False, True])
def test_graphs_run_on_the_device(train, gpu):
    pytest.importorskip("torch_geometric")
    check(graph.case(graph.GATV2, TINY, train), gpu)
    check(graph.case(graph.GAT, TINY, train), gpu)
    parts = Case("parts", "", lambda: graph_parts.layer_and_its_functions(graph.GATV2, TINY), graph.TOLERANCE)
    check(parts, gpu)


def test_what_needs_the_cpu_is_skipped_with_a_reason(gpu, capsys):
    assert main(["threads", "--device", "gpu"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("SKIPPED: threads-attention")
    assert "it cannot run on gpu: it compares threads of the CPU" in said


def test_a_line_of_the_device(gpu, monkeypatch):
    monkeypatch.setattr(measure, "BUDGET", 0.0)
    (case,) = chosen(["layer-inference-2x10x512x8"])
    line = measure.measured(case, 1)
    assert (line.device, line.ours_peak_mb, line.peer_peak_mb) == ("gpu:0", None, None)
