"""Text as a model reads it: ids, pieces, and the word that each piece is part of."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from polyhead._checks import WrongType, check_integer, check_integers, kind_of
from polyhead.models import checkpoint_files as files
from polyhead.models.tokenizer_file import Encoder

_WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


@dataclass(frozen=True, eq=False)
class Tokens:
    """A text cut into tokens; `len` is their number.

    Attributes:
        ids: their numbers in the vocabulary.
        pieces: their texts in the vocabulary, such as "cat" and "##s", or "Ġcat" and "s".
        word_of: for each token the number of its word; None for a special token such as [CLS], and for blanks.
        words: the text's own words, in its own spelling.
        closing: how many special tokens, such as [SEP], the tokenizer put at the end.
    """

    ids: Int[Tensor, "tokens"]
    pieces: tuple[str, ...]
    word_of: tuple[int | None, ...]
    words: tuple[str, ...]
    closing: int = 0

    def __len__(self) -> int:
        return len(self.pieces)

    def shortened(self, limit: int) -> Tokens:
        """The first tokens, `limit` with the special ones that close the text; itself where it fits.

        Words of which no token is left are left out, so `len` of the two says how many were kept of how many.
        """
        limit = check_integer("limit", limit)
        if len(self) <= limit:
            return self
        if limit <= self.closing:
            raise ValueError(
                f"limit: it is {limit}; it must be more than {self.closing}, the special tokens at the end"
            )
        kept = [*range(limit - self.closing), *range(len(self) - self.closing, len(self))]
        word_of = tuple(self.word_of[i] for i in kept)
        words = self.words[: 1 + max((word for word in word_of if word is not None), default=-1)]
        return replace(
            self, ids=self.ids[kept], pieces=tuple(self.pieces[i] for i in kept), word_of=word_of, words=words
        )


class Tokenizer:
    """Text into tokens, by a tokenizer.json: `tokenizer(text)`, `tokenizer.of_words(words)`; and back, `tokenizer.decode(ids)`.

    Nothing is cut off and nothing padded, whatever the file says about it.
    """

    mask_id: int | None
    """The id that stands for a word to be guessed, such as [MASK]; None where there is none."""

    def __init__(self, path: str | Path) -> None:
        if not isinstance(path, (str, PathLike)):
            raise WrongType(f"path must be a str or a path, got {kind_of(path)}")
        self._encoder = _read(Path(path))
        native = self._encoder.native
        special = {
            token.content: number for number, token in native.get_added_tokens_decoder().items() if token.special
        }
        self.mask_id = next((special[name] for name in ("[MASK]", "<mask>") if name in special), None)
        # The special tokens that are no words even where they are written in the text itself: not those that stand for a word.
        unknown = getattr(native.model, "unk_token", None)
        self._delimiters = set(special.values()) - {self.mask_id, special.get(unknown)}
        # Whether a word's space is part of its pieces (byte-level BPE), and has to be given with a word that comes alone.
        in_text = self._encoder.encode("a b").ids
        alone, spaced = (self._encoder.encode(["a", b]).ids for b in ("b", " b"))
        self._spaced = in_text != alone and in_text == spaced

    @classmethod
    def from_pretrained(cls, path_or_package: str | Path) -> Tokenizer:
        """The tokenizer of a folder with a tokenizer.json, or of an installed package that carries one."""
        return cls(files.folder(path_or_package) / files.TOKENIZER)

    @property
    def vocab(self) -> int:
        """How many ids a model must have an embedding for: one more than the highest."""
        return 1 + max(self._encoder.native.get_vocab().values(), default=-1)

    def __call__(self, text: str) -> Tokens:
        """The tokens of a text, with the special ones that the model expects around it.

        Words are the text's own, with their case and accents; a punctuation mark is a word of its own.
        """
        if not isinstance(text, str):
            raise ValueError(
                f"text: it is {type(text).__name__}; it must be a str (of_words takes a sentence that is split already)"
            )
        _check_unicode("text", text)
        encoding = self._encoder.encode(text)
        spans: dict[int, tuple[int, int]] = {}
        for (start, stop), word in zip(encoding.offsets, self._word_of(encoding), strict=True):
            # blanks between words are tokens of byte-level tokenizers, and no words
            if word is not None and not (start < stop and text[start:stop].isspace() and word not in spans):
                spans[word] = (spans[word][0] if word in spans else start, stop)
        limits = [*(start for start, _ in spans.values()), len(text)][1:]
        words = tuple(_whole(text, *span, limit) for span, limit in zip(spans.values(), limits, strict=True))
        return self._tokens(encoding, {word: number for number, word in enumerate(spans)}, words)

    def of_words(self, words: Sequence[str]) -> Tokens:
        """The tokens of a sentence that is split into words already, as in a treebank: the words are those given.

        A word that the tokenizer reads as nothing, such as an empty one, stays among the words without a token.
        """
        if not isinstance(words, Sequence) or isinstance(words, str) or not all(isinstance(w, str) for w in words):
            raise ValueError(f"words: it is {words!r:.60}; it must be a list of str (call the tokenizer with a text)")
        _check_unicode("words", *words)
        given = [f" {word}" if number and self._spaced else word for number, word in enumerate(words)]
        encoding = self._encoder.encode(given)
        return self._tokens(encoding, {number: number for number in range(len(words))}, tuple(words))

    def decode(self, ids: Int[Tensor, "tokens"] | Sequence[int]) -> str:
        """The text of tokens, such as a model has written, without special tokens."""
        if isinstance(ids, Tensor) and (ids.dim() != 1 or ids.dtype not in _WHOLE):
            raise ValueError(
                f"ids: they are {ids.dtype} of shape {tuple(ids.shape)}; they must be the whole numbers of one text, (tokens,)"
            )
        numbers = check_integers("ids", ids, 0, hint="pass the ids of one text, as a list or a tensor")
        known = lambda number: number < 2**32 and self._encoder.native.id_to_token(number) is not None
        unknown = next((number for number in numbers if not known(number)), None)
        if unknown is not None:
            raise ValueError(f"ids: {unknown} is not in the vocabulary; they must be ids of this tokenizer")
        return self._encoder.decode(numbers)

    def _word_of(self, encoding: Any) -> list[int | None]:
        """The tokenizer's own number of the word of each token; None for special tokens."""
        rows = zip(encoding.ids, encoding.word_ids, encoding.special_tokens_mask, strict=True)
        return [None if special or number in self._delimiters else word for number, word, special in rows]

    def _tokens(self, encoding: Any, numbers: dict[int, int], words: tuple[str, ...]) -> Tokens:
        word_of = tuple(None if word is None else numbers.get(word) for word in self._word_of(encoding))
        added = encoding.special_tokens_mask
        closing = next((n for n, special in enumerate(reversed(added)) if not special), 0)
        return Tokens(torch.tensor(encoding.ids, dtype=torch.long), tuple(encoding.tokens), word_of, words, closing)


def check_length(ids: Tensor, positions: int, first: int = 0) -> None:
    """Raise where ids, of which `first` others were read before, are more than a model has positions for."""
    if ids.dim() < 1 or first + ids.shape[-1] > positions:
        before = f" after the {first} in the caches" if first else ""
        raise ValueError(
            f"ids: their shape is {tuple(ids.shape)}{before}; it must be (..., tokens), with at most {positions - first} tokens, "
            f"for the model has {positions} positions (Tokens.shortened cuts a text)"
        )


def _read(path: Path) -> Encoder:
    files.expect(
        path,
        "transformers' AutoTokenizer.from_pretrained(folder).save_pretrained(folder) writes it from older files; "
        "from_pretrained of Bert, Gpt and Llama reads a model without it",
    )
    return Encoder(path)


def _whole(text: str, start: int, stop: int, limit: int) -> str:
    """A word with the accents that the tokenizer dropped after its last letter, without the spaces it took in."""
    while stop < limit and unicodedata.category(text[stop]) == "Mn":
        stop += 1
    return text[start:stop].strip()


def _check_unicode(name: str, *texts: str) -> None:
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"{name}: the character at {error.start} is half of one, {text[error.start]!r}; it must be text that was decoded whole"
            ) from None
