"""Where a token's attention comes from through all layers: attention rollout."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from jaxtyping import Float
from torch import Tensor

from polyhead._checks import WrongType, check_integer, kind_of
from polyhead.heads import Heads


def rollout(seen: Mapping[str, Heads], token: int) -> Float[Tensor, "... tokens"]:
    """How much of each input token reaches one token of the last layer (Abnar 2020): R_l = rownorm(mean_h A + I) R_(l-1).

    The heads of a layer count alike, and the residual connection as much as all of them. One token's row of R is a vector
    that goes down through the layers: nothing is of size tokens x tokens.

    Args:
        seen: self-attention from the first layer to the last, as `capture` gives it.
        token: its number.
    """
    if not isinstance(seen, Mapping) or not all(isinstance(heads, Heads) for heads in seen.values()):
        raise WrongType(f"seen must be what capture records, a mapping to Heads, got {kind_of(seen)}")
    layers = list(seen.values())
    if not layers:
        raise ValueError("seen: it is empty; there must be a layer at the least")
    sizes = {tuple(heads.shape[-2:]) for heads in layers}
    tokens = layers[-1].shape[-1]
    if sizes != {(tokens, tokens)}:
        raise ValueError(
            f"seen: the layers have (queries, keys) {sorted(sizes)}; all must be self-attention of one length"
        )
    token = check_integer("token", token, -tokens, tokens - 1)
    last = layers[-1]
    row = torch.zeros(
        *last.shape[:-3], tokens, dtype=torch.promote_types(last.dtype, torch.float32), device=last.device
    )
    row[..., token] = 1
    everything = torch.ones(tokens, dtype=torch.bool, device=last.device)
    for heads in reversed(layers):
        # rows of weights sum to less than 1 where there is a sink
        total = heads.mass(everything).mean(-2) + 1
        row = row / total
        row = row + heads.received(row[..., None, :]).mean(-2)
    return row
