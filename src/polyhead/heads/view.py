"""What the heads did: a view on one attention that computes nothing until it is asked."""

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

from polyhead._checks import WrongType, check_integer, kind_of
from polyhead.heads.grid_view import At, averaged_around, drawn_around, drawn_from, points_of
from polyhead.heads.indexing import Index, chosen, narrowed, one, pick
from polyhead.heads.origin import WATCHED, WEIGHTS_NEED, Origin, versions
from polyhead.heads.tensor_interface import AsTensor
from polyhead.kernels import Call
from polyhead.metrics import blockwise
from polyhead.metrics.blockwise import Part
from polyhead.metrics.compute import AnyPart, MetricRequest, Place, compute, mass_question
from polyhead.metrics.edges import EdgePart
from polyhead.neighbourhood import Graph, broadcasts
from polyhead.plots import html, plot

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Metric = str | tuple[Any, ...]
# What can be measured, and how many arguments it has.
_METRICS = {"entropy": 0, "distance": 0, "mass": 1, "received": 0, "top": 1, "heatmap": 1, "diversity": 0}


class Heads(AsTensor):
    """The weights `(..., heads, queries, keys)` of one attention, before dropout, as a view.

    It has the weights' shape, indexes like them and turns into a tensor wherever one is asked for; `heads[0, 3]`
    computes only that part. The numbers about heads (`entropy`, `received`, …) are streamed in blocks of queries and
    never build queries x keys. It keeps references, no copies: after an in-place change of what an answer needs (an
    optimizer's step on W_O, a truncated cache) it raises rather than mislead; `.detach()` makes it lasting. What
    `torch.compile` and `torch.export` return is not watched.
    """

    def __init__(self, call: Call, origin: Origin, cache: Any = None) -> None:
        self._part: AnyPart = EdgePart(call) if isinstance(call.over, Graph) else Part(call)
        self._origin = origin
        self._seen = None if torch.compiler.is_compiling() else versions(call, origin, cache)
        self._cache = cache

    # what it is

    @property
    def weights(self) -> Float[Tensor, "... heads queries keys"]:
        """The weights as a tensor: computed now, differentiable."""
        return self._fresh().weights().to(self.dtype)

    @property
    def outputs(self) -> Float[Tensor, "... heads queries value_dim"]:
        """Each head's own output, before the heads are combined."""
        self._fresh("outputs")
        out, part = self._origin.outputs, self._part
        out = out if part.heads is None else out.index_select(-3, part.heads)
        return out if isinstance(part, EdgePart) or part.queries is None else out.index_select(-2, part.queries)

    def contribution(self) -> Heads:
        """The same view, each weight times the norm of what it moves: |α_ij · W_O v_j| (Kobayashi 2020).

        Much of the plain weight may rest on keys whose values are next to nothing: this tells.
        """
        return self._with(self._part._replace(moved=self._moved_by_a_weight()))

    def _moved_by_a_weight(self) -> Float[Tensor, "... all_heads all_keys"]:
        call, join, gate = self._fresh("v", "W_O", "gate").call, self._origin.join, self._origin.gate
        if call.v.is_inference():
            # what was made in inference mode has no gradients for others to join
            join, gate = (None if x is None else x.detach() for x in (join, gate))
        heads = call.sizes.heads
        # (..., out, heads · dim) -> (..., heads, out, dim)
        by_head = None if join is None else join.unflatten(-1, (heads, -1)).movedim(-2, -3)
        moved = blockwise.moved_by(call.v, by_head, heads)
        return moved if gate is None else moved * gate.abs()[..., :, None]

    def select(
        self,
        *,
        heads: Index | None = None,
        queries: Index | None = None,
        keys: Index | None = None,
        edges: Index | None = None,
    ) -> Heads:
        """A view on some heads, queries or keys: a number, a slice or a list of numbers for each; axes stay.

        On a graph, `edges` are chosen by their numbers, by the `queries` that they go to and the `keys` that they come from.
        """
        part = self._part
        for axis, index in (("heads", heads), ("edges", edges), ("queries", queries), ("keys", keys)):
            if index is None:
                continue
            if axis == "edges" and not isinstance(part, EdgePart):
                raise ValueError("edges: this attention is not on a graph; choose queries and keys")
            numbers = pick(axis, part.numbers(axis), index)
            if isinstance(part, EdgePart) and axis not in part.axes:
                part = part.ending(axis, numbers)
            else:
                part = chosen(part, axis, numbers)
        return self._with(part)

    def row(self, batch: int) -> Heads:
        """A view on one row of the batch, counted over all batch axes, which stay."""
        part, origin = self._fresh("v", "outputs", "W_O", "gate"), self._origin
        lead = self.shape[: -len(part.axes)]
        batch = check_integer("batch", batch, 0, lead.numel() - 1)
        at = tuple(one(int(i), n) for i, n in zip(np.unravel_index(batch, lead), lead, strict=True)) if lead else ()
        view = self._with(narrowed(part, list(at)))
        lse = None if origin.lse is None else origin.lse[at]
        view._origin = origin._replace(outputs=origin.outputs[at], lse=lse)
        view._seen = None if self._seen is None else versions(view._part.call, view._origin, self._cache)
        return view

    @property
    def edge_index(self) -> Int[Tensor, "2 edges"]:
        """On a graph: the source and the destination of each edge of the view, in the order of the weights."""
        if not isinstance(self._part, EdgePart):
            raise ValueError("edge_index: this attention is not on a graph")
        return self._part.pairs

    # numbers about the heads

    def measure(self, *metrics: Metric) -> list[Any]:
        """Several numbers in one pass, as the methods below give them.

        Each is a method's name, or a tuple of it and its arguments: `heads.measure("entropy", ("mass", "previous"), ("top", 3))`.
        `("contribution", "received")` is `heads.contribution().received()`.
        """
        part = self._fresh()
        questions = [self._question(metric) for metric in metrics]
        moved = part.moved
        if moved is None and any(question.moved for question in questions):
            moved = self._moved_by_a_weight()
        return compute(part._replace(moved=None), questions, moved=moved, lse=self._origin.lse)

    def _question(self, metric: Metric) -> MetricRequest:
        """A metric as the kernels know it; checked."""
        if not isinstance(metric, str) and not (isinstance(metric, tuple) and metric):
            raise ValueError(f"metrics: {metric!r} is no name of a metric, and no tuple of a name and its arguments")
        name, *about = (metric,) if isinstance(metric, str) else metric
        part, moved = self._part, self._part.moved is not None
        if name == "contribution" and about:
            return self._question(tuple(about))._replace(moved=True)
        if name not in _METRICS or len(about) != _METRICS[name]:
            if name == "received" and len(about) == 1:
                self._check_counts(about[0])
                return MetricRequest(name, tuple(about), moved)
            known = ", ".join(f"({name!r}, …)" if number else repr(name) for name, number in _METRICS.items())
            raise ValueError(f"metrics: {metric!r} is none of {known}, ('contribution', …)")
        if name == "mass":
            self._check_place(about[0])
            question = mass_question(about[0], len(part.numbers("queries")), part.keys_seen, self.device)
            return question._replace(moved=moved)
        if name == "top":
            about = [check_integer("k", about[0], 1, part.keys_seen, hint=f"there are {part.keys_seen} keys")]
        if name == "heatmap":
            about = [check_integer("size", about[0])]
        return MetricRequest(name, tuple(about), moved)

    def _check_place(self, on: object) -> None:
        """Raise where a tensor of keys is of another batch, or of other heads."""
        if not isinstance(on, Tensor):
            return
        own, queries = len(self._part.axes), len(self._part.numbers("queries"))
        keys, lead = self._part.keys_seen, tuple(self.shape[:-own])
        wanted = (*lead, keys) if on.dtype == torch.bool else (*lead, self.shape[-own], queries)
        if on.shape[-1:] == wanted[-1:] and not broadcasts(tuple(on.shape), wanted):
            raise ValueError(f"on must broadcast to {wanted}, got shape {tuple(on.shape)}")

    def _check_counts(self, counts: object) -> None:
        """Raise where this is not one number a query."""
        own = len(self._part.axes)
        wanted = (*self.shape[:-own], self.shape[-own], len(self._part.numbers("queries")))
        if counts is None or (isinstance(counts, Tensor) and broadcasts(tuple(counts.shape), wanted)):
            return
        given = tuple(counts.shape) if isinstance(counts, Tensor) else type(counts).__name__
        raise ValueError(
            f"counts: it is {given}; it must be a tensor that broadcasts to (..., heads, queries) = {wanted}"
        )

    def entropy(self) -> Float[Tensor, "... heads queries"]:
        """How spread each query's attention is, in nats: 0 on one key, log n evenly over n keys."""
        return self.measure("entropy")[0]

    def distance(self) -> Float[Tensor, "... heads queries"]:
        """How far from itself each query looks, on average: in items, on a grid from point to point."""
        return self.measure("distance")[0]

    def mass(self, on: Place) -> Float[Tensor, "... heads queries"]:
        """How much of each query's weight lies on certain keys.

        Args:
            on: `"self"`, `"previous"`, `"next"`, `"first"`; or how far after the query the key stands (-1: the previous one); or
                a bool tensor (..., keys), True for the keys that count; or whole numbers (..., heads or 1, queries): of each query
                one key, -1 for none.
        """
        return self.measure(("mass", on))[0]

    def received(self, counts: Float[Tensor, "... #heads queries"] | None = None) -> Float[Tensor, "... heads keys"]:
        """How much weight each key receives from all queries together; each counts 1, or as much as given."""
        return self.measure(("received", counts))[0]

    def top(self, k: int) -> tuple[Float[Tensor, "... heads queries k"], Int[Tensor, "... heads queries k"]]:
        """The k largest weights of each query, and the keys they lie on; -1 where a query has fewer keys."""
        return self.measure(("top", k))[0]

    def heatmap(self, size: int = 64) -> Float[Tensor, "... heads height width"]:
        """The weights averaged to at most size x size cells: a picture of any length."""
        return self.measure(("heatmap", size))[0]

    def diversity(self) -> Float[Tensor, "... heads heads"]:
        """How differently two heads attend, averaged over queries: 0 alike, 1 no key in common."""
        return self.measure("diversity")[0]

    def agreement(self, queries: int = 64) -> Float[Tensor, "... heads"]:
        """How alike queries rank the keys, in each head: 1 is one ranking for all, *static* attention (Brody 2021).

        Spearman's correlation of the scores of all keys, whoever may attend to them, averaged over pairs of queries: of all,
        or of as many as `queries`, evenly apart. Features of edges do not count: most pairs have none.
        """
        call = self._fresh().call
        number = call.sizes.queries
        queries = check_integer("queries", queries, 2)
        if number < 2:
            raise ValueError(f"queries: at least two are compared, and this attention has {number}")
        chosen = torch.linspace(0, number - 1, min(queries, number), device=self.device).long()
        answer = blockwise.agreement(call, chosen)
        return answer if self._part.heads is None else answer.index_select(-1, self._part.heads)

    def around(
        self, reach: int | Sequence[int], grid: Sequence[int] | None = None
    ) -> Float[Tensor, "... heads *window"]:
        """On a grid: the weights by where the key stands from the query, `(..., heads, 2·reach + 1, …)`, an axis for each of the grid's.

        The average over all queries: where a key lies beyond the border for some, these have nothing there. It shows the taps of
        a convolution, or that a head has none. Special tokens do not count.

        Args:
            reach: how many points to either side: a number, or one an axis.
            grid: where the neighbourhood is no `Grid`: the sizes of the grid that fills the last keys; those before are special tokens.
        """
        part = self._fresh()
        return averaged_around(part, points_of(part, grid), reach)

    # pictures

    def plot(
        self,
        *,
        batch: int = 0,
        tokens: Sequence[str] | None = None,
        size: int | None = None,
        image: Any = None,
        at: At | None = None,
        grid: Sequence[int] | None = None,
        around: int | Sequence[int] | None = None,
    ) -> Figure:
        """A picture of each head, as a matplotlib Figure (`pip install polyhead[plot]`).

        `plot()` draws heat-maps, queries x keys. On a grid of rows and columns there are two more: `plot(image=photo, at=(3, 5))`
        lays over the image where one query looks, and `plot(around=2)` draws `around(2)`.

        Args:
            batch: which row of the batch.
            tokens: names for the keys (and for as many queries) of heat-maps.
            size: of heat-maps: a longer sequence is averaged to as many cells; 256 unless given.
            image: what the points are of, in any size: (channels, height, width), (height, width, channels) or (height, width); of
                bytes, of floats from 0 to 1, or of any floats, whose range is then shown whole.
            at: the query: its row and column, or its number, such as 0 for [CLS]; the one in the middle unless given. It counts
                queries, not keys: with a stride of 4, query (6, 5) stands at the keys' point (24, 20). Without an image the weights are drawn alone.
            grid: as in `around`: for attention that does not say where its items stand.
            around: how far around the queries to look.
        """
        measure = self._measure()
        if tokens is not None and not isinstance(tokens, Sequence):
            raise WrongType(f"tokens must be a list of names, got {kind_of(tokens)}")
        if around is None and image is None and at is None and grid is None:
            numbers = self._part.numbers("heads").tolist()
            return plot(self._row_maps(batch, 256 if size is None else size), numbers, tokens, self._extent(), measure)
        for name, given in (("tokens", tokens), ("size", size)):
            if given is not None:
                raise ValueError(
                    f"{name}: it is for heat-maps of queries x keys; leave it out, or image, at, grid and around"
                )
        if around is not None and (image is not None or at is not None):
            raise ValueError(
                "around: it draws the average over all queries, which stands nowhere on an image; leave it out, or image and at"
            )
        part = self.row(batch)._part
        points = points_of(part, grid)
        if around is not None:
            return drawn_around(part, points, around, measure)
        return drawn_from(part, points, at, image, measure)

    def _repr_html_(self) -> str:
        if not self.shape.numel():
            return text.escape(repr(self))
        return html(self._row_maps(0, 64), self._part.numbers("heads").tolist(), repr(self))

    def _extent(self) -> tuple[int, int]:
        """How many queries and keys a picture shows."""
        part = self._part
        return len(part.numbers("queries")), len(part.numbers("keys"))

    def _measure(self) -> str:
        return "weight" if self._part.moved is None else "contribution"

    def _row_maps(self, batch: int, size: int) -> Float[Tensor, "heads height width"]:
        """The heat-maps of one row of the batch."""
        maps = self.row(batch).heatmap(size).detach()
        return maps.reshape(maps.shape[-3:])

    # lasting copies

    def detach(self) -> Heads:
        """The same view without gradients, on copies of all that may change later."""
        return self._moved(lambda x: x.detach().clone())

    def cpu(self) -> Heads:
        """A lasting copy of the view on the CPU."""
        return self._moved(lambda x: x.detach().to("cpu", copy=True))

    def numpy(self) -> np.ndarray[Any, Any]:
        """The weights as a NumPy array."""
        w = self.weights.detach().cpu()
        return (w.float() if w.dtype == torch.bfloat16 else w).numpy()

    def _moved(self, change: Callable[[Tensor], Tensor]) -> Heads:
        self._fresh(*WATCHED)
        lasting: Heads = pytree.tree_map(change, self._with(self._part))
        part = lasting._part
        lasting._part = part._replace(call=part.call._replace(score=copy.deepcopy(part.call.score)))
        return lasting

    # how it stays true

    def _fresh(self, *also: str) -> AnyPart:
        """The part, after making sure that nothing that it and these others need has changed since the call."""
        if self._seen is None:
            return self._part
        now = versions(self._part.call, self._origin, self._cache)
        changed = [name for name, before, after in zip(WATCHED, self._seen, now, strict=True) if before != after]
        stale = [name for name in changed if name in WEIGHTS_NEED or name in also]
        if stale:
            raise ValueError(
                f"this view is stale: {', '.join(stale)} changed in place since the attention was computed; "
                "look before the change, or keep a lasting copy with heads.detach()"
            )
        return self._part

    def _with(self, part: AnyPart) -> Heads:
        view = object.__new__(Heads)
        view.__dict__.update(self.__dict__, _part=part)
        return view

    def __getstate__(self) -> dict[str, Any]:
        return self.detach().__dict__

    def __repr__(self) -> str:
        what = "" if self._part.moved is None else ", of contributions"
        return f"Heads(shape={tuple(self.shape)}, over={self._part.call.over!r}{what})"
