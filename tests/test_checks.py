"""The checks of public integers, numbers and tensors: accepted values, refused values, and messages."""

import numpy as np
import pytest
import torch

from polyhead._checks import (
    LARGEST_INT32,
    WrongType,
    check_dense_tensor,
    check_integer,
    check_number,
    count_of,
    is_integer,
    short_repr,
)


@pytest.mark.parametrize("value", [3, np.int8(3), np.uint64(3), np.array(3), torch.tensor(3), torch.tensor([3])])
def test_integers_of_every_kind_become_python_integers(value):
    assert is_integer(value)
    assert check_integer("n", value) == 3
    assert type(check_integer("n", value)) is int


@pytest.mark.parametrize(
    "value",
    [True, np.True_, torch.tensor(True), 3.0, np.float64(3), "3", None, [3], torch.tensor(3.0), torch.tensor([1, 2]), int],
)  # fmt: skip
def test_other_types_raise_type_error_and_value_error(value):
    assert not is_integer(value)
    for kind in (TypeError, ValueError):
        with pytest.raises(kind, match=r"^n must be an integer in \[1, 2147483647\], got "):
            check_integer("n", value)


@pytest.mark.parametrize("value", [0, -1, LARGEST_INT32 + 1, 2**62, 2**64, 10**5000, np.int64(-1)], ids=short_repr)
def test_integer_out_of_range_raises_value_error_only(value):
    with pytest.raises(ValueError, match=r"^n must be an integer in \[1, 2147483647\], got .{1,60}; try 1$") as raised:
        check_integer("n", value, hint="try 1")
    assert not isinstance(raised.value, TypeError)


def test_numbers_and_interval_ends():
    assert check_number("x", 0, 0, 1, "[)") == 0
    assert check_number("x", np.float32(0.5), 0, 1, "[)") == 0.5
    assert check_number("x", float("inf"), 0) == float("inf")
    for value, ends in ((1.0, "[)"), (0.0, "(]"), (float("nan"), "[]"), (-0.1, "[]"), (2**70, "[]")):
        with pytest.raises(ValueError, match=rf"^x must be a number in \{ends[0]}0, 1\{ends[1]}, got ") as raised:
            check_number("x", value, 0, 1, ends)
        assert not isinstance(raised.value, WrongType)
    for value in (True, "1", None, [1.0], 1j, torch.tensor([1.0, 2.0])):
        with pytest.raises(WrongType, match=r"^x must be a number in \[0, 1\], got "):
            check_number("x", value, 0, 1)


def test_only_dense_tensors_are_accepted():
    x = torch.ones(2, 3)
    assert check_dense_tensor("x", x, "(items, 3)") is x
    for value, words in (
        (None, "got None"),
        ([[1.0]], "got list"),
        (torch.Tensor, "got the class Tensor"),
        (np.ones((2, 3)), r"got ndarray of float64 and shape \(2, 3\); try 1"),
    ):
        with pytest.raises(TypeError, match=rf"^x must be a tensor \(items, 3\), {words}"):
            check_dense_tensor("x", value, "(items, 3)", hint="try 1")
    with pytest.raises(ValueError, match=r"^x must be a dense tensor \(items, 3\), got layout torch.sparse_coo"):
        check_dense_tensor("x", x.to_sparse(), "(items, 3)")


def test_values_in_messages_are_short():
    class Broken:
        def __repr__(self):
            raise RuntimeError

    assert short_repr(-1) == "-1"
    assert short_repr("a\nb") == r"'a\nb'"
    assert short_repr(10**5000) == "int"
    assert short_repr(Broken()) == "Broken"
    assert short_repr(torch.ones(2, 3)) == "Tensor of torch.float32 and shape (2, 3)"
    assert len(short_repr(list(range(10_000)))) == 60


def test_one_thing_is_not_several():
    assert [count_of(n, "rank") for n in (0, 1, 2)] == ["0 ranks", "1 rank", "2 ranks"]
