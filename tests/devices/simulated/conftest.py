"""Registers the simulated device: these files run in a process of their own (`tests/devices/test_in_own_process.py`)."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from benchmarks import simulated_device


@pytest.fixture(scope="session")
def gpu():
    return simulated_device.install()
