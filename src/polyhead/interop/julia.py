"""GeometricMachineLearning.jl's MultiHeadAttention: its parameters as a polyhead layer, and the way back.

There x is (N, T), items in columns, and head i has P_Q, P_K and P_V of (N, D) with D = N ÷ heads:

    output = vcat_i(P_Vᵀx · softmax((P_Qᵀx)ᵀ(P_Kᵀx) / √N))   [+ x],   the softmax down each column

so that it is the keys that ask: what Julia calls P_K is W_Q here. `polyhead.numpy.column_attention` is this formula.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from polyhead._checks import shown
from polyhead.manifold import Stiefel
from polyhead.nn.attention import MultiHeadAttention
from polyhead.score import Dot

Order = Literal["QK", "KQ"]
Scale = Literal["model", "head"] | None
Parameters = Mapping[str, Mapping[str, Any]]
# Julia's parameter -> the letter of the layer's projection
_LETTERS: dict[str, dict[str, str]] = {
    "QK": {"PQ": "k", "PK": "q", "PV": "v"},
    "KQ": {"PQ": "q", "PK": "k", "PV": "v"},
}


def layer_from_julia(
    parameters: Parameters, *, scale: Scale = "model", order: Order = "QK", residual: bool = True
) -> MultiHeadAttention:
    """A layer with a copy of Julia's parameters and its outputs: `layer(x)` takes (T, N), the transpose of Julia's x.

    Projections whose matrices all have orthonormal columns lie on the Stiefel manifold, the others are free.

    Args:
        parameters: `{"PQ": {"head_1": …}, "PK": …, "PV": …}`, arrays or tensors of (N, D). HDF5 and JLD2 files, read from
            Python, have them transposed.
        scale: what scores are divided by: `"model"`, √N, as the library does now; `"head"`, √D; None, nothing, as an older
            version did.
        order: `"QK"`, the softmax of QᵀK, as the library computes it; `"KQ"`, that of KᵀQ, as its page says.
        residual: whether the input is added to the output, Julia's `add_connection`.

    Raises:
        ValueError: for parameters that are missing or do not fit each other.
    """
    _check_choices(scale, order)
    matrices = {name: _stacked(parameters, name) for name in ("PQ", "PK", "PV")}
    (heads, features, dim), dtype = matrices["PQ"].shape, matrices["PQ"].dtype
    for name, stacked in matrices.items():
        if stacked.shape != (heads, features, dim) or stacked.dtype != dtype:
            raise ValueError(
                f"parameters: {name} has {len(stacked)} heads of {tuple(stacked.shape[1:])} in {stacked.dtype}, but PQ has {heads} of "
                f"{(features, dim)} in {dtype}; they must be alike"
            )
    if heads * dim != features:
        turned = "; they look transposed: pass matrix.T for each" if heads * features == dim else ""
        raise ValueError(
            f"parameters: PQ has {heads} heads of {(features, dim)}; they must be (N, N ÷ {heads}){turned}"
        )
    # a head's columns are its rows of the weight
    weights = {_LETTERS[order][name]: stacked.mT.flatten(0, 1) for name, stacked in matrices.items()}
    on = [letter for letter, weight in weights.items() if Stiefel(heads=heads).check(weight)[0]]
    factor = {"model": features**-0.5, "head": None, None: 1.0}[scale]
    layer = MultiHeadAttention(
        features, heads, score=Dot(factor), combine="concat", bias=False, residual=residual,
        manifold=dict.fromkeys(on, "stiefel"),
    ).to(dtype)  # fmt: skip
    with torch.no_grad():
        for letter, weight in weights.items():
            layer.get_parameter(f"{letter}_proj.weight").copy_(weight)
    return layer


def layer_to_julia(
    layer: MultiHeadAttention, *, scale: Scale = "model", order: Order = "QK"
) -> dict[str, dict[str, np.ndarray[Any, Any]]]:
    """Julia's parameters with a copy of a layer's weights: what `layer_from_julia` with the same `scale` and `order` reads.

    Raises:
        ValueError: for whatever Julia's layer cannot express, with the reason.
    """
    _check_choices(scale, order)
    for reason in _inexpressible(layer, scale):
        raise ValueError(reason)
    found: dict[str, dict[str, np.ndarray[Any, Any]]] = {}
    for name, letter in _LETTERS[order].items():
        weight = layer.get_parameter(f"{letter}_proj.weight").detach().cpu()
        # NumPy has no bf16
        weight = weight.float() if weight.dtype == torch.bfloat16 else weight
        matrices = weight.unflatten(0, (layer.num_heads, -1)).mT
        found[name] = {f"head_{head}": matrix.numpy().copy() for head, matrix in enumerate(matrices, start=1)}
    return found


def _check_choices(scale: object, order: object) -> None:
    if scale not in ("model", "head", None):
        raise ValueError(f"scale: it is {scale!r}; it must be 'model', 'head' or None")
    if order not in ("QK", "KQ"):
        raise ValueError(f"order: it is {order!r}; it must be 'QK' or 'KQ'")


def _stacked(parameters: Parameters, name: str) -> Float[Tensor, "heads features dim"]:
    """The matrices of one projection, head by head."""
    if not isinstance(parameters, Mapping) or not isinstance(parameters.get(name), Mapping):
        raise ValueError(
            f"parameters: there is no {name} with its heads; they must be {{'PQ': {{'head_1': …}}, 'PK': …, 'PV': …}}"
        )
    given = parameters[name]
    wanted = [f"head_{head}" for head in range(1, len(given) + 1)]
    if not given or set(given) != set(wanted):
        raise ValueError(f"parameters: {name} has {sorted(map(str, given))}; it must have head_1, head_2 and so on")
    matrices = [_matrix(f"parameters: {name}.{key}", given[key]) for key in wanted]
    for key, matrix in zip(wanted, matrices, strict=True):
        if matrix.dim() != 2 or not matrix.is_floating_point() or matrix.shape != matrices[0].shape:
            raise ValueError(
                f"parameters: {name}.{key} is {matrix.dtype} of shape {tuple(matrix.shape)}; it must be a floating-point matrix "
                "(N, D), of one shape for all heads"
            )
    return torch.stack(matrices)


def _matrix(name: str, given: Any) -> Tensor:
    if isinstance(given, Tensor):
        return given.detach()
    try:
        # a copy, since torch warns of arrays that may not be written to
        return torch.from_numpy(np.array(given))
    except (TypeError, ValueError):
        raise ValueError(f"{name} must be a floating-point matrix (N, D), got {shown(given)}") from None


def _inexpressible(layer: MultiHeadAttention, scale: Scale) -> Iterator[str]:
    """Why Julia's layer cannot be this one."""
    if not isinstance(layer, MultiHeadAttention) or type(layer).forward is not MultiHeadAttention.forward:
        yield f"layer: it is {type(layer).__name__}; it must be a MultiHeadAttention with its own forward"
        return
    if layer.combine != "concat":
        yield f"combine: it is {layer.combine!r}; it must be 'concat', the one way Julia's layer combines heads"
    for letter in "qkv":
        linear = getattr(layer, f"{letter}_proj")
        if not isinstance(linear, nn.Linear) or linear.bias is not None:
            what = "one with a bias" if isinstance(linear, nn.Linear) else type(linear).__name__
            yield f"{letter}_proj: it is {what}; it must be an nn.Linear without a bias, as in Julia's layer"
            return
    wanted = (layer.num_heads * layer.head_dim, layer.d_model, layer.d_model, layer.num_heads, layer.head_dim)
    names = ("d_model", "d_key", "d_value", "kv_heads", "value_dim")
    for name, size in zip(names, wanted, strict=True):
        if getattr(layer, name) != size:
            yield f"{name}: it is {getattr(layer, name)}; it must be {size}, for Julia's layer has one size for all"
    for name in ("o_bias", "position", "sink", "gate", "q_norm"):
        if getattr(layer, name) is not None:
            yield f"{name}: it is {type(getattr(layer, name)).__name__}; it must be None, for Julia's layer has none"
    factor = {"model": layer.d_model**-0.5, "head": layer.head_dim**-0.5, None: 1.0}[scale]
    if type(layer.score) is not Dot or layer.score.factor(layer.head_dim) != factor:
        yield f"score: it is {layer.score!r}; it must be Dot({factor:.6g}), for scale={scale!r}"
