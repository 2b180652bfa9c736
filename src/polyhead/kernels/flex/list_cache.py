"""Keeps the block lists of a neighbourhood, so that the layers of a model and the steps of a training share them."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Hashable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from polyhead._torch import can_keep_tensors, current_stream_id
from polyhead.kernels.call import Call, key_intervals
from polyhead.kernels.flex.block_lists import BlockLists, make_block_lists
from polyhead.neighbourhood import Neighbourhood

MAX_KEPT = 64


class _Kept(NamedTuple):
    tensors: tuple[weakref.ref[Tensor], ...]
    versions: tuple[int, ...]
    lists: BlockLists


_kept: OrderedDict[Hashable, _Kept] = OrderedDict()


def block_lists_of(call: Call) -> BlockLists:
    """The block lists of a call: those of an earlier one, if its neighbourhood had the same fields and unchanged tensors.

    A tensor is unchanged if torch counted no write to it; writes through `.data` and NumPy are not counted.
    """
    # dropout differs in every pair
    with_full = call.dropout == 0
    interval_of = lambda part: key_intervals(call._replace(over=part))
    make = lambda: make_block_lists(call.over, interval_of, call.sizes.keys, with_full=with_full)
    fields = list(_fields(call.over)) if can_keep_tensors(call.q.device) else [None]
    if any(field is None for field in fields):
        return make()
    tensors = tuple(x for x in fields if isinstance(x, Tensor))
    key = (
        tuple(id(x) if isinstance(x, Tensor) else x for x in fields),
        (call.sizes.batch, *call.sizes[2:], call.q.device, current_stream_id(call.q.device), with_full),
    )
    versions = tuple(x._version for x in tensors)
    # taken out and put back as the newest, so that other threads cannot remove it in between
    found = _kept.pop(key, None)
    if (
        found is not None
        and found.versions == versions
        and all(a() is b for a, b in zip(found.tensors, tensors, strict=True))
    ):
        _kept[key] = found
        return found.lists
    # tensors made in inference mode could not be saved for a backward pass later
    with torch.inference_mode(False), torch.no_grad():
        lists = make()
    _kept[key] = _Kept(tuple(weakref.ref(x, lambda _: _kept.pop(key, None)) for x in tensors), versions, lists)
    while len(_kept) > MAX_KEPT:
        _kept.popitem(last=False)
    return lists


def _fields(over: Neighbourhood) -> Iterator[Any]:
    """What the allowed pairs depend on: types, numbers and tensors; None if that cannot be known."""
    if type(over).__module__.partition(".")[0] != "polyhead":
        # a class of a user's may keep anything anywhere
        yield None
        return
    yield type(over)
    for name, value in vars(over).items():
        yield name
        yield from _flatten(value)


def _flatten(value: object) -> Iterator[Any]:
    if isinstance(value, Neighbourhood):
        yield from _fields(value)
    elif isinstance(value, (tuple, list)):
        yield len(value)
        for item in value:
            yield from _flatten(item)
    elif isinstance(value, Tensor):
        yield None if value.is_inference() else value
    elif value is None:
        yield type(None)
    elif isinstance(value, slice):
        # not hashable before Python 3.12
        yield slice
        yield from _flatten((value.start, value.stop, value.step))
    else:
        yield value if isinstance(value, (int, float, str)) else None
