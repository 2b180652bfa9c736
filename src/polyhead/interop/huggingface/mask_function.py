"""The masks of transformers' models, read as neighbourhoods."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import CodeType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from polyhead._torch import values_unavailable
from polyhead.interop.huggingface.lazy_mask import Allowed, BoolMask, LazyMask
from polyhead.neighbourhood import Causal, Dense, Neighbourhood, Padding, Segments, Window


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    *,
    device: torch.device | str = "cpu",
    **options: Any,
) -> Tensor | None:
    """The mask of a model's attentions, called by transformers: lazy where it is understood, transformers' own elsewhere."""
    from transformers.masking_utils import causal_mask_function, sdpa_mask

    theirs: Any = sdpa_mask
    function = causal_mask_function if mask_function is None else mask_function
    # a step with a static cache may be compiled, and its mask has to be of one kind at every step
    fixed = q_length == 1 and not options.get("allow_is_causal_skip", True)
    # what is traced runs later, with other numbers
    traced = values_unavailable() or torch._C._is_tracing()
    if not fixed and not traced:
        place = _Place(batch_size, q_length, kv_length, int(q_offset), int(kv_offset), torch.device(device))
        lazy = _understood(function, attention_mask, place)
        if lazy is not None:
            return lazy
    made: Tensor | None = theirs(
        batch_size, q_length, kv_length, q_offset, kv_offset, function, attention_mask, device=device, **options
    )
    return made if made is None or fixed or traced else BoolMask(made)


class _Place(NamedTuple):
    """Where queries and keys stand: query number i at i + q_offset, key number j at j + kv_offset."""

    batch: int
    queries: int
    keys: int
    q_offset: int
    kv_offset: int
    device: torch.device

    @property
    def aligned(self) -> bool:
        """Whether the last query stands at the last key, as neighbourhoods count."""
        return self.q_offset + self.queries == self.kv_offset + self.keys and self.queries <= self.keys


def _understood(
    function: Callable[..., Any], attention_mask: Tensor | None, place: _Place, readers: _Readers | None = None
) -> LazyMask | None:
    """The mask that a function of transformers describes, with the padding of the batch; None where it is not known."""
    readers = _readers if readers is None else readers
    parts = list(_parts(function))
    known = [readers.get(getattr(part, "__code__", None)) for part in parts]
    causal = any(reader is _causal for reader in known)
    # nobody looks beyond the last query
    seen = min(place.keys, place.q_offset + place.queries - place.kv_offset) if causal else place.keys
    near = place._replace(keys=seen)
    over: Neighbourhood = Dense()
    for part, reader in zip(parts, known, strict=True):
        read = None if reader is None else reader(_enclosed(part), near)
        if read is None:
            return None
        over = over & read
    if attention_mask is not None:
        if attention_mask.dim() != 2 or len(attention_mask) != place.batch:
            return None
        keep = attention_mask[:, place.kv_offset : place.kv_offset + seen].to(place.device, torch.bool)
        keep = nn.functional.pad(keep, (0, seen - keep.shape[1]))
        if not keep.all():
            over = over & Padding(keep, queries=False)
    return LazyMask(Allowed(over, seen, (place.batch, 1, place.queries, place.keys), place.device))


_Reader = Callable[[dict[str, Any], _Place], Neighbourhood | None]
_Readers = dict[CodeType | None, _Reader]
# by the code of transformers' mask functions; filled by `learn`
_readers: _Readers = {}


def _parts(function: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """The functions that `and_masks` has joined; of any other, itself."""
    joined = getattr(function, "__qualname__", "") == "and_masks.<locals>.and_mask"
    for part in _enclosed(function).get("mask_functions", ()) if joined else ():
        yield from _parts(part)
    if not joined:
        yield function


def _enclosed(function: Any) -> dict[str, Any]:
    """The variables that a function has taken from around it."""
    cells = getattr(function, "__closure__", None) or ()
    return dict(zip(function.__code__.co_freevars, (cell.cell_contents for cell in cells), strict=True))


def _everyone(enclosed: dict[str, Any], place: _Place) -> Neighbourhood:
    return Dense()


def _causal(enclosed: dict[str, Any], place: _Place) -> Neighbourhood | None:
    return Causal() if place.aligned else None


def _window(enclosed: dict[str, Any], place: _Place) -> Neighbourhood | None:
    reach = enclosed["sliding_window"]
    if not place.aligned or reach < 1:
        return None
    return Dense() if reach >= place.keys else Window(reach - 1, place.keys)


def _both_ways(enclosed: dict[str, Any], place: _Place) -> Neighbourhood | None:
    reach = enclosed["sliding_window"]
    if not place.aligned or reach < 0:
        return None
    return Dense() if reach >= place.keys else Window(reach)


def _chunks(enclosed: dict[str, Any], place: _Place) -> Neighbourhood | None:
    first, size = enclosed["left_padding"].to(place.device), enclosed["chunk_size"]
    if not place.aligned or first.shape != (place.batch,):
        return None
    position = torch.arange(place.keys, device=place.device) + place.kv_offset
    number = (position - first[:, None]).div(size, rounding_mode="floor")
    return Dense() if bool((number[:, :1] == number[:, -1:]).all()) else Segments(number)


def _packed(enclosed: dict[str, Any], place: _Place) -> Neighbourhood | None:
    ids = enclosed["packed_sequence_mask"]
    if not place.aligned or place.kv_offset or ids.shape != (place.batch, place.keys):
        return None
    return Segments(ids.to(place.device))


def learn(masks: ModuleType) -> None:
    """Take note of the mask functions of transformers' `masking_utils` that can be read."""
    _readers.clear()
    _readers.update(_agreeing(masks))


def _agreeing(masks: ModuleType) -> _Readers:
    """The readers of those mask functions that do, in this version of transformers, what the readers say."""
    found: _Readers = {}
    ids = torch.tensor([[0, 0, 0, 1, 1, 2, 2]]).expand(2, -1)
    samples: tuple[tuple[str, tuple[Any, ...], _Reader], ...] = (
        ("bidirectional_mask_function", (), _everyone),
        ("causal_mask_function", (), _causal),
        ("sliding_window_overlay", (3,), _window),
        ("sliding_window_bidirectional_overlay", (2,), _both_ways),
        ("chunked_overlay", (3, torch.tensor([0, 2])), _chunks),
        ("packed_sequence_mask_function", (ids,), _packed),
    )
    for name, arguments, reader in samples:
        function = getattr(masks, name, None)
        if function is not None:
            function = function(*arguments) if arguments else function
            if _agrees(masks, function, {function.__code__: reader}):
                found[function.__code__] = reader
    return found


def _agrees(masks: ModuleType, function: Callable[..., Any], readers: _Readers) -> bool:
    """Whether a reader gives, for a small example, the mask that transformers builds."""
    keep = torch.tensor([[0, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 0]]).bool()
    place = _Place(2, 7, 7, 0, 0, torch.device("cpu"))
    theirs = masks.sdpa_mask(*place[:5], function, keep, allow_is_causal_skip=False)
    try:
        ours = _understood(function, keep, place, readers)
    # what such a function encloses may have got another name
    except KeyError:
        return False
    return ours is not None and torch.equal(ours.allowed.numbers(), theirs)
