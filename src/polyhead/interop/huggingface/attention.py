"""The attention that transformers calls, and its registration."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from polyhead.attend import prepare, run
from polyhead.interop.huggingface.lazy_mask import BoolMask, LazyMask
from polyhead.interop.huggingface.mask_function import learn, mask
from polyhead.interop.huggingface.model_support import NAME, guard
from polyhead.kernels.reference import weights
from polyhead.neighbourhood import Causal, Neighbourhood, Window
from polyhead.score import Dot, Score

_INSTALL = "pip install 'transformers>=5.4'"


def register() -> None:
    """Make `attn_implementation="polyhead"` known to transformers, for every model that takes its attention from there.

    After it, `AutoModel.from_pretrained(…, attn_implementation="polyhead")`, `from_config` and
    `model.set_attn_implementation("polyhead")` compute attention with polyhead's kernels, in training, evaluation and
    generation. It adds one entry to each of transformers' tables, of attentions and of masks, and has a model asked
    before it takes the name: one that computes attention by itself refuses it with a `ValueError`. Other names are as
    they were. To call it again does no harm.

    Raises:
        ImportError: where transformers is not installed, or is too old.
    """
    try:
        import transformers
        from transformers import AttentionInterface, AttentionMaskInterface, masking_utils
    except ImportError as error:
        raise ImportError(
            f"transformers: it cannot be imported ({error}); it must be 5.4 or newer: {_INSTALL}"
        ) from error
    if "q_offset" not in inspect.signature(masking_utils.sdpa_mask).parameters:
        raise ImportError(f"transformers: it is {transformers.__version__}; it must be 5.4 or newer: {_INSTALL}")
    learn(masking_utils)
    guard()
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, mask)


def attention(
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
    """One attention of a transformers model: its tensors, masks and options as transformers hands them over.

    Its other options are left unread, as transformers' own attentions do: a window is in the mask already.
    """
    _refuse_found_keys(cache, indices=indices, block_indices=block_indices)
    query, key, value = _narrowed(query, key, value)
    over: Neighbourhood | Tensor | None = None
    bias, queries, keys = position_bias, query.shape[2], key.shape[2]
    allowed = attention_mask.allowed if isinstance(attention_mask, LazyMask) else None
    if allowed is not None and not allowed.given and allowed.shape[2:] == (queries, keys):
        over, seen = allowed.over, allowed.seen
    elif attention_mask is not None:
        seen = keys
        given = attention_mask.numbers() if isinstance(attention_mask, BoolMask) else attention_mask
        if given.dtype == torch.bool:
            over = given
        elif given.is_floating_point():
            bias = given if bias is None else bias + given
        else:
            raise ValueError(
                f"attention_mask: it is {given.dtype}; it must be bool, True = may attend, or floating-point numbers to add"
            )
    else:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        over, seen = _without_mask(bool(causal), queries, keys)
    if seen < keys:
        key, value, bias = key[:, :, :seen], value[:, :, :seen], None if bias is None else bias[..., :seen]
    score: Score = Dot(scaling) if softcap is None else CappedDot(softcap, scaling)
    call = prepare(query, key, value, over=over, score=score, position=None, bias=bias, sink=s_aux, dropout=dropout)
    out = run(call)[0].transpose(1, 2).contiguous()
    if not output_attentions:
        return out, None
    return out, nn.functional.pad(weights(call).to(out.dtype), (0, keys - seen))


def _refuse_found_keys(cache: object, **chosen: Tensor | None) -> None:
    """Refuse keys that are found otherwise than by a mask: in pages, or by their numbers."""
    for name, value in {"cache": cache, **chosen}.items():
        if value is not None:
            remedy = "use generate, or 'sdpa'" if name == "cache" else "use attn_implementation='eager'"
            raise ValueError(
                f"{name} must be None on attn_implementation='polyhead', got a {type(value).__name__}: keys are chosen by "
                f"masks alone; {remedy}"
            )


class CappedDot(Score):
    """score(q, k) = cap · tanh(scale · qᵀk / cap): scores that stay between -cap and cap (Gemma 2)."""

    def __init__(self, cap: float, scale: float | None = None) -> None:
        super().__init__()
        if cap <= 0:
            raise ValueError(f"softcap: it is {cap}; it must be more than 0, or None")
        self.cap, self.dot = cap, Dot(scale)

    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        s: Tensor = self.dot(q, k)
        return torch.tanh(s / self.cap) * self.cap


def _narrowed(*tensors: Tensor) -> list[Tensor]:
    """The tensors in the dtype that autocast would give to torch's attention; a rotation may have widened some."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return list(tensors)
    return [x.to(torch.get_autocast_dtype(device)) for x in tensors]


def _without_mask(causal: bool, queries: int, keys: int) -> tuple[Neighbourhood | None, int]:
    """Who may attend where there is no mask, and to how many of the keys: as transformers asks torch's attention.

    Query i attends to the keys 0 … i, however many there are; a single query attends to all.
    """
    if not causal or queries == 1:
        return None, keys
    return (Causal(), queries) if queries <= keys else (Window(keys, queries - keys), keys)
