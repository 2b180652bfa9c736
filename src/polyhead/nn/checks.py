"""What layers say of arguments that are not theirs: sizes, shares, and the words of other libraries."""

from __future__ import annotations

import operator
from typing import Any

CONSTRUCTOR_WORDS = {
    "embed_dim": "d_model",
    "batch_first": "nothing: tensors are (..., items, features), the batch first",
    "kdim": "d_key",
    "vdim": "d_value",
    "add_zero_attn": "sink=0.0",
    "add_bias_kv": "nothing here: only the drop-in appends a learned key and value",
    "device": "with torch.device(device): around the constructor, or .to(device)",
    "dtype": ".to(dtype)",
}
CALL_WORDS = {
    "key_padding_mask": "over=Padding(~key_padding_mask), True = a real key (padded queries get zero; queries=False lets them attend)",
    "attn_mask": "over=~attn_mask for a bool mask (here True = may attend), bias=attn_mask for numbers to add",
    "is_causal": "over=Causal()",
    "need_weights": "nothing: heads is always handed back, and costs nothing until heads.weights is asked for",
    "average_attn_weights": "heads.weights.mean(-3)",
    "attention_mask": "over=Padding(attention_mask.bool()), for one of (batch, keys)",
}


def check_sizes(**sizes: object) -> None:
    """Raise where one is given and is not a whole number, 1 or more."""
    for name, size in sizes.items():
        if size is not None and (not hasattr(size, "__index__") or isinstance(size, bool) or operator.index(size) < 1):
            raise ValueError(f"{name}: it is {size!r}; it must be a whole number, 1 or more")


def check_shares(**shares: object) -> None:
    """Raise where one is not a share that dropout may have."""
    for name, share in shares.items():
        if not isinstance(share, (int, float)) or not 0 <= share < 1:
            raise ValueError(f"{name}: it is {share!r}; it must be at least 0 and less than 1")


def untranslated(words: dict[str, Any], known: dict[str, str]) -> Exception:
    """The error for words of other layers, with what each becomes here."""
    unknown = [word for word in words if word not in known]
    if unknown:
        return TypeError(f"MultiHeadAttention takes no argument {unknown[0]!r}; see help(MultiHeadAttention)")
    lines = [f"  {word}= becomes {known[word]}" for word in words]
    if sum("over=" in known[word] for word in words) > 1:
        lines.append("  several neighbourhoods are joined with &: over=Causal() & Padding(lengths)")
    return ValueError(
        "these are words of other layers:\n"
        + "\n".join(lines)
        + "\nFor a drop-in that takes torch's words, use polyhead.interop.torch.MultiheadAttention"
    )
