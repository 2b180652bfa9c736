"""The package as pip installs it: with a compiler and without one."""

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

CALL = """
import torch
from polyhead import Graph, MultiHeadAttention
layer = MultiHeadAttention(6, num_heads=2, score="gatv2")
graph, x = Graph(torch.tensor([[0, 1], [1, 0]])), torch.randn(2, 6)
assert layer(x, over=graph)[0].shape == (2, 6)
print(layer.explain(x, over=graph))
"""


def installed(folder: Path, environment: dict[str, str]) -> Path:
    """The interpreter of a new virtual environment that has polyhead, and torch from the one that runs the tests."""
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    subprocess.run(
        [python, "-m", "pip", "install", "--quiet", "--no-deps", ROOT],
        env={**os.environ, "PIP_CONSTRAINT": str(ROOT / "constraints.txt"), **environment},
        check=True,
    )
    # a path alone: the editable polyhead beside it is not switched on
    site = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    (Path(site) / "beside.pth").write_text(sysconfig.get_path("purelib"))
    return python


def said(python: Path, *arguments: str, cwd: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [python, *arguments], capture_output=True, text=True, check=True, cwd=cwd, env=environment
    ).stdout


@pytest.mark.skipif(sys.platform == "win32", reason="the paths are those of a POSIX system")
@pytest.mark.parametrize("compiler", [True, False])
def test_installing(compiler: bool, tmp_path: Path):
    without = {"CC": "/nowhere/cc", "CXX": "/nowhere/c++"}
    python = installed(tmp_path / "venv", {} if compiler else without)
    assert str(tmp_path) in said(python, "-c", "import polyhead; print(polyhead.__file__)", cwd=tmp_path)
    doctor = said(python, "-m", "polyhead", "doctor", cwd=tmp_path)
    took = said(python, "-c", CALL, cwd=tmp_path)
    if compiler:
        assert "C++ kernels     yes" in doctor
        assert took.startswith("edges_native")
    else:
        assert "C++ kernels     no (polyhead was installed without a compiler" in doctor
        assert "not edges_native: there are no C++ kernels: polyhead was installed without a compiler" in took
