"""A drop-in for torch.nn.MultiheadAttention, and conversion between it and a polyhead layer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from polyhead._checks import check_dense_tensor
from polyhead._torch import is_fx_proxy, record_fx_call, refuse_scripting
from polyhead.attend import run_call
from polyhead.kernels.reference import pair_weights
from polyhead.neighbourhood import Causal, Dense, Mask, Neighbourhood, Padding, Window
from polyhead.nn.attention import MultiHeadAttention
from polyhead.nn.checks import check_dtype_and_device
from polyhead.prepare import AttentionOptions, check_and_make_call
from polyhead.score import Dot


class MultiheadAttention(nn.MultiheadAttention):
    """`torch.nn.MultiheadAttention` computed by polyhead, with the same constructor, parameters, masks and return values.

    In torch's masks True means *no* attention; floating-point masks are added to the scores. With bool masks the kernels
    skip blocks. Fused kernels are used whether or not weights are returned.

    Differences from the original:

    - A query without keys gets zero weights, and `out_proj`'s bias as output: never NaN.
    - The returned weights are those before dropout, and dropout draws other random numbers.
    - Training, evaluation and `no_grad` use the same code path. Nested tensors are refused.
    - A bool and a floating-point mask can be combined; wrong shapes raise a `ValueError` in every mode.
    - `torch.jit.script` raises a `TypeError`; `torch.export`, `torch.compile` and `torch.jit.trace` work.

    As in the original, `is_causal=True` needs an `attn_mask`. Without `key_padding_mask` and with `need_weights=False` it
    replaces the mask, whose values are not read: query i attends to the keys 0 … i, and appended keys come last.

    `nn.TransformerEncoderLayer` in evaluation without gradients reads the parameters of its `self_attn` and does not call
    it, whatever its class; `torch.backends.mha.set_fastpath_enabled(False)` disables that.
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
        """The output, and the weights or None.

        Args:
            query, key, value: (items, batch, features), with `batch_first` (batch, items, features), or without a batch
                (items, features).
            key_padding_mask: (batch, keys) or (keys): bool, True = a key to ignore, or values to add to the scores.
            need_weights: whether to return the weights, (batch, queries, keys), instead of None.
            attn_mask: (queries, keys) or (batch · heads, queries, keys): bool, True = may not attend, or values to add.
            average_attn_weights: whether the weights are averaged over heads; otherwise (batch, heads, queries, keys).
            is_causal: a hint that `attn_mask` is the causal mask.

        Raises:
            ValueError: for wrong shapes, with the argument and the rule.
            RuntimeError: for `is_causal` without `attn_mask`, as in the original.
        """
        if is_fx_proxy(query):
            return record_fx_call(
                self, query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
            )
        self._check_inputs(query, key, value)
        batched = query.dim() == 3
        if not batched:
            query, key, value = query[None], key[None], value[None]
        batch_axis = 0 if self.batch_first or not batched else 1
        batch, queries, keys = query.shape[batch_axis], query.shape[1 - batch_axis], key.shape[1 - batch_axis]
        self._check_masks(attn_mask, key_padding_mask, batch if batched else None, queries, keys)
        if is_causal and attn_mask is None:
            raise RuntimeError(
                "is_causal=True needs an attn_mask, got None; pass "
                "torch.nn.Transformer.generate_square_subsequent_mask(queries)"
            )
        q, k, v = self._project(query, key, value, batch_axis)
        k, v = self._append_keys(k, v)
        if is_causal and key_padding_mask is None and not need_weights:
            # the original aligns the first query with the first key; appended keys come last and are masked first
            k, v, bias = k[:, :, :queries], v[:, :, :queries], None
            over = _causal_from_first_key(queries, k.shape[2])
        else:
            over, bias = _masks_to_neighbourhood_and_bias(
                key_padding_mask, attn_mask, (batch, self.num_heads, queries, keys), k.shape[2] - keys
            )
        dropout = self.dropout if self.training else 0.0
        call = check_and_make_call(q, k, v, AttentionOptions(over, bias=bias, dropout=dropout))
        output: Tensor = self.out_proj(_merge_heads(run_call(call)[0], batch_axis))
        p = pair_weights(call).to(q.dtype) if need_weights else None
        if p is not None and average_attn_weights:
            p = p.mean(1)
        return (output, p) if batched else (output[0], None if p is None else p[0])

    def _project(self, query: Tensor, key: Tensor, value: Tensor, batch_axis: int) -> list[Tensor]:
        """Queries, keys and values by head."""
        maps = zip((query, key, value), *_qkv_weights_and_biases(self), strict=True)
        try:
            return [_split_heads(F.linear(x, weight, bias), self.num_heads, batch_axis) for x, weight, bias in maps]
        except RuntimeError:
            check_dtype_and_device(self, query=query, key=key, value=value)
            raise

    def _append_keys(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append the learned key and value of `add_bias_kv`, and the zeros of `add_zero_attn`."""
        if self.bias_k is not None and self.bias_v is not None:
            k, v = _append_to_each_batch(k, self.bias_k), _append_to_each_batch(v, self.bias_v)
        if self.add_zero_attn:
            k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
        return k, v

    __prepare_scriptable__ = refuse_scripting

    def _check_inputs(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        axes, batch_axis = ("batch, items", 0) if self.batch_first else ("items, batch", 1)
        inputs = (("query", query, self.embed_dim), ("key", key, self.kdim), ("value", value, self.vdim))
        for name, x, features in inputs:
            if getattr(x, "is_nested", False):
                raise ValueError(f"{name} must be a padded tensor, got a nested one; pass a key_padding_mask with it")
            shape = tuple(check_dense_tensor(name, x, f"({axes}, {features})").shape)
            if len(shape) not in (2, 3) or shape[-1] != features:
                raise ValueError(
                    f"{name} must have shape ({axes}, {features}), or (items, {features}) without a batch, got {shape}"
                )
            if len(shape) != query.dim():
                raise ValueError(
                    f"{name} must have a batch axis if and only if the query has one, got shapes {shape} and {tuple(query.shape)}"
                )
            if len(shape) == 3 and shape[batch_axis] != query.shape[batch_axis]:
                raise ValueError(
                    f"{name} must have the query's batch size, {query.shape[batch_axis]}, got {shape[batch_axis]} "
                    f"(batch_first is {self.batch_first}: the axes are {axes}, features)"
                )
        if key.shape[:-1] != value.shape[:-1]:
            items = 1 - batch_axis if value.dim() == 3 else 0
            raise ValueError(f"value must have as many items as key, {key.shape[items]}, got {value.shape[items]}")

    def _check_masks(
        self, attn_mask: Tensor | None, key_padding_mask: Tensor | None, batch: int | None, queries: int, keys: int
    ) -> None:
        by_head = ((1 if batch is None else batch) * self.num_heads, queries, keys)
        _check_mask(
            "attn_mask", attn_mask, {"(queries, keys)": (queries, keys), "(batch * heads, queries, keys)": by_head}
        )
        by_key: dict[str, tuple[int, ...]] = {"(keys,)": (keys,)} if batch is None else {"(batch, keys)": (batch, keys)}
        _check_mask("key_padding_mask", key_padding_mask, by_key)


def _check_mask(name: str, mask: Tensor | None, shapes: dict[str, tuple[int, ...]]) -> None:
    """Raise for a mask of the wrong dtype or shape; `shapes` maps the names of axes to the shapes that are allowed."""
    if mask is None:
        return
    check_dense_tensor(name, mask, " or ".join(shapes))
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise ValueError(
            f"{name} must be bool, True = no attention, or floating-point values to add, got {mask.dtype}; pass {name}.bool()"
        )
    if tuple(mask.shape) not in shapes.values():
        rule = " or ".join(f"{axes} = {shape}" for axes, shape in shapes.items())
        raise ValueError(f"{name} must have shape {rule}, got {tuple(mask.shape)}")


def _qkv_weights_and_biases(module: nn.MultiheadAttention) -> tuple[Sequence[Tensor], Sequence[Tensor | None]]:
    """The weights and the biases of torch's module for query, key and value."""
    if module._qkv_same_embed_dim:
        weights: Sequence[Tensor] = module.in_proj_weight.chunk(3)
    else:
        weights = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
    packed: Tensor | None = module.in_proj_bias
    # torch's module accepts a bias of another dtype if its input is transposed in memory
    return weights, (None,) * 3 if packed is None else packed.to(weights[0].dtype).chunk(3)


def _split_heads(x: Float[Tensor, "..."], heads: int, batch_axis: int) -> Float[Tensor, "batch heads items dim"]:
    """Split features into heads, for (batch, items, features) or, with `batch_axis=1`, (items, batch, features)."""
    x = x.view(*x.shape[:2], heads, x.shape[2] // heads)
    return x.transpose(1, 2) if batch_axis == 0 else x.permute(1, 2, 0, 3)


def _merge_heads(x: Float[Tensor, "batch heads items dim"], batch_axis: int) -> Float[Tensor, "..."]:
    """The inverse of `_split_heads`."""
    return (x.transpose(1, 2) if batch_axis == 0 else x.permute(2, 0, 1, 3)).flatten(2)


def _append_to_each_batch(x: Float[Tensor, "batch heads items dim"], last: Float[Tensor, "1 1 features"]) -> Tensor:
    batch, heads, _, dim = x.shape
    # under autocast `x` is narrower than the parameter
    return torch.cat((x, last.to(x.dtype).view(1, heads, 1, dim).expand(batch, -1, -1, -1)), 2)


def _causal_from_first_key(queries: int, keys: int) -> Neighbourhood:
    """Query i attends to the keys 0 … i; needs queries >= keys."""
    return Causal() if queries == keys else Window(keys, queries - keys)


def _masks_to_neighbourhood_and_bias(
    key_padding_mask: Tensor | None, attn_mask: Tensor | None, sizes: tuple[int, int, int, int], extra: int
) -> tuple[Neighbourhood, Float[Tensor, "#batch #heads #queries keys"] | None]:
    """torch's masks as a neighbourhood and a bias; every query may attend to the `extra` last keys."""
    over: Neighbourhood = Dense()
    bias: Tensor | None = None
    if attn_mask is not None:
        pairs = attn_mask[None, None] if attn_mask.dim() == 2 else attn_mask.reshape(sizes)
        if pairs.dtype == torch.bool:
            over = Mask(_allow_appended_keys(~pairs, extra))
        else:
            bias = F.pad(pairs, (0, extra))
    if key_padding_mask is not None:
        padded = key_padding_mask if key_padding_mask.dim() == 2 else key_padding_mask[None]
        if padded.dtype == torch.bool:
            over = over & Padding(_allow_appended_keys(~padded, extra), queries=False)
        else:
            by_key = F.pad(padded, (0, extra))[:, None, None]
            bias = by_key if bias is None else bias + by_key
    return over, bias


def _allow_appended_keys(keep: Bool[Tensor, "..."], extra: int) -> Bool[Tensor, "..."]:
    return F.pad(keep, (0, extra), value=True) if extra else keep


def from_torch(module: nn.MultiheadAttention) -> MultiHeadAttention:
    """A polyhead layer with a copy of the weights of torch's module or the drop-in; outputs agree to 1e-6.

    `add_zero_attn=True` becomes `sink=0.0`: the output is the same, but the view of the heads has no column for the zero key.
    torch's `key_padding_mask` is the layer's `over=Padding(~key_padding_mask, queries=False)`.

    Raises:
        ValueError: for `batch_first=False`, `add_bias_kv=True` and subclasses that override `forward`.
    """
    if not isinstance(module, nn.MultiheadAttention) or type(module).forward not in _CONVERTIBLE_FORWARDS:
        raise ValueError(
            f"module must be a torch.nn.MultiheadAttention that does not override forward, got {_type_name(module)}"
        )
    if not module.batch_first:
        raise ValueError(
            "module must have batch_first=True, since a polyhead layer takes (batch, items, features), got False; set "
            "module.batch_first = True (the weights are the same), convert it, and transpose the inputs and the output of the "
            "layer with x.transpose(0, 1)"
        )
    if module.bias_k is not None or module.bias_v is not None:
        raise ValueError(
            "module must have add_bias_kv=False, since a polyhead layer has no learned key and value, got True; use "
            "polyhead.interop.torch.MultiheadAttention"
        )
    # on the meta device: the copies replace all weights
    with torch.device("meta"):
        layer = MultiHeadAttention(
            module.embed_dim, module.num_heads, d_key=module.kdim, d_value=module.vdim,
            bias=module.in_proj_bias is not None, dropout=module.dropout,
        )  # fmt: skip
    linears = (layer.q_proj, layer.k_proj, layer.v_proj, layer.o_proj)
    weights, biases = _qkv_weights_and_biases(module)
    sources = zip(linears, (*weights, module.out_proj.weight), (*biases, module.out_proj.bias), strict=True)
    for linear, weight, bias in sources:
        assert linear is not None
        linear.register_parameter("weight", _copy_parameter(weight))
        linear.register_parameter("bias", _copy_parameter(bias))
    if module.add_zero_attn:
        layer.sink = module.out_proj.weight.new_zeros(module.num_heads)
    return layer.train(module.training)


def to_torch(layer: MultiHeadAttention) -> nn.MultiheadAttention:
    """torch's module, with `batch_first=True`, and a copy of the weights of a polyhead layer; outputs agree to 1e-6.

    For a query without keys the layer returns `o_proj`'s bias, but torch's module NaN.

    Raises:
        ValueError: for a layer that torch's module cannot express, with the reason.
    """
    for reason in _reasons_torch_cannot_express(layer):
        raise ValueError(reason)
    q, k, v, o = (getattr(layer, name) for name in _PROJECTION_NAMES)
    module = nn.MultiheadAttention(
        layer.d_model, layer.num_heads, layer.dropout, o.bias is not None, add_zero_attn=layer.sink is not None,
        kdim=layer.d_key, vdim=layer.d_value, batch_first=True, device="meta",
    )  # fmt: skip
    if module._qkv_same_embed_dim:
        module.register_parameter("in_proj_weight", _concat_parameters(q.weight, k.weight, v.weight))
    else:
        for name, linear in (("q_proj_weight", q), ("k_proj_weight", k), ("v_proj_weight", v)):
            module.register_parameter(name, _copy_parameter(linear.weight))
    if o.bias is not None:
        module.register_parameter("in_proj_bias", _concat_parameters(q.bias, k.bias, v.bias))
    module.out_proj.register_parameter("weight", _copy_parameter(o.weight))
    module.out_proj.register_parameter("bias", _copy_parameter(o.bias))
    return module.train(layer.training)


def _reasons_torch_cannot_express(layer: MultiHeadAttention) -> Iterator[str]:
    """The reasons why torch's module cannot express a layer."""
    if not isinstance(layer, MultiHeadAttention) or type(layer).forward is not MultiHeadAttention.forward:
        yield f"layer must be a polyhead.MultiHeadAttention that does not override forward, got {_type_name(layer)}"
        return
    if layer.o_proj is None:
        yield f"combine must be 'project', as in torch's module, got {layer.combine!r}"
        return
    linears = {name: getattr(layer, name) for name in _PROJECTION_NAMES}
    for name, linear in linears.items():
        if not isinstance(linear, nn.Linear) or type(linear).forward is not nn.Linear.forward:
            folded = " (fold_value_projection removes W_V)" if name == "v_proj" else ""
            yield f"{name} must be an nn.Linear, since torch's module holds plain weights, got {_type_name(linear)}{folded}"
            return
    yield from _reasons_from_sizes(layer, layer.o_proj.out_features)
    for name, part in (("position", layer.position), ("gate", layer.gate)):
        if part is not None:
            yield f"{name} must be None, since torch's module has none, got {_type_name(part)}"
    if layer.q_norm is not None or layer.k_norm is not None:
        yield "qk_norm must be False, since torch's module does not normalise queries and keys, got True"
    if isinstance(layer.sink, nn.Parameter):
        yield "sink must be None or 0, since torch's add_zero_attn is a fixed logit of 0, got a learned one"
    elif layer.sink is not None and bool((layer.sink != 0).any()):
        yield f"sink must be None or 0, since torch's add_zero_attn is a fixed logit of 0, got {layer.sink.tolist()}"
    if type(layer.score) is not Dot or layer.score.factor(layer.head_dim) != layer.head_dim**-0.5:
        yield f"score must be Dot() with the default scale, 1/√head_dim, as in torch's module, got {layer.score!r}"
    yield from _reasons_from_differing_projections(linears)


def _reasons_from_sizes(layer: MultiHeadAttention, d_out: int) -> Iterator[str]:
    heads, dim, model = layer.num_heads, layer.head_dim, layer.d_model
    if layer.kv_heads != heads:
        yield f"kv_heads must be num_heads, {heads}, since torch's module has no grouped heads, got {layer.kv_heads}"
    if heads * dim != model:
        yield f"num_heads * head_dim must be d_model, {model}, as in torch's module, got {heads} * {dim} = {heads * dim}"
    if layer.value_dim != dim:
        yield f"value_dim must be head_dim, {dim}, since torch's module has one size for both, got {layer.value_dim}"
    if d_out != model:
        yield f"d_out must be d_model, {model}, since torch's module has one size for both, got {d_out}"


def _reasons_from_differing_projections(linears: dict[str, nn.Linear]) -> Iterator[str]:
    """Projections that differ where torch's module has one flag or one packed parameter."""
    biased = {name: linear.bias is not None for name, linear in linears.items()}
    if len(set(biased.values())) > 1:
        yield f"bias must be the same for all projections, since torch's module has one flag, got {biased}"
    q, k, v, _ = linears.values()
    packed = ["bias", "weight"] if q.in_features == k.in_features == v.in_features else ["bias"]
    for name in packed:
        parts: list[Tensor | None] = [getattr(linear, name) for linear in (q, k, v)]
        trainable = [part is not None and part.requires_grad for part in parts]
        if len(set(trainable)) > 1:
            yield f"requires_grad must be the same for the {name} of q, k and v, since torch's module packs them, got {trainable}"


def _type_name(x: object) -> str:
    return f"{type(x).__module__}.{type(x).__qualname__}"


def _copy_parameter(x: Tensor | None) -> nn.Parameter | None:
    return None if x is None else nn.Parameter(x.detach().clone(), x.requires_grad)


def _concat_parameters(*parts: Tensor) -> nn.Parameter:
    return nn.Parameter(torch.cat([part.detach() for part in parts]), parts[0].requires_grad)


_PROJECTION_NAMES = ("q_proj", "k_proj", "v_proj", "o_proj")
_CONVERTIBLE_FORWARDS = (nn.MultiheadAttention.forward, MultiheadAttention.forward)
