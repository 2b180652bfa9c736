"""torch's own multi-head attention: a drop-in for it, and the way from it to a polyhead layer and back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from polyhead._checks import check_tensor
from polyhead._torch import is_symbolic, record_call, refuse_scripting
from polyhead.attend import prepare, run
from polyhead.kernels.reference import weights
from polyhead.neighbourhood import Causal, Dense, Mask, Neighbourhood, Padding, Window
from polyhead.nn.attention import MultiHeadAttention
from polyhead.nn.checks import check_like
from polyhead.score import Dot

_DOT = Dot()


class MultiheadAttention(nn.MultiheadAttention):
    """`torch.nn.MultiheadAttention` computed by polyhead: its constructor, parameters, masks and return values.

    torch's masks say who may *not*: True = no attention; floating-point masks are added to the scores. Bool masks let
    the kernels skip blocks, and the fused kernels serve whether or not weights are asked for.

    It differs from the original in this:

    - A query that may attend to no key gets zero weights, and `out_proj`'s bias as output: never NaN.
    - The returned weights are those before dropout, and dropout draws other random numbers.
    - Training, evaluation and `no_grad` compute the same: there is no second path. Nested tensors are refused.
    - A bool and a floating-point mask may be given together; wrong shapes raise a `ValueError` in every mode.
    - `torch.jit.script` refuses it in words; `torch.export`, `torch.compile` and `torch.jit.trace` take it.

    As in the original, `is_causal=True` needs an `attn_mask`, and where neither weights nor a `key_padding_mask` are in
    play it stands in for it: the mask's numbers are not read, query i attends to the keys 0 … i, appended ones last.

    `nn.TransformerEncoderLayer` in evaluation without gradients reads the parameters of its `self_attn` and does not call
    it, whatever its class; `torch.backends.mha.set_fastpath_enabled(False)` makes it call.
    """

    def forward(
        self,
        query: Float[Tensor, "..."],
        key: Float[Tensor, "..."],
        value: Float[Tensor, "..."],
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """The output, and the weights if asked for.

        Args:
            query, key, value: (items, batch, features), with `batch_first` (batch, items, features), or without a batch
                (items, features).
            key_padding_mask: (batch, keys) or (keys): bool, True = a key to ignore, or numbers to add.
            need_weights: whether to return the weights, (batch, queries, keys); None in their place otherwise.
            attn_mask: (queries, keys) or (batch · heads, queries, keys): bool, True = may not attend, or numbers to add.
            average_attn_weights: whether the weights are averaged over heads; else (batch, heads, queries, keys).
            is_causal: the hint that `attn_mask` is the causal mask.

        Raises:
            ValueError: where shapes do not fit, with the argument's name and the rule.
            RuntimeError: for `is_causal` without `attn_mask`, as the original.
        """
        if is_symbolic(query):
            return record_call(
                self, query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
            )
        self._check_inputs(query, key, value)
        batched = query.dim() == 3
        if not batched:
            query, key, value = query[None], key[None], value[None]
        rows = 0 if self.batch_first or not batched else 1
        batch, queries, keys = query.shape[rows], query.shape[1 - rows], key.shape[1 - rows]
        by_pair, by_head = (queries, keys), (batch * self.num_heads, queries, keys)
        _check_mask("attn_mask", attn_mask, {"(queries, keys)": by_pair, "(batch * heads, queries, keys)": by_head})
        of_keys: dict[str, tuple[int, ...]] = {"(batch, keys)": (batch, keys)} if batched else {"(keys,)": (keys,)}
        _check_mask("key_padding_mask", key_padding_mask, of_keys)
        if is_causal and attn_mask is None:
            raise RuntimeError(
                "is_causal: it is True, but attn_mask is None; it must be a hint about the attn_mask given with it "
                "(torch.nn.Transformer.generate_square_subsequent_mask makes the causal one)"
            )
        q, k, v = self._projected(query, key, value, rows)
        k, v = self._lengthened(k, v)
        if is_causal and key_padding_mask is None and not need_weights:
            # The original aligns the first query with the first key; what it appends comes last and is hidden first.
            k, v, bias = k[:, :, :queries], v[:, :, :queries], None
            over = _from_first(queries, k.shape[2])
        else:
            over, bias = _read(key_padding_mask, attn_mask, (batch, self.num_heads, queries, keys), k.shape[2] - keys)
        dropout = self.dropout if self.training else 0.0
        call = prepare(q, k, v, over=over, score=_DOT, position=None, bias=bias, sink=None, dropout=dropout)
        output: Tensor = self.out_proj(_joined(run(call)[0], rows))
        p = weights(call).to(q.dtype) if need_weights else None
        if p is not None and average_attn_weights:
            p = p.mean(1)
        return (output, p) if batched else (output[0], None if p is None else p[0])

    def _projected(self, query: Tensor, key: Tensor, value: Tensor, rows: int) -> list[Tensor]:
        """Queries, keys and values by head."""
        maps = zip((query, key, value), *_maps(self), strict=True)
        try:
            return [_by_head(F.linear(x, weight, bias), self.num_heads, rows) for x, weight, bias in maps]
        except RuntimeError:
            check_like(self, query=query, key=key, value=value)
            raise

    def _lengthened(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values with the learned one and the zero that `add_bias_kv` and `add_zero_attn` append."""
        if self.bias_k is not None and self.bias_v is not None:
            k, v = _with_last(k, self.bias_k), _with_last(v, self.bias_v)
        if self.add_zero_attn:
            k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
        return k, v

    __prepare_scriptable__ = refuse_scripting

    def _check_inputs(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        axes, rows = ("batch, items", 0) if self.batch_first else ("items, batch", 1)
        given = (("query", query, self.embed_dim), ("key", key, self.kdim), ("value", value, self.vdim))
        for name, x, features in given:
            if getattr(x, "is_nested", False):
                raise ValueError(f"{name}: it is a nested tensor; it must be a padded one, with a key_padding_mask")
            shape = tuple(check_tensor(name, x, f"({axes}, {features})").shape)
            if len(shape) not in (2, 3) or shape[-1] != features:
                raise ValueError(
                    f"{name}: its shape is {shape}; it must be ({axes}, {features}), or (items, {features}) without a batch"
                )
            if len(shape) != query.dim():
                raise ValueError(
                    f"{name}: its shape is {shape} and the query's {tuple(query.shape)}; all must have a batch axis, or none"
                )
            if len(shape) == 3 and shape[rows] != query.shape[rows]:
                raise ValueError(
                    f"{name}: its batch is {shape[rows]}; it must be the query's, {query.shape[rows]} "
                    f"(batch_first is {self.batch_first}: the axes are {axes}, features)"
                )
        if key.shape[:-1] != value.shape[:-1]:
            items = 1 - rows if value.dim() == 3 else 0
            raise ValueError(f"value: it has {value.shape[items]} items; it must have the key's, {key.shape[items]}")


def _check_mask(name: str, mask: Tensor | None, shapes: dict[str, tuple[int, ...]]) -> None:
    """Raise for a mask of the wrong dtype or shape; `shapes` are those it may have, by the names of their axes."""
    if mask is None:
        return
    check_tensor(name, mask, " or ".join(shapes))
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise ValueError(
            f"{name}: it is {mask.dtype}; it must be bool, True = no attention, or floating-point numbers to add"
        )
    if tuple(mask.shape) not in shapes.values():
        rule = " or ".join(f"{axes} = {shape}" for axes, shape in shapes.items())
        raise ValueError(f"{name}: its shape is {tuple(mask.shape)}; it must be {rule}")


def _maps(module: nn.MultiheadAttention) -> tuple[Sequence[Tensor], Sequence[Tensor | None]]:
    """The weights and the biases of torch's module for query, key and value."""
    if module._qkv_same_embed_dim:
        maps: Sequence[Tensor] = module.in_proj_weight.chunk(3)
    else:
        maps = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
    packed: Tensor | None = module.in_proj_bias
    # a bias of another dtype is one that torch's module takes where its input lies transposed in memory
    return maps, (None,) * 3 if packed is None else packed.to(maps[0].dtype).chunk(3)


def _by_head(x: Float[Tensor, "..."], heads: int, rows: int) -> Float[Tensor, "batch heads items dim"]:
    """(batch, items, features) split by head; (items, batch, features) where `rows` is 1."""
    x = x.view(*x.shape[:2], heads, x.shape[2] // heads)
    return x.transpose(1, 2) if rows == 0 else x.permute(1, 2, 0, 3)


def _joined(x: Float[Tensor, "batch heads items dim"], rows: int) -> Float[Tensor, "..."]:
    """What `_by_head` split."""
    return (x.transpose(1, 2) if rows == 0 else x.permute(2, 0, 1, 3)).flatten(2)


def _with_last(x: Float[Tensor, "batch heads items dim"], last: Float[Tensor, "1 1 features"]) -> Tensor:
    batch, heads, _, dim = x.shape
    # under autocast `x` is narrower than the parameter
    return torch.cat((x, last.to(x.dtype).view(1, heads, 1, dim).expand(batch, -1, -1, -1)), 2)


def _from_first(queries: int, keys: int) -> Neighbourhood:
    """Query i attends to the keys 0 … i, for at least as many queries as keys."""
    return Causal() if queries == keys else Window(keys, queries - keys)


def _read(
    key_padding_mask: Tensor | None, attn_mask: Tensor | None, sizes: tuple[int, int, int, int], extra: int
) -> tuple[Neighbourhood, Float[Tensor, "#batch #heads #queries keys"] | None]:
    """torch's masks as who may attend to whom, and numbers to add; the `extra` last keys are open to all."""
    over: Neighbourhood = Dense()
    bias: Tensor | None = None
    if attn_mask is not None:
        pairs = attn_mask[None, None] if attn_mask.dim() == 2 else attn_mask.reshape(sizes)
        if pairs.dtype == torch.bool:
            over = Mask(_open(~pairs, extra))
        else:
            bias = F.pad(pairs, (0, extra))
    if key_padding_mask is not None:
        padded = key_padding_mask if key_padding_mask.dim() == 2 else key_padding_mask[None]
        if padded.dtype == torch.bool:
            over = over & Padding(_open(~padded, extra), queries=False)
        else:
            by_key = F.pad(padded, (0, extra))[:, None, None]
            bias = by_key if bias is None else bias + by_key
    return over, bias


def _open(keep: Bool[Tensor, "..."], extra: int) -> Bool[Tensor, "..."]:
    return F.pad(keep, (0, extra), value=True) if extra else keep


def from_torch(module: nn.MultiheadAttention) -> MultiHeadAttention:
    """A polyhead layer with a copy of the weights of torch's module, or of the drop-in, and its outputs to 1e-6.

    `add_zero_attn=True` becomes `sink=0.0`: the same output; the view on the heads has no column for the zero key.
    torch's `key_padding_mask` is the layer's `over=Padding(~key_padding_mask, queries=False)`.

    Raises:
        ValueError: for `batch_first=False`, `add_bias_kv=True` and subclasses with a forward of their own.
    """
    if not isinstance(module, nn.MultiheadAttention) or type(module).forward not in _FORWARDS:
        raise ValueError(
            f"module: it is {_kind(module)}; it must be a torch.nn.MultiheadAttention with its own forward"
        )
    if not module.batch_first:
        raise ValueError(
            "module: its batch_first is False, it takes (items, batch, features); it must be True, for a polyhead layer takes "
            "(batch, items, features). Set module.batch_first = True (the weights are the same), convert, and transpose "
            "what the layer takes and gives with x.transpose(0, 1)"
        )
    if module.bias_k is not None or module.bias_v is not None:
        raise ValueError(
            "module: its add_bias_kv is True; it must be False, for a polyhead layer has no learned key and value to append. "
            "polyhead.interop.torch.MultiheadAttention has them"
        )
    # on the meta device nothing is drawn that the copies would replace
    with torch.device("meta"):
        layer = MultiHeadAttention(
            module.embed_dim, module.num_heads, d_key=module.kdim, d_value=module.vdim,
            bias=module.in_proj_bias is not None, dropout=module.dropout,
        )  # fmt: skip
    linears = (layer.q_proj, layer.k_proj, layer.v_proj, layer.o_proj)
    maps, biases = _maps(module)
    own = zip(linears, (*maps, module.out_proj.weight), (*biases, module.out_proj.bias), strict=True)
    for linear, weight, bias in own:
        assert linear is not None
        linear.register_parameter("weight", _copy(weight))
        linear.register_parameter("bias", _copy(bias))
    if module.add_zero_attn:
        layer.sink = module.out_proj.weight.new_zeros(module.num_heads)
    return layer.train(module.training)


def to_torch(layer: MultiHeadAttention) -> nn.MultiheadAttention:
    """torch's module with a copy of the weights of a polyhead layer and its outputs to 1e-6; `batch_first` is True.

    A query with no key gets `o_proj`'s bias from the layer, but NaN from torch's module.

    Raises:
        ValueError: for whatever torch's module cannot express, with the reason.
    """
    for reason in _inexpressible(layer):
        raise ValueError(reason)
    q, k, v, o = (getattr(layer, name) for name in _PROJECTIONS)
    module = nn.MultiheadAttention(
        layer.d_model, layer.num_heads, layer.dropout, o.bias is not None, add_zero_attn=layer.sink is not None,
        kdim=layer.d_key, vdim=layer.d_value, batch_first=True, device="meta",
    )  # fmt: skip
    if module._qkv_same_embed_dim:
        module.register_parameter("in_proj_weight", _pack(q.weight, k.weight, v.weight))
    else:
        for name, linear in (("q_proj_weight", q), ("k_proj_weight", k), ("v_proj_weight", v)):
            module.register_parameter(name, _copy(linear.weight))
    if o.bias is not None:
        module.register_parameter("in_proj_bias", _pack(q.bias, k.bias, v.bias))
    module.out_proj.register_parameter("weight", _copy(o.weight))
    module.out_proj.register_parameter("bias", _copy(o.bias))
    return module.train(layer.training)


def _inexpressible(layer: MultiHeadAttention) -> Iterator[str]:
    """Why torch's module cannot be this layer."""
    if not isinstance(layer, MultiHeadAttention) or type(layer).forward is not MultiHeadAttention.forward:
        yield f"layer: it is {_kind(layer)}; it must be a polyhead.MultiHeadAttention with its own forward"
        return
    if layer.o_proj is None:
        yield f"combine: it is {layer.combine!r}; it must be 'project', the one way torch's module combines heads"
        return
    linears = {name: getattr(layer, name) for name in _PROJECTIONS}
    for name, linear in linears.items():
        if not isinstance(linear, nn.Linear) or type(linear).forward is not nn.Linear.forward:
            merged = " (a merged layer has no W_V)" if name == "v_proj" else ""
            yield f"{name}: it is {_kind(linear)}{merged}; it must be an nn.Linear, for torch's module holds plain weights"
            return
    yield from _wrong_sizes(layer, layer.o_proj.out_features)
    for name, part in (("position", layer.position), ("gate", layer.gate)):
        if part is not None:
            yield f"{name}: it is {_kind(part)}; it must be None, for torch's module has none"
    if layer.q_norm is not None or layer.k_norm is not None:
        yield "qk_norm: it is True; it must be False, for torch's module normalises no queries and keys"
    if isinstance(layer.sink, nn.Parameter):
        yield "sink: it is learned; it must be None or 0, for torch's add_zero_attn is a fixed logit of 0"
    elif layer.sink is not None and bool((layer.sink != 0).any()):
        yield f"sink: it is {layer.sink.tolist()}; it must be None or 0, for torch's add_zero_attn is a fixed logit of 0"
    if type(layer.score) is not Dot or layer.score.factor(layer.head_dim) != layer.head_dim**-0.5:
        yield f"score: it is {layer.score!r}; it must be Dot() with its own scale, 1/√head_dim, the one torch's module has"
    yield from _uneven(linears)


def _wrong_sizes(layer: MultiHeadAttention, d_out: int) -> Iterator[str]:
    heads, dim, model = layer.num_heads, layer.head_dim, layer.d_model
    if layer.kv_heads != heads:
        yield f"kv_heads: it is {layer.kv_heads}; it must be num_heads, {heads}, for torch's module shares no keys"
    if heads * dim != model:
        yield f"head_dim: it is {dim} in {heads} heads, {heads * dim} features; torch's module must have d_model, {model}"
    if layer.value_dim != dim:
        yield f"value_dim: it is {layer.value_dim}; it must be head_dim, {dim}, for torch's module has one for both"
    if d_out != model:
        yield f"d_out: it is {d_out}; it must be d_model, {model}, for torch's module gives what it takes"


def _uneven(linears: dict[str, nn.Linear]) -> Iterator[str]:
    """Where one flag or one parameter of torch's module would have to have two values."""
    biased = {name: linear.bias is not None for name, linear in linears.items()}
    if len(set(biased.values())) > 1:
        yield f"bias: the projections have {biased}; they must all have one or none, for torch's module has one flag"
    q, k, v, _ = linears.values()
    packed = ["bias", "weight"] if q.in_features == k.in_features == v.in_features else ["bias"]
    for name in packed:
        parts: list[Tensor | None] = [getattr(linear, name) for linear in (q, k, v)]
        learn = [part is not None and part.requires_grad for part in parts]
        if len(set(learn)) > 1:
            yield f"requires_grad: it is {learn} for the {name} of q, k and v; it must be one, for torch's module packs them"


def _kind(x: object) -> str:
    return f"{type(x).__module__}.{type(x).__qualname__}"


def _copy(x: Tensor | None) -> nn.Parameter | None:
    return None if x is None else nn.Parameter(x.detach().clone(), x.requires_grad)


def _pack(*parts: Tensor) -> nn.Parameter:
    return nn.Parameter(torch.cat([part.detach() for part in parts]), parts[0].requires_grad)


_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
_FORWARDS = (nn.MultiheadAttention.forward, MultiheadAttention.forward)
