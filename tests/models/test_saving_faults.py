"""A failed save leaves the old checkpoint: on a full disk, with links and devices, and when the process is killed."""

from __future__ import annotations

import errno
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from polyhead.models import Gpt
from polyhead.models.gpt import Config

pytest.importorskip("safetensors.torch", reason="pip install 'polyhead[inspect]'")
if sys.platform == "win32":
    pytest.skip("devices, FIFOs and locks need Unix", allow_module_level=True)

TINY = Config(d_model=12, heads=3, layers=1, vocab=29, positions=11)
# 1.1 MB, more than the disk below
LARGE = TINY._replace(d_model=96, vocab=1000, layers=2)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 256 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "none", folder], capture_output=True).returncode:
        pytest.skip("mounting a disk needs root")
    yield folder
    subprocess.run(["umount", folder], check=True)


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def same(a: Gpt, b: Gpt) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))


def test_a_full_disk_leaves_the_old_files(disk: Path) -> None:
    Gpt(TINY).to_pretrained(disk / "old")
    before = content(disk)
    for name in ("old", "new/folder"):
        with pytest.raises(OSError, match=r"No space left on device: .*model\.safetensors") as raised:
            Gpt(LARGE).to_pretrained(disk / name)
        assert raised.value.errno == errno.ENOSPC
    assert content(disk) == before
    assert [path.name for path in disk.iterdir()] == ["old"]
    assert Gpt.from_pretrained(disk / "old").config == TINY._replace(d_feedforward=48)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
@pytest.mark.parametrize("kind", ["FIFO", "character device", "directory"])
@pytest.mark.parametrize("linked", [False, True])
def test_only_regular_files_are_replaced(name: str, kind: str, linked: bool, tmp_path: Path) -> None:
    Gpt(TINY).to_pretrained(tmp_path)
    (tmp_path / name).unlink()
    there = tmp_path / ("there" if linked else name)
    if kind == "FIFO":
        os.mkfifo(there)
    elif kind == "directory":
        there.mkdir()
    else:
        try:
            os.mknod(there, stat.S_IFCHR | 0o666, os.makedev(1, 3))
        except PermissionError:
            pytest.skip("creating devices needs root")
    if linked:
        (tmp_path / name).symlink_to("there")
    before, mode = content(tmp_path), there.lstat()
    with pytest.raises(ValueError, match=rf"^folder must be .*, got a {kind}: .*{name}$"):
        Gpt(TINY).to_pretrained(tmp_path)
    assert content(tmp_path) == before and there.lstat() == mode


def test_links_are_followed_to_another_disk(disk: Path, tmp_path: Path) -> None:
    """For example, weights may be on a larger disk."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").symlink_to(disk / "weights")
    for model in (Gpt(TINY), Gpt(TINY._replace(layers=2))):
        model.to_pretrained(tmp_path / "model")
        assert (tmp_path / "model" / "model.safetensors").is_symlink()
        assert same(Gpt.from_pretrained(tmp_path / "model"), model)
        assert [path.name for path in disk.iterdir()] == ["weights"]
    before = content(tmp_path)
    with pytest.raises(OSError, match="No space left on device"):
        Gpt(LARGE).to_pretrained(tmp_path / "model")
    assert content(tmp_path) == before


# moves 0 and 1 move the old files away, 2 and 3 the new ones to their targets
KILLED = """
import os, signal, sys
from pathlib import Path
from polyhead.models import Gpt
from polyhead.models.gpt import Config

last, replace, moves = int(sys.argv[2]), Path.replace, []

def killed(self, target):
    if len(moves) == last:
        os.kill(os.getpid(), signal.SIGKILL)
    moves.append(target)
    return replace(self, target)

Path.replace = killed
Gpt(Config(d_model=12, heads=3, layers=2, vocab=29, positions=11)).to_pretrained(sys.argv[1])
"""


@pytest.mark.parametrize("moves", [0, 1, 3])
def test_the_next_save_removes_files_of_a_killed_one(moves: int, tmp_path: Path) -> None:
    first = Gpt(TINY)
    first.to_pretrained(tmp_path)
    before = content(tmp_path)
    process = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path), str(moves)])
    assert process.returncode == -signal.SIGKILL
    left = content(tmp_path)
    assert len(left) > len(before)
    # the old files still exist, in the folder or its subfolder
    assert set(before.values()) <= set(left.values())
    if moves == 0:
        assert same(Gpt.from_pretrained(tmp_path), first)
    else:
        with pytest.raises(FileNotFoundError, match=r"config\.json: file not found"):
            Gpt.from_pretrained(tmp_path)
        # a failed save does not remove them
        with pytest.raises(ValueError, match="meta device"):
            Gpt(TINY).to("meta").to_pretrained(tmp_path)
        assert content(tmp_path) == left
    second = Gpt(TINY)
    second.to_pretrained(tmp_path)
    assert same(Gpt.from_pretrained(tmp_path), second)
    assert content(tmp_path).keys() == before.keys()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


def test_file_modes_are_preserved(tmp_path: Path) -> None:
    Gpt(TINY).to_pretrained(tmp_path)
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).chmod(0o640)
    Gpt(TINY).to_pretrained(tmp_path)
    for name in ("config.json", "model.safetensors"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o640
