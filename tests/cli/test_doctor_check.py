"""`polyhead doctor --check`: a right kernel passes, a wrong one is found, an error is recorded, and the report says all of it."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch

from polyhead.attend import run_call
from polyhead.cli.main import main
from polyhead.device_check import run, timing
from polyhead.kernels.fused import Fused
from polyhead.kernels.tiled import Tiled

CASE = "dense: plain (float32)"


def check(tmp_path: Path, *arguments: str, only: str = CASE) -> tuple[int, dict]:
    """The exit code, and the report."""
    out = tmp_path / "report.json"
    with pytest.raises(SystemExit) as leaving:
        main(["doctor", "--check", "--out", str(out), "--only", only, *arguments])
    return leaving.value.code, json.loads(out.read_text())


def usage_error(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as leaving:
        main(["doctor", *arguments])
    assert leaving.value.code == 2
    return capsys.readouterr().err


def of_kernel(report: dict, name: str) -> dict:
    (case,) = report["cases"]
    (found,) = (kernel for kernel in case["kernels"] if kernel["kernel"] == name)
    return found


def test_right_kernels_pass(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    code, report = check(tmp_path, "--device", "cpu")
    assert code == 0
    assert report["passed"] and report["device"] == "cpu" and report["times"] == []
    assert report["facts"]["torch"] == torch.__version__
    assert "TF32 is off" in report["facts"]["fp32 products"]
    (case,) = report["cases"]
    assert (case["case"], case["dtype"], case["tolerance"], case["passed"]) == ("dense: plain", "float32", 1e-4, True)
    assert case["kernels"][0]["kernel"] == "fused"
    assert {"fused", "tiled", "reference"} <= {kernel["kernel"] for kernel in case["kernels"]} | {*case["refused"]}
    for kernel in case["kernels"]:
        assert kernel["passed"] and kernel["error"] is None
        assert 0 <= kernel["output"] < 1e-5 and 0 <= kernel["gradients"] < 1e-5
    said = capsys.readouterr().out
    count = len(case["kernels"])
    assert f"{count} of {count} comparisons passed on cpu" in said
    assert str(tmp_path / "report.json") in said


def test_a_reason_of_a_refusal_is_in_the_report(tmp_path: Path):
    _, report = check(tmp_path, only="window: relative bias, bias, sink (float32)")
    assert report["cases"][0]["refused"]["fused"] == "it supports only full or causal attention"


def test_a_wrong_value_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    right = Tiled.__call__

    def wrong(self, call):
        out, lse = right(self, call)
        # one number in a hundred thousand
        slip = torch.zeros_like(out)
        slip[..., -1, -1] = 1e-3
        return out + slip, lse

    monkeypatch.setattr(Tiled, "__call__", wrong)
    code, report = check(tmp_path)
    assert code == 1 and not report["passed"]
    assert not of_kernel(report, "tiled")["passed"]
    assert of_kernel(report, "tiled")["furthest"] == "output"
    assert of_kernel(report, "tiled")["gradients"] < 1e-5
    assert of_kernel(report, "fused")["passed"]
    said = capsys.readouterr().out
    assert "1 FAILED" in said
    assert "FAILED  dense: plain (float32), tiled: the output differs by" in said


def test_a_wrong_gradient_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    right = Fused.__call__

    def wrong(self, call):
        k = call.k
        # the values are right, the gradient of k is a thousandth too large
        return right(self, call._replace(k=k.detach() + 1.001 * (k - k.detach())))

    monkeypatch.setattr(Fused, "__call__", wrong)
    code, report = check(tmp_path)
    assert code == 1
    found = of_kernel(report, "fused")
    assert found["furthest"] == "gradient of k" and found["gradients"] == pytest.approx(1e-3, rel=0.1)
    assert found["output"] < 1e-5 and not found["passed"]


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (lambda out: out.sqrt(), "must be finite, got"),
        (lambda out: out[..., :-1], "Mismatch in shape"),
    ],
)
def test_results_that_cannot_be_compared_fail(result, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    right = Fused.__call__
    monkeypatch.setattr(Fused, "__call__", lambda self, call: (result(right(self, call)[0]), None))
    monkeypatch.setattr(run, "TOLERANCES", {**run.TOLERANCES, torch.float32: 1e9})
    code, report = check(tmp_path)
    assert code == 1
    error = of_kernel(report, "fused")["error"]
    assert message in error


def test_a_kernel_that_raises_is_recorded_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def broken(self, call):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(Tiled, "__call__", broken)
    code, report = check(tmp_path)
    assert code == 1
    assert "illegal memory access" in of_kernel(report, "tiled")["error"]
    assert of_kernel(report, "reference")["passed"]
    assert "illegal memory access" in capsys.readouterr().out


def test_a_case_that_cannot_be_made_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def broken(self, call):
        raise RuntimeError("out of luck")

    monkeypatch.setattr(Tiled, "refuses", broken)
    code, report = check(tmp_path)
    (case,) = report["cases"]
    assert code == 1 and not case["passed"]
    assert case["kernels"] == [] and "out of luck" in case["error"]


def test_modules_are_checked(tmp_path: Path):
    for name in (
        "graph layer",
        "cache steps",
        "cache steps, static",
        "head metrics",
        "Stiefel steps",
        "capture",
        "convolution",
    ):
        code, report = check(tmp_path, only=f"{name} (float32)")
        assert code == 0, (name, report)
        assert len(report["cases"]) == 1


def test_a_wrong_module_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from polyhead.nn.cache import KeyValueCache

    right = KeyValueCache.append
    # a step in fp32 writes its values a thousandth too large
    monkeypatch.setattr(
        KeyValueCache, "append", lambda self, k, v: right(self, k, v * (1.001 if v.dtype == torch.float32 else 1))
    )
    code, report = check(tmp_path, only="cache steps (float32)")
    assert code == 1
    assert of_kernel(report, "cache")["furthest"] == "output"


def test_times_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(timing, "FEWEST", 1)
    monkeypatch.setattr(timing, "MOST", 1)
    code, report = check(tmp_path, only="time: grid")
    assert code == 0
    forward, training = report["times"]
    assert forward["case"] == "grid 32 x 32, window of 7, forward" and training["case"].endswith("forward and backward")
    assert forward["peer"] == "SDPA(mask)" and forward["error"] is None
    assert forward["ours_ms"] > 0 and forward["ratio"] == pytest.approx(forward["peer_ms"] / forward["ours_ms"])
    assert "grid 32 x 32, window of 7, forward" in capsys.readouterr().out


def test_unequal_outputs_are_not_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("polyhead.device_check.times.attend", lambda q, k, v, over: 1.01 * run_call_on(q, k, v, over))
    code, report = check(tmp_path, only="time: grid")
    assert code == 1 and not report["passed"]
    assert "must be equal before they are timed" in report["times"][0]["error"]
    assert report["times"][0]["ours_ms"] is None


def run_call_on(q, k, v, over):
    from polyhead.prepare import AttentionOptions, check_and_make_call

    return run_call(check_and_make_call(q, k, v, AttentionOptions(over)))[0]


def test_an_interrupted_check_reports_what_was_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    right, cases = run.run_case, []

    def interrupted(case, device):
        cases.append(case)
        if len(cases) == 3:
            raise KeyboardInterrupt
        return right(case, device)

    monkeypatch.setattr(run, "run_case", interrupted)
    code, report = check(tmp_path, only="dense: plain")
    assert code == 130 and report["interrupted"] and not report["passed"] and report["failed"] == 0
    assert [case["case"] for case in report["cases"]] == ["dense: plain"] * 2
    said = capsys.readouterr()
    assert "Interrupted after 2 of 4 cases" in said.err
    assert "fused" in said.out
    # before the first case nothing is written over an earlier report
    cases[:] = [None, None]
    code, again = check(tmp_path, only="dense: plain")
    assert code == 130 and again == report


def test_a_narrow_terminal_cuts_off_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("COLUMNS", "30")
    monkeypatch.setenv("FORCE_COLOR", "1")
    check(tmp_path)
    said = capsys.readouterr().out
    assert "reference" in said and "passed" in said and "…" not in said


def test_it_needs_no_rich(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "rich" else found(name, *a))
    code, _ = check(tmp_path)
    assert code == 0
    said = capsys.readouterr()
    (row,) = (line for line in said.out.splitlines() if line.startswith("dense") and "tiled" in line)
    assert row.split()[-1] == "passed"
    assert "Checking: 0 of 1" in said.err


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("cuda", "got cuda: torch was built without CUDA"),
        ("cuda:1", "got cuda:1: torch was built without CUDA"),
        ("mps", "got mps: torch was built without MPS"),
        ("xpu", "got xpu: torch 2"),
        ("meta", "got meta: its tensors have no values"),
        ("gpu7", "got 'gpu7', which torch does not know"),
        ("", "got '', which torch does not know"),
    ],
)
def test_a_device_that_is_not_there_is_refused(device: str, message: str, capsys: pytest.CaptureFixture[str]):
    kind = device.partition(":")[0]
    if kind in ("cuda", "mps", "xpu") and getattr(torch, kind).is_available():
        pytest.skip(f"there is a device {kind} here")
    said = usage_error(capsys, "--check", "--device", device)
    assert "--device must be a device that torch finds here" in said
    assert message in " ".join(said.split())


def test_a_report_that_cannot_be_written_is_refused_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    said = usage_error(capsys, "--check", "--out", str(tmp_path / "missing" / "report.json"))
    assert "--out must be in a folder that exists" in said
    assert "--out must be a regular file" in usage_error(capsys, "--check", "--out", str(tmp_path))


def test_options_of_the_check_need_it(capsys: pytest.CaptureFixture[str]):
    for arguments in (("--device", "cpu"), ("--out", "x.json"), ("--only", "window")):
        assert f"{arguments[0]} must be given with --check" in usage_error(capsys, *arguments)


def test_an_unknown_case_is_refused(capsys: pytest.CaptureFixture[str]):
    assert "--only must be a part of the name of a case, got 'nonsense'" in usage_error(
        capsys, "--check", "--only", "nonsense"
    )
