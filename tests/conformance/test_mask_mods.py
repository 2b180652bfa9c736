"""Every neighbourhood's mask_mod equals its mask, pair by pair."""

from __future__ import annotations

import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from table import LAYOUTS, NEIGHBOURHOODS
from test_grids import GRIDS, HEADS
from test_properties import expressions
from torch.nn.attention.flex_attention import create_mask

from polyhead import Causal, Grid, Mask, Neighbourhood, Padding, Segments, Window
from polyhead.neighbourhood import BatchRows, Sizes, mask_mods

CPU = torch.device("cpu")


def check(over: Neighbourhood, sizes: Sizes) -> None:
    shape = (*sizes.batch, sizes.heads, sizes.queries, sizes.keys)
    expected = over.mask(sizes, CPU).expand(shape)
    rows = torch.Size(sizes.batch).numel()
    got = create_mask(over.mask_mod(sizes, CPU), rows, *shape[-3:], device="cpu")
    assert torch.equal(got.reshape(shape), expected), over


@pytest.mark.parametrize("layout", ["more-keys", "more-queries", "two-batches"])
@pytest.mark.parametrize("name", NEIGHBOURHOODS)
def test_along_a_sequence(name: str, layout: str):
    torch.manual_seed(0)
    shape = LAYOUTS[layout]
    check(NEIGHBOURHOODS[name](shape), Sizes(shape.batch, shape.heads, shape.queries, shape.keys))


@pytest.mark.parametrize("name", GRIDS)
def test_on_a_grid(name: str):
    over = GRIDS[name]()
    lattice = over.lattice
    queries, keys = (torch.Size(axes).numel() + lattice.prefix for axes in (lattice.outputs, lattice.sizes))
    check(over, Sizes((2,), HEADS, queries, keys))


@settings(max_examples=15, deadline=None)
@given(data=st.data(), size=st.tuples(st.integers(1, 3), st.sampled_from([1, 5, 33]), st.sampled_from([1, 3, 34])))
def test_expressions(data: st.DataObject, size: tuple[int, int, int]):
    batch, queries, keys = size
    over, _ = data.draw(expressions(batch, queries, keys))
    check(over, Sizes((batch,), 2, queries, keys))


class Dilated(Neighbourhood):
    """A class of a user's: its mask_mod is the default."""

    def allows(self, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return (key - query) % 3 == head % 2


def test_classes_that_users_write():
    check(Dilated(), Sizes((2, 2), 3, 7, 11))
    check(Causal() & Dilated(), Sizes((2,), 3, 11, 11))


def test_rows_of_a_batch():
    torch.manual_seed(0)
    for over in (Padding(torch.randint(0, 9, (4, 3))), Segments(torch.randint(0, 2, (4, 3, 9))), Causal()):
        check(over.select_batch_rows((4, 3), (slice(1, 3), slice(None))), Sizes((2, 3), 2, 9, 9))
        check(BatchRows(over, (4, 3), (slice(0, 4, 2), slice(2, 3))), Sizes((2, 1), 2, 9, 9))


def test_windows_larger_than_any_sequence():
    check(Window(sys.maxsize, 0), Sizes((1,), 1, 9, 9))
    check(Window(0, sys.maxsize), Sizes((1,), 1, 4, 9))
    ends = Window(sys.maxsize).mask_mod(Sizes((), 1, 2**29, 2**29), CPU)
    last = torch.tensor(2**29 - 1, dtype=torch.int32)
    assert ends(last, last, last, torch.zeros_like(last)) and ends(last, last, torch.zeros_like(last), last)


def test_masks_that_broadcast():
    torch.manual_seed(0)
    for shape in ((1, 1, 9), (3, 1, 9), (2, 1, 1, 9), (2, 3, 1, 9), (1, 1, 7, 9), (2, 3, 7, 9)):
        check(Mask(torch.rand(shape) > 0.5), Sizes((2,), 3, 7, 9))


def test_numbers_are_kept_between_calls():
    """A second call of the same size fills no tensors; their number is bounded."""
    sizes = Sizes((1,), 1, 35, 35)
    Grid(5, 7, window=3).mask_mod(sizes, CPU)
    kept = dict(mask_mods._kept_numbers)
    Grid(5, 7, window=3).mask_mod(sizes, CPU)
    assert mask_mods._kept_numbers.keys() == kept.keys()
    for left in range(2 * mask_mods._MAX_KEPT_NUMBERS):
        Window(left).mask_mod(sizes, CPU)
    assert len(mask_mods._kept_numbers) <= mask_mods._MAX_KEPT_NUMBERS


def test_numbers_from_inference_mode_can_be_saved_for_backward():
    mask_mods._kept_numbers.clear()
    with torch.inference_mode():
        Causal().mask_mod(Sizes((1,), 1, 5, 9), CPU)
    ((number,),) = mask_mods._kept_numbers.values()
    assert not number.is_inference()
