"""Processes for the table `distributed`: started once, joined by gloo, of one thread each; and what they send."""

from __future__ import annotations

import contextlib
import datetime
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from benchmarks.case import CaseError

# how long one measurement may take
SECONDS = 900


class RankPool:
    """`world` processes. `run(function, *args)` runs a function on all of them."""

    def __init__(self, world: int, environment: dict[str, str] | None = None) -> None:
        context = multiprocessing.get_context("spawn")
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._pipes: list[Any] = []
        self._processes = []
        with _environment({"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **(environment or {})}):
            for rank in range(world):
                ours, theirs = context.Pipe()
                process = context.Process(target=_serve, args=(theirs, rank, world, self._store.port), daemon=True)
                process.start()
                theirs.close()
                self._pipes.append(ours)
                self._processes.append(process)

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(10)
            if process.is_alive():
                process.kill()

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """What the function returns on each rank; raises `CaseError` if it fails on any."""
        for pipe in self._pipes:
            pipe.send((function, args))
        results: list[Any] = []
        failures: list[str] = []
        for rank, pipe in enumerate(self._pipes):
            try:
                ok, result = pipe.recv() if pipe.poll(SECONDS) else (False, f"no answer within {SECONDS} s")
            except EOFError:
                ok, result = False, "the process ended"
            (results if ok else failures).append(result if ok else f"rank {rank}: {result}")
        if failures:
            raise CaseError("\n".join(failures))
        return results


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _serve(pipe: Connection, rank: int, world: int, port: int) -> None:
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, is_master=False)
    timeout = datetime.timedelta(seconds=SECONDS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timeout)
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, function(*args)))
        except Exception:
            pipe.send((False, traceback.format_exc()))


class Sample(NamedTuple):
    """Seconds of one call: by the clock, and of this process's CPU time."""

    wall: float
    cpu: float


def timed(run: Callable[[], Any], calls: int = 1) -> Sample:
    """The time of one call on this rank; all ranks start together."""
    dist.barrier()
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(calls):
        run()
    return Sample((time.perf_counter() - wall) / calls, (time.process_time() - cpu) / calls)


class Sent(NamedTuple):
    """What one rank sends to others in one call."""

    bytes: int
    messages: int


@contextlib.contextmanager
def counted() -> Iterator[Callable[[], Sent]]:
    """Count what this rank sends by all-to-all, point to point and all-reduce (as a ring: 2 (ranks - 1) / ranks of its bytes)."""
    sizes: list[int] = []
    all_to_all, batch, reduce = dist.all_to_all_single, dist.batch_isend_irecv, dist.all_reduce

    def count_all_to_all(
        output: Any, x: Any, output_splits: Any = None, input_splits: Any = None, **options: Any
    ) -> Any:
        row = x[0].numel() * x.element_size() if len(x) else 0
        rank = dist.get_rank(options.get("group"))
        sizes.extend(rows * row for other, rows in enumerate(input_splits) if other != rank and rows)
        return all_to_all(output, x, output_splits, input_splits, **options)

    def count_batch(operations: Any) -> Any:
        sizes.extend(op.tensor.numel() * op.tensor.element_size() for op in operations if op.op is dist.isend)
        return batch(operations)

    def count_reduce(x: Any, *args: Any, **options: Any) -> Any:
        ranks = dist.get_world_size(options.get("group"))
        sizes.extend([x.numel() * x.element_size() // ranks] * (2 * (ranks - 1)))
        return reduce(x, *args, **options)

    try:
        for name, function in (
            ("all_to_all_single", count_all_to_all),
            ("batch_isend_irecv", count_batch),
            ("all_reduce", count_reduce),
        ):
            setattr(dist, name, function)
        yield lambda: Sent(sum(sizes), len(sizes))
    finally:
        dist.all_to_all_single, dist.batch_isend_irecv, dist.all_reduce = all_to_all, batch, reduce
