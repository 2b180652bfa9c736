"""One block for encoders and decoders: attention, then a feed-forward network."""

from __future__ import annotations

from collections.abc import Callable
from types import NoneType
from typing import NoReturn

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from polyhead._checks import WrongType, check_integer, check_numel, describe_type
from polyhead._foreign_arguments import (
    TRANSFORMER_LAYER,
    TRANSFORMER_LAYER_CALL,
    foreign_argument_error,
    hint_for_input,
    translate_foreign_arguments,
)
from polyhead._old_checkpoints import TRANSFORMER_LAYER_KEYS, accept_old_state_dict_keys
from polyhead._torch import is_fx_proxy, record_fx_call, refuse_scripting
from polyhead.linalg.skinny_gemm import apply_linear
from polyhead.neighbourhood import Neighbourhood, as_neighbourhood
from polyhead.nn.attention import MultiHeadAttention
from polyhead.nn.cache import KeyValueCache, KeyValues
from polyhead.nn.checks import check_dropout_rates, check_input_features, explain_input_mismatch
from polyhead.nn.dropout import dropout_16bit
from polyhead.nn.skip_padded_rows import find_unpadding

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
}


class FeedForward(nn.Module):
    """Position-wise feed-forward network: down(activation(up(x))), or down(activation(gate(x)) · up(x)).

    Args:
        d_model: input and output features.
        d_hidden: hidden features.
        activation: `"relu"`, `"gelu"`, `"gelu_tanh"` or `"silu"`.
        gated: whether a third linear map gates the hidden features; with `"silu"` this is SwiGLU.
        bias: whether the linear maps have biases.
    """

    __prepare_scriptable__ = refuse_scripting

    def __init__(
        self, d_model: int, d_hidden: int, *, activation: str = "relu", gated: bool = False, bias: bool = True
    ) -> None:
        super().__init__()
        d_model, d_hidden = check_integer("d_model", d_model), check_integer("d_hidden", d_hidden)
        check_numel("up", (d_hidden, d_model), hint="d_model or d_hidden is too large")
        if not isinstance(activation, str) or activation not in ACTIVATIONS:
            raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}")
        self.activation = activation
        self.gate = nn.Linear(d_model, d_hidden, bias) if gated else None
        self.up = nn.Linear(d_model, d_hidden, bias)
        self.down = nn.Linear(d_hidden, d_model, bias)

    def forward(self, x: Float[Tensor, "... d_model"]) -> Float[Tensor, "... d_model"]:
        act = ACTIVATIONS[self.activation]
        with explain_input_mismatch(self, self.up.in_features, x=x):
            # one name: the larger of the two is not kept while `down` runs
            hidden = apply_linear(self.up, x)
            hidden = act(hidden) if self.gate is None else act(apply_linear(self.gate, x)) * hidden
            return apply_linear(self.down, hidden)

    def extra_repr(self) -> str:
        return f"activation={self.activation!r}"


class TransformerLayer(nn.Module):
    """Self-attention, optional cross-attention, then a feed-forward network, each with a residual connection.

    Each sublayer computes x + sublayer(norm(x)) with `norm_first` (pre-norm), else norm(x + sublayer(x)) (post-norm, as in
    Vaswani 2017). Encoder layers have no `cross`. Decoder layers have one, and are called with `over=Causal()`.

    Args:
        attention: self-attention; the submodule `self_attn`.
        feedforward: the position-wise network, such as a `FeedForward`.
        cross: attention to a memory, such as the encoder's output; the submodule `cross_attn`.
        norm: makes a normalisation module from a number of features.
        norm_first: normalise the input of each sublayer (pre-norm), or the residual sum (post-norm).
        dropout: dropout rate of each sublayer's output.
    """

    @translate_foreign_arguments(TRANSFORMER_LAYER)
    def __init__(
        self,
        attention: MultiHeadAttention,
        feedforward: nn.Module,
        *,
        cross: MultiHeadAttention | None = None,
        norm: Callable[[int], nn.Module] = nn.LayerNorm,
        norm_first: bool = True,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        (dropout,) = check_dropout_rates(dropout=dropout)
        _check_attention_sublayer("attention", attention)
        d_model = attention.d_model
        if cross is not None:
            _check_attention_sublayer("cross", cross)
            if cross.d_model != d_model:
                raise ValueError(f"cross must have the d_model of attention, {d_model}, got {cross.d_model}")
            if cross.position is not None:
                raise ValueError(
                    f"cross must have position=None, got {cross.position}; positions in a memory are not those of the items"
                )
        if isinstance(feedforward, FeedForward) and feedforward.up.in_features != d_model:
            raise ValueError(
                f"feedforward must have the d_model of attention, {d_model}, got {feedforward.up.in_features}"
            )
        if not isinstance(feedforward, nn.Module):
            raise WrongType(f"feedforward must be a module such as FeedForward(…), got {describe_type(feedforward)}")
        if isinstance(norm, nn.Module) or not callable(norm):
            raise ValueError(
                f"norm must make a module from a number of features, such as nn.LayerNorm, got {describe_type(norm)}"
            )
        self.norm_first = norm_first
        accept_old_state_dict_keys(self, TRANSFORMER_LAYER_KEYS)
        self.self_attn = attention
        self.self_attn_norm = norm(d_model)
        self.cross_attn = cross
        self.cross_attn_norm = None if cross is None else norm(d_model)
        self.feedforward = feedforward
        self.feedforward_norm = norm(d_model)
        self.dropout = dropout

    def forward(
        self,
        x: Float[Tensor, "... items d_model"],
        memory: Float[Tensor, "... keys d_key"] | KeyValues | None = None,
        over: Neighbourhood | Tensor | None = None,
        *,
        memory_over: Neighbourhood | Tensor | None = None,
        cache: KeyValueCache | None = None,
        **foreign: NoReturn,
    ) -> Float[Tensor, "... items d_model"]:
        """Apply the sublayers.

        Args:
            x: the items.
            memory: what `cross` attends to, or its `KeyValues` from `cross.project_kv`.
            over: which items may attend to which. Outputs at padded positions are undefined.
            memory_over: which items may attend to which part of the memory.
            cache: keys and values of earlier items, made by `layer.self_attn.cache(batch, length)`.
        """
        if is_fx_proxy(x):
            recorded: Tensor = record_fx_call(self, x, memory, over, memory_over=memory_over, cache=cache)
            return recorded
        if foreign:
            raise foreign_argument_error("TransformerLayer", foreign, TRANSFORMER_LAYER_CALL)
        if (memory is None) != (self.cross_attn is None) or not isinstance(memory, (Tensor, KeyValues, NoneType)):
            _refuse_memory(memory, self.cross_attn is not None)
        if not isinstance(x, Tensor) or x.dim() < 2 or x.shape[-1] != self.self_attn.d_model:
            check_input_features("x", x, self.self_attn.d_model, self)
        with explain_input_mismatch(self, self.self_attn.d_model, x=x):
            x = self._residual(x, self.self_attn_norm, lambda y: self.self_attn(y, over=over, cache=cache)[0])
        if self.cross_attn is not None:
            cross, norm = self.cross_attn, self.cross_attn_norm
            assert norm is not None
            x = self._residual(x, norm, lambda y: cross(y, memory, over=memory_over)[0])
        # other modules may depend on the shape of their input
        may_unpad = cache is None and isinstance(self.feedforward, FeedForward)
        unpadding = find_unpadding(as_neighbourhood(over).bind_self_attention(True), x) if may_unpad else None
        if unpadding is None:
            return self._residual(x, self.feedforward_norm, self.feedforward)
        return unpadding.pad(self._residual(unpadding.unpad(x), self.feedforward_norm, self.feedforward))

    __prepare_scriptable__ = refuse_scripting

    def _residual(self, x: Tensor, norm: nn.Module, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        y = sublayer(norm(x) if self.norm_first else x)
        if self.training and self.dropout:
            y = dropout_16bit(y, self.dropout)
        return x + y if self.norm_first else norm(x + y)

    def extra_repr(self) -> str:
        return f"norm_first={self.norm_first}, dropout={self.dropout}"


def _refuse_memory(memory: object, has_cross: bool) -> None:
    """Raise for a memory of a layer without cross-attention, for none with it, and for other types."""
    if memory is None:
        raise ValueError("memory must be given: this layer has cross-attention, which attends to it")
    hint = hint_for_input("memory", memory)
    if isinstance(memory, Neighbourhood):
        raise ValueError(
            f"memory must be a tensor or KeyValues, got {memory!r}; pass a neighbourhood as over= or memory_over="
        )
    if has_cross:
        raise WrongType(
            f"memory must be a tensor (..., keys, features) or KeyValues, got {describe_type(memory)}{hint}"
        )
    if hint:
        raise ValueError(f"memory must be None: this layer has no cross-attention, got {describe_type(memory)}{hint}")
    raise ValueError("memory must be None: this layer has no cross-attention; make it with cross=MultiHeadAttention(…)")


def _check_attention_sublayer(name: str, attention: object) -> None:
    """Raise unless an attention can be a sublayer with a residual connection."""
    if not isinstance(attention, MultiHeadAttention):
        hint = "; pass MultiHeadAttention(d_model, num_heads)" if isinstance(attention, int) else ""
        if isinstance(attention, nn.MultiheadAttention):
            hint = " of torch; convert it with polyhead.interop.torch.from_torch"
        raise ValueError(f"{name} must be a MultiHeadAttention, got {type(attention).__name__}{hint}")
    width = attention.value_dim * (attention.num_heads if attention.combine == "concat" else 1)
    width = width if attention.o_proj is None else attention.o_proj.out_features
    if width != attention.d_model:
        raise ValueError(f"{name} must have as many output features as its query, {attention.d_model}, got {width}")
    if attention.residual:
        raise ValueError(f"{name} must have residual=False, got True; the transformer layer adds the residual")
