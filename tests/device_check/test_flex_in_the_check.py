"""The kernel `flex` in the check of a device, on the CPU: every other kernel is checked where it runs anyway."""

from __future__ import annotations

import pytest
import torch

from polyhead.device_check.cases import CPU, list_cases
from polyhead.device_check.run import run_case

pytest.importorskip("triton", reason="flex needs Triton: that the check runs flex is NOT tested")
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")

NAMES = ("causal: plain", "mask-window: relative bias, bias, sink", "grid-window: relative bias, dropout")


@pytest.mark.parametrize("name", NAMES)
def test_flex_is_checked(name: str, flex_on_cpu: None):
    (case,) = (case for case in list_cases([torch.float32]) if case.name == name)
    result = run_case(case, CPU)
    assert "flex" in [kernel.kernel for kernel in result.kernels]
    assert result.passed, result


def test_a_wrong_flex_is_found(flex_on_cpu: None, monkeypatch: pytest.MonkeyPatch):
    from polyhead.kernels.flex import kernel

    right = kernel.run_flex
    # a log-sum-exp that is a little off matters only where there is a sink
    monkeypatch.setattr(kernel, "run_flex", lambda *args: (lambda out, lse: (out, lse + 1e-3))(*right(*args)))
    (case,) = (case for case in list_cases([torch.float32]) if case.name == NAMES[1])
    (found,) = (found for found in run_case(case, CPU).kernels if found.kernel == "flex")
    assert not found.passed and found.error is None
