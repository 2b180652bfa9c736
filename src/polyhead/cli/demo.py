"""`polyhead demo`: one attention layer, and a picture of its heads."""

from __future__ import annotations

import argparse
import io
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from polyhead.nn import MultiHeadAttention

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the subcommand."""
    parser = commands.add_parser("demo", help="run one layer on random tokens and draw its heads")
    parser.add_argument("--out", type=Path, default=Path("heads.png"), help="the picture (default: %(default)s)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """The example that every tutorial shows: 512 features, 8 heads, 2 sequences of 10 tokens."""
    torch.manual_seed(0)
    mha = MultiHeadAttention(d_model=512, num_heads=8)
    x = torch.randn(2, 10, 512)
    output, heads = mha(x, x, x)
    print(f"Output: {tuple(output.shape)}")
    print(f"Heads:  {tuple(heads.shape)}")
    try:
        _write(heads.plot(), arguments.out)
    except (OSError, ValueError) as error:
        # a ValueError is matplotlib's, about the kind of file
        sys.exit(f"polyhead demo: cannot write {arguments.out}: {getattr(error, 'strerror', None) or error}")
    print(f"A heat-map for each head: {arguments.out}")


def _write(figure: Figure, path: Path) -> None:
    """Write a picture whole or not at all."""
    picture = io.BytesIO()
    figure.savefig(picture, format=path.suffix.lstrip(".") or "png", dpi=120)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        unfinished.write_bytes(picture.getvalue())
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
