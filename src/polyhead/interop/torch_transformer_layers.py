"""Convert torch's encoder and decoder layers to `TransformerLayer`."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import nn

from polyhead.interop.torch import from_torch
from polyhead.nn import FeedForward, TransformerLayer

_NAME_BY_ACTIVATION_FUNCTION = {F.relu: "relu", F.gelu: "gelu"}
_NAME_BY_ACTIVATION_MODULE: dict[type, str] = {nn.ReLU: "relu", nn.GELU: "gelu"}


def layer_from_torch(layer: nn.TransformerEncoderLayer | nn.TransformerDecoderLayer) -> TransformerLayer:
    """A `TransformerLayer` with a copy of the weights of torch's layer, and the same outputs.

    In training it applies the same dropout to attention weights and residual branches, but none inside the feed-forward network.

    Raises:
        ValueError: for other modules, `batch_first=False`, and activations other than relu and gelu.
    """
    if not isinstance(layer, (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)):
        raise ValueError(
            f"layer must be a torch.nn.TransformerEncoderLayer or TransformerDecoderLayer, got {type(layer).__name__}"
        )
    module: Any = layer
    activation = _NAME_BY_ACTIVATION_FUNCTION.get(module.activation) or _NAME_BY_ACTIVATION_MODULE.get(
        type(module.activation)
    )
    if activation is None or getattr(module.activation, "approximate", "none") != "none":
        raise ValueError(f"layer must have the activation relu or gelu, got {module.activation!r:.60}")
    decoder = isinstance(layer, nn.TransformerDecoderLayer)
    feedforward = FeedForward(
        module.linear1.in_features,
        module.linear1.out_features,
        activation=activation,
        bias=module.linear1.bias is not None,
    )
    feedforward.up, feedforward.down = copy.deepcopy(module.linear1), copy.deepcopy(module.linear2)
    ours = TransformerLayer(
        from_torch(module.self_attn), feedforward, cross=from_torch(module.multihead_attn) if decoder else None,
        norm=partial(nn.LayerNorm, eps=module.norm1.eps), norm_first=module.norm_first, dropout=module.dropout1.p,
    )  # fmt: skip
    ours.self_attn_norm = copy.deepcopy(module.norm1)
    if decoder:
        ours.cross_attn_norm = copy.deepcopy(module.norm2)
    ours.feedforward_norm = copy.deepcopy(module.norm3 if decoder else module.norm2)
    return ours.train(module.training)
