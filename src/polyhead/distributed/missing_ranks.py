"""Which rank is missing: an error that names it, where a collective only says that it failed or timed out.

Everything here goes through the store by which the ranks found each other, so it works for every backend.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.distributed_c10d import _get_default_store

from polyhead._checks import check_integer, check_number
from polyhead.distributed.agreement import name_ranks
from polyhead.distributed.process_group import process_group

# A rank is silent if its heartbeat does not change for so many beats, and for so many seconds on a busy machine.
_SILENT_BEATS, _SILENT_SECONDS = 3, 3.0
# Seconds between two looks at the store: at first, and at most.
_FIRST_POLL_SECONDS, _POLL_SECONDS = 0.001, 0.05
# What errors of gloo's and NCCL's collectives say.
_COMMUNICATION_WORDS = ("gloo", "nccl", "c10d")
# A week: longer ones do not fit what waits for them.
_MAX_SECONDS = 604800.0
_REMEDY = "look at its log, then start again from the last checkpoint"

# By the group of all ranks, and by the ranks of a group: several groups may have the same.
_boards: weakref.WeakKeyDictionary[dist.ProcessGroup, Counter[tuple[int, ...]]] = weakref.WeakKeyDictionary()
_barriers: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], _Board]] = weakref.WeakKeyDictionary()


def wait_for_ranks(timeout: float, group: dist.ProcessGroup | None = None) -> None:
    """Wait until every rank of a group is here: a barrier that names the ranks which do not come.

    It needs no collective. Call it before long work, or before each step with NCCL, whose failed collectives end the process
    without a Python error.

    Raises:
        RuntimeError: after `timeout` seconds. It names the missing ranks. A rank that comes later gets an error too.
    """
    timeout = _check_timeout(timeout)
    barriers, ranks = _barriers.setdefault(process_group(None), {}), _ranks_of(group)
    before = barriers.get(ranks)
    board, start = _Board(group, timeout, before), time.monotonic()
    with board.reachable("the barrier", start, None):
        board.write("here", "yes")
        pause = _FIRST_POLL_SECONDS
        while not all(here := board.read("here")):
            if time.monotonic() - start > timeout:
                board.write("gave up", "yes")
                missing = name_ranks([rank for rank, is_here in zip(board.ranks, here, strict=True) if not is_here])
                raise RuntimeError(f"{missing} did not reach the barrier within {timeout:g} s; {_REMEDY}")
            time.sleep(pause)
            pause = min(2 * pause, _POLL_SECONDS)
        if before is not None:
            # every rank is here, and so has left the barrier before
            before.erase()
        barriers[ranks] = board
        gave_up = [rank for rank, text in zip(board.ranks, board.read("gave up"), strict=True) if text]
    if gave_up:
        own = dist.get_rank()
        raise RuntimeError(f"rank {own} reached the barrier after {name_ranks(gave_up)} gave up; {_REMEDY}")


class RankWatch:
    """Finds out who is missing where a step fails: `with watch.step(17): …` around a step's collectives.

    Each rank writes the number of its step, and a heartbeat from a thread, to the store. If a collective fails, the ranks that
    are left read what the others wrote, and raise an error that names the rank that died, hangs, is behind or has raised.
    Construct it on every rank at the same place; it ends with `close()` or as a context manager.

    The collectives themselves end by the timeout of their group, `init_process_group(timeout=…)`, for gloo by a Python error.
    NCCL ends the process instead unless TORCH_NCCL_BLOCKING_WAIT=1 is set; without it call `wait_for_ranks` before a step.

    Args:
        timeout: seconds. The group's own timeout, after which a collective fails; ranks must also be here within it.
        group: the ranks that take part; None is all.
    """

    def __init__(self, timeout: float, group: dist.ProcessGroup | None = None) -> None:
        self.timeout = _check_timeout(timeout)
        self._beat_seconds = min(1.0, timeout / 10)
        self._silent_seconds = max(_SILENT_SECONDS, _SILENT_BEATS * self._beat_seconds)
        wait_for_ranks(timeout, group)
        # a rank that waits for an answer of the store must not delay the heartbeat: one connection each
        self._board = _Board(group, self._silent_seconds)
        self._has_raised = False
        self._heart = _Heart(self._board.clone(), self._beat_seconds)
        self._heart.start()

    def __enter__(self) -> RankWatch:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End the heartbeat. Ranks that still wait for this one are told that it has finished."""
        self._heart.stop()
        # the rank that serves the store may have finished first, and then nobody waits
        with contextlib.suppress(dist.DistError):
            if not self._board.own("report"):
                self._board.write("report", "finished")

    @contextlib.contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Around the collectives of step `number`, which every rank must reach.

        Raises:
            RuntimeError: where a collective failed because of another rank. It names that rank, and its cause is the
                collective's own error. Other errors of this rank are raised as they are, and told to the other ranks.
        """
        number, start = check_integer("number", number, 0), time.monotonic()
        with self._board.reachable(f"step {number}", start, None):
            self._board.write("step", str(number))
            if self._has_raised:
                # the error was handled: it is not why a later step fails
                self._board.write("report", "")
                self._has_raised = False
        try:
            yield
        except BaseException as error:
            with self._board.reachable(f"step {number}", start, error):
                found = None
                if _is_communication_error(error):
                    self._board.write("report", "waited")
                    found = self._find_missing(number, start, error)
                    self._linger(start)
                if found is None:
                    self._board.write("report", f"raised {type(error).__name__}: {error}"[:500])
                    self._has_raised = True
                    raise
            raise RuntimeError(found) from error

    def _find_missing(self, step: int, start: float, error: BaseException) -> str | None:
        """What happened to the other ranks; None where nothing did."""
        board, before, seconds = self._board, self._board.read("beat"), time.monotonic() - start

        def find_silent() -> list[int]:
            rows = zip(before, board.read("beat"), board.read("report"), strict=True)
            return [i for i, (then, now, report) in enumerate(rows) if then == now and not report]

        self._wait(lambda: not find_silent(), time.monotonic() + self._silent_seconds)
        silent, reports = find_silent(), board.read("report")
        steps = [int(text or -1) for text in board.read("step")]
        if silent:
            return self._describe(silent, steps, step, seconds, "stopped answering")
        for rank, report in zip(board.ranks, reports, strict=True):
            if report.startswith("raised"):
                return f"rank {rank} {report} in step {step}, for which this rank waited; {_REMEDY}"
        behind = [i for i, reached in enumerate(steps) if reached < step]
        if behind:
            done = "has finished" if all(reports[i] == "finished" for i in behind) else "is alive"
            return self._describe(behind, steps, step, seconds, done)
        if "timed out" not in str(error).lower():
            return None
        self._wait(lambda: all(board.read("report")), time.monotonic() + self.timeout)
        stuck = [i for i, report in enumerate(board.read("report")) if not report]
        return self._describe(stuck, steps, step, seconds, "is alive") if stuck else None

    def _describe(self, at: list[int], steps: list[int], step: int, seconds: float, state: str) -> str:
        ranks = [self._board.ranks[i] for i in at]
        reached = min(steps[i] for i in at)
        verb = "did not reach" if reached < step else "did not finish"
        place = f"was in step {reached}" if reached >= 0 else "was before the first step"
        if len(ranks) > 1:
            state = state.replace("has", "have").replace("is ", "are ")
            place = place.replace("was", "were")
        them = "it" if len(ranks) == 1 else "they"
        return f"{name_ranks(ranks)} {verb} step {step} within {seconds:.0f} s: {them} {state} and {place}; {_REMEDY}"

    def _linger(self, start: float) -> None:
        """Wait a little until the other ranks know too: the first process that ends may take theirs with it, or the store."""
        self._board.write("named", "yes")
        deadline = time.monotonic() + self._silent_seconds
        if self._board.is_server:
            deadline = max(deadline, start + self.timeout)
        before = self._board.read("beat")

        def all_named() -> bool:
            # ranks whose heart does not beat are gone, and need not be told
            rows = zip(self._board.read("named"), before, self._board.read("beat"), strict=True)
            return all(named or then == now for named, then, now in rows)

        time.sleep(1.5 * self._beat_seconds)
        self._wait(all_named, deadline)

    def _wait(self, until: Callable[[], bool], deadline: float) -> None:
        while not until() and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)


class _Heart(threading.Thread):
    """Counts beats into the store until it is stopped, or the store is gone."""

    def __init__(self, board: _Board, seconds: float) -> None:
        super().__init__(name="polyhead heartbeat", daemon=True)
        self._board, self._seconds, self._stopped = board, seconds, threading.Event()

    def run(self) -> None:
        count = 0
        while not self._stopped.wait(self._seconds):
            count += 1
            try:
                self._board.write("beat", str(count))
            except RuntimeError:
                # whoever needs the store notices that it is gone, and says so
                return

    def stop(self) -> None:
        self._stopped.set()
        self.join(self._seconds)


class _Board:
    """What the ranks of a group write for each other into the store: a short text per topic and rank."""

    def __init__(self, group: dist.ProcessGroup | None, answer_seconds: float, before: _Board | None = None) -> None:
        """`before` is a board whose connection this one takes over."""
        self.ranks = list(_ranks_of(group))
        # every rank makes its boards in the same order
        made = _boards.setdefault(process_group(None), Counter())
        made[tuple(self.ranks)] += 1
        number = made[tuple(self.ranks)]
        self._group_rank = dist.get_rank(group)
        self._prefix = f"polyhead/{'-'.join(map(str, self.ranks))}/{number}"
        self._seconds = answer_seconds
        self.lost = False
        if before is None or before.lost:
            self._store: Any = self._connect()
        else:
            self._store = before._store
            self._store.set_timeout(datetime.timedelta(seconds=answer_seconds))
        self._open()

    @property
    def is_server(self) -> bool:
        """Whether the store ends with this process; torchrun keeps it in a process of its own."""
        return dist.get_rank() == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"

    def _connect(self) -> Any:
        store: Any = _get_default_store()
        store = store.clone()
        store.set_timeout(datetime.timedelta(seconds=self._seconds))
        return store

    def _open(self) -> None:
        """Refuse what an earlier start of the ranks has left in the store: it would be read as theirs of today."""
        if self._store.add(f"{self._prefix}/opened/{self._group_rank}", 1) > 1:
            raise RuntimeError(
                "store must be one that no earlier start of these ranks has written to, got the one that torchrun keeps over its "
                "restarts; use polyhead.distributed.init_process_group"
            )

    def clone(self) -> _Board:
        """The same board by a connection of its own."""
        twin = object.__new__(_Board)
        vars(twin).update(vars(self))
        twin._store = self._connect()
        return twin

    def write(self, topic: str, text: str) -> None:
        if self.lost:
            raise dist.DistStoreError("the store did not answer before")
        self._store.set(f"{self._prefix}/{topic}/{self._group_rank}", text)

    def read(self, topic: str) -> list[str]:
        """The texts of all ranks; empty where a rank has written none."""
        found: list[list[str]] = []
        errors: list[BaseException] = []

        def ask() -> None:
            try:
                found.append(self._ask(topic))
            except dist.DistError as error:
                errors.append(error)

        # a connection waits for an answer without end where the host of the store hangs: wait beside it
        thread = threading.Thread(target=ask, name="polyhead store", daemon=True)
        if not self.lost:
            thread.start()
            thread.join(self._seconds)
        if found:
            return found[0]
        self.lost = True
        raise dist.DistStoreError("the store did not answer") from (errors[0] if errors else None)

    def _ask(self, topic: str) -> list[str]:
        keys = [f"{self._prefix}/{topic}/{i}" for i in range(len(self.ranks))]
        if not self._store.check(keys):
            keys = [key if self._store.check([key]) else "" for key in keys]
        texts = iter(self._store.multi_get([key for key in keys if key]) if any(keys) else [])
        return [next(texts).decode() if key else "" for key in keys]

    def erase(self) -> None:
        """Remove what this rank has written, when no rank reads it any more."""
        for topic in ("opened", "here"):
            self._store.delete_key(f"{self._prefix}/{topic}/{self._group_rank}")

    def own(self, topic: str) -> str:
        """What this rank has written."""
        return self.read(topic)[self._group_rank]

    @contextlib.contextmanager
    def reachable(self, place: str, start: float, cause: BaseException | None) -> Iterator[None]:
        """Name the rank that serves the store where the store does not answer."""
        try:
            yield
        except dist.DistError as error:
            if error is cause:
                raise
            seconds = time.monotonic() - start
            raise RuntimeError(
                f"rank 0 did not answer in {place} within {seconds:.0f} s: the store that its host serves cannot be reached, because "
                "the process or the host has ended, hangs, or the link to it is cut; look at its log, then start again from the "
                "last checkpoint"
            ) from (cause or error)


def _ranks_of(group: dist.ProcessGroup | None) -> tuple[int, ...]:
    """The ranks of a group, of which this process must be one."""
    ranks = tuple(dist.get_process_group_ranks(process_group(group)))
    if dist.get_rank() not in ranks:
        raise ValueError(f"group must have rank {dist.get_rank()}, which calls this, got one of ranks {list(ranks)}")
    return ranks


def _check_timeout(timeout: float) -> float:
    return check_number("timeout", timeout, 0, _MAX_SECONDS, "()")


def _is_communication_error(error: BaseException) -> bool:
    """Whether an error is one of a collective, which another rank may have caused."""
    if isinstance(error, dist.DistError):
        return True
    if not isinstance(error, (RuntimeError, CheckpointException)) or isinstance(error, torch.OutOfMemoryError):
        return False
    return any(word in str(error).lower() for word in _COMMUNICATION_WORDS)
