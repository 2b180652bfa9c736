"""`polyhead`: one subcommand a file."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import polyhead
from polyhead.cli import demo, doctor, inspect, sizes


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the command line and run the subcommand."""
    parser = argparse.ArgumentParser(prog="polyhead", description="Multi-head attention whose heads you can see.")
    parser.add_argument("--version", action="version", version=f"polyhead {polyhead.__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    inspect.add(commands)
    demo.add(commands)
    doctor.add(commands)
    sizes.add(commands)
    chosen = parser.parse_args(arguments)
    chosen.run(chosen)
