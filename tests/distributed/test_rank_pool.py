"""The pools of ranks themselves: results by rank, and failures that are reported."""

import pytest
import torch
import torch.distributed as dist
from rank_pool import run_on_threads


def sum_of_ranks():
    x = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(x)
    return x.item(), dist.get_rank()


def fail_on_last_rank():
    if dist.get_rank() == dist.get_world_size() - 1:
        raise ValueError("the last rank fails")
    return 0


@pytest.mark.parametrize("ranks", ["two_ranks", "four_ranks"])
def test_processes_run_together(ranks, request):
    pool = request.getfixturevalue(ranks)
    world = pool.world
    assert pool.run(sum_of_ranks) == [(world * (world - 1) / 2, rank) for rank in range(world)]


def test_failures_name_their_rank(two_ranks):
    with pytest.raises(AssertionError, match=r"rank 1: (.|\n)*the last rank fails"):
        two_ranks.run(fail_on_last_rank)
    assert two_ranks.run(sum_of_ranks)[0] == (1.0, 0)


def test_eight_ranks_by_threads():
    assert run_on_threads(sum_of_ranks, 8) == [(28.0, rank) for rank in range(8)]
