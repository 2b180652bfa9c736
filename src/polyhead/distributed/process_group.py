"""The process group of a mesh; and `init_process_group` for ranks that torchrun starts again after a failure.

torchrun keeps one store over all its starts (pytorch/pytorch 135712), and the addresses in it outlive their ranks: a rank that is early
reads where another one listened before the failure, and the new start fails too.
"""

from __future__ import annotations

import datetime
import time

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from polyhead._checks import describe_type
from polyhead.distributed.agreement import name_ranks

# Seconds between two looks at the store.
_POLL_SECONDS = 0.05


def process_group(mesh: DeviceMesh | dist.ProcessGroup | None) -> dist.ProcessGroup:
    """The process group of a mesh of one dimension; None is the group of all ranks."""
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError("mesh needs ranks: call torch.distributed.init_process_group first, under torchrun")
    if mesh is None:
        assert dist.group.WORLD is not None
        return dist.group.WORLD
    if isinstance(mesh, DeviceMesh):
        if mesh.ndim != 1:
            raise ValueError(f'mesh must have one dimension, got {mesh}; pass one of them, such as mesh["items"]')
        return mesh.get_group()
    if not isinstance(mesh, dist.ProcessGroup):
        raise ValueError(f"mesh must be a DeviceMesh, a process group or None, got {describe_type(mesh)}")
    return mesh


def init_process_group(backend: str | None = None, *, timeout: datetime.timedelta) -> None:
    """torch's `init_process_group` under torchrun, in a part of the store that no earlier start has written to.

    Args:
        backend: "gloo", "nccl", …, as torch's; None chooses by device.
        timeout: of finding each other and of every collective.

    Raises:
        RuntimeError: some ranks did not come within the timeout. It names them.
    """
    store, rank, ranks = next(iter(rendezvous("env://", timeout=timeout)))
    own = separate_store(store, rank, ranks, timeout.total_seconds())
    dist.init_process_group(backend, store=own, rank=rank, world_size=ranks, timeout=timeout)


def separate_store(store: Store, rank: int, ranks: int, seconds: float) -> Store:
    """A part of a store for the ranks that are running now. Every rank must call it.

    Rank 0 numbers the starts. It tells the number to every ticket that it sees, until each rank has used it: tickets of ranks that
    are gone get an answer that nobody reads.
    """
    deadline = time.monotonic() + seconds
    if rank == 0:
        start = store.add("polyhead/starts", 1)
        missing = set(range(1, ranks))
        while missing:
            for other in missing:
                store.set(f"polyhead/start/{other}/{store.add(f'polyhead/ticket/{other}', 0)}", str(start))
            missing = {other for other in missing if not store.check([f"polyhead/came/{start}/{other}"])}
            _wait_a_little(deadline, sorted(missing), seconds)
    else:
        answer = f"polyhead/start/{rank}/{store.add(f'polyhead/ticket/{rank}', 1)}"
        while not store.check([answer]):
            _wait_a_little(deadline, [0], seconds)
        start = int(store.get(answer))
        store.set(f"polyhead/came/{start}/{rank}", "")
    return PrefixStore(f"polyhead/{start}", store)


def _wait_a_little(deadline: float, missing: list[int], seconds: float) -> None:
    if missing and time.monotonic() > deadline:
        raise RuntimeError(
            f"{name_ranks(missing)} did not come within {seconds:g} s; look at its log, then start again"
        )
    if missing:
        time.sleep(_POLL_SECONDS)
