"""`polyhead doctor`: what this installation can do, for reports and for the doubtful."""

from __future__ import annotations

import argparse
import importlib.metadata
import platform

import numpy
import torch

import polyhead
from polyhead._torch import missing, native
from polyhead.models.pretrained import DEFAULT

# What else the package works with, where it is installed.
_OPTIONAL = ("matplotlib", "pillow", "rich", "safetensors", "tokenizers", "torch_geometric", "transformers")


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the subcommand."""
    parser = commands.add_parser("doctor", help="say what is built in, and which versions are in use")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """One line a fact."""
    for name, value in facts().items():
        print(f"{name:<16}{value}")


def facts() -> dict[str, str]:
    """What a report of a mistake, or of a slow run, should hold."""
    return {
        "polyhead": polyhead.__version__,
        "python": f"{platform.python_version()} on {platform.system()} {platform.machine()}",
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        **{name: _version(name) for name in _OPTIONAL},
        "default model": _version(DEFAULT),
        **_kernels(),
        "threads": f"{torch.get_num_threads()}",
        "cuda": f"{torch.version.cuda}, {torch.cuda.device_count()} devices" if torch.cuda.is_available() else "no",
    }


def _kernels() -> dict[str, str]:
    if native is None:
        return {
            "C++ kernels": f"no ({missing}). Graphs and images take portable paths, which are slower; to have them, install a C++ "
            "compiler, then polyhead again"
        }
    return {
        "C++ kernels": f"yes, by {native.compiler()}",
        "instructions": f"{native.instruction_set()} (this CPU can: {', '.join(native.instruction_sets())})",
        "OpenMP": "yes" if native.openmp() else "no: one thread",
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
