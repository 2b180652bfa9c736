"""Try each risky row in a process of its own, with little memory and little time; print how each ended, a line of JSON each."""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

from malformed_row import Row
from risky_rows import ROWS

SECONDS = 10
# Bytes that a row may ask for, besides what Python and torch have already.
ROOM = 2 << 30


def main() -> None:
    for row in ROWS:
        print(json.dumps({"name": row.name, **tried(row)}), flush=True)


def tried(row: Row) -> dict[str, Any]:
    """How a row ended: its error, or the signal that ended its process."""
    read, write = os.pipe()
    sys.stdout.flush()
    child = os.fork()
    if not child:
        os.close(read)
        _limit()
        with os.fdopen(write, "w") as pipe:
            json.dump(_outcome(row), pipe)
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        told = pipe.read()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status) or not told:
        return {"ended": f"by signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"with status {status}"}
    outcome: dict[str, Any] = json.loads(told)
    return outcome


def _limit() -> None:
    signal.alarm(SECONDS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + ROOM, used + ROOM))


def _outcome(row: Row) -> dict[str, Any]:
    try:
        result = row.call()
    except BaseException as error:
        return {
            "kinds": [kind.__name__ for kind in type(error).__mro__],
            "words": str(error),
            "trace": traceback.format_exc(),
        }
    return {"accepted": type(result).__name__}


if __name__ == "__main__":
    main()
