"""Project the inputs of a layer where some keys lie elsewhere: their rows are fetched before or after the projection."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor

from polyhead.neighbourhood import Neighbourhood
from polyhead.nn.projection import project_keys_values, project_own_queries, project_qkv

if TYPE_CHECKING:
    from polyhead.nn.attention import MultiHeadAttention


def project_with_remote_keys(
    layer: MultiHeadAttention, query: Tensor, key: Tensor, value: Tensor, over: Neighbourhood,
    points: Int[Tensor, "all_keys axes"] | None,
) -> tuple[
    Float[Tensor, "... heads queries dim"],
    Float[Tensor, "... heads all_keys dim"],
    Float[Tensor, "... heads all_keys value_dim"],
]:  # fmt: skip
    """q of the own queries, and k and v of all keys; keys are normalised and rotated by their coordinates `points`.

    Rows are sent where they are narrowest. What needs no remote row, such as the projection of the queries, is computed
    while they are under way.
    """
    if not fetches_projected_rows(layer, key, value):
        wait = over.start_fetch(key) if value is key or layer.v_proj is None else over.start_fetch(key, value)
        shared = layer.q_proj is None and query is key
        q = None if shared else project_own_queries(layer, query)
        fetched = wait()
        k, v = project_keys_values(layer, fetched[0], fetched[-1])
        q = k[..., : query.shape[-2], :] if q is None else q
        return q, *layer._normalise_and_rotate_keys(k, v, 0, points)
    own = None if points is None else points[: key.shape[-2]]
    pending: list[Callable[[], tuple[Tensor, ...]]] = []

    def start(k: Tensor, v: Tensor) -> None:
        pending.append(over.start_fetch(*layer._normalise_and_rotate_keys(k, v, 0, own)))

    q, _, _ = project_qkv(layer, query, key, value, None, keys_are_ready=start)
    k, v = pending[0]()
    return q, k, v


def fetches_projected_rows(layer: MultiHeadAttention, key: Tensor, value: Tensor) -> bool:
    """Whether k and v are sent, and not the inputs: where they are not wider, and where only the owner has the input as it is used."""
    drops = layer.training and (layer.input_dropout > 0 or layer.value_dropout > 0)
    if drops or key.layout != torch.strided or value.layout != torch.strided:
        return True
    inputs, projected = layer.d_key, layer.kv_heads * layer.head_dim
    if layer.v_proj is not None:
        inputs += 0 if value is key else layer.d_value
        projected += layer.value_heads * layer.value_dim
    return projected <= inputs
