"""`polyhead demo`: the sentence of every tutorial, through a trained model."""

from __future__ import annotations

import argparse

from polyhead.cli import inspect


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the subcommand."""
    parser = commands.add_parser("demo", help=f'the same as: polyhead inspect "{inspect.EXAMPLE}"')
    parser.set_defaults(text=inspect.EXAMPLE, file=None, image=None, at=None, model=None)
    inspect.options(parser)
