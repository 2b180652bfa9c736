"""Convert GeometricMachineLearning.jl's MultiHeadAttention to a polyhead layer and back.

In Julia x is (N, T), with items in columns, and head i has P_Q, P_K and P_V of (N, D) with D = N ÷ heads:

    output = vcat_i(P_Vᵀx · softmax((P_Qᵀx)ᵀ(P_Kᵀx) / √N))   [+ x],   with the softmax over each column

so that queries and keys are swapped: Julia's P_K is W_Q here. `polyhead.numpy.column_attention` is this formula.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from polyhead._checks import short_repr
from polyhead.manifold import Stiefel
from polyhead.nn.attention import MultiHeadAttention
from polyhead.score import Dot

ProductOrder = Literal["QK", "KQ"]
ScoreScale = Literal["model", "head"] | None
JuliaParameters = Mapping[str, Mapping[str, Any]]
# Julia's parameter -> the letter of the layer's projection, by order
_PROJECTION_BY_JULIA_NAME: dict[str, dict[str, str]] = {
    "QK": {"PQ": "k", "PK": "q", "PV": "v"},
    "KQ": {"PQ": "q", "PK": "k", "PV": "v"},
}


def layer_from_julia(
    parameters: JuliaParameters, *, scale: ScoreScale = "model", order: ProductOrder = "QK", residual: bool = True
) -> MultiHeadAttention:
    """A layer with a copy of Julia's parameters and the same outputs: `layer(x)` takes (T, N), the transpose of Julia's x.

    Projections whose matrices all have orthonormal columns are on the Stiefel manifold, others are unconstrained.

    Args:
        parameters: `{"PQ": {"head_1": …}, "PK": …, "PV": …}`, arrays or tensors of (N, D). In HDF5 and JLD2 files that
            are read from Python they are transposed.
        scale: the divisor of the scores: `"model"`, √N, as in current versions of the library; `"head"`, √D; None for no
            scaling, as in an older version.
        order: `"QK"`, the softmax of QᵀK, as the library computes it; `"KQ"`, the softmax of KᵀQ, as its documentation says.
        residual: whether the input is added to the output, Julia's `add_connection`.

    Raises:
        ValueError: for parameters that are missing or inconsistent.
    """
    _check_scale_and_order(scale, order)
    matrices = {name: _stack_heads(parameters, name) for name in ("PQ", "PK", "PV")}
    (heads, features, dim), dtype = matrices["PQ"].shape, matrices["PQ"].dtype
    for name, stacked in matrices.items():
        if stacked.shape != (heads, features, dim) or stacked.dtype != dtype:
            raise ValueError(
                f"parameters: {name} must match PQ, {heads} heads of {(features, dim)} in {dtype}, got {len(stacked)} heads of "
                f"{tuple(stacked.shape[1:])} in {stacked.dtype}"
            )
    if heads * dim != features:
        hint = "; they look transposed: pass matrix.T for each" if heads * features == dim else ""
        raise ValueError(f"parameters: the {heads} heads of PQ must be (N, N ÷ {heads}), got {(features, dim)}{hint}")
    # the columns of a head are its rows of the weight
    weights = {_PROJECTION_BY_JULIA_NAME[order][name]: stacked.mT.flatten(0, 1) for name, stacked in matrices.items()}
    on_stiefel = [letter for letter, weight in weights.items() if Stiefel(heads=heads).check(weight)[0]]
    factor = {"model": features**-0.5, "head": None, None: 1.0}[scale]
    layer = MultiHeadAttention(
        features, heads, score=Dot(factor), combine="concat", bias=False, residual=residual,
        manifold=dict.fromkeys(on_stiefel, "stiefel"),
    ).to(dtype)  # fmt: skip
    with torch.no_grad():
        for letter, weight in weights.items():
            layer.get_parameter(f"{letter}_proj.weight").copy_(weight)
    return layer


def layer_to_julia(
    layer: MultiHeadAttention, *, scale: ScoreScale = "model", order: ProductOrder = "QK"
) -> dict[str, dict[str, np.ndarray[Any, Any]]]:
    """Julia's parameters with a copy of a layer's weights: the inverse of `layer_from_julia` with the same `scale` and `order`.

    Raises:
        ValueError: for a layer that Julia's layer cannot express, with the reason.
    """
    _check_scale_and_order(scale, order)
    for reason in _reasons_julia_cannot_express(layer, scale):
        raise ValueError(reason)
    parameters: dict[str, dict[str, np.ndarray[Any, Any]]] = {}
    for name, letter in _PROJECTION_BY_JULIA_NAME[order].items():
        weight = layer.get_parameter(f"{letter}_proj.weight").detach().cpu()
        # NumPy has no bf16
        weight = weight.float() if weight.dtype == torch.bfloat16 else weight
        matrices = weight.unflatten(0, (layer.num_heads, -1)).mT
        parameters[name] = {f"head_{head}": matrix.numpy().copy() for head, matrix in enumerate(matrices, start=1)}
    return parameters


def _check_scale_and_order(scale: object, order: object) -> None:
    if scale not in ("model", "head", None):
        raise ValueError(f"scale must be 'model', 'head' or None, got {scale!r}")
    if order not in ("QK", "KQ"):
        raise ValueError(f"order must be 'QK' or 'KQ', got {order!r}")


def _stack_heads(parameters: JuliaParameters, name: str) -> Float[Tensor, "heads features dim"]:
    """The matrices of one projection, stacked by head."""
    if not isinstance(parameters, Mapping) or not isinstance(parameters.get(name), Mapping):
        raise ValueError(
            f"parameters must be {{'PQ': {{'head_1': …}}, 'PK': …, 'PV': …}}, got no dict of heads for {name}"
        )
    heads = parameters[name]
    keys = [f"head_{head}" for head in range(1, len(heads) + 1)]
    if not heads or set(heads) != set(keys):
        raise ValueError(f"parameters: {name} must have head_1, head_2 and so on, got {sorted(map(str, heads))}")
    matrices = [_to_tensor(f"parameters: {name}.{key}", heads[key]) for key in keys]
    for key, matrix in zip(keys, matrices, strict=True):
        if matrix.dim() != 2 or not matrix.is_floating_point() or matrix.shape != matrices[0].shape:
            raise ValueError(
                f"parameters: {name}.{key} must be a floating-point matrix (N, D), of one shape for all heads, got {matrix.dtype} of "
                f"shape {tuple(matrix.shape)}"
            )
    return torch.stack(matrices)


def _to_tensor(name: str, value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return value.detach()
    try:
        # a copy, since torch warns about read-only arrays
        return torch.from_numpy(np.array(value))
    except (TypeError, ValueError):
        raise ValueError(f"{name} must be a floating-point matrix (N, D), got {short_repr(value)}") from None


def _reasons_julia_cannot_express(layer: MultiHeadAttention, scale: ScoreScale) -> Iterator[str]:
    """The reasons why Julia's layer cannot express a layer."""
    if not isinstance(layer, MultiHeadAttention) or type(layer).forward is not MultiHeadAttention.forward:
        yield f"layer must be a MultiHeadAttention that does not override forward, got {type(layer).__name__}"
        return
    if layer.combine != "concat":
        yield f"combine must be 'concat', as in Julia's layer, got {layer.combine!r}"
    for letter in "qkv":
        linear = getattr(layer, f"{letter}_proj")
        if not isinstance(linear, nn.Linear) or linear.bias is not None:
            what = "one with a bias" if isinstance(linear, nn.Linear) else type(linear).__name__
            yield f"{letter}_proj must be an nn.Linear without a bias, as in Julia's layer, got {what}"
            return
    sizes = (layer.num_heads * layer.head_dim, layer.d_model, layer.d_model, layer.num_heads, layer.head_dim)
    names = ("d_model", "d_key", "d_value", "kv_heads", "value_dim")
    for name, size in zip(names, sizes, strict=True):
        if getattr(layer, name) != size:
            yield f"{name} must be {size}, since Julia's layer has one size for all, got {getattr(layer, name)}"
    for name in ("o_bias", "position", "sink", "gate", "q_norm"):
        if getattr(layer, name) is not None:
            yield f"{name} must be None, since Julia's layer has none, got {type(getattr(layer, name)).__name__}"
    factor = {"model": layer.d_model**-0.5, "head": layer.head_dim**-0.5, None: 1.0}[scale]
    if type(layer.score) is not Dot or layer.score.factor(layer.head_dim) != factor:
        yield f"score must be Dot({factor:.6g}) for scale={scale!r}, got {layer.score!r}"
