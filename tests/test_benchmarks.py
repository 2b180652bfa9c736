"""The benchmarks' own promises: equal before a number, whole files, clear names. No test asserts on a time."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import measure, tables
from benchmarks.__main__ import main, write
from benchmarks.case import Case, CaseError, Sides, grad, inference, training
from benchmarks.measure import Line, interleaved, largest_difference
from benchmarks.memory import peak_mb

ROOT = Path(__file__).resolve().parent.parent
KEYS = ["case", "ours_ms", "peer", "peer_ms", "ratio", "floor_ms", "ours_peak_mb", "peer_peak_mb", "max_abs_diff"]


def fixed(value: Tensor) -> Sides:
    """Ours gives `value`, the peer and the floor give zeros."""
    zeros = torch.zeros(3)
    return Sides(inference(lambda: value), inference(lambda: zeros), (inference(lambda: zeros),))


def trained(factor: float) -> Sides:
    """Two sides of one output, whose gradients differ by a factor."""
    x = torch.linspace(1, 2, 5, requires_grad=True)
    same = lambda: factor * x + (1 - factor) * x.detach()
    gradients = lambda: {"x": grad(x)}
    return Sides(training(same, [x], gradients), training(lambda: 1 * x, [x], gradients))


@pytest.fixture
def no_children(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "peak_in_child", lambda case, side: 1.5)


def test_a_wrong_result_is_an_error_and_not_a_number(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, no_children: None
) -> None:
    cases = (
        Case("bad-case", "zeros", lambda: fixed(torch.full((3,), 0.01)), 1e-3),
        Case("good-case", "zeros", lambda: fixed(torch.full((3,), 1e-5)), 1e-3),
    )
    monkeypatch.setitem(tables.TABLES, "made-up", cases)
    file = tmp_path / "lines.json"
    assert main(["made-up", "--repeats", "1", "--json", str(file)]) == 1
    said = capsys.readouterr()
    assert "error: bad-case: the output differs by 0.01; the tolerance is 0.001" in said.err
    assert "bad-case" not in said.out
    assert "good-case" in said.out
    assert not file.exists()


def test_a_crash_names_its_case(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def crash() -> Sides:
        raise RuntimeError("out of luck")

    monkeypatch.setitem(tables.TABLES, "made-up", (Case("crashing-case", "none", crash),))
    assert main(["made-up"]) == 1
    said = capsys.readouterr().err
    assert "error: crashing-case" in said
    assert "out of luck" in said


@pytest.mark.parametrize(
    ("sides", "message"),
    [
        (fixed(torch.tensor([0.0, torch.nan, 0.0])), "the output differs by nan"),
        (fixed(torch.zeros(1)), r"the output is \(1,\) on our side and \(3,\) on another"),
        (trained(1.01), "the gradient of x differs by 0.01"),
    ],
)
def test_what_must_not_pass(sides: Sides, message: str) -> None:
    with pytest.raises(CaseError, match=f"^{message}"):
        largest_difference(sides, 1e-3)


def test_a_floor_is_compared_too() -> None:
    good, bad = (inference(lambda x=x: x) for x in (torch.zeros(3), torch.ones(3)))
    sides = Sides(good, good, (good, bad))
    with pytest.raises(CaseError, match="differs by 1"):
        largest_difference(sides, 1e-3)


def test_equal_gradients_pass() -> None:
    sides = trained(1.0)
    assert largest_difference(sides, 1e-3) < 1e-6


def test_json_has_the_keys(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, no_children: None) -> None:
    monkeypatch.setitem(tables.TABLES, "made-up", (Case("a", "zeros", lambda: fixed(torch.zeros(3))),))
    file = tmp_path / "lines.json"
    assert main(["made-up", "--repeats", "2", "--json", str(file)]) == 0
    (line,) = json.loads(file.read_text())
    assert list(line) == KEYS
    assert [line["case"], line["peer"], line["ours_peak_mb"], line["max_abs_diff"]] == ["a", "zeros", 1.5, 0.0]
    assert [path.name for path in tmp_path.iterdir()] == ["lines.json"]


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    file = tmp_path / "lines.json"
    line = Line("a", 1.0, "b", 2.0, 2.0, None, 0.0, 0.0, 0.0)
    write(file, [line])
    before = file.read_text()
    with pytest.raises(TypeError):
        write(file, [line, dataclasses.replace(line, ratio=object())])  # type: ignore[arg-type]
    assert file.read_text() == before
    assert [path.name for path in tmp_path.iterdir()] == ["lines.json"]


def test_unknown_names_are_told_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leaving:
        main(["dense", "nonsense"])
    assert leaving.value.code == 2
    said = capsys.readouterr().err
    assert "'nonsense' is no table and in no case's name" in said
    assert "dense: layer-inference-2x10x512x8 " in said
    assert "cache-step-4096" in said


def test_a_missing_folder_is_told_before_anything_runs(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        main(["dense", "--json", str(tmp_path / "missing" / "lines.json")])
    assert "--json: there is no folder" in capsys.readouterr().err


def test_names_choose_tables_and_parts_of_names() -> None:
    assert tables.chosen([]) == [case for cases in tables.TABLES.values() for case in cases]
    assert tables.chosen(["dense"]) == list(tables.TABLES["dense"])
    names = [case.name for case in tables.chosen(["step-512", "default-call-training"])]
    assert names == ["default-call-training-1x2048x768x12", "cache-step-512"]


def test_names_of_cases_are_unique() -> None:
    names = [case.name for cases in tables.TABLES.values() for case in cases]
    assert len(names) == len(set(names))


def test_sides_take_turns_whose_order_rotates(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[int] = []
    runs = [lambda i=i: order.append(i) for i in range(3)]
    monkeypatch.setattr(measure, "_calls_a_sample", lambda run: 2)
    samples = interleaved(runs, 3)  # type: ignore[arg-type]
    assert order == [0, 0, 1, 1, 2, 2, 1, 1, 2, 2, 0, 0, 2, 2, 0, 0, 1, 1]
    assert [len(own) for own in samples] == [3, 3, 3]


def test_the_line_is_made_of_medians(monkeypatch: pytest.MonkeyPatch, no_children: None) -> None:
    taken = [[1.0, 2.0, 4.0], [6.0, 4.0, 4.0], [9.0, 9.0, 9.0], [3.0, 0.5, 0.5]]
    monkeypatch.setattr(measure, "interleaved", lambda runs, repeats: taken)
    line = measure.measured(Case("a", "b", lambda: fixed(torch.zeros(3))))
    assert (line.ours_ms, line.peer_ms, line.ratio, line.floor_ms) == (2000.0, 4000.0, 2.0, 500.0)


def test_the_peak_counts_what_a_call_gives_back() -> None:
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        pytest.skip("the peak cannot be reset here")
    assert 120 < peak_mb(lambda: torch.ones(2**25).sum()) < 160


def test_a_real_case_from_end_to_end(tmp_path: Path) -> None:
    file = tmp_path / "lines.json"
    command = [sys.executable, "-m", "benchmarks", "layer-inference-2x10", "--repeats", "1", "--json", str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    header, names, row = done.stdout.splitlines()
    assert f"torch {torch.__version__}" in header
    assert set(KEYS) <= set(names.split())
    (line,) = json.loads(file.read_text())
    assert list(line) == KEYS
    assert row.startswith(line["case"] + " ")
    assert line["case"] == "layer-inference-2x10x512x8"
    assert line["max_abs_diff"] < 1e-5
    assert all(line[key] > 0 for key in ("ours_ms", "peer_ms", "floor_ms", "ratio"))
