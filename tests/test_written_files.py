"""Pages and checkpoints are written whole or not at all, and replace nothing but regular files."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.__main__ import main as benchmark
from polyhead.cli.main import main
from polyhead.inspection.report.html_page import Page
from polyhead.inspection.report.report import report
from polyhead.nn import MultiHeadAttention

if sys.platform == "win32":
    pytest.skip("devices, FIFOs and locks are Unix's", allow_module_level=True)

ROOT = os.geteuid() == 0
PAGE = Page("<!DOCTYPE html>new")


def fifo(path: Path) -> None:
    os.mkfifo(path)


def listening(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        # the name of a socket may be no longer than 108 bytes
        folder = os.open(path.parent, os.O_RDONLY)
        made.bind(f"/proc/self/fd/{folder}/{path.name}")
        os.close(folder)


def device(path: Path) -> None:
    """Another /dev/null."""
    try:
        os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 3))
    except PermissionError:
        pytest.skip("only root makes devices")


def directory(path: Path) -> None:
    path.mkdir()


KINDS = {"FIFO": fifo, "socket": listening, "character device": device, "directory": directory}


def report_of_heads(path: Path) -> None:
    _, heads = MultiHeadAttention(8, 2)(torch.randn(3, 8))
    report(heads, path)


@pytest.mark.parametrize("write", [PAGE.write, report_of_heads], ids=["write", "report"])
@pytest.mark.parametrize("linked", [False, True], ids=["itself", "linked"])
@pytest.mark.parametrize("kind", KINDS)
def test_only_regular_files_are_replaced(kind: str, linked: bool, write: Any, tmp_path: Path) -> None:
    there = tmp_path / "there"
    KINDS[kind](there)
    path = tmp_path / "page.html" if linked else there
    if linked:
        path.symlink_to(there)
    before = there.lstat()
    with pytest.raises(ValueError, match=rf"^path must be a regular file or a new one.*, got a {kind}: {path}$"):
        write(path)
    assert there.lstat() == before and path.is_symlink() == linked
    assert {entry.name for entry in tmp_path.iterdir()} == {"there", path.name}


@pytest.mark.parametrize("kind", KINDS)
def test_the_command_line_refuses_before_any_work(kind: str, tmp_path: Path) -> None:
    KINDS[kind](tmp_path / "there")
    before = (tmp_path / "there").lstat()
    with pytest.raises(
        SystemExit, match=rf"^polyhead inspect: out must be a regular file or a new one.*, got a {kind}: "
    ):
        main(["inspect", "a text", "--model", "no-such-model", "--out", str(tmp_path / "there")])
    assert (tmp_path / "there").lstat() == before


@pytest.mark.parametrize("kind", KINDS)
def test_experiments_and_benchmarks_refuse_before_any_work(
    kind: str, tmp_path: Path, experiments: None, capsys: pytest.CaptureFixture[str]
) -> None:
    KINDS[kind](tmp_path / "there")
    before = (tmp_path / "there").lstat()
    import common

    with pytest.raises(argparse.ArgumentTypeError, match=f"^must be a regular file or a new one, got a {kind}: "):
        common.output_file(str(tmp_path / "there"))
    with pytest.raises(ValueError, match=f"file must be a regular file or a new one.*, got a {kind}: "):
        common.write_whole(tmp_path / "there", b"new")
    with pytest.raises(SystemExit):
        benchmark(["--json", str(tmp_path / "there")])
    assert f"--json must be a regular file or a new one, got a {kind}" in re.sub(
        r", such as .*?,", ",", capsys.readouterr().err
    )
    assert (tmp_path / "there").lstat() == before


def test_links_are_followed(tmp_path: Path) -> None:
    (tmp_path / "far" / "away").mkdir(parents=True)
    real = tmp_path / "far" / "away" / "real.html"
    real.write_text("old")
    (tmp_path / "far" / "second.html").symlink_to("away/real.html")
    first = tmp_path / "first.html"
    first.symlink_to("far/second.html")
    PAGE.write(first)
    assert real.read_text() == first.read_text() == PAGE.html
    assert first.is_symlink() and (tmp_path / "far" / "second.html").is_symlink() and not real.is_symlink()
    assert [entry.name for entry in real.parent.iterdir()] == ["real.html"]


def test_dangling_links(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.symlink_to("new.html")
    PAGE.write(path)
    assert path.is_symlink() and (tmp_path / "new.html").read_text() == PAGE.html
    nowhere = tmp_path / "nowhere.html"
    nowhere.symlink_to("absent/page.html")
    with pytest.raises(FileNotFoundError, match=r"path must be in a folder that exists, got .*there is no folder"):
        PAGE.write(nowhere)
    assert nowhere.is_symlink()
    loop = tmp_path / "loop.html"
    loop.symlink_to("loop.html")
    with pytest.raises(OSError, match=r"Too many levels of symbolic links: .*loop\.html"):
        PAGE.write(loop)
    assert loop.is_symlink()


@contextlib.contextmanager
def umask(mode: int) -> Iterator[None]:
    before = os.umask(mode)
    try:
        yield
    finally:
        os.umask(before)


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002])
def test_file_modes_are_preserved(mask: int, tmp_path: Path) -> None:
    """A new file has the mode that the umask leaves, one that is replaced keeps its own, and its owner."""
    with umask(mask):
        PAGE.write(tmp_path / "new.html")
        assert stat.S_IMODE((tmp_path / "new.html").stat().st_mode) == 0o666 & ~mask
        old = tmp_path / "old.html"
        old.write_text("old")
        old.chmod(0o640)
        if ROOT:
            os.chown(old, 12345, 23456)
        PAGE.write(old)
        assert stat.S_IMODE(old.stat().st_mode) == 0o640
        if ROOT:
            assert (old.stat().st_uid, old.stat().st_gid) == (12345, 23456)


@pytest.mark.parametrize("name", ["a" * 255, "ü" * 127, " ", "-", "[a-z]*.html", "new\nline", b"\xff.html".decode("utf-8", "surrogateescape")])  # fmt: skip
def test_unusual_file_names(name: str, tmp_path: Path) -> None:
    for text in ("first", "second"):
        Page(text).write(tmp_path / name)
        assert (tmp_path / name).read_text() == text
    assert len(list(tmp_path.iterdir())) == 1


def test_lone_surrogates_are_written(tmp_path: Path) -> None:
    _, heads = MultiHeadAttention(8, 2)(torch.randn(3, 8))
    report(heads, tmp_path / "page.html", title=b"\xff.png".decode("utf-8", "surrogateescape"))
    assert r"\udcff.png" in (tmp_path / "page.html").read_text()


# what is killed


WRITER = """
import sys
from polyhead import _files
from polyhead.inspection.report.html_page import Page

settle = _files.flush_and_copy_permissions

def waiting(new, place):
    settle(new, place)
    print("written", flush=True)
    sys.stdin.readline()

_files.flush_and_copy_permissions = waiting
Page(sys.argv[2]).write(sys.argv[1])
"""


def writing(path: Path, text: str) -> subprocess.Popen[str]:
    """A process that has written a page, and waits for a line before it is moved to its place."""
    command = [sys.executable, "-c", WRITER, str(path), text]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "written\n"
    return process


def test_leftovers_of_a_killed_process_are_removed_by_the_next(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text("old")
    killed, alive = writing(path, "killed"), writing(path, "alive")
    with killed, alive:
        os.kill(killed.pid, signal.SIGKILL)
        assert killed.wait() == -signal.SIGKILL
        assert path.read_text() == "old"
        assert len(list(tmp_path.iterdir())) == 3
        PAGE.write(path)
        # of the two, the one that still writes keeps its own
        assert path.read_text() == PAGE.html
        assert len(list(tmp_path.iterdir())) == 2
        alive.communicate("go on\n")
    assert alive.returncode == 0 and path.read_text() == "alive"
    assert [entry.name for entry in tmp_path.iterdir()] == ["page.html"]


def test_leftovers_of_others_stay(tmp_path: Path) -> None:
    """Only folders of our own, of the same page, that nobody uses."""
    path = tmp_path / "page.html"
    killed = writing(path, "killed")
    with killed:
        os.kill(killed.pid, signal.SIGKILL)
    (left,) = tmp_path.iterdir()
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "file").write_text("precious")
    (tmp_path / f"{left.name}-link").symlink_to("precious")
    (tmp_path / f"{left.name}-file").write_text("precious")
    (tmp_path / f"{left.name}-other").mkdir()
    if ROOT:
        os.chown(tmp_path / f"{left.name}-other", 12345, 12345)
    PAGE.write(tmp_path / "another.html")
    assert left.exists()
    PAGE.write(path)
    names = {entry.name.replace(left.name, "left") for entry in tmp_path.iterdir()}
    kept = {"page.html", "another.html", "precious", "left-link", "left-file", *(["left-other"] if ROOT else [])}
    assert names == kept and (tmp_path / "precious" / "file").read_text() == "precious"


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, MemoryError])
def test_an_interrupt_leaves_no_files(error: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "page.html").write_text("old")

    def interrupted(handle: int) -> None:
        raise error

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(error):
        PAGE.write(tmp_path / "page.html")
    assert [entry.name for entry in tmp_path.iterdir()] == ["page.html"]
    assert (tmp_path / "page.html").read_text() == "old"


def test_two_writers_at_once(tmp_path: Path) -> None:
    """Whoever reads meanwhile, and afterwards, sees one of the pages, whole."""
    script = "import sys; from polyhead.inspection.report.report import Page\nfor _ in range(30): Page(sys.argv[2] * 300_000).write(sys.argv[1])"
    path = tmp_path / "page.html"
    pages = {letter * 300_000 for letter in "ab"}
    PAGE.write(path)
    running = [subprocess.Popen([sys.executable, "-c", script, str(path), letter]) for letter in "ab"]
    seen = set()
    while any(process.poll() is None for process in running):
        seen.add(path.read_text())
        time.sleep(0.005)
    assert [process.returncode for process in running] == [0, 0]
    assert seen <= pages | {PAGE.html} and path.read_text() in pages
    assert [entry.name for entry in tmp_path.iterdir()] == ["page.html"]


# disks that are full, or closed


def run(script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


LIMITED = """
import resource, signal, sys
from polyhead.inspection.report.html_page import Page
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
try:
    Page("x" * 100_000).write(sys.argv[1])
except OSError as error:
    print(type(error).__name__, error.strerror)
"""


def test_a_file_size_limit(tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text("old")
    assert run(LIMITED, tmp_path / "page.html").stdout == "OSError File too large\n"
    assert (tmp_path / "page.html").read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["page.html"]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 256 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "none", folder], capture_output=True)
    if mounted.returncode:
        pytest.skip("only root mounts disks")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_full_disk(disk: Path) -> None:
    (disk / "page.html").write_text("old")
    with pytest.raises(OSError, match="No space left on device"):
        Page("x" * 1_000_000).write(disk / "page.html")
    assert (disk / "page.html").read_text() == "old"
    assert [entry.name for entry in disk.iterdir()] == ["page.html"]


def test_a_read_only_disk(disk: Path) -> None:
    (disk / "page.html").write_text("old")
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    for name in ("page.html", "new.html"):
        with pytest.raises(PermissionError, match=rf"path must be a file that can be written, got .*{name}"):
            PAGE.write(disk / name)
    assert (disk / "page.html").read_text() == "old"


AS_NOBODY = """
import os, sys
from polyhead.inspection.report.html_page import Page
if os.geteuid() == 0:
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
try:
    Page("new").write(sys.argv[1])
except PermissionError as error:
    print(error)
"""


@pytest.mark.parametrize(("folder", "file"), [(0o555, 0o666), (0o777, 0o444)])
def test_permissions_are_respected(folder: int, file: int) -> None:
    """A page in a folder that is closed, and one that is protected itself in a folder that is open."""
    # not tmp_path, which nobody else can reach
    with tempfile.TemporaryDirectory() as made:
        place = Path(made)
        (place / "page.html").write_text("old")
        (place / "page.html").chmod(file)
        place.chmod(folder)
        assert run(AS_NOBODY, place / "page.html").stdout.startswith("path must be a file that can be written, got ")
        assert (place / "page.html").read_text() == "old"
        place.chmod(0o755)
