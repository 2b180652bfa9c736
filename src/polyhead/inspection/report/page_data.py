"""The data of a report page: numbers as JSON, arrays as compressed blobs."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from polyhead._checks import check_integer
from polyhead.heads import Heads
from polyhead.inspection.measured_heads import (
    MAX_SHORT_TEXT_TOKENS,
    LayerMetrics,
    MeasuredLayer,
    squeeze_batch,
    to_json_numbers,
)
from polyhead.inspection.report import image_layout
from polyhead.inspection.report.image_layout import ImageLayout
from polyhead.inspection.view_properties import count_batch_entries, find_key_intervals, is_on_graph
from polyhead.kernels.reference import masked_scores
from polyhead.models import Tokens
from polyhead.score import Dot

# Bytes that q and k of all heads may take together: they are the bulk of the page of a long text.
QK_BYTES = 7_200_000
# Edges of a graph that are kept.
MAX_EDGES = 200_000
# Bytes that the strongest keys of all queries may take, for heads whose q and k are not kept; fewer per query than
# TOP_KEYS_PER_QUERY if they would take more.
TOP_KEYS_BYTES = 3_000_000

# By whether queries and keys are the same items.
_ATTENTION_KINDS = {True: "self-attention", False: "cross-attention", None: "unknown whether self- or cross-attention"}

Array = npt.NDArray[Any]
JsonObject = dict[str, Any]
# (layer, head)
HeadIndex = tuple[int, int]


class PageLayer(NamedTuple):
    """One attention layer of a page: its heads in one row of the batch, and the tokens of its queries and keys."""

    number: int
    name: str
    measured: MeasuredLayer
    rows: Tokens | None
    columns: Tokens | None
    # the positions of tokens on the page's image, for a layer over patches
    image: ImageLayout | None = None

    @property
    def view(self) -> Heads:
        return self.measured.view

    @property
    def is_graph(self) -> bool:
        """Whether the attention is on a graph."""
        return is_on_graph(self.view)

    @property
    def heads(self) -> list[int]:
        """The numbers of the heads."""
        return self.indices("heads").tolist()

    @property
    def query_and_key_counts(self) -> tuple[int, int]:
        """How many queries and keys are shown."""
        return len(self.indices("queries")), len(self.indices("keys"))

    @property
    def has_all_weights(self) -> bool:
        """Whether every weight is on the page."""
        return not self.is_graph and self.image is None and max(self.query_and_key_counts) <= MAX_SHORT_TEXT_TOKENS

    @property
    def is_plain_dot_product(self) -> bool:
        """Whether a weight is exp(scale · q·k − lse) inside an interval of keys, and nothing else."""
        call = self.view.part.call
        has_only_dot = type(call.score) is Dot and call.relative_bias is None and call.sink is None
        return not self.is_graph and has_only_dot and self.key_intervals is not None

    @property
    def key_intervals(self) -> Int[Tensor, "2 queries"] | None:
        """The first key of each query and the one past the last; None if its keys are not an interval."""
        return self.measured.compute_once("key intervals", lambda: find_key_intervals(self.view))

    @property
    def has_bias(self) -> bool:
        """Whether an additive bias or mask changes scores."""
        bias = self.view.part.call.bias
        return bias is not None and bool(bias.any())

    def contribution_norms(self) -> Float[Tensor, "heads keys"]:
        """The contribution of a weight of 1 on each key: |W_O v|, or |v| if W_O is unknown."""
        norm = self.view.contribution().part.contribution_norm
        assert norm is not None
        return squeeze_batch(norm, 2)[self.heads][:, self.indices("keys")]

    @property
    def score_scale(self) -> float:
        """The factor of q·k in a score."""
        call = self.view.part.call
        assert isinstance(call.score, Dot)
        return call.score.factor(call.q.shape[-1])

    def q_and_k_of_heads(self) -> tuple[Float[Tensor, "heads queries dim"], Float[Tensor, "heads keys dim"]]:
        """q and k of the heads that are shown."""
        call = self.view.part.call
        q, k = (squeeze_batch(x, 3) for x in (call.q, call.k))
        k = k.repeat_interleave(len(q) // len(k), 0)
        return q[self.heads][:, self.indices("queries")], k[self.heads][:, self.indices("keys")]

    def with_layout(self, layout: ImageLayout | None) -> PageLayer:
        """The layer in another layout, with its names; itself if it is not on the image."""
        if layout is None:
            return self
        rows, columns = layout.token_names()
        return self._replace(image=layout, rows=rows, columns=columns)

    def metrics(self) -> LayerMetrics:
        return self.measured.metrics(None if self.columns is None else self.columns.special)

    def indices(self, axis: str) -> Int[Tensor, " some"]:
        return self.view.part.indices(axis)


def make_page_layer(
    number: int,
    name: str,
    measured: MeasuredLayer,
    batch: int,
    texts: tuple[Tokens | None, Tokens | None],
    image: ImageLayout | None = None,
) -> PageLayer:
    """A checked layer of a page."""
    heads = measured.heads
    if heads.part.contribution_norm is not None:
        raise ValueError(
            f"heads[{name!r}] must be a view on weights, got one on contributions; pass the view that it came from, the page shows both"
        )
    rows = count_batch_entries(heads)
    check_integer("batch", batch, 0, rows - 1, hint=f"{name!r} has {rows} rows")
    if 0 in heads.shape or 0 in (len(heads.part.indices("queries")), len(heads.part.indices("keys"))):
        raise ValueError(f"heads[{name!r}] must have heads, queries and keys, got shape {tuple(heads.shape)}")
    return PageLayer(number, name, measured, *texts, image)


class ArrayBlobs:
    """Arrays as text: little-endian, deflated, in base64. JSON refers to a blob by its number."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def add(self, array: Array | Tensor, kind: str) -> JsonObject:
        array = np.asarray(array)
        packed = zlib.compress(np.ascontiguousarray(array, dtype="<" + kind).tobytes(), 6)
        self.texts.append(base64.b64encode(packed).decode())
        return {"blob": len(self.texts) - 1, "kind": kind, "shape": list(array.shape)}


def layers_to_json(layers: Sequence[PageLayer], first: Iterable[HeadIndex], blobs: ArrayBlobs) -> list[JsonObject]:
    """The layers of a page. If not all heads can be kept exactly, those in `first` are kept before others."""
    on_image = sum(len(layer.heads) for layer in layers if layer.image is not None)
    records = [
        _graph_layer_to_json(layer, blobs) if layer.is_graph
        else _image_layer_to_json(layer, layer.image, on_image, blobs) if layer.image is not None
        else _text_layer_to_json(layer, blobs)
        for layer in layers
    ]  # fmt: skip
    _add_qk_or_top_keys(layers, records, first, blobs)
    return records


def _common_layer_fields(layer: PageLayer, stats: Mapping[str, Any]) -> JsonObject:
    """The fields that all records have."""
    call = layer.view.part.call
    queries, keys = layer.query_and_key_counts
    is_self = layer.view.is_self_attention
    shares_text = is_self is True and layer.rows is layer.columns and queries == keys
    kind = "graph" if layer.is_graph else "self" if shares_text else "cross"
    return {
        "number": layer.number, "name": layer.name, "kind": kind, "attention": _ATTENTION_KINDS[is_self], "heads": layer.heads, "queries": queries, "keys": keys,
        "over": repr(call.over.over if hasattr(call.over, "over") else call.over),
        "score": type(call.score).__name__, "scale": layer.score_scale if isinstance(call.score, Dot) else None,
        "plain": layer.is_plain_dot_product and not layer.has_bias, "has_w_o": layer.view.origin.w_o is not None, "stats": stats, "arrays": {}, "exact": {},
    }  # fmt: skip


def _text_layer_to_json(layer: PageLayer, blobs: ArrayBlobs) -> JsonObject:
    """The record of a text. A cell of a map is the share of its queries' attention on all of its keys together.

    It is between 0 and 1 at any length, while a mean over keys would vanish. It is stored as a byte, 255 times its square root, which
    separates small numbers: the error is at most 0.004.
    """
    metrics = layer.metrics()
    special = (False,) * layer.query_and_key_counts[0] if layer.rows is None else layer.rows.special
    words = ~torch.tensor(special)
    # a query with one key, such as the first of a causal model, says nothing about its head
    informative = words & _has_several_keys(layer)
    record = _common_layer_fields(layer, metrics.mean_over_words(informative if bool(informative.any()) else words))
    arrays = record["arrays"]
    arrays["contribution_norms"] = blobs.add(layer.contribution_norms(), "f4")
    if layer.has_all_weights:
        _add_short_text_arrays(layer, arrays, blobs)
    else:
        for name, maps in metrics.maps.items():
            arrays[f"{name} map"] = blobs.add((255 * maps.clamp(0, 1).sqrt()).round(), "u1")
    return record


def _add_short_text_arrays(layer: PageLayer, arrays: JsonObject, blobs: ArrayBlobs) -> None:
    """Add the arrays of a short text: weights, scores if they are not q·k alone, and outputs."""
    arrays["weights"] = blobs.add(layer.measured.weights, "f4")
    call, w_o = layer.view.part.call, layer.view.origin.w_o
    queries, keys = layer.indices("queries"), layer.indices("keys")
    if (layer.has_bias or not layer.is_plain_dot_product) and type(call.score) is Dot:
        arrays["scores"] = blobs.add(squeeze_batch(masked_scores(call), 3)[layer.heads][:, queries][..., keys], "f4")
    arrays["outputs"] = blobs.add(squeeze_batch(layer.view.outputs, 3), "f2")
    if w_o is not None and w_o.dim() == 2:
        # the output is that of all heads, even if only some are shown
        joined = squeeze_batch(layer.view.origin.outputs, 3)[:, queries].transpose(0, 1).flatten(1)
        arrays["output"] = blobs.add(joined @ w_o.float().T, "f2")


def _add_qk_or_top_keys(
    layers: Sequence[PageLayer], records: list[JsonObject], first: Iterable[HeadIndex], blobs: ArrayBlobs
) -> None:
    """Add q, k and lse of as many heads as fit, and the strongest pairs of the others."""
    texts = [layer for layer in layers if not layer.is_graph and layer.image is None]
    ranked = [(layer.number, head) for layer in texts for head in layer.heads]
    ranked.sort(key=lambda pair: -score_head_interest(records[pair[0]], pair[1]))
    long = [layer for layer in texts if not layer.has_all_weights]
    # a pair takes four bytes, or six with more than 65,536 keys
    most = TOP_KEYS_BYTES // max(1, 6 * sum(len(layer.heads) * layer.query_and_key_counts[0] for layer in long))
    left, pairs = QK_BYTES, TOP_KEYS_BYTES
    for number, head in dict.fromkeys([*first, *ranked]):
        layer, record = layers[number], records[number]
        if layer not in texts:
            continue
        metrics, index = layer.metrics(), layer.heads.index(head)
        kept = _pack_qk_and_lse(layer, index, left)
        if kept is None and not layer.has_all_weights:
            top, keys = (x[index, :, : max(1, most)] for x in (metrics.top, metrics.keys))
            pairs -= 6 * top.numel()
            kept = (
                {"top": (top, "f2"), "keys": (keys, "u2" if layer.query_and_key_counts[1] <= 1 << 16 else "u4")}
                if pairs >= 0
                else {}
            )
        elif kept is not None and not layer.has_all_weights:
            left -= _count_bytes(kept)
        record["exact"][str(head)] = {name: blobs.add(*array) for name, array in (kept or {}).items()}
    for layer, record in zip(layers, records, strict=True):
        if not layer.is_graph and layer.image is None and layer.key_intervals is not None:
            record["arrays"]["reach"] = blobs.add(layer.key_intervals, "i4")


TypedArrays = dict[str, tuple[Any, str]]


def _count_bytes(kept: TypedArrays) -> int:
    return sum(array.nbytes for array, _ in kept.values())


def _pack_qk_and_lse(layer: PageLayer, index: int, left: int) -> TypedArrays | None:
    """q, k and the log-sum-exp of each row, from which the page computes any weight: exp(scale · q·k − lse).

    The lse is chosen to make each row's largest weight exact, so that rounding q and k to 16 bits affects only the others; if the
    error is too large, they keep 32 bits. None if they do not determine the weights, or take more bytes than are left.
    """
    if not (layer.is_plain_dot_product or (layer.has_all_weights and type(layer.view.part.call.score) is Dot)):
        return None
    q, k = (x[index] for x in layer.q_and_k_of_heads())
    if not layer.has_all_weights and 2 * (q.numel() + k.numel()) > left:
        return None
    top, keys = (x[index, :, 0] for x in (layer.metrics().top, layer.metrics().keys))
    rows = torch.linspace(0, len(q) - 1, min(len(q), 64)).long()
    for kind in ("f4",) if layer.has_all_weights else ("f2", "f4"):
        rough = [torch.from_numpy(x.numpy().astype(kind).astype("f4")) for x in (q, k)]
        lse = (rough[0] * rough[1][keys]).sum(-1) * layer.score_scale - top.clamp(min=1e-30).log()
        if kind == "f4" or _largest_weight_error(layer, index, rough, lse, rows) <= 0.005:
            break
    kept = {"q": (q.numpy().astype(kind), kind), "k": (k.numpy().astype(kind), kind), "lse": (lse.numpy(), "f4")}
    return kept if layer.has_all_weights or _count_bytes(kept) <= left else None


def _largest_weight_error(layer: PageLayer, index: int, rough: list[Tensor], lse: Tensor, rows: Tensor) -> float:
    """The largest error of the page's weights in these rows."""
    true = layer.view.select(heads=index, queries=rows).weights.float()
    found = ((rough[0][rows] @ rough[1].T) * layer.score_scale - lse[rows, None]).exp()
    off = (found - true.reshape(found.shape)).abs() * (true.reshape(found.shape) > 0)
    return float(off.max()) if bool(off.isfinite().all()) else torch.inf


def _has_several_keys(layer: PageLayer) -> Bool[Tensor, " queries"]:
    """Whether each query may attend to more than one key; True if this is not known."""
    if layer.key_intervals is None:
        return torch.ones(layer.query_and_key_counts[0], dtype=torch.bool)
    first, stop = layer.key_intervals
    return stop - first > 1


def _graph_layer_to_json(layer: PageLayer, blobs: ArrayBlobs) -> JsonObject:
    """The record of a graph: its edges and their weights."""
    view = layer.view
    weights = view.weights.float()
    weights, pairs = weights.reshape(weights.shape[-2:]), view.edge_index
    # nodes without incoming edges have no weights
    live = torch.zeros(len(view.part.indices("queries")), dtype=torch.bool)
    live[pairs[1]] = True
    mean = lambda x: to_json_numbers(x.reshape(x.shape[-2:]).float()[:, live].mean(-1))
    record = _common_layer_fields(
        layer, {"entropy": mean(view.entropy()), "weight": {"self": mean(view.mass("self"))}, "share": {}}
    )
    record["edges"] = weights.shape[-1]
    # parallel edges are drawn as one, with the sum of their weights
    single, index = pairs.unique(dim=1, return_inverse=True)
    record["parallel"] = record["edges"] - single.shape[1]
    if record["parallel"]:
        pairs, weights = single, weights.new_zeros(len(weights), single.shape[1]).index_add_(1, index, weights)
    if weights.shape[-1] > MAX_EDGES:
        best = weights.abs().amax(0).topk(MAX_EDGES).indices.sort().values
        weights, pairs = weights[:, best], pairs[:, best]
    arrays = record["arrays"]
    arrays["edges"] = blobs.add(pairs, "u4")
    arrays["weights"] = blobs.add(weights, "f4" if weights.numel() <= MAX_EDGES else "f2")
    arrays["contribution_norms"] = blobs.add(layer.contribution_norms(), "f4" if weights.numel() <= MAX_EDGES else "f2")
    return record


def _image_layer_to_json(layer: PageLayer, image: ImageLayout, all_heads: int, blobs: ArrayBlobs) -> JsonObject:
    """The record of a layer over patches."""
    found = image_layout.measure_layer_on_image(layer.measured, image)
    record = _common_layer_fields(layer, image_layout.image_stats_to_json(found.stats))
    record.update(queries=image.queries, keys=image.keys, image=image.to_json())
    record["arrays"]["contribution_norms"] = blobs.add(
        image_layout.mean_norm_per_block(layer.contribution_norms(), image), "f4"
    )
    record["arrays"]["seen"] = blobs.add(*image_layout.quantize_weights(found.weights, all_heads))
    return record


def score_head_interest(record: JsonObject, head: int) -> float:
    """A rank for heads: high if the weight is narrow and not on neighbours or special tokens."""
    index = record["heads"].index(head)
    entropy = record["stats"]["entropy"][index] or 0.0
    narrow = 1 - entropy / np.log(max(record["keys"], 2))
    usual = sum((by[index] or 0.0) for by in record["stats"]["weight"].values())
    return float(narrow * max(0.05, 1 - usual))
