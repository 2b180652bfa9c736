"""`Heads`: a view on one attention, which computes weights and metrics when they are read."""

from __future__ import annotations

import copy
import html as text
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils import _pytree as pytree

from polyhead._checks import WrongType, check_integer, describe_type, short_repr
from polyhead.heads import grid_view
from polyhead.heads.indexing import Index, index_into_selection, unit_slice
from polyhead.heads.origin import WATCHED_TENSORS, Origin, check_unchanged, is_released, view_fingerprint
from polyhead.heads.tensor_interface import TensorInterface
from polyhead.kernels import Call
from polyhead.metrics import blockwise
from polyhead.metrics.attention_parts import Part, make_whole_part, select_batch_rows
from polyhead.metrics.compute import KeysToSum, MetricRequest, compute_metrics, mass_request
from polyhead.neighbourhood import Neighbourhood, broadcasts_to
from polyhead.plots import heat_maps_html, plot_heat_maps

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Metric = str | tuple[Any, ...]
# The metrics of `measure`, and how many arguments each takes.
_METRIC_ARGUMENT_COUNTS = {
    "entropy": 0,
    "distance": 0,
    "mass": 1,
    "received": 0,
    "top": 1,
    "heatmap": 1,
    "diversity": 0,
}


class Heads(TensorInterface):
    """The weights `(..., heads, queries, keys)` of one attention, before dropout, as a view.

    It has the shape of the weights, can be indexed like them, and is converted to a tensor where torch needs one;
    `heads[0, 3]` computes only that part. Metrics (`entropy`, `received`, …) are computed in blocks of queries and never
    allocate queries x keys. The view refers to tensors and does not copy them: if one that a result needs is changed in
    place (W_O by an optimizer's step, a cache by truncation), it raises an error instead of returning wrong values;
    `.detach()` returns a permanent copy. Changes are not detected in views returned by `torch.compile` and `torch.export`.
    """

    def __init__(self, call: Call, origin: Origin, cache: Any = None) -> None:
        self._part: Part = make_whole_part(call)
        self._origin = origin
        self._versions = None if torch.compiler.is_compiling() else view_fingerprint(call, origin, cache)
        self._cache = cache

    # weights and outputs

    @property
    def weights(self) -> Float[Tensor, "... heads queries keys"]:
        """The weights as a tensor, computed at each access; differentiable."""
        return self._part_if_unchanged().weights().to(self.dtype)

    @property
    def outputs(self) -> Float[Tensor, "... heads queries value_dim"]:
        """Each head's own output, before the heads are combined."""
        self._part_if_unchanged("outputs")
        return self._part.select_outputs(self._origin.outputs)

    def contribution(self) -> Heads:
        """The same view with each weight multiplied by the norm of the projected value: |α_ij · W_O v_j| (Kobayashi 2020).

        A large weight on a key whose value is close to zero has a small contribution.
        """
        return self._with_part(self._part._replace(contribution_norm=self._contribution_norm()))

    def _contribution_norm(self) -> Float[Tensor, "... all_heads all_keys"]:
        call, w_o, gate = self._part_if_unchanged("v", "W_O", "gate").call, self._origin.w_o, self._origin.gate
        if call.v.is_inference():
            # inference tensors cannot be saved for backward: the result has no gradients
            w_o, gate = (None if x is None else x.detach() for x in (w_o, gate))
        heads = call.sizes.heads
        # (..., out, heads · dim) -> (..., heads, out, dim)
        by_head = None if w_o is None else w_o.unflatten(-1, (heads, -1)).movedim(-2, -3)
        norm = blockwise.contribution_norms(call.v, by_head, heads)
        return norm if gate is None else norm * gate.abs()[..., :, None]

    def select(
        self,
        *,
        heads: Index | None = None,
        queries: Index | None = None,
        keys: Index | None = None,
        edges: Index | None = None,
    ) -> Heads:
        """A view on some heads, queries or keys, each given as an index, a slice or a list of indices; no axis is removed.

        On a graph, `edges` selects by index, `queries` by destination and `keys` by source.
        """
        part = self._part
        for axis, index in (("heads", heads), ("edges", edges), ("queries", queries), ("keys", keys)):
            if index is None:
                continue
            part = part.select(axis, index_into_selection(axis, part.indices(axis), index))
        return self._with_part(part)

    def select_batch_entry(self, batch: int) -> Heads:
        """A view on one row of the batch, by its index in the flattened batch axes; no axis is removed."""
        part, origin = self._part_if_unchanged("v", "outputs", "W_O", "gate"), self._origin
        lead = self.shape[: -len(part.axes)]
        batch = check_integer("batch", batch, 0, lead.numel() - 1)
        index = np.unravel_index(batch, lead) if lead else ()
        at = tuple(unit_slice(int(i), n) for i, n in zip(index, lead, strict=True))
        view = self._with_part(select_batch_rows(part, at))
        lse = None if origin.lse is None else origin.lse[at]
        view._origin = origin._replace(outputs=origin.outputs[at], lse=lse)
        if self._versions is not None:
            view._versions = view_fingerprint(view._part.call, view._origin, self._cache)
        return view

    @property
    def edge_index(self) -> Int[Tensor, "2 edges"]:
        """On a graph: the source and the destination of each edge of the view, in the order of the weights."""
        return self._part.edge_index

    @property
    def part(self) -> Part:
        """The call and the selected heads, queries, keys or edges. For tools."""
        return self._part

    @property
    def origin(self) -> Origin:
        """The outputs of all heads, W_O and the gate. For tools."""
        return self._origin

    def check_unchanged(self) -> None:
        """Raise where a tensor that the view refers to has changed since the call; W_O may have been released. For tools."""
        lacks_w_o = is_released(self._origin.w_o)
        self._part_if_unchanged(*(name for name in WATCHED_TENSORS if name != "W_O" or not lacks_w_o))

    @property
    def is_self_attention(self) -> bool | None:
        """Whether queries and keys are the same items; None if that is not known."""
        return self._origin.is_self_attention

    @property
    def over(self) -> Neighbourhood:
        """The neighbourhood of the attention."""
        return self._part.call.over

    # metrics

    def measure(self, *metrics: Metric) -> list[Any]:
        """Several metrics in one pass, with the results of the methods below.

        Each is a method's name, or a tuple of its name and arguments: `heads.measure("entropy", ("mass", "previous"), ("top", 3))`.
        `("contribution", "received")` is `heads.contribution().received()`.
        """
        part = self._part_if_unchanged()
        requests = [self._make_metric_request(metric) for metric in metrics]
        norm = part.contribution_norm
        if norm is None and any(request.contribution for request in requests):
            norm = self._contribution_norm()
        return compute_metrics(
            part._replace(contribution_norm=None), requests, contribution_norm=norm, lse=self._origin.lse
        )

    def _make_metric_request(self, metric: Metric) -> MetricRequest:
        """A metric of `measure` as a checked request."""
        if not isinstance(metric, str) and not (isinstance(metric, tuple) and metric):
            raise ValueError(f"metrics must be names, or tuples of a name and its arguments, got {metric!r}")
        name, *arguments = (metric,) if isinstance(metric, str) else metric
        part, contribution = self._part, self._part.contribution_norm is not None
        if name == "contribution" and arguments:
            return self._make_metric_request(tuple(arguments))._replace(contribution=True)
        if name not in _METRIC_ARGUMENT_COUNTS or len(arguments) != _METRIC_ARGUMENT_COUNTS[name]:
            if name == "received" and len(arguments) == 1:
                self._check_counts(arguments[0])
                return MetricRequest(name, tuple(arguments), contribution)
            known = ", ".join(
                f"({name!r}, …)" if number else repr(name) for name, number in _METRIC_ARGUMENT_COUNTS.items()
            )
            raise ValueError(f"metrics must be among {known}, ('contribution', …), got {metric!r}")
        if name == "mass":
            self._check_mass_shape(arguments[0])
            return mass_request(arguments[0], part)._replace(contribution=contribution)
        if name == "top":
            arguments = [check_integer("k", arguments[0], 1, part.num_keys, hint=f"there are {part.num_keys} keys")]
        if name == "heatmap":
            arguments = [check_integer("size", arguments[0])]
        return MetricRequest(name, tuple(arguments), contribution)

    def _check_mass_shape(self, on: object) -> None:
        """Raise where a tensor of keys does not fit the batch or the heads."""
        if not isinstance(on, Tensor):
            return
        lead = tuple(self.shape[: -len(self._part.axes)])
        shape = (*lead, self._part.num_keys) if on.dtype == torch.bool else self._query_shape()
        if on.shape[-1:] == shape[-1:] and not broadcasts_to(tuple(on.shape), shape):
            raise ValueError(f"on must broadcast to {shape}, got shape {tuple(on.shape)}")

    def _check_counts(self, counts: object) -> None:
        """Raise unless `counts` is None or has one number per query."""
        shape = self._query_shape()
        if counts is None or (isinstance(counts, Tensor) and broadcasts_to(tuple(counts.shape), shape)):
            return
        got = f"shape {tuple(counts.shape)}" if isinstance(counts, Tensor) else type(counts).__name__
        raise ValueError(f"counts must be a tensor that broadcasts to (..., heads, queries) = {shape}, got {got}")

    def _query_shape(self) -> tuple[int, ...]:
        """The shape of metrics per query: (..., heads, queries)."""
        own = len(self._part.axes)
        return (*self.shape[:-own], self.shape[-own], self._part.num_queries)

    def entropy(self) -> Float[Tensor, "... heads queries"]:
        """The entropy of each query's weights, in nats: 0 on one key, log n if uniform over n keys."""
        return self.measure("entropy")[0]

    def distance(self) -> Float[Tensor, "... heads queries"]:
        """The mean distance from each query to its keys: in items, or between points on a grid."""
        return self.measure("distance")[0]

    def mass(self, on: KeysToSum) -> Float[Tensor, "... heads queries"]:
        """The weight of each query on certain keys.

        Args:
            on: `"self"`, `"previous"`, `"next"`, `"first"`; or the offset of the key from the query (-1: the previous one); or
                a bool tensor (..., keys), True for the keys to sum over; or an integer tensor (..., heads or 1, queries): the
                index of one key per query, -1 for no key.
        """
        return self.measure(("mass", on))[0]

    def received(self, counts: Float[Tensor, "... #heads queries"] | None = None) -> Float[Tensor, "... heads keys"]:
        """The weight that each key receives from all queries; `counts` multiplies the weights of each query."""
        return self.measure(("received", counts))[0]

    def top(self, k: int) -> tuple[Float[Tensor, "... heads queries k"], Int[Tensor, "... heads queries k"]]:
        """The k largest weights of each query and the indices of their keys, -1 where a query has fewer keys."""
        return self.measure(("top", k))[0]

    def heatmap(self, size: int = 64) -> Float[Tensor, "... heads height width"]:
        """The weights averaged to at most size x size cells."""
        return self.measure(("heatmap", size))[0]

    def diversity(self) -> Float[Tensor, "... heads heads"]:
        """The distance between the weights of two heads, averaged over queries: 0 identical, 1 no key in common."""
        return self.measure("diversity")[0]

    def agreement(self, queries: int = 64) -> Float[Tensor, "... heads"]:
        """How similarly queries rank the keys, per head: 1 is one ranking for all, *static* attention (Brody 2021).

        Spearman's correlation of two queries' scores of all keys, regardless of the neighbourhood, averaged over pairs of
        queries. At most `queries` queries are compared, evenly spaced. Edge features are left out: most pairs have no edge.
        """
        call = self._part_if_unchanged().call
        number = call.sizes.queries
        queries = check_integer("queries", queries, 2)
        if number < 2:
            raise ValueError(f"agreement needs an attention with at least 2 queries, got {number}")
        compared = torch.linspace(0, number - 1, min(queries, number), device=self.device).long()
        agreement = blockwise.agreement(call, compared)
        return agreement if self._part.heads is None else agreement.index_select(-1, self._part.heads)

    def average_by_offset(
        self, reach: int | Sequence[int], grid: grid_view.GridArgument | None = None
    ) -> Float[Tensor, "... heads *window"]:
        """On a grid: the weights by offset of the key from the query, `(..., heads, 2·reach + 1, …)`, one axis per axis of the grid.

        The mean over all queries; offsets that leave the grid count as zero weight. If a head is a tap of a convolution, its
        weight is at one offset. Special tokens do not count.

        Args:
            reach: the largest offset to either side: an integer, or one per axis.
            grid: if the neighbourhood has no coordinates: the sizes of the grid that fills the last keys, after at most 16 special
                tokens; or `Grid(14, 14, prefix=77)` for more of them.
        """
        part = self._part_if_unchanged()
        return grid_view.average_by_offset(part, grid_view.find_token_grid(part, grid), reach)

    # pictures

    def plot(
        self,
        *,
        batch: int = 0,
        tokens: Sequence[str] | None = None,
        size: int | None = None,
        image: Any = None,
        at: grid_view.IndexOrPoint | None = None,
        grid: grid_view.GridArgument | None = None,
        around: int | Sequence[int] | None = None,
    ) -> Figure:
        """A picture of each head, as a matplotlib Figure (`pip install polyhead[plot]`).

        `plot()` draws heat-maps, queries x keys. On a grid with rows and columns, `plot(image=photo, at=(3, 5))` overlays the
        weights of one query on the image, and `plot(around=2)` draws `average_by_offset(2)`.

        Args:
            batch: the row of the batch.
            tokens: names of the keys (and of as many queries) of heat-maps; of more than 40, evenly spaced ones are shown.
            size: the largest number of cells per axis of a heat-map, 256 by default; longer sequences are averaged.
            image: the image that the points are from, in any size: (channels, height, width), (height, width, channels) or
                (height, width); bytes, floats in [0, 1], or other floats, which are scaled to their range.
            at: the query: its row and column, or its index, such as 0 for [CLS]; by default the one in the middle. It counts
                queries, not keys: with a stride of 4, query (6, 5) is at the keys' point (24, 20). Without an image only the
                weights are drawn.
            grid: as in `average_by_offset`: for attention whose neighbourhood has no coordinates.
            around: the largest offset from the query.
        """
        measure = self._quantity_name()
        if tokens is not None and not isinstance(tokens, Sequence):
            raise WrongType(f"tokens must be a list of names, got {describe_type(tokens)}")
        if around is None and image is None and at is None and grid is None:
            maps, part = self._row_heatmaps(batch, 256 if size is None else size), self._part
            return plot_heat_maps(maps, part.head_numbers, tokens, (part.num_queries, part.num_keys), measure)
        for name, value in (("tokens", tokens), ("size", size)):
            if value is not None:
                raise ValueError(
                    f"{name} must be left out with image, at, grid or around, got {short_repr(value)}; it is for heat-maps of "
                    "queries x keys"
                )
        if around is not None and (image is not None or at is not None):
            raise ValueError(
                f"around must be left out with image or at, got {short_repr(around)}; it draws the mean over all queries, which has no "
                "position on an image"
            )
        part = self.select_batch_entry(batch)._part
        token_grid = grid_view.find_token_grid(part, grid)
        if around is not None:
            return grid_view.plot_offsets(part, token_grid, around, measure)
        return grid_view.plot_query(part, token_grid, at, image, measure, (batch, self.shape[:-3].numel()))

    def _repr_html_(self) -> str:
        if not self.shape.numel():
            return text.escape(repr(self))
        return heat_maps_html(self._row_heatmaps(0, 64), self._part.head_numbers, repr(self))

    def _quantity_name(self) -> str:
        return "weight" if self._part.contribution_norm is None else "contribution"

    def _row_heatmaps(self, batch: int, size: int) -> Float[Tensor, "heads height width"]:
        """The heat-maps of one row of the batch."""
        maps = self.select_batch_entry(batch).heatmap(size).detach()
        return maps.reshape(maps.shape[-3:])

    # copies

    def detach(self) -> Heads:
        """The same view without gradients, on copies of all its tensors."""
        return self._copy_tensors(lambda x: x.detach().clone())

    def cpu(self) -> Heads:
        """A permanent copy of the view on the CPU, without gradients."""
        copied = self._copy_tensors(lambda x: x.detach().to("cpu", copy=True))
        score = copied._part.call.score.to("cpu")
        # tensors that the score refers to without owning them
        vars(score).update({name: x.cpu() for name, x in vars(score).items() if isinstance(x, Tensor)})
        return copied

    def numpy(self) -> np.ndarray[Any, Any]:
        """The weights as a NumPy array."""
        w = self.weights.detach().cpu()
        return (w.float() if w.dtype == torch.bfloat16 else w).numpy()

    def _copy_tensors(self, copy_tensor: Callable[[Tensor], Tensor]) -> Heads:
        self.check_unchanged()
        copy_present = lambda x: x if is_released(x) else copy_tensor(x)
        copied: Heads = pytree.tree_map_only(Tensor, copy_present, self._with_part(self._part))
        part = copied._part
        copied._part = part._replace(call=part.call._replace(score=copy.deepcopy(part.call.score)))
        return copied

    # staleness

    def _part_if_unchanged(self, *also: str) -> Part:
        """The part; raises where its tensors, or `also` these, have changed since the call."""
        check_unchanged(self._part.call, self._origin, self._cache, self._versions, also)
        return self._part

    def _with_part(self, part: Part) -> Heads:
        view = object.__new__(Heads)
        view.__dict__.update(self.__dict__, _part=part)
        return view

    def __getstate__(self) -> dict[str, Any]:
        return self.detach().__dict__

    def __repr__(self) -> str:
        kind = "" if self._part.contribution_norm is None else ", of contributions"
        return f"Heads(shape={tuple(self.shape)}, over={self._part.call.over!r}{kind})"
