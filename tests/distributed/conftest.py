"""Pools of ranks, each started once per file."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from rank_pool import RankPool

# c10d looks up the name of each rank that connects: where no name server answers, that takes ten seconds unless it is told to be short
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[RankPool]:
    pool = RankPool(2)
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def four_ranks() -> Iterator[RankPool]:
    pool = RankPool(4)
    yield pool
    pool.close()
