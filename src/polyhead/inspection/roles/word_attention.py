"""Words over word pieces: which pieces make a word, and attention between words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor


class Text(NamedTuple):
    """What a model read: its pieces, and the word that each is part of (None: a special token such as [CLS])."""

    pieces: tuple[str, ...]
    word_of: tuple[int | None, ...]
    words: tuple[str, ...]

    @classmethod
    def of_words(cls, words: Sequence[str]) -> Text:
        """A text in which every piece is a word: names of nodes, or tokens that one knows no more about."""
        return cls(tuple(words), tuple(range(len(words))), tuple(words))

    @property
    def special(self) -> tuple[bool, ...]:
        return tuple(word is None for word in self.word_of)


def by_word(
    weights: Float[Tensor, "... queries keys"], rows: Text, columns: Text | None = None
) -> Float[Tensor, "... words words"]:
    """Attention between words (Clark 2019): the sum over a key's pieces, the mean over a query's; special tokens are left out."""
    to = _members(rows, weights)
    of = to if columns is None else _members(columns, weights)
    return (to / to.sum(0).clamp(min=1)).T @ weights @ of


def _members(text: Text, like: Tensor) -> Float[Tensor, "pieces words"]:
    """1 where a piece is part of a word."""
    member = torch.zeros(len(text.pieces), len(text.words), dtype=like.dtype, device=like.device)
    for piece, word in enumerate(text.word_of):
        if word is not None:
            member[piece, word] = 1
    return member
