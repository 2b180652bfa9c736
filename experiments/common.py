"""Shared by the experiments: data, progress bars, tables, and atomic writes of files."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import io
import json
import os
import sys
import time
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor

from polyhead import _files

PICTURES = Path(__file__).resolve().parent.parent / "docs" / "experiments"
# one colour per arm, the same in every picture; safe for colour-blind readers (Okabe and Ito)
BLUE, ORANGE, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "#7F7F7F"


# errors of a truncated file of arrays, or of one with other contents
UNREADABLE = (KeyError, ValueError, OSError, EOFError, zipfile.BadZipFile)


class DataError(Exception):
    """A data file is missing or malformed; the message says what to do."""


def natural(text: str) -> int:
    """A positive integer, for argparse."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be a positive integer, got {text!r}")
    return number


def output_file(text: str) -> Path:
    """An output file, for argparse; one that cannot be replaced is rejected before any work is done."""
    try:
        found = _files.file_type(text)
    except OSError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if found not in ("regular file", None):
        raise argparse.ArgumentTypeError(f"must be a regular file or a new one, got a {found}: {text}")
    return Path(text)


class Citations(NamedTuple):
    """A citation graph with the public split of Planetoid (Yang 2016)."""

    features: Tensor
    """Sparse (nodes, words); every nonempty row sums to one."""
    edge_index: Tensor
    """(2, edges), both directions, without self-loops."""
    labels: Tensor
    """(nodes,); −1 without a label."""
    train: Tensor
    valid: Tensor
    test: Tensor

    @property
    def classes(self) -> int:
        return int(self.labels.max()) + 1


def planetoid(folder: Path, name: str) -> Citations:
    """Read `folder/name.npz`: CSR features, `edge_index`, `labels`, and the node numbers `train`, `valid` and `test`."""
    file = folder / f"{name}.npz"
    try:
        # np.load would leave a truncated file open
        with file.open("rb") as stream, np.load(stream, allow_pickle=False) as arrays:
            a = {key: arrays[key] for key in arrays.files}
        count = np.diff(a["features_indptr"])
        rows = np.repeat(np.arange(len(count)), count)
        sums = np.bincount(rows, a["features_data"], len(count))
        # empty rows, of which Citeseer has 15, remain empty
        values = (a["features_data"] / sums[rows]).astype(np.float32)
        at = torch.from_numpy(np.stack((rows, a["features_indices"].astype(np.int64))))
        features = torch.sparse_coo_tensor(
            at, torch.from_numpy(values), tuple(int(n) for n in a["features_shape"]), check_invariants=True
        ).coalesce()
        whole = [
            torch.from_numpy(a[key].astype(np.int64)) for key in ("edge_index", "labels", "train", "valid", "test")
        ]
        return Citations(features, *whole)
    except FileNotFoundError:
        reason = f"{file} does not exist"
    except UNREADABLE as error:
        reason = f"{file} cannot be read: {error}"
    raise DataError(
        f"{reason}\nIt must contain {name} of https://github.com/kimiyoung/planetoid (data/ind.{name}.*) as one .npz with "
        "features_data, features_indices, features_indptr, features_shape (CSR), edge_index (2 x edges, both directions), "
        "labels, train, valid, test. Pass the folder it is in as --data."
    )


def run(main: Callable[[], None]) -> int:
    """Run an experiment; user errors and Ctrl-C become a message and exit code 1."""
    try:
        main()
    except (DataError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 1
    return 0


def add_shared(parser: argparse.ArgumentParser, picture: str) -> None:
    """Add the options of an experiment without saved runs: see `shown`."""
    add = parser.add_argument
    add("--threads", type=natural, default=1, help="threads of torch (default: %(default)s)")
    add("--out", type=output_file, default=PICTURES / picture, help="the picture")
    add("--json", type=output_file, metavar="FILE", help="write the results")


def shown(
    arguments: argparse.Namespace,
    measure: Callable[[], dict[str, Any]],
    report: Callable[[dict[str, Any]], None],
    picture: Callable[[dict[str, Any]], Figure],
) -> int:
    """Measure, print the tables, draw the picture, write the results; returns the exit code."""

    def work() -> None:
        torch.set_num_threads(arguments.threads)
        found = measure()
        report(found)
        write_picture(arguments.out, picture(found))
        write_json(arguments.json, found)

    return run(work)


def write_whole(file: Path, content: bytes) -> None:
    """Write a file atomically."""
    file.parent.mkdir(parents=True, exist_ok=True)
    _files.write_atomically(file, content, "file")


def write_picture(file: Path, figure: Figure) -> None:
    """Write a figure, in the format of the file's suffix."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format=file.suffix.lstrip(".") or "png", dpi=150)
    write_whole(file, buffer.getvalue())
    print(f"picture: {file}")


def write_json(file: Path | None, results: Any) -> None:
    """Write the results as JSON, if a file is given."""
    if file is not None:
        write_whole(file, (json.dumps(results, indent=1) + "\n").encode())


@contextlib.contextmanager
def claimed(file: Path) -> Iterator[bool]:
    """Lock a file until the context ends or the process dies; False if another process has it."""
    # only on Unix
    import fcntl

    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


def append_line(file: Path, result: dict[str, Any]) -> None:
    """Append one line of JSON in a single write, so that lines of parallel runs do not mix."""
    file.parent.mkdir(parents=True, exist_ok=True)
    torn = file.exists() and file.stat().st_size > 0 and not file.read_bytes().endswith(b"\n")
    line = ("\n" if torn else "") + json.dumps(result) + "\n"
    handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(handle, line.encode())
    finally:
        os.close(handle)


def read_lines(file: Path) -> list[dict[str, Any]]:
    """The lines of JSON in a file, without lines that a killed run left unfinished."""
    lines = []
    for text in file.read_text().splitlines() if file.exists() else ():
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            continue
    return lines


def resumed(
    file: Path, wanted: Sequence[dict[str, Any]], measure: Callable[[dict[str, Any], Progress], dict[str, Any]]
) -> list[dict[str, Any]]:
    """The wanted runs with their results: read from the file, or measured now and appended to it.

    A line of the file counts only if all fields agree, so changed settings are measured again.
    """
    found = {json.dumps(line.get("wanted"), sort_keys=True): line for line in read_lines(file)}
    lines = []
    with progress() as bar:
        task = bar.add_task("", total=len(wanted))
        for one in wanted:
            key = json.dumps(one, sort_keys=True)
            if key not in found:
                bar.update(task, description=", ".join(str(x) for x in one.values() if isinstance(x, (str, int))))
                began = time.perf_counter()
                answer = measure(one, bar)
                found[key] = {"wanted": one, **answer, "seconds": round(time.perf_counter() - began, 1)}
                append_line(file, found[key])
            lines.append(one | {name: value for name, value in found[key].items() if name != "wanted"})
            bar.advance(task)
    return lines


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table, with numbers right-aligned; at full width if the output is a file."""
    table = Table(title=title, title_justify="left", title_style="bold")
    for place, column in enumerate(columns):
        table.add_column(column, justify="right" if place else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else 160).print(table)


def progress() -> Progress:
    """A progress bar on standard error: `with progress() as bar`, then `bar.add_task`, `bar.update`."""
    return Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        console=Console(stderr=True), transient=True,
    )  # fmt: skip


def keep_memory() -> None:
    """Let glibc keep freed memory: every step allocates megabytes, and fresh pages would cost a fifth of its time."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        trim_threshold, top_pad, mmap_threshold = -1, -2, -3
        for option, size in ((trim_threshold, 2**31 - 1), (top_pad, 2**26), (mmap_threshold, 2**25)):
            mallopt(option, size)
