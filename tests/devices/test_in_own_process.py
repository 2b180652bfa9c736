"""Runs what needs the simulated device: each file of `simulated/` in a process of its own.

The device is registered for the whole process, and cannot be removed: other tests must not see it.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
FILES = sorted((HERE / "simulated").glob("check_*.py"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_on_the_simulated_device(file: Path) -> None:
    command = [sys.executable, "-m", "pytest", str(file), "-q", "-p", "no:xdist", "--rootdir", str(HERE.parent.parent)]
    # this process may be a worker of xdist, which says so in its environment
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    result = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=HERE.parent.parent)
    assert result.returncode == 0, result.stdout[-20_000:] + result.stderr[-5_000:]


def test_there_are_files() -> None:
    assert FILES
