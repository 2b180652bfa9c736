"""Ranks that are started again find each other, whatever the ranks before them have left in the store."""

import datetime
import threading

import pytest
import torch.distributed as dist

from polyhead.distributed import RankWatch
from polyhead.distributed.process_group import separate_store


@pytest.fixture
def connect():
    """A connection to one store, for each rank its own."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return lambda: dist.TCPStore("127.0.0.1", server.port, is_master=False, timeout=datetime.timedelta(seconds=20))


def start(connect, present, ranks=4, seconds=20.0):
    """The store or the error of each rank that comes."""
    results = {}

    def run(rank):
        try:
            results[rank] = separate_store(connect(), rank, ranks, seconds)
        except RuntimeError as error:
            results[rank] = str(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in present]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_a_start_sees_nothing_of_the_one_before(connect):
    for number in range(3):
        stores = start(connect, range(4))
        assert not any(store.check([f"address/{rank}"]) for rank, store in stores.items())
        for rank, store in stores.items():
            store.set(f"address/{rank}", str(number))
        assert [stores[3].get(f"address/{rank}") for rank in range(4)] == [str(number).encode()] * 4


def test_ranks_that_were_lost_on_the_way_do_not_hinder_the_next_start(connect):
    # rank 2 is lost before it comes, rank 0 before it answers
    assert (
        start(connect, [0, 1, 3], seconds=0.5)[0]
        == "rank 2 did not come within 0.5 s; look at its log, then start again"
    )
    assert (
        start(connect, [1, 2], seconds=0.5)[2] == "rank 0 did not come within 0.5 s; look at its log, then start again"
    )
    stores = start(connect, range(4))
    stores[1].set("a", "1")
    assert all(store.check(["a"]) for store in stores.values())


def test_entries_of_ranks_before_are_not_taken_for_those_of_today():
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    RankWatch(5).close()
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        with pytest.raises(RuntimeError, match=r"use polyhead\.distributed\.init_process_group"):
            RankWatch(5)
    finally:
        dist.destroy_process_group()
