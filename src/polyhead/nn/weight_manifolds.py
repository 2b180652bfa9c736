"""The manifolds of a layer's projections."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

import torch
from torch import nn

from polyhead.manifold import Euclidean, Manifold, Stiefel
from polyhead.nn.surgery import AppendOne

if TYPE_CHECKING:
    from polyhead.nn.attention import MultiHeadAttention

ManifoldLike = Literal["euclidean", "stiefel"] | Euclidean | Stiefel


def resolve_manifolds(
    manifold: ManifoldLike | Mapping[str, ManifoldLike], layer: MultiHeadAttention
) -> dict[str, Stiefel]:
    """The manifolds of W_Q, W_K and W_V by letter, without Euclidean ones."""
    letters = [letter for letter in "qkv" if getattr(layer, f"{letter}_proj") is not None]
    by_letter = dict(manifold) if isinstance(manifold, Mapping) else dict.fromkeys(letters, manifold)
    for letter in by_letter:
        if letter not in letters:
            tied = f", since {type(layer.score).__name__} shares projections" if len(letters) < 3 else ""
            raise ValueError(
                f"manifold must have keys among the layer's projections, {', '.join(letters)}{tied}, got {letter!r}"
            )
    resolved = {}
    for letter, choice in by_letter.items():
        on = _manifold_from_choice(choice)
        if isinstance(on, Stiefel):
            if on.heads is not None:
                raise ValueError(f"manifold must be a Stiefel without heads, got {on!r}; the layer sets them")
            _check_stiefel_fits(layer, letter)
            resolved[letter] = on
    return resolved


def weight_manifolds(layer: MultiHeadAttention) -> dict[str, Manifold]:
    """The manifolds of the current projection weights, by parameter name. Heads may have been pruned, and W_V folded."""
    heads = {"q": layer.num_heads, "k": layer.kv_heads, "v": layer.value_heads}
    by_name: dict[str, Manifold] = {}
    for letter, on in layer.manifold.items():
        projection = getattr(layer, f"{letter}_proj")
        if isinstance(projection, nn.Linear) and isinstance(projection._parameters.get("weight"), nn.Parameter):
            by_name[f"{letter}_proj.weight"] = dataclasses.replace(on, heads=heads[letter])
        elif not isinstance(projection, (nn.Identity, AppendOne)):
            raise ValueError(
                f"{letter}_proj must be an nn.Linear with its own weight to stay on {on!r}, got {type(projection).__name__}; "
                f"del layer.manifold[{letter!r}] drops the constraint"
            )
    return by_name


@torch.no_grad()
def draw_weights_on_manifolds(layer: MultiHeadAttention) -> None:
    """Draw the weights that have a manifold uniformly on it."""
    for name, on in weight_manifolds(layer).items():
        weight = layer.get_parameter(name)
        weight.copy_(on.random(*weight.shape, dtype=weight.dtype, device=weight.device))


def format_manifolds(layer: MultiHeadAttention) -> str:
    """The manifolds as part of the layer's repr."""
    letters = [letter for letter in "qkv" if isinstance(getattr(layer, f"{letter}_proj"), nn.Linear)]
    on = {letter: layer.manifold[letter] for letter in letters if letter in layer.manifold}
    distinct = set(on.values())
    return f", manifold={distinct.pop() if len(distinct) == 1 and len(on) == len(letters) else on}" if on else ""


def _manifold_from_choice(choice: object) -> Manifold:
    if isinstance(choice, (Euclidean, Stiefel)):
        return choice
    if choice == "euclidean":
        return Euclidean()
    if choice == "stiefel":
        return Stiefel()
    raise ValueError(
        f"manifold must be 'euclidean', 'stiefel', a Stiefel, or a dict of these for some of q, k and v, got {choice!r}"
    )


def _check_stiefel_fits(layer: MultiHeadAttention, letter: str) -> None:
    dim, width = ("value_dim", layer.value_dim) if letter == "v" else ("head_dim", layer.head_dim)
    source = {"q": "d_model", "k": "d_key", "v": "d_value"}[letter]
    features = getattr(layer, source)
    if width > features:
        raise ValueError(
            f"{dim} must be at most {source}, {features}, got {width}; on the Stiefel manifold each head's rows of the projection "
            "are orthonormal, so there can be no more of them than input features"
        )
