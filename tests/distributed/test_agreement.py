"""Ranks that were given different arguments get the same error; ranks that were given the same get none."""

import datetime
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from rank_pool import run_on_threads

from polyhead import Causal, Dense, Graph, Grid, Mask, Padding, Segments, Window
from polyhead.distributed import agreement
from polyhead.distributed.agreement import check_agreement, fingerprint, name_ranks


def error_of(what, by_rank, group=None):
    """The error of this rank, whose values are `what` updated by those of its rank."""
    try:
        check_agreement(group, what | by_rank.get(dist.get_rank(), {}))
    except ValueError as error:
        return str(error)
    return None


def error_with_version_of_rank(module, version):
    """The error where rank 1 has another version of torch or polyhead."""
    if dist.get_rank() != 1:
        return error_of({}, {})
    torch_version = mock.patch.object(torch, "__version__", version)
    with torch_version if module == "torch" else mock.patch.object(agreement, "version", lambda _: version):
        return error_of({}, {})


def error_of_neighbourhoods(overs):
    return error_of({"over": fingerprint(overs[dist.get_rank()])}, {})


def errors_in_subgroups():
    """Ranks 0 and 2 differ from 1 and 3, but not within their groups; then ranks 2 and 3 differ."""
    evens, odds = dist.new_group([0, 2]), dist.new_group([1, 3])
    group = evens if dist.get_rank() % 2 == 0 else odds
    agreed = error_of({"parity": str(dist.get_rank() % 2)}, {}, group)
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    return agreed, error_of({"heads": "4"}, {3: {"heads": "8"}}, pairs[dist.get_rank() // 2])


def bytes_sent(what):
    """The bytes of each all-gather that a check runs."""
    sent = []
    original = dist.all_gather

    def count(outputs, own, group=None):
        sent.append(own.numel())
        return original(outputs, own, group=group)

    with mock.patch.object(dist, "all_gather", count):
        check_agreement(None, what)
    return sent


def test_equal_values_give_no_error(two_ranks):
    assert two_ranks.run(error_of, {"over": "Causal()", "dtype": "torch.float32"}, {}) == [None, None]


def test_one_small_collective(two_ranks):
    assert two_ranks.run(bytes_sent, {"over": "x" * 10_000}) == [[24], [24]]


def test_other_values_give_the_same_error_on_every_rank(two_ranks):
    dtypes = {0: {"dtype": "torch.float32"}, 1: {"dtype": "torch.bfloat16"}}
    expected = "dtype must be the same on every rank, got torch.float32 on rank 0, torch.bfloat16 on rank 1; pass the same to all"
    assert two_ranks.run(error_of, {"over": "Causal()"}, dtypes) == [expected] * 2


def test_two_arguments_that_differ_are_both_named(two_ranks):
    (error, other) = two_ranks.run(
        error_of, {"length": "8", "order": "zigzag"}, {1: {"length": "9", "order": "contiguous"}}
    )
    assert error == other
    assert "length must be the same on every rank, got 8 on rank 0, 9 on rank 1" in error
    assert "order must be the same on every rank, got zigzag on rank 0, contiguous on rank 1" in error


def test_an_argument_that_one_rank_lacks_is_named(two_ranks):
    errors = two_ranks.run(error_of, {}, {1: {"bias": "yes"}})
    assert (
        errors
        == ["bias must be the same on every rank, got nothing on rank 0, yes on rank 1; pass the same to all"] * 2
    )


def test_values_that_differ_at_their_end_are_noticed(two_ranks):
    errors = two_ranks.run(error_of, {"over": "x" * 5000 + "a"}, {1: {"over": "x" * 5000 + "b"}})
    assert errors[0] == errors[1] and "beyond their first 120 characters" in errors[0]


@pytest.mark.parametrize("module", ["torch", "polyhead"])
def test_other_versions_are_named_on_every_rank(module, two_ranks):
    errors = two_ranks.run(error_with_version_of_rank, module, "2.8.0+other")
    assert errors[0] == errors[1]
    assert f"{module} must be the same on every rank" in errors[0]
    assert "2.8.0+other on rank 1; install the same version on all" in errors[0]


def test_neighbourhoods_that_differ_give_the_same_error_on_every_rank(two_ranks):
    errors = two_ranks.run(error_of_neighbourhoods, [Causal() & Window(3), Causal() & Window(4)])
    assert errors[0] == errors[1]
    assert errors[0].startswith("over must be the same on every rank, got ")
    assert "on rank 0" in errors[0] and "on rank 1" in errors[0]
    lengths = [Padding(torch.tensor([3, 5])), Padding(torch.tensor([3, 5]))]
    assert two_ranks.run(error_of_neighbourhoods, lengths) == [None, None]


def test_groups_are_compared_by_themselves(four_ranks):
    agreed, different = zip(*four_ranks.run(errors_in_subgroups), strict=True)
    assert agreed == (None,) * 4
    error = "heads must be the same on every rank, got 4 on rank 2, 8 on rank 3; pass the same to all"
    assert different == (None, None, error, error)


def test_eight_ranks_name_the_one_that_differs():
    errors = run_on_threads(error_of, 8, {"length": "8"}, {5: {"length": "7"}})
    error = (
        "length must be the same on every rank, got 8 on ranks 0, 1, 2, 3, 4, 6, 7, 7 on rank 5; pass the same to all"
    )
    assert errors == [error] * 8


def test_a_group_of_one_needs_no_collective():
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=datetime.timedelta(seconds=5))
    try:
        with mock.patch.object(dist, "all_gather", side_effect=AssertionError):
            check_agreement(None, {"over": fingerprint(Causal())})
    finally:
        dist.destroy_process_group()


EDGES = torch.tensor([[0, 1, 2], [1, 2, 0]])
DIFFERENT = [
    Dense(),
    Causal(),
    Window(3),
    Window(3, 2),
    Window(4),
    Causal() & Window(3),
    Causal() & Window(4),
    Padding(torch.tensor([3, 5])),
    Padding(torch.tensor([5, 3])),
    Causal() & Padding(torch.tensor([3, 5])),
    Segments(torch.tensor([0, 0, 1])),
    Segments(torch.tensor([0, 1, 1])),
    Segments(torch.tensor([], dtype=torch.long)),
    Segments(torch.zeros(2, 0, dtype=torch.long)),
    Mask(torch.eye(3, dtype=torch.bool)),
    Mask(torch.eye(3, dtype=torch.bool).flip(0)),
    Graph(EDGES, 3),
    Graph(EDGES, 4),
    Graph(EDGES.flip(0), 3),
    Graph(EDGES, 3, weights=torch.ones(3)),
    Graph(EDGES, 3, weights=torch.ones(3, dtype=torch.float64)),
    Graph(torch.empty(2, 0, dtype=torch.long), 3),
    Grid((4, 4)),
    Grid((4, 4), window=3),
    Grid((2, 8), window=3),
]


def test_fingerprints_of_different_neighbourhoods_differ():
    assert len({fingerprint(over).rpartition("#")[2] for over in DIFFERENT}) == len(DIFFERENT)


def test_fingerprints_do_not_depend_on_storage():
    ids = torch.tensor([[0, 0, 1], [0, 1, 1]])
    strided = torch.tensor([[0, 0], [0, 1], [1, 1]]).t()
    assert not strided.is_contiguous() and fingerprint(Segments(ids)) == fingerprint(Segments(strided))
    keep = torch.eye(3, dtype=torch.bool)[None, None]
    assert fingerprint(Mask(keep.expand(2, 4, 3, 3))) == fingerprint(Mask(keep.repeat(2, 4, 1, 1)))


def test_large_tensors_are_hashed_in_parts(monkeypatch):
    ids = torch.arange(24).view(2, 12) // 5
    whole = fingerprint(Segments(ids))
    for elements in (1, 5, 12, 23):
        monkeypatch.setattr("polyhead.distributed.agreement._HASHED_ELEMENTS", elements)
        assert fingerprint(Segments(ids)) == whole


@pytest.mark.parametrize(
    ("ranks", "text"), [([3], "rank 3"), ([0, 2], "ranks 0, 2"), ([4, 5], "ranks 4, 5"), ([4, 5, 6], "ranks 4 to 6")]
)
def test_ranks_are_named(ranks, text):
    assert name_ranks(ranks) == text
