"""Files that are read within bounds, and written whole or not at all."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

if sys.platform != "win32":
    import fcntl

_KINDS = {
    stat.S_IFREG: "regular file",
    stat.S_IFDIR: "directory",
    stat.S_IFCHR: "character device",
    stat.S_IFBLK: "block device",
    stat.S_IFIFO: "FIFO",
    stat.S_IFSOCK: "socket",
}


def kind(path: str | os.PathLike[str]) -> str | None:
    """What a path leads to, through symbolic links, such as "regular file" or "FIFO"; None where there is nothing.

    Raises:
        OSError: where it cannot be told, as with links that lead to themselves.
    """
    try:
        mode = os.stat(path).st_mode  # noqa: PTH116, a path may be a str
    except FileNotFoundError:
        return None
    return _KINDS.get(stat.S_IFMT(mode), "special file")


def read_bytes(path: str | os.PathLike[str], most: int) -> bytes:
    """The content of a regular file of at most `most` bytes.

    Raises:
        OSError: where it cannot be opened.
        ValueError: where it has more bytes; or is a device, a FIFO or a socket, which may never end.
    """
    found = kind(path)
    if found not in ("regular file", "directory", None):
        raise ValueError(f"{path} must be a regular file, got a {found}; write what it gives to a file first")
    with open(path, "rb", opener=_without_waiting) as stream:
        # some files of the system's own say that they have none
        content = stream.read(most + 1) if os.fstat(stream.fileno()).st_size <= most else None
    if content is None or len(content) > most:
        raise ValueError(f"{path} must have at most {most:,} bytes, got more; is it what it should be?")
    return content


def _without_waiting(path: str, flags: int) -> int:
    # a FIFO that came in its place meanwhile may have nobody who writes to it
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def target(path: str | os.PathLike[str], name: str = "path") -> Path:
    """Where a file is written: the path itself, or what it leads to through symbolic links.

    Call it before any work is done. `name` is the argument that the path was given as.

    Raises:
        TypeError: where it is no path.
        ValueError: where something other than a regular file is there: it would be lost.
        OSError: where its folder is not there or cannot be written to, or links lead to themselves.
    """
    # a number would be taken for an open file
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"{name} must be a path, got {type(path).__name__}")
    found, real = kind(path), Path(os.path.realpath(path))
    if found not in ("regular file", None):
        example = f", such as {Path(path) / 'heads.html'}" if found == "directory" else ""
        raise ValueError(f"{name} must be a regular file or a new one{example}, got a {found}: {path}")
    if not real.parent.is_dir():
        raise FileNotFoundError(f"{name} must be in a folder that exists, got {path}; there is no folder {real.parent}")
    if not os.access(real.parent, os.W_OK | os.X_OK) or (found and not os.access(real, os.W_OK)):
        raise PermissionError(f"{name} must be a file that can be written, got {path}; permission is denied")
    return real


def write_whole(path: str | os.PathLike[str], content: bytes, name: str = "path") -> None:
    """Write a file, or leave it as it was: whatever fails, and whenever the process is killed.

    Where two write the same file at once, one of both contents results, whole. See `target` for what is refused.
    """
    place = target(path, name)
    sweep(place)
    with workspace(place) as folder:
        new = folder / place.name
        handle = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0), 0o666)
        with os.fdopen(handle, "wb") as stream:
            stream.write(content)
        settle(new, place)
        new.replace(place)


def settle(new: Path, place: Path) -> None:
    """Make a file ready to be moved to its place: all of it is on the disk, and it has the mode and owner of what is there."""
    with new.open("r+b") as stream:
        os.fsync(stream.fileno())
    if place.exists():
        old = place.stat()
        # only root may give files away
        with contextlib.suppress(OSError, AttributeError):
            os.chown(new, old.st_uid, old.st_gid)
        new.chmod(stat.S_IMODE(old.st_mode))


@contextlib.contextmanager
def workspace(place: Path) -> Iterator[Path]:
    """A new folder beside a file that is to be replaced, closed to others; it is locked while it is used, and gone afterwards."""
    while True:
        with (
            tempfile.TemporaryDirectory(prefix=_prefix(place), dir=place.parent) as made,
            _locked(Path(made), alone=False) as locked,
        ):
            # not where another process has swept it away before it was locked
            if locked and Path(made).is_dir():
                yield Path(made)
                return


def sweep(place: Path) -> None:
    """Remove the workspaces that killed processes have left beside a file: those of ours that nobody has locked."""
    for left in place.parent.glob(f"{_prefix(place)}*"):
        # one that cannot be removed stays, and does no harm
        with contextlib.suppress(OSError), _locked(left, alone=True) as locked:
            if locked and left.lstat().st_uid == os.geteuid():
                shutil.rmtree(left)


def _prefix(place: Path) -> str:
    """How workspaces beside a file are called: never too long, whatever the file's name is."""
    return f".polyhead-{hashlib.sha256(os.fsencode(place.name)).hexdigest()[:16]}-"


if sys.platform == "win32":

    @contextlib.contextmanager
    def _locked(folder: Path, *, alone: bool) -> Iterator[bool]:
        """Folders have no locks there: what a kill has left is not told from what is in use, and stays."""
        yield not alone

else:

    @contextlib.contextmanager
    def _locked(folder: Path, *, alone: bool) -> Iterator[bool]:
        """Hold a folder, as one who uses it or as nobody but us, without waiting for the latter; says whether it is held.

        The lock ends with the process, however that ends.
        """
        try:
            handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:
            # it is gone; or something else, which is not removed
            yield not alone and folder.is_dir()
            return
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB if alone else fcntl.LOCK_SH)
                held = True
            except OSError:
                # in use; or file systems without locks, on which nothing is removed
                held = not alone
            yield held
        finally:
            os.close(handle)
