"""The benchmarks on devices, and the bounds of times on GPUs that the page on performance shows."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import roofline
from benchmarks.__main__ import main
from polyhead import Dense

ROOT = Path(__file__).resolve().parent.parent


def test_a_device_that_is_not_there_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leaving:
        main(["dense", "--device", "meta"])
    assert leaving.value.code == 2
    assert "--device must be a device that torch finds here" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["distributed", "--device", "meta"])
    assert "--device must be cpu for distributed" in capsys.readouterr().err


def test_the_roofline_is_that_of_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    """Each row is on the page, with numbers that are at most a tenth off: a change of a kernel changes them a little."""
    assert main(["roofline"]) == 0
    cells = lambda line: [cell.strip() for cell in line.strip("|").split("|")]
    page = [cells(line) for line in (ROOT / "docs" / "performance.md").read_text().splitlines() if line.startswith("|")]
    rows = [cells(line) for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert len(rows) > 20
    for row in rows:
        (shown,) = (other for other in page if other[:2] == row[:2] and len(other) == len(row))
        for printed, written in zip(row, shown, strict=True):
            if re.fullmatch(r"[\d,.]+", printed):
                assert float(written.replace(",", "")) == pytest.approx(float(printed.replace(",", "")), rel=0.1), row
            else:
                assert written == printed


def test_a_roofline_is_the_larger_of_two_bounds() -> None:
    work = roofline.Work(flops=312e9, bytes=1555e6)
    assert work.milliseconds(roofline.A100_40) == pytest.approx(1.0)
    assert work.milliseconds(roofline.H100) == pytest.approx(1555 / 3350)
    assert (work.bound(roofline.A100_80), work.bound(roofline.H100)) == ("operations", "bytes")
    dense = roofline.SequenceCase("", Dense(), 1024, heads=3, dim=8, masked=False)
    assert dense.ours(False).flops == 4 * 1024**2 * 3 * 8
    assert dense.ours(False).bytes == 2 * 4 * 1024 * 3 * 8 + 4 * 1024 * 3
    assert dense.ours(True).flops == 14 * 1024**2 * 3 * 8


def test_the_roofline_stands_alone(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["roofline", "dense"])
    assert "roofline must be the only argument" in capsys.readouterr().err
