"""Runs what needs a simulated device, or a GPU for which code is made: each file in a process of its own.

Such a device is registered for the whole process, and cannot be removed: other tests must not see it.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
FILES = sorted((HERE / "simulated").glob("check_*.py"))
LOWERING = HERE / "lowering" / "check_lowering.py"


def run_alone(file: Path, *options: str) -> None:
    """Run the tests of a file in a process of its own."""
    command = [sys.executable, "-m", "pytest", str(file), "-q", "-p", "no:xdist", "--rootdir", str(HERE.parent.parent)]
    # this process may be a worker of xdist, which says so in its environment
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    result = subprocess.run(
        [*command, *options], capture_output=True, text=True, env=environment, cwd=HERE.parent.parent
    )
    assert result.returncode == 0, result.stdout[-20_000:] + result.stderr[-5_000:]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_on_the_simulated_device(file: Path) -> None:
    run_alone(file)


def test_code_for_gpus() -> None:
    pytest.importorskip("triton", reason="Triton, which makes code for GPUs, is not installed")
    run_alone(LOWERING, "-m", "not slow")


@pytest.mark.slow("code for GPUs, for every neighbourhood, width, dtype and architecture: an hour")
@pytest.mark.parametrize("arch", ["sm75", "sm80", "sm86", "sm89", "sm90", "sm100"])
def test_all_code_for_gpus(arch: str) -> None:
    pytest.importorskip("triton", reason="Triton, which makes code for GPUs, is not installed")
    run_alone(LOWERING, "-m", "slow", "-k", arch)


def test_there_are_files() -> None:
    assert FILES
