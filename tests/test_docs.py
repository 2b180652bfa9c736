"""The documentation: its code runs and prints what it shows, its links lead somewhere, its tree is the real one."""

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

# `<!-- needs: tokenizers -->`: what has to be installed for a page's code
NEEDS = re.compile(r"^<!-- needs: (?P<packages>[\w ]+) -->$", re.MULTILINE)
FENCE = re.compile(r"^```(?P<language>\w*)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?P<target>[^)\s]+)\)")
# `kernels/tiles.py: plan`, or `nn/attention.py: MultiHeadAttention.forward`
PLACE = re.compile(r"`(?P<file>[\w/]+\.py): (?P<name>[\w.]+)`")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The pages' tensors are small: more threads are no quicker, and much slower on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


class Block(NamedTuple):
    """A fenced block: what it holds, the line before its first, and what stands between it and the one before."""

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
def test_code_runs_and_prints_what_is_shown(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of a page run top to bottom in one namespace. What one prints stands in a text block right after it."""
    for package in " ".join(NEEDS.findall(page.read_text())).split():
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed: the code of {name(page)} is NOT tested")
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    namespace: dict[str, object] = {"__name__": name(page)}
    every = list(blocks(page))
    for number, block in enumerate(every):
        if block.language != "python":
            continue
        printed = io.StringIO()
        # empty lines in front: a traceback shows the line of the page
        code = compile("\n" * block.line + block.body, page, "exec")
        with contextlib.redirect_stdout(printed):
            exec(code, namespace)
        following = every[number + 1 : number + 2]
        shown = [after.body for after in following if after.language == "text" and not after.gap.strip()]
        assert printed.getvalue() == "".join(shown), f"{name(page)}, the block that begins in line {block.line + 1}"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_fences_are_closed(page: Path) -> None:
    assert "```" not in prose(page)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in LINK.findall(prose(page)):
        if re.match(r"\w+:", target):
            continue
        file, _, anchor = target.partition("#")
        there = page if not file else (page.parent / file).resolve()
        assert there.exists(), f"{name(page)}: there is no {target}"
        if anchor:
            assert anchor in {slug(line) for line in prose(there).splitlines() if line.startswith("#")}, target


def slug(heading: str) -> str:
    """The anchor of a heading: lower case, hyphens for spaces, no punctuation."""
    return re.sub(r"[^\w\- ]", "", heading.lstrip("# ").lower()).replace(" ", "-")


def test_every_page_is_linked_from_the_readme() -> None:
    linked = set(LINK.findall(prose(ROOT / "README.md")))
    assert {name(page) for page in PAGES if page.parent.name == "docs"} <= linked


def test_the_tree_is_the_real_one() -> None:
    (tree,) = (block.body for block in blocks(ARCHITECTURE) if block.body.startswith("src/polyhead/\n"))
    listed, folders = [], [PACKAGE]
    for line in tree.splitlines()[1:]:
        depth = (len(line) - len(line.lstrip())) // 2
        entry, _, purpose = line.strip().partition(" ")
        folders[depth:] = [folders[depth - 1] / entry]
        assert folders[depth].exists(), line
        if not entry.endswith("/"):
            assert purpose.strip(), f"{entry} does not say what it is for"
            listed.append(folders[depth])
    assert len(set(listed)) == len(listed)
    assert {file for file in listed if file.suffix == ".py"} == set(PACKAGE.rglob("*.py"))


def test_the_layers_are_those_that_are_checked() -> None:
    (checked,) = re.findall(r"^layers = \[\n(.*?)^\]", (ROOT / "pyproject.toml").read_text(), re.MULTILINE | re.DOTALL)
    layers = [line.replace("polyhead.", "") for line in re.findall(r'"(.+)"', checked)]
    assert "\n".join(layers) + "\n" in [block.body for block in blocks(ARCHITECTURE)]


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_named_places_exist(page: Path) -> None:
    for file, place in PLACE.findall(prose(page)):
        source = next((folder / file for folder in (PACKAGE, ROOT) if (folder / file).exists()), None)
        assert source is not None, f"{name(page)}: there is no {file}"
        assert place in set(names(ast.parse(source.read_text()).body)), f"{name(page)}: {file} has no {place}"


def names(body: list[ast.stmt], owner: str = "") -> Iterator[str]:
    """The functions, classes, methods and constants of a file."""
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


def test_the_count_of_architectures_is_the_tables() -> None:
    head = (ROOT / "tests/interop/huggingface_zoo.tsv").read_text().partition("\n")[0]
    version, *counts = re.findall(r"[\d.]+\d|\d+", head)
    text = (ROOT / "docs/coming-from-transformers.md").read_text()
    assert f"transformers {version}" in text
    for count, words in zip(counts, ("work, that is", "are refused;", "could not be run"), strict=True):
        assert re.search(rf"{count}\s+{words}", text), (count, words)
