"""`python -m fuzz TARGET… [--minutes N] [--count N] [--seed S]`: check random configurations against the oracles."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

from fuzz.run import run

TARGETS = ("attend", "layer", "graph", "grid", "optim", "models", "backend")


def main(argv: Sequence[str] | None = None) -> int:
    """Fuzz each target in turn; return 1 if any configuration failed."""
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__)
    parser.add_argument("targets", nargs="+", choices=TARGETS, metavar="TARGET", help=", ".join(TARGETS))
    parser.add_argument("--minutes", type=float, help="minutes per target; default 1, or unlimited with --count")
    parser.add_argument("--count", type=int, help="number of configurations per target")
    parser.add_argument("--seed", type=int, default=0, help="seed of the configurations; default 0")
    parser.add_argument(
        "--native", type=Path, help="C++ kernels to use instead of the installed ones, such as a build with sanitizers"
    )
    arguments = parser.parse_args(argv)
    for name in ("minutes", "count"):
        given = getattr(arguments, name)
        if given is not None and not given > 0:
            parser.error(f"--{name} must be more than 0, got {given}")
    if arguments.native is not None:
        use_native(arguments.native)
    minutes = 1.0 if arguments.minutes is None and arguments.count is None else arguments.minutes
    failed = False
    for name in arguments.targets:
        target = importlib.import_module(f"fuzz.{name}")
        summary = run(target, arguments.seed, minutes=minutes, count=arguments.count, progress=True)
        print(f"\n{summary}", flush=True)
        failed |= summary.mismatches > 0
    return int(failed)


def use_native(file: Path) -> None:
    """Load the C++ kernels from a file, before the package looks for its own."""
    if "polyhead" in sys.modules:
        raise RuntimeError("polyhead is already imported, with its own kernels")
    spec = importlib.util.spec_from_file_location("polyhead._native", file)
    if spec is None or spec.loader is None:
        raise ValueError(f"--native must be a compiled Python module, got {file}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules["polyhead._native"] = module


if __name__ == "__main__":
    sys.exit(main())
