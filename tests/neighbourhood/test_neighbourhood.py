"""Masks of neighbourhoods in small pictures, and error messages."""

import pytest
import torch

from polyhead import Causal, Dense, Mask, Padding, Segments, Window, attend
from polyhead.neighbourhood import Sizes

CPU = torch.device("cpu")


def picture(over, queries, keys, batch=(), heads=1):
    sizes = Sizes(batch, heads, queries, keys)
    over.check(sizes)
    mask = over.mask(sizes, CPU).expand(*batch, heads, queries, keys)
    return ["".join(".x"[int(x)] for x in row) for row in mask.reshape(-1, keys)]


def test_causal_is_aligned_lower_right():
    assert picture(Causal(), 3, 5) == ["xxx..", "xxxx.", "xxxxx"]
    assert picture(Causal(), 4, 2) == ["..", "..", "x.", "xx"]


def test_window_includes_self_and_both_sides():
    assert picture(Window(1), 4, 4) == ["xx..", "xxx.", ".xxx", "..xx"]
    assert picture(Window(0, 2), 3, 3) == ["xxx", ".xx", "..x"]


def test_padding_right_left_and_of_queries():
    assert picture(Padding(torch.tensor([2])), 2, 3, (1,)) == ["xx.", "xx."]
    assert picture(Padding([2], queries=True), 3, 3, (1,)) == ["xx.", "xx.", "..."]
    left = torch.tensor([[False, True, True]])
    assert picture(Padding(left, queries=True), 3, 3, (1,)) == ["...", ".xx", ".xx"]
    # the queries of a decoding step are the last keys
    assert picture(Padding(left, queries=True), 1, 3, (1,)) == [".xx"]


def test_segments_of_keys_and_of_queries():
    assert picture(Segments(torch.tensor([0, 0, 1])), 3, 3) == ["xx.", "xx.", "..x"]
    assert picture(Segments(torch.tensor([0, 0, 1]), torch.tensor([1, 7])), 2, 3) == ["..x", "..."]


def test_an_intersection_allows_what_every_part_allows():
    over = Causal() & Window(1) & Padding(torch.tensor([3]))
    assert picture(over, 4, 4, (1,)) == ["x...", "xx..", ".xx.", "..x."]
    assert repr(Dense() & Causal()) == "Causal()"
    assert isinstance(Dense() & Dense(), Dense)
    assert repr(Causal() & Window(2)) == "Causal() & Window(left=2, right=2)"
    with pytest.raises(TypeError):
        Causal() & 3


def test_masks_may_differ_by_head():
    keep = torch.tensor([[[True, False]], [[False, True]]])
    assert picture(Mask(keep), 1, 2, (), 2) == ["x.", ".x"]


def call(over, batch=3, heads=4, queries=5, keys=7):
    q, k = torch.randn(batch, heads, queries, 2), torch.randn(batch, heads, keys, 2)
    return attend(q, k, k, over=over)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Window(-1), r"Window: left must be an integer in \[0, 9223372036854775807\], got -1"),
        (lambda: Window(2, -3), r"Window: right must be an integer in \[0, 9223372036854775807\], got -3"),
        (lambda: Window(1.5), r"Window: left must be an integer in \[0, 9223372036854775807\], got 1\.5"),
        (
            lambda: Padding(torch.tensor([1.0])),
            r"Padding: lengths_or_keep must be a tensor of integer lengths, or of bool \(\.\.\., keys\) that is True where a key is real, got Tensor of torch\.float32 and shape \(1,\)",
        ),
        (lambda: Padding([-1]), r"Padding: lengths must be 0 or more, got -1"),
        (lambda: call(Padding([1, 8, 2])), r"Padding: lengths must be at most the number of keys, 7, got 8"),
        (lambda: call(Padding([1, 2])), r"Padding: its leading axes must broadcast to the batch \(3,\), got \(2,\)"),
        (lambda: call(Padding(torch.ones(3, 6).bool())), r"Padding: keep must cover 7 keys, got 6"),
        (
            lambda: Segments(torch.rand(3)),
            r"Segments: ids must be a tensor of integers \(\.\.\., items\), got Tensor of torch\.float32 and shape \(3,\)",
        ),
        (lambda: call(Segments(torch.zeros(6).long())), r"Segments: ids must cover 7 keys, got 6"),
        (
            lambda: call(Segments(torch.zeros(7).long(), torch.zeros(4).long())),
            r"Segments: query_ids must cover 5 queries, got 4",
        ),
        (
            lambda: call(Segments(torch.zeros(5).long()), queries=7, keys=5),
            r"Segments: the queries must be among the 5 keys, got 7 queries; pass their ids as query_ids",
        ),
        (
            lambda: call(torch.zeros(5, 7)),
            r"Mask: keep must be bool.*got torch.float32; .*pass bias=.*keep == 0",
        ),
        (
            lambda: call(torch.ones(5, 7).int()),
            r"Mask: keep must be bool, .*got torch.int32; for a mask of 0 and 1 .*pass keep\.bool\(\), for lengths Padding",
        ),
        (
            lambda: call(torch.ones(7).bool()),
            r"Mask: keep must have shape \(..., queries, keys\), got \(7,\); .*Padding",
        ),
        (
            lambda: call(torch.ones(3, 7).bool()),
            r"looks like \(batch, keys\).*use Padding\(keep\), True = a real key.*Padding\(~mask\)",
        ),
        (lambda: call(torch.ones(3, 5, 7).bool()), r"looks like \(batch, queries, keys\); keep\.unsqueeze\(1\)"),
        (
            lambda: call(torch.ones(4, 5, 7).bool(), batch=4),
            r"where batch and heads have the same size, got \(4, 5, 7\).*unsqueeze\(1\).*keep\[None\]",
        ),
        (
            lambda: call(torch.ones(5, 6).bool()),
            r"Mask: keep must broadcast to .* = \(3, 4, 5, 7\), got shape \(5, 6\)",
        ),
        (lambda: call(torch.ones(12, 5, 7).bool()), r"splits batch and heads"),
        (lambda: call(torch.tensor([[3, 4, 5]])), r"for lengths Padding\(lengths\)"),
        (lambda: call(Causal), r"over must be a neighbourhood such as Causal\(\) .*, got the class Causal"),
        (lambda: call("causal"), r"over must be a neighbourhood such as Causal\(\) .*, got str"),
    ],
)
def test_invalid_arguments_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
