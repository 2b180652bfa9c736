"""What a report page knows of the heads: small numbers as JSON, arrays as compressed blobs beside them."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float, Int
from torch import Tensor

from polyhead._checks import check_integer
from polyhead.heads import Heads
from polyhead.inspection.report import image_layout
from polyhead.inspection.report.image_layout import ImageLayout
from polyhead.inspection.roles.word_attention import Text
from polyhead.kernels.reference import scores
from polyhead.metrics.edges import EdgePart
from polyhead.score import Dot

# Up to so many queries and keys every weight is on the page.
WHOLE = 64
# What q and k of all heads may take together, in bytes: they are the bulk of a page of a long text.
EXACT = 7_200_000
# What the maps of all heads may take together, in bytes before compression.
MAPS = 2_600_000
# So many edges of a graph are kept.
EDGES = 200_000
# So many keys of each query are kept exactly where q and k are not; fewer where all of them would take more than PAIRS bytes.
TOP = 8
PAIRS = 3_000_000

Array = npt.NDArray[Any]
Json = dict[str, Any]
Pair = tuple[int, int]


class Layer(NamedTuple):
    """One attention of a page: a lasting view on one row of its batch, and what its rows and columns are called."""

    number: int
    name: str
    view: Heads
    # whether a pair is allowed exactly when its key lies in the query's interval
    interval: bool
    rows: Text | None
    columns: Text | None
    # where items stand on the page's image, if they do
    image: ImageLayout | None = None

    @property
    def graph(self) -> bool:
        return isinstance(self.view._part, EdgePart)

    @property
    def heads(self) -> list[int]:
        return self.numbers("heads").tolist()

    @property
    def sizes(self) -> tuple[int, int]:
        return len(self.numbers("queries")), len(self.numbers("keys"))

    @property
    def whole(self) -> bool:
        """Whether every weight is on the page."""
        return not self.graph and self.image is None and max(self.sizes) <= WHOLE

    @property
    def plain(self) -> bool:
        """Whether a weight is exp(scale · q·k − lse) inside an interval of keys, and nothing else."""
        part = self.view._part
        call = part.call
        whole = isinstance(part, EdgePart) or (part.queries is None and part.keys is None)
        extra = call.table is not None or call.bias is not None or call.sink is not None
        return whole and not self.graph and self.interval and type(call.score) is Dot and not extra

    def moved(self) -> Float[Tensor, "heads keys"]:
        """What a weight of 1 on a key moves: |W_O v|, or |v| where there is no W_O."""
        part = self.view.contribution()._part
        assert part.moved is not None
        return _one_row(part.moved, 2)[self.heads][:, self.numbers("keys")]

    @property
    def scale(self) -> float:
        """What a product of q and k is multiplied by."""
        call = self.view._part.call
        assert isinstance(call.score, Dot)
        return call.score.factor(call.q.shape[-1])

    def projected(self) -> tuple[Float[Tensor, "heads queries dim"], Float[Tensor, "heads keys dim"]]:
        call = self.view._part.call
        q, k = (_one_row(x, 3) for x in (call.q, call.k))
        k = k.repeat_interleave(len(q) // len(k), 0)
        return q[self.heads][:, self.numbers("queries")], k[self.heads][:, self.numbers("keys")]

    def numbers(self, axis: str) -> Int[Tensor, " some"]:
        return self.view._part.numbers(axis)


def _one_row(x: Tensor, axes: int) -> Tensor:
    """One row of a batch without the batch's axes."""
    x = x.reshape(x.shape[-axes:])
    return x.float() if x.is_floating_point() else x


def layer_of(
    number: int,
    name: str,
    heads: Heads,
    batch: int,
    texts: tuple[Text | None, Text | None],
    image: ImageLayout | None = None,
) -> Layer:
    """A layer of a page, on copies that nothing changes any more."""
    lasting = heads.cpu()
    part = lasting._part
    if part.moved is not None:
        raise ValueError(f"heads: {name!r} is a view on contributions; pass the view itself, the page shows both")
    lead = part.shape[: -len(part.axes)]
    batch = check_integer("batch", batch, 0, lead.numel() - 1, hint=f"{name!r} has {lead.numel()} rows")
    if 0 in part.shape or 0 in (len(part.numbers("queries")), len(part.numbers("keys"))):
        raise ValueError(f"heads: {name!r} has the shape {tuple(part.shape)}; there is nothing to show")
    view = lasting.row(batch)
    return Layer(number, name, view, part.call.over.exact, *texts, image)


class Blobs:
    """Arrays as text: little-endian, deflated, in base64. JSON names a blob by its number."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def add(self, array: Array | Tensor, kind: str) -> Json:
        array = np.asarray(array)
        packed = zlib.compress(np.ascontiguousarray(array, dtype="<" + kind).tobytes(), 6)
        self.texts.append(base64.b64encode(packed).decode())
        return {"blob": len(self.texts) - 1, "kind": kind, "shape": list(array.shape)}


def layers_record(layers: Sequence[Layer], first: Iterable[Pair], blobs: Blobs) -> list[Json]:
    """The layers of a page. Heads in `first` are the first to be kept exactly, where not all can be."""
    number = sum(len(layer.heads) for layer in layers)
    fitting = [size for size in (256, 192, 128, 96, 64, 48) if 2 * number * size * size <= MAPS]
    size = fitting[0] if fitting else 32
    on_image = sum(len(layer.heads) for layer in layers if layer.image is not None)
    records = [
        _graph(layer, blobs) if layer.graph
        else _on_image(layer, layer.image, on_image, blobs) if layer.image is not None
        else _sequence(layer, size, blobs)
        for layer in layers
    ]  # fmt: skip
    _keep_exact(layers, records, first, blobs)
    return records


def _common(layer: Layer, stats: Mapping[str, Any]) -> Json:
    call = layer.view._part.call
    queries, keys = layer.sizes
    kind = "graph" if layer.graph else "self" if layer.rows is layer.columns and queries == keys else "cross"
    return {
        "number": layer.number, "name": layer.name, "kind": kind, "heads": layer.heads, "queries": queries, "keys": keys,
        "over": repr(call.over.over if hasattr(call.over, "over") else call.over),
        "score": type(call.score).__name__, "scale": layer.scale if isinstance(call.score, Dot) else None,
        "plain": layer.plain, "joined": layer.view._origin.join is not None, "stats": stats, "arrays": {}, "exact": {},
    }  # fmt: skip


class _Measured:
    """All numbers of a layer that need its weights, from one pass."""

    def __init__(self, layer: Layer, size: int) -> None:
        queries, keys = layer.sizes
        rows, columns = layer.rows, layer.columns
        special = torch.tensor(columns.special if columns else (False,) * keys)
        on = {"self": "self", "previous": "previous", "next": "next", "first": "first", "special": special}
        everything = torch.ones(keys, dtype=torch.bool)
        named: dict[str, Any] = {
            "entropy": "entropy", "distance": "distance", "top": ("top", min(TOP, keys)),
            "map": ("heatmap", size), "moved map": ("contribution", "heatmap", size),
            "moved": ("contribution", "mass", everything),
            **{f"weight {name}": ("mass", place) for name, place in on.items()},
            **{f"share {name}": ("contribution", "mass", place) for name, place in on.items()},
        }  # fmt: skip
        answers = dict(zip(named, layer.view.measure(*named.values()), strict=True))
        self.top, found = (_one_row(x, 3) for x in answers.pop("top"))
        # which of the keys that are looked at: a view may look at some
        place = torch.zeros(int(layer.numbers("keys").max()) + 1, dtype=torch.long)
        place[layer.numbers("keys")] = torch.arange(keys)
        self.keys = place[found.clamp(min=0)]
        self.maps = {"weight": _one_row(answers.pop("map"), 3), "share": _one_row(answers.pop("moved map"), 3)}
        self.numbers = {name: _one_row(x, 2) for name, x in answers.items()}
        self.total = self.numbers.pop("moved")
        words = torch.tensor([not one for one in rows.special]) if rows else torch.ones(queries, dtype=torch.bool)
        self.counts = words & (self.top[..., 0] > 0)
        self._sum_keys(queries, keys)

    def _sum_keys(self, queries: int, keys: int) -> None:
        """Turn the maps' means over pairs into means over queries of sums over keys; contributions into shares of a row."""
        height, width = self.maps["weight"].shape[-2:]
        among_keys = (torch.arange(keys) * width // keys).bincount()
        row = torch.arange(queries) * height // queries
        total = torch.zeros(len(self.total), height).index_add(1, row, self.total) / row.bincount()
        for maps in self.maps.values():
            maps *= among_keys
        self.maps["share"] /= total.clamp(min=1e-30)[..., None]

    def stats(self) -> Json:
        """Means over the queries that are words; those of special tokens, and those without a key, do not count."""
        counts = self.counts if bool(self.counts.any()) else torch.ones_like(self.counts)
        mean = lambda x: _plain((x * counts).sum(1) / counts.sum(1).clamp(min=1))
        stats: Json = {"weight": {}, "share": {}}
        for name, numbers in self.numbers.items():
            measure, _, on = name.partition(" ")
            if on:
                stats[measure][on] = mean(numbers if measure == "weight" else numbers / self.total.clamp(min=1e-30))
            else:
                stats[measure] = mean(numbers)
        return stats


def _plain(x: Tensor) -> list[float | None]:
    return [round(number, 5) if np.isfinite(number) else None for number in x.tolist()]


def _sequence(layer: Layer, size: int, blobs: Blobs) -> Json:
    """A cell of a map is the share of its queries' attention that falls on all of its keys together.

    That is between 0 and 1 at any length, while a mean over the keys would fade to nothing. It is kept as a byte, 255 times its
    square root: small numbers stay apart, and the error is at most 0.004.
    """
    measured = _Measured(layer, size)
    record = _common(layer, measured.stats())
    arrays = record["arrays"]
    arrays["moved"] = blobs.add(layer.moved(), "f4")
    if layer.whole:
        _whole(layer, arrays, blobs)
    else:
        for name, maps in measured.maps.items():
            arrays[f"{name} map"] = blobs.add((255 * maps.clamp(0, 1).sqrt()).round(), "u1")
    record["measured"] = measured
    return record


def _whole(layer: Layer, arrays: Json, blobs: Blobs) -> None:
    """All that a sentence's page shows of a layer."""
    arrays["weights"] = blobs.add(_one_row(layer.view.weights, 3), "f4")
    call, origin = layer.view._part.call, layer.view._origin
    queries, keys = layer.numbers("queries"), layer.numbers("keys")
    if not layer.plain and type(call.score) is Dot:
        arrays["scores"] = blobs.add(_one_row(scores(call), 3)[layer.heads][:, queries][..., keys], "f4")
    arrays["outputs"] = blobs.add(_one_row(layer.view.outputs, 3), "f2")
    if origin.join is not None and origin.join.dim() == 2:
        # all heads make the output, also where some are looked at
        joined = _one_row(origin.outputs, 3)[:, queries].transpose(0, 1).flatten(1)
        arrays["output"] = blobs.add(joined @ origin.join.float().T, "f2")


def _keep_exact(layers: Sequence[Layer], records: list[Json], first: Iterable[Pair], blobs: Blobs) -> None:
    """Add q, k and lse of as many heads as fit, and the strongest pairs of the others."""
    texts = [layer for layer in layers if not layer.graph and layer.image is None]
    ranked = [(layer.number, head) for layer in texts for head in layer.heads]
    ranked.sort(key=lambda pair: -telling(records[pair[0]], pair[1]))
    long = [layer for layer in texts if not layer.whole]
    # a pair takes four bytes, six where the keys are very many
    most = PAIRS // max(1, 6 * sum(len(layer.heads) * layer.sizes[0] for layer in long))
    left, pairs = EXACT, PAIRS
    for number, head in dict.fromkeys([*first, *ranked]):
        layer, record = layers[number], records[number]
        if layer not in texts:
            continue
        measured, place = record["measured"], layer.heads.index(head)
        kept = _exact(layer, place, measured, left)
        if kept is None and not layer.whole:
            top, keys = (x[place, :, : max(1, most)] for x in (measured.top, measured.keys))
            pairs -= 6 * top.numel()
            kept = (
                {"top": (top, "f2"), "keys": (keys, "u2" if layer.sizes[1] <= 1 << 16 else "u4")} if pairs >= 0 else {}
            )
        elif kept is not None and not layer.whole:
            left -= _bytes(kept)
        record["exact"][str(head)] = {name: blobs.add(*array) for name, array in (kept or {}).items()}
    for layer, record in zip(layers, records, strict=True):
        record.pop("measured", None)
        if layer.plain and layer.image is None:
            record["arrays"]["reach"] = blobs.add(_reach(layer), "i4")


Arrays = dict[str, tuple[Any, str]]


def _bytes(kept: Arrays) -> int:
    return sum(array.nbytes for array, _ in kept.values())


def _exact(layer: Layer, place: int, measured: _Measured, left: int) -> Arrays | None:
    """q, k and the log-sum-exp of each row, from which the page computes any weight: exp(scale · q·k − lse).

    The lse is the one that makes each row's largest weight exact, so that the rounding of q and k to 16 bits only shows in the
    others; where it shows too much, they keep 32. None where they do not tell the weights, or take more bytes than are left.
    """
    if not (layer.plain or (layer.whole and type(layer.view._part.call.score) is Dot)):
        return None
    q, k = (x[place] for x in layer.projected())
    if not layer.whole and 2 * (q.numel() + k.numel()) > left:
        return None
    top, keys = measured.top[place, :, 0], measured.keys[place, :, 0]
    rows = torch.linspace(0, len(q) - 1, min(len(q), 64)).long()
    for kind in ("f4",) if layer.whole else ("f2", "f4"):
        rough = [torch.from_numpy(x.numpy().astype(kind).astype("f4")) for x in (q, k)]
        lse = (rough[0] * rough[1][keys]).sum(-1) * layer.scale - top.clamp(min=1e-30).log()
        if kind == "f4" or _error(layer, place, rough, lse, rows) <= 0.005:
            break
    kept = {"q": (q.numpy().astype(kind), kind), "k": (k.numpy().astype(kind), kind), "lse": (lse.numpy(), "f4")}
    return kept if layer.whole or _bytes(kept) <= left else None


def _error(layer: Layer, place: int, rough: list[Tensor], lse: Tensor, rows: Tensor) -> float:
    """How far the page's weights of these rows are from the true ones."""
    true = layer.view.select(heads=place, queries=rows).weights.float()
    found = ((rough[0][rows] @ rough[1].T) * layer.scale - lse[rows, None]).exp()
    off = (found - true.reshape(found.shape)).abs() * (true.reshape(found.shape) > 0)
    return float(off.max()) if bool(off.isfinite().all()) else torch.inf


def _reach(layer: Layer) -> Array:
    """The first key of each query and the one past the last, (2, queries)."""
    queries, keys = layer.sizes
    interval = layer.view._part.call.over.interval(queries, keys, torch.device("cpu"))
    return torch.stack([bound.reshape(-1, queries)[0].clamp(0, keys) for bound in interval]).numpy()


def _graph(layer: Layer, blobs: Blobs) -> Json:
    view = layer.view
    weights = view.weights.float()
    weights, pairs = weights.reshape(weights.shape[-2:]), view.edge_index
    # nodes without an edge to them attend to nothing
    live = torch.zeros(len(view._part.numbers("queries")), dtype=torch.bool)
    live[pairs[1]] = True
    mean = lambda x: _plain(x.reshape(x.shape[-2:]).float()[:, live].mean(-1))
    record = _common(layer, {"entropy": mean(view.entropy()), "weight": {"self": mean(view.mass("self"))}, "share": {}})
    record["edges"] = weights.shape[-1]
    # edges that are there more than once are one line, of all their weight
    single, place = pairs.unique(dim=1, return_inverse=True)
    record["parallel"] = record["edges"] - single.shape[1]
    if record["parallel"]:
        pairs, weights = single, weights.new_zeros(len(weights), single.shape[1]).index_add_(1, place, weights)
    if weights.shape[-1] > EDGES:
        # the ends of the ranking are of no use to anyone who looks at a node: the strongest stay
        best = weights.abs().amax(0).topk(EDGES).indices.sort().values
        weights, pairs = weights[:, best], pairs[:, best]
    arrays = record["arrays"]
    arrays["edges"] = blobs.add(pairs, "u4")
    arrays["weights"] = blobs.add(weights, "f4" if weights.numel() <= EDGES else "f2")
    arrays["moved"] = blobs.add(layer.moved(), "f4" if weights.numel() <= EDGES else "f2")
    return record


def _on_image(layer: Layer, image: ImageLayout, all_heads: int, blobs: Blobs) -> Json:
    record = _common(layer, image_layout.stats(layer.view, image))
    record.update(queries=image.queries, keys=image.keys, image=image.record())
    record["arrays"]["moved"] = blobs.add(image_layout.moved(layer.moved(), image), "f4")
    record["arrays"]["seen"] = blobs.add(*image_layout.weights(layer.view, image, all_heads))
    return record


def telling(record: Json, head: int) -> float:
    """How much there is to see in a head: weight that is neither spread nor on a neighbour or a special token."""
    place = record["heads"].index(head)
    entropy = record["stats"]["entropy"][place] or 0.0
    narrow = 1 - entropy / np.log(max(record["keys"], 2))
    usual = sum((by[place] or 0.0) for by in record["stats"]["weight"].values())
    return float(narrow * max(0.05, 1 - usual))
