"""The documentation: its code runs and prints the output it shows, its links and file names are valid, its tree is complete."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "polyhead"
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
ARCHITECTURE = ROOT / "docs" / "architecture.md"

# `<!-- needs: tokenizers -->`: packages that the code of a page needs
NEEDS = re.compile(r"^<!-- needs: (?P<packages>[\w ]+) -->$", re.MULTILINE)
FENCE = re.compile(r"^```(?P<language>\w*)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?P<target>[^)\s]+)\)")
# `kernels/tile_plan.py: plan`, or `nn/attention.py: MultiHeadAttention.forward`
PLACE = re.compile(r"`(?P<file>[\w/]+\.py): (?P<name>[\w.]+)`")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The tensors on the pages are small: more threads do not help, and are much slower on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


class Block(NamedTuple):
    """A fenced block: its content, the number of its opening line, and the text between it and the previous block."""

    language: str
    body: str
    line: int
    gap: str


def blocks(page: Path) -> Iterator[Block]:
    text, end = page.read_text(), 0
    for found in FENCE.finditer(text):
        line = text.count("\n", 0, found.start("body"))
        yield Block(found["language"], found["body"], line, text[end : found.start()])
        end = found.end()


def prose(page: Path) -> str:
    """A page without its fenced blocks."""
    return FENCE.sub("", page.read_text())


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_code_runs_and_prints_the_output_shown(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks of a page run from top to bottom in one namespace. A `text` block directly after one has its output."""
    for package in " ".join(NEEDS.findall(page.read_text())).split():
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed: the code of {name(page)} is NOT tested")
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    namespace: dict[str, object] = {"__name__": name(page)}
    page_blocks = list(blocks(page))
    for number, block in enumerate(page_blocks):
        if block.language != "python":
            continue
        printed = io.StringIO()
        # empty lines in front: a traceback shows the line of the page
        code = compile("\n" * block.line + block.body, page, "exec")
        with contextlib.redirect_stdout(printed):
            exec(code, namespace)
        following = page_blocks[number + 1 : number + 2]
        shown = [after.body for after in following if after.language == "text" and not after.gap.strip()]
        assert printed.getvalue() == "".join(shown), f"{name(page)}, block at line {block.line + 1}"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_fences_are_closed(page: Path) -> None:
    assert "```" not in prose(page)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_are_valid(page: Path) -> None:
    for target in LINK.findall(prose(page)):
        if re.match(r"\w+:", target):
            continue
        file, _, anchor = target.partition("#")
        linked = page if not file else (page.parent / file).resolve()
        assert linked.exists(), f"{name(page)}: {target} does not exist"
        if anchor:
            assert anchor in {slug(line) for line in prose(linked).splitlines() if line.startswith("#")}, target


def slug(heading: str) -> str:
    """The anchor of a heading: lower case, hyphens for spaces, no punctuation."""
    return re.sub(r"[^\w\- ]", "", heading.lstrip("# ").lower()).replace(" ", "-")


def test_every_page_is_linked_from_the_readme() -> None:
    linked = set(LINK.findall(prose(ROOT / "README.md")))
    assert {name(page) for page in PAGES if page.parent == ROOT / "docs"} <= linked


def test_the_tree_lists_every_python_file() -> None:
    (tree,) = (block.body for block in blocks(ARCHITECTURE) if block.body.startswith("src/polyhead/\n"))
    listed, folders = [], [PACKAGE]
    for line in tree.splitlines()[1:]:
        depth = (len(line) - len(line.lstrip())) // 2
        entry, _, purpose = line.strip().partition(" ")
        folders[depth:] = [folders[depth - 1] / entry]
        assert folders[depth].exists(), line
        assert purpose.strip(), f"{entry} has no description"
        # a folder's line stands for its __init__.py, unless that has a line of its own
        listed.append(folders[depth] / "__init__.py" if (folders[depth] / "__init__.py").exists() else folders[depth])
    assert {file for file in listed if file.suffix == ".py"} == set(PACKAGE.rglob("*.py"))
    files = [file for file in listed if file.name != "__init__.py"]
    assert len(set(files)) == len(files)


def test_the_layers_are_those_of_import_linter() -> None:
    (contract,) = re.findall(r"^layers = \[\n(.*?)^\]", (ROOT / "pyproject.toml").read_text(), re.MULTILINE | re.DOTALL)
    layers = [line.replace("polyhead.", "") for line in re.findall(r'"(.+)"', contract)]
    assert "\n".join(layers) + "\n" in [block.body for block in blocks(ARCHITECTURE)]


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_named_places_exist(page: Path) -> None:
    for file, place in PLACE.findall(prose(page)):
        source = next((folder / file for folder in (PACKAGE, ROOT) if (folder / file).exists()), None)
        assert source is not None, f"{name(page)}: {file} does not exist"
        assert place in set(names(ast.parse(source.read_text()).body)), f"{name(page)}: {file} has no {place}"


def names(body: list[ast.stmt], owner: str = "") -> Iterator[str]:
    """The functions, classes, methods and constants that a file defines."""
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield owner + node.name
        if isinstance(node, ast.ClassDef):
            yield from names(node.body, f"{owner}{node.name}.")
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (owner + target.id for target in targets if isinstance(target, ast.Name))


def test_no_placeholder_is_left() -> None:
    for page in PAGES:
        assert not re.search(r"@[A-Z]+@", page.read_text()), page


def test_the_number_of_architectures_is_that_of_the_table() -> None:
    head = (ROOT / "tests/interop/huggingface_zoo.tsv").read_text().partition("\n")[0]
    version, *counts = re.findall(r"[\d.]+\d|\d+", head)
    text = (ROOT / "docs/coming-from-transformers.md").read_text()
    assert f"transformers {version}" in text
    for count, words in zip(counts, ("work, that is", "are refused;", "could not be run"), strict=True):
        assert re.search(rf"{count}\s+{words}", text), (count, words)
