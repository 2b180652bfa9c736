"""Attention between words, from attention between word pieces."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from polyhead.models import Tokens


def compute_word_attention(
    weights: Float[Tensor, "... queries keys"], rows: Tokens, columns: Tokens | None = None
) -> Float[Tensor, "... words words"]:
    """Attention between words (Clark 2019): the sum over a key's pieces, the mean over a query's; special tokens are left out."""
    to = _word_membership_matrix(rows, weights)
    of = to if columns is None else _word_membership_matrix(columns, weights)
    return (to / to.sum(0).clamp(min=1)).T @ weights @ of


def mask_visible_words(tokens: Tokens, allowed: Bool[Tensor, "tokens tokens"]) -> Bool[Tensor, "words words"]:
    """Which words a word may attend to; words without a token attend to nothing."""
    return compute_word_attention(allowed.float(), tokens) > 0


def _word_membership_matrix(text: Tokens, like: Tensor) -> Float[Tensor, "pieces words"]:
    """1 where a piece is part of a word."""
    member = torch.zeros(len(text.pieces), len(text.words), dtype=like.dtype, device=like.device)
    for piece, word in enumerate(text.word_of):
        if word is not None:
            member[piece, word] = 1
    return member
