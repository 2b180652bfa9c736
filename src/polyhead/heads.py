"""What the heads did: a view on one attention that computes nothing until it is asked."""

from __future__ import annotations

import copy
import html as text
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils import _pytree as pytree

from polyhead.kernels import Call, metrics
from polyhead.kernels.ask import AnyPart, Place, Question, answers, mass_question
from polyhead.kernels.edge_metrics import EdgePart
from polyhead.kernels.metrics import Part
from polyhead.neighbourhood import Dense, Graph
from polyhead.picture import html, plot
from polyhead.score import Dot

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.figure import Figure

Index = int | slice | Sequence[int] | Tensor
Metric = str | tuple[Any, ...]
# What can be measured, and how many arguments it has.
_METRICS = {"entropy": 0, "distance": 0, "mass": 1, "received": 0, "top": 1, "heatmap": 1, "diversity": 0}


class Origin(NamedTuple):
    """What a view came from besides the attention itself: what the layer made of the heads' outputs."""

    outputs: Float[Tensor, "... heads queries value_dim"]
    join: Float[Tensor, "out heads_dim"] | None = None
    gate: Float[Tensor, " heads"] | None = None
    # the log-sum-exp of the scores, without the sink, where the kernel told
    lse: Float[Tensor, "... heads queries"] | None = None


class Heads:
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
        self._seen = None if torch.compiler.is_compiling() else _versions(call, origin, cache)
        self._cache = cache

    # what it is

    @property
    def shape(self) -> torch.Size:
        return self._part.shape

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
        call, join = self._fresh("v", "W_O", "gate").call, self._origin.join
        heads = call.sizes.heads
        # (..., out, heads · dim) -> (..., heads, out, dim)
        by_head = None if join is None else join.unflatten(-1, (heads, -1)).movedim(-2, -3)
        moved = metrics.moved_by(call.v, by_head, heads)
        return moved if self._origin.gate is None else moved * self._origin.gate.abs()[..., :, None]

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
            numbers = _pick(axis, part.numbers(axis), index)
            if isinstance(part, EdgePart) and axis not in part.axes:
                part = part.ending(axis, numbers)
            else:
                part = _chosen(part, axis, numbers)
        return self._with(part)

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
        return answers(part._replace(moved=None), questions, moved=moved, lse=self._origin.lse)

    def _question(self, metric: Metric) -> Question:
        """A metric as the kernels know it; checked."""
        name, *about = (metric,) if isinstance(metric, str) else metric
        part, moved = self._part, self._part.moved is not None
        if name == "contribution" and about:
            return self._question(tuple(about))._replace(moved=True)
        if name not in _METRICS or len(about) != _METRICS[name]:
            if name == "received" and len(about) == 1:
                return Question(name, tuple(about), moved)
            known = ", ".join(f"({name!r}, …)" if number else repr(name) for name, number in _METRICS.items())
            raise ValueError(f"metrics: {metric!r} is none of {known}, ('contribution', …)")
        if name == "mass":
            question = mass_question(about[0], len(part.numbers("queries")), part.keys_seen, self.device)
            return question._replace(moved=moved)
        if name == "top" and not 1 <= about[0] <= part.keys_seen:
            raise ValueError(f"k: it is {about[0]}; there are {part.keys_seen} keys")
        if name == "heatmap" and about[0] < 1:
            raise ValueError(f"size: it is {about[0]}; it must be 1 or more")
        return Question(name, tuple(about), moved)

    def entropy(self) -> Float[Tensor, "... heads queries"]:
        """How spread each query's attention is, in nats: 0 on one key, log n evenly over n keys."""
        return self.measure("entropy")[0]

    def distance(self) -> Float[Tensor, "... heads queries"]:
        """How far from itself each query looks, on average."""
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
        if queries < 2 or number < 2:
            raise ValueError(f"queries: it is {queries}, of {number}; at least two are compared")
        chosen = torch.linspace(0, number - 1, min(queries, number), device=self.device).long()
        answer = metrics.agreement(call, chosen)
        return answer if self._part.heads is None else answer.index_select(-1, self._part.heads)

    # pictures

    def plot(self, *, batch: int = 0, tokens: Sequence[str] | None = None, size: int = 256) -> Figure:
        """A heat-map for each head, as a matplotlib Figure (`pip install polyhead[plot]`).

        Args:
            batch: which row of the batch.
            tokens: names for the keys (and for as many queries).
            size: a longer sequence is averaged to as many cells.
        """
        return plot(
            self._row_maps(batch, size), self._part.numbers("heads").tolist(), tokens, self._extent(), self._measure()
        )

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
        lead = self.shape[: -len(self._part.axes)]
        if not 0 <= batch < lead.numel():
            raise ValueError(f"batch: it is {batch}; there are {lead.numel()} rows")
        at = torch.unravel_index(torch.tensor(batch), lead) if lead else ()
        part = _narrowed(self._fresh(), [_slice(int(i), n) for i, n in zip(at, lead, strict=True)])
        about_all = part._replace(moved=None)
        maps = answers(about_all, [Question("heatmap", (size,), part.moved is not None)], moved=part.moved)[0].detach()
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
        self._fresh(*_WATCHED)
        lasting: Heads = pytree.tree_map(change, self._with(self._part))
        part = lasting._part
        lasting._part = part._replace(call=part.call._replace(score=copy.deepcopy(part.call.score)))
        return lasting

    # how it stays true

    def _fresh(self, *also: str) -> AnyPart:
        """The part, after making sure that nothing that it and these others need has changed since the call."""
        if self._seen is None:
            return self._part
        now = _versions(self._part.call, self._origin, self._cache)
        changed = [name for name, before, after in zip(_WATCHED, self._seen, now, strict=True) if before != after]
        stale = [name for name in changed if name in _WEIGHTS_NEED or name in also]
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

    # as a tensor

    def __getitem__(self, index: Any) -> Tensor:
        """Part of the weights; numbers and slices compute no more than they name."""
        given = index if isinstance(index, tuple) else (index,)
        plain = all(i is Ellipsis or (isinstance(i, (int, slice)) and not isinstance(i, bool)) for i in given)
        if not plain or len(given) > len(self.shape) + 1 or given.count(Ellipsis) > 1:
            return self.weights[index]
        place = given.index(Ellipsis) if Ellipsis in given else len(given)
        behind = len(given) - place - 1 if Ellipsis in given else 0
        filled = (*given[:place], *[slice(None)] * (len(self.shape) - place - behind), *given[len(given) - behind :])
        if len(filled) != len(self.shape):
            raise IndexError(f"too many indices: {len(given)} for a view of {len(self.shape)} axes")
        slices = [_slice(i, n) if isinstance(i, int) else i for i, n in zip(filled, self.shape, strict=True)]
        own = len(self._part.axes)
        part = _narrowed(self._fresh(), slices[:-own])
        for axis, s in zip(part.axes, slices[-own:], strict=True):
            if s != slice(None):
                part = _chosen(part, axis, part.numbers(axis)[s])
        w = part.weights().to(self.dtype)
        return w[tuple(0 if isinstance(i, int) else slice(None) for i in filled)]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_heads = lambda x: isinstance(x, Heads)
        to_tensor = lambda x: x.weights if isinstance(x, Heads) else x
        args, kwargs = pytree.tree_map(to_tensor, (tuple(args), kwargs or {}), is_leaf=is_heads)
        return func(*args, **kwargs)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        array = self.numpy()
        return array if dtype is None else array.astype(dtype)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not hasattr(Tensor, name):
            raise AttributeError(f"Heads has no attribute {name!r}")
        if name.endswith("_"):
            raise AttributeError(
                f"Heads is a view that is computed anew: {name}() would change nothing; use heads.weights"
            )
        return getattr(self.weights, name)

    def __bool__(self) -> bool:
        return bool(self.weights)

    @property
    def requires_grad(self) -> bool:
        call = self._part.call
        learned = (call.q, call.k, call.table, call.bias, call.sink, *call.score.learned(), *call.over.leaves())
        return any(x is not None and x.requires_grad for x in learned)

    def numel(self) -> int:
        return self.shape.numel()

    @property
    def dtype(self) -> torch.dtype:
        return self._part.call.q.dtype

    @property
    def device(self) -> torch.device:
        return self._part.call.q.device

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def dim(self) -> int:
        return len(self.shape)

    def size(self, dim: int | None = None) -> torch.Size | int:
        return self.shape if dim is None else self.shape[dim]

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Iterator[Tensor]:
        return (self[i] for i in range(len(self)))

    def __repr__(self) -> str:
        what = "" if self._part.moved is None else ", of contributions"
        return f"Heads(shape={tuple(self.shape)}, over={self._part.call.over!r}{what})"


def _as_tensor(name: str) -> Callable[..., Any]:
    method = getattr(Tensor, name)

    def apply(self: Heads, *others: Any) -> Any:
        return method(self.weights, *(other.weights if isinstance(other, Heads) else other for other in others))

    return apply


for _name in (
    ["add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "matmul", "rmatmul", "pow", "neg", "abs", "eq", "ne", "lt", "le", "gt", "ge"]
):  # fmt: skip
    setattr(Heads, f"__{_name}__", _as_tensor(f"__{_name}__"))


def _narrowed(part: AnyPart, rows: list[slice]) -> AnyPart:
    """A part in some rows of its batch."""
    if all(row == slice(None) for row in rows):
        return part
    call, at = part.call, tuple(rows)
    batch, bias = call.sizes.batch, call.bias
    own = len(part.axes)
    if bias is not None and bias.dim() > own:
        bias = bias.expand(*batch, *bias.shape[-own:])[at]
    over = call.over if isinstance(call.over, Graph) else call.over.rows(batch, at)
    call = call._replace(q=call.q[at], k=call.k[at], v=call.v[at], over=over, bias=bias)
    return part._replace(call=call, moved=None if part.moved is None else part.moved[at])


def _chosen(part: AnyPart, axis: str, numbers: Int[Tensor, " some"]) -> AnyPart:
    changed: dict[str, Any] = {axis: numbers}
    return part._replace(**changed)


def _slice(index: int, size: int) -> slice:
    index = operator.index(index)
    if not -size <= index < size:
        raise IndexError(f"index {index} is out of bounds for an axis of {size}")
    return slice(index % size, index % size + 1)


def _pick(axis: str, own: Int[Tensor, " own"], index: Index) -> Int[Tensor, " some"]:
    """Which of its own numbers a view keeps on an axis."""
    if isinstance(index, slice):
        return own[index]
    at = torch.as_tensor(index, device=own.device).reshape(-1)
    if at.dtype == torch.bool:
        at = at.nonzero()[:, 0] if len(at) == len(own) else at
    if not len(at):
        return own[:0]
    whole = not at.is_floating_point() and at.dtype != torch.bool
    if not whole or not -len(own) <= int(at.min()) <= int(at.max()) < len(own):
        raise ValueError(f"{axis}: {index!r} is out of reach; there are {len(own)}")
    return own[at]


# What the weights are computed from; the others are needed by some answers.
_WEIGHTS_NEED = ("q", "k", "over", "score", "position", "bias", "sink", "cache")
_WATCHED = (*_WEIGHTS_NEED, "v", "outputs", "W_O", "gate")


def _versions(call: Call, origin: Origin, cache: Any) -> tuple[object, ...]:
    """A count of in-place changes of all that a view points to, in the order of `_WATCHED`."""
    q, k, v, over, score, table, bias, sink, _, _ = call
    # a cache only appends, and counts by itself
    cached = cache is not None
    return (
        _version(q),
        None if cached else _version(k),
        () if type(over) is Dense else tuple(_version(x) for x in over.leaves()),
        () if type(score) is Dot else tuple(_version(x) for x in score.learned()),
        _version(table),
        _version(bias),
        _version(sink),
        None if cache is None else cache.generation,
        None if cached else _version(v),
        _version(origin.outputs),
        _version(origin.join),
        _version(origin.gate),
    )


def _version(x: Tensor | None) -> tuple[int, int] | None:
    # tensors made under torch.inference_mode() are not counted
    return None if x is None or x.is_inference() else (id(x), x._version)


def _flatten(heads: Heads) -> tuple[list[Any], Any]:
    fields: dict[str, Any] = {**heads._part.call._asdict(), **heads._part._asdict(), **heads._origin._asdict()}
    static = {name: fields.pop(name) for name in ("score", "dropout", "call")}
    present = {name: field for name, field in fields.items() if field is not None}
    return list(present.values()), (tuple(present), static["score"], static["dropout"])


def _unflatten(children: Any, context: Any) -> Heads:
    names, score, dropout = context
    fields = dict(zip(names, children, strict=True))
    take: Callable[[Any], dict[str, Any]] = lambda kind: {n: fields.get(n) for n in kind._fields}
    call = Call(**{**take(Call), "score": score, "dropout": dropout})
    heads = object.__new__(Heads)
    kind = EdgePart if isinstance(call.over, Graph) else Part
    heads._part, heads._origin = kind(**{**take(kind), "call": call}), Origin(**take(Origin))
    heads._seen = heads._cache = None
    return heads


def _dumpable(context: Any) -> Any:
    names, score, dropout = context
    if type(score) is not Dot:
        raise ValueError(f"score: a view on {type(score).__name__} scores cannot be written into an exported program")
    return names, score.scale, dropout


pytree.register_pytree_node(
    Heads,
    _flatten,
    _unflatten,
    serialized_type_name="polyhead.heads.Heads",
    to_dumpable_context=_dumpable,
    from_dumpable_context=lambda dumped: (tuple(dumped[0]), Dot(dumped[1]), dumped[2]),
)
