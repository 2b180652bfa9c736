"""`python -m benchmarks [NAMES…] [--device D] [--json FILE] [--repeats N]`: run cases, print a line per case, write them as JSON."""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import platform
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks import placement
from benchmarks.case import Case, CaseError
from benchmarks.measure import Line, cores, measured, use_two_threads
from benchmarks.tables import TABLES, chosen
from polyhead import _files
from polyhead.device_check.devices import describe_device, find_device


def main(argv: Sequence[str] | None = None) -> int:
    """Run the requested cases that can run here; return 1 if a case failed, or if none can run."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    if "distributed" in arguments.names:
        return _run_distributed(parser, arguments)
    if "devices" in arguments.names:
        return _count_on_device(parser, arguments)
    if "roofline" in arguments.names:
        return _print_roofline(parser, arguments)
    try:
        device, cases = find_device(arguments.device), chosen(arguments.names)
        if arguments.json is not None:
            _files.resolve_writable_path(arguments.json, "--json")
    except (OSError, ValueError) as error:
        parser.error(str(error))
    with placement.on(device):
        return _run_tables(cases, arguments)


def _run_tables(cases: Sequence[Case], arguments: argparse.Namespace) -> int:
    """Run the cases that can run on this device."""
    cases = _present(cases)
    if not cases:
        print("error: none of these cases can run here", file=sys.stderr)
        return 1
    use_two_threads()
    print(_header(), flush=True)
    lines = run(cases, arguments.repeats)
    if len(lines) < len(cases):
        unwritten = "" if arguments.json is None else f"; {arguments.json} is not written"
        print(f"error: {len(cases) - len(lines)} of {len(cases)} cases failed{unwritten}", file=sys.stderr)
        return 1
    if arguments.json is not None:
        write(arguments.json, lines)
    return 0


def _run_distributed(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    """Run the table of several processes, whose lines are of another kind, by itself."""
    # the processes that it starts import this file too
    from benchmarks.distributed import run_distributed

    if arguments.device != "cpu":
        parser.error(
            f"--device must be cpu for distributed, whose ranks are processes on the CPU, got {arguments.device}"
        )
    if arguments.json is not None:
        try:
            _files.resolve_writable_path(arguments.json, "--json")
        except (OSError, ValueError) as error:
            parser.error(str(error))
    torch.set_num_threads(1)
    print(_header(), flush=True)
    names = [name for name in arguments.names if name != "distributed"]
    try:
        run_distributed(names, arguments.repeats, arguments.json)
    except (CaseError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _count_on_device(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    """Print launches and waits on the simulated device, by themselves: it is registered for the whole process."""
    from benchmarks.devices import print_counts

    if arguments.json is not None or arguments.repeats is not None or arguments.device != "cpu":
        parser.error("devices takes names of cases only: it counts on a simulated device, and measures no times")
    try:
        print_counts([name for name in arguments.names if name != "devices"])
    except (CaseError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _print_roofline(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    """Print bounds of times on GPUs, by themselves: nothing is measured."""
    # counts on tensors without data, which other tables do not need
    from benchmarks.roofline import print_roofline

    if arguments.names != ["roofline"] or arguments.json is not None or arguments.repeats is not None:
        parser.error("roofline must be the only argument: it prints bounds, and measures nothing")
    print_roofline()
    return 0


def _present(cases: Sequence[Case]) -> list[Case]:
    """The cases whose requirements are met. The others are listed on stderr, once per reason."""
    left_out: dict[str, list[str]] = {}
    present = []
    for case in cases:
        reason = case.lacks()
        if reason is None:
            present.append(case)
        else:
            left_out.setdefault(reason, []).append(case.name)
    for reason, names in left_out.items():
        print(f"SKIPPED: {', '.join(names)}\n  {reason}", file=sys.stderr, flush=True)
    return present


def run(cases: Sequence[Case], repeats: int | None) -> list[Line]:
    """Measure each case and print its line; a case that fails gives an error instead of a line."""
    widths = [max(len(name), *(len(text) for text in texts)) for name, *texts in _columns(cases)]
    print(_aligned([name for name, *_ in _columns(cases)], widths), flush=True)
    lines = []
    for case in cases:
        try:
            line = measured(case, repeats)
        except CaseError as error:
            print(f"error: {case.name}: {error}", file=sys.stderr, flush=True)
        except Exception:
            print(f"error: {case.name}:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
        else:
            lines.append(line)
            print(_aligned(_texts(line), widths), flush=True)
    return lines


def write(file: Path, lines: Sequence[Line]) -> None:
    """Write the lines as JSON, atomically."""
    text = json.dumps([dataclasses.asdict(line) for line in lines], indent=1) + "\n"
    _files.write_atomically(file, text.encode(), "json")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Compare Polyhead with its peers and with the floor. A case is timed only if its results are equal.",
    )
    known = ", ".join(TABLES)
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help=f"a table ({known}), or a part of the names of cases; distributed, alone or with parts of names, runs ranks; "
        "devices, likewise, counts launches and waits; roofline, alone, prints bounds of times on GPUs",
    )
    parser.add_argument(
        "--device", default="cpu", metavar="D", help="where cases run, such as cuda or cuda:1 (default: %(default)s)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the lines as a list of objects")
    parser.add_argument(
        "--repeats",
        type=_positive,
        metavar="N",
        help="number of rounds per case; default: as many as fit into some seconds",
    )
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number


def _header() -> str:
    today = datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z")
    device = placement.here()
    on_device = "" if device.type == "cpu" else f"{describe_device(device).get('device name', device)} as {device}, "
    threads = f"{cores()} cores, {torch.get_num_threads()} threads"
    return f"{on_device}{_cpu()}, {threads}, torch {torch.__version__}, {today}"


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    models = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.processor() or platform.machine())


def _columns(cases: Sequence[Case]) -> list[list[str]]:
    """The names of the columns, each with its known contents or with a text as wide as any."""
    number = "99999.999"
    return [
        ["case", *(case.name for case in cases)],
        ["ours_ms", number],
        ["peer", *(case.peer for case in cases)],
        ["peer_ms", number],
        ["ratio", "99.99"],
        ["floor_ms", number],
        ["ours/floor", "9.99"],
        ["ours_peak_mb", "9999.9"],
        ["peer_peak_mb", "9999.9"],
        ["max_abs_diff", "1.0e-06"],
    ]


def _texts(line: Line) -> list[str]:
    floor = line.floor_ms
    return [
        line.case,
        f"{line.ours_ms:.3f}",
        line.peer,
        f"{line.peer_ms:.3f}",
        f"{line.ratio:.2f}",
        "-" if floor is None else f"{floor:.3f}",
        "-" if floor is None else f"{line.ours_ms / floor:.2f}",
        *("-" if peak is None else f"{peak:.1f}" for peak in (line.ours_peak_mb, line.peer_peak_mb)),
        f"{line.max_abs_diff:.1e}",
    ]


def _aligned(texts: Sequence[str], widths: Sequence[int]) -> str:
    """Left-align names, right-align numbers."""
    words = {0, 2}
    return "  ".join(
        text.ljust(width) if i in words else text.rjust(width)
        for i, (text, width) in enumerate(zip(texts, widths, strict=True))
    )


if __name__ == "__main__":
    sys.exit(main())
