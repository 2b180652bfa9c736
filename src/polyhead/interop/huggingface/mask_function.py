"""Read the masks of transformers' models as neighbourhoods."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import CodeType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from polyhead._torch import is_tracing_or_dataless
from polyhead.interop.huggingface.lazy_mask import ConditionMask, LazyMask, LazyMaskState
from polyhead.neighbourhood import Causal, Dense, Neighbourhood, Padding, Segments, Window


def polyhead_mask(
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
    """The mask function that transformers calls: returns a lazy mask if it can read the function, otherwise transformers' own."""
    from transformers.masking_utils import causal_mask_function, sdpa_mask

    theirs: Any = sdpa_mask
    function = causal_mask_function if mask_function is None else mask_function
    # a step with a static cache may be compiled, so its mask must have the same type at every step
    static_step = q_length == 1 and not options.get("allow_is_causal_skip", True)
    # traced code runs later, with other values
    traced = is_tracing_or_dataless() or torch._C._is_tracing()
    if not static_step and not traced:
        extent = _MaskExtent(batch_size, q_length, kv_length, int(q_offset), int(kv_offset), torch.device(device))
        lazy = _read_mask_function(function, attention_mask, extent)
        if lazy is not None:
            return lazy
    made: Tensor | None = theirs(
        batch_size, q_length, kv_length, q_offset, kv_offset, function, attention_mask, device=device, **options
    )
    return made if made is None or static_step or traced else ConditionMask(made)


class _MaskExtent(NamedTuple):
    """The sizes and offsets of a mask: query i has position i + q_offset, key j has position j + kv_offset."""

    batch: int
    queries: int
    keys: int
    q_offset: int
    kv_offset: int
    device: torch.device

    @property
    def aligned(self) -> bool:
        """Whether the last query and the last key have the same position, as in our neighbourhoods."""
        return self.q_offset + self.queries == self.kv_offset + self.keys and self.queries <= self.keys


def _read_mask_function(
    function: Callable[..., Any],
    attention_mask: Tensor | None,
    extent: _MaskExtent,
    readers: _ReaderByCode | None = None,
) -> LazyMask | None:
    """The mask of a mask function of transformers, with the padding of the batch; None if the function is unknown."""
    readers = _reader_by_code if readers is None else readers
    parts = list(_split_and_masks(function))
    known = [readers.get(getattr(part, "__code__", None)) for part in parts]
    causal = any(reader is _read_causal for reader in known)
    # no query attends to keys after the last query
    used = min(extent.keys, extent.q_offset + extent.queries - extent.kv_offset) if causal else extent.keys
    used_extent = extent._replace(keys=used)
    over: Neighbourhood = Dense()
    for part, reader in zip(parts, known, strict=True):
        part_over = None if reader is None else reader(_closure_variables(part), used_extent)
        if part_over is None:
            return None
        over = over & part_over
    if attention_mask is not None:
        if attention_mask.dim() != 2 or len(attention_mask) != extent.batch:
            return None
        keep = attention_mask[:, extent.kv_offset : extent.kv_offset + used].to(extent.device, torch.bool)
        keep = nn.functional.pad(keep, (0, used - keep.shape[1]))
        if not keep.all():
            over = over & Padding(keep, queries=False)
    return LazyMask(LazyMaskState(over, used, (extent.batch, 1, extent.queries, extent.keys), extent.device))


_MaskReader = Callable[[dict[str, Any], _MaskExtent], Neighbourhood | None]
_ReaderByCode = dict[CodeType | None, _MaskReader]
# the code of transformers' mask functions -> their readers; filled by `collect_mask_readers`
_reader_by_code: _ReaderByCode = {}


def _split_and_masks(function: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """The functions that `and_masks` combined; for other functions, the function itself."""
    combined = getattr(function, "__qualname__", "") == "and_masks.<locals>.and_mask"
    for part in _closure_variables(function).get("mask_functions", ()) if combined else ():
        yield from _split_and_masks(part)
    if not combined:
        yield function


def _closure_variables(function: Any) -> dict[str, Any]:
    """The closure variables of a function."""
    cells = getattr(function, "__closure__", None) or ()
    return dict(zip(function.__code__.co_freevars, (cell.cell_contents for cell in cells), strict=True))


def _read_bidirectional(variables: dict[str, Any], extent: _MaskExtent) -> Neighbourhood:
    return Dense()


def _read_causal(variables: dict[str, Any], extent: _MaskExtent) -> Neighbourhood | None:
    return Causal() if extent.aligned else None


def _read_sliding_window(variables: dict[str, Any], extent: _MaskExtent) -> Neighbourhood | None:
    reach = variables["sliding_window"]
    if not extent.aligned or reach < 1:
        return None
    return Dense() if reach >= extent.keys else Window(reach - 1, extent.keys)


def _read_bidirectional_window(variables: dict[str, Any], extent: _MaskExtent) -> Neighbourhood | None:
    reach = variables["sliding_window"]
    if not extent.aligned or reach < 0:
        return None
    return Dense() if reach >= extent.keys else Window(reach)


def _read_chunked(variables: dict[str, Any], extent: _MaskExtent) -> Neighbourhood | None:
    first, size = variables["left_padding"].to(extent.device), variables["chunk_size"]
    if not extent.aligned or first.shape != (extent.batch,):
        return None
    position = torch.arange(extent.keys, device=extent.device) + extent.kv_offset
    chunk = (position - first[:, None]).div(size, rounding_mode="floor")
    return Dense() if bool((chunk[:, :1] == chunk[:, -1:]).all()) else Segments(chunk)


def _read_packed_sequences(variables: dict[str, Any], extent: _MaskExtent) -> Neighbourhood | None:
    ids = variables["packed_sequence_mask"]
    if not extent.aligned or extent.kv_offset or ids.shape != (extent.batch, extent.keys):
        return None
    return Segments(ids.to(extent.device))


def collect_mask_readers(masks: ModuleType) -> None:
    """Find the mask functions of transformers' `masking_utils` that can be read."""
    # the user's default device may be another one
    with torch.device("cpu"):
        found = _find_agreeing_readers(masks)
    _reader_by_code.clear()
    _reader_by_code.update(found)


def _find_agreeing_readers(masks: ModuleType) -> _ReaderByCode:
    """The readers that agree with the mask functions of this version of transformers."""
    found: _ReaderByCode = {}
    ids = torch.tensor([[0, 0, 0, 1, 1, 2, 2]]).expand(2, -1)
    samples: tuple[tuple[str, tuple[Any, ...], _MaskReader], ...] = (
        ("bidirectional_mask_function", (), _read_bidirectional),
        ("causal_mask_function", (), _read_causal),
        ("sliding_window_overlay", (3,), _read_sliding_window),
        ("sliding_window_bidirectional_overlay", (2,), _read_bidirectional_window),
        ("chunked_overlay", (3, torch.tensor([0, 2])), _read_chunked),
        ("packed_sequence_mask_function", (ids,), _read_packed_sequences),
    )
    for name, arguments, reader in samples:
        function = getattr(masks, name, None)
        if function is not None:
            function = function(*arguments) if arguments else function
            if _agrees_with_transformers(masks, function, {function.__code__: reader}):
                found[function.__code__] = reader
    return found


def _agrees_with_transformers(masks: ModuleType, function: Callable[..., Any], readers: _ReaderByCode) -> bool:
    """Whether a reader gives the same mask as transformers for a small example."""
    keep = torch.tensor([[0, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 0]]).bool()
    extent = _MaskExtent(2, 7, 7, 0, 0, torch.device("cpu"))
    theirs = masks.sdpa_mask(*extent[:5], function, keep, allow_is_causal_skip=False)
    try:
        ours = _read_mask_function(function, keep, extent, readers)
    # a closure variable may have another name in this version
    except KeyError:
        return False
    return ours is not None and torch.equal(ours.state.tensor(), theirs)
