"""Helpers of the tests that run experiments."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

EXPERIMENTS = Path(__file__).parent.parent / "experiments"


def assert_is_png(file: Path) -> None:
    assert file.read_bytes().startswith(b"\x89PNG")


def kill_at_line(script: str, arguments: Sequence[str], text: str) -> None:
    """Run an experiment and kill it when its progress, on standard error, shows a text."""
    command = [sys.executable, str(EXPERIMENTS / script), *arguments]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        if text in line:
            break
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL


def kill_when(script: str, arguments: Sequence[str], ready: Callable[[], bool], seconds: float) -> None:
    """Run an experiment and kill it when a condition holds, which must be before it ends and within the time."""
    command = [sys.executable, str(EXPERIMENTS / script), *arguments]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + seconds
        while not ready():
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


def complete_lines(file: Path) -> list[str]:
    """The lines of JSON in a file, without one that a killed process left unfinished."""
    return [line for line in file.read_text().splitlines() if line.endswith("}")]
