"""`make test DEVICE=…`: a device that is not there ends the run with an error, and is never skipped."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def test_a_device_that_is_not_there_is_an_error():
    file = Path(__file__).parent / "test_mask_mods.py"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", str(file)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(command, capture_output=True, text=True, env={**environment, "POLYHEAD_DEVICE": "meta"})
    assert done.returncode == 2
    assert "DEVICE must be a device that torch finds here, such as cpu, cuda or cuda:1, got meta" in done.stdout
