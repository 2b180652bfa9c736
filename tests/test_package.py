"""The package as a whole: public names, version, import cost, command line."""

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import polyhead

ROOT = Path(__file__).parent.parent


def test_public_names():
    assert sorted(polyhead.__all__) == [
        "ALiBi", "Causal", "Dense", "Dot", "Euclidean", "Explanation", "GAT", "GATv2", "Graph", "Grid", "Heads", "KeyValueCache", "Manifold", "Mask", "MultiHeadAttention",
        "Neighbourhood", "Offsets", "Padding", "Position", "QuadraticOffset", "RelativeBias", "RopeScaling", "Rotary", "Score", "Segments", "Stiefel", "Window", "attend", "attention_weights",
        "capture", "explain", "from_conv", "from_mask_mod", "optim", "report", "self_dominance", "to_conv",
    ]  # fmt: skip
    assert all(hasattr(polyhead, name) for name in polyhead.__all__)
    assert sorted(polyhead.optim.__all__) == ["Adam", "AdamW", "SGD", "check", "groups", "project", "split"]


def test_names_that_are_imported_on_first_use():
    """After `import polyhead` alone each is listed, and is what its own import gives."""
    code = """
import importlib, polyhead
lazy = ("models", "inspection", "capture", "report", "self_dominance")
print([name in dir(polyhead) for name in lazy])
print([polyhead.models, polyhead.inspection] == [importlib.import_module(f"polyhead.{name}") for name in lazy[:2]])
print([getattr(polyhead, name) is getattr(polyhead.inspection, name) for name in lazy[2:]])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == [f"{[True] * 5}", "True", f"{[True] * 3}"], done.stderr


def test_the_version_is_in_the_changelog():
    assert importlib.metadata.version("polyhead") == polyhead.__version__
    assert f"## {polyhead.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_import_loads_no_packages_besides_those_of_torch():
    code = (
        "import sys, torch, numpy, jaxtyping; before = set(sys.modules); import polyhead;"
        "print(__import__('json').dumps(sorted({name.split('.')[0] for name in set(sys.modules) - before})))"
    )
    new = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert set(json.loads(new)) - sys.stdlib_module_names == {"polyhead"}, new


def run(*arguments, cwd):
    environment = {**os.environ, "MPLBACKEND": "agg"}
    return subprocess.run(
        [sys.executable, "-m", "polyhead", *arguments],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    "arguments", [["--version"], ["--help"], ["demo", "--help"], ["inspect", "--help"], ["doctor"]]
)
def test_the_command_line_has_help_and_a_version(arguments, tmp_path):
    done = run(*arguments, cwd=tmp_path)
    assert done.returncode == 0
    assert "polyhead" in done.stdout


def test_import_is_fast():
    """Less than 0.3 s of CPU time more than torch."""
    code = "import torch, time; began = time.process_time(); import polyhead; print(time.process_time() - began)"

    def cost():
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        return float(done.stdout)

    # the least: other processes make a run longer, never shorter
    assert min(cost() for _ in range(5)) < 0.3
