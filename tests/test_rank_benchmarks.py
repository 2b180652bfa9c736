"""The table `distributed` compares before it times; plans for 1,024 ranks send what a neighbourhood requires. No test asserts on a time."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import distributed, rank_cases, thousand_ranks
from benchmarks.case import CaseError
from benchmarks.rank_pool import RankPool
from polyhead import Graph, Window
from polyhead.distributed import partition

RANKS, TOKENS = thousand_ranks.RANKS, thousand_ranks.TOKENS
OWN = TOKENS // RANKS


def test_a_case_is_compared_timed_and_counted() -> None:
    tokens = 512
    case = rank_cases.RankCase("small", None, partial(rank_cases.items, "window", True, tokens))
    with RankPool(2) as pool:
        line = distributed.measure_case(pool, case, 1)
    assert line.max_abs_diff < 1e-5
    assert min(line.one_ms, line.halves_ms, line.sharded_ms, line.sharded_cpu_ms) > 0
    # keys and values of what the first queries of the second rank see, and in one message
    first_query = tokens // 2
    keys = first_query - int(Window(256).interval(tokens, tokens, torch.device("cpu"))[0].flatten()[first_query])
    assert line.sent_mb == keys * 2 * rank_cases.HEADS * rank_cases.DIM * 4 / 1e6
    assert line.messages == 1


def test_a_wrong_result_gives_an_error_instead_of_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "TOLERANCE", 0.0)
    case = rank_cases.RankCase("small", None, partial(rank_cases.items, "window", False, 64))
    with RankPool(2) as pool, pytest.raises(CaseError, match="small: sharded results differ by"):
        distributed.measure_case(pool, case, 1)


@pytest.mark.parametrize("name", ["window", "documents"])
@pytest.mark.parametrize("rank", [0, 500, RANKS - 1])
def test_a_rank_of_many_sends_what_the_next_ones_see(name: str, rank: int) -> None:
    plan = thousand_ranks.plan_items(name, rank)
    document = rank_cases._documents(TOKENS)
    begin = torch.searchsorted(document, document)
    sent, messages = 0, 0
    for other in range(rank + 1, RANKS):
        # the first query of a rank sees furthest back
        query = other * OWN
        first = query - 256 if name == "window" else int(begin[query])
        rows = max(0, (rank + 1) * OWN - max(first, rank * OWN))
        sent, messages = sent + rows, messages + (rows > 0)
    assert (plan.transport, plan.sent_rows, plan.messages) == ("exchange", sent, messages)


def test_a_causal_ring_of_many_passes_each_key_to_the_last_who_sees_it() -> None:
    rank = RANKS // 2
    plan = thousand_ranks.plan_items("causal", rank)
    # keys go to lower ranks. All see the early stretch of each other rank, and the lower ones see the late stretch of the higher
    stretch = OWN // 2
    late = RANKS - rank
    assert (plan.transport, plan.sent_rows, plan.messages) == ("ring", (RANKS - 1 + late) * stretch, RANKS - 1)


def test_a_part_of_many_sends_each_row_once_to_each_part_that_needs_it() -> None:
    torch.manual_seed(0)
    nodes = 1 << 15
    graph = Graph(rank_cases.draw_clustered(nodes, 1 << 17, 32), nodes)
    parts = partition(graph, RANKS, method="contiguous")
    owner = parts.owner
    source, target = graph.edge_index
    needs = torch.stack((source, owner[target]))[:, owner[source] != owner[target]].unique(dim=1)
    for rank in (0, RANKS // 2, RANKS - 1):
        part = parts[rank]
        sent = needs[:, owner[needs[0]] == rank]
        assert len(part.send) == sent.shape[1]
        assert part.plan.messages == len(sent[1].unique())
        assert len(part.halo) == int((needs[1] == rank).sum())
