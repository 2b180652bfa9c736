"""The masks of transformers' models: read as neighbourhoods, and built when somebody asks for their numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import CodeType, ModuleType
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from polyhead._torch import numbers_hidden
from polyhead.neighbourhood import Causal, Dense, Neighbourhood, Padding, Segments, Sizes, Window


class Allowed:
    """Who may attend to whom in one batch, and the mask that says so, once somebody has asked for its numbers."""

    def __init__(self, over: Neighbourhood, seen: int, shape: tuple[int, int, int, int], device: torch.device) -> None:
        # among the first `seen` keys, to which alone anybody attends: a static cache has empty ones behind them
        self.over, self.seen = over, seen
        self.shape, self.device = shape, device
        # somebody holds the numbers and may have written into them: `over` need not be true of them any more
        self.given = False
        self._numbers: Tensor | None = None

    def numbers(self) -> Bool[Tensor, "batch 1 queries keys"]:
        """The mask as an ordinary tensor, always the same one."""
        if self._numbers is None:
            batch, _, queries, keys = self.shape
            # what is made in inference mode could not be cut outside of it
            with torch.inference_mode(False):
                keep = self.over.mask(Sizes((batch,), 1, queries, self.seen), self.device)
                keep = keep.expand(batch, 1, queries, self.seen)
                self._numbers = nn.functional.pad(keep, (0, keys - self.seen))
        return self._numbers

    def to(self, device: torch.device) -> Allowed:
        over = pytree.tree_map_only(Tensor, lambda x: x.to(device), self.over)
        return Allowed(over, self.seen, self.shape, device)


class LazyMask(Tensor):
    """The mask `(batch, 1, queries, keys)` of a model, that has not been built: it knows who may attend to whom.

    The attention reads `allowed`. For everyone else it is a bool tensor whose numbers are made when they are asked for: a
    model may cut it, move it, join it or write into it, and gets what it would get from transformers' own mask.
    """

    allowed: Allowed

    @staticmethod
    def __new__(cls, allowed: Allowed) -> LazyMask:
        make: Any = Tensor._make_wrapper_subclass
        made: LazyMask = make(cls, allowed.shape, dtype=torch.bool, device=allowed.device)
        made.allowed = allowed
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"LazyMask({self.allowed.over}, shape={tuple(self.shape)})"

    def tolist(self) -> Any:
        return self.clone().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        return self._handed().numpy(force=force)

    def __dlpack__(self, **options: Any) -> Any:
        return self._handed().__dlpack__(**options)

    def share_memory_(self) -> Tensor:
        return self._handed().share_memory_()

    def data_ptr(self) -> int:
        return self._handed().data_ptr()

    def _handed(self) -> Tensor:
        """The numbers, for somebody who reads and writes them where they lie: the mask itself has no memory."""
        self.allowed.given = True
        return self.allowed.numbers()

    def __deepcopy__(self, memo: object) -> Tensor:
        return self.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.clone().__reduce_ex__(protocol)

    __torch_function__: Any = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return LazyMask(args[0].allowed)
        moved = func is torch.ops.aten._to_copy.default and kwargs.get("dtype") in (None, torch.bool)
        if moved and kwargs.get("device") is not None and not args[0].allowed.given:
            return LazyMask(args[0].allowed.to(kwargs["device"]))
        shares = func._schema.is_mutable or any(made.alias_info is not None for made in func._schema.returns)

        def plain(lazy: LazyMask) -> Tensor:
            lazy.allowed.given |= shares
            return lazy.allowed.numbers()

        args, kwargs = pytree.tree_map_only(LazyMask, plain, (args, kwargs))
        return func(*args, **kwargs)


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
    if not fixed and not numbers_hidden() and not torch._C._is_tracing():
        place = _Place(batch_size, q_length, kv_length, int(q_offset), int(kv_offset), torch.device(device))
        lazy = _understood(function, attention_mask, place)
        if lazy is not None:
            return lazy
    made: Tensor | None = theirs(
        batch_size, q_length, kv_length, q_offset, kv_offset, function, attention_mask, device=device, **options
    )
    return made


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
