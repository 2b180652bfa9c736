"""`polyhead doctor --check` on the simulated device: the quicker cases in fp32, and the report."""

from __future__ import annotations

import json

import pytest
import torch

from polyhead.cli.main import main
from polyhead.device_check.cases import list_cases
from polyhead.device_check.devices import find_device, supported_dtypes
from polyhead.device_check.run import run_case


def is_quick(name: str) -> bool:
    """Few keys on sequences; GAT and GATv2 on one grid, where the reference computes them."""
    subject, _, variant = name.partition(": ")
    if subject.startswith(("grid", "offsets")):
        return "GAT" not in variant or subject == "grid-window"
    return variant in ("", "few keys") or subject in ("graph random", "graph bipartite")


CASES = [case for case in list_cases([torch.float32]) if is_quick(case.name)]


def test_the_device_is_found(gpu):
    assert find_device("gpu") == torch.device("gpu")
    assert {torch.float32, torch.float64} <= set(supported_dtypes(gpu))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_case_passes(case, gpu):
    result = run_case(case, gpu)
    assert result.error is None, result.error
    assert not [kernel for kernel in result.kernels if not kernel.passed]


def test_the_command_writes_its_report(gpu, tmp_path):
    out = tmp_path / "report.json"
    with pytest.raises(SystemExit) as leaving:
        main(["doctor", "--check", "--device", "gpu", "--only", "few keys (bfloat16)", "--out", str(out)])
    assert leaving.value.code == 2
    with pytest.raises(SystemExit) as leaving:
        main(["doctor", "--check", "--device", "gpu", "--only", "window: few keys (float32)", "--out", str(out)])
    assert leaving.value.code == 0
    report = json.loads(out.read_text())
    assert report["device"] == "gpu" and report["passed"]
    assert "short" in report["cases"][0]["refused"]
