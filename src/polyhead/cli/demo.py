"""`polyhead demo`: `polyhead inspect` on the sentence of many tutorials."""

from __future__ import annotations

import argparse

from polyhead.cli import inspect


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the subcommand."""
    parser = commands.add_parser("demo", help=f'run: polyhead inspect "{inspect.EXAMPLE_SENTENCE}"')
    parser.set_defaults(text=inspect.EXAMPLE_SENTENCE, file=None, image=None, at=None, model=None)
    inspect.add_common_options(parser)
