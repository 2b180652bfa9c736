"""Files and functions stay small enough to read at once."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("src", "benchmarks", "experiments", "fuzz")
FILE_LINES, FUNCTION_LINES, PARAMETERS = 400, 60, 8
# Each argument of these is one that users name: `report`'s are about the page, PyG's and transformers' are theirs.
MANY_PARAMETERS = {
    "src/polyhead/inspection/report/report.py: report",
    "src/polyhead/interop/huggingface/attention.py: polyhead_attention_forward",
}

Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions() -> Iterator[tuple[str, Function]]:
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, Function):
                    yield f"{path.relative_to(ROOT)}: {node.name}", node


def is_tensor(parameter: ast.arg) -> bool:
    """Whether an annotation is that of a tensor, optional or with its shape."""
    return parameter.annotation is not None and "Tensor" in ast.unparse(parameter.annotation)


@pytest.mark.parametrize("suffix", [".py", ".hpp", ".cpp", ".js", ".css"])
def test_files_have_at_most_400_lines(suffix: str) -> None:
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob(f"*{suffix}")]
    assert files or suffix != ".py"
    long = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8").count("\n") for path in files}
    assert {name: lines for name, lines in long.items() if lines > FILE_LINES} == {}


def test_functions_have_at_most_60_lines() -> None:
    lines = {name: (node.end_lineno or 0) - node.lineno + 1 for name, node in functions() if node.name != "__init__"}
    assert len(lines) > 1000
    assert {name: number for name, number in lines.items() if number > FUNCTION_LINES} == {}


def test_functions_have_at_most_8_parameters_besides_tensors() -> None:
    many = {}
    for name, node in functions():
        parameters = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        others = [p.arg for p in parameters if p.arg not in ("self", "cls") and not is_tensor(p)]
        if len(others) > PARAMETERS and node.name != "__init__" and name not in MANY_PARAMETERS:
            many[name] = others
    assert many == {}


@pytest.mark.parametrize(("page", "lines"), [("README.md", 170), ("docs/architecture.md", 330)])
def test_pages_for_newcomers_are_short(page: str, lines: int) -> None:
    assert (ROOT / page).read_text(encoding="utf-8").count("\n") <= lines
