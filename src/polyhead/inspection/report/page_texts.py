"""The texts of a page as users pass them: by layer, as a tokenizer returns them, and for encoder-decoders."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from polyhead.heads import Heads
from polyhead.models import Tokens

# `Tokens`, a list of words, or what a fast tokenizer of transformers returns
Text = Any
Texts = Text | tuple[Text, Text]

_SINGULAR = {"queries": "query", "keys": "key"}
# At the start of a piece: it begins a word (byte-level BPE, SentencePiece), or continues one (WordPiece).
_WORD_STARTS, _CONTINUATION = ("Ġ", "▁"), "##"


class PageTexts:
    """The argument `texts` of a report: which tokens it gives to each layer."""

    def __init__(self, texts: Texts | Mapping[str, Texts] | None, layers: Mapping[str, Heads], batch: int) -> None:
        self._batch = batch
        # a BatchEncoding is a mapping too
        by_layer = isinstance(texts, Mapping) and not _is_encoding(texts)
        self._by_layer: dict[str, Texts] | None = dict(texts) if by_layer and isinstance(texts, Mapping) else None
        self._shared = None if by_layer else texts
        for name in self._by_layer or ():
            if name not in layers:
                raise ValueError(_describe_unknown_layer(name, list(layers)))

    def is_named(self, name: str) -> bool:
        """Whether the texts are a mapping that names a layer."""
        return self._by_layer is not None and self._by_layer.get(name) is not None

    def has_text(self, name: str) -> bool:
        """Whether there is a text for a layer."""
        return self._text_of(name) is not None

    def _text_of(self, name: str) -> Texts | None:
        return self._shared if self._by_layer is None else self._by_layer.get(name)

    def tokens(self, name: str, view: Heads) -> tuple[Tokens | None, Tokens | None]:
        """The tokens of a layer's queries and keys; (None, None) if rows and columns share one unnamed text."""
        text = self._text_of(name)
        if text is None:
            return None, None
        queries, keys = _count_queries_and_keys(view)
        if _is_pair(text):
            first, second = (as_tokens(each, self._batch) for each in text)
            rows, columns = (first, second) if self.is_named(name) else _choose_of_pair(name, view, first, second)
        else:
            rows = columns = as_tokens(text, self._batch)
        if rows is columns and len(columns) == keys > queries:
            # with a cache, the queries are the last keys
            begin = keys - queries
            rows = Tokens.from_pieces(rows.pieces[begin:], rows.word_of[begin:], rows.words)
        for tokens, number, axis in ((rows, queries, "queries"), (columns, keys, "keys")):
            if len(tokens) != number:
                raise ValueError(
                    f"texts of {name!r} must have {number} pieces, one per {_SINGULAR[axis]}, got {len(tokens)}"
                )
            if len(tokens.word_of) != number:
                raise ValueError(
                    f"texts must have a word_of of {number} entries, one per piece, got {len(tokens.word_of)}"
                )
        return rows, columns

    def fits_both_axes(self, name: str, view: Heads) -> bool:
        """Whether a single text has as many pieces as a layer has queries and keys."""
        text = self._text_of(name)
        if text is None or _is_pair(text):
            return False
        return _count_queries_and_keys(view) == (len(as_tokens(text, self._batch)),) * 2

    def words_of_queries(self, name: str, view: Heads) -> Tokens | None:
        """The text of the queries of a layer whose keys are patches: None if the layer is self-attention, or the text does not fit."""
        text = self._text_of(name)
        queries, keys = _count_queries_and_keys(view)
        is_cross = view.is_self_attention is False or (view.is_self_attention is None and queries != keys)
        if text is None or not is_cross or (_is_pair(text) and self.is_named(name)):
            return None
        words = as_tokens(text[0] if _is_pair(text) else text, self._batch)
        return words if len(words) == queries == len(words.word_of) else None


def _count_queries_and_keys(view: Heads) -> tuple[int, int]:
    return len(view.part.indices("queries")), len(view.part.indices("keys"))


def _is_pair(texts: Texts) -> bool:
    return isinstance(texts, tuple) and len(texts) == 2 and not isinstance(texts[0], str)


def _choose_of_pair(name: str, view: Heads, target: Tokens, source: Tokens) -> tuple[Tokens, Tokens]:
    """The tokens of a layer, where (target, source) are the texts of an encoder-decoder: self-attention has one of them."""
    queries, keys = _count_queries_and_keys(view)
    unknown_but_other = (
        view.is_self_attention is None and queries == keys and (len(target), len(source)) != (keys, keys)
    )
    if not (view.is_self_attention is True or unknown_but_other):
        return target, source
    fitting = [text for text in (target, source) if len(text) == keys]
    if not fitting:
        raise ValueError(
            f"texts of {name!r}, a self-attention, must have {keys} pieces, one per key, got {len(target)} and {len(source)}"
        )
    if len(fitting) == 2 and target.pieces != source.pieces:
        side = _side_of_encoder_decoder(name)
        if side is None:
            raise ValueError(
                f"texts must be a mapping by layer: {name!r} is a self-attention, and both texts have {keys} pieces, got a pair; pass "
                f"texts={{{name!r}: …}} with one of them"
            )
        return (target, target) if side == "decoder" else (source, source)
    return fitting[0], fitting[0]


def _side_of_encoder_decoder(name: str) -> str | None:
    """ "encoder" or "decoder", by the first part of a module's name that says so: decoder.bert.encoder.layer.0 is a decoder's."""
    for part in name.lower().split("."):
        sides = [side for side in ("encoder", "decoder") if side in part]
        if len(sides) == 1:
            return sides[0]
    return None


def _describe_unknown_layer(name: object, layers: Sequence[str]) -> str:
    near = difflib.get_close_matches(str(name), layers, 3, 0.5) or layers[:3]
    return (
        f"texts must be a text or a mapping from layers to texts, got {str(name)!r:.60}, which is not a layer; the layers are "
        f"{', '.join(map(repr, near))}{', …' if len(near) < len(layers) else ''}"
    )


def as_tokens(text: Any, batch: int) -> Tokens:
    """One text as tokens; of a batch that a tokenizer returned, one row."""
    if isinstance(text, Tokens):
        return text
    if isinstance(text, (list, tuple)) and all(isinstance(word, str) for word in text):
        return Tokens.from_pieces(text)
    if _is_encoding(text):
        return _read_encoding(text, batch)
    raise ValueError(
        "texts must be Tokens, as a tokenizer returns them, a list of words, a pair of these for cross-attention, or a mapping from "
        f"layers to them, got {type(text).__name__}"
    )


def _is_encoding(text: object) -> bool:
    """Whether a text is a BatchEncoding of transformers or an Encoding of tokenizers, neither of which is imported."""
    return not isinstance(text, Tokens) and hasattr(text, "tokens") and hasattr(text, "word_ids")


def _read_encoding(text: Any, batch: int) -> Tokens:
    """The pieces of an encoding, and the words that they belong to."""
    pieces, word_ids, sequences = text.tokens, text.word_ids, text.sequence_ids
    if callable(pieces):
        # one text was tokenized without a batch axis, or with one
        rows = len(getattr(text, "encodings", None) or ())
        if not rows:
            raise ValueError(
                f"texts must come from a fast tokenizer, which knows words, got a {type(text).__name__} of a slow one; pass "
                "tokenizer.convert_ids_to_tokens(ids)"
            )
        if batch >= rows:
            raise ValueError(f"texts must have row {batch} of the batch, got {rows} texts; pass all texts of the batch")
        pieces, word_ids, sequences = pieces(batch), word_ids(batch), sequences(batch)
    word_of: list[int | None] = []
    spelling: list[str] = []
    previous: tuple[Any, Any] | None = None
    for piece, word, sequence in zip(pieces, word_ids, sequences, strict=True):
        if word is None:
            word_of.append(None)
            previous = None
            continue
        # tokenizers without a word splitter call a whole text one word
        if previous != (sequence, word) or piece.startswith(_WORD_STARTS):
            spelling.append("")
        spelling[-1] += piece.lstrip("".join(_WORD_STARTS)).removeprefix(_CONTINUATION)
        word_of.append(len(spelling) - 1)
        previous = (sequence, word)
    return Tokens.from_pieces(tuple(pieces), word_of, tuple(spelling))
