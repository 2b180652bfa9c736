"""Ranks for tests: processes that are started once per file and run many functions, and threads where processes are too many."""

from __future__ import annotations

import datetime
import multiprocessing
import threading
import traceback
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

# what the ranks would otherwise import one by one; optimizers and FSDP2 import the compiler
_PRELOADED = ["torch._dynamo", "torch.distributed.fsdp", "torch.distributed.checkpoint.state_dict", "polyhead.models"]
# how long one function may take on all ranks, and how long a collective waits for a missing rank
TEST_SECONDS, COLLECTIVE_SECONDS = 120, 60


class RankPool:
    """`world` processes joined by gloo on the loopback interface. `run(function, *args)` runs a function on all of them."""

    def __init__(self, world: int, seconds: float = COLLECTIVE_SECONDS) -> None:
        # one server imports torch once; the ranks are forks of it
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOADED)
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._store, self.world = store, world
        self._pipes, self._processes = [], []
        for rank in range(world):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank, world, store.port, seconds), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, function: Any, *args: Any) -> list[Any]:
        """What `function(*args)` returns on each rank, in the order of ranks. Raises where it fails on any."""
        for pipe in self._pipes:
            pipe.send((function, args))
        results, failures = [], []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(TEST_SECONDS):
                self.close()
                raise TimeoutError(f"rank {rank} did not answer within {TEST_SECONDS} s; others: {failures}")
            try:
                ok, result = pipe.recv()
            except EOFError:
                ok, result = False, "the process ended"
            (results if ok else failures).append(result if ok else f"rank {rank}: {result}")
        if failures:
            raise AssertionError("\n".join(failures))
        return results

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(5)
            if process.is_alive():
                process.kill()


def _serve(pipe: Connection, rank: int, world: int, port: int, seconds: float) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    timeout = datetime.timedelta(seconds=seconds)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timeout)
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        torch.manual_seed(0)
        torch.set_default_dtype(torch.float32)
        try:
            pipe.send((True, function(*args)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))


def run_on_threads(function: Any, world: int, *args: Any) -> list[Any]:
    """What `function(*args)` returns on each of `world` ranks that are threads of this process."""
    from torch.testing._internal.distributed.multi_threaded_pg import (
        ProcessLocalGroup,
        _install_threaded_pg,
        _uninstall_threaded_pg,
    )

    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    _install_threaded_pg()
    store = dist.HashStore()
    results: list[Any] = [None] * world
    failures: list[str] = []

    def work(rank: int) -> None:
        dist.init_process_group("threaded", rank=rank, world_size=world, store=store)
        try:
            results[rank] = function(*args)
        except BaseException as error:
            failures.append(f"rank {rank}: {traceback.format_exc()}")
            ProcessLocalGroup.exception_handle(error)
        finally:
            dist.destroy_process_group()

    try:
        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(world)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(TEST_SECONDS)
    finally:
        _uninstall_threaded_pg()
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
    if failures:
        raise AssertionError("\n".join(failures))
    return results
