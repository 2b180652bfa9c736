"""`polyhead doctor`: versions and build of this installation, for bug reports; with `--check`, its results on a device."""

from __future__ import annotations

import argparse
import importlib.metadata
import platform
import sys
from pathlib import Path

import numpy
import torch

import polyhead
from polyhead._torch import native, native_missing_reason
from polyhead.kernels.flex.support import DEVICE_TYPES, DTYPES, device_refuses
from polyhead.models.pretrained import DEFAULT_PACKAGE

DEFAULT_REPORT = "polyhead-check.json"
# Optional dependencies.
_OPTIONAL_PACKAGES = ("matplotlib", "pillow", "rich", "safetensors", "tokenizers", "torch_geometric", "transformers")


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the subcommand."""
    parser = commands.add_parser(
        "doctor",
        help="print the versions in use, and whether the C++ kernels were built; check the kernels on a device",
    )
    add = parser.add_argument
    add("--check", action="store_true", help="compare every kernel with the reference, in value and gradient")
    add("--device", metavar="D", help="with --check: the device, such as cpu, cuda, cuda:1, mps or xpu (default: cpu)")
    add("--out", type=Path, metavar="FILE", help=f"with --check: the report, as JSON (default: {DEFAULT_REPORT})")
    add("--only", metavar="PART", help="with --check: only cases whose name contains PART, such as window or bfloat16")
    parser.set_defaults(run=run, usage_error=parser.error)


def run(arguments: argparse.Namespace) -> None:
    """Print one fact per line, and check the kernels if asked to."""
    facts = collect_facts()
    if not arguments.check:
        unused = next((name for name in ("device", "out", "only") if getattr(arguments, name) is not None), None)
        if unused is not None:
            arguments.usage_error(f"--{unused} must be given with --check; pass --check too")
        print_facts(facts)
        return
    # the check loads layers and models that the facts do not need
    from polyhead.cli.doctor_check import run_check

    sys.exit(run_check(arguments, facts))


def print_facts(facts: dict[str, str]) -> None:
    """Print one fact per line."""
    for name, value in facts.items():
        print(f"{name:<16}{value}")


def collect_facts() -> dict[str, str]:
    """The facts that a report of a bug or of a slow run needs, by name."""
    return {
        "polyhead": polyhead.__version__,
        "python": f"{platform.python_version()} on {platform.system()} {platform.machine()}",
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        **{name: _installed_version(name) for name in _OPTIONAL_PACKAGES},
        "default model": _installed_version(DEFAULT_PACKAGE),
        **_collect_kernel_facts(),
        "threads": f"{torch.get_num_threads()}",
        "cuda": f"{torch.version.cuda}, {torch.cuda.device_count()} devices" if torch.cuda.is_available() else "no",
        "triton": _installed_version(_triton_package()),
        "flex": _describe_flex(),
    }


def _triton_package() -> str:
    """The package that Triton comes from: those for ROCm and XPU have names of their own."""
    return importlib.metadata.packages_distributions().get("triton", ["triton"])[0]


def _describe_flex() -> str:
    """Whether the kernel `flex` runs on the GPU of this machine, or why not."""
    device = next((torch.device(name) for name in DEVICE_TYPES if getattr(torch, name).is_available()), None)
    if device is None:
        return f"no (it is for {' and '.join(DEVICE_TYPES)}, and torch finds neither)"
    reasons = {dtype: device_refuses(device, dtype) for dtype in DTYPES}
    refused = dict.fromkeys(reason for reason in reasons.values() if reason is not None)
    if all(reasons.values()):
        return f"no ({'; '.join(refused)})"
    return "; ".join([f"yes, on {device.type}", *refused])


def _collect_kernel_facts() -> dict[str, str]:
    if native is None:
        return {
            "C++ kernels": f"no ({native_missing_reason}). Graphs and images use slower portable kernels. To build the C++ kernels, "
            "install a C++ compiler, then reinstall polyhead"
        }
    return {
        "C++ kernels": f"yes, compiled with {native.compiler()}",
        "instructions": f"{native.instruction_set()} (this CPU supports {', '.join(native.instruction_sets())})",
        "OpenMP": "yes" if native.openmp() else "no, the C++ kernels run on one thread",
    }


def _installed_version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
