"""Bounded reads and atomic writes of files."""

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

_FILE_TYPES = {
    stat.S_IFREG: "regular file",
    stat.S_IFDIR: "directory",
    stat.S_IFCHR: "character device",
    stat.S_IFBLK: "block device",
    stat.S_IFIFO: "FIFO",
    stat.S_IFSOCK: "socket",
}


def file_type(path: str | os.PathLike[str]) -> str | None:
    """The kind of file at a path, through symbolic links, such as "regular file" or "FIFO"; None where nothing exists.

    Raises:
        OSError: where it cannot be determined, for example for links in a cycle.
    """
    try:
        mode = os.stat(path).st_mode  # noqa: PTH116, a path may be a str
    except FileNotFoundError:
        return None
    return _FILE_TYPES.get(stat.S_IFMT(mode), "special file")


def read_bytes_up_to(path: str | os.PathLike[str], limit: int) -> bytes:
    """The content of a regular file of at most `limit` bytes.

    Raises:
        OSError: where the file cannot be opened.
        ValueError: where it has more bytes, or is a device, a FIFO or a socket, which may never end.
    """
    found = file_type(path)
    if found not in ("regular file", "directory", None):
        raise ValueError(f"{path} must be a regular file, got a {found}; write its content to a file first")
    with open(path, "rb", opener=_open_without_blocking) as stream:
        # files in /proc report a size of 0
        content = stream.read(limit + 1) if os.fstat(stream.fileno()).st_size <= limit else None
    if content is None or len(content) > limit:
        raise ValueError(f"{path} must have at most {limit:,} bytes, got more; check that it is the right file")
    return content


def _open_without_blocking(path: str, flags: int) -> int:
    # the file may have been replaced by a FIFO without a writer since it was checked
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def resolve_writable_path(path: str | os.PathLike[str], name: str = "path") -> Path:
    """The path that a file is written to: the path itself, or the target of its symbolic links.

    Call it before any work is done. `name` is the argument that holds the path.

    Raises:
        TypeError: where `path` is not a path.
        ValueError: where something other than a regular file exists there, which would be lost.
        OSError: where the folder does not exist or is not writable, or links form a cycle.
    """
    # os.stat takes an integer for an open file
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"{name} must be a path, got {type(path).__name__}")
    found, real = file_type(path), Path(os.path.realpath(path))
    if found not in ("regular file", None):
        example = f", such as {Path(path) / 'heads.html'}" if found == "directory" else ""
        raise ValueError(f"{name} must be a regular file or a new one{example}, got a {found}: {path}")
    if not real.parent.is_dir():
        raise FileNotFoundError(f"{name} must be in a folder that exists, got {path}; there is no folder {real.parent}")
    if not os.access(real.parent, os.W_OK | os.X_OK) or (found and not os.access(real, os.W_OK)):
        raise PermissionError(f"{name} must be a file that can be written, got {path}; permission is denied")
    return real


def write_atomically(path: str | os.PathLike[str], content: bytes, name: str = "path") -> None:
    """Write a file atomically: after any failure, or if the process is killed, it is unchanged.

    If two processes write the same file at once, the result is the whole content of one. See `resolve_writable_path` for the errors.
    """
    place = resolve_writable_path(path, name)
    remove_abandoned_folders(place)
    with locked_temporary_folder(place) as folder:
        new = folder / place.name
        handle = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0), 0o666)
        with os.fdopen(handle, "wb") as stream:
            stream.write(content)
        flush_and_copy_permissions(new, place)
        new.replace(place)


def flush_and_copy_permissions(new: Path, place: Path) -> None:
    """Prepare a file for its move to `place`: flush it to the disk, and copy mode and owner of the file that it replaces."""
    with new.open("r+b") as stream:
        os.fsync(stream.fileno())
    if place.exists():
        old = place.stat()
        # only root may change the owner
        with contextlib.suppress(OSError, AttributeError):
            os.chown(new, old.st_uid, old.st_gid)
        new.chmod(stat.S_IMODE(old.st_mode))


@contextlib.contextmanager
def locked_temporary_folder(place: Path) -> Iterator[Path]:
    """A private temporary folder beside the file that is to be replaced; it is locked while in use, and removed afterwards."""
    while True:
        with (
            tempfile.TemporaryDirectory(prefix=_temporary_folder_prefix(place), dir=place.parent) as folder,
            _lock_folder(Path(folder), exclusive=False) as locked,
        ):
            # try again if another process has removed the folder before it was locked
            if locked and Path(folder).is_dir():
                yield Path(folder)
                return


def remove_abandoned_folders(place: Path) -> None:
    """Remove the workspaces that killed processes have left beside a file: those of this user that are not locked."""
    for folder in place.parent.glob(f"{_temporary_folder_prefix(place)}*"):
        # a folder that cannot be removed stays and does no harm
        with contextlib.suppress(OSError), _lock_folder(folder, exclusive=True) as locked:
            if locked and folder.lstat().st_uid == os.geteuid():
                shutil.rmtree(folder)


def _temporary_folder_prefix(place: Path) -> str:
    """The prefix of the names of workspaces beside a file; a hash, so that no name is too long."""
    return f".polyhead-{hashlib.sha256(os.fsencode(place.name)).hexdigest()[:16]}-"


if sys.platform == "win32":

    @contextlib.contextmanager
    def _lock_folder(folder: Path, *, exclusive: bool) -> Iterator[bool]:
        """Windows cannot lock folders: those that a kill has left look like those in use, and stay."""
        yield not exclusive

else:

    @contextlib.contextmanager
    def _lock_folder(folder: Path, *, exclusive: bool) -> Iterator[bool]:
        """Lock a folder, shared or exclusively, and yield whether it is locked. An exclusive lock is tried without waiting.

        The lock ends with the process, however that ends.
        """
        try:
            handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:
            # the folder is gone, or it is something else, which is not removed
            yield not exclusive and folder.is_dir()
            return
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB if exclusive else fcntl.LOCK_SH)
                locked = True
            except OSError:
                # in use, or on a file system without locks, where nothing is removed
                locked = not exclusive
            yield locked
        finally:
            os.close(handle)
