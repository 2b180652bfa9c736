"""The layer: projections, attention, and how heads become features."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from polyhead._checks import (
    HEADS,
    WrongType,
    check_integer,
    check_integers,
    check_number,
    check_numel,
    check_tensor,
    is_integer,
    shown,
)
from polyhead._torch import is_symbolic, record_call, refuse_scripting
from polyhead.attend import Explanation, assemble, explained, points, run
from polyhead.heads import Heads, Origin
from polyhead.kernels.call import Call
from polyhead.manifold import Manifold, Stiefel
from polyhead.neighbourhood import Dense, Neighbourhood, neighbourhood
from polyhead.nn import surgery
from polyhead.nn import weight_manifolds as manifolds
from polyhead.nn.cache import KeyValueCache, KeyValues
from polyhead.nn.checks import (
    CALL_ARGUMENTS,
    CONSTRUCTOR_WORDS,
    check_like,
    check_shares,
    check_sizes,
    foreign_argument_error,
)
from polyhead.nn.projection_inputs import dropout, dropout_per_head, live_rows, project
from polyhead.nn.unpad import Unpadding
from polyhead.position import Position
from polyhead.score import GAT, Dot, GATv2, Score

Combine = Literal["project", "concat", "mean"]


class MultiHeadAttention(nn.Module):
    """Multi-head attention: output = combine(attend(W_Q query, W_K key, W_V value)).

    The names are those of Vaswani 2017; W_Q … W_O are the modules `q_proj`, `k_proj`, `v_proj`, `o_proj`. Weights start
    Xavier-uniform, biases at zero.

    Args:
        d_model: features of the query, and of key, value and output unless given.
        num_heads: heads of the queries.
        kv_heads: heads of keys and values, shared by consecutive query heads (1: multi-query).
        head_dim: features a head scores with; d_model / num_heads unless given.
        value_dim: features a head sums; head_dim unless given.
        d_key, d_value: features of key and value inputs.
        d_out: features of the output, with `combine="project"`.
        score: how strongly a query attends to a key: `"dot"`, `"gat"`, `"gatv2"`, or a `Score` such as `GATv2(8, 16, edge_dim=4)`.
        position: where keys stand: `Rotary()`, `ALiBi(num_heads)`, `RelativeBias(num_heads)`; on a grid `Rotary(axes=2)`,
            `RelativeBias(num_heads, window=(7, 7))`, `QuadraticOffset(centres)`.
        sink: the logit of one more key of value zero: a number, or `"learned"` for one learned number a head.
        combine: `"project"` joins the heads and maps them with W_O; `"concat"` joins them; `"mean"` averages them.
        manifold: where the projections lie. `"stiefel"`: each head's rows of W_Q, W_K and W_V are orthonormal, a basis of the
            subspace that it sees; `{"v": "stiefel"}` chooses among q, k and v. `polyhead.optim` keeps them there.
        qk_norm: RMS-normalise each head's queries and keys, with learned gains.
        residual: whether the query is added to the output, through a linear map `r_proj` where their widths differ.
        bias: whether the projections and the output have biases.
        dropout: the share of pairs that is dropped in training.
        input_dropout: the share of the inputs' numbers that is dropped in training, drawn anew for each head.
        value_dropout: the share of the values' numbers that is dropped in training, after they are projected.
    """

    sink: Tensor | None
    gate: Tensor | None
    """Optional: set to one number a head, that multiplies the head's output: a tensor, or an `nn.Parameter` to train it.

    `state_dict` has it. A layer without one gets a fixed one on loading: set a parameter before, to go on training.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        *,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        value_dim: int | None = None,
        d_key: int | None = None,
        d_value: int | None = None,
        d_out: int | None = None,
        score: Score | Literal["dot", "gat", "gatv2"] = "dot",
        position: Position | None = None,
        sink: float | Literal["learned"] | None = None,
        combine: Combine = "project",
        manifold: manifolds.Sampler | Mapping[str, manifolds.Sampler] = "euclidean",
        qk_norm: bool = False,
        residual: bool = False,
        bias: bool = True,
        dropout: float = 0.0,
        input_dropout: float = 0.0,
        value_dropout: float = 0.0,
        **torch_words: Any,
    ) -> None:
        super().__init__()
        if torch_words:
            raise foreign_argument_error(torch_words, CONSTRUCTOR_WORDS)
        d_model, num_heads = check_integer("d_model", d_model), check_integer("num_heads", num_heads, 1, HEADS)
        kv_heads, head_dim, value_dim, d_key, d_value, d_out = check_sizes(
            kv_heads=kv_heads, head_dim=head_dim, value_dim=value_dim, d_key=d_key, d_value=d_value, d_out=d_out
        )
        if head_dim is None and d_model % num_heads:
            raise ValueError(
                f"num_heads: {num_heads} does not divide d_model {d_model}; "
                f"pass head_dim={d_model // num_heads or 1} (any head_dim will do), or another num_heads"
            )
        if kv_heads is not None and num_heads % kv_heads:
            raise ValueError(
                f"kv_heads: {kv_heads} does not divide num_heads {num_heads}; heads share keys and values in groups of one size"
            )
        _check_choices(score, position, sink, combine, d_out)
        dropout, input_dropout, value_dropout = check_shares(
            dropout=dropout, input_dropout=input_dropout, value_dropout=value_dropout
        )
        self.d_model, self.num_heads = d_model, num_heads
        self.kv_heads = self.value_heads = kv_heads or num_heads
        self.head_dim = head_dim or d_model // num_heads
        self.value_dim = value_dim or self.head_dim
        self.d_key = d_key or d_model
        self.d_value = d_value or d_key or d_model
        self.combine, self.dropout, self.residual = combine, dropout, residual
        self.input_dropout, self.value_dropout = input_dropout, value_dropout
        self.score = score if isinstance(score, Score) else _SCORES[score](num_heads, self.head_dim)
        self._check_ties()
        self.position = position
        if position is not None:
            position.check(num_heads, self.head_dim)
        shares_queries, shares_values = self.score.shares_queries, self.score.shares_values
        width = {"project": d_out or d_model, "concat": num_heads * self.value_dim, "mean": self.value_dim}[combine]
        widest = num_heads * max(self.head_dim, self.value_dim), max(d_model, self.d_key, self.d_value, width)
        check_numel("the largest projection", widest, hint="d_model, num_heads, head_dim or another size is too large")
        # None where the score says that k_proj serves
        self.q_proj = None if shares_queries else nn.Linear(d_model, num_heads * self.head_dim, bias)
        self.k_proj = nn.Linear(self.d_key, self.kv_heads * self.head_dim, bias)
        self.v_proj: nn.Module | None = (
            None if shares_values else nn.Linear(self.d_value, self.kv_heads * self.value_dim, bias)
        )
        self.o_proj = nn.Linear(num_heads * self.value_dim, width, bias) if combine == "project" else None
        self.o_bias = nn.Parameter(torch.empty(width)) if bias and combine != "project" else None
        self.r_proj = nn.Linear(d_model, width, bias=False) if residual and width != d_model else None
        self.q_norm = nn.RMSNorm(self.head_dim) if qk_norm else None
        self.k_norm = nn.RMSNorm(self.head_dim) if qk_norm else None
        self.manifold = manifold
        self._sink_start = 0.0 if sink is None or sink == "learned" else float(sink)
        if sink == "learned":
            self.sink = nn.Parameter(torch.empty(num_heads))
        else:
            self.register_buffer("sink", None if sink is None else torch.empty(num_heads))
        self.register_buffer("gate", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the projections' weights anew, and set the sink to where it starts."""
        if self.sink is not None:
            nn.init.constant_(self.sink, self._sink_start)
        if self.o_bias is not None:
            nn.init.zeros_(self.o_bias)
        redraw = getattr(self.score, "reset_parameters", None)
        if redraw is not None:
            redraw()
        for linear in (self.q_proj, self.k_proj, self.v_proj, self.o_proj, self.r_proj):
            if isinstance(linear, nn.Linear):
                nn.init.xavier_uniform_(linear.weight)
                if linear.bias is not None:
                    nn.init.zeros_(linear.bias)
        manifolds.draw(self)

    def forward(
        self,
        query: Float[Tensor, "... queries d_model"],
        key: Float[Tensor, "... keys d_key"] | KeyValues | None = None,
        value: Float[Tensor, "... keys d_value"] | None = None,
        over: Neighbourhood | Tensor | None = None,
        *,
        bias: Float[Tensor, "... #heads #queries #keys"] | None = None,
        cache: KeyValueCache | None = None,
        **torch_words: Any,
    ) -> tuple[Float[Tensor, "... queries d_out"], Heads]:
        """The output, and a view on what the heads did.

        Args:
            query: who attends. With nothing else, everything attends to itself.
            key, value: what is attended to; `value` is `key` unless given, and `key` is `query`. What `project_kv` has kept of
                them may stand in place of `key`.
            over: who may attend to whom; a bool tensor is a mask, True = may attend.
            bias: numbers added to the scores.
            cache: keys and values of earlier calls, to which this call's are appended.

        Raises:
            ValueError: where shapes do not fit, with the argument's name and the rule.
        """
        if is_symbolic(query):
            return record_call(self, query, key, value, over, bias=bias, cache=cache, **torch_words)
        if torch_words:
            raise foreign_argument_error(torch_words, CALL_ARGUMENTS)
        if cache is not None and not isinstance(cache, KeyValueCache):
            raise ValueError(f"cache: it is {type(cache).__name__}; it must be one made by mha.cache(batch, length)")
        if cache is not None and key is not None and key is not query:
            raise ValueError(
                "cache: it is for a sequence that attends to itself; key must be left out, or be the query"
            )
        gate, o_proj = self.gate, self.o_proj
        if gate is not None and gate.shape != (self.num_heads,):
            raise ValueError(
                f"gate: its shape is {tuple(gate.shape)}; it must be one number a head, ({self.num_heads},)"
            )
        call, live = self._call(query, key, value, over, bias, cache)
        out, lse = run(call)
        if gate is not None:
            out = out * gate[:, None, None].to(out.dtype)
        if self.combine == "mean":
            output = out.mean(-3)
        else:
            # (..., queries, heads · value_dim)
            output = out.transpose(-3, -2).flatten(-2)
        if o_proj is not None:
            output = project(o_proj, output) if live is None else live.pad(o_proj(live.unpad(output)))
        elif self.o_bias is not None:
            output = output + self.o_bias
        if self.residual:
            output = output + (query if self.r_proj is None else project(self.r_proj, query))
        # a quantised map has no tensor of that name
        w_o = getattr(o_proj, "weight", None)
        return output, Heads(call, Origin(out, w_o if isinstance(w_o, Tensor) else None, gate, lse), cache)

    __prepare_scriptable__ = refuse_scripting

    def explain(
        self,
        query: Float[Tensor, "... queries d_model"],
        key: Float[Tensor, "... keys d_key"] | KeyValues | None = None,
        value: Float[Tensor, "... keys d_value"] | None = None,
        over: Neighbourhood | Tensor | None = None,
        *,
        bias: Float[Tensor, "... #heads #queries #keys"] | None = None,
    ) -> Explanation:
        """Which kernel a call with these arguments takes, and why the faster ones refuse. No attention is computed."""
        return explained(self._call(query, key, value, over, bias, None, seed=torch.tensor(0))[0])

    def _call(
        self, query: Tensor, key: Tensor | KeyValues | None, value: Tensor | None, over: Neighbourhood | Tensor | None,
        bias: Tensor | None, cache: KeyValueCache | None, seed: Tensor | None = None,
    ) -> tuple[Call, Unpadding | None]:  # fmt: skip
        """Project, position and cache: everything before the attention."""
        to_itself = key is None or key is query
        over, live = neighbourhood(over), None
        if type(over) is not Dense:
            over = over.within(to_itself)
        if isinstance(key, KeyValues):
            q, k, v = self._to_memory(query, key, value)
            queries, _ = self._points(over, q, k)
        else:
            key = query if key is None else key
            value = key if value is None else value
            self._check_inputs(query, key, value)
            if to_itself and value is key and cache is None and not (self.input_dropout and self.training):
                live = live_rows(over, query, self.num_heads)
            try:
                q, k, v = self._projected(query, key, value, live)
            except RuntimeError:
                check_like(self, query=query, key=key, value=value)
                raise
            queries, keys = self._points(over, q, k)
            k, v = self._placed(k, v, 0 if cache is None else cache.length, keys)
        if self.q_norm is not None:
            q = self.q_norm(q)
        if cache is not None:
            cache.append(k, v)
            k, v = cache.k, cache.v
        if self.position is not None:
            q = self.position.rotate(q, k.shape[-2] - q.shape[-2], queries)
        dropout = self.dropout if self.training else 0.0
        try:
            call = assemble(q, k, v, over, self.score, self.position, bias, self.sink, dropout, seed)
        except BaseException:
            if cache is not None:
                cache.length -= query.shape[-2]
            raise
        return call, live

    def project_kv(
        self, key: Float[Tensor, "... keys d_key"], value: Float[Tensor, "... keys d_value"] | None = None
    ) -> KeyValues:
        """The keys and values of what is attended to again and again: `mha(x, mha.project_kv(y))` is `mha(x, y)`."""
        value = key if value is None else value
        for name, x in (("key", key), ("value", value)):
            check_tensor(name, x, "(..., keys, features)")
        if (
            key.dim() < 2
            or key.shape[-1] != self.d_key
            or value.shape[-1] != self.d_value
            or key.shape[:-1] != value.shape[:-1]
        ):
            raise ValueError(
                f"key, value: their shapes are {tuple(key.shape)} and {tuple(value.shape)}; they must be "
                f"(..., keys, {self.d_key}) and (..., keys, {self.d_value})"
            )
        if self.position is not None and self.position.axes is not None:
            raise ValueError(
                f"project_kv: {type(self.position).__name__} is for a grid, whose points only a call knows; call the layer"
            )
        try:
            projected = self._keys_values(*self._inputs(key, value))
        except RuntimeError:
            check_like(self, key=key, value=value)
            raise
        return KeyValues(*self._placed(*projected, 0, None))

    def _to_memory(self, query: Tensor, memory: KeyValues, value: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        if value is not None:
            raise ValueError("value: the key is a memory, which holds the values too; value must be left out")
        check_tensor("query", query, f"(..., items, {self.d_model})")
        if query.dim() < 2 or query.shape[-1] != self.d_model:
            raise ValueError(f"query: its shape is {tuple(query.shape)}; it must be (..., items, {self.d_model})")
        k, v = memory
        batch, keys = tuple(query.shape[:-2]), k.shape[-2]
        wanted = (*batch, self.kv_heads, keys, self.head_dim), (*batch, self.value_heads, keys, self.value_dim)
        if (tuple(k.shape), tuple(v.shape)) != wanted:
            raise ValueError(
                f"key: this memory has keys {tuple(k.shape)} and values {tuple(v.shape)}; it must be one that this layer's "
                f"project_kv made, of the query's batch {batch}"
            )
        (x,) = self._inputs(query)
        try:
            q = _split(project(self.k_proj if self.q_proj is None else self.q_proj, x), self.num_heads)
        except RuntimeError:
            check_like(self, query=query)
            raise
        if not (q.dtype == k.dtype == v.dtype and q.device == k.device == v.device):
            raise ValueError(
                f"key: this memory is {k.dtype} and {v.dtype} on {k.device}, but queries are {q.dtype} on {q.device}; "
                "call project_kv again after .to(), and under the same autocast"
            )
        return q, k, v

    def _points(self, over: Neighbourhood, q: Tensor, k: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Where queries and keys stand on a grid, if the position asks for it."""
        if self.position is None:
            return None, None
        return points(self.position, over, q.shape[-2], k.shape[-2], q.device)

    def _placed(self, k: Tensor, v: Tensor, first: int, at: Tensor | None) -> tuple[Tensor, Tensor]:
        """Keys and values as they are attended to; the first stands at position `first`, or all at these points."""
        if self.k_norm is not None:
            k = self.k_norm(k)
        if self.position is not None:
            k = self.position.rotate(k, first, at)
        # under autocast, where there is no W_V to narrow the values
        return k, v if v.dtype == k.dtype else v.to(k.dtype)

    def _projected(
        self, query: Tensor, key: Tensor, value: Tensor, live: Unpadding | None
    ) -> tuple[Float[Tensor, "... heads items dim"], ...]:
        """q, k and v, split into heads; one and the same tensor where they share a projection and an input."""
        apply_linear: Callable[[nn.Module, Any], Tensor] = project
        if live is None:
            x, y, z = self._inputs(query, key, value)
        else:
            x = y = z = live.unpad(query)
            apply_linear = lambda linear, rows: live.pad(linear(rows))
        k, v = self._keys_values(y, z, apply_linear)
        if self.q_proj is not None:
            q = _split(apply_linear(self.q_proj, x), self.num_heads)
        else:
            q = k if query is key else _split(apply_linear(self.k_proj, x), self.num_heads)
        return q, k, v

    def _inputs(self, *given: Tensor) -> list[Any]:
        """Inputs as they are projected: dropped in training, one and the same for inputs that are the same."""
        if not (self.input_dropout and self.training):
            return list(given)
        thin: dict[int, list[Any]] = {}
        for x in given:
            if id(x) not in thin:
                thin[id(x)] = dropout_per_head(x, self.num_heads, self.input_dropout)
        return [thin[id(x)] for x in given]

    def _keys_values(
        self, key: Any, value: Any, apply_linear: Callable[[nn.Module, Any], Tensor] = project
    ) -> tuple[Float[Tensor, "... heads keys dim"], Float[Tensor, "... heads keys value_dim"]]:
        k = _split(apply_linear(self.k_proj, key), self.kv_heads)
        v = k if self.v_proj is None else _split(apply_linear(self.v_proj, value), self.value_heads)
        return k, dropout(v, self.value_dropout) if self.value_dropout and self.training else v

    def cache(
        self, batch: int | tuple[int, ...] | None, length: int, *, dtype: torch.dtype | None = None
    ) -> KeyValueCache:
        """Room for `length` keys and values of a batch; None for input without a batch axis.

        The dtype is that of the projected keys unless given: of the weights, under autocast of what it narrows to.
        """
        lead = [] if batch is None else check_integers("batch", [batch] if is_integer(batch) else batch)
        length = check_integer("length", length)
        check_numel("the cache", (*lead, self.kv_heads, length, max(self.head_dim, self.value_dim)))
        # the first parameter of a projection that is not a plain map, such as one that is quantised
        like = next((p for p in self.k_proj.parameters() if p.is_floating_point()), None)
        device = torch.device("cpu") if like is None else like.device
        if dtype is None:
            narrow = device.type != "meta" and torch.is_autocast_enabled(device.type)
            dtype = torch.get_autocast_dtype(device.type) if narrow else torch.float32 if like is None else like.dtype
        shapes = (*lead, self.kv_heads, length, self.head_dim), (*lead, self.value_heads, length, self.value_dim)
        try:
            k, v = (torch.empty(shape, dtype=dtype, device=device) for shape in shapes)
        except RuntimeError as error:
            raise MemoryError(f"batch, length: there is no room for keys and values of {shapes[0]}: {error}") from None
        return KeyValueCache(k, v)

    def _check_ties(self) -> None:
        """One projection for two inputs needs inputs of one width, and heads of one width and number."""
        one = f"{type(self.score).__name__} has one projection for both"
        heads = ("kv_heads", self.kv_heads, "num_heads", self.num_heads)
        shared: list[tuple[str, int, str, int, str]] = []
        if self.score.shares_values:
            shared.append(("value_dim", self.value_dim, "head_dim", self.head_dim, one))
            shared.append(("d_value", self.d_value, "d_key", self.d_key, one))
        if self.score.shares_queries:
            shared.append((*heads, one))
            shared.append(("d_key", self.d_key, "d_model", self.d_model, one))
        if self.input_dropout:
            shared.append((*heads, "input_dropout draws anew for each head"))
        for name, size, other, wanted, reason in shared:
            if size != wanted:
                raise ValueError(f"{name}: it is {size}, but {other} is {wanted}; they must be equal, since {reason}")
        if isinstance(self.score, (GAT, GATv2)):
            self.score.check(self.num_heads, self.head_dim, self.score.edge_dim)

    def _check_inputs(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        dense = isinstance(query, Tensor) and query.layout == torch.strided and not query.is_nested
        if (
            dense
            and value is query
            and query.dim() > 1
            and query.shape[-1] == self.d_model == self.d_key == self.d_value
        ):
            return
        for name, x, features in (
            ("query", query, self.d_model),
            ("key", key, self.d_key),
            ("value", value, self.d_value),
        ):
            if not isinstance(x, Tensor) or x.is_nested or (x.layout != torch.strided and x.dim() != 2):
                check_tensor(name, x, f"(..., items, {features}), or a sparse one without a batch")
            shape = x.shape
            if len(shape) < 2 or shape[-1] != features:
                image = len(shape) > 2 and shape[1] == features
                hint = f"; an image becomes items by {name}.flatten(2).transpose(1, 2)" if image else ""
                raise ValueError(f"{name}: its shape is {tuple(shape)}; it must be (..., items, {features}){hint}")
            if shape[:-2] != query.shape[:-2]:
                raise ValueError(
                    f"{name}: its batch is {tuple(shape[:-2])}, but the query's is {tuple(query.shape[:-2])}"
                )
        if value.shape[-2] != key.shape[-2]:
            raise ValueError(f"value: it has {value.shape[-2]} items, but key has {key.shape[-2]}")

    @property
    def manifold(self) -> dict[str, Stiefel]:
        """Where W_Q, W_K and W_V lie, by `"q"`, `"k"` and `"v"`, without those that are free. It may be set to what the
        constructor takes; `polyhead.optim.project` then takes the weights there."""
        return self._manifold

    @manifold.setter
    def manifold(self, manifold: manifolds.Sampler | Mapping[str, manifolds.Sampler]) -> None:
        self._manifold = manifolds.placed(manifold, self)

    @property
    def manifolds(self) -> dict[str, Manifold]:
        """The manifolds of the parameters that have one, by their names: what `polyhead.optim.groups` reads."""
        return manifolds.manifolds(self)

    def prune(self, heads: Sequence[int]) -> None:
        """Remove heads for good. `state_dict` remembers, and loads into a layer that was never pruned.

        Prune before an optimizer is made: the projections get new, smaller parameters.
        """
        surgery.prune(self, heads)

    def fold_value_projection(self) -> MultiHeadAttention:
        """The same function without W_V: attention is linear in its values, so W_V is folded into W_O.

        Every head sums the inputs themselves. Fewer maps, but wider heads: for understanding, not for speed.
        """
        return surgery.fold_value_projection(self)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        surgery.before_loading(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        grouped = "" if self.kv_heads == self.num_heads else f", kv_heads={self.kv_heads}"
        return f"{self.d_model}, num_heads={self.num_heads}{grouped}, head_dim={self.head_dim}, combine={self.combine!r}, dropout={self.dropout}{manifolds.words(self)}"


def _check_choices(score: object, position: object, sink: object, combine: object, d_out: int | None) -> None:
    if not isinstance(score, Score) and not (isinstance(score, str) and score in _SCORES):
        raise ValueError(f"score: it is {score!r}; it must be 'dot', 'gat', 'gatv2' or a Score")
    if position is not None and not isinstance(position, Position):
        raise WrongType(f"position must be a Position such as Rotary(), got {shown(position)}")
    if sink is not None and sink != "learned":
        check_number("sink", sink, -math.inf, hint="'learned' makes it a parameter")
    if combine not in ("project", "concat", "mean"):
        raise ValueError(f"combine: it is {combine!r}; it must be 'project', 'concat' or 'mean'")
    if d_out is not None and combine != "project":
        raise ValueError(
            f"d_out: it is {d_out}, but combine={combine!r} maps nothing; its width follows from the heads"
        )


def _split(x: Float[Tensor, "... items heads_dim"], heads: int) -> Float[Tensor, "... heads items dim"]:
    return x.unflatten(-1, (heads, x.shape[-1] // heads)).transpose(-3, -2)


_SCORES: dict[str, Callable[[int, int], Score]] = {"dot": lambda heads, dim: Dot(), "gat": GAT, "gatv2": GATv2}
