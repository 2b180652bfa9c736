"""Project the inputs of a layer to queries, keys and values, split into heads."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from polyhead._checks import check_dense_tensor
from polyhead._foreign_arguments import hint_for_input
from polyhead.kernels.call import GlobalIndices
from polyhead.linalg.skinny_gemm import apply_linear
from polyhead.nn.cache import KeyValues
from polyhead.nn.checks import check_dtype_and_device
from polyhead.nn.dropout import dropout_16bit, dropout_of_heads
from polyhead.nn.skip_padded_rows import Unpadding
from polyhead.nn.sparse_linear import drop_inputs_per_head, project_dense_or_sparse

if TYPE_CHECKING:
    from polyhead.nn.attention import MultiHeadAttention

# A linear map of an input, which may be dense, sparse, unpadded, or one copy per head.
Projector = Callable[[nn.Module, Any], Tensor]


def project_qkv(
    layer: MultiHeadAttention, query: Tensor, key: Tensor, value: Tensor, unpadding: Unpadding | None,
    keys_are_ready: Callable[[Tensor, Tensor], None] | None = None,
) -> tuple[Float[Tensor, "... heads items dim"], ...]:  # fmt: skip
    """q, k and v; the same tensor where they share a projection and an input.

    `keys_are_ready` is called with k and v before q is computed.
    """
    x: Any
    y: Any
    z: Any
    project: Projector = apply_linear
    try:
        if unpadding is not None:
            x = y = z = unpadding.unpad(query)
            project = lambda linear, rows: unpadding.pad(linear(rows))
        elif (layer.input_dropout and layer.training) or not (
            query.layout == key.layout == value.layout == torch.strided
        ):
            x, y, z = _drop_inputs_in_training(layer, query, key, value)
            project = project_dense_or_sparse
        else:
            x, y, z = query, key, value
        k, v = _project_keys_values_unchecked(layer, y, z, project)
        if keys_are_ready is not None:
            keys_are_ready(k, v)
        if layer.q_proj is None and query is key:
            return k, k, v
        q_proj = layer.k_proj if layer.q_proj is None else layer.q_proj
        return _split_heads(project(q_proj, x), layer.num_heads), k, v
    except RuntimeError:
        check_dtype_and_device(layer, query=query, key=key, value=value)
        raise


def project_queries(
    layer: MultiHeadAttention, query: Tensor, key_values: KeyValues
) -> Float[Tensor, "... heads queries dim"]:
    """q, for keys and values that are already projected."""
    q = project_own_queries(layer, query)
    k, v = key_values
    if not (q.dtype == k.dtype == v.dtype and q.device == k.device == v.device):
        raise ValueError(
            f"key must be of the queries' dtype and device, {q.dtype} on {q.device}, got {k.dtype} and {v.dtype} on "
            f"{k.device}; call project_kv again after .to(), and under the same autocast"
        )
    return q


def project_own_queries(layer: MultiHeadAttention, query: Tensor) -> Float[Tensor, "... heads queries dim"]:
    """q alone."""
    try:
        (x,) = _drop_inputs_in_training(layer, query)
        q_proj = layer.k_proj if layer.q_proj is None else layer.q_proj
        return _split_heads(project_dense_or_sparse(q_proj, x), layer.num_heads)
    except RuntimeError:
        check_dtype_and_device(layer, query=query)
        raise


def project_keys_values(layer: MultiHeadAttention, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """k and v, after checks of the inputs."""
    for name, x in (("key", key), ("value", value)):
        check_dense_tensor(name, x, "(..., keys, features)", hint=hint_for_input(name, x)[2:])
    if (
        key.dim() < 2
        or key.shape[-1] != layer.d_key
        or value.shape[-1] != layer.d_value
        or key.shape[:-1] != value.shape[:-1]
    ):
        raise ValueError(
            f"key, value must have shapes (..., keys, {layer.d_key}) and (..., keys, {layer.d_value}), got "
            f"{tuple(key.shape)} and {tuple(value.shape)}"
        )
    try:
        y, z = _drop_inputs_in_training(layer, key, value)
        return _project_keys_values_unchecked(layer, y, z, project_dense_or_sparse)
    except RuntimeError:
        check_dtype_and_device(layer, key=key, value=value)
        raise


def check_qkv_inputs(layer: MultiHeadAttention, query: Tensor, key: Tensor, value: Tensor) -> None:
    """Raise where query, key and value do not fit the layer or each other."""
    dense = isinstance(query, Tensor) and query.layout == torch.strided and not query.is_nested
    one_width = layer.d_model == layer.d_key == layer.d_value
    if dense and key is query and value is query and one_width and query.dim() > 1 and query.shape[-1] == layer.d_model:
        return
    for name, x, features in (
        ("query", query, layer.d_model),
        ("key", key, layer.d_key),
        ("value", value, layer.d_value),
    ):
        if not isinstance(x, Tensor) or x.is_nested or (x.layout != torch.strided and (x.dim() != 2 or x.is_mkldnn)):
            described_as = f"(..., items, {features}), or a sparse one without a batch"
            check_dense_tensor(name, x, described_as, hint=hint_for_input(name, x)[2:])
        shape = x.shape
        if len(shape) < 2 or shape[-1] != features:
            image = len(shape) > 2 and shape[1] == features
            hint = f"; pass an image as {name}.flatten(2).transpose(1, 2)" if image else hint_for_input(name, x)
            raise ValueError(f"{name} must have shape (..., items, {features}), got {tuple(shape)}{hint}")
        if shape[:-2] != query.shape[:-2]:
            raise ValueError(
                f"{name} must have the query's batch {tuple(query.shape[:-2])}, got {tuple(shape[:-2])}{hint_for_input(name, x)}"
            )
    if value.shape[-2] != key.shape[-2]:
        raise ValueError(f"value must have as many items as key, {key.shape[-2]}, got {value.shape[-2]}")


def check_projected_key_values(
    layer: MultiHeadAttention, query: Tensor, key_values: KeyValues, value: Tensor | None
) -> None:
    """Raise where a query does not fit the result of `project_kv`."""
    if value is not None:
        raise ValueError("value must be left out where key is the result of project_kv, which holds the values too")
    check_dense_tensor("query", query, f"(..., items, {layer.d_model})")
    if query.dim() < 2 or query.shape[-1] != layer.d_model:
        raise ValueError(f"query must have shape (..., items, {layer.d_model}), got {tuple(query.shape)}")
    k, v = key_values
    batch, keys = tuple(query.shape[:-2]), k.shape[-2]
    expected = (*batch, layer.kv_heads, keys, layer.head_dim), (*batch, layer.value_heads, keys, layer.value_dim)
    if (tuple(k.shape), tuple(v.shape)) != expected:
        raise ValueError(
            f"key must be the result of this layer's project_kv for the query's batch {batch}, got keys of shape "
            f"{tuple(k.shape)} and values of shape {tuple(v.shape)}"
        )


def _project_keys_values_unchecked(
    layer: MultiHeadAttention, key: Any, value: Any, project: Projector
) -> tuple[Float[Tensor, "... heads keys dim"], Float[Tensor, "... heads keys value_dim"]]:
    k = _split_heads(project(layer.k_proj, key), layer.kv_heads)
    v = k if layer.v_proj is None else _split_heads(project(layer.v_proj, value), layer.value_heads)
    return k, _drop_values(layer, v) if layer.value_dropout and layer.training else v


def _drop_values(layer: MultiHeadAttention, v: Float[Tensor, "... heads keys value_dim"]) -> Tensor:
    """Dropout of the values; if this process has some of the heads, of the same numbers as with all of them."""
    if layer.global_value_heads is None:
        return dropout_16bit(v, layer.value_dropout)
    return dropout_of_heads(v, layer.value_dropout, *layer.global_value_heads)


def _drop_inputs_in_training(layer: MultiHeadAttention, *inputs: Tensor) -> list[Any]:
    """The inputs, in training with dropout per head; inputs that are the same tensor share one draw."""
    if not (layer.input_dropout and layer.training):
        return list(inputs)
    first, total, *_ = layer.global_heads or GlobalIndices(0, layer.num_heads)
    heads = range(first, first + layer.num_heads)
    dropped: dict[int, list[Any]] = {}
    for x in inputs:
        if id(x) not in dropped:
            dropped[id(x)] = drop_inputs_per_head(x, layer.input_dropout, heads, total)
    return [dropped[id(x)] for x in inputs]


def _split_heads(x: Float[Tensor, "... items heads_dim"], heads: int) -> Float[Tensor, "... heads items dim"]:
    return x.unflatten(-1, (heads, x.shape[-1] // heads)).transpose(-3, -2)
