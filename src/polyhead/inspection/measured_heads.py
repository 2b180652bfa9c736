"""Recorded heads whose weights and metrics are computed once, for everything that reads them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from polyhead._checks import WrongType, describe_type
from polyhead.heads import Heads

# Up to this many queries and keys, all weights are computed at once and kept.
MAX_SHORT_TEXT_TOKENS = 64
# Bytes that the maps of all heads may take together, before compression.
MAX_HEATMAPS_BYTES = 2_600_000
# Strongest keys that are kept per query.
TOP_KEYS_PER_QUERY = 8

Result = TypeVar("Result")


class MeasuredHeads(Mapping[str, Heads]):
    """Heads by the names of their layers, in one batch entry. Functions pass it on instead of the heads, so that nothing is computed twice."""

    def __init__(self, heads: Heads | Mapping[str, Heads] | Sequence[Heads], batch: int = 0) -> None:
        if not isinstance(heads, (Heads, Mapping, list, tuple)):
            raise WrongType(
                f"heads must be a Heads, or a mapping of names to Heads as `capture` records it, or a list of Heads, got "
                f"{describe_type(heads)}; with capture(model) as seen: model(x)"
            )
        views: dict[str, Heads] = (
            {"attention": heads}
            if isinstance(heads, Heads)
            else dict(heads)
            if isinstance(heads, Mapping)
            else {f"layer {number}": view for number, view in enumerate(heads)}
        )
        for name, view in views.items():
            if not isinstance(view, Heads):
                raise WrongType(
                    f"heads[{name!r}] must be a Heads, got {describe_type(view)}; capture without metrics= records them"
                )
        total = sum(len(view.part.indices("heads")) for view in views.values())
        self.batch = batch
        self.layers = {name: MeasuredLayer(view, batch, _choose_heatmap_size(total)) for name, view in views.items()}

    @classmethod
    def wrap(cls, heads: Heads | Mapping[str, Heads] | Sequence[Heads], batch: int = 0) -> MeasuredHeads:
        """Wrap heads; heads that are wrapped for this batch entry already are returned as they are."""
        return heads if isinstance(heads, MeasuredHeads) and heads.batch == batch else cls(heads, batch)

    def __getitem__(self, name: str) -> Heads:
        return self.layers[name].heads

    def __iter__(self) -> Iterator[str]:
        return iter(self.layers)

    def __len__(self) -> int:
        return len(self.layers)


def _choose_heatmap_size(heads: int) -> int:
    """The side of a head's map, so that those of all heads fit into `MAX_HEATMAPS_BYTES`."""
    fitting = [size for size in (256, 192, 128, 96, 64, 48) if 2 * heads * size * size <= MAX_HEATMAPS_BYTES]
    return fitting[0] if fitting else 32


class MeasuredLayer:
    """The heads of one layer in one batch entry."""

    def __init__(self, heads: Heads, batch: int, map_size: int) -> None:
        self.heads, self.map_size = heads, map_size
        self._batch = batch
        self._results: dict[Hashable, Any] = {}

    @cached_property
    def view(self) -> Heads:
        """A lasting view of the batch entry, on the CPU."""
        return self.heads.select_batch_entry(self._batch).cpu()

    @cached_property
    def weights(self) -> Float[Tensor, "heads queries keys"]:
        """All weights of the batch entry, on the CPU."""
        return self._weights_of_batch_entry(self.heads)

    def weights_of_queries(self, queries: Sequence[int]) -> Float[Tensor, "heads some keys"]:
        """The weights of some queries; those of a short text are computed for all queries and kept."""
        if max(self.heads.shape[-2:]) <= MAX_SHORT_TEXT_TOKENS:
            return self.weights[:, queries]
        return self._weights_of_batch_entry(self.heads.select(queries=queries))

    def _weights_of_batch_entry(self, heads: Heads) -> Float[Tensor, "heads queries keys"]:
        lead = heads.shape[:-3]
        row = tuple(int(i) for i in np.unravel_index(self._batch, lead)) if lead else ()
        with torch.no_grad():
            return heads[row].float().cpu()

    def metrics(self, special: Sequence[bool] | None = None) -> LayerMetrics:
        """The metrics of a page; `special` marks the keys that are special tokens, None if there are none."""
        marked = tuple(special) if special is not None else (False,) * len(self.heads.part.indices("keys"))
        return self.compute_once(
            ("metrics", marked), lambda: LayerMetrics(self.view, torch.tensor(marked), self.map_size)
        )

    def compute_once(self, key: Hashable, compute: Callable[[], Result]) -> Result:
        """What `compute` returned the first time it was called under this key."""
        if key not in self._results:
            self._results[key] = compute()
        result: Result = self._results[key]
        return result


class LayerMetrics:
    """The metrics of a layer that need its weights, computed in one pass.

    Attributes:
        top: the largest weights of each query, (heads, queries, TOP_KEYS_PER_QUERY).
        keys: their keys, as positions among the keys of the view.
        maps: "weight" and "share", (heads, height, width): means over queries of sums over keys. A share is a contribution over the
            sum of its row.
        numbers: by name, (heads, queries): "entropy", "distance", and "weight" and "share" on each of "self", "previous", "next",
            "first" and "special". Shares here are contributions, not yet divided by `total`.
        total: the sum of each query's contributions, (heads, queries).
    """

    @torch.no_grad()
    def __init__(self, view: Heads, special: Bool[Tensor, " keys"], size: int) -> None:
        keys = len(special)
        targets = {"self": "self", "previous": "previous", "next": "next", "first": "first", "special": special}
        named: dict[str, Any] = {
            "entropy": "entropy", "distance": "distance", "top": ("top", min(TOP_KEYS_PER_QUERY, keys)),
            "map": ("heatmap", size), "share map": ("contribution", "heatmap", size),
            "total": ("contribution", "mass", torch.ones(keys, dtype=torch.bool)),
            **{f"weight {name}": ("mass", target) for name, target in targets.items()},
            **{f"share {name}": ("contribution", "mass", target) for name, target in targets.items()},
        }  # fmt: skip
        answers = dict(zip(named, view.measure(*named.values()), strict=True))
        self.top, found = (squeeze_batch(x, 3) for x in answers.pop("top"))
        self.keys = _key_positions_in_view(view)[found.clamp(min=0)]
        self.maps = {
            "weight": squeeze_batch(answers.pop("map"), 3),
            "share": squeeze_batch(answers.pop("share map"), 3),
        }
        self.numbers = {name: squeeze_batch(x, 2) for name, x in answers.items()}
        self.total = self.numbers.pop("total")
        self._convert_map_means_to_key_sums(len(view.part.indices("queries")), keys)

    def _convert_map_means_to_key_sums(self, queries: int, keys: int) -> None:
        """Turn the maps' means over pairs into means over queries of sums over keys; contributions into shares of a row."""
        height, width = self.maps["weight"].shape[-2:]
        among_keys = (torch.arange(keys) * width // keys).bincount()
        row = torch.arange(queries) * height // queries
        total = torch.zeros(len(self.total), height).index_add(1, row, self.total) / row.bincount()
        for maps in self.maps.values():
            maps *= among_keys
        self.maps["share"] /= total.clamp(min=1e-30)[..., None]

    def contribution_share(self, target: str) -> Float[Tensor, "heads queries"]:
        """The share of each query's contributions that comes from a target: "self", "previous", "next", "first" or "special"."""
        return self.numbers[f"share {target}"] / self.total.clamp(min=1e-30)

    def mean_over_words(self, words: Bool[Tensor, " queries"]) -> dict[str, Any]:
        """Means over the queries that are words and have a key; over all queries if there is none."""
        counts = words & (self.top[..., 0] > 0)
        counts = counts if bool(counts.any()) else torch.ones_like(counts)
        mean = lambda x: to_json_numbers((x * counts).sum(1) / counts.sum(1).clamp(min=1))
        stats: dict[str, Any] = {"weight": {}, "share": {}}
        for name, numbers in self.numbers.items():
            measure, _, target = name.partition(" ")
            if target:
                stats[measure][target] = mean(numbers if measure == "weight" else self.contribution_share(target))
            else:
                stats[measure] = mean(numbers)
        return stats


def _key_positions_in_view(view: Heads) -> Int[Tensor, " keys"]:
    """For each key of the call its position among the keys of the view."""
    keys = view.part.indices("keys")
    position = torch.zeros(int(keys.max()) + 1, dtype=torch.long)
    position[keys] = torch.arange(len(keys))
    return position


def squeeze_batch(x: Tensor, axes: int) -> Tensor:
    """The only row of a batch, without the batch axes; floats in fp32."""
    x = x.reshape(x.shape[-axes:])
    return x.float() if x.is_floating_point() else x


def to_json_numbers(x: Tensor) -> list[float | None]:
    """Numbers for JSON, to five digits; None for NaN and infinity."""
    return [round(number, 5) if np.isfinite(number) else None for number in x.tolist()]
