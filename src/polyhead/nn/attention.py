"""The multi-head attention layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NoReturn

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from polyhead._checks import MAX_HEADS, check_dense_tensor, check_integer, check_numel
from polyhead._foreign_arguments import (
    ATTENTION_LAYER,
    ATTENTION_LAYER_CALL,
    foreign_argument_error,
    translate_foreign_arguments,
)
from polyhead._torch import is_fx_proxy, record_fx_call, refuse_scripting
from polyhead.attend import Explanation, explain_call, run_call
from polyhead.heads import Heads, Origin
from polyhead.kernels.call import Call, GlobalIndices
from polyhead.linalg.skinny_gemm import apply_linear
from polyhead.manifold import Manifold, Stiefel
from polyhead.neighbourhood import Dense, Neighbourhood, Sizes, as_neighbourhood
from polyhead.nn import surgery, weight_manifolds
from polyhead.nn.attention_checks import SCORES_BY_NAME, check_constructor_options, check_shared_projections
from polyhead.nn.cache import KeyValueCache, KeyValues, allocate_cache
from polyhead.nn.checks import check_dropout_rates, check_optional_sizes
from polyhead.nn.projection import (
    check_projected_key_values,
    check_qkv_inputs,
    project_keys_values,
    project_qkv,
    project_queries,
)
from polyhead.nn.remote_keys import project_with_remote_keys
from polyhead.nn.skip_padded_rows import Unpadding, find_unpadding
from polyhead.nn.sparse_linear import project_dense_or_sparse
from polyhead.position import Position
from polyhead.prepare import AttentionOptions, find_lattice, item_coordinates, make_call
from polyhead.score import Score

Combine = Literal["project", "concat", "mean"]


class MultiHeadAttention(nn.Module):
    """Multi-head attention: output = combine(attend(W_Q query, W_K key, W_V value)).

    The names are those of Vaswani 2017; W_Q … W_O are the modules `q_proj`, `k_proj`, `v_proj`, `o_proj`. Weights start
    Xavier-uniform, biases at zero.

    Args:
        d_model: features of the query, and by default of key, value and output.
        num_heads: heads of the queries.
        kv_heads: heads of keys and values, shared by consecutive query heads (1: multi-query).
        head_dim: features of each head's queries and keys; d_model / num_heads by default.
        value_dim: features of each head's values; head_dim by default.
        d_key, d_value: features of the key and value inputs.
        d_out: features of the output, with `combine="project"`.
        score: the score function: `"dot"`, `"gat"`, `"gatv2"`, or a `Score` such as `GATv2(8, 16, edge_dim=4)`.
        position: the position encoding: `Rotary()`, `ALiBi(num_heads)`, `RelativeBias(num_heads)`; on a grid `Rotary(axes=2)`,
            `RelativeBias(num_heads, window=(7, 7))`, `QuadraticOffset(centres)`.
        sink: the logit of an additional key whose value is zero: a number, or `"learned"` for one learned logit per head.
        combine: `"project"` concatenates the heads and applies W_O; `"concat"` concatenates them; `"mean"` averages them.
        manifold: the manifold of the projections. `"stiefel"`: each head's rows of W_Q, W_K and W_V are orthonormal, a basis
            of the subspace that it sees; `{"v": "stiefel"}` chooses among q, k and v. `polyhead.optim` keeps them there.
        qk_norm: whether to RMS-normalise each head's queries and keys, with learned gains.
        residual: whether to add the query to the output, through a linear map `r_proj` where their widths differ.
        bias: whether the projections and the output have biases.
        dropout: probability of dropping a pair of query and key in training.
        input_dropout: probability of dropping an input feature in training, drawn separately for each head.
        value_dropout: probability of dropping a feature of the projected values in training.
    """

    sink: Tensor | None
    gate: Tensor | None
    """Optional factor per head on the head's output: assign a tensor, or an `nn.Parameter` to train it.

    It is part of `state_dict`. Loading gives a layer without a gate a fixed one: assign a parameter first to train it.
    """
    global_heads: GlobalIndices | None = None
    """Which heads of the whole attention it has, if other processes have the rest; None for all of them."""
    global_value_heads: tuple[list[int], int] | None = None
    """Which heads of the values it has, and how many there are in the whole attention; None for all of them."""

    @translate_foreign_arguments(ATTENTION_LAYER)
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
        manifold: weight_manifolds.ManifoldLike | Mapping[str, weight_manifolds.ManifoldLike] = "euclidean",
        qk_norm: bool = False,
        residual: bool = False,
        bias: bool = True,
        dropout: float = 0.0,
        input_dropout: float = 0.0,
        value_dropout: float = 0.0,
    ) -> None:
        super().__init__()
        d_model, num_heads = check_integer("d_model", d_model), check_integer("num_heads", num_heads, 1, MAX_HEADS)
        kv_heads, head_dim, value_dim, d_key, d_value, d_out = check_optional_sizes(
            kv_heads=kv_heads, head_dim=head_dim, value_dim=value_dim, d_key=d_key, d_value=d_value, d_out=d_out
        )
        if head_dim is None and d_model % num_heads:
            raise ValueError(
                f"num_heads must divide d_model = {d_model} where head_dim is not given, got {num_heads}; "
                f"pass head_dim={d_model // num_heads or 1} (any head_dim is possible), or another num_heads"
            )
        if kv_heads is not None and num_heads % kv_heads:
            raise ValueError(
                f"kv_heads must divide num_heads = {num_heads}, got {kv_heads}; query heads share keys and values in equal groups"
            )
        check_constructor_options(score, position, sink, combine, d_out)
        dropout, input_dropout, value_dropout = check_dropout_rates(
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
        self.score = score if isinstance(score, Score) else SCORES_BY_NAME[score](num_heads, self.head_dim)
        check_shared_projections(self)
        self.position = position
        if position is not None:
            position.check(num_heads, self.head_dim)
        shares_queries, shares_values = self.score.shares_queries, self.score.shares_values
        width = {"project": d_out or d_model, "concat": num_heads * self.value_dim, "mean": self.value_dim}[combine]
        widest = num_heads * max(self.head_dim, self.value_dim), max(d_model, self.d_key, self.d_value, width)
        check_numel("the largest projection", widest, hint="d_model, num_heads, head_dim or another size is too large")
        # None where the score shares k_proj
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
        """Initialise the projections' weights and the sink."""
        if self.sink is not None:
            nn.init.constant_(self.sink, self._sink_start)
        if self.o_bias is not None:
            nn.init.zeros_(self.o_bias)
        reset_score = getattr(self.score, "reset_parameters", None)
        if reset_score is not None:
            reset_score()
        for linear in (self.q_proj, self.k_proj, self.v_proj, self.o_proj, self.r_proj):
            if isinstance(linear, nn.Linear):
                nn.init.xavier_uniform_(linear.weight)
                if linear.bias is not None:
                    nn.init.zeros_(linear.bias)
        weight_manifolds.draw_weights_on_manifolds(self)

    def forward(
        self,
        query: Float[Tensor, "... queries d_model"],
        key: Float[Tensor, "... keys d_key"] | KeyValues | None = None,
        value: Float[Tensor, "... keys d_value"] | None = None,
        over: Neighbourhood | Tensor | None = None,
        *,
        bias: Float[Tensor, "... #heads #queries #keys"] | None = None,
        cache: KeyValueCache | None = None,
        **foreign: NoReturn,
    ) -> tuple[Float[Tensor, "... queries d_out"], Heads]:
        """The output, and a view of the heads.

        Args:
            query: the items that attend. Without `key` this is self-attention.
            key, value: the items attended to; `value` is `key` by default, and `key` is `query`. `key` may also be what
                `project_kv` returned.
            over: the pairs that may attend; a bool tensor is a mask, True = may attend.
            bias: added to the scores.
            cache: keys and values of earlier calls, to which this call's are appended.

        Raises:
            ValueError: if an argument does not fit the others; the message names it and the rule.
        """
        if is_fx_proxy(query):
            return record_fx_call(self, query, key, value, over, bias=bias, cache=cache, **foreign)
        if foreign:
            raise foreign_argument_error("MultiHeadAttention", foreign, ATTENTION_LAYER_CALL)
        if cache is not None and not isinstance(cache, KeyValueCache):
            raise ValueError(f"cache must be made by mha.cache(batch, length), got {type(cache).__name__}")
        if cache is not None and key is not None and key is not query:
            raise ValueError("key must be left out, or be the query, with a cache, which is for self-attention")
        gate, o_proj = self.gate, self.o_proj
        if gate is not None and gate.layout != torch.strided:
            check_dense_tensor("gate", gate, "of one number per head")
        if gate is not None and gate.shape != (self.num_heads,):
            raise ValueError(f"gate must have one number per head, shape ({self.num_heads},), got {tuple(gate.shape)}")
        call, unpadding = self._project_into_call(query, key, value, self._attend_options(over, bias), cache)
        out, lse = run_call(call)
        if gate is not None:
            out = out * gate[:, None, None].to(out.dtype)
        output = self._merge_heads(out)
        if o_proj is not None:
            output = (
                apply_linear(o_proj, output) if unpadding is None else unpadding.pad(o_proj(unpadding.unpad(output)))
            )
        elif self.o_bias is not None:
            output = output + self.o_bias
        if self.residual:
            output = output + (query if self.r_proj is None else project_dense_or_sparse(self.r_proj, query))
        # a quantised projection has no tensor of that name
        w_o = getattr(o_proj, "weight", None)
        is_self = key is None or key is query
        return output, Heads(call, Origin(out, w_o if isinstance(w_o, Tensor) else None, gate, lse, is_self), cache)

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
        """Which kernel a call with these arguments uses, and why each faster one refuses. Computes no attention."""
        # no seed is drawn: explaining leaves the generator as it is
        options = self._attend_options(over, bias)._replace(seed=torch.tensor(0))
        return explain_call(self._project_into_call(query, key, value, options, None)[0])

    def prepare(
        self,
        query: Float[Tensor, "... queries d_model"],
        key: Float[Tensor, "... keys d_key"] | KeyValues | None = None,
        value: Float[Tensor, "... keys d_value"] | None = None,
        over: Neighbourhood | Tensor | None = None,
        *,
        bias: Float[Tensor, "... #heads #queries #keys"] | None = None,
    ) -> Call:
        """The attention that a call with these arguments computes: q, k, v and options, as kernels receive them."""
        return self._project_into_call(query, key, value, self._attend_options(over, bias), None)[0]

    def _attend_options(self, over: Neighbourhood | Tensor | None, bias: Tensor | None) -> AttentionOptions:
        dropout = self.dropout if self.training else 0.0
        return AttentionOptions(
            over, self.score, self.position, bias, self.sink, dropout, global_indices=self.global_heads
        )

    def _merge_heads(self, out: Float[Tensor, "... heads queries value_dim"]) -> Float[Tensor, "... queries features"]:
        """The heads of each query side by side, or their mean."""
        return out.mean(-3) if self.combine == "mean" else out.transpose(-3, -2).flatten(-2)

    def _project_into_call(
        self, query: Tensor, key: Tensor | KeyValues | None, value: Tensor | None, options: AttentionOptions,
        cache: KeyValueCache | None,
    ) -> tuple[Call, Unpadding | None]:  # fmt: skip
        """Project, position and cache: everything before the attention."""
        over, unpadding, lattice = as_neighbourhood(options.over), None, None
        if isinstance(key, KeyValues):
            check_projected_key_values(self, query, key, value)
            keys = key.k.shape[-2]
        else:
            key = query if key is None else key
            value = key if value is None else value
            check_qkv_inputs(self, query, key, value)
            keys = key.shape[-2] if cache is None else cache.keys_after(key.shape[-2])
        if type(over) is not Dense:
            over = over.bind_self_attention(key is query)
            over.check(Sizes(tuple(query.shape[:-2]), self.num_heads, query.shape[-2], keys))
            over.check_device(query.device)
        if over.item_indices is not None and (cache is not None or isinstance(key, KeyValues)):
            raise ValueError(f"cache and KeyValues must be left out for items on several ranks, got over={over!r}")
        if self.position is not None:
            lattice = find_lattice(self.position, over, *over.whole_sizes(query.shape[-2], keys))
        if isinstance(key, KeyValues):
            q, (k, v) = project_queries(self, query, key), key
        elif over.has_remote_keys:
            assert value is not None
            points = None if self.position is None else item_coordinates(over, lattice, key.device)[1]
            q, k, v = project_with_remote_keys(self, query, key, value, over, points)
        else:
            assert value is not None
            if key is query and value is query and cache is None and not (self.input_dropout and self.training):
                unpadding = find_unpadding(over, query)
            q, k, v = project_qkv(self, query, key, value, unpadding)
            points = None if self.position is None else item_coordinates(over, lattice, k.device)[1]
            at = None if cache is None else cache.positions_of(k.shape[-2])
            points = points if at is None else at[:, None]
            k, v = self._normalise_and_rotate_keys(k, v, keys - k.shape[-2], points)
        if self.q_norm is not None:
            q = self.q_norm(q)
        if self.position is not None:
            at = None if cache is None else cache.positions_of(q.shape[-2])
            points = item_coordinates(over, lattice, q.device)[0] if at is None else at[:, None]
            q = self.position.rotate(q, keys - q.shape[-2], points)
        options = options._replace(over=over)
        if cache is None:
            return make_call(q, k, v, options, lattice), unpadding
        with cache.append_with_rollback(k, v):
            options = options._replace(over=cache.visible_keys(over, q.shape[-2]))
            return make_call(q, cache.k, cache.v, options, lattice), unpadding

    def _normalise_and_rotate_keys(
        self, k: Tensor, v: Tensor, start: int, points: Int[Tensor, "keys axes"] | None
    ) -> tuple[Tensor, Tensor]:
        """Normalise and rotate keys, of which the first has position `start`, or each its own coordinates."""
        if self.k_norm is not None:
            k = self.k_norm(k)
        if self.position is not None:
            k = self.position.rotate(k, start, points)
        # under autocast, where no W_V has converted the values
        return k, v if v.dtype == k.dtype else v.to(k.dtype)

    def project_kv(
        self, key: Float[Tensor, "... keys d_key"], value: Float[Tensor, "... keys d_value"] | None = None
    ) -> KeyValues:
        """Project keys and values once for many calls: `mha(x, mha.project_kv(y))` equals `mha(x, y)`."""
        if self.position is not None and self.position.axes is not None:
            raise ValueError(
                f"project_kv works for positions along a sequence, got {type(self.position).__name__} on a grid, which only a "
                "call knows; call the layer instead"
            )
        k, v = project_keys_values(self, key, key if value is None else value)
        return KeyValues(*self._normalise_and_rotate_keys(k, v, 0, None))

    def cache(
        self,
        batch: int | tuple[int, ...] | None,
        length: int,
        *,
        dtype: torch.dtype | None = None,
        static: bool = False,
    ) -> KeyValueCache:
        """An empty cache for `length` keys and values of a batch; `batch=None` for input without a batch axis.

        The dtype is by default that of the projected keys: the weights' dtype, or autocast's. With `static` the filled length
        lies on the device and shapes are fixed, as CUDA graphs need it: each step reads all `length` positions.
        """
        return allocate_cache(self, batch, length, dtype, static)

    @property
    def manifold(self) -> dict[str, Stiefel]:
        """The manifolds of W_Q, W_K and W_V, by `"q"`, `"k"` and `"v"`; Euclidean ones are left out. It can be set to what
        the constructor accepts; `polyhead.optim.project` then moves the weights onto it."""
        return self._manifold

    @manifold.setter
    def manifold(self, manifold: weight_manifolds.ManifoldLike | Mapping[str, weight_manifolds.ManifoldLike]) -> None:
        self._manifold = weight_manifolds.resolve_manifolds(manifold, self)

    @property
    def manifolds(self) -> dict[str, Manifold]:
        """The manifolds of parameters, by parameter name: what `polyhead.optim.groups` reads."""
        return weight_manifolds.weight_manifolds(self)

    def prune(self, heads: Sequence[int]) -> None:
        """Remove heads permanently. `state_dict` records it, and loads into a layer that was never pruned.

        Prune before making an optimizer: the projections get new, smaller parameters.
        """
        surgery.prune_heads(self, heads)

    def fold_value_projection(self) -> MultiHeadAttention:
        """The same function without W_V: attention is linear in its values, so W_V can be folded into W_O.

        Each head then averages the inputs themselves. Fewer matrices but wider heads: for understanding, not for speed.
        """
        return surgery.fold_value_projection(self)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        surgery.match_heads_to_state_dict(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        grouped = "" if self.kv_heads == self.num_heads else f", kv_heads={self.kv_heads}"
        return f"{self.d_model}, num_heads={self.num_heads}{grouped}, head_dim={self.head_dim}, combine={self.combine!r}, dropout={self.dropout}{weight_manifolds.format_manifolds(self)}"
