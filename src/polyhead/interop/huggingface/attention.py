"""The attention function that transformers calls, and its registration."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from polyhead.attend import run_call
from polyhead.interop.huggingface.lazy_mask import ConditionMask, LazyMask
from polyhead.interop.huggingface.mask_function import collect_mask_readers, polyhead_mask
from polyhead.interop.huggingface.model_support import BACKEND_NAME, patch_transformers_to_check_models
from polyhead.kernels.reference import pair_weights
from polyhead.neighbourhood import Causal, Neighbourhood, Window
from polyhead.prepare import AttentionOptions, check_and_make_call
from polyhead.score import Dot, Score

_INSTALL_COMMAND = "pip install 'transformers>=5.4'"


def register() -> None:
    """Register `attn_implementation="polyhead"` with transformers, for every model that uses its attention interface.

    Afterwards `AutoModel.from_pretrained(…, attn_implementation="polyhead")`, `from_config` and
    `model.set_attn_implementation("polyhead")` compute attention with polyhead's kernels, in training, evaluation and
    generation. It adds one entry to each of transformers' registries, of attention functions and of mask functions, and
    checks each model that selects the name: a model that does not use the interface raises a `ValueError`. Other
    implementations are unchanged. Repeated calls have no effect.

    Raises:
        ImportError: if transformers is not installed, or is too old.
    """
    try:
        import transformers
        from transformers import AttentionInterface, AttentionMaskInterface, masking_utils
    except ImportError as error:
        raise ImportError(
            f"transformers must be 5.4 or newer, got an error on import ({error}): {_INSTALL_COMMAND}"
        ) from error
    if "q_offset" not in inspect.signature(masking_utils.sdpa_mask).parameters:
        raise ImportError(f"transformers must be 5.4 or newer, got {transformers.__version__}: {_INSTALL_COMMAND}")
    collect_mask_readers(masking_utils)
    patch_transformers_to_check_models()
    AttentionInterface.register(BACKEND_NAME, polyhead_attention_forward)
    AttentionMaskInterface.register(BACKEND_NAME, polyhead_mask)


def polyhead_attention_forward(
    module: nn.Module,
    query: Float[Tensor, "batch heads queries dim"],
    key: Float[Tensor, "batch key_heads keys dim"],
    value: Float[Tensor, "batch key_heads keys value_dim"],
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Float[Tensor, "#batch #heads queries keys"] | None = None,
    s_aux: Float[Tensor, " heads"] | None = None,
    softcap: float | None = None,
    cache: object = None,
    indices: Tensor | None = None,
    block_indices: Tensor | None = None,
    output_attentions: bool | None = False,
    **_: Any,
) -> tuple[Float[Tensor, "batch queries heads value_dim"], Float[Tensor, "batch heads queries keys"] | None]:
    """One attention call of a transformers model, with tensors, masks and options as transformers passes them.

    Other options are ignored, as in transformers' own attention functions: a window is already in the mask.
    """
    _refuse_selected_keys(cache, indices=indices, block_indices=block_indices)
    query, key, value = _cast_for_autocast(query, key, value)
    over: Neighbourhood | Tensor | None = None
    bias, queries, keys = position_bias, query.shape[2], key.shape[2]
    allowed = attention_mask.state if isinstance(attention_mask, LazyMask) else None
    if allowed is not None and not allowed.exposed and allowed.shape[2:] == (queries, keys):
        over, used = allowed.over, allowed.used_keys
    elif attention_mask is not None:
        used = keys
        plain = attention_mask.tensor() if isinstance(attention_mask, ConditionMask) else attention_mask
        if plain.dtype == torch.bool:
            over = plain
        elif plain.is_floating_point():
            bias = plain if bias is None else bias + plain
        else:
            raise ValueError(
                f"attention_mask must be bool, True = may attend, or floating-point values to add, got {plain.dtype}; pass mask.bool()"
            )
    else:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        over, used = _neighbourhood_without_mask(bool(causal), queries, keys)
    if used < keys:
        key, value, bias = key[:, :, :used], value[:, :, :used], None if bias is None else bias[..., :used]
    score: Score = Dot(scaling) if softcap is None else SoftcappedDot(softcap, scaling)
    call = check_and_make_call(query, key, value, AttentionOptions(over, score, bias=bias, sink=s_aux, dropout=dropout))
    out = run_call(call)[0].transpose(1, 2).contiguous()
    if not output_attentions:
        return out, None
    return out, nn.functional.pad(pair_weights(call).to(out.dtype), (0, keys - used))


def _refuse_selected_keys(cache: object, **indices: Tensor | None) -> None:
    """Refuse keys that are selected without a mask: by a paged cache, or by their indices."""
    for name, value in {"cache": cache, **indices}.items():
        if value is not None:
            remedy = "use generate, or 'sdpa'" if name == "cache" else "use attn_implementation='eager'"
            raise ValueError(
                f"{name} must be None on attn_implementation='polyhead', got a {type(value).__name__}: keys are chosen by "
                f"masks alone; {remedy}"
            )


class SoftcappedDot(Score):
    """score(q, k) = cap · tanh(scale · qᵀk / cap): scores between -cap and cap (Gemma 2)."""

    def __init__(self, cap: float, scale: float | None = None) -> None:
        super().__init__()
        if cap <= 0:
            raise ValueError(f"softcap must be more than 0, or None, got {cap}")
        self.cap, self.dot = cap, Dot(scale)

    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        s: Tensor = self.dot(q, k)
        return torch.tanh(s / self.cap) * self.cap


def _cast_for_autocast(*tensors: Tensor) -> list[Tensor]:
    """Cast tensors to the dtype that autocast uses for torch's attention; rotary embeddings may have widened some."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return list(tensors)
    return [x.to(torch.get_autocast_dtype(device)) for x in tensors]


def _neighbourhood_without_mask(causal: bool, queries: int, keys: int) -> tuple[Neighbourhood | None, int]:
    """The neighbourhood without a mask, and the number of keys in use, as transformers calls torch's attention.

    If causal, query i attends to the keys 0 … i, for any number of keys; a single query attends to all.
    """
    if not causal or queries == 1:
        return None, keys
    return (Causal(), queries) if queries <= keys else (Window(keys, queries - keys), keys)
