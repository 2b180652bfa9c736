"""`polyhead`: the entry point. Each subcommand is a file of its own."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import polyhead
from polyhead.cli import demo, doctor, inspect, sizes


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line and run the subcommand."""
    parser = argparse.ArgumentParser(prog="polyhead", description="Multi-head attention whose heads you can see.")
    parser.add_argument("--version", action="version", version=f"polyhead {polyhead.__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    for subcommand in (inspect, demo, doctor, sizes):
        subcommand.add_parser(commands)
    parsed = parser.parse_args(arguments)
    parsed.run(parsed)
