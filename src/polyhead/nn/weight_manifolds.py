"""On which manifolds a layer's projections lie."""

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

Sampler = Literal["euclidean", "stiefel"] | Euclidean | Stiefel


def placed(manifold: Sampler | Mapping[str, Sampler], layer: MultiHeadAttention) -> dict[str, Stiefel]:
    """The manifold of each of q, k and v that has one."""
    own = [letter for letter in "qkv" if getattr(layer, f"{letter}_proj") is not None]
    chosen = dict(manifold) if isinstance(manifold, Mapping) else dict.fromkeys(own, manifold)
    for letter in chosen:
        if letter not in own:
            tied = f", since {type(layer.score).__name__} has one projection for several" if len(own) < 3 else ""
            raise ValueError(f"manifold: it names {letter!r}; this layer has projections {', '.join(own)}{tied}")
    found = {}
    for letter, choice in chosen.items():
        on = _named(choice)
        if isinstance(on, Stiefel):
            if on.heads is not None:
                raise ValueError(f"manifold: it is {on!r}; its heads must be left out, since the layer's are meant")
            _check_fits(layer, letter)
            found[letter] = on
    return found


def manifolds(layer: MultiHeadAttention) -> dict[str, Manifold]:
    """The manifolds of the projections' weights as they are now: heads may have been pruned, W_V folded away."""
    heads = {"q": layer.num_heads, "k": layer.kv_heads, "v": layer.value_heads}
    found: dict[str, Manifold] = {}
    for letter, on in layer.manifold.items():
        projection = getattr(layer, f"{letter}_proj")
        if isinstance(projection, nn.Linear) and isinstance(projection._parameters.get("weight"), nn.Parameter):
            found[f"{letter}_proj.weight"] = dataclasses.replace(on, heads=heads[letter])
        elif not isinstance(projection, (nn.Identity, AppendOne)):
            raise ValueError(
                f"{letter}_proj: it is {type(projection).__name__}, without a weight of its own to keep on {on!r}; it must be an "
                f"nn.Linear, or free: del layer.manifold[{letter!r}]"
            )
    return found


@torch.no_grad()
def draw(layer: MultiHeadAttention) -> None:
    """Draw the weights that lie on a manifold uniformly on it."""
    for name, on in manifolds(layer).items():
        weight = layer.get_parameter(name)
        weight.copy_(on.random(*weight.shape, dtype=weight.dtype, device=weight.device))


def words(layer: MultiHeadAttention) -> str:
    """What a layer says of its manifolds when it is printed."""
    letters = [letter for letter in "qkv" if isinstance(getattr(layer, f"{letter}_proj"), nn.Linear)]
    on = {letter: layer.manifold[letter] for letter in letters if letter in layer.manifold}
    alike = set(on.values())
    return f", manifold={alike.pop() if len(alike) == 1 and len(on) == len(letters) else on}" if on else ""


def _named(choice: object) -> Manifold:
    if isinstance(choice, (Euclidean, Stiefel)):
        return choice
    if choice == "euclidean":
        return Euclidean()
    if choice == "stiefel":
        return Stiefel()
    raise ValueError(
        f"manifold: it is {choice!r}; it must be 'euclidean', 'stiefel', a Stiefel, or a dict of these for some of q, k and v"
    )


def _check_fits(layer: MultiHeadAttention, letter: str) -> None:
    dim, width = ("value_dim", layer.value_dim) if letter == "v" else ("head_dim", layer.head_dim)
    source = {"q": "d_model", "k": "d_key", "v": "d_value"}[letter]
    features = getattr(layer, source)
    if width > features:
        raise ValueError(
            f"{dim}: it is {width}, but {source} is {features}; on the Stiefel manifold a head has at most as many directions as "
            "its input has features"
        )
