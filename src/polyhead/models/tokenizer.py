"""Text as token ids, pieces, and the word that each piece belongs to."""

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

from polyhead._checks import WrongType, check_integer, check_integers, describe_type
from polyhead.models import checkpoint_files
from polyhead.models.tokenizer_file import BoundedTokenizer
from polyhead.neighbourhood import Neighbourhood

# byte-level BPE: printable bytes are the characters of Latin-1, the others those from U+0100
_PRINTABLE_BYTES = (*range(33, 127), *range(161, 173), *range(174, 256))
_BYTE_OF_CHARACTER = {chr(byte): byte for byte in _PRINTABLE_BYTES} | {
    chr(256 + number): byte for number, byte in enumerate(sorted(set(range(256)) - set(_PRINTABLE_BYTES)))
}
_INTEGER_DTYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


@dataclass(frozen=True, eq=False)
class Tokens:
    """The tokens of a text; `len` is their number.

    Attributes:
        ids: their ids in the vocabulary; empty for tokens that no tokenizer made (`from_pieces`).
        pieces: their text in the vocabulary, such as "cat" and "##s", or "Ġcat" and "s"; `labels` has it as plain text.
        word_of: the index of the word of each token; None for special tokens such as [CLS], and for blanks.
        words: the words of the text, in its spelling.
        closing: the number of special tokens, such as [SEP], that the tokenizer appended.
        unknown_id: the id that replaces a piece that is not in the vocabulary, such as that of [UNK]; None if there is none.
    """

    ids: Int[Tensor, "tokens"]
    pieces: tuple[str, ...]
    word_of: tuple[int | None, ...]
    words: tuple[str, ...]
    closing: int = 0
    unknown_id: int | None = None

    @classmethod
    def from_pieces(
        cls,
        pieces: Sequence[str],
        word_of: Sequence[int | None] | None = None,
        words: Sequence[str] | None = None,
    ) -> Tokens:
        """Tokens without ids, such as the names of a graph's nodes; each piece is a word unless `word_of` and `words` are given."""
        word_of = range(len(pieces)) if word_of is None else word_of
        words = pieces if words is None else words
        return cls(torch.empty(0, dtype=torch.long), tuple(pieces), tuple(word_of), tuple(words))

    def __len__(self) -> int:
        return len(self.pieces)

    @property
    def labels(self) -> tuple[str, ...]:
        """The pieces as plain text, for display."""
        return tuple(map(display_piece, self.pieces))

    @property
    def special(self) -> tuple[bool, ...]:
        """Whether each token is part of no word, such as [CLS]."""
        return tuple(word is None for word in self.word_of)

    @property
    def unknown_share(self) -> float:
        """The share of the words of which a piece is not in the vocabulary, or that have no piece at all.

        Words are counted, not pieces: a small vocabulary spells the others in letters, which would hide the unknown ones.
        """
        known = set(self.word_of)
        if self.unknown_id is not None and len(self.ids):
            known -= {word for word, id in zip(self.word_of, self.ids.tolist(), strict=True) if id == self.unknown_id}
        return sum(word not in known for word in range(len(self.words))) / max(1, len(self.words))

    def truncate(self, limit: int) -> Tokens:
        """The text truncated to `limit` tokens, including the special tokens at its end; itself if it fits.

        Words without remaining tokens are dropped.
        """
        limit = check_integer("limit", limit)
        if len(self) <= limit:
            return self
        if limit <= self.closing:
            raise ValueError(
                f"limit must be more than {self.closing}, the number of special tokens at the end, got {limit}"
            )
        indices = [*range(limit - self.closing), *range(len(self) - self.closing, len(self))]
        word_of = tuple(self.word_of[i] for i in indices)
        words = self.words[: 1 + max((word for word in word_of if word is not None), default=-1)]
        ids = self.ids[indices] if len(self.ids) else self.ids
        return replace(self, ids=ids, pieces=tuple(self.pieces[i] for i in indices), word_of=word_of, words=words)


def display_piece(piece: str) -> str:
    """A piece as plain text: "cat" for "Ġcat", "▁cat" and "cat</w>", "s" for "##s", "é" for "Ã©"; blanks as "␣" and "↵"."""
    text = _decode_byte_characters(piece).replace("▁", " ")
    text = text.removesuffix("</w>") or text
    text = text.removeprefix("##") or text
    return text.strip() or text.replace(" ", "␣").replace("\n", "↵").replace("\t", "⇥")


def _decode_byte_characters(piece: str) -> str:
    """The text of a piece of byte-level BPE, in which a character is a byte; other pieces as they are."""
    if piece.isascii() or not all(character in _BYTE_OF_CHARACTER for character in piece):
        return piece
    content = bytes(_BYTE_OF_CHARACTER[character] for character in piece)
    starts_with_blank = piece.startswith(("Ġ", "Ċ"))
    try:
        text = content.decode()
    except UnicodeDecodeError:
        # a part of a character; without the mark of byte-level BPE it is a letter such as ł
        return content.decode(errors="backslashreplace") if starts_with_blank else piece
    if any(unicodedata.category(character) == "Cc" for character in text.strip()):
        return piece
    return text if starts_with_blank or len(content) > len(text) else piece


class Tokenizer:
    """The tokenizer of a tokenizer.json: `tokenizer(text)`, `tokenizer.encode_words(words)`, and `tokenizer.decode(ids)`.

    It never truncates or pads: such settings in the file are ignored.
    """

    mask_id: int | None
    """The id of the mask token, such as [MASK]; None if the vocabulary has none."""
    unknown_id: int | None
    """The id that replaces a piece that is not in the vocabulary, such as that of [UNK]; None if there is none."""

    def __init__(self, path: str | Path) -> None:
        if not isinstance(path, (str, PathLike)):
            raise WrongType(f"path must be a str or a path, got {describe_type(path)}")
        self._tokenizer = _load_tokenizer_file(Path(path))
        native = self._tokenizer.native
        special = {
            token.content: number for number, token in native.get_added_tokens_decoder().items() if token.special
        }
        self.mask_id = next((special[name] for name in ("[MASK]", "<mask>") if name in special), None)
        # special tokens that are not words even if they occur in the text; the mask and the unknown token represent words
        self.unknown_id = self._tokenizer.unknown_id
        self._delimiters = set(special.values()) - {self.mask_id, self.unknown_id}
        # whether pieces include the space before a word (byte-level BPE), which must then be added to pre-split words
        in_text = self._tokenizer.encode("a b").ids
        alone, spaced = (self._tokenizer.encode(["a", b]).ids for b in ("b", " b"))
        self._needs_spaces = in_text != alone and in_text == spaced

    @classmethod
    def from_pretrained(cls, path_or_package: str | Path) -> Tokenizer:
        """The tokenizer of a folder with a tokenizer.json, or of an installed package that contains one."""
        return cls(checkpoint_files.find_checkpoint_folder(path_or_package) / checkpoint_files.TOKENIZER_FILE)

    @property
    def vocab(self) -> int:
        """The size of the embedding that a model needs: one more than the highest id."""
        return 1 + max(self._tokenizer.native.get_vocab().values(), default=-1)

    def __call__(self, text: str) -> Tokens:
        """The tokens of a text, with the special tokens that the model expects around it.

        Words keep the case and the accents of the text; a punctuation mark is a separate word.
        """
        if not isinstance(text, str):
            raise ValueError(
                f"text must be a str, got {type(text).__name__}; pass a sentence that is already split to encode_words"
            )
        _check_unicode("text", text)
        encoding = self._tokenizer.encode(text)
        spans: dict[int, tuple[int, int]] = {}
        for (start, stop), word in zip(encoding.offsets, self._word_indices(encoding), strict=True):
            # blanks between words are tokens of byte-level tokenizers, but not words
            if word is not None and not (start < stop and text[start:stop].isspace() and word not in spans):
                spans[word] = (spans[word][0] if word in spans else start, stop)
        limits = [*(start for start, _ in spans.values()), len(text)][1:]
        words = tuple(_extract_word(text, *span, limit) for span, limit in zip(spans.values(), limits, strict=True))
        return self._to_tokens(encoding, {word: index for index, word in enumerate(spans)}, words)

    def encode_words(self, words: Sequence[str]) -> Tokens:
        """The tokens of a sentence that is already split into words, as in a treebank.

        Words for which the tokenizer has no token, such as empty ones, are kept in `words`.
        """
        if not isinstance(words, Sequence) or isinstance(words, str) or not all(isinstance(w, str) for w in words):
            raise ValueError(f"words must be a list of str, got {words!r:.60}; pass a text to the tokenizer itself")
        _check_unicode("words", *words)
        spaced = [f" {word}" if index and self._needs_spaces else word for index, word in enumerate(words)]
        encoding = self._tokenizer.encode(spaced)
        return self._to_tokens(encoding, {index: index for index in range(len(words))}, tuple(words))

    def decode(self, ids: Int[Tensor, "tokens"] | Sequence[int]) -> str:
        """The text of tokens, for example those that a model generated, without special tokens."""
        if isinstance(ids, Tensor) and (ids.dim() != 1 or ids.dtype not in _INTEGER_DTYPES):
            raise ValueError(
                f"ids must be integers of shape (tokens,), got {ids.dtype} of shape {tuple(ids.shape)}; decode one text at a time"
            )
        numbers = check_integers("ids", ids, 0, hint="pass the ids of one text, as a list or a tensor")
        known = lambda number: number < 2**32 and self._tokenizer.native.id_to_token(number) is not None
        unknown = next((number for number in numbers if not known(number)), None)
        if unknown is not None:
            raise ValueError(f"ids must be in the vocabulary of this tokenizer, got {unknown}")
        return self._tokenizer.decode(numbers)

    def _word_indices(self, encoding: Any) -> list[int | None]:
        """The index that the tokenizer gives to the word of each token; None for special tokens."""
        rows = zip(encoding.ids, encoding.word_ids, encoding.special_tokens_mask, strict=True)
        return [None if special or number in self._delimiters else word for number, word, special in rows]

    def _to_tokens(self, encoding: Any, indices: dict[int, int], words: tuple[str, ...]) -> Tokens:
        word_of = tuple(None if word is None else indices.get(word) for word in self._word_indices(encoding))
        special_tokens = encoding.special_tokens_mask
        closing = next((n for n, special in enumerate(reversed(special_tokens)) if not special), 0)
        ids = torch.tensor(encoding.ids, dtype=torch.long)
        return Tokens(ids, tuple(encoding.tokens), word_of, words, closing, self.unknown_id)


def check_sequence_length(
    ids: Tensor, positions: int, first: int = 0, over: Neighbourhood | Tensor | None = None
) -> None:
    """Raise if ids, after `first` cached ones, exceed the positions of a model; `over` knows the ids on other ranks."""
    if isinstance(over, Neighbourhood) and ids.dim() > 0 and over.item_indices is not None:
        length = over.whole_sizes(ids.shape[-1], ids.shape[-1])[0]
        if length > positions:
            raise ValueError(f"over must have at most the {positions} positions of the model, got {over!r}")
        return
    if ids.dim() < 1 or first + ids.shape[-1] > positions:
        before = f" after the {first} in the caches" if first else ""
        raise ValueError(
            f"ids must have shape (..., tokens) with at most {positions - first} tokens{before}, since the model has {positions} "
            f"positions, got {tuple(ids.shape)}; Tokens.truncate truncates a text"
        )


def _load_tokenizer_file(path: Path) -> BoundedTokenizer:
    checkpoint_files.check_regular_file(
        path,
        "transformers' AutoTokenizer.from_pretrained(folder).save_pretrained(folder) writes it from older files; "
        "from_pretrained of Bert, Gpt and Llama loads a model without it",
    )
    return BoundedTokenizer(path)


def _extract_word(text: str, start: int, stop: int, limit: int) -> str:
    """A word of the text with the accents that the tokenizer dropped after its last letter, without surrounding spaces."""
    while stop < limit and unicodedata.category(text[stop]) == "Mn":
        stop += 1
    return text[start:stop].strip()


def _check_unicode(name: str, *texts: str) -> None:
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"{name} must be valid Unicode, got the surrogate {text[error.start]!r} at index {error.start}; decode the bytes as a whole"
            ) from None
